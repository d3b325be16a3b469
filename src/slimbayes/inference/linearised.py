"""predict_linearised: the predictive of a network that is linear in its posterior's numbers around their means.

    f(x) ~ Normal(f at the means, J covariance J^T)

which is what the Gauss-Newton matrix of a Laplace approximation assumes (Immer et al. 2021).

Sizes: K members, N rows, C outputs of a row, D numbers of one posterior, S draws.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine.noise import Seed, key, seed_of
from slimbayes.engine.sharing import evaluating
from slimbayes.inference.curvature import MOST_ROOTS
from slimbayes.inference.jacobians import Rows, joints_of, rows_at_means
from slimbayes.prediction.batches import batches_of
from slimbayes.prediction.checks import check_noise_rule
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.elbo import check_finite
from slimbayes.train.likelihoods import LikelihoodName, entropy, likelihood_named


def predict_linearised(
    model: nn.Module,
    x: Any,
    likelihood: LikelihoodName = "categorical",
    scale: float | Tensor = 0.0,
    draws: int | None = None,
    output: str | int | None = None,
    inputs: int | None = None,
    seed: Seed = None,
) -> Prediction:
    """Predict with the network linearised in its `JointNormal` posteriors, as `laplace` fits them.

    Without draws it is a closed form: for real targets the Gaussian itself; for classes the probit approximation,
    softmax(f / sqrt(1 + pi / 8 variance)), whose aleatoric part is the entropy at the means, or the total if that is
    less. It shrinks each class by its own variance, which may change the most probable one: draws are better where they
    can be afforded.

    Args:
        model, x, likelihood, scale, output, inputs: as in `predict`; batches of x must hold rows along one dimension.
        draws: from every member, of the linearised functions; each is one function for all rows. None for the closed
            form.
        seed: of the draws.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
        >>> fit = sb.laplace(net, [(torch.randn(50, 2), torch.randn(50, 1))], likelihood="gaussian")
        >>> pred = predict_linearised(net, torch.randn(7, 2), "gaussian", scale=fit.noise)
        >>> pred.mean.shape, bool((pred.variance > fit.noise**2).all())
        (torch.Size([7, 1]), True)
    """
    if draws is not None and draws < 1:
        raise ValueError(f"predict_linearised needs at least one draw, or None, got draws={draws!r}.")
    check_noise_rule(model, likelihood)
    check_finite(model)
    joints, number, parts = joints_of(model), seed_of(seed) if draws else 0, []
    with evaluating(model):
        for args, kwargs in batches_of(model, x, None, inputs):
            found = [
                [_linear(rows, joints, k, draws, number) for rows in rows_at_means(model, args, kwargs, k, output)]
                for k in range(joints[0].members)
            ]
            outputs, spread = (
                torch.stack([torch.cat([piece[i] for piece in member], i) for member in found]) for i in (0, 1)
            )
            parts.append(_prediction(outputs, spread, likelihood, scale, draws))
    return Prediction.joined(parts)


@torch.no_grad()
def _linear(rows: Rows, joints: list[Any], member: int, draws: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Outputs (B, ...) at the means, and their variances (1, B, ...), or S deviations (S, B, ...)."""
    outputs = rows.outputs.detach()
    many = math.prod(outputs.shape[1:])
    if many > MOST_ROOTS:
        raise ValueError(
            f"predict_linearised takes a backward pass for each of {many:,} outputs of a row, {MOST_ROOTS:,} at most. "
            f"Use predict, which samples."
        )
    noise = [_noise(p, draws, seed, place, member) for place, p in enumerate(joints)]
    roots = [p.times_root(member) for p in joints]
    spread = torch.zeros(draws or 1, *outputs.shape, dtype=outputs.dtype, device=outputs.device)
    flat = spread.view(len(spread), len(outputs), -1)
    for c in range(many):
        unit = torch.zeros_like(outputs).view(len(outputs), -1)
        unit[:, c] = 1.0
        for lines, root, e in zip(rows.pull(unit.view_as(outputs)), roots, noise, strict=True):
            moved = root(lines)
            flat[:, :, c] += moved.square().sum(1) if e is None else e @ moved.mT
    return outputs, spread


def _noise(posterior: Any, draws: int | None, seed: int, place: int, member: int) -> Tensor | None:
    if draws is None:
        return None
    source = torch.Generator().manual_seed(key(seed, "linearised", place, member))
    drawn = torch.randn(draws, posterior.size, generator=source, dtype=posterior.dtype)
    return drawn.to(posterior.device)


def _prediction(
    outputs: Tensor, spread: Tensor, likelihood: LikelihoodName, scale: float | Tensor, draws: int | None
) -> Prediction:
    """Of outputs (K, N, ...), and variances (K, 1, N, ...) or deviations (K, S, N, ...)."""
    members, means = len(outputs), likelihood_named(likelihood)
    if draws is not None:  # draw j belongs to member j mod K
        drawn = (outputs.unsqueeze(1) + spread).transpose(0, 1).flatten(0, 1)
        return Prediction.from_outputs(drawn, likelihood, members, scale)
    variance = spread.squeeze(1)
    if means.discrete:
        probit = outputs / (1 + math.pi / 8 * variance).sqrt()
        found = Prediction.from_outputs(probit, likelihood, members, scale)
        total = entropy(found.log_probs)
        within = torch.minimum(means.predictive(outputs, scale, None)[1].mean(0), total)
        found.aleatoric, found.epistemic = within, total - within
        return found
    found = Prediction.from_outputs(outputs, likelihood, members, scale)
    variance = variance[..., 0] if variance.dim() > found.by_member.dim() else variance  # of means, not raw scales
    found.epistemic = found.epistemic + variance.mean(0)
    assert found.noise is not None
    found.noise = found.noise + variance  # one Gaussian for each member: its density is that of the prediction
    return found
