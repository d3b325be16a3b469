"""Posteriors with correlated weights: matrix normal and multivariate normal, against torch's own distributions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import slimbayes as sb

CONFIGS = {"full": sb.MultivariateNormal, "matrix": sb.FullMatrixNormal}


def correlated(kind: str, layer: nn.Module, **options: Any) -> Any:
    """A converted layer with correlations that are far from none, in float64."""
    net = sb.bayesianize(layer, CONFIGS[kind](scale_init=0.3, **options)).double()
    with torch.no_grad():
        for name, parameter in net.posterior.named_parameters():
            parameter.add_(
                torch.randn_like(parameter) * (0.5 if name.endswith("below") else 0.2)
            )
    return net


def covariance(posterior: Any, kind: str) -> Tensor:
    """Of all weights, row after row of the matrix view: of a matrix normal the Kronecker product of its factors'."""
    if kind == "full":
        factor = posterior.factor.matrix()
        return (factor @ factor.T).detach()
    rows, columns = posterior.rows.matrix(), posterior.columns.matrix()
    return torch.kron(rows @ rows.T, columns @ columns.T).detach()


@pytest.mark.parametrize("prior", [sb.Normal(0.2, 0.7), sb.HeNormal()])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_kl_is_that_of_torchs_multivariate_normals(kind: str, prior: Any) -> None:
    net = correlated(kind, nn.Linear(4, 3), prior=prior)
    loc, scale = (0.2, 0.7) if isinstance(prior, sb.Normal) else (0.0, math.sqrt(2 / 4))
    q = torch.distributions.MultivariateNormal(
        net.weight.detach().T.flatten(), covariance(net.posterior["weight"], kind)
    )
    p = torch.distributions.MultivariateNormal(
        torch.full((12,), loc).double(), scale**2 * torch.eye(12).double()
    )
    torch.testing.assert_close(sb.kl(net), torch.distributions.kl_divergence(q, p))


@pytest.mark.parametrize("kind", CONFIGS)
def test_draws_have_the_covariance(kind: str) -> None:
    """Of a Conv1d, whose matrix view is (inputs x kernel) by outputs; within five standard errors."""
    net, draws = correlated(kind, nn.Conv1d(1, 2, 2, bias=False)), 20_000
    with torch.no_grad():
        x = (
            torch.eye(2).double().view(2, 1, 2)
        )  # the outputs are the weights of each tap
        weights = sb.sample(net, x, draws=draws).flatten(1)  # (taps, outputs)
    mean = net.posterior["weight"].site.to_matrix(net.weight.detach()).flatten()
    wanted, centred = covariance(net.posterior["weight"], kind), weights - mean
    products = centred[:, :, None] * centred[:, None]
    error = products.std(0) / math.sqrt(draws)
    assert ((products.mean(0) - wanted).abs() < 5 * error).all()
    assert (wanted - wanted.diag().diag()).abs().max() > 0.02


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_correlations_it_is_mean_field_and_the_matrix_normal(kind: str) -> None:
    plain = nn.Linear(4, 3)
    net = sb.bayesianize(plain, CONFIGS[kind](scale_init=0.1))
    independent = sb.bayesianize(
        nn.Linear(4, 3), sb.MeanField(scale_init=0.1, scale_jitter=0.0)
    )
    independent.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(sb.kl(net), sb.kl(independent))
    torch.testing.assert_close(net.posterior["weight"].scale(), torch.full((3, 4), 0.1))
    if kind == "matrix":
        diagonal = sb.bayesianize(
            nn.Linear(4, 3), sb.MatrixNormal(scale_init=0.1, scale_jitter=0.3)
        )
        with torch.no_grad():
            diagonal.weight.copy_(net.weight)
            net.posterior["weight"].rows.log_scale.copy_(
                diagonal.posterior["weight"].log_u[:, 0]
            )
            net.posterior["weight"].columns.log_scale.copy_(
                diagonal.posterior["weight"].log_v[:, 0]
            )
        torch.testing.assert_close(sb.kl(net), sb.kl(diagonal))
        torch.testing.assert_close(
            net.posterior["weight"].scale(), diagonal.posterior["weight"].scale()
        )


