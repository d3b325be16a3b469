"""Closed unions: a config picks one of a list by its `kind`; it can never name code to import.

    method: Annotated[Choice, OneOf([Rank1, KTied])]      {kind: Rank1, members: 4, prior: {kind: Cauchy, scale: 0.1}}
    model: Network                                        {kind: wrn, depth: 16, width: 4}

Models of methods and priors are made from the signatures of our own classes. Networks and augmentations, functions of
`slimbayes.models` and `slimbayes.data`, have models with bounds of their own and are looked up when they are built:
configs are checked without torch. Their options and defaults are the functions' own, which a test compares.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model, model_validator
from pydantic_core import CoreSchema

from slimbayes.distributions.families import FAMILIES, Distribution


class Options(BaseModel):
    """A group of options: closed to other names, never changed, without NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Choice(Options):
    """One member of a closed union: `kind` and the arguments of what it makes."""

    makes: ClassVar[Callable[..., Any]]
    kind: str

    def build(self) -> Any:
        """What the choice stands for."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        return self.makes(**{name: v.build() if isinstance(v, Choice) else v for name, v in given.items()})

    @model_validator(mode="after")
    def _allowed(self) -> Choice:
        self.build()  # our own classes check their values; an error raised here gets its path from pydantic
        return self


@dataclass(frozen=True)
class OneOf:
    """Marks a field that holds one of several choices, or of the models in `also`, told apart by `kind`."""

    makes: tuple[Callable[..., Any], ...]
    also: tuple[type[BaseModel], ...] = ()

    @property
    def models(self) -> tuple[type[BaseModel], ...]:
        return (*map(choice, self.makes), *self.also)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Annotated[Union[self.models], Field(discriminator="kind")])  # noqa: UP007


@cache
def choice(makes: Callable[..., Any]) -> type[Choice]:
    """The pydantic model of a class or function."""
    hints, parameters = get_type_hints(makes), inspect.signature(makes).parameters
    fields: dict[str, Any] = {"kind": (Literal[makes.__name__], ...)}
    for p in parameters.values():
        fields[p.name] = (_translated(hints[p.name]), ... if p.default is p.empty else _default(p.default))
    made = create_model(makes.__name__, __base__=Choice, __doc__=inspect.getdoc(makes), **fields)
    made.makes = staticmethod(makes)
    return made


def models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    """All pydantic models that a type, or what marks a field, allows."""
    if isinstance(annotation, OneOf):
        yield from annotation.models
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def _translated(hint: Any) -> Any:
    """A type as JSON can give it: `Distribution` is any family, sequences are tuples."""
    if hint is Distribution:
        return Annotated[Choice, _FAMILY]
    if get_origin(hint) in (types.UnionType, Union):
        return Union[tuple(_translated(arm) for arm in get_args(hint))]  # noqa: UP007
    return types.GenericAlias(tuple, (*get_args(hint), ...)) if get_origin(hint) is Sequence else hint


def _default(value: Any) -> Any:
    if not isinstance(value, Distribution):
        return value
    family: Callable[..., Any] = type(value)
    return choice(family).model_validate(value.to_dict())


_FAMILY = OneOf(tuple(FAMILIES.values()))

# --- networks and augmentations ---

Size = Annotated[int, Field(ge=1, le=1_000_000)]


class Named(Options):
    """A function of ours by name: its options, but for those in `filled`, which the data fill in."""

    home: ClassVar[str] = "slimbayes.models"
    filled: ClassVar[tuple[str, ...]] = ("classes",)
    kind: str

    def network(self, facts: Mapping[str, Any], data: str) -> Any:
        """The network of these options and of what the data say about it."""
        if missing := ", ".join(name for name in self.filled if name not in facts):
            raise ValueError(f"{self.kind} needs {missing}, which {data} does not say: it is no network for this data.")
        return self.build(**{name: facts[name] for name in self.filled})

    def build(self, **filled: Any) -> Any:
        """What the function makes of these options."""
        options = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        return getattr(import_module(self.home), self.kind)(**options, **filled)


class MLP(Named):
    filled: ClassVar = ("classes", "inputs")
    kind: Literal["mlp"]
    hidden: Annotated[tuple[Size, ...], Field(max_length=1000)] = (400, 400)


class RegressionNet(Named):
    filled: ClassVar = ("inputs", "outputs")
    kind: Literal["regression_net"]
    hidden: Size = 50
    norm: bool = True


class LeNet(Named):
    filled: ClassVar = ("classes", "channels", "size")
    kind: Literal["lenet"]
    kernel: Annotated[int, Field(ge=1, le=1000)] = 5


class SmallResNet(Named):
    kind: Literal["small_resnet"]


class SmallCNN(Named):
    filled: ClassVar = ("classes", "channels")
    kind: Literal["small_cnn"]
    width: Size = 32


class WRN(Named):
    kind: Literal["wrn"]
    depth: Annotated[int, Field(ge=10, le=10_000)] = 28
    width: Annotated[int, Field(ge=1, le=10_000)] = 10

    @model_validator(mode="after")
    def _blocks(self) -> WRN:
        if (self.depth - 4) % 6:
            raise ValueError(f"wrn: depth must be 6 n + 4 (10, 16, 22, 28, ...), got {self.depth}")
        return self


class PyramidNet(Named):
    kind: Literal["pyramidnet"]
    depth: Annotated[int, Field(ge=8, le=10_000)] = 110
    alpha: Annotated[float, Field(ge=0, le=10_000)] = 270

    @model_validator(mode="after")
    def _blocks(self) -> PyramidNet:
        if (self.depth - 2) % 6:
            raise ValueError(f"pyramidnet: depth must be 6 n + 2 (8, 14, ..., 110), got {self.depth}")
        return self


class ResNet(Named):
    kind: Literal["resnet18", "resnet50"]
    small_images: bool = False


class ImdbLSTM(Named):
    filled: ClassVar = ("vocabulary",)
    kind: Literal["imdb_lstm"]
    embedding: Size = 128
    units: Size = 128


class MortalityLSTM(Named):
    filled: ClassVar = ("vocabulary",)
    kind: Literal["mortality_lstm"]
    embedding: Size = 32
    units: Size = 512
    hidden: Size = 512


class PadCropFlip(Named):
    home: ClassVar = "slimbayes.data"
    filled: ClassVar = ("images", "fill", "generator")
    kind: Literal["pad_crop_flip"]
    pad: Annotated[int, Field(ge=0, le=10_000)] = 4
    flip: bool = True


class ResizedCrop(Named):
    home: ClassVar = "slimbayes.data"
    filled: ClassVar = ("images", "generator")
    kind: Literal["resized_crop"]
    size: Annotated[int, Field(ge=1, le=10_000)]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    @model_validator(mode="after")
    def _boxes(self) -> ResizedCrop:
        (small, large), (tall, wide) = self.scale, self.ratio
        if not 0 < small <= large <= 1 or not 0 < tall <= wide:
            raise ValueError("scale must lie in (0, 1] and ratio above 0, least first")
        return self


Network = Annotated[
    MLP | RegressionNet | LeNet | SmallResNet | SmallCNN | WRN | PyramidNet | ResNet | ImdbLSTM | MortalityLSTM,
    Field(discriminator="kind"),
]
Augmentation = Annotated[PadCropFlip | ResizedCrop, Field(discriminator="kind")]
