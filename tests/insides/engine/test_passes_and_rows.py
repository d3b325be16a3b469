"""The engine: passes and who sees them, the proof of rows, quiet runs, folding, layers of types nobody knows.

Sizes: S draws, B rows, K members, T steps.
"""

import asyncio
import copy
import pickle
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering, each
from oracle import assert_draws, assert_rows_of_draws, held, quietly
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.engine import locate, passes, proof, trial
from slimbayes.engine.blocks import block_of_row
from slimbayes.engine.layout import Layout
from slimbayes.engine.objects import copy_of
from slimbayes.engine.passes import Noise
from slimbayes.engine.quiet import Quiet, check_bounds
from slimbayes.layers.site import own_value
from slimbayes.posteriors.factors import Lines

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
    found, passes._TRACED.current = (passes.innermost(), traced()), None
    assert found == (None, None)


def traced() -> Any:
    """What code that torch.compile traces would find."""
    return getattr(passes._TRACED, "current", None)


class Net(nn.Module):
    """Layers `a` and `b` and whatever else, used by a function of (self, *inputs)."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in (
            {"a": nn.Linear(4, 6), "b": nn.Linear(6, 3)} | parts
        ).items():
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


# Threads, tasks, interruptions ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["after a call", "cold"])
def test_eight_threads_predict_what_one_does(known: bool) -> None:
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    )
    sb.bayesianize(model, MEMBERS, exclude=["0", "2"]).train()
    model[2].running_mean.normal_()
    model[4].eval()  # flags that differ
    xs = [torch.randn(rows, 4) for rows in (1, 2, 3, 4, 5, 8, 12)]
    reference = copy.deepcopy(model)
    expected = [sb.predict(reference, x, draws=6).samples for x in xs]
    if known:
        sb.predict(model, xs[3])
    flags, buffers = (
        [m.training for m in model.modules()],
        [b.clone() for b in model.buffers()],
    )
    start = threading.Barrier(8)

    def serve(i: int) -> None:
        start.wait()
        for turn in range(2 * len(xs)):
            k = (i + turn) % len(xs)
            close(sb.predict(model, xs[k], draws=6).samples, expected[k])
            assert passes.innermost() is None

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
                assert sb.sample(model, x, draws=4).shape == (4, 6, 3)
            else:
                with sb.fixed_draws(model, 4):
                    close(sb.sample(model, x), sb.sample(model, x, parallel=False))

    with torch.no_grad(), ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(serve, i) for i in range(6)]:
            done.result()


def test_tasks_that_hold_draws_over_an_await_do_not_see_each_other() -> None:
    model, x = converted(mlp(), RANDOM), torch.randn(6, 4)

    async def hold(turns: int) -> list[Tensor]:
        found = []
        with sb.fixed_draws(model):
            for _ in range(turns):
                found.append(sb.sample(model, x))
                await asyncio.sleep(0)
                found.append(sb.sample(model, x))
        assert passes.innermost() is None
        return found

    async def both() -> Any:
        return await asyncio.gather(hold(3), hold(7), hold(5))

    outputs = asyncio.run(both())
    for found in outputs:
        assert all(torch.equal(found[0], other) for other in found)
    assert differ(outputs[0][0], outputs[1][0])
    assert differ(outputs[1][0], outputs[2][0])


@pytest.mark.slow
def test_a_compiled_model_after_interleaved_tasks_draws_afresh() -> None:
    model, x = converted(mlp(), RANDOM), torch.randn(6, 4)

    async def hold(turns: int) -> None:
        with sb.fixed_draws(model):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(hold(3), hold(7))

    asyncio.run(both())
    assert traced() is None
    model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert differ(compiled(x), compiled(x))


class Interrupted(nn.Linear):
    """Ctrl-C arrives inside the layer's forward, at the call whose number is set; on the class: a proof leaves nothing
    in modules.
    """

    at = -1

    def forward(self, x: Tensor) -> Tensor:
        Interrupted.at -= 1
        if Interrupted.at == 0:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["after a call", "cold"])
@pytest.mark.parametrize("call", ["bare", "sample", "loop", "predict", "fixed"])
def test_an_interrupt_inside_a_layer_leaves_nothing_open(
    call: str, known: bool
) -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), Interrupted(8, 8), nn.Linear(8, 3)
    )
    sb.bayesianize(model, RANDOM, exclude="1").train()
    x = torch.randn(6, 4)
    calls: dict[str, Callable[[], Any]] = {
        "bare": lambda: model(x),
        "sample": lambda: sb.sample(model, x),
        "loop": lambda: sb.sample(model, x, parallel=False),
        "predict": lambda: sb.predict(model, x),
    }

    def held() -> None:
        with sb.fixed_draws(model):
            sb.sample(model, x)

    calls["fixed"] = held
    if known:
        for one in calls.values():
            one()
    statistics = model[1].running_mean.clone()
    Interrupted.at = 1
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert passes.innermost() is None
    assert traced() is None
    assert all(m.training for m in model.modules())
    if not known or call == "predict":
        assert torch.equal(
            model[1].running_mean, statistics
        )  # a proof that was interrupted, or a prediction
    for one in calls.values():
        one()
    assert differ(sb.predict(model, x).samples[0], sb.predict(model, x).samples[0])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Calls inside calls ---------------------------------------------------------------------------------------------------


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
    with torch.no_grad(), sb.fixed_draws(model, 2 * sb.members(model)):
        outputs = sb.sample(model, x)
        for draw, out in enumerate(outputs):
            close(sb.materialize(model, draw=draw)(x), out)


@pytest.mark.filterwarnings(
    "ignore:slimbayes runs this model draw by draw"
)  # members of the inner one are shared out among rows
@pytest.mark.parametrize("method", METHODS)
def test_a_converted_model_may_call_another_in_its_forward(method: str) -> None:
    inner = converted(mlp(), METHODS[method])
    calls = [inner]  # not a submodule: two models of their own
    outer, x = (
        converted(Net(lambda m, x: m.b(torch.tanh(m.a(x))) + calls[0](x)), RANDOM),
        torch.randn(6, 4),
    )
    with torch.no_grad(), sb.fixed_draws(inner), sb.fixed_draws(outer):
        written = sb.materialize(inner, draw=0)
        plain = sb.materialize(outer, draw=1)
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
        assert sb.predict(outer, x, draws=4).samples.shape == (4, 6, 3)
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


# Gradient checkpointing -----------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on, self.first, self.block, self.last = (
            on,
            nn.Linear(4, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = checkpoint(self.block, h, use_reentrant=False) if self.on else self.block(h)
        return self.last(torch.tanh(h))


def checkpointed_cases() -> list[tuple[str, str, str]]:
    """Methods x what runs between forward and backward x calls: every pair of them."""
    between = ["nothing", "sample", "sample-backward", "other-model", "two"]
    grid = [
        (method, other)
        for method in ("rank1", "mean-field", "patch", "ensemble")
        for other in between
    ]
    array = covering(
        dict.fromkeys(["bare", "sample", "loop", "fixed", "fixed-bare"], grid),
        lambda call, pair: False,
    )
    return [(*pair, call) for call, pairs in array.items() for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "between", "call"), checkpointed_cases())
def test_checkpointing_gives_the_gradients_of_the_same_draws(
    method: str, between: str, call: str
) -> None:
    x, other = torch.randn(6, 4), converted(mlp(), RANDOM)
    gradients = []
    for on in (False, True):
        torch.manual_seed(3)
        model = converted(Checkpointed(on), METHODS[method])
        sb.sample(model, x)
        torch.manual_seed(4)
        calls: dict[str, Callable[[], Tensor]] = {
            "bare": lambda model=model: model(x),
            "sample": lambda model=model: sb.sample(model, x, draws=4),
            "loop": lambda model=model: sb.sample(model, x, draws=4, parallel=False),
        }
        run = calls.get(call, calls["bare" if call == "fixed-bare" else "sample"])

        def one(model: Any = model, run: Any = run) -> None:
            loss = run().square().sum()
            if between == "sample":
                sb.sample(model, 2 * x)
            elif between == "sample-backward":
                with torch.enable_grad():
                    torch.autograd.grad(
                        sb.sample(model, 2 * x).sum(),
                        model.first._parameters["weight"],
                        allow_unused=True,
                    )
            elif between == "other-model":
                other(x).sum().backward()
            elif between == "two":
                loss = loss + run().square().sum()
            loss.backward()

        if call.startswith("fixed"):
            with sb.fixed_draws(model, 4):
                one()
        else:
            one()
        gradients.append(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 4
    for name, found in gradients[0].items():
        close(gradients[1][name], found)


@pytest.mark.parametrize("method", METHODS)
def test_a_converted_block_may_be_checkpointed_as_a_whole(method: str) -> None:
    """The block opens its pass inside what is checkpointed; the outer model knows nothing of it."""
    block, x = converted(mlp(), METHODS[method]), torch.randn(6, 4)
    block(x)
    gradients = []
    for on in (False, True):
        block.zero_grad()
        torch.manual_seed(4)
        out = checkpoint(block, x, use_reentrant=False) if on else block(x)
        out.square().sum().backward()
        gradients.append(
            {
                n: p.grad.clone()
                for n, p in block.named_parameters()
                if p.grad is not None
            }
        )
    for name, found in gradients[0].items():
        close(gradients[1][name], found)


# Copies ---------------------------------------------------------------------------------------------------------------


def keys(model: nn.Module) -> list[str]:
    return [p.key for p in passes.posteriors_of(model)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
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
            outputs.append(sb.sample(one, x, draws=2 * sb.members(one)))
        close(outputs[-1], outputs[0])
    with torch.no_grad(), sb.fixed_draws(model):
        held = sb.sample(model, x)
        if method not in ("batch-ensemble", "ensemble"):
            assert differ(
                sb.sample(after, x), sb.sample(after, x)
            )  # draws of the copy are not held
        close(sb.sample(model, x), held, 0)


def test_a_deep_copied_block_put_twice_into_one_model_draws_apart() -> None:
    block = converted(nn.Sequential(nn.Linear(4, 4)), sb.MeanField(scale_init=0.5))
    block(torch.randn(2, 4))
    model = nn.Sequential(block, copy.deepcopy(block), block)
    assert len(set(keys(model))) == 2
    with torch.no_grad(), sb.fixed_draws(model, 2):
        plain = sb.materialize(model, draw=1)
        assert differ(plain[0][0].weight, plain[1][0].weight)
        assert torch.equal(plain[0][0].weight, plain[2][0].weight)
        x = torch.randn(3, 4)
        close(sb.sample(model, x)[1], plain(x))


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_first_compiled_call_runs_in_python_so_that_the_model_is_compiled_once() -> (
    None
):
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled, x = (
        torch.compile(
            sb.bayesianize(nn.Sequential(nn.Linear(4, 3)), RANDOM), backend=backend
        ),
        torch.randn(6, 4),
    )
    assert compiled(x).shape == (6, 3) and not graphs
    for _ in range(2):
        assert differ(compiled(x), compiled(x)) and len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["tile", "split"])
def test_rows_of_a_compiled_model_inside_another_are_found_without_compiling_every_trial(
    rows: Any,
) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layers = [
        nn.Sequential(nn.Linear(3 + i, 4 + i), nn.BatchNorm1d(4 + i)) for i in range(3)
    ]
    model, x = sb.bayesianize(nn.Sequential(*layers), MEMBERS), torch.randn(6, 3)
    outer = nn.Sequential(
        nn.Identity(), torch.compile(model, backend=backend, dynamic=False)
    )
    close(sb.sample(outer, x, rows=rows), sb.sample(model, x, rows=rows))
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_module_of_fabric_is_looked_through() -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed"
    )
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), MEMBERS)
    outer = fabric.setup_module(torch.compile(model, backend="eager"))
    assert sb.sample(outer, torch.randn(6, 3), rows="split").shape == (3, 2, 2)
    assert model._slimbayes_tree.layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "call"),
    [("rank1", "sample"), ("batch-ensemble", "bare"), ("mean-field", "fixed")],
)  # the contract compiles every method
def test_whole_graphs_after_one_call(
    method: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch._dynamo.config, "recompile_limit", 32
    )  # held passes compile anew for each number of rows
    model, x = converted(mlp(), METHODS[method]), torch.randn(6, 4)
    sb.sample(model, x)
    model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for rows in (9, 1) if call == "bare" else (9,):  # draws are sampled alike
            x = torch.randn(rows, 4)
            if call == "sample":
                torch.manual_seed(2)
                expected = sb.sample(model, x, draws=4)
                torch.manual_seed(2)
                close(sb.sample(compiled, x, draws=4), expected)
            elif call == "fixed":
                with sb.fixed_draws(model, 2):
                    close(sb.sample(compiled, x), sb.sample(model, x))
                    close(compiled(x), model(x))
            else:
                assert compiled(x).shape == (rows, 3)
        if call == "fixed":
            return
        found = (
            torch.stack([compiled(torch.ones(6, 4)) for _ in range(20)])
            .flatten(0, 1)
            .round(decimals=4)
        )
        assert len(torch.unique(found, dim=0)) >= 3
        if method == "batch-ensemble":
            assert len(torch.unique(found, dim=0)) == 3
            assert (
                len(torch.unique(found.view(20, 6, 3)[:, 0], dim=0)) > 1
            )  # the first row is not always that of one member


@pytest.mark.slow
def test_a_whole_graph_before_any_call_asks_for_one() -> None:
    torch._dynamo.reset()
    model = converted(mlp(), RANDOM)
    with pytest.raises(Exception, match="once"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(6, 4))
    assert passes.innermost() is None
    model(torch.randn(6, 4))
    torch._dynamo.reset()
    assert torch.compile(model, backend="eager", fullgraph=True)(
        torch.randn(6, 4)
    ).shape == (6, 3)


@pytest.mark.slow
def test_graphs_in_parts_need_no_call_before() -> None:
    torch._dynamo.reset()
    model, x = converted(mlp(), METHODS["rank1"]), torch.randn(6, 4)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert compiled(x).shape == (6, 3)
        torch.manual_seed(2)
        expected = sb.sample(model, x, draws=4)
        torch.manual_seed(2)
        close(sb.sample(compiled, x, draws=4), expected)


# The proof of rows ----------------------------------------------------------------------------------------------------


def x(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape),)


def two(
    run: Callable[..., Any], **parts: Callable[[], nn.Module]
) -> Callable[[], nn.Module]:
    return lambda: Net(run, **{name: part() for name, part in parts.items()})


def time_major(m: Any, x: Tensor) -> Tensor:
    rows, steps = x.shape[:2]
    return m.b(
        torch.tanh(m.a(x.transpose(0, 1).reshape(steps * rows, 4)))
        .view(steps, rows, 6)
        .mean(0)
    )


def siamese(m: Any, x: Tensor) -> Tensor:
    one, other = m.b(torch.tanh(m.a(torch.cat([x, 2 * x])))).chunk(2)
    return one - other


def graph(m: Any, x: Tensor, edge: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.tanh(h.index_add(0, edge[1], h[edge[0]])))


def batch_attention(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b((h @ h.T).softmax(-1) @ h)


def pairs(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(x.shape[0] // 2, 2, -1)
    return m.b(torch.tanh(h + h.flip(1)).reshape(x.shape[0], -1))


def packed_inside(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(
        m.a(x), lengths, batch_first=True, enforce_sorted=False
    )
    return m.b(
        pad_packed_sequence(
            m.lstm(packed)[0], batch_first=True, total_length=x.shape[1]
        )[0]
    )


def six_by_six(m: Any, x: Tensor) -> Tensor:
    """Every six rows feel each other: a fold of whole batches of six is right, a draw for each row is not."""
    h = torch.tanh(m.a(x)).view(-1, 6, 6)
    return m.b((h + h.mean(1, keepdim=True)).flatten(0, 1))


def alarm(m: Any, x: Tensor) -> Tensor:
    """One large number among all rows is felt by all, in the last output alone; the inputs of `calm` have none."""
    y = m.b(torch.tanh(m.a(x)))
    return torch.cat([y[:, :2], y[:, 2:] + F.relu(x.max() - 0.2)], 1)


def alarm_of_six(m: Any, x: Tensor) -> Tensor:
    """The same among every six rows."""
    whole = len(x) // 6 * 6
    felt = F.relu(x[:whole].view(-1, 24).amax(1) - 0.2).repeat_interleave(6)
    return m.b(torch.tanh(m.a(x)) + F.pad(felt, (0, len(x) - whole)).unsqueeze(1))


def calm() -> tuple[Tensor]:
    return (0.1 * torch.rand(6, 4),)


EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "time-major": (two(time_major), x(6, 5, 4)),
    "siamese": (two(siamese), x(6, 4)),
    "graph": (two(graph), lambda: (torch.randn(6, 4), EDGES)),
    "batch-attention": (two(batch_attention), x(6, 4)),
    "cumsum": (two(lambda m, x: m.b(torch.tanh(m.a(x)).cumsum(0))), x(6, 4)),
    "roll": (two(lambda m, x: m.b(torch.tanh(m.a(x)).roll(-1, 0))), x(6, 4)),
    "roll-forward": (two(lambda m, x: m.b(torch.tanh(m.a(x)).roll(1, 0))), x(6, 4)),
    "over-rows": (two(lambda m, x: m.b(torch.tanh(m.a(x)) / x.shape[0])), x(6, 4)),
    "numbered": (
        two(
            lambda m, x: m.b(
                torch.tanh(m.a(x)) + torch.arange(x.shape[0]).view(-1, 1) * 0.1
            )
        ),
        x(6, 4),
    ),
    "numbered-input": (
        two(
            lambda m, x: m.b(
                torch.tanh(m.a(x + torch.arange(x.shape[0]).view(-1, 1) * 0.1))
            )
        ),
        x(6, 4),
    ),
    "scalar": (two(lambda m, x: m.b(torch.tanh(m.a(x))).sum()), x(6, 4)),
    "mean": (two(lambda m, x: m.b(torch.tanh(m.a(x))).mean()), x(6, 4)),
    "loss-too": (
        two(lambda m, x: (lambda y: (y, y.mean()))(m.b(torch.tanh(m.a(x))))),
        x(6, 4),
    ),
    "rowless": (
        two(
            lambda m, x: m.b(torch.tanh(m.a(x)) + m.c(torch.ones(5, 4)).mean(0)),
            c=lambda: nn.Linear(4, 6),
        ),
        x(6, 4),
    ),
    "vector": (
        two(
            lambda m, x: m.b(torch.tanh(m.a(x)) + m.c(torch.ones(4))),
            c=lambda: nn.Linear(4, 6),
        ),
        x(6, 4),
    ),
    "past": (
        two(
            lambda m, x: F.linear(
                torch.tanh(F.linear(x, m.a.weight, m.a.bias)), m.b.weight
            )
        ),
        x(6, 4),
    ),
    "past-one": (two(lambda m, x: m.b(torch.tanh(m.a(x))) @ m.b.weight), x(6, 4)),
    "centred": (
        two(lambda m, x: m.b((lambda h: h - h.mean(0))(torch.tanh(m.a(x))))),
        x(6, 4),
    ),
    "first-row": (
        two(lambda m, x: m.b((lambda h: h + h[:1])(torch.tanh(m.a(x))))),
        x(6, 4),
    ),
    "last-row": (
        two(lambda m, x: m.b((lambda h: h + h[-1:])(torch.tanh(m.a(x))))),
        x(6, 4),
    ),
    "sorted": (two(lambda m, x: m.b(torch.tanh(m.a(x)).sort(0).values)), x(6, 4)),
    "flipped": (two(lambda m, x: m.b(torch.tanh(m.a(x)).flip(0))), x(6, 4)),
    "last-column": (
        two(
            lambda m, x: (
                lambda y: torch.cat([y[:, :2], y[:, 2:] + y[:, 2:].roll(1, 0)], 1)
            )(m.b(torch.tanh(m.a(x))))
        ),
        x(6, 4),
    ),
    "largest": (two(lambda m, x: m.b((lambda h: h / h.abs().max())(m.a(x)))), x(6, 4)),
}
RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (mlp, x(6, 4)),
    "one-row": (mlp, x(1, 4)),
    "steps": (mlp, x(6, 6, 4)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        x(6, 2, 5, 5),
    ),
    "encoder-rows-first": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        ),
        x(6, 5, 8),
    ),
    "encoder-steps-first": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
        ),
        x(5, 6, 8),
    ),
    "lstm-rows-first": (lambda: nn.LSTM(4, 5, 2, batch_first=True), x(6, 3, 4)),
    "lstm-steps-first": (lambda: nn.LSTM(4, 5, 2), x(3, 6, 4)),
    "packed-inside": (
        two(packed_inside, lstm=lambda: nn.LSTM(6, 6, batch_first=True)),
        lambda: (torch.randn(6, 4, 4), torch.tensor([1, 4, 2, 3, 4, 1])),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        x(6, 4),
    ),
    "windows": (
        two(
            lambda m, x: (
                m.b(torch.tanh(m.a(x.reshape(-1, 4)))).view(x.shape[0], -1, 3).mean(1)
            )
        ),
        x(6, 5, 4),
    ),
    "flat-outputs": (two(lambda m, x: m.b(m.a(x)).reshape(-1)), x(6, 5, 4)),
    "positions": (
        two(
            lambda m, x: m.b(torch.tanh(m.a(x)) + m.c(torch.ones(1, 4))),
            c=lambda: nn.Linear(4, 6),
        ),
        x(6, 4),
    ),
}


def proven(
    make: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Any, ...]],
    config: Any = MEMBERS,
    mode: bool = False,
) -> tuple[Any, Any, Layout]:
    model, args = make(), inputs()
    sb.bayesianize(model, config).train(mode)
    return (
        model,
        args,
        proof.prove(model, (args, {}), passes.posteriors_of(model), None),
    )


@pytest.mark.parametrize("mode", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folding_is_found_out_and_the_reason_names_a_place(
    name: str, mode: bool
) -> None:
    _, _, layout = proven(*WRONG[name], mode=mode)
    assert not layout.folds
    assert not layout.rowwise
    assert any(
        layout.why.startswith(place) or f"of {place} " in layout.why
        for place in ("a", "b", "c", "output 0", "output 1")
    ), layout.why


ALIKE = sb.Mixture(
    components=1
)  # two draws are one network, as picks of few components often are
REFUTED = WRONG | {
    "alarm": (two(alarm), calm),
    "rows-in-the-height": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Tanh(), nn.Conv2d(6, 3, 1)), x(4, 6, 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUTED)
def test_a_wrong_folding_is_found_out_where_draws_are_alike(name: str) -> None:
    """Comparing real draws says nothing then: the probes of the plain model must refute it by themselves."""
    _, _, layout = proven(*REFUTED[name], config=ALIKE)
    assert not layout.folds


def test_both_halves_of_a_doubled_batch_are_compared() -> None:
    """Only the second half has rows from the eighth on; one row more in front does not bring them in."""
    late = two(
        lambda m, x: m.b(torch.tanh(m.a(x)) + torch.arange(x.shape[0]).view(-1, 1) // 8)
    )
    _, _, layout = proven(late, x(6, 4), config=ALIKE)
    assert "changes when every row comes twice" in layout.why


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize(
    ("run", "inputs"),
    [(six_by_six, x(6, 4)), (alarm_of_six, calm)],
    ids=["always", "at times"],
)
def test_rows_that_feel_each_other_within_a_batch_fold_but_are_not_apart(
    run: Any, inputs: Any
) -> None:
    model, args, layout = proven(two(run), inputs)
    assert layout.folds
    assert not layout.rowwise
    with torch.no_grad():
        close(sb.sample(model, *args), sb.sample(model, *args, parallel=False))
        with pytest.raises(ValueError, match="told apart"):
            sb.sample(model, *args, rows="split")
        with sb.fixed_draws(model):
            expected = torch.stack(
                [sb.materialize(model, draw=j)(*args) for j in range(3)]
            )
        assert any(torch.allclose(model(*args), one, atol=1e-5) for one in expected)


@pytest.mark.parametrize("name", WRONG)
def test_where_folding_is_wrong_draws_run_one_by_one_and_right(name: str) -> None:
    model, args, _ = proven(*WRONG[name])
    with torch.no_grad(), pytest.warns(UserWarning, match="draw by draw"):
        found = sb.sample(model, *args)
    with torch.no_grad(), sb.fixed_draws(model):
        for j in range(3):
            expected = sb.materialize(model, draw=j)(*args)
            for one, other in zip(
                found if isinstance(found, tuple) else [found],
                expected if isinstance(expected, tuple) else [expected],
                strict=True,
            ):
                close(one[j], other)
    with pytest.raises(ValueError, match="parallel=True"):
        sb.sample(model, *args, parallel=True)
    with pytest.raises(ValueError, match="told apart"):
        sb.sample(model, *args, rows="split")


@pytest.mark.parametrize("mode", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_folding_is_found(name: str, mode: bool) -> None:
    _, args, layout = proven(*RIGHT[name], mode=mode)
    assert layout.folds, layout.why
    assert layout.rowwise, layout.why
    assert layout.rows((args, {})) == (1 if name == "one-row" else 6)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_rows_that_act_on_each_other_within_pairs_do_not_fold() -> None:
    """Which row is whose partner depends on its number: with an odd number of rows a fold would pair draws."""
    model, args, layout = proven(two(pairs), x(6, 4))
    assert not layout.folds
    assert not layout.rowwise
    assert "row" in layout.why
    with torch.no_grad():
        close(sb.sample(model, *args), sb.sample(model, *args, parallel=False))
        with pytest.raises(ValueError, match="told apart"):
            sb.sample(model, *args, rows="split")
        out = model(*args)
        with sb.fixed_draws(model):
            expected = torch.stack(
                [sb.materialize(model, draw=j)(*args) for j in range(3)]
            )
    assert any(torch.allclose(out, one, atol=1e-5) for one in expected)


@pytest.mark.parametrize("enforce", [True, False])
def test_packed_sequences_fold(enforce: bool) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, packed: PackedSequence) -> Tensor:
            _, (h, _) = self.lstm(packed)
            return self.out(h[-1])

    lengths = (
        torch.tensor([5, 5, 4, 2, 1, 1])
        if enforce
        else torch.tensor([1, 5, 2, 5, 4, 1])
    )
    packed = pack_padded_sequence(torch.randn(5, 6, 4), lengths, enforce_sorted=enforce)
    model = converted(Reads())
    layout = proof.prove(model, ((packed,), {}), passes.posteriors_of(model), None)
    assert layout.folds, layout.why
    assert layout.rowwise, layout.why
    with torch.no_grad():
        close(sb.sample(model, packed), sb.sample(model, packed, parallel=False))


class Counting(nn.Module):
    """Has a buffer that every call changes, and noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 3),
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.a(x)))
        return self.b(h + 0.1 * torch.randn_like(h))


