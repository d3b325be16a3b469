"""Awkward models under every method: what a converted model returns is what plain models with its drawn weights return.

Of models x methods x what is asked of them, every pair is met (see covering.py), and BatchEnsemble by every model.
Methods whose draws meet rows alike are one method to a model. Of one seed, of predictions and of a bare call one model
in three each is asked: how rows are found, which is where models differ, is asked of all.
"""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from awkward_models import CASES, Case, S
from covering import Pair, covering, marked, pairs_in
from oracle import (
    assert_draws,
    assert_equal,
    assert_rows_of_draws,
    draws_of_rows,
    held,
    leaves,
    quietly,
)
from torch import nn

import slimbayes as sb

METHODS: dict[str, Any] = {
    "batch-ensemble": sb.BatchEnsemble(members=3),
    "rank1-example": sb.Rank1(members=3, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5)),
    "mean-field": sb.MeanField(scale_init=0.2, bias="gaussian"),
    "emp": sb.ModelPatch(components=3, jitter=0.5, patch=".*"),
    "rank1-member": sb.Rank1(
        members=3, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5), draws="member"
    ),
    "flipout": sb.MeanField(scale_init=0.2, estimator="flipout"),
    "ensemble": sb.Ensemble(members=3, init="copies", jitter=0.5),
    "drop-connect": sb.DropConnect(rate=0.4),
    "ensemble-layers": {".+": sb.Ensemble(members=3, init="copies", jitter=0.5)},
}
ALIKE = {
    "rank1-member": "batch-ensemble",
    "flipout": "rank1-example",
    "emp": "mean-field",
    "drop-connect": "mean-field",
    "ensemble-layers": "batch-ensemble",
}
DROPS = [
    "dropout",
    "dropout-time-major",
    "transformer-dropout",
]  # models with dropout layers, for MCDropout
MEMBERS = [
    "batch-ensemble",
    "ensemble",
]  # methods whose draws are members: nothing random is left


ALONE = (
    "ensemble-layers",
    "lstm-alone-sequence-first",
)  # a pattern of names cannot match a model that is one layer
QUESTIONS: dict[
    str, list[Pair]
] = {}  # by test: all (method, model) pairs, of which a covering array is run


def asked(
    methods: Any = METHODS, of: Any = lambda case: True, third: int | None = None
) -> Any:
    """Mark a test as one to ask of these methods on all models that `of` takes, or a third of them."""

    def register(test: Any) -> Any:
        models = [
            name
            for n, (name, case) in enumerate(CASES.items())
            if of(case) and third in (None, n % 3)
        ]
        pairs = [(method, name) for method in methods for name in models]
        QUESTIONS[test.__name__] = [pair for pair in pairs if pair != ALONE]
        return test

    return register


def kept(question: str, pair: Pair) -> bool:
    return (
        question == "test_held_draws_are_written_out_models_in_any_fold"
        and pair[0] == "batch-ensemble"
    )


