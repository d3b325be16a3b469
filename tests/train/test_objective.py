"""Likelihoods, the ELBO, schedules and predictions (F11, F12, F17)."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import each
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor, nn
from torch import distributions as td
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes.train import schedules
from slimbayes.train.elbo import silent_of_dwarfed
from slimbayes.train.heteroscedastic import noise_scale
from slimbayes.train.targets import check_classes_of

S, B, C = 5, 7, 4


def logits_and_labels(*shape: int) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(S, B, *shape, C, dtype=torch.float64), torch.randint(
        C, (B, *shape)
    )


def binary(*shape: int) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(S, B, *shape, dtype=torch.float64), torch.randint(
        2, (B, *shape)
    ).double()


# F11: the four forms --------------------------------------------------------------------------------------------------


def loop_forms(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Eqs. 11 to 14, one row and one draw at a time; logits (S, B, C)."""
    rows = {form: [] for form in ("average", "mixture", "probs", "logits")}
    for b, y in enumerate(labels):
        logp = [special.log_softmax(logits[s, b])[y] for s in range(len(logits))]
        rows["average"].append(-sum(logp) / len(logp))
        rows["mixture"].append(-math.log(sum(math.exp(v) for v in logp) / len(logp)))
        rows["probs"].append(
            -math.log(np.mean([special.softmax(z[b]) for z in logits], 0)[y])
        )
        rows["logits"].append(-special.log_softmax(logits[:, b].mean(0))[y])
    return {form: float(np.mean(v)) for form, v in rows.items()}


def test_categorical_forms_equal_the_papers_equations() -> None:
    """F11: Eq. 12 = Eq. 14 <= Eq. 13; Eq. 11 is another number."""
    logits, labels = logits_and_labels()
    expected = loop_forms(logits.numpy(), labels.numpy())
    ours = {form: sb.categorical(logits, labels, form).item() for form in expected}
    assert ours == pytest.approx(expected, abs=1e-10)
    assert ours["probs"] == pytest.approx(ours["mixture"], abs=1e-6)
    assert ours["mixture"] < ours["average"] - 0.1
    assert (
        min(abs(ours["logits"] - ours[f]) for f in ("average", "mixture", "probs"))
        > 0.05
    )


def test_bernoulli_forms_equal_two_class_categorical_ones() -> None:
    """F11: sigmoid(z) is softmax((0, z)); holds for Eqs. 11 to 14, and Eq. 12 = Eq. 14 <= Eq. 13."""
    logits, labels = binary()
    two = np.stack([np.zeros((S, B)), logits.numpy()], -1)
    expected = loop_forms(two, labels.long().numpy())
    ours = {form: sb.bernoulli(logits, labels, form).item() for form in expected}
    assert ours == pytest.approx(expected, abs=1e-10)
    assert ours["probs"] == pytest.approx(ours["mixture"], abs=1e-6)
    assert ours["mixture"] < ours["average"] - 0.05
    assert (
        min(abs(ours["logits"] - ours[f]) for f in ("average", "mixture", "probs"))
        > 0.02
    )


