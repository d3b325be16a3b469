"""Conversion: what is selected, what is refused and in which words, and what stays as it was."""

import copy
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.convert.summary import Summary
from slimbayes.layers.base import BayesLayer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)
        )
        self.head = nn.Linear(8, 3)
        self.token = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x) + self.token).mean(1))


def converted(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, BayesLayer)}


ALL = {"body.0", "body.3", "head"}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, ALL),
        ("head", None, {"head"}),
        (r"body\.\d", None, {"body.0", "body.3"}),
        (nn.Embedding, None, {"embed"}),
        (".*", None, ALL | {"embed"}),
        (["embed", nn.Linear], None, ALL | {"embed"}),
        (
            lambda name, layer: getattr(layer, "out_features", 0) == 8,
            None,
            {"body.0", "body.3"},
        ),
        (None, "head", ALL - {"head"}),
        (None, [lambda name, layer: name == "body.0", "head"], {"body.3"}),
        (nn.Linear, r"body.*", {"head"}),
    ],
)
def test_selects_by_pattern_type_and_predicate(
    include: object, exclude: object, expected: set[str]
) -> None:
    assert (
        converted(sb.bayesianize(Net(), sb.Rank1(), include=include, exclude=exclude))
        == expected
    )


def test_a_mapping_gives_each_layer_its_method_and_the_first_match_counts() -> None:
    model = sb.bayesianize(
        Net(),
        {"head": sb.BatchEnsemble(members=3), r"body.*|head": sb.Rank1(members=2)},
    )
    details = {r.name: r.detail for r in sb.summary(model).rows}
    assert details["head"] == "BatchEnsemble(members=3)"
    assert details["body.0"] == "Rank1(normal, members=2)"
    assert details["embed"] == "not included"
    assert sb.members(model) == 6
    assert sb.sample(model, torch.randint(10, (5, 4))).shape == (6, 5, 3)


def test_a_second_method_may_take_the_layers_the_first_left() -> None:
    model = sb.bayesianize(Net(), sb.Rank1(members=2), include="head")
    sb.bayesianize(model, sb.BatchEnsemble(members=2), include=r"body.*")
    status = {
        r.name: r.detail for r in sb.summary(model).rows if r.status == "converted"
    }
    assert status == {
        "head": "Rank1(normal, members=2)",
        "body.0": "BatchEnsemble(members=2)",
        "body.3": "BatchEnsemble(members=2)",
    }
    assert (
        type(model).plain is Net and type(model).__bases__[-1] is Net
    )  # one layer of wrapping, not two
    x = torch.randint(10, (4, 4))
    assert sb.sample(model, x).shape == (2, 4, 3)
    sb.debayesianize(model)
    assert not converted(model) and type(model) is Net


def test_an_inner_module_may_be_converted_alone() -> None:
    model = Net()
    sb.bayesianize(model.body, sb.Rank1(members=2))
    x = torch.randint(10, (4, 4))
    assert model(x).shape == (4, 3)
    assert sb.sample(model, x).shape == (2, 4, 3)
    assert {r.name for r in sb.summary(model).rows if r.status == "converted"} == {
        "body.0",
        "body.3",
    }


def test_the_summary_says_why_each_layer_was_skipped() -> None:
    rows = {
        r.name: r
        for r in sb.summary(sb.bayesianize(Net(), sb.Rank1(), exclude="head")).rows
    }
    assert "leave embeddings alone" in rows["embed"].detail
    assert "no weight matrix" in rows["body.1"].detail
    assert "beside those of its submodules" in rows[""].detail
    assert rows["head"].detail == "excluded"
    assert sum(r.before for r in rows.values()) == sum(
        p.numel() for p in Net().parameters()
    )


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(3, 3, dtype=torch.int8), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.float()


class MyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def lazy() -> nn.Module:
    import warnings

    with warnings.catch_warnings(action="ignore"):
        return nn.LazyLinear(3)


UNCONVERTIBLE = {
    "projection": (
        lambda: nn.LSTM(3, 4, proj_size=2),
        r"proj_size=2 adds a projection .* use proj_size=0",
    ),
    "max_norm": (
        lambda: nn.Embedding(4, 3, max_norm=1.0),
        "max_norm rewrites the table",
    ),
    "lazy": (lazy, "it is not initialised yet; run one batch"),
    "whole numbers": (Quantised, "no Bayesian form of .*Quantised is known"),
    "converted": (
        lambda: sb.bayesianize(nn.Linear(3, 3), sb.Rank1()),
        "it is converted already; call debayesianize first",
    ),
}


