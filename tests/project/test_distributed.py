"""Two gloo processes against one: DDP and FSDP2 compute what a single process computes that plays both ranks in turn.

The fixture starts two processes, each runs every scenario and writes its results, and the tests compare those of the
two ranks with each other and with what one process finds here: it runs the rows of each rank with the noise of that
rank, and averages losses and gradients over the ranks.

Sizes: N rows of the whole batch, K members, S draws.
"""

import contextlib
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch._dynamo  # FSDP2 needs it: imported once, not in both processes
import torch.distributed as dist
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine import noise

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

WORLD, SECONDS = 2, 100
pytestmark = pytest.mark.slow  # two processes that import torch
NUM_DATA = 20
WEIGHTS = {
    "loss": (1.0, 1.0),
    "nll": (1.0, 0.0),
    "kl": (0.0, 1.0),
    "twice": (0.0, 2.0),
}  # of the likelihood and of the KL
Result = dict[str, Any]
Scenario = Callable[[int, Path], Result]
SCENARIOS: dict[str, Scenario] = {}
CONFIGS: dict[str, sb.Config] = {
    "example": sb.Rank1(members=2),
    "member": sb.Rank1(members=2, draws="member"),
    "odd": sb.Rank1(
        members=3, prior=sb.Cauchy(1.0, 0.1)
    ),  # three members do not divide the four rows of a rank
    "batchensemble": sb.BatchEnsemble(members=2),
    "picks": sb.ModelPatch(components=3, patch=".*", draws="example", jitter=0.5),
    "ensemble": sb.Ensemble(members=2, init="copies", jitter=0.5),
}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


def build(config: str) -> nn.Module:
    torch.manual_seed(0)
    # Of few sizes: for each, torch takes a tenth of a second to find out how operations are sharded.
    net = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    return sb.bayesianize(net, CONFIGS[config])


