"""Deep ensembles (Lakshminarayanan et al. 2017): K whole networks behind one model.

    Table 2 of Chang et al. 2019:   one pick for the whole model; every component is a network of its own

The same distribution as `Mixture(assignment="model")`, but by copying modules: that holds for any module, buffers
included, so members keep batch-norm statistics of their own. Member 0 is the model itself; the posterior holds the
others.
"""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine.passes import Noise
from slimbayes.engine.state import copy_modules
from slimbayes.layers import kind_of
from slimbayes.layers.copied import OF_MEMBER_0, parts_of
from slimbayes.posteriors.base import Posterior, Role
from slimbayes.posteriors.configs.whole_modules import Ensemble
from slimbayes.posteriors.picks import resets


def copies(config: Ensemble, module: nn.Module) -> EnsemblePosterior:
    """The posterior of one module: its K - 1 further members."""
    guessed: list[str] = []
    if config.factory is None:
        others = [copy_modules(module) for _ in range(config.members - 1)]
        for other in others:
            guessed = _start(other, config)
    else:
        others = [_built(module, config.factory) for _ in range(config.members - 1)]
    posterior = EnsemblePosterior(module, others)
    own = {
        name: t
        for name, t in module.state_dict().items()
        if isinstance(t, Tensor) and not t.is_meta
    }
    fresh = others if config.factory is None and config.init == "fresh" else []
    states = [other.state_dict() for other in fresh]
    posterior.alike = bool(states) and all(
        torch.equal(t, state[name]) for state in states for name, t in own.items()
    )
    if guessed:
        names = ", ".join([*guessed[:3], "..."] if guessed[3:] else guessed)
        why = "do not start as torch starts them, and how is not known: other members start with their spread"
        posterior.note = f"{len(guessed)} parameters ({names}) {why}"
    return posterior


def _built(module: nn.Module, factory: Callable[[], nn.Module]) -> nn.Module:
    """A member from the factory, on the module's device and in its type."""
    new, first = factory(), next(module.parameters(), torch.empty(0))
    shapes, wanted = shapes_of(new), shapes_of(module)
    differ = sorted(
        n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n)
    )
    if differ:
        names = ", ".join(differ[:5])
        raise ValueError(
            f"Ensemble: factory builds another network than the one converted: they differ in {names}."
        )
    return new.to(device=first.device, dtype=first.dtype).train(module.training)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a module's state, by name; it may also keep what is none (`get_extra_state`)."""
    return {
        name: tuple(t.shape)
        for name, t in module.state_dict().items()
        if isinstance(t, Tensor)
    }


@torch.no_grad()
def _start(member: nn.Module, config: Ensemble) -> list[str]:
    """Start a copy as the config says; returns names of parameters whose own start had to be guessed."""
    if config.init == "fresh":
        return _reset(member)
    tables: Any = [
        m
        for m in member.modules()
        if kind_of(m) == "table" and getattr(m, "padding_idx", None) is not None
    ]
    paddings = [(m, m.get_parameter("weight")[m.padding_idx].clone()) for m in tables]
    for parameter in member.parameters():
        parameter.add_(
            config.jitter
            * parameter.square().mean().sqrt()
            * torch.randn_like(parameter)
        )
    for table, row in paddings:
        table.get_parameter("weight")[table.padding_idx] = row  # no parameter: it stays
    return []


def _reset(member: Any) -> list[str]:
    """Start a network anew as it would itself; returns names of parameters of which that is a guess."""
    if any(cls.__name__ == "PreTrainedModel" for cls in type(member).__mro__):
        for (
            module
        ) in member.modules():  # transformers' know how to start each of their modules
            member._init_weights(module)
        return []
    free = {
        n: p for n, p in member.named_parameters() if p.requires_grad and not p.is_meta
    }
    before = {name: p.detach().clone() for name, p in free.items()}
    for parameter in free.values():
        parameter.add_(1)  # what nothing resets is known by it
    own: Any = getattr(member, "init_weights", None)  # timm's name for it
    knows = callable(own) and not inspect.signature(own).parameters.keys() - {
        "mode",
        "needs_reset",
    }
    starts: list[Any] = [own] if knows else resets(member)
    for reset in starts:
        try:
            reset()
        except (
            Exception
        ):  # a start of its own that does not run: as where nothing starts them
            broken = {id(p) for p in reset.__self__.parameters()}
            for name in [
                name for name, parameter in free.items() if id(parameter) in broken
            ]:
                free[name].copy_(before[name] + 1)
    left = [name for name, p in free.items() if torch.equal(p, before[name] + 1)]
    for name in left:
        _shuffle(free[name], before[name])
    # A network that has an initialiser of its own starts by it, wherever that leads.
    guessed = (
        []
        if knows
        else [n for n, p in free.items() if n not in left and _respread(p, before[n])]
    )
    return [
        name
        for name in free
        if name in guessed or (name in left and not _constant(before[name]))
    ]


