"""Appendix C of Ensemble Model Patching: precisions that are inferred (C.1) and coordinate descent (C.2)."""

import math

import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.distributions import Gamma, kl_divergence

import slimbayes as sb
from slimbayes.distributions.kl import marginal_cost


@pytest.mark.parametrize(
    ("square", "count", "shape", "mean"),
    [(3.0, 4, 1.0, 1.0), (0.2, 7, 2.5, 3.0), (50.0, 1, 0.4, 0.1)],
)
def test_the_collapsed_bound_is_the_evidence_of_the_hyperprior_by_quadrature(
    square, count, shape, mean
):
    prior = stats.gamma(shape, scale=mean / shape)
    evidence, _ = integrate.quad(
        lambda tau: (
            prior.pdf(tau) * (tau / mean) ** (count / 2) * math.exp(-tau * square / 2)
        ),
        0,
        math.inf,
        epsabs=1e-13,
    )
    assert float(
        marginal_cost(torch.tensor(square).double(), count, shape, mean)
    ) == pytest.approx(-math.log(evidence))


def best_q(square, count, shape, mean):
    """Shape and rate of the best q(tau)."""
    return square.new_tensor(shape + count / 2), shape / mean + square / 2


def test_it_is_what_is_left_of_the_bound_at_the_best_q_and_no_other_q_is_better():
    square, count, shape, mean = torch.tensor(5.0).double(), 6, 1.5, 2.0

    def bound(a, b):
        """E_q[tau] S/2 - n/2 E_q[log tau] + KL(q || prior), and n/2 log(mean)."""
        expected_log = torch.digamma(a) - b.log()
        first = a / b * square / 2 - count / 2 * (expected_log - math.log(mean))
        return float(first + kl_divergence(Gamma(a, b), Gamma(shape, shape / mean)))

    a, b = best_q(square, count, shape, mean)
    best = float(marginal_cost(square, count, shape, mean))
    assert bound(a, b) == pytest.approx(best)
    assert all(
        bound(a * f, b * g) > best
        for f in (0.8, 1.0, 1.25)
        for g in (0.8, 1.0, 1.25)
        if (f, g) != (1.0, 1.0)
    )


@pytest.mark.parametrize("cross", [False, True])
def test_a_models_kl_with_inferred_precisions_is_the_sum_over_its_layers(cross):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    config = sb.ModelPatch(
        components=3,
        cross=cross,
        patch="norm+output",
        tau=2.0,
        rho=0.5,
        precision_shape=1.5,
        jitter=1.0,
    )
    net = sb.bayesianize(net, config)
    expected = 0.0
    for layer in (net[1], net[2]):
        q = layer.posterior["weight"]
        for own, others, mean in (
            (layer.weight, q.weight, 2.0),
            (layer.bias, q.bias, 0.5),
        ):
            every = torch.cat([own[None], others]).detach()
            expected += float(
                marginal_cost(every.square().sum() / 3, own.numel(), 1.5, mean)
            )
    assert float(sb.kl(net).detach()) == pytest.approx(expected, rel=1e-5)
    sb.kl(net).backward()
    assert (
        net[1].weight.grad is not None
        and net[1].posterior["weight"].weight.grad is not None
    )
    # a prior of large shape is a fixed precision
    fixed = sb.bayesianize(
        nn.LayerNorm(4), sb.ModelPatch(components=2, tau=2.0, init="ones")
    )
    free = sb.bayesianize(
        nn.LayerNorm(4),
        sb.ModelPatch(components=2, tau=2.0, init="ones", precision_shape=1e5),
    )
    assert float(sb.kl(free).detach()) == pytest.approx(
        float(sb.kl(fixed).detach()), rel=1e-3
    )
    shared = sb.shared_precision(net, shape=1.5, tau=2.0, rho=0.5)
    first = [(net[0].weight, 2.0), (net[0].bias, 0.5)]
    assert float(shared.detach()) == pytest.approx(
        sum(
            float(marginal_cost(p.detach().square().sum(), p.numel(), 1.5, mean))
            for p, mean in first
        ),
        rel=1e-5,
    )


