"""Closed unions: pydantic models made from the signatures of our own classes and functions.

    method: Annotated[Choice, OneOf([Rank1, KTied])]      {kind: Rank1, members: 4, prior: {kind: Cauchy, scale: 0.1}}

A config picks one of a list by its `kind`; it can never name code to import.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
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
    """The pydantic model of a class or function.

    Example:
        >>> def ring(inner: float, outer: float = 2.0): return inner, outer
        >>> choice(ring).model_validate({"kind": "ring", "inner": 1}).build()
        (1.0, 2.0)
    """
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
