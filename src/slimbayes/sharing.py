"""Work that draws share at prediction, where they agree on everything a layer's output depends on so far.

A folded pass repeats the batch for each of S draws. Until the first layer that draws anything the repetitions are equal, so modules before
it need to see one of them; after a layer that picks one of K components there are at most K different ones, then K^2, and so on. While
this context is open every module without posteriors runs on one representative of each group of equal repetitions, and its
output is dealt out again. Layers that draw real numbers end it: from then on all draws differ.

Sizes: S draws, B rows of each, G groups of draws that agree.
"""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.layers.base import Converted, posteriors_at
from slimbayes.passes import Pass, posteriors_of


class shared:
    """Context in which forward passes of a model in eval mode share what their draws have in common."""

    def __init__(self, model: nn.Module, batch_dim: int) -> None:
        self.model, self.batch_dim = model, batch_dim
        self.posteriors = posteriors_of(model)
        self.handles: list[Any] = []
        self.current: Pass | None = None
        self.group: Tensor | None = None  # (S,) group of each draw; None when no two draws agree any more
        self.first: Tensor | None = None  # (G,) one draw of each group
        self.waiting: list[nn.Module] = []  # the module whose output is to be dealt out
        self.saved = False  # whether any module of the first pass had something to share

    def __enter__(self) -> "shared":
        for layer in self.model.modules():
            if isinstance(layer, Converted):
                self.handles.append(layer.register_forward_hook(self._split))
        for module in _plain_modules(self.model):
            self.handles.append(module.register_forward_pre_hook(self._narrow, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._deal))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.group = self.first = None

    def _begin(self) -> bool:
        """Whether there is anything to share in the pass under way."""
        current = self.posteriors[0].current
        assert current is not None
        if self.current is not current:  # a new pass: all its draws agree
            if self.current is not None and not self.saved:  # where the first pass shared nothing the others will not either
                self._remove()
                return False
            self.current, self.waiting = current, []
            self.group = self.first = None
            if (current.draws or 1) > 1:
                self.group = torch.zeros(current.draws or 1, dtype=torch.long, device=self.posteriors[0].device)
                self.first = self.group[:1]
        return self.group is not None

    def _split(self, layer: Any, args: Any, output: Any) -> None:
        """After a layer that draws: groups whose draws differ there come apart."""
        if not self._begin():
            return
        assert self.group is not None
        for posterior in posteriors_at(layer):
            choices = posterior.choices()
            if choices is None or len(choices) != len(self.group):
                self.group = self.first = None
                return
            _, group = torch.unique(torch.stack([self.group, choices]), dim=1, return_inverse=True)
            count = int(group.max()) + 1
            if 2 * count > len(group):  # dealing out would cost more than it saves
                self.group = self.first = None
                return
            self.group = group
            order = torch.arange(len(group) - 1, -1, -1, device=group.device)
            self.first = torch.empty(count, dtype=torch.long, device=group.device).scatter_(0, group[order], order)

    def _narrow(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._begin():
            return None
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > self.batch_dim]
        if not leaves or not all(self._alike(leaf) for leaf in leaves):
            return None
        self.waiting.append(module)
        self.saved = True
        return pytree.tree_map(self._representatives, (args, kwargs))

    def _alike(self, x: Tensor) -> bool:
        """Whether x holds the rows of all draws, equal within groups: a dimension of the same size might mean something else."""
        assert self.current is not None and self.group is not None and self.first is not None
        if x.shape[self.batch_dim] != self.current.rows:
            return False
        blocks = x.unflatten(self.batch_dim, (len(self.group), -1)).movedim(self.batch_dim, 0).flatten(1)
        some = blocks[:, :: max(1, blocks.shape[1] // 64)]
        return torch.equal(some, some[self.first[self.group]])

    def _representatives(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= self.batch_dim:
            return leaf
        assert self.group is not None and self.first is not None
        blocks = leaf.unflatten(self.batch_dim, (len(self.group), -1))
        return blocks.index_select(self.batch_dim, self.first).flatten(self.batch_dim, self.batch_dim + 1)

    def _deal(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.waiting or self.waiting[-1] is not module:
            return None
        self.waiting.pop()
        assert self.current is not None and self.group is not None and self.first is not None
        group, count = self.group, len(self.first)
        rows = (self.current.rows or 0) // len(group) * count

        def deal(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= self.batch_dim or leaf.shape[self.batch_dim] != rows:
                return leaf
            blocks = leaf.unflatten(self.batch_dim, (count, -1))
            return blocks.index_select(self.batch_dim, group).flatten(self.batch_dim, self.batch_dim + 1)

        return pytree.tree_map(deal, output)


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    """The largest modules without posteriors in them that have a weight matrix: the work worth sharing."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, Converted):
            return
        heavy = any(p.dim() > 1 for p in module.parameters())
        if heavy and not posteriors_of(module) and type(module).forward is not nn.Module.forward:
            found.append(module)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return found
