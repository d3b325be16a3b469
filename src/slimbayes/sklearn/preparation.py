"""A table's columns and scales as they were learnt, in a form that JSON holds: what a run needs to read other rows.

Sizes: N rows, d columns of numbers, c of categories, w numbers after scaling (missing ones add columns that say where).
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OrdinalEncoder, QuantileTransformer, StandardScaler

from slimbayes.sklearn.columns import UNKNOWN, Scaling, Table, scaler


@dataclass
class Preparation:
    """What rows of a table become before a network sees them.

    Example:
        >>> table = Table([1], "refuse")
        >>> read = table.fit(np.array([[1.0, "red"], [3.0, "blue"]], dtype=object))
        >>> found = Preparation.learnt(table, "standard", read)
        >>> found(read).tolist(), found.width, table.sizes
        ([[-1.0, 2.0], [1.0, 1.0]], 1, (3,))
        >>> (Preparation.from_facts(found.facts())(read) == found(read)).all()
        np.True_
    """

    table: Table
    scaling: Scaling
    steps: Any  # a scikit-learn pipeline; None where no column holds numbers

    @classmethod
    def learnt(cls, table: Table, scaling: Scaling, read: np.ndarray, seed: int = 0) -> Self:
        """Learn scales from training rows (N, d + c), as `Table.read` gives them."""
        count = len(table.numbers)
        steps = scaler(scaling, table.missing, len(read), seed).fit(read[:, :count]) if count else None
        return cls(table, scaling, steps)

    @property
    def width(self) -> int:
        """Numbers of a row after scaling."""
        count = len(self.table.numbers)
        return self.steps.transform(np.zeros((1, count))).shape[1] if count else 0

    def __call__(self, read: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
        """Rows (N, d + c) of `Table.read` as the network takes them: (N, w + c)."""
        count = len(self.table.numbers)
        numbers = self.steps.transform(read[:, :count]) if count else read[:, :0]
        return np.concatenate([numbers, read[:, count:]], 1).astype(dtype)

    def facts(self) -> dict[str, Any]:
        """All that was learnt, as JSON holds it."""
        encoder, steps = self.table.encoder, {} if self.steps is None else self.steps.named_steps
        facts: dict[str, Any] = {
            "names": self.table.names, "missing": self.table.missing, "scaling": self.scaling,
            "categories": self.table.categories,
            "words": [] if encoder is None else [list(map(str, found)) for found in encoder.categories_],
        }  # fmt: skip
        if (one := steps.get("simpleimputer")) is not None:
            facts |= {"fill": one.statistics_.tolist(), "gaps": one.indicator_.features_.tolist()}
        if (one := steps.get("quantiletransformer")) is not None:
            facts |= {"quantiles": one.quantiles_.tolist()}
        if (one := steps.get("standardscaler")) is not None:
            facts |= {"mean": one.mean_.tolist(), "scale": one.scale_.tolist()}
        return facts

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """What `facts` wrote down. Steps are fitted to rows that give them their shapes, then get their numbers."""
        table = Table(facts["categories"], facts["missing"], list(facts["names"]), list(facts["categories"]))
        if words := [np.array(found, dtype=object) for found in facts["words"]]:
            encoder = OrdinalEncoder(categories=words, handle_unknown="use_encoded_value", unknown_value=UNKNOWN)
            table.encoder = encoder.fit(np.array([[found[0] for found in words]], dtype=object))
        count = len(table.numbers)
        if not count:
            return cls(table, facts["scaling"], None)
        quantiles = np.array(facts.get("quantiles", np.zeros((2, count))), dtype=np.float64)
        steps = scaler(facts["scaling"], table.missing, len(quantiles), 0)
        rows = np.zeros((2, count))
        if "fill" in facts:  # medians of themselves, and gaps where there were some
            rows[:] = facts["fill"]
            rows[1, facts["gaps"]] = np.nan
        for _, step in steps.steps:
            if isinstance(step, QuantileTransformer):
                step.set_params(n_quantiles=len(quantiles)).fit(quantiles)
                step.quantiles_ = quantiles
            else:
                step.fit(rows)
            if isinstance(step, StandardScaler):
                step.mean_, step.scale_ = np.array(facts["mean"]), np.array(facts["scale"])
                step.var_ = step.scale_**2
            assert not isinstance(step, SimpleImputer) or step.statistics_.tolist() == facts["fill"]
            rows = step.transform(rows)
        return cls(table, facts["scaling"], steps)
