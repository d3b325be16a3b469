"""Functions from the implicit priors of dropout and Ensemble Model Patching (Chang et al. 2019, Figure 3 and Appendix D.1).

    y = B + sum_h W_h sign(b_h + w_h x)          B, b ~ N(0, 20)   W, w ~ N(0, 5)   h = 1 ... H

    dropout      every W_h and w_h is set to zero with probability 1/2; the others are not rescaled
    emp, ecmp    every layer, or every weight and bias, is picked from K independent components

A function steps at -b_h / w_h for each hidden unit whose w_h and W_h are both left: H steps by EMP, about H / 4 by dropout. Each function
here has a network of its own, and then that is all the difference there is: the components are independent draws of one Gaussian, so a
pick among them is another, and a single function of EMP is one of the plain Gaussian network.

Whether 20 and 5 are variances or standard deviations the paper does not say. Its other Normals have variances, so we read them so. Both
fit its description: standard deviations stretch the same picture, x by 2 and y by 2.2, and shift it more, B / y being 0.4 and not 0.2.

    python -m slimbayes.diagnostics.prior_functions --out figure3.png --seed 0

Sizes: H hidden units, K components, n points x.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import bayesianize
from slimbayes.diagnostics.plots import _figure_class
from slimbayes.errors import did_you_mean
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.drop_connect import DropConnect
from slimbayes.posteriors.mixture import Mixture
from slimbayes.prediction.sample import frozen, sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = Literal["dropout", "emp", "ecmp"]
_TITLES = {
    "dropout": "dropout, rate {rate:g}",
    "emp": "EMP, {components} components",
    "ecmp": "ECMP, {components} components",
}
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
            # DropConnect divides what it keeps by the probability of keeping it; the figure's weights stay as they were drawn.
            parameter.normal_(0.0, bias_std if name.endswith("bias") else kept * weight_std)
        net.to(x)
        with frozen(net):
            out.append(sample(net, x.unsqueeze(1))[0, :, 0])
    return torch.stack(out) if out else x.new_empty(0, len(x))


def _config(method: str, components: int, rate: float) -> Config:
    if method == "dropout":
        return DropConnect(rate=rate)  # single weights: with one input, dropping inputs would drop all of w at once
    if method not in _TITLES:
        raise ValueError(f"prior_functions: unknown method {method!r}{did_you_mean(str(method), _TITLES)}")
    return Mixture(components=components, assignment="layer" if method == "emp" else "element")


def plot_prior_functions(
    path: str | os.PathLike[str],
    methods: Sequence[Method] = ("dropout", "emp"),
    functions: int = 3,
    limit: float = 5.0,
    points: int = 4001,
    hidden: int = 100,
    components: int = 5,
    rate: float = 0.5,
    bias_std: float = 20**0.5,
    weight_std: float = 5**0.5,
) -> Figure:
    """Draw functions of each method's implicit prior side by side (the paper's Figure 3) and write the picture to a file.

    Args:
        path: the file to write, of any type matplotlib knows.
        limit: x runs from -limit to limit, in `points` points.
        methods, functions, hidden, components, rate, bias_std, weight_std: as in `prior_functions`.

    Example:
        >>> import tempfile
        >>> figure = plot_prior_functions(tempfile.mktemp(suffix=".png"), points=201)
        >>> [axes.get_title().split(":")[0] for axes in figure.axes]
        ['dropout, rate 0.5', 'EMP, 5 components']
    """
    figure_class = _figure_class("plot_prior_functions")
    x = torch.linspace(-limit, limit, points)
    figure: Figure = figure_class(figsize=(0.8 + 3.9 * len(methods), 3.4), layout="constrained")
    panels: Any = figure.subplots(1, len(methods), sharex=True, sharey=True, squeeze=False)[0]
    for panel, method in zip(panels, methods, strict=True):
        values = prior_functions(method, x, functions, hidden, components, rate, bias_std, weight_std)
        for i, line in enumerate(values):
            panel.plot(
                x.numpy(), line.numpy(), color=_COLOURS[i % len(_COLOURS)], linewidth=1.3, solid_joinstyle="miter"
            )
        _dress(panel, _TITLES[method].format(rate=rate, components=components), values)
    panels[0].set_ylabel("y = f(x)")
    figure.savefig(path, dpi=130)
    return figure


def _dress(panel: Any, title: str, values: Tensor) -> None:
    steps = (values.diff(dim=1).abs() > 1e-3).sum(1).float().mean() if len(values) else torch.zeros(())
    panel.set_title(f"{title}: {steps:.0f} steps on average", fontsize=11)
    panel.set_xlabel("x")
    panel.margins(x=0)
    panel.locator_params(axis="x", nbins=7, integer=True)
    panel.grid(axis="y", linewidth=0.5, alpha=0.4)
    panel.spines[["top", "right"]].set_visible(False)


def main(argv: list[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m slimbayes.diagnostics.prior_functions", description="Draw Figure 3 of Chang et al. 2019."
    )
    parser.add_argument("--out", default="figure3.png", help="the picture to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["dropout", "emp"], choices=list(_TITLES))
    parser.add_argument("--functions", type=int, default=3)
    parser.add_argument("--limit", type=float, default=5.0, help="x runs from -limit to limit")
    parser.add_argument("--bias-std", type=float, default=20**0.5)
    parser.add_argument("--weight-std", type=float, default=5**0.5)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    plot_prior_functions(
        args.out, args.methods, args.functions, args.limit, bias_std=args.bias_std, weight_std=args.weight_std
    )
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
