"""What each metric is called, which way is better, how its values are written, and what a handful of seeds say of it:
standard errors, intervals and sign-flip tests, which repeat bit for bit.

Bootstrap: percentile interval of the mean. With n values it is too short by about sqrt((n - 1) / n) and worse for tiny
n; docs/report.md has measured coverages. Sign flips (Fisher's randomisation test): if the method made no difference,
every paired difference could as well have had the other sign, so p is the share of the 2^n sign patterns whose mean is
at least as large. scipy has both, but a report need not install it, and tables would change with its version.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MISSING = "\u2013"  # what tables show where there is no value: an en dash


Place = Literal["summary", "comparison", "terminal"]


@dataclass(frozen=True)
class Metric:
    """A metric. `better` is None where neither direction is good by itself; `nearer` means nearer to `target`. `shown`
    says where it stands without being asked for: in the page's summary, in comparisons, in the terminal.

    Example:
        >>> metric("nll").best([0.3, 0.2, float("nan")])
        {1}
        >>> metric("accuracy").text(0.9613), metric("nll").text(0.1234), metric("nll").text(0.00001, 3)
        ('96.13', '0.123', '<0.001')
    """

    name: str
    label: str
    better: Literal["higher", "lower", "nearer"] | None = None
    percent: bool = False
    target: float = math.nan
    shown: tuple[Place, ...] = ()

    @property
    def arrow(self) -> str:
        """A sign for a table's head."""
        return {
            "higher": "↑",
            "lower": "↓",
            "nearer": f"→ {self.target:.0%}",
            None: "",
        }[self.better]

    @property
    def head(self) -> str:
        """The label with its unit."""
        return f"{self.label}, %" if self.percent else self.label

    @property
    def advice(self) -> str:
        """The arrow in words."""
        nearer = f"nearer to {self.target:.0%}"
        return (
            f"{nearer if self.better == 'nearer' else self.better} is better"
            if self.better
            else ""
        )

    def best(self, values: Sequence[float]) -> set[int]:
        """Where the best values stand; several on a tie, none without a direction or with fewer than two values."""
        losses = [self._loss(value) for value in values]
        least = min((loss for loss in losses if math.isfinite(loss)), default=None)
        return (
            {i for i, loss in enumerate(losses) if loss == least}
            if len(values) > 1
            else set()
        )

    def _loss(self, value: float) -> float:
        if self.better is None or math.isnan(value):
            return math.inf
        return {"higher": -value, "lower": value, "nearer": abs(value - self.target)}[
            self.better
        ]

    def decimals(self, values: Iterable[float]) -> int:
        """How many decimals a column of values needs, by the largest of them."""
        if self.percent:
            return 2
        size = max(
            (abs(value) for value in values if math.isfinite(value)), default=0.0
        )
        return next(
            (
                places
                for line, places in ((1000, 0), (100, 1), (10, 2), (0.1, 3))
                if size >= line
            ),
            4,
        )

    def text(self, value: float, places: int | None = None) -> str:
        """A value without a percent sign; what would read as zero without being zero is said to be small."""
        if not math.isfinite(value):
            return str(value)
        places = self.decimals([value]) if places is None else places
        amount = value * 100 if self.percent else value
        if amount and abs(amount) < 0.5 * 10**-places:
            return f"{'<' if amount > 0 else '>-'}{10**-places:.{places}f}"
        return f"{amount:.{places}f}"


_EVERYWHERE: tuple[Place, ...] = ("summary", "comparison", "terminal")
# The order is that of every table and menu.
KNOWN = {
    known.name: known
    for known in (
        Metric("accuracy", "Accuracy", "higher", percent=True, shown=_EVERYWHERE),
        Metric("nll", "NLL", "lower", shown=_EVERYWHERE),
        Metric("ece", "ECE", "lower", shown=_EVERYWHERE),
        Metric("brier", "Brier", "lower", shown=("comparison",)),
        Metric("rmse", "RMSE", "lower", shown=_EVERYWHERE),
        Metric("lpd", "LPD", "higher", shown=_EVERYWHERE),
        Metric("crps", "CRPS", "lower", shown=_EVERYWHERE),
        Metric(
            "coverage95",
            "Coverage of 95 %",
            "nearer",
            percent=True,
            target=0.95,
            shown=("summary", "comparison"),
        ),
        Metric("auroc", "AUROC", "higher", shown=("comparison", "terminal")),
        Metric("aucpr", "AUCPR", "higher", shown=("comparison",)),
        Metric(
            "fpr95", "FPR95", "lower", percent=True, shown=("comparison", "terminal")
        ),
        Metric("top5", "Top-5 accuracy", "higher", percent=True),
        Metric("aurc", "AURC", "lower"),
        Metric("soft_nll", "NLL of soft labels", "lower"),
        Metric("adaptive_ece", "Adaptive ECE", "lower"),
        Metric("classwise_ece", "Class-wise ECE", "lower"),
        Metric("mce", "MCE", "lower"),
        Metric("entropy", "Entropy"),
        Metric("epistemic", "Epistemic"),
        Metric("disagreement", "Disagreement", percent=True),
        Metric("normalised_disagreement", "Disagreement / error"),
        Metric("kl", "KL"),
        Metric("cosine", "Cosine similarity"),
        Metric("loss", "Loss"),
        Metric("kl_weight", "KL weight"),
        Metric("lr", "Learning rate"),
    )
}


