"""What one training step costs Python: how often it changes the source file; and lines shaped once for all layers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.engine.modules import posteriors_of
from slimbayes.posteriors.factors import Lines

SOURCE = str(Path(sb.__file__).parent)


def hops(work: Any) -> int:
    """How often the file changes between one call or return of a function of the library and the next, in this thread.

    Calls of anything else, of torch and of what Python generates for dataclasses among it, are passed over.
    """
    count, latest = 0, ""

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal count, latest
        file = frame.f_code.co_filename
        if event in ("call", "return") and file.startswith(SOURCE):
            count, latest = count + (latest not in ("", file)), file

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def steps(layers: int) -> int:
    """Hops of `sample`, a likelihood, `elbo` and a backward pass, once the step is settled."""
    net = nn.Sequential(
        *[m for _ in range(layers) for m in (nn.Linear(4, 4), nn.ReLU())]
    )
    sb.bayesianize(net, sb.Rank1(members=2))
    x, y = torch.randn(8, 4), torch.randint(4, (8,))

    def step() -> None:
        sb.elbo(
            sb.categorical(sb.sample(net, x), y), net, num_data=1000
        ).loss.backward()

    for _ in range(20):  # a proof, and looks at whether it still holds
        step()
    return hops(step)


@pytest.mark.slow
def test_a_step_goes_through_few_files() -> None:
    """212 with two layers, 23 for each further one, before factors were shaped together and calls read once."""
    two, five = steps(2), steps(5)
    assert two <= 96 and five - two <= 3 * 8


class Shapes(nn.Module):
    """Layers that meet rows as vectors, as sequences and as images, one of them in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Conv2d(1, 3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = torch.tanh(self.c(self.a(torch.stack([x, x * 2, x - 1], 1))))  # (R, 3, 4)
        return self.d(x.unsqueeze(1)).flatten(1)


class Pictures(nn.Sequential):
    """Convolutions for the most part."""

    def __init__(self) -> None:
        maps = [nn.Conv1d(2, 3, 1), nn.Conv1d(3, 3, 1), nn.Conv1d(3, 2, 1)]
        super().__init__(nn.Unflatten(1, (2, 2)), *maps, nn.Flatten(), nn.Linear(4, 3))


METHODS = [
    sb.Rank1(members=2),
    sb.Rank1(members=2, draws="member"),
    sb.BatchEnsemble(members=2),
    sb.Rank1(members=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", METHODS, ids=["example", "member", "point", "one"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [Shapes, Pictures])
def test_one_layers_lines_meet_inputs_of_several_kinds(
    make: Any, config: Any, autocast: bool
) -> None:
    torch.manual_seed(0)
    net = sb.bayesianize(make(), config)
    with torch.no_grad():
        for p in posteriors_of(net):
            p.s.loc.normal_(1.0, 0.3)
            if p.bias is not None:
                p.bias.normal_()
    x = torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        folded, apart = (
            sb.sample(net, x, draws=6, parallel=parallel, seed=1)
            for parallel in (True, False)
        )
    torch.testing.assert_close(
        folded, apart, **({"rtol": 0.05, "atol": 0.05} if autocast else {})
    )
    with sb.fixed_draws(net, 4):
        every = sb.sample(net, x)
        for j, out in enumerate(every):
            torch.testing.assert_close(
                out, sb.materialize(net, draw=j)(x), rtol=1e-4, atol=1e-5
            )
        torch.testing.assert_close(
            sb.sample(net, x[:4]), every[:, :4]
        )  # other rows, the same draws


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("draws", ["example", "member"])
def test_lines_that_a_checkpoint_made_without_a_graph_serve_nobody_else(
    reentrant: bool, draws: Any
) -> None:
    class Net(nn.Module):
        saves = False

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = (
                checkpoint(self.a, x, use_reentrant=reentrant)
                if self.saves
                else self.a(x)
            )
            return self.b(torch.tanh(x))

    torch.manual_seed(0)
    net, x = (
        sb.bayesianize(Net(), sb.Rank1(members=2, draws=draws)),
        torch.randn(6, 4, requires_grad=True),
    )
    sb.sample(net, x)
    found = []
    for net.saves in (False, True):  # each is another kind of call
        sb.sample(net, x)
        net.zero_grad()
        sb.sample(net, x, seed=3).square().mean().backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_lines_are_shaped_anew_for_every_kind_of_input() -> None:
    whole = torch.arange(12.0).view(2, 6).requires_grad_()

    def made(second: bool) -> Lines:
        lines = Lines(second)
        lines.wholes.append((whole, {"a": 4, "b": 2}, whole.split([4, 2], 1)))
        return lines

    lines = made(False)
    a = lines.meeting(torch.zeros(2, 4), -1, 2)["a"]
    assert (
        a.shape == (2, 4)
        and lines.meeting(torch.ones(2, 4), -1, 2)["a"] is a
        and a.requires_grad
    )
    assert torch.equal(
        lines.meeting(torch.zeros(6, 4), -1, 6)["b"],
        whole[:, 4:].repeat_interleave(3, 0),
    )
    assert (
        lines.meeting(torch.zeros(2, 4, dtype=torch.float64), -1, 2)["a"].dtype
        == torch.float64
    )
    with torch.no_grad():
        assert not lines.meeting(torch.zeros(6, 4), -1, 6)["a"].requires_grad
    assert lines.meeting(torch.zeros(6, 4), -1, 6)["a"].requires_grad
    assert (
        lines.meeting(torch.zeros(2, 5, 4), -1, 2) is None
        and lines.meeting(torch.zeros(2, 4, 5), 1, 2) is None
    )
    assert made(False).meeting(torch.zeros(2, 5, 4), -1, 2)["a"].shape == (2, 1, 4)
    assert made(True).meeting(torch.zeros(2, 4, 5), 1, 2)["a"].shape == (2, 4, 1)
    assert made(True).meeting(torch.zeros(2, 4, 5, 5), 1, 2)["a"].shape == (2, 4, 1, 1)
    assert made(True).meeting(torch.zeros(2, 4), -1, 2) is None


def test_held_draws_meet_no_rows_and_any_number_of_them() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), sb.Rank1(members=3)
    )
    with sb.fixed_draws(net, 6):
        whole = torch.randn(12, 4)
        first = sb.sample(net, whole[:6])
        for rows in (0, 1, 5, 12):
            found = sb.sample(net, whole[:rows])
            assert found.shape == (6, rows, 3) and net(whole[:rows]).shape == (rows, 3)
            torch.testing.assert_close(found[:, :6], first[:, :rows])
