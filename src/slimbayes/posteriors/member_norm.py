"""Batch norm whose members keep apart: each normalises its rows with their statistics and keeps running ones of its
own.

    y_k = (x_k - mean_k) / sqrt(var_k + eps) * weight + bias       x_k: the rows of member k, of all its draws in the
    pass running_k <- running_k + momentum (batch_k - running_k)        for members that had rows

In the rank-1 paper (Dusenberry et al. 2020) members share statistics, scales and biases, and so they do here by
default: all of its CIFAR runs, and on TPUs its ImageNet runs too, whose code calls sharing "not correct in math" and
would build K separate layers elsewhere. Those are `affine=True`; without, members keep statistics of their own under
one scale and bias.

Nothing is drawn. Member 0 is the layer itself, so that its checkpoint still loads; the posterior holds the K - 1
others: as buffers running_mean, running_var (K - 1, C) and num_batches_tracked (K - 1,), as parameters perhaps weight
and bias (K - 1, C).

Sizes: K members, n blocks of rows in a pass, C channels. Block j belongs to member (first + j) mod K, so blocks j, j +
    K, ... share one member: a turn. How many rows a turn has is known beforehand; which member it is may be known to
    the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.engine.rows import LinearMap, sizes_of_blocks, spread
from slimbayes.layers.site import Site
from slimbayes.posteriors.configs.whole_modules import MemberNorm
from slimbayes.posteriors.ensemble import Members

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class MemberNormPosterior(Members):
    """Members 1 to K - 1 of a batch norm; member 0 is the layer itself."""

    own_statistics = (
        True  # of the rows of each member, also where no running ones are kept
    )
    place: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, config: MemberNorm, site: Site) -> None:
        super().__init__()
        self.members = config.members
        own = config.affine and config.members > 1 and site.n_out > 0
        self.weight = (
            nn.Parameter(torch.ones(config.members - 1, site.n_out)) if own else None
        )
        self.bias = (
            nn.Parameter(torch.zeros(config.members - 1, site.n_out))
            if own and site.bias
            else None
        )
        self.register_buffer(
            "place", torch.zeros(1), persistent=False
        )  # tells the device, where there is nothing else

    def join(self, layer: Any) -> None:
        super().join(layer)
        for name in _STATISTICS:
            own = getattr(layer, name)
            others = (
                None
                if own is None or self.members == 1
                else own.expand(self.members - 1, *own.shape).clone()
            )
            self.register_buffer(name, others)
            self.place = self.place if own is None else self.place.to(own.device)

    @torch.no_grad()
    def adopt(self) -> None:
        linear = self.linear_map()
        for others, own in ((self.weight, linear.weight), (self.bias, linear.bias)):
            if others is not None and own is not None:
                others.copy_(own)

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Forget the statistics, as the layer's method of this name does for member 0."""
        if self.running_mean is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    @torch.no_grad()
    def keep_members(self, members: Sequence[int], tied: Sequence[Any] = ()) -> None:
        self.members = len(members)
        for name, others in [*self._parameters.items(), *self._buffers.items()]:
            if others is None or name == "place":
                continue
            own = getattr(self.layer, name)
            every = torch.cat([own[None].to(others.dtype), others])[list(members)]
            own.copy_(every[0])
            rest = (
                nn.Parameter(every[1:])
                if isinstance(others, nn.Parameter)
                else every[1:]
            )
            setattr(self, name, rest if len(every) > 1 else None)

    @property
    def anchor(self) -> Tensor:
        return self.place

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        if self.members == 1:
            return linear.op(x, linear.weight, linear.bias)
        self.layer._check_input_dim(x)
        x, dim = spread(x, self.current.rows, linear.batch_dim)
        sizes = sizes_of_blocks(x.shape[dim], self.current.blocks(self), self.current)
        blocks = list(x.split(sizes, dim))
        turns = [
            t
            for t in range(min(len(sizes), self.members))
            if sum(sizes[t :: self.members])
        ]
        if not turns:
            return x
        member = self.values()
        order = torch.stack(
            [member[t] for t in turns]
        )  # a list as an index would be copied to the device
        rows = [
            torch.cat(blocks[t :: self.members], dim)
            if len(sizes) > self.members
            else blocks[t]
            for t in turns
        ]
        for t, y in zip(turns, self._normalised(rows, order, linear), strict=True):
            blocks[t :: self.members] = y.split(sizes[t :: self.members], dim)
        return torch.cat(blocks, dim)

    def _normalised(
        self, rows: list[Tensor], order: Tensor, linear: LinearMap
    ) -> list[Tensor]:
        """The rows of each turn, normalised by the member that `order` has for it, (turns,)."""
        layer = self.layer
        from_batch = layer.training or layer.running_mean is None
        kept = (
            layer.training
            and layer.track_running_stats
            and layer.running_mean is not None
        )
        statistics: Any = [[None] * len(rows)] * 2
        fewest = min(part.numel() // part.shape[1] for part in rows)
        if from_batch and fewest < 2:
            raise ValueError(
                f"{self.name}: every member's statistics need more than one value for each channel, but this pass has "
                f"a member with {fewest}. Use 2 rows or more for each of the {self.members} members, a multiple of "
                f"them, sample(model, x), or eval mode."
            )
        if not from_batch:  # copies: autograd keeps what it is given, and running statistics change in place
            statistics = [
                self._of(order, getattr(layer, name), getattr(self, name))
                for name in _STATISTICS[:2]
            ]
        if kept:
            statistics = layer.running_mean.new_zeros(2, len(rows), layer.num_features)
        weights, biases = (
            self._of(order, linear.weight, self.weight),
            self._of(order, linear.bias, self.bias),
        )
        # A momentum of one leaves the batch's own statistics in what is given to be updated.
        each = zip(rows, *statistics, weights, biases, strict=True)
        out = [
            F.batch_norm(x, mean, var, w, b, from_batch, 1.0, layer.eps)
            for x, mean, var, w, b in each
        ]
        if kept:
            self._keep(statistics, order)
        return out

    def _of(self, order: Tensor, own: Tensor | None, others: Tensor | None) -> Any:
        """What each turn's member has, (turns, C); the layer's own where they share it."""
        if own is None or others is None:
            return [own] * len(order)
        return torch.cat([own.unsqueeze(0), others.to(own.dtype)]).index_select(
            0, order
        )

    @torch.no_grad()
    def _keep(self, batch: Tensor, order: Tensor) -> None:
        """Move the running statistics of members that had rows towards the batch's mean and variance, (2, turns, C)."""
        layer = self.layer
        met = torch.zeros(
            self.members, dtype=torch.long, device=batch.device
        ).index_fill_(0, order, 1)
        layer.num_batches_tracked.add_(met[0])
        self.num_batches_tracked.add_(met[1:])
        share = met.to(batch.dtype)
        if (
            layer.momentum is None
        ):  # a cumulative average, over the batches that each member saw
            share = share / torch.cat(
                [layer.num_batches_tracked.view(1), self.num_batches_tracked]
            ).clamp_min(1)
        else:
            share = share * layer.momentum
        share = share.unsqueeze(1)
        seen = batch.new_zeros(2, self.members, batch.shape[2]).index_copy_(
            1, order, batch
        )
        for name, new in zip(_STATISTICS[:2], seen, strict=True):
            getattr(layer, name).lerp_(new[0], share[0])
            getattr(self, name).lerp_(new[1:], share[1:])
