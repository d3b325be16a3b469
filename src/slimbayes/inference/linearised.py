"""predict_linearised: the predictive of a network that is linear in its posterior's numbers around their means.

    f(x) ~ Normal(f at the means, J covariance J^T)

which is what the Gauss-Newton matrix of a Laplace approximation assumes (Immer et al. 2021); and the derivatives J that
both need. Each row of a batch is a draw of its own: a member's mean plus a deviation of zero that needs a gradient.
Backward then gives every row's own derivative at once. Rows that cannot be told apart run one by one.

Sizes: K members, N rows, B of a piece of a batch, C outputs of a row, D numbers of one posterior, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import calls, passes
from slimbayes.engine.layout import Unproven, arrays_of, map_arrays
from slimbayes.engine.locate import batch_dim_of, check_size, layout_of
from slimbayes.engine.noise import Seed, seed_of
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.sharing import evaluating
from slimbayes.posteriors.joint_normal import JointNormalPosterior
from slimbayes.posteriors.joint_weights import Watched
from slimbayes.prediction.averages import draw_counts
from slimbayes.prediction.batches import batches_of, rows_of
from slimbayes.prediction.checks import check_draws
from slimbayes.prediction.predict import find_output
from slimbayes.prediction.prediction import Prediction
from slimbayes.seeds import key
from slimbayes.train.elbo import check_finite
from slimbayes.train.likelihoods import LikelihoodName, entropy, likelihood_named

MOST_ROOTS = 1000  # backward passes for each piece of a batch
MOST = 2**24  # numbers that the derivatives of a piece of a batch may hold


@dataclass
class RowDerivatives:
    """Outputs (B, ...) of consecutive rows at the means, the first of them row `start` of the batch."""

    start: int
    outputs: Tensor
    deviations: list[Tensor]
    watched: list[Watched | None]

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        """cotangent^T d outputs / d numbers of each row, (B, D) for each posterior."""
        found = torch.autograd.grad(
            self.outputs,
            self.deviations,
            cotangent,
            retain_graph=True,
            allow_unused=True,
        )
        return [
            torch.zeros_like(d) if g is None else g
            for g, d in zip(found, self.deviations, strict=True)
        ]

    def inputs(self) -> list[Tensor | None]:
        """Inputs (B, m) of the layers whose curvature is a Kronecker product."""
        return [
            None if w is None else w.inputs(len(self.outputs)) for w in self.watched
        ]


def joints_of(model: nn.Module) -> list[Any]:
    """The joint posteriors of a model; refused where others have a part in its draws."""
    found = passes.posteriors_of(model)
    others = [p.name for p in found if not isinstance(p, JointNormalPosterior)]
    if others or not found:
        what = f"{others[0]} has another one" if others else "the model has none"
        raise ValueError(
            f"Derivatives are taken in the numbers of JointNormal posteriors, but {what}; see laplace."
        )
    return found


def rows_at_means(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    member: int,
    output: str | int | None,
    factored: bool = False,
) -> Iterator[RowDerivatives]:
    """A batch in pieces, each run at a member's means, so small that derivatives of all its rows fit into memory.

    `factored` takes derivatives in the outputs of layers whose covariance is a Kronecker product, not in its numbers.
    """
    joints = joints_of(model)
    sizes = [p.site.n_out if factored and p.factored else p.size for p in joints]
    layout, dim = layout_of(model, args, kwargs, joints), batch_dim_of(model) or 0
    many = (
        layout.rows((args, kwargs))
        if layout.rowwise
        else rows_of(model, arrays_of((args, kwargs)))
    )

    def cut(start: int, count: int) -> Any:
        """The inputs of some rows, which `layout` must tell apart if they are more than one."""

        def row(i: int, leaf: Any) -> Any:
            return (
                leaf.narrow(dim, start, 1)
                if leaf.dim() > dim and leaf.shape[dim] == many
                else leaf
            )

        if not layout.rowwise:
            return map_arrays(row, (args, kwargs))
        part = layout.narrow((args, kwargs), start, count)
        check_size(model, part, joints, layout)
        return part

    def pick(parameter: Tensor, n: int) -> Tensor:
        return parameter.detach()[member : member + 1].expand(n, *parameter.shape[1:])

    @torch.enable_grad()
    def run(inputs: Any, start: int, count: int) -> RowDerivatives:
        new = Pass(count, count, rowwise=False)
        new.layout = layout if count > 1 else None
        mask = inputs[1].get(
            "attention_mask"
        )  # padding must not change what layers of transformers get on average
        mask = (
            mask
            if isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == count
            else None
        )
        deviations = [
            torch.zeros(count, size, device=p.device, dtype=p.dtype, requires_grad=True)
            for p, size in zip(joints, sizes, strict=True)
        ]
        watched = [
            Watched(deviation, [], mask) if factored and p.factored else None
            for p, deviation in zip(joints, deviations, strict=True)
        ]
        for p, deviation, watch in zip(joints, deviations, watched, strict=True):
            new.put(p.key, Noise(deviation.detach()[:, :0], deviation.detach()[:, :0]))
            new.values[p.key] = watch or p.draws_at(deviation, pick)
        outputs = find_output(passes.run(new, model, *inputs[0], **inputs[1]), output)
        return RowDerivatives(start, outputs, deviations, watched)

    start, most = 0, max(1, MOST // sum(sizes))
    while start < many:
        count = min(most, many - start) if layout.rowwise else 1
        part = cut(start, count)
        try:
            yield run(part, start, count)
        except Unproven as error:
            calls.unfold(layout, error)
            continue
        start += count


def predict_linearised(
    model: nn.Module,
    x: Any,
    likelihood: LikelihoodName = "categorical",
    likelihood_std: float | Tensor = 0.0,
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
        model, x, likelihood, likelihood_std, output, inputs: as in `predict`; batches of x must hold rows along one
            dimension.
        draws: S, of the linearised functions; draw j is one function for all rows and belongs to member j mod K. None
            for the closed form.
        seed: of the draws.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
        >>> fit = sb.laplace(net, [(torch.randn(50, 2), torch.randn(50, 1))], likelihood="gaussian")
        >>> pred = predict_linearised(net, torch.randn(7, 2), "gaussian", likelihood_std=fit.likelihood_std)
        >>> pred.mean.shape, bool((pred.variance > fit.likelihood_std**2).all())
        (torch.Size([7, 1]), True)
    """
    check_draws("predict_linearised", draws, also=(None,))
    likelihood_named(likelihood)  # refuses an unknown one
    check_finite(model)
    joints, number, parts = joints_of(model), seed_of(seed) if draws else 0, []
    members = joints[0].members
    counts = [1] * members if draws is None else draw_counts(int(draws), members)
    with evaluating(model):
        for args, kwargs in batches_of(model, x, None, inputs):
            outputs, spread = [], []
            for k, count in enumerate(counts):
                if count == 0:
                    continue
                every = None if draws is None else range(k, int(draws), members)
                found = [
                    _linear(rows, joints, k, every, number)
                    for rows in rows_at_means(model, args, kwargs, k, output)
                ]
                outputs.append(torch.cat([piece[0] for piece in found]))
                spread.append(torch.cat([piece[1] for piece in found], 1))
            parts.append(
                _prediction(
                    outputs, spread, likelihood, likelihood_std, draws is not None
                )
            )
    return Prediction.joined(parts)