@cache
def array() -> dict[str, list[Pair]]:
    return covering(QUESTIONS, kept, ALIKE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    question = metafunc.function.__name__
    if question in QUESTIONS:
        grid = (
            QUESTIONS
            if metafunc.config.getoption("--full-contract", False)
            else array()
        )
        pairs = grid[question]
        quick = {*[pair for pair in pairs if kept(question, pair)][::4]} | set(
            {m: (m, n) for m, n in pairs}.values()
        )
        metafunc.parametrize(("method", "name"), marked(pairs, quick))


def test_every_pair_of_method_model_and_question_is_met() -> None:
    wanted, found = (
        set().union(
            *(
                pairs_in((*pair, name), ALIKE)
                for name, pairs in grid.items()
                for pair in pairs
            )
        )
        for grid in (QUESTIONS, array())
    )
    assert found == wanted and len(wanted) > len(CASES) * (
        len(METHODS) - len(ALIKE) + len(QUESTIONS) / 2
    )


def built(
    name: str, method: str, mode: str = "eval"
) -> tuple[nn.Module, Any, Any, Case]:
    """A converted model and its inputs."""
    case = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = case.make()
    args, kwargs = case.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of dropout inside attention, which MCDropout cannot reach
        part = model.get_submodule(case.part)
        sb.bayesianize(
            part, sb.MCDropout() if method == "mc-dropout" else METHODS[method]
        )
    return model.train(mode == "train"), args, kwargs, case


def rows_of(name: str, method: str) -> Any:
    """Where outputs of a bare call hold their rows. Whole networks may take their rows of the queries beside all of the
    support; layers would mix the support's rows."""
    return 0 if (name, method) == ("prototypes", "ensemble") else CASES[name].rows


def seeded(function: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return function(*args, **kwargs)


@asked()
@torch.no_grad()
def test_held_draws_are_written_out_models_in_any_fold(name: str, method: str) -> None:
    model, args, kwargs, case = built(name, method)
    with quietly(), sb.fixed_draws(model, S):
        plains = held(model, S)
        assert len(plains) == S
        outputs = sb.sample(model, *args, **kwargs)
        assert_draws(outputs, plains, args, kwargs)
        assert_equal(sb.sample(model, *args, **kwargs), outputs, "the second call")
        assert_equal(
            sb.sample(model, *args, parallel=False, **kwargs), outputs, "one by one"
        )
        try:
            folded = sb.sample(model, *args, parallel=True, **kwargs)
            assert_equal(
                folded,
                outputs,
                "parallel=True neither equals the draws one by one nor refuses",
            )
        except ValueError:
            assert case.folds is not True
        expected = [plain(*args, **kwargs) for plain in plains]
        assert_rows_of_draws(
            model(*args, **kwargs), expected, rows_of(name, method), case.owner
        )  # of a bare call
    if method not in ("emp", "drop-connect"):  # which may pick alike
        assert max(float((t - t[:1]).abs().max()) for t in leaves(outputs)) > 1e-3, (
            "draws do not differ"
        )


@asked(third=0)
@torch.no_grad()
def test_one_seed_gives_the_same_draws_in_any_fold(name: str, method: str) -> None:
    model, args, kwargs, _ = built(name, method)
    with quietly():
        expected = seeded(sb.sample, model, *args, draws=S, parallel=False, **kwargs)
        assert all(t.shape[0] == S for t in leaves(expected))
        assert_equal(
            seeded(sb.sample, model, *args, draws=S, **kwargs),
            expected,
            "auto, first time",
        )
        assert_equal(
            seeded(sb.sample, model, *args, draws=S, **kwargs),
            expected,
            "auto, second time",
        )
        try:
            folded = seeded(sb.sample, model, *args, draws=S, parallel=True, **kwargs)
        except ValueError:
            return
        assert_equal(
            folded,
            expected,
            "parallel=True neither equals the draws one by one nor refuses",
        )


@asked(of=lambda case: case.trains)
def test_training_is_the_same_in_any_fold(name: str, method: str) -> None:
    model, args, kwargs, _ = built(name, method, "train")
    results = []
    for parallel in (False, "auto"):
        with quietly():
            outputs = seeded(
                sb.sample,
                model,
                *args,
                draws=S,
                parallel=parallel,
                **kwargs,
            )
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = sum(t.square().mean() for t in leaves(outputs) if t.is_floating_point())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        results.append(
            (
                outputs,
                [
                    torch.zeros_like(p) if g is None else g
                    for p, g in zip(parameters, gradients)
                ],
            )
        )
    assert_equal(results[1], results[0])
    assert model.training


@asked(of=lambda case: case.predicts and not all(case.inputs()), third=1)
@torch.no_grad()
def test_predictions_are_of_written_out_models_in_any_fold(
    name: str, method: str
) -> None:
    model, args, kwargs, _ = built(name, method, "train")
    x = kwargs if kwargs else tuple(args)
    output = "logits" if name == "loss-and-logits" else None
    options: Any = {"draws": S, "likelihood": "gaussian"}
    with quietly():
        with sb.fixed_draws(model, S):
            plains = held(model, S)
            predicted = sb.predict(
                model, x, likelihood="gaussian", output=output
            ).samples
        assert all(m.training for m in model.modules())
        assert_equal(
            predicted,
            torch.stack([_first(plain.eval()(*args, **kwargs)) for plain in plains]),
        )
        expected = seeded(sb.predict, model, x, parallel=False, **options)
        assert_equal(seeded(sb.predict, model, x, **options).samples, expected.samples)


def _first(output: Any) -> torch.Tensor:
    return (
        output["logits"]
        if isinstance(output, dict) and "logits" in output
        else leaves(output)[0]
    )


@asked(MEMBERS, third=2)
@torch.no_grad()
def test_a_bare_call_gives_each_row_one_member(name: str, method: str) -> None:
    model, args, kwargs, case = built(name, method)
    with quietly(), sb.fixed_draws(model):
        expected = [plain(*args, **kwargs) for plain in held(model)]
    with quietly():
        for _ in range(3):  # where the members begin is random
            assert_rows_of_draws(
                model(*args, **kwargs), expected, rows_of(name, method), case.owner
            )


@torch.no_grad()
def test_rows_of_a_bare_call_are_shared_out_among_members() -> None:
    """One draw for the whole call would satisfy the tests above everywhere; not where rows are plain to see."""
    for name in ("mlp", "cnn", "windows-lstm"):
        model, args, kwargs, case = built(name, "batch-ensemble")
        with sb.fixed_draws(model):
            expected = [plain(*args, **kwargs) for plain in held(model)]
        rows = draws_of_rows(model(*args, **kwargs), expected, case.rows)
        assert len(set().union(*rows)) == S, name


# MCDropout drops units of activations, which no weights can stand for: draws are compared with themselves -------------


@pytest.mark.parametrize("name", DROPS)
@torch.no_grad()
def test_held_dropout_is_the_same_in_any_fold(name: str) -> None:
    model, args, kwargs, _ = built(name, "mc-dropout")
    with quietly(), sb.fixed_draws(model, S):
        one_by_one = sb.sample(model, *args, parallel=False, **kwargs)
        assert_equal(sb.sample(model, *args, **kwargs), one_by_one)
        assert_equal(
            sb.predict(model, (*args, *kwargs.values()), likelihood="gaussian").samples,
            one_by_one,
        )
        rows = draws_of_rows(model(*args, **kwargs), list(leaves(one_by_one)[0]), 0)
        assert all(rows)
    assert float(leaves(one_by_one)[0].std(0).max()) > 1e-3


@pytest.mark.parametrize("name", DROPS)
@torch.no_grad()
def test_dropout_of_one_seed_is_the_same_in_any_fold(name: str) -> None:
    model, args, kwargs, _ = built(name, "mc-dropout")
    with quietly():
        expected = seeded(sb.sample, model, *args, draws=S, parallel=False, **kwargs)
        assert_equal(seeded(sb.sample, model, *args, draws=S, **kwargs), expected)


# What is said ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if case.folds is False]
)
@torch.no_grad()
def test_a_model_that_cannot_fold_says_so_once_and_refuses_to_be_forced(
    name: str,
) -> None:
    model, args, kwargs, _ = built(name, "batch-ensemble")
    with quietly() as said:
        sb.sample(model, *args, **kwargs)
        sb.sample(model, *args, **kwargs)
        sb.sample(model, *args, parallel=False, **kwargs)
    assert len(said) == 1, said
    assert "parallel" in said[0].lower() or "batch_dim" in said[0], (
        "the warning names no remedy"
    )
    with pytest.raises(ValueError), quietly():
        sb.sample(model, *args, parallel=True, **kwargs)


@asked(of=lambda case: case.folds is True)
@torch.no_grad()
def test_a_model_that_folds_says_nothing(name: str, method: str) -> None:
    model, args, kwargs, _ = built(name, method)
    with quietly() as said:
        outputs = seeded(sb.sample, model, *args, draws=S, **kwargs)
        assert_equal(
            seeded(sb.sample, model, *args, draws=S, parallel=True, **kwargs),
            outputs,
        )
        sb.predict(model, *args, draws=S)
    assert said == []


def test_materialize_leaves_no_posterior_and_the_model_as_it_was() -> None:
    model, args, _, _ = built("mlp", "rank1-example")
    before = copy.deepcopy(model.state_dict())
    with sb.fixed_draws(model):
        plain = held(model)[1]
        inside = sb.sample(model, *args)
    assert {n: tuple(p.shape) for n, p in plain.named_parameters()} == {
        n: tuple(p.shape) for n, p in CASES["mlp"].make().named_parameters()
    }
    assert [type(m) for m in plain.modules()] == [
        type(m) for m in CASES["mlp"].make().modules()
    ]
    assert_equal(plain(*args), inside[1])
    assert all(
        torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )
