"""Numbers that used to be silently wrong or infinite: extreme logits, wrong shapes, open fields, ranks and costs.

Expected values come from closed forms in Python floats or from scipy.
"""

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from covering import each, pairwise
from scipy import integrate, special
from slimbayes_lab.papers.table import averages
from slimbayes_lab.runs.scores import class_scores
from torch import Tensor, nn

import slimbayes as sb
import slimbayes.layers
import slimbayes.metrics as sm
from slimbayes.decisions import TemperatureScaling
from slimbayes.distributions.kl import kl as kl_of
from slimbayes.layers import bayes_class
from slimbayes.posteriors.configs.base import Config
from slimbayes.posteriors.k_tied import KTiedPosterior
from slimbayes.posteriors.target_layers import chosen_layers
from slimbayes.prediction.averages import Accumulator
from slimbayes.prediction.stacking import stack

FORMS = ("average", "mixture", "probs", "logits")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def predicted(
    outputs: Tensor, likelihood: str = "categorical", **options: Any
) -> sb.Prediction:
    return sb.Prediction.from_outputs(outputs, likelihood, **options)


# Log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), each(DTYPES, [17.0, 200.0, 5000.0]))
def test_log_prob_of_classes_is_finite_at_any_logit(
    dtype: torch.dtype, size: float
) -> None:
    pred = predicted(torch.tensor([[[0.0, size]]], dtype=dtype))
    size = float(torch.tensor(size, dtype=dtype))  # as the type holds it
    assert pred.log_prob(torch.tensor([0])).item() == pytest.approx(
        -size - math.log1p(math.exp(-size)), rel=1e-6
    )
    assert pred.log_prob(torch.tensor([1])).item() == pytest.approx(
        -math.log1p(math.exp(-size)), abs=1e-7
    )
    assert pred.label.item() == 1 and pred.confidence.item() == pytest.approx(1)


@pytest.mark.parametrize(("dtype", "logit"), each(DTYPES, [17.0, -17.0, 200.0, -200.0]))
def test_log_prob_of_binary_targets_is_finite_at_any_logit(
    dtype: torch.dtype, logit: float
) -> None:
    pred = predicted(torch.tensor([[logit]], dtype=dtype), "bernoulli")
    for target, sign in ((1, 1), (0, -1)):
        expected = float(special.log_expit(sign * logit))
        assert pred.log_prob(torch.tensor([target])).item() == pytest.approx(
            expected, rel=1e-5
        )
        assert pred.draw_log_prob(torch.tensor([target])).item() == pytest.approx(
            expected, rel=1e-5
        )
    assert pred.entropy.item() == pytest.approx(
        (1 + abs(logit)) * math.exp(-abs(logit)), rel=1e-5, abs=1e-37
    )


@pytest.mark.parametrize("weights", [None, (0.7, 0.3), (1.0, 0.0)])
def test_mixture_of_draws_is_equation_14_where_probabilities_underflow(
    weights: tuple[float, ...] | None,
) -> None:
    """Two members of two draws, whose probabilities of the target are e^-200, e^-300, e^-150 and e^-400."""
    sizes = np.array([200.0, 300.0, 150.0, 400.0])
    outputs = torch.stack([torch.zeros(4, 1), torch.tensor(sizes[:, None])], -1).float()
    share = np.tile(np.array(weights or (0.5, 0.5)) / 2, 2)
    with np.errstate(divide="ignore"):
        expected = special.logsumexp(-sizes, b=share)
    target = torch.tensor([0])
    for likelihood, given in (
        ("categorical", outputs),
        ("bernoulli", -outputs[..., 1]),
    ):
        hit = target if likelihood == "categorical" else 1 - target
        pred = predicted(given, likelihood, members=2, weights=weights)
        assert pred.log_prob(hit).item() == pytest.approx(expected, rel=1e-6)
        running = Accumulator(likelihood, 2, 0.0, keep=False, weights=weights)
        for chunk in given.split(2):
            running.add(chunk)
        assert sb.Prediction(**running.fields()).log_prob(hit).item() == pytest.approx(
            expected, rel=1e-6
        )
        assert sb.Prediction(**running.fields()).by_draw is None
    assert sb.categorical(outputs, target, "mixture").item() == pytest.approx(
        -special.logsumexp(-sizes, b=0.25)
    )


