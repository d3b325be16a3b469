"""The prior over weights that priors over their rank-1 factors induce (Dusenberry et al. 2020, Eq. 3 and Figure 1).

    w' = w r s      w ~ Normal(0, scale), r and s from the priors of the factors
    p(w') = E[ Normal(w'; 0, scale |r s|) ]

A factor with mass around zero makes the density of w' at zero infinite (it grows as -log |w'|): it prunes. The
expectation is a sum over equally likely values of the factors, which holds for tails as heavy as Cauchy's.

Sizes: n points, m values of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimbayes.diagnostics.plots import bare, empty_figure
from slimbayes.distributions.families import Cauchy, Distribution, Normal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Factor = Distribution | Callable[[Tensor], Tensor]  # a family, or a quantile function of numbers in (0, 1)
_AT_ONCE = 1 << 22  # numbers


def inverse_gamma_root(u: Tensor) -> Tensor:
    """Quantiles of r where r^2 ~ InverseGamma(1, 1), under which w' is Student's t with two degrees of freedom."""
    return (-u.log()).rsqrt()


FIGURE: dict[str, Factor] = {
    "r fixed at 1": Normal(1.0, 1e-6), "Normal(0, 1)": Normal(0.0, 1.0), "Cauchy(0, 1)": Cauchy(0.0, 1.0),
    "r² inverse Gamma(1, 1)": inverse_gamma_root,
}  # fmt: skip


def induced_prior(points: Tensor, r: Factor, s: Factor | None = None, scale: float = 1.0, values: int = 4096) -> Tensor:
    """Density of the weight w' = w r s at some points.

    Args:
        r: prior of the factor on outputs: a family, or its quantile function.
        s: prior of the factor on inputs; None: it is one.
        scale: standard deviation of w.
        values: of each factor that are averaged over; each of two factors takes the square root of it.

    Shape: points (n,) -> (n,), float64.

    Example:
        >>> import slimbayes as sb
        >>> at = torch.tensor([0.1, 3.0])
        >>> normal, cauchy = (induced_prior(at, prior) for prior in (sb.Normal(0.0, 1.0), sb.Cauchy(0.0, 1.0)))
        >>> bool(cauchy[0] < normal[0]), bool(cauchy[1] > normal[1])  # less mass around zero, heavier tails
        (True, True)
    """
    if points.dim() != 1 or not scale > 0 or values < 1:
        raise ValueError(
            f"induced_prior needs points (n,), scale above 0 and at least one value, got {tuple(points.shape)}, "
            f"{scale!r} and {values!r}."
        )
    each = values if s is None else math.isqrt(values)
    product = _values(r, each)
    if s is not None:
        product = (product[:, None] * _values(s, each)).flatten()
    spread = scale * product.abs()
    parts = [_density(part, spread) for part in points.double().split(max(1, _AT_ONCE // len(spread)))]
    return torch.cat(parts)


def _values(factor: Factor, count: int) -> Tensor:
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return factor.rsample(torch.special.ndtri(u)) if isinstance(factor, Distribution) else factor(u)


def _density(points: Tensor, spread: Tensor) -> Tensor:
    z = points[:, None] / spread
    return ((-0.5 * z * z).exp() / (spread * math.sqrt(2 * math.pi))).mean(1)


def plot_induced_priors(points: Tensor, priors: Mapping[str, Factor] | None = None) -> Figure:
    """Densities of w' under several priors of r, plain and with a logarithmic axis (the paper's Figure 1).

    Example:
        >>> figure = plot_induced_priors(torch.linspace(-3, 3, 61))
        >>> len(figure.axes), len(figure.axes[0].lines)
        (2, 4)
    """
    figure = empty_figure("plot_induced_priors", 8.6, 3.4)
    panels: Any = figure.subplots(1, 2)
    for name, prior in (FIGURE if priors is None else priors).items():
        density = induced_prior(points, prior)
        for panel in panels:
            panel.plot(points.numpy(), density.numpy(), label=name, linewidth=1.3)
    for panel in panels:
        panel.set_xlabel("w'")
        panel.margins(x=0)
        bare(panel)
    panels[0].set_ylabel("density")
    panels[0].set_ylim(0, 1)
    panels[1].set_yscale("log")
    panels[0].legend(fontsize=8, frameon=False)
    return figure
