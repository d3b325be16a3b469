"""Diagnostics against closed forms, a published implementation's numbers and the k-tied paper's tables (F23 to F29)."""

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import diagnostics as dg
from slimbayes.diagnostics.prior_plots import plot_prior_functions, prior_functions
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.diagnostics.spectra import low_rank
from slimbayes.distributions.families import Distribution
from slimbayes.distributions.kl import kl
from slimbayes.engine.passes import posteriors_of

METHODS = [sb.MeanField(), sb.KTied(rank=2), sb.MatrixNormal()]


def mlp(config: sb.Config | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4)
    )
    return sb.bayesianize(
        net, config or sb.MeanField(scale_init=0.1, scale_jitter=0.05)
    )


def single(m: int, n: int, config: sb.Config) -> nn.Linear:
    """One layer in float64, so that comparisons are exact."""
    return sb.bayesianize(nn.Linear(m, n).double(), config)


def sigma(net: nn.Module, name: str = "weight") -> Tensor:
    return gaussian_sites(net)[name].scales()


def with_sigma(matrix: Tensor, **options: object) -> nn.Linear:
    net = single(*matrix.shape, sb.MeanField(**options))
    with torch.no_grad():
        net.posterior["weight"].weight_log_scale.copy_(matrix.T.log())
    return net


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


# The k-tied family (F23 to F26)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_f23_scales_are_the_positive_product_of_the_factors(k: int) -> None:
    net = single(6, 5, sb.KTied(rank=k, scale_jitter=2.0))
    q = net.posterior["weight"]
    product = q.log_u.exp() @ q.log_v.exp().T
    torch.testing.assert_close(sigma(net), product, rtol=1e-12, atol=0)
    assert (product > 0).all()


