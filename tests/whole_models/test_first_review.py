"""What the first review found, entry by entry: model surgery, threads, interruptions, generation, layers used past
their forward, crashes."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import each, pairwise
from oracle import (
    assert_draws,
    assert_equal,
    assert_rows_of_draws,
    draws_of_rows,
    held,
    quietly,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb

RANDOM = sb.Rank1(members=2, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5))
MEMBERS = sb.BatchEnsemble(members=2)
METHODS: dict[str, Any] = {
    "rank1": RANDOM,
    "rank1-member": sb.Rank1(members=2, scale_init=0.3, draws="member"),
    "batch-ensemble": MEMBERS,
    "k-tied": sb.KTied(rank=2, scale_init=0.2),
    "mean-field": sb.MeanField(scale_init=0.2),
    "flipout": sb.MeanField(scale_init=0.2, estimator="flipout"),
    "emp": sb.ModelPatch(components=3, jitter=0.5, patch="norm+output"),
    "drop-connect": sb.DropConnect(rate=0.4),
    "mc-dropout": sb.MCDropout(),
    "ensemble": sb.Ensemble(members=2, init="copies", jitter=0.5),
}


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def net(config: Any = MEMBERS) -> Any:
    return sb.bayesianize(mlp(), config).eval()


def spread(outputs: Tensor) -> float:
    """How far draws are apart."""
    return float((outputs - outputs[:1]).detach().abs().max())


def in_words(error: Exception, *words: str) -> None:
    """A refusal that says what it is about."""
    assert any(word in str(error).lower() for word in words), error


@torch.no_grad()
def check_all(model: Any, x: Tensor, draws: int | None = None) -> None:
    """Sample, predict and bare calls of a model in eval mode agree with its written-out draws."""
    with quietly(), sb.fixed_draws(model, draws):
        plains = held(model, draws)
        assert_draws(sb.sample(model, x), plains, (x,), {})
        assert_draws(
            sb.predict(model, x, likelihood="gaussian").samples, plains, (x,), {}
        )
        assert_rows_of_draws(model(x), [plain(x) for plain in plains], 0)


# 1.2 State on modules: surgery ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_replaced_layer_takes_no_draws_away_from_the_others(place: int) -> None:
    """Transfer learning: `net[0] = nn.Linear(...)` once stopped all draws."""
    model, x = net(RANDOM), torch.randn(6, 4)
    old = model[place]
    model[place] = nn.Linear(old.in_features, old.out_features)
    check_all(model, x)
    with torch.no_grad():
        assert spread(sb.sample(model, x)) > 1e-2
        assert float(sb.predict(model, x, draws=8).epistemic.max()) > 1e-4
        assert len({tuple(model(x)[0].tolist()) for _ in range(4)}) > 1


@pytest.mark.parametrize("place", [0, 4])
def test_summary_and_checkpoints_follow_a_replaced_layer(
    place: int, tmp_path: Path
) -> None:
    model, x = net(), torch.randn(6, 4)
    model[place] = nn.Linear(model[place].in_features, model[place].out_features)
    status = {row.name: row.status for row in sb.summary(model).rows}
    assert status.get(str(place)) != "converted"
    assert status["2"] == "converted"
    base = sb.debayesianize(copy.deepcopy(model))
    sb.save(model, tmp_path / "posterior")
    assert_equal(
        sb.sample(sb.load(base, tmp_path / "posterior"), x), sb.sample(model, x)
    )


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_layer_can_be_made_plain_again(place: int) -> None:
    model, x = net(RANDOM), torch.randn(6, 4)
    weight = model[place].weight.detach().clone()
    assert type(sb.debayesianize(model[place])) is nn.Linear
    check_all(model, x)
    assert torch.equal(model[place].weight, weight)
    assert spread(sb.sample(model, x)) > 1e-2
    sb.kl(model).backward()
    assert sb.members(model) == 2


def test_the_last_converted_layer_can_go() -> None:
    """A model of which nothing drawn is left is a plain one, or says so; it never fails on its own state."""
    model, x = (
        sb.bayesianize(nn.Sequential(nn.Linear(4, 3)), MEMBERS),
        torch.randn(6, 4),
    )
    sb.debayesianize(model[0])
    assert_equal(model(x), F.linear(x, model[0].weight, model[0].bias))
    try:
        assert spread(sb.sample(model, x)) == 0
    except ValueError as error:
        in_words(error, "bayesianize")


def test_layers_can_be_removed_added_and_wrapped() -> None:
    model, x = net(RANDOM), torch.randn(6, 4)
    del model[2]
    check_all(model, x)
    model.append(nn.Linear(3, 5))
    check_all(model, x)
    model[0] = nn.Sequential(model[0], nn.LayerNorm(8))
    check_all(model, x)
    outer = nn.Sequential(nn.Linear(4, 4), model).eval()
    check_all(outer, x)
    check_all(nn.ModuleDict({"inner": outer})["inner"], x)


def test_a_layer_converted_later_joins_the_others() -> None:
    model, x = net(MEMBERS), torch.randn(6, 4)
    model[0] = nn.Linear(4, 8)
    sb.bayesianize(model, MEMBERS, include="0")
    check_all(model, x)
    assert {
        row.name for row in sb.summary(model).rows if row.status == "converted"
    } == {"0", "2", "4"}


def test_a_part_of_another_converted_model_can_be_used() -> None:
    one, other, x = net(MEMBERS), net(MEMBERS), torch.randn(6, 4)
    one[0] = other[0]
    check_all(one, x)
    check_all(other, x)


def test_frozen_parameters_stay_drawn() -> None:
    model, x = net(RANDOM), torch.randn(6, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".posterior." in name)
    check_all(model, x)
    sb.sample(model, x).square().sum().backward()
    assert model[0].weight.grad is None
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all())
        for n, p in model.named_parameters()
        if ".posterior." in n
    )


def test_deep_copies_are_models_of_their_own() -> None:
    model, x = net(RANDOM), torch.randn(6, 4)
    model(x)
    with sb.fixed_draws(model):
        twin = copy.deepcopy(model)
        inside = sb.sample(model, x)
        check_all(
            twin, x
        )  # it holds no draws of the first, and its own fixed_draws does not disturb them
        assert_equal(sb.sample(model, x), inside)
    with torch.no_grad():
        twin[0].weight.zero_()
    check_all(model, x)
    assert float(model[0].weight.detach().abs().max()) > 0


# 1.2 Threads, interruptions, recursion, backward passes in between ----------------------------------------------------


@pytest.mark.slow
def test_threads_agree_with_one_thread() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    sb.bayesianize(model, {".*[04]": MEMBERS})
    model.train()
    xs = [torch.randn(rows, 4) for rows in (1, 2, 3, 5, 6, 7, 8, 12)]
    expected = [sb.predict(model, x, draws=2).probs for x in xs]
    statistics = model[1].running_mean.clone()
    start = threading.Barrier(8)

    def serve(i: int) -> None:
        start.wait()
        for turn in range(12):
            k = (i + turn) % 8
            assert_equal(sb.predict(model, xs[k], draws=2).probs, expected[k])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(serve, i) for i in range(8)]:
            done.result()
    assert all(m.training for m in model.modules())
    assert torch.equal(model[1].running_mean, statistics)


def test_threads_hold_draws_of_their_own() -> None:
    model, x = net(RANDOM), torch.randn(6, 4)
    start = threading.Barrier(4)

    def serve(_: int) -> Tensor:
        start.wait()
        with torch.no_grad(), sb.fixed_draws(model, 4):
            first = sb.sample(model, x)
            for _ in range(10):
                assert_equal(sb.sample(model, x), first)
                model(x)
        return first

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(serve, range(4)))
    assert all(spread(torch.stack([outputs[0], other])) > 1e-3 for other in outputs[1:])


class Interrupting(nn.Module):
    """Ctrl-C arrives while it runs, once; the class knows: a proof leaves nothing in modules."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if Interrupting.armed:
            Interrupting.armed = False
            raise KeyboardInterrupt
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["bare", "sample", "sample-loop", "predict", "fixed", "part"]
)
def test_an_interrupted_call_leaves_nothing_open(call: str) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 8), Interrupting(), nn.Linear(8, 3)),
        torch.randn(6, 4),
    )
    sb.bayesianize(model, RANDOM).train()
    calls: dict[str, Callable[[], Any]] = {
        "bare": lambda: model(x),
        "sample": lambda: sb.sample(model, x),
        "sample-loop": lambda: sb.sample(model, x, parallel=False),
        "predict": lambda: sb.predict(model, x),
        "part": lambda: nn.Sequential(model[0], model[1])(x),
    }

    def under_held_draws() -> None:
        with sb.fixed_draws(model, 4):
            sb.sample(model, x)

    calls["fixed"] = under_held_draws
    Interrupting.armed = True
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert all(m.training for m in model.modules())
    for again in calls.values():
        again()
    check_all(model.eval(), x)
    assert spread(torch.stack([sb.sample(model, x), sb.sample(model, x)])) > 1e-3


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        h = torch.tanh(self.a(x))
        inner = self(h, depth - 1) if depth else h
        return self.b(inner) + h


