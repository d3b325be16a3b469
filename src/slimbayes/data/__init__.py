"""Data to train on and to judge uncertainty by: readers, batched augmentation, the corruptions of CIFAR-10-C.

Its names (api.py) come with torch when one is first asked for; tables in files are looked at without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimbayes.data.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    names = {} if name.startswith("_") else vars(import_module(f"{__name__}.api"))
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = names[name]
    return names[name]


def __dir__() -> list[str]:
    names = import_module(f"{__name__}.api")
    return sorted({*globals(), *(name for name in vars(names) if not name.startswith("_"))})
