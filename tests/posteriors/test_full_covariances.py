"""Full covariances, of all weights or of rows and columns, against torch's own distributions."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import slimbayes as sb

CONFIGS = {
    "full": partial(sb.JointNormal, over="weights"),
    "matrix": sb.FullMatrixNormal,
}


def correlated(kind: str, layer: nn.Module, **options: Any) -> Any:
    """A converted layer with correlations that are far from none, in float64."""
    net = sb.bayesianize(layer, CONFIGS[kind](scale_init=0.3, **options)).double()
    with torch.no_grad():
        for name, parameter in net.posterior.named_parameters():
            parameter.add_(
                torch.randn_like(parameter)
                * (0.5 if name.endswith(("below", "lower")) else 0.2)
            )
    return net


def covariance(net: Any) -> Tensor:
    """Of all weights, and of the bias where the posterior has it, in the order of `mean`."""
    posterior = net.posterior["weight"]
    if hasattr(posterior, "covariance"):
        return posterior.covariance()[0].detach()
    rows, columns = posterior.rows.matrix(), posterior.columns.matrix()
    return torch.kron(rows @ rows.T, columns @ columns.T).detach()


def mean(net: Any) -> Tensor:
    """All weights as they are stored, or row after row of the matrix view where rows and columns are correlated."""
    posterior = net.posterior["weight"]
    if hasattr(posterior, "covariance"):
        return posterior.means()[0].detach()
    return posterior.site.to_matrix(net.weight.detach()).flatten()


@pytest.mark.parametrize(
    ("kind", "prior"),
    [
        ("full", sb.Normal(0.2, 0.7)),
        ("matrix", sb.Normal(0.2, 0.7)),
        ("matrix", sb.HeNormal()),
    ],
)
def test_the_kl_is_that_of_torchs_multivariate_normals(kind: str, prior: Any) -> None:
    net = correlated(kind, nn.Linear(4, 3), prior=prior)
    loc, scale = (0.2, 0.7) if isinstance(prior, sb.Normal) else (0.0, math.sqrt(2 / 4))
    q = torch.distributions.MultivariateNormal(mean(net), covariance(net))
    size = len(mean(net))
    p = torch.distributions.MultivariateNormal(
        torch.full((size,), loc).double(), scale**2 * torch.eye(size).double()
    )
    torch.testing.assert_close(sb.kl(net), torch.distributions.kl_divergence(q, p))


@pytest.mark.parametrize("bias", [True, False])
def test_a_full_covariance_of_n_numbers_takes_n_times_n_plus_1_halves(
    bias: bool,
) -> None:
    net = sb.bayesianize(nn.Linear(4, 3, bias=bias), sb.JointNormal(over="weights"))
    size = 15 if bias else 12
    assert sum(p.numel() for p in net.posterior.parameters()) == size * (size + 1) // 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_draws_have_the_covariance(kind: str) -> None:
    """Of a Conv1d, whose matrix view is (inputs x kernel) by outputs; within five standard errors."""
    net, draws = correlated(kind, nn.Conv1d(1, 2, 2, bias=False)), 20_000
    with torch.no_grad():
        x = torch.eye(2).double().view(2, 1, 2)  # outputs are the weights of each tap
        weights = sb.sample(net, x, draws=draws).squeeze(3)  # (draws, taps, outputs)
    ordered = weights.mT if kind == "full" else weights
    centred = ordered.flatten(1) - mean(net)
    products = centred[:, :, None] * centred[:, None]
    error, wanted = products.std(0) / math.sqrt(draws), covariance(net)
    assert ((products.mean(0) - wanted).abs() < 5 * error).all()
    assert (wanted - wanted.diag().diag()).abs().max() > 0.02


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_correlations_it_is_mean_field_and_the_matrix_normal(kind: str) -> None:
    plain = nn.Linear(4, 3, bias=False)
    net = sb.bayesianize(plain, CONFIGS[kind](scale_init=0.1))
    independent = sb.bayesianize(
        nn.Linear(4, 3, bias=False), sb.MeanField(scale_init=0.1, scale_jitter=0.0)
    )
    independent.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(sb.kl(net), sb.kl(independent))
    if kind == "matrix":
        diagonal = sb.bayesianize(
            nn.Linear(4, 3, bias=False),
            sb.MatrixNormal(scale_init=0.1, scale_jitter=0.3),
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
    """Against torch's distribution of the free weights, with the covariance of the draws."""
    layer = nn.Linear(3, 3, bias=False)
    prune.custom_from_mask(
        layer, "weight", torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]])
    )
    net = correlated(kind, layer)
    posterior, mask = net.posterior["weight"], net.weight_mask.T != 0
    with torch.no_grad():
        drawn = sb.sample(net, torch.eye(3).double(), draws=10_000)
    assert (drawn[:, ~mask] == 0).all() and (drawn[:, mask] != net.weight.T[mask]).all()

    if kind == "full":
        stored = net.weight_mask.flatten() != 0
        exact, centred = covariance(net)[stored][:, stored], (drawn.mT - net.weight)
        centred = centred.detach().flatten(1)[:, stored]
        loc = net.weight.detach().flatten()[stored]
    else:

        def draw(noise: Tensor) -> Tensor:
            return posterior.spread(noise * mask)[0][mask]

        jacobian = torch.autograd.functional.jacobian(
            draw, torch.zeros(1, 3, 3).double()
        ).flatten(1)
        loc = net.weight.detach().T[mask]
        exact, centred = jacobian @ jacobian.T, drawn[:, mask] - loc
    products = centred[:, :, None] * centred[:, None]
    assert ((products.mean(0) - exact).abs() < 5 * products.std(0) / 100).all()
    q = torch.distributions.MultivariateNormal(loc, exact)
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
        nn.Linear(2, 1, bias=False), sb.JointNormal(over="weights", scale_init=0.3)
    ).double()
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=100, line_search_fn="strong_wolfe"
    )
    posterior = net.posterior["weight"]

    def loss() -> (
        Tensor
    ):  # expected in closed form: the mean's residuals and tr(X S X^T)
        optimizer.zero_grad()
        spread = (x @ posterior.root()[0]).square().sum()
        value = 0.5 * ((y - net.weight[0] @ x.T).square().sum() + spread) + sb.kl(net)
        value.backward()
        return value

    optimizer.step(loss)
    torch.testing.assert_close(posterior.covariance()[0], truth, rtol=1e-3, atol=1e-5)
    assert truth[0, 1].abs() > 0.5 * truth.diag().min()


