"""The weight matrices that have Gaussian posteriors: what the diagnostics read, and how they replace a posterior.

Sizes: m x n the matrix view of a weight, inputs (times the kernel's size) by outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import conversions_of, decisions_of
from slimbayes.convert.plan import Selection, selected
from slimbayes.engine import passes
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer, sites_in
from slimbayes.posteriors.configs.gaussian import GaussianConfig, MeanField
from slimbayes.posteriors.gaussian import GaussianPosterior, MeanFieldPosterior
from slimbayes.train.elbo import check_finite


@dataclass(frozen=True)
class GaussianSite:
    """One weight matrix with a Gaussian posterior.

    Attributes:
        name: the layer's name and the site's, "encoder.fc1.weight".
        layer_name, layer: the converted layer it belongs to.
        key: the site's name within the layer.
        posterior: its posterior.
    """

    name: str
    layer_name: str
    layer: BayesLayer
    key: str
    posterior: GaussianPosterior

    @property
    def weight(self) -> Tensor:
        """The layer's own weight, which holds the posterior means, as it is stored."""
        return self.layer.linear_map(self.key).weight

    def means(self) -> Tensor:
        """Posterior means (m, n), a copy in float64."""
        return self.posterior.site.to_matrix(self.weight.detach()).double()

    def scales(self) -> Tensor:
        """Posterior standard deviations (m, n), a copy in float64."""
        return self.posterior.site.to_matrix(self.posterior.log_scale().detach()).double().exp()


def gaussian_sites(model: nn.Module, include: Selection = None, exclude: Selection = None) -> list[GaussianSite]:
    """Every weight matrix with a Gaussian posterior, in the model's order; refuses a model with none, or broken ones.

    `include` and `exclude` choose layers as in `bayesianize`.
    """
    conversions_of(model)
    check_finite(model)
    sites = [
        GaussianSite(f"{name}.{key}".lstrip("."), name, layer, key, posterior)
        for name, layer, key, posterior in sites_in(model)
        if isinstance(posterior, GaussianPosterior)
    ]
    if not sites:
        kinds = ", ".join(sorted({type(p).__name__ for p in posteriors_of(model)})) or "none"
        problem = f"No layer of this {type(model).__name__} has a Gaussian posterior over its weights; found: {kinds}."
        raise ValueError(f"{problem} Convert it with MeanField, KTied or MatrixNormal.")
    layers = {site.layer_name: site.layer for site in sites}
    inside = selected("include", include, layers) if include is not None else set(layers)
    outside = selected("exclude", exclude, layers)
    return [site for site in sites if site.layer_name in inside and site.layer_name not in outside]


@torch.no_grad()
def set_scales(model: nn.Module, verb: str, scales: Sequence[tuple[GaussianSite, Tensor]]) -> None:
    """Let posteriors become mean-field ones with these standard deviations (m, n); those of biases are copied.

    The layers' new configs are recorded, from which checkpoints are written.
    """
    if any(passes.of(p.key) is not None for p in posteriors_of(model)[:1]):
        advice = "Call it outside `frozen` and the model's forward."
        raise ValueError(f"{verb} cannot change a model whose draws are held. {advice}")
    decisions = {name: decision for name, _, decision in decisions_of(model) if decision.config is not None}
    for site, values in scales:
        old, former = site.posterior, decisions[site.layer_name].config
        assert isinstance(former, GaussianConfig)
        config = decisions[site.layer_name].config = MeanField.like(former)
        with torch.random.fork_rng(devices=[]):  # the start is overwritten: the caller's noise must not depend on it
            new = config.build(old.site)
        assert isinstance(new, MeanFieldPosterior)
        first = next(old.parameters())
        new.to(device=first.device, dtype=first.dtype).train(old.training).requires_grad_(first.requires_grad)
        new.name = old.name
        if old.bias_log_scale is not None and new.bias_log_scale is not None:
            new.bias_log_scale.copy_(old.bias_log_scale)
        new.weight_log_scale.copy_(new.site.from_matrix(values.log()))
        if {n: v.shape for n, v in old.state_dict().items()} == {n: v.shape for n, v in new.state_dict().items()}:
            old.load_state_dict(new.state_dict())  # an optimizer keeps hold of the parameters
        else:  # the object stays and its class is swapped: whoever knows the posterior goes on knowing it
            old.__class__ = type(new)
            old.__dict__.clear()
            old.__dict__.update(new.__dict__)