@pytest.mark.parametrize("kind", UNCONVERTIBLE)
def test_a_layer_that_cannot_be_converted_is_named_and_nothing_changes(
    kind: str,
) -> None:
    make, message = UNCONVERTIBLE[kind]
    model = nn.ModuleDict({"good": nn.Linear(3, 3), "odd": make()})
    before = [type(m) for m in model.modules()]
    include = [nn.Linear, "odd"] if kind == "max_norm" else None
    with pytest.raises(
        ValueError,
        match=rf"cannot be converted:\n  odd .*{message}(.|\n)*exclude=\[\.\.\.\]",
    ):
        sb.bayesianize(model, sb.Rank1(), include=include, strict=True)
    assert [type(m) for m in model.modules()] == before
    assert not hasattr(model, "_slimbayes")
    odd = type(model["odd"])
    sb.bayesianize(model, sb.Rank1(), include=include)
    assert "good" in converted(model) and type(model["odd"]) is odd
    (decision,) = [d for d in model._slimbayes.decisions if d.name == "odd"]
    assert decision.config is None and re.search(message, decision.reason)
    if kind != "converted":
        (row,) = [r for r in sb.summary(model).rows if r.name == "odd"]
        assert row.status == "skipped" and re.search(message, row.detail)


OF_THEIR_OWN: dict[str, Any] = {
    "unknown": Custom,
    "subclass": lambda: MyLinear(3, 3),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("kind", OF_THEIR_OWN)
def test_layers_of_unknown_types_run_their_own_forward_with_drawn_weights(
    kind: str,
) -> None:
    """Each draw is the plain layer with that draw's weight written in; neutral draws are the plain layer."""
    plain, x = OF_THEIR_OWN[kind](), torch.randn(4, 3)
    model = sb.bayesianize(
        nn.ModuleDict({"good": nn.Linear(3, 3), "odd": copy.deepcopy(plain)}),
        sb.Rank1(members=2, scale_init=0.3),
        strict=True,
    )
    assert converted(model) == {"good", "odd"}
    with sb.fixed_draws(model.odd, 4):
        y = sb.sample(model.odd, x)
        assert y.shape == (4, 4, 3) and len(y.flatten(1).unique(dim=0)) == 4
        for j in range(4):
            torch.testing.assert_close(sb.materialize(model.odd, draw=j)(x), y[j])
    neutral = sb.bayesianize(
        copy.deepcopy(plain), sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0))
    )
    torch.testing.assert_close(sb.sample(neutral, x), plain(x).expand(2, 4, 3))


def test_layers_of_unknown_types_may_give_more_than_tensors() -> None:
    class Noted(Custom):
        def forward(self, x: Tensor) -> tuple[Tensor, str, Tensor]:  # type: ignore[override]
            return super().forward(x), "a note", torch.arange(7.0)

    model = sb.bayesianize(Noted(), sb.BatchEnsemble(members=2))
    with sb.fixed_draws(model):
        every = [sb.materialize(model, draw=j)(torch.ones(1, 3))[0] for j in range(2)]
        for rows in (1, 2):
            y, note, table = model(torch.ones(rows, 3))
            assert note == "a note" and torch.equal(table, torch.arange(7.0))
            torch.testing.assert_close(y, torch.cat(every[:rows]))


def test_a_failure_while_building_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net()
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    built = sb.Rank1.build

    def fail_on_the_last(self: sb.Rank1, site: object) -> object:
        if site.n_out == 3:
            raise RuntimeError("out of memory")
        return built(self, site)

    monkeypatch.setattr(sb.Rank1, "build", fail_on_the_last)
    with pytest.raises(RuntimeError, match="out of memory"):
        sb.bayesianize(model, sb.Rank1())
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == list(state)
    assert not hasattr(model, "_slimbayes")


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_refused(argument: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"{argument}='haed' matches no layer with parameters; did you mean 'head'\? Known: .*embed",
    ):
        sb.bayesianize(Net(), sb.Rank1(), **{argument: "haed"})


def test_a_model_without_anything_to_convert_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="No layer would be converted. Reasons given: it has no weight matrix",
    ):
        sb.bayesianize(nn.LayerNorm(3), sb.Rank1())