@pytest.mark.parametrize("method", ["rank1", "batch-ensemble", "mean-field"])
def test_recursion_is_one_pass(method: str) -> None:
    check_all(
        sb.bayesianize(Recursive(), METHODS[method]).eval(), torch.randn(6, 4), draws=2
    )


def test_a_backward_pass_in_between_keeps_held_draws() -> None:
    model, x = net(RANDOM), torch.randn(6, 4)
    outputs = model(x)
    sampled = sb.sample(model, x)
    with sb.fixed_draws(model):
        before = sb.sample(model, x)
        outputs.sum().backward()
        assert_equal(sb.sample(model, x), before)
        sampled.sum().backward()
        assert_equal(sb.sample(model, x), before)
        before.sum().backward()
        assert_equal(sb.sample(model, x), before)


def test_checkpointed_layers_are_recomputed_with_the_draws_of_their_own_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = net(RANDOM), torch.randn(6, 4)

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module, on: bool) -> None:
            super().__init__()
            self.inner, self.on = inner, on

        def forward(self, x: Tensor) -> Tensor:
            return (
                checkpoint(self.inner, x, use_reentrant=False)
                if self.on
                else self.inner(x)
            )

    gradients = []
    for on in (False, True):
        torch.manual_seed(3)
        wrapped = Checkpointed(model, on)
        out = sb.sample(wrapped, x)
        sb.sample(
            wrapped, x
        ).sum().backward()  # another pass in between, backward included
        model.zero_grad()
        out.square().sum().backward()
        gradients.append(
            [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
    assert_equal(gradients[1], gradients[0])


# 1.2 Sub-modules and other methods ------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.backbone(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encode(x)))


@pytest.mark.parametrize("method", ["batch-ensemble", "ensemble-layers"])
@pytest.mark.filterwarnings("ignore:.*is called by itself after another part")
@torch.no_grad()
def test_a_submodule_on_its_own_gives_each_row_one_member(method: str) -> None:
    config = MEMBERS if method == "batch-ensemble" else {".+": METHODS["ensemble"]}
    model, x = sb.bayesianize(Encoder(), config).eval(), torch.randn(7, 4)
    with sb.fixed_draws(model):
        plains = [sb.materialize(model, draw=j) for j in range(2)]
    calls: dict[str, Callable[[Any], Tensor]] = {
        "backbone": lambda m: m.backbone(x),
        "encode": lambda m: m.encode(x),
        "head": lambda m: m.head(torch.ones(7, 8)),
    }
    for name, call in calls.items():
        found = [
            draws_of_rows(call(model), [call(plain) for plain in plains], 0)
            for _ in range(4)
        ]
        assert all(all(rows) for rows in found), name


@torch.no_grad()
def test_sample_predict_and_fixed_draws_work_on_submodules() -> None:
    model, x = sb.bayesianize(Encoder(), MEMBERS).eval(), torch.randn(7, 4)
    with sb.fixed_draws(model):
        plains = [sb.materialize(model, draw=j) for j in range(2)]
        wanted = torch.stack([plain.backbone(x) for plain in plains])  # type: ignore[operator]
        assert_equal(sb.sample(model.backbone, x), wanted)
        assert_equal(
            sb.predict(model.backbone, x, likelihood="gaussian").samples, wanted
        )
        assert all(draws_of_rows(model.backbone(x), list(wanted), 0))
        assert all(
            draws_of_rows(model.encode(x), [plain.encode(x) for plain in plains], 0)
        )  # type: ignore[operator]
    assert_equal(sb.sample(model.backbone, x), wanted)
    assert_equal(sb.predict(model.backbone, x, likelihood="gaussian").samples, wanted)
    with sb.fixed_draws(model.backbone):
        assert_equal(sb.sample(model.backbone, x), wanted)
        assert_equal(sb.materialize(model.backbone, draw=1)(x), wanted[1])
    assert sb.members(model.backbone) == 2


# 1.2 generate() -------------------------------------------------------------------------------------------------------


def _gpt2(tied: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=23, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=tied, initializer_range=0.7, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tied"),
    [({}, True), ({"num_beams": 3}, False), ({"use_cache": False}, True)],
    ids=["greedy", "beams", "no-cache"],
)
@torch.no_grad()
def test_generate_holds_one_draw_for_each_sequence(
    options: dict[str, Any], tied: bool
) -> None:
    """Two deterministic members once gave six greedy texts in six runs."""
    model, prompt = sb.bayesianize(_gpt2(tied), MEMBERS), torch.randint(2, 23, (5, 4))
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
    } | options
    with quietly(), sb.fixed_draws(model):
        plains = [sb.materialize(model, draw=j) for j in range(2)]
    texts = [plain.generate(prompt, **options) for plain in plains]  # type: ignore[operator]
    assert not torch.equal(texts[0], texts[1]), (
        "the members say the same: the test shows nothing"
    )
    for _ in range(3):
        with quietly():
            found = model.generate(prompt, **options)
        rows = [
            [j for j in range(2) if torch.equal(row, texts[j][i])]
            for i, row in enumerate(found)
        ]
        assert all(rows), (
            f"rows {[i for i, fits in enumerate(rows) if not fits]} are no member's text"
        )


@pytest.mark.slow
@torch.no_grad()
def test_generate_draws_afresh_for_each_call() -> None:
    model, prompt = sb.bayesianize(_gpt2(False), RANDOM), torch.randint(2, 23, (3, 4))
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
    }
    with quietly():
        texts = {
            tuple(model.generate(prompt, **options).flatten().tolist())
            for _ in range(5)
        }
        assert len(texts) > 1
        with sb.fixed_draws(model):
            assert (
                len(
                    {
                        tuple(model.generate(prompt, **options).flatten().tolist())
                        for _ in range(3)
                    }
                )
                == 1
            )