def test_members_add_up_in_log_space() -> None:
    """The log of a member's mean probability, of classes and of densities, and their mixture."""
    outputs, target = (
        50 * torch.randn(6, 9, 4, dtype=torch.float64),
        torch.randint(4, (9,)),
    )
    pred = predicted(outputs, members=3)
    logp = special.log_softmax(outputs.numpy(), -1)[
        :, range(9), target.numpy()
    ].reshape(2, 3, 9)
    expected = special.logsumexp(logp, axis=0) - math.log(2)
    np.testing.assert_allclose(pred.member_log_prob(target).numpy(), expected)
    real = predicted(outputs[..., 0], "gaussian", members=3, likelihood_std=2.0)
    value = torch.randn(9, dtype=torch.float64)
    assert real.member_log_prob(value).shape == (3, 9)
    together = torch.logsumexp(real.member_log_prob(value), 0) - math.log(3)
    torch.testing.assert_close(together, real.log_prob(value))


def test_entropies_and_mutual_information_of_sure_draws() -> None:
    """Two draws that are sure of opposite classes: one bit epistemic, next to nothing aleatoric."""
    opposite = {
        "categorical": [[[200.0, 0.0]], [[0.0, 200.0]]],
        "bernoulli": [[200.0], [-200.0]],
    }
    for likelihood, outputs in opposite.items():
        pred = predicted(torch.tensor(outputs), likelihood)
        assert (
            pred.epistemic.item() == pytest.approx(math.log(2))
            and pred.aleatoric.item() < 1e-30
        )
    masked = predicted(torch.tensor([[[1.0, 1.0, -math.inf]]]))
    assert (
        masked.entropy.item() == pytest.approx(math.log(2)) and masked.probs[0, 2] == 0
    )
    assert bool(
        predicted(torch.full((1, 1, 3), math.nan)).entropy.isnan()
    )  # what is not a number stays visible


def test_memory_does_not_grow_with_draws() -> None:
    running = Accumulator("categorical", 2, 0.0, keep=False)
    for _ in range(50):
        running.add(torch.randn(4, 3, 5))
    held = (
        [v for v in vars(running).values() if isinstance(v, Tensor)]
        + running.samples
        + running.noises
    )
    assert sum(t.numel() for t in held) == 2 * 3 * 5 + 3
    assert sb.Prediction(**running.fields()).count == 200


def test_predictions_join_along_rows() -> None:
    outputs, target = torch.randn(6, 9, 4), torch.randint(4, (9,))
    for likelihood in ("categorical", "heteroscedastic_gaussian"):
        given = outputs if likelihood == "categorical" else outputs[..., :2]
        options: dict[str, Any] = {"members": 3, "weights": [0.5, 0.3, 0.2]}
        options |= {} if likelihood == "categorical" else {"likelihood_std": 1.0}
        whole = predicted(given, likelihood, **options)
        parts = [
            predicted(part, likelihood, **options) for part in given.split([4, 5], 1)
        ]
        joined = sb.Prediction.joined(parts)
        for name in (
            "mean",
            "member_mean",
            "samples",
            "aleatoric",
            "epistemic",
            "weights",
        ):
            torch.testing.assert_close(
                getattr(joined, name), getattr(whole, name), msg=name
            )
        y = target if likelihood == "categorical" else target.float()
        torch.testing.assert_close(joined.log_prob(y), whole.log_prob(y))
    with pytest.raises(ValueError, match="no batch"):
        sb.Prediction.joined([])


