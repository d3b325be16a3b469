"""Faults met by a sceptical user in workflows around models nobody here wrote: each against a slow answer."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
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
        self.layer, self.write, self.once, self.done = (
            nn.Linear(4, 3),
            write,
            once,
            False,
        )

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
        lambda: Writes(
            lambda layer: setattr(layer.bias, "data", layer.bias + 1), once=False
        ),
        lambda: nn.Sequential(nn.Linear(4, 4), Fitted()),
    ],
)
@pytest.mark.parametrize(
    "call",
    [sb.sample, lambda net, x: net(x), lambda net, x: sb.predict(net, x).samples],
)
def test_what_a_forward_writes_into_a_drawn_weight_is_refused_in_each_call(
    config: Any, make: Any, call: Any
) -> None:
    net = sb.bayesianize(make(), config).eval()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match="writes into a parameter of (layer|1), which is drawn anew",
        ):
            call(net, X)


@pytest.mark.parametrize("config", DRAWN)
def test_bounds_of_a_drawn_weight_that_a_layer_keeps_itself_are_those_of_each_draw(
    config: Any,
) -> None:
    net = sb.bayesianize(nn.Sequential(nn.Linear(4, 4), Bounded(4, 3)), config)
    with sb.fixed_draws(net, 4), torch.no_grad():
        for x in (X, X + 1):
            assert_draws(
                sb.sample(net, x),
                [sb.materialize(net, draw=j) for j in range(4)],
                (x,),
                {},
            )


class Speaks(nn.Module):
    """A method that calls its parts with more rows than came in, and one that searches with beams, as `generate`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def several(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().repeat_interleave(3, 0))

    def generate(self, x: Tensor) -> Tensor:
        x = (
            x.repeat_interleave(3, 0)
            * torch.tensor([1.0, 2.0, 3.0]).repeat(len(x))[:, None]
        )
        for _ in range(3):
            best = self(x).sum(-1).view(-1, 3).argmax(1) + 3 * torch.arange(len(x) // 3)
            x = self(x) + x[best].repeat_interleave(3, 0)
        return x[::3]

    def drawn(self, x: Tensor) -> Any:
        return (
            sb.sample(self, x),
            sb.predict(self, x, likelihood="gaussian").samples,
            sb.materialize(self, draw=1)(x),
        )


MEMBERS = [
    sb.BatchEnsemble(members=2, mean_init=sb.Normal(1.0, 1.0)),
    sb.Rank1(members=2),
]


@pytest.mark.parametrize("config", MEMBERS)
@torch.no_grad()
def test_beams_of_a_sequence_have_one_of_the_draws_that_are_held(config: Any) -> None:
    net = sb.bayesianize(Speaks(), config)
    with sb.fixed_draws(net):
        wanted = torch.stack(
            [sb.materialize(net, draw=j).generate(X) for j in range(2)]
        )
        found = net.generate(X)
        near = (found - wanted).abs().amax(-1) < 1e-5
        assert near.any(0).all() and (near.sum(1) > 0).all()


@pytest.mark.parametrize("config", MEMBERS)
@torch.no_grad()
def test_methods_that_mix_held_draws_are_told_and_what_they_ask_for_is_held(
    config: Any,
) -> None:
    net = sb.bayesianize(Speaks(), config)
    with sb.fixed_draws(net):
        with pytest.warns(
            sb.SlimbayesWarning, match="calls its parts with 5 and 15 rows"
        ):
            net.several(X)
        plains = [sb.materialize(net, draw=j) for j in range(2)]
        sampled, predicted, plain = net.drawn(X)
        for found in (sampled, predicted):
            assert_draws(found, plains, (X,), {})
        torch.testing.assert_close(plain, plains[1](X))


class Meter:
    """Counts and sums what a layer gives."""

    def __init__(self) -> None:
        self.count, self.total, self.parts = 0, torch.zeros(()), {"sizes": []}

    def look(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        self.count += 1
        self.total += out.detach().sum()
        self.parts["sizes"].append(len(out))


class Outside(nn.Module):
    """A module that looks at the features of another, which it does not hold as a part."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Any] = {}

    def look(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        self.features["calls"] = self.features.get("calls", 0) + 1


@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField(), sb.Ensemble(members=2)])
@pytest.mark.parametrize(
    "call", [sb.sample, lambda net, x: net(x), lambda net, x: sb.predict(net, x)]
)
def test_what_hooks_collect_is_of_the_call_and_not_of_trials(
    config: Any, call: Any
) -> None:
    net, seen, meter, outside, inner = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        [],
        Meter(),
        Outside(),
        Meter(),
    )
    net[1].register_forward_hook(lambda layer, args, out: seen.append(out.detach()))
    net[1].register_forward_hook(meter.look)
    net[1].register_forward_hook(outside.look)
    net[1].register_forward_pre_hook(lambda layer, args: inner.look(layer, (), args[0]))
    sb.bayesianize(net, config).eval()
    call(net, X)
    first = len(seen), meter.count, outside.features["calls"], inner.count
    call(net, X)
    second = len(seen), meter.count, outside.features["calls"], inner.count
    assert second == tuple(2 * n for n in first)
    if isinstance(config, sb.Ensemble):  # members have copies of a hook's object
        return
    assert len(set(first)) == 1 and meter.parts["sizes"] == [len(out) for out in seen]
    torch.testing.assert_close(
        meter.total, torch.stack([out.sum() for out in seen]).sum()
    )


class Tied(nn.Module):
    """Decodes with the weight it encodes with, in methods that can be called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 8), nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(self.other(x.to(self.layer.weight.dtype))).tanh()

    def decode(self, z: Tensor) -> Tensor:
        return z @ self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def both(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def start(self, weight: Tensor) -> None:
        self.layer.weight.data.copy_(weight)

    def size(self) -> Tensor:
        return self.layer.weight.norm()


@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField(), sb.DropConnect()])
@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_methods_that_compute_with_weights_which_are_no_draws_are_told(
    config: Any, fixed: bool
) -> None:
    net = sb.bayesianize(Tied(), config)
    net.start(torch.randn(8, 4))
    assert torch.equal(net.size(), net.layer.weight.norm())
    with sb.fixed_draws(net) if fixed else contextlib.nullcontext():
        z = net.encode(X)
        with pytest.warns(
            sb.SlimbayesWarning,
            match="decode of Tied computes with a parameter of layer",
        ):
            net.decode(z)
        net.decode(z)  # said once
        with pytest.warns(
            sb.SlimbayesWarning, match="both of Tied computes with a parameter of layer"
        ):
            net.both(X)


