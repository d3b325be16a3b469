"""Models nobody here wrote: transformers' BERT, GPT-2, ViT and ResNet, torch's transformers, and an LSTM classifier.

All are tiny and random, so nothing is downloaded. Sizes: B rows, L tokens, S draws, K members, C classes.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import each, pairwise
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

# torch says so of every sequence-first nn.Transformer.
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True:UserWarning"
)

B, L, C, WORDS = 3, 5, 4, 24


class LSTMClassifier(nn.Module):
    """Token ids (B, L) to logits (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0].mean(1))


# A wide initialisation: at the default 0.02 attention is flat, and a query's factors would hardly reach the output.
def bert(**options: Any) -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16, num_labels=C, initializer_range=0.3, **options,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(**options: Any) -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 16,
        "initializer_range": 0.3,
    }
    return GPT2LMHeadModel(
        GPT2Config(
            **sizes,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            use_cache=False,
            **options,
        )
    )


def vit(**options: Any) -> nn.Module:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4,
        num_channels=options.pop("num_channels", 3), num_labels=options.pop("num_labels", C), initializer_range=0.3,
        **options,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet() -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
            num_labels=C,
        )
    )


def seq2seq(batch_first: bool) -> nn.Module:
    return nn.Transformer(32, 4, 1, 1, 48, batch_first=batch_first)


def encoder(batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=batch_first)


def padding() -> Tensor:
    mask = torch.ones(B, L, dtype=torch.long)
    mask[0, 3:] = 0
    return mask


def tokens() -> Tensor:
    return torch.randint(1, WORDS, (B, L))


@dataclass
class Case:
    """A model and an input for it."""

    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]] = tuple
    kwargs: Callable[[], dict[str, Any]] = dict
    batch_dim: int = 0
    keys: tuple[str, ...] = field(
        default=("key", "k_proj", "posterior.k")
    )  # attention ignores a shift of all keys

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args(), self.kwargs()

    def convert(self, model: nn.Module, config: sb.Config) -> nn.Module:
        return sb.bayesianize(model, config, batch_dim=self.batch_dim)


CASES: dict[str, Case] = {
    "bert": Case(
        bert, kwargs=lambda: {"input_ids": tokens(), "attention_mask": padding()}
    ),
    "gpt2": Case(
        gpt2, kwargs=lambda: {"input_ids": tokens(), "attention_mask": padding()}
    ),
    "vit": Case(vit, kwargs=lambda: {"pixel_values": torch.randn(B, 3, 8, 8)}),
    "resnet": Case(resnet, kwargs=lambda: {"pixel_values": torch.randn(B, 3, 16, 16)}),
    "seq2seq": Case(
        partial(seq2seq, True),
        lambda: (torch.randn(B, L, 32), torch.randn(B, L - 1, 32)),
    ),
    "seq2seq-sequence-first": Case(
        partial(seq2seq, False),
        lambda: (torch.randn(L, B, 32), torch.randn(L - 1, B, 32)),
        batch_dim=1,
    ),
    "encoder": Case(
        encoder,
        lambda: (torch.randn(B, L, 32),),
        lambda: {"src_key_padding_mask": padding() == 0},
    ),
    "lstm": Case(LSTMClassifier, lambda: (tokens(),)),
}
METHODS: dict[str, sb.Config] = {
    "normal": sb.Rank1(members=2),
    "cauchy": sb.Rank1(members=2, prior=sb.Cauchy(1.0, 0.1)),
    "member": sb.Rank1(members=2, draws="member"),
    "batchensemble": sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0)),
}
every_model = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# Every model with two methods, every method with half of the models.
every_pair = pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, method, id=f"{one}-{other}")
        for i, (one, case) in enumerate(CASES.items())
        for j, (other, method) in enumerate(METHODS.items())
        if (i + j) % 4 < 2
    ],
)


def main(output: Any) -> Tensor:
    """The tensor of predictions in what a model returns."""
    return output if isinstance(output, Tensor) else output.logits


