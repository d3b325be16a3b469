"""The config of radial Bayesian neural nets; posteriors/radial.py says what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimbayes.distributions.families import Distribution, Normal
from slimbayes.posteriors.configs.base import SiteConfig, check_not_negative, check_positive


@dataclass(frozen=True, kw_only=True)
class Radial(SiteConfig):
    """Radial posterior over all weights: twice the parameters of the plain model.

    Args:
        prior: a `Normal`.
        scale_init, scale_jitter: scales start at Normal(scale_init, scale_jitter), kept above a tenth of scale_init.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = sb.bayesianize(nn.Linear(3, 2), Radial(prior=Normal(0.0, 0.3)))
        >>> sb.sample(net, torch.randn(5, 3), draws=4).shape
        torch.Size([4, 5, 2])
    """

    prior: Distribution = Normal(0.0, 1.0)  # noqa: RUF009 (immutable)
    scale_init: float = 0.02
    scale_jitter: float = 0.002
    builds: ClassVar[str] = "radial.RadialPosterior"

    def __post_init__(self) -> None:
        if not isinstance(self.prior, Normal):
            raise ValueError(f"Radial: the KL is known for a Normal prior, got {self.prior!r}.")
        check_positive(self, "scale_init", self.scale_init)
        check_not_negative(self, "scale_jitter", self.scale_jitter)