def test_a_plain_model_is_not_sampled() -> None:
    with pytest.raises(
        ValueError, match=r"This Linear has not been converted.*Deterministic"
    ):
        sb.sample(nn.Linear(3, 3), torch.randn(2, 3))


def test_rows_that_do_not_fit_the_asked_layout_are_refused() -> None:
    model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(members=4))
    with pytest.raises(
        ValueError,
        match=r"4 draws evenly, but the batch has 6 rows. Use a multiple of 4",
    ):
        sb.sample(model, torch.randn(6, 3), rows="split")
    assert sb.sample(model, torch.randn(8, 3), rows="split").shape == (4, 2, 2)


def test_split_rows_go_to_their_members() -> None:
    model, x = (
        sb.bayesianize(nn.Linear(3, 2), sb.BatchEnsemble(members=4)),
        torch.randn(8, 3),
    )
    every = sb.sample(model, x)
    wanted = torch.stack([every[k, 2 * k : 2 * k + 2] for k in range(4)])
    for parallel in ("auto", False):
        torch.testing.assert_close(
            sb.sample(model, x, rows="split", parallel=parallel), wanted
        )


class Mixer(nn.Module):
    """Transposes, so that a layer does not see the rows where it expects them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten()[:15].view(5, 3, 1).expand(5, 3, 4))


def test_an_input_without_recognisable_rows_names_layer_shape_and_remedy_and_runs_draw_by_draw() -> (
    None
):
    model, x = (
        sb.bayesianize(Mixer(), sb.Rank1(members=1, scale_init=0.3)),
        torch.randn(4, 4),
    )
    with pytest.warns(
        UserWarning,
        match=r"draw by draw.*: inner: an input of shape \(5, 3, 4\) has no rows in it.*batch_dim=",
    ):
        model(x)
    with pytest.raises(
        ValueError,
        match=r"parallel=True: the draws of this model cannot share a forward: inner: ",
    ):
        sb.sample(model, x, draws=3, parallel=True)
    with sb.fixed_draws(model, 3):
        y = sb.sample(model, x)
        assert len(y.flatten(1).unique(dim=0)) == 3
        for j in range(3):
            torch.testing.assert_close(sb.materialize(model, draw=j)(x), y[j])


class SequenceFirstHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4) -> (T, B, 2)
        return self.head(self.rnn(x.transpose(0, 1))[0])


@pytest.mark.slow
def test_rows_inside_a_sequence_first_part_are_found() -> None:
    for steps in (
        7,
        6,
        3,
    ):  # 6 steps of 3 rows could also be folded rows, and 3 steps the rows themselves
        x = torch.randn(3, steps, 4)
        model = sb.bayesianize(SequenceFirstHead(), sb.Rank1(members=1, scale_init=0.2))
        y = model(x[:1].expand(3, steps, 4))
        other = sb.bayesianize(
            SequenceFirstHead(), sb.Rank1(members=2, scale_init=0.2, draws="member")
        )
        with sb.fixed_draws(other):
            for j, drawn in enumerate(
                sb.sample(other, x, parallel=True)
            ):  # a draw keeps to its rows at every step
                torch.testing.assert_close(drawn, sb.materialize(other, draw=j)(x))
        assert not torch.allclose(y[:, 0], y[:, 1], atol=1e-3)  # each row its own draw


def test_windows_folded_into_the_batch_share_their_rows_draw() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:  # (B, W, 4)
            return self.inner(x.flatten(0, 1)).view(x.shape)

    model = sb.bayesianize(Windows(), sb.Rank1(members=2, scale_init=0.3))
    y = sb.sample(model, torch.randn(1, 1, 4).expand(3, 5, 4))
    assert torch.allclose(y, y[:, :, :1].expand_as(y), atol=1e-6)
    assert not torch.allclose(y[:, 0], y[:, 1], atol=1e-3)


def test_unknown_config_fields_and_values_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"Rank1 has no field 'membres'; did you mean 'members'\?"
    ):
        sb.config_from_dict({"kind": "Rank1", "membres": 4})
    with pytest.raises(
        ValueError, match=r"Unknown method 'Rank2'; did you mean 'Rank1'\?"
    ):
        sb.config_from_dict({"kind": "Rank2"})
    with pytest.raises(
        ValueError,
        match=r"Unknown distribution family 'Cauchi'; did you mean 'Cauchy'\?",
    ):
        sb.config_from_dict({"kind": "Rank1", "prior": {"kind": "Cauchi"}})
    with pytest.raises(
        ValueError, match=r"Rank1: unknown draws 'exmple'; did you mean 'example'\?"
    ):
        sb.Rank1(draws="exmple")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"members": 0}, "members must be a whole number of at least 1, got 0"),
        ({"members": True}, "members must be a whole number"),
        ({"rank": 1.5}, "rank must be a whole number"),
        ({"scale_init": -1.0}, "A scale must be above"),
        ({"scale_jitter": -0.1}, "scale_jitter must not be negative"),
        ({"clip": 0.0}, "clip must be positive or None"),
        (
            {"posterior": "cauchy", "prior": sb.Normal(1.0, 0.1)},
            r"KL\(Cauchy \|\| Normal\) is infinite",
        ),
        (
            {"posterior": "normal", "prior": sb.HalfCauchy(1.0)},
            "a HalfCauchy prior has none",
        ),
        ({"posterior": "lognormal", "perturbation": "additive"}, "never zero"),
        (
            {"posterior": "lognormal", "mean_init": sb.Signs()},
            "cannot start at random signs",
        ),
        (
            {"prior": sb.Point(1.0), "posterior": "normal"},
            "Point cannot serve as a prior",
        ),
    ],
)
def test_bad_configs_say_what_is_wrong(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sb.Rank1(**fields)


@pytest.mark.parametrize(
    "config",
    [
        sb.Rank1(),
        sb.Rank1(
            members=2,
            prior=sb.Cauchy(0.5, 1e-4),
            mean_init=sb.Signs(0.25),
            rank=3,
            draws="member",
            clip=None,
            random="s",
        ),
        sb.Rank1(posterior="lognormal", prior=sb.HalfCauchy(2.0)),
        sb.Rank1(
            perturbation="additive", posterior="normal", prior=sb.Cauchy(0.0, 0.3)
        ),
        sb.BatchEnsemble(members=7, mean_init=sb.Normal(1.0, 0.5)),
        sb.Deterministic(),
    ],
)
def test_configs_survive_json(config: sb.Config) -> None:
    import json

    assert sb.config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_nan_factors_stop_training_and_prediction_with_the_layers_name() -> None:
    model = sb.bayesianize(Net(), sb.Rank1(members=2))
    with torch.no_grad():
        model.head.posterior["weight"].r.rho.fill_(float("inf"))
    x, y = torch.randint(10, (4, 4)), torch.tensor([0, 1, 2, 0])
    message = r"head\.weight: 6 of 6 values of its posterior's r\.rho are NaN or infinite.*clip gradients"
    with pytest.raises(FloatingPointError, match=message):
        sb.elbo(sb.categorical(sb.sample(model, x), y), model, num_data=10)
    with pytest.raises(FloatingPointError, match=message):
        sb.predict(model, x)


def test_flags_hooks_and_types_survive() -> None:
    model = Net().double()
    model.head.eval().requires_grad_(False)
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    sb.bayesianize(model, sb.Rank1(members=2))
    assert not model.head.training and model.body[0].training
    assert (
        not model.head.weight.requires_grad
        and model.head.posterior["weight"].r.loc.requires_grad
    )
    assert model.head.posterior["weight"].r.loc.dtype == torch.float64
    assert isinstance(model.head, nn.Linear)
    sb.sample(model, torch.randint(10, (4, 4)))  # the first call also locates rows
    calls.clear()
    sb.sample(model, torch.randint(10, (4, 4)))
    assert calls == [1]


def test_registered_layers_convert() -> None:
    from slimbayes.layers import LAYERS
    from slimbayes.layers.linear import BayesLinear

    class BayesMyLinear(BayesLinear, MyLinear):
        plain = MyLinear

        def bayes_forward(self, input: Tensor) -> Tensor:
            return 2 * super().bayes_forward(input)

    sb.register_layer(BayesMyLinear)
    try:
        plain, x = MyLinear(3, 2), torch.randn(4, 3)
        model = sb.bayesianize(
            copy.deepcopy(plain), sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0))
        )
        torch.testing.assert_close(sb.sample(model, x), plain(x).expand(2, 4, 2))
    finally:
        del LAYERS[MyLinear]


def test_fixed_draws_are_held_over_batches_of_any_size_and_fresh_ones_follow() -> None:
    model, x = (
        sb.bayesianize(Net(), sb.Rank1(members=2, scale_init=0.3)),
        torch.randint(10, (6, 4)),
    )
    with sb.fixed_draws(model, 6):
        whole = sb.sample(model, x)
        assert whole.shape == (6, 6, 3)
        torch.testing.assert_close(
            torch.cat([sb.sample(model, x[:1]), sb.sample(model, x[1:])], 1), whole
        )
        bare = model(x)  # six rows, six draws: row j under draw j
        torch.testing.assert_close(bare, torch.stack([whole[j, j] for j in range(6)]))
        with (
            pytest.raises(ValueError, match="cannot run inside another fixed_draws"),
            sb.fixed_draws(model),
        ):
            pass
    assert not torch.allclose(sb.sample(model, x), whole[:2])


@pytest.mark.parametrize(
    "config",
    [
        sb.Rank1(members=3, scale_init=0.3),
        sb.BatchEnsemble(members=3, mean_init=sb.Normal(1.0, 0.5)),
        sb.Ensemble(members=3),
        sb.MeanField(scale_init=0.3),
    ],
)
def test_any_number_of_draws_can_be_held(config: sb.Config) -> None:
    model, x = sb.bayesianize(nn.Linear(4, 2), config), torch.randn(5, 4)
    with sb.fixed_draws(model, 6, seed=1):
        six = sb.sample(model, x)
    with sb.fixed_draws(model, 4, seed=1):
        four = sb.sample(model, x)
        plain = [sb.materialize(model, draw=j)(x) for j in range(4)]
        shared = model(x)
    with sb.fixed_draws(model, seed=1):
        default = sb.sample(model, x)
    torch.testing.assert_close(four, six[:4])
    torch.testing.assert_close(four, torch.stack(plain))
    torch.testing.assert_close(default, six[: sb.members(model)])
    owner = [0, 0, 1, 2, 3]  # five examples are shared out among four draws
    expected = torch.stack([four[j, i] for i, j in enumerate(owner)])
    torch.testing.assert_close(shared, expected)


@pytest.mark.parametrize(
    ("draws", "options", "message"),
    [
        (0, {}, "at least one draw, a whole number, or 'mean', got draws=0"),
        ("median", {}, "a whole number, or 'mean', got draws='median'"),
        ("mean", {"seed": 0}, "draws nothing, so it takes no seed"),
    ],
)
def test_draws_that_cannot_be_held_are_refused(
    draws: Any, options: dict[str, Any], message: str
) -> None:
    model = sb.bayesianize(nn.Linear(4, 2), sb.MeanField())
    with (
        pytest.raises(ValueError, match=message),
        sb.fixed_draws(model, draws, **options),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs either a draw or a member, got neither"),
        ({"draw": 0, "member": 0}, "needs either a draw or a member, got both"),
        ({"draw": 3}, "draw must be a number from 0 to 2, got 3"),
        ({"draw": -1}, "draw must be a number from 0 to 2, got -1"),
        ({"draw": "mean"}, "draw must be a number from 0 to 2, got 'mean'"),
        ({"member": 2}, 'member must be "mean" or a number from 0 to 1, got 2'),
    ],
)
def test_materialize_refuses_what_names_no_single_network(
    options: dict[str, Any], message: str
) -> None:
    model = sb.bayesianize(nn.Linear(4, 2), sb.BatchEnsemble(members=2))
    with sb.fixed_draws(model, 3), pytest.raises(ValueError, match=message):
        sb.materialize(model, **options)


def test_materialize_needs_held_draws_for_a_draw_but_not_for_a_member() -> None:
    model = sb.bayesianize(nn.Linear(4, 2), sb.BatchEnsemble(members=2))
    with pytest.raises(ValueError, match="found no draws that are held"):
        sb.materialize(model, draw=0)
    x = torch.randn(5, 4)
    outside = sb.materialize(model, member=1)(x)
    with sb.fixed_draws(model, "mean"):
        torch.testing.assert_close(sb.materialize(model, draw=1)(x), outside)
        torch.testing.assert_close(sb.materialize(model, member=1)(x), outside)


@pytest.mark.slow
def test_a_bare_call_uses_every_member_for_a_single_row() -> None:
    model = sb.bayesianize(
        nn.Linear(3, 1), sb.BatchEnsemble(members=4, mean_init=sb.Normal(1.0, 0.5))
    )
    x = torch.randn(1, 3)
    members = sb.sample(model, x).flatten()
    seen = [int((members - model(x).item()).abs().argmin()) for _ in range(400)]
    counts = [seen.count(k) for k in range(4)]
    assert min(counts) > 60, counts  # 100 expected, standard deviation 8.7


def test_nothing_is_drawn_twice_in_one_pass() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) - self.inner(x)

    model = sb.bayesianize(Twice(), sb.Rank1(members=2, scale_init=0.5))
    x = torch.randn(5, 3)
    assert not model(x).any() and not sb.sample(model, x).any()
    assert not torch.equal(
        model.inner(x), model.inner(x)
    )  # two passes of the layer alone


@pytest.mark.slow
@pytest.mark.timeout(60)  # a symbolic size that nests with depth would take hours here
def test_a_compiled_model_takes_other_numbers_of_draws() -> None:
    model = sb.bayesianize(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]), sb.BatchEnsemble(members=4)
    )
    torch._dynamo.reset()
    compiled, x = torch.compile(model, backend="eager"), torch.randn(6, 8)
    for draws in (1, 2, 3):
        torch.testing.assert_close(
            sb.sample(compiled, x, draws=draws * sb.members(compiled)),
            sb.sample(model, x, draws=draws * sb.members(model)),
        )


@pytest.mark.parametrize("training", [True, False])
def test_posteriors_join_in_the_mode_of_their_layer(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).train(
        training
    )
    sb.bayesianize(model, sb.Rank1(members=2))
    assert {module.training for module in model.modules()} == {training}


def test_random_signs_never_wreck_a_trained_network_in_silence(tmp_path: Path) -> None:
    """Known where batch norm has counted batches; not for a fresh network, other starts, or a file's own factors."""
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    trained = copy.deepcopy(fresh)
    trained(torch.randn(5, 3))
    signs = sb.BatchEnsemble(members=2, mean_init=sb.Signs(0.5))
    with warnings.catch_warnings(action="error"):
        sb.save(sb.bayesianize(fresh, signs), tmp_path / "net")
        sb.bayesianize(
            copy.deepcopy(trained),
            sb.BatchEnsemble(members=2, mean_init=sb.Normal(1.0, 0.05)),
        )
        sb.load(copy.deepcopy(trained), tmp_path / "net", check_base="structure")
    with pytest.warns(
        sb.SlimbayesWarning,
        match=r"^0: factors that start at random signs .* undo what",
    ):
        sb.bayesianize(trained, signs)


