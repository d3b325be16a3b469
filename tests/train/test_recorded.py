"""`sb.recorded`: the same steps as without it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import slimbayes as sb
from slimbayes.train import recorded

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a GPU"
)


def trained(
    device: str, record: bool, steps: int = 6, **options: object
) -> tuple[list[float], Tensor]:
    """Losses and the parameters after some steps, whose rate, KL weight and last batch's size change on the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net = sb.bayesianize(net, sb.Rank1(members=2)).to(device)
    kind = options.pop("kind", torch.optim.Adam)
    optimizer = kind(net.parameters(), lr=0.1, fused=True, **options)  # type: ignore[operator]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x: Tensor, y: Tensor, weight: float) -> Tensor:
        optimizer.zero_grad()
        loss = sb.elbo(
            sb.categorical(sb.sample(net, x), y), net, 100, kl_weight=weight
        ).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = sb.recorded(step, net, optimizer) if record else step
    x, y = torch.randn(8, 3, device=device), torch.arange(8, device=device) % 2
    torch.manual_seed(1)
    losses = []
    for i in range(steps):
        size = 4 if i == steps - 1 else 8
        losses.append(float(call(x[:size] * (i + 1), y[:size], i / steps)))
        schedule.step()
    state = [t.detach().flatten().float() for t in (*net.parameters(), *net.buffers())]
    return losses, torch.cat(state).cpu()


@on_gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"kind": torch.optim.AdamW}, {"kind": torch.optim.SGD, "momentum": 0.9}],
)
def test_recorded_steps_are_the_steps(options: dict[str, object]) -> None:
    losses, state = trained("cuda", True, **options)
    plain, wanted = trained("cuda", False, **options)
    assert losses == pytest.approx(plain, rel=1e-4)
    torch.testing.assert_close(state, wanted, rtol=1e-3, atol=1e-4)


@on_gpu
def test_draws_differ_between_replays() -> None:
    net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(members=2)).cuda()
    call = sb.recorded(lambda x: net(x), net)
    with torch.no_grad():
        x = torch.randn(8, 3, device="cuda")
        first, kept = call(x), call(x)
        assert not torch.equal(first, kept)
        again = kept.clone()
        call(x)
        assert torch.equal(kept, again), "results are the caller's own"


@on_gpu
def test_what_cannot_be_recorded_runs() -> None:
    net = nn.Linear(3, 2).cuda()
    call = sb.recorded(
        lambda x: (net(x) + 0 * torch.randn(2, device="cuda")).sum().item(), net
    )
    x = torch.randn(8, 3, device="cuda")
    with pytest.warns(sb.SlimbayesWarning, match="cannot record this step"):
        assert call(x) == pytest.approx(net(x).sum().item(), rel=1e-4)
    assert call(x) == pytest.approx(net(x).sum().item(), rel=1e-4)


@on_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_what_changes_between_replays(autocast: bool) -> None:
    """Weights as tensors of the CPU, rates by hand, moments that are loaded; autocast around the steps."""
    found = []
    for record in (False, True):
        torch.manual_seed(0)
        net, x = nn.Linear(3, 2).cuda(), torch.randn(8, 3, device="cuda")
        optimizer = torch.optim.SGD(
            net.parameters(), lr=torch.tensor(0.1), momentum=0.9, fused=True
        )

        def step(
            x: Tensor, weight: Tensor, net: Any = net, optimizer: Any = optimizer
        ) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).float().square().mean() * weight
            loss.backward()
            optimizer.step()
            return loss.detach()

        call, losses = sb.recorded(step, net, optimizer) if record else step, []
        for i in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            if i == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                losses.append(float(call(x, torch.tensor(1.0 + i))))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-2 if autocast else 1e-4)


def test_without_a_gpu_it_is_the_step() -> None:
    assert trained("cpu", True)[0] == trained("cpu", False)[0]


def test_optimizers_that_a_graph_cannot_hold_are_refused() -> None:
    net = nn.Linear(2, 1)
    for optimizer in (
        torch.optim.NAdam(net.parameters()),
        torch.optim.Adam(net.parameters()),
    ):
        with pytest.raises(ValueError, match="fused=True"):
            sb.recorded(lambda x: x, net, optimizer)


