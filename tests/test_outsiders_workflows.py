"""Faults met by a sceptical user in workflows around models nobody here wrote: each against a slow answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_draws
from torch import Tensor, nn

import slimbayes as sb

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Writes(nn.Module):
    """Writes into the weight of a layer: in each call, or in the first, as networks that rescale themselves do."""

    def __init__(self, write: Callable[[nn.Linear], Any], once: bool) -> None:
        super().__init__()
        self.layer, self.write, self.once, self.done = nn.Linear(4, 3), write, once, False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.once and self.done):
            with torch.no_grad():
                self.write(self.layer)
            self.done = True
        return self.layer(x)


class Fitted(nn.Module):
    """Starts at the statistics of the first inputs, as the norms of flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 4))
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.shift.data.copy_(x.mean(0, keepdim=True))
            self.done.fill_(True)
        return x - self.shift


class Bounded(nn.Linear):
    """A dense layer that bounds the norm of its weight in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


DRAWN = [sb.Rank1(members=2), sb.MeanField(), sb.DropConnect()]


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("config", DRAWN)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Writes(lambda layer: layer.weight.div_(2), once=True),
        lambda: Writes(lambda layer: layer.weight.data.clamp_(-0.1, 0.1), once=False),
        lambda: Writes(lambda layer: setattr(layer.bias, "data", layer.bias + 1), once=False),
        lambda: nn.Sequential(nn.Linear(4, 4), Fitted()),
    ],
)
@pytest.mark.parametrize("call", [sb.sample, lambda net, x: net(x), lambda net, x: sb.predict(net, x).samples])
def test_what_a_forward_writes_into_a_drawn_weight_is_refused_in_each_call(config: Any, make: Any, call: Any) -> None:
    net = sb.bayesianize(make(), config).eval()
    for _ in range(2):
        with pytest.raises(ValueError, match="writes into a parameter of (layer|1), which is drawn anew"):
            call(net, X)


@pytest.mark.parametrize("config", DRAWN)
def test_bounds_of_a_drawn_weight_that_a_layer_keeps_itself_are_those_of_each_draw(config: Any) -> None:
    net = sb.bayesianize(nn.Sequential(nn.Linear(4, 4), Bounded(4, 3)), config)
    with sb.frozen(net, draws=2), torch.no_grad():
        for x in (X, X + 1):
            assert_draws(sb.sample(net, x), [sb.write_out(net, j) for j in range(2 * sb.members(net))], (x,), {})