@pytest.mark.slow
@given(
    st.integers(0, 2**31),
    st.floats(0.1, 30),
    st.sampled_from([sb.categorical, sb.bernoulli]),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_mixture_is_never_above_average(
    seed: int, spread: float, likelihood: Callable[..., Tensor]
) -> None:
    """F11: Jensen, at any spread of the members."""
    torch.manual_seed(seed)
    logits, labels = logits_and_labels() if likelihood is sb.categorical else binary()
    assert (
        likelihood(spread * logits, labels, "mixture")
        <= likelihood(spread * logits, labels, "average") + 1e-12
    )


@pytest.mark.parametrize(
    ("dtype", "form"),
    each([torch.float32, torch.float64], ["average", "mixture", "logits"]),
)
def test_losses_and_gradients_are_finite_where_softmax_underflows(
    form: str, dtype: torch.dtype
) -> None:
    """F11: logits of +-1e4; a confident wrong member costs 2e4 nats in Eq. 13, log 2 in Eq. 14 beside a right one."""
    logits = torch.tensor(
        [[[1e4, -1e4]], [[-1e4, 1e4]]], dtype=dtype, requires_grad=True
    )
    for loss in (
        sb.categorical(logits, torch.tensor([0]), form),
        sb.bernoulli(logits[..., 0], torch.ones(1, dtype=dtype), form),
    ):
        assert bool(loss.isfinite())
        (grad,) = torch.autograd.grad(loss, logits)
        assert bool(grad.isfinite().all())
    expected = {"average": 1e4, "mixture": math.log(2), "logits": math.log(2)}[form]
    assert sb.categorical(logits, torch.tensor([0]), form).item() == pytest.approx(
        expected, rel=1e-6
    )


# F12: gradients -------------------------------------------------------------------------------------------------------


def test_mixture_gradients_are_weighted_by_responsibilities() -> None:
    """F12, sec. 3.4 corrected: d log(1/K sum p) / d theta_k = (p_k / sum p) d log p_k; the average has 1/K there."""
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    probs = logits.detach().softmax(-1)
    score = F.one_hot(labels, C) - probs  # d log p_k / d logits_k
    density = probs.gather(-1, labels.expand(S, B).unsqueeze(-1))
    responsibility = density / density.sum(0)
    torch.testing.assert_close(
        responsibility.sum(0), torch.ones(B, 1, dtype=torch.float64)
    )
    for form, weight in (
        ("mixture", responsibility),
        ("average", torch.full_like(density, 1 / S)),
    ):
        (grad,) = torch.autograd.grad(sb.categorical(logits, labels, form), logits)
        torch.testing.assert_close(grad, -weight * score / B, rtol=1e-10, atol=1e-14)


def test_average_loss_couples_members_through_shared_weights_only() -> None:
    """F12: under the average a member's own factors do not feel the other's, under the mixture they do."""
    net = sb.bayesianize(
        nn.Linear(3, C), sb.BatchEnsemble(members=2, member_bias=False)
    )
    x, y = torch.randn(B, 3), torch.randint(C, (B,))

    def gradients(form: str, shift: float) -> tuple[Tensor, Tensor]:
        moved = copy.deepcopy(net)
        with torch.no_grad():
            moved.posterior["weight"].r.loc[1] += shift
        sb.categorical(sb.sample(moved, x), y, form).backward()
        return moved.posterior["weight"].r.loc.grad[0], moved.weight.grad

    for form, coupled in (("average", False), ("mixture", True)):
        (own, shared), (own_moved, shared_moved) = (
            gradients(form, 0.0),
            gradients(form, 2.0),
        )
        assert torch.allclose(own, own_moved, atol=1e-6) is not coupled
        assert not torch.allclose(shared, shared_moved, atol=1e-3)


# Real targets ---------------------------------------------------------------------------------------------------------


def mixture_of(mean: Tensor, scale: Tensor) -> td.Distribution:
    """Equal mixture over the first axis of Normals; a row's outputs are independent given the draw."""
    mean, scale = mean.flatten(2).movedim(0, 1), scale.flatten(2).movedim(0, 1)
    parts = td.Independent(td.Normal(mean, scale), 1)
    return td.MixtureSameFamily(
        td.Categorical(torch.ones(mean.shape[:2], dtype=torch.float64)), parts
    )


@pytest.mark.parametrize(("shape", "scale"), each([(), (3,), (2, 3)], [0.3, "vector"]))
def test_gaussian_forms_equal_torch_distributions(
    shape: tuple[int, ...], scale: Any
) -> None:
    """F11 for real targets: the sum over a row's outputs, the mean over rows."""
    mean, target = (
        torch.randn(S, B, *shape, dtype=torch.float64),
        torch.randn(B, *shape, dtype=torch.float64),
    )
    given = (
        torch.rand(B, *shape, dtype=torch.float64) + 0.2 if scale == "vector" else scale
    )
    wide = torch.as_tensor(given, dtype=torch.float64).expand(S, B, *shape)
    flat = target.flatten(1) if shape else target.unsqueeze(1)
    mix = mixture_of(mean.unsqueeze(-1), wide.unsqueeze(-1))
    each = td.Normal(mean, wide).log_prob(target).reshape(S, B, -1).sum(-1)
    pooled = td.Normal(mean.mean(0), wide[0]).log_prob(target).reshape(B, -1).sum(-1)
    expected = {
        "average": -each.mean(),
        "mixture": -mix.log_prob(flat).mean(),
        "probs": -pooled.mean(),
        "logits": -pooled.mean(),
    }
    for form, value in expected.items():
        torch.testing.assert_close(
            sb.gaussian(mean, target, given, form), value, rtol=1e-12, atol=1e-12
        )
    assert expected["mixture"] < expected["average"]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_heteroscedastic_forms_equal_torch_distributions(
    shape: tuple[int, ...],
) -> None:
    """F11: means and softplus scales from the network; "probs" pools mean and variance, "logits" the raw outputs."""
    output, target = (
        torch.randn(S, B, *shape, 2, dtype=torch.float64),
        torch.randn(B, *shape, dtype=torch.float64),
    )
    spread = 3.0
    raw = output.mean(0)

    def noise(z: Tensor) -> Tensor:
        return spread * torch.hypot(
            torch.tensor(0.03).double(), 3 * torch.tanh(0.3 * torch.log1p(z.exp()) / 3)
        )

    mean, scale = output[..., 0], noise(output[..., 1])

    def total(d: td.Distribution) -> Tensor:
        logp = d.log_prob(target)
        return -logp.reshape(*logp.shape[: logp.dim() - len(shape)], -1).sum(-1).mean()

    flat = target.flatten(1) if shape else target.unsqueeze(1)
    expected = {
        "average": total(td.Normal(mean, scale)),
        "mixture": -mixture_of(mean.unsqueeze(-1), scale.unsqueeze(-1))
        .log_prob(flat)
        .mean(),
        "probs": total(td.Normal(mean.mean(0), (scale**2).mean(0).sqrt())),
        "logits": total(td.Normal(raw[..., 0], noise(raw[..., 1]))),
    }
    for form, value in expected.items():
        ours = sb.heteroscedastic_gaussian(output, target, form, spread)
        torch.testing.assert_close(ours, value, rtol=1e-7, atol=1e-7)


def test_heteroscedastic_noise_neither_collapses_nor_explodes() -> None:
    """A head that says "no noise at all" costs at most 556 nats for an error of one standard deviation, not 5e7; and it
    means the same in training and in prediction.
    """
    for spread in (1.0, 1e-3, torch.tensor([1.0, 100.0])):
        unit, raw = torch.as_tensor(spread), torch.tensor([-1e4, 0.0, 1e4])
        noise = noise_scale(raw[:, None].expand(3, unit.numel()), spread) / unit
        torch.testing.assert_close(noise[0], torch.full_like(noise[0], 0.03))
        torch.testing.assert_close(
            noise[2], torch.full_like(noise[2], 3.0), rtol=1e-4, atol=0.0
        )
    worst = sb.heteroscedastic_gaussian(torch.tensor([[[0.0, -1e4]]]), torch.ones(1))
    assert 545 < float(worst) < 556
    output, target = torch.randn(3, 6, 2), 5 * torch.randn(6)
    pred = sb.Prediction.from_outputs(
        output, "heteroscedastic_gaussian", likelihood_std=5.0
    )
    nll = sb.heteroscedastic_gaussian(output, target, "mixture", likelihood_std=5.0)
    torch.testing.assert_close(-pred.log_prob(target).mean(), nll)


def test_heteroscedastic_targets_in_other_units_are_told() -> None:
    output, target = torch.zeros(1, 40, 2), torch.linspace(0, 1e-3, 40)
    with pytest.warns(
        UserWarning,
        match=r"deviation 0.0003, but likelihood_std=1 .*\[0.03, 3\].*standardise",
    ):
        sb.heteroscedastic_gaussian(output, target)
    sb.heteroscedastic_gaussian(output, target, likelihood_std=3e-4)


# Labels of every kind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["average", "mixture", "probs", "logits"])
def test_soft_labels_reduce_to_hard_ones_and_weigh_the_others(form: str) -> None:
    """F11: probabilities as targets; the loss is linear in them."""
    logits, labels = logits_and_labels()
    hard = F.one_hot(labels, C).double()
    torch.testing.assert_close(
        sb.categorical(logits, hard, form),
        sb.categorical(logits, labels, form),
        rtol=1e-12,
        atol=1e-12,
    )
    soft = torch.rand(B, C, dtype=torch.float64).softmax(-1)
    each = [
        sb.categorical(logits[:, b : b + 1], torch.tensor([c]), form).item()
        for b in range(B)
        for c in range(C)
    ]
    expected = (soft.flatten().numpy() * np.array(each)).sum() / B
    assert sb.categorical(logits, soft, form).item() == pytest.approx(
        expected, rel=1e-12
    )
    if form == "average":
        torch_loss = torch.stack([F.cross_entropy(z, soft) for z in logits]).mean()
        torch.testing.assert_close(
            sb.categorical(logits, soft), torch_loss, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("form", ["average", "mixture", "probs", "logits"])
def test_soft_binary_labels_weigh_both_classes(form: str) -> None:
    """F11 for bernoulli targets strictly between 0 and 1."""
    logits, soft = binary()[0], torch.rand(B, dtype=torch.float64)
    each = [
        [
            sb.bernoulli(logits[:, b : b + 1], torch.tensor([v]).double(), form).item()
            for v in (0, 1)
        ]
        for b in range(B)
    ]
    expected = np.mean(
        [
            (1 - y) * no + y * yes
            for y, (no, yes) in zip(soft.tolist(), each, strict=True)
        ]
    )
    assert sb.bernoulli(logits, soft, form).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("form", "index"), each(["average", "mixture", "probs", "logits"], [-100, 2])
)
def test_ignored_labels_count_for_nothing(form: str, index: int) -> None:
    """F11: the mean over the labels that are left, as torch's cross entropy."""
    logits, labels = logits_and_labels(3)
    labels[0, 1] = labels[3] = index
    kept = labels != index
    expected = sb.categorical(logits[:, kept], labels[kept], form)
    ours = sb.categorical(logits, labels, form, ignore_index=index)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    if form == "average":
        torch_loss = torch.stack(
            [
                F.cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=index)
                for z in logits
            ]
        ).mean()
        torch.testing.assert_close(ours, torch_loss, rtol=1e-12, atol=1e-12)