def test_f23_one_tied_is_the_matrix_normal_with_diagonal_covariances() -> None:
    """Covariance of vec(W), columns stacked, is P (x) Q with diagonal P = v^2 and Q = u^2."""
    net = single(6, 5, sb.MatrixNormal(scale_jitter=1.0))
    q = net.posterior["weight"]
    kronecker = torch.kron(
        (2 * q.log_v[:, 0]).exp().diag(), (2 * q.log_u[:, 0]).exp().diag()
    )
    covariance = sigma(net).T.reshape(-1).square().diag()
    torch.testing.assert_close(covariance, kronecker, rtol=1e-12, atol=1e-30)
    additive = q.log_u + q.log_v.T
    torch.testing.assert_close(sigma(net).log(), additive, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_f23_sample_covariance() -> None:
    net = single(3, 2, sb.KTied(rank=2, scale_init=0.5, scale_jitter=0.5))
    with torch.no_grad(), sb.fixed_draws(net, 10_000):
        drawn = net.posterior["weight"].values().weight.flatten(1)  # (draws, out x in)
    expected = sigma(net).T.reshape(-1).square().diag()
    size = expected.diag().sqrt()
    error = (torch.cov(drawn.T) - expected) / torch.outer(size, size)
    assert error.abs().max() < 5 * math.sqrt(2 / 10_000)


@pytest.mark.parametrize("k", [2, 3])
def test_f24_higher_ranks_have_no_kronecker_factorisation(k: int) -> None:
    """Variances of a matrix normal have rank one; those of a k-tied Normal have rank k (k + 1) / 2."""
    variance = sigma(single(12, 10, sb.KTied(rank=k, scale_jitter=1.0))).square()
    values = torch.linalg.svdvals(variance)
    assert int((values > 1e-10 * values[0]).sum()) == k * (k + 1) // 2
    assert (variance - low_rank(variance, 1)).norm() > 1e-3 * variance.norm()


def test_f25_gradients_of_the_factors() -> None:
    """dL/dlog u_ik = sum_j dL/dsigma_ij u_ik v_jk, with L the ELBO of a mean-field net of the same sigma and noise."""
    tied = single(6, 5, sb.KTied(rank=2, scale_init=0.3, scale_jitter=0.5))
    free = dg.truncate(copy.deepcopy(tied), rank=2)
    x, y = (
        torch.randn(8, 6, dtype=torch.float64),
        torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]),
    )
    for net in (tied, free):
        torch.manual_seed(1)
        sb.elbo(
            sb.categorical(sb.sample(net, x, draws=3), y), net, num_data=50
        ).loss.backward()
    q = tied.posterior["weight"]
    u, v = q.log_u.detach().exp(), q.log_v.detach().exp()
    by_sigma = free.posterior["weight"].weight_log_scale.grad.T / sigma(tied)
    torch.testing.assert_close(q.log_u.grad, u * (by_sigma @ v), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        q.log_v.grad, v * (by_sigma.T @ u), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_f26_initial_scales(k: int) -> None:
    assert sigma(
        sb.bayesianize(nn.Linear(1500, 1200), sb.KTied(rank=k))
    ).mean() == pytest.approx(0.0101, abs=6e-5)


PRIORS = [
    sb.Normal(0.0, 0.3), sb.HeNormal(), sb.TiedMean(0.2), sb.LaplacePrior(0.2), sb.EmpiricalBayes(), sb.ScaleMixture(),
]  # fmt: skip


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
def test_f26_equal_scales_have_equal_kl(prior: Distribution) -> None:
    tied = single(6, 5, sb.KTied(rank=2, prior=prior, bias="gaussian"))
    free = dg.truncate(copy.deepcopy(tied), rank=2)
    assert isinstance(free._slimbayes.decisions[0].config, sb.MeanField)
    torch.testing.assert_close(sb.kl(free), sb.kl(tied), rtol=1e-10, atol=0)


# Spectra and low-rank approximations (F27)


def test_f27_eckart_young() -> None:
    a = torch.rand(9, 6, dtype=torch.float64) + 0.1
    gamma = torch.linalg.svdvals(a)
    for k in range(1, 6):
        torch.testing.assert_close(
            (a - low_rank(a, k)).norm(),
            gamma[k:].square().sum().sqrt(),
            rtol=1e-12,
            atol=1e-12,
        )
        error = dg.truncation_errors(with_sigma(a), rank=k, epsilon=1e-300)["weight"]
        assert error <= float(gamma[k:].norm() / gamma.norm()) * (
            1 + 1e-9
        )  # clamping can only help: sigma is positive


@pytest.mark.parametrize("config", METHODS, ids=lambda c: type(c).__name__)
def test_f27_explained_variance(config: sb.Config) -> None:
    net = mlp(config)
    report = dg.spectrum(net)
    assert [s.name for s in report.sites] == ["0.weight", "2.weight", "4.weight"]
    for site in report.sites:
        assert sum(site.explained("means")) == pytest.approx(1) and sum(
            site.explained("scales")
        ) == pytest.approx(1)
        assert site.first(min(site.shape)) == pytest.approx(1)
    values = torch.linalg.svdvals(net[2].weight.detach().double())
    assert report["2"].means == pytest.approx(values.tolist(), rel=1e-10)
    assert report["2"].explained("means") == pytest.approx(
        (values**2 / (values**2).sum()).tolist(), rel=1e-10
    )
    rank = {sb.KTied: 2, sb.MatrixNormal: 1}.get(type(config))
    if rank:
        assert report["0"].first(rank) == pytest.approx(1, abs=1e-12)


def test_f27_rank_one_of_a_positive_matrix_is_positive_and_only_higher_ranks_are_clamped() -> (
    None
):
    cut = 0
    for seed in range(20):
        torch.manual_seed(seed)
        a = (2 * torch.randn(8, 7, dtype=torch.float64)).exp()
        assert (low_rank(a, 1) > 0).all()
        cut += int((low_rank(a, 2) <= 0).any())
        scales = sigma(dg.truncate(with_sigma(a), rank=2, epsilon=1e-3))
        torch.testing.assert_close(
            scales, low_rank(a, 2).clamp_min(1e-3), rtol=1e-12, atol=0
        )
    assert cut > 10


@pytest.mark.parametrize(
    ("layer", "sites"),
    [
        (nn.Conv2d(6, 8, 3), {"weight": (54, 8)}),
        (nn.Conv2d(6, 8, 3, groups=2), {"weight": (27, 8)}),
        (nn.ConvTranspose1d(6, 8, 3), {"weight": (18, 8)}),
        (nn.Embedding(11, 5), {"weight": (11, 5)}),
        (nn.LSTM(5, 6), {"weight_ih_l0": (5, 24), "weight_hh_l0": (6, 24)}),
        (nn.MultiheadAttention(8, 2), {n: (8, 8) for n in ("q", "k", "v", "out")}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_f27_every_layer_has_a_matrix_view_that_round_trips(
    layer: nn.Module, sites: dict[str, tuple[int, int]]
) -> None:
    net = sb.bayesianize(layer, sb.MeanField(scale_jitter=0.003))
    assert {s.name: s.shape for s in dg.spectrum(net).sites} == sites
    before = {name: p.scales() for name, p in gaussian_sites(net).items()}
    for p in gaussian_sites(net).values():
        weight = p.linear_map().weight
        assert torch.equal(p.site.from_matrix(p.site.to_matrix(weight)), weight)
    errors = dg.truncation_errors(net, 2)
    free = dg.truncate(copy.deepcopy(net), 2)
    for name, a in before.items():
        torch.testing.assert_close(
            sigma(free, name), low_rank(a, 2).clamp_min(1e-6), rtol=1e-5, atol=0
        )
        assert float((sigma(free, name) - a).norm() / a.norm()) == pytest.approx(
            errors[name]
        )


def test_f27_any_order_of_a_kernels_rows_gives_the_papers_spectrum() -> None:
    net = sb.bayesianize(nn.Conv2d(6, 8, 3), sb.MeanField())
    paper = (
        net.weight.detach().permute(2, 3, 1, 0).reshape(-1, 8).double()
    )  # (kh, kw, in, out), all but the last flattened
    assert dg.spectrum(net)["weight"].means == pytest.approx(
        torch.linalg.svdvals(paper).tolist(), rel=1e-6
    )


# Truncation


@pytest.mark.parametrize("k", [1, 2, 3])
def test_truncating_an_exactly_k_tied_model_reproduces_it(k: int) -> None:
    tied = single(20, 15, sb.KTied(rank=k, scale_jitter=0.5))
    a = sigma(tied)
    assert dg.truncation_errors(tied, k)["weight"] < 1e-5
    torch.testing.assert_close(sigma(dg.truncate(tied, k)), a, rtol=1e-4, atol=0)


def test_truncation_keeps_means_biases_outputs_and_the_callers_noise() -> None:
    shared = {
        "prior": sb.Normal(0.0, 0.3),
        "estimator": "flipout",
        "bias": "gaussian",
        "max_scale": 0.4,
        "scale_init": 0.1,
    }
    net = mlp(sb.KTied(rank=3, **shared, scale_jitter=0.02))
    net[0].posterior.requires_grad_(False)
    means, biases = (
        net[0].weight.clone(),
        net[0].posterior["weight"].bias_log_scale.clone(),
    )
    torch.manual_seed(3)
    assert dg.truncate(net, rank=2) is net
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(net[0].weight, means) and torch.equal(
        net[0].posterior["weight"].bias_log_scale, biases
    )
    assert net[0].posterior["weight"].name == "0.weight"
    assert net._slimbayes.decisions[0].config == sb.MeanField(**shared)
    assert not any(p.requires_grad for p in net[0].posterior.parameters())
    assert all(p.requires_grad for p in net[2].posterior.parameters())
    assert sb.sample(net, torch.randn(5, 12), draws=3).shape == (
        3,
        5,
        4,
    ) and "MeanField" in str(sb.summary(net))


def test_mean_field_truncation_keeps_the_parameters_an_optimizer_holds() -> None:
    net = mlp()
    former = list(net.parameters())
    dg.truncate(net, rank=1)
    assert all(a is b for a, b in zip(former, net.parameters(), strict=True))
    assert dg.spectrum(net)["2"].first(1) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    "source",
    [sb.MeanField(bias="gaussian"), sb.KTied(rank=4), sb.MatrixNormal()],
    ids=lambda c: type(c).__name__,
)
def test_truncated_models_save_and_load(source: sb.Config, tmp_path: Path) -> None:
    net = dg.truncate(mlp(source), rank=2, exclude="4")
    again = sb.load(
        sb.debayesianize(mlp(source)), sb.save(net, tmp_path / "q", base=True)
    )
    assert same(state(net), state(again))
    torch.manual_seed(1)
    one = sb.sample(net, torch.ones(3, 12), draws=2)
    torch.manual_seed(1)
    assert torch.equal(one, sb.sample(again, torch.ones(3, 12), draws=2))


def test_a_model_that_has_run_goes_on_after_its_posteriors_changed_class() -> None:
    net, x = (
        sb.bayesianize(
            nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), sb.KTied()
        ),
        torch.randn(6, 4),
    )
    sb.sample(net, x), sb.kl(net)
    dg.truncate(net, rank=1)
    fresh = copy.deepcopy(net)
    torch.testing.assert_close(sb.kl(net), sb.kl(fresh))
    torch.testing.assert_close(
        sb.sample(net, x, draws=2, parallel=True, seed=1),
        sb.sample(fresh, x, draws=2, seed=1),
    )
    assert all(
        p.layer is layer
        for layer, p in zip((net[0], net[2]), posteriors_of(net), strict=True)
    )


def test_truncation_of_a_module_converted_inside_another() -> None:
    net = nn.Sequential(
        sb.bayesianize(nn.Sequential(nn.Linear(6, 5)), sb.KTied(rank=2)),
        nn.Linear(5, 3),
    )
    sb.bayesianize(net, sb.Rank1(members=2), exclude=r"0\..*")
    dg.truncate(net, rank=1)
    assert isinstance(net[0]._slimbayes.decisions[0].config, sb.MeanField)
    assert [s.name for s in dg.spectrum(net).sites] == [
        "0.0.weight"
    ]  # rank-1 layers are passed over


def test_a_refused_truncation_changes_nothing() -> None:
    net = mlp()
    before, types = state(net), [type(p) for p in net[0].posteriors()]
    with pytest.raises(
        ValueError,
        match=r"4\.weight: rank=5 is more than its 7 x 4 matrix .* which is 4.*exclude='4'",
    ):
        dg.truncate(net, rank=5)
    assert same(before, state(net)) and types == [type(p) for p in net[0].posteriors()]
    dg.truncate(net, rank=5, exclude="4")
    for wrong in (0, 1.0, True):
        with pytest.raises(
            ValueError, match="rank must be a whole number of at least 1"
        ):
            dg.truncate(net, rank=wrong)
    with pytest.raises(ValueError, match="epsilon must be positive"):
        dg.truncate(net, rank=1, epsilon=0.0)
    with pytest.raises(ValueError, match="include='9' matches no layer"):
        dg.truncate(net, rank=1, include="9")
    with (
        sb.fixed_draws(net),
        pytest.raises(
            ValueError, match="truncate cannot change a model whose draws are held"
        ),
    ):
        dg.truncate(net, rank=1)


# Gradient noise (F29)


def feed(net: nn.Module, tracker: dg.GradientSNR, gradients: Tensor) -> None:
    parameter = net.posterior["weight"].weight_log_scale
    for gradient in gradients:
        parameter.grad = gradient.reshape(parameter.shape).clone()
        tracker.update()


def test_f29_pure_noise_gives_one_and_a_seventh() -> None:
    """E[1 + mean^2 / var] over 10 steps is 1 + E[t^2] / 9 = 1 + 1 / 7, t with 9 degrees of freedom."""
    net = single(300, 400, sb.MeanField())
    tracker = dg.GradientSNR(net, window=10)
    feed(net, tracker, torch.randn(10, 120_000, dtype=torch.float64))
    assert tracker.result()[""] == pytest.approx(1 + 1 / 7, abs=3e-3)


def test_f29_equals_the_definition_over_the_last_window() -> None:
    net = single(4, 3, sb.MeanField())
    tracker = dg.GradientSNR(net, window=5)
    gradients = torch.randn(13, 12, dtype=torch.float64) + 2
    feed(net, tracker, gradients[:3])
    for seen in (gradients[:3], gradients[8:]):
        expected = (seen.square().mean(0) / seen.var(0, correction=0)).mean()
        assert tracker.result()[""] == pytest.approx(float(expected), rel=1e-10)
        assert tracker.result()[""] >= 1
        feed(net, tracker, gradients[3:] if tracker.steps == 3 else gradients[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f29_constant_gradients(dtype: torch.dtype) -> None:
    net = sb.bayesianize(nn.Linear(4, 3).to(dtype), sb.MeanField())
    for value, expected in ((0.1, math.inf), (0.0, math.nan)):
        tracker = dg.GradientSNR(net, window=7)
        feed(net, tracker, torch.full((7, 12), value, dtype=dtype))
        assert tracker.result()[""] == pytest.approx(expected, nan_ok=True)
    mixed = torch.full((7, 12), 0.1, dtype=dtype)
    mixed[:, 0] = torch.randn(7, dtype=dtype)
    feed(net, tracker, mixed)
    one = mixed[:, 0].double()
    assert tracker.result()[""] == pytest.approx(
        float(one.square().mean() / one.var(correction=0)), rel=1e-9
    )


def test_tied_scales_have_less_noisy_gradients() -> None:
    """The KL's share adds up over weights that share a scale, the noise does not: most ratios exceed mean-field's."""
    x, y = torch.randn(64, 50), torch.randint(40, (64,))
    found = []
    for config in (sb.MeanField(), sb.KTied(rank=1), sb.KTied(rank=2)):
        net = sb.bayesianize(nn.Sequential(nn.Linear(50, 40)), config)
        tracker = dg.GradientSNR(net)
        for _ in range(10):
            net.zero_grad()
            sb.elbo(
                sb.categorical(sb.sample(net, x), y), net, num_data=20_000
            ).loss.backward()
            tracker.update()
        assert tracker.result()["0"] > tracker.result("median")["0"] >= 1
        found.append(tracker.result("median")["0"])
    assert min(found[1:]) > 2 * found[0]


def test_a_tracker_keeps_layers_apart_and_joins_a_layers_weights() -> None:
    net = sb.bayesianize(
        nn.ModuleDict({"rnn": nn.LSTM(3, 2), "head": nn.Linear(2, 2)}), sb.KTied(rank=1)
    )
    tracker = dg.GradientSNR(net)
    for value in (1.0, 3.0):
        for name, p in net.named_parameters():
            p.grad = torch.full_like(p, value if "hh" in name else 2 * value - 1)
        tracker.update()
    # g = 1, 3: 5 / 1; g = 1, 5: 13 / 4. log U and log V have 3 + 8 and 2 + 8 entries.
    assert tracker.result() == pytest.approx(
        {"rnn": (11 * 13 / 4 + 10 * 5) / 21, "head": 13 / 4}
    )


def test_a_tracker_says_what_it_lacks() -> None:
    net = mlp()
    with pytest.raises(ValueError, match="window of at least 2 steps, got window=1"):
        dg.GradientSNR(net, window=1)
    tracker = dg.GradientSNR(net)
    with pytest.raises(
        ValueError,
        match=r"0\.weight weight_log_scale has no gradient. Call update\(\) after loss.backward",
    ):
        tracker.update()
    with pytest.raises(ValueError, match="at least 2 steps, got 0"):
        tracker.result()
    with pytest.raises(
        ValueError, match="unknown average 'medium'; did you mean 'median'"
    ):
        tracker.result("medium")


# Pareto tails


def uniforms(count: int) -> Tensor:
    """Numbers that look random and are the same everywhere."""
    i = torch.arange(1, count + 1, dtype=torch.float64)
    return (torch.sin(i * 12.9898 + 78.233).abs() * 43758.5453).frac() * (
        1 - 1e-9
    ) + 5e-10


def pareto(u: Tensor, k: float) -> Tensor:
    """Quantiles of the generalised Pareto distribution."""
    return -torch.log1p(-u) if k == 0 else torch.expm1(-k * torch.log1p(-u)) / k


# What ArviZ 0.19.0, arviz.psislw(log_weights)[1], gives for the logs of pareto(uniforms(count), k).
ARVIZ = {
    (0.0, 100): 0.0382642804, (0.0, 1000): 0.2332849346, (0.0, 4000): 0.0040398451,
    (0.3, 100): 0.1515427108, (0.3, 1000): 0.5114181643, (0.3, 4000): 0.3039891465,
    (0.5, 100): 0.2278929387, (0.5, 1000): 0.6929054265, (0.5, 4000): 0.5028630624,
    (0.8, 100): 0.3444195634, (0.8, 1000): 0.9596127720, (0.8, 4000): 0.7991089585,
    (1.2, 100): 0.5050368555, (1.2, 1000): 1.3064012717, (1.2, 4000): 1.1903927656,
}  # fmt: skip


@pytest.mark.parametrize(("k", "count"), ARVIZ)
def test_pareto_k_equals_a_published_implementation(k: float, count: int) -> None:
    log_ratios = pareto(uniforms(count), k).log()
    assert dg.pareto_k(log_ratios) == pytest.approx(ARVIZ[k, count], abs=1e-7)
    assert dg.pareto_k(log_ratios - 12_345.0) == pytest.approx(
        ARVIZ[k, count], abs=1e-7
    )  # any constant drops out


@pytest.mark.parametrize("k", [0.0, 0.3, 0.5, 0.8, 1.2])
def test_pareto_k_finds_the_shape_of_known_tails(k: float) -> None:
    from scipy.stats import genpareto

    found, fitted, wanted = [], [], []
    for seed in range(20):
        u = torch.rand(
            10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        x = pareto(u, k)
        found.append(dg.pareto_k(x.log()))
        if seed < 3:
            tail = x.sort().values[-301:]
            fitted.append(genpareto.fit((tail[1:] - tail[0]).numpy(), floc=0)[0])
            wanted.append((310 * found[-1] - 5) / 300)  # without the prior
    assert sum(found) / 20 == pytest.approx(
        (300 * k + 5) / 310, abs=0.05
    )  # with the prior at one half
    assert wanted == pytest.approx(fitted, abs=0.1)


def test_pareto_k_at_its_limits() -> None:
    assert dg.pareto_k(torch.full((100,), 3.7)) == -math.inf
    i = torch.arange(1, 501, dtype=torch.float64)
    assert dg.pareto_k(300 * torch.sin(i * 12.9898)) == pytest.approx(
        7.049865099, abs=1e-6
    )  # ArviZ again: a tail of 10^200
    assert (
        dg.pareto_k(i * 400) == math.inf
    )  # all but a few ratios underflow beside the largest
    assert dg.pareto_k(torch.cat([i.log(), torch.tensor([-math.inf])])) < 0
    for wrong in (torch.zeros(10), torch.zeros(5, 50)):
        with pytest.raises(
            ValueError, match="a vector of at least 25 log ratios, got shape"
        ):
            dg.pareto_k(wrong)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="needs finite log ratios"):
            dg.pareto_k(torch.cat([torch.zeros(50), torch.tensor([bad])]))


# How good a posterior is


def none(net: nn.Module) -> Tensor:
    """No data: the posterior is the prior."""
    return torch.zeros(net[0].posterior["weight"].current.draws)


@pytest.mark.parametrize(
    "config",
    [
        *(
            sb.MeanField(
                prior=prior, scale_init=0.1, scale_jitter=0.03, bias="gaussian"
            )
            for prior in (
                sb.Normal(0.1, 0.3),
                sb.HeNormal(),
                sb.TiedMean(0.2),
                sb.ScaleMixture(narrow=0.1),
            )
        ),
        sb.MeanField(
            estimator="flipout",
            scale_init=0.2,
            scale_jitter=0.1,
            max_scale=0.21,
            bias="gaussian",
        ),
        sb.KTied(rank=2, estimator="local", scale_init=0.3),
        sb.Rank1(members=3, scale_init=0.2),
        sb.Rank1(members=2, prior=sb.Cauchy(1.0, 0.1), scale_init=0.2),
        sb.Rank1(members=1, prior=sb.LogNormal(0.0, 0.3), scale_init=0.2, rank=2),
        sb.Rank1(
            members=1,
            random="s",
            prior=sb.Cauchy(1.0, 0.3),
            posterior="normal",
            scale_init=0.2,
            clip=1.1,
        ),
    ],
)
@pytest.mark.slow
def test_without_data_the_mean_log_ratio_is_minus_the_kl(config: sb.Config) -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), config
    )
    ratios = dg.log_ratios(net, none, draws=6000 * config.members, chunk=1000)
    assert ratios.shape == (6000 * config.members,)
    # The KL is summed over members too; draw j belongs to member j mod K.
    total = ratios.unflatten(0, (6000, config.members)).sum(1)
    error = total.std() / math.sqrt(6000)
    assert total.mean() == pytest.approx(
        -float(sb.kl(net).detach()), abs=5 * float(error)
    )


def test_ratios_of_members_and_of_capped_biases_are_their_own() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 3)),
        sb.Rank1(members=2, random="r", prior=sb.Normal(1.0, 0.1)),
    )
    factor = net[0].posterior["weight"].r
    with torch.no_grad():
        factor.loc[1] = 3.0
    apart = kl(factor.distribution(), factor.prior).detach().flatten(1).sum(1)
    found = (
        dg.log_ratios(net, none, draws=12_000, chunk=7).unflatten(0, (-1, 2)).mean(0)
    )
    torch.testing.assert_close(found.float(), -apart, rtol=0.02, atol=0.1)
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 3)),
        sb.MeanField(scale_init=0.1, max_scale=0.2, bias="gaussian"),
    )
    with torch.no_grad():
        net[0].posterior["weight"].bias_log_scale.fill_(1.0)
    ratios = dg.log_ratios(net, none, draws=4000, chunk=1000)
    assert ratios.mean() == pytest.approx(
        -float(sb.kl(net).detach()), abs=5 * float(ratios.std()) / math.sqrt(4000)
    )


