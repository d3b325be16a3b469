"""A network that a function of the user's own makes."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from slimbayes.errors import brief, did_you_mean
from slimbayes.lab.own_config import OwnCodeError


def call(place: str, args: Mapping[str, Any], facts: Mapping[str, Any]) -> nn.Module:
    """What the function at "package.module:function" makes of arguments, and of those facts that it has names for.

    Example:
        >>> call("torch.nn:Linear", {"in_features": 3, "out_features": 1}, {"inputs": 3})
        Linear(in_features=3, out_features=1, bias=True)
    """
    function = _found(place)
    known = inspect.signature(function).parameters
    given = {name: value for name, value in facts.items() if name in known} | dict(args)
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise OwnCodeError(
            f"model.python: {place} cannot be called: {error}. model.args gives arguments; the data say "
            f"{', '.join(facts)}."
        ) from error
    try:
        made = function(**given)
    except Exception as error:  # whatever the user's code raises, it is told where
        at = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {brief(str(error))}, in {at.filename}, line {at.lineno}"
        raise OwnCodeError(f"model.python: {place} raised {told}.") from error
    if not isinstance(made, nn.Module):
        raise OwnCodeError(f"model.python: {place} must give a torch.nn.Module, got {type(made).__name__}.")
    return made


def _found(place: str) -> Callable[..., Any]:
    module_name, _, name = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # at the end: what is installed cannot be replaced by a file that lies about
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that the user's module needs
        raise OwnCodeError(f"model.python: there is no module {brief(error.name)}, installed or in {here}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise OwnCodeError(f"model.python: {module_name} has no function {brief(name)}{did_you_mean(name, known)}")
    found: Callable[..., Any] = function
    return found
