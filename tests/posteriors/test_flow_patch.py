"""FlowPatch beyond the contract: a known posterior that independent normals miss, k-hat, and what it refuses."""

import math

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.diagnostics import check
from slimbayes.posteriors.flow_patch import FlowPosterior


class Sum(nn.Module):
    """Outputs the scale times x plus the bias: the likelihood sees their sum at x = 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(x)


def bound(net: nn.Module, x: torch.Tensor, y: torch.Tensor, draws: int) -> torch.Tensor:
    """-ELBO of targets with noise of a tenth."""
    outputs = sb.sample(net, x, draws=draws)
    return 50 * ((outputs - y) ** 2).sum((1, 2)).mean() + sb.kl(net)


@pytest.mark.slow
def test_a_flow_fits_a_correlated_posterior_better_than_independent_normals():
    """Inputs normalise to (1, -1): each output is scale * (+-1) + bias, so scale and bias are strongly correlated."""
    x, y = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, -0.5]])
    found = {}
    for steps in (0, 6):
        torch.manual_seed(0)
        net = sb.bayesianize(
            Sum(), sb.FlowPatch(steps=steps, scale_init=0.1, samples=32)
        )
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for _ in range(150):
            optimizer.zero_grad()
            bound(net, x, y, 32).backward()
            optimizer.step()
        with torch.no_grad():
            found[steps] = float(
                torch.stack([bound(net, x, y, 256) for _ in range(10)]).mean()
            )
    # y = a z + b + noise, z = +-1: exactly Gaussian; each pair has evidence N(y; 0, 1 + 1 + 0.01)
    exact = sum(0.5 * (v**2 / 2.01 + math.log(2.01 / 0.01)) for v in (1.0, -0.5))
    assert exact < found[6] < found[0] - 0.5


def test_without_steps_it_is_mean_field_and_its_kl_the_closed_form():
    torch.manual_seed(0)
    net = sb.bayesianize(
        nn.LayerNorm(3),
        sb.FlowPatch(steps=0, scale_init=0.3, tau=2.0, rho=0.5, samples=20_000),
    )
    closed = 0.0
    for mean, tau in ((net.weight, 2.0), (net.bias, 0.5)):
        prior = torch.distributions.Normal(0.0, tau**-0.5)
        q = torch.distributions.Normal(mean.detach(), 0.3)
        closed += float(torch.distributions.kl_divergence(q, prior).sum())
    assert float(sb.kl(net).detach()) == pytest.approx(closed, rel=0.02)


def test_a_check_knows_its_density_and_a_config_its_limits():
    torch.manual_seed(0)
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), sb.FlowPatch()
    )
    found = check(net, torch.randn(20, 4), torch.arange(20) % 3)
    assert found.elements == 12 and found.k_hat is not None
    assert [type(p) for p in net[1].posterior.values()] == [FlowPosterior]
    for wrong, told in (
        ({"steps": -1}, "steps must"),
        ({"tau": 0.0}, "tau is"),
        ({"scale_init": 0.0}, "scale_init"),
    ):
        with pytest.raises(ValueError, match=told):
            sb.FlowPatch(**wrong)
    with pytest.raises(ValueError, match="looked for norm layers"):
        sb.bayesianize(nn.Sequential(nn.Linear(4, 6)), sb.FlowPatch())
