"""The abstract Posterior: what a method must provide, and with its Config (configs/base.py) the only thing that the
rest of the library sees.

    Posterior           draws of one weight matrix (or module) and their KL
    WeightPosterior     a Posterior whose draws are weight matrices

Sizes: K members, n draws of a pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from slimbayes.engine import passes
from slimbayes.engine.modules import Keyed, noise_type
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site

# What a parameter is to an optimizer. Weights of the network or of a member of it, and components that a layer picks
# from, train at the network's pace; the others are variational, with a pace of their own and no decay: scales, factors,
# logits, and offsets, which members add to the layer's own bias and which are frozen with it.
Role = Literal["weight", "component", "scale", "factor", "logit", "offset"]


class Support(NamedTuple):
    """What a posterior of finitely many functions can be: `picks` independent variables of W values each.

    Shape: lines (W, width) are standard normals that lead to each value of a pick; probs (W,). The noise of a draw
    holds the first number of every pick, then the second.
    """

    picks: int
    lines: Tensor
    probs: Tensor


class Posterior(Keyed, ABC):
    """Variational parameters of one weight matrix, their draws and their KL. `forward(x, linear)` applies a draw."""

    # What the conversion sets.
    name: str = ""  # for messages: "encoder.fc1.weight"
    site: Site  # the matrix of its layer that it is for
    blockwise: bool = False  # one draw serves a whole block of rows, never a single one
    # What a method says of itself.
    members: int = 1  # K
    late: bool = (
        False  # it draws while its layer runs, when the shape of the input is known
    )
    own_role: ClassVar[Role] = (
        "weight"  # what the layer's own weight and bias are to it
    )
    regularises_mean: bool = (
        False  # whether the KL already holds a prior on the layer's own weight
    )
    regularises_bias: bool = False  # and on its bias
    oriented: ClassVar[bool] = (
        False  # it scales inputs and outputs: a layer tied the other way round cannot share it
    )
    note: str = ""  # what a summary should say about it

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None

    # --- what a method must say ---

    @abstractmethod
    def widths(self, rowwise: bool) -> tuple[int, int]:
        """How many standard normals a pass takes for each block and for each row; the latter only if `rowwise`."""

    @abstractmethod
    def draw(self, noise: Noise) -> Any:
        """Turn noise into draws; `by_member` tells members apart."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL to the prior, summed over elements and members: a scalar."""

    # --- what it may say ---

    def role(self, name: str) -> Role:
        """What a parameter of this posterior is, by its name here: how it trains and decays follows from it."""
        return "scale"

    def centre(self, block: Tensor) -> Tensor:
        """The noise behind the posterior's mean, or median, in the shape of some noise (n, width)."""
        return torch.zeros_like(block)

    def adopt(self) -> None:
        """Start from the layer's own weight and bias; called once, when the layer is converted."""

    def keep_members(self, members: Sequence[int], tied: Sequence[Any] = ()) -> None:
        """Keep these members, of which there are several, in this order; `tied` are other layers that share it. Where
        members cannot be told apart from the parameters a method leaves this as it is.
        """
        raise NotImplementedError

    def reset_running_stats(self) -> None:
        """Forget running statistics, where members have their own."""

    def seeded(self, rows: int) -> bool:
        """Whether kernels make the noise of so many rows from a seed, so that a pass draws none."""
        return False

    @classmethod
    def draw_together(cls, posteriors: Sequence[Self], current: Pass) -> None:
        """Make the draws of all posteriors of this class in a model; a method may use fewer, larger operations."""
        for posterior in posteriors:
            posterior.values()

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self]) -> list[Tensor]:
        """KL terms that add up to the KL of all posteriors of this class in a model; a method may join them."""
        return [posterior.kl() for posterior in posteriors]

    @property
    def has_weights(self) -> bool:
        """Whether this pass has a weight draw for each block of rows, which `materialize` gives."""
        return False

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Lines s (n, in), r (n, out), bias (n, out) or None of this pass, if they make (W (x o s)) o r + b + bias."""
        return None

    def served(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the one draw that serves all rows of this pass, if there is but one and it is formed."""
        return None

    @property
    def countable(self) -> bool:
        """Whether each draw is one of a few functions, which `choices` tells apart."""
        return self.is_point

    def choices(self) -> Tensor:
        """Which of a few functions each draw of this pass is, as integers (n,), where draws are countable."""
        return self.by_member(
            torch.arange(self.members, device=self.device), self.drawn
        )

    @property
    def log_size(self) -> float:
        """Natural logarithm of how many different functions a draw of one member can be; of what is drawn late at
        least, since only its input tells.
        """
        return 0.0 if self.is_point else math.inf

    def support(self) -> Support | None:
        """The values that draws of one member can take; None where they cannot be listed."""
        return Support(0, torch.zeros(1, 0), torch.ones(1)) if self.is_point else None

    def log_ratio(self) -> Tensor | None:
        """log p - log q of each held draw, prior and posterior, (n,) in float64; None where no density is known."""
        return None

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        """How far means are from the prior's, in its scales, and scales over the prior's, of what has both."""
        return []

    # --- what it may rely on ---

    def join(self, layer: Any) -> None:
        """Become part of a layer; called once, on conversion. The layer is kept out of the tree of modules."""
        self.__dict__["layer"] = layer

    def linear_map(self) -> LinearMap:
        """The linear map of its site, with the layer's present weight and bias."""
        return self.layer.linear_map(self.site.name)

    @property
    def current(self) -> Pass:
        """The pass under way that has draws of this posterior."""
        found = passes.pass_of(self.key)
        if found is None:
            raise RuntimeError(
                "Draws exist only while the model is called. torch.jit.trace and script ask for them outside: "
                "use slimbayes.export or torch.compile, or trace materialize(model, member=0)."
            )
        return found

    @property
    def noise(self) -> Noise:
        return self.current.noise[self.key]

    @property
    def lines(self) -> Tensor:
        """This pass's noise, one line for each draw (n, width)."""
        return self.noise.row if self.per_row else self.noise.block

    def values(self) -> Any:
        """This pass's draw. Sharded parameters are whole only while their layer runs, so they are drawn here, as are
        draws that a reentrant checkpoint meets again.
        """
        current = self.current
        if self.key in current.values:
            return current.values[self.key]
        values = self.draw(self.noise)
        current.values[self.key] = values
        return values

    def by_member(self, parameter: Tensor, count: int) -> Tensor:
        """A parameter (K, ...) by the member of each of so many blocks or rows of this pass, (count, ...)."""
        return self.current.pick(self, parameter, count)

    @property
    def drawn(self) -> int:
        """How many draws this pass has: one for each row, or one for each block of rows."""
        return self.lines.shape[0]  # len would fix it for torch.export

    @property
    def is_point(self) -> bool:
        """Whether nothing is drawn: each member is one function."""
        return not self.late and self.widths(True) == (0, 0)

    @property
    def by_row(self) -> bool:
        """Whether a pass draws in another way, for every row, where rows can be told apart."""
        return not self.blockwise and self.widths(True) != self.widths(False)

    @property
    def per_row(self) -> bool:
        """Whether this pass has noise for every row, not only for blocks of rows."""
        return self.noise.seed is not None or self.noise.row.shape[1] > 0

    @property
    def anchor(self) -> Tensor:
        """A parameter (or else a buffer) that stands for all: they share device, dtype and sharding."""
        return next(chain(self.parameters(), self.buffers()))

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the noise: that of the parameters, float32 at least."""
        return noise_type(self.anchor.dtype)

    @property
    def sharded(self) -> bool:
        """Whether the parameters are split over processes (FSDP2)."""
        return hasattr(self.anchor, "full_tensor")


class WeightPosterior(Posterior):
    """Draws are weight matrices. By default `values()` are deviations (n, *shape) from the layer's own weight, or a
    pair: of the weight, and of the bias (n, out) or None.
    """

    @property
    def has_weights(self) -> bool:
        return not self.per_row

    def weights(
        self, linear: LinearMap, draws: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        """Weights (n, *shape) and biases (n, out) of this pass's draws, or of some."""
        values = self.values()
        change, shift = values if isinstance(values, tuple) else (values, None)
        weights = linear.weight + linear.masked(change[draws]).to(linear.weight.dtype)
        if linear.bias is None:
            return weights, None
        if shift is None:
            return weights, linear.bias.expand(weights.shape[0], *linear.bias.shape)
        return weights, linear.bias + shift[draws].to(linear.bias.dtype)

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        """Apply this pass's draw of the linear map to x."""
        return linear.blocks(x, *self.weights(linear), self.current)

    def materialize(
        self, linear: LinearMap, index: int
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of draw `index` as plain tensors, for kernels that take nothing else."""
        weights, biases = self.weights(linear, slice(index, index + 1))
        return weights.squeeze(0), None if biases is None else biases.squeeze(0)
