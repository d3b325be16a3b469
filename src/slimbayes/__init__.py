"""slimbayes: turn any PyTorch model into a parameter-efficient Bayesian neural net."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimbayes.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A public name or a submodule, loaded when it is asked for: the command line and the report start without torch."""
    if not name.startswith("_"):
        if find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        api = import_module(f"{__name__}.api")
        if hasattr(api, name):
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    api = import_module(f"{__name__}.api")
    return sorted({*globals(), *(name for name in vars(api) if not name.startswith("_"))})
