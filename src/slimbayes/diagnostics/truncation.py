"""truncate: replace trained standard deviations by matrices of low rank (Swiatkowski et al. 2020, section 2.4 and Table 2).

    "mean-field"   sigma <- max(A_k, epsilon)     A_k: the k largest singular values' part of sigma
    "k-tied"       sigma <- U V^T                 positive U (m x k), V (n x k): a real k-tied posterior, k (m + n) numbers

Where this deviates: the paper cuts negative entries of A_k off at zero. A standard deviation of exactly zero makes the KL
infinite, so we cut at epsilon. For k = 1 nothing is cut, since the rank-1 part of a positive matrix is positive.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import Model
from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.low_rank import low_rank, nonnegative_factors
from slimbayes.diagnostics.sites import (
    GaussianSite,
    converted_config,
    decisions_of,
    exchange,
    gaussian_sites,
    rebuilt,
    refuse_open_pass,
)
from slimbayes.errors import did_you_mean
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.gaussian import GaussianPosterior
from slimbayes.posteriors.k_tied import KTied, KTiedPosterior
from slimbayes.posteriors.mean_field import MeanField, MeanFieldPosterior

Form = Literal["mean-field", "k-tied"]
_FORMS = ("mean-field", "k-tied")


def truncate(
    model: Model,
    rank: int,
    form: Form = "mean-field",
    epsilon: float = 1e-6,
    include: Selection = None,
    exclude: Selection = None,
) -> Model:
    """Approximate every matrix of posterior standard deviations by one of low rank, in place, and return the model.

    The means stay. `truncation_errors` tells beforehand what is lost. Posteriors whose method changes get new parameters, so an
    optimizer must be made anew.

    Args:
        model: a model converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        rank: k.
        form: which posterior holds the result. "mean-field" reaches the nearest matrix of rank k but keeps a number for each
            weight; "k-tied" has k (m + n) numbers and positive factors. A posterior that is k-tied with this rank or less stays
            as it is.
        epsilon: least standard deviation.
        include, exclude: layers to truncate, as in `bayesianize`.

    Raises:
        ValueError: a layer's matrix has fewer rows or columns than `rank`. The model is then unchanged.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(30, 20), sb.MeanField())
        >>> net = truncate(net, rank=2, form="k-tied")
        >>> sum(p.numel() for p in net.posterior.parameters())  # 2 (30 + 20) in place of 600
        100
    """
    refuse_open_pass(model, "truncate")
    sites = gaussian_sites(model, include, exclude)
    new, configs = _plan(model, sites, rank, form, epsilon)
    exchange(model, sites, new, configs)
    return model


@torch.no_grad()
def truncation_errors(
    model: nn.Module,
    rank: int,
    form: Form = "mean-field",
    epsilon: float = 1e-6,
    include: Selection = None,
    exclude: Selection = None,
) -> dict[str, float]:
    """Relative error |sigma' - sigma| / |sigma| of every weight that `truncate` would make, without changing the model.

    Args: as in `truncate`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(30, 20)), sb.KTied(rank=3))
        >>> one, three = (truncation_errors(net, rank=k)["0.weight"] for k in (1, 3))
        >>> one > 1e-3, three < 1e-6
        (True, True)
    """
    sites = gaussian_sites(model, include, exclude)
    new, _ = _plan(model, sites, rank, form, epsilon)
    errors = {}
    for site in sites:
        before = site.scales()
        posterior = new.get(site.name, site.posterior)
        after = posterior.site.to_matrix(posterior.log_scale()).double().exp()
        errors[site.name] = float((after - before).norm() / before.norm())
    return errors


def _plan(
    model: nn.Module, sites: list[GaussianSite], rank: int, form: Form, epsilon: float
) -> tuple[dict[str, GaussianPosterior], dict[str, Config]]:
    """New posteriors by site name and new configs by layer name, for everything that changes."""
    _check(sites, rank, form, epsilon)
    decisions = decisions_of(model)
    new: dict[str, GaussianPosterior] = {}
    configs: dict[str, Config] = {}
    for site in sites:
        posterior = site.posterior
        if form == "k-tied" and isinstance(posterior, KTiedPosterior) and posterior.log_u.shape[1] <= rank:
            continue
        config = decisions[site.layer_name].config
        assert config is not None
        if form == "k-tied":
            configs[site.layer_name] = tied = converted_config(config, KTied, rank=rank)
            new[site.name] = k_tied(posterior, tied, site.scales(), epsilon)
        else:
            free = config if isinstance(config, MeanField) else converted_config(config, MeanField)
            configs[site.layer_name] = free
            new[site.name] = mean_field(posterior, free, low_rank(site.scales(), rank).clamp_min(epsilon))
    return new, configs


def _check(sites: list[GaussianSite], rank: int, form: str, epsilon: float) -> None:
    if form not in _FORMS:
        raise ValueError(f"Unknown form {form!r}{did_you_mean(str(form), _FORMS)}")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}.")
    if not epsilon > 0:
        raise ValueError(
            f"epsilon must be positive, because a standard deviation of zero has an infinite KL; got {epsilon!r}."
        )
    for site in sites:
        m, n = site.posterior.site.matrix
        if rank > min(m, n):
            raise ValueError(
                f"{site.name}: rank={rank} is more than its {m} x {n} matrix of standard deviations can have, which is "
                f"{min(m, n)}. Choose a lower rank, or leave the layer as it is with exclude={site.layer_name!r}."
            )


@torch.no_grad()
def mean_field(old: GaussianPosterior, config: MeanField, scales: Tensor) -> MeanFieldPosterior:
    """A mean-field posterior with these standard deviations (m, n)."""
    new = rebuilt(old, config)
    assert isinstance(new, MeanFieldPosterior)
    new.weight_log_scale.copy_(new.site.from_matrix(scales.log()))
    return new


@torch.no_grad()
def k_tied(old: GaussianPosterior, config: KTied, scales: Tensor, epsilon: float) -> KTiedPosterior:
    """A k-tied posterior near these standard deviations (m, n), none of them below epsilon."""
    new = rebuilt(old, config)
    assert isinstance(new, KTiedPosterior)
    u, v, _ = nonnegative_factors(scales, config.rank)
    # Factors are stored as logs, so zeros become small numbers: negligible ones, unless sigma itself would fall below epsilon.
    floor = 1e-6 * torch.minimum(u.mean(0), v.mean(0)).clamp_min(1e-100)
    if float((u @ v.T).min()) < epsilon:
        floor = torch.full_like(floor, math.sqrt(epsilon / config.rank))
    new.log_u.copy_(u.clamp_min(floor).log())
    new.log_v.copy_(v.clamp_min(floor).log())
    return new
