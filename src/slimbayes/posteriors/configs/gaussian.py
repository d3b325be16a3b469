"""What mean-field and k-tied configs share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Self

from slimbayes.distributions.families import Distribution, Normal
from slimbayes.posteriors.checks import check_choice, check_not_negative
from slimbayes.posteriors.configs.base import SiteConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site

Estimator = Literal["reparam", "flipout", "local"]


@dataclass(frozen=True, kw_only=True)
class GaussianConfig(SiteConfig):
    """What mean-field and k-tied configs share; `MeanField` describes the fields."""

    prior: Distribution = Normal(0.0, 1.0)  # noqa: RUF009 (immutable)
    estimator: Estimator = "reparam"
    scale_init: float = 0.01
    scale_jitter: float = 0.001
    bias: Literal["point", "gaussian"] = "point"
    max_scale: float | None = None
    independent_positions: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_choice(self, "estimator", self.estimator, ("reparam", "flipout", "local"))
        check_choice(self, "bias", self.bias, ("point", "gaussian"))
        if not self.scale_init > 0:
            raise ValueError(f"{name}: scale_init must be positive, got {self.scale_init!r}.")
        check_not_negative(self, "scale_jitter", self.scale_jitter)
        if self.max_scale is not None and not self.max_scale > self.scale_init:
            start = f"scale_init={self.scale_init!r}, where scales start"
            raise ValueError(f"{name}: max_scale={self.max_scale!r} must be above {start}.")
        if not isinstance(self.prior, Normal) and not hasattr(self.prior, "gaussian_kl"):
            known = "Normal, HeNormal, TiedMean, LaplacePrior, EmpiricalBayes or ScaleMixture"
            raise ValueError(f"{name}: {type(self.prior).__name__} is no prior for weights; use {known}.")

    def describe(self) -> str:
        return type(self).__name__

    def extra_flops(self, site: Site) -> float:
        """Beyond drawing weights, which happens once a pass: the second product of flipout and of local."""
        m, n = site.matrix
        signs = 0.5 * (site.n_in + site.n_out)  # a multiplication is half a multiply-add
        return {"reparam": 0.0, "flipout": m * n + signs, "local": float(m * n)}[self.estimator]

    @classmethod
    def like(cls, other: GaussianConfig) -> Self:
        """This method with another's prior, estimator, start, biases and cap; its jitter means something else in
        each.
        """
        if isinstance(other, cls):
            return other
        shared = [f.name for f in fields(GaussianConfig) if f.name != "scale_jitter"]
        return cls(**{name: getattr(other, name) for name in shared})
