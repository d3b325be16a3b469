"""The configs of the k-tied Normal; posteriors/k_tied.py says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimbayes.posteriors.checks import check_count
from slimbayes.posteriors.configs.gaussian import GaussianConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True)
class KTied(GaussianConfig):
    """k-tied Normal posterior: mean-field with standard deviations of rank k.

    Args: as in `MeanField`, and
        rank: k; a matrix narrower than that gets as much as it can have, and its posterior's `note` says so.
        scale_jitter: standard deviation of the noise on the initial log U and log V.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(400, 400), sb.KTied(rank=2))
        >>> sum(p.numel() for p in net.posterior.parameters())
        1600
    """

    rank: int = 2
    scale_jitter: float = 0.1

    def __post_init__(self) -> None:
        check_count(self, "rank", self.rank)
        super().__post_init__()

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.k_tied import KTiedPosterior

        return KTiedPosterior(self, site, self.rank)

    def extra_flops(self, site: Site) -> float:
        """Beyond drawing weights, which happens once a pass: flipout's second product, or the thin ones of local."""
        thin = self.estimator == "local" and self.max_scale is None
        return thin_flops(site, self.rank) if thin else super().extra_flops(site)

    def describe(self) -> str:
        return f"KTied(rank={self.rank})"


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

    scale_jitter: float = 0.1

    def extra_flops(self, site: Site) -> float:
        """As `KTied` of rank one."""
        thin = self.estimator == "local" and self.max_scale is None
        return thin_flops(site, rank=1) if thin else super().extra_flops(site)

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.k_tied import KTiedPosterior

        return KTiedPosterior(self, site, rank=1)


def thin_flops(site: Site, rank: int) -> float:
    """Multiply-adds of the local estimator's two thin products at one position."""
    m, n = site.matrix
    k = min(rank, m, n)
    return k * (k + 1) / 2 * (m + n)
