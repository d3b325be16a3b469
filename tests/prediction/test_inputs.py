"""The door of the library: inputs, targets, weights and outputs that are no numbers or do not fit are refused in words
that name the argument, the row and the column; nothing is predicted from NaN."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from covering import each
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import slimbayes as sb
from slimbayes.prediction.predict import predict_prefixes

NAN, INF = math.nan, math.inf


def net(method: Any = None, *layers: nn.Module) -> Any:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layers or (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))))
    return sb.bayesianize(plain, method or sb.Rank1(members=2))


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def poisoned(value: float, x: Tensor, *at: int) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_inputs_that_are_no_numbers_are_refused_by_row_and_column(value: float) -> None:
    bad = poisoned(value, rows(), 4, 2)
    where = rf"predict was given {value} in 'input', row 4, column 2\. .*allow_nonfinite=True"
    for given in (
        bad,
        bad.numpy(),
        bad.double().numpy(),
        iter(bad.split(3)),
        torch.utils.data.TensorDataset(bad),
    ):
        with pytest.raises(ValueError, match=where):
            sb.predict(net(), given)
    with pytest.raises(ValueError, match=where):
        predict_prefixes(net(), bad, [2])
    with pytest.raises(ValueError, match="row 14, column 2"):
        predict_prefixes(net(), bad, [2], before=10)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, first: Tensor, extra: Any = None) -> Tensor:
        return self.a(first) + (0 if extra is None else self.a(extra["v"]))


def test_arguments_are_named_wherever_they_lie() -> None:
    model, bad = sb.bayesianize(Two(), sb.Rank1(members=2)), poisoned(NAN, rows(), 3, 1)
    for given in ({"first": rows(), "extra": {"v": bad}}, (rows(), {"v": bad})):
        with pytest.raises(ValueError, match=r"nan in 'extra'\['v'\], row 3, column 1"):
            sb.predict(model, given)
    images = net(None, nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    with pytest.raises(ValueError, match=r"inf in 'input', row 1, at \(2, 3, 4\)"):
        sb.predict(images, poisoned(INF, torch.zeros(2, 3, 8, 8), 1, 2, 3, 4))
    packed = pack_sequence([poisoned(NAN, rows(3), 2, 0), rows(2)])
    with pytest.raises(ValueError, match=r"nan in 'input', at \(\d, 0\)"):
        sb.predict(
            sb.bayesianize(nn.LSTM(4, 3), sb.Rank1()),
            packed,
            output=0,
            likelihood="gaussian",
        )


def test_large_numbers_are_numbers() -> None:
    """Their sum is infinite, they are not."""
    sb.predict(
        net(None, nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        torch.full((200, 4), 2e36),
    )
    x16 = torch.full((600, 4), 6e4, dtype=torch.float16)
    sb.predict(net(None, nn.LayerNorm(4), nn.Linear(4, 3)).half(), x16)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_rows_of_nan_have_no_label_where_they_are_allowed(likelihood: Any) -> None:
    model, bad = net(None, nn.Linear(4, 3)), poisoned(NAN, rows(), 4, 2)
    pred = sb.predict(
        model, bad, draws=3, likelihood=likelihood, allow_nonfinite=True, seed=0
    )
    good = sb.predict(model, rows(), draws=3, likelihood=likelihood, seed=0)
    others = [0, 1, 2, 3, 5]
    torch.testing.assert_close(pred.mean[others], good.mean[others])
    assert bool(pred.mean[4].isnan().all())
    if likelihood == "gaussian":
        return
    assert pred.label[4].eq(-1).all() and pred.confidence[4].isnan().all()
    assert (
        torch.equal(pred.label[others], good.label[others])
        and int(good.label.min()) >= 0
    )


@pytest.mark.parametrize(
    "given", [torch.zeros(0, 4), np.zeros((0, 4)), iter([]), iter([torch.zeros(0, 4)])]
)
def test_no_rows_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="predict was given no rows"):
        sb.predict(net(), given)


def test_an_empty_batch_among_others_changes_nothing() -> None:
    x = rows()
    found = sb.predict(net(), iter([x[:2], x[:0], x[2:]]), seed=1).samples
    torch.testing.assert_close(found, sb.predict(net(), x, seed=1).samples)


MISFITS: dict[str, tuple[Any, Any, str]] = {
    "width": (
        net(),
        torch.zeros(6, 3),
        r"layer '0' takes inputs of width 4 \(in_features\), got shape \(6, 3\)",
    ),
    "no width": (
        net(),
        torch.zeros(6, 0),
        r"layer '0' takes inputs of width 4 \(in_features\), got shape \(6, 0\)",
    ),
    "mean-field": (
        net(sb.MeanField()),
        torch.zeros(6, 5),
        r"layer '0' takes inputs of width 4",
    ),
    "ensemble": (
        net(sb.Ensemble(members=2)),
        torch.zeros(6, 5),
        r"0' takes inputs of width 4",
    ),
    "float64": (
        net(),
        torch.zeros(6, 4).double(),
        r"computes in float32, got inputs of torch.float64: .*torch.float32",
    ),
    "integers": (
        net(),
        torch.zeros(6, 4).long(),
        r"computes in float32, got inputs of torch.int64",
    ),
    "integer array": (
        net(),
        np.zeros((6, 4), dtype=int),
        r"computes in float32, got inputs of torch.int64",
    ),
    "channels": (
        net(None, nn.Conv2d(3, 4, 3), nn.Flatten()),
        torch.zeros(2, 1, 8, 8),
        r"layer '0' takes inputs of width 3 along dimension -3 \(in_channels\), got shape \(2, 1, 8, 8\)",
    ),
    "words": (
        net(sb.MeanField(), nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)),
        torch.tensor([[1, 2], [10, 3]]),
        "layer '0' takes whole numbers from 0 to 9, got 1 to 10",
    ),
    "words as numbers": (
        net(sb.MeanField(), nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)),
        torch.zeros(2, 2),
        "takes whole numbers below 10, got torch.float32",
    ),
    "steps": (
        sb.bayesianize(nn.LSTM(4, 3, batch_first=True), sb.Rank1(members=1)),
        torch.zeros(2, 5, 3),
        r"takes inputs of width 4 \(input_size\), got shape \(2, 5, 3\)",
    ),
}


@pytest.mark.parametrize(("case", "call"), each(MISFITS, ["predict", "sample"]))
def test_inputs_that_do_not_fit_are_told_by_layer(case: str, call: str) -> None:
    model, x, match = MISFITS[case]
    run, given = (
        (sb.predict, x) if call == "predict" else (sb.sample, torch.as_tensor(x))
    )
    with pytest.raises(ValueError, match=match):
        run(model, given, draws=2)


def test_inputs_that_did_not_fit_say_nothing_about_others() -> None:
    """Once: draws ran one by one ever after."""
    model, x = net(), rows()
    for call in (sb.sample, sb.predict, lambda m, x: m(x)):
        with pytest.raises((ValueError, RuntimeError)):
            call(model, x[:, :3])
    assert sb.sample(model, x, draws=4, parallel=True).shape == (4, 6, 3)


def test_other_errors_of_a_model_are_left_as_they_are() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of its own")

    model = nn.Sequential(nn.Linear(4, 4), Fails(4, 3))
    with pytest.raises(RuntimeError, match="^of its own$"):
        sb.predict(sb.bayesianize(model, sb.Rank1(members=2), include="0"), rows())


@pytest.mark.parametrize(
    "given", [np.array([["a"] * 4]), np.array([[1.0, None, 2.0, 3.0]], dtype=object)]
)
def test_what_is_no_number_at_all_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="predict needs numbers, got an array of dtype"):
        sb.predict(net(), given)


# Weights and outputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda m: sb.predict(m, rows()),
        sb.check_finite,
        lambda m: sb.save(m, "/nowhere"),
    ],
)
def test_base_weights_and_buffers_are_looked_at(call: Any) -> None:
    model = net()
    model[2].weight.data[1, 1] = NAN
    with pytest.raises(
        FloatingPointError,
        match=r"^2: 1 of 24 values of its own weight, not of a posterior, are NaN",
    ):
        call(model)
    model = net(None, nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[1].running_var[2] = INF
    with pytest.raises(
        FloatingPointError,
        match=r"^1: 1 of 3 values of its own running_var, not of a posterior, are",
    ):
        call(model)
    model = net()
    model[0].posterior["weight"].s.loc.data[0] = INF
    with pytest.raises(
        FloatingPointError,
        match=r"^0\.weight: \d+ of \d+ values of its posterior's s\.loc are NaN",
    ):
        call(model)


def test_masks_may_be_infinite_and_large_weights_are_weights() -> None:
    model = net()
    model.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    model[0].weight.data.fill_(3e38)
    sb.check_finite(model)
    model.mask[0, 0] = NAN
    with pytest.raises(
        FloatingPointError, match="^the model: 1 of 9 values of its own mask"
    ):
        sb.check_finite(model)


class Root(nn.Module):
    """NaN for some inputs: finite numbers go in, finite weights see them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x[:, :1].sub(5).mul(-1).sqrt() * 0


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("keep", [True, False])
def test_outputs_that_are_no_numbers_are_refused_by_row_and_draw(
    likelihood: Any, keep: bool
) -> None:
    model = net(sb.Rank1(members=1), nn.Linear(4, 3), Root())
    model[0].weight.data[0].mul_(0), model[0].bias.data[0].fill_(0)
    x = rows()
    sb.predict(model, x, likelihood=likelihood, draws=3)
    model[0].weight.data[0, 0] = 1e3
    x[:, 0] = -1.0
    x[4, 0] = 1.0
    with pytest.raises(
        FloatingPointError,
        match=r"output for row 4 under draw 0 is NaN or infinite, though its inputs",
    ):
        sb.predict(
            model,
            iter(x.split(3)),
            likelihood=likelihood,
            draws=3,
            chunk=4,
            keep_samples=keep,
        )
    with pytest.raises(FloatingPointError, match=r"output for row 14 under draw 0"):
        predict_prefixes(model, x, [1, 3], likelihood, before=10)