# 1.3 Converted but not used, or used twice ----------------------------------------------------------------------------


class Past(nn.Module):
    """BEiT, SwinV2 and Mamba read weights past the layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(4, 6), nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(
            F.linear(
                x, self.fc.weight, torch.cat([self.fc.bias[:3], self.fc.bias[3:] * 2])
            )
        )
        return F.conv1d(h.unsqueeze(1), self.conv.weight, self.conv.bias).flatten(1)


@pytest.mark.parametrize(
    "method",
    [
        "rank1",
        "rank1-member",
        "batch-ensemble",
        "k-tied",
        "mean-field",
        "flipout",
        "drop-connect",
    ],
)
def test_weights_used_past_the_forward_are_drawn(method: str) -> None:
    model, x = sb.bayesianize(Past(), METHODS[method]).eval(), torch.randn(6, 4)
    check_all(model, x, draws=4)
    outputs = (
        sb.sample(model, x, draws=2)
        if method != "batch-ensemble"
        else sb.sample(model, x)
    )
    assert spread(outputs) > 1e-2
    outputs.square().sum().backward()
    posterior = {n: p for n, p in model.named_parameters() if ".posterior." in n}
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in posterior.values()
    )


@pytest.mark.parametrize("method", ["batch-ensemble", "rank1", "mean-field"])
def test_a_forward_of_the_instance_is_run_with_drawn_weights(method: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = mlp(), torch.randn(6, 4)
    for layer in (model[0], model[4]):
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    sb.bayesianize(model, METHODS[method]).eval()
    check_all(model, x, draws=4)
    assert spread(sb.sample(model, x, draws=2)) > 1e-2


class LoudLayer(nn.TransformerEncoderLayer):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stacked"),
    each(["batch-ensemble", "rank1", "mean-field", "k-tied"], [False, True]),
)
@torch.no_grad()
def test_subclasses_of_encoder_layers_draw_in_eval(method: str, stacked: bool) -> None:
    layer: nn.Module = LoudLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = sb.bayesianize(
        nn.TransformerEncoder(layer, 2) if stacked else layer, METHODS[method]
    ).eval()
    x = torch.randn(3, 5, 8)
    assert spread(sb.sample(model, x, draws=2)) > 1e-2
    check_all(model, x, draws=4)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        if tie:
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids)))


TIED = {
    "mean-field": sb.MeanField(scale_init=0.2, scale_jitter=0.0),
    "k-tied": sb.KTied(rank=2, scale_init=0.2, scale_jitter=0.0),
}


@pytest.mark.parametrize("method", TIED)
def test_tied_weights_have_one_posterior_one_draw_and_one_kl(method: str) -> None:
    model, ids = sb.bayesianize(Tied(), TIED[method]).eval(), torch.randint(9, (4, 5))
    alone = nn.Embedding(9, 6)
    alone.weight.data.copy_(model.table.weight.data)
    alone = sb.bayesianize(nn.Sequential(alone), TIED[method])
    torch.testing.assert_close(sb.kl(model), sb.kl(alone))
    count = [
        sum(p.numel() for n, p in m.named_parameters() if "posterior." in n)
        for m in (model, alone)
    ]
    assert count[0] == count[1]
    assert model.out.weight is model.table.weight
    check_all(model, ids, draws=3)
    with sb.fixed_draws(model, 3):
        plain = sb.materialize(model, draw=1)
        assert plain.out.weight is plain.table.weight
    assert sb.debayesianize(model).out.weight is model.table.weight


@pytest.mark.slow
def test_tied_weights_survive_a_checkpoint(tmp_path: Path) -> None:
    model, ids = (
        sb.bayesianize(Tied(), TIED["mean-field"]).eval(),
        torch.randint(9, (4, 5)),
    )
    base = sb.debayesianize(copy.deepcopy(model))
    sb.save(model, tmp_path / "p")
    loaded = sb.load(base, tmp_path / "p").eval()
    results = []
    for one in (model, loaded):
        torch.manual_seed(2)
        results.append(sb.sample(one, ids, draws=2))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize(
    "method", ["mean-field", "flipout", "k-tied", "drop-connect", "rank1", "ensemble"]
)
def test_padding_vectors_stay_zero(method: str) -> None:
    model = nn.Sequential(nn.Embedding(7, 5, padding_idx=2))
    sb.bayesianize(model, {"0": METHODS[method]}).eval()
    ids = torch.tensor([[2, 1, 2], [2, 2, 2], [0, 2, 6], [5, 4, 3]])
    outputs = sb.sample(model, ids, draws=3)
    assert float(outputs[:, ids == 2].detach().abs().max()) == 0
    assert float(model(ids)[ids == 2].detach().abs().max()) == 0
    check_all(model, ids, draws=4)


def test_padding_adds_nothing_to_the_kl() -> None:
    """Its scale once ran to that of the prior, and the loss with it."""
    config = sb.MeanField(scale_init=0.2, scale_jitter=0.0)
    kls = []
    for padding in (None, 2):
        table = nn.Embedding(7, 5, padding_idx=padding)
        table.weight.data.fill_(0.1)
        table.weight.data[2] = 0.0
        kls.append(float(sb.kl(sb.bayesianize(nn.Sequential(table), config)).detach()))
    row = nn.Linear(5, 1, bias=False)
    row.weight.data.zero_()
    torch.testing.assert_close(
        kls[0] - kls[1],
        float(sb.kl(sb.bayesianize(row, config)).detach()),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "method", ["mean-field", "flipout", "k-tied", "rank1", "drop-connect"]
)
def test_pruned_weights_stay_zero(method: str) -> None:
    model, x = mlp().eval(), torch.randn(6, 4)
    prune.l1_unstructured(model[0], "weight", 0.5)
    with torch.no_grad():
        model(x)
    gone = model[0].weight_mask == 0
    sb.bayesianize(model, METHODS[method])
    with torch.no_grad(), sb.fixed_draws(model, 2 * sb.members(model)):
        for plain in held(model, 2 * sb.members(model)):
            plain(x)
            assert float(plain[0].weight[gone].abs().max()) == 0  # type: ignore[index]
    check_all(model, x, draws=4)
    # An input that only pruned weights would have carried changes nothing.
    prune.custom_from_mask(
        model[0], "weight", (torch.arange(4) > 0).float().expand(8, 4)
    )
    with torch.no_grad(), quietly(), sb.fixed_draws(model, 2 * sb.members(model)):
        moved = x + torch.tensor([5.0, 0, 0, 0])
        assert_equal(sb.sample(model, moved), sb.sample(model, x))


class Noisy(nn.Module):
    """A user's own random module."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("place", ["before", "after"])
