"""Replace trained standard deviations by matrices of low rank (Swiatkowski et al. 2020, section 2.4 and Table 2).

    "mean-field"   sigma <- max(A_k, epsilon)   A_k: the k largest singular values' part of sigma, the nearest of rank k
    "k-tied"       sigma <- U V^T               positive U (m x k), V (n x k): a k-tied posterior, k (m + n) numbers

Where this deviates: the paper cuts negative entries of A_k off at zero. A standard deviation of exactly zero makes the
KL infinite, so we cut at epsilon. For k = 1 nothing is cut, since the rank-1 part of a positive matrix is positive.

A_k's error bounds that of U V^T from below. They agree for k = 1 (Perron-Frobenius), for k = 2 wherever A_2 is not
negative, and whenever the further singular values are small beside the first, as those of trained standard deviations
are. They need not agree for k >= 3: a matrix may have a larger nonnegative rank than rank.
"""

from __future__ import annotations

import math
from dataclasses import replace as changed
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import Model
from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import (
    GaussianSite,
    Replacement,
    config_of,
    gaussian_sites,
    mean_field,
    rebuilt,
    refuse_held_draws,
    replace,
)
from slimbayes.errors import did_you_mean
from slimbayes.posteriors.k_tied import KTied, KTiedPosterior

Form = Literal["mean-field", "k-tied"]


def truncate(
    model: Model,
    rank: int,
    form: Form = "mean-field",
    epsilon: float = 1e-6,
    include: Selection = None,
    exclude: Selection = None,
) -> Model:
    """Approximate every matrix of posterior standard deviations by one of low rank, in place, and return the model.

    The means stay. `truncation_errors` tells beforehand what is lost. Posteriors whose method changes get new
    parameters, so an optimizer must be made anew.

    Args:
        model: converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        rank: k, at most what the narrowest matrix can have: otherwise a ValueError, and the model is unchanged.
        form: which posterior holds the result. "mean-field" reaches the nearest matrix of rank k but keeps a number for
            each weight; "k-tied" has k (m + n) numbers. What is k-tied with this rank or less stays as it is.
        epsilon: least standard deviation.
        include, exclude: layers to truncate, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(30, 20), sb.MeanField())
        >>> net = truncate(net, rank=2, form="k-tied")
        >>> sum(p.numel() for p in net.posterior.parameters())  # 2 (30 + 20) in place of 600
        100
    """
    refuse_held_draws(model, "truncate")
    replace(model, _plan(model, gaussian_sites(model, include, exclude), rank, form, epsilon))
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
    errors = {site.name: 0.0 for site in sites}
    for site, new, _ in _plan(model, sites, rank, form, epsilon):
        before, after = site.scales(), changed(site, posterior=new).scales()
        errors[site.name] = float((after - before).norm() / before.norm())
    return errors


def _plan(model: nn.Module, sites: list[GaussianSite], rank: int, form: Form, epsilon: float) -> list[Replacement]:
    """What becomes of every site that changes."""
    _check(sites, rank, form, epsilon)
    if form == "mean-field":
        return [mean_field(model, s, low_rank(s.scales(), rank).clamp_min(epsilon)) for s in sites]
    wider = [s for s in sites if not (isinstance(s.posterior, KTiedPosterior) and s.posterior.rank <= rank)]
    return [_k_tied(model, s, rank, epsilon) for s in wider]


def _check(sites: list[GaussianSite], rank: int, form: str, epsilon: float) -> None:
    if form not in ("mean-field", "k-tied"):
        raise ValueError(f"Unknown form {form!r}{did_you_mean(str(form), ('mean-field', 'k-tied'))}")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}.")
    if not epsilon > 0:
        why = "because a standard deviation of zero has an infinite KL"
        raise ValueError(f"epsilon must be positive, {why}; got {epsilon!r}.")
    for site in sites:
        m, n = site.posterior.site.matrix
        if rank > min(m, n):
            raise ValueError(
                f"{site.name}: rank={rank} is more than its {m} x {n} matrix of standard deviations can have, which is "
                f"{min(m, n)}. Choose a lower rank, or leave the layer as it is with exclude={site.layer_name!r}."
            )


