"""The plain model through the same API: no posterior, no draws that differ, no KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimbayes.posteriors.configs.base import Config


@dataclass(frozen=True, kw_only=True)
class Deterministic(Config):
    """Leave the model as it is, so that baselines run through `sample`, `elbo`, `predict`, `save` and `load` too.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.Deterministic())
        >>> sb.sample(net, torch.randn(5, 3)).shape
        torch.Size([1, 5, 2])
    """

    converts: ClassVar[bool] = False

    def describe(self) -> str:
        return "Deterministic"