def plain_output(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """What a plain model computes, without torch's fused encoder path: that one writes zeros at padded positions."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return main(model(*args, **kwargs))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def neutral(model: nn.Module) -> nn.Module:
    """All factors at one, with scales at their floor of 1e-7."""
    with torch.no_grad():
        for posterior in posteriors_of(model):
            for factor in (posterior.r, posterior.s):
                factor.loc.fill_(1.0)
                if hasattr(factor, "rho"):
                    factor.rho.fill_(-40.0)
    return model


def scatter(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """Means and bias offsets that differ between members, as after training."""
    with torch.no_grad():
        for posterior in posteriors_of(model):
            for name, parameter in posterior.named_parameters():
                if not name.endswith("rho"):
                    parameter.add_(scale * torch.randn_like(parameter))
    return model


def layers_of(model: nn.Module) -> dict[str, BayesLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, BayesLayer)}


# ---- the function is kept, and every layer takes part ----------------------------------------------------------------


@pytest.mark.slow
@every_pair
def test_neutral_factors_leave_the_function_as_it_was(
    case: Case, method: sb.Config
) -> None:
    model, (args, kwargs) = case.build().eval(), case.inputs()
    # A Cauchy draw at the scale floor still leaves a few factors off by 1e-7 times its tail.
    tolerance = {"cauchy": 2e-3, "normal": 2e-5}.get(
        getattr(method, "family", ""), 2e-6
    )
    expected = plain_output(model, args, kwargs)
    neutral(case.convert(model, method))
    with torch.no_grad():
        bare, drawn = (
            main(model(*args, **kwargs)),
            main(sb.sample(model, *args, **kwargs)),
        )
    assert drawn.shape == (2, *expected.shape)
    torch.testing.assert_close(bare, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        drawn, expected.expand_as(drawn), atol=tolerance, rtol=tolerance
    )


@pytest.mark.slow
@every_pair
def test_every_posterior_reaches_the_output_in_eval(
    case: Case, method: sb.Config
) -> None:
    """torch's fused paths in eval mode read weights past the layers' forward: each posterior alone must show."""
    model, (args, kwargs) = case.convert(case.build().eval(), method), case.inputs()
    silent = []
    with torch.no_grad():
        for posterior in posteriors_of(neutral(model)):
            factor = posterior.r
            moved = factor.rho if hasattr(factor, "rho") else factor.loc
            before = moved.clone()
            moved[-1] = (
                0.0 if hasattr(factor, "rho") else 1.0 + torch.rand_like(moved[-1])
            )  # the last member alone
            first, second = main(sb.sample(model, *args, draws=4, **kwargs)).split(
                2
            )  # two draws of each member
            changed = (
                (first[-1] - (second[-1] if hasattr(factor, "rho") else first[0]))
                .abs()
                .max()
            )
            kept = (first[0] - second[0]).abs().max()
            if (
                changed < 1e-3 or kept > changed / 20
            ):  # a Cauchy draw strays a little even at the scale floor
                silent.append((posterior.name, changed.item(), kept.item()))
            moved.copy_(before)
    assert not silent


@pytest.mark.slow
@every_pair
def test_every_posterior_parameter_gets_the_right_gradient(
    case: Case, method: sb.Config
) -> None:
    model, (args, kwargs) = case.build().double().eval(), case.inputs()
    args, kwargs = pytree.tree_map(
        lambda t: t.double() if t.is_floating_point() else t, (args, kwargs)
    )
    scatter(case.convert(model, method), 0.1)
    weight: dict[str, Tensor] = {}

    def loss() -> Tensor:
        torch.manual_seed(1)
        out = main(sb.sample(model, *args, **kwargs))
        return (out * weight.setdefault("w", torch.randn_like(out))).sum()

    loss().backward()
    parameters = {n: p for n, p in model.named_parameters() if ".posterior." in n}
    assert parameters
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not (name.endswith("bias") and any(key in name for key in case.keys)):
            assert (parameter.grad.flatten(1).abs().amax(1) > 1e-9).all(), (
                f"{name}: a member has no gradient"
            )
    # One directional derivative over all of them, against a central difference with the same noise.
    step, values = 1e-6, list(parameters.values())
    direction = [torch.randn_like(p) for p in values]
    expected = sum((p.grad * d).sum() for p, d in zip(values, direction, strict=True))
    with torch.no_grad():
        torch._foreach_add_(values, direction, alpha=step)
        above = loss()
        torch._foreach_add_(values, direction, alpha=-2 * step)
        slope = (above - loss()) / (2 * step)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-6)


# ---- sample and predict ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_model
def test_folded_draws_equal_one_forward_per_member(case: Case) -> None:
    model, (args, kwargs) = case.build().eval(), case.inputs()
    scatter(case.convert(model, METHODS["batchensemble"]))
    with torch.no_grad():
        folded, looped = (
            main(sb.sample(model, *args, parallel=parallel, **kwargs))
            for parallel in (True, False)
        )
    assert (folded[0] - folded[1]).abs().max() > 1e-2
    torch.testing.assert_close(folded, looped, atol=1e-5, rtol=1e-4)


def plain_output_of(
    model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Everything the plain model returns."""
    return sb.debayesianize(model)(**batch, **options)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_sample_keeps_the_output_type_and_adds_the_draws_axis_to_every_tensor(
    parallel: bool,
) -> None:
    plain = bert(attn_implementation="eager").eval()
    options = {"output_hidden_states": True, "output_attentions": True}
    batch = CASES["bert"].kwargs() | {"labels": torch.tensor([0, 1, 2])}
    expected = plain(**batch, **options)
    model = sb.bayesianize(plain, METHODS["normal"])
    if parallel:  # a loss has no rows: every draw has its own, which folded draws could not tell apart
        with pytest.raises(
            ValueError,
            match="output 0, which has no rows, mixes rows of different draws",
        ):
            sb.sample(model, **batch, **options, draws=6, parallel=True)
        del batch["labels"]
        expected = plain_output_of(copy.deepcopy(model), batch, options)
    drawn = sb.sample(model, **batch, **options, draws=6, parallel=parallel)
    if not parallel:
        assert drawn.loss.shape == (6,) and len(drawn.loss.unique()) == 6
    assert type(drawn) is type(expected)
    assert drawn.keys() == expected.keys()
    assert len(drawn.attentions) == 1
    assert len(drawn.hidden_states) == 2
    shapes = [leaf.shape for leaf in pytree.tree_leaves(drawn)]
    assert shapes == [(6, *leaf.shape) for leaf in pytree.tree_leaves(expected)]


def test_sample_keeps_tuples_and_dicts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Mapping[str, Tensor]) -> Any:
            y = self.fc(x["a"])
            return {"mean": y, "parts": (y + x["b"], "label")}

    model = sb.bayesianize(Two(), METHODS["normal"])
    out = sb.sample(model, {"a": torch.randn(3, 4), "b": torch.randn(3, 1)}, draws=4)
    assert out["mean"].shape == (4, 3, 2)
    assert out["parts"][1] == "label"
    assert isinstance(out["parts"], tuple)
    assert out["parts"][0].shape == (4, 3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "name"), each([dict, BatchEncoding], ["bert", "gpt2", "vit", "resnet"])
)
def test_predict_takes_the_batches_of_transformers(name: str, wrap: type) -> None:
    case = CASES[name]
    model, batch = (
        scatter(case.convert(case.build(), METHODS["batchensemble"])),
        case.kwargs(),
    )
    with torch.no_grad():
        expected = sb.sample(model.eval(), **batch).logits.softmax(-1)
    model.train()
    pred = sb.predict(model, wrap(batch))
    assert model.training
    torch.testing.assert_close(pred.probs, expected.mean(0))
    torch.testing.assert_close(pred.member_probs, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_predict_takes_loaders_of_dicts_and_of_pairs() -> None:
    model = scatter(sb.bayesianize(bert().eval(), METHODS["batchensemble"]))
    rows = [
        {"input_ids": torch.randint(1, WORDS, (L,)), "labels": torch.tensor(i % C)}
        for i in range(5)
    ]
    with torch.no_grad():
        expected = (
            sb.sample(model, torch.stack([r["input_ids"] for r in rows]))
            .logits.softmax(-1)
            .mean(0)
        )
    torch.testing.assert_close(
        sb.predict(model, DataLoader(rows, batch_size=2)).probs, expected
    )

    model = scatter(sb.bayesianize(vit().eval(), METHODS["batchensemble"]))
    x, y = torch.randn(5, 3, 8, 8), torch.arange(5) % C
    with torch.no_grad():
        expected = sb.sample(model, x).logits.softmax(-1).mean(0)
    torch.testing.assert_close(
        sb.predict(model, DataLoader(TensorDataset(x, y), batch_size=2)).probs, expected
    )


@pytest.mark.parametrize("wrap", [dict, BatchEncoding])
def test_predict_chunks_the_batches_of_transformers(wrap: type) -> None:
    model, seen = sb.bayesianize(bert(), METHODS["normal"]), []
    model.bert.encoder.layer[0].register_forward_hook(
        lambda m, args, out: seen.append(args[0].shape[0])
    )
    batch = {"input_ids": torch.randint(1, WORDS, (6, L))}
    assert sb.predict(model, wrap(batch), draws=4, chunk=4).probs.shape == (
        6,
        C,
    )  # the first call also locates rows
    seen.clear()
    assert sb.predict(model, wrap(batch), draws=4, chunk=4).probs.shape == (6, C)
    assert max(seen) <= 4
    assert sum(seen) == 6 * 2 * 2


# ---- layouts of torch's transformers ---------------------------------------------------------------------------------


def test_sequence_first_encoder_takes_a_padding_mask() -> None:
    model = scatter(
        sb.bayesianize(encoder(False).eval(), METHODS["batchensemble"], batch_dim=1)
    )
    x, mask = torch.randn(L, B, 32), padding() == 0
    with torch.no_grad():
        folded, looped = (
            sb.sample(model, x, src_key_padding_mask=mask, parallel=parallel)
            for parallel in (True, False)
        )
    torch.testing.assert_close(folded, looped, atol=1e-5, rtol=1e-4)


def test_causal_mask_of_as_many_tokens_as_rows_is_no_batch() -> None:
    model = scatter(sb.bayesianize(encoder().eval(), METHODS["batchensemble"]))
    x, mask = torch.randn(L, L, 32), nn.Transformer.generate_square_subsequent_mask(L)
    with torch.no_grad():
        folded, looped = (
            sb.sample(model, x, mask=mask, parallel=parallel)
            for parallel in (True, False)
        )
    torch.testing.assert_close(folded, looped, atol=1e-5, rtol=1e-4)


def test_undeclared_sequence_first_layout_is_never_silently_wrong() -> None:
    model = scatter(sb.bayesianize(encoder(False).eval(), METHODS["batchensemble"]))
    x = torch.randn(L, B, 32)
    with torch.no_grad():
        looped = sb.sample(model, x, parallel=False)
        with contextlib.suppress(
            ValueError
        ):  # a refusal is as good as the right answer
            torch.testing.assert_close(
                sb.sample(model, x), looped, atol=1e-5, rtol=1e-4
            )


# ---- ties, shared modules and skipped layers -------------------------------------------------------------------------


@pytest.mark.slow
def test_gpt2_weights_stay_tied(tmp_path: Path) -> None:
    def tied(model: nn.Module) -> bool:
        return model.lm_head.weight is model.transformer.wte.weight

    plain = gpt2().eval()
    model = scatter(sb.bayesianize(copy.deepcopy(plain), METHODS["normal"]))
    assert tied(plain)
    assert tied(model)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(
            1.5
        )  # trained since: only the checkpoint knows
    ids = tokens()
    sb.sample(model, ids)
    again, loaded = (
        copy.deepcopy(model),
        sb.load(plain, sb.save(model, tmp_path / "posterior", base=True)),
    )
    for other in (again, loaded):
        assert tied(other)
        assert other.lm_head.weight is not model.lm_head.weight
        outputs = []
        for net in (model, other):
            torch.manual_seed(3)
            outputs.append(sb.sample(net, ids).logits)
        torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "embeddings"), [("gpt2", 2), ("bert", 3), ("lstm", 1)]
)
def test_embeddings_are_skipped_and_the_summary_says_so(
    name: str, embeddings: int
) -> None:
    case = CASES[name]
    model = case.build()
    count = sum(p.numel() for p in model.parameters())
    report = sb.summary(case.convert(model, METHODS["normal"]))
    rows = [r for r in report.rows if r.layer == "Embedding"]
    assert len(rows) == embeddings
    assert all(r.status == "skipped" and "embeddings" in r.detail for r in rows)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    assert all([n for n, _ in m.named_parameters()] == ["weight"] for m in tables)
    assert report.before == count
    assert report.after == sum(p.numel() for p in model.parameters())
    lines = {line.split()[0]: line for line in str(report).splitlines()}
    assert all("skipped" in lines[r.name] and r.detail in lines[r.name] for r in rows)