# TemperatureScaling ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "likelihood"), each([0.1, 1.0, 100.0], ["categorical", "bernoulli"])
)
def test_temperature_of_very_sure_predictions(scale: float, likelihood: str) -> None:
    """Logits of +-17 x scale, of which sigmoid(1.7) are right: the temperature is 10 x scale, in closed form."""
    rows = 10_000
    right = round(rows / (1 + math.exp(-1.7)))
    exact = 17 * scale / math.log(right / (rows - right))
    sign = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
    z = 17 * scale * sign
    target = ((sign > 0) ^ (torch.arange(rows) >= right)).long()
    outputs = (
        z[None]
        if likelihood == "bernoulli"
        else torch.stack([torch.zeros_like(z), z], -1)[None]
    )
    pred = predicted(outputs, likelihood)
    if exact > 100:
        with pytest.warns(sb.SlimbayesWarning, match="so 100 was taken"):
            assert TemperatureScaling.fit(pred, target).temperature == pytest.approx(
                100.0, rel=1e-3
            )
    else:
        found = TemperatureScaling.fit(pred, target)
        assert found.temperature == pytest.approx(exact, rel=1e-3)
        scaled = found(pred).probs
        sure = scaled if likelihood == "bernoulli" else scaled[..., 1]
        torch.testing.assert_close(
            sure,
            torch.where(sign > 0, right / rows, 1 - right / rows),
            rtol=1e-3,
            atol=1e-4,
        )


# Metrics and tables ---------------------------------------------------------------------------------------------------


def test_nll_metric_is_equation_14() -> None:
    pred = predicted(torch.tensor([[[0.0, 200.0]]]))
    metric = sm.NLL()
    metric.update(pred, torch.tensor([0]))
    assert float(metric.compute()) == 200
    binary = sm.NLL()
    binary.update(
        predicted(torch.tensor([[200.0, -200.0]]), "bernoulli"), torch.tensor([0, 0])
    )
    assert float(binary.compute()) == 100
    soft = sm.SoftLabelNLL()
    soft.update(pred, torch.tensor([[1.0, 1.0]]))
    assert float(soft.compute()) == 100
    outputs, target = (
        80 * torch.randn(8, 50, 5, dtype=torch.float64),
        torch.randint(5, (50,)),
    )
    many = sm.NLL()
    many.update(predicted(outputs), target)
    assert float(many.compute()) == pytest.approx(
        float(sb.categorical(outputs, target, "mixture"))
    )


def test_divergence_of_sure_members_is_finite() -> None:
    metric = sm.PairwiseKL()
    metric.update(predicted(torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]]), members=2))
    assert float(metric.compute()) == pytest.approx(200)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("members", [1, 2])
def test_evaluation_of_sure_predictions_is_finite(
    likelihood: str, members: int
) -> None:
    """What lab.evaluate reports: wrong by 200 nats with every draw."""
    outputs = torch.tensor([[[0.0, 200.0]] * 3] * 2)
    scores = class_scores(
        2, 15, members, likelihood == "bernoulli", torch.device("cpu")
    )
    given = outputs if likelihood == "categorical" else outputs[..., 1]
    scores.update(
        predicted(given, likelihood, members=members), torch.tensor([0, 0, 1])
    )
    found = scores.result(curves=False)
    assert found["metrics"]["nll"] == pytest.approx(400 / 3)
    assert [one["nll"] for one in found["members"]] == pytest.approx(
        [400 / 3] * (members if members > 1 else 0)
    )
    assert all(
        math.isfinite(value)
        for value in (found["metrics"] | found["diversity"]).values()
    )


def test_tables_show_scores_that_are_not_finite() -> None:
    from slimbayes_lab.papers.table import _value

    found = averages(
        [{"nll": 0.5, "ece": 0.1}, {"nll": math.inf, "ece": 0.3}, {"nll": math.nan}], {}
    )
    assert found["ece"]["mean"] == pytest.approx(0.2) and found["nll"]["count"] == 3
    assert json.loads(json.dumps(found, allow_nan=False))["nll"]["mean"] == "inf/nan"
    assert _value(found["nll"], 3) == "inf/nan"


# Likelihoods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_finite_at_sure_logits(form: str) -> None:
    logits = torch.tensor([[[0.0, 200.0]], [[0.0, 150.0]]], requires_grad=True)
    loss = sb.categorical(logits, torch.tensor([0]), form)
    loss.backward()
    expected = {"average": 175.0, "logits": 175.0}.get(form, 150 + math.log(2))
    assert (
        loss.item() == pytest.approx(expected)
        and bool(logits.grad.isfinite().all())
        and bool(logits.grad.any())
    )
    for target in (torch.tensor([0]), torch.tensor([[0.5, 0.5]])):
        assert bool(sb.categorical(logits, target, form).isfinite())
    binary = torch.tensor([[200.0], [150.0]], requires_grad=True)
    loss = sb.bernoulli(binary, torch.tensor([0.0]), form)
    loss.backward()
    assert (
        loss.item() == pytest.approx(expected)
        and bool(binary.grad.isfinite().all())
        and bool(binary.grad.any())
    )


