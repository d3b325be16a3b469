"""Stacking weights against optimality conditions, scipy, closed forms and simulated mixtures (Yao et al. 2018)."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from torch import Tensor

import slimbayes as sb
from slimbayes.prediction.stacking import factored_weights, stacking_weights

pytestmark = pytest.mark.usefixtures("last_draws")


def problem(seed: int, draws: int, rows: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    level = 10 * torch.randn(
        rows, generator=generator, dtype=torch.float64
    )  # what all draws share must not matter
    return level + spread * torch.randn(
        draws, rows, generator=generator, dtype=torch.float64
    )


def score(log_probs: Tensor, weights: Any) -> float:
    """Mean log score of a mixture, in numpy."""
    with np.errstate(divide="ignore"):
        return float(
            special.logsumexp(
                log_probs.numpy() + np.log(np.asarray(weights))[:, None], 0
            ).mean()
        )


# One weight for each draw ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 100), st.floats(-3, 3))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_weights_meet_the_optimality_conditions(
    seed: int, draws: int, rows: int, exponent: float
) -> None:
    """KKT: mean_n p_s / mixture is at most 1, and 1 where a weight is positive. Spreads from 0.001 to 1000 nats."""
    log_probs = problem(seed, draws, rows, 10**exponent)
    weights = stacking_weights(log_probs)
    assert weights.shape == (draws,)
    assert bool((weights >= 0).all())
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    probs = np.exp(log_probs.numpy() - log_probs.numpy().max(0))
    gradient = (probs / (weights.numpy() @ probs)).mean(1)
    assert gradient.max() <= 1 + 1e-8
    assert np.abs(weights.numpy() * (1 - gradient)).max() < 1e-8
    vertices = [score(log_probs, np.eye(draws)[s]) for s in range(draws)]
    assert (
        score(log_probs, weights)
        >= max(*vertices, score(log_probs, np.full(draws, 1 / draws))) - 1e-8
    )


@pytest.mark.parametrize(("draws", "rows"), [(2, 30), (4, 50), (6, 20), (5, 2)])
def test_weights_agree_with_scipy(draws: int, rows: int) -> None:
    log_probs = problem(draws, draws, rows)
    found = optimize.minimize(
        lambda w: -score(log_probs, np.maximum(w, 1e-300)),
        np.full(draws, 1 / draws),
        method="SLSQP",
        bounds=[(0, 1)] * draws,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    weights = stacking_weights(log_probs)
    assert score(log_probs, weights) == pytest.approx(-found.fun, abs=1e-7)
    assert score(log_probs, weights) >= -found.fun - 1e-9
    np.testing.assert_allclose(weights.numpy(), found.x, atol=1e-3)


def test_two_draws_have_a_closed_form() -> None:
    """Two kinds of rows, of which one comes a times in n: the mixture must give it the probability a / n."""
    p, q, a, n = 0.9, 0.1, 70, 100
    log_probs = torch.tensor(
        [[p] * a + [q] * (n - a), [q] * a + [p] * (n - a)], dtype=torch.float64
    ).log()
    expected = (a / n - q) / (p - q)
    assert stacking_weights(log_probs).tolist() == pytest.approx(
        [expected, 1 - expected], abs=1e-8
    )


def test_known_mixture_weights_are_recovered() -> None:
    """Rows simulated from a mixture of four Gaussians; a fifth, far away, took no part."""
    centres, truth = (
        torch.tensor([-3.0, 0.0, 2.0, 5.0, 40.0]),
        torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]),
    )
    y = centres[torch.multinomial(truth, 20_000, replacement=True)] + torch.randn(
        20_000
    )
    weights = stacking_weights(
        torch.distributions.Normal(centres[:, None], 1.0).log_prob(y)
    )
    torch.testing.assert_close(weights, truth.double(), rtol=0, atol=0.015)
    assert weights[4] < 1e-6


def test_permuted_draws_have_permuted_weights_and_permuted_rows_the_same() -> None:
    log_probs = problem(3, 12, 60)
    weights, order = stacking_weights(log_probs), torch.randperm(12)
    torch.testing.assert_close(
        stacking_weights(log_probs[order]), weights[order], rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        stacking_weights(log_probs[:, torch.randperm(60)]), weights, rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        stacking_weights(log_probs - 1e4 * torch.rand(60)), weights, rtol=0, atol=1e-6
    )


def test_equal_draws_share_equally() -> None:
    """No preference among copies, alone or beside others; one draw gets all."""
    row = problem(0, 1, 30)
    assert stacking_weights(row.expand(5, -1)).tolist() == pytest.approx([0.2] * 5)
    assert stacking_weights(row).tolist() == [1.0]
    three = problem(1, 3, 50)
    doubled = stacking_weights(three.repeat(2, 1))
    torch.testing.assert_close(doubled[:3], doubled[3:], rtol=0, atol=1e-9)
    torch.testing.assert_close(
        2 * doubled[:3], stacking_weights(three), rtol=0, atol=1e-6
    )


def test_ruled_out_rows_count_and_draws_that_know_nothing_get_nothing() -> None:
    """-inf is a probability of zero."""
    log_probs = problem(5, 4, 40)
    log_probs[1] = -math.inf
    log_probs[0, ::2] = -math.inf
    weights = stacking_weights(log_probs)
    assert weights[1] < 1e-8
    assert bool(weights.isfinite().all())
    apart = torch.where(
        torch.eye(3, dtype=torch.bool).repeat_interleave(torch.tensor([1, 2, 5]), 1),
        0.0,
        -math.inf,
    )
    assert stacking_weights(apart).tolist() == pytest.approx(
        [1 / 8, 2 / 8, 5 / 8], abs=1e-8
    )  # disjoint: shares of rows


def test_many_draws_and_float32() -> None:
    log_probs = problem(7, 300, 500).float()
    weights = stacking_weights(log_probs)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, stacking_weights(log_probs.double()))


def test_members_of_a_prediction_are_stacked() -> None:
    """Held-out densities give weights, weights a better held-out density: than any other, on their own rows."""
    target = torch.randn(300)
    outputs = torch.stack(
        [
            target + 0.3 * torch.randn(300),
            torch.randn(300),
            target + 3 + torch.randn(300),
        ]
    )
    equal = sb.Prediction.from_outputs(
        outputs, "gaussian", members=3, likelihood_std=0.5
    )
    weights = stacking_weights(equal.draw_log_prob(target))
    stacked = sb.Prediction.from_outputs(
        outputs, "gaussian", members=3, likelihood_std=0.5, weights=weights
    )
    assert weights[0] > 0.9
    assert stacked.log_prob(target).mean() > equal.log_prob(target).mean() + 0.5


@pytest.mark.parametrize(
    ("log_probs", "match"),
    [
        (torch.zeros(3), r"shape \(S, N\) are needed.*got \(3,\)"),
        (torch.zeros(0, 3), r"got \(0, 3\)"),
        (torch.zeros(3, 0), r"got \(3, 0\)"),
        (torch.tensor([[0.0, math.nan]]), "got nan"),
        (torch.tensor([[0.0, math.inf]]), r"\+inf"),
        (
            torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf]]),
            "1 of 3 rows, the first is 2, have log_probs -inf under every draw",
        ),
    ],
)
def test_what_cannot_be_stacked_is_refused(log_probs: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        stacking_weights(log_probs)
    with pytest.raises(ValueError, match=match):
        factored_weights(
            log_probs, torch.zeros(len(log_probs), 1, dtype=torch.long), [1]
        )


def test_too_few_steps_are_no_silent_answer() -> None:
    with pytest.raises(
        RuntimeError, match="after 2 steps, .* short of the best mean log score"
    ):
        stacking_weights(problem(0, 5, 50), steps=2)
    with pytest.raises(RuntimeError, match="after 1 steps with a gradient"):
        factored_weights(*toy((3, 2)), steps=1)


# Probabilities of components ------------------------------------------------------------------------------------------


def toy(
    components: tuple[int, ...], rows: int = 80, seed: int = 0
) -> tuple[Tensor, Tensor, list[int]]:
    """Every combination once: Gaussian predictions that add up what each site's component contributes."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor(list(itertools.product(*map(range, components))))
    parts = [
        torch.randn(size, rows, generator=generator, dtype=torch.float64)
        for size in components
    ]
    mean = sum(part[choices[:, i]] for i, part in enumerate(parts))
    y = torch.randn(rows, generator=generator, dtype=torch.float64)
    return (
        -0.5 * (y - mean) ** 2 - 0.5 * math.log(2 * math.pi),
        choices,
        list(components),
    )


