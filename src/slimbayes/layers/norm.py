"""Norm layers: the site "weight" is the scale of each channel, and the bias goes with it.

Statistics are those of the plain layer, computed over all rows of a folded batch and kept once: draws share them, only
the scale and the bias differ. Sizes: n draws of the pass, C channels (all elements of a LayerNorm's normalized_shape).
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.engine.passes import Pass
from slimbayes.engine.rows import LinearMap, Op, apply_rows
from slimbayes.layers.base import BayesLayer, bayes_form, register_layer
from slimbayes.layers.site import Site, has, own_value

LARGE = (
    2**16
)  # from so many activations on, a pass over them costs more than a few operations on their channels


@dataclass
class NormMap(LinearMap):
    """y = normalised(x) * weight + bias: only the last two steps depend on the draw.

    `known(x)` has the mean and one over the standard deviation of each channel (C,), where they are known beforehand.
    """

    known: Callable[[Tensor], tuple[Tensor, Tensor] | None] = lambda x: None

    def blocks(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass
    ) -> Tensor:
        if weights.shape[0] == 1:
            return self.op(
                x, weights.squeeze(0), None if biases is None else biases.squeeze(0)
            )
        plain: Any = self.op
        known = (
            self.known(x) if x.numel() >= LARGE and x.dtype == weights.dtype else None
        )
        if known is None:
            y = plain(x, None, None)
        else:
            y, weights = x, weights * known[1]
            shift = weights * known[0]
            biases = -shift if biases is None else biases - shift
        shape, tail = y.shape, weights.dim() - 1
        if (
            tail > 1
        ):  # a LayerNorm over several dimensions: its elements are the channels
            y, weights = y.flatten(-tail), weights.flatten(1)
            biases = None if biases is None else biases.flatten(1)
        y = apply_rows(
            operator.mul, y, weights, current, self.batch_dim, self.channel_dim, biases
        )
        return y.unflatten(-1, shape[-tail:]) if tail > 1 else y


@lru_cache(maxsize=256)
def _site(shape: tuple[int, ...], bias: bool) -> Site:
    size = math.prod(shape)
    return Site(
        "weight", size, size, bias, "weight", shape, positions="many", kind="norm"
    )


class BayesNorm(BayesLayer):
    """What norm layers share. `statistics` says what they are taken over: a batch, one row, or a channel of it."""

    bayes_kind = "norm"
    bayes_channel_dim = 1
    statistics: ClassVar[Literal["batch", "row", "channel"]] = "row"

    def sites(self) -> list[Site]:
        if not has(self, "weight"):  # nothing to draw, but dropout can act on its input
            return [_site((0,), False)]
        return [_site(tuple(own_value(self, "weight").shape), has(self, "bias"))]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return ndim > 1 and dim != cls.bayes_channel_dim % ndim

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight, bias = self.own_affine()
        return NormMap(
            weight,
            bias,
            self.bayes_op,
            torch.mul,
            batch_dim,
            self.bayes_channel_dim,
            known=self.bayes_known,
        )

    def bayes_known(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and one over the standard deviation of each channel (C,), where they do not depend on the input."""
        return None

    def project_draw(
        self, site: str, x: Tensor, batch_dim: int | None = None, op: Op | None = None
    ) -> Tensor:
        posterior: Any = self._modules["posterior"]._modules[site]  # type: ignore[union-attr]
        served = None if x.dim() == self.bayes_unbatched else posterior.served()
        if served is None:
            return super().project_draw(site, x, batch_dim, op)
        return self.bayes_op(
            x, *served
        )  # wherever rows lie: torch's own kernel takes the drawn scale and bias


class _BatchNorm(BayesNorm):
    statistics = "batch"

    def bayes_op(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        self._check_input_dim(x)
        training, momentum = self.training, self.momentum
        kept = not training or self.track_running_stats
        own = self._buffers  # quicker than attributes of a module are
        mean, variance = (
            (own["running_mean"], own["running_var"]) if kept else (None, None)
        )
        seen = own["num_batches_tracked"] if training and kept else None
        if seen is not None:
            seen.add_(1)
        if momentum is None:  # a cumulative average
            momentum = 0.0 if seen is None else 1.0 / float(seen)
        return F.batch_norm(
            x,
            mean,
            variance,
            weight,
            bias,
            training or mean is None,
            momentum,
            self.eps,
        )

    def bayes_known(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        self._check_input_dim(x)
        mean, exact = self.running_mean, x.dtype in (torch.float32, torch.float64)
        if (
            self.training
            or mean is None
            or mean.dtype != x.dtype
            or x.shape[1:2] != mean.shape
            or not exact
        ):
            return None  # in half precision a large mean would take the place of what is left without it
        return mean, (self.running_var + self.eps).rsqrt()

    def reset_running_stats(self) -> None:
        super().reset_running_stats()  # type: ignore[misc]
        for posterior in self.posteriors():
            posterior.reset_running_stats()  # members may have statistics of their own


class _InstanceNorm(BayesNorm):
    statistics = "channel"

    def bayes_op(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        batch = self.training or not self.track_running_stats
        return F.instance_norm(
            x,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            batch,
            momentum,
            self.eps,
        )

    @property
    def bayes_unbatched(self) -> int:  # type: ignore[override]
        return self._get_no_batch_dim()

    def bayes_forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return super().bayes_forward(input)


@register_layer
class BayesGroupNorm(BayesNorm, nn.GroupNorm):
    """Shape: (R, C, ...)."""

    plain = nn.GroupNorm

    def bayes_op(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class _LastDimensions(BayesNorm):
    bayes_channel_dim = -1

    @property
    def bayes_unbatched(self) -> int:  # type: ignore[override]
        return len(self.normalized_shape)


@register_layer
class BayesLayerNorm(_LastDimensions, nn.LayerNorm):
    """Shape: (R, ..., *normalized_shape)."""

    plain = nn.LayerNorm

    def bayes_op(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


@register_layer
class BayesRMSNorm(_LastDimensions, nn.RMSNorm):
    """Shape: (R, ..., *normalized_shape); it has no bias."""

    plain = nn.RMSNorm

    def bayes_op(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


# Shapes (R, C, ...). Running statistics are shared by all draws; an instance norm also takes inputs without rows.
BayesBatchNorm1d = bayes_form(_BatchNorm, nn.BatchNorm1d)
BayesBatchNorm2d = bayes_form(_BatchNorm, nn.BatchNorm2d)
BayesBatchNorm3d = bayes_form(_BatchNorm, nn.BatchNorm3d)
BayesInstanceNorm1d = bayes_form(_InstanceNorm, nn.InstanceNorm1d)
BayesInstanceNorm2d = bayes_form(_InstanceNorm, nn.InstanceNorm2d)
BayesInstanceNorm3d = bayes_form(_InstanceNorm, nn.InstanceNorm3d)