@pytest.mark.parametrize("made", [torch.jit.script, torch.fx.symbolic_trace])
@pytest.mark.parametrize("config", [sb.Rank1(), sb.Ensemble()])
def test_code_that_is_fixed_is_refused_in_words(made: Any, config: sb.Config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        model = made(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="convert the module that it was made of"):
        sb.bayesianize(model, config)


def test_parts_whose_weights_cannot_be_drawn_stay_and_the_summary_says_why() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.script = torch.jit.script(nn.Linear(4, 4))
            self.complex, self.real = (
                nn.Linear(4, 4, dtype=torch.complex64),
                nn.Linear(4, 3),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.real(self.complex(self.script(x).to(torch.complex64)).abs())

    model, x = (
        sb.bayesianize(Halves(), sb.Rank1(members=2, scale_init=0.3)).eval(),
        torch.randn(5, 4),
    )
    text = str(sb.summary(model))
    assert "TorchScript" in text and "complex" in text
    folded = sb.sample(model, x, seed=1)
    torch.testing.assert_close(folded, sb.sample(model, x, seed=1, parallel=False))
    with pytest.raises(ValueError, match="complex"):
        sb.bayesianize(Halves(), sb.Rank1(members=2), strict=True)


def test_the_number_of_networks_is_told_as_far_as_it_is_known() -> None:
    for log_size, at_least, told in [
        (math.log(8), False, "8"),
        (math.log(8), True, "at least 8"),
        (0.0, True, "2^units, as many as its dropout layers see"),
        (math.inf, True, "infinite (continuous)"),
        (math.log(10) * 20, False, "10^20.0"),
    ]:
        assert Summary((), log_size, at_least).ensemble_size == told
