"""Reads records, writes tables and one self-contained page. It sees only files, imports no torch, and loads lazily.

record -> groups (runs of one name, and which of their evaluations are meant) -> tables, figures (of charts) -> page
                                                                              -> comparison
metric: what scores are called, which way is better, and what a handful of seeds say of them
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimbayes_lab.report.comparison import compare
    from slimbayes_lab.report.page import write_page

__all__ = ["compare", "write_page"]

_HOMES = {"compare": "comparison", "write_page": "page"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
