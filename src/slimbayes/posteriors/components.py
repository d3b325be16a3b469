"""What methods that pick among components share: their config (`Mixture` describes its fields), and how they start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.layers.site import LinearMap, Site
from slimbayes.posteriors.base import SiteConfig
from slimbayes.posteriors.checks import check_choice, check_count, check_not_negative

Draws = Literal["forward", "example"]
_INITS = ("copies", "fresh", "ones", "uniform")


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(SiteConfig):
    """K components, how often each is picked, how they start, and the precisions of their prior."""

    components: int = 5
    probs: tuple[float, ...] | None = None
    learn_probs: bool = False
    draws: Draws = "forward"
    init: Literal["copies", "fresh", "ones", "uniform"] | float = "copies"
    jitter: float = 0.05
    tau: float | None = 1.0
    rho: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_count(self, "components", self.components)
        check_choice(self, "draws", self.draws, ("forward", "example"))
        if not isinstance(self.init, (int, float)):
            check_choice(self, "init", self.init, _INITS)
        check_not_negative(self, "tau", self.tau, "is a precision and ")
        check_not_negative(self, "rho", self.rho, "is a precision and ")
        check_not_negative(self, "jitter", self.jitter)
        if self.tau is None and self.rho is not None:
            alone = "without tau would leave only the weights to weight decay; give both or neither"
            raise ValueError(f"{name}: rho={self.rho!r} {alone}.")
        if self.probs is not None:
            self._check_probs(self.probs)

    def _check_probs(self, probs: tuple[float, ...]) -> None:
        name = type(self).__name__
        if not isinstance(probs, tuple):
            raise TypeError(f"{name}: probs must be a tuple of numbers, got {probs!r}.")
        if len(probs) != self.components or not min(probs) >= 0 or not abs(sum(probs) - 1) < 1e-6:
            needed = f"{self.components} numbers (one for each component), none negative, that sum to 1"
            raise ValueError(f"{name}: probs must be {needed}; got {probs}, whose sum is {sum(probs):.6g}.")
        if self.learn_probs and not min(probs) > 0:
            raise ValueError(f"{name}: a probability that starts at zero cannot be learned; got probs={probs}.")

    @property
    def shares(self) -> tuple[float, ...]:
        """How often each component is picked, at the start if that is learned."""
        return tuple(float(p) for p in self.probs or (1.0 / self.components,) * self.components)


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
