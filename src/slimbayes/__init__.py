"""slimbayes: turn any PyTorch model into a parameter-efficient Bayesian neural net."""

from importlib import import_module

# `python -m slimbayes_lab` imports this while the current folder is first on the path, where a typing.py may lie: nothing
# is imported here that Python has not imported itself.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slimbayes.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    """A public name, kept once found: the command line and the report start without torch, which comes with the first
    name.
    """
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module(f"{__name__}.api")
    if name == "__all__":
        value: Any = [public for public in vars(api) if not public.startswith("_")]
    elif hasattr(api, name):
        value = getattr(api, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
