"""spectrum: how much of the posterior means and of the standard deviations the first few singular values explain, and
the k-tied paper's figures of it. matplotlib is imported on call.

    explained_k = gamma_k^2 / sum_i gamma_i^2          gamma: singular values of the m x n matrix view, not centred

Trained mean-field posteriors have standard deviations of nearly rank one or two, while their means have not
(Swiatkowski et al. 2020, Figures 3, 5 and 12): where that holds, a k-tied posterior loses little.

Nothing is centred, so a matrix that hardly varies is of rank one to begin with: the first singular value explains 99 %
of independent scales that spread by 10 %. Look at how the rest falls with k, and at the ELBO after `truncate`, which
replaces trained standard deviations by matrices of low rank (section 2.4 and Table 2):

    sigma <- max(A_k, epsilon)          A_k: the k largest singular values' part of sigma, the nearest of rank k

Where this deviates: the paper cuts negative entries of A_k off at zero. A standard deviation of exactly zero makes the
KL infinite, so we cut at epsilon. For k = 1 nothing is cut, since the rank-1 part of a positive matrix is positive.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import Model
from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import gaussian_sites, layer_of, set_scales, weights_of
from slimbayes.errors import did_you_mean
from slimbayes.posteriors.configs.base import check_choice, check_count
from slimbayes.prediction.panels import (
    BLUE,
    ORANGE,
    empty_figure,
    legend_above,
    remove_box,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Of = Literal["means", "scales"]


@dataclass(frozen=True)
class SiteSpectrum:
    """Singular values of one weight matrix's posterior, largest first.

    Attributes:
        name: the layer's name and the weight's.
        shape: (m, n) of the matrix view.
        means, scales: singular values of the posterior means and of the posterior standard deviations.

    Example:
        >>> SiteSpectrum("fc", (2, 2), means=(1.0, 1.0), scales=(3.0, 1.0)).explained("scales")
        (0.9, 0.1)
    """

    name: str
    shape: tuple[int, int]
    means: tuple[float, ...]
    scales: tuple[float, ...]

    def explained(self, of: Of = "scales") -> tuple[float, ...]:
        """Fraction of the variance that each singular value explains; the fractions sum to one."""
        check_choice(self, "spectrum", of, ("means", "scales"))
        squares = [value**2 for value in (self.means if of == "means" else self.scales)]
        total = sum(squares) or 1.0  # a matrix of zeros has no variance to explain
        return tuple(square / total for square in squares)

    def first(self, count: int, of: Of = "scales") -> float:
        """Fraction of the variance that the first `count` singular values explain together."""
        return sum(self.explained(of)[:count])


@dataclass(frozen=True)
class Spectrum:
    """Spectra of all weight matrices with Gaussian posteriors. `str()` gives a table."""

    sites: tuple[SiteSpectrum, ...]

    def __getitem__(self, name: str) -> SiteSpectrum:
        """The spectrum of one weight, by its name or, if it is the layer's only one, the layer's."""
        sites = {s.name: s for s in self.sites}
        found = weights_of(name, sites)
        if len(found) != 1:
            raise KeyError(
                f"{name!r} names {len(found)} weights of this spectrum{did_you_mean(name, sites)}"
            )
        return sites[found[0]]

    def __str__(self) -> str:
        shapes = [f"{s.shape[0]} x {s.shape[1]}" for s in self.sites]
        name, shape = max(22, *(len(s.name) for s in self.sites)), max(map(len, shapes))
        lines = [
            f"{'variance':<{name}}  {'':>{shape}}  {'means':<25}  standard deviations"
        ]
        lines.append(
            f"{'explained by the first':<{name}}  {'':>{shape}}"
            + 2 * "       1        2        3".rjust(27)
        )
        lines.append("-" * len(lines[-1]))
        for s, size in zip(self.sites, shapes, strict=True):
            cells = "".join(
                f"{s.first(k, of):9.2%}"
                for of in ("means", "scales")
                for k in (1, 2, 3)
            )
            lines.append(f"{s.name:<{name}}  {size:>{shape}}{cells}")
        return "\n".join(lines)


@torch.no_grad()
def spectrum(
    model: nn.Module, include: Selection = None, exclude: Selection = None
) -> Spectrum:
    """Singular values of the means and of the standard deviations of every Gaussian posterior of a model.

    Args:
        model: converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        include, exclude: layers to look at, as in `bayesianize`.

    Shape: matrices are inputs by outputs; a convolution's is (inputs x kernel) by outputs, an LSTM's inputs by 4 units.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(20, 10)), sb.KTied(rank=1))
        >>> round(spectrum(net)["0"].first(1), 6), spectrum(net)["0"].first(1, "means") < 0.5
        (1.0, True)
    """
    found = []
    for name, p in gaussian_sites(model, include, exclude).items():
        means, scales = (
            tuple(torch.linalg.svdvals(matrix).tolist())
            for matrix in (p.means(), p.scales())
        )
        found.append(SiteSpectrum(name, p.site.matrix, means, scales))
    return Spectrum(tuple(found))


def truncate(
    model: Model,
    rank: int,
    epsilon: float = 1e-6,
    include: Selection = None,
    exclude: Selection = None,
) -> Model:
    """Approximate every matrix of posterior standard deviations by one of low rank, in place, and return the model.

    The means stay, and posteriors become mean-field ones. `truncation_errors` tells beforehand what is lost. Posteriors
    whose method changes get new parameters, so an optimizer must be made anew.

    Args:
        model: converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        rank: k, at most what the narrowest matrix can have: otherwise a ValueError, and the model is unchanged.
        epsilon: least standard deviation.
        include, exclude: layers to truncate, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> net = truncate(sb.bayesianize(nn.Sequential(nn.Linear(30, 20)), sb.MeanField()), rank=2)
        >>> round(spectrum(net)["0"].first(2), 6)
        1.0
    """
    sites = gaussian_sites(model, include, exclude)
    check_count("truncate", "rank", rank)
    if not epsilon > 0:
        raise ValueError(
            f"epsilon must be positive: a standard deviation of zero has an infinite KL; got {epsilon!r}."
        )
    for name, p in sites.items():
        m, n = p.site.matrix
        if rank > min(m, n):
            raise ValueError(
                f"{name}: rank={rank} is more than its {m} x {n} matrix of standard deviations can have, which is "
                f"{min(m, n)}. Choose a lower rank, or leave the layer as it is with exclude={layer_of(name)!r}."
            )
    set_scales(
        model,
        "truncate",
        {
            name: low_rank(p.scales(), rank).clamp_min(epsilon)
            for name, p in sites.items()
        },
    )
    return model


def truncation_errors(
    model: nn.Module,
    rank: int,
    epsilon: float = 1e-6,
    include: Selection = None,
    exclude: Selection = None,
) -> dict[str, float]:
    """Relative error |sigma' - sigma| / |sigma| of every weight that `truncate` would make, without changing the model.

    Args: as in `truncate`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(30, 20)), sb.KTied(rank=3))
        >>> one, three = (truncation_errors(net, rank=k)["0.weight"] for k in (1, 3))
        >>> one > 1e-3, three < 1e-6
        (True, True)
    """
    before = {
        name: p.scales() for name, p in gaussian_sites(model, include, exclude).items()
    }
    after = gaussian_sites(
        truncate(copy.deepcopy(model), rank, epsilon, include, exclude),
        include,
        exclude,
    )
    return {
        name: float((after[name].scales() - scales).norm() / scales.norm())
        for name, scales in before.items()
    }


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of this rank (Eckart-Young), which may have negative entries from rank 2 on."""
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * values[:rank]) @ vt[:rank]