def test_rows_that_stay_as_they_are_have_no_ratio() -> None:
    """The padding row of an embedding is not drawn, so neither the KL nor the ratios count it."""
    net = sb.bayesianize(
        nn.Sequential(nn.Embedding(3, 4, padding_idx=0)), sb.MeanField(scale_init=0.1)
    )
    ratios = dg.log_ratios(net, none, draws=2000, chunk=1000)
    assert ratios.mean() == pytest.approx(
        -float(sb.kl(net).detach()), abs=5 * float(ratios.std()) / math.sqrt(2000)
    )


def test_empirical_bayes_ratios_differ_from_the_kl_by_the_hyperprior() -> None:
    prior = sb.EmpiricalBayes()
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 3)), sb.MeanField(prior=prior, scale_init=0.1)
    )
    ratios = dg.log_ratios(net, none, draws=4000, chunk=1000)
    mean, scale = net[0].weight.detach(), sigma(net, "0.weight")
    variance = (scale.square().sum() + mean.square().sum() + 2 * prior.rate) / (
        12 + 2 * prior.concentration + 2
    )
    gamma = torch.distributions.Gamma(
        torch.tensor(prior.concentration), torch.tensor(prior.rate)
    )
    log_hyperprior = gamma.log_prob(1 / variance) - 2 * variance.log()
    expected = -float(sb.kl(net).detach() + log_hyperprior)
    assert ratios.mean() == pytest.approx(
        expected, abs=5 * float(ratios.std()) / math.sqrt(4000)
    )


