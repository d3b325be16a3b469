"""Where the members of a converted model have their means: as factors of each layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import passes
from slimbayes.layers.base import BayesLayer, Converted
from slimbayes.posteriors.factors import Drawn
from slimbayes.prediction.sample import central_pass


@torch.no_grad()
def member_factors(model: nn.Module) -> dict[str, dict[str, Drawn]]:
    """Factors r (K, out), s (K, in) and bias offsets at the members' means, by layer and site.

    None of layers whose mean is their own weight; refused where a mean is neither.
    """
    posteriors = passes.posteriors_of(model)
    members = math.lcm(*(p.members for p in posteriors))
    found: dict[str, dict[str, Drawn]] = {}
    plain: list[str] = []

    def look() -> None:
        for name, layer in model.named_modules():
            for site, p in layer.posterior.items() if isinstance(layer, Converted) else ():
                lines = p.factors() if isinstance(layer, BayesLayer) else None  # type: ignore[operator]
                if lines is not None:
                    s, r, bias = lines
                    found.setdefault(name, {})[site] = Drawn(r.clone(), s.clone(), bias)
                elif not (members == 1 and _own(layer, site, p)):
                    raise ValueError(
                        f"The means of {p.name} ({type(p).__name__}) are no factors of its weight. Call "
                        f"merge(model, member=0) first, which makes them plain weights."
                    )
                else:
                    plain.append(name)

    passes.run(central_pass(posteriors), look)
    if found and plain:
        raise ValueError(f"{plain[0]} has no factors, but {next(iter(found))} has. Call merge(model) first.")
    return found


def _own(layer: Any, site: str, posterior: Any) -> bool:
    """Whether the one draw under way is the layer's own weight and bias."""
    linear = layer.linear_map(site)
    weight, bias = posterior.materialise(linear, 0)
    return torch.equal(weight, linear.weight) and (bias is None or torch.equal(bias, linear.bias))


@torch.no_grad()
def set_factors(model: nn.Module, means: dict[str, dict[str, Drawn]]) -> None:
    """Give joint posteriors over factors these means."""
    for name, sites in means.items():
        layer: Any = model.get_submodule(name)
        for site, drawn in sites.items():
            posterior = layer.posterior[site]
            for factor, value in ((posterior.r, drawn.r), (posterior.s, drawn.s)):
                factor.loc.copy_(value.unsqueeze(1))
            bias: Tensor | None = drawn.bias
            if posterior.bias is not None and bias is not None:
                posterior.bias.copy_(bias[1:])