@torch.no_grad()
def _k_tied(model: nn.Module, site: GaussianSite, rank: int, epsilon: float) -> Replacement:
    """A k-tied posterior near a site's standard deviations, none of them below epsilon."""
    config = changed(KTied.like(config_of(model, site)), rank=rank)
    new = rebuilt(site, config)
    assert isinstance(new, KTiedPosterior)
    u, v, _ = nonnegative_factors(site.scales(), rank)
    # Factors are stored as logs, so zeros become small numbers: negligible ones, unless sigma would fall below epsilon.
    floor = 1e-6 * torch.minimum(u.mean(0), v.mean(0)).clamp_min(1e-100)
    if float((u @ v.T).min()) < epsilon:
        floor = torch.full_like(floor, math.sqrt(epsilon / rank))
    new.log_u.copy_(u.clamp_min(floor).log())
    new.log_v.copy_(v.clamp_min(floor).log())
    return Replacement(site, new, config)


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of this rank (Eckart-Young), which may have negative entries from rank 2 on.

    >>> low_rank(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 1)
    tensor([[2., 0.],
            [0., 0.]])
    """
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * values[:rank]) @ vt[:rank]


class Factors(NamedTuple):
    """U (m, k) and V (n, k), not negative, and the relative error |A - U V^T| / |A|."""

    u: Tensor
    v: Tensor
    error: float


# scikit-learn's NMF stops up to 5 % above the bound on nearly rank-1 matrices, in five times the time (400 x 300, k = 2
# and 3): this start is exact there, and the descent only repairs what had to be cut off.
def nonnegative_factors(matrix: Tensor, rank: int, steps: int = 2000) -> Factors:
    """Factors without negative entries whose product is near a positive matrix.

    Args:
        matrix: A (m, n), positive.
        rank: k, at most min(m, n).
        steps: at most so many rounds of coordinate descent (HALS, Cichocki & Phan 2009).

    Shape: U (m, k), V (n, k), columns of equal length in both, in float64.

    Example:
        >>> a = torch.rand(6, 2) @ torch.rand(2, 5)
        >>> u, v, error = nonnegative_factors(a, 2)
        >>> bool((u >= 0).all() and (v >= 0).all()), error < 1e-6
        (True, True)
    """
    matrix = matrix.double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    root[0] *= 1.0 if bool(left[:, 0].sum() >= 0) else -1.0  # first singular vectors are positive, up to a common sign
    u, v = (factor.clamp_min(0) for factor in _simplex_start(left[:, :rank] * root, right[:rank].T * root))
    enough = float(values[rank:].norm()) * (1 + 1e-6) + 1e-9 * float(matrix.norm())
    error = float((matrix - u @ v.T).norm())
    for step in range(steps):
        if error <= enough:
            break
        _improve(u, matrix @ v, v.T @ v)
        _improve(v, matrix.T @ u, u.T @ u)
        if step % 100 == 99:
            former, error = error, float((matrix - u @ v.T).norm())
            if error > former * (1 - 1e-5):
                break
    balance = (v.norm(dim=0) / u.norm(dim=0).clamp_min(1e-300)).sqrt().clamp_min(1e-150)
    u, v = u * balance, v / balance
    return Factors(u, v, float((matrix - u @ v.T).norm() / matrix.norm()))


def _simplex_start(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """U = P T >= 0 and V = Q T^-T, whose product is P Q^T exactly; V may have negative entries.

    Divided by their first entries, the rows of P are points in k - 1 dimensions; U >= 0 says that a simplex holds them
    all. We take the all but tight one of fixed directions: U > 0 always, V >= 0 unless its corners reach too far.
    """
    k = p.shape[1]
    if k == 1:
        return p, q
    # The floors are for exact blocks, or a rank below k: there a first entry or an axis can be mere rounding.
    points = p[:, 1:] / p[:, :1].clamp_min(1e-6 * float(p[:, 0].max()))
    # Facet normals of a regular simplex: k vectors that sum to zero, scaled to the points' extent along each axis.
    frame = torch.cat([p.new_ones(k, 1), torch.eye(k, dtype=p.dtype, device=p.device)[:, :-1]], 1)
    normals = torch.linalg.qr(frame)[0][:, 1:] / points.abs().amax(0).clamp_min(1e-6)
    heights = -(points @ normals.T).amin(0) + 1e-3  # each facet all but touches a point: a factor of zero has no log
    t = torch.cat([heights[None], normals.T]) / heights.sum()
    return p @ t, q @ torch.linalg.inv(t).T


def _improve(x: Tensor, target: Tensor, gram: Tensor) -> None:
    """Set each column of one factor to its best nonnegative value, in place; target is A times the other factor."""
    for j in range(x.shape[1]):
        gradient = target[:, j] - x @ gram[:, j]
        x[:, j] = (x[:, j] + gradient / gram[j, j].clamp_min(1e-300)).clamp_min(0)