def test_class_dimension_may_lie_anywhere() -> None:
    """F11: images give (S, B, C, H, W)."""
    logits, labels = logits_and_labels(2, 3)
    images = logits.movedim(-1, 2)
    expected = torch.stack([F.cross_entropy(z, labels) for z in images]).mean()
    for class_dim in (2, -3):
        torch.testing.assert_close(
            sb.categorical(images, labels, class_dim=class_dim),
            expected,
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize(
    ("likelihood", "outputs", "target"),
    [
        (sb.gaussian, (S, B, 1), torch.zeros(B)),
        (sb.gaussian, (S, B), torch.zeros(B, 1)),
        (sb.gaussian, (S, B), torch.zeros(1)),
        (sb.heteroscedastic_gaussian, (S, B, 1, 2), torch.zeros(B)),
        (sb.bernoulli, (S, B, 1), torch.zeros(B)),
        (sb.bernoulli, (S, B), torch.zeros(B, 1)),
        (sb.bernoulli, (S, B), torch.zeros(1)),
        (sb.categorical, (B, B, C), torch.zeros(B, 1, dtype=torch.long)),
        (sb.categorical, (S, B, C), torch.zeros(1, dtype=torch.long)),
        (sb.categorical, (S, B, C), torch.full((1, C), 0.25)),
        (sb.categorical, (S, B, C), torch.full((B, 1), 0.25)),
    ],
)
def test_targets_of_another_shape_are_refused(
    likelihood: Callable[..., Tensor], outputs: tuple[int, ...], target: Tensor
) -> None:
    """A target that broadcasts would compare every row with every target, silently."""
    with pytest.raises(ValueError, match="shape"):
        likelihood(torch.zeros(outputs), target)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "target"),
    [
        (sb.categorical, (S, B, C), torch.zeros(B, dtype=torch.long)),
        (sb.categorical, (S, B, C), torch.full((B, C), 0.25)),
        (sb.bernoulli, (S, B), torch.zeros(B)),
        (sb.bernoulli, (S, B), torch.full((B,), 0.5)),
        (sb.gaussian, (S, B), torch.zeros(B)),
        (sb.heteroscedastic_gaussian, (S, B, 2), torch.zeros(B)),
    ],
)
def test_unknown_forms_are_refused_by_name(
    likelihood: Callable[..., Tensor], outputs: tuple[int, ...], target: Tensor
) -> None:
    """A slip in form= must not fall back to another loss."""
    with pytest.raises(ValueError, match="'avarage'; did you mean 'average'"):
        likelihood(torch.zeros(outputs), target, form="avarage")