def test_classes_that_are_ruled_out_are_no_fault() -> None:
    """A logit of -inf is a probability of zero."""

    class Ruled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.index_fill(1, torch.tensor([1]), -INF)

    pred = sb.predict(net(None, nn.Linear(4, 3), Ruled()), rows(), draws=2)
    assert (
        bool((pred.probs[:, 1] == 0).all())
        and bool(pred.probs.isfinite().all())
        and 1 not in pred.label
    )


# Targets --------------------------------------------------------------------------------------------------------------

LABELS = [
    (torch.tensor([0, 1, 2, 0, 5, 1]), "class indices from 0 to 2, got 5 in row 4"),
    (torch.tensor([0, 1, 2, 0, 1, -1]), "class indices from 0 to 2, got -1 in row 5"),
    (
        torch.tensor([0.0, 1, 2, 0, 1, 1]),
        r"class indices from 0 to 2, got dtype torch.float32: .*target.long\(\)",
    ),
    (torch.full((6,), -100), "All 6 targets are ignore_index=-100"),
    (
        torch.tensor([[0], [1], [2], [0], [1], [0]]),
        r"A target of shape \(6,\) is needed",
    ),
    (
        torch.full((6, 3), NAN),
        r"Targets must be probabilities of classes, .* got nan in row 0, at \(0,\)",
    ),
    (torch.full((6, 3), -0.1), "Targets must be probabilities of classes"),
]


