"""Which parameters of a converted model train: all, the posteriors alone, or those and a head. And what share that is.

What trains beside the posteriors, and batch norms, whose statistics move by themselves, `save` writes with them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from slimbayes.convert.plan import Selection, selected
from slimbayes.engine.passes import posteriors_of
from slimbayes.errors import did_you_mean
from slimbayes.layers.base import Converted

Train = Literal["all", "posterior", "posterior+head"]


def modules_to_save(
    model: nn.Module, train: Train, head: Selection
) -> tuple[list[str], list[str]]:
    """Names of modules to be saved with the posteriors, and of the heads among them, before a conversion."""
    if train not in get_args(Train):
        raise ValueError(
            f"bayesianize: unknown train {train!r}{did_you_mean(str(train), get_args(Train))}"
        )
    if head is not None and train != "posterior+head":
        raise ValueError(
            f'bayesianize: head= is what trains beside the posterior; give train="posterior+head" too, not {train!r}.'
        )
    if train == "all":
        return [], []
    modules, heads = dict(model.named_modules()), list[str]()
    if (
        train == "posterior+head"
    ):  # without a selection the last module that has parameters of its own
        owners = {
            name: m for name, m in modules.items() if any(True for _ in m.parameters())
        }
        last = [
            name
            for name, m in owners.items()
            if any(True for _ in m.parameters(recurse=False))
        ][-1:]
        heads = last if head is None else sorted(selected("head", head, owners))
    return [
        name for name, m in modules.items() if _has_statistics(m) and name not in heads
    ] + heads, heads


def _has_statistics(module: nn.Module) -> bool:
    """Whether a module has statistics that move by themselves."""
    return getattr(module, "running_mean", None) is not None


def freeze(model: nn.Module, heads: Sequence[str]) -> list[str]:
    """Let the posteriors and these modules train, and nothing else; returns the names of what no longer does.

    Members' biases train where the layer's own does: no prior holds them, and of a network that fits its data already
    Adam takes them anywhere.
    """
    trains, in_head = is_saved_name(model, heads), _is_inside(heads)
    offsets = {
        id(p)
        for q in posteriors_of(model)
        for name, p in q.named_parameters()
        if q.role(name) == "offset"
    }
    frozen = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not trains(name)
    ]
    biases = [
        name
        for name, p in model.named_parameters()
        if id(p) in offsets and not in_head(name)
    ]
    for name in frozen + biases:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def is_saved_name(model: nn.Module, saved: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name in a model's state belongs to a posterior or one of these modules: what is saved."""
    every = list(
        model.named_modules(remove_duplicate=False)
    )  # a module has all its names in the state
    meant = {module for name, module in every if name in saved}
    of_posterior = tuple(
        f"{name}.posterior.".lstrip(".")
        for name, module in every
        if isinstance(module, Converted)
    )
    of_saved = _is_inside(
        [*saved, *(name for name, module in every if module in meant)]
    )
    return lambda name: name.startswith(of_posterior) or of_saved(name)


def _is_inside(modules: Sequence[str]) -> Callable[[str], bool]:
    prefixes = tuple(f"{name}." if name else "" for name in modules)
    return lambda name: name.startswith(prefixes)


@dataclass(frozen=True, repr=False)
class Trainable:
    """How many parameters of a model train, and how many there are; shown as a line of words."""

    trainable: int
    total: int

    @property
    def share(self) -> float:
        return self.trainable / max(self.total, 1)

    def __repr__(self) -> str:
        return (
            f"{self.trainable:,} of {self.total:,} parameters train ({self.share:.2%})"
        )


def trainable(model: nn.Module) -> Trainable:
    """What share of a model's parameters trains.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
        >>> trainable(sb.bayesianize(net, sb.Rank1(members=1), train="posterior"))
        620 of 11,730 parameters train (5.29%)
    """
    parameters = list(model.parameters())
    return Trainable(
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() for p in parameters),
    )
