"""The engine itself: passes and who sees them, the proof of rows, quiet runs, folding, and layers of types nobody knows.

Sizes: S draws, B rows, K members, T steps.
"""

import asyncio
import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.engine import passes, proof
from slimbayes.engine.layout import Layout
from slimbayes.engine.quiet import Quiet

MEMBERS = sb.BatchEnsemble(members=3)
RANDOM = sb.Rank1(members=2, scale_init=0.3)
METHODS: dict[str, Any] = {
    "rank1": RANDOM,
    "rank1-member": sb.Rank1(members=2, draws="member", scale_init=0.3),
    "batch-ensemble": MEMBERS,
    "ensemble": sb.Ensemble(members=2, init="copies", jitter=0.3),
    "mean-field": sb.MeanField(scale_init=0.3),
    "k-tied": sb.KTied(rank=1, scale_init=0.3),
    "patch": sb.ModelPatch(components=3, patch=".*", jitter=0.3),
}


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    yield
    found, passes._TRACED.current = (passes.current(), passes._TRACED.current), None
    assert found == (None, None)


class Net(nn.Module):
    """Layers `a` and `b` and whatever else, used by a function of (self, *inputs)."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in ({"a": nn.Linear(4, 6), "b": nn.Linear(6, 3)} | parts).items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def converted(model: nn.Module, config: Any = MEMBERS, **options: Any) -> Any:
    return sb.bayesianize(model, config, **options).eval()


def close(one: Tensor, two: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


def differ(one: Tensor, two: Tensor) -> bool:
    return bool((one - two).abs().max() > 1e-3)


# Threads, tasks, interruptions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["after a call", "cold"])
def test_eight_threads_predict_what_one_does(known: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    sb.bayesianize(model, MEMBERS, exclude=["0", "2"]).train()
    model[2].running_mean.normal_()
    model[4].eval()  # flags that differ
    xs = [torch.randn(rows, 4) for rows in (1, 2, 3, 4, 5, 8, 12)]
    reference = copy.deepcopy(model)
    expected = [sb.predict(reference, x, draws=2).samples for x in xs]
    if known:
        sb.predict(model, xs[3])
    flags, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
    start = threading.Barrier(8)

    def serve(i: int) -> None:
        start.wait()
        for turn in range(25):
            k = (i + turn) % len(xs)
            close(sb.predict(model, xs[k], draws=2).samples, expected[k])
            assert passes.current() is None

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(serve, i) for i in range(8)]:
            done.result()
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_threads_keep_bare_calls_and_samples_apart() -> None:
    model = converted(mlp(), RANDOM)
    x, start = torch.randn(6, 4), threading.Barrier(6)
    model(x)

    def serve(i: int) -> None:
        start.wait()
        for _ in range(10):
            if i % 3 == 0:
                assert model(x).shape == (6, 3)
            elif i % 3 == 1:
                assert sb.sample(model, x, draws=2).shape == (4, 6, 3)
            else:
                with sb.frozen(model, draws=2):
                    close(sb.sample(model, x), sb.sample(model, x, fold=False))

    with torch.no_grad(), ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(serve, i) for i in range(6)]:
            done.result()


def test_tasks_that_hold_draws_over_an_await_do_not_see_each_other() -> None:
    model, x = converted(mlp(), RANDOM), torch.randn(6, 4)

    async def hold(turns: int) -> list[Tensor]:
        found = []
        with sb.frozen(model):
            for _ in range(turns):
                found.append(sb.sample(model, x))
                await asyncio.sleep(0)
                found.append(sb.sample(model, x))
        assert passes.current() is None
        return found

    async def both() -> Any:
        return await asyncio.gather(hold(3), hold(7), hold(5))

    outputs = asyncio.run(both())
    for found in outputs:
        assert all(torch.equal(found[0], other) for other in found)
    assert differ(outputs[0][0], outputs[1][0])
    assert differ(outputs[1][0], outputs[2][0])


def test_a_compiled_model_after_interleaved_tasks_draws_afresh() -> None:
    model, x = converted(mlp(), RANDOM), torch.randn(6, 4)

    async def hold(turns: int) -> None:
        with sb.frozen(model):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(hold(3), hold(7))

    asyncio.run(both())
    assert passes._TRACED.current is None
    model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert differ(compiled(x), compiled(x))


class Interrupted(nn.Linear):
    """Ctrl-C arrives inside the layer's forward, at the call whose number is set."""

    at = -1

    def forward(self, x: Tensor) -> Tensor:
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("known", [True, False], ids=["after a call", "cold"])
@pytest.mark.parametrize("call", ["bare", "sample", "loop", "predict", "frozen", "backward"])
def test_an_interrupt_inside_a_layer_leaves_nothing_open(call: str, known: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Interrupted(8, 8), nn.Linear(8, 3))
    checkpointed = Net(lambda m, x: m.model[3](checkpoint(m.model[:3], x, use_reentrant=False)), model=model)
    sb.bayesianize(model, RANDOM, exclude="1").train()
    x = torch.randn(6, 4)
    calls: dict[str, Callable[[], Any]] = {
        "bare": lambda: model(x),
        "sample": lambda: sb.sample(model, x),
        "loop": lambda: sb.sample(model, x, fold=False),
        "predict": lambda: sb.predict(model, x),
        "backward": lambda: checkpointed(x).sum().backward(),
    }

    def held() -> None:
        with sb.frozen(model):
            sb.sample(model, x)

    calls["frozen"] = held
    if known:
        for one in calls.values():
            one()
    statistics = model[1].running_mean.clone()
    model[2].at = 2 if call == "backward" and known else 1
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert passes.current() is None
    assert passes._TRACED.current is None
    assert all(m.training for m in model.modules())
    if not known or call == "predict":
        assert torch.equal(model[1].running_mean, statistics)  # a proof that was interrupted, or a prediction
    for one in calls.values():
        one()
    assert differ(sb.predict(model, x).samples[0], sb.predict(model, x).samples[0])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Calls inside calls ---------------------------------------------------------------------------------------------------------------------


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(self(h, depth - 1) if depth else h) + h


