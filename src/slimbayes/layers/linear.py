"""Dense layers and convolutions: one weight, applied to channels, whatever other dimensions there are.

Linear has its weight as (out, in), transformers' Conv1D (GPT-2) as (in, out), channels last. Weights may be stored as
integers (bitsandbytes' Linear8bitLt and Linear4bit, and their like): factors scale what goes in and what comes out, so
the layer's own forward does the rest, whatever its kernel. The weight is neither read nor changed, and methods that
draw weights leave such layers alone.

In convolutions and transposed ones, in one to three dimensions, channels come second. A factor multiplies whole
channels: W'[o, i, ...] = W[o, i, ...] r[o] s[i]. Grouped weights hold only the inputs of their own group, so the
factors are laid out group by group.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, bayes_form, register_layer
from slimbayes.layers.site import Site, has, own_value, table_outer


@register_layer
class BayesLinear(BayesLayer, nn.Linear):
    """An nn.Linear whose weight is drawn from `posterior["weight"]`.

    Shape: (R, ..., in) -> (R, ..., out) with R rows; a single vector (in,) counts as one row.
    """

    plain = nn.Linear
    bayes_out_dim = 0
    bayes_unbatched = 1
    bayes_op = staticmethod(F.linear)  # type: ignore[assignment]

    def sites(self) -> list[Site]:
        shape = (self.out_features, self.in_features)
        return [
            Site(
                "weight",
                self.in_features,
                self.out_features,
                has(self, "bias"),
                "weight",
                shape,
            )
        ]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim < ndim - 1


class StoredInOut(BayesLayer):
    """Mixin of transformers' Conv1D, which may not be installed: a class is made of it when one is met."""

    bayes_out_dim = 1
    may_hold_rows = BayesLinear.may_hold_rows

    def sites(self) -> list[Site]:
        n_in, n_out = own_value(self, "weight").shape
        return [Site("weight", n_in, n_out, True, "weight", (n_in, n_out), out_dim=1)]

    def bayes_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return x @ weight
        return torch.addmm(bias, x.reshape(-1, x.size(-1)), weight).view(
            *x.shape[:-1], weight.shape[1]
        )

    def bayes_outer(self, r: Tensor, s: Tensor) -> Tensor:
        return table_outer(r, s)


class Quantised(BayesLayer):
    """Mixin of linear layers that run their own forward between factors."""

    bayes_kind = "quantised"
    bayes_note = "factors around the layer's own forward"
    read_names = ()  # its forward reads the weight as it is
    may_hold_rows = BayesLinear.may_hold_rows
    bayes_unbatched = 1
    bayes_absorbs = False

    def sites(self) -> list[Site]:
        n_in, n_out = self.in_features, self.out_features
        return [
            Site(
                "weight",
                n_in,
                n_out,
                has(self, "bias"),
                "weight",
                (n_out, n_in),
                kind="quantised",
            )
        ]

    def bayes_op(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        own, y = self._parameters.get("bias"), self.plain.forward(self, x)
        y = y if own is None else y - own.to(y.dtype)  # it comes after the factors
        return y if bias is None else y + bias.to(y.dtype)


def is_quantised(layer: nn.Module) -> bool:
    """Whether a linear layer stores integers."""
    weight = layer._parameters.get("weight")
    return (
        isinstance(layer, nn.Linear)
        and weight is not None
        and not weight.is_floating_point()
    )


class _BayesConv(BayesLayer):
    spatial: int  # number of spatial dimensions
    out_dim: int = 0  # of the stored kernel
    bayes_channel_dim = 1

    def sites(self) -> list[Site]:
        shape, bias = tuple(own_value(self, "weight").shape), has(self, "bias")
        return [
            Site(
                "weight",
                self.in_channels,
                self.out_channels,
                bias,
                "weight",
                shape,
                self.out_dim,
                "many",
            )
        ]

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

    @property
    def bayes_unbatched(self) -> int:  # type: ignore[override]
        return self.spatial + 1


class _BayesTransposed(_BayesConv):
    out_dim = 1

    def _op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Any
    ) -> Tensor:
        conv: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[
            self.spatial - 1
        ]
        return conv(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )

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
        sizes = (
            self.stride,
            self.padding,
            self.kernel_size,
            self.spatial,
            self.dilation,
        )
        padding = self._output_padding(input, output_size, *sizes)
        return self.project_draw(
            "weight",
            input,
            op=lambda x, weight, bias: self._op(x, weight, bias, padding),
        )


# An input without a row dimension counts as one row.
BayesConv1d = bayes_form(_BayesConv, nn.Conv1d, spatial=1)  # (R, in, L) -> (R, out, L')
BayesConv2d = bayes_form(
    _BayesConv, nn.Conv2d, spatial=2
)  # (R, in, H, W) -> (R, out, H', W')
BayesConv3d = bayes_form(
    _BayesConv, nn.Conv3d, spatial=3
)  # (R, in, D, H, W) -> (R, out, D', H', W')
BayesConvTranspose1d = bayes_form(_BayesTransposed, nn.ConvTranspose1d, spatial=1)
BayesConvTranspose2d = bayes_form(_BayesTransposed, nn.ConvTranspose2d, spatial=2)
BayesConvTranspose3d = bayes_form(_BayesTransposed, nn.ConvTranspose3d, spatial=3)
