"""Reads records, writes tables and one self-contained page. It sees only files, imports no torch, and loads lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimbayes.report.comparison import compare
    from slimbayes.report.page import write_page

__all__ = ["compare", "write_page"]

_HOMES = {"compare": "comparison", "write_page": "page"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