@torch.no_grad()
def test_random_modules_of_the_user_are_never_shared_between_draws(place: str) -> None:
    """Once: epistemic 1e-7 against .023."""
    parts = (
        [Noisy(), nn.Linear(4, 3)] if place == "before" else [nn.Linear(4, 3), Noisy()]
    )
    model, x = sb.bayesianize(nn.Sequential(*parts), MEMBERS).eval(), torch.zeros(5, 4)
    for run in (
        lambda: sb.sample(model, x, draws=16),
        lambda: sb.sample(model, x, draws=16, parallel=False),
        lambda: sb.predict(model, x, draws=16, likelihood="gaussian").samples,
    ):
        with quietly():
            outputs = run()
        same_member = outputs[::2]
        assert min(spread(same_member[[0, j]]) for j in range(1, 8)) > 1e-2
        assert float(same_member.std(0).mean()) > 0.2


@torch.no_grad()
def test_what_follows_a_random_module_is_not_shared_between_draws() -> None:
    model = nn.Sequential(Noisy(), nn.Linear(4, 4), nn.Linear(4, 3))
    sb.bayesianize(model, sb.BatchEnsemble(members=1), include="2").eval()
    with quietly():
        samples = sb.predict(
            model, torch.zeros(5, 4), draws=8, share=True, likelihood="gaussian"
        ).samples
        wide = sb.bayesianize(
            nn.Sequential(Noisy(), nn.Linear(4, 4), nn.Linear(4, 3)),
            {"2": sb.MeanField()},
        )
        drawn = sb.predict(
            wide, torch.zeros(5, 4), draws=8, likelihood="gaussian"
        ).samples
    for found in (samples, drawn):
        assert min(spread(found[[0, j]]) for j in range(1, 8)) > 1e-1


