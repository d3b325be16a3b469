"""What each metric is called, which way is better, and how its values are written. The one place that knows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MISSING = "\u2013"  # what tables show where there is no value: an en dash
Better = Literal["higher", "lower", "nearer"]


@dataclass(frozen=True)
class Metric:
    """A metric. `better` is None where neither direction is good by itself; `nearer` means nearer to `target`."""

    name: str
    label: str
    better: Better | None = None
    percent: bool = False
    target: float = math.nan

    @property
    def arrow(self) -> str:
        """A sign for a table's head."""
        return {"higher": "↑", "lower": "↓", "nearer": f"→ {self.target:.0%}", None: ""}[self.better]

    @property
    def head(self) -> str:
        """The label with its unit."""
        return f"{self.label}, %" if self.percent else self.label

    @property
    def advice(self) -> str:
        """The arrow in words."""
        return {
            "higher": "higher is better",
            "lower": "lower is better",
            "nearer": f"nearer to {self.target:.0%} is better",
            None: "",
        }[self.better]

    def loss(self, value: float) -> float:
        """A number that is smaller for a better value; infinite where no value is better or the value is not a number."""
        if self.better is None or math.isnan(value):
            return math.inf
        return {"higher": -value, "lower": value, "nearer": abs(value - self.target)}[self.better]


# The order is that of every table and menu.
_KNOWN = [
    Metric("accuracy", "Accuracy", "higher", percent=True),
    Metric("nll", "NLL", "lower"),
    Metric("ece", "ECE", "lower"),
    Metric("brier", "Brier", "lower"),
    Metric("rmse", "RMSE", "lower"),
    Metric("lpd", "LPD", "higher"),
    Metric("crps", "CRPS", "lower"),
    Metric("coverage95", "Coverage of 95 %", "nearer", percent=True, target=0.95),
    Metric("auroc", "AUROC", "higher"),
    Metric("aucpr", "AUCPR", "higher"),
    Metric("fpr95", "FPR95", "lower", percent=True),
    Metric("top5", "Top-5 accuracy", "higher", percent=True),
    Metric("aurc", "AURC", "lower"),
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
]
_TABLE = {known.name: known for known in _KNOWN}
HEADLINE = ("accuracy", "nll", "ece", "brier", "rmse", "lpd", "crps", "coverage95", "auroc", "aucpr", "fpr95")


def printable(text: str) -> str:
    """Text without line breaks and control signs: they garble tables, and Vega's expressions cannot quote all of them.

    Example:
        >>> printable("two\\nlines")
        'two lines'
    """
    return "".join(sign if sign.isprintable() else " " for sign in text).strip() or "unnamed"


def metric(name: str) -> Metric:
    """The metric of that name; a name this package does not know has no direction and is its own label.

    Example:
        >>> metric("nll").better, metric("my_score").better
        ('lower', None)
    """
    return _TABLE.get(name) or Metric(name, printable(name))


def ordered(names: Iterable[str]) -> list[str]:
    """Known metrics first, in the order of the tables, then the others by name.

    Example:
        >>> ordered(["zeta", "ece", "accuracy", "alpha"])
        ['accuracy', 'ece', 'alpha', 'zeta']
    """
    place = {name: i for i, name in enumerate(_TABLE)}
    return sorted(set(names), key=lambda name: (place.get(name, len(place)), name))


def best(name: str, values: Sequence[float]) -> set[int]:
    """Where the best values stand; several on a tie, none where no direction is better or fewer than two values compete.

    Example:
        >>> best("nll", [0.3, 0.2, float("nan")])
        {1}
    """
    losses = [metric(name).loss(value) for value in values]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(values) < 2 or not finite:
        return set()
    return {i for i, loss in enumerate(losses) if loss == min(finite)}


def decimals(name: str, values: Iterable[float]) -> int:
    """Decimals for a column of a metric's values, by the largest of them.

    Example:
        >>> decimals("accuracy", [0.9]), decimals("nll", [0.2, 0.04]), decimals("rmse", [48.0])
        (2, 3, 2)
    """
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return (
        2
        if metric(name).percent
        else next((places for line, places in ((1000, 0), (100, 1), (10, 2), (0.1, 3)) if size >= line), 4)
    )


def shown(name: str, value: float, places: int | None = None) -> str:
    """A value as text, without a percent sign; what would be written as zero without being zero is told to be small.

    Example:
        >>> shown("accuracy", 0.9613), shown("nll", 0.1234), shown("nll", 0.00001, 3)
        ('96.13', '0.123', '<0.001')
    """
    if not math.isfinite(value):
        return str(value)
    places = decimals(name, [value]) if places is None else places
    amount = value * 100 if metric(name).percent else value
    if amount and abs(amount) < 0.5 * 10**-places:
        return f"{'<' if amount > 0 else '>-'}{10**-places:.{places}f}"
    return f"{amount:.{places}f}"
