"""A Prediction as a container of rows: slices, devices, joins, tables for notebooks.

Sizes: S draws, K members, N rows, C classes.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimbayes.train.targets import (
    can_read_values,
    check_labels,
    check_real,
    is_floating,
)

if TYPE_CHECKING:
    from slimbayes.prediction.prediction import Prediction

_DIMS = {
    "aleatoric": 0,
    "epistemic": 0,
    "distance": 0,
    "by_member": 1,
    "by_draw": 1,
    "noise": 1,
}  # where rows lie
_SHOWN, _COLUMNS = 8, 12  # rows and columns of a table in a notebook


class Views:
    """Methods of a Prediction, and of nothing else, that treat it as a container of rows or show it."""

    def __len__(self: Any) -> int:
        """N."""
        return len(self.aleatoric)

    def __getitem__(
        self: Any, rows: int | slice | Sequence[int] | Tensor
    ) -> Prediction:
        """Some of the rows, by number, slice, list or mask; a single number gives a prediction of one row.

        Example:
            >>> import slimbayes as sb
            >>> p = sb.Prediction.from_outputs(torch.tensor([[-1.0, 0.0, 1.0]]), "gaussian")
            >>> p[1:].mean, p[-1].mean, p[p.mean < 0].mean
            (tensor([0., 1.]), tensor([1.]), tensor([-1.]))
        """
        size = len(self)
        if isinstance(rows, int):
            if not -size <= rows < size:  # the end of iteration, too
                raise IndexError(f"row {rows} of a prediction of {size} rows")
            rows = slice(rows % size, rows % size + 1)
        chosen = (
            torch.arange(size)[rows]
            if isinstance(rows, slice)
            else torch.as_tensor(rows).cpu()
        )
        index = torch.arange(size)[chosen if chosen.numel() else chosen.long()]
        return self._each(lambda t, dim: t.index_select(dim, index.to(t.device)))

    def to(self: Any, target: torch.device | str | torch.dtype) -> Prediction:
        """The same on another device, or in another precision."""
        moved = self._each(lambda t, dim: t.to(target))
        return (
            moved
            if moved.weights is None
            else replace(moved, weights=moved.weights.to(target))
        )

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """Predictions of several batches of rows as one.

        Example:
            >>> import slimbayes as sb
            >>> one = sb.Prediction.from_outputs(torch.zeros(3, 2, 4))
            >>> sb.Prediction.joined([one, one]).probs.shape
            torch.Size([4, 4])
        """
        if not parts:
            raise ValueError(
                "At least one Prediction is needed, got none: predict was given no batch."
            )
        first = parts[0]

        def shared_weights(part: Prediction) -> list[float] | None:
            return (
                None
                if part.weights is None or "weights" in part._row_dims
                else part.weights.tolist()
            )

        if any(shared_weights(p) != shared_weights(first) for p in parts):
            raise ValueError(
                "Predictions to join need the same weights of members, or weights for each row, in all."
            )
        facts = [
            f"{p.likelihood} with {p.count} draws of {len(p.by_member)} members"
            for p in parts
        ]
        if len(set(facts)) > 1 or any(p._row_dims != first._row_dims for p in parts):
            told = ", ".join(sorted(facts))
            raise ValueError(
                f"Predictions to join need one likelihood, draws and fields alike; got {told}."
            )
        rows = {
            name: torch.cat([getattr(p, name) for p in parts], dim)
            for name, dim in first._row_dims.items()
        }
        return replace(first, **rows)  # type: ignore[arg-type]

    @property
    def _row_dims(self: Any) -> dict[str, int]:
        """The fields that have rows, and the dimension these lie in; weights have, where they differ between rows."""
        by_row = self.weights is not None and self.weights.dim() == 2
        dims = _DIMS | {"weights": 1} if by_row else _DIMS
        return {
            name: dim for name, dim in dims.items() if getattr(self, name) is not None
        }

    def _each(self: Any, change: Callable[[Tensor, int], Tensor]) -> Prediction:
        """Every tensor with rows changed, given where they lie."""
        return replace(
            self,
            **{
                name: change(getattr(self, name), dim)
                for name, dim in self._row_dims.items()
            },
        )

    def check_target(self: Any, target: Tensor) -> Tensor:
        """The target, refused unless it fits; a binary one (N, 1), as in training, loses its last dimension."""
        if is_floating(target) and not self.discrete and can_read_values(target):
            check_real(target)
        needed = (
            self.by_member.shape[1:-1] if self.discrete else self.by_member.shape[1:]
        )
        if self.likelihood == "bernoulli" and target.shape == (*needed, 1):
            target = target.squeeze(-1)
        if target.shape != needed:
            raise ValueError(
                f"A target of shape {tuple(needed)} is needed for this prediction, got {tuple(target.shape)}."
            )
        if self.discrete:
            check_labels(
                target,
                self.by_member.shape[-1] if self.likelihood == "categorical" else None,
            )
        return target

    def to_numpy(self: Any) -> dict[str, Any]:
        """Every summary as numpy arrays: mean, member_mean, total and its parts; distance and samples if there."""
        names = ["mean", "member_mean", "total", "aleatoric", "epistemic"]
        names += [] if self.distance is None else ["distance"]
        names += [] if self.by_draw is None else ["samples"]
        return {name: _array(getattr(self, name)) for name in names}

    def to_pandas(self: Any) -> Any:
        """One line for each row: label, confidence and probabilities, or mean and std; uncertainties; distance.

        Needs pandas, which slimbayes does not bring along.
        """
        try:
            from pandas import DataFrame  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas.") from error
        return DataFrame(
            {name: _array(column) for name, column in self._columns().items()}
        )

    def _columns(self: Any) -> dict[str, Tensor]:
        """Columns (N,) of a table."""
        if self.aleatoric.dim() > 2 or (self.aleatoric.dim() == 2 and self.discrete):
            shape = tuple(self.aleatoric.shape)
            raise ValueError(
                f"A table needs one prediction, or one line of them, for each row; got shape {shape}."
            )
        if not self.discrete:
            found = {
                "mean": self.mean,
                "std": self.std,
                "aleatoric": self.aleatoric,
                "epistemic": self.epistemic,
            }
            if self.aleatoric.dim() == 2:
                found = {
                    f"{name}_{t}": c[:, t]
                    for t in range(self.aleatoric.shape[1])
                    for name, c in found.items()
                }
        else:
            found = {
                "label": self.label,
                "confidence": self.confidence,
                "entropy": self.total,
            }
            found |= {"aleatoric": self.aleatoric, "epistemic": self.epistemic}
        found |= {} if self.distance is None else {"distance": self.distance}
        if self.discrete:
            found |= {
                f"p_{c}": p for c, p in enumerate(self.log_probs.exp().unbind(-1))
            }
        return found

    def __repr__(self: Any) -> str:
        """One line: what is predicted, from what, and how uncertain it is on average."""
        members, shape = len(self.by_member), list(self.aleatoric.shape)
        what = (
            f"{self.by_member.shape[-1]} classes" if self.discrete else "real targets"
        )
        rows = " x ".join(
            [f"{shape[0]} row{'s' * (shape[0] != 1)}", *map(str, shape[1:])]
        )
        unit = "entropy" if self.discrete else "variance"
        total = self.aleatoric + self.epistemic
        means = [
            f"{float(t.double().mean()):.3g}"
            for t in (total, self.aleatoric, self.epistemic)
        ]
        told = f"{unit} {means[0]} = {means[1]} aleatoric + {means[2]} epistemic"
        away = (
            ""
            if self.distance is None
            else f", distance {float(self.distance.mean()):.2g}"
        )
        draws = f"{self.count} draw{'s' * (self.count > 1)} of {members} member{'s' * (members > 1)}"
        return f"Prediction({rows}, {what} ({self.likelihood}), {draws}, mean {told}{away})"

    def _repr_html_(self: Any) -> str:
        """A short table for notebooks."""
        try:
            columns = self[:_SHOWN]._columns()
        except ValueError:
            return f"<code>{html.escape(repr(self))}</code>"
        columns = dict(list(columns.items())[:_COLUMNS])
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *columns))
        lines = []
        for row in range(min(_SHOWN, len(self))):
            cells = "".join(
                f"<td>{_short(float(c[row]))}</td>" for c in columns.values()
            )
            lines.append(f"<tr><th>{row}</th>{cells}</tr>")
        rest = len(self) - _SHOWN
        more = (
            f"<tr><td colspan={len(columns) + 1}>and {rest} more</td></tr>"
            if rest > 0
            else ""
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}{more}</tbody></table>"
        return f"<div><code>{html.escape(repr(self))}</code>{table}</div>"


def _array(values: Tensor) -> Any:
    """As a numpy array, of which there are none in bfloat16."""
    return (
        (values.float() if values.dtype == torch.bfloat16 else values)
        .detach()
        .cpu()
        .numpy()
    )


def _short(value: float) -> str:
    """A number in a few characters."""
    small = value != 0 and not 1e-3 <= abs(value) < 1e5
    return (
        f"{value:.0e}"
        if small
        else f"{value:.0f}"
        if value.is_integer()
        else f"{value:.3f}"
    )