# The ELBO and schedules -----------------------------------------------------------------------------------------------


def test_temperature_tempers_the_kl_beside_its_annealing_and_is_checked() -> None:
    net, nll = sb.bayesianize(nn.Linear(4, 3), sb.MeanField()), torch.tensor(0.7)
    terms = sb.elbo(nll, net, num_data=50, kl_weight=0.5, temperature=0.1)
    torch.testing.assert_close(terms.loss, 0.7 + 0.05 * sb.kl(net) / 50)
    torch.testing.assert_close(terms.kl, sb.kl(net) / 50)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature must be positive"):
            sb.elbo(nll, net, num_data=50, temperature=wrong)


def test_a_kl_that_dwarfs_the_likelihood_is_told_once_for_a_model() -> None:
    """And not where it is small, tempered, or only looks large because micro-batches share it; the NLL, to which other
    units of a target add any number, is not asked."""
    net, nll = sb.bayesianize(nn.Linear(40, 30), sb.MeanField()), torch.tensor(0.7)
    per_datum = sb.kl(net).item() / 20
    with warnings.catch_warnings(action="error", category=sb.SlimbayesWarning):
        sb.elbo(nll, net, num_data=20, temperature=3 / per_datum)
        sb.elbo(nll / 4, net, num_data=20, micro_batches=4, temperature=3 / per_datum)
        sb.elbo(torch.tensor(-2.0), net, num_data=20, temperature=0.9 / per_datum)
    with pytest.warns(
        sb.SlimbayesWarning,
        match=f"{per_datum:.3g} nats for each datum, more than one can tell",
    ):
        sb.elbo(nll + 1000.0, net, num_data=20)
    with warnings.catch_warnings(action="error", category=sb.SlimbayesWarning):
        sb.elbo(nll, net, num_data=20)
    other = sb.bayesianize(nn.Linear(40, 30), sb.MeanField())
    with (
        silent_of_dwarfed(other),
        warnings.catch_warnings(action="error", category=sb.SlimbayesWarning),
    ):
        sb.elbo(nll, other, num_data=20)
    with pytest.warns(sb.SlimbayesWarning, match="nats for each datum, "):
        sb.elbo(nll / 4, other, num_data=20, micro_batches=4)