@pytest.mark.parametrize(("target", "match"), LABELS)
def test_labels_that_are_none_are_refused_before_there_is_a_loss(
    target: Tensor, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        sb.categorical(torch.zeros(2, 6, 3), target)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_labels_of_any_whole_type_are_taken(dtype: torch.dtype) -> None:
    target = torch.tensor([0, 1, 2], dtype=dtype)
    assert sb.categorical(torch.zeros(2, 3, 3), target).item() == pytest.approx(
        math.log(3)
    )


def test_other_targets_that_are_none_are_refused() -> None:
    real = torch.tensor([0.0, 1.0, NAN, 2.0])
    for loss in (
        lambda: sb.gaussian(torch.zeros(2, 4), real),
        lambda: sb.heteroscedastic_gaussian(torch.zeros(2, 4, 2), real),
    ):
        with pytest.raises(
            ValueError, match="Targets must be finite, got nan in row 2"
        ):
            loss()
    for bad, said in (
        (real, "nan in row 2"),
        (torch.tensor([0, 1, 2, 0]), "2 in row 2"),
    ):
        with pytest.raises(
            ValueError,
            match=f"Targets must be 0, 1 or a probability between them, got {said}",
        ):
            sb.bernoulli(torch.zeros(2, 4), bad)


@pytest.mark.parametrize(
    "name", ["categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian"]
)
def test_no_targets_are_refused(name: str) -> None:
    outputs = {"categorical": (2, 0, 3), "heteroscedastic_gaussian": (2, 0, 2)}.get(
        name, (2, 0)
    )
    with pytest.raises(
        ValueError,
        match=r"At least one target is needed, got shape \(0,\): the batch is empty",
    ):
        getattr(sb, name)(torch.zeros(outputs), torch.zeros(0).long())


@pytest.mark.slow
def test_values_are_not_looked_at_while_a_graph_is_made() -> None:
    """Nothing is read back from the device, and torch.func and compilers go through."""
    outputs, target = torch.randn(5, 2, 6, 3), torch.randint(3, (5, 6))
    losses = torch.vmap(sb.categorical)(outputs, target)
    assert losses.tolist() == pytest.approx(
        [sb.categorical(o, t).item() for o, t in zip(outputs, target, strict=True)]
    )
    for function, shapes in (
        (sb.categorical, ((2, 6, 3), (6,))),
        (sb.bernoulli, ((2, 6), (6,))),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        logits, labels = torch.randn(shapes[0]), torch.randint(2, shapes[1])
        for form in ("average", "mixture"):
            torch.testing.assert_close(
                compiled(logits, labels, form), function(logits, labels, form)
            )


CHECKED = [
    ([0, 1, 2, 3], {"classes": 3}, "from 0 to 2, got 3 in row 3"),
    (
        [0, 1, -100],
        {"classes": 3},
        r"got -100 in row 2\. Rows without a label must be left out",
    ),
    ([0, 1, -1], {}, "class indices from 0 on, got -1 in row 2"),
    (
        [1, 1, 1],
        {"classes": 3},
        "All 3 targets are 1: of one class there is nothing to learn",
    ),
    ([0.0, 1.0], {}, "got dtype torch.float32"),
    ([0.0, 1.5], {"likelihood": "bernoulli"}, "got 1.5 in row 1"),
    (
        [0.0, NAN],
        {"likelihood": "gaussian"},
        "Targets must be finite, got nan in row 1",
    ),
    (
        [[0.0, 1.0], [2.0, INF]],
        {"likelihood": "gaussian"},
        r"got inf in row 1, at \(1,\)",
    ),
    ([], {"likelihood": "gaussian"}, "At least one target is needed"),
    ([0.0], {"likelihood": "gausian"}, "Unknown likelihood 'gausian'"),
]


@pytest.mark.parametrize(("target", "options", "match"), CHECKED)
def test_a_whole_set_of_targets_is_checked_once(
    target: Any, options: Any, match: str
) -> None:
    for form in (
        torch.tensor,
        lambda t: np.array(t, dtype=np.float32 if np.array(t).dtype == float else None),
    ):
        with pytest.raises(ValueError, match=match):
            sb.check_targets(form(target), **options)
    sb.check_targets(torch.tensor([0, -100, 1]), classes=2, ignore_index=-100)
    sb.check_targets(torch.tensor([[0.2, 0.8], [0.9, 0.1]]))
    sb.check_targets(torch.tensor([0.0, 0.4]), "bernoulli")


# Arguments that broadcast, or mean nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: sb.gaussian(
                torch.zeros(1, 6), torch.zeros(6), likelihood_std=torch.ones(6, 1)
            ),
            "does not broadcast",
        ),
        (
            lambda: sb.gaussian(
                torch.zeros(6, 6), torch.zeros(6), likelihood_std=torch.ones(6, 1)
            ),
            "does not broadcast",
        ),
        (
            lambda: sb.heteroscedastic_gaussian(
                torch.zeros(1, 6, 2), torch.zeros(6), likelihood_std=torch.ones(6, 1)
            ),
            "likelihood_std of",
        ),
        (
            lambda: sb.gaussian(torch.zeros(1, 6), torch.zeros(6), likelihood_std=0.0),
            "positive and finite, got 0.0",
        ),
        (
            lambda: sb.heteroscedastic_gaussian(
                torch.zeros(1, 6, 2), torch.zeros(6), likelihood_std=-1.0
            ),
            "got -1.0",
        ),
        (lambda: sb.gaussian(torch.zeros(6), torch.zeros(6)), "draws in front"),
        (
            lambda: sb.categorical(torch.zeros(6, 3), torch.zeros(6).long()),
            "draws in front",
        ),
        (
            lambda: sb.categorical(torch.zeros(2, 6, 3), torch.ones(6, 3)),
            "must sum to 1, got 3",
        ),
        (lambda: sb.categorical(torch.zeros(2, 6, 3), [0] * 6), "got list"),
        (
            lambda: sb.categorical(
                torch.zeros(2, 3, 3), torch.zeros(3).long(), class_dim=1
            ),
            "class_dim=1",
        ),
    ],
)
def test_likelihoods_refuse_what_would_broadcast(call: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        call()


def test_likelihoods_take_scales_of_targets_and_rows() -> None:
    mean, target = torch.zeros(2, 6, 3), torch.zeros(6, 3)
    expected = sb.gaussian(mean, target, likelihood_std=2.0)
    for scale in (
        torch.tensor(2.0),
        torch.full((1, 1), 2.0),
        torch.full((3,), 2.0),
        torch.full((6, 1), 2.0),
    ):
        assert torch.equal(sb.gaussian(mean, target, likelihood_std=scale), expected)


@pytest.mark.parametrize(
    "scale",
    [torch.full((1, 3), 2.0), np.full((5, 3), 2.0), np.full(3, 2.0), [2.0, 2.0, 2.0]],
)
def test_predict_takes_scales_as_deviations_of_columns_and_as_arrays(
    scale: Any,
) -> None:
    model, x = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)), torch.randn(5, 4)
    found, expected = (
        sb.predict(
            model,
            iter([x[:2], x[2:]]),
            np.int64(3),
            likelihood="gaussian",
            likelihood_std=s,
            seed=0,
        )
        for s in (scale, 2.0)
    )
    assert torch.allclose(found.std, expected.std)


