"""The abstract Config and Posterior: what a method must provide, and the only thing the rest of the library sees.

Sizes: K members, m x n the matrix view of a weight.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Distribution, distribution_from_dict
from slimbayes.engine import passes
from slimbayes.engine.passes import Keyed, Noise, Pass
from slimbayes.errors import did_you_mean

if TYPE_CHECKING:
    from slimbayes.layers.base import LinearMap


Pick = Callable[[Tensor, int], Tensor]  # a parameter (K, ...) and a number of blocks or rows n -> (n, ...), by member
MapOf = Callable[[], "LinearMap"]  # builds the linear map of a posterior's site
Kind = Literal["matrix", "norm", "dropout"]
Unit = Literal["element", "channel"]  # what dropout drops


@dataclass(frozen=True)
class Site:
    """One weight matrix of a layer that a posterior covers, or the scale of a norm layer, or the units of a dropout layer.

    Attributes:
        name: key of its posterior in `layer.posterior`.
        n_in, n_out: its input and output channels.
        bias: whether a bias follows it.
        parameter: name of the layer's parameter that holds it.
        shape: shape of the weight as it is stored.
        out_dim: which dimension of the stored weight counts outputs; the others, flattened, are the inputs of its matrix view.
        positions: whether one row meets the matrix once, or at many places or times that share the weights; "pooled" if such
            places are averaged, "nonlinear" if the output is not linear in the weights.
        kind: "matrix"; "norm" for a scale, one number for each channel; "dropout" for a layer without weights.
        whole: the layer is of a type we do not know and runs its own forward, with drawn weights in place of its own.
    """

    name: str
    n_in: int
    n_out: int
    bias: bool
    parameter: str
    shape: tuple[int, ...]
    out_dim: int = 0
    positions: Literal["one", "many", "pooled", "nonlinear"] = "one"
    kind: Kind = "matrix"
    whole: bool = False

    @property
    def bias_parameter(self) -> str:
        """Name of the layer's parameter that holds the bias; attention keeps those of its three inputs in one."""
        separate = self.parameter.endswith("_proj_weight")
        return "in_proj_bias" if separate else self.parameter.replace("weight", "bias")

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (m, n) of the matrix view: inputs (times the kernel's size) by outputs."""
        n = self.shape[self.out_dim]
        return math.prod(self.shape) // n, n

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A stored weight as a matrix (m, n)."""
        return weight.movedim(self.out_dim, -1).reshape(self.matrix)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """A matrix (..., m, q) as a stored weight with q outputs, (..., *shape)."""
        shape = [size for d, size in enumerate(self.shape) if d != self.out_dim]
        lead = matrix.dim() - 2
        return matrix.reshape(*matrix.shape[:-2], *shape, matrix.shape[-1]).movedim(-1, lead + self.out_dim)


class Posterior(Keyed, ABC):
    """Variational parameters of one weight matrix, their draws and their KL."""

    members: int = 1  # K
    name: str = ""  # for messages: "encoder.fc1.weight"
    regularises_mean: bool = False  # whether the KL already holds a prior on the layer's own weight
    regularises_bias: bool = False  # and on its bias
    late: bool = False  # it draws while its layer runs, when the shape of the input is known
    blockwise: bool = False  # one draw serves a whole block of rows, never a single one

    note: str = ""  # what a summary should say about it
    noticed: bool = False  # whether a first pass has told which layers never ran

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None

    @property
    def current(self) -> Pass:
        """The pass under way that has draws of this posterior."""
        found = passes.of(self.key)
        assert found is not None, "no pass has been opened"
        return found

    @property
    def anchor(self) -> Tensor:
        """A parameter (or else a buffer) that stands for all: they share device, dtype and sharding. Override it where one is at hand."""
        return next(chain(self.parameters(), self.buffers()))

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the noise: that of the parameters, float32 at least."""
        return torch.promote_types(self.anchor.dtype, torch.float32)

    def join(self, layer: Any) -> None:
        """Become part of a layer; called once, when it is converted. The layer is kept out of the module tree, which it contains."""
        object.__setattr__(self, "layer", layer)

    def adopt(self, linear: LinearMap) -> None:
        """Start from the layer's own weight and bias; called once, when the layer is converted."""

    def weights_of_components(self) -> list[nn.Parameter]:
        """Parameters that are weights like the layer's own, of other components or members: they train at the network's pace."""
        return []

    def decayed(self) -> list[nn.Parameter]:
        """Those of them that have no prior in the KL: weight decay covers them."""
        return []

    @property
    def countable(self) -> bool:
        """Whether each draw is one of a few functions, which `choices` tells apart."""
        return False

    def choices(self) -> Tensor | None:
        """Which of a few functions each draw of this pass is, as integers (n,); None where draws are not countable."""
        return None

    @property
    def log_size(self) -> float:
        """Natural logarithm of how many different functions a draw of one member can be, or of a number it is not below."""
        return math.inf

    @classmethod
    def realise_together(cls, posteriors: Sequence[Self]) -> None:
        """Realise the draws of all posteriors of this class in a model; a method may do so in fewer, larger operations."""
        for posterior in posteriors:
            posterior.values()

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self], linears: Sequence[MapOf]) -> list[Tensor]:
        """KL terms that add up to the KL of all posteriors of this class in a model; a method may join them."""
        return [posterior.kl(linear) for posterior, linear in zip(posteriors, linears, strict=True)]

    def values(self) -> Any:
        """This pass's draw. Sharded parameters are whole only while their layer runs, so they are realised here."""
        current = self.current
        if self.key not in current.values:
            self.keep(self.realise(self.noise, partial(current.pick, self)))
        return current.values[self.key]

    def keep(self, values: Any) -> None:
        """Set this pass's draw."""
        self.current.values[self.key] = values

    @property
    def sharded(self) -> bool:
        """Whether the parameters are split over processes (FSDP2)."""
        return hasattr(self.anchor, "full_tensor")

    @property
    def noise(self) -> Noise:
        return self.current.noise[self.key]

    @property
    def by_row(self) -> bool:
        """Whether a pass draws afresh for every row where rows can be told apart."""
        return not self.blockwise and self.widths(True)[1] > 0

    def drawn_late(self, make: Callable[[list[int]], Tensor], shape: Sequence[int], dim: int | None) -> Tensor:
        """Numbers drawn while the layer runs, make(shape) with rows along `dim`.

        Of draws that run one by one each takes its part of what all would have drawn in one forward: the same draws either way.
        """
        current, sizes = self.current, list(shape)
        if current.index is None or dim is None:
            return make(sizes)
        made, place = current.masks.setdefault(self.key, []), self.place_in_forward()
        while len(made) <= place:
            made.append(make([n * current.total if d == dim else n for d, n in enumerate(sizes)]))
        return made[place].narrow(dim, current.index * sizes[dim], sizes[dim])

    def place_in_forward(self) -> int:
        """How many times this forward has asked before."""
        calls = self.current.calls
        count = calls.get(self.key, 0)
        if (
            not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        ):  # gradient checkpointing computes it again
            if count > 1:
                raise ValueError(
                    f"{self.name}: draws at several places of a forward cannot be told apart by gradient checkpointing; "
                    f"use one layer for each."
                )
            return 0
        calls[self.key] = count + 1
        return count

    @property
    def per_row(self) -> bool:
        """Whether this pass has noise for every row, not only for blocks of rows."""
        return self.noise.row.shape[1] > 0

    @property
    def has_weights(self) -> bool:
        """Whether this pass has one weight draw for each block of rows, which `materialise` can give."""
        return not self.per_row

    @property
    def drawn(self) -> int:
        """How many draws this pass has: one for each row, or one for each block of rows."""
        return (self.noise.row if self.per_row else self.noise.block).shape[0]  # len would fix it for torch.export

    @abstractmethod
    def widths(self, rowwise: bool) -> tuple[int, int]:
        """How many standard normals a pass takes for each block and for each row; the latter only if it is `rowwise`."""

    @abstractmethod
    def realise(self, noise: Noise, pick: Pick) -> Any:
        """Turn noise into draws; `pick(parameter, n)` lays a parameter (K, ...) out by the member of each block or row."""

    @abstractmethod
    def kl(self, linear: MapOf) -> Tensor:
        """KL to the prior, summed over elements and members: a scalar. `linear()` has the layer's own weight and bias."""

    def log_ratio(self, linear: LinearMap) -> Tensor | None:
        """log p - log q of each held draw under prior and posterior, (n,) in float64; None where no density is known."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        """Apply this pass's draw of the linear map to x."""

    @abstractmethod
    def materialise(self, linear: LinearMap, index: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of draw `index` as plain tensors, for kernels that take nothing else."""


class Config(ABC):
    """Everything a user chooses about a method. Subclasses are frozen, keyword-only dataclasses that survive JSON."""

    members: int = 1
    converts: ClassVar[bool] = True
    leaves_alone: ClassVar[
        dict[str, str]
    ] = {}  # layer type name -> why this method skips it unless it is included by name
    whole: ClassVar[bool] = False  # whether it converts modules of any type as a whole

    @property
    def covers(self) -> tuple[Kind, ...]:
        """The kinds of layer this method can convert."""
        return ("matrix",)

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        """Names of the layers to convert out of those offered; None for all it covers. `named`: the user picked them by name."""
        return None

    def describe(self) -> str:
        """The method in a few words, for summaries."""
        return f"{type(self).__name__}(members={self.members})"

    @abstractmethod
    def build(self, site: Site) -> Posterior:
        """A new posterior for one weight matrix, on torch's default device and in its default dtype."""

    def extra_flops(self, site: Site) -> float:
        """Multiply-adds beyond the plain layer's at one position for one draw; weights drawn once a pass add none."""
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the method's name and every field.

        >>> import slimbayes as sb
        >>> sb.Deterministic().to_dict()
        {'kind': 'Deterministic'}
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"kind": type(self).__name__} | {
            k: v.to_dict() if isinstance(v, Distribution) else v for k, v in values.items()
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a config of this method from its JSON form; unknown fields are refused by name."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name == "kind":
                continue
            if name not in known:
                raise ValueError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
            values[name] = distribution_from_dict(value) if isinstance(value, dict) else value
        return cls(**values)


def check_choice(owner: object, field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value outside a closed set, naming the owner, the field and the nearest valid choice."""
    if value not in allowed:
        raise ValueError(f"{type(owner).__name__}: unknown {field} {value!r}{did_you_mean(str(value), allowed)}")


def check_rate(owner: object, field: str, value: object) -> None:
    """Refuse anything but a number in [0, 1)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{type(owner).__name__}: {field} must lie in [0, 1), got {value!r}.")


def check_count(owner: object, field: str, value: object) -> None:
    """Refuse anything but a whole number of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(owner).__name__}: {field} must be a whole number of at least 1, got {value!r}.")