_LINES: tuple[tuple[Of, str, str, str], ...] = (
    ("means", "posterior means", BLUE, "o"),
    ("scales", "posterior standard deviations", ORANGE, "s"),
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
    found = weights_of(layer, sites)
    if len(found) != 1:
        problem = (
            "has several weights; name one"
            if found
            else "has no Gaussian posterior or is not there"
        )
        raise ValueError(
            f"layer={layer!r} {problem}{did_you_mean(layer, found or sites)}"
        )
    site, scales = sites[found[0]].site, sites[found[0]].scales().cpu()
    squares, maps = torch.linalg.svdvals(scales).square(), [("trained", scales)]
    for rank in (1, 2)[: min(scales.shape)]:
        share = float(squares[:rank].sum() / squares.sum())
        maps.append((f"rank {rank}: {share:.2%} explained", low_rank(scales, rank)))
    figure = empty_figure("plot_scales", 1.4 + 2.9 * len(maps), 3.6)
    axes: Any = figure.subplots(1, len(maps), sharex=True, sharey=True, squeeze=False)[
        0
    ]
    # The most extreme half percent at each end would leave one colour to all the rest.
    ordered, cut = scales.flatten().sort().values, scales.numel() // 200
    look = {
        "aspect": "auto",
        "cmap": "viridis",
        "vmin": float(ordered[cut]),
        "vmax": float(ordered[-1 - cut]),
    }
    smooth = (
        "nearest" if max(scales.shape) <= 500 else "auto"
    )  # large maps are averaged down, small ones not blurred
    for axis, (title, matrix) in zip(axes, maps, strict=True):
        image = axis.imshow(matrix.numpy(), interpolation=smooth, **look)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("outputs")
    axes[0].set_ylabel("inputs" if len(site.shape) == 2 else "inputs x kernel")
    figure.colorbar(
        image,
        ax=list(axes),
        label="standard deviation",
        extend="both",
        pad=0.01,
        aspect=30,
    )
    figure.suptitle(f"{found[0]}: posterior standard deviations", fontsize=11)
    return figure


@torch.no_grad()
def plot_spectrum(
    model: nn.Module,
    count: int = 10,
    include: Selection = None,
    exclude: Selection = None,
) -> Figure:
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
        shown = min(count, *site.shape)
        ranks = range(1, shown + 1)
        for line, (of, label, colour, marker) in enumerate(_LINES):
            values = site.explained(of)
            panel.plot(
                ranks,
                values[:shown],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.4,
                label=label,
            )
            place = {"transform": panel.transAxes, "ha": "right", "va": "top"}
            panel.text(
                0.97,
                0.93 - 0.11 * line,
                f"first two: {sum(values[:2]):.2%}",
                color=colour,
                fontsize=9,
                **place,
            )
        panel.set_title(
            f"{site.name}  ({site.shape[0]} x {site.shape[1]})", fontsize=10
        )
        panel.set_xlabel("singular value")
        panel.set_xticks(ranks[:: math.ceil(shown / 10)])
        panel.set_ylim(-0.03, 1.03)
        remove_box(panel)
    for panel in list(panels.flat)[len(sites) :]:
        panel.remove()
    for row in panels:
        row[0].set_ylabel("fraction of variance")
    legend_above(figure, panels[0, 0])
    return figure