def regression(shrink: float, features: int = 1) -> tuple[nn.Module, object]:
    """A linear model with a diagonal Gaussian posterior, and a q whose scales are `shrink` times the true ones."""
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(40, features, dtype=torch.float64))[0] * 3
    y = x @ torch.ones(features, 1, dtype=torch.float64) + torch.randn(
        40, 1, dtype=torch.float64
    )
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(features, 1, bias=False).double()),
        sb.MeanField(prior=sb.Normal(0.0, 1.0)),
    )
    with torch.no_grad():
        net[0].weight.copy_((x.T @ y / (9 + 1)).T)
        net[0].posterior["weight"].weight_log_scale.fill_(
            math.log(shrink / math.sqrt(9 + 1))
        )
    return net, lambda model: -0.5 * (sb.sample(model, x) - y).square().sum((1, 2))


def test_the_exact_posterior_has_constant_ratios() -> None:
    net, log_likelihood = regression(1.0, features=3)
    ratios = dg.log_ratios(net, log_likelihood, draws=100)
    torch.testing.assert_close(
        ratios, ratios[:1].expand_as(ratios), rtol=1e-10, atol=1e-10
    )
    report = dg.k_hat(net, log_likelihood, draws=100)
    assert report.k == -math.inf and report.verdict == "reliable"


