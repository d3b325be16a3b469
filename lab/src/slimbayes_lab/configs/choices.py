"""Closed unions: a config picks one of a list by its `kind`; it can never name code to import.

    method: Annotated[Choice, OneOf(METHODS)]       {kind: Rank1, members: 4, prior: {kind: Cauchy, scale: 0.1}}
    model: Annotated[Named, OneOf(NETWORKS)]        {kind: wrn, depth: 16, width: 4}

Models of methods and priors are made from the signatures of our own classes. Networks and augmentations, functions of
`slimbayes_lab.models` and `slimbayes_lab.data`, have models with bounds of their own and are looked up when they are built:
configs are checked without torch. Their options and defaults are the functions' own, which a test compares.
`describe_faults` says what is wrong with a config, in the config's own words.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema, ErrorDetails

from slimbayes.distributions.families import FAMILIES, Distribution
from slimbayes.errors import brief, cut, did_you_mean


class Options(BaseModel):
    """A group of options: closed to other names, never changed, without NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Choice(Options):
    """One member of a closed union: `kind` and the arguments of what it makes."""

    makes: ClassVar[Callable[..., Any]]
    kind: str

    def build(self) -> Any:
        """What the choice stands for."""
        given = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name != "kind"
        }
        return self.makes(
            **{
                name: v.build() if isinstance(v, Choice) else v
                for name, v in given.items()
            }
        )

    @model_validator(mode="after")
    def _allowed(self) -> Choice:
        self.build()  # our own classes check their values; an error raised here gets its path from pydantic
        return self


@dataclass(frozen=True)
class OneOf:
    """Marks a field that holds one of several models, told apart by `kind`."""

    models: tuple[type[BaseModel], ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return handler.generate_schema(
            Annotated[Union[self.models], Field(discriminator="kind")]  # noqa: UP007
        )


@cache
def choice(makes: Callable[..., Any]) -> type[Choice]:
    """The pydantic model of a class or function."""
    hints, parameters = get_type_hints(makes), inspect.signature(makes).parameters
    fields: dict[str, Any] = {"kind": (Literal[makes.__name__], ...)}
    for p in parameters.values():
        fields[p.name] = (
            _translated(hints[p.name]),
            ... if p.default is p.empty else _default(p.default),
        )
    made = create_model(
        makes.__name__, __base__=Choice, __doc__=inspect.getdoc(makes), **fields
    )
    made.makes = staticmethod(makes)
    return made


def choices(makes: Iterable[Callable[..., Any]]) -> tuple[type[Choice], ...]:
    return tuple(map(choice, makes))


def _translated(hint: Any) -> Any:
    """A type as JSON can give it: `Distribution` is any family, sequences are tuples."""
    if hint is Distribution:
        return Annotated[Choice, _FAMILY]
    if get_origin(hint) in (types.UnionType, Union):
        return Union[tuple(_translated(arm) for arm in get_args(hint))]  # noqa: UP007
    return (
        types.GenericAlias(tuple, (*get_args(hint), ...))
        if get_origin(hint) is Sequence
        else hint
    )


def _default(value: Any) -> Any:
    if not isinstance(value, Distribution):
        return value
    family: Callable[..., Any] = type(value)
    return choice(family).model_validate(value.to_dict())


_FAMILY = OneOf(choices(FAMILIES.values()))

# --- networks and augmentations ---

Size = Annotated[int, Field(ge=1, le=1_000_000)]


class Named(Options):
    """A function of ours by name: its options, but for those in `filled`, which the data fill in."""

    home: ClassVar[str]
    filled: ClassVar[tuple[str, ...]]
    kind: str

    def network(self, facts: Mapping[str, Any], data: str) -> Any:
        """The network of these options and of what the data say about it."""
        if missing := ", ".join(name for name in self.filled if name not in facts):
            raise ValueError(
                f"{self.kind} needs {missing}, which {data} does not say: it is no network for this data."
            )
        return self.build(**{name: facts[name] for name in self.filled})

    def build(self, **filled: Any) -> Any:
        """What the function makes of these options."""
        options = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name != "kind"
        }
        return getattr(import_module(self.home), self.kind)(**options, **filled)


def _named(
    kind: str, *filled: str, home: str = "slimbayes_lab.models", **options: Any
) -> type[Named]:
    """The model of a function of ours, with its options' types and defaults."""
    fields: dict[str, Any] = {"kind": (Literal[kind], ...)}
    made = create_model(kind, __base__=Named, **fields, **options)
    made.home, made.filled = home, filled
    return made