@pytest.mark.parametrize("method", ["rank1", "batch-ensemble", "mean-field", "patch"])
def test_recursion_is_one_pass(method: str) -> None:
    model, x = converted(Recursive(), METHODS[method]), torch.randn(6, 4)
    with torch.no_grad(), sb.frozen(model, draws=2):
        outputs = sb.sample(model, x)
        for draw, out in enumerate(outputs):
            close(sb.write_out(model, draw)(x), out)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")  # members of the inner one are shared out among rows
@pytest.mark.parametrize("method", METHODS)
def test_a_converted_model_may_call_another_in_its_forward(method: str) -> None:
    inner = converted(mlp(), METHODS[method])
    calls = [inner]  # not a submodule: two models of their own
    outer, x = converted(Net(lambda m, x: m.b(torch.tanh(m.a(x))) + calls[0](x)), RANDOM), torch.randn(6, 4)
    with torch.no_grad(), sb.frozen(inner), sb.frozen(outer):
        written = sb.write_out(inner, 0)
        plain = sb.write_out(outer, 1)
        calls[0] = written
        expected = plain(x)
        calls[0] = inner
        with torch.no_grad():
            assert sb.sample(outer, x).shape == (2, 6, 3)
        calls[0] = written
        close(sb.sample(outer, x)[1], expected)
    calls[0] = inner
    with torch.no_grad():
        assert outer(x).shape == (6, 3)
        assert differ(outer(x), outer(x))
        assert sb.predict(outer, x, draws=2).samples.shape == (4, 6, 3)
    inner(x).sum().backward()


def test_one_model_may_predict_while_another_is_called() -> None:
    teacher, x = converted(mlp()), torch.randn(6, 4)
    seen: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        seen.append(sb.predict(teacher, x[:2]).probs)
        return m.b(torch.tanh(m.a(x)))

    student, expected = converted(Net(run)), sb.predict(teacher, x[:2]).probs
    student(x)
    sb.sample(student, x)
    close(seen[-1], expected)


# Gradient checkpointing ------------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on, self.first, self.block, self.last = on, nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = checkpoint(self.block, h, use_reentrant=False) if self.on else self.block(h)
        return self.last(torch.tanh(h))


@pytest.mark.parametrize("call", ["bare", "sample", "loop", "frozen", "frozen-bare"])
@pytest.mark.parametrize("between", ["nothing", "sample", "sample-backward", "other-model", "two"])
@pytest.mark.parametrize("method", ["rank1", "mean-field", "patch", "ensemble"])
def test_checkpointing_gives_the_gradients_of_the_same_draws(method: str, between: str, call: str) -> None:
    x, other = torch.randn(6, 4), converted(mlp(), RANDOM)
    gradients = []
    for on in (False, True):
        torch.manual_seed(3)
        model = converted(Checkpointed(on), METHODS[method])
        sb.sample(model, x)
        torch.manual_seed(4)
        calls: dict[str, Callable[[], Tensor]] = {
            "bare": lambda model=model: model(x),
            "sample": lambda model=model: sb.sample(model, x, draws=2),
            "loop": lambda model=model: sb.sample(model, x, draws=2, fold=False),
        }
        run = calls.get(call, calls["bare" if call == "frozen-bare" else "sample"])

        def one(model: Any = model, run: Any = run) -> None:
            loss = run().square().sum()
            if between == "sample":
                sb.sample(model, 2 * x)
            elif between == "sample-backward":
                with torch.enable_grad():
                    torch.autograd.grad(sb.sample(model, 2 * x).sum(), model.first._parameters["weight"], allow_unused=True)
            elif between == "other-model":
                other(x).sum().backward()
            elif between == "two":
                loss = loss + run().square().sum()
            loss.backward()

        if call.startswith("frozen"):
            with sb.frozen(model, draws=2):
                one()
        else:
            one()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 4
    for name, found in gradients[0].items():
        close(gradients[1][name], found)