def test_elbo_is_per_datum_and_weighs_the_kl_in_the_loss_only() -> None:
    """A.6: loss = nll + weight * KL / N, KL summed over layers, members, r and s, here by torch.distributions."""
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        sb.Rank1(members=3, prior=sb.Normal(1.0, 0.2)),
    )
    expected = 0.0
    for layer in net:
        for factor in (layer.posterior["weight"].r, layer.posterior["weight"].s):
            q = td.Normal(factor.loc, torch.log1p(factor.rho.exp()) + 1e-7)
            expected += td.kl_divergence(q, td.Normal(1.0, 0.2)).sum().item()
    assert sb.kl(net).item() == pytest.approx(expected, rel=1e-5)
    nll = torch.tensor(1.5)
    for weight in (0.0, 0.25, 1.0, torch.tensor(0.5)):
        terms = sb.elbo(nll, net, num_data=200, kl_weight=weight)
        assert terms.nll is nll
        assert terms.kl.item() == pytest.approx(expected / 200, rel=1e-5)
        assert terms.loss.item() == pytest.approx(
            1.5 + float(weight) * expected / 200, rel=1e-5
        )


def test_kl_does_not_depend_on_the_batch_or_the_draws() -> None:
    """A.5: computed from parameters, divided by num_data once."""
    net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(members=2))
    before = sb.kl(net)
    for rows, draws in ((1, 1), (8, 3)):
        sb.sample(net, torch.randn(rows, 3), draws=draws)
        assert torch.equal(sb.kl(net), before)


@pytest.mark.parametrize("num_data", [0, -5])
def test_num_data_must_be_a_size(num_data: int) -> None:
    """A zero would turn the KL into infinity."""
    with pytest.raises(ValueError, match="size of the training set"):
        sb.elbo(
            torch.zeros(()),
            sb.bayesianize(nn.Linear(2, 2), sb.Rank1()),
            num_data=num_data,
        )


def test_linear_annealing_reaches_one_on_the_papers_last_step() -> None:
    """F17: CIFAR: 390 steps, 200 epochs: 1/78,000 at step 0, 1 at step 77,999 and after, never before."""
    weight = schedules.linear(390 * 200)
    assert weight(0) == 1 / 78_000
    assert weight(77_999) == weight(77_999 + 390 * 50) == 1.0
    assert weight(77_998) < 1.0
    assert weight(38_999) == 0.5


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (99, 0.0),
        (100, 0.005),
        (199, 0.005),
        (19_999, 0.995),
        (20_000, 1.0),
        (50_000, 1.0),
    ],
)
def test_staircase_annealing_rises_every_hundred_steps(
    step: int, expected: float
) -> None:
    """F17, F30: slope 5e-5 in steps of 100."""
    assert schedules.staircase(5e-5)(step) == pytest.approx(expected, abs=1e-12)


# Prediction: classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "dtype"), each([0.1, 3.0, 1e4], [torch.float32, torch.float64])
)
def test_class_uncertainty_splits_exactly(scale: float, dtype: torch.dtype) -> None:
    """total = aleatoric + epistemic to the bit, total = entropy of the averaged probabilities, epistemic >= 0."""
    logits = (scale * torch.randn(12, 200, C, dtype=torch.float64)).to(dtype)
    pred = sb.Prediction.from_outputs(logits, members=4)
    probs = special.softmax(logits.double().numpy(), -1)
    mean = probs.mean(0)
    entropy = special.entr(mean).sum(-1)
    assert torch.equal(pred.total, pred.aleatoric + pred.epistemic)
    assert bool((pred.epistemic >= 0).all())
    np.testing.assert_allclose(pred.probs.numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(pred.entropy.numpy(), entropy, atol=2e-6)
    np.testing.assert_allclose(
        pred.aleatoric.numpy(), special.entr(probs).sum(-1).mean(0), atol=2e-6
    )
    np.testing.assert_allclose(
        mean[range(200), pred.label.numpy()], mean.max(-1), atol=1e-6
    )  # rounding breaks ties
    np.testing.assert_allclose(pred.confidence.numpy(), mean.max(-1), atol=1e-6)
    np.testing.assert_allclose(
        pred.member_probs.numpy(), probs.reshape(3, 4, 200, C).mean(0), atol=1e-6
    )


def test_identical_draws_know_nothing_epistemic() -> None:
    """Seven equal draws: the mutual information is zero up to rounding, and rounding never makes it negative."""
    logits = torch.randn(1, 5000, C).expand(7, -1, -1)
    for pred in (
        sb.Prediction.from_outputs(logits),
        sb.Prediction.from_outputs(logits[..., 0], "bernoulli"),
    ):
        assert 0 <= pred.epistemic.min() <= pred.epistemic.max() < 1e-6


def test_epistemic_uncertainty_is_the_mean_divergence_from_the_mean() -> None:
    """The mutual information written another way: mean over draws of KL(p_s || mean)."""
    logits = torch.randn(6, 50, C, dtype=torch.float64)
    probs = special.softmax(logits.numpy(), -1)
    expected = special.rel_entr(probs, probs.mean(0)).sum(-1).mean(0)
    np.testing.assert_allclose(
        sb.Prediction.from_outputs(logits).epistemic.numpy(), expected, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(), (1,)])