def test_losses_refuse_outputs_that_do_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"last dimension of 2; got outputs of shape \(3, 5, 4\)"
    ):
        sb.heteroscedastic_gaussian(torch.zeros(3, 5, 4), torch.zeros(5))
    with pytest.raises(
        ValueError, match=r"last dimension of 2; got outputs of shape \(3, 5\)"
    ):
        predicted(torch.zeros(3, 5), "heteroscedastic_gaussian")
    with pytest.raises(
        ValueError,
        match=r'at least two classes, got one .* use likelihood="bernoulli".* "gaussian"',
    ):
        sb.categorical(torch.zeros(3, 5, 1), torch.zeros(5).long())
    with pytest.raises(
        ValueError,
        match=r"at least two classes, got one along dimension -1 .* \(3, 5, 1\)",
    ):
        predicted(torch.zeros(3, 5, 1))


def test_classes_of_images_are_not_guessed() -> None:
    pixels = torch.randn(3, 2, 5, 8, 8)
    with pytest.raises(
        ValueError,
        match=r"\(3, 2, 5, 8, 8\) do not say where .* class_dim=2 for images",
    ):
        predicted(pixels)
    assert predicted(pixels, class_dim=2).probs.shape == (2, 8, 8, 5)
    assert predicted(pixels, class_dim=-1).probs.shape == (2, 5, 8, 8)
    assert predicted(pixels[..., 0]).probs.shape == (2, 5, 8)  # a sequence
    with pytest.raises(ValueError, match="got one along dimension 2"):
        predicted(pixels[:, :, :1], class_dim=2)


# Stacking -------------------------------------------------------------------------------------------------------------


class Cut(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear, self.classes = nn.Linear(2, 4), classes

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., : self.classes]

    def extra_repr(self) -> str:
        return str(self.classes)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_stack_refuses_unequal_members() -> None:
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    with pytest.raises(ValueError, match="members that predict in one shape"):
        stack(sb.ensemble([Cut(2), Cut(3)]), x, y)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    net = sb.bayesianize(
        net, {"0": sb.Ensemble(members=2), "2": sb.Ensemble(members=3)}
    )
    with pytest.raises(ValueError, match=r"unequal numbers of them \(0.*: 2, 2.*: 3\)"):
        stack(net, x, y)


# Rank1's config -------------------------------------------------------------------------------------------------------


def test_open_fields_follow_what_is_changed() -> None:
    config = dataclasses.replace(sb.Rank1(), perturbation="additive")
    assert config == sb.Rank1(perturbation="additive") and hash(config) == hash(
        sb.Rank1(perturbation="additive")
    )
    assert config.resolved().prior == sb.Normal(
        0.0, 0.1
    ) and config.resolved().mean_init == sb.Normal(0.0, 0.05)
    layer = sb.bayesianize(nn.Linear(300, 300), config)
    assert layer.posterior["weight"].r.loc.mean().abs() < 0.01
    cauchy = dataclasses.replace(sb.Rank1(), prior=sb.Cauchy(1.0, 0.2)).resolved()
    assert (cauchy.posterior, cauchy.scale_jitter, cauchy.prior) == (
        "cauchy",
        0.0,
        sb.Cauchy(1.0, 0.2),
    )
    assert cauchy.resolved() == cauchy
    assert sb.Rank1(scale_jitter=0.0).resolved().scale_jitter == 0.0
    assert sb.Rank1(prior=sb.Cauchy(1.0, 0.1)).describe() == "Rank1(cauchy, members=4)"


