"""Functions from the implicit priors of dropout and ensemble model patching (Chang et al. 2019, Figure 3 and D.1).

    y = B + sum_h W_h sign(b_h + w_h x)          B, b ~ N(0, 20)   W, w ~ N(0, 5)   h = 1 ... H

    dropout      every W_h and w_h is set to zero with probability 1/2; the others are not rescaled
    emp, ecmp    every layer, or every weight and bias, is picked from K independent components

A function steps at -b_h / w_h for each hidden unit whose w_h and W_h are both left: H steps by EMP, about H / 4 by
dropout. Each function here has a network of its own, and then that is all the difference there is: a pick among
independent draws of one Gaussian is another, so a function of EMP is one of the plain Gaussian network.

Whether 20 and 5 are variances or standard deviations the paper does not say. Its other Normals have variances, so we
read them so. Both fit its description: standard deviations stretch the same picture, x by 2 and y by 2.2, and shift it
more, B / y being 0.4 and not 0.2.

Sizes: H hidden units, K components, n points x.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import bayesianize
from slimbayes.errors import did_you_mean
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.configs.mixture import DropConnect, Mixture
from slimbayes.prediction.figures import bare, empty_figure
from slimbayes.prediction.sample import frozen, sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = Literal["dropout", "emp", "ecmp"]
FIGURE: tuple[Method, ...] = ("dropout", "emp")  # what the paper draws
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
        raise ValueError(f"prior_functions needs a vector of real numbers x, got shape {tuple(x.shape)} and {x.dtype}.")
    config = _config(method, components, rate)
    kept = 1 - rate if method == "dropout" else 1.0
    out = []
    for _ in range(functions):
        net = bayesianize(nn.Sequential(nn.Linear(1, hidden), Sign(), nn.Linear(hidden, 1)), config)
        for name, parameter in net.named_parameters():
            # DropConnect divides what it keeps by the probability of keeping it; the figure's weights stay as drawn.
            parameter.normal_(0.0, bias_std if name.endswith("bias") else kept * weight_std)
        net.to(x)
        with frozen(net):
            out.append(sample(net, x.unsqueeze(1))[0, :, 0])
    return torch.stack(out) if out else x.new_empty(0, len(x))


def _config(method: str, components: int, rate: float) -> Config:
    if method == "dropout":
        return DropConnect(rate=rate)  # single weights: with one input, dropping inputs would drop all of w at once
    if method == "emp":
        return Mixture(components=components, assignment="layer")
    if method == "ecmp":
        return Mixture(components=components, assignment="element")
    raise ValueError(f"prior_functions: unknown method {method!r}{did_you_mean(method, ('dropout', 'emp', 'ecmp'))}")


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
    panels: Any = figure.subplots(1, len(functions), sharex=True, sharey=True, squeeze=False)[0]
    for panel, (title, values) in zip(panels, functions.items(), strict=True):
        for i, line in enumerate(values):
            colour = _COLOURS[i % len(_COLOURS)]
            panel.plot(x.numpy(), line.numpy(), color=colour, linewidth=1.3, solid_joinstyle="miter")
        panel.set_title(f"{title}: {mean_steps(values):.0f} steps on average", fontsize=11)
        panel.set_xlabel("x")
        panel.margins(x=0)
        panel.locator_params(axis="x", nbins=7, integer=True)
        bare(panel)
    panels[0].set_ylabel("y = f(x)")
    return figure


def mean_steps(values: Tensor) -> float:
    """How many steps functions (m, n) take on average.

    >>> mean_steps(torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    0.5
    """
    return float((values.diff(dim=1).abs() > 1e-3).sum()) / max(len(values), 1)