def test_binary_predictions_equal_two_class_ones(shape: tuple[int, ...]) -> None:
    """A (S, N) or (S, N, 1) logit z is the pair (0, z)."""
    z = torch.randn(6, 20, dtype=torch.float64)
    one = sb.Prediction.from_outputs(z.reshape(6, 20, *shape), "bernoulli", members=2)
    two = sb.Prediction.from_outputs(
        torch.stack([torch.zeros_like(z), z], -1), members=2
    )
    torch.testing.assert_close(one.probs, two.probs[:, 1], rtol=0, atol=1e-12)
    for name in ("aleatoric", "epistemic", "entropy", "confidence"):
        torch.testing.assert_close(
            getattr(one, name), getattr(two, name), rtol=0, atol=1e-12
        )
    assert torch.equal(one.label, two.label)


def test_ensemble_of_one_is_its_member() -> None:
    """One draw: nothing epistemic, the prediction is the member's own."""
    logits = torch.randn(1, 30, C, dtype=torch.float64)
    pred = sb.Prediction.from_outputs(logits)
    torch.testing.assert_close(pred.probs, logits[0].softmax(-1), rtol=1e-14, atol=0)
    assert pred.epistemic.max() == 0
    real = sb.Prediction.from_outputs(logits, "gaussian", likelihood_std=0.3)
    assert torch.equal(real.mean, logits[0])
    assert real.epistemic.max() == 0


# Prediction: real targets ---------------------------------------------------------------------------------------------


def test_real_uncertainty_is_the_law_of_total_variance() -> None:
    """Mean noise variance plus variance of the means; with a large common offset, where naive sums of squares fail."""
    output = torch.randn(12, 30, 2) * 0.01 + torch.tensor([1000.0, 0.0])
    pred = sb.Prediction.from_outputs(
        output, "heteroscedastic_gaussian", members=3, likelihood_std=1.0
    )
    mean, noise = (
        output[..., 0].double().numpy(),
        noise_scale(output[..., 1]).double().numpy() ** 2,
    )
    np.testing.assert_allclose(pred.epistemic.numpy(), mean.var(0), rtol=1e-2)
    np.testing.assert_allclose(pred.aleatoric.numpy(), noise.mean(0), rtol=1e-5)
    assert torch.equal(pred.variance, pred.aleatoric + pred.epistemic)
    np.testing.assert_allclose(
        pred.std.numpy() ** 2, mean.var(0) + noise.mean(0), rtol=1e-5
    )
    np.testing.assert_allclose(pred.mean.numpy(), mean.mean(0), rtol=1e-6)
    known_noise = sb.Prediction.from_outputs(
        output[..., 0], "gaussian", likelihood_std=0.5
    )
    assert torch.equal(known_noise.aleatoric, torch.full((30,), 0.25))


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_cover_a_known_gaussian(level: float) -> None:
    """Draws N(0, .6^2) with noise .8: the predictive is N(0, 1), so coverage and width are known."""
    generator = torch.Generator().manual_seed(0)
    output = 0.6 * torch.randn(100, 1500, dtype=torch.float64, generator=generator)
    low, high = sb.Prediction.from_outputs(
        output, "gaussian", likelihood_std=0.8
    ).interval(level)
    z = stats.norm.ppf((1 + level) / 2)
    covered = stats.norm.cdf(high.numpy()) - stats.norm.cdf(low.numpy())
    assert covered.mean() == pytest.approx(level, abs=0.01)
    assert (high - low).mean().item() == pytest.approx(2 * z, rel=0.02)


def test_interval_of_class_probabilities_is_their_quantiles() -> None:
    """No noise to add: quantiles of the draws."""
    logits = torch.randn(40, 5, C, dtype=torch.float64)
    low, high = sb.Prediction.from_outputs(logits).interval(0.8)
    expected = np.quantile(special.softmax(logits.numpy(), -1), [0.1, 0.9], axis=0)
    np.testing.assert_allclose(np.stack([low, high]), expected, atol=1e-12)


# predict --------------------------------------------------------------------------------------------------------------