@pytest.mark.parametrize(
    "changes",
    [{}, {"perturbation": "additive", "clip": 3.0}, {"prior": sb.Cauchy(1.0, 0.1)}],
)
def test_open_fields_survive_json(changes: dict[str, Any]) -> None:
    for config in (sb.Rank1(**changes), sb.Rank1(**changes).resolved()):
        again = sb.Rank1.from_dict(json.loads(json.dumps(config.to_dict())))
        assert (
            again == config
            and hash(again) == hash(config)
            and repr(again) == repr(config.resolved())
        )
    assert (
        sb.Rank1(prior=sb.Normal(1.0, 0.1))
        == sb.Rank1()
        != sb.Rank1(prior=sb.Cauchy(1.0, 0.1))
    )


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"scale_init": 0.0},
            ValueError,
            'must be positive, got 0.* use posterior="point", or BatchEnsemble',
        ),
        ({"scale_init": -0.1}, ValueError, "A scale must be above"),
        (
            {"scale_init": "0.1"},
            TypeError,
            "scale_init must be a number or None, got str '0.1'",
        ),
        (
            {"prior": 0.1},
            TypeError,
            r"prior must be a distribution .* got float 0.1. Write prior=Normal\(1.0, 0.1\)",
        ),
        ({"mean_init": 1}, TypeError, "mean_init must be a distribution .* got int 1"),
        ({"prior": sb.Normal}, TypeError, "prior must be a distribution such as"),
        (
            {"prior": sb.HeNormal()},
            ValueError,
            "HeNormal is no prior of factors; use one of Normal, Cauchy",
        ),
        ({"clip": True}, TypeError, "clip must be a number or None, got bool True"),
        ({"posterior": 3}, ValueError, "unknown posterior 3"),
    ],
)
def test_values_that_no_rank1_can_have(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        sb.Rank1(**changes)


def test_points_need_no_scale() -> None:
    sb.bayesianize(nn.Linear(3, 2), sb.Rank1(posterior="point", scale_init=0.0))


# Ranks and costs ------------------------------------------------------------------------------------------------------


def test_narrow_matrices_lower_the_rank_and_say_so() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)), sb.KTied(rank=2)
    )
    first, last = (net[i].posterior["weight"] for i in (0, 2))
    assert (first.rank, first.note) == (2, "")
    assert (last.rank, last.note) == (
        1,
        "rank lowered from 2 to 1: the matrix is 64 x 1",
    )
    assert last.log_u.shape == (64, 1) and last.log_v.shape == (1, 1)
    assert last.scale().detach().mean().item() == pytest.approx(
        0.01, rel=0.1
    )  # still starts at scale_init
    assert sb.sample(net, torch.randn(5, 8), draws=3).shape == (3, 5, 1)
    only = sb.bayesianize(nn.Linear(64, 1), sb.MatrixNormal()).posterior["weight"]
    assert isinstance(only, KTiedPosterior) and (only.rank, only.note) == (1, "")


@pytest.mark.parametrize(
    ("config", "relative"),
    [
        (sb.KTied(rank=3), 1.0),
        (sb.KTied(rank=3, estimator="local"), 1 + 6 * 2000 / 1e6),
        (sb.KTied(rank=3, estimator="local", max_scale=0.5), 2.0),
        (sb.KTied(rank=3, estimator="flipout"), 2.001),
        (sb.MatrixNormal(estimator="local"), 1 + 2000 / 1e6),
        (sb.MeanField(), 1.0),
        (sb.MeanField(estimator="local"), 2.0),
        (sb.MeanField(estimator="flipout"), 2.001),
        (sb.Rank1(), 1.001),
        (sb.Rank1(rank=3), 3.003),
        (sb.BatchEnsemble(rank=2), 2.002),
        (sb.DropConnect(), 1.0),
    ],
)
def test_methods_own_their_cost(config: Config, relative: float) -> None:
    """Multiply-adds at each position of a 1000 x 1000 matrix, counted by hand; weights are drawn once a pass."""
    assert sb.estimate_cost(
        nn.Linear(1000, 1000), config
    ).relative_flops == pytest.approx(relative)


# ModelPatch -----------------------------------------------------------------------------------------------------------


def test_output_layers_are_told_by_what_they_are() -> None:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Unflatten(1, (8, 1, 1)), nn.ConvTranspose2d(8, 3, 2)
    )
    sb.bayesianize(net, sb.ModelPatch(patch="output"))
    assert [r.name for r in sb.summary(net).rows if r.status == "converted"] == ["2"]
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LSTM(8, 8))
    sb.bayesianize(words, sb.ModelPatch(patch="input+output"))
    assert [r.name for r in sb.summary(words).rows if r.status == "converted"] == ["1"]
    with pytest.raises(
        ValueError, match=r"an output layer \(dense or convolutional\) and found none"
    ):
        sb.bayesianize(
            nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 4), nn.LayerNorm(4)),
            sb.ModelPatch(patch="output"),
        )