def test_precisions_that_cannot_be_inferred_are_refused():
    for wrong in ({"tau": None}, {"precision_shape": -1.0}, {"tau": 0.0}, {"rho": 0.0}):
        with pytest.raises(ValueError, match="a Gamma prior needs a positive shape"):
            sb.ModelPatch(**({"precision_shape": 1.0} | wrong))
    with pytest.raises(ValueError, match="shape and mean must be positive"):
        sb.OutputPrecision(shape=0.0)
    with pytest.raises(ValueError, match="A target of shape"):
        sb.OutputPrecision().nll(torch.zeros(2, 5, 1), torch.zeros(5))


def test_the_output_precision_finds_the_closed_form_posterior():
    torch.manual_seed(0)
    outputs, y = torch.zeros(1, 40, 2).double(), 0.3 * torch.randn(40, 2).double()
    noise = sb.OutputPrecision(shape=1.0, mean=1.0).double()
    optimizer = torch.optim.LBFGS(
        noise.parameters(),
        max_iter=200,
        tolerance_grad=1e-10,
        line_search_fn="strong_wolfe",
    )

    def loss():
        optimizer.zero_grad()
        value = noise.nll(outputs, y) + noise.kl() / 40
        value.backward()
        return value

    optimizer.step(loss)
    a, b = best_q(y.square().sum(), y.numel(), 1.0, 1.0)
    torch.testing.assert_close(noise.log_shape.exp(), a, rtol=1e-4, atol=0)
    torch.testing.assert_close(noise.log_rate.exp(), b, rtol=1e-4, atol=0)
    assert float(noise.likelihood_std) == pytest.approx(float((b / a).sqrt()), rel=1e-4)


def test_one_part_rests_while_the_other_is_trained():
    """Of three steps each: a rate of zero leaves every weight of the resting part as it is, whatever its moments."""
    torch.manual_seed(0)
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
        sb.ModelPatch(components=2, patch="norm+output"),
    )
    groups = sb.param_groups(net, apart=True)
    parts = {
        name: [p for g in groups if g["part"] == name for p in g["params"]]
        for name in ("shared", "patch")
    }
    assert sum(map(len, parts.values())) == len(list(net.parameters()))
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    turn = sb.schedules.alternating(3)
    for step in range(12):
        resting = "patch" if turn(step) == "shared" else "shared"
        before = {name: [p.clone() for p in parts[name]] for name in parts}
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if group["part"] == resting else 0.1
        optimizer.zero_grad()
        sb.elbo(sb.categorical(sb.sample(net, x), y), net, 20).loss.backward()
        optimizer.step()
        same = {
            name: all(torch.equal(p, q) for p, q in zip(parts[name], before[name]))
            for name in parts
        }
        assert same == {"shared": resting == "shared", "patch": resting == "patch"}
    with pytest.raises(ValueError, match="phases of at least one step"):
        sb.schedules.alternating(0)


@pytest.mark.slow
def test_coordinate_descent_ends_where_descent_ends():
    """Least squares y = w x + b, w shared, two components of the bias-like norm: a convex problem with one optimum."""
    torch.manual_seed(0)
    x = torch.randn(64, 1)
    y = 2 * x + 1

    def descend(every):
        torch.manual_seed(1)
        net = sb.bayesianize(
            nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1)),
            {"1": sb.Mixture(components=1, tau=None)},
        )
        (
            nn.init.ones_(net[0].weight),
            nn.init.ones_(net[1].weight),
            nn.init.zeros_(net[1].bias),
        )
        groups = sb.param_groups(net, apart=True)
        assert [
            p is net[0].weight
            for g in groups
            if g["part"] == "shared"
            for p in g["params"]
        ] == [True]
        optimizer = torch.optim.SGD(groups, lr=0.2)
        for step in range(150):
            part = None if every is None else sb.schedules.alternating(every)(step)
            for group in optimizer.param_groups:
                group["lr"] = 0.2 if part in (None, group["part"]) else 0.0
            optimizer.zero_grad()
            sb.gaussian(sb.sample(net, x), y, 1.0).backward()
            optimizer.step()
        return float((net[0].weight * net[1].weight).detach()), float(
            net[1].bias.detach()
        )

    torch.testing.assert_close(
        torch.tensor(descend(5)), torch.tensor((2.0, 1.0)), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        torch.tensor(descend(None)), torch.tensor((2.0, 1.0)), atol=1e-3, rtol=0
    )