class Guarded(nn.Module):
    """A network that refuses more rows than its limit and records its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, C)
        )
        self.limits, self.modes = (
            [10**9],
            [],
        )  # in a list, which is no flag of the model

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        assert len(x) <= self.limits[0], f"{len(x)} rows"
        self.modes.append(self.training)
        return self.layers(x if shift is None else x + shift)


def guarded(config: sb.Config | None = None) -> Guarded:
    return sb.bayesianize(Guarded(), config or sb.BatchEnsemble(members=3))


@pytest.mark.slow
@given(st.integers(3, 60), st.integers(1, 12), st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_chunks_bound_the_rows_of_a_forward_and_change_nothing(
    chunk: int, draws: int, keep: bool
) -> None:
    """At most `chunk` rows at once, the same numbers as in one go."""
    net, x = guarded(), torch.randn(11, 3)
    sb.predict(net, x)  # locates rows
    whole = sb.predict(net, x, draws=draws)
    net.limits[0] = chunk
    pieces = sb.predict(net, x, draws=draws, chunk=chunk, keep_samples=keep)
    assert pieces.count == whole.count == draws
    for name in ("mean", "member_mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(
            getattr(pieces, name), getattr(whole, name), rtol=0, atol=2e-6
        )
    if keep:
        torch.testing.assert_close(pieces.samples, whole.samples, rtol=0, atol=2e-6)


def test_samples_are_dropped_on_request() -> None:
    """keep_samples=False holds nothing of size S, says so when asked, and gives the same summaries."""
    net, x = guarded(sb.Rank1(members=2, scale_init=0.3)), torch.randn(9, 3)
    results = []
    for keep in (True, False):
        torch.manual_seed(4)
        results.append(sb.predict(net, x, draws=16, chunk=36, keep_samples=keep))
    kept, dropped = results
    assert kept.samples.shape == (16, 9, C)
    held = [v for v in vars(dropped).values() if isinstance(v, Tensor)]
    assert len(held) == 3
    assert all(16 not in v.shape for v in held)
    for name in ("mean", "member_mean", "aleatoric", "epistemic"):
        torch.testing.assert_close(
            getattr(kept, name), getattr(dropped, name), rtol=0, atol=0
        )
    with pytest.raises(ValueError, match="keep_samples=True"):
        dropped.samples  # noqa: B018
    assert "samples" not in dropped.to_numpy()


def test_real_predictions_stream_over_chunks() -> None:
    """The running variance over chunks of draws equals that of all draws at once."""
    net = guarded(sb.Rank1(members=2, scale_init=0.3))
    x = torch.randn(5, 3)
    for likelihood, size in (("gaussian", C), ("heteroscedastic_gaussian", 2)):
        head = (
            net
            if size == C
            else sb.bayesianize(nn.Linear(3, 2), sb.Rank1(members=2, scale_init=0.3))
        )
        torch.manual_seed(4)
        pred = sb.predict(
            head, x, draws=9, chunk=20, likelihood=likelihood, likelihood_std=0.5
        )
        values = pred.samples.double()
        torch.testing.assert_close(
            pred.epistemic.double(), values.var(0, unbiased=False), rtol=1e-4, atol=1e-7
        )
        torch.testing.assert_close(
            pred.mean.double(), values.mean(0), rtol=1e-5, atol=1e-6
        )


def test_predict_averages_the_probabilities_of_sample() -> None:
    """Same seed, same draws: predict is sample of held draws, softmax and a mean; never a mean of logits."""
    net, x = guarded(sb.Rank1(members=2, scale_init=0.5)).eval(), torch.randn(6, 3)
    pred = sb.predict(net, x, draws=6, seed=2)
    with sb.fixed_draws(net, 6, seed=2):
        probs = sb.sample(net, x).softmax(-1).detach()
    torch.testing.assert_close(pred.samples, probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(pred.probs, probs.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        pred.member_probs,
        torch.stack([probs[k::2].mean(0) for k in range(2)]),
        rtol=0,
        atol=1e-6,
    )


def test_predict_inside_fixed_draws_uses_the_held_draws() -> None:
    """The same functions on every batch: rows predicted apart or together agree."""
    net, x = guarded(sb.Rank1(members=2, scale_init=0.5)).eval(), torch.randn(6, 3)
    with sb.fixed_draws(net, 4):
        whole = sb.predict(net, x)
        halves = [sb.predict(net, part).samples for part in x.split(3)]
    assert whole.count == 4
    torch.testing.assert_close(torch.cat(halves, 1), whole.samples, rtol=0, atol=1e-6)


def test_predict_takes_tensors_tuples_dicts_and_loaders() -> None:
    """Inputs of every kind give the same numbers; a loader's targets are ignored and its order kept."""
    net, x, shift = guarded(), torch.randn(10, 3), torch.randn(10, 3)
    plain, shifted = sb.predict(net, x).probs, sb.predict(net, x + shift).probs
    assert (plain - shifted).abs().max() > 0.01
    pairs = DataLoader(TensorDataset(x, torch.zeros(10)), batch_size=4)
    mappings = [{"x": x[i : i + 4], "shift": shift[i : i + 4]} for i in range(0, 10, 4)]
    for batches, expected in (
        (pairs, plain), (DataLoader(x, batch_size=3), plain), ((x[i : i + 1] for i in range(10)), plain), ((x,), plain),
        ((x, shift), shifted), ([x, shift], shifted), ({"x": x, "shift": shift}, shifted), (iter(mappings), shifted),
    ):  # fmt: skip
        torch.testing.assert_close(
            sb.predict(net, batches).probs, expected, rtol=0, atol=1e-6
        )
    torch.testing.assert_close(
        sb.predict(net, {"x": x, "shift": shift}, chunk=6).probs,
        shifted,
        rtol=0,
        atol=1e-6,
    )


