"""distance: distances from training rows, and predictions mixed with what is known without looking; mean; slices."""

import copy
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.prediction.distance import Distance

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import distance as distance_benchmark  # noqa: E402

N, P, C = 60, 3, 4


def rows(count: int = N, width: int = P) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def fitted(
    targets: Tensor, likelihood: Any, net: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Distance]:
    net = sb.bayesianize(nn.Linear(P, C), sb.Rank1(members=2)) if net is None else net
    return net, sb.distance(net, [(rows(), targets)], likelihood, **options)


# Distance -------------------------------------------------------------------------------------------------------------


def test_the_distance_is_the_variance_a_gaussian_process_has_left() -> None:
    """Against numpy, row by row, and against leaving each row out in turn."""
    _, near = fitted(rows()[:, 0], "gaussian")
    x = rows().double().numpy()
    z = (x - x.mean(0)) / x.std(0, ddof=1)
    gaps = sorted(np.linalg.norm(a - b) for i, a in enumerate(z) for b in z[i + 1 :])
    z = z / (gaps[(len(gaps) - 1) // 2] / 1.5)

    def left(at: np.ndarray, known: np.ndarray) -> float:
        k = np.exp(-0.5 * ((known - at) ** 2).sum(1))
        gram = np.exp(
            -0.5 * ((known[:, None] - known[None]) ** 2).sum(-1)
        ) + 0.1 * np.eye(len(known))
        return float(1 - k @ np.linalg.solve(gram, k))

    np.testing.assert_allclose(
        near(rows()).numpy(), [left(at, z) for at in z], atol=2e-5
    )
    out = sorted(left(at, np.delete(z, i, 0)) for i, at in enumerate(z))
    assert float(near.typical) == pytest.approx(out[(N - 1) // 2], abs=2e-5)


def test_the_distance_is_one_far_away_and_grows_on_the_way() -> None:
    _, near = fitted(rows()[:, 0], "gaussian")
    away = near(torch.tensor([[0.0] * P, [1.5] * P, [3.0] * P, [1e3] * P, [1e30] * P]))
    assert bool((away[1:] >= away[:-1]).all())
    assert away[0] < 0.1
    assert away[3] == away[4] == 1
    assert bool((near(1e30 * rows()) == 1).all())


def test_constant_columns_and_equal_rows_do_no_harm() -> None:
    x = rows()
    x[:, 1] = 7.0
    net = sb.bayesianize(nn.Linear(P, 1), sb.Deterministic())
    near = sb.distance(net, [(x, x[:, :1])], "gaussian")
    there = near(x)
    assert bool(there.isfinite().all()) and float(there.mean()) < 0.5
    moved = x.clone()
    moved[:, 1] = 20.0  # a column that never moved has moved
    assert float(near(moved).min()) > 0.9
    same = sb.distance(
        net, [(torch.ones(5, P), torch.arange(5.0)[:, None])], "gaussian"
    )
    assert (
        float(same(torch.ones(1, P))) < 0.1 < 0.9 < float(same(torch.full((1, P), 9.0)))
    )


def test_rows_that_are_kept_are_an_even_sample_of_all_batches() -> None:
    """10,000 rows in order, 50 kept: they come from everywhere."""
    x = torch.arange(10_000.0)[:, None]
    net = sb.bayesianize(nn.Linear(1, 1), sb.Deterministic())
    near = sb.distance(net, zip(x.split(37), x.split(37)), "gaussian", rows=50)
    kept = (near.rows * near.stretch + near.shift).flatten()
    assert len(kept) == 50
    assert stats.kstest(kept.numpy() / 10_000, "uniform").pvalue > 0.01
    assert float(near.marginal[0]) == pytest.approx(4999.5) and float(
        near.marginal[1]
    ) == pytest.approx(1e8 / 12, rel=1e-3)


# Predictions ----------------------------------------------------------------------------------------------------------


def shares(near: Distance, x: Tensor) -> Tensor:
    return ((near(x) - near.typical) / (1 - near.typical)).clamp(0, 1)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_logits_of_classes_shrink_as_if_they_had_a_further_variance(
    likelihood: Any,
) -> None:
    """Draw by draw, from the logits themselves; what distance adds is epistemic; nothing changes on the data."""
    outputs = C if likelihood == "categorical" else 1
    net = sb.bayesianize(nn.Linear(P, outputs), sb.Rank1(members=2))
    near = sb.distance(net, [rows()], likelihood)  # targets are not needed
    x = torch.cat([rows()[:5], 3 * rows()[5:8]])
    plain, pred = (
        sb.predict(net, x, draws=3, seed=0, likelihood=likelihood, distance=f)
        for f in (None, near)
    )
    with sb.fixed_draws(net, 3, seed=0):
        z = sb.sample(net, x).double()
    z = z if likelihood == "categorical" else torch.cat([-z / 2, z / 2], -1)
    z = z - z.mean(-1, keepdim=True)
    w = shares(near, x)[:, None].double()
    p = (z / (1 + math.pi / 8 * w * z.square().mean(-1, keepdim=True)).sqrt()).softmax(
        -1
    )
    torch.testing.assert_close(
        pred.log_probs.double(), p.mean(0).log(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        pred.total, torch.special.entr(p.mean(0)).sum(-1).float(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(pred.aleatoric, plain.aleatoric)
    torch.testing.assert_close(pred.distance, near(x))
    assert torch.equal(pred.by_draw[:, w[:, 0] == 0], plain.by_draw[:, w[:, 0] == 0])
    assert (
        float(w.min()) == 0
        and float(w.max()) > 0.5
        and bool((pred.epistemic >= plain.epistemic - 1e-6).all())
    )
    few = sb.predict(
        net,
        x,
        draws=3,
        seed=0,
        likelihood=likelihood,
        distance=near,
        keep_samples=False,
    )
    assert few.by_draw is None
    torch.testing.assert_close(few.probs, pred.probs)


def test_far_away_no_class_is_sure_however_large_the_logits() -> None:
    net = sb.bayesianize(nn.Linear(P, C), sb.Deterministic())
    near = sb.distance(net, [rows()])
    for size in (1e2, 1e6, 1e18, 1e30):
        x = size * rows()[:4]
        plain, pred = sb.predict(net, x), sb.predict(net, x, distance=near)
        assert float(plain.log_probs.amin()) < -30 and float(pred.log_probs.amin()) > -6
        assert float(pred.epistemic.min()) > 0.3


@pytest.mark.parametrize("targets", [(), (2,)])
def test_real_targets_are_mixed_with_their_distribution(
    targets: tuple[int, ...],
) -> None:
    """Density, mean, variances, intervals, CRPS and coverage are those of one mixture of normals."""
    net = sb.bayesianize(
        nn.Sequential(
            nn.Linear(P, math.prod(targets)), nn.Unflatten(1, targets or (1,))
        ),
        sb.MeanField(),
    )
    net = (
        net
        if targets
        else sb.bayesianize(
            nn.Sequential(nn.Linear(P, 1), nn.Flatten(0)), sb.MeanField()
        )
    )
    y = 3 + 2 * torch.randn(N, *targets)
    near = sb.distance(net, [(rows(), y)], "gaussian")
    x, seen = torch.cat([rows()[:4], 2.5 * rows()[4:8]]), torch.randn(8, *targets)
    plain, pred = (
        sb.predict(
            net,
            x,
            draws=5,
            likelihood="gaussian",
            likelihood_std=0.3,
            seed=0,
            distance=f,
        )
        for f in (None, near)
    )
    w = shares(near, x).reshape(-1, *[1] * len(targets)).double().numpy()
    m, v = y.double().mean(0).numpy(), y.double().var(0, correction=0).numpy()
    mu, inner = plain.mean.double().numpy(), plain.total.double().numpy()
    np.testing.assert_allclose(
        pred.mean.numpy(), (1 - w) * mu + w * m, rtol=1e-4, atol=1e-5
    )
    total = (1 - w) * inner + w * v + w * (1 - w) * (mu - m) ** 2
    np.testing.assert_allclose(pred.total.numpy(), total, rtol=1e-4)
    np.testing.assert_allclose(
        pred.aleatoric.numpy(), np.broadcast_to((1 - w) * 0.09, mu.shape), rtol=1e-5
    )
    p = (1 - w) * np.exp(plain.log_prob(seen).double().numpy()) + w * stats.norm.pdf(
        seen.numpy(), m, np.sqrt(v)
    )
    np.testing.assert_allclose(
        pred.log_prob(seen).numpy(), np.log(p), rtol=1e-3, atol=1e-4
    )
    low, high = pred.interval(0.9)
    draws = plain.samples.double().numpy()

    def below(at: np.ndarray) -> np.ndarray:
        return (1 - w) * stats.norm.cdf(at, draws, 0.3).mean(0) + w * stats.norm.cdf(
            at, m, np.sqrt(v)
        )

    np.testing.assert_allclose(below(low.numpy()), 0.05, atol=1e-5)
    np.testing.assert_allclose(below(high.numpy()), 0.95, atol=1e-5)
    grid = np.linspace(-30, 30, 6001).reshape(-1, *[1] * seen.dim())
    crps = (
        ((below_grid(grid, draws, w, m, v) - (grid >= seen.numpy())) ** 2).sum(0)
        * 60
        / 6000
    )
    metric = sb.metrics.CRPS()
    metric.update(pred, seen)
    assert float(metric.compute()) == pytest.approx(float(crps.mean()), abs=5e-3)
    inside = sb.metrics.IntervalCoverage(0.9)
    inside.update(pred, seen)
    assert float(inside.compute()) == pytest.approx(
        float((np.abs(below(seen.numpy()) - 0.5) <= 0.45).mean())
    )


def below_grid(
    grid: np.ndarray, draws: np.ndarray, w: np.ndarray, m: np.ndarray, v: np.ndarray
) -> np.ndarray:
    inner = np.mean([stats.norm.cdf(grid, d, 0.3) for d in draws], 0)
    return (1 - w) * inner + w * stats.norm.cdf(grid, m, np.sqrt(v))


def test_large_targets_keep_the_digits_of_their_spread() -> None:
    net = sb.bayesianize(nn.Linear(P, 1), sb.Rank1(members=2))
    seconds = 1.7e9 + 3 * torch.randn(
        N, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    batches = list(zip(rows().split(25), seconds.split(25), strict=True))
    mean, variance = sb.distance(net, batches, "gaussian").marginal
    torch.testing.assert_close(mean, seconds.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(
        variance, seconds.var(0, correction=0), rtol=1e-6, atol=0
    )


def test_a_prediction_with_distances_is_cut_joined_and_rescaled() -> None:
    net, near = fitted(rows(N, C), "gaussian")
    pred = sb.predict(
        net,
        2 * rows(),
        draws=2,
        likelihood="gaussian",
        likelihood_std=0.5,
        seed=0,
        distance=near,
    )
    parts = [pred[:7], pred[7], pred[list(range(8, 20))], pred[torch.arange(N) >= 20]]
    again = sb.Prediction.joined(parts)
    batches = sb.predict(
        net,
        iter((2 * rows()).split(9)),
        draws=2,
        likelihood="gaussian",
        likelihood_std=0.5,
        seed=0,
        distance=near,
    )
    y = rows(N, C)
    for other in (again, batches, pickle.loads(pickle.dumps(pred)), pred.to("cpu")):
        torch.testing.assert_close(other.log_prob(y), pred.log_prob(y))
        torch.testing.assert_close(other.distance, pred.distance)
    large = pred.rescaled(1.0, 10.0)
    torch.testing.assert_close(
        large.log_prob(1 + 10 * y),
        pred.log_prob(y) - math.log(10),
        rtol=1e-4,
        atol=1e-4,
    )
    with pytest.raises(IndexError, match="row 60 of a prediction of 60 rows"):
        pred[N]


def test_the_shifted_likelihood_is_bounded_where_a_net_is_sure_of_itself() -> None:
    """A head without noise that is off by 100 standard deviations: thousands of nats before, a handful now."""
    net = sb.bayesianize(nn.Linear(1, 2), sb.Deterministic())
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0], [0.0]]))
        net.bias.copy_(torch.tensor([0.0, -20.0]))
    x = rows(100, 1)
    near = sb.distance(net, [(x, x[:, 0])], "heteroscedastic_gaussian")
    away = torch.full((1, 1), 100.0)
    plain, pred = (
        sb.predict(
            net,
            away,
            likelihood="heteroscedastic_gaussian",
            likelihood_std=1.0,
            distance=f,
        )
        for f in (None, near)
    )
    assert float(plain.log_prob(torch.zeros(1))) < -1000
    assert float(pred.log_prob(torch.zeros(1))) == pytest.approx(-0.92, abs=0.3)


def test_rows_are_ranked_by_distance() -> None:
    net = sb.bayesianize(nn.Linear(P, C), sb.Rank1())
    pred = sb.predict(net, rows(), distance=sb.distance(net, [rows()]))
    assert torch.equal(sb.metrics.ood_score(pred, "distance"), pred.distance)
    with pytest.raises(TypeError, match=r"made with predict\(..., distance=\)"):
        sb.metrics.ood_score(sb.predict(net, rows()), "distance")


# Features -------------------------------------------------------------------------------------------------------------


def pictures() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, C),
    )


@pytest.mark.parametrize(
    "config",
    [sb.Rank1(members=2), sb.ModelPatch(components=2, patch="output"), sb.MeanField()],
)
def test_pictures_are_told_apart_by_what_reaches_the_last_layer(config: Any) -> None:
    net = sb.bayesianize(pictures(), config)
    x = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    near = sb.distance(
        net, [(x[:25], torch.arange(25) % C), (x[25:], torch.arange(25) % C)]
    )
    assert near.at == "4" and near.rows.shape == (50, 6)
    pred = sb.predict(net, torch.cat([x[:5], 20 * x[:5]]), draws=2, distance=near)
    assert float(pred.distance[:5].max()) < 0.5 < 0.99 < float(pred.distance[5:].min())
    assert not net._forward_pre_hooks and not net[4]._forward_pre_hooks
    with pytest.raises(ValueError, match="outside `fixed_draws`"), sb.fixed_draws(net):
        sb.predict(net, x, distance=near)
    named = sb.distance(net, [(x, torch.arange(50) % C)], at="4")
    torch.testing.assert_close(
        named(torch.ones(1, 6)), near(torch.ones(1, 6)), rtol=1e-2, atol=1e-3
    )


def test_what_far_cannot_use_is_refused_in_words() -> None:
    net = sb.bayesianize(pictures(), sb.Rank1())
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % C
    for options, batches, match in [
        ({"at": "5"}, [(x, y)], "no such layer"),
        ({"at": "0"}, [(x, y)], r"at='0' got shape \(6, 1, 8, 8\)"),
        ({"rows": 1}, [(x, y)], "rows >= 2, got 1"),
        ({}, [(x[:1], y[:1])], "two rows to learn from, got 1"),
        ({}, [], "two rows to learn from, got 0"),
        ({}, [(x * math.nan, y)], "NaN or infinite"),
    ]:
        with pytest.raises(ValueError, match=match):
            sb.distance(net, batches, **options)
    with pytest.raises(
        TypeError, match=r"real targets needs batches \(input, target\), got Tensor"
    ):
        sb.distance(net, x, "gaussian")
    kept = sb.predict(net, x, keep_samples=False)
    with pytest.raises(ValueError, match="keep_samples=True"):
        sb.distance(net, [x]).widen(kept, torch.zeros(6))
    plain, near = fitted(rows()[:, 0], "gaussian")
    with pytest.raises(
        ValueError,
        match=r"targets of shape \(\) for each row, the prediction has \(4,\)",
    ):
        sb.predict(plain, rows(), likelihood="gaussian", distance=near)


# mean -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        sb.MeanField(),
        sb.KTied(),
        sb.MatrixNormal(),
        sb.MCDropout(rate=0.5),
        sb.Deterministic(),
    ],
)
def test_the_mean_is_the_plain_network(config: Any) -> None:
    plain = nn.Sequential(nn.Linear(P, 8), nn.Dropout(0.5), nn.Linear(8, C)).eval()
    net = sb.bayesianize(copy.deepcopy(plain), config)
    with sb.fixed_draws(net, "mean"):
        torch.testing.assert_close(net(rows()), plain(rows()))
        pred = sb.predict(net, rows())
    assert pred.count == 1
    torch.testing.assert_close(pred.probs, plain(rows()).softmax(-1))


def test_the_mean_of_members_is_each_members_own_and_has_no_noise() -> None:
    net = sb.bayesianize(
        nn.Linear(P, C),
        sb.Rank1(members=3, mean_init=sb.Normal(1.0, 0.5), scale_init=0.3),
    )
    posterior: Any = net.posterior["weight"]
    with sb.fixed_draws(net, "mean"):
        a, b = sb.sample(net, rows()), sb.sample(net, rows())
        with (
            pytest.raises(ValueError, match="cannot run inside another fixed_draws"),
            sb.fixed_draws(net, "mean"),
        ):
            pass
    assert a.shape == (3, N, C) and torch.equal(a, b)
    for k in range(3):
        r, s = posterior.r.loc[k].flatten(), posterior.s.loc[k].flatten()
        own = nn.functional.linear(rows() * s, net.weight, None) * r + net.bias
        torch.testing.assert_close(a[k], own)
    assert not torch.equal(sb.sample(net, rows(), seed=0), a)
    patched = sb.bayesianize(
        nn.Sequential(nn.Linear(P, C)), sb.ModelPatch(components=3, patch="output")
    )
    with (
        pytest.raises(
            ValueError, match="0.weight: a pick among 3 components has no mean"
        ),
        sb.fixed_draws(patched, "mean"),
    ):
        pass


# The benchmark --------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_record_holds() -> None:
    found = json.loads((ROOT / "lab" / "results" / "far.json").read_text())
    assert (ROOT / "docs" / "distance.md").read_text() == distance_benchmark.page(found)
    cells, mean = (
        found["fresh"],
        distance_benchmark.mean,
    )  # splits and sets on which nothing was chosen
    gains: list[float] = []
    for name in {c["set"] for c in cells}:
        gain = {
            field: mean(cells, field, far=True, set=name)
            - mean(cells, field, far=False, set=name)
            for field in ("test_nll", "far_nll")
        }
        gains.append(gain["far_nll"])
        assert gain["test_nll"] < 0.01 and gain["far_nll"] < 0.2, (
            name
        )  # widening costs where a net extrapolates well
        assert mean(cells, "far_auroc", far=True, set=name) > 0.69, name
    assert sorted(gains)[len(gains) // 2] < 0  # but most sets gain