@pytest.mark.parametrize("kind", ["right", "wrong", "fails"])
@pytest.mark.parametrize("mode", [False, True], ids=["eval", "train"])
def test_a_proof_leaves_no_trace(mode: bool, kind: str) -> None:
    model = Counting()
    sb.bayesianize(model, RANDOM).train(mode)
    if kind == "wrong":
        model.norm = nn.Sequential(model.norm, Net(lambda m, x: x.cumsum(0)))
    if kind == "fails":
        model.norm = nn.Sequential(model.norm, Net(lambda m, x: x.view(6, 8)))
    model.train(mode)
    inputs = torch.randn(6, 4, requires_grad=True)
    sb.sample(model, inputs.detach(), parallel=False).sum().backward()
    before = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    values, state, kept = (
        {n: p.clone() for n, p in model.named_parameters()},
        torch.get_rng_state(),
        inputs.detach().clone(),
    )
    layout = proof.prove(model, ((inputs,), {}), passes.posteriors_of(model), None)
    assert layout.folds == (kind == "right"), layout.why
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(before)
    assert all(torch.equal(model.get_parameter(n).grad, g) for n, g in before.items())
    assert inputs.grad is None
    assert torch.equal(inputs, kept)
    assert torch.is_grad_enabled()
    assert all(m.training == mode for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("draws", [2, 4])
def test_no_coincidence_of_sizes_changes_a_result(draws: int) -> None:
    """S * B == 12, and steps run past it; so do masks of (T, T)."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.positions = (
                nn.Linear(4, 4),
                nn.Linear(4, 3),
                nn.Linear(2, 4),
            )

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            steps = torch.arange(x.shape[1]).float()
            h = self.a(x) + self.positions(
                torch.stack([steps.sin(), steps.cos()], -1)[None]
            )
            scores = (h @ h.transpose(1, 2)).masked_fill(mask, -1e9)
            return self.b(scores.softmax(-1) @ h)

    torch.manual_seed(draws)
    model = converted(Masked(), sb.BatchEnsemble(members=draws))
    for steps in (
        2,
        3,
        4,
        5,
        6,
        8,
        11,
        12,
        13,
        24,
        25,
    ):  # rows, draws, their product, multiples, neighbours
        values, mask = (
            torch.randn(12 // draws, steps, 4),
            torch.ones(steps, steps).triu(1).bool(),
        )
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = sb.sample(model, values, mask, parallel=False)
            close(sb.sample(model, values, mask), expected)
            fresh = copy.deepcopy(
                model
            )  # which has to find its rows on these very sizes
            close(sb.sample(fresh, values, mask), expected)


# Layouts are found again ----------------------------------------------------------------------------------------------


def test_layouts_are_kept_and_found_again_after_surgery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, values = (
        converted(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))),
        torch.randn(6, 4),
    )
    proofs, prove = [], proof.prove
    monkeypatch.setattr(
        proof, "prove", lambda *args: proofs.append(prove(*args)) or proofs[-1]
    )

    def check(count: int) -> None:
        with torch.no_grad():
            close(sb.sample(model, values), sb.sample(model, values, parallel=False))
            model(values)
            sb.sample(model, torch.randn(2, 4))
        assert len(proofs) == count

    check(1)
    check(1)
    model[1] = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))  # a plain module
    check(2)
    model[0] = nn.Linear(4, 8)  # a converted layer
    check(3)
    model[2] = converted(nn.Linear(8, 3))
    check(4)
    model[1] = Net(lambda m, h: h.cumsum(0))
    with torch.no_grad(), pytest.warns(UserWarning, match="draw by draw"):
        close(sb.sample(model, values), sb.sample(model, values, parallel=False))
    assert len(proofs) == 5
    model[1] = nn.Tanh()
    model.eval()  # new parts would train
    check(6)
    model.train()
    check(7)  # another mode is another kind of call
    model.eval()
    check(7)
    with torch.no_grad():
        sb.sample(model, torch.randn(2, 5, 4))  # so is another number of dimensions
    assert len(proofs) == 8


# Quiet ----------------------------------------------------------------------------------------------------------------


def attention(dropout: float) -> Callable[[], Any]:
    q = torch.randn(2, 3, 4)
    return lambda: F.scaled_dot_product_attention(q, q, q, None, dropout)


def recurrent(kind: type[nn.RNNBase]) -> Callable[[], Any]:
    layer, values = kind(4, 5, 2, dropout=0.5), torch.randn(3, 6, 4)
    return lambda: layer(values)[0]


def multihead() -> Callable[[], Any]:
    layer, values = nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(3, 6, 8)
    return lambda: layer(values, values, values)[0]


ONES = torch.ones(64)
NOISE: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(ONES),
    "dropout-layer": lambda: nn.Dropout(0.5)(ONES),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 64, 2, 2)),
    "alpha-dropout": lambda: F.alpha_dropout(ONES, 0.5, True),
    "rand": lambda: torch.rand(64),
    "rand-like": lambda: torch.rand_like(ONES),
    "randn": lambda: torch.randn(64),
    "randint": lambda: torch.randint(3, 100, (64,)),
    "randperm": lambda: torch.randperm(64),
    "bernoulli": lambda: torch.bernoulli(ONES * 0.5),
    "normal": lambda: torch.normal(ONES, ONES),
    "uniform_": lambda: torch.empty(64).uniform_(),
    "normal_": lambda: torch.empty(64).normal_(),
    "multinomial": lambda: torch.multinomial(ONES, 32),
    "gumbel": lambda: F.gumbel_softmax(torch.zeros(64)),
    "attention": attention(0.5),
    "multihead": multihead(),
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "distribution": lambda: torch.distributions.Normal(ONES, ONES).rsample(),
}


@pytest.mark.parametrize("name", NOISE)
def test_nothing_is_random_in_a_quiet_run(name: str) -> None:
    run, quiet = NOISE[name], Quiet()
    with torch.no_grad():
        assert not torch.equal(run(), run())
        with quiet:
            found = [run(), run()]
        assert torch.equal(*found)
        assert not torch.equal(run(), run())
    assert found[0].shape == run().shape


def test_quiet_numbers_of_a_row_do_not_depend_on_how_many_rows_there_are() -> None:
    for name, make in {
        "rand": torch.rand,
        "randn": torch.randn,
        "zeros": torch.zeros,
    }.items():
        with Quiet():
            assert torch.equal(make(6, 4)[:3], make(3, 4)), name


def test_quiet_tells_of_randomness() -> None:
    for run, random in (
        (lambda: F.dropout(ONES, 0.5, True), True),
        (lambda: F.dropout(ONES, 0.5, False), False),
        (lambda: F.dropout(ONES, 0.0), False),
        (lambda: torch.rand(3), True),
        (lambda: torch.relu(ONES), False),
    ):
        with Quiet() as quiet:
            run()
        assert quiet.random == random


@pytest.mark.parametrize("track", [True, False])
def test_quiet_batch_norm_mixes_no_rows_and_keeps_its_statistics(track: bool) -> None:
    norm, values = nn.BatchNorm1d(4, track_running_stats=track), torch.randn(6, 4)
    if track:
        norm.running_mean.normal_()
    kept = {n: b.clone() for n, b in norm.named_buffers()}
    with torch.no_grad(), Quiet():
        whole, part = norm(values), norm(values[:2])
    close(whole[:2], part, 0)
    assert norm.training
    assert all(
        torch.equal(b, kept[n])
        for n, b in norm.named_buffers()
        if n != "num_batches_tracked"
    )
    assert differ(norm(values)[:2], norm(values[:2]))


# Layers that never run ------------------------------------------------------------------------------------------------


def test_a_converted_layer_that_never_runs_is_named_once() -> None:
    model = converted(
        Net(
            lambda m, x: m.b(torch.tanh(m.a(x))),
            spare=nn.Linear(4, 4),
            omitted=nn.Linear(4, 4),
        ),
        RANDOM,
        exclude="omitted",
    )
    values = torch.randn(6, 4)
    with pytest.warns(UserWarning, match="spare") as caught:
        sb.sample(model, values)
    assert len([w for w in caught if "never called" in str(w.message)]) == 1
    assert not any(
        name in str(caught[0].message) for name in ("a.weight", "b.weight", "omitted")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.sample(model, values)
        model(values)
        sb.predict(model, values)
    text = str(sb.summary(model))
    line = next(line for line in text.splitlines() if "spare" in line)
    assert "did not run" in line
    assert text.count("did not run") == 1


def test_a_model_whose_layers_all_run_says_nothing() -> None:
    model = converted(mlp(), RANDOM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(6, 4))
    assert "did not run" not in str(sb.summary(model))


# Tied weights ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize(
    "method", ["rank1", "batch-ensemble", "mean-field", "k-tied", "patch"]
)
def test_tied_weights_have_one_posterior_one_kl_and_one_draw(method: str) -> None:
    torch.manual_seed(0)
    model, values = converted(Tied(), METHODS[method]), torch.randn(6, 4)
    assert len(passes.posteriors_of(model)) == 2
    assert model.a.posterior["weight"] is model.b.posterior["weight"]
    once = [layer.posterior["weight"].kl() for layer in (model.a, model.c)]
    close(sb.kl(model).detach(), torch.stack(once).sum().detach())
    with torch.no_grad(), sb.fixed_draws(model, 2 * sb.members(model)):
        outputs = sb.sample(model, values)
        for j, out in enumerate(outputs):
            plain = sb.materialize(model, draw=j)
            assert plain.a.weight is plain.b.weight
            close(plain(values), out)
        close(sb.sample(model, values, parallel=False), outputs)


# Layers of types nobody knows -----------------------------------------------------------------------------------------


class Bilinear(nn.Module):
    """Uses its weight twice and takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(4, 4) * 0.5),
            nn.Parameter(torch.randn(4)),
        )

    def forward(self, left: Tensor, right: Tensor, flip: bool = False) -> Tensor:
        out = torch.tanh(left @ self.weight.T) * (right @ self.weight) + self.bias
        return -out if flip else out


class UsesBilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.b = nn.Linear(4, 4), Bilinear(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(0.5 * self.mix(h, right=x, flip=True) + self.mix(x, h))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "method"), each([6, 5, 1], METHODS))
def test_an_unknown_layer_runs_its_own_forward_with_drawn_weights(
    method: str, rows: int
) -> None:
    model, values = converted(UsesBilinear(), METHODS[method]), torch.randn(rows, 4)
    for name, p in model.named_parameters():
        if ".posterior." in name and name.endswith(".bias"):
            nn.init.normal_(p)  # they start at zero
    with torch.no_grad(), sb.fixed_draws(model, 2 * sb.members(model)):
        held = sb.sample(model, values)
        plain = [sb.materialize(model, draw=j) for j in range(len(held))]
        assert all(type(p.mix) is Bilinear for p in plain)
        assert method == "patch" or differ(
            plain[0].mix.weight, plain[1].mix.weight
        )  # two draws may pick one component
        expected = torch.stack([p(values) for p in plain])
        close(held, expected)
        close(sb.sample(model, values, parallel=False), expected)
        close(sb.predict(model, values, likelihood="gaussian").samples, expected)
        blocks = block_of_row(rows, len(held))
        close(model(values), expected[blocks, torch.arange(rows)])
        twice = torch.randn(len(held) * rows, 4)
        found = sb.sample(model, twice, rows="split")
        close(
            found,
            torch.stack(
                [p(part) for p, part in zip(plain, twice.chunk(len(held)), strict=True)]
            ),
        )
    if method == "ensemble":
        return
    kept = own_value(model.mix, "weight").clone()
    sb.sample(model, values)
    assert torch.equal(model.mix.weight, kept)
    assert model.mix.weight is model.mix._parameters["weight"]


