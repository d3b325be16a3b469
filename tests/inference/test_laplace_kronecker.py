"""Kronecker products of curvature: where they are exact, and what a model with them does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import slimbayes as sb

PRIOR = sb.Normal(0.0, 0.5)


def fits(
    net: nn.Module, batches: Any, likelihood: Any = "categorical", **options: Any
) -> tuple[nn.Module, nn.Module]:
    """The network with full covariances and with products."""
    found = []
    for structure in ("full", "kronecker"):
        own = copy.deepcopy(net)
        found.append(
            (
                own,
                sb.laplace(
                    own,
                    batches,
                    likelihood,
                    "weights",
                    structure=structure,
                    prior=PRIOR,
                    **options,
                ),
            )
        )
    return tuple(own for own, _ in found), tuple(fit.log_evidence for _, fit in found)  # type: ignore[return-value]


def same(full: nn.Module, product: nn.Module) -> None:
    for name, layer in full.named_modules():
        if hasattr(layer, "posterior"):
            wanted, found = (
                m.get_submodule(name).posterior["weight"] for m in (full, product)
            )
            assert found.factored and not wanted.factored
            torch.testing.assert_close(found.covariance(), wanted.covariance())
            torch.testing.assert_close(found.variances(), wanted.variances())


@pytest.mark.parametrize("bias", [True, False])
def test_products_are_exact_for_linear_models_of_gaussian_targets(bias: bool) -> None:
    net = nn.Linear(4, 3, bias=bias).double().eval()
    x, y = torch.randn(30, 4).double(), torch.randn(30, 3).double()
    nets, evidence = fits(
        net,
        list(zip(x.split(13), y.split(13), strict=True)),
        "gaussian",
        likelihood_std=0.7,
    )
    same(*nets)
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-10)
    new = torch.randn(5, 4).double()
    variances = [sb.predict_linearised(n, new, "gaussian").epistemic for n in nets]
    torch.testing.assert_close(*variances)


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double().eval()


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (stack(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(1, 4)),
        (
            stack(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)),
            torch.randn(1, 2, 2, 2),
        ),
        (
            stack(
                nn.ConvTranspose2d(2, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)
            ),
            torch.randn(1, 2, 1, 1),
        ),
    ],
    ids=["dense", "convolution", "transposed"],
)
def test_products_are_exact_for_one_row(net: nn.Module, x: Tensor) -> None:
    nets, evidence = fits(net, [(x.double(), torch.tensor([1]))])
    same(*nets)
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-10)


def test_products_are_exact_where_positions_are_averaged() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).mean(1)

    x, y = torch.randn(20, 6, 4).double(), torch.randn(20, 3).double()
    nets, _ = fits(Pooled().double().eval(), [(x, y)], "gaussian", likelihood_std=0.7)
    same(*nets)


def test_products_by_rows_together_and_alone(tmp_path: Path) -> None:
    """And large layers get one by themselves, are saved, trained by the ELBO, and drawn as they are linearised."""
    net = stack(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(12, 2, 4, 4).double(), torch.randint(3, (12,))
    made = []
    for batches in ([(x, y)], list(zip(x.split(1), y.split(1), strict=True))):
        own = copy.deepcopy(net)
        sb.laplace(own, batches, over="weights", full_up_to=60)
        made.append(own)
    covariances = [
        [layer.posterior["weight"].covariance() for layer in (own[0], own[3])]
        for own in made
    ]
    torch.testing.assert_close(covariances[0], covariances[1])
    own = made[0]
    assert (
        own[0].posterior["weight"].factored and not own[3].posterior["weight"].factored
    )
    assert "Kronecker" in sb.summary(own).rows[0].detail
    again = sb.load(copy.deepcopy(net), sb.save(own, tmp_path / "fit"))
    assert torch.equal(
        sb.predict(again, x, seed=0).probs, sb.predict(own, x, seed=0).probs
    )
    drawn = sb.predict(own, x, draws=4, seed=0, keep_samples=True)
    assert float(drawn.epistemic.max()) > 0
    sb.elbo(sb.categorical(sb.sample(own, x), y), own, num_data=12).loss.backward()
    assert own[0].posterior["weight"].log_scale.grad.isfinite().all()


def test_draws_have_the_covariance() -> None:
    net = nn.Linear(3, 2).double().eval()
    sb.laplace(
        net,
        [(torch.randn(9, 3).double(), torch.randint(2, (9,)))],
        over="weights",
        structure="kronecker",
    )
    posterior = net.posterior["weight"]
    e = torch.randn(
        40_000, posterior.size, generator=torch.Generator().manual_seed(0)
    ).double()
    drawn = posterior._deviation(e, lambda parameter, n: parameter).detach()
    covariance = posterior.covariance()[0].detach()
    assert (
        float((drawn.T @ drawn / len(e) - covariance).norm() / covariance.norm()) < 0.03
    )
    derivatives = torch.randn(5, posterior.size).double()
    wanted = derivatives @ covariance @ derivatives.T
    moved = posterior.times_root(0)(derivatives)
    torch.testing.assert_close(moved @ moved.T, wanted)


def test_what_has_no_product_is_said() -> None:
    batches = [(torch.randn(6, 4).double(), torch.randint(3, (6,)))]
    with pytest.raises(ValueError, match="needs over='weights', got 'both'"):
        sb.laplace(stack(nn.Linear(4, 3)), batches, structure="kronecker")
    with pytest.raises(ValueError, match="factors are vectors"):
        sb.JointNormal(beyond="kronecker")
    net = stack(nn.Linear(4, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)
    with pytest.raises(
        ValueError,
        match=r"0.weight has weights that stay as they are.*structure='diagonal'",
    ):
        sb.laplace(net, batches, over="weights", structure="kronecker")
    grouped = stack(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten())
    sb.laplace(
        grouped,
        [(torch.randn(6, 4, 1).double(), torch.randint(3, (6,)))],
        over="weights",
        structure="kronecker",
    )
    assert (
        not grouped[0].posterior["weight"].factored
        and "independent" in sb.summary(grouped).rows[0].detail
    )
