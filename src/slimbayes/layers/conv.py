"""Convolutions and transposed convolutions in one to three dimensions, grouped or not: channels come second.

A factor multiplies whole channels: W'[o, i, ...] = W[o, i, ...] r[o] s[i]. Grouped weights hold only the inputs of their own
group, so the factors are laid out group by group.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, LinearMap, Op, has, mask_of, own_value
from slimbayes.posteriors.base import Site


class _BayesConv(BayesLayer):
    spatial: int  # number of spatial dimensions

    def sites(self) -> list[Site]:
        out_dim = int(isinstance(self, nn.modules.conv._ConvTransposeNd))  # a transposed kernel is stored inputs first
        shape = tuple(own_value(self, "weight").shape)
        return [
            Site("weight", self.in_channels, self.out_channels, has(self, "bias"), "weight", shape, out_dim, "many")
        ]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim != 1 and ndim == cls.spatial + 2

    def _map(self, op: Any, outer: Any, batch_dim: int) -> LinearMap:
        name, weight, bias = self.posterior["weight"].name, self.own_value("weight"), self.own_value("bias")
        return LinearMap(weight, bias, op, outer, batch_dim, 1, name, mask=mask_of(self))

    def _batched(self, input: Tensor, op: Any, outer: Any) -> Tensor:
        if input.dim() == self.spatial + 1:
            return self.posterior["weight"](input.unsqueeze(0), self._map(op, outer, 0)).squeeze(0)
        return self.posterior["weight"](input, self._map(op, outer, self.rows_of(input)))


class _Direct(_BayesConv):
    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        return self._map(self._conv_forward, self._outer, batch_dim)

    def _outer(self, r: Tensor, s: Tensor) -> Tensor:
        # weight is (out, in / groups, ...): output o sees the inputs of group o // (out / groups)
        s = s.view(self.groups, 1, -1).expand(-1, self.out_channels // self.groups, -1)
        mask = r[:, None] * s.reshape(self.out_channels, -1)
        return mask.view(*mask.shape, *[1] * self.spatial)

    def bayes_forward(self, input: Tensor) -> Tensor:
        return self._batched(input, self._conv_forward, self._outer)


class _Transposed(_BayesConv):
    _conv: Any  # the functional form

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        return self._map(self._op(self.output_padding), self._outer, batch_dim)

    def _op(self, output_padding: Any) -> Op:
        def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self._conv(x, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation)

        return op

    def _outer(self, r: Tensor, s: Tensor) -> Tensor:
        # weight is (in, out / groups, ...): input i feeds the outputs of group i // (in / groups)
        r = r.view(self.groups, 1, -1).expand(-1, self.in_channels // self.groups, -1)
        mask = s[:, None] * r.reshape(self.in_channels, -1)
        return mask.view(*mask.shape, *[1] * self.spatial)

    def bayes_forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, self.spatial, self.dilation
        )
        return self._batched(input, self._op(padding), self._outer)


class BayesConv1d(_Direct, nn.Conv1d):
    """Shape: (R, in, L) -> (R, out, L'); an unbatched (in, L) counts as one row."""

    plain, spatial = nn.Conv1d, 1


class BayesConv2d(_Direct, nn.Conv2d):
    """Shape: (R, in, H, W) -> (R, out, H', W'); an unbatched input counts as one row."""

    plain, spatial = nn.Conv2d, 2


class BayesConv3d(_Direct, nn.Conv3d):
    """Shape: (R, in, D, H, W) -> (R, out, D', H', W'); an unbatched input counts as one row."""

    plain, spatial = nn.Conv3d, 3


class BayesConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """Shape: (R, in, L) -> (R, out, L')."""

    plain, spatial, _conv = nn.ConvTranspose1d, 1, staticmethod(F.conv_transpose1d)


class BayesConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """Shape: (R, in, H, W) -> (R, out, H', W')."""

    plain, spatial, _conv = nn.ConvTranspose2d, 2, staticmethod(F.conv_transpose2d)


class BayesConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """Shape: (R, in, D, H, W) -> (R, out, D', H', W')."""

    plain, spatial, _conv = nn.ConvTranspose3d, 3, staticmethod(F.conv_transpose3d)