def test_norms_are_told_by_what_they_are() -> None:
    net = nn.Sequential(
        nn.Linear(4, 8),
        nn.RMSNorm(8),
        nn.LayerNorm(8, elementwise_affine=False),
        nn.GroupNorm(2, 8),
    )
    assert all(bayes_class(net[i]).bayes_kind == "norm" for i in (1, 2, 3))
    sb.bayesianize(net, sb.ModelPatch())
    assert [r.name for r in sb.summary(net).rows if r.status == "converted"] == [
        "1",
        "3",
    ]


def test_norms_of_other_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that another package calls something else, once the library has a class for it."""

    class Scaled(nn.LayerNorm):
        pass

    known = slimbayes.layers.bayes_class
    monkeypatch.setattr(
        slimbayes.layers,
        "bayes_class",
        lambda m: known(nn.LayerNorm(1) if type(m) is Scaled else m),
    )
    net = nn.Sequential(nn.Linear(4, 4), Scaled(4))
    assert chosen_layers("a test", "norm", net, {"0": net[0], "1": net[1]}) == {"1"}


# The objective --------------------------------------------------------------------------------------------------------


def test_accumulated_micro_batches_have_the_gradient_of_the_batch() -> None:
    """With the same noise for each, so that all meet the same weights."""
    net = sb.bayesianize(nn.Linear(3, 4), sb.MeanField(scale_init=0.3))
    x, y = torch.randn(8, 3), torch.randint(4, (8,))

    def gradients(parts: int) -> dict[str, Tensor]:
        net.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            torch.manual_seed(3)
            nll = sb.categorical(sb.sample(net, a), b) / parts
            sb.elbo(
                nll, net, num_data=100, kl_weight=0.7, micro_batches=parts
            ).loss.backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    whole, accumulated = gradients(1), gradients(4)
    for name, gradient in whole.items():
        torch.testing.assert_close(accumulated[name], gradient, msg=name)
    quarter = sb.elbo(torch.zeros(()), net, num_data=100, micro_batches=4)
    assert quarter.kl.item() == pytest.approx(sb.kl(net).item() / 400)
    for wrong in (0, -1, 2.5):
        with pytest.raises(
            ValueError, match="micro_batches must be a whole number of at least 1"
        ):
            sb.elbo(torch.zeros(()), net, num_data=100, micro_batches=wrong)


@pytest.mark.parametrize(
    ("dtype", "narrow", "offset"),
    pairwise(
        [torch.float64, torch.float32],
        [0.1, 1e-2, 1e-4, 1e-6],
        [0.0, 0.01, 0.5, 1.0, 3.0],
    ),
)
def test_kl_of_a_normal_under_a_far_narrower_cauchy(
    dtype: torch.dtype, narrow: float, offset: float
) -> None:
    """Against adaptive quadrature cut at the prior's scales: 1e-4 nats, where it was 1e-3, and infinite in float32."""

    def integrand(z: float) -> float:
        return (
            math.exp(-0.5 * z**2)
            / math.sqrt(2 * math.pi)
            * math.log1p(((z + offset) / narrow) ** 2)
        )

    near = {sign * 10.0**power - offset for sign in (-1, 1) for power in range(-7, 1)}
    cuts = sorted({-12.0, 12.0, -offset} | near)
    parts = itertools.pairwise(cuts)
    mean = sum(
        integrate.quad(integrand, low, high, epsabs=1e-12, limit=200)[0]
        for low, high in parts
    )
    expected = mean + math.log(narrow * math.pi) - 0.5 * math.log(2 * math.pi * math.e)
    q = sb.Normal(torch.tensor(1 + offset, dtype=dtype), torch.tensor(1.0, dtype=dtype))
    assert kl_of(q, sb.Cauchy(1.0, narrow)).item() == pytest.approx(expected, abs=1e-4)