@torch.no_grad()
def test_random_modules_are_not_shared_between_the_picks_of_a_mixture() -> None:
    model = nn.Sequential(Noisy(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    sb.bayesianize(model, sb.ModelPatch(components=2, jitter=0.0)).eval()
    with quietly():
        samples = sb.predict(
            model, torch.zeros(5, 4), draws=16, likelihood="gaussian"
        ).samples
    assert min(spread(samples[[0, j]]) for j in range(1, 16)) > 1e-3


# 2 Crashes ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_models_that_are_on_a_device_already_predict_there(method: str) -> None:
    model = _rich().cuda()
    sb.bayesianize(model, METHODS[method])
    x = torch.randn(6, 4, device="cuda")
    assert sb.predict(model, x, draws=2).probs.is_cuda
    assert sb.sample(model, x).is_cuda and model(x).is_cuda


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m not in ("emp", "ensemble")]
)  # which copy numbers
def test_buffers_of_posteriors_follow_the_device_of_the_layer(method: str) -> None:
    """On any machine: what a conversion adds lies where the layer does."""
    model = sb.bayesianize(_rich().to("meta"), METHODS[method])
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


def _rich() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "method"),
    each(["bare", "sample", "sample-loop", "fixed", "predict"], METHODS),
)
@torch.no_grad()
def test_an_empty_batch_gives_empty_outputs_or_words(method: str, call: str) -> None:
    model, x = sb.bayesianize(_rich(), METHODS[method]).eval(), torch.randn(0, 4)
    count = sb.members(model)
    try:
        with quietly():
            if call == "bare":
                assert model(x).shape == (0, 3)
            elif call == "sample":
                assert sb.sample(model, x).shape == (count, 0, 3)
            elif call == "sample-loop":
                assert sb.sample(model, x, parallel=False).shape == (count, 0, 3)
            elif call == "fixed":
                with sb.fixed_draws(model):
                    assert sb.sample(model, x).shape == (count, 0, 3)
            else:
                assert sb.predict(model, x).probs.shape == (0, 3)
    except ValueError as error:
        in_words(error, "empty", "no rows", "0 rows", "at least one row")
    assert sb.sample(model, torch.randn(2, 4)).shape == (count, 2, 3)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        padded, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.fc(padded[torch.arange(len(lengths)), lengths - 1])


