"""From one kind of posterior to another: the members' means as factors of each layer, and k-tied scales in the place of
a diagonal Gaussian's, those of least KL from it.

    KL = sum 1/2 (sigma_ij^2 p_ij - 1) - log sigma_ij - 1/2 log p_ij,   sigma = U V^T,  p the precisions

For k = 1 it is a matrix scaling, solved by turns: sigma_ij^2 = a_i b_j with a_i = n / sum_j b_j p_ij and alike for b.

Sizes: K members, m x n the matrix view of a weight.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import (
    Conversion,
    bayesianize,
    conversions_of,
    debayesianize,
)
from slimbayes.engine import passes
from slimbayes.engine.state import copy_modules
from slimbayes.posteriors.configs.weights import KTied
from slimbayes.posteriors.factors import Drawn
from slimbayes.prediction.sample import central_pass

Factors = dict[str, dict[str, Drawn]]  # of each member, by layer and site


def plain_model(
    model: nn.Module, copy: bool = False
) -> tuple[nn.Module, Factors, list[tuple[str, Conversion]]]:
    """What an approximation begins with: a plain model to work on, the factors at its members' means, and its former
    conversions. A converted model is copied; a plain one, which has neither, is taken itself unless `copy` says so.
    """
    if not passes.posteriors_of(model):
        return copy_modules(model) if copy else model, {}, []
    return (
        debayesianize(copy_modules(model)),
        member_factors(model),
        conversions_of(model),
    )


@torch.no_grad()
def member_factors(model: nn.Module) -> Factors:
    """Factors r (K, out), s (K, in) and bias offsets at the members' means, by layer and site.

    None of layers whose mean is their own weight; refused where a mean is neither.
    """
    posteriors = passes.posteriors_of(model)
    members = math.lcm(*(p.members for p in posteriors))
    found: Factors = {}
    plain: list[str] = []

    def own(posterior: Any) -> bool:
        """Whether the one draw under way is the layer's own weight and bias."""
        linear = posterior.linear_map()
        weight, bias = posterior.materialize(linear, 0)
        return torch.equal(weight, linear.weight) and (
            bias is None or torch.equal(bias, linear.bias)
        )

    def look() -> None:
        names = {id(layer): name for name, layer in model.named_modules()}
        for p in posteriors:
            lines = p.factors()
            if lines is not None:
                s, r, bias = lines
                found.setdefault(names[id(p.layer)], {})[p.site.name] = Drawn(
                    r.clone(), s.clone(), bias
                )
            elif not (members == 1 and own(p)):
                raise ValueError(
                    f"The means of {p.name} ({type(p).__name__}) are no factors of its weight. Call "
                    f"materialize(model, member=0) first, which makes them plain weights."
                )
            else:
                plain.append(names[id(p.layer)])

    passes.run(central_pass(posteriors), look)
    if found and plain:
        raise ValueError(
            f"{plain[0]} has no factors, but {next(iter(found))} has. Call materialize(model, member=0) first."
        )
    return found


@torch.no_grad()
def set_factors(model: nn.Module, means: Factors) -> None:
    """Give joint posteriors over factors these means."""
    for name, sites in means.items():
        layer: Any = model.get_submodule(name)
        for site, drawn in sites.items():
            posterior = layer.posterior[site]
            for factor, value in ((posterior.r, drawn.r), (posterior.s, drawn.s)):
                factor.loc.copy_(value.unsqueeze(1))
            if posterior.bias is not None and drawn.bias is not None:
                posterior.bias.copy_(drawn.bias[1:])


@torch.no_grad()
def fit_k_tied(model: nn.Module, rank: int) -> None:
    """Replace joint posteriors of independent weights by k-tied ones, in place."""
    shared: Any = {"rank": rank, "bias": "gaussian", "scale_jitter": 0.0}
    joints = passes.posteriors_of(model)
    configs = {
        re.escape(p.name.rpartition(".")[0]): KTied(prior=p.prior, **shared)
        for p in joints
    }
    variances = {p.name: p.variances()[0].double() for p in joints}
    debayesianize(model)
    bayesianize(model, configs)
    for p in passes.posteriors_of(model):
        variance, size = variances[p.name], math.prod(p.site.shape)
        log_u, log_v = k_tied_logs(
            1 / p.site.to_matrix(variance[:size].view(p.site.shape)), p.rank
        )
        p.log_u.copy_(log_u)
        p.log_v.copy_(log_v)
        if p.bias_log_scale is not None:
            p.bias_log_scale.copy_(0.5 * variance[size:].log())


def k_tied_logs(precision: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """log U (m, k) and log V (n, k) of the k-tied scales nearest to a diagonal Gaussian of these precisions (m, n)."""
    m, n = precision.shape
    b = torch.ones(n, dtype=precision.dtype, device=precision.device)
    for _ in range(200):
        a = n / (precision @ b)
        b = m / (a @ precision)
    log_u, log_v = (0.5 * x.log().unsqueeze(1) for x in (a, b))
    if rank == 1:
        return log_u, log_v
    # From k equal shares, told apart by a small fixed pattern.
    pattern = torch.Generator().manual_seed(0)
    logs = [
        x
        - 0.5 * math.log(rank)
        + 0.3 * torch.randn(len(x), rank, generator=pattern, dtype=x.dtype).to(x.device)
        for x in (log_u, log_v)
    ]
    optimizer = torch.optim.LBFGS(
        [x.requires_grad_() for x in logs],
        max_iter=300,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-12,
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        scale = logs[0].exp() @ logs[1].exp().T
        value = (0.5 * scale.square() * precision - scale.log()).mean()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[arg-type]
    return logs[0].detach(), logs[1].detach()
