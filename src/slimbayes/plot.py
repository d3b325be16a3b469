"""slimbayes.plot: pictures of predictions and posteriors; each returns a matplotlib Figure.

    import slimbayes as sb

    sb.plot.reliability(prediction, target).savefig("reliability.png")

Figures are made without pyplot, as those of `slimbayes.diagnostics`.

Sizes: N rows, K members, T real targets of a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slimbayes.diagnostics.spectra import plot_scales as plot_scales
from slimbayes.diagnostics.spectra import plot_spectrum as plot_spectrum
from slimbayes.engine.passes import posteriors_of
from slimbayes.metrics.functional import calibration, surest_first
from slimbayes.prediction.averages import mixture_below
from slimbayes.prediction.panels import BLUE, GREY, ORANGE, empty_figure, remove_box
from slimbayes.prediction.panels import bands as bands
from slimbayes.prediction.panels import uncertainties as uncertainties
from slimbayes.prediction.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 15


def reliability(prediction: Prediction, target: Tensor, bins: int = _BINS) -> Figure:
    """Is confidence earned? Above: how often predictions come true; below: how many there are.

    Classes: accuracy against the confidence in each bin. Real targets: the share of targets in central intervals
    against their level, and the histogram of F(y), which is flat if all is well.

    Shape: target as in `Prediction.log_prob`.

    Example:
        >>> p = Prediction.from_outputs(torch.randn(4, 200, 3))
        >>> len(reliability(p, torch.randint(3, (200,))).axes)
        2
    """
    figure = empty_figure("reliability", 4.4, 4.8)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot(
        [0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="calibrated"
    )
    if prediction.discrete:
        found = calibration(prediction, target, bins, drop=0)
        full = found.count > 0
        middles, accuracy = (
            ((found.edges[1:] + found.edges[:-1]) / 2)[full],
            found.accuracy[full],
        )
        upper.bar(
            middles, accuracy, 0.92 / bins, color=BLUE, alpha=0.75, label="accuracy"
        )
        upper.plot(
            found.confidence[full],
            accuracy,
            "o",
            color=ORANGE,
            markersize=4,
            label="mean confidence",
        )
        lower.bar(middles, found.count[full], 0.92 / bins, color=GREY, alpha=0.75)
        title, across, up = f"ECE {found.ece:.3f}", "confidence", "accuracy"
    else:
        below = _distribution_function(prediction, target).flatten()
        levels = torch.linspace(0, 1, 101, dtype=torch.float64)
        observed = torch.stack(
            [((below - 0.5).abs() <= level / 2).double().mean() for level in levels]
        )
        upper.plot(levels, observed, color=BLUE, linewidth=1.8, label="targets inside")
        lower.hist(below, bins=bins, range=(0, 1), color=GREY, alpha=0.75)
        gap = float((observed - levels).abs().mean())
        title, across, up = (
            f"mean gap {gap:.3f}",
            "level of a central interval; below: F(y)",
            "share inside",
        )
    upper.set_title(title, fontsize=10)
    upper.set(ylabel=up, ylim=(0, 1.02))
    upper.legend(frameon=False, fontsize=9, loc="upper left")
    lower.set(xlabel=across, ylabel="rows")
    for panel in (upper, lower):
        remove_box(panel)
    return figure


def _distribution_function(prediction: Prediction, target: Tensor) -> Tensor:
    """F(y) of each target under the predictive mixture of normals, (N, ...), in float64."""
    prediction.log_prob(
        target
    )  # refuses targets that do not fit, and predictions without noise
    assert prediction.noise is not None
    values, scale = prediction.samples.double(), prediction.noise.double().sqrt()
    return mixture_below(target.double(), values, scale, prediction.weights).cpu()


def risk_coverage(prediction: Prediction, target: Tensor) -> Figure:
    """The error that remains if only the surest rows are answered: of classes their share, of real targets the RMSE.

    Rows are ordered by confidence, real targets by total uncertainty, equally sure ones in all orders at once; the
    dashed line orders all at random.

    Shape: target (N,), or (N, T) of real targets.

    Example:
        >>> p = Prediction.from_outputs(torch.randn(4, 50, 3))
        >>> len(risk_coverage(p, torch.randint(3, (50,))).axes)
        1
    """
    target = prediction.check_target(target)
    if prediction.discrete:
        loss, sure = (
            (prediction.label != target).flatten().double(),
            prediction.confidence.flatten(),
        )
    else:  # of a row's targets together
        loss = (
            (target.double() - prediction.mean.double())
            .square()
            .reshape(len(target), -1)
            .mean(-1)
        )
        sure = -prediction.total.reshape(len(target), -1).sum(-1)
    loss = surest_first(sure.cpu(), loss.cpu())[1]
    count = torch.arange(1, len(loss) + 1)
    risk = loss.cumsum(0) / count
    risk, of = (risk, "error rate") if prediction.discrete else (risk.sqrt(), "RMSE")
    figure = empty_figure("risk_coverage", 4.8, 3.6)
    panel: Any = figure.subplots()
    panel.plot(
        count / len(loss), risk, color=BLUE, linewidth=1.8, label="surest rows first"
    )
    panel.axhline(
        float(risk[-1]), color=GREY, linewidth=1, linestyle="--", label="in any order"
    )
    panel.set(xlabel="coverage: share of rows answered", ylabel=of, xlim=(0, 1.02))
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=9)
    remove_box(panel)
    return figure


def disagreement(prediction: Prediction) -> Figure:
    """How much members differ, pair by pair: share of rows with different labels, or RMS difference of their means.

    Example:
        >>> p = Prediction.from_outputs(torch.randn(6, 50, 3), members=3)
        >>> len(disagreement(p).axes)  # the map and its colour bar
        2
    """
    members = prediction.by_member.detach()
    if len(members) < 2:
        raise ValueError(
            "Members can disagree if there are at least two, got 1: take a method with members, as Rank1(members=4)."
        )
    if prediction.discrete:
        labels, name = (
            members.argmax(-1).flatten(1),
            "share of rows with different labels",
        )
        apart = torch.stack([(labels != row).double().mean(1) for row in labels])
    else:
        values, name = members.double().flatten(1), "RMS difference of means"
        apart = torch.stack([(values - row).square().mean(1).sqrt() for row in values])
    figure = empty_figure("disagreement", 4.6, 3.8)
    panel: Any = figure.subplots()
    image = panel.imshow(apart.cpu(), cmap="viridis", vmin=0)
    if len(apart) <= 10:
        middle = float(apart.max()) / 2
        for i, row in enumerate(apart.tolist()):
            for j, value in enumerate(row):
                colour = "black" if value > middle else "white"
                panel.text(
                    j,
                    i,
                    f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=colour,
                )
    ticks = range(len(apart))[:: math.ceil(len(apart) / 10)]
    panel.set(xticks=ticks, yticks=ticks, xlabel="member", ylabel="member")
    figure.colorbar(image, ax=panel, label=name)
    return figure


@torch.no_grad()
def posterior_scales(model: nn.Module, most: int = 40) -> Figure:
    """Posterior standard deviations over those of the prior, layer by layer: near one a layer has learned nothing.

    Boxes hold half of a layer's weights or factors, whiskers all but two percent.

    Args:
        model: a converted model whose posteriors have scales: `Rank1`, `MeanField`, `KTied`, `MatrixNormal`.
        most: at most so many layers are shown, the first ones.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), sb.MeanField())
        >>> len(posterior_scales(net).axes)
        1
    """
    boxes = _ratios(model)
    if not boxes:
        raise ValueError(
            "posterior_scales found no posterior with scales and a prior that has one, too."
        )
    names = list(boxes)[:most]
    figure = empty_figure("posterior_scales", 6.4, 1.1 + 0.3 * len(names))
    panel: Any = figure.subplots()
    look = {
        "orientation": "horizontal",
        "whis": (1, 99),
        "showfliers": False,
        "patch_artist": True,
        "widths": 0.6,
    }
    shapes = panel.boxplot([boxes[name].numpy() for name in reversed(names)], **look)
    for box in shapes["boxes"]:
        box.set(facecolor=BLUE, alpha=0.5, linewidth=0.8)
    for line in shapes["medians"]:
        line.set(color=ORANGE, linewidth=1.6)
    panel.set_yticks(range(1, len(names) + 1), list(reversed(names)), fontsize=9)
    panel.set_xscale("log")
    panel.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    left_out = "" if len(boxes) <= most else f"; {len(boxes) - most} more are not shown"
    panel.set_xlabel(f"posterior scale / prior scale (dashed: the prior{left_out})")
    remove_box(panel, "x")
    return figure


def _ratios(model: nn.Module) -> dict[str, Tensor]:
    """Scales over the prior's of each posterior that has any, by name."""
    found: dict[str, Tensor] = {}
    for posterior in posteriors_of(model):
        ratios = posterior.against_prior()
        if ratios:
            found[str(posterior.name)] = torch.cat(
                [r.flatten().double().cpu() for _, r in ratios]
            )
    return found
