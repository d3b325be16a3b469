"""draws is the number of forward passes: their order, their independence of one another, and averages over them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.diagnostics import k_hat, log_ratios
from slimbayes.metrics import CRPS, LPD
from slimbayes.prediction.averages import Accumulator
from slimbayes.prediction.predict import predict_prefixes

K, N, C = 3, 5, 4
METHODS: dict[str, sb.Config] = {
    "rank-1": sb.Rank1(members=K, scale_init=0.3),
    "joint": sb.JointNormal(members=K, over="both", scale_init=0.3),
    "ensemble": sb.Ensemble(members=K),
    "mean-field": sb.MeanField(scale_init=0.3),
    "emp": sb.ModelPatch(components=3, jitter=0.5, patch="output"),
}


def net(config: sb.Config, outputs: int = C) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
    return sb.bayesianize(plain.double(), config).eval()


def rows() -> Tensor:
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(1)).double()


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


# Order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 2, 3, 4, 7])
def test_draw_j_is_member_j_mod_k(draws: int) -> None:
    model, x = net(sb.BatchEnsemble(members=K)), rows()
    members = [sb.materialize(model, member=k)(x) for k in range(K)]
    expected = torch.stack([members[j % K] for j in range(draws)])
    close(sb.sample(model, x, draws=draws), expected)
    close(sb.predict(model, x, draws=draws).samples, expected.softmax(-1))
    with sb.fixed_draws(model, draws):
        close(sb.sample(model, x), expected)


@pytest.mark.parametrize("method", METHODS)
def test_draws_are_the_written_out_networks_of_their_numbers(method: str) -> None:
    model, x = net(METHODS[method]), rows()
    samples = sb.predict(model, x, draws=7, seed=3).samples
    with sb.fixed_draws(model, 7, seed=3):
        plains = [sb.materialize(model, draw=j) for j in range(7)]
    close(samples, torch.stack([plain(x).softmax(-1) for plain in plains]))


@pytest.mark.parametrize("method", METHODS)
def test_a_draw_is_the_same_network_however_many_there_are(method: str) -> None:
    model, x = net(METHODS[method]), rows()
    every = sb.predict(model, x, draws=11, seed=3).samples
    for draws in range(1, 11):
        for chunk in (None, 1, 2 * N, 4 * N):
            found = sb.predict(model, x, draws=draws, chunk=chunk, seed=3)
            close(found.samples, every[:draws])
            assert found.count == draws
    prefixes = predict_prefixes(model, x, [2, 7, 4], seed=3)
    for draws, found in prefixes.items():
        close(found.samples, every[:draws])
        close(found.probs, every[:draws].mean(0))


def test_by_default_each_member_has_one_draw() -> None:
    model, x = net(METHODS["rank-1"]), rows()
    assert len(sb.sample(model, x)) == sb.predict(model, x).count == K
    with sb.fixed_draws(model):
        assert len(sb.sample(model, x)) == K


@pytest.mark.parametrize("draws", [0, -1, 1.5, "many"])
def test_other_numbers_of_draws_are_refused(draws: Any) -> None:
    model, x = net(METHODS["rank-1"]), rows()
    with pytest.raises(ValueError, match="at least one draw, a whole number"):
        sb.predict(model, x, draws=draws)


# Averages over draws of which some members have more ------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("chunk", [None, 2 * N, 4 * N])
def test_averages_of_classes_are_plain_means_over_the_draws(
    draws: int, chunk: int | None
) -> None:
    model, x = net(METHODS["rank-1"]), rows()
    y = torch.arange(N) % C
    with sb.fixed_draws(model, draws, seed=3):
        p = sb.sample(model, x).softmax(-1).detach()
    found = sb.predict(model, x, draws=draws, seed=3, chunk=chunk)
    close(found.probs, p.mean(0))
    close(found.aleatoric, torch.special.entr(p).sum(-1).mean(0))
    close(found.total, torch.special.entr(p.mean(0)).sum(-1))
    close(found.log_prob(y), p.mean(0)[torch.arange(N), y].log())
    members = torch.stack([p[k::K].mean(0) for k in range(min(K, draws))])
    close(found.member_probs, members)
    low, high = found.interval(0.8)
    close(low, p.quantile(0.1, 0))
    close(high, p.quantile(0.9, 0))


@pytest.mark.parametrize("draws", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("chunk", [None, 2 * N, 4 * N])
def test_averages_of_real_targets_are_plain_means_over_the_draws(
    draws: int, chunk: int | None
) -> None:
    model, x, std = net(METHODS["rank-1"]), rows(), 0.7
    y = torch.zeros(N, C, dtype=torch.float64)
    with sb.fixed_draws(model, draws, seed=3):
        f = sb.sample(model, x).detach()
    found = sb.predict(
        model, x, draws=draws, likelihood="gaussian", likelihood_std=std, seed=3,
        chunk=chunk,
    )  # fmt: skip
    close(found.mean, f.mean(0))
    close(found.epistemic, f.var(0, correction=0))
    close(found.variance, f.var(0, correction=0) + std**2)
    density = torch.tensor(stats.norm.pdf(y, f, std)).mean(0)
    close(found.log_prob(y), density.log())
    assert float(LPD()(found, y)) == pytest.approx(float(density.log().mean()))
    one_by_one = sb.Prediction.from_outputs(f, "gaussian", likelihood_std=std)
    assert float(CRPS()(found, y)) == pytest.approx(float(CRPS()(one_by_one, y)))
    for mine, other in zip(found.interval(0.8), one_by_one.interval(0.8), strict=True):
        close(mine, other)


@pytest.mark.parametrize("sizes", [[1] * 8, [2, 3, 3], [5, 3], [3, 3, 2], [7, 1]])
@pytest.mark.parametrize("weights", [None, [0.5, 0.2, 0.3], [0.0, 0.4, 0.6]])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_draws_may_arrive_in_any_pieces(
    sizes: list[int], weights: list[float] | None, likelihood: Any
) -> None:
    """Each draw counts as much as its member weighs, whatever comes together."""
    outputs = torch.randn(8, N, C, dtype=torch.float64)
    sums = Accumulator(likelihood, K, 0.7, keep=True, weights=weights)
    for piece in outputs.split(sizes):
        sums.add(piece)
    found = sb.Prediction(**sums.fields())
    own = np.array([1.0] * K if weights is None else weights)[np.arange(8) % K]
    shares = torch.tensor(own / own.sum())
    values = outputs.softmax(-1) if likelihood == "categorical" else outputs

    def average(of: Tensor) -> Tensor:
        return torch.einsum("s,s...->...", shares, of)

    close(found.mean, average(values))
    if likelihood == "categorical":
        close(found.aleatoric, average(torch.special.entr(values).sum(-1)))
    else:
        close(found.epistemic, average((values - found.mean).square()))


def test_stacked_members_count_by_their_weights_in_any_number_of_draws() -> None:
    nets = [nn.Linear(6, C).double() for _ in range(K)]
    x = rows()
    p = torch.stack([one(x).softmax(-1) for one in nets]).detach()
    model = sb.ensemble(nets)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    model.posterior["members"].weights.copy_(weights)  # type: ignore[index]
    four = (0.5 * p[0] + 0.2 * p[1] + 0.3 * p[2] + 0.5 * p[0]) / 1.5
    torch.testing.assert_close(
        sb.predict(model, x, draws=4).probs, four, rtol=1e-5, atol=1e-7
    )


def test_draws_of_members_without_weight_alone_are_refused() -> None:
    model, x = sb.ensemble([nn.Linear(6, C).double() for _ in range(K)]), rows()
    weights = torch.tensor([0.0, 0.4, 0.6], dtype=torch.float64)
    model.posterior["members"].weights.copy_(weights)  # type: ignore[index]
    with pytest.raises(ValueError, match="first 1 members have weight zero"):
        sb.predict(model, x, draws=1)
    assert sb.predict(model, x, draws=2).probs.isfinite().all()


# Elsewhere ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rank-1", "ensemble"])
@pytest.mark.parametrize("draws", [2, 5])
def test_an_exported_file_has_so_many_draws(
    draws: int, method: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = sb.bayesianize(nn.Linear(6, C), METHODS[method]), rows().float()
    made = sb.export(
        model, x, tmp_path / "net.pt2", draws=draws, likelihood="categorical"
    )
    mean, aleatoric, epistemic = torch.export.load(made.path).module()(x)
    expected = sb.predict(model, x, draws=draws, seed=0)
    assert made.draws == draws
    for mine, other in (
        (mean, expected.probs),
        (aleatoric, expected.aleatoric),
        (epistemic, expected.epistemic),
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="None of the 2 draws belongs"):
        sb.export(model, x, tmp_path / "none.pt2", draws=2, members=[2])


def test_linearised_draws_are_the_same_functions_however_many_there_are() -> None:
    model, x = net(METHODS["joint"]), rows()
    every = sb.predict_linearised(model, x, draws=8, seed=3)
    for draws in range(1, 8):
        found = sb.predict_linearised(model, x, draws=draws, seed=3)
        close(found.samples, every.samples[:draws])
        close(found.probs, every.samples[:draws].mean(0))


def test_norms_are_refreshed_under_so_many_draws() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, C))
    model, x = sb.bayesianize(plain, METHODS["rank-1"]), torch.randn(20, 6)
    assert sb.members(sb.refresh_norms(model, x, per="draw", draws=4)) == 4
    assert sb.members(sb.refresh_norms(model, x, per="draw")) == K


def test_importance_ratios_are_of_so_many_draws_in_their_order() -> None:
    """Members far apart in what the data say of them: the ratios tell whose they are."""
    model = net(METHODS["rank-1"])

    def log_likelihood(held: nn.Module) -> Tensor:
        count = len(sb.sample(held, rows()))
        return 1e6 * (torch.arange(count) % K).double()

    ratios = log_ratios(model, log_likelihood, draws=8, chunk=4)
    assert ratios.shape == (8,)
    member = (ratios / 1e6).round().long()
    assert torch.equal(member, torch.arange(8) % K)
    found = k_hat(model, log_likelihood, draws=25 * K + 1)
    assert len(found.members) == K and found.draws == 25
    with pytest.raises(ValueError, match="25 draws of each of 3 members, 75 in all"):
        k_hat(model, log_likelihood, draws=25 * K - 1)


def test_distance_widens_uneven_draws_as_it_does_even_ones() -> None:
    """Of a network whose draws are all alike nothing depends on how many there are."""
    torch.manual_seed(0)
    alike = sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0))
    model, x = sb.bayesianize(nn.Linear(6, 1), alike), torch.randn(40, 6)
    near = sb.distance(model, [(x, x[:, :1])], likelihood="gaussian")
    how: dict[str, Any] = {"likelihood": "gaussian", "likelihood_std": 0.5}
    away = torch.cat([x[:3], 3 * x[3:6]])
    two, five = (sb.predict(model, away, draws=d, distance=near, **how) for d in (2, 5))
    for name in ("mean", "variance", "aleatoric"):
        torch.testing.assert_close(getattr(five, name), getattr(two, name))
    target = torch.zeros(6, 1)
    torch.testing.assert_close(five.log_prob(target), two.log_prob(target))
    assert bool((five.distance > 0.5).any()) and math.isfinite(float(five.mean.sum()))