def _checked(holds: Callable[[Any], bool], needed: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(needed)
        return value

    return AfterValidator(check)


_Some = Annotated[int, Field(ge=1, le=10_000)]
_Widths = Annotated[tuple[Size, ...], Field(max_length=1000)]
_WRN = Annotated[
    int,
    Field(ge=10, le=10_000),
    _checked(lambda n: n % 6 == 4, "must be 6 n + 4 (10, 16, 22, 28, ...)"),
]
_PYRAMID = Annotated[
    int,
    Field(ge=8, le=10_000),
    _checked(lambda n: n % 6 == 2, "must be 6 n + 2 (8, 14, ..., 110)"),
]
_SHARES = _checked(
    lambda pair: 0 < pair[0] <= pair[1] <= 1, "must lie in (0, 1], least first"
)
_RATIOS = _checked(lambda pair: 0 < pair[0] <= pair[1], "must lie above 0, least first")

NETWORKS = (
    _named("mlp", "classes", "inputs", hidden=(_Widths, (400, 400))),
    _named("regression_net", "inputs", "outputs", hidden=(Size, 50), norm=(bool, True)),
    _named(
        "lenet",
        "classes",
        "channels",
        "size",
        kernel=(Annotated[int, Field(ge=1, le=1000)], 5),
    ),
    _named("small_resnet", "classes"),
    _named("small_cnn", "classes", "channels", width=(Size, 32)),
    _named("wrn", "classes", depth=(_WRN, 28), width=(_Some, 10)),
    _named(
        "pyramidnet",
        "classes",
        depth=(_PYRAMID, 110),
        alpha=(Annotated[float, Field(ge=0, le=10_000)], 270),
    ),
    _named("resnet18", "classes", small_images=(bool, False)),
    _named("resnet50", "classes", small_images=(bool, False)),
    _named("imdb_lstm", "vocabulary", embedding=(Size, 128), units=(Size, 128)),
    _named(
        "mortality_lstm",
        "vocabulary",
        embedding=(Size, 32),
        units=(Size, 512),
        hidden=(Size, 512),
    ),
    _named("table_net", "numbers", "sizes", "outputs", hidden=(_Widths, (128, 128))),
)
AUGMENTATIONS = (
    _named(
        "pad_crop_flip", "images", "fill", "generator", home="slimbayes_lab.data",
        pad=(Annotated[int, Field(ge=0, le=10_000)], 4), flip=(bool, True),
    ),
    _named(
        "resized_crop", "images", "generator", home="slimbayes_lab.data", size=(_Some, ...),
        scale=(Annotated[tuple[float, float], _SHARES], (0.08, 1.0)),
        ratio=(Annotated[tuple[float, float], _RATIOS], (3 / 4, 4 / 3)), flip=(bool, True),
    ),
)  # fmt: skip

# --- what is wrong with a config ---

_SHOWN = 20  # faults in one message


def describe_faults(error: ValidationError, root: type[BaseModel]) -> str:
    """What is wrong with a config, whose model is `root`, in lines; each and all of them are in bounds."""
    faults = dict.fromkeys(
        _describe(fault, root) for fault in error.errors(include_url=False)
    )
    lines = [f"  {cut(fault, most=1000)}" for fault in faults]
    return "\n".join(
        lines[:_SHOWN]
        + ([f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])
    )


def _describe(fault: ErrorDetails, root: type[BaseModel]) -> str:
    """One fault: its path, what is wrong, and the nearest valid word."""
    place = tuple(
        cut(part, most=60) if isinstance(part, str) else part for part in fault["loc"]
    )
    path, fields = _locate(root, place, unknown=fault["type"] == "extra_forbidden")
    if fault["type"] == "extra_forbidden":
        return f"{path}: no such field{did_you_mean(str(fault['loc'][-1]), fields)}"
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        known = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
        return f"{path}.kind: unknown {brief(context['tag'])}{did_you_mean(str(context['tag']), known)}"
    if fault["type"] == "union_tag_not_found":
        return f"{path}: needs a `kind` that says which"
    if fault["type"] == "missing":
        return f"{path}: is missing"
    got = fault["input"]
    shown = "" if isinstance(got, dict | BaseModel) else f", got {brief(got)}"
    return f"{path}: {fault['msg'].removeprefix('Value error, ')}{shown}"


def _locate(
    root: type[BaseModel], place: tuple[int | str, ...], unknown: bool
) -> tuple[str, list[str]]:
    """A fault's path as the config spells it, without pydantic's words for arms of unions, and the known fields.

    ("method", "Rank1", "prior", "Cauchy", "scale") is method.prior.scale.
    """
    models: list[type[BaseModel]] = [root]
    path, mapping = [], False
    for part in place[:-1] if unknown else place:
        field = next(
            (m.model_fields[str(part)] for m in models if part in m.model_fields), None
        )
        if mapping or isinstance(part, int):  # a key of a mapping, a place in a list
            path.append(str(part))
            mapping = False
        elif field is not None:
            path.append(str(part))
            mapping = get_origin(field.annotation) is dict
            models = [
                m
                for source in (field.annotation, *field.metadata)
                for m in _models_in(source)
            ]
        else:  # the arm that `kind` chose, or the name of a class
            models = [
                m for m in models if part == m.__name__ or part in get_args(_kind(m))
            ] or models
    known = list(
        dict.fromkeys(
            name for m in models for name in m.model_fields if name != "format"
        )
    )
    return ".".join([*path, str(place[-1])] if unknown else path) or "(top)", known


def _kind(model: type[BaseModel]) -> Any:
    return (
        model.model_fields["kind"].annotation if "kind" in model.model_fields else None
    )


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    """All pydantic models that a type, or what marks a field, allows."""
    if isinstance(annotation, OneOf):
        yield from annotation.models
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