def test_probabilities_that_are_rounded_and_a_loss_of_one_number_are_taken() -> None:
    sb.categorical(torch.zeros(2, 6, 7), torch.full((6, 7), 0.14))
    model = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
    assert float(sb.elbo(torch.ones(1), model, num_data=10).nll) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"likelihood": "gaussian", "likelihood_std": -1.0}, "not negative, got -1.0"),
        (
            {"likelihood": "gaussian", "likelihood_std": torch.ones(4, 3)},
            "nor has it a line for each row",
        ),
        (
            {"likelihood": "gaussian", "likelihood_std": torch.ones(6, 3)},
            "6 rows, but 5 were predicted",
        ),
        (
            {"likelihood": "gaussian", "likelihood_std": torch.ones(5, 2)},
            "one row's targets",
        ),
        ({"likelihood": "gaussian", "output": 0}, "returns one tensor"),
        ({"class_dim": 0}, "class_dim=0"),
        ({"class_dim": 1}, "class_dim=1"),
        ({"parallel": None}, "parallel must be"),
        ({"draws": 2.0}, "at least one draw"),
        ({"chunk": 2.5}, "chunk=2.5"),
    ],
)
def test_predict_refuses_options_that_would_mean_something_else(
    options: Any, match: str
) -> None:
    model = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
    with pytest.raises(ValueError, match=match):
        sb.predict(model, torch.randn(5, 4), **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rows": "spilt"}, "spilt"),
        ({"parallel": "yes"}, "parallel must be"),
        ({"draws": 1.5}, "draws=1.5"),
    ],
)
def test_sample_refuses_options_that_would_mean_something_else(
    options: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        sb.sample(
            sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)),
            torch.randn(4, 4),
            **options,
        )


