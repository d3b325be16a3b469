"""Fixed numbers by name, and the parameters of a network that posteriors serve."""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


class Numbers:
    """Fixed numbers of a case; each name has numbers of its own."""

    def __init__(self, case: str) -> None:
        self.case = case

    def generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.case}/{name}".encode()))

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.from_numpy(np.array(self.generator(name).standard_normal(shape)))

    def positive(self, name: str, *shape: int) -> Tensor:
        return (0.3 * self.normal(name, *shape)).exp()

    def uniform(self, name: str, *shape: int) -> Tensor:
        return torch.from_numpy(np.array(self.generator(name).uniform(size=shape)))

    def integers(self, name: str, most: int, *shape: int) -> Tensor:
        return torch.from_numpy(
            np.array(self.generator(name).integers(most, size=shape))
        )

    def triangle(self, name: str, *shape: int, scale: float = 0.2) -> Tensor:
        """Lower triangular matrices with positive diagonals."""
        below = 0.3 * scale * self.normal(f"{name} below", *shape, shape[-1]).tril(-1)
        return below + torch.diag_embed(scale * self.positive(name, *shape))


@dataclass(frozen=True)
class Place:
    """A parameter that a posterior serves, and the bias beside it."""

    layer: str
    weight: str  # its name in the layer
    bias: str | None
    shape: tuple[int, ...]
    n_in: int
    n_out: int
    out_dim: int = 0
    groups: int = 1
    rows: slice | None = None
    kind: str = "matrix"
    inputs: tuple[int, ...] = ()  # shape of what one example gives the layer
    outputs: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        part = "" if self.rows is None else f"[{self.rows.start}:{self.rows.stop}]"
        return f"{self.layer}.{self.weight}".strip(".") + part

    @property
    def bias_name(self) -> str:
        return f"{self.layer}.{self.bias}"

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (m, n) of the matrix view: inputs by outputs."""
        n = self.shape[self.out_dim]
        return math.prod(self.shape) // n, n

    @property
    def fan_in(self) -> int:
        return 1 if self.kind == "table" else self.matrix[0]

    def to_matrix(self, weights: Tensor) -> Tensor:
        """Weights (..., *shape) as matrices (..., m, n)."""
        lead = weights.shape[: weights.dim() - len(self.shape)]
        return weights.movedim(len(lead) + self.out_dim, -1).reshape(
            *lead, *self.matrix
        )

    def from_matrix(self, matrices: Tensor) -> Tensor:
        """Matrices (..., m, n) as weights (..., *shape)."""
        lead = matrices.shape[:-2]
        others = [n for d, n in enumerate(self.shape) if d != self.out_dim]
        last = matrices.reshape(*lead, *others, self.shape[self.out_dim])
        return last.movedim(-1, len(lead) + self.out_dim)

    def outer(self, r: Tensor, s: Tensor) -> Tensor:
        """r s^T for each element of the weight, of factors r (n_out,) and s (n_in,)."""
        mask = r.new_zeros(self.shape[:2])
        for a in range(self.shape[0]):
            for b in range(self.shape[1]):
                i, o = (b, a) if self.out_dim == 0 else (a, b)
                if self.out_dim == 0:  # inputs of this output's group
                    i += o // (self.n_out // self.groups) * self.shape[1]
                else:
                    o += i // (self.n_in // self.groups) * self.shape[1]
                mask[a, b] = r[o] * s[i]
        return mask.reshape(*self.shape[:2], *[1] * (len(self.shape) - 2))

    def own_weight(self, base: Tensors) -> Tensor:
        whole = base[f"{self.layer}.{self.weight}"]
        return whole if self.rows is None else whole[self.rows]

    def own_bias(self, base: Tensors) -> Tensor | None:
        if self.bias is None:
            return None
        whole = base[self.bias_name]
        return whole if self.rows is None else whole[self.rows]


def places_of(network: nn.Module, layer: str) -> list[Place]:
    """The parameters of a layer that have posteriors."""
    module: Any = network.get_submodule(layer)
    if isinstance(module, nn.Dropout):
        return [Place(layer, "", None, (), 0, 0, kind="dropout")]
    if isinstance(module, nn.Embedding):
        shape = tuple(module.weight.shape)
        return [Place(layer, "weight", None, shape, *shape, out_dim=1, kind="table")]
    if isinstance(module, nn.LSTM | nn.GRU):
        shapes = [tuple(p.shape) for p in (module.weight_ih_l0, module.weight_hh_l0)]
        biases = ("bias_ih_l0", None)  # two would add up to one
        return [
            Place(layer, name, bias, shape, shape[1], shape[0])
            for name, bias, shape in zip(
                ("weight_ih_l0", "weight_hh_l0"), biases, shapes, strict=True
            )
        ]
    if isinstance(module, nn.MultiheadAttention):
        size = module.embed_dim
        parts = [slice(i * size, (i + 1) * size) for i in range(3)]
        square = (size, size)
        return [
            Place(layer, "in_proj_weight", "in_proj_bias", square, *square, rows=part)
            for part in parts
        ] + [Place(layer, "out_proj.weight", "out_proj.bias", square, *square)]
    shape = tuple(module.weight.shape)
    bias = None if module.bias is None else "bias"
    if isinstance(module, nn.Linear):
        return [Place(layer, "weight", bias, shape, shape[1], shape[0])]
    if hasattr(module, "in_channels"):
        return [
            Place(
                layer,
                "weight",
                bias,
                shape,
                module.in_channels,
                module.out_channels,
                out_dim=int(module.transposed),
                groups=module.groups,
            )
        ]
    size = math.prod(shape)
    return [Place(layer, "weight", bias, shape, size, size, kind="norm")]
