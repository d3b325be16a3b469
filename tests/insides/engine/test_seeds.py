"""predict, sample and fixed_draws are functions of model, inputs and seed: whatever the chunks, the batches, the number of
draws and the process."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch._dynamo.testing
from covering import each
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes.engine import noise
from slimbayes.engine.noise import key
from slimbayes.posteriors.mc_dropout import kept_units
from slimbayes.prediction.predict import predict_prefixes

N = 12
METHODS: dict[str, Any] = {
    "rank1": sb.Rank1(members=2, scale_init=0.5),
    "rank1-cauchy": sb.Rank1(members=1, posterior="cauchy", scale_init=0.2),
    "rank1-member": sb.Rank1(members=2, scale_init=0.5, draws="member"),
    "mean-field": sb.MeanField(scale_init=0.3),
    "flipout": sb.MeanField(scale_init=0.3, estimator="flipout"),
    "local": sb.MeanField(scale_init=0.3, estimator="local"),
    "k-tied": sb.KTied(rank=2),
    "emp": sb.ModelPatch(components=3, jitter=0.5, patch="norm+output"),
    "emp-example": sb.ModelPatch(
        components=3, jitter=0.5, patch="norm+output", draws="example"
    ),
    "mixture": sb.Mixture(components=3, jitter=0.5, assignment="element", sigma=0.1),
    "channel-dropout": sb.MCDropout(rate=0.3, unit="channel", before=".*"),
    "element-dropout": sb.MCDropout(rate=0.3, before="output"),
    "own-dropout": sb.MCDropout(),
    "drop-connect": sb.DropConnect(rate=0.3),
    "ensemble": sb.Ensemble(members=3),
    "batch-ensemble": sb.BatchEnsemble(members=3),
    "member-norm": {
        "norm": sb.MemberNorm(members=2),
        ".*": sb.Rank1(members=2, scale_init=0.5),
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = (
            nn.Linear(5, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.4),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def net(method: Any) -> nn.Module:
    torch.manual_seed(0)
    return sb.bayesianize(
        Net().double().eval(),
        METHODS.get(method, method) if isinstance(method, str) else method,
    )


def rows() -> Tensor:
    return torch.randn(
        N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_predict_is_a_function_of_model_inputs_and_seed(method: str) -> None:
    """Not of chunks, sizes and order of batches, the number of draws, or how many of them run at once: two a call."""
    model, x = net(method), rows()
    whole = sb.predict(model, x, draws=6 * sb.members(model), seed=7)
    torch.manual_seed(99)
    close(
        sb.predict(model, x, draws=6 * sb.members(model), seed=7, chunk=5).samples,
        whole.samples,
    )
    order = torch.randperm(N)
    close(
        sb.predict(
            model, iter(x[order].split([1, 5, 6])), draws=6 * sb.members(model), seed=7
        ).samples,
        whole.samples[:, order],
    )
    few = sb.predict(model, x, draws=2 * sb.members(model), seed=7, chunk=24)
    close(few.samples, whole.samples[: few.count])
    for option in (
        {"parallel": False, "keep_samples": False},
        {"parallel": True, "share": False},
    ):
        close(
            sb.predict(model, x, draws=6 * sb.members(model), seed=7, **option).mean,
            whole.mean,
        )
    if method not in ("ensemble", "batch-ensemble"):
        assert not torch.allclose(
            sb.predict(model, x, draws=6 * sb.members(model), seed=8).samples,
            whole.samples,
        )
        assert (
            float(whole.samples.unflatten(0, (6, -1)).std(0).max()) > 1e-3
        )  # a member's draws differ


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_each_draw_is_one_function_for_all_rows(method: str) -> None:
    """The one that fixed_draws holds with that seed, and that materialize copies."""
    model, x = net(method), rows()
    pred = sb.predict(model, x.repeat(2, 1), draws=3 * sb.members(model), seed=5)
    close(pred.samples[:, :N], pred.samples[:, N:])
    with sb.fixed_draws(model, 3 * sb.members(model), seed=5):
        close(sb.sample(model, x).softmax(-1).detach(), pred.samples[:, :N])
        close(sb.predict(model, x).samples, pred.samples[:, :N])
        if method not in (
            "own-dropout",
            "element-dropout",
            "channel-dropout",
            "member-norm",
        ):
            close(
                sb.materialize(model, draw=2)(x).softmax(-1).detach(),
                pred.samples[2, :N],
            )


def test_prefixes_are_the_draws_of_predict() -> None:
    model, x = net("rank1"), rows()
    for n, pred in predict_prefixes(model, x, [1, 4], seed=3).items():
        close(
            pred.samples,
            sb.predict(model, x, draws=n, seed=3).samples,
        )


def test_torch_s_own_generator_rules_where_no_seed_is_given() -> None:
    model, x = net("flipout"), rows()
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append([sb.predict(model, x, draws=2).samples for _ in range(2)])
    close(found[0], found[1])
    assert not torch.allclose(found[0][0], found[0][1])
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    first, second = (
        [sb.predict(model, x, seed=g).samples for _ in range(2)] for g in generators
    )
    close(first, second)
    assert not torch.allclose(first[0], first[1])


def test_a_seed_leaves_torch_s_own_generator_alone() -> None:
    model, x = net("own-dropout"), rows()
    sb.predict(model, x)
    before = torch.get_rng_state()
    sb.predict(model, x, draws=3, seed=1), sb.sample(model, x, draws=3, seed=1)
    with sb.fixed_draws(model, seed=1):
        sb.sample(model, x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "training"), each(METHODS, [False, True]))
def test_sample_is_a_function_of_its_seed(method: str, training: bool) -> None:
    model, x = net(method).train(training), rows()
    first = sb.sample(model, x, draws=3 * sb.members(model), seed=6)
    torch.manual_seed(99)
    close(sb.sample(model, x, draws=3 * sb.members(model), seed=6), first)
    if not training:
        close(
            sb.sample(model, x, draws=3 * sb.members(model), seed=6, parallel=False),
            first,
        )
    if method not in ("ensemble", "batch-ensemble"):
        assert not torch.allclose(
            sb.sample(model, x, draws=3 * sb.members(model), seed=7), first
        )


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    "method", [sb.Rank1(members=2), sb.ModelPatch(components=2), sb.Deterministic()]
)
def test_what_a_model_draws_by_itself_follows_the_seed_too(method: Any) -> None:
    model = sb.bayesianize(
        nn.Sequential(Noisy(), nn.Linear(5, 3), nn.LayerNorm(3)).double(), method
    ).eval()
    x = rows()
    for run in (
        lambda seed: sb.predict(model, x, draws=6, seed=seed).samples,
        lambda seed: sb.predict(model, x, seed=seed).samples,
        lambda seed: sb.sample(model, x, draws=6, seed=seed).detach(),
        lambda seed: sb.sample(model, x, parallel=False, seed=seed).detach(),
    ):
        first = run(1)
        torch.manual_seed(5)
        close(run(1), first)
        assert not torch.allclose(run(2), first)


def test_seeds_that_are_none_are_refused() -> None:
    model, x = net("rank1"), rows()
    for seed in (1.5, True, "1"):
        with pytest.raises(
            TypeError,
            match=r"seed must be a whole number, a torch\.Generator or None, got ",
        ):
            sb.predict(model, x, seed=seed)
    with sb.fixed_draws(model):
        for run in (sb.predict, sb.sample):
            with pytest.raises(ValueError, match="give the seed to fixed_draws"):
                run(model, x, seed=1)


@pytest.mark.slow
def test_a_row_by_itself_is_predicted_as_with_draws_of_its_own() -> None:
    """The mean of what predict says of one row is that of sample, which draws for each row afresh."""
    for method in ("rank1", "flipout", "own-dropout", "emp-example"):
        model, x = net(method), rows()[:1]
        ours = sb.predict(model, x, draws=8000, seed=0).samples[:, 0]
        with torch.no_grad():
            theirs = sb.sample(model, x.expand(4000, -1), seed=1).softmax(-1)
        theirs = theirs.flatten(0, 1)
        error = (ours.var(0) / len(ours) + theirs.var(0) / len(theirs)).sqrt()
        assert float(((ours.mean(0) - theirs.mean(0)) / error).abs().max()) < 4, method
        assert float((ours.std(0) / theirs.std(0) - 1).abs().max()) < 0.1, method


def test_masks_of_dropout_are_fair_and_apart() -> None:
    keys = torch.arange(200) * 977 + key(
        0
    )  # neighbours, as the draws of a pass have them
    kept = kept_units(keys, 0, [40, 50], 0.3).double()
    assert float(kept.mean()) == pytest.approx(
        0.7, abs=4 * (0.21 / kept.numel()) ** 0.5
    )
    for dims in ((0,), (1,), (2,), (0, 1), (1, 2)):
        count = kept.sum(dims)
        size = kept.numel() / count.numel()
        assert float(
            ((count - 0.7 * size) ** 2 / (0.21 * size)).mean()
        ) == pytest.approx(1, abs=0.5)
    flat = kept.flatten(1)
    for other in (
        kept_units(keys, 1, [40, 50], 0.3).double().flatten(1),
        flat.roll(1, 0),
        flat.roll(1, 1),
    ):
        agree = (flat == other).double().mean()
        assert float(agree) == pytest.approx(0.58, abs=0.005)


def test_windows_of_a_row_drop_apart_and_alike_in_any_batch() -> None:
    """Steps folded into the batch: each has a mask of its own, the same whatever rows stand beside it."""

    class Folded(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (
                super().forward(x.flatten(0, 1)).unflatten(0, (len(x), -1)).flatten(1)
            )

    torch.manual_seed(0)
    model = sb.bayesianize(Folded().double().eval(), sb.MCDropout())
    x = rows()[:, None].expand(N, 4, 5)
    whole = sb.predict(model, x, draws=3, seed=1, likelihood="gaussian").samples
    close(
        sb.predict(model, x, draws=3, seed=1, likelihood="gaussian", chunk=5).samples,
        whole,
    )
    steps = whole.unflatten(-1, (4, 3))
    assert len(steps[0, 0].unique(dim=0)) > 1


def test_many_rows_are_cut_and_located_on_a_few() -> None:
    """Memory does not grow with the rows of one tensor, neither in the proof nor in the forwards."""
    model, seen = net("rank1"), []
    model.a.register_forward_pre_hook(lambda layer, inputs: seen.append(len(inputs[0])))
    x = torch.randn(50_000, 5, dtype=torch.float64)
    whole = sb.predict(model, x, seed=1, keep_samples=False).mean
    assert max(seen) <= 2**15 and whole.shape == (50_000, 3)
    close(whole[-7:], sb.predict(model, x[-7:], seed=1).mean)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rank1", "own-dropout"])
def test_compiled_models_have_the_same_draws(method: str) -> None:
    """Masks of dropout are made inside the graph, from numbers that enter it: a new seed compiles nothing anew."""
    model, x = net(method), rows()
    expected = [sb.predict(model, x, draws=6, seed=seed).samples for seed in range(4)]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter)
    frames = []
    for seed, samples in enumerate(expected):
        close(sb.predict(fast, x, draws=6, seed=seed).samples, samples)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


@pytest.mark.slow
def test_noise_of_a_compiled_loss_is_torchs_own() -> None:
    """On a CPU, where a compiler would take its own generator: a loss is what it is without one."""
    model = nn.Sequential(
        nn.Linear(5, 3, bias=False)
    )  # a layer more is three more programs to compile
    sb.bayesianize(
        model, sb.KTied(rank=2, prior=sb.Normal(0.0, 0.2), estimator="reparam")
    )
    x = torch.randn(6, 5)
    sb.sample(model, x)
    torch._dynamo.reset()
    results = []
    known = {
        "cpp.vec_isa_ok": False,
        "compile_threads": 1,
    }  # no program to try the processor, no processes to wait
    for loss in (
        torch.compile(
            lambda: sb.sample(model, x).square().mean(), fullgraph=True, options=known
        ),
    ) * 2:
        torch.manual_seed(3)
        results.append(loss())
    torch.manual_seed(3)
    results.append(sb.sample(model, x).square().mean())
    torch.manual_seed(4)
    other = sb.sample(model, x).square().mean()
    gradients = [torch.autograd.grad(y, list(model.parameters())) for y in results]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(gradients[0], gradients[2])
    assert torch.equal(results[0], results[1]) and not torch.isclose(results[0], other)


# Processes ------------------------------------------------------------------------------------------------------------


def in_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, pickle.dumps(function()))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return pickle.loads(file.read())


FORKED: dict[str, Callable[[nn.Module], Any]] = {
    "predict": lambda model: sb.predict(model, rows(), draws=4).samples.tolist(),
    "sample": lambda model: sb.sample(model, rows()).tolist(),
    "bare": lambda model: model(rows()).tolist(),
    "fixed": lambda model: with_fixed_draws(model).tolist(),
    "training": lambda model: model.train()(rows()).tolist(),
}


def with_fixed_draws(model: nn.Module) -> Tensor:
    with sb.fixed_draws(model):
        return sb.sample(model, rows())


@pytest.mark.slow
@pytest.mark.parametrize("what", FORKED)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_draw_differently_and_reproducibly(what: str) -> None:
    model = net("own-dropout" if what in ("training", "sample") else "rank1")
    model(rows())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    children = [in_child(lambda: FORKED[what](model)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    children.append(FORKED[what](model))
    assert all(a != b for i, a in enumerate(children) for b in children[:i])
    if what == "bare":  # forks are counted alike, whatever is drawn then
        grandchildren = [
            in_child(lambda: in_child(lambda: FORKED[what](model))) for _ in range(2)
        ]
        assert grandchildren[0] != grandchildren[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_seeds_itself_draws_what_anybody_with_that_seed_draws() -> None:
    model = net("rank1")

    def seeded(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return sb.predict(model, rows()).samples.tolist()

    children = [in_child(lambda: seeded(5)) for _ in range(2)]
    torch.manual_seed(1)
    assert children[0] == children[1] == seeded(5)
    explicit = [
        in_child(lambda: sb.predict(model, rows(), seed=3).samples.tolist())
        for _ in range(2)
    ]
    assert (
        explicit[0] == explicit[1] == sb.predict(model, rows(), seed=3).samples.tolist()
    )
    # a child's own generator goes on untouched
    torch.manual_seed(2)
    expected = torch.rand(3).tolist()
    torch.manual_seed(2)
    assert in_child(lambda: torch.rand(3).tolist()) == expected


def _forking_run() -> None:
    noise._FORKS.children = noise._FORKS.own = 0  # as in a process that nobody forked
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(2, 2), sb.Rank1(members=1))
    for _ in range(2):
        if os.fork() == 0:
            print(sb.predict(model, torch.ones(1, 2)).samples.tolist(), flush=True)
            os._exit(0)
        os.wait()


@pytest.mark.slow
def test_equal_runs_count_their_forks_alike(tmp_path: Path) -> None:
    runs = [forks.start(_forking_run, log=tmp_path / str(i)) for i in range(2)]
    assert forks.exit_codes(runs, seconds=60) == [0, 0]
    first, second = ((tmp_path / str(i)).read_text().splitlines() for i in range(2))
    assert first == second and len(first) == 2 and first[0] != first[1]


def test_loaders_of_any_kind_give_the_same_draws() -> None:
    model, x = net("local"), rows()
    expected = sb.predict(model, x, draws=3, seed=2).samples
    data = TensorDataset(x, torch.zeros(N))
    for given in (data, DataLoader(data, batch_size=5), x.numpy()):
        close(sb.predict(model, given, draws=3, seed=2).samples, expected)