@pytest.mark.parametrize(
    ("nll", "model", "options", "match"),
    [
        (torch.ones(5), None, {}, r"shape \(5,\)"),
        (1.0, None, {}, "got float"),
        (torch.ones(()), nn.Linear(4, 3), {}, "has not been converted"),
        (torch.ones(()), None, {"num_data": float("inf")}, "got inf"),
        (torch.ones(()), None, {"kl_weight": -1.0}, "kl_weight must be"),
    ],
)
def test_elbo_refuses_terms_that_would_count_otherwise(
    nll: Any, model: Any, options: Any, match: str
) -> None:
    model = model or sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
    with pytest.raises(ValueError, match=match):
        sb.elbo(nll, model, **{"num_data": 10, **options})


def test_a_model_without_numbers_is_refused_in_words() -> None:
    model = sb.bayesianize(nn.Linear(4, 3, device="meta"), sb.Rank1(members=2))
    with pytest.raises(ValueError, match="meta device"):
        sb.predict(model, torch.randn(5, 4))


def test_rows_may_have_noise_of_their_own_however_they_are_cut() -> None:
    model, x, scale = (
        sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)),
        torch.randn(7, 4),
        1 + torch.rand(7, 1),
    )
    for options in ({}, {"chunk": 4}):
        found = sb.predict(
            model, x, likelihood="gaussian", likelihood_std=scale, seed=0, **options
        )
        torch.testing.assert_close(found.aleatoric, scale.square().expand(7, 3))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x), batch_size=2
    )
    found = sb.predict(
        model, loader, likelihood="gaussian", likelihood_std=scale, inputs=1
    )
    torch.testing.assert_close(found.aleatoric, scale.square().expand(7, 3))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: sb.metrics.crps_samples(torch.zeros(6, 6), torch.zeros(6, 1)),
            "target of shape",
        ),
        (
            lambda: sb.metrics.crps_mixture(
                torch.zeros(6, 6), torch.ones(6, 6), torch.zeros(6, 1)
            ),
            "target of shape",
        ),
        (
            lambda: sb.metrics.crps_mixture(
                torch.zeros(2, 6), -torch.ones(2, 6), torch.zeros(6)
            ),
            "not negative",
        ),
        (
            lambda: sb.Prediction.from_outputs(
                torch.zeros(2, 6), "gaussian", likelihood_std=-1.0
            ),
            "not negative",
        ),
        (lambda: sb.Prediction.from_outputs(torch.zeros(4, 6)), "one of rows"),
        (
            lambda: sb.Prediction.from_outputs(
                torch.zeros(4, 6), "gaussian", likelihood_std=1.0
            ).log_prob([0.0] * 6),
            "got list",
        ),
    ],
)
def test_predictions_and_scores_refuse_what_would_broadcast(
    call: Any, match: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        call()


@pytest.mark.parametrize("decay", [-1.0, math.nan, {"kernels": -0.1}])
def test_penalties_that_would_reward_are_refused(decay: Any) -> None:
    model = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
    with pytest.raises(ValueError, match="from 0 on"):
        sb.param_groups(model, decay)
    with pytest.raises(ValueError, match="from 0 on"):
        sb.l2(model, shared_weights=-1.0)


def test_a_list_of_batches_is_no_list_of_arguments() -> None:
    model, x = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)), torch.randn(5, 4)
    batches = [(x[:2], torch.zeros(2)), (x[2:], torch.zeros(3))]
    assert torch.equal(
        sb.predict(model, batches, seed=0).probs, sb.predict(model, x, seed=0).probs
    )
    with pytest.raises(ValueError, match="an iterator of batches"):
        sb.predict(model, [x, x])


