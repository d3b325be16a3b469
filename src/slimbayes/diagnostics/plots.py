"""plot_scales and plot_spectrum: the k-tied paper's figures for a model of your own. matplotlib is imported only here, on call.

Figures are made without pyplot: no window opens, none stays open, and `figure.savefig(path)` writes one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.low_rank import low_rank
from slimbayes.diagnostics.sites import GaussianSite, gaussian_sites
from slimbayes.diagnostics.spectra import Of, SiteSpectrum, spectrum
from slimbayes.errors import did_you_mean

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
    figure_class = _figure_class("plot_scales")
    site = _find(gaussian_sites(model), layer)
    maps = _maps(site.scales().cpu())
    figure: Figure = figure_class(figsize=(1.4 + 2.9 * len(maps), 3.6), layout="constrained")
    axes: Any = figure.subplots(1, len(maps), sharex=True, sharey=True, squeeze=False)[0]
    low, high = _colour_range(maps[0][1])
    for axis, (title, matrix) in zip(axes, maps, strict=True):
        smooth = (
            "nearest" if max(matrix.shape) <= 500 else "auto"
        )  # large maps are averaged down, small ones not blurred
        image = axis.imshow(matrix.numpy(), aspect="auto", cmap="viridis", vmin=low, vmax=high, interpolation=smooth)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("outputs")
    axes[0].set_ylabel("inputs" if len(site.posterior.site.shape) == 2 else "inputs x kernel")
    figure.colorbar(image, ax=list(axes), label="standard deviation", extend="both", pad=0.01, aspect=30)
    figure.suptitle(f"{site.name}: posterior standard deviations", fontsize=11)
    return figure


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
    figure_class = _figure_class("plot_spectrum")
    sites = spectrum(model, include, exclude).sites
    columns = min(len(sites), 4)
    rows = math.ceil(len(sites) / columns)
    figure: Figure = figure_class(figsize=(1.0 + 2.9 * columns, 0.7 + 2.5 * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, site in zip(panels.flat, sites, strict=False):
        _draw_spectrum(panel, site, count)
    for panel in list(panels.flat)[len(sites) :]:
        panel.remove()
    for row in panels:
        row[0].set_ylabel("fraction of variance")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=10)
    return figure


def _draw_spectrum(panel: Any, site: SiteSpectrum, count: int) -> None:
    shown = min(count, *site.shape)
    for line, (of, label, colour, marker) in enumerate(_LINES):
        values = site.explained(of)
        panel.plot(
            range(1, shown + 1), values[:shown], color=colour, marker=marker, markersize=4, linewidth=1.4, label=label
        )
        note = f"first two: {sum(values[:2]):.2%}"
        panel.text(
            0.97, 0.93 - 0.11 * line, note, transform=panel.transAxes, color=colour, fontsize=9, ha="right", va="top"
        )
    panel.set_title(f"{site.name}  ({site.shape[0]} x {site.shape[1]})", fontsize=10)
    panel.set_xlabel("singular value")
    panel.set_xticks(range(1, shown + 1) if shown <= 10 else range(1, shown + 1, math.ceil(shown / 10)))
    panel.set_ylim(-0.03, 1.03)
    panel.grid(axis="y", linewidth=0.5, alpha=0.4)
    panel.spines[["top", "right"]].set_visible(False)


def _maps(scales: Tensor) -> list[tuple[str, Tensor]]:
    """The matrix and its approximations, each with its title."""
    squares = torch.linalg.svdvals(scales).square()
    maps = [("trained", scales)]
    for rank in (1, 2)[: min(scales.shape)]:
        share = float(squares[:rank].sum() / squares.sum())
        maps.append((f"rank {rank}: {share:.2%} explained", low_rank(scales, rank)))
    return maps


def _colour_range(matrix: Tensor) -> tuple[float, float]:
    """All but the most extreme half percent at each end, which would leave one colour to all the rest."""
    ordered = matrix.flatten().sort().values
    cut = len(ordered) // 200
    return float(ordered[cut]), float(ordered[-1 - cut])


def _find(sites: list[GaussianSite], name: str) -> GaussianSite:
    found = [s for s in sites if s.name == name] or [s for s in sites if s.layer_name == name]
    if len(found) != 1:
        problem = "has several weights; name one" if found else "has no Gaussian posterior or is not there"
        raise ValueError(f"layer={name!r} {problem}{did_you_mean(name, [s.name for s in found or sites])}")
    return found[0]


def _figure_class(caller: str) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib, which slimbayes does not bring along: pip install matplotlib."
        ) from error
    return Figure