def test_what_hooks_on_all_modules_collect_is_of_the_call_alone() -> None:
    net, seen = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), []
    sb.bayesianize(net, sb.Rank1(members=2)).eval()
    with nn.modules.module.register_module_forward_hook(
        lambda layer, args, out: seen.append(layer)
    ):
        sb.sample(net, X)
    assert [layer for layer in seen if layer is net[1]] == [net[1]]


@dataclass
class Memory:
    state: Any = None
    seen: int = 0


class Remembers(nn.Module):
    """Keeps its hidden state in an object, which may lie in a list of another one."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.body, self.head, self.memory = nn.Linear(12, 8), nn.Linear(8, 3), memory

    def forward(self, x: Tensor) -> Tensor:
        own = self.memory if hasattr(self.memory, "seen") else self.memory.layers[0]
        state = (
            x.new_zeros(len(x), 8)
            if own.state is None or len(own.state) != len(x)
            else own.state
        )
        own.state, own.seen = self.body(torch.cat([x, state], -1)).tanh(), own.seen + 1
        return self.head(own.state)


class Prepares(nn.Module):
    """Keeps what it computed from drawn weights in an object."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.body, self.head, self.memory = nn.Linear(4, 8), nn.Linear(8, 3), memory

    def forward(self, x: Tensor) -> Tensor:
        own = self.memory if hasattr(self.memory, "seen") else self.memory.layers[0]
        if own.state is None:
            own.state = self.body(torch.ones(1, 4))
        return self.head(self.body(x).tanh() * own.state)


