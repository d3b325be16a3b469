"""Metrics that take batches: torchmetrics' Metric with states that are sums, or whole lists where nothing less will do.

Both kinds combine exactly across processes and batches, so the order and the size of batches change rounding alone.
States are named for what they sum: a torchmetrics MetricCollection lets metrics whose states have equal names and first
values share one update, which is right for ECE and MCE, and would be wrong for accuracy and top-5.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Streaming(Metric):
    """What all metrics here share: float64 states, and an error instead of a number when nothing was seen.

    `update` takes a batch; `compute` is over all batches so far, of all processes.
    """

    full_state_update = False
    is_differentiable = False

    def __init__(self) -> None:
        super().__init__()
        self.set_dtype(
            torch.float64
        )  # also the type in which a process without data joins the others' lists

    def add_sum(self, name: str, *shape: int) -> None:
        self.add_state(
            name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum"
        )

    def add_list(self, name: str) -> None:
        self.add_state(name, [], dist_reduce_fx="cat")

    def add_to(self, name: str, amount: Tensor | float) -> None:
        """Add to a sum, or append to a list, a copy: the caller may overwrite its scores."""
        state = getattr(self, name)
        amount = torch.as_tensor(amount).to(self.device, torch.float64, copy=True)
        if isinstance(state, list):
            state.append(amount.flatten())
        else:
            setattr(self, name, state + amount)

    def all_of(self, name: str) -> Tensor:
        """A list as one tensor (M,), refused when empty."""
        state: Tensor | Sequence[Tensor] = getattr(self, name)
        values = (
            state
            if isinstance(state, Tensor)
            else torch.cat(list(state))
            if state
            else torch.zeros(0)
        )
        self.need_rows(len(values))
        return values

    def need_rows(self, count: Tensor | int) -> None:
        if not count:
            raise ValueError(
                f"{type(self).__name__} has seen no rows; call update first."
            )

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # torchmetrics warns where a process had no batch, though its share of the others' sums is well defined
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(wrapped)
        def quiet() -> Any:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", r"The ``compute`` method of metric", UserWarning
                )
                return wrapped()

        return quiet


class Mean(Streaming):
    """The mean of one number per row, which `update` adds in batches; `option` keeps variants of a class apart."""

    def __init__(self, option: str = "") -> None:
        super().__init__()
        self.sum_name, self.count_name = (
            f"{type(self).__name__}{option}_{part}" for part in ("sum", "count")
        )
        self.add_sum(self.sum_name)
        self.add_sum(self.count_name)

    def add(self, values: Tensor) -> None:
        self.add_to(self.sum_name, values.double().sum())
        self.add_to(self.count_name, values.numel())

    def compute(self) -> Tensor:
        """The mean over all rows so far, of all processes."""
        count = getattr(self, self.count_name)
        self.need_rows(count)
        return getattr(self, self.sum_name) / count


class GivenMean(Mean):
    """The mean of numbers as they are given."""

    def update(self, values: Tensor) -> None:
        self.add(values)
