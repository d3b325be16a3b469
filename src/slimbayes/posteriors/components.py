"""How the components that methods pick from start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.layers.site import LinearMap, Site
from slimbayes.posteriors.configs.mixture import ComponentConfig


@torch.no_grad()
def start_components(
    config: ComponentConfig, site: Site, layer: Any, linear: LinearMap, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Set the further components (K - 1, ...) of a layer's weight and bias as the config says."""
    if config.init == "copies":
        for others, own in ((weight, linear.weight), (bias, linear.bias)):
            if others is not None and own is not None:
                own = own.to(others.dtype)
                others.copy_(own + config.jitter * own.square().mean().sqrt() * torch.randn_like(others))
    elif site.kind == "norm" and config.init != "fresh":
        for scales, biases in ((linear.weight, linear.bias), (weight, bias)):
            _fill(scales, config.init)
            _fill(biases, 0.0)
    elif weight is not None:  # a matrix has no ones to start at
        for k in range(len(weight)):
            fresh = copy.deepcopy(layer)
            for reset in resets(fresh):
                reset()
            start = fresh.linear_map(site.name)
            weight[k] = start.weight
            if bias is not None:
                bias[k] = start.bias


def resets(layer: nn.Module) -> list[Callable[[], None]]:
    """What starts a layer's parameters, children first: attention starts its output projection in its own way."""
    parts = [m for name, m in layer.named_modules() if name.split(".")[0] != "posterior"]
    found = [getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None) for m in reversed(parts)]
    return [reset for reset in found if reset is not None]


def _fill(tensor: Tensor | None, init: str | float) -> None:
    if tensor is None:
        return
    if init == "uniform":
        tensor.uniform_(0.0, 1.0)
    else:
        tensor.fill_(1.0 if init == "ones" else float(init))