def test_predict_runs_in_eval_mode_without_gradients_and_restores_flags() -> None:
    """Also when the model fails half way."""
    net = guarded().train()
    net.layers[1].eval()
    flags = [m.training for m in net.modules()]
    statistics = net.layers[1].running_mean.clone()
    pred = sb.predict(net, torch.randn(6, 3))
    assert not pred.probs.requires_grad
    assert net.modes and not any(net.modes)  # the proof of rows calls it too
    assert [m.training for m in net.modules()] == flags
    assert torch.equal(net.layers[1].running_mean, statistics)
    net.limits[0] = 1
    with pytest.raises(AssertionError, match="rows"):
        sb.predict(net, torch.randn(6, 3))
    assert [m.training for m in net.modules()] == flags


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numpy_arrays_hold_every_summary(dtype: torch.dtype) -> None:
    """to_numpy for plotting and metrics."""
    pred = sb.Prediction.from_outputs(torch.randn(6, 5, C).to(dtype), members=2)
    arrays = pred.to_numpy()
    assert set(arrays) == {
        "mean",
        "member_mean",
        "total",
        "aleatoric",
        "epistemic",
        "samples",
    }
    for name, value in arrays.items():
        assert isinstance(value, np.ndarray)
        np.testing.assert_array_equal(value, getattr(pred, name).numpy())


def test_summaries_of_the_other_kind_of_target_are_refused() -> None:
    """No variance of class labels, no entropy of real targets."""
    classes, real = (
        sb.Prediction.from_outputs(torch.randn(2, 3, C)),
        sb.Prediction.from_outputs(torch.randn(2, 3), "gaussian"),
    )
    for pred, name in (
        (classes, "variance"),
        (classes, "std"),
        (real, "probs"),
        (real, "entropy"),
        (real, "label"),
    ):
        with pytest.raises(AttributeError, match="likelihood"):
            getattr(pred, name)
    with pytest.raises(ValueError, match="did you mean 'categorical'"):
        sb.predict(guarded(), torch.randn(2, 3), likelihood="categorial")


def test_predict_finds_the_classes_of_images() -> None:
    """A segmentation net has them second, where a softmax over the last dimension would go along the width."""
    net = sb.bayesianize(
        torch.nn.Conv2d(1, C, 3, padding=1), sb.BatchEnsemble(members=2)
    )
    x = torch.randn(B, 1, 6, 7)
    with torch.no_grad():
        expected = sb.sample(net, x).softmax(2).mean(0)
    pred = sb.predict(net, x, class_dim=2)
    torch.testing.assert_close(pred.probs, expected.movedim(1, -1))
    assert pred.entropy.shape == (B, 6, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        sb.Rank1(members=2),
        *(sb.KTied(rank=2, estimator=e) for e in ("reparam", "local")),
        sb.ModelPatch(components=2, patch="norm+output", tau=1.0),
    ],
    ids=lambda config: f"{type(config).__name__}-{getattr(config, 'estimator', '')}",
)
def test_a_loss_with_its_draws_and_kl_is_one_graph_once_rows_are_located(
    config: sb.Config,
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), config
    )
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])

    def loss() -> Tensor:
        return sb.elbo(sb.categorical(sb.sample(net, x), y), net, num_data=100).loss

    with torch.no_grad():
        sb.sample(net, x)
    graphs: list[int] = []
    count = lambda graph, _: graphs.append(len(graph.graph.nodes)) or graph.forward  # noqa: E731
    found = torch.compile(loss, fullgraph=True, backend=count, dynamic=False)()
    found.backward()
    assert len(graphs) == 1 and bool(found.isfinite())
    trained = [p for p in net.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            torch.tensor([0.0, 2.0]),
            r"class indices from 0 to 2, got dtype torch.float32: .*target.long\(\)",
        ),
        (torch.tensor([0, 3]), "class indices from 0 to 2"),
        (torch.tensor([-1, -1]), "All 2 targets are ignore_index=-1"),
    ],
)
def test_what_is_no_class_is_refused(target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_classes_of(target, 3, -1)
    check_classes_of(torch.tensor([0, 2, -1]), 3, -1)