@pytest.mark.parametrize(
    ("method", "call"),
    each(["normal", "cauchy", "member"], ["bare", "sample", "fixed"]),
)
def test_a_module_called_twice_sees_one_draw(method: str, call: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), self.fc(x)

    model = sb.bayesianize(Twice(), METHODS[method])
    x = torch.randn(1, 4).expand(
        6, 4
    )  # equal rows: what differs between them is the draw
    if call == "bare":
        first, second = model(x)
    elif call == "sample":
        first, second = sb.sample(model, x)
    else:
        with sb.fixed_draws(model):
            first, second = sb.sample(model, x)
    assert torch.equal(first, second)
    rows = first.reshape(-1, 3)
    distinct = len(torch.unique(rows, dim=0))
    per_row = method != "member" and call != "fixed"
    assert distinct == (len(rows) if per_row else 2)


# ---- what a conversion must not disturb ------------------------------------------------------------------------------


@pytest.mark.slow
@every_pair
def test_base_checkpoint_loads_into_the_converted_model(
    case: Case, method: sb.Config
) -> None:
    donor, model = case.build().eval(), case.convert(case.build().eval(), method)
    missing, unexpected = model.load_state_dict(donor.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(".posterior." in name for name in missing)
    assert set(missing) == {n for n in model.state_dict() if ".posterior." in n}
    args, kwargs = case.inputs()
    if isinstance(method, sb.BatchEnsemble):
        with torch.no_grad():
            torch.testing.assert_close(
                main(model(*args, **kwargs)),
                plain_output(donor, args, kwargs),
                atol=2e-6,
                rtol=2e-6,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
@every_model
def test_dtype_survives(case: Case, dtype: torch.dtype, wide: torch.dtype) -> None:
    model, (args, kwargs) = case.build().to(dtype).eval(), case.inputs()
    before = copy.deepcopy(model.state_dict())
    args, kwargs = pytree.tree_map(
        lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
    )
    expected = plain_output(model, args, kwargs)
    with torch.no_grad():
        out = main(
            sb.sample(neutral(case.convert(model, METHODS["normal"])), *args, **kwargs)
        )
    after = model.state_dict()
    assert all(
        torch.equal(after[n], t) and after[n].dtype == t.dtype
        for n, t in before.items()
    )
    assert {p.dtype for q in posteriors_of(model) for p in q.parameters()} == {wide}
    assert out.dtype == dtype
    error = {torch.float64: 1e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(out, expected.expand_as(out), atol=error, rtol=error)


@pytest.mark.slow
@every_model
def test_flags_hooks_and_types_survive_and_debayesianize_gives_everything_back(
    case: Case,
) -> None:
    model, (args, kwargs) = case.build().train(), case.inputs()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 == 0)
    last = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LSTM))][-1]
    last.eval()
    fired: list[str] = []
    last.register_forward_hook(lambda *_: fired.append("layer"))
    model.register_forward_pre_hook(lambda *_: fired.append("root before"))
    model.register_forward_hook(lambda *_: fired.append("root after"))

    def facts() -> list[Any]:
        return [
            [
                (n, p.requires_grad, p.dtype, id(p))
                for n, p in model.named_parameters()
                if ".posterior." not in n
            ],
            [(n, m.training) for n, m in model.named_modules() if "posterior" not in n],
        ]

    before, types, keys = (
        facts(),
        {n: type(m) for n, m in model.named_modules()},
        list(model.state_dict()),
    )
    torch.manual_seed(5)
    expected = main(model(*args, **kwargs))
    state = copy.deepcopy(
        model.state_dict()
    )  # after the batch norms have seen the batch
    expected_fired, fired[:] = list(fired), []

    case.convert(model, METHODS["normal"])
    assert facts() == before
    assert all(p.requires_grad for q in posteriors_of(model) for p in q.parameters())
    assert all(
        q.training == layer.training
        for layer in layers_of(model).values()
        for q in layer.posteriors()
    )
    for name, layer in layers_of(model).items():
        assert isinstance(layer, types[name])
        assert type(layer) is not types[name]
    with torch.random.fork_rng(), torch.no_grad():
        sb.sample(model, *args, **kwargs)  # the first call also locates rows
    fired.clear()
    main(sb.sample(model, *args, **kwargs)).sum().backward()
    assert fired == expected_fired
    assert set(fired) == {"layer", "root before", "root after"}
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())

    model.load_state_dict(state, strict=False)
    fired.clear()
    assert sb.debayesianize(model) is model
    assert facts() == before
    assert list(model.state_dict()) == keys
    assert {n: type(m) for n, m in model.named_modules()} == types
    torch.manual_seed(5)
    torch.testing.assert_close(main(model(*args, **kwargs)), expected, rtol=0, atol=0)
    assert fired == expected_fired