def test_sgd_that_leaves_out_its_first_step_is_refused() -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="dampening"):
        sb.recorded(
            lambda x: x,
            net,
            torch.optim.SGD(net.parameters(), momentum=0.9, dampening=0.5, fused=True),
        )


# --- what is recorded anew, and what is not: a CPU that plays GPU ---


class Replayed:
    """A graph that runs the step again and writes into the same outputs, as replays do."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.found = work, work()

    def replay(self) -> None:
        for old, new in zip(
            tree_leaves(self.found), tree_leaves(self.work()), strict=True
        ):
            if isinstance(old, Tensor):
                old.copy_(new)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """All that were made so far."""
    made: list[Replayed] = []

    def record(
        work: Callable[[], Any], state: list[Tensor], optimizer: object
    ) -> tuple[Replayed, Any]:
        made.append(Replayed(work))
        return made[-1], made[-1].found

    monkeypatch.setattr(recorded, "record", record)
    monkeypatch.setattr(recorded, "_on_gpu", lambda leaf: isinstance(leaf, Tensor))
    return made


def test_arguments_of_all_kinds(recordings: list[Replayed]) -> None:
    def step(
        batch: dict[str, Tensor],
        *,
        weight: Any = 1.0,
        twice: bool = False,
        name: str | None = None,
    ) -> Any:
        return {"y": batch["x"] * weight * (1 + twice)}, name

    call, x = sb.recorded(step, nn.Linear(1, 1)), torch.ones(2)
    first = call({"x": x}, weight=2.0)
    assert first[0]["y"].tolist() == [2, 2] and first[1] is None
    assert call({"x": 2 * x}, weight=np.float32(3.0))[0]["y"].tolist() == [6, 6]
    assert (
        call({"x": x}, weight=np.float64(4.0))[0]["y"].tolist() == [4, 4]
        and len(recordings) == 1
    )
    assert first[0]["y"].tolist() == [2, 2], "results are the caller's own"
    assert (
        call({"x": x}, weight=2.0, twice=True)[0]["y"].tolist() == [4, 4]
        and len(recordings) == 2
    )
    assert call({"x": x}, name="a")[1] == "a" and len(recordings) == 3


@dataclass
class Batch:
    x: Tensor


def test_what_a_recording_cannot_see_is_run_and_said(
    recordings: list[Replayed],
) -> None:
    net, one = nn.Linear(1, 1), torch.ones(1)
    call = sb.recorded(lambda batch, y: batch.x.sum() + y, net)
    with pytest.warns(sb.SlimbayesWarning, match="an argument is a Batch"):
        assert float(call(Batch(torch.zeros(2000)), one)) == 1
    far = torch.zeros(2000)
    far[1000] = 5  # not printed
    assert float(call(Batch(far), one)) == 6
    call = sb.recorded(lambda x: Batch(2 * x), net)
    with pytest.warns(sb.SlimbayesWarning, match="returns a Batch"):
        first = call(one)
    call(5 * one)
    assert float(first.x) == 2, "results are the caller's own"
    x = one.clone().requires_grad_()
    with pytest.warns(sb.SlimbayesWarning, match="requires a gradient"):
        sb.recorded(lambda x: (3 * x).sum().backward(), net)(x)
    assert x.grad is not None and float(x.grad) == 3


def test_numbers_of_the_cpu_are_moved() -> None:
    assert recorded._static(torch.tensor(0.5), torch.device("meta")).is_meta


def test_what_a_graph_has_fixed_is_recorded_anew(recordings: list[Replayed]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    call, x = sb.recorded(lambda x: net(x), net), torch.ones(3, 2)
    call(x), call(x)
    assert len(recordings) == 1
    net[1].eval()
    call(x)
    assert len(recordings) == 2, "a part's mode"
    net[0].weight.requires_grad_(False)
    call(x)
    assert len(recordings) == 3, "what is trained"
    with (
        torch.autocast("cuda", torch.bfloat16)
        if torch.cuda.is_available()
        else torch.inference_mode()
    ):
        call(x)
    assert len(recordings) == 4
    net.double()
    call(x.double()), net.float(), call(x)
    assert len(recordings) == 6, "weights that lie elsewhere"


@pytest.mark.parametrize("start", [0.1, torch.tensor(0.1)])
def test_rates_are_those_of_the_optimizer(
    recordings: list[Replayed], start: float | Tensor
) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=start, fused=True)

    def step(x: Tensor) -> None:
        optimizer.step()

    call, x = sb.recorded(step, net, optimizer), torch.ones(1)
    rate = optimizer.param_groups[0]["lr"]
    assert rate is not start
    for new in (0.5, torch.tensor(0.25), np.float64(0.125)):
        optimizer.param_groups[0]["lr"] = new
        call(x)
        assert optimizer.param_groups[0]["lr"] is rate and float(rate) == float(new)
    assert len(recordings) == 1
    other = nn.Linear(1, 1)
    optimizer.add_param_group({"params": other.parameters(), "lr": 0.5})
    call(x)
    assert isinstance(optimizer.param_groups[1]["lr"], Tensor) and len(recordings) == 2


def test_moments_that_were_loaded_are_recorded_anew(recordings: list[Replayed]) -> None:
    net, x = nn.Linear(1, 1), torch.ones(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, fused=True)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    call = sb.recorded(step, net, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    call(x)
    call(x)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    call(x)
    assert (
        len(recordings) == 2
        and optimizer.param_groups[0]["lr"] is rate
        and float(rate) == 0.25
    )


# sb.compiled


def test_compiled_is_torchs_compiler_with_settings_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch, "compile", lambda model, **how: told.append(how) or model
    )
    net = nn.Linear(2, 2)
    assert sb.compiled(net, dynamic=False) is net and told[-1]["dynamic"] is False
    known = torch._inductor.list_options()
    assert told[-1]["options"]["realize_reads_threshold"] > 4
    assert set(told[-1]["options"]) <= {*known, "guard_filter_fn"}
    sb.compiled(net, mode="max-autotune", options={"realize_reads_threshold": 5})
    assert (
        told[-1]["options"]["realize_reads_threshold"] == 5
        and told[-1]["options"]["max_autotune"] is True
    )
    with pytest.raises(ValueError, match="call torch.compile for 'eager'"):
        sb.compiled(net, backend="eager")


@pytest.mark.slow
def test_compiled_code_looks_at_values_before_each_call_and_not_at_the_code_of_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    # What is looked at is decided before the graph is made into a program, which takes most of the time.
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx",
        lambda graph, *args, **options: graph.forward,
    )
    net, x, shift = (
        sb.bayesianize(nn.Linear(2, 2), sb.Rank1(members=2)),
        torch.randn(4, 2),
        {"by": 1.0},
    )

    def loss() -> Tensor:
        return sb.sample(net, x).mean() * 0 + sb.kl(net) * 0 + shift["by"]

    net(x)
    looks = []
    for compiler in (torch.compile, sb.compiled):
        torch._dynamo.reset()
        fast, shift["by"] = compiler(loss, dynamic=False), 1.0
        assert float(fast().detach()) == 1
        shift["by"] = 2.0
        assert float(fast().detach()) == 2
        looks.append(
            len(
                str(
                    _debug_get_cache_entry_list(loss.__code__)[0].guard_manager
                ).splitlines()
            )
        )
    assert looks[1] < 0.8 * looks[0]


@on_gpu
def test_compiled_networks_have_the_values_and_gradients_of_plain_ones() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 2),
    )
    net = sb.bayesianize(net, sb.Rank1(members=2, mean_init=sb.Normal(1.0, 0.5))).cuda()
    x, found = torch.randn(6, 3, 8, 8, device="cuda"), []
    for call in (net, sb.compiled(net, dynamic=False)):
        torch.manual_seed(1)
        out = sb.sample(call, x, rows="split")
        net.zero_grad()
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in net.parameters())])
    for own, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, own, rtol=1e-3, atol=1e-3)
