"""The abstract Config and Posterior: what a method must provide, and the only thing the rest of the library sees.

Sizes: K members, n draws of one pass, W standard normals per draw.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions import Distribution, distribution_from_dict
from slimbayes.messages import did_you_mean

if TYPE_CHECKING:
    from slimbayes.layers.base import LinearMap
    from slimbayes.passes import Pass


Pick = Callable[[Tensor], Tensor]  # a parameter (K, ...) -> one line for each draw of the pass (n, ...)


@dataclass(frozen=True)
class Site:
    """One weight matrix of a layer that a posterior covers: its name, sizes and whether a bias follows it."""

    name: str
    n_in: int
    n_out: int
    bias: bool


class Posterior(nn.Module, ABC):
    """Variational parameters of one weight matrix, their draws and their KL.

    A subclass sets `members`, `rowwise` and `width` in its constructor and implements `realise`, `kl` and `forward`.
    """

    members: int = 1  # K
    rowwise: bool = False  # a fresh draw for every row, or one for every block of rows
    width: int = 0  # W
    name: str = ""  # for messages: "encoder.fc1.weight"

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        self.current: Pass | None = None
        self._noise: Tensor | None = None
        self._values: Any = None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the noise: that of the parameters, float32 at least."""
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)

    def start(self, new: Pass, noise: Tensor) -> None:
        """Take this pass's noise (n, W); realise the draw at once unless the parameters are sharded."""
        self.current, self._noise, self._values = new, noise, None
        if not any(hasattr(p, "full_tensor") for p in self.parameters()):
            self.values()

    def values(self) -> Any:
        """This pass's draw. Sharded parameters are whole only while their layer runs, so they are realised here."""
        if self._values is None:
            assert self._noise is not None and self.current is not None
            self._values = self.realise(self._noise, partial(self.current.pick, self))
        return self._values

    @property
    def drawn(self) -> int:
        """n, how many draws this pass has of this posterior."""
        assert self._noise is not None
        return self._noise.shape[0]

    @abstractmethod
    def realise(self, noise: Tensor, pick: Pick) -> Any:
        """Turn noise (n, W) into n draws; `pick` lays a parameter (K, ...) out by each draw's member, (n, ...)."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL to the prior, summed over elements and members: a scalar."""

    @abstractmethod
    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        """Apply this pass's draw of the linear map to x."""

    @abstractmethod
    def materialise(self, linear: LinearMap, index: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of draw `index` as plain tensors, for kernels that take nothing else."""

    def __getstate__(self) -> dict[str, Any]:
        # A draw is no state: copies and pickles made after a forward start without one.
        return self.__dict__ | {"current": None, "_noise": None, "_values": None}


class Config(ABC):
    """Everything a user chooses about a method. Subclasses are frozen, keyword-only dataclasses that survive JSON."""

    members: int = 1
    converts: ClassVar[bool] = True
    leaves_alone: ClassVar[dict[str, str]] = {}  # layer type name -> why this method skips it unless it is included by name

    @abstractmethod
    def build(self, site: Site) -> Posterior:
        """A new posterior for one weight matrix, on torch's default device and in its default dtype."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the method's name and every field.

        >>> import slimbayes as sb
        >>> sb.Deterministic().to_dict()
        {'method': 'Deterministic'}
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"method": type(self).__name__} | {
            k: v.to_dict() if isinstance(v, Distribution) else v for k, v in values.items()
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a config of this method from its JSON form; unknown fields are refused by name."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name == "method":
                continue
            if name not in known:
                raise ValueError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
            values[name] = distribution_from_dict(value) if isinstance(value, dict) else value
        return cls(**values)


def check_choice(owner: object, field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value outside a closed set, naming the owner, the field and the nearest valid choice."""
    if value not in allowed:
        raise ValueError(f"{type(owner).__name__}: unknown {field} {value!r}{did_you_mean(str(value), allowed)}")


def check_count(owner: object, field: str, value: object) -> None:
    """Refuse anything but a whole number of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(owner).__name__}: {field} must be a whole number of at least 1, got {value!r}.")
