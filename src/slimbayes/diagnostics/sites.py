"""The weight matrices of a model that have Gaussian posteriors: what the diagnostics read, and how they exchange a posterior.

Sizes: m x n the matrix view of a weight, inputs (times the kernel's size) by outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import conversions_of
from slimbayes.convert.plan import Decision, Selection, selected
from slimbayes.engine import passes
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer
from slimbayes.posteriors.base import Config, SiteConfig
from slimbayes.posteriors.gaussian import GaussianPosterior
from slimbayes.train.elbo import check_finite

AnyConfig = TypeVar("AnyConfig", bound=Config)
# What a mean-field and a k-tied config have in common, less the jitter of the start, which means something else in each.
_SHARED = ("prior", "estimator", "scale_init", "bias", "max_scale", "independent_positions")


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
    """Every weight matrix with a Gaussian posterior, in the model's order; refuses a model that has none, or broken ones.

    `include` and `exclude` choose layers as in `bayesianize`.

    >>> import slimbayes as sb
    >>> [s.name for s in gaussian_sites(sb.bayesianize(nn.Sequential(nn.Linear(3, 2)), sb.MeanField()))]
    ['0.weight']
    """
    conversions_of(model)
    check_finite(model)
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, BayesLayer) and _is_gaussian(layer)
    }
    if not layers:
        kinds = sorted({type(p).__name__ for p in posteriors_of(model)}) or ["none"]
        raise ValueError(
            f"No layer of this {type(model).__name__} has a Gaussian posterior over its weights; found: {', '.join(kinds)}. "
            f"Convert it with MeanField, KTied or MatrixNormal."
        )
    inside = selected("include", include, layers) if include is not None else set(layers)
    outside = selected("exclude", exclude, layers)
    chosen = {n: layer for n, layer in layers.items() if n in inside and n not in outside}
    return [
        GaussianSite(f"{name}.{key}".lstrip("."), name, layer, key, posterior)  # type: ignore[arg-type]
        for name, layer in chosen.items()
        for key, posterior in layer.posterior.items()
    ]


def _is_gaussian(layer: BayesLayer) -> bool:
    return all(isinstance(p, GaussianPosterior) for p in layer.posterior.values())


def decisions_of(model: nn.Module) -> dict[str, Decision]:
    """The conversion record of every converted layer, by the layer's name; a checkpoint is written from these."""
    return {
        ".".join(part for part in (root, decision.name) if part): decision
        for root, conversion in conversions_of(model)
        for decision in conversion.decisions
        if decision.config is not None
    }


def refuse_open_pass(model: nn.Module, verb: str) -> None:
    """Draws that are held were made from the scales about to change."""
    if any(passes.of(p.key) is not None for p in posteriors_of(model)[:1]):
        raise ValueError(
            f"{verb} cannot change a model whose draws are held. Call it outside `frozen` and the model's forward."
        )


def converted_config(config: Any, kind: type[AnyConfig], **changes: Any) -> AnyConfig:
    """The config of another Gaussian method with the same prior, estimator, biases and cap."""
    return kind(**{name: getattr(config, name) for name in _SHARED}, **changes)


@torch.no_grad()
def rebuilt(old: GaussianPosterior, config: SiteConfig) -> GaussianPosterior:
    """A posterior of another method for an old one's place: biases' scales are copied, weights' are still to be set."""
    with torch.random.fork_rng(
        devices=[]
    ):  # the start is random but overwritten: the caller's noise must not depend on it
        new = config.build(old.site)
    assert isinstance(new, GaussianPosterior)
    first = next(old.parameters())
    new.to(device=first.device, dtype=first.dtype).train(old.training).requires_grad_(first.requires_grad)
    new.name = old.name
    if old.bias_log_scale is not None and new.bias_log_scale is not None:
        new.bias_log_scale.copy_(old.bias_log_scale)
    return new


def exchange(
    model: nn.Module, sites: list[GaussianSite], new: Mapping[str, GaussianPosterior], configs: Mapping[str, Config]
) -> None:
    """Let posteriors become the new ones (by site name) and record the layers' new configs (by layer name)."""
    decisions = decisions_of(model)
    for site in sites:
        fresh = new.get(site.name)
        if fresh is None:
            continue
        if _shapes(fresh) == _shapes(
            site.posterior
        ):  # the same parameters with other values: an optimizer keeps hold of them
            site.posterior.load_state_dict(fresh.state_dict())
        else:  # the object stays and its class is swapped, like a layer's: whoever knows the posterior goes on knowing it
            site.posterior.__class__ = type(fresh)
            site.posterior.__dict__.clear()
            site.posterior.__dict__.update(fresh.__dict__)
    for name, config in configs.items():
        decisions[name].config = config


def _shapes(posterior: GaussianPosterior) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in posterior.state_dict().items()}
