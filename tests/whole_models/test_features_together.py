"""Features that meet: tied weights, held draws, stacking, export, Laplace, plans that are kept. Each is right alone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import each
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import diagnostics as dg
from slimbayes.decisions import Abstention, TemperatureScaling
from slimbayes.distributions.families import Normal
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.heteroscedastic import noise_scale, noise_slope


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def moved(net: Any) -> Any:
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net


X = torch.randn(12, 4)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_merge_mean_of_tied_layers() -> None:
    net = moved(sb.bayesianize(Tied(), sb.BatchEnsemble(members=3)))
    every = [sb.materialize(net, member=k).a.weight for k in range(3)]
    torch.testing.assert_close(
        sb.materialize(net, member="mean").a.weight,
        torch.stack(every).mean(0).requires_grad_(),
    )


def test_select_tied_layers_with_biases_of_their_own() -> None:
    net = moved(sb.bayesianize(Tied(), sb.BatchEnsemble(members=3)))
    before = sb.sample(net, X)
    torch.testing.assert_close(
        sb.sample(sb.keep_members(net, [2, 1]), X), before[[2, 1]]
    )


@pytest.mark.parametrize(
    "config",
    [
        sb.MeanField(),
        sb.KTied(),
        sb.JointNormal(members=2),
        sb.FullMatrixNormal(),
    ],
)
def test_held_draws_have_gradients_and_follow_parameters(config: Any) -> None:
    net = sb.bayesianize(nn.Linear(4, 3), config)
    with sb.fixed_draws(net, 2 * sb.members(net), seed=0):
        with torch.no_grad():
            sb.sample(net, X)
        sb.sample(net, X).square().sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        moved(net)
        held = sb.sample(net, X)
    with sb.fixed_draws(net, 2 * sb.members(net), seed=0):
        torch.testing.assert_close(held, sb.sample(net, X))


@pytest.mark.slow
def test_stacking_weights_survive_export_and_refreshed_norms(tmp_path: Path) -> None:
    net = sb.ensemble(
        [
            moved(
                nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
            ).eval()
            for _ in range(3)
        ]
    )
    w = torch.tensor([0.7, 0.2, 0.1])
    net.posterior["members"].weights.copy_(w)
    p = sb.predict(net, X)
    torch.testing.assert_close(p.probs, (p.member_probs * w[:, None, None]).sum(0))
    sb.export(net, X, tmp_path / "a.pt2", likelihood="categorical", members=[0, 1])
    some = (p.member_probs[:2] * (w[:2] / w[:2].sum())[:, None, None]).sum(0)
    torch.testing.assert_close(
        torch.export.load(tmp_path / "a.pt2").module()(X)[0], some
    )
    q = sb.predict(sb.refresh_norms(net, X, per="draw"), X)
    torch.testing.assert_close(q.probs, (q.member_probs * w[:, None, None]).sum(0))


def test_plans_follow_priors_and_clips() -> None:
    net = moved(sb.bayesianize(mlp(), sb.Rank1(members=2, clip=2.0)))
    sb.kl(net)
    sb.sample(net, X)
    net[0].posterior["weight"].clip, net[2].posterior["weight"].r.prior = (
        0.01,
        Normal(0.0, 3.0),
    )
    torch.testing.assert_close(sb.kl(net), sb.kl(copy.deepcopy(net)))
    torch.testing.assert_close(
        sb.sample(net, X, seed=0), sb.sample(copy.deepcopy(net), X, seed=0)
    )


@pytest.mark.parametrize(
    "fit",
    [
        sb.laplace,
        lambda net, data: sb.sample_posterior(
            net, data, chains=2, draws=2, burn_in=1, thin=1
        ),
    ],
)
def test_what_trains_is_saved_and_holds_rows_stays(fit: Any, tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    net = sb.bayesianize(
        copy.deepcopy(base), sb.Rank1(members=2), train="posterior", batch_dim=0
    )
    sb.sample(net.train(), X)  # statistics move
    fit(net.eval(), [(X, torch.randint(3, (12,)))])
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {
        n
        for n, _ in net.named_parameters()
        if "posterior" in n and not n.endswith(".bias")
    }
    assert net._slimbayes.batch_dim == 0
    sb.save(net, tmp_path / "p")
    again = sb.load(copy.deepcopy(base), tmp_path / "p").eval()
    torch.testing.assert_close(sb.sample(again, X, seed=0), sb.sample(net, X, seed=0))


@pytest.mark.parametrize("over", ["both", "weights"])
def test_joint_normal_cast_to_half(over: Any) -> None:
    net = sb.bayesianize(mlp(), sb.JointNormal(over=over)).bfloat16()
    assert sb.sample(net, X.bfloat16()).isfinite().all()


@pytest.mark.parametrize(
    ("config", "width"),
    each([sb.BatchEnsemble(members=2), sb.Rank1(members=2), sb.JointNormal()], [5, 7]),
)
def test_a_tied_embedding_shares_no_factors(config: Any, width: Any) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.m, self.f = (
                nn.Embedding(7, width),
                nn.Linear(width, width),
                nn.Linear(width, 7, bias=False),
            )
            self.f.weight = self.e.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.f(torch.tanh(self.m(self.e(x))))

    net, x = (
        moved(sb.bayesianize(Words(), config, include=["e", "m", "f"])),
        torch.randint(7, (6, 3)),
    )
    with sb.fixed_draws(net, seed=0):
        out = sb.sample(net, x)
        for j in range(len(out)):
            torch.testing.assert_close(
                sb.materialize(net, draw=j)(x), out[j], atol=1e-5, rtol=1e-5
            )
    assert "inputs for outputs" in str(sb.summary(net))
    with pytest.raises(ValueError, match="inputs for outputs"):
        sb.bayesianize(Words(), config, include=["e", "m", "f"], strict=True)


def test_a_flow_has_no_mean_at_hand() -> None:
    net = moved(
        sb.bayesianize(
            nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
            sb.FlowPatch(),
        )
    )
    with pytest.raises(ValueError, match="average draws"), sb.fixed_draws(net, "mean"):
        pass


def test_fisher_slope_is_the_noise_derivative() -> None:
    raw = torch.linspace(-6, 12, 19, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(noise_scale(raw).sum(), raw)[0]
    torch.testing.assert_close(
        noise_slope(torch.stack([raw, raw], -1).detach())[0], want
    )


def test_laplace_of_a_heteroscedastic_head_has_no_noise_of_its_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 1)
    y = 1.5 * torch.randn(200)
    lin = torch.nn.Linear(1, 2).eval()
    ll = -200 * float(sb.heteroscedastic_gaussian(lin(x)[None], y).detach())
    fit = sb.laplace(
        lin,
        [(x, y)],
        "heteroscedastic_gaussian",
        over="weights",
        prior=sb.Normal(0.0, 10.0),
    )
    assert fit.likelihood_std == 0.0 and abs(fit.log_likelihood - ll) < 0.1


def test_temperature_one_leaves_far_predictions_alone() -> None:
    torch.manual_seed(0)
    net = sb.bayesianize(torch.nn.Linear(4, 3), sb.Rank1(members=2))
    x = torch.randn(50, 4)
    p = sb.predict(net, 5 * x, distance=sb.distance(net, [(x, x)]), seed=0)
    torch.testing.assert_close(
        TemperatureScaling(1.0)(p).epistemic, p.epistemic, rtol=1e-4, atol=1e-5
    )


def test_decisions_refuse_nan_targets() -> None:
    p, y = (
        Prediction.from_outputs(torch.zeros(1, 300), "gaussian", likelihood_std=1.0),
        torch.full((300,), torch.nan),
    )
    with pytest.raises(ValueError):
        TemperatureScaling.fit(p, y)
    with pytest.raises(ValueError):
        Abstention.fit(p, y, tolerance=1.0)


def test_joined_refuses_other_weights() -> None:
    a, b = (
        Prediction.from_outputs(
            torch.tensor([[0.0], [9.0]]), "gaussian", 2, 1.0, weights=w
        )
        for w in ([1.0, 0.0], [0.0, 1.0])
    )
    with pytest.raises(ValueError):
        Prediction.joined([a, b])


def test_spread_is_judged_target_by_target() -> None:
    z, out = torch.randn(64, 2), torch.zeros(1, 64, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.heteroscedastic_gaussian(
            out, z + torch.tensor([0.0, 500.0]), likelihood_std=1.0
        )
    with pytest.warns(UserWarning, match="bounds their noise"):
        sb.heteroscedastic_gaussian(
            out, z * torch.tensor([1.0, 1e3]), likelihood_std=torch.tensor([1e3, 1.0])
        )


def test_set_params_changes_the_next_fit_alone() -> None:
    from slimbayes.sklearn import BayesRegressor

    X = np.random.default_rng(0).normal(size=(60, 2))
    m = BayesRegressor(epochs=1, random_state=0).fit(X, X[:, 0])
    std = m.predict(X, return_std=True)[1]
    assert np.array_equal(m.set_params(noise=1.0).predict(X, return_std=True)[1], std)


def test_a_category_of_test_rows_alone_is_refused(tmp_path: Path) -> None:
    from slimbayes_lab.configs.experiment import Data
    from slimbayes_lab.tasks.intake import open_data

    (tmp_path / "t.csv").write_text(
        "a,k,y\n"
        + "".join(f"{i},{'x' if i % 2 else 'z'},{i}.5\n" for i in range(40))
        + "1,w,2.5\n"
    )
    with pytest.raises(ValueError, match="did not see"):
        open_data(
            Data(
                name="t",
                csv=str(tmp_path / "t.csv"),
                target="y",
                test=0.2,
                validation=0.2,
                held_out="last",
            ),
            None,
        )


def test_intervals_weigh_members() -> None:
    p = Prediction.from_outputs(
        torch.tensor([[[0.0]], [[100.0]]]), "gaussian", 2, 1.0, weights=[1.0, 0.0]
    )
    assert float(p.interval(0.9)[1]) < 2


def test_a_weight_of_two_layers_counts_once() -> None:
    net = sb.bayesianize(Tied(), sb.MeanField(scale_init=0.3))
    ratios = dg.log_ratios(net, lambda held: torch.zeros(500), draws=500, chunk=500)
    assert list(dg.prune(copy.deepcopy(net), 0.5).by_weight) == ["a.weight"]
    assert float(ratios.mean()) == pytest.approx(-float(sb.kl(net).detach()), rel=0.1)
