"""What priors mean: for functions, under dropout and ensemble model patching (Chang et al. 2019, Figure 3 and D.1), and
for weights, under priors of their rank-1 factors (Dusenberry et al. 2020, Eq. 3 and Figure 1).

    y = B + sum_h W_h sign(b_h + w_h x)          B, b ~ N(0, 20)   W, w ~ N(0, 5)   h = 1 ... H

    dropout      every W_h and w_h is set to zero with probability 1/2; the others are not rescaled
    emp, ecmp    every layer, or every weight and bias, is picked from K independent components

A function steps at -b_h / w_h for each hidden unit whose w_h and W_h are both left: H steps by EMP, about H / 4 by
dropout. Each function here has a network of its own, and then that is all the difference there is: a pick among
independent draws of one Gaussian is another, so a function of EMP is one of the plain Gaussian network.

Whether 20 and 5 are variances or standard deviations the paper does not say. Its other Normals have variances, so we
read them so. Both fit its description: standard deviations stretch the same picture, x by 2 and y by 2.2, and shift it
more, B / y being 0.4 and not 0.2.

    w' = w r s      w ~ Normal(0, scale), r and s from the priors of the factors
    p(w') = E[ Normal(w'; 0, scale |r s|) ]

A factor with mass around zero makes the density of w' at zero infinite (it grows as -log |w'|): it prunes. The
expectation is a sum over equally likely values of the factors, which holds for tails as heavy as Cauchy's.

Sizes: H hidden units, K components, n points, m values of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import bayesianize
from slimbayes.distributions.families import Cauchy, Distribution, Normal
from slimbayes.posteriors.configs.base import Config, check_choice
from slimbayes.posteriors.configs.mixture import DropConnect, Mixture
from slimbayes.prediction.panels import empty_figure, remove_box
from slimbayes.prediction.sample import fixed_draws, sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Method = Literal["dropout", "emp", "ecmp"]
METHODS: tuple[Method, ...] = ("dropout", "emp")  # what the paper draws
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


class Sign(nn.Module):
    """The sign of each number. Shape: any."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


@torch.no_grad()
def prior_functions(
    method: Method,
    x: Tensor,
    functions: int = 3,
    hidden: int = 100,
    components: int = 5,
    rate: float = 0.5,
    bias_std: float = 20**0.5,
    weight_std: float = 5**0.5,
) -> Tensor:
    """Functions of a network with one hidden layer of signs, drawn from a method's implicit prior.

    Args:
        method: "dropout", "emp" or "ecmp".
        hidden: H.
        components: K, for "emp" and "ecmp".
        rate: probability of dropping a weight, for "dropout".
        bias_std, weight_std: standard deviations of the Gaussian prior; 20 and 5 for the other reading of the paper.

    Shape: x (n,) -> (functions, n).

    Example:
        >>> x = torch.linspace(-10, 10, 2001)
        >>> steps = [int((prior_functions(method, x)[0].diff().abs() > 1e-3).sum()) for method in ("dropout", "emp")]
        >>> steps[0] < steps[1] / 2
        True
    """
    if x.dim() != 1 or not x.is_floating_point():
        raise ValueError(
            f"prior_functions needs a vector of real numbers x, got shape {tuple(x.shape)} and {x.dtype}."
        )
    check_choice("prior_functions", "method", method, ("dropout", "emp", "ecmp"))
    config: Config = Mixture(
        components=components, assignment="layer" if method == "emp" else "element"
    )
    if (
        method == "dropout"
    ):  # of single weights: with one input, dropping inputs would drop all of w at once
        config = DropConnect(rate=rate)
    kept = 1 - rate if method == "dropout" else 1.0
    out = []
    for _ in range(functions):
        net = bayesianize(
            nn.Sequential(nn.Linear(1, hidden), Sign(), nn.Linear(hidden, 1)), config
        )
        for name, parameter in net.named_parameters():
            # DropConnect divides what it keeps by the probability of keeping it; the figure's weights stay as drawn.
            parameter.normal_(
                0.0, bias_std if name.endswith("bias") else kept * weight_std
            )
        net.to(x)
        with fixed_draws(net):
            out.append(sample(net, x.unsqueeze(1))[0, :, 0])
    return torch.stack(out) if out else x.new_empty(0, len(x))


def plot_prior_functions(x: Tensor, functions: Mapping[str, Tensor]) -> Figure:
    """Draw functions of each method's implicit prior side by side (the paper's Figure 3).

    Shape: x (n,); for each method, whose name is the title, functions (m, n).

    Example:
        >>> x = torch.linspace(-5, 5, 201)
        >>> figure = plot_prior_functions(x, {method: prior_functions(method, x) for method in ("dropout", "emp")})
        >>> [axes.get_title().split(":")[0] for axes in figure.axes]
        ['dropout', 'emp']
    """
    figure = empty_figure("plot_prior_functions", 0.8 + 3.9 * len(functions), 3.4)
    panels: Any = figure.subplots(
        1, len(functions), sharex=True, sharey=True, squeeze=False
    )[0]
    for panel, (title, values) in zip(panels, functions.items(), strict=True):
        for i, line in enumerate(values):
            colour = _COLOURS[i % len(_COLOURS)]
            panel.plot(
                x.numpy(),
                line.numpy(),
                color=colour,
                linewidth=1.3,
                solid_joinstyle="miter",
            )
        panel.set_title(
            f"{title}: {mean_steps(values):.0f} steps on average", fontsize=11
        )
        panel.set_xlabel("x")
        panel.margins(x=0)
        panel.locator_params(axis="x", nbins=7, integer=True)
        remove_box(panel)
    panels[0].set_ylabel("y = f(x)")
    return figure


def mean_steps(values: Tensor) -> float:
    """How many steps functions (m, n) take on average."""
    return float((values.diff(dim=1).abs() > 1e-3).sum()) / max(len(values), 1)


Factor = (
    Distribution | Callable[[Tensor], Tensor]
)  # a family, or a quantile function of numbers in (0, 1)
_AT_ONCE = 1 << 22  # numbers


def inverse_gamma_root(u: Tensor) -> Tensor:
    """Quantiles of r where r^2 ~ InverseGamma(1, 1), under which w' is Student's t with two degrees of freedom."""
    return (-u.log()).rsqrt()


FIGURE: dict[str, Factor] = {
    "r fixed at 1": Normal(1.0, 1e-6), "Normal(0, 1)": Normal(0.0, 1.0), "Cauchy(0, 1)": Cauchy(0.0, 1.0),
    "r² inverse Gamma(1, 1)": inverse_gamma_root,
}  # fmt: skip


def induced_prior(
    points: Tensor,
    r: Factor,
    s: Factor | None = None,
    scale: float = 1.0,
    values: int = 4096,
) -> Tensor:
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
    parts = [
        part[:, None] / spread
        for part in points.double().split(max(1, _AT_ONCE // len(spread)))
    ]
    return torch.cat(
        [
            ((-0.5 * z * z).exp() / (spread * math.sqrt(2 * math.pi))).mean(1)
            for z in parts
        ]
    )


def _values(factor: Factor, count: int) -> Tensor:
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return (
        factor.rsample(torch.special.ndtri(u))
        if isinstance(factor, Distribution)
        else factor(u)
    )


def plot_induced_priors(
    points: Tensor, priors: Mapping[str, Factor] | None = None
) -> Figure:
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
        remove_box(panel)
    panels[0].set_ylabel("density")
    panels[0].set_ylim(0, 1)
    panels[1].set_yscale("log")
    panels[0].legend(fontsize=8, frameon=False)
    return figure