def _constant(own: Tensor) -> bool:
    return bool((own == own.flatten()[:1]).all())


def _shuffle(parameter: Tensor, own: Tensor) -> None:
    """What nothing resets (class tokens, tables of positions, layer scales) gets the network's own numbers in another
    order: the same distribution if they were drawn alike, the same constant if they were constant.
    """
    order = torch.randperm(own.numel(), device=own.device)
    parameter.copy_(own.flatten()[order].view_as(own))


def _respread(parameter: Tensor, own: Tensor) -> bool:
    """Give a parameter that its layer started anew the spread of the network's own start; whether it had another.

    What was constant is that constant again.
    """
    if own.numel() < 2 or torch.equal(parameter, own):
        return False
    if _constant(own):
        parameter.copy_(own)
        return False
    if parameter.dim() < 2 or not float(parameter.std()) > 0:
        return False
    ratio = float(own.std() / parameter.std())
    if abs(math.log(ratio)) < 6 / math.sqrt(
        2 * own.numel()
    ):  # as far apart as two draws of one start
        return False
    parameter.mul_(ratio)
    return True


class Members(Posterior):
    """K whole modules of which one serves each block of rows: nothing is drawn, and there is no KL."""

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return 0, 0

    def draw(self, noise: Noise) -> Tensor:
        """The member of each block of rows, (n,)."""
        return self.choices()

    def role(self, name: str) -> Role:
        return "weight"

    def kl(self) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device)


class EnsemblePosterior(Members):
    """Members 1 to K - 1 of a module; member 0 is the module itself."""

    weights: Tensor
    others: nn.ModuleList
    alike = False  # whether members that were to start anew have the numbers of the first, as constants have

    def __init__(self, module: nn.Module, others: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = len(others) + 1
        self.others = nn.ModuleList(others)
        self.batch_dim = 0  # kept here, not on the module, whose attributes are its own
        self.register_buffer("weights", torch.full((self.members,), 1.0 / self.members))

    def join(self, layer: Any) -> None:
        super().join(layer)
        for module in parts_of(layer):
            module.__dict__[OF_MEMBER_0] = True

    def unlike(self) -> str:
        """The first thing that members have different and that is not in their state, if any: a part's type, a flag,
        number or function that it keeps, a tensor that is no parameter and no persistent buffer.
        """
        own = [
            (n, m)
            for n, m in self.layer.named_modules()
            if not f"{n}.".startswith("posterior.")
        ]
        for other in self.others:
            for (name, a), b in zip(own, other.modules(), strict=False):
                if getattr(type(a), "plain", type(a)) is not getattr(
                    type(b), "plain", type(b)
                ):
                    return name
                theirs = _unsaved(b)
                for at, value in _unsaved(a).items():
                    if at in theirs and not _alike(value, theirs[at]):
                        return f"{name}.{at}".lstrip(".")
        return ""

    @torch.no_grad()
    def keep_members(self, members: Sequence[int], tied: Sequence[Any] = ()) -> None:
        if what := members[0] and self.unlike():
            raise ValueError(
                f"Members differ in {what}, which is no parameter, so another cannot take the place of the first: join "
                f"those you want by ensemble([...])."
            )
        own = {
            n: t
            for n, t in self.layer.state_dict().items()
            if not n.startswith("posterior.")
        }
        every = [own, *(other.state_dict() for other in self.others)]
        states = [copy.deepcopy(dict(every[k])) for k in members]
        if members[0]:
            self.layer.load_state_dict(states[0], strict=False)
            self.others = self.others[: len(members) - 1]
            for other, state in zip(self.others, states[1:], strict=True):
                other.load_state_dict(state)
        else:
            self.others = nn.ModuleList([self.others[k - 1] for k in members[1:]])
        kept = self.weights[list(members)]
        self.weights, self.members = kept / kept.sum(), len(members)

    @property
    def anchor(self) -> Tensor:
        return next(self.others.parameters(), self.weights)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.note = ""  # how members started no longer matters
        super()._load_from_state_dict(*args)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and (
            a.is_meta or b.is_meta or bool((a.to(b) == b).all())
        )
    return type(a) is type(b) and a == b


def _unsaved(module: nn.Module) -> dict[str, Any]:
    """What a module keeps that may decide what it does and that its state does not hold; not what it counts."""
    kinds = (bool, float, str, Tensor, types.FunctionType, types.BuiltinFunctionType)
    kept = {
        n: v
        for n, v in vars(module).items()
        if n != "training" and not n.startswith("_slimbayes")
    }
    buffers = {n: module._buffers[n] for n in module._non_persistent_buffers_set}
    return {
        n: value for n, value in (kept | buffers).items() if isinstance(value, kinds)
    }
