"""slimbayes: turn any PyTorch model into a parameter-efficient Bayesian neural net."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimbayes.api import *  # noqa: F403

__version__ = "0.1.0"


def _public_name(package: str, name: str) -> Any:
    """A name of a package's api.py, kept in the package once found: the command line and the report start without
    torch, which comes with the first name.
    """
    found: dict[str, Any] = {}
    if name == "__all__" or not name.startswith("_"):
        api = vars(import_module(f"{package}.api"))
        found = {public: value for public, value in api.items() if not public.startswith("_")}
        found["__all__"] = list(found)
    if name not in found:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    setattr(sys.modules[package], name, found[name])
    return found[name]


def __getattr__(name: str) -> Any:
    return _public_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
