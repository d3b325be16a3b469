"""Replace trained standard deviations by matrices of low rank (Swiatkowski et al. 2020, section 2.4 and Table 2).

    sigma <- max(A_k, epsilon)          A_k: the k largest singular values' part of sigma, the nearest of rank k

Where this deviates: the paper cuts negative entries of A_k off at zero. A standard deviation of exactly zero makes the
KL infinite, so we cut at epsilon. For k = 1 nothing is cut, since the rank-1 part of a positive matrix is positive.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from slimbayes.convert.convert import Model
from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import Replacement, gaussian_sites, mean_field, refuse_held_draws, replace


def truncate(
    model: Model, rank: int, epsilon: float = 1e-6, include: Selection = None, exclude: Selection = None
) -> Model:
    """Approximate every matrix of posterior standard deviations by one of low rank, in place, and return the model.

    The means stay, and posteriors become mean-field ones. `truncation_errors` tells beforehand what is lost. Posteriors
    whose method changes get new parameters, so an optimizer must be made anew.

    Args:
        model: converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        rank: k, at most what the narrowest matrix can have: otherwise a ValueError, and the model is unchanged.
        epsilon: least standard deviation.
        include, exclude: layers to truncate, as in `bayesianize`.

    Example:
        >>> import slimbayes as sb
        >>> from slimbayes.diagnostics import spectrum
        >>> net = truncate(sb.bayesianize(nn.Sequential(nn.Linear(30, 20)), sb.MeanField()), rank=2)
        >>> round(spectrum(net)["0"].first(2), 6)
        1.0
    """
    refuse_held_draws(model, "truncate")
    replace(model, _plan(model, rank, epsilon, include, exclude))
    return model


@torch.no_grad()
def truncation_errors(
    model: nn.Module, rank: int, epsilon: float = 1e-6, include: Selection = None, exclude: Selection = None
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
    errors = {}
    for site, new, _ in _plan(model, rank, epsilon, include, exclude):
        before, after = site.scales(), dataclasses.replace(site, posterior=new).scales()
        errors[site.name] = float((after - before).norm() / before.norm())
    return errors


def _plan(model: nn.Module, rank: int, epsilon: float, include: Selection, exclude: Selection) -> list[Replacement]:
    """What becomes of every site."""
    sites = gaussian_sites(model, include, exclude)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}.")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive: a standard deviation of zero has an infinite KL; got {epsilon!r}.")
    for site in sites:
        m, n = site.posterior.site.matrix
        if rank > min(m, n):
            raise ValueError(
                f"{site.name}: rank={rank} is more than its {m} x {n} matrix of standard deviations can have, which is "
                f"{min(m, n)}. Choose a lower rank, or leave the layer as it is with exclude={site.layer_name!r}."
            )
    return [mean_field(model, site, low_rank(site.scales(), rank).clamp_min(epsilon)) for site in sites]


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of this rank (Eckart-Young), which may have negative entries from rank 2 on.

    >>> low_rank(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 1)
    tensor([[2., 0.],
            [0., 0.]])
    """
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * values[:rank]) @ vt[:rank]