def exact(
    log_probs: Tensor, choices: Tensor, probabilities: list[Any], prior: float
) -> float:
    """The objective over an enumeration, a sum over rows, with w_s = prod_i p_i(c_si) and no normalising."""
    weights = np.ones(len(choices))
    for i, p in enumerate(probabilities):
        weights *= np.asarray(p)[choices[:, i].numpy()]
    return log_probs.shape[1] * score(log_probs, weights) + prior * sum(
        np.log(np.asarray(p)).sum() for p in probabilities
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("components", "prior"),
    [
        ((3,), 0.3),
        ((2, 2), 5.0),
        ((3, 2, 2), 0.3),
        ((4, 1, 3), 1.0),
        ((2, 2, 2, 2), 5.0),
    ],
)
def test_an_enumerated_mixture_is_maximised_exactly(
    components: tuple[int, ...], prior: float
) -> None:
    """All combinations once: the estimate is the implicit mixture's own score, and scipy finds no better."""
    log_probs, choices, sizes = toy(components)
    ours = factored_weights(log_probs, choices, sizes, prior)
    assert [tuple(p.shape) for p in ours] == [(k,) for k in sizes]
    assert [p.sum().item() for p in ours] == pytest.approx([1.0] * len(sizes))
    ends = np.cumsum(sizes)[:-1]

    def loss(logits: np.ndarray) -> float:
        return -exact(
            log_probs,
            choices,
            [special.softmax(z) for z in np.split(logits, ends)],
            prior,
        )

    rng = np.random.default_rng(0)
    starts = [np.zeros(sum(sizes)), *rng.standard_normal((4, sum(sizes)))]
    best = max(-optimize.minimize(loss, start, tol=1e-12).fun for start in starts)
    assert exact(log_probs, choices, ours, prior) == pytest.approx(best, abs=1e-6)
    assert (
        exact(log_probs, choices, ours, prior)
        >= exact(log_probs, choices, [np.full(k, 1 / k) for k in sizes], prior) - 1e-9
    )


