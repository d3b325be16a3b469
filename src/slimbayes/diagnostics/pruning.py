"""prune: drop the weights that are uncertain beside their size (Blundell et al. 2015, section 5.1).

    SNR = |mean| / sigma          weights with the lowest ratio go first, over all layers together

A pruned weight gets mean 0 and standard deviation 1e-6: its draws vanish, and the model goes on working in every way.
For the ELBO a weight that is so sure of being zero is expensive, log(prior scale / 1e-6) nats: the pruned model is for
predicting. Nothing keeps pruned weights at zero if training goes on.

A tied scale cannot vanish for one weight alone, so a k-tied layer that loses weights becomes a mean-field one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import gaussian_sites, mean_field, refuse_held_draws, replace

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
    refuse_held_draws(model, "prune")
    sites = gaussian_sites(model, include, exclude)
    ratios = [(site.means().abs() / site.scales()).cpu() for site in sites]
    chosen = _chosen(torch.cat([r.flatten() for r in ratios]), fraction, snr_threshold)
    masks = [part.view(r.shape) for part, r in zip(chosen.split([r.numel() for r in ratios]), ratios)]
    pairs = list(zip(sites, masks, strict=True))
    losing = {site.layer_name for site, mask in pairs if mask.any()}  # a layer has one config: all its matrices change
    new = [
        mean_field(model, site, site.scales().masked_fill(mask.to(site.posterior.device), PRUNED_SCALE))
        for site, mask in pairs
        if site.layer_name in losing
    ]
    replace(model, new)
    for site, mask in pairs:
        site.weight.masked_fill_(site.posterior.site.from_matrix(mask).to(site.weight.device), 0.0)
    gone = [r[mask].max() for r, mask in zip(ratios, masks) if mask.any()]
    by_weight = {site.name: int(mask.sum()) / mask.numel() for site, mask in pairs}
    return Pruned(int(chosen.sum()) / len(chosen), by_weight, float(max(gone, default=-math.inf)))


def _chosen(ratios: Tensor, fraction: float | None, snr_threshold: float | None) -> Tensor:
    """Which of all ratios go."""
    if snr_threshold is not None and fraction is None:
        return ratios < snr_threshold
    if fraction is None or snr_threshold is not None:
        got = f"fraction={fraction!r}, snr_threshold={snr_threshold!r}"
        raise ValueError(f"prune needs either a fraction or an snr_threshold, got {got}.")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction!r}.")
    chosen = torch.zeros_like(ratios, dtype=torch.bool)
    chosen[ratios.argsort(stable=True)[: round(fraction * len(ratios))]] = True  # a larger fraction prunes a superset
    return chosen