@pytest.mark.parametrize(
    "method", ["rank1", "batch-ensemble", "mean-field", "ensemble"]
)
@torch.no_grad()
def test_packed_sequences_are_predicted(method: str) -> None:
    model = sb.bayesianize(Packed(), METHODS[method]).eval()
    packed = pack_padded_sequence(
        torch.randn(4, 6, 4),
        torch.tensor([3, 6, 1, 2]),
        batch_first=True,
        enforce_sorted=False,
    )
    with quietly(), sb.fixed_draws(model, 2 * sb.members(model)):
        plains = held(model, 2 * sb.members(model))
        assert_draws(sb.sample(model, packed), plains, (packed,), {})
        assert_draws(
            sb.predict(model, packed, likelihood="gaussian").samples,
            plains,
            (packed,),
            {},
        )
    with quietly():
        assert sb.predict(model, packed, draws=3).probs.shape == (4, 3)


@pytest.mark.parametrize("method", METHODS)
def test_functional_call_takes_detached_parameters(method: str) -> None:
    model, x = sb.bayesianize(_rich(), METHODS[method]).eval(), torch.randn(6, 4)
    state = {
        n: t.detach().clone()
        for n, t in (*model.named_parameters(), *model.named_buffers())
    }
    outputs = []
    for run in (
        lambda: model(x),
        lambda: torch.func.functional_call(model, state, (x,)),
    ):
        torch.manual_seed(1)
        outputs.append(run())
    assert_equal(outputs[1], outputs[0])
    changed = state | {
        n: t * 0
        for n, t in state.items()
        if n.endswith("4.weight") or n.endswith("4.bias")
    }
    if method in (
        "rank1",
        "batch-ensemble",
    ):  # members' offsets of the bias start at zero
        assert (
            float(torch.func.functional_call(model, changed, (x,)).detach().abs().max())
            == 0
        )