@pytest.mark.parametrize(
    ("shrink", "verdict"), [(0.9, "reliable"), (0.4, "unreliable"), (2.0, "reliable")]
)
def test_k_hat_of_a_gaussian_with_wrong_scales(shrink: float, verdict: str) -> None:
    """Scales shrunk by c give ratios exp(a z^2) with tail index k = 1 - c^2; too wide ones give bounded ratios."""
    net, log_likelihood = regression(shrink)
    report = dg.k_hat(net, log_likelihood, draws=4000, chunk=500)
    if shrink < 1:
        assert report.k == pytest.approx(1 - shrink**2, abs=0.15)
    else:
        assert report.k < 0.2
    assert report.verdict == verdict and report.threshold == 0.7


def test_k_hat_of_many_weights_and_of_members() -> None:
    net, log_likelihood = regression(0.3, features=30)
    assert dg.k_hat(net, log_likelihood, draws=500).verdict == "failed"
    plain = nn.Linear(2, 1)
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    net = sb.bayesianize(plain, sb.Rank1(members=3))
    report = dg.k_hat(
        net,
        lambda model: -0.5 * (sb.sample(model, x) - y).square().sum((1, 2)),
        draws=150,
    )
    assert len(report.members) == 3 and report.k == max(report.members)
    assert report.threshold == pytest.approx(
        1 - 1 / math.log10(50)
    ) and report.verdict in str(report)
    assert json.loads(json.dumps(report.to_dict()))["draws"] == 50