def shown_in(place: Place) -> tuple[str, ...]:
    """Names of the metrics that stand in a place without being asked for.

    >>> {"nll", "auroc"} <= set(shown_in("terminal")), "brier" in shown_in("terminal")
    (True, False)
    """
    return tuple(name for name, known in KNOWN.items() if place in known.shown)


# What every JavaScript object has: a library that keeps things by name in plain objects finds these there already.
_INHERITED = {
    "__proto__", "constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString", "toString",
    "valueOf", "__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__",
}  # fmt: skip
_LONG = 80


def printable(text: str) -> str:
    """Text without line breaks and control signs: they garble tables, and Vega's expressions cannot quote all of them.

    Long text is cut, with its checksum in place of the rest; names that mean something to JavaScript are put in quotes.

    Example:
        >>> printable("two\\nlines"), printable("__proto__")
        ('two lines', '“__proto__”')
    """
    shown = (
        "".join(sign if sign.isprintable() else " " for sign in text).strip()
        or "unnamed"
    )
    if len(shown) > _LONG:
        shown = f"{shown[:_LONG]}... ({zlib.crc32(text.encode(errors='replace')):08x})"
    return f"“{shown}”" if shown in _INHERITED else shown


def metric(name: str) -> Metric:
    """The metric of that name; a name this package does not know has no direction and is its own label."""
    return KNOWN.get(name) or Metric(name, printable(name))


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Known metrics first, in the order of the tables, then the others by name.

    Example:
        >>> sort_metrics(["zeta", "ece", "accuracy", "alpha"])
        ['accuracy', 'ece', 'alpha', 'zeta']
    """
    place = {name: i for i, name in enumerate(KNOWN)}
    return sorted(set(names), key=lambda name: (place.get(name, len(place)), name))


# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
EXACT = 16  # up to so many pairs all 2^n sign patterns are counted
FLIPS = 2**16  # random patterns beyond that
Interval = tuple[float, float]


def _usable(values: Sequence[float]) -> bool:
    """At least two values, all finite: otherwise nothing can be said about their spread."""
    return len(values) > 1 and all(map(math.isfinite, values))


def mean(values: Sequence[float]) -> float:
    """The plain mean; NaN and infinity go through it, an empty sequence gives NaN."""
    return sum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float | None:
    """Standard deviation (n - 1) over sqrt(n); None for a single value or where one is not finite."""
    return (
        float(np.std(values, ddof=1) / math.sqrt(len(values)))
        if _usable(values)
        else None
    )


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean; None for a single value or where one is not finite. Claims are judged by it:
    a bootstrap of three values is about their span, which chance alone puts on one side of zero once in four times.
    """
    error, freedom = standard_error(values), len(values) - 1
    if error is None:
        return None
    half = error * (
        _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.42 / freedom
    )
    return mean(values) - half, mean(values) + half


def bootstrap_interval(
    values: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of the mean; None for a single value or where one is not finite."""
    if not _usable(values):
        return None
    data = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))
    low, high = np.quantile(data[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float | None:
    """Two-sided p-value of paired differences under random signs; None for fewer than two or where one is not finite.

    It is never below 2 / 2^n: five pairs cannot give less than 0.0625.
    """
    if not _usable(differences):
        return None
    data, exact = np.asarray(differences, dtype=float), len(differences) <= EXACT
    if exact:
        flipped = np.arange(2 ** len(data))[:, None] >> np.arange(len(data)) & 1
    else:
        flipped = np.random.default_rng(seed).integers(2, size=(FLIPS, len(data)))
    sums = np.abs((1.0 - 2.0 * flipped) @ data)
    # Sums that are equal on paper may differ in the last bits.
    reached = int((sums >= abs(data.sum()) - 1e-12 * np.abs(data).sum()).sum())
    return reached / len(sums) if exact else (reached + 1) / (len(sums) + 1)
