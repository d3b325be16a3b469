"""The k-tied Normal (Swiatkowski et al. 2020): mean-field posteriors whose standard deviations factor.

    W_ij ~ Normal(mean_ij, sigma_ij)      sigma = U V^T,  U (m x k), V (n x k) positive      k (m + n) numbers instead
    of m n

U and V are kept as logs, and log sigma is their logsumexp. Convolutions count as (inputs x kernel) x outputs, an LSTM's
matrices as one (inputs x 4 units) each. With k = 1 this is the matrix normal with diagonal covariances.

The local estimator never forms sigma: sigma o sigma has rank q = k (k + 1) / 2 at most, so the outputs' variance is
two thin products,

    x^2 (sigma o sigma) = [x^2 P] Q^T,    P_i,ab = u_ia u_ib,   Q_j,ab = v_ja v_jb, twice that where a < b

and neither does the KL, but for one logarithm of each weight where k > 1:

    sum sigma^2 = sum (U^T U) o (V^T V)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.priors import ScaleSums
from slimbayes.distributions.scales import widen
from slimbayes.distributions.sums import negligible, outer, sum_dtype, sum_log_outer
from slimbayes.engine.fused import product_type
from slimbayes.engine.rows import LinearMap
from slimbayes.kernels import LARGE, ready
from slimbayes.layers.site import Site
from slimbayes.posteriors.configs.weights import KTied
from slimbayes.posteriors.gaussian import GaussianPosterior
from slimbayes.posteriors.late import seed_late


class KTiedPosterior(GaussianPosterior):
    """log U (m, k) and log V (n, k).

    Attributes:
        rank: k, at most what the matrix can have.
        note: a word on what differs from the config, for summaries.
    """

    def __init__(self, config: KTied, site: Site) -> None:
        super().__init__(config, site)
        (m, n), rank = site.matrix, config.rank
        self.rank = min(rank, m, n)
        self.note = (
            ""
            if self.rank == rank
            else f"rank lowered from {rank} to {self.rank}: the matrix is {m} x {n}"
        )
        rank = self.rank
        # Each of the k products starts at scale_init / k, so that their sum starts where mean-field does.
        start = 0.5 * (math.log(config.scale_init) - math.log(rank))
        self.log_u = nn.Parameter(start + config.scale_jitter * torch.randn(m, rank))
        self.log_v = nn.Parameter(start + config.scale_jitter * torch.randn(n, rank))

    def raw_log_scale(self) -> Tensor:
        # logsumexp over k with one shift for the whole matrix: k multiplications and one logarithm for each weight
        log_u, log_v = widen(self.log_u), widen(self.log_v)
        shift_u, shift_v = log_u.detach().amax(), log_v.detach().amax()
        product = self._product((log_u - shift_u).exp(), (log_v - shift_v).exp())
        return product.clamp_min(torch.finfo(product.dtype).tiny).log() + (
            shift_u + shift_v
        )

    def scale(self) -> Tensor:
        if self.log_cap is not None:
            return super().scale()
        return self._product(widen(self.log_u).exp(), widen(self.log_v).exp())

    def _product(self, u: Tensor, v: Tensor) -> Tensor:
        """U V^T in the shape and memory order of the stored weight."""
        return (
            outer(v, u).view(self.site.shape)
            if self.site.out_dim == 0
            else self.site.from_matrix(outer(u, v))
        )

    def kl(self) -> Tensor:
        first, *others = self.kl_together([self])
        return sum(others, first)

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self]) -> list[Tensor]:
        """By sums, of layers that have a prior in common at once; weight by weight where sums do not tell the KL."""
        terms: list[Tensor] = []
        alike: dict[Any, list[tuple[Self, LinearMap]]] = {}
        for p in posteriors:
            linear = p.linear_map()
            if (
                linear.mask is not None
                or p.log_cap is not None
                or p.sharded
                or not hasattr(p.prior, "kl_of_sums")
            ):
                terms.append(super(KTiedPosterior, p).kl())
                continue
            places = p.log_u.dtype, p.log_u.device, linear.weight.dtype
            alike.setdefault(
                (p.rank, *places, p.prior, p.key if p.prior.per_layer else ""), []
            ).append((p, linear))
        for same in alike.values():
            means, prior = (
                [widen(linear.weight) for _, linear in same],
                same[0][0].prior,
            )
            terms.append(prior.kl_of_sums(means, cls.sums_of([p for p, _ in same])))
            terms += [term for p, linear in same for term in p.kl_of_bias(linear)]
        return terms

    @staticmethod
    def sums_of(posteriors: Sequence[KTiedPosterior]) -> ScaleSums:
        """Sums of log sigma and sigma^2 over the weights of posteriors of one rank: of thin factors alone, which are
        joined, but for sum log sigma where k > 1.
        """
        lines: list[Tensor] = [
            factor for p in posteriors for factor in (p.log_u, p.log_v)
        ]
        rank = posteriors[0].rank
        joined, sizes = torch.cat(lines), [len(factor) for factor in lines]
        logs = joined.to(sum_dtype(joined))
        # Each row less its maximum, so that products neither overflow nor vanish; less log k, so that they are near 1.
        shift = (
            logs.detach().amax(1, keepdim=True) + 0.5 * math.log(rank)
            if rank > 1
            else logs
        )
        factors = logs.exp()
        squares = (factors.unsqueeze(2) * factors.unsqueeze(1)).flatten(1)
        columns = torch.cat([squares, shift, torch.ones_like(shift)], 1)
        # Of each U and each V: U^T U, the sum of shifts, and how many rows there are.
        totals = torch.stack([part.sum(0) for part in columns.split(sizes)])
        u, v = totals[0::2], totals[1::2]
        log_scale = (u[:, -2] * v[:, -1] + u[:, -1] * v[:, -2]).sum()
        if rank > 1:
            near = (
                (logs - shift)
                .exp()
                .clamp_min(negligible(widen(joined)))
                .to(widen(joined).dtype)
                .split(sizes)
            )
            pairs = zip(near[1::2], near[0::2], strict=True)
            log_scale = (
                log_scale + torch.stack([sum_log_outer(b, a) for b, a in pairs]).sum()
            )
        size = sum(m * n for m, n in (p.site.matrix for p in posteriors))
        return ScaleSums(size, log_scale, (u[:, :-2] * v[:, :-2]).sum())

    def _local(self, x: Tensor, linear: LinearMap) -> Tensor:
        y = self._by_kernel(x, linear)
        return super()._local(x, linear) if y is None else y

    def _by_kernel(self, x: Tensor, linear: LinearMap) -> Tensor | None:
        """`_local` of a dense layer in two kernels and a product; None where that cannot be, or had better not."""
        few = (
            linear.mask is None
            and self.log_cap is None
            and self.rank * (self.rank + 1) // 2 <= 6
        )
        if (
            torch.compiler.is_compiling()
            or not few
            or linear.out_dim is None
            or linear.batch_dim != 0
        ):
            return None
        weight: Any = linear.weight
        dtype = (
            product_type(x, weight)
            if ready(x) and x.numel() >= LARGE and x.is_contiguous()
            else None
        )
        if dtype is None or weight.shape[1 - linear.out_dim] != x.shape[-1]:
            return None
        from slimbayes.kernels.tied import tied_local

        if not self.independent_positions:
            self._check_met_once(x)
        c = (
            None
            if self.bias_log_scale is None
            else (2 * widen(self.bias_log_scale)).exp()
        )
        rows = x.view(-1, x.shape[-1])
        seed, first = seed_late(self, len(rows))
        y = tied_local(
            rows,
            weight,
            linear.out_dim,
            linear.bias,
            *self.variance_factors(),
            c,
            seed,
            first,
            dtype,
        )
        return y.view(*x.shape[:-1], y.shape[1])

    def output_variance(self, squared: Tensor, linear: LinearMap) -> Tensor:
        stored = self.site.shape
        grouped = (stored[1 - self.site.out_dim], stored[self.site.out_dim]) != (
            self.site.n_in,
            self.site.n_out,
        )
        if self.log_cap is not None or grouped or linear.mask is not None:
            # a cap breaks the factorisation, groups the shape
            return super().output_variance(squared, linear)
        p, q = self.variance_factors()
        thin = linear.op(
            squared, self.site.from_matrix(p).to(linear.weight.dtype), None
        )
        return (thin.movedim(linear.channel_dim, -1) @ q.T.to(thin.dtype)).movedim(
            -1, linear.channel_dim
        )

    def variance_factors(self) -> tuple[Tensor, Tensor]:
        """P (m, q) and Q (n, q) with sigma o sigma = P Q^T."""
        u, v = widen(self.log_u).exp().unbind(1), widen(self.log_v).exp().unbind(1)
        pairs = [(a, b) for a in range(self.rank) for b in range(a, self.rank)]
        p, q = (
            [u[a] * u[b] for a, b in pairs],
            [(v[a] * v[b]) * (1 + (a < b)) for a, b in pairs],
        )
        return torch.stack(p, 1), torch.stack(q, 1)
