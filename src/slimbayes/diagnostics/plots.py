"""plot_scales and plot_spectrum: the k-tied paper's figures for a model of your own. matplotlib is imported on call.

Figures are made without pyplot: no window opens, none stays open, and `figure.savefig(path)` writes one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.diagnostics.spectra import Of, SiteSpectrum, low_rank, spectrum
from slimbayes.errors import did_you_mean
from slimbayes.prediction.figures import bare, empty_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES: tuple[tuple[Of, str, str, str], ...] = (
    ("means", "posterior means", "#0072B2", "o"),
    ("scales", "posterior standard deviations", "#D55E00", "s"),
)


@torch.no_grad()
def plot_scales(model: nn.Module, layer: str) -> Figure:
    """Heat maps of a layer's standard deviations and of their rank-1 and rank-2 approximations (the paper's Figure 4).

    All maps share one colour scale; each approximation's title says how much of the variance it explains.

    Args:
        model: a model converted with `MeanField`, `KTied` or `MatrixNormal`.
        layer: the layer's name, or the weight's where a layer has several.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(30, 20)), sb.MeanField())
        >>> len(plot_scales(net, "0").axes)  # three maps and the colour bar
        4
    """
    sites = gaussian_sites(model)
    found = [s for s in sites if s.name == layer] or [s for s in sites if s.layer_name == layer]
    if len(found) != 1:
        problem = "has several weights; name one" if found else "has no Gaussian posterior or is not there"
        raise ValueError(f"layer={layer!r} {problem}{did_you_mean(layer, [s.name for s in found or sites])}")
    site, scales = found[0], found[0].scales().cpu()
    maps = _maps(scales)
    figure = empty_figure("plot_scales", 1.4 + 2.9 * len(maps), 3.6)
    axes: Any = figure.subplots(1, len(maps), sharex=True, sharey=True, squeeze=False)[0]
    # The most extreme half percent at each end would leave one colour to all the rest.
    ordered, cut = scales.flatten().sort().values, scales.numel() // 200
    look = {"aspect": "auto", "cmap": "viridis", "vmin": float(ordered[cut]), "vmax": float(ordered[-1 - cut])}
    smooth = "nearest" if max(scales.shape) <= 500 else "auto"  # large maps are averaged down, small ones not blurred
    for axis, (title, matrix) in zip(axes, maps, strict=True):
        image = axis.imshow(matrix.numpy(), interpolation=smooth, **look)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("outputs")
    axes[0].set_ylabel("inputs" if len(site.posterior.site.shape) == 2 else "inputs x kernel")
    figure.colorbar(image, ax=list(axes), label="standard deviation", extend="both", pad=0.01, aspect=30)
    figure.suptitle(f"{site.name}: posterior standard deviations", fontsize=11)
    return figure


def _maps(scales: Tensor) -> list[tuple[str, Tensor]]:
    """The matrix and its approximations, each with its title."""
    squares = torch.linalg.svdvals(scales).square()
    maps = [("trained", scales)]
    for rank in (1, 2)[: min(scales.shape)]:
        share = float(squares[:rank].sum() / squares.sum())
        maps.append((f"rank {rank}: {share:.2%} explained", low_rank(scales, rank)))
    return maps


@torch.no_grad()
def plot_spectrum(model: nn.Module, count: int = 10, include: Selection = None, exclude: Selection = None) -> Figure:
    """Variance explained by each singular value, means against standard deviations (the paper's Figures 3, 5 and 12).

    Args:
        model: a model converted with `MeanField`, `KTied` or `MatrixNormal`.
        count: how many of the largest singular values to show.
        include, exclude: layers to show, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), sb.MeanField())
        >>> len(plot_spectrum(net).axes)  # one panel for each weight
        2
    """
    sites = spectrum(model, include, exclude).sites
    columns = min(len(sites), 4)
    rows = math.ceil(len(sites) / columns)
    figure = empty_figure("plot_spectrum", 1.0 + 2.9 * columns, 0.7 + 2.5 * rows)
    panels: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, site in zip(panels.flat, sites, strict=False):
        _draw_spectrum(panel, site, min(count, *site.shape))
    for panel in list(panels.flat)[len(sites) :]:
        panel.remove()
    for row in panels:
        row[0].set_ylabel("fraction of variance")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=10)
    return figure


def _draw_spectrum(panel: Any, site: SiteSpectrum, shown: int) -> None:
    ranks = range(1, shown + 1)
    for line, (of, label, colour, marker) in enumerate(_LINES):
        values = site.explained(of)
        panel.plot(ranks, values[:shown], color=colour, marker=marker, markersize=4, linewidth=1.4, label=label)
        place = {"transform": panel.transAxes, "ha": "right", "va": "top"}
        panel.text(0.97, 0.93 - 0.11 * line, f"first two: {sum(values[:2]):.2%}", color=colour, fontsize=9, **place)
    panel.set_title(f"{site.name}  ({site.shape[0]} x {site.shape[1]})", fontsize=10)
    panel.set_xlabel("singular value")
    panel.set_xticks(ranks[:: math.ceil(shown / 10)])
    panel.set_ylim(-0.03, 1.03)
    bare(panel)