@pytest.mark.parametrize("counts", [(5, 5, 5), (2, 9, 4)])
def test_one_site_is_stacking_of_its_components(counts: tuple[int, ...]) -> None:
    """Each component's density is the mean over the draws that picked it, however many did."""
    log_probs = problem(11, sum(counts), 60)
    picked = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    order = torch.randperm(len(picked))
    means = torch.stack(
        [
            torch.logsumexp(log_probs[picked == k], 0) - math.log(counts[k])
            for k in range(3)
        ]
    )
    (ours,) = factored_weights(
        log_probs[order], picked[order].unsqueeze(1), [3], prior=0, tolerance=1e-8
    )
    torch.testing.assert_close(ours, stacking_weights(means), rtol=0, atol=1e-4)


def test_a_component_that_ruins_predictions_is_dropped_without_prior() -> None:
    """The optimum on the boundary, and what the prior leaves of it: one row's worth among 80."""
    log_probs, choices, sizes = toy((3, 2))
    log_probs = log_probs - 30.0 * (choices[:, :1] == 1)
    assert factored_weights(log_probs, choices, sizes, prior=0)[0][1] < 1e-5
    assert factored_weights(log_probs, choices, sizes, prior=1)[0][
        1
    ].item() == pytest.approx(1 / (80 + 3), rel=1e-3)


def test_sites_without_influence_stay_uniform() -> None:
    """Only the first of three sites matters; by symmetry the others keep equal probabilities."""
    choices = torch.tensor(list(itertools.product(range(2), range(3), range(2))))
    log_probs = problem(2, 2, 50)[choices[:, 0]]
    first, second, third = factored_weights(log_probs, choices, [2, 3, 2])
    torch.testing.assert_close(
        second, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        third, torch.full((2,), 1 / 2, dtype=torch.float64), rtol=0, atol=1e-5
    )
    assert abs(float(first[0]) - 0.5) > 0.05