def test_k_hat_refuses_what_it_cannot_judge() -> None:
    net = mlp().train()
    with pytest.raises(ValueError, match=r"a tensor of shape \(16,\), got \(\)"):
        dg.k_hat(net, lambda model: torch.tensor(1.0), draws=50)
    assert net.training and all(m.training for m in net.modules())
    with pytest.raises(ValueError, match="at least 25 draws .* got draws=10"):
        dg.k_hat(net, none, draws=10)
    with pytest.raises(
        TypeError,
        match=r"0.weight: the density of a MixturePosterior's draws is not known",
    ):
        dg.k_hat(
            sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), sb.Mixture(components=2)),
            none,
            draws=50,
        )
    with pytest.raises(ValueError, match="has no posterior"):
        dg.k_hat(sb.bayesianize(nn.Linear(2, 2), sb.Deterministic()), none)


# Pruning


@pytest.mark.parametrize("config", METHODS, ids=lambda c: type(c).__name__)
def test_pruning_takes_the_lowest_ratios_of_all_layers(config: sb.Config) -> None:
    net = mlp(config)
    before = {name: (p.means(), p.scales()) for name, p in gaussian_sites(net).items()}
    ratios = torch.cat([(m.abs() / s).flatten() for m, s in before.values()])
    report = dg.prune(net, 0.7)
    assert report.sparsity == pytest.approx(0.7, abs=0.5 / len(ratios))
    assert report.threshold == pytest.approx(
        float(ratios.sort().values[round(0.7 * len(ratios)) - 1])
    )
    assert list(report.by_weight) == list(before)
    for name, site in gaussian_sites(net).items():
        mean, scale = before[name]
        gone = mean.abs() / scale <= report.threshold
        assert float(gone.double().mean()) == pytest.approx(report.by_weight[name])
        torch.testing.assert_close(site.means(), mean.masked_fill(gone, 0.0))
        torch.testing.assert_close(
            site.scales(), scale.masked_fill(gone, 1e-6), rtol=1e-4, atol=0
        )
    assert (
        sb.kl(net).isfinite()
        and sb.predict(net, torch.randn(3, 12), draws=2).probs.isfinite().all()
    )


def test_pruning_by_threshold_and_by_layer() -> None:
    net = mlp()
    kept = state(net[2])
    report = dg.prune(net, snr_threshold=1.5, exclude="2")
    assert same(kept, state(net[2])) and list(report.by_weight) == [
        "0.weight",
        "4.weight",
    ]
    ratios = [
        (p.means().abs() / p.scales())
        for p in gaussian_sites(net, exclude="2").values()
    ]
    assert (
        all(bool(((r == 0) | (r >= 1.5)).all()) for r in ratios)
        and report.threshold < 1.5
    )


@pytest.mark.parametrize(
    "layer",
    [nn.MultiheadAttention(8, 2), nn.LSTM(5, 6), nn.Conv2d(4, 6, 3)],
    ids=lambda m: type(m).__name__,
)
def test_pruning_layers_with_several_or_many_sided_weights(layer: nn.Module) -> None:
    net = sb.bayesianize(layer, sb.KTied(rank=2))
    report = dg.prune(net, 0.5)
    weights = [
        p for n, p in net.named_parameters() if "weight" in n and "posterior" not in n
    ]
    assert (
        sum(int((p == 0).sum()) for p in weights)
        == round(report.sparsity * sum(p.numel() for p in weights))
        > 0
    )


@pytest.mark.parametrize("config", METHODS, ids=lambda c: type(c).__name__)
def test_pruning_nothing_changes_nothing(config: sb.Config) -> None:
    net = mlp(config)
    before = state(net)
    report = dg.prune(net, 0.0)
    assert (
        same(before, state(net))
        and report.sparsity == 0
        and report.threshold == -math.inf
    )
    assert net._slimbayes.decisions[0].config == config


@pytest.mark.parametrize("config", METHODS, ids=lambda c: type(c).__name__)
def test_larger_fractions_prune_supersets_and_copies_leave_the_model_alone(
    config: sb.Config,
) -> None:
    net = mlp(config)
    before, former = state(net), None
    for fraction in (0.0, 0.3, 0.6, 0.9, 1.0):
        pruned = copy.deepcopy(net)
        assert dg.prune(pruned, fraction).sparsity == pytest.approx(fraction, abs=5e-3)
        zero = torch.cat([pruned[i].weight.detach().flatten() == 0 for i in (0, 2, 4)])
        assert former is None or bool((zero | ~former).all())
        former = zero
    assert same(before, state(net)) and net._slimbayes.decisions[0].config == config


def test_a_layer_that_loses_weights_of_one_matrix_changes_as_a_whole(
    tmp_path: Path,
) -> None:
    net = sb.bayesianize(nn.LSTM(5, 6), sb.KTied(rank=2))
    with torch.no_grad():
        net.weight_ih_l0.fill_(10.0)
    scales = sigma(net, "weight_ih_l0")
    assert [share > 0 for share in dg.prune(net, 0.2).by_weight.values()] == [
        False,
        True,
    ]
    torch.testing.assert_close(sigma(net, "weight_ih_l0"), scales, rtol=1e-6, atol=0)
    again = sb.load(nn.LSTM(5, 6), sb.save(net, tmp_path / "q", base=True))
    assert same(state(net), state(again)) and {
        type(p).__name__ for p in again.posteriors()
    } == {"MeanFieldPosterior"}


def test_pruned_models_save_and_load(tmp_path: Path) -> None:
    net = mlp(sb.KTied(rank=2))
    dg.prune(net, 0.5, include=["0", "2"])
    again = sb.load(sb.debayesianize(mlp()), sb.save(net, tmp_path / "q", base=True))
    assert (
        same(state(net), state(again))
        and type(again[4].posteriors()[0]).__name__ == "KTiedPosterior"
    )


