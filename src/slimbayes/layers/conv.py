"""Convolutions and transposed convolutions in one to three dimensions, grouped or not: channels come second.

A factor multiplies whole channels: W'[o, i, ...] = W[o, i, ...] r[o] s[i]. Grouped weights hold only the inputs of
their own group, so the factors are laid out group by group.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, bayes_form
from slimbayes.layers.parameters import has, own_value
from slimbayes.layers.site import Site


class _BayesConv(BayesLayer):
    spatial: int  # number of spatial dimensions
    out_dim: int = 0  # of the stored kernel
    bayes_channel_dim = 1

    def sites(self) -> list[Site]:
        shape, bias = tuple(own_value(self, "weight").shape), has(self, "bias")
        return [Site("weight", self.in_channels, self.out_channels, bias, "weight", shape, self.out_dim, "many")]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim != 1 and ndim == cls.spatial + 2

    def bayes_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def bayes_outer(self, r: Tensor, s: Tensor) -> Tensor:
        # weight is (out, in / groups, ...): output o sees the inputs of group o // (out / groups)
        s = s.view(self.groups, 1, -1).expand(-1, self.out_channels // self.groups, -1)
        mask = r[:, None] * s.reshape(self.out_channels, -1)
        return mask.view(*mask.shape, *[1] * self.spatial)

    def bayes_forward(self, input: Tensor) -> Tensor:
        return self.project_draw("weight", input, unbatched=self.spatial + 1)


class _BayesTransposed(_BayesConv):
    out_dim = 1

    def _op(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Any) -> Tensor:
        conv: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.spatial - 1]
        return conv(x, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation)

    def bayes_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._op(x, weight, bias, self.output_padding)

    def bayes_outer(self, r: Tensor, s: Tensor) -> Tensor:
        # weight is (in, out / groups, ...): input i feeds the outputs of group i // (in / groups)
        r = r.view(self.groups, 1, -1).expand(-1, self.in_channels // self.groups, -1)
        mask = s[:, None] * r.reshape(self.in_channels, -1)
        return mask.view(*mask.shape, *[1] * self.spatial)

    def bayes_forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        if output_size is None:
            return super().bayes_forward(input)
        sizes = (self.stride, self.padding, self.kernel_size, self.spatial, self.dilation)
        padding = self._output_padding(input, output_size, *sizes)
        alone = input.dim() == self.spatial + 1
        linear = self.linear_map("weight", 0 if alone else self.rows_of(input))
        linear.op = lambda x, weight, bias: self._op(x, weight, bias, padding)
        y = self.posterior["weight"](input.unsqueeze(0) if alone else input, linear)
        return y.squeeze(0) if alone else y


# An input without a row dimension counts as one row.
BayesConv1d = bayes_form(_BayesConv, nn.Conv1d, spatial=1)  # (R, in, L) -> (R, out, L')
BayesConv2d = bayes_form(_BayesConv, nn.Conv2d, spatial=2)  # (R, in, H, W) -> (R, out, H', W')
BayesConv3d = bayes_form(_BayesConv, nn.Conv3d, spatial=3)  # (R, in, D, H, W) -> (R, out, D', H', W')
BayesConvTranspose1d = bayes_form(_BayesTransposed, nn.ConvTranspose1d, spatial=1)
BayesConvTranspose2d = bayes_form(_BayesTransposed, nn.ConvTranspose2d, spatial=2)
BayesConvTranspose3d = bayes_form(_BayesTransposed, nn.ConvTranspose3d, spatial=3)
