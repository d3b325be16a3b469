"""Closed unions: pydantic models made from the signatures of our own classes and functions, so that each option is written down once.

    Method = union([Rank1, KTied, ...])       {kind: Rank1, members: 4, prior: {kind: Cauchy, loc: 1.0, scale: 0.1}}

A config picks one of a list by its `kind`; it can never name code to import.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model, model_validator
from torch import Tensor

from slimbayes.distributions.families import FAMILIES, Distribution


class Choice(BaseModel):
    """One member of a closed union: `kind` and the arguments of what it makes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    makes: ClassVar[Callable[..., Any]]
    filled: ClassVar[tuple[str, ...]] = ()

    def build(self, **more: Any) -> Any:
        """What the choice stands for; `more` are the arguments that no config sets."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        values = {name: value.build() if isinstance(value, Choice) else value for name, value in given.items()}
        return self.makes(**values, **more)

    @model_validator(mode="after")
    def _allowed(self) -> Choice:
        # Our own classes check their values; an error raised here gets its path from pydantic.
        if not self.filled and isinstance(self.makes, type):
            self.build()
        return self


@cache
def choice(makes: Callable[..., Any], filled: tuple[str, ...] = ()) -> type[Choice]:
    """The pydantic model of a class or function; arguments in `filled` are left to whoever builds it.

    Example:
        >>> def ring(inner: float, outer: float = 2.0): return inner, outer
        >>> choice(ring).model_validate({"kind": "ring", "inner": 1}).build()
        (1.0, 2.0)
    """
    name = makes.__name__
    hints = get_type_hints(makes)
    parameters = inspect.signature(makes).parameters
    own = tuple(p for p in filled if p in parameters)
    fields: dict[str, Any] = {"kind": (Literal[name], ...)}  # type: ignore[valid-type]
    for p in parameters.values():
        if p.name not in own:
            fields[p.name] = (_translated(hints[p.name]), ... if p.default is p.empty else _default(p.default))
    # Documentation goes into the JSON Schema; a class attribute set afterwards is no field.
    made = create_model(name, __base__=Choice, __doc__=inspect.getdoc(makes), **fields)
    made.makes, made.filled = staticmethod(makes), own  # type: ignore[assignment]
    return made


def union(
    makes: Iterable[Callable[..., Any]], filled: tuple[str, ...] = (), also: tuple[type[BaseModel], ...] = ()
) -> Any:
    """The type of a field that holds one of several choices, or of the models in `also`, told apart by `kind`."""
    models = (*(choice(one, filled) for one in makes), *also)
    return Annotated[Union[models], Field(discriminator="kind")]  # noqa: UP007


def _translated(hint: Any) -> Any:
    """A type as JSON can give it: `Distribution` is any family, sequences are tuples, numbers are no tensors."""
    if hint is Distribution:
        return _DISTRIBUTIONS
    if get_origin(hint) in (types.UnionType, Union):
        return Union[tuple(_translated(arm) for arm in get_args(hint) if arm is not Tensor)]  # noqa: UP007
    if get_origin(hint) is Sequence:
        return tuple[(*get_args(hint), ...)]  # type: ignore[return-value]
    return hint


def _default(value: Any) -> Any:
    return TypeAdapter(_DISTRIBUTIONS).validate_python(value.to_dict()) if isinstance(value, Distribution) else value


_DISTRIBUTIONS: Any = union(FAMILIES.values())