def test_prune_refuses_unclear_orders() -> None:
    net = mlp()
    before = state(net)
    for wrong in ({}, {"fraction": 0.5, "snr_threshold": 1.0}):
        with pytest.raises(ValueError, match="either a fraction or an snr_threshold"):
            dg.prune(net, **wrong)
    with pytest.raises(
        ValueError, match=r"fraction must lie between 0 and 1, got 1\.5"
    ):
        dg.prune(net, 1.5)
    with sb.fixed_draws(net), pytest.raises(ValueError, match="prune cannot change"):
        dg.prune(net, 0.5)
    assert same(before, state(net))


# Counts


@pytest.mark.parametrize(("m", "n"), [(5, 3), (400, 10)])
def test_table_1_counts_are_those_of_the_posteriors(m: int, n: int) -> None:
    """m n means, and for the scales m n, m + n or k (m + n) numbers."""

    def scales(config: sb.Config) -> int:
        return (
            sum(
                p.numel()
                for p in sb.bayesianize(
                    nn.Linear(m, n, bias=False), config
                ).parameters()
            )
            - m * n
        )

    assert scales(sb.MeanField()) == m * n and scales(sb.MatrixNormal()) == m + n
    assert [scales(sb.KTied(rank=k)) for k in (1, 2, 3)] == [
        k * (m + n) for k in (1, 2, 3)
    ]


# Reports and plots


def test_a_spectrum_reads_as_a_table_and_as_data() -> None:
    report = dg.spectrum(mlp())
    lines = str(report).splitlines()
    assert (
        len(lines) == 6
        and lines[3].startswith("0.weight")
        and f"{report['0'].first(1, 'means'):.2%}" in lines[3]
    )
    assert (
        f"{report['4'].first(3):.2%}" in lines[5]
        and len({len(line) for line in lines[1:]}) == 1
    )
    assert report["0"].shape == (12, 9) and len(report["4"].explained()) == 4
    with pytest.raises(KeyError, match="did you mean '0.weight'"):
        report["0.weigh"]
    with pytest.raises(ValueError, match="unknown spectrum 'stds'"):
        report["0"].explained("stds")
    attention = dg.spectrum(sb.bayesianize(nn.MultiheadAttention(8, 2), sb.MeanField()))
    assert attention["q"].shape == (8, 8)


def test_models_without_gaussian_posteriors_are_refused() -> None:
    with pytest.raises(ValueError, match="has not been converted"):
        dg.spectrum(nn.Linear(2, 2))
    with pytest.raises(
        ValueError,
        match=r"has a Gaussian posterior .* found: Rank1Posterior\. Convert it with MeanField",
    ):
        dg.truncate(sb.bayesianize(nn.Linear(2, 2), sb.Rank1()), 1)
    broken = mlp()
    with torch.no_grad():
        broken[0].posterior["weight"].weight_log_scale[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"0\.weight"):
        dg.spectrum(broken)


