"""prune and pruning_curve: drop the weights that are uncertain beside their size (Blundell et al. 2015, section 5.1).

    SNR = |mean| / sigma          weights with the lowest ratio go first, over all layers together

A pruned weight gets mean 0 and standard deviation 1e-6: its draws vanish, and the model goes on working in every way. For the
ELBO a weight that is so sure of being zero is expensive, log(prior scale / 1e-6) nats: the pruned model is for predicting.
Nothing keeps pruned weights at zero if training goes on.

A tied scale cannot vanish for one weight alone, so a k-tied layer that loses weights becomes a mean-field one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import (
    GaussianSite,
    converted_config,
    decisions_of,
    exchange,
    gaussian_sites,
    refuse_open_pass,
)
from slimbayes.diagnostics.truncation import mean_field
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.gaussian import GaussianPosterior
from slimbayes.posteriors.mean_field import MeanField

PRUNED_SCALE = 1e-6


@dataclass(frozen=True)
class PrunedSite:
    """How many of one weight matrix's entries were pruned."""

    name: str
    pruned: int
    total: int

    @property
    def sparsity(self) -> float:
        return self.pruned / self.total


@dataclass(frozen=True)
class PruningReport:
    """What `prune` did. `str()` gives a table, `to_dict()` plain data.

    Attributes:
        sites: one entry for each weight matrix.
        threshold: the largest ratio |mean| / sigma that was pruned; -inf if none was.
    """

    sites: tuple[PrunedSite, ...]
    threshold: float

    @property
    def sparsity(self) -> float:
        """Pruned fraction of all weights."""
        return sum(s.pruned for s in self.sites) / sum(s.total for s in self.sites)

    def to_dict(self) -> dict[str, Any]:
        sites = [asdict(s) | {"sparsity": s.sparsity} for s in self.sites]
        return {"sparsity": self.sparsity, "threshold": self.threshold, "sites": sites}

    def __str__(self) -> str:
        width = max(len("all"), *(len(s.name) for s in self.sites))
        pruned, total = sum(s.pruned for s in self.sites), sum(s.total for s in self.sites)
        rows = [(s.name, s.pruned, s.total, s.sparsity) for s in self.sites] + [("all", pruned, total, self.sparsity)]
        return "\n".join(
            f"{name:<{width}}  {gone:>12,} of {size:>12,} pruned  {share:7.2%}" for name, gone, size, share in rows
        )


class PruningPoint(NamedTuple):
    """One point of a pruning curve: the fraction asked for, the fraction pruned, and what `evaluate` returned."""

    fraction: float
    sparsity: float
    value: Any


@torch.no_grad()
def prune(
    model: nn.Module,
    fraction: float | None = None,
    *,
    snr_threshold: float | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> PruningReport:
    """Set the weights with the lowest |mean| / sigma to zero, in place, and report how many there are in each layer.

    The means are the network's own weights, so save a pruned model with base=True. Biases are left alone.

    Args:
        model: a model converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        fraction: how many of the chosen layers' weights to prune, from 0 to 1.
        snr_threshold: prune what lies below this ratio instead.
        include, exclude: layers to prune, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 5)), sb.MeanField())
        >>> report = prune(net, 0.8)
        >>> report.sparsity, int((net[0].weight == 0).sum()) == report.sites[0].pruned
        (0.8, True)
    """
    refuse_open_pass(model, "prune")
    sites = gaussian_sites(model, include, exclude)
    ratios = [(site.means().abs() / site.scales()).cpu() for site in sites]
    masks, threshold = _masks(ratios, fraction, snr_threshold)
    new, configs = _plan(model, sites, masks)
    exchange(model, sites, new, configs)
    for site, mask in zip(sites, masks, strict=True):
        stored = site.posterior.site.from_matrix(mask)
        site.weight.masked_fill_(stored.to(site.weight.device), 0.0)
    lines = (PrunedSite(site.name, int(mask.sum()), mask.numel()) for site, mask in zip(sites, masks, strict=True))
    return PruningReport(tuple(lines), threshold)


def _masks(ratios: list[Tensor], fraction: float | None, snr_threshold: float | None) -> tuple[list[Tensor], float]:
    """Which entries go, matrix by matrix, and the largest ratio among them."""
    if (fraction is None) == (snr_threshold is None):
        got = f"fraction={fraction!r}, snr_threshold={snr_threshold!r}"
        raise ValueError(f"prune needs either a fraction or an snr_threshold, got {got}.")
    flat = torch.cat([r.reshape(-1) for r in ratios])
    if fraction is None:
        chosen = flat < snr_threshold
    else:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must lie between 0 and 1, got {fraction!r}.")
        chosen = torch.zeros_like(flat, dtype=torch.bool)
        chosen[flat.argsort(stable=True)[: round(fraction * len(flat))]] = True  # a larger fraction prunes a superset
    parts = chosen.split([r.numel() for r in ratios])
    threshold = float(flat[chosen].max()) if bool(chosen.any()) else -math.inf
    return [part.view(r.shape) for part, r in zip(parts, ratios, strict=True)], threshold


def _plan(
    model: nn.Module, sites: list[GaussianSite], masks: list[Tensor]
) -> tuple[dict[str, GaussianPosterior], dict[str, Config]]:
    """Mean-field posteriors for layers that lose weights: a config belongs to a layer, so all its matrices change together."""
    decisions = decisions_of(model)
    losing = {site.layer_name for site, mask in zip(sites, masks, strict=True) if bool(mask.any())}
    new: dict[str, GaussianPosterior] = {}
    configs: dict[str, Config] = {}
    for site, mask in zip(sites, masks, strict=True):
        if site.layer_name in losing:
            config = decisions[site.layer_name].config
            free = config if isinstance(config, MeanField) else converted_config(config, MeanField)
            configs[site.layer_name] = free
            scales = site.scales()
            new[site.name] = mean_field(site.posterior, free, scales.masked_fill(mask.to(scales.device), PRUNED_SCALE))
    return new, configs


def pruning_curve(
    model: nn.Module,
    evaluate: Callable[[nn.Module], Any],
    fractions: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98),
    include: Selection = None,
    exclude: Selection = None,
) -> list[PruningPoint]:
    """What a metric becomes as more and more weights are pruned. The model is not changed: each point prunes a copy.

    Args:
        model: as in `prune`.
        evaluate: called with the pruned copy; its result is kept as it is. It must use the copy, not the model.
        fractions: fractions of the weights to prune.
        include, exclude: layers to prune, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(20, 10), sb.MeanField())
        >>> [p.value for p in pruning_curve(net, lambda copy: int((copy.weight == 0).sum()), fractions=(0.0, 0.5, 1.0))]
        [0, 100, 200]
    """
    points = []
    for fraction in fractions:
        pruned = copy.deepcopy(model)
        sparsity = prune(pruned, fraction, include=include, exclude=exclude).sparsity
        points.append(PruningPoint(fraction, sparsity, evaluate(pruned)))
    return points
