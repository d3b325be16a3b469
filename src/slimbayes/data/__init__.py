"""Data to train on and to judge uncertainty by: readers, batched augmentation, the corruptions of CIFAR-10-C.

Its names (api.py) come with torch when one is first asked for; tables in files are looked at without.
"""

from typing import TYPE_CHECKING, Any

from slimbayes import _public_name

if TYPE_CHECKING:
    from slimbayes.data.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return _public_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