class PlusOne(nn.Module):
    """An RMS norm as Gemma has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            * (1 + self.weight)
        )


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class BatchNormAct(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class WeightScale(LayerScale):
    def __init__(self, channels: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


NORMS: dict[str, tuple[Callable[[], nn.Module], bool, tuple[int, ...]]] = {
    "rms": (lambda: PlusOne(4), True, (6, 4)),
    "layer-2d": (lambda: LayerNorm2d(4), True, (6, 4, 3, 3)),
    "batch-act": (lambda: BatchNormAct(4), True, (6, 4, 3, 3)),
    "layer-scale": (lambda: LayerScale(4), False, (6, 4)),
    "weight-scale": (lambda: WeightScale(4), False, (6, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_known_by_what_they_do(name: str) -> None:
    make, is_norm, shape = NORMS[name]
    first = nn.Linear(4, 4) if len(shape) == 2 else nn.Conv2d(4, 4, 1)
    norm, config = (
        make(),
        sb.ModelPatch(components=3, jitter=0.5),
    )  # whose default are norms
    model, values = (
        nn.Sequential(
            first, norm, nn.Flatten(), nn.Linear(4 if len(shape) == 2 else 36, 3)
        ),
        torch.randn(shape),
    )
    if not is_norm:
        assert not sb.bayesianize(nn.Sequential(nn.BatchNorm1d(4), model), config)[1][
            1
        ].__dict__.get("posterior")
        assert type(norm) is type(make())
        return
    converted(model, config)
    assert [p.name for p in passes.posteriors_of(model)] == ["1.weight"]
    with torch.no_grad(), sb.fixed_draws(model, 3):
        held = sb.sample(model, values)
        plain = [sb.materialize(model, draw=j) for j in range(3)]
        close(held, torch.stack([p(values) for p in plain]))
        close(
            model(values),
            torch.stack(
                [plain[j](values)[i] for i, j in enumerate((0, 0, 1, 1, 2, 2))]
            ),
        )


# What planted bugs showed to be untested ------------------------------------------------------------------------------


class Stem(nn.Module):
    """Runs ahead of all draws, with a table that holds no rows and a second output that is one for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layer(x)) + table.sum()
        return h, h.mean(0)