@pytest.mark.slow
@every_model
def test_converted_model_survives_deepcopy_and_an_exact_round_trip(
    case: Case, tmp_path: Path
) -> None:
    plain, (args, kwargs) = case.build().eval(), case.inputs()
    model = scatter(case.convert(copy.deepcopy(plain), METHODS["normal"]))
    sb.sample(model, *args, **kwargs)
    outputs = []
    for other in (
        model,
        copy.deepcopy(model),
        sb.load(plain, sb.save(model, tmp_path / "posterior")),
    ):
        torch.manual_seed(2)
        with torch.no_grad():
            outputs.append(main(sb.sample(other, *args, **kwargs)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# ---- training loops --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vit_learns_the_digits() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y = torch.tensor(data.target)
    model = sb.bayesianize(
        vit(num_channels=1, num_labels=10), sb.Rank1(members=2, scale_init=0.05)
    )
    start = [p.detach().clone() for q in posteriors_of(model) for p in q.parameters()]
    optimizer = torch.optim.AdamW(
        sb.param_groups(model, weight_decay=1e-4, lr=6e-3), lr=6e-3
    )
    divergence = sb.kl(model).item()
    for _ in range(50):
        rows = torch.randint(0, 1400, (64,))
        terms = sb.elbo(
            sb.categorical(sb.sample(model, x[rows]).logits, y[rows]),
            model,
            num_data=1400,
        )
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
    pred = sb.predict(model, x[1400:], draws=4)
    accuracy = (pred.label == y[1400:]).float().mean().item()
    assert accuracy > 0.7, accuracy  # chance is 0.1; .77 to .83 with four other seeds
    assert (
        torch.nn.functional.nll_loss(pred.probs.log(), y[1400:]) < 1.0
    )  # chance is 2.3
    moved = [p for q in posteriors_of(model) for p in q.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(start, moved, strict=True))
    assert sb.kl(model).item() != divergence
    # What it has never seen leaves the members less agreed than what it has.
    assert (
        sb.predict(model, torch.randn(200, 1, 8, 8), draws=4).epistemic.mean()
        > pred.epistemic.mean()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_trainer_trains_with_the_kl_in_the_loss(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [
        {"input_ids": torch.randint(1, WORDS, (L,)), "labels": torch.tensor(i % C)}
        for i in range(8)
    ]
    losses: list[tuple[float, float]] = []

    class VariationalTrainer(Trainer):
        def compute_loss(
            self,
            model: nn.Module,
            inputs: Any,
            return_outputs: bool = False,
            **kwargs: Any,
        ) -> Any:
            out = model(**inputs)
            terms = sb.elbo(out.loss, model, num_data=len(rows))
            losses.append((out.loss.item(), terms.loss.item()))
            return (terms.loss, out) if return_outputs else terms.loss

    model = sb.bayesianize(bert(), METHODS["normal"])
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", max_grad_norm=0.0,
    )  # fmt: skip
    optimizer = torch.optim.SGD(sb.param_groups(model), lr=1e-2)
    VariationalTrainer(
        model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None)
    ).train()
    assert (
        len(losses) == 12
    )  # with a loss among its outputs a call trains one member: the second had its turn, but for one time in 4096
    assert all(total > nll for nll, total in losses)
    still = [n for n, p in model.named_parameters() if torch.equal(p, start[n])]
    # Attention ignores a shift of all keys, so their biases move by rounding at most.
    assert not [n for n in still if not ("key" in n and n.endswith("bias"))]


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


def posterior_gradients(
    model: nn.Module, loss: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(7)
    value = loss()
    value.backward()
    return value.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if ".posterior." in n
    }


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(found[0], expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name],
            gradient,
            atol=1e-5,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


LOSSES: dict[str, Callable[[nn.Module, dict[str, Tensor]], Tensor]] = {
    "bare": lambda model, batch: model(**batch).logits.square().mean(),
    "folded": lambda model, batch: sb.sample(model, **batch).logits.square().mean(),
    "split": lambda model, batch: (
        sb.sample(model, **batch, rows="split").logits.square().mean()
    ),
    "looped": lambda model, batch: (
        sb.sample(model, **batch, parallel=False).logits.square().mean()
    ),
    "two passes": lambda model, batch: (
        sb.sample(model, **batch).logits * sb.sample(model, **batch).logits
    ).mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "loss"), pairwise(["bert", "gpt2"], ["normal", "member"], LOSSES)
)
def test_gradient_checkpointing_recomputes_the_same_draw(
    name: str, method: str, loss: str
) -> None:
    case = CASES[name]
    model = scatter(
        case.convert(case.build().train(), METHODS[method])
    )  # dropout stays on: its noise must not be disturbed
    batch = {
        "input_ids": torch.randint(1, WORDS, (4, L)),
        "attention_mask": torch.ones(4, L, dtype=torch.long),
    }
    expected = posterior_gradients(model, lambda: LOSSES[loss](model, batch))
    calls: list[int] = []
    block = (
        model.bert.encoder.layer[0].output.dense
        if name == "bert"
        else model.transformer.h[0].mlp.c_fc
    )
    block.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    for _ in range(
        5
    ):  # a flag has changed: rows are located again, and looked at in some of the next calls
        LOSSES[loss](model, batch)
    calls.clear()
    found = posterior_gradients(model, lambda: LOSSES[loss](model, batch))
    assert len(calls) == 2 * {"looped": 2, "two passes": 2}.get(
        loss, 1
    )  # once forward and once more in backward
    assert_same(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["normal", "batchensemble"])
def test_checkpoint_around_a_block_of_an_mlp(method: str, reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.saving = nn.Linear(4, 8), nn.Linear(8, 3), False
            self.block = nn.Sequential(
                nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8)
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.last(
                checkpoint(self.block, h, use_reentrant=reentrant)
                if self.saving
                else self.block(h)
            )

    model, x = scatter(sb.bayesianize(Net(), METHODS[method])), torch.randn(6, 4)
    expected = posterior_gradients(model, lambda: sb.sample(model, x).square().mean())
    model.saving = True
    assert_same(
        posterior_gradients(model, lambda: sb.sample(model, x).square().mean()),
        expected,
    )


# ---- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_is_reproducible_under_a_fixed_draw() -> None:
    model = sb.bayesianize(gpt2().eval(), sb.Rank1(members=1, scale_init=0.3))
    ids = torch.randint(1, WORDS, (2, 3))
    options = {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    texts = []
    with torch.no_grad():
        for _ in range(4):
            with sb.fixed_draws(model, 1):
                cached, again = (
                    model.generate(ids, **options, use_cache=True) for _ in range(2)
                )
                byhand = ids
                for _ in range(
                    6
                ):  # the same draw without a cache, one greedy token after another
                    scores = sb.sample(model, byhand).logits[0, :, -1]
                    scores[:, 0] = -torch.inf  # min_new_tokens forbids the end token
                    byhand = torch.cat([byhand, scores.argmax(-1, keepdim=True)], 1)
            assert torch.equal(cached, again)
            assert torch.equal(cached, byhand)
            texts.append(cached)
    assert any(
        not torch.equal(texts[0], text) for text in texts[1:]
    )  # another draw, another function