@torch.no_grad()
def test_vmap_runs_over_an_ensemble() -> None:
    model, xs = net(METHODS["ensemble"]), torch.randn(5, 4, 4)
    with sb.fixed_draws(model):
        plains = [sb.materialize(model, draw=j) for j in range(2)]
    outputs = torch.vmap(lambda x: model(x), randomness="different")(xs)
    for x, output in zip(xs, outputs):
        assert all(draws_of_rows(output, [plain(x) for plain in plains], 0))


@pytest.mark.parametrize("method", [sb.Rank1, sb.MeanField, sb.Ensemble])
def test_a_class_in_place_of_a_config_is_refused_in_words(method: Any) -> None:
    model = mlp()
    with pytest.raises((TypeError, ValueError), match=rf"{method.__name__}\("):
        sb.bayesianize(model, method)
    with pytest.raises((TypeError, ValueError), match=rf"{method.__name__}\("):
        sb.bayesianize(model, {".*": method})
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    "make",
    [
        lambda: sb.Rank1(prior=0.1),
        lambda: sb.MeanField(prior=0.1),
        lambda: sb.KTied(prior=1.0),
    ],
    ids=["rank1", "mean-field", "k-tied"],
)
def test_a_number_in_place_of_a_prior_is_refused_in_words(
    make: Callable[[], Any],
) -> None:
    with pytest.raises((TypeError, ValueError), match=r"(?s)prior.*Normal"):
        make()


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "numpy": lambda x, y: x.numpy(),
    "numpy-reversed": lambda x, y: np.ascontiguousarray(x.numpy()[::-1])[
        ::-1
    ],  # with negative strides
    "dataset": lambda x, y: TensorDataset(x, y),
    "dataset-of-inputs": lambda x, y: TensorDataset(x),
    "subset": lambda x, y: torch.utils.data.Subset(TensorDataset(x, y), range(len(x))),
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=3),
    "loader-of-inputs": lambda x, y: DataLoader(TensorDataset(x), batch_size=3),
    "generator": lambda x, y: (part for part in x.split(3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_and_data_sets_are_predicted(form: str) -> None:
    model, x, y = net(), torch.randn(10, 4), torch.randint(3, (10,))
    assert_equal(sb.predict(model, FORMS[form](x, y)).probs, sb.predict(model, x).probs)


class Variational(nn.Module):
    """Users have posteriors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.posterior = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.posterior(x))


@pytest.mark.parametrize(
    ("method", "base"), each(["rank1", "mean-field", "batch-ensemble"], [False, True])
)
def test_a_module_called_posterior_is_saved_and_loaded(
    method: str, base: bool, tmp_path: Path
) -> None:
    model, x = sb.bayesianize(Variational(), METHODS[method]).eval(), torch.randn(6, 4)
    fresh = sb.debayesianize(copy.deepcopy(model))
    sb.save(model, tmp_path / "p", base=base)
    loaded = sb.load(fresh, tmp_path / "p").eval()
    results = []
    for one in (model, loaded):
        torch.manual_seed(1)
        results.append(sb.sample(one, x))
    assert_equal(results[1], results[0])
    groups = {id(p) for p in model.posterior[0].posterior.parameters()}
    assert id(model.posterior[0].weight) not in groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "style"),
    pairwise(
        ["mean-field", "flipout", "k-tied", "rank1", "drop-connect"],
        ["weight_norm", "spectral_norm"],
        ["old", "new"],
    ),
)
def test_normalised_weights_are_drawn(method: str, kind: str, style: str) -> None:
    home = torch.nn.utils if style == "old" else torch.nn.utils.parametrizations
    model, x = mlp().eval(), torch.randn(6, 4)
    with quietly():
        model[0] = getattr(home, kind)(model[0]).eval()
        model[4] = getattr(home, kind)(model[4]).eval()
    with torch.no_grad():
        plain = model(x)
    sb.bayesianize(model, METHODS[method])
    assert {row.status for row in sb.summary(model).rows if row.name in ("0", "4")} == {
        "converted"
    }
    outputs = sb.sample(model, x, draws=3)
    assert spread(outputs.detach()) > 1e-3
    outputs.square().sum().backward()
    trained = [p for n, p in model.named_parameters() if ".posterior." in n]
    assert method == "drop-connect" or trained  # which has no parameters of its own
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained)
    with torch.no_grad():
        model(
            x
        )  # leaves computed weights without a graph, so that the model can be copied
        check_all(model, x, draws=4)
        assert_equal(sb.debayesianize(model)(x), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    each(
        ["mean-field", "flipout", "k-tied", "rank1"], ["weight_norm", "spectral_norm"]
    ),
)
def test_old_style_norms_train(method: str, kind: str) -> None:
    """Their weight is what a hook last computed, with its graph: they train for several steps all the same."""
    model, x, y = mlp(), torch.randn(6, 4), torch.randint(3, (6,))
    with quietly():
        for place in (0, 4):
            model[place] = getattr(torch.nn.utils, kind)(model[place])
    sb.bayesianize(model, METHODS[method])
    own = model[0].weight_v if kind == "weight_norm" else model[0].weight_orig
    before = own.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        sb.elbo(
            sb.categorical(sb.sample(model, x), y), model, num_data=6
        ).loss.backward()
        optimizer.step()
    assert not torch.equal(own, before)
    assert sb.predict(model, x, draws=2).probs.isfinite().all()
    copy.deepcopy(model)(x)


def test_unequal_members_are_stacked_or_refused_in_words() -> None:
    config = {
        "0": sb.Ensemble(members=2, init="copies", jitter=0.5),
        "4": sb.Ensemble(members=3, init="copies", jitter=0.5),
    }
    model, x, y = (
        sb.bayesianize(mlp(), config),
        torch.randn(20, 4),
        torch.randint(3, (20,)),
    )
    try:
        weights = sb.stack(model, x, y)
    except ValueError as error:
        in_words(error, "members")
    else:
        assert all(
            float(w.sum()) == pytest.approx(1, abs=1e-4) for w in weights.values()
        )
    assert sb.predict(model, x).probs.shape == (20, 3)


def _image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "images"), [("ensemble", 0), (next(iter(METHODS)), 1)]
)
def test_export_with_a_dynamic_batch(method: str, images: int) -> None:
    make, shape = (_image_net, (2, 6, 6)) if images else (_rich, (4,))
    model = sb.bayesianize(make(), METHODS[method]).eval()
    model(torch.randn(6, *shape))  # rows are located on real inputs
    # torch.export treats sizes of one apart, also those of an ensemble member's share of the rows.
    fewest = 3 if method == "ensemble" else 2
    batch = torch.export.Dim("batch", min=fewest, max=64)
    exported = torch.export.export(
        model, (torch.randn(6, *shape),), dynamic_shapes=({0: batch},)
    ).module()
    for rows in (fewest, 5, 6, 13):
        x = torch.randn(rows, *shape)
        with torch.no_grad():
            outputs = [exported(x) for _ in range(6)]
        assert all(
            out.shape == (rows, 3) and bool(out.isfinite().all()) for out in outputs
        )
        assert spread(torch.stack(outputs)) > 1e-4, "the exported model draws nothing"


@pytest.mark.slow
@torch.no_grad()
def test_an_exported_ensemble_gives_each_row_one_member() -> None:
    for method in ("ensemble", "batch-ensemble"):
        model = net(METHODS[method])
        with sb.fixed_draws(model):
            plains = [sb.materialize(model, draw=j) for j in range(2)]
        model(torch.randn(6, 4))
        exported = torch.export.export(
            model,
            (torch.randn(6, 4),),
            dynamic_shapes=({0: torch.export.Dim("batch", min=3, max=64)},),
        ).module()
        for rows in (3, 5, 9):
            x = torch.randn(rows, 4)
            assert all(draws_of_rows(exported(x), [plain(x) for plain in plains], 0)), (
                method,
                rows,
            )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b((h if mask is None else h * mask.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize("form", ["loader", "list", "dataset"])
@torch.no_grad()
def test_a_mask_in_the_batch_is_never_dropped_in_silence(form: str) -> None:
    model = sb.bayesianize(Masked(), MEMBERS).eval()
    x, mask, y = torch.randn(10, 5, 4), torch.rand(10, 5) > 0.5, torch.randint(3, (10,))
    dataset = TensorDataset(x, mask, y)
    data: Any = {
        "loader": DataLoader(dataset, batch_size=4),
        "list": iter([(x, mask, y)]),
        "dataset": dataset,
    }[form]
    try:
        predicted = sb.predict(model, data).probs
    except (ValueError, TypeError) as error:
        in_words(error, "three", "3 ", "tuple", "targets")
        return
    assert_equal(predicted, sb.predict(model, (x, mask)).probs)


@torch.no_grad()
def test_a_named_batch_with_a_mask_is_served() -> None:
    model = sb.bayesianize(Masked(), MEMBERS).eval()
    x, mask = torch.randn(10, 5, 4), torch.rand(10, 5) > 0.5
    loader = DataLoader([{"x": a, "mask": b} for a, b in zip(x, mask)], batch_size=4)
    assert_equal(sb.predict(model, loader).probs, sb.predict(model, (x, mask)).probs)
