"""Signal-to-noise ratios: of the gradients that train posterior scales (Swiatkowski et al. 2020, section 3.2), and of
weights, by which they are pruned (Blundell et al. 2015, section 5.1).

    SNR = E[g^2] / Var[g] = 1 + E[g]^2 / Var[g] >= 1        over the last `window` steps, for each scalar parameter

A layer's value is the mean over its parameters: log sigma of a mean-field posterior, log U and log V of a k-tied one. A
tied scale sums the gradients of many weights, of which the KL's part adds up and the noise partly cancels, so its ratio
is higher. Pure noise gives 1 + 1 / (window - 3).

The mean is the paper's, and a few weights can make it: where the likelihood hardly depends on a weight, its gradient is
the KL's alone and nearly constant. In a mean-field layer such weights stand by themselves, so its mean may exceed a
k-tied layer's although almost all of its gradients are noisier. The median is there to tell.

    SNR = |mean| / sigma          weights with the lowest ratio go first, over all layers together

A pruned weight gets mean 0 and standard deviation 1e-6: its draws vanish, and the model goes on working in every way.
For the ELBO a weight that is so sure of being zero is expensive, log(prior scale / 1e-6) nats: the pruned model is for
predicting. Nothing keeps pruned weights at zero if training goes on. A tied scale cannot vanish for one weight alone,
so a k-tied layer that loses weights becomes a mean-field one.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import gaussian_sites, layer_of, set_scales
from slimbayes.posteriors.configs.base import check_choice


class GradientSNR:
    """Track the gradients of all posterior scales and tell their signal-to-noise ratio, layer by layer.

    A parameter whose gradient did not vary at all within the window has no ratio and is left out of its layer's
    average. A layer in which no gradient varied gets inf, and nan if all its gradients were zero. Memory: 8 x window
    bytes for each scale, of which a mean-field layer has m n and a k-tied one k (m + n).

    Args:
        model: a model converted with `MeanField`, `KTied` or `MatrixNormal`.
        window: how many of the latest steps count, at least 2.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(4, 3)), sb.KTied(rank=1))
        >>> snr = GradientSNR(net, window=5)
        >>> for _ in range(5):
        ...     net.zero_grad()
        ...     (net(torch.randn(8, 4)).square().mean() + sb.kl(net) / 100).backward()
        ...     snr.update()
        >>> snr.result()["0"] >= 1
        True
    """

    def __init__(self, model: nn.Module, window: int = 10) -> None:
        if window < 2:
            raise ValueError(
                f"A variance needs a window of at least 2 steps, got window={window!r}."
            )
        self.window, self.steps = window, 0
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}  # by layer, by name
        self.history: dict[str, Tensor] = {}
        for weight, posterior in gaussian_sites(model).items():
            scales = {
                f"{weight} {n}": p
                for n, p in posterior.named_parameters()
                if n != "bias_log_scale"
            }
            self.parameters.setdefault(layer_of(weight), {}).update(scales)
            for name, p in scales.items():
                self.history[name] = torch.zeros(
                    window, p.numel(), dtype=torch.float64, device=p.device
                )

    @torch.no_grad()
    def update(self) -> None:
        """Take the present gradients: call it once a step, after backward and before they are clipped or zeroed."""
        gradients = {
            name: p.grad
            for scales in self.parameters.values()
            for name, p in scales.items()
        }
        missing = [name for name, gradient in gradients.items() if gradient is None]
        if missing:
            advice = "Call update() after loss.backward() and before zero_grad()."
            raise ValueError(f"{missing[0]} has no gradient. {advice}")
        for name, gradient in gradients.items():
            assert gradient is not None
            self.history[name][self.steps % self.window].copy_(gradient.reshape(-1))
        self.steps += 1

    def result(self, average: Literal["mean", "median"] = "mean") -> dict[str, float]:
        """The ratio of each layer, by its name, over the last `window` steps or as many as there were."""
        check_choice(self, "average", average, ("mean", "median"))
        seen = min(self.steps, self.window)
        if seen < 2:
            raise ValueError(
                f"A variance needs at least 2 steps, got {seen}. Call update() after each backward."
            )
        return {
            layer: _average_snr(
                torch.cat([self.history[name][:seen] for name in scales], 1), average
            )
            for layer, scales in self.parameters.items()
        }


def _average_snr(gradients: Tensor, average: str) -> float:
    """Mean or median over the columns of gradients (window, parameters) of 1 + mean^2 / variance."""
    # Taken relative to the first step, equal gradients have a variance of exactly zero, not of rounding errors.
    shifted = gradients - gradients[0]
    variance = shifted.var(0, correction=0)
    mean = gradients[0] + shifted.mean(0)
    varies = variance > 0
    if not bool(varies.any()):
        return math.inf if bool(mean.any()) else math.nan
    ratios = 1 + mean[varies].square() / variance[varies]
    return float(ratios.mean() if average == "mean" else ratios.median())


PRUNED_SCALE = 1e-6


class Pruned(NamedTuple):
    """The pruned fraction of all weights and of each matrix, and the largest |mean| / sigma that went; -inf if none."""

    sparsity: float
    by_weight: dict[str, float]
    threshold: float


@torch.no_grad()
def prune(
    model: nn.Module,
    fraction: float | None = None,
    *,
    snr_threshold: float | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> Pruned:
    """Set the weights with the lowest |mean| / sigma to zero, in place, and say how many that were.

    The means are the network's own weights, so save a pruned model with base=True. Biases are left alone.

    Args:
        model: converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        fraction: how many of the chosen layers' weights to prune, from 0 to 1.
        snr_threshold: prune what lies below this ratio instead.
        include, exclude: layers to prune, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 5)), sb.MeanField())
        >>> pruned = prune(net, 0.8)
        >>> pruned.sparsity, int((net[0].weight == 0).sum()) == round(200 * pruned.by_weight["0.weight"])
        (0.8, True)
    """
    sites = gaussian_sites(model, include, exclude)
    ratios = [(p.means().abs() / p.scales()).cpu() for p in sites.values()]
    chosen = _chosen(torch.cat([r.flatten() for r in ratios]), fraction, snr_threshold)
    masks = [
        part.view(r.shape)
        for part, r in zip(chosen.split([r.numel() for r in ratios]), ratios)
    ]
    found = [
        (name, p, mask) for (name, p), mask in zip(sites.items(), masks, strict=True)
    ]
    losing = {
        layer_of(name) for name, _, mask in found if mask.any()
    }  # a layer has one config: all its matrices change
    new = {
        name: p.scales().masked_fill(mask.to(p.device), PRUNED_SCALE)
        for name, p, mask in found
    }
    set_scales(
        model,
        "prune",
        {name: scales for name, scales in new.items() if layer_of(name) in losing},
    )
    for _, p, mask in found:
        p.linear_map().weight.masked_fill_(p.site.from_matrix(mask).to(p.device), 0.0)
    gone = [r[mask].max() for r, mask in zip(ratios, masks) if mask.any()]
    by_weight = {name: int(mask.sum()) / mask.numel() for name, _, mask in found}
    return Pruned(
        int(chosen.sum()) / len(chosen), by_weight, float(max(gone, default=-math.inf))
    )


def _chosen(
    ratios: Tensor, fraction: float | None, snr_threshold: float | None
) -> Tensor:
    """Which of all ratios go."""
    if snr_threshold is not None and fraction is None:
        return ratios < snr_threshold
    if fraction is None or snr_threshold is not None:
        got = f"fraction={fraction!r}, snr_threshold={snr_threshold!r}"
        raise ValueError(
            f"prune needs either a fraction or an snr_threshold, got {got}."
        )
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction!r}.")
    chosen = torch.zeros_like(ratios, dtype=torch.bool)
    chosen[ratios.argsort(stable=True)[: round(fraction * len(ratios))]] = (
        True  # a larger fraction prunes a superset
    )
    return chosen