def test_targets_that_are_none_are_refused_by_what_learns_from_them() -> None:
    model, x, y = (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).eval(),
        torch.randn(9, 4),
        torch.randn(9, 1),
    )
    y[3] = math.nan
    with pytest.raises(ValueError, match="got nan in row 3"):
        sb.laplace(model, [(x, y)], likelihood="gaussian")
    with pytest.raises(ValueError, match="two numbers for each target"):
        sb.laplace(model, [(x, torch.ones(9))], likelihood="heteroscedastic_gaussian")
    with pytest.raises(ValueError, match="NaN or infinite: leave their rows out"):
        sb.distance(
            sb.bayesianize(model, sb.Rank1(members=2)), [(x, y)], likelihood="gaussian"
        )


def test_distances_of_another_network_are_told() -> None:
    model, x = (
        sb.bayesianize(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
            sb.Rank1(members=2),
        ),
        torch.randn(9, 4),
    )
    inner, own = sb.distance(model, [x], at="2"), sb.distance(model, [x])
    sb.predict(model, x, distance=inner)
    with torch.no_grad():
        model[0].weight.mul_(1.1)
    sb.predict(model, x, distance=own)  # rows themselves: weights do not matter
    with pytest.warns(sb.SlimbayesWarning, match="with other weights"):
        sb.predict(model, x, distance=inner)
