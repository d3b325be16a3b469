"""The configs of posteriors over weights: mean-field, k-tied and matrix normal."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from slimbayes.distributions.families import Distribution, Normal
from slimbayes.distributions.priors import HeNormal
from slimbayes.posteriors.configs.base import (
    Count,
    NotNegative,
    Positive,
    SiteConfig,
    check_count,
    check_prior,
    name_of,
)

if TYPE_CHECKING:
    from slimbayes.layers.site import Site


Estimator = Literal["reparam", "flipout", "local"]
Limit = Annotated[int, partial(check_count, most=None)]


def check_weight_prior(owner: object, field: str, value: object) -> None:
    """Refuse what gives no KL of Gaussian weights."""
    if not isinstance(value, Distribution) or not hasattr(
        value.for_layer(1), "gaussian_kl"
    ):
        known = (
            "Normal, HeNormal, TiedMean, LaplacePrior, EmpiricalBayes or ScaleMixture"
        )
        raise ValueError(
            f"{name_of(owner)}: {type(value).__name__} is no prior for weights; use {known}."
        )


@dataclass(frozen=True, kw_only=True)
class GaussianConfig(SiteConfig):
    """What mean-field and k-tied configs share; `MeanField` describes the fields."""

    prior: Annotated[Distribution, check_weight_prior] = Normal(0.0, 1.0)  # noqa: RUF009 (immutable)
    estimator: Estimator = "reparam"
    scale_init: Positive = 0.01
    scale_jitter: NotNegative = 0.001
    bias: Literal["point", "gaussian"] = "point"
    max_scale: float | None = None
    independent_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_scale is not None and not self.max_scale > self.scale_init:
            start = f"scale_init={self.scale_init!r}, where scales start"
            raise ValueError(
                f"{name_of(self)}: max_scale={self.max_scale!r} must be above {start}."
            )

    def extra_flops(self, site: Site) -> float:
        """Beyond drawing weights, which happens once a pass: the second product of flipout and of local."""
        m, n = site.matrix
        signs = 0.5 * (
            site.n_in + site.n_out
        )  # a multiplication is half a multiply-add
        return {"reparam": 0.0, "flipout": m * n + signs, "local": float(m * n)}[
            self.estimator
        ]

    @classmethod
    def like(cls, other: GaussianConfig) -> Self:
        """This method with another's fields but for its jitter, which means something else in each."""
        if isinstance(other, cls):
            return other
        shared = [f.name for f in fields(GaussianConfig) if f.name != "scale_jitter"]
        return cls(**{name: getattr(other, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class MeanField(GaussianConfig):
    """Mean-field Gaussian posterior over all weights: twice the parameters of the plain model.

    The defaults are the literature's, with which many small tasks end up worse than without a posterior;
    `sb.recipe("mean-field", start=...)` has those that scored best there, with their temperature.

    Args:
        prior: `Normal`, `HeNormal`, `TiedMean`, `LaplacePrior` (L1), `EmpiricalBayes` or `ScaleMixture`. Different
            layers may have different ones: give bayesianize a mapping from name patterns to configs.
        estimator: "reparam", "flipout" or "local" (see posteriors/gaussian.py). Flipout applies every layer twice,
            with the means and with the deviations: a step takes two of plain's at best, where "reparam" takes one.
        scale_init, scale_jitter: scales start at Normal(scale_init, scale_jitter).
        bias: "point" keeps biases point estimates, "gaussian" gives them posteriors too.
        max_scale: cap on the scales.
        independent_positions: lets "local" draw independent noise at positions that share their weights.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.MeanField(prior=sb.Normal(0.0, 0.3), estimator="flipout"))
        >>> sb.sample(net, torch.randn(5, 3), draws=4).shape
        torch.Size([4, 5, 2])
    """

    builds: ClassVar[str] = "gaussian.MeanFieldPosterior"


@dataclass(frozen=True, kw_only=True)
class KTied(GaussianConfig):
    """k-tied Normal posterior: mean-field with standard deviations of rank k.

    As for `MeanField`, `sb.recipe("2-tied", start=...)` has the prior, estimator and temperature that scored best.

    Args: as in `MeanField`, and
        rank: k; a matrix narrower than that gets as much as it can have, and its posterior's `note` says so.
        scale_jitter: standard deviation of the noise on the initial log U and log V.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(400, 400), sb.KTied(rank=2))
        >>> sum(p.numel() for p in net.posterior.parameters())
        1600
    """

    rank: Count = 2
    scale_jitter: NotNegative = 0.1
    main_field: ClassVar[str] = "rank"
    builds: ClassVar[str] = "k_tied.KTiedPosterior"

    def extra_flops(self, site: Site) -> float:
        """Beyond drawing weights, which happens once a pass: flipout's second product, or the thin ones of local."""
        if self.estimator != "local" or self.max_scale is not None:
            return super().extra_flops(site)
        m, n = site.matrix
        k = min(self.rank, m, n)
        return k * (k + 1) / 2 * (m + n)


@dataclass(frozen=True, kw_only=True)
class MatrixNormal(GaussianConfig):
    """Matrix normal posterior with diagonal row and column covariances (Louizos & Welling 2016): the 1-tied Normal.

    Args: as in `KTied`.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.MatrixNormal())
        >>> sum(p.numel() for p in net.posterior.parameters())
        5
    """

    scale_jitter: NotNegative = 0.1

    def resolved(self) -> KTied:
        return KTied(rank=1, **{f.name: getattr(self, f.name) for f in fields(self)})

    extra_flops = SiteConfig.extra_flops


@dataclass(frozen=True, kw_only=True)
class FullMatrixNormal(SiteConfig):
    """Matrix normal posterior with full covariances of rows and of columns; `MatrixNormal` has diagonal ones.

    An m x n matrix takes m (m + 1) / 2 + n (n + 1) / 2 numbers beside its mean. Biases stay points.

    `JointNormal(over="weights")` has a full covariance of all weights.

    Args:
        prior: `Normal` or `HeNormal`, independent for each weight.
        scale_init: standard deviation of all weights at the start, uncorrelated.
        limit: matrices that take more numbers are refused.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.FullMatrixNormal())
        >>> sum(p.numel() for p in net.posterior.parameters())
        9
    """

    prior: Annotated[Distribution, partial(check_prior, known=(Normal, HeNormal))] = (
        Normal(0.0, 1.0)  # noqa: RUF009 (immutable)
    )
    scale_init: Positive = 0.01
    limit: Limit = 10_000_000
    builds: ClassVar[str] = "full_matrix_normal.FullMatrixNormalPosterior"

    def check_size(self, site: Site) -> None:
        """Refuse a matrix whose covariance would take more numbers than the limit."""
        m, n = site.matrix
        numbers = m * (m + 1) // 2 + n * (n + 1) // 2
        if numbers > self.limit:
            raise ValueError(
                f"FullMatrixNormal: the covariance of a {m:,} x {n:,} matrix takes {numbers:,} numbers "
                f"({4e-9 * numbers:,.2f} GB), and limit={self.limit:,}. Use KTied or MeanField, or raise it."
            )
