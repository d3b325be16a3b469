"""How far a long prediction is: one line on stderr, in terminals and notebooks."""

import sys
import time
from typing import Any

_PAUSE = 0.2  # seconds between two lines


class Progress:
    """Rows that are done, of how many where that is known, and the time it takes.

    Args:
        x: what `predict` was given; its length, or its dataset's, is the number of rows.
        shown: whether anything is written.
    """

    def __init__(self, x: Any, shown: bool) -> None:
        rows = getattr(x, "dataset", x)
        many = hasattr(rows, "__len__") and not isinstance(rows, (dict, tuple, list))
        self.total = len(rows) if shown and many else None
        self.shown, self.done, self.start, self.told, self.width = shown, 0, time.monotonic(), 0.0, 0

    def add(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        if self.shown and (now - self.told > _PAUSE or self.done == self.total):
            self.told = now
            self._write(now - self.start)

    def close(self) -> None:
        if self.shown:
            self._write(time.monotonic() - self.start)
            sys.stderr.write("\n")

    def _write(self, seconds: float) -> None:
        of = "" if not self.total else f" of {self.total:,} ({self.done / self.total:.0%})"
        left = f", {seconds * (self.total / self.done - 1):.0f} s left" if self.total and self.done < self.total else ""
        line = f"predict: {self.done:,}{of} rows, {seconds:.1f} s{left}"
        sys.stderr.write(f"\r{line:{self.width}}")
        sys.stderr.flush()
        self.width = len(line)
