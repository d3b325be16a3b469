"""The abstract Config: what a user chooses about a method. Files of this folder need no torch before a config is
put to use, so that configs can be read and checked without it.

    Config              what a user chooses
    Deterministic       the plain model through the same API
    check_choice, ...   checks of values: each names the owner, the field, what it got and what it needs
    Count, Positive ... types of fields, by which a Config checks itself
    SiteConfig          a Config with a posterior for each weight matrix: the usual case
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from slimbayes.distributions.families import (
    Distribution,
    Normal,
    distribution_from_dict,
)
from slimbayes.errors import brief, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior

MOST = 1_000_000


def name_of(owner: object) -> str:
    """Who refuses a value: a function by its name, a config by its class."""
    return owner if isinstance(owner, str) else type(owner).__name__


def check_choice(
    owner: object, field: str, value: object, allowed: tuple[str, ...]
) -> None:
    """Refuse a value outside a closed set, naming the nearest valid choice."""
    if value not in allowed:
        raise ValueError(
            f"{name_of(owner)}: unknown {field} {brief(value)}{did_you_mean(str(value)[:80], allowed)}"
        )


def check_rate(owner: object, field: str, value: object) -> None:
    """Refuse anything but a number in [0, 1)."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not 0 <= value < 1
    ):
        raise ValueError(
            f"{name_of(owner)}: {field} must lie in [0, 1), got {brief(value)}."
        )


def check_count(
    owner: object, field: str, value: object, most: int | None = MOST
) -> None:
    """Refuse anything but a whole number of at least one, and such as no memory holds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name_of(owner)}: {field} must be a whole number of at least 1, got {brief(value)}."
        )
    if most is not None and value > most:
        raise ValueError(
            f"{name_of(owner)}: {field} must be {most:,} at most, got {brief(value)}."
        )


def check_whole(owner: object, field: str, value: object) -> None:
    """Refuse anything but a whole number from zero on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"{name_of(owner)}: {field} must be a whole number, not negative, got {brief(value)}."
        )


def check_positive(owner: object, field: str, value: float) -> None:
    """Refuse zero, numbers below it and NaN."""
    if not value > 0:
        raise ValueError(
            f"{name_of(owner)}: {field} must be positive, got {brief(value)}."
        )


def check_not_negative(
    owner: object, field: str, value: float | None, what: str = ""
) -> None:
    """Refuse numbers below zero; `what` says what the number is. None is left alone."""
    if value is not None and not value >= 0:
        raise ValueError(
            f"{name_of(owner)}: {field} {what}must not be negative, got {brief(value)}."
        )


def check_number(owner: object, field: str, value: object) -> None:
    """Refuse what is neither a number nor None."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, (int, float))
    ):
        got = f"{type(value).__name__} {brief(value)}"
        raise TypeError(
            f"{name_of(owner)}: {field} must be a number or None, got {got}."
        )


def check_distribution(owner: object, field: str, value: object) -> None:
    """Refuse what is neither a distribution nor None."""
    if value is not None and not isinstance(value, Distribution):
        example = (
            f" Write {field}=Normal(1.0, {value!r})."
            if isinstance(value, (int, float))
            else ""
        )
        needed, got = (
            "a distribution such as Normal(1.0, 0.1), or None",
            f"{type(value).__name__} {brief(value)}",
        )
        raise TypeError(
            f"{name_of(owner)}: {field} must be {needed}, got {got}.{example}"
        )


def check_prior(
    owner: object,
    field: str,
    value: object,
    known: tuple[type[Distribution], ...] = (Normal,),
) -> None:
    """Refuse a prior of weights of another family than those for which the KL is known."""
    if not isinstance(value, known):
        names = " or ".join(kind.__name__ for kind in known)
        raise ValueError(
            f"{name_of(owner)}: the KL is known for a {names} prior, got {brief(value)}."
        )


Count = Annotated[int, check_count]
Whole = Annotated[int, check_whole]
Rate = Annotated[float, check_rate]
Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, check_not_negative]
Precision = Annotated[float, partial(check_not_negative, what="is a precision and ")]
Family = Annotated[Distribution, check_distribution]
NormalPrior = Annotated[Distribution, check_prior]


@cache
def _types(config: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a config may have."""
    hints = get_type_hints(config, include_extras=True)
    arms = {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in hints.items()
    }
    return {f.name: arms[f.name] for f in dataclasses.fields(config)}


