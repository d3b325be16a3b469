"""A module of any type with K - 1 further members of itself: the layer behind `Ensemble`.

The class of the module is swapped for one made on the spot, whose `plain` is what it was. Each member runs on the rows that belong to
it, once per call. Sizes: K members, n blocks of rows in a pass, R rows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from slimbayes import passes
from slimbayes.layers.base import BayesLayer
from slimbayes.posteriors.base import Site

_CLASSES: dict[type[nn.Module], type[BayesLayer]] = {}


class Copied(BayesLayer):
    """Mixin of modules that were copied as a whole; `posterior["members"]` holds the copies."""

    def sites(self) -> list[Site]:
        return []

    def _members(self) -> Any:
        return self.posterior["members"]

    def member(self, index: int) -> Any:
        """A callable that runs one member."""
        if index == 0:
            return lambda *args, **kwargs: self.plain.forward(self, *args, **kwargs)
        return self._members().others[index - 1]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        posterior = self._members()
        current = posterior.current
        if any(isinstance(arg, PackedSequence) for arg in (*args, *kwargs.values())):
            raise ValueError(f"{posterior.name or 'the model'}: members cannot share out a packed sequence; copy the module that packs it.")
        rows = passes.infer_rows((args, kwargs), self.batch_dim) or 1
        blocks = current.blocks(posterior)
        if posterior.members == 1:
            return self.member(0)(*args, **kwargs)
        if blocks == 1:
            return self.member(int(current.first) % posterior.members)(*args, **kwargs)
        index, back = _deal(rows, blocks, current.first, posterior.members, posterior.device)
        states = isinstance(self, nn.RNNBase)
        inputs = [_take((args, kwargs), line, rows, self.batch_dim, states) for line in index]
        together = posterior.batched and not self._needs_loop(posterior.device)
        outputs = self._batched(inputs) if together else self._loop(inputs)
        return _join(outputs, back, index.shape[1], self.batch_dim)

    def _needs_loop(self, device: torch.device) -> bool:
        """Batch norm updates its statistics in place while it trains, which vmap cannot follow; and it runs past autocast."""
        return torch.is_autocast_enabled(device.type) or any(isinstance(m, nn.modules.batchnorm._NormBase) and m.training for m in self.modules())

    def _loop(self, inputs: list[Any]) -> list[Any]:
        return [self.member(k)(*args, **kwargs) for k, (args, kwargs) in enumerate(inputs)]

    def _batched(self, inputs: list[Any]) -> list[Any]:
        others = self._members().others
        own = {n: t for n, t in (*self.named_parameters(), *self.named_buffers()) if not n.startswith("posterior.")}
        states = [own, *({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in others)]
        stacked = {name: torch.stack([state[name] for state in states]) for name in own}
        leaves = [pytree.tree_flatten(one) for one in inputs]
        tensors = [i for i, leaf in enumerate(leaves[0][0]) if isinstance(leaf, Tensor)]
        together = [torch.stack([flat[i] for flat, _ in leaves]) for i in tensors]

        def run(state: Any, *parts: Tensor) -> Any:
            flat = list(leaves[0][0])
            for i, part in zip(tensors, parts, strict=True):
                flat[i] = part
            args, kwargs = pytree.tree_unflatten(flat, leaves[0][1])
            return functional_call(others[0], state, args, kwargs)

        outputs = torch.vmap(run, randomness="different")(stacked, *together)
        return [pytree.tree_map(lambda leaf, k=k: leaf[k], outputs) for k in range(len(states))]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists only here: it is made again from the plain one.
        return _empty, (self.plain,), self.__getstate__()


class _Hidden:
    """Keeps the posterior out of a Sequential's own list of steps; it is the last child."""

    _modules: dict[str, Any]

    def __iter__(self) -> Any:
        return iter([module for name, module in self._modules.items() if name != "posterior"])

    def __len__(self) -> int:
        return len(self._modules) - ("posterior" in self._modules)


def copied_class(plain: type[nn.Module]) -> type[BayesLayer]:
    """The class of copied modules of one type."""
    if plain not in _CLASSES:
        bases = (Copied, _Hidden, plain) if issubclass(plain, nn.Sequential) else (Copied, plain)
        _CLASSES[plain] = type(f"Copied{plain.__name__}", bases, {"plain": plain, "__module__": __name__})
    return _CLASSES[plain]


def _empty(plain: type[nn.Module]) -> nn.Module:
    cls = copied_class(plain)
    return cls.__new__(cls)


class NotJoined:
    """Stands for what members return one by one and nobody can join, such as transformers' caches."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"{len(self.parts)} separate {type(self.parts[0]).__name__}s"


def _deal(rows: int, blocks: int, first: int | Tensor, members: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of each member, (K, most), and where in all of them each row's output lies, (R,).

    Blocks of a bare call may differ by one row; the shorter ones are filled up with a row of their neighbour, whose output is not used.
    """
    block = passes.block_of_row(rows, blocks, device)
    member = (block + first) % members
    order = torch.argsort(member, stable=True)
    most = -(-rows // blocks) * (blocks // members)
    count = torch.zeros(members, dtype=torch.long, device=device).index_add(0, member, torch.ones_like(member))
    start = count.cumsum(0) - count
    place = torch.arange(most, device=device)
    index = order[(start.unsqueeze(1) + place).clamp_max(rows - 1)]
    back = torch.empty_like(order).scatter(0, order, torch.arange(rows, device=device))
    return index, member * most + (back - start[member])


def _take(inputs: Any, line: Tensor, rows: int, batch_dim: int, states: bool) -> Any:
    """The rows of one member, out of every tensor that has as many rows as the batch; recurrent states hold theirs along dimension 1."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, NotJoined) or hasattr(leaf, "get_seq_length"):
            raise ValueError(f"A cache of keys and values ({leaf!r}) cannot be shared out among members: call the model with use_cache=False.")
        for dim in (batch_dim, 1) if states else (batch_dim,):
            if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == rows:
                return leaf.index_select(dim, line)
        return leaf

    return pytree.tree_map(take, inputs)


def _join(outputs: list[Any], back: Tensor, most: int, batch_dim: int) -> Any:
    """Outputs of all members, row by row; what has no rows is averaged if it is a number (a loss), else taken from member 0."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return NotJoined(leaves) if hasattr(leaves[0], "get_seq_length") else leaves[0]
        fits = [d for d in range(leaves[0].dim()) if leaves[0].shape[d] == most]
        if not fits:
            return torch.stack(leaves).mean(0) if leaves[0].is_floating_point() else leaves[0]
        dim = batch_dim if batch_dim in fits else fits[0]
        return torch.cat(leaves, dim).index_select(dim, back)

    return pytree.tree_map(join, *outputs)