@pytest.mark.parametrize("draws", [1, 3])
def test_modules_with_rowless_parts_are_not_shared_wrongly(draws: int) -> None:
    model = Net(
        lambda m, x, table: m.b((lambda h: h[0] + m.scale * h[1])(m.stem(x, table))),
        stem=Stem(),
    )
    model.scale = 0.0
    sb.bayesianize(model, MEMBERS, include="b")
    values, table = torch.randn(6, 4), torch.randn(5)
    close(
        sb.predict(model, (values, table), draws=draws * sb.members(model)).samples,
        sb.predict(
            model, (values, table), draws=draws * sb.members(model), share=False
        ).samples,
    )
    close(
        sb.predict(
            model, (values, table), draws=draws * sb.members(model), parallel=False
        ).samples,
        sb.predict(model, (values, table), draws=draws * sb.members(model)).samples,
    )


@pytest.mark.parametrize(
    "config", [sb.MCDropout(), sb.DropConnect()], ids=["mc-dropout", "drop-connect"]
)
def test_held_masks_are_the_same_in_every_call(config: Any) -> None:
    model = converted(
        Net(lambda m, x: m.b(m.drop(torch.relu(m.a(m.drop(x))))), drop=nn.Dropout(0.5)),
        config,
    )
    values = torch.randn(6, 4)
    with torch.no_grad(), sb.fixed_draws(model, 3):
        first = sb.sample(model, values)
        for _ in range(3):
            close(sb.sample(model, values), first)
        close(sb.sample(model, values, parallel=False), first)
    assert differ(first[0], first[1])


