"""The generalised Gauss-Newton matrix of each joint posterior's numbers, summed over a data set in one pass; and the
covariances that follow from it.

    H = sum over rows J^T F J       J: derivatives of a row's outputs;  F: the likelihood's information about them

H of a posterior's numbers is a diagonal, a matrix, or for a layer's weights W (n outputs x m inputs and a one for the
bias) a Kronecker product of two small ones (Martens and Grosse 2015; over positions as KFAC-reduce, Eschenhagen et al.
2023):

    H ~ G (x) A / N,    A = sum over rows of a a^T,  G = sum over rows and directions of g g^T

a is a row's input to the layer, averaged over its positions, g the derivative of its outputs, summed over them. It is
exact for one row, and where g g^T is the same for all rows, as in a linear model of Gaussian targets.

Sizes: K members, D numbers of one posterior, B rows, N rows of all batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.inference.linearised import MOST_ROOTS, joints_of, rows_at_means
from slimbayes.posteriors.joint_normal import ROUNDING
from slimbayes.prediction.batches import IGNORED
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

NO_TARGETS = (
    "laplace was given no targets: the loader is empty, or all of them are -100."
)


def triangular(values: Tensor, vectors: Tensor, precision: float) -> Tensor:
    """Cholesky factor of (H + lambda)^-1 (D, D) from eigenvalues (D,) and eigenvectors (D, D) of H."""
    half = vectors * (values.clamp_min(0) + precision).rsqrt()
    # A triangular root of half half^T from a QR, which keeps the digits that forming the product would lose.
    root = torch.linalg.qr(half.mT).R.mT
    return root * root.diagonal().sign()


class SiteCurvature:
    """The curvature of one posterior's numbers: diagonals (K, D), or whole matrices (K, D, D)."""

    _found: tuple[Tensor, Tensor] | None = None

    def __init__(self, posterior: Any) -> None:
        shape = (
            posterior.members,
            *[posterior.size] * (2 if posterior.correlated else 1),
        )
        self.posterior, self.values = (
            posterior,
            torch.zeros(shape, dtype=torch.float64, device=posterior.device),
        )

    def add_derivatives(self, lines: Tensor, member: int) -> None:
        """Derivatives (B, D) of rows along one direction of their outputs; of a layer's outputs (B, n) in a product."""
        lines = lines.double()
        self.values[member] += (
            lines.square().sum(0) if self.values.dim() == 2 else lines.mT @ lines
        )

    def add_inputs(self, inputs: Tensor | None, kept: Tensor) -> None:
        """Inputs (B, m) of a layer, once for each batch, and how much rows count (B,)."""

    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (K, D), the least first, and eigenvectors (K, D, D)."""
        if self._found is None:
            values, vectors = torch.linalg.eigh(self.values)
            self._found = values.clamp_min(0), vectors
        return self._found

    def spectrum(self) -> Tensor:
        """Eigenvalues (K, D)."""
        return self.values if self.values.dim() == 2 else self._eigen()[0]

    def finite(self) -> bool:
        return bool(self.values.isfinite().all())

    def directions(self, scale: float, precision: float) -> int | None:
        """How many directions tell the covariance (H / scale + precision)^-1 from the prior's, all members' alike; None
        if so many that they take more room than the covariance.
        """
        p = self.posterior
        if not (p.correlated and p.rounded and p.dtype == torch.float32):
            return None
        # Standard deviations fall short of the prior's by a factor of sqrt(1 + e / precision).
        shares = self._eigen()[0] / (scale * precision)
        count = int((shares > (1 + ROUNDING) ** 2 - 1).sum(1).max())
        # Of what is 1e-4 of the prior's, float32 has three digits left in 1 - V V^T.
        return count if 2 * count < p.size - 1 and float(shares.max()) < 1e8 else None

    def fit(
        self, scale: float, precision: float, directions: int | None = None
    ) -> None:
        """Give the posterior that covariance, by so many directions or whole."""
        if self.values.dim() == 2:
            self.posterior.set_root((self.values / scale + precision).rsqrt())
            return
        values, vectors = self._eigen()
        if directions is None:
            pairs = zip(values / scale, vectors, strict=True)
            self.posterior.set_root(
                torch.stack([triangular(e, v, precision) for e, v in pairs])
            )
            return
        first = values.shape[1] - directions
        narrower = 1 - (1 + values[:, first:] / (scale * precision)).rsqrt()
        self.posterior.set_directions(
            precision**-0.5, vectors[:, :, first:] * narrower.sqrt().unsqueeze(1)
        )


class KroneckerCurvature(SiteCurvature):
    """G (n, n) and A (m, m), or (m + 1, m + 1) with a bias."""

    def __init__(self, posterior: Any) -> None:
        self.posterior, self.rows = posterior, 0.0
        self.left, self.right = (
            torch.zeros_like(basis, dtype=torch.float64) for basis in posterior.bases()
        )

    def add_derivatives(self, lines: Tensor, member: int) -> None:
        self.left += lines.double().mT @ lines.double()

    def add_inputs(self, inputs: Tensor | None, kept: Tensor) -> None:
        assert inputs is not None
        lines = inputs.double() * kept.double().sqrt().unsqueeze(1)
        self.right += lines.mT @ lines
        self.rows += float(kept.sum())

    def _eigen(self) -> tuple[Any, Any]:
        """Eigenvalues (n, m), and eigenvectors of both sides."""
        (left, u), (right, v) = (
            torch.linalg.eigh(side) for side in (self.left, self.right)
        )
        return torch.outer(left.clamp_min(0), right.clamp_min(0)) / max(
            self.rows, 1.0
        ), (u, v)

    def spectrum(self) -> Tensor:
        return self._eigen()[0].flatten().unsqueeze(0)

    def finite(self) -> bool:
        return bool(self.left.isfinite().all() and self.right.isfinite().all())

    def fit(
        self, scale: float, precision: float, directions: int | None = None
    ) -> None:
        values, sides = self._eigen()
        self.posterior.set_bases(*sides, (values / scale + precision).rsqrt())


@dataclass
class Curvature:
    """What a pass over the data tells.

    Attributes:
        blocks: H of each posterior, in float64.
        log_likelihood: of all targets at the means, averaged over members; at unit noise for "gaussian".
        targets: how many there were.
    """

    blocks: list[SiteCurvature] = field(default_factory=list)
    log_likelihood: float = 0.0
    targets: int = 0


def sum_curvature(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any, Tensor]],
    likelihood: LikelihoodName,
    samples: int | None = None,
    output: str | int | None = None,
    scale: float = 1.0,
) -> Curvature:
    """Sum the curvature over all batches; `samples` draws targets from the model instead of exact information.

    `scale` is the noise of "gaussian", or the targets' own deviation for "heteroscedastic_gaussian".
    """
    joints = joints_of(model)
    total, members = (
        Curvature(
            [(KroneckerCurvature if p.factored else SiteCurvature)(p) for p in joints]
        ),
        joints[0].members,
    )
    for args, kwargs, target in batches:
        for member in range(members):
            for rows in rows_at_means(
                model, args, kwargs, member, output, factored=True
            ):
                part = target[rows.start : rows.start + len(rows.outputs)]
                likelihood_named(likelihood).predictive(
                    rows.outputs[None, :1], 1.0, None
                )  # refuses what does not fit
                kept = _kept(rows.outputs, part, likelihood).to(rows.outputs.dtype)
                for root in _roots(rows.outputs.detach(), likelihood, samples, scale):
                    for block, lines in zip(
                        total.blocks, rows.pull(root * kept), strict=True
                    ):
                        block.add_derivatives(lines, member)
                for block, inputs in zip(total.blocks, rows.inputs(), strict=True):
                    block.add_inputs(
                        inputs, kept.flatten(1).amax(1) if kept.dim() > 1 else kept
                    )
                total.log_likelihood += (
                    _log_likelihood(rows.outputs, part, likelihood, scale) / members
                )
        total.targets += int(_kept(target, target, likelihood).sum())
    if not total.targets:
        raise ValueError(NO_TARGETS)
    for p, block in zip(joints, total.blocks, strict=True):
        if not block.finite():
            raise FloatingPointError(
                f"laplace: the curvature of {p.name} is NaN or infinite. Look for inputs or weights that are not "
                f"finite (check_finite), or run the model in float32."
            )
    return total


def _roots(
    outputs: Tensor, likelihood: LikelihoodName, samples: int | None, scale: float
) -> Iterator[Tensor]:
    """Square roots of the information about outputs (B, ...), exact or of targets that are drawn."""
    information = likelihood_named(likelihood).fisher
    if samples is not None:
        return (
            information.score(outputs, scale) / samples**0.5 for _ in range(samples)
        )
    count = information.count(outputs)
    if count > MOST_ROOTS:
        raise ValueError(
            f"Exact curvature of outputs of shape {tuple(outputs.shape)} takes {count:,} backward passes for each "
            f"batch. Give samples=, such as 10, to draw as many targets from the model instead."
        )
    return information.roots(outputs, scale)


def _kept(outputs: Tensor, target: Tensor, likelihood: LikelihoodName) -> Tensor:
    """Where targets are to count, shaped to meet the outputs; a real target may be any number, of whatever type."""
    real = not likelihood_named(likelihood).discrete
    kept = torch.ones_like(target, dtype=torch.bool) if real else target != IGNORED
    return kept.view(*kept.shape, *[1] * max(outputs.dim() - kept.dim(), 0))


def _log_likelihood(
    outputs: Tensor, target: Tensor, likelihood: LikelihoodName, scale: float
) -> float:
    outputs = outputs.detach().double()
    if likelihood_named(likelihood).discrete and bool((target == IGNORED).any()):
        kept = target != IGNORED
        outputs, target = outputs[kept], target[kept]
    if not target.numel():
        return 0.0
    target = target.double() if target.is_floating_point() else target
    return float(
        Prediction.from_outputs(outputs[None], likelihood, likelihood_std=scale)
        .log_prob(target)
        .sum()
    )