def test_matrices_that_are_too_large_are_refused_with_the_size_they_would_need() -> (
    None
):
    assert sb.bayesianize(nn.Linear(400, 400), sb.FullMatrixNormal()).posterior[
        "weight"
    ].scale().shape == (400, 400)
    with pytest.raises(
        ValueError,
        match=r"400 x 400 matrix takes 160,400 numbers \(0.00 GB\), and limit=100,000",
    ):
        sb.bayesianize(nn.Linear(400, 400), sb.FullMatrixNormal(limit=100_000))
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 2)),
        sb.FullMatrixNormal(limit=100_000),
    )
    assert "160,400 numbers" in str(sb.summary(net))  # the small layer is converted
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
def test_bad_options_are_refused_in_words(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sb.FullMatrixNormal(**options)


def test_joint_weights_of_a_recurrent_layer_leave_its_second_bias_alone() -> None:
    net = sb.bayesianize(nn.LSTM(3, 2), sb.JointNormal(over="weights"))
    size = (
        8 * 3 + 8 + 8 * 2
    )  # of b_ih and b_hh, which add up, the first has a distribution
    assert sum(p.size for p in net.posterior.values()) == size
    own = torch.cat(
        [net.weight_ih_l0.flatten(), net.bias_ih_l0, net.weight_hh_l0.flatten()]
    )
    expected = 0.5 * (own.square() + 0.01**2 - 1).sum() - size * math.log(0.01)
    torch.testing.assert_close(sb.kl(net), expected)