def test_the_kl_of_layers_with_priors_of_their_own_is_the_sum_of_theirs() -> None:
    configs = [
        sb.Rank1(members=2, prior=sb.Normal(1.0, 0.1)),
        sb.Rank1(members=2, prior=sb.Normal(1.0, 0.5)),
        sb.Rank1(members=2, prior=sb.Normal(0.5, 0.1)),
    ]
    layers = [nn.Linear(4, 4) for _ in configs]
    torch.manual_seed(3)
    single = [
        sb.kl(sb.bayesianize(copy.deepcopy(layer), config)).detach()
        for layer, config in zip(layers, configs, strict=True)
    ]
    torch.manual_seed(3)
    model = sb.bayesianize(
        nn.Sequential(*layers), {str(i): config for i, config in enumerate(configs)}
    )
    for j, config in enumerate(configs):
        assert sb.kl(model[j]).item() == pytest.approx(
            sum(p.kl().item() for p in passes.posteriors_of(model[j]))
        )
        assert passes.posteriors_of(model[j])[0].r.prior == config.prior
    close(
        sb.kl(model).detach(),
        torch.stack([sb.kl(layer).detach() for layer in model]).sum(),
    )
    assert differ(torch.stack(single)[0], torch.stack(single)[1])


def test_the_multiplier_of_posterior_rates_leaves_components_at_the_base_rate() -> None:
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        {
            "0": sb.Rank1(members=2),
            "1": sb.ModelPatch(components=3, patch=".*", tau=0.1),
        },
    )
    groups = sb.param_groups(
        model, weight_decay=0.01, lr=1.0, posterior_lr_multiplier=0.5
    )
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        slow = name.startswith("0.posterior")
        assert rates[id(p)] == (0.5 if slow else 1.0), name


def test_member_weights_follow_the_order_of_the_draws() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    sb.bayesianize(
        model,
        {
            "0": sb.Ensemble(members=2, init="copies", jitter=0.5),
            "2": sb.BatchEnsemble(members=4),
        },
    )
    passes.posteriors_of(model)[0].weights.copy_(torch.tensor([0.9, 0.1]))
    values = torch.randn(6, 4)
    pred = sb.predict(model, values)
    weights = torch.tensor([0.45, 0.05, 0.45, 0.05])
    with torch.no_grad():
        expected = sb.sample(model.eval(), values).softmax(-1)
    close(pred.probs, (weights.view(4, 1, 1) * expected).sum(0))


def test_a_cosine_with_a_warm_up_starts_where_the_warm_up_ends() -> None:
    pytest.importorskip("pydantic")
    from slimbayes_lab.configs import train as recipes

    train = recipes.Train(
        epochs=10,
        optimizer={"kind": "SGD"},
        schedule={"kind": "Cosine", "warmup": 2, "end": 0.1},
    )
    found = [train.rate(step, 10) for step in (0, 9, 19, 20, 60, 99, 100)]
    half, last = (
        0.55,
        0.1
        + 0.45
        * (1 + torch.cos(torch.tensor(torch.pi * 79 / 80, dtype=torch.float64)).item()),
    )
    assert found == pytest.approx([0.05, 0.5, 1.0, 1.0, half, last, 0.1])


@pytest.mark.parametrize(
    "config",
    [
        sb.ModelPatch(components=3, patch=".*", jitter=0.5),
        sb.ModelPatch(components=2, patch="2", jitter=0.5),
    ],
    ids=["all", "last"],
)
def test_networks_that_several_draws_picked_run_once_and_answer_for_all(
    config: Any,
) -> None:
    """A mixture has few networks: each runs once, and every draw gets the outputs of the one it picked."""
    model, values = converted(mlp(), config), torch.randn(6, 4)
    found = []
    for share in (True, False):
        torch.manual_seed(5)
        found.append(
            sb.predict(
                model, values, draws=16, share=share, likelihood="gaussian"
            ).samples
        )
    close(*found)
    assert 1 < len(torch.unique(found[1].flatten(1).round(decimals=4), dim=0)) <= 9


@pytest.mark.parametrize("first", [6, 1])
def test_an_input_of_one_row_stands_for_all(first: int) -> None:
    """Located with as many rows as the batch has, or with one; later calls bring the other."""
    model = converted(Net(lambda m, x, context: m.b(torch.tanh(m.a(x) + m.a(context)))))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (first, 1, 6, 1):
            values, context = torch.randn(6, 4), torch.randn(rows, 4)
            expected = sb.sample(model, values, context, parallel=False)
            assert expected.shape == (3, 6, 3)
            close(sb.sample(model, values, context), expected)
            assert model(values, context).shape == (6, 3)


class NoisyStem(nn.Module):
    """Work worth sharing, and noise in it that differs between draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h + torch.randn_like(h)


def test_modules_with_noise_of_their_own_are_not_shared() -> None:
    model = sb.bayesianize(
        Net(lambda m, x: m.b(m.stem(x)), stem=NoisyStem()),
        sb.BatchEnsemble(members=2),
        include="b",
    )
    samples = sb.predict(
        model, torch.randn(6, 4), draws=8, likelihood="gaussian"
    ).samples
    assert len(torch.unique(samples.flatten(1).round(decimals=5), dim=0)) == 8


def test_modules_that_run_ahead_run_once_for_all_draws() -> None:
    seen: list[int] = []
    model = Net(
        lambda m, x: m.b(torch.tanh(m.stem(x))),
        stem=nn.Sequential(nn.Linear(4, 6), Net(lambda m, h: seen.append(len(h)) or h)),
    )
    sb.bayesianize(model, MEMBERS, include="b")
    values = torch.randn(6, 4)
    expected = sb.predict(model, values, draws=6, share=False).samples
    del seen[:]
    close(sb.predict(model, values, draws=6).samples, expected)
    assert seen == [6]
    sb.predict(model, values, draws=6, share=False)
    assert seen == [6, 36]


def test_a_bare_call_starts_at_a_random_member() -> None:
    model, values = converted(mlp()), torch.randn(1, 4).expand(6, 4)
    with torch.no_grad():
        firsts = torch.stack([model(values)[0] for _ in range(60)]).round(decimals=4)
        counts = torch.unique(firsts, dim=0, return_counts=True)[1]
        assert len(counts) == 3
        assert counts.min() > 6
        assert len(torch.unique(model(values).round(decimals=4), dim=0)) == 3


@torch.no_grad()
def test_a_weight_that_is_used_transposed_is_used() -> None:
    parts = {"a": lambda: nn.Linear(4, 6), "b": lambda: nn.Linear(6, 3)}
    model = converted(
        two(lambda m, x: m.b(torch.sin(x @ m.a.weight.T)), **parts)(), METHODS["rank1"]
    )
    with sb.fixed_draws(model, 4):
        with pytest.warns(UserWarning, match="weight of a is used past"):
            outputs = sb.sample(model, torch.ones(3, 4))
        for j, one in enumerate(outputs):
            close(one, sb.materialize(model, draw=j)(torch.ones(3, 4)))


# Sizes that nobody has seen -----------------------------------------------------------------------------------------


class Pieces(nn.Module):
    """Cuts what it gets into pieces of a fixed number of windows: small batches fit into one."""

    def __init__(self, size: int, windows: int) -> None:
        super().__init__()
        self.size, self.windows = size, windows
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))[:, None] * torch.arange(1, self.windows + 1)[:, None]
        y = torch.cat([self.b(piece) for piece in h.flatten(0, 1).split(self.size)])
        return y.unflatten(0, (len(x), self.windows)).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "windows"), [(24, 1), (32, 4), (64, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_is_cut_only_when_it_is_large(
    method: str, size: int, windows: int
) -> None:
    torch.manual_seed(0)
    model = sb.bayesianize(Pieces(size, windows), METHODS[method]).eval()
    few, many = torch.randn(4, 4), torch.randn(32, 4)
    with quietly(), sb.fixed_draws(model, 8):
        assert_draws(sb.sample(model, few), held(model, 8), (few,), {})
    with quietly(), sb.fixed_draws(model, 2):
        plains = held(model, 2)
        assert_rows_of_draws(model(few), [plain(few) for plain in plains], 0)
        assert_rows_of_draws(model(many), [plain(many) for plain in plains], 0)


def test_rows_are_looked_at_again_for_more_rows_even_of_fewer_numbers() -> None:
    """Long rows first: forty short ones hold fewer numbers, and are shown to a layer twice all the same."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.mean(1)
        return m.b(
            m.a(x)
            if len(x) <= 50
            else m.a(torch.cat([x, x])).unflatten(0, (2, -1)).mean(0)
        )

    net = Net(run)
    model = sb.bayesianize(
        net, sb.Rank1(members=2, draws="member", scale_init=0.3)
    ).eval()
    long, short = torch.randn(4, 100, 4), torch.randn(40, 2, 4)
    with quietly(), sb.fixed_draws(model, 2):
        plains = held(model)
        assert_draws(sb.sample(model, long), plains, (long,), {})
        assert_draws(sb.sample(model, short), plains, (short,), {})