# Copies -----------------------------------------------------------------------------------------------------------------------------------


def keys(model: nn.Module) -> list[str]:
    return [p.key for p in passes.posteriors_of(model)]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("method", METHODS)
def test_copies_are_models_of_their_own(method: str, how: Callable[[Any], Any]) -> None:
    model, x = converted(mlp(), METHODS[method]), torch.randn(6, 4)
    before = how(model)
    sb.sample(model, x)
    model(x)
    after = how(model)
    found = [keys(m) for m in (model, before, after)]
    assert len({key for group in found for key in group}) == sum(map(len, found))
    outputs = []
    for one in (model, before, after):
        torch.manual_seed(7)
        with torch.no_grad():
            outputs.append(sb.sample(one, x, draws=2))
        close(outputs[-1], outputs[0])
    with torch.no_grad(), sb.frozen(model):
        held = sb.sample(model, x)
        if method not in ("batch-ensemble", "ensemble"):
            assert differ(sb.sample(after, x), sb.sample(after, x))  # draws of the copy are not held
        close(sb.sample(model, x), held, 0)


def test_a_deep_copied_block_put_twice_into_one_model_draws_apart() -> None:
    block = converted(nn.Sequential(nn.Linear(4, 4)), sb.MeanField(scale_init=0.5))
    block(torch.randn(2, 4))
    model = nn.Sequential(block, copy.deepcopy(block), block)
    assert len(set(keys(model))) == 2
    with torch.no_grad(), sb.frozen(model, draws=2):
        plain = sb.write_out(model, 1)
        assert differ(plain[0][0].weight, plain[1][0].weight)
        assert torch.equal(plain[0][0].weight, plain[2][0].weight)
        x = torch.randn(3, 4)
        close(sb.sample(model, x)[1], plain(x))


# torch.compile --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["sample", "bare", "frozen"])
@pytest.mark.parametrize("method", ["rank1", "rank1-member", "batch-ensemble", "mean-field", "patch"])
def test_whole_graphs_after_one_call(method: str, call: str) -> None:
    torch._dynamo.reset()
    model, x = converted(mlp(), METHODS[method]), torch.randn(6, 4)
    sb.sample(model, x)
    model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for rows in (6, 9, 12, 1):
            x = torch.randn(rows, 4)
            if call == "sample":
                torch.manual_seed(2)
                expected = sb.sample(model, x, draws=2)
                torch.manual_seed(2)
                close(sb.sample(compiled, x, draws=2), expected)
            elif call == "frozen":
                with sb.frozen(model, draws=2):
                    close(sb.sample(compiled, x), sb.sample(model, x))
                    close(compiled(x), model(x))
            else:
                assert compiled(x).shape == (rows, 3)
        found = torch.stack([compiled(torch.ones(6, 4)) for _ in range(20)]).flatten(0, 1).round(decimals=4)
        assert len(torch.unique(found, dim=0)) >= 3
        if method == "batch-ensemble":
            assert len(torch.unique(found, dim=0)) == 3
            assert len(torch.unique(found.view(20, 6, 3)[:, 0], dim=0)) > 1  # the first row is not always that of one member


def test_a_whole_graph_before_any_call_asks_for_one() -> None:
    torch._dynamo.reset()
    model = converted(mlp(), RANDOM)
    with pytest.raises(Exception, match="once"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(6, 4))
    assert passes.current() is None
    model(torch.randn(6, 4))
    torch._dynamo.reset()
    assert torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(6, 4)).shape == (6, 3)


@pytest.mark.parametrize("method", ["rank1", "batch-ensemble", "mean-field"])
def test_graphs_in_parts_need_no_call_before(method: str) -> None:
    torch._dynamo.reset()
    model, x = converted(mlp(), METHODS[method]), torch.randn(6, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        assert compiled(x).shape == (6, 3)
        torch.manual_seed(2)
        expected = sb.sample(model, x, draws=2)
        torch.manual_seed(2)
        close(sb.sample(compiled, x, draws=2), expected)