@pytest.mark.slow
def test_plots_show_every_layer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    net = mlp()
    figure = dg.plot_spectrum(net, count=3)
    assert [a.get_title() for a in figure.axes] == [
        "0.weight  (12 x 9)",
        "2.weight  (9 x 7)",
        "4.weight  (7 x 4)",
    ]
    means, scales = figure.axes[0].lines
    assert list(scales.get_ydata()) == pytest.approx(
        dg.spectrum(net)["0"].explained()[:3]
    )
    assert list(means.get_ydata()) == pytest.approx(
        dg.spectrum(net)["0"].explained("means")[:3]
    )
    many = sb.bayesianize(
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), sb.MeanField()
    )
    assert len(dg.plot_spectrum(many).axes) == 5
    maps = dg.plot_scales(net, "0")
    drawn = [torch.tensor(a.images[0].get_array().data) for a in maps.axes[:3]]
    exact = sigma(net, "0.weight")
    torch.testing.assert_close(drawn, [exact, low_rank(exact, 1), low_rank(exact, 2)])
    maps.savefig(tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 5000
    assert (
        len(
            dg.plot_scales(
                sb.bayesianize(nn.Linear(4, 1), sb.MeanField()), "weight"
            ).axes
        )
        == 3
    )  # no rank 2 in a vector
    with pytest.raises(
        ValueError, match=r"layer='1' has no Gaussian posterior or is not there"
    ):
        dg.plot_scales(net, "1")
    with pytest.raises(ValueError, match="has several weights; name one"):
        dg.plot_scales(sb.bayesianize(nn.LSTM(3, 2), sb.MeanField()), "")


def test_without_matplotlib_only_plots_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for plot in (lambda: dg.plot_spectrum(mlp()), lambda: dg.plot_scales(mlp(), "0")):
        with pytest.raises(
            ImportError, match="needs matplotlib, .* pip install matplotlib"
        ):
            plot()


# Functions of implicit priors, against a direct simulation in numpy and closed forms (Appendix D.1 of the EMP paper)

IMPLICIT: Any = ("dropout", "emp", "ecmp")
HIDDEN, BIAS, WEIGHT = 100, 20**0.5, 5**0.5


def simulate(
    method: str, x: np.ndarray, functions: int, rate: float = 0.5
) -> np.ndarray:
    """y = B + sum_h W_h sign(b_h + w_h x), with masks for dropout; a pick of iid components is one of them."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(functions):
        w, big_w = rng.normal(0, WEIGHT, (2, HIDDEN))
        b, big_b = rng.normal(0, BIAS, HIDDEN), rng.normal(0, BIAS)
        if method == "dropout":
            w, big_w = (
                w * (rng.random(HIDDEN) >= rate),
                big_w * (rng.random(HIDDEN) >= rate),
            )
        out.append(big_b + np.sign(b + np.outer(x, w)) @ big_w)
    return np.array(out)


def steps_of(values: torch.Tensor) -> torch.Tensor:
    return (values.diff(dim=1).abs() > 1e-4).sum(1).double()


@pytest.mark.slow
@pytest.mark.parametrize("method", IMPLICIT)
def test_values_are_those_of_the_formula(method: Any) -> None:
    """Distributions at three points, and their differences between points, agree with the direct simulation."""
    x = torch.tensor([-3.0, 0.0, 1.0])
    got, expected = (
        prior_functions(method, x, functions=200).numpy(),
        simulate(method, x.numpy(), 1500),
    )
    for i in range(3):
        assert stats.ks_2samp(got[:, i], expected[:, i]).pvalue > 0.005
    for i, j in ((0, 1), (1, 2)):
        assert (
            stats.ks_2samp(
                got[:, i] - got[:, j], expected[:, i] - expected[:, j]
            ).pvalue
            > 0.005
        )
    variance = BIAS**2 + HIDDEN * WEIGHT**2 * (0.5 if method == "dropout" else 1.0)
    np.testing.assert_allclose(got.var(0), variance, rtol=4 * math.sqrt(2 / len(got)))
    assert abs(got.mean()) < 4 * math.sqrt(variance / len(got))


@pytest.mark.parametrize("method", IMPLICIT)
def test_a_quarter_of_the_steps_survives_dropout(method: Any) -> None:
    """Steps lie at -b/w, a Cauchy variable; with w and W each dropped half of the time a quarter is seen."""
    x, functions = torch.linspace(-5, 5, 20_001, dtype=torch.float64), 12
    inside = 2 / math.pi * math.atan(5 / (BIAS / WEIGHT))
    share = inside * (0.25 if method == "dropout" else 1.0)
    counted = steps_of(prior_functions(method, x, functions=functions)).mean().item()
    error = math.sqrt(HIDDEN * share * (1 - share) / functions)
    assert (
        abs(counted - HIDDEN * share) < 4 * error + 0.02 * HIDDEN * share
    )  # two steps may fall between the same two points


@pytest.mark.slow
def test_rate_and_standard_deviations() -> None:
    """Nothing dropped leaves every step; the second reading of the paper is the first one stretched."""
    x = torch.linspace(-1e4, 1e4, 3)
    everything = prior_functions("dropout", x, functions=100, rate=0.0)
    np.testing.assert_allclose(everything.var(0).numpy(), 520, rtol=0.4)
    wide = prior_functions("emp", x, functions=100, bias_std=20.0, weight_std=5.0)
    np.testing.assert_allclose(wide.var(0).numpy(), 400 + 100 * 25, rtol=0.4)
    assert steps_of(prior_functions("dropout", x, rate=0.99999)).sum() == 0
    assert prior_functions("emp", x, functions=0).shape == (0, 3)


def test_same_seed_same_functions_each_its_own() -> None:
    x = torch.linspace(-2, 2, 50)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(prior_functions("emp", x, functions=4))
    assert torch.equal(*drawn)
    assert len({tuple(line.tolist()) for line in drawn[0]}) == 4


def test_errors_say_what_is_needed() -> None:
    with pytest.raises(
        ValueError, match="unknown method 'dropuot'; did you mean 'dropout'"
    ):
        prior_functions("dropuot", torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"vector of real numbers x, got shape \(3, 1\)"
    ):
        prior_functions("emp", torch.zeros(3, 1))
    with pytest.raises(ValueError, match="rate must lie in"):
        prior_functions("dropout", torch.zeros(3), rate=1.0)


@pytest.mark.slow
def test_picture() -> None:
    """Two panels with the paper's methods, three lines in each, on the same axes."""
    x = torch.linspace(-5, 5, 401)
    figure = plot_prior_functions(
        x, {"dropout": prior_functions("dropout", x), "EMP": prior_functions("emp", x)}
    )
    left, right = figure.axes
    assert left.get_title().startswith("dropout: ") and right.get_title().startswith(
        "EMP: "
    )
    assert [len(axes.lines) for axes in figure.axes] == [
        3,
        3,
    ] and left.get_ylim() == right.get_ylim()
    (near,) = plot_prior_functions(x / 5, {"flat": torch.zeros(1, len(x))}).axes
    assert all(float(tick).is_integer() for tick in near.get_xticks())


def test_matplotlib_is_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot_prior_functions needs matplotlib"):
        plot_prior_functions(torch.zeros(3), {})


# --- priors over weights that priors over factors induce (rank-1 paper, Eq. 3 and Figure 1) ---


def test_induced_priors_are_the_closed_forms() -> None:
    """Two normals: K0(|w|) / pi. Normal and Cauchy: exp(w^2 / 2) E1(w^2 / 2) / (pi sqrt(2 pi)). Inverse Gamma: t_2."""
    from scipy.special import exp1, k0

    from slimbayes.diagnostics.prior_plots import inverse_gamma_root

    w = torch.tensor([-4.0, -1.0, 0.3, 0.8, 2.0, 6.0], dtype=torch.float64)
    a = w.abs().numpy()
    for prior, expected in (
        (sb.Normal(0.0, 1.0), k0(a) / math.pi),
        (
            sb.Cauchy(0.0, 1.0),
            np.exp(a**2 / 2) * exp1(a**2 / 2) / (math.pi * math.sqrt(2 * math.pi)),
        ),
        (inverse_gamma_root, (2 + a**2) ** -1.5),
    ):
        got = sb.diagnostics.induced_prior(w, prior, values=1 << 16).numpy()  # type: ignore[arg-type]
        np.testing.assert_allclose(got, expected, rtol=2e-3)


@pytest.mark.slow
def test_two_factors_and_a_scale_are_products() -> None:
    """A second factor that is fixed scales the density; the order of factors does not matter."""
    w, r, s = torch.linspace(0.2, 3, 8), sb.Normal(1.0, 0.5), sb.Normal(2.0, 1e-9)
    both = sb.diagnostics.induced_prior(w, r, s, values=1 << 18)
    torch.testing.assert_close(
        both, sb.diagnostics.induced_prior(w, r, scale=2.0, values=512)
    )
    torch.testing.assert_close(
        both, sb.diagnostics.induced_prior(w, s, r, values=1 << 18)
    )
    wide = torch.linspace(-60, 60, 20_001)
    assert float(
        torch.trapezoid(
            sb.diagnostics.induced_prior(wide, r, values=256), wide.double()
        )
    ) == pytest.approx(1.0, abs=2e-3)
    with pytest.raises(ValueError, match="scale above 0"):
        sb.diagnostics.induced_prior(w, r, scale=0.0)
