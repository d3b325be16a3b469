"""Bootstrap intervals and sign-flip tests against exact enumeration, closed forms and scipy."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from slimbayes_lab.report.metric import (
    EXACT,
    bootstrap_interval,
    mean,
    sign_flip_p,
    standard_error,
    t_interval,
)


def all_resamples(values):
    """Every one of the n^n equally likely resamples, by plain loops."""
    return sorted(
        sum(pick) / len(pick) for pick in itertools.product(values, repeat=len(values))
    )


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        [0.3, 0.1, 0.7],
        [5.0, 1.0, 2.0, 2.5],
        [0.1, 0.9, 0.4, 0.45, 0.2, 0.6],
    ],
)
def test_the_bootstrap_agrees_with_every_possible_resample(values):
    exact = all_resamples(values)
    low, high = bootstrap_interval(values, resamples=200_000)
    # The drawn quantile must sit at an exact quantile of nearly the same level: the distribution is a staircase.
    for found, level in ((low, 0.025), (high, 0.975)):
        below = np.mean([value < found - 1e-9 for value in exact])
        upto = np.mean([value <= found + 1e-9 for value in exact])
        assert below - 0.002 <= level <= upto + 0.002


@pytest.mark.slow
def test_the_bootstrap_agrees_with_scipy_and_with_the_normal_limit():
    values = np.random.default_rng(1).normal(3, 2, 400)
    low, high = bootstrap_interval(values.tolist(), resamples=20_000)
    other = stats.bootstrap(
        (values,),
        np.mean,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert (low, high) == pytest.approx(tuple(other), abs=0.02)
    error = standard_error(values.tolist())
    assert (low, high) == pytest.approx(
        (values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.02
    )


def test_the_bootstrap_repeats_and_follows_its_seed():
    values = [0.2, 0.5, 0.3, 0.9]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, resamples=99) != bootstrap_interval(
        values, resamples=99, seed=1
    )
    narrow, wide = (
        bootstrap_interval(values, level=0.5),
        bootstrap_interval(values, level=0.99),
    )
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_nothing_is_claimed_without_two_finite_values(values):
    assert (
        standard_error(values) is None
        and bootstrap_interval(values) is None
        and sign_flip_p(values) is None
    )


def test_mean_passes_on_what_is_not_finite():
    assert (
        math.isnan(mean([]))
        and math.isnan(mean([1.0, math.nan]))
        and mean([1.0, math.inf]) == math.inf
    )


@pytest.mark.parametrize("count", range(2, 11))
def test_sign_flips_agree_with_scipy_s_exact_test(count):
    gaps = np.random.default_rng(count).normal(0.4, 1, count)
    other = stats.permutation_test(
        (gaps,),
        np.mean,
        permutation_type="samples",
        n_resamples=np.inf,
        alternative="two-sided",
    ).pvalue
    assert sign_flip_p(gaps.tolist()) == pytest.approx(other)


@pytest.mark.parametrize("plus", range(9))
def test_equal_sizes_give_the_binomial_sign_test(plus):
    """|sum| of n signs is at least as large exactly where the number of plus signs is at least as far from n / 2."""
    gaps = [0.1] * plus + [-0.1] * (8 - plus)
    assert sign_flip_p(gaps) == pytest.approx(stats.binomtest(plus, 8).pvalue)


@pytest.mark.parametrize("seed", range(6))
def test_ties_are_counted_as_on_paper(seed):
    """Tenths are not exact in binary: sums that tie on paper must tie here too."""
    tenths = np.random.default_rng(seed).integers(-4, 5, 8).tolist()
    reached = sum(
        abs(sum(s * t for s, t in zip(signs, tenths))) >= abs(sum(tenths))
        for signs in itertools.product((1, -1), repeat=8)
    )
    assert sign_flip_p([t / 10 for t in tenths]) == reached / 2**8


def test_the_smallest_p_and_no_difference():
    assert sign_flip_p([1.0, 2.0, 3.0]) == 2 / 2**3
    assert sign_flip_p([0.0, 0.0, 0.0]) == 1.0


def test_many_pairs_are_sampled_and_agree_with_the_exact_distribution():
    """Beyond the exact limit: equal sizes again have the binomial law."""
    count = EXACT + 14
    gaps = [1.0] * 21 + [-1.0] * (count - 21)
    p = sign_flip_p(gaps)
    assert p == pytest.approx(
        stats.binomtest(21, count).pvalue, abs=0.005
    ) and p == sign_flip_p(gaps)
    assert sign_flip_p([1.0] * 40) == pytest.approx(1 / (2**16 + 1))


def test_p_values_are_uniform_where_nothing_differs():
    """Under the null an exact test rejects at level a with probability a, for levels that the pattern count allows."""
    rng = np.random.default_rng(0)
    levels = Counter(
        sign_flip_p(rng.normal(0, 1, 6).tolist()) <= 0.25 for _ in range(4000)
    )
    assert levels[True] / 4000 == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("count", [2, 3, 5, 20, 31, 32, 60, 200])
def test_the_t_interval_is_scipys(count):
    values = np.random.default_rng(count).normal(size=count)
    wanted = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert t_interval(list(values)) == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    assert t_interval([1.0]) is None and t_interval([1.0, math.nan]) is None
