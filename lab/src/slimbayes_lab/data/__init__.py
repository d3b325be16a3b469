"""Data to train on and to judge uncertainty by: readers, batched augmentation, the corruptions of CIFAR-10-C.

Its names (api.py) come with torch when one is first asked for; tables in files are looked at without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimbayes_lab.data.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    names: dict[str, Any] = {}
    if name == "__all__" or not name.startswith("_"):
        found = vars(import_module(f"{__name__}.api"))
        names = {
            public: value
            for public, value in found.items()
            if not public.startswith("_")
        }
        names["__all__"] = list(names)
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = names[name]
    return names[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