def batch(rank: int, step: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step's batch."""
    data = torch.Generator().manual_seed(100 + step)
    x = torch.randn(WORLD * size, 4, generator=data)
    y = torch.randint(0, 3, (WORLD * size,), generator=data)
    return x[rank::WORLD], y[rank::WORLD]  # dealt out as DistributedSampler does


def ddp(model: nn.Module, rank: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def shard(model: nn.Module, rank: int, alone: tuple[int, ...] = (0, 2, 4)) -> nn.Module:
    """FSDP2 with a group of its own for the layers at these positions; the root takes the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for i in alone:
        fully_shard(model[i], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        n.removeprefix("module."): whole(p.grad)
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def loss(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    nll_weight: float = 1.0,
    kl_weight: float = 1.0,
) -> sb.ELBO:
    return sb.elbo(
        nll_weight * sb.categorical(sb.sample(net, x), y),
        net,
        num_data=NUM_DATA,
        kl_weight=kl_weight,
    )


def train(net: nn.Module, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(sb.param_groups(net, weight_decay=0.01), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, *batch(rank, step)).loss.backward()
        optimizer.step()


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    return max((one[n] - two[n]).abs().max().item() for n in one)


# ---- one process that plays all ranks --------------------------------------------------------------------------------


@contextlib.contextmanager
def playing(rank: int, world: int = WORLD) -> Iterator[None]:
    """Draw what a rank would draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slimbayes.engine.noise.processes", lambda: (rank, world))
        yield


class Ranks:
    """All ranks in turn with one model; each has its own random state, which starts at the same seed."""

    def __init__(self, seed: int = 1) -> None:
        self.states = [torch.Generator().manual_seed(seed).get_state()] * WORLD

    def each(self, run: Callable[[int], Any]) -> list[Any]:
        found = []
        for rank in range(WORLD):
            torch.set_rng_state(self.states[rank])
            with playing(rank):
                found.append(run(rank))
            self.states[rank] = torch.get_rng_state()
        return found

    def backward(self, net: nn.Module, run: Callable[[int], sb.ELBO]) -> list[sb.ELBO]:
        """Losses of all ranks, and in the model's gradients the mean of theirs."""

        def one(rank: int) -> sb.ELBO:
            terms = run(rank)
            terms.loss.backward()
            return terms

        found = self.each(one)
        for p in net.parameters():
            if p.grad is not None:
                p.grad /= WORLD
        return found


def played_training(config: str, steps: int) -> dict[str, Tensor]:
    net, ranks = build(config), Ranks()
    optimizer = torch.optim.SGD(sb.param_groups(net, weight_decay=0.01), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        ranks.backward(net, lambda rank, step=step: loss(net, *batch(rank, step)))
        optimizer.step()
    return parameters(net)


def played_step(config: str) -> Result:
    net = build(config)
    optimizer = torch.optim.SGD(sb.param_groups(net, weight_decay=0.01), lr=0.1)
    terms = Ranks().backward(net, lambda rank: loss(net, *batch(rank)))
    grad = gradients(net)
    optimizer.step()
    return {
        "kl": sb.kl(build(config)).detach(),
        "nll": [t.nll.detach() for t in terms],
        "grad": grad,
        "end": parameters(net),
    }


# ---- scenarios: each runs on both ranks ------------------------------------------------------------------------------


def _ddp_training(config: str, rank: int) -> Result:
    net = ddp(build(config), rank)
    start = parameters(net)
    torch.manual_seed(1)
    train(net, rank, steps=3)
    return {"start": start, "end": parameters(net)}


@scenario
def ddp_training(rank: int, folder: Path) -> Result:
    return {config: _ddp_training(config, rank) for config in CONFIGS}


@scenario
def ddp_noise(rank: int, folder: Path) -> Result:
    """Every rank asks for draws at the very same input."""
    out = {}
    for config in ("example", "member"):
        net = ddp(build(config), rank).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            out[config] = {
                "sample": sb.sample(net, torch.ones(3, 4)),
                "bare": net(torch.ones(3, 4)),
            }
    return out


@scenario
def ddp_gradients(rank: int, folder: Path) -> Result:
    """One backward pass of the whole loss, of the likelihood alone, of the KL alone, and of a KL counted twice."""
    out = {}
    for name, weights in WEIGHTS.items():
        net = ddp(build("example"), rank)
        torch.manual_seed(1)
        terms = loss(net, *batch(rank), *weights)
        terms.loss.backward()
        out[name] = {
            "loss": terms.loss.detach(),
            "kl": terms.kl.detach(),
            "grad": gradients(net),
        }
    return out


@scenario
def ddp_uneven(rank: int, folder: Path) -> Result:
    """Three rows on one rank and five on the other, then equal shares again."""
    net = ddp(build("example"), rank)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for size in (3 + 2 * rank, 4):
        optimizer.zero_grad()
        loss(net, *batch(0, size=size)).loss.backward()
        optimizer.step()
    torch.manual_seed(1)
    single = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=1, scale_init=0.3))
    with torch.no_grad():
        drawn = sb.sample(single, torch.ones(3 + 2 * rank, 4), draws=2)
    return {"end": parameters(net), "drawn": drawn}


@scenario
def ddp_save(rank: int, folder: Path) -> Result:
    """Nothing is sharded, so one rank saves alone, as people do; a collective inside would wait for ever."""
    net = ddp(build("example"), rank)
    train(net, rank, steps=1)
    if rank == 0:
        sb.save(net.module, folder / "inner", base=True)
        sb.save(net, folder / "wrapper", base=True)
    return {"end": parameters(net)}


def _fsdp_step(config: str, rank: int, alone: tuple[int, ...] = (0, 2, 4)) -> Result:
    net = shard(build(config), rank, alone)
    before = sb.kl(net)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(sb.param_groups(net, weight_decay=0.01), lr=0.1)
    terms = loss(net, *batch(rank))
    terms.loss.backward()
    grad = gradients(net)
    optimizer.step()
    plain = all(type(t) is Tensor for t in (before, *terms))
    return {
        "plain": plain,
        "kl": before.detach(),
        "nll": terms.nll.detach(),
        "grad": grad,
        "end": parameters(net),
    }


@scenario
def fsdp_step(rank: int, folder: Path) -> Result:
    return {config: _fsdp_step(config, rank) for config in CONFIGS}


@scenario
def fsdp_root(rank: int, folder: Path) -> Result:
    """All parameters in the root's group, which stays whole between forward and backward."""
    return _fsdp_step("example", rank, alone=())


@scenario
def fsdp_mixed(rank: int, folder: Path) -> Result:
    """The last layer in the root's group: whole after the forward, while the others are shards again."""
    return _fsdp_step("example", rank, alone=(0, 2))


@scenario
def fsdp_kl_gradient(rank: int, folder: Path) -> Result:
    net = shard(build("odd"), rank)
    sb.kl(net).backward()
    return {"grad": gradients(net)}


@scenario
def fsdp_predict(rank: int, folder: Path) -> Result:
    net = shard(build("example"), rank).eval()
    x = batch(rank)[0]
    torch.manual_seed(1)
    pred = sb.predict(net, x, draws=2)
    with torch.no_grad(), sb.fixed_draws(net):
        held = torch.equal(sb.sample(net, x), sb.sample(net, x))
    return {"samples": pred.samples, "held": held}


@scenario
def fsdp_save(rank: int, folder: Path) -> Result:
    """Gathering shards is collective, so every rank calls save. The paths differ to show who writes."""
    net = shard(build("example"), rank)
    train(net, rank, steps=1)
    sb.save(net, folder / f"sharded-{rank}", base=True)
    return {
        "end": parameters(net),
        "complete": (folder / "sharded-0" / "manifest.json").exists(),
    }


# ---- the two processes -----------------------------------------------------------------------------------------------


def work(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    # A rank that waits for one that failed must not wait for ever.
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=limit,
    )
    for name, run in SCENARIOS.items():
        try:
            result = run(rank, folder)
        except Exception:
            result = {"error": traceback.format_exc()}
        torch.save(result, folder / f"{name}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        ranks = [
            forks.start(work, rank, place, log=place / f"log-{rank}")
            for rank in range(WORLD)
        ]
        forks.exit_codes(ranks, SECONDS)  # scenarios without a result fail below
        yield place


def results(folder: Path, name: str) -> list[Result]:
    out = []
    for rank in range(WORLD):
        file = folder / f"{name}-{rank}.pt"
        assert file.exists(), (
            f"rank {rank} left no result:\n{(folder / f'log-{rank}').read_text()[-2000:]}"
        )
        out.append(torch.load(file, weights_only=True))
    errors = [
        f"rank {rank}: {r['error']}" for rank, r in enumerate(out) if "error" in r
    ]
    assert not errors, "\n".join(errors)
    return out


# ---- DDP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_ddp_ranks_stay_equal_and_follow_one_process(folder: Path, config: str) -> None:
    first, second = (r[config] for r in results(folder, "ddp_training"))
    assert distance(first["end"], second["end"]) == 0
    assert (
        min((first["start"][n] - p).abs().max().item() for n, p in first["end"].items())
        > 0
    )
    assert distance(first["end"], played_training(config, steps=3)) < 1e-6


@pytest.mark.parametrize("call", ["sample", "bare"])
@pytest.mark.parametrize("config", ["example", "member"])
def test_ddp_ranks_with_equal_seeds_draw_different_noise(
    folder: Path, config: str, call: str
) -> None:
    # Rounded, because equal rows of one product may differ in the last bit.
    outputs = [
        r[config][call].reshape(-1, 3).round(decimals=4)
        for r in results(folder, "ddp_noise")
    ]
    one = [len(torch.unique(out, dim=0)) for out in outputs]
    both = len(torch.unique(torch.cat(outputs), dim=0))
    assert both == sum(one)
    assert one == [len(out) if config == "example" else 2 for out in outputs]


def test_ddp_loss_and_gradients_equal_those_of_one_process(folder: Path) -> None:
    ranks = results(folder, "ddp_gradients")
    for name in ("loss", "nll", "kl"):
        net = build("example")
        terms = Ranks().backward(
            net,
            lambda rank, name=name, net=net: loss(net, *batch(rank), *WEIGHTS[name]),
        )
        expected = gradients(net)
        for rank, alone in zip(ranks, terms, strict=True):
            torch.testing.assert_close(
                rank[name]["loss"], alone.loss.detach(), atol=1e-6, rtol=1e-6
            )
            assert distance(rank[name]["grad"], expected) < 1e-6, name


def test_ddp_counts_the_kl_once(folder: Path) -> None:
    ranks, net = results(folder, "ddp_gradients"), build("example")
    (sb.kl(net) / NUM_DATA).backward()
    expected = gradients(net)
    assert all(".posterior." in n for n in expected)
    for rank in ranks:
        torch.testing.assert_close(rank["kl"]["kl"] * NUM_DATA, sb.kl(net).detach())
        found, twice = (
            {n: r["grad"][n] for n in expected} for r in (rank["kl"], rank["twice"])
        )
        assert distance(found, expected) < 1e-6
        assert distance(twice, expected) > 0.01  # one KL for each rank would show


def test_ddp_uneven_batches_neither_hang_nor_part_the_ranks(folder: Path) -> None:
    first, second = results(folder, "ddp_uneven")
    assert distance(first["end"], second["end"]) == 0


def test_ddp_uneven_batches_draw_different_noise(folder: Path) -> None:
    rows = torch.cat(
        [
            r["drawn"].reshape(-1, 3).round(decimals=4)
            for r in results(folder, "ddp_uneven")
        ]
    )
    assert len(rows) == 16
    assert len(torch.unique(rows, dim=0)) == 16


def test_a_rank_draws_its_own_noise_at_a_cost_that_does_not_depend_on_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, randn = [], torch.randn

    def counting(shape: Any, **options: Any) -> Tensor:
        asked.append(tuple(shape))
        return randn(shape, **options)

    monkeypatch.setattr(torch, "randn", counting)
    found = []
    for rank in (0, 3, 63):
        torch.manual_seed(5)
        with playing(rank, 64):
            found.append(
                noise.standard_normal((5, 7), torch.device("cpu"), torch.float32)
            )
    assert asked == [(5, 7)] * 3
    assert len(torch.unique(torch.stack(found))) == 3 * 35
    with playing(3, 64):
        torch.manual_seed(5)
        assert torch.equal(
            noise.standard_normal((5, 7), torch.device("cpu"), torch.float32), found[1]
        )
        assert not torch.equal(
            noise.standard_normal((5, 7), torch.device("cpu"), torch.float32), found[1]
        )


def test_ranks_noise_is_standard_normal_and_uncorrelated() -> None:
    found = []
    for rank in range(16):
        torch.manual_seed(5)
        with playing(rank, 16):
            found.append(
                noise.standard_normal((20_000,), torch.device("cpu"), torch.float64)
            )
    drawn = torch.stack(found)
    assert drawn.mean(1).abs().max() < 5 / 20_000**0.5
    assert (drawn.var(1) - 1).abs().max() < 5 * (2 / 20_000) ** 0.5
    assert (
        torch.corrcoef(drawn) - torch.eye(16, dtype=torch.float64)
    ).abs().max() < 5 / 20_000**0.5


@pytest.mark.parametrize("saved", ["inner", "wrapper"])
def test_ddp_rank_zero_saves_alone(folder: Path, saved: str) -> None:
    first, _ = results(folder, "ddp_save")
    loaded = sb.load(sb.debayesianize(build("example")), folder / saved)
    assert distance(parameters(loaded), first["end"]) == 0


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_fsdp_step_equals_one_process(folder: Path, config: str) -> None:
    alone = played_step(config)
    for rank, nll in zip(
        [r[config] for r in results(folder, "fsdp_step")], alone["nll"], strict=True
    ):
        assert rank["plain"]
        torch.testing.assert_close(rank["nll"], nll, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rank["kl"], alone["kl"])
        assert distance(rank["grad"], alone["grad"]) < 1e-6
        assert distance(rank["end"], alone["end"]) < 1e-6


@pytest.mark.parametrize("config", CONFIGS)
def test_fsdp_trains_every_parameter(folder: Path, config: str) -> None:
    start = parameters(build(config))
    for rank in results(folder, "fsdp_step"):
        still = [n for n, p in rank[config]["end"].items() if torch.equal(p, start[n])]
        assert not still


def test_fsdp_step_runs_with_draws_shared_by_a_rank(folder: Path) -> None:
    first, second = (r["member"] for r in results(folder, "fsdp_step"))
    assert distance(first["end"], second["end"]) == 0
    assert first["nll"] != second["nll"]


@pytest.mark.parametrize("name", ["fsdp_root", "fsdp_mixed"])
def test_fsdp_groups_may_span_layers(folder: Path, name: str) -> None:
    alone = played_step("example")
    for rank in results(folder, name):
        assert rank["plain"]
        assert distance(rank["grad"], alone["grad"]) < 1e-6
        assert distance(rank["end"], alone["end"]) < 1e-6


def test_fsdp_kl_gradient_equals_one_process(folder: Path) -> None:
    net = build("odd")
    sb.kl(net).backward()
    alone = gradients(net)
    assert alone.keys() == {
        n for n, _ in build("odd").named_parameters() if n.endswith(("loc", "rho"))
    }
    for rank in results(folder, "fsdp_kl_gradient"):
        assert distance(rank["grad"], alone) < 1e-6


def test_fsdp_predicts_as_one_process(folder: Path) -> None:
    net = build("example").eval()
    alone = Ranks().each(lambda rank: sb.predict(net, batch(rank)[0], draws=2).samples)
    for rank, samples in zip(results(folder, "fsdp_predict"), alone, strict=True):
        torch.testing.assert_close(rank["samples"], samples, atol=1e-6, rtol=1e-6)
        assert rank["held"]


def test_fsdp_checkpoint_loads_into_one_process(folder: Path) -> None:
    first, second = results(folder, "fsdp_save")
    assert distance(first["end"], second["end"]) == 0
    loaded = sb.load(sb.debayesianize(build("batchensemble")), folder / "sharded-0")
    assert distance(parameters(loaded), first["end"]) == 0
    assert not any(hasattr(p, "full_tensor") for p in loaded.parameters())


def test_fsdp_one_rank_writes_and_all_wait_for_it(folder: Path) -> None:
    assert all(r["complete"] for r in results(folder, "fsdp_save"))
    assert [(folder / f"sharded-{rank}").exists() for rank in range(WORLD)] == [
        True,
        False,
    ]