class Config:
    """Everything a user chooses about a method. Subclasses are frozen, keyword-only dataclasses that survive JSON."""

    members: int = 1
    main_field: ClassVar[str] = "members"  # the one that `describe` shows
    converts: ClassVar[bool] = True
    leaves_tables: ClassVar[str] = (
        ""  # what to say of embeddings where a method leaves them alone by default
    )
    whole: ClassVar[bool] = False  # whether it converts modules of any type as a whole
    covers: tuple[Any, ...] = (
        "matrix",
        "table",
    )  # the kinds of layer it can convert (layers/site.py: Kind)

    def __post_init__(self) -> None:
        """Refuse what the types of the fields do not allow."""
        for field, types in _types(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, field)
            for kind in types if value is not None or NoneType not in types else ():
                if get_origin(kind) is Annotated:
                    kind.__metadata__[0](self, field, value)
                elif get_origin(kind) is Literal and not (
                    float in types and isinstance(value, (int, float))
                ):
                    check_choice(self, field, value, get_args(kind))

    def targets(
        self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool
    ) -> set[str] | None:
        """Names of the layers to convert out of those offered; None for all. `named`: the user picked them by name."""
        return None

    def leaves_alone(self, layer: nn.Module) -> str:
        """Why this method skips a layer unless it is included by name; nothing if it does not."""
        if not self.leaves_tables:
            return ""
        from slimbayes.layers import kind_of

        why = f"{self.leaves_tables}; include it by name to convert it"
        return why if kind_of(layer) == "table" else ""

    def of_networks_from(self, factory: Callable[[], Any]) -> Config:
        """This config for a network that `factory` has built, and can build afresh."""
        return self

    def describe(self) -> str:
        """The method in a few words, for summaries."""
        name, field = type(self).__name__, self.main_field
        known = any(f.name == field for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{name}({field}={getattr(self, field)})" if known else name

    def extra_parameters(self, layer: nn.Module, sites: Sequence[Site]) -> list[Tensor]:
        """Parameters that converting a layer with these sites would add, as tensors whose numbers do not matter."""
        return []

    def extra_flops(self, site: Site) -> float:
        """Multiply-adds beyond the plain layer's at one position for one draw; weights drawn once a pass add none."""
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the method's name and every field.

        >>> import slimbayes as sb
        >>> sb.Deterministic().to_dict()
        {'kind': 'Deterministic'}
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        json = {
            k: v.to_dict() if isinstance(v, Distribution) else v
            for k, v in values.items()
        }
        return {"kind": type(self).__name__} | json

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a config of this method from its JSON form; unknown fields are refused by name."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        values: dict[str, Any] = {
            name: value for name, value in data.items() if name != "kind"
        }
        for name, value in values.items():
            if name not in known:
                raise ValueError(
                    f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}"
                )
            values[name] = (
                distribution_from_dict(value) if isinstance(value, dict) else value
            )
            values[name] = tuple(value) if isinstance(value, list) else values[name]
        return cls(**values)


class SiteConfig(Config):
    """A method that gives each weight matrix a posterior of its own."""

    builds: ClassVar[str]  # which posterior: file and class under slimbayes/posteriors

    def resolved(self) -> SiteConfig:
        """What this config comes down to: with everything said that was left open, or another method's case."""
        return self

    def build(self, site: Site) -> Posterior:
        """A new posterior for one weight matrix, on torch's default device and in its default dtype."""
        config = self.resolved()
        file, _, name = config.builds.partition(".")
        posterior: Posterior = getattr(
            import_module(f"slimbayes.posteriors.{file}"), name
        )(config, site)
        return posterior

    def extra_flops(self, site: Site) -> float:
        config = self.resolved()
        return 0.0 if type(config) is type(self) else config.extra_flops(site)

    def extra_parameters(self, layer: nn.Module, sites: Sequence[Site]) -> list[Tensor]:
        import torch

        wide = torch.promote_types(
            next(layer.parameters(), torch.empty(0)).dtype, torch.float32
        )
        with torch.device("meta"):
            return [
                p
                for site in sites
                for p in self.build(site).to(dtype=wide).parameters()
            ]


@dataclass(frozen=True, kw_only=True)
class Deterministic(Config):
    """Leave the model as it is, so that baselines run through `sample`, `elbo`, `predict`, `save` and `load` too.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.Deterministic())
        >>> sb.sample(net, torch.randn(5, 3)).shape
        torch.Size([1, 5, 2])
    """

    converts: ClassVar[bool] = False