@pytest.mark.parametrize("kind", CONFIGS)
def test_pruned_weights_stay_and_the_kl_is_that_of_the_others(kind: str) -> None:
    """Against torch's distribution of the free weights, whose covariance is that of the draws' Jacobian."""
    layer = nn.Linear(3, 3, bias=False)
    prune.custom_from_mask(
        layer, "weight", torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]])
    )
    net = correlated(kind, layer)
    posterior, mask = net.posterior["weight"], net.weight_mask.T != 0
    with torch.no_grad():
        drawn = sb.sample(net, torch.eye(3).double(), draws=10_000)
    assert (drawn[:, ~mask] == 0).all() and (drawn[:, mask] != net.weight.T[mask]).all()

    def draw(noise: Tensor) -> Tensor:
        return posterior.spread(noise * mask)[0][mask]

    jacobian = torch.autograd.functional.jacobian(
        draw, torch.zeros(1, 3, 3).double()
    ).flatten(1)
    centred = drawn[:, mask] - net.weight.detach().T[mask]
    products = centred[:, :, None] * centred[:, None]
    assert (
        (products.mean(0) - jacobian @ jacobian.T).abs() < 5 * products.std(0) / 100
    ).all()
    q = torch.distributions.MultivariateNormal(
        net.weight.detach().T[mask], jacobian @ jacobian.T
    )
    p = torch.distributions.MultivariateNormal(
        torch.zeros(6).double(), torch.eye(6).double()
    )
    torch.testing.assert_close(sb.kl(net), torch.distributions.kl_divergence(q, p))


@pytest.mark.parametrize("kind", CONFIGS)
def test_log_ratios_of_held_draws_average_to_the_kl(kind: str) -> None:
    net = correlated(kind, nn.Linear(3, 2))
    with sb.fixed_draws(net, 4000), torch.no_grad():
        total = net.posterior["weight"].log_ratio()
    assert -total.mean().item() == pytest.approx(
        sb.kl(net).item(), abs=5 * total.std().item() / math.sqrt(4000)
    )


def test_a_posterior_learns_the_correlations_of_a_linear_regression() -> None:
    """Exact: the posterior of a linear model with a Normal(0, 1) prior and unit noise is Normal with covariance
    (X^T X + I)^-1, which a full covariance reaches and a mean-field one cannot."""
    torch.manual_seed(1)
    x = torch.randn(20, 2).double() @ torch.tensor([[1.0, 0.9], [0.0, 0.4]]).double()
    y = x @ torch.tensor([1.0, -1.0]).double() + torch.randn(20).double()
    truth = torch.linalg.inv(x.T @ x + torch.eye(2).double())
    net = sb.bayesianize(
        nn.Linear(2, 1, bias=False), sb.MultivariateNormal(scale_init=0.3)
    ).double()
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=100, line_search_fn="strong_wolfe"
    )
    factor = net.posterior["weight"].factor

    def loss() -> (
        Tensor
    ):  # expected in closed form: the mean's residuals and tr(X S X^T)
        optimizer.zero_grad()
        spread = (x @ factor.matrix()).square().sum()
        value = 0.5 * ((y - net.weight[0] @ x.T).square().sum() + spread) + sb.kl(net)
        value.backward()
        return value

    optimizer.step(loss)
    torch.testing.assert_close(
        factor.matrix() @ factor.matrix().T, truth, rtol=1e-3, atol=1e-5
    )
    assert truth[0, 1].abs() > 0.5 * truth.diag().min()


def test_matrices_that_are_too_large_are_refused_with_the_size_they_would_need() -> (
    None
):
    with pytest.raises(
        ValueError,
        match=r"400 x 400 matrix takes 12,800,080,000 numbers \(51.20 GB\), and limit=10,0",
    ):
        sb.bayesianize(nn.Linear(400, 400), sb.MultivariateNormal())
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 2)), sb.MultivariateNormal()
    )
    assert "12,800,080,000 numbers" in str(
        sb.summary(net)
    )  # the small layer is converted
    assert sb.bayesianize(nn.Linear(400, 400), sb.FullMatrixNormal()).posterior[
        "weight"
    ].scale().shape == (400, 400)
    with pytest.raises(ValueError, match="limit=100"):
        sb.bayesianize(nn.Linear(400, 400), sb.FullMatrixNormal(limit=100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": sb.Cauchy()}, "Normal or HeNormal prior, got Cauchy"),
        ({"scale_init": 0.0}, "scale_init must be positive"),
        ({"limit": 0}, "limit must be a whole number"),
    ],
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_bad_options_are_refused_in_words(
    kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CONFIGS[kind](**options)


def test_joint_weights_of_a_recurrent_layer_leave_its_second_bias_alone() -> None:
    net = sb.bayesianize(
        nn.LSTM(3, 2), sb.JointNormal(over="weights", prior=sb.Normal(0.0, 1.0))
    )
    size = (
        8 * 3 + 8 + 8 * 2
    )  # of b_ih and b_hh, which add up, the first has a distribution
    assert sum(p.size for p in net.posterior.values()) == size
    own = torch.cat(
        [net.weight_ih_l0.flatten(), net.bias_ih_l0, net.weight_hh_l0.flatten()]
    )
    expected = 0.5 * (own.square() + 0.01**2 - 1).sum() - size * math.log(0.01)
    torch.testing.assert_close(sb.kl(net), expected)