@torch.no_grad()
def _linear(
    rows: RowDerivatives, joints: list[Any], member: int, draws: range | None, seed: int
) -> tuple[Tensor, Tensor]:
    """Outputs (B, ...) at the means, and their variances (1, B, ...), or deviations (S', B, ...) of draws with these
    numbers.
    """
    outputs = rows.outputs.detach()
    many = math.prod(outputs.shape[1:])
    if many > MOST_ROOTS:
        raise ValueError(
            f"predict_linearised takes a backward pass for each of {many:,} outputs of a row, {MOST_ROOTS:,} at most. "
            f"Use predict, which samples."
        )

    def noise_of(place: int, p: Any) -> Tensor | None:
        if draws is None:
            return None
        lines = torch.empty(len(draws), p.size, dtype=p.dtype)
        for line, j in zip(lines, draws, strict=True):
            source = torch.Generator().manual_seed(key(seed, "linearised", place, j))
            line.normal_(generator=source)
        return lines.to(p.device)

    noise = [noise_of(place, p) for place, p in enumerate(joints)]
    roots = [p.times_root(member) for p in joints]
    count = 1 if draws is None else len(draws)
    spread = torch.zeros(
        count, *outputs.shape, dtype=outputs.dtype, device=outputs.device
    )
    flat = spread.view(len(spread), len(outputs), -1)
    for c in range(many):
        unit = torch.zeros_like(outputs).view(len(outputs), -1)
        unit[:, c] = 1.0
        for lines, root, e in zip(
            rows.pull(unit.view_as(outputs)), roots, noise, strict=True
        ):
            moved = root(lines)
            flat[:, :, c] += moved.square().sum(1) if e is None else e @ moved.mT
    return outputs, spread


def _prediction(
    at_means: list[Tensor],
    spread: list[Tensor],
    likelihood: LikelihoodName,
    likelihood_std: float | Tensor,
    drawn: bool,
) -> Prediction:
    """Of each member's outputs (N, ...), and their variance (1, N, ...) or its draws' deviations (S', N, ...)."""
    members, meaning = len(at_means), likelihood_named(likelihood)
    if drawn:  # draw j belongs to member j mod K
        count = sum(map(len, spread))
        draws = [
            at_means[j % members] + spread[j % members][j // members]
            for j in range(count)
        ]
        return Prediction.from_outputs(
            torch.stack(draws), likelihood, members, likelihood_std
        )
    outputs, variance = torch.stack(at_means), torch.cat(spread)
    if meaning.discrete:
        probit = outputs / (1 + math.pi / 8 * variance).sqrt()
        found = Prediction.from_outputs(probit, likelihood, members, likelihood_std)
        total = entropy(found.log_probs)
        within = torch.minimum(
            meaning.predictive(outputs, likelihood_std, None)[1].mean(0), total
        )
        return replace(found, aleatoric=within, epistemic=total - within)
    found = Prediction.from_outputs(outputs, likelihood, members, likelihood_std)
    variance = (
        variance[..., 0] if variance.dim() > found.by_member.dim() else variance
    )  # of means, not raw scales
    assert found.noise is not None
    noise = (
        found.noise + variance
    )  # one Gaussian for each member: its density is that of the prediction
    return replace(found, epistemic=found.epistemic + variance.mean(0), noise=noise)
