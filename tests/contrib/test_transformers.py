"""BayesTrainer under transformers' own loop, and predictions and text with uncertainty, on tiny random networks."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from slimbayes.contrib.transformers import BayesTrainer, classify, generate
from slimbayes.inference.density import Density
from slimbayes.prediction.batches import loss_kind

WORDS, LENGTH = 20, 5
ROWS = [
    {
        "input_ids": torch.randint(
            2, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i)
        ),
        "labels": i % 2,
    }
    for i in range(12)
]


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label={0: "bad", 1: "good"},
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 0.05, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "max_grad_norm": 0.0,
        "weight_decay": 0.5, "optim": "sgd", "lr_scheduler_type": "constant",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **given | options)


POINT = sb.Rank1(
    members=2,
    posterior="normal",
    prior=sb.Normal(1.0, 0.1),
    scale_init=1e-6,
    mean_init=sb.Point(1.2),
)


@pytest.mark.parametrize("counted", [None, 0])
def test_a_batch_without_targets_has_the_loss_of_the_kl(
    counted: int | None, tmp_path: Path
) -> None:
    model = sb.bayesianize(gpt(), POINT).train()
    words = torch.stack([row["input_ids"] for row in ROWS[:4]])  # type: ignore[misc]
    trainer = BayesTrainer(model, arguments(tmp_path), num_data=48, train_dataset=ROWS)
    trainer.compute_loss(
        model, {"input_ids": words, "labels": words}
    )  # whose loss is found to be the usual one
    nothing = {"input_ids": words, "labels": torch.full_like(words, -100)}
    loss = trainer.compute_loss(
        model,
        nothing,
        num_items_in_batch=None if counted is None else torch.tensor(counted),
    )
    torch.testing.assert_close(loss, sb.kl(model) / 48)


def test_the_loss_of_an_evaluation_is_that_of_batches_with_targets(
    tmp_path: Path,
) -> None:
    words = [row["input_ids"] for row in ROWS]
    rows: list[Any] = [{"input_ids": one, "labels": one} for one in words]
    nothing = [
        {"input_ids": one, "labels": torch.full_like(one, -100)} for one in words[:4]
    ]  # type: ignore[call-overload]
    options = arguments(
        tmp_path, per_device_eval_batch_size=4, logging_nan_inf_filter=False
    )
    trainer = BayesTrainer(
        sb.bayesianize(gpt(), POINT), options, num_data=48, train_dataset=rows
    )
    wanted = trainer.evaluate(rows)["eval_loss"]
    assert trainer.evaluate(rows + nothing)["eval_loss"] == pytest.approx(
        wanted, rel=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "language"), [(1, False), (3, True)])
def test_the_kl_counts_once_for_each_optimizer_step(
    steps: int, language: bool, tmp_path: Path
) -> None:
    """With data that say nothing the step is that of the KL alone, however many batches it is made of."""
    rows = (
        [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in ROWS]
        if language
        else ROWS
    )
    model = sb.bayesianize(gpt() if language else bert(), POINT, train="posterior")
    for p in model.parameters():
        if not p.requires_grad:
            p.zero_()  # the network's outputs are constant: only the KL has a gradient
    start = copy.deepcopy(model)
    options = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=steps)
    BayesTrainer(
        model, options, num_data=48, kl_schedule=lambda step: 0.5, train_dataset=rows
    ).train()
    loss = 0.5 * sb.kl(start) / 48
    loss.backward()
    moved = 0
    for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True):
        if q.grad is not None and "loc" in name:
            torch.testing.assert_close(p, q - 0.05 * q.grad, rtol=1e-4, atol=1e-6)
            moved += int(bool(q.grad.any()))
    assert moved > 4


def test_posteriors_do_not_decay_and_every_row_has_its_draw(tmp_path: Path) -> None:
    model = sb.bayesianize(bert(), sb.Rank1(members=2))
    trainer = BayesTrainer(model, arguments(tmp_path), train_dataset=ROWS)
    groups = trainer.create_optimizer().param_groups
    decayed = {
        id(p) for group in groups if group["weight_decay"] for p in group["params"]
    }
    assert decayed and not any(
        id(p) in decayed for q in posteriors_of(model) for p in q.parameters()
    )
    batch = {
        "input_ids": torch.stack([row["input_ids"] for row in ROWS]),
        "labels": torch.tensor([0, 1] * 6),
    }
    _, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    assert "loss" not in outputs and outputs["logits"].shape == (12, 2)
    assert trainer._targets(batch) == 12


@pytest.mark.slow
def test_widths_may_learn_faster(tmp_path: Path) -> None:
    """By an optimizer of one's own, whose groups keep their ratio under the Trainer's schedule."""
    model = sb.bayesianize(
        bert(), sb.Rank1(members=2, scale_init=0.01), train="posterior"
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(
        sb.param_groups(model, lr=1e-4, scale_lr_multiplier=100.0)
    )
    options = arguments(tmp_path, lr_scheduler_type="linear")
    BayesTrainer(
        model, options, train_dataset=ROWS, optimizers=(optimizer, None)
    ).train()
    moved = {
        name: float((p.detach() - before[name]).abs().max())
        for name, p in model.named_parameters()
    }
    assert all(far > 5e-3 for name, far in moved.items() if name.endswith("rho"))
    assert (
        0 < max(far for name, far in moved.items() if not name.endswith("rho")) < 5e-4
    )


@pytest.mark.slow
def test_evaluation_averages_draws_and_adapters_come_back(tmp_path: Path) -> None:
    base = bert()
    model = sb.bayesianize(
        copy.deepcopy(base),
        sb.Rank1(members=2),
        train="posterior+head",
        head="classifier",
    )
    options = arguments(tmp_path, num_train_epochs=2, save_strategy="epoch")
    own = {"compute_metrics": lambda found: {"rows": len(found.label_ids)}}
    trainer = BayesTrainer(
        model, options, draws=6, train_dataset=ROWS, eval_dataset=ROWS, **own
    )
    trainer.train()
    scores = trainer.evaluate()
    assert (
        scores["eval_rows"] == 12
        and 0 <= scores["eval_ece"] <= 1
        and 0 <= scores["eval_accuracy"] <= 1
    )
    assert scores["eval_nll"] == pytest.approx(scores["eval_loss"], rel=1e-3)
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    assert len(checkpoints) == 2 and not list(tmp_path.rglob("model.safetensors"))
    saved = load_file(checkpoints[-1] / "posterior" / "posterior.safetensors")
    assert {name for name in saved if ".posterior." not in name} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert not (checkpoints[-1] / "posterior" / "base.safetensors").exists()
    again = sb.load(copy.deepcopy(base), checkpoints[-1] / "posterior")
    assert all(
        torch.equal(t, model.state_dict()[n]) for n, t in again.state_dict().items()
    )
    resumed = sb.bayesianize(
        copy.deepcopy(base),
        sb.Rank1(members=2),
        train="posterior+head",
        head="classifier",
    )
    options = arguments(tmp_path, num_train_epochs=2)
    BayesTrainer(resumed, options, train_dataset=ROWS).train(
        resume_from_checkpoint=str(checkpoints[-1])
    )
    assert all(
        torch.equal(t, model.state_dict()[n]) for n, t in resumed.state_dict().items()
    )
    with pytest.raises(ValueError, match=r"has no checkpoint of a BayesTrainer"):
        trainer._load_from_checkpoint(str(tmp_path / "elsewhere"))


def test_sizes_that_cannot_be_known_are_asked_for(tmp_path: Path) -> None:
    model = sb.bayesianize(gpt(), sb.Rank1(members=1), train="posterior")
    trainer = BayesTrainer(model, arguments(tmp_path), train_dataset=ROWS)
    tokens = torch.randint(2, WORDS, (4, LENGTH))
    with pytest.raises(
        ValueError, match=r"give num_data=, the number of target tokens"
    ):
        trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens})
    with pytest.raises(ValueError, match=r"has not been converted"):
        BayesTrainer(bert(), arguments(tmp_path))
    with pytest.raises(ValueError, match=r"num_data must be at least 1, got 0"):
        BayesTrainer(model, arguments(tmp_path), num_data=0)


@pytest.mark.slow
def test_a_kl_that_leaves_the_data_no_say_is_told_of(tmp_path: Path) -> None:
    for weight, told in ((1.0, 1), (1e-3, 0)):
        model = sb.bayesianize(bert(), sb.Rank1(members=4), train="posterior")
        schedule = (
            sb.schedules.constant(weight) if weight < 1 else sb.schedules.linear(3)
        )
        trainer = BayesTrainer(
            model, arguments(tmp_path), train_dataset=ROWS, kl_schedule=schedule
        )
        with warnings.catch_warnings(record=True, action="always") as said:
            trainer.train()
        assert sum("the prior decides" in str(w.message) for w in said) == told


@pytest.mark.slow
def test_one_pass_and_chains_take_batches_with_labels() -> None:
    tokens = torch.stack([row["input_ids"] for row in ROWS])
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.tensor([0, 1] * 6),
    }
    model, plain = bert(), bert()
    fit = sb.laplace(model, [batch], include=".*(query|value|classifier)")
    expected = -12 * plain(**batch).loss.item()
    assert (
        fit.log_likelihood == pytest.approx(expected, rel=1e-5)
        and len(fit.prior_precision) == 3
    )
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    near = sb.predict_linearised(model, inputs).probs
    torch.testing.assert_close(
        near, sb.predict(model, inputs, draws=400, seed=0).probs, atol=0.05, rtol=0
    )
    walked = bert()
    sb.sample_posterior(
        walked,
        [batch],
        "sgld",
        include="classifier",
        chains=2,
        draws=2,
        burn_in=2,
        thin=1,
    )
    assert sb.members(walked) == 4


@pytest.mark.slow
def test_labels_of_causal_models_are_those_of_the_next_token() -> None:
    tokens = torch.stack([row["input_ids"] for row in ROWS[:4]])
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
    }
    batch["labels"][0, :3] = -100
    kept, plain = 4 * (LENGTH - 1) - 2, gpt()
    wanted = -kept * plain(**batch).loss.item()
    assert sb.laplace(gpt(), [batch]).log_likelihood == pytest.approx(wanted, rel=1e-5)
    walked = sb.bayesianize(
        gpt(), sb.Rank1(members=2, posterior="point", mean_init=sb.Point(1.0))
    )
    density = Density(walked, [batch], "categorical", 0.0, sb.Normal(1.0, 0.1), 1.0)
    assert density.size == kept
    torch.testing.assert_close(
        density.of_all() - density.log_prior(),
        torch.full((2,), wanted),
        rtol=1e-5,
        atol=0,
    )


class Words:
    """A tokenizer of numbers."""

    def __call__(self, texts: list[str], **options: Any) -> dict[str, torch.Tensor]:
        rows = [torch.tensor([int(word) for word in text.split()]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_texts_are_classified_with_uncertainty() -> None:
    model = sb.bayesianize(bert(), sb.Rank1(members=2, scale_init=0.3))
    found = classify(
        model, Words(), ["3 4 5", "7 8", "9"], draws=10, batch_size=2, seed=0
    )
    assert len(found) == 3
    for one in found:
        assert one["label"] in ("bad", "good") and 0.5 <= one["score"] <= 1
        assert 0 < one["mutual_information"] < one["entropy"] <= math.log(2) + 1e-6
    alone = classify(model, Words(), ["9"], draws=10, seed=0)
    assert alone[0]["score"] == pytest.approx(found[2]["score"], abs=1e-4)
    assert (
        classify(model, Words(), "9", draws=10, seed=0) == alone
    )  # one text, not its letters
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(
        ValueError, match=r'likelihood="bernoulli"'
    ):  # a softmax over yes and no labels is neither
        classify(model, Words(), "9")


@pytest.mark.slow
def test_generated_tokens_have_uncertainty() -> None:
    model = sb.bayesianize(gpt(), sb.Rank1(members=2, scale_init=0.5))
    prompts = {
        "input_ids": torch.tensor([[3, 4, 5], [0, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
    }
    config = GenerationConfig(
        max_new_tokens=6,
        do_sample=True,
        num_return_sequences=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    found = generate(model, prompts, config, draws=8, seed=0)
    assert found.sequences.shape[0] == 4 and torch.equal(
        found.sequences[::2, :3], prompts["input_ids"]
    )
    new = found.sequences[:, 3:]
    for values in (found.log_prob, found.entropy, found.mutual_information, found.mask):
        assert values.shape == new.shape
    assert bool((found.log_prob < 0).all()) and bool(
        (found.mutual_information > 0).all()
    )
    assert bool((found.mutual_information < found.entropy).all())
    assert found.sequence_mean(found.mutual_information).shape == (4,)
    # By hand: the second new token of the first sequence, under each of the same draws.
    whole = found.sequences[:, : 3 + 2]
    mask = torch.cat(
        [
            prompts["attention_mask"].repeat_interleave(2, 0),
            torch.ones_like(whole[:, 3:]),
        ],
        1,
    )
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with sb.fixed_draws(model, 8, seed=0), torch.no_grad():
        logits = sb.sample(
            model, input_ids=whole, attention_mask=mask, position_ids=places
        ).logits
    p = logits[:, 0, 3].softmax(-1)
    total = -(p.mean(0) * p.mean(0).log()).sum()
    within = -(p * p.log()).sum(-1).mean()
    assert found.mutual_information[0, 1].item() == pytest.approx(
        (total - within).item(), rel=1e-3
    )
    assert found.log_prob[0, 1].item() == pytest.approx(
        p.mean(0)[new[0, 1]].log().item(), rel=1e-3
    )
    # Nothing counts after the end.
    point = sb.bayesianize(gpt(), sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0)))
    certain = generate(
        point,
        prompts,
        GenerationConfig(max_new_tokens=3, eos_token_id=1, pad_token_id=0),
        draws=2,
    )
    assert bool((certain.mutual_information.abs() < 1e-5).all())


def test_what_comes_after_the_end_does_not_count() -> None:
    from slimbayes.contrib.transformers import _alive

    new = torch.tensor([[5, 1, 0, 0], [5, 6, 7, 8], [1, 1, 1, 1]])
    expected = [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert _alive(gpt(), GenerationConfig(eos_token_id=1), new).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt, t5])
@pytest.mark.parametrize("beams", [1, 2])
def test_sequences_are_those_of_their_members_alone(make: Any, beams: int) -> None:
    """Padded prompts, with a cache: what each member writes by itself, judged by the average over members."""
    config = sb.Rank1(
        members=3,
        posterior="point",
        mean_init=sb.Normal(1.0, 1.0),
        clip=None,
        draws="member",
    )
    model = sb.bayesianize(make(), config)
    prompts = {
        "input_ids": torch.randint(2, WORDS, (6, 4)),
        "attention_mask": torch.ones(6, 4, dtype=torch.long),
    }
    prompts["attention_mask"][::2, :2] = 0
    how = GenerationConfig(
        max_new_tokens=5,
        num_beams=beams,
        do_sample=False,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    found = generate(model, prompts, how, draws=3)
    alone = [sb.materialize(copy.deepcopy(model), member=k) for k in range(3)]
    written = [one.generate(**prompts, generation_config=how) for one in alone]
    own = [
        {k for k in range(3) if torch.equal(written[k][i], found.sequences[i])}
        for i in range(6)
    ]
    assert all(own) and any(
        k in own[0] and (k + 1) % 3 in own[2] and (k + 2) % 3 in own[4]
        for k in range(3)
    )
    assert any(len(members) < 3 for members in own)  # else members would not differ
    given, start = dict(prompts), 1
    if make is t5:
        given["decoder_input_ids"] = found.sequences
    else:
        mask, start = nn.functional.pad(prompts["attention_mask"], (0, 5), value=1), 4
        places = (mask.cumsum(1) - 1).clamp_min(0)
        given = {
            "input_ids": found.sequences,
            "attention_mask": mask,
            "position_ids": places,
        }
    with torch.no_grad():
        probs = torch.stack([one(**given).logits.softmax(-1) for one in alone]).mean(0)
    told = (
        probs[:, start - 1 : -1]
        .gather(-1, found.sequences[:, start:, None])
        .squeeze(-1)
        .log()
    )
    torch.testing.assert_close(found.log_prob, told, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_pass_takes_models_that_read_and_write() -> None:
    labels = torch.randint(2, WORDS, (4, 3))
    batch = {
        "input_ids": torch.stack([row["input_ids"] for row in ROWS[:4]]),
        "labels": labels,
    }  # type: ignore[misc]
    plain = t5()
    with torch.no_grad():
        logs = plain(**batch).logits.log_softmax(-1)
    fit = sb.laplace(t5(), [batch], output="logits")
    assert fit.log_likelihood == pytest.approx(
        logs.gather(-1, labels.unsqueeze(-1)).sum().item(), rel=1e-5
    )


@pytest.mark.parametrize("over", ["both", "weights"])
def test_padding_changes_no_curvature(over: Any) -> None:
    """Also not where layers have a Kronecker product of what they are given on average."""
    words, labels = torch.randint(2, WORDS, (4, LENGTH)), torch.tensor([0, 1, 1, 0])
    options: dict[str, Any] = {
        "output": "logits",
        "prior": sb.Normal(1.0, 0.3),
        "over": over,
        "full_up_to": 30,
    }
    evidence = []
    for pads in (0, 3):
        mask = nn.functional.pad(torch.ones_like(words), (0, pads))
        batch = {
            "input_ids": nn.functional.pad(words, (0, pads)),
            "attention_mask": mask,
            "labels": labels,
        }
        evidence.append(sb.laplace(bert(), [batch], **options).log_evidence)
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-6)


def weighted(
    self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None
) -> Any:
    """The forward of a model that somebody wrote, whose loss weighs classes."""
    out = BertForSequenceClassification.forward(self, input_ids)
    if labels is not None:
        out["loss"] = nn.functional.cross_entropy(
            out.logits, labels, torch.tensor([1.0, 9.0])
        )
    return out


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:slimbayes runs this model draw by draw"
)  # a loss among outputs has no rows
@pytest.mark.parametrize(
    "kind", ["reads and writes", "routers", "weights", "whole numbers"]
)
def test_the_loss_is_the_model_s_own(kind: str, tmp_path: Path) -> None:
    """Starts of decoders made of labels, terms of routers, losses somebody wrote, labels that are no classes."""
    torch.manual_seed(0)
    words = torch.stack([row["input_ids"] for row in ROWS[:4]])
    batch = {"input_ids": words, "labels": words.flip(1)}
    narrow = {
        "vocab_size": WORDS,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    model: Any
    if kind == "reads and writes":  # without a start it would take its inputs
        sizes = {
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "init_std": 1.0,
        }
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        model = BartForConditionalGeneration(
            BartConfig(vocab_size=WORDS, **sizes, **heads)
        )
    elif kind == "routers":
        options = {
            "num_key_value_heads": 2,
            "num_local_experts": 3,
            "output_router_logits": True,
        }
        config = MixtralConfig(
            **narrow, **options, intermediate_size=8, router_aux_loss_coef=1.0
        )
        model = MixtralForCausalLM(config)
    else:
        model = BertForSequenceClassification(
            BertConfig(**narrow, num_labels=1 + (kind == "weights"))
        )
        batch["labels"] = torch.tensor([0, 1, 1, 0])
        if kind == "weights":
            model = type(
                "Weighted", (BertForSequenceClassification,), {"forward": weighted}
            )(model.config)
    sb.bayesianize(model.eval(), sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0)))
    trainer = BayesTrainer(model, arguments(tmp_path), num_data=48, train_dataset=ROWS)
    ours, own = trainer.compute_loss(model, batch), model(**batch).loss
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=0)
    judged = trainer.evaluate(ROWS[:4]) if kind == "whole numbers" else {}
    assert "eval_nll" not in judged  # of one output there is no class


def test_a_config_without_an_end_has_the_model_s() -> None:
    model = sb.bayesianize(gpt(), sb.BatchEnsemble(members=2))
    config = GenerationConfig(max_new_tokens=24, do_sample=True, pad_token_id=2)
    torch.manual_seed(0)
    found = generate(model, {"input_ids": torch.full((6, 2), 3)}, config, draws=2)
    new = found.sequences[:, 2:].tolist()
    assert found.mask.sum(1).tolist() == [
        words.index(1) + 1 if 1 in words else len(words) for words in new
    ]
    assert not found.mask.all()


def test_only_a_loss_of_transformers_is_taken_for_a_cross_entropy() -> None:
    """One that somebody wrote, or gave, may weigh what one batch does not show."""
    batch = {
        "input_ids": torch.stack([row["input_ids"] for row in ROWS[:4]]),
        "labels": torch.tensor([0, 1, 1, 0]),
    }
    stock, given = bert(), bert()
    given.loss_function = given.loss_function
    written = type("Written", (BertForSequenceClassification,), {"__module__": "mine"})(
        stock.config
    )
    for model, kind in (
        (stock, "cross-entropy"),
        (given, "of classes"),
        (written, "of classes"),
    ):
        assert (
            loss_kind(sb.bayesianize(model.eval(), sb.BatchEnsemble(members=2)), batch)
            == kind
        )