OBJECTS = [
    Memory,
    lambda: SimpleNamespace(state=None, seen=0),
    lambda: SimpleNamespace(layers=[Memory()]),
]


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField(), sb.Ensemble(members=2)])
@pytest.mark.parametrize("make", OBJECTS)
@pytest.mark.parametrize("cls", [Remembers, Prepares])
@torch.no_grad()
def test_what_draws_keep_in_objects_is_kept_apart(
    config: Any, make: Any, cls: Any
) -> None:
    net = sb.bayesianize(cls(make()), config).eval()
    with sb.fixed_draws(net):
        plains = [sb.materialize(net, draw=j) for j in range(sb.members(net))]
        for x in (X, X + 1, X - 1):
            torch.testing.assert_close(
                sb.sample(net, x), torch.stack([plain(x) for plain in plains])
            )


@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField()])
@pytest.mark.parametrize("make", OBJECTS)
@torch.no_grad()
def test_what_was_computed_from_drawn_weights_is_not_kept_in_objects(
    config: Any, make: Any
) -> None:
    net = sb.bayesianize(Prepares(make()), config).eval()
    net(X[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sb.predict(net, X, draws=4, likelihood="gaussian", seed=1).samples
    with sb.fixed_draws(net, 4, seed=1):
        plains = [sb.materialize(net, draw=j) for j in range(4)]
    torch.testing.assert_close(found, torch.stack([plain(X) for plain in plains]))


class Leaves(nn.Module):
    """Keeps its hidden state as an attribute of a module of torch's."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.bodies, self.act, self.head = (
            nn.ModuleList([nn.Linear(4, 8)]),
            nn.Tanh(),
            nn.Linear(8, 3),
        )
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        there: Any = self.get_submodule(self.place)
        state = getattr(there, "state", x.new_zeros(len(x), 8))
        there.state = self.act(self.bodies[0](x) + state).detach()
        return self.head(there.state)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField(), sb.Ensemble(members=2)])
@pytest.mark.parametrize("place", ["bodies", "bodies.0", "act"])
@torch.no_grad()
def test_what_draws_keep_in_modules_of_torch_is_kept_apart(
    config: Any, place: str
) -> None:
    net = sb.bayesianize(Leaves(place), config).eval()
    with sb.fixed_draws(net):
        plains = [sb.materialize(net, draw=j) for j in range(sb.members(net))]
        for x in (X, X + 1, X - 1):
            torch.testing.assert_close(
                sb.sample(net, x), torch.stack([plain(x) for plain in plains])
            )


class Caches(nn.Module):
    """Remembers what it computed for a length."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.body, self.head = (
            nn.Linear(1, 8),
            nn.Linear(4, 8),
            nn.Linear(8, 3),
        )

    @functools.cache  # noqa: B019 - what is tested
    def offsets(self, size: int) -> Tensor:
        return self.steps(torch.arange(size).float()[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) + self.offsets(x.shape[1])).tanh()).mean(1)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField(), sb.Ensemble(members=2)])
@torch.no_grad()
def test_methods_that_remember_what_they_returned_work_it_out_for_each_draw(
    config: Any,
) -> None:
    net, x = Caches().eval(), torch.randn(5, 3, 4)
    net(x)  # remembers what the plain weights gave
    sb.bayesianize(net, config)
    for seed in (1, 2):
        net(x)
        with sb.fixed_draws(net, 4, seed=seed):
            plains = [sb.materialize(net, draw=j) for j in range(4)]
        wanted = torch.stack([plain(x) for plain in plains])
        torch.testing.assert_close(
            sb.predict(net, x, 4, likelihood="gaussian", seed=seed).samples, wanted
        )
