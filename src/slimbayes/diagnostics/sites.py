"""The weight matrices that have Gaussian posteriors: what the diagnostics read, and how they replace a posterior.

Sizes: m x n the matrix view of a weight, inputs (times the kernel's size) by outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import conversions_of, decisions_of
from slimbayes.convert.plan import Selection, selected
from slimbayes.engine import passes
from slimbayes.engine.modules import discard_plans
from slimbayes.engine.passes import posteriors_of
from slimbayes.posteriors.configs.weights import GaussianConfig, MeanField
from slimbayes.posteriors.gaussian import GaussianPosterior, MeanFieldPosterior
from slimbayes.train.elbo import check_finite


def gaussian_sites(
    model: nn.Module, include: Selection = None, exclude: Selection = None
) -> dict[str, GaussianPosterior]:
    """Every Gaussian posterior by the name of its weight, "encoder.fc1.weight", in the model's order; refuses a model
    with none, or broken ones.

    `include` and `exclude` choose layers as in `bayesianize`.
    """
    conversions_of(model)
    check_finite(model)
    names = {id(module): name for name, module in model.named_modules()}
    found = {
        names[id(p.layer)]: p.layer
        for p in posteriors_of(model)
        if isinstance(p, GaussianPosterior)
    }
    if not found:
        kinds = (
            ", ".join(sorted({type(p).__name__ for p in posteriors_of(model)}))
            or "none"
        )
        problem = f"No layer of this {type(model).__name__} has a Gaussian posterior over its weights; found: {kinds}."
        raise ValueError(f"{problem} Convert it with MeanField, KTied or MatrixNormal.")
    inside = selected("include", include, found) if include is not None else set(found)
    inside -= selected("exclude", exclude, found)
    sites = [
        (name, site, p)
        for name, layer in found.items()
        if name in inside
        for site, p in layer.posterior.items()
    ]
    return {f"{name}.{site}".lstrip("."): p for name, site, p in sites}


def layer_of(weight: str) -> str:
    """The name of the layer that a weight of this name belongs to.

    >>> layer_of("encoder.fc1.weight")
    'encoder.fc1'
    """
    return weight.rpartition(".")[0]


def weights_of(name: str, weights: Collection[str]) -> list[str]:
    """The weight of this name, or all of the layer of this name."""
    return (
        [name]
        if name in weights
        else [weight for weight in weights if layer_of(weight) == name]
    )


@torch.no_grad()
def set_scales(model: nn.Module, verb: str, scales: Mapping[str, Tensor]) -> None:
    """Let posteriors become mean-field ones with these standard deviations (m, n); those of biases are copied.

    The layers' new configs are recorded, from which checkpoints are written.
    """
    if any(passes.pass_of(p.key) is not None for p in posteriors_of(model)[:1]):
        advice = "Call it outside `fixed_draws` and the model's forward."
        raise ValueError(f"{verb} cannot change a model whose draws are held. {advice}")
    decisions = {
        name: decision
        for name, _, decision in decisions_of(model)
        if decision.config is not None
    }
    sites = gaussian_sites(model)
    for name, values in scales.items():
        old, decision = sites[name], decisions[layer_of(name)]
        assert isinstance(decision.config, GaussianConfig)
        config = decision.config = MeanField.like(decision.config)
        with torch.random.fork_rng(
            devices=[]
        ):  # the start is overwritten: the caller's noise must not depend on it
            new = config.build(old.site)
        assert isinstance(new, MeanFieldPosterior)
        first = next(old.parameters())
        new.to(device=first.device, dtype=first.dtype).train(
            old.training
        ).requires_grad_(first.requires_grad)
        if old.bias_log_scale is not None and new.bias_log_scale is not None:
            new.bias_log_scale.copy_(old.bias_log_scale)
        new.weight_log_scale.copy_(new.site.from_matrix(values.log()))
        if {n: v.shape for n, v in old.state_dict().items()} == {
            n: v.shape for n, v in new.state_dict().items()
        }:
            old.load_state_dict(
                new.state_dict()
            )  # an optimizer keeps hold of the parameters
        else:  # the object stays and its class is swapped: whoever knows the posterior goes on knowing it
            old.__class__ = type(new)
            new.__dict__ |= {
                kept: old.__dict__[kept]
                for kept in ("key", "layer", "name", "blockwise", "conversion")
            }
            old.__dict__.clear()
            old.__dict__.update(new.__dict__)
    discard_plans()