def test_a_prior_keeps_few_draws_from_collapsing() -> None:
    """Twelve of 4^8 networks, three rows: without a prior all weight goes to a few. More pseudo-rows, more draws."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.stack(
        [
            torch.arange(4).repeat(3)[torch.randperm(12, generator=generator)]
            for _ in range(8)
        ],
        1,
    )
    log_probs = problem(4, 12, 3, spread=3.0)
    used = []  # effective number of draws
    for prior in (0.0, 1.0, 10.0, 1000.0):
        found = factored_weights(log_probs, choices, [4] * 8, prior)
        weights = torch.stack([p[choices[:, i]] for i, p in enumerate(found)]).prod(0)
        used.append(float(weights.sum() ** 2 / weights.square().sum()))
    assert used[0] < 3.1
    assert used[0] + 1 < used[1] < used[2] < used[3]
    assert used[3] == pytest.approx(12, abs=0.01)


def test_estimates_from_draws_approach_the_enumeration() -> None:
    """2000 uniform draws of 27 combinations give nearly the enumeration's probabilities."""
    log_probs, choices, sizes = toy((3, 3, 3))
    picked = torch.randint(27, (2000,))
    ours = factored_weights(log_probs[picked], choices[picked], sizes)
    for p, q in zip(ours, factored_weights(log_probs, choices, sizes), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.06)


@pytest.mark.slow
@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0, 10), st.floats(-1, 2))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_draws_are_never_scored_worse_than_uniformly(
    seed: int, sites: int, prior: float, exponent: float
) -> None:
    """The objective as documented, in numpy, with scarce draws: at most what equal probabilities lose."""
    log_probs = problem(seed, 30, 20, 10**exponent)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.stack(
        [
            torch.cat([torch.arange(3), torch.randint(3, (27,), generator=generator)])
            for _ in range(sites)
        ],
        1,
    )
    ours = factored_weights(log_probs, choices, [3] * sites, prior)

    def objective(probabilities: list[Tensor]) -> float:
        weights = np.ones(30)
        for i, p in enumerate(probabilities):
            picked = choices[:, i].numpy()
            weights *= p.numpy()[picked] / np.bincount(picked)[picked]
        return 20 * score(log_probs, weights / weights.sum()) + prior * sum(
            float(p.log().sum()) for p in probabilities if prior
        )

    assert (
        objective(ours)
        >= objective([torch.full((3,), 1 / 3, dtype=torch.float64)] * sites) - 1e-7
    )


@pytest.mark.parametrize(
    ("choices", "components", "changes", "match"),
    [
        (
            torch.zeros(3, 2, dtype=torch.long),
            [1, 1],
            {},
            r"\(S, L\) = \(4, 2\) are needed as choices.*got torch.int64 of shape \(3, 2\)",
        ),
        (torch.zeros(4, 2, dtype=torch.long), [1], {}, r"\(S, L\) = \(4, 1\)"),
        (torch.zeros(4, 1), [1], {}, "got torch.float32"),
        (torch.zeros(4, 0, dtype=torch.long), [], {}, "L >= 1 sites"),
        (
            torch.tensor([[0, 0], [0, 1], [0, 2], [0, 1]]),
            [1, 2],
            {},
            "Site 1 has 2 components, got choices from 0 to 2",
        ),
        (
            torch.tensor([[0], [-1], [0], [1]]),
            [2],
            {},
            "Site 0 has 2 components, got choices from -1 to 1",
        ),
        (
            torch.tensor([[0], [2], [0], [2]]),
            [3],
            {},
            "Site 0: no draw picked component 1 of 3",
        ),
        (
            torch.tensor([[0], [1], [0], [1]]),
            [2],
            {"prior": -1.0},
            "prior must be .* got -1.0",
        ),
        (
            torch.tensor([[0], [1], [0], [1]]),
            [2],
            {"prior": math.nan},
            "prior must be .* got nan",
        ),
    ],
)
def test_choices_that_do_not_fit_are_refused(
    choices: Tensor, components: list[int], changes: dict[str, float], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        factored_weights(torch.zeros(4, 6), choices, components, **changes)


def test_gradients_may_be_off_around_it() -> None:
    """Evaluation usually runs under no_grad."""
    problem_ = toy((2, 3))
    with torch.no_grad():
        off = factored_weights(*problem_)
    for p, q in zip(off, factored_weights(*problem_), strict=True):
        assert torch.equal(p, q)
        assert not q.requires_grad


@pytest.mark.parametrize("kind", ["ensemble", "patches"])
def test_a_stack_that_fails_leaves_the_weights_alone(kind: str) -> None:
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
    ).eval()
    config = (
        sb.Ensemble(members=3) if kind == "ensemble" else sb.ModelPatch(components=3)
    )
    model = sb.bayesianize(net, config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    sb.stack(model, x, y, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="A target of shape"):
        sb.stack(model, x, y[:, None], seed=0)
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