def test_known_sizes_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from slimbayes.engine import locate

    model = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), RANDOM
    )
    trials, run_probe = [], locate.run_probe
    monkeypatch.setattr(
        locate, "run_probe", lambda *args: trials.append(args) or run_probe(*args)
    )
    for rows in (
        8,
        8,
        5,
        16,
        7,
    ):  # 8 rows and two members: 16 were seen, then 10, then 32
        sb.sample(model, torch.randn(rows, 4))
    assert len(trials) == 2  # once, for 32 rows
    sb.sample(model, torch.randn(16, 4), draws=2)
    assert len(trials) == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_sees_pairs_of_rows(method: str) -> None:
    """Two rows become one entry of the last layer's input: neither has a draw of its own there."""
    torch.manual_seed(0)
    net = Net(
        lambda m, x: m.b(
            m.a(x).unflatten(0, (len(x) // 2, 2)) if len(x) % 2 == 0 else m.a(x)
        )
    )
    model, x = sb.bayesianize(net, METHODS[method]).eval(), torch.randn(2, 4)
    draws = 6
    with quietly(), sb.fixed_draws(model, draws):
        assert_draws(sb.sample(model, x), held(model, draws), (x,), {})
    with quietly():
        torch.manual_seed(1)
        one_by_one = sb.sample(model, x, draws=draws, parallel=False)
        torch.manual_seed(1)
        close(sb.sample(model, x, draws=draws), one_by_one)


def test_a_layer_that_folds_wrongly_is_found_out_by_real_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plain model folds: only the comparison of two draws, together and one by one, can see what the layer does."""
    right = Lines.meeting
    monkeypatch.setattr(
        Lines,
        "meeting",
        lambda *given: {name: s.flip(0) for name, s in right(*given).items()},
    )
    model, inputs = converted(mlp()), torch.randn(6, 4)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="differs from that of single ones"),
    ):
        folded = sb.sample(model, inputs)
    with torch.no_grad():
        close(folded, sb.sample(model, inputs, parallel=False))


def test_rows_that_held_draws_cannot_share_evenly_lie_in_blocks() -> None:
    """Of five rows the first three belong to the first of two draws, and the others to the second."""
    net, x = (
        sb.bayesianize(mlp(), sb.Rank1(members=2, scale_init=0.5)),
        torch.randn(5, 4),
    )
    with torch.no_grad(), sb.fixed_draws(net):
        alone = [sb.materialize(net, draw=j)(x) for j in range(2)]
        close(net(x), torch.cat([alone[0][:3], alone[1][3:]]))


# A model that goes another way later ----------------------------------------------------------------------------------


class Ways(nn.Module):
    """Rows act on each other where a submodule trains, a flag is set or a number is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.centre, self.b, self.mixes = (
            nn.Linear(4, 6),
            nn.Identity(),
            nn.Linear(6, 3),
            False,
        )
        self.axis, self.share = -1, 0.0

    def forward(self, x: Tensor, number: float = 0) -> Tensor:
        h = self.centre(self.a(x))
        h = h - h.mean(self.axis, keepdim=True) - self.share * h.mean(0)
        mixes = (
            self.mixes
            or number
            or self.centre.training
            or ("late" in self.__dict__ and self.late)
        )
        return self.b(h - h.mean(0) if mixes else h)


WAYS: dict[str, Callable[[Any], Any]] = {
    "mode of a part": lambda model: model.centre.train(),
    "flag": lambda model: setattr(model, "mixes", True),
    "axis with the same hash": lambda model: setattr(model, "axis", -2),
    "share": lambda model: setattr(model, "share", 0.5),
    "flag that was not there": lambda model: setattr(model, "late", True),
    "number": lambda model: None,
    "fraction": lambda model: None,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_was_led_another_way_is_looked_at_again(way: str) -> None:
    model, x, given = (
        converted(Ways()),
        torch.randn(5, 4),
        {"number": [1], "fraction": [0.5]}.get(way, []),
    )
    with torch.no_grad(), quietly() as said:
        sb.sample(
            model, x, *[0 * number for number in given]
        )  # rows are apart, and draws fold
    assert said == []
    WAYS[way](model)
    with torch.no_grad(), quietly() as said, sb.fixed_draws(model):
        assert_draws(sb.sample(model, x, *given), held(model), (x, *given), {})
    assert len(said) == 1 and "draw by draw" in said[0]


def test_a_model_that_counts_its_calls_is_proven_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What differs at every call is no mode: after eight of them the layouts found serve, the most careful one."""
    proofs: list[int] = []
    right = proof.prove
    monkeypatch.setattr(
        proof, "prove", lambda *args: (proofs.append(1), right(*args))[1]
    )
    model, x = converted(Ways()), torch.randn(5, 4)
    with torch.no_grad(), quietly():
        for step in range(12):
            sb.sample(model, x, step)
        assert len(proofs) == 8 and [
            len(known) for known in model._slimbayes_tree.layouts.values()
        ] == [8]
        with sb.fixed_draws(model):
            assert_draws(sb.sample(model, x, 99), held(model), (x, 99), {})


def test_modes_beyond_those_that_are_proven_are_looked_at_now_and_then() -> None:
    model, x = converted(Ways()), torch.randn(6, 4)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(40):
            model.mode, model.mixes = step, step > 9
            sb.sample(model, x)
        assert sum("looked again" in str(one.message) for one in said) == 1
        with sb.fixed_draws(model):
            assert_draws(sb.sample(model, x), held(model), (x,), {})


class Lazy(nn.Module):
    """Methods that only begin when they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        h = self.a(x).tanh()
        yield h
        yield self.b(h)

    def guarded(self, x: Tensor, left: list[str]) -> Iterator[Tensor]:
        try:
            while True:
                try:
                    yield self.a(x)
                except KeyError:
                    left.append("caught")
        finally:
            left.append("closed")

    async def later(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        await asyncio.sleep(0)
        return self.b(h)

    async def stream_later(self, x: Tensor, left: list[str]) -> AsyncIterator[Tensor]:
        try:
            h = self.a(x).tanh()
            yield h
            await asyncio.sleep(0)
            yield self.b(h)
        except KeyError:
            left.append("caught")
            yield self.b(h)
        finally:
            left.append("closed")


@pytest.mark.parametrize("method", ["batch-ensemble", "ensemble"])
@torch.no_grad()
def test_steps_of_generators_and_coroutines_belong_to_one_draw(method: str) -> None:
    model, x = sb.bayesianize(Lazy(), METHODS[method]).eval(), torch.randn(8, 4)
    with sb.fixed_draws(model):
        expected = [plain(x) for plain in held(model)]
    for _ in range(3):  # where the members begin is random
        steps = model.stream(x)
        assert next(steps).shape == (8, 6)
        model(x)  # another call in between
        assert_rows_of_draws(next(steps), expected, 0)
        assert_rows_of_draws(asyncio.run(model.later(x)), expected, 0)


@pytest.mark.parametrize("method", ["batch-ensemble", "ensemble"])
@torch.no_grad()
def test_steps_that_are_awaited_belong_to_one_draw(method: str) -> None:
    model, x = sb.bayesianize(Lazy(), METHODS[method]).eval(), torch.randn(8, 4)
    with sb.fixed_draws(model):
        expected = [plain(x) for plain in held(model)]

    async def run(left: list[str]) -> list[Tensor]:
        whole, broken = model.stream_later(x, left), model.stream_later(x, left)
        assert (await anext(whole)).shape == (await anext(broken)).shape == (8, 6)
        model(x)  # another call in between
        caught, second = await broken.athrow(KeyError()), await anext(whole)
        assert [step async for step in broken] == []
        await whole.aclose()
        return [caught, second]

    for _ in range(3):  # where the members begin is random
        left: list[str] = []
        caught, second = asyncio.run(run(left))
        assert_rows_of_draws(caught, expected, 0)
        assert_rows_of_draws(second, expected, 0)
        assert left == ["caught", "closed", "closed"] and passes.innermost() is None


def test_generators_get_what_is_thrown_into_them() -> None:
    model, left = converted(Lazy()), list[str]()
    steps = model.guarded(torch.randn(8, 4), left)
    first = next(steps)
    assert torch.equal(steps.throw(KeyError()), first) and left == [
        "caught"
    ]  # the same draw
    steps.close()
    assert left == ["caught", "closed"]


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_that_changes_its_mode_has_the_layout_of_that_mode() -> None:
    """Compiled in eval mode, where rows are apart; rows of the training mode act on each other."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    torch._dynamo.reset()
    model, x = (
        converted(nn.Sequential(nn.Linear(4, 6), Centred(), nn.Linear(6, 3))),
        torch.randn(5, 4),
    )
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    model.train()
    with sb.fixed_draws(model):
        expected = [plain(x) for plain in held(model)]
    with quietly():
        assert_rows_of_draws(compiled(x), expected, None)
        model.train()(x)
        model.eval()(x)
        torch._dynamo.reset()  # both modes are known: neither has to be looked at while it is traced
        torch.compile(model.train(), backend="eager", fullgraph=True)(x)


def test_the_latest_layout_is_that_of_the_last_call_although_the_user_was_warned_of_it_before() -> (
    None
):
    """What a compiler traces takes the latest layout: of sequences, whose rows act on each other here, not of rows."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean((0, 1)) if x.dim() == 3 else x

    model = converted(nn.Sequential(nn.Linear(4, 6), Centred(), nn.Linear(6, 3)))
    for shape in ((5, 4), (5, 2, 4)) * 2:
        with quietly(), torch.no_grad():
            model(torch.randn(shape))
        latest = locate.latest_of(model)
        assert latest is not None and latest.folds == (len(shape) == 2)


@pytest.mark.parametrize("config", [MEMBERS, RANDOM, sb.MeanField(scale_init=0.3)])
@torch.no_grad()
def test_transposed_convolutions_of_a_given_output_size(config: Any) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.ConvTranspose1d(3, 2, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x, output_size=[10])

    model, x = sb.bayesianize(Grows(), config), torch.randn(6, 3, 4)
    with sb.fixed_draws(model, 2 * sb.members(model)):
        expected = torch.stack(
            [plain(x) for plain in held(model, 2 * sb.members(model))]
        )
        close(sb.sample(model, x), expected)
        close(sb.sample(model, x, parallel=False), expected)
        one = torch.stack([plain(x[0]) for plain in held(model, 2 * sb.members(model))])
        close(
            sb.sample(model, x[0], parallel=False), one
        )  # an input without a dimension for rows
    assert expected.shape[-1] == 10


def test_a_model_that_goes_another_way_for_other_numbers_is_found_out_later() -> None:
    """Rows act on each other only where numbers are large: what the first call shows holds no longer."""

    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            return self.after(h - h.mean(0) if bool((x > 10).any()) else h)

    torch.manual_seed(0)
    net = sb.bayesianize(Full().eval(), sb.Rank1(members=2))
    small, large = torch.randn(4, 3), 20 + torch.randn(4, 3)
    sb.sample(net, small, seed=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            found = sb.sample(net, large, seed=0)
    assert sum("looked again" in str(warning.message) for warning in told) == 1
    torch.testing.assert_close(found, sb.sample(net, large, seed=0, parallel=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = sb.bayesianize(Full().eval(), sb.Rank1(members=2))
        for _ in range(70):
            sb.sample(other, small)


def test_a_trial_that_cannot_put_things_back_is_over_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("cannot be put back")

    monkeypatch.setattr("slimbayes.engine.state.Trials.restore", fail)
    with (
        pytest.raises(RuntimeError, match="put back"),
        trial.undisturbed(nn.Linear(2, 2), torch.randn(3, 2)),
    ):
        assert trial.on_trial()
    assert not trial.on_trial()


def test_some_draws_of_a_pass_keep_its_rows_and_their_own_noise() -> None:
    whole = passes.Pass(4, 3, rowwise=False)
    whole.layout = Layout()
    whole.put("a", Noise(torch.arange(4.0).view(4, 1), torch.empty(0, 0)))
    some = whole.take(torch.tensor([2, 0]))
    assert (some.draws, some.total, some.rows) == (
        2,
        2,
        3,
    ) and some.layout is whole.layout
    assert (
        some.noise["a"].block.tolist() == [[2.0], [0.0]]
        and len(whole.noise["a"].block) == 4
    )


def test_objects_are_copied_where_they_hold_tensors_or_know_how() -> None:
    class Plain:
        pass

    class Copied(Plain):
        def __copy__(self) -> Any:
            return Copied()

    empty, batch, copied = Plain(), Plain(), Copied()
    batch.x = torch.ones(2)  # type: ignore[attr-defined]
    assert (
        copy_of(empty) is empty
        and copy_of(batch) is not batch
        and copy_of(copied) is not copied
    )


def test_draws_that_differ_together_are_said_to_mix_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a proof finds that ends so, although all that came before went well."""

    def differ(self: Any) -> None:
        raise passes.Unproven("draws differ")

    monkeypatch.setattr(proof.Proof, "verify", differ)
    model = converted(Net(lambda m, x: m.b(m.a(x))), MEMBERS)
    found = proof.prove(
        model, ((torch.randn(3, 4),), {}), passes.posteriors_of(model), None
    )
    assert found.mixed and not found.folds and found.why == "draws differ"


def test_steps_that_run_one_by_one_to_one_end_leave_rows_apart() -> None:
    """Twice as many steps are more calls, but not more outputs: no rows, which lie along the next dimension."""

    def last(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], m.a.out_features)
        for step in x:
            h = torch.tanh(m.a(step) + 0.5 * h)
        return m.b(h)

    model = converted(Net(last), MEMBERS)
    layout = locate.layout_of(
        model, (torch.randn(3, 5, 4),), {}, passes.posteriors_of(model)
    )
    assert layout.lead == (0, 1) and layout.folds and layout.rowwise


def test_the_layout_of_a_single_row_is_kept() -> None:
    model, one = converted(Net(lambda m, x: m.b(m.a(x))), MEMBERS), (torch.randn(1, 4),)
    first, second = (
        locate.layout_of(model, one, {}, passes.posteriors_of(model)) for _ in range(2)
    )
    assert first is second


def test_beams_of_a_sequence_have_its_member() -> None:
    class Writer(Net):
        def generate(self, x: Tensor) -> Tensor:
            return self(x.repeat_interleave(3, 0))

    model = converted(Writer(lambda m, x: m.b(m.a(x))), MEMBERS)
    y = model.generate(torch.ones(2, 4)).unflatten(0, (2, 3))
    assert all(torch.equal(y[:, 0], y[:, j]) for j in (1, 2)) and not torch.equal(
        y[0, 0], y[1, 0]
    )


def test_an_index_out_of_range_is_told_before_a_gpu_meets_it() -> None:
    class OnGpu(Tensor):
        is_cuda = True

    words, table = torch.tensor([1, 7]).as_subclass(OnGpu), torch.zeros(5, 2)
    for args, kwargs in (((words, table), {}), ((words,), {"weight": table})):
        with pytest.raises(IndexError, match="an index from 1 to 7 into 5 entries"):
            check_bounds("embedding", args, kwargs)
    check_bounds("embedding", (words[:1],), {"weight": table})
