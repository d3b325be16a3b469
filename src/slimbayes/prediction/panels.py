"""Pictures of one Prediction: bands of real targets, uncertainties of classes. matplotlib is imported on call.

Figures are made without pyplot: no window opens, none stays open, notebooks show what a cell ends with, and
`figure.savefig(path)` writes one.

Sizes: N rows.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from slimbayes.prediction.prediction import Prediction

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
_PANELS = 4


def empty_figure(caller: str, width: float, height: float) -> Figure:
    """A figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        advice = "which slimbayes does not bring along: pip install matplotlib"
        raise ImportError(f"{caller} needs matplotlib, {advice}.") from error

    class ShownFigure(Figure):
        """matplotlib's own figures are shown in notebooks only once pyplot is there."""

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    return ShownFigure(figsize=(width, height), layout="constrained")


def remove_box(panel: Any, axis: str = "y") -> None:
    """Thin lines across an axis and no box."""
    panel.grid(axis=axis, linewidth=0.5, alpha=0.4)
    panel.spines[["top", "right"]].set_visible(False)


def bands(
    prediction: Prediction, x: Tensor | None = None, target: Tensor | None = None
) -> Figure:
    """Mean, 50 % and 90 % intervals of real targets, with the targets as dots; a panel for each of up to four.

    Without `x` rows are ordered by their mean.

    Shape: x (N,) or (N, 1); target as `prediction.mean`, (N,) or (N, T).

    Example:
        >>> import slimbayes as sb
        >>> p = sb.Prediction.from_outputs(torch.randn(8, 20).cumsum(1), "gaussian", likelihood_std=0.1)
        >>> len(bands(p, torch.linspace(0, 1, 20)).axes)
        1
    """
    prediction._need(discrete=False)
    mean, rows = prediction.mean, len(prediction)
    if (
        mean.dim() > 2
        or (x is not None and x.numel() != rows)
        or (target is not None and target.shape != mean.shape)
    ):
        got = [None if t is None else tuple(t.shape) for t in (x, target)]
        raise ValueError(
            f"bands needs predictions (N,) or (N, T), x (N,) and targets like them; got predictions of shape "
            f"{tuple(mean.shape)}, x and target of {got[0]} and {got[1]}."
        )
    outer, inner = prediction.interval(0.9), prediction.interval(0.5)
    lines = torch.stack([mean, *inner, *outer]).reshape(5, rows, -1).cpu().double()
    dots = None if target is None else target.reshape(rows, -1).cpu().double()
    shown = min(lines.shape[2], _PANELS)
    figure = empty_figure("bands", 1.5 + 4.2 * shown, 3.6)
    panels: Any = figure.subplots(1, shown, squeeze=False)[0]
    for t, panel in enumerate(panels):
        order = lines[0, :, t].argsort() if x is None else x.flatten().cpu().argsort()
        at = torch.arange(rows) if x is None else x.flatten().cpu()[order]
        middle, low, high, lowest, highest = lines[:, order, t]
        panel.fill_between(
            at,
            lowest,
            highest,
            color=BLUE,
            alpha=0.18,
            linewidth=0,
            label="90 % interval",
        )
        panel.fill_between(
            at, low, high, color=BLUE, alpha=0.32, linewidth=0, label="50 % interval"
        )
        panel.plot(at, middle, color=BLUE, linewidth=1.6, label="mean")
        if dots is not None:
            panel.plot(
                at,
                dots[order, t],
                "o",
                color=ORANGE,
                markersize=3,
                alpha=0.8,
                label="target",
            )
        panel.set_xlabel("rows, ordered by mean" if x is None else "x")
        panel.set_title("" if shown == 1 else f"target {t}", fontsize=10)
        remove_box(panel)
    legend_above(figure, panels[0])
    return figure


def uncertainties(prediction: Prediction, target: Tensor | None = None) -> Figure:
    """Histogram of the predictive entropy; with targets, of rows that are right and of those that are wrong.

    Shape: target (N, ...) class indices.

    Example:
        >>> import slimbayes as sb
        >>> p = sb.Prediction.from_outputs(torch.randn(8, 50, 3))
        >>> len(uncertainties(p, torch.randint(3, (50,))).axes)
        1
    """
    entropy = prediction.entropy.flatten().cpu().double()
    groups = [("all rows", entropy, GREY)]
    if target is not None:
        target = prediction.check_target(target)
        right = (prediction.label == target).flatten().cpu()
        groups = [("right", entropy[right], BLUE), ("wrong", entropy[~right], ORANGE)]
    figure = empty_figure("uncertainties", 5.6, 3.4)
    panel: Any = figure.subplots()
    top = max(float(entropy.max()), 1e-3)
    for name, values, colour in groups:
        label = (
            f"{name} ({len(values)}, mean {float(values.mean()):.2f})"
            if len(values)
            else f"{name} (0)"
        )
        share = torch.full_like(
            values, 1 / max(len(values), 1)
        )  # few wrong rows must show beside many right ones
        panel.hist(
            values,
            bins=24,
            range=(0, top),
            weights=share,
            color=colour,
            alpha=0.55,
            label=label,
        )
    panel.set_xlabel("predictive entropy, nats")
    panel.set_ylabel("share of rows" if target is None else "share of each group")
    remove_box(panel)
    legend_above(figure, panel)
    return figure


def legend_above(figure: Figure, panel: Any) -> None:
    """One key, that of a panel, for a whole figure."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=len(labels),
        frameon=False,
        fontsize=9,
    )
