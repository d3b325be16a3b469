"""Laplace approximations against closed forms, derivatives by brute force, and laplace-torch."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import each
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.inference.curvature import SiteCurvature, sum_curvature, triangular
from slimbayes.inference.evidence import CurvatureSpectrum, best_precision
from slimbayes.inference.means import k_tied_logs
from slimbayes.prediction.batches import labelled_batches


def mlp(outputs: int = 3) -> nn.Module:
    return (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double().eval()
    )


def data(
    rows: int = 30, classes: int | None = 3, outputs: int = 2
) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(rows, 4).double()
    y = (
        torch.randn(rows, outputs).double()
        if classes is None
        else torch.randint(classes, (rows,))
    )
    return list(zip(x.split(13), y.split(13), strict=True))


def matrices(curvature: Any) -> list[Tensor]:
    return [block.values for block in curvature.blocks]


def regression(rows: int = 40) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model at its least-squares fit, without a bias."""
    x, y = torch.randn(rows, 3).double(), torch.randn(rows, 2).double()
    net = nn.Linear(3, 2, bias=False).double().eval()
    net.weight.data = torch.linalg.lstsq(x, y).solution.T.contiguous()
    return net, x, y


def test_factors_of_a_linear_model_have_the_exact_posterior_and_evidence() -> None:
    net, x, y = regression()
    plain, sigma, scale = copy.deepcopy(net), 0.7, 0.3
    fit = sb.laplace(
        net,
        [(x, y)],
        "gaussian",
        over="r",
        prior=sb.Normal(1.0, scale),
        likelihood_std=sigma,
    )
    z = (x @ plain.weight.T).detach()  # y_o = r_o z_o, each output by itself
    precision = z.square().sum(0) / sigma**2 + scale**-2
    torch.testing.assert_close(
        net.posterior["weight"].covariance()[0], precision.reciprocal().diag()
    )
    evidence = 0.0
    for o in range(2):
        covariance = sigma**2 * torch.eye(len(x)).double() + scale**2 * torch.outer(
            z[:, o], z[:, o]
        )
        evidence += (
            torch.distributions.MultivariateNormal(z[:, o], covariance)
            .log_prob(y[:, o])
            .item()
        )
    assert fit.log_evidence == pytest.approx(evidence, rel=1e-10)
    new = torch.randn(5, 3).double()
    pred = sb.predict_linearised(net, new, "gaussian", likelihood_std=sigma)
    torch.testing.assert_close(pred.mean, plain(new).detach())
    torch.testing.assert_close(
        pred.epistemic, (plain(new).square() / precision).detach()
    )
    expected = torch.distributions.Normal(
        pred.mean, (pred.epistemic + sigma**2).sqrt()
    ).log_prob(torch.zeros(5, 2))
    torch.testing.assert_close(pred.log_prob(torch.zeros(5, 2).double()), expected)


def test_weights_of_a_linear_model_have_the_exact_posterior_and_evidence() -> None:
    x, y, sigma, precision = (
        torch.randn(40, 3).double(),
        torch.randn(40).double(),
        0.5,
        2.0,
    )
    net = nn.Linear(3, 1, bias=False).double().eval()
    gram = x.T @ x / sigma**2 + precision * torch.eye(3).double()
    net.weight.data = torch.linalg.solve(gram, x.T @ y / sigma**2)[
        None
    ]  # ridge regression: the posterior's mean
    prior = sb.Normal(0.0, precision**-0.5)
    fit = sb.laplace(
        net,
        [(x, y[:, None])],
        "gaussian",
        over="weights",
        prior=prior,
        likelihood_std=sigma,
    )
    torch.testing.assert_close(net.posterior["weight"].covariance()[0], gram.inverse())
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(40).double(),
        sigma**2 * torch.eye(40).double() + x @ x.T / precision,
    )
    assert fit.log_evidence == pytest.approx(marginal.log_prob(y).item(), rel=1e-10)


def factors_by_name(net: nn.Module) -> dict[str, Tensor]:
    """Ones for the outputs and inputs of every layer."""
    out = {}
    for name, layer in net.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            out[f"{name}.r"] = torch.ones(layer.weight.shape[0]).double()
            out[f"{name}.s"] = torch.ones(layer.weight.shape[1]).double()
    return out


def scaled(net: nn.Module, factors: dict[str, Tensor], x: Tensor) -> Tensor:
    weights = dict(net.named_parameters())
    for name in {key[:-2] for key in factors}:
        weight = weights[f"{name}.weight"]
        spread = torch.outer(factors[f"{name}.r"], factors[f"{name}.s"])
        weights[f"{name}.weight"] = weight * spread.view(
            *spread.shape, *[1] * (weight.dim() - 2)
        )
    return functional_call(net, weights, (x,))


def brute_force(
    net: nn.Module, batches: list[Any], information: Any
) -> dict[str, Tensor]:
    """J^T F J of each layer's factors, from derivatives of the whole batch."""
    total: dict[str, Tensor] = {}
    for x, _ in batches:
        jacobians = jacrev(lambda f, x=x: scaled(net, f, x))(factors_by_name(net))
        middle = information(net(x).detach())
        for name in {key[:-2] for key in jacobians}:
            j = torch.cat([jacobians[f"{name}.r"], jacobians[f"{name}.s"]], -1).detach()
            total[name] = total.get(name, 0) + torch.einsum(
                "bci,bcd,bdj->ij", j, middle, j
            )
    return total


def softmax_information(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def binary_information(logits: Tensor) -> Tensor:
    p = logits.sigmoid()
    return torch.diag_embed(p * (1 - p))


def test_curvature_is_that_of_brute_force() -> None:
    images = [(torch.randn(6, 2, 5, 5).double(), torch.randint(3, (6,)))]
    conv = (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))
        .double()
        .eval()
    )
    binary = [(x, torch.randint(2, (len(x), 2)).double()) for x, _ in data()]
    for net, batches, likelihood, information in (
        (mlp(), data(), "categorical", softmax_information),
        (mlp(2), binary, "bernoulli", binary_information),
        (
            mlp(2),
            data(classes=None),
            "gaussian",
            lambda f: torch.eye(2).double().expand(len(f), 2, 2),
        ),
        (conv, images, "categorical", softmax_information),
    ):
        expected = brute_force(net, batches, information)
        sb.bayesianize(net, sb.JointNormal())
        found = sum_curvature(net, labelled_batches(net, batches), likelihood)
        for p, matrix in zip(posteriors_of(net), matrices(found), strict=True):
            torch.testing.assert_close(
                matrix[0], expected[p.layer.bayes_name], rtol=1e-8, atol=1e-10
            )


@pytest.mark.slow
def test_curvature_of_means_and_scales_is_the_average_of_scores() -> None:
    net, batches = mlp(2), data(classes=None, outputs=1)
    batches = [(x, y[:, 0]) for x, y in batches]
    sb.bayesianize(net, sb.JointNormal())
    exact = sum_curvature(
        net, labelled_batches(net, batches), "heteroscedastic_gaussian"
    )
    drawn = sum_curvature(
        net, labelled_batches(net, batches), "heteroscedastic_gaussian", samples=400
    )
    for a, b in zip(matrices(exact), matrices(drawn), strict=True):
        assert float((a - b).norm() / a.norm()) < 0.15


def test_drawn_targets_average_to_exact_information_and_ignored_ones_do_not_count() -> (
    None
):
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    net, x = Tagger().double().eval(), torch.randn(8, 5, 4).double()
    target = torch.randint(3, (8, 5))
    target[:, 3:] = -100
    sb.bayesianize(net, sb.JointNormal())
    exact = sum_curvature(net, [((x,), {}, target)], "categorical")
    short = sum_curvature(net, [((x[:, :3],), {}, target[:, :3])], "categorical")
    drawn = sum_curvature(net, [((x,), {}, target)], "categorical", samples=400)
    torch.testing.assert_close(matrices(exact)[0], matrices(short)[0])
    assert exact.targets == 24 and exact.log_likelihood == pytest.approx(
        short.log_likelihood
    )
    assert (
        float(
            (matrices(exact)[0] - matrices(drawn)[0]).norm() / matrices(exact)[0].norm()
        )
        < 0.15
    )


def test_rows_that_cannot_be_told_apart_run_one_by_one() -> None:
    class Windows(nn.Module):
        """Its layer sees rows in an order that no layout knows."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.cat([x, x.flip(0)], 0))[: len(x)]

    net, batches = Windows().double().eval(), data(7)
    plain = nn.Sequential(copy.deepcopy(net.fc))
    sb.bayesianize(plain, sb.JointNormal())
    wanted = sum_curvature(plain, labelled_batches(plain, batches), "categorical")
    sb.bayesianize(net, sb.JointNormal())
    found = sum_curvature(net, labelled_batches(net, batches), "categorical")
    torch.testing.assert_close(matrices(found)[0], matrices(wanted)[0])


class Last(nn.Module):
    """The last step of a sequence model, as classes."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.fc((y[0] if isinstance(y, tuple) else y)[:, -1])


@pytest.mark.parametrize(
    ("over", "kind"), each(["both", "weights"], ["lstm", "attention", "conv"])
)
def test_rows_together_have_the_curvature_of_rows_alone(kind: str, over: Any) -> None:
    """Together factors scale activations, and each row has its weights; alone they are multiplied into the weight."""
    net, shape = {
        "lstm": (Last(nn.LSTM(4, 5, batch_first=True), 5), (6, 3, 4)),
        "attention": (
            Last(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, dropout=0.0), 4),
            (6, 3, 4),
        ),
        "conv": (
            nn.Sequential(
                nn.Conv1d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
            ),
            (6, 4, 3),
        ),
    }[kind]
    net = net.double().eval()
    x, y = torch.randn(shape).double(), torch.randint(3, (6,))
    sb.bayesianize(net, sb.JointNormal(over=over))
    together = sum_curvature(net, labelled_batches(net, [(x, y)]), "categorical")
    alone = sum_curvature(
        net,
        labelled_batches(net, list(zip(x.split(1), y.split(1), strict=True))),
        "categorical",
    )
    for a, b in zip(matrices(together), matrices(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)
        assert float(a.diagonal(dim1=1, dim2=2).max()) > 0


@pytest.mark.slow
def test_the_evidence_is_largest_where_it_says() -> None:
    net, batches = mlp(2), data(classes=None)
    fit = sb.laplace(copy.deepcopy(net), batches, "gaussian", prior="shared")
    (precision,) = set(fit.prior_precision.values())

    def evidence(precision: float, noise: float) -> float:
        prior = sb.Normal(0.0, precision**-0.5)
        return sb.laplace(
            copy.deepcopy(net), batches, "gaussian", prior=prior, likelihood_std=noise
        ).log_evidence

    best = evidence(precision, fit.likelihood_std)
    assert best == pytest.approx(fit.log_evidence, rel=1e-9)
    for change in (0.97, 1.03):
        assert evidence(precision * change, fit.likelihood_std) < best
        assert evidence(precision, fit.likelihood_std * change) < best
    apart = sb.laplace(copy.deepcopy(net), batches, "gaussian", prior="layer")
    assert (
        apart.log_evidence > fit.log_evidence
        and len(set(apart.prior_precision.values())) == 2
    )


def test_priors_left_open_are_those_of_factors_or_of_weights() -> None:
    net, batches = mlp(), data()
    fit = sb.laplace(copy.deepcopy(net), batches)
    assert fit.prior_precision == pytest.approx({"0": 0.15**-2, "2": 0.15**-2})
    assert fit.model[0].posterior["weight"].prior.loc == 1.0
    tuned = sb.laplace(copy.deepcopy(net), batches, over="weights")
    assert (
        tuned.log_evidence
        == sb.laplace(
            copy.deepcopy(net), batches, over="weights", prior="layer"
        ).log_evidence
    )
    real = sb.laplace(mlp(2), data(classes=None), "gaussian")
    assert real.model[0].posterior["weight"].prior.loc == 0.0


def test_a_real_target_may_be_any_number() -> None:
    net, (x, y) = mlp(2), tuple(map(torch.cat, zip(*data(classes=None), strict=True)))
    y[0] = -100.0  # no mark of a missing one
    sb.bayesianize(net, sb.JointNormal())
    for target in (y, y.long()):
        assert sum_curvature(net, [((x,), {}, target)], "gaussian").targets == y.numel()


def test_labels_of_a_row_that_are_missing_do_not_count_whatever_their_type() -> None:
    net, x = mlp(2), torch.randn(9, 4).double()
    sb.bayesianize(net, sb.JointNormal())
    y = torch.randint(2, (9, 2))
    y[:4, 1] = -100
    half = torch.where(y == -100, 0, y)
    whole, floats = (
        sum_curvature(net, [((x,), {}, t)], "bernoulli") for t in (y, y.double())
    )
    # rows without a second label, as if its information were not there
    alone = sum_curvature(net, [((x,), {}, half)], "bernoulli")
    first = sum_curvature(
        net,
        [((x[:4],), {}, torch.stack([y[:4, 0], torch.full((4,), -100)], 1))],
        "bernoulli",
    )
    rest = sum_curvature(net, [((x[4:],), {}, y[4:])], "bernoulli")
    for found in (whole, floats):
        assert found.targets == 14 and found.log_likelihood == pytest.approx(
            first.log_likelihood + rest.log_likelihood
        )
        for one, a, b, c in zip(
            *map(matrices, (found, first, rest, alone)), strict=True
        ):
            torch.testing.assert_close(one, a + b)
            assert float((c - one).norm()) > 1e-3


def test_the_root_of_an_inverse() -> None:
    matrix = torch.randn(6, 4).double()
    root = triangular(*torch.linalg.eigh(matrix @ matrix.T), 0.1)
    torch.testing.assert_close(
        root @ root.T, (matrix @ matrix.T + 0.1 * torch.eye(6).double()).inverse()
    )
    assert torch.equal(root, root.tril()) and bool((root.diagonal() > 0).all())


@pytest.mark.filterwarnings("ignore:By default `link_approx`")
@pytest.mark.parametrize(
    ("structure", "likelihood"),
    each(["full", "diag", "kron"], ["classification", "regression"]),
)
def test_last_layers_agree_with_laplace_torch(structure: str, likelihood: str) -> None:
    other = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    classes = likelihood == "classification"
    net = mlp(3 if classes else 2).float()
    if (
        structure == "kron"
    ):  # its factors of weights and of biases are apart, ours are one
        net[2].bias = None
    x, y = (
        torch.randn(40, 4),
        torch.randint(3, (40,)) if classes else torch.randn(40, 2),
    )
    loader, options = (
        DataLoader(TensorDataset(x, y), 15),
        {} if classes else {"sigma_noise": 0.7},
    )
    theirs = other.Laplace(
        net,
        likelihood,
        subset_of_weights="last_layer",
        hessian_structure=structure,
        prior_precision=2.5,
        **options,
    )
    theirs.fit(loader)
    ours: dict[str, Any] = {
        "likelihood": "categorical" if classes else "gaussian",
        "over": "weights",
        "layers": "last",
        "structure": {"full": "full", "diag": "diagonal", "kron": "kronecker"}[
            structure
        ],
        "likelihood_std": None if classes else 0.7,
    }
    mine = copy.deepcopy(net)
    fit = sb.laplace(mine, loader, prior=sb.Normal(0.0, 2.5**-0.5), **ours)
    assert fit.log_evidence == pytest.approx(
        float(theirs.log_marginal_likelihood()), rel=1e-5
    )
    variances = mine[2].posterior["weight"].variances()[0]
    if structure == "kron":
        covariance = theirs.posterior_precision.to_matrix().inverse()
        torch.testing.assert_close(
            mine[2].posterior["weight"].covariance()[0],
            covariance,
            rtol=1e-3,
            atol=1e-6,
        )
    else:
        expected = (
            theirs.posterior_covariance.diagonal()
            if structure == "full"
            else theirs.posterior_variance
        )
        torch.testing.assert_close(variances, expected, rtol=1e-4, atol=1e-7)
    new = torch.randn(6, 4)
    if classes:
        torch.testing.assert_close(
            sb.predict_linearised(mine, new).probs, theirs(new, link_approx="probit")
        )
    else:
        pred, (mean, covariance) = (
            sb.predict_linearised(mine, new, "gaussian", likelihood_std=0.7),
            theirs(new),
        )
        torch.testing.assert_close(pred.mean, mean)
        torch.testing.assert_close(
            pred.epistemic, covariance.diagonal(dim1=1, dim2=2), rtol=1e-4, atol=1e-6
        )
    theirs.optimize_prior_precision(method="marglik", n_steps=200)
    tuned = sb.laplace(copy.deepcopy(net), loader, **ours)
    assert tuned.prior_precision["2"] == pytest.approx(
        float(theirs.prior_precision), rel=1e-3
    )


def test_a_fitted_model_is_an_ordinary_converted_one(tmp_path: Path) -> None:
    net = mlp().float()
    plain, batches = copy.deepcopy(net), [(x.float(), y) for x, y in data()]
    sb.laplace(net, batches)
    x = torch.randn(6, 4)
    again = sb.load(copy.deepcopy(plain), sb.save(net, tmp_path / "posterior"))
    assert torch.equal(
        sb.predict(net, x, draws=8, seed=1).probs,
        sb.predict(again, x, draws=8, seed=1).probs,
    )
    first, second = sb.predict_linearised(net, x), sb.predict_linearised(again, x)
    assert torch.equal(first.probs, second.probs) and bool((first.epistemic > 0).all())
    assert sb.kl(net).item() == pytest.approx(sb.kl(again).item())
    assert all(row.status == "converted" for row in sb.summary(net).rows)
    assert torch.equal(sb.materialize(net, member=0)(x), plain(x))
    assert torch.equal(sb.debayesianize(net)(x), plain(x))


def test_draws_of_a_linear_model_have_the_linearised_variance() -> None:
    net, x, y = regression()
    fit = sb.laplace(net, [(x, y)], "gaussian", over="s", prior=sb.Normal(1.0, 0.3))
    closed = sb.predict_linearised(
        net, x[:4], "gaussian", likelihood_std=fit.likelihood_std
    )
    for drawn in (
        sb.predict(
            net,
            x[:4],
            draws=4000,
            likelihood="gaussian",
            likelihood_std=fit.likelihood_std,
            seed=0,
        ),
        sb.predict_linearised(
            net,
            x[:4],
            "gaussian",
            likelihood_std=fit.likelihood_std,
            draws=4000,
            seed=0,
        ),
    ):
        torch.testing.assert_close(
            drawn.epistemic, closed.epistemic, rtol=0.12, atol=1e-6
        )
        torch.testing.assert_close(drawn.mean, closed.mean, atol=0.03, rtol=0.0)


def test_members_of_a_converted_model_keep_their_means() -> None:
    net = mlp().float()
    sb.bayesianize(net, sb.Rank1(members=3, mean_init=sb.Normal(1.0, 0.3)))
    for p in posteriors_of(net):
        nn.init.normal_(p.bias, std=0.1)
    before = [sb.materialize(net, member=k) for k in range(3)]
    batches, x = [(x.float(), y) for x, y in data()], torch.randn(6, 4)
    fit = sb.laplace(net, batches)
    assert sb.members(net) == 3 and type(fit.model) is type(net) and fit.model is net
    for k in range(3):
        torch.testing.assert_close(sb.materialize(net, member=k)(x), before[k](x))
    # Each member has the curvature of the plain network that it is, which has factors of one.
    covariances = [p.covariance()[1] for p in posteriors_of(net)]
    scaled_by = [
        torch.cat([p.r.loc[1, 0], p.s.loc[1, 0]]).detach() for p in posteriors_of(net)
    ]
    sb.bayesianize(before[1], sb.JointNormal())
    plain = sum_curvature(
        before[1], labelled_batches(before[1], batches), "categorical"
    )
    for covariance, matrix, factor, precision in zip(
        covariances,
        matrices(plain),
        scaled_by,
        fit.prior_precision.values(),
        strict=True,
    ):
        own = matrix[0] / torch.outer(
            factor, factor
        )  # d / d log factor = factor d / d factor
        expected = (own + precision * torch.eye(len(own))).inverse().float()
        torch.testing.assert_close(covariance.detach(), expected, rtol=1e-3, atol=1e-4)


def test_means_of_mean_field_weights_are_taken() -> None:
    net = mlp().float()
    plain, batches = copy.deepcopy(net), [(x.float(), y) for x, y in data()]
    sb.bayesianize(net, sb.MeanField())
    assert sb.laplace(net, batches).log_evidence == pytest.approx(
        sb.laplace(plain, batches).log_evidence
    )
    with pytest.raises(ValueError, match=r"has no mean that is one network"):
        sb.laplace(sb.bayesianize(mlp().float(), sb.Mixture(components=2)), batches)
    with pytest.raises(
        ValueError, match=r"are no factors of its weight. Call materialize"
    ):
        sb.laplace(
            sb.bayesianize(mlp().float(), sb.Rank1(perturbation="additive")), batches
        )


def test_k_tied_scales_are_fitted_to_the_diagonal() -> None:
    net, batches = mlp(), data()
    exact = copy.deepcopy(net)
    sb.laplace(exact, batches, over="weights", structure="diagonal")
    sb.laplace(net, batches, structure="k-tied", rank=2)
    for layer, tied in ((exact[0], net[0]), (exact[2], net[2])):
        target = layer.posterior["weight"].variances()[0].sqrt().detach()
        p = tied.posterior["weight"]
        size = tied.weight.numel()
        assert p.prior.scale == layer.posterior["weight"].prior.scale and p.rank == 2
        torch.testing.assert_close(p.bias_log_scale.exp().detach(), target[size:])
        gap = p.scale().detach().flatten().log() - target[:size].log()
        assert gap.square().mean().sqrt() < 0.25 * target[:size].log().std()
    sb.predict(net, torch.randn(5, 4).double(), draws=4)


def test_more_products_come_nearer() -> None:
    precision = torch.rand(6, 5).double() + 0.1

    def distance(rank: int) -> float:
        u, v = k_tied_logs(precision, rank)
        scale = u.exp() @ v.exp().T
        return float(
            (
                0.5 * (scale.square() * precision - 1)
                - scale.log()
                - 0.5 * precision.log()
            ).sum()
        )

    assert 0 <= distance(4) < distance(2) < distance(1)


@pytest.mark.filterwarnings("ignore:laplace. factors of")
def test_large_layers_have_a_diagonal_and_say_so() -> None:
    net, batches = mlp(), data()
    sb.laplace(net, batches, full_up_to=8)
    assert (
        net[0].posterior["weight"].lower is None
        and net[2].posterior["weight"].lower is not None
    )
    assert "independent" in sb.summary(net).rows[0].detail
    full = mlp()
    full.load_state_dict(sb.materialize(net, member=0).state_dict())
    sb.laplace(full, batches, prior=sb.Normal(0.0, 1.0))
    precision = full[0].posterior["weight"].covariance()[0].inverse().diagonal()
    diagonal = copy.deepcopy(sb.materialize(full, member=0))
    sb.laplace(diagonal, batches, prior=sb.Normal(0.0, 1.0), structure="diagonal")
    torch.testing.assert_close(
        diagonal[0].posterior["weight"].variances()[0], precision.reciprocal()
    )


def exact_net() -> nn.Module:
    net = nn.Linear(4, 2, bias=False).double().eval()
    net.weight.data.fill_(1.0)
    return net


EXACT = [(torch.eye(4)[:3].double(), torch.ones(3, 2).double())]


class Unfed(nn.Module):
    """A layer that has no part in the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.idle = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + 0.0 * self.idle(self.fc(x)).detach()


@pytest.mark.parametrize(
    ("make", "batches", "options", "message"),
    [
        (
            lambda: mlp().train(),
            data(),
            {},
            r"is in training mode.*call model.eval\(\) first",
        ),
        (
            mlp,
            [torch.randn(5, 4).double()],
            {},
            r"Batch 0 of the loader is a Tensor without targets",
        ),
        (mlp, [], {}, r"given no targets: the loader is empty"),
        (
            mlp,
            data(),
            {"prior": sb.Normal(1.0, 0.1), "likelihood": "categoric"},
            r"Unknown likelihood",
        ),
        (mlp, data(), {"structure": "kron"}, r"unknown structure 'kron'"),
        (
            mlp,
            data(),
            {"prior": "wide"},
            r'prior must be a Normal, "layer" or "shared", got \'wide\'',
        ),
        (
            lambda: Unfed().double().eval(),
            data(),
            {"prior": "layer"},
            r"of idle.weight runs away to zero.*singular.*Exclude",
        ),
        (
            exact_net,
            EXACT,
            {"likelihood": "gaussian"},
            r"do not tell the noise.*Give likelihood_std=",
        ),
        (
            lambda: mlp(2),
            data(classes=None),
            {"likelihood": "gaussian", "likelihood_std": -1.0},
            r"likelihood_std must be positive",
        ),
        (
            lambda: mlp(1200),
            data(classes=1200),
            {},
            r"takes 1,200 backward passes.*Give samples=",
        ),
    ],
)
def test_bad_input_is_said_in_words_and_changes_nothing(
    make: Any, batches: Any, options: Any, message: str
) -> None:
    net = make()
    before = (
        str(net),
        {name: value.clone() for name, value in net.state_dict().items()},
    )
    with pytest.raises(ValueError, match=message):
        sb.laplace(net, batches, **options)
    assert str(net) == before[0] and not posteriors_of(net)
    assert all(
        torch.equal(value, before[1][name]) for name, value in net.state_dict().items()
    )


def test_a_precision_that_runs_away_and_curvature_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match=r"of fc runs away to infinity.*Give prior="):
        best_precision([CurvatureSpectrum("fc", torch.ones(1, 3), scatter=0.0)])
    net = sb.bayesianize(mlp().float(), sb.Rank1(members=2))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"curvature of 0.weight is NaN"):
        sb.laplace(
            net, [(torch.full((3, 4), math.nan), torch.zeros(3, dtype=torch.long))]
        )
    assert all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )
    assert list(before) == list(net.state_dict())


class Masked(nn.Module):
    """The mean over some of a row's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.inside(x)) * mask.unsqueeze(2)
        out: Tensor = self.out(hidden.sum(1) / mask.sum(1, keepdim=True))
        return out


def test_a_pair_is_one_input_of_a_forward_that_takes_it_as_one() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(both[0] + both[1])

    net, x, y = Pair().eval(), torch.randn(8, 4), torch.randint(3, (8,))
    pair = sb.laplace(copy.deepcopy(net), [((x, x), y)]).log_evidence
    assert pair == sb.laplace(copy.deepcopy(net.layer), [(2 * x, y)]).log_evidence


def test_batches_of_several_inputs_come_flat_or_nested() -> None:
    x, mask, y = torch.randn(6, 5, 4), torch.ones(6, 5), torch.randint(3, (6,))
    mask[:, 3:] = 0
    net = Masked().eval()
    flat, nested = (
        sb.laplace(copy.deepcopy(net), [b]).log_evidence
        for b in ((x, mask, y), ((x, mask), y))
    )
    assert flat == nested
    with pytest.raises(
        ValueError,
        match=r"does not fit Sequential\.forward.*weights of rows are not taken",
    ):
        sb.laplace(mlp(), [(torch.randn(6, 4).double(), y, torch.rand(6))])


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")]
)
def test_wrapped_models_are_fitted_inside(wrap: Any, tmp_path: Path) -> None:
    plain, batches = mlp(), data()
    wrapped = wrap(copy.deepcopy(plain)).eval()
    fit = sb.laplace(wrapped, batches)
    assert fit.model is wrapped and sorted(fit.prior_precision) == ["0", "2"]
    again = sb.load(copy.deepcopy(plain), sb.save(wrapped, tmp_path / "posterior"))
    x = batches[0][0]
    torch.testing.assert_close(
        sb.predict(again, x, 5, seed=0).probs, sb.predict(wrapped, x, 5, seed=0).probs
    )


def test_weights_elsewhere_and_last_layers_that_stay_are_said() -> None:
    with pytest.raises(ValueError, match="load it without offloading"):
        sb.laplace(mlp().to("meta"), data())
    net = nn.Sequential(
        nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
    ).eval()
    net[2].weight = net[0].weight
    batch = torch.randint(7, (6,)), torch.randint(7, (6,))
    with pytest.raises(
        ValueError,
        match=r'runs last, 2, cannot be the one of layers="last": its weight is tied to 0',
    ):
        sb.laplace(net, [batch], layers="last")
    with pytest.raises(ValueError, match="the loader is empty"):
        sb.laplace(mlp(), [], layers="last")


@pytest.mark.parametrize(("rate", "dtype"), [(1.0, "F16"), (1e-6, "F32")])
def test_correlations_are_kept_in_half_precision_where_that_changes_little(
    rate: float, dtype: str, tmp_path: Path
) -> None:
    """A wide prior leaves directions that differ by orders of magnitude, and then rounding would not do."""
    from safetensors import safe_open

    net = nn.Sequential(nn.Linear(30, 20)).eval()
    x = torch.randn(200, 30)
    batches = [(x, net(x).detach() + torch.randn(200, 20))]
    wide = copy.deepcopy(net).double()
    prior = sb.Normal(1.0, rate**-0.5)
    sb.laplace(net, batches, "gaussian", prior=prior, likelihood_std=1.0)
    sb.laplace(
        wide,
        [(a.double(), b.double()) for a, b in batches],
        "gaussian",
        prior=prior,
        likelihood_std=1.0,
    )
    own, exact = (m[0].posterior["weight"].root()[0].double() for m in (net, wide))
    spread = torch.linalg.svdvals(torch.linalg.solve(exact, own)).detach()
    assert float((spread - 1).abs().max()) < 3e-3
    path = sb.save(net, tmp_path / "posterior")
    with safe_open(path / "posterior.safetensors", "pt") as file:
        assert file.get_slice("0.posterior.weight.lower").get_dtype() == dtype
    again = sb.load(sb.debayesianize(copy.deepcopy(net)), path)
    mine, theirs = (m[0].posterior["weight"].state_dict() for m in (net, again))
    assert all(
        theirs[n].dtype == t.dtype and torch.equal(theirs[n], t)
        for n, t in mine.items()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:laplace. factors of")  # a wide prior
@pytest.mark.parametrize("members", [1, 2])
def test_where_data_tell_of_few_directions_those_are_kept(
    members: int, tmp_path: Path
) -> None:
    """Twelve rows, two outputs: the curvature of 50 factors has rank 12 at most. In float64 covariances stay whole."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2)).eval()
    base = copy.deepcopy(net)
    if members > 1:
        sb.bayesianize(
            net,
            sb.Rank1(members=members, posterior="point", mean_init=sb.Normal(1.0, 0.1)),
        )
    exact = copy.deepcopy(net).double()
    x, y = torch.randn(12, 30), torch.randint(2, (12,))
    fits = [
        sb.laplace(m, [(x.to(m[0].weight.dtype), y)], prior=sb.Normal(1.0, 2.0))
        for m in (net, exact)
    ]
    assert fits[0].log_evidence == pytest.approx(fits[1].log_evidence, rel=1e-4)
    few, whole = (m[0].posterior["weight"] for m in (net, exact))
    assert (
        few.lower is None
        and 0 < few.directions.shape[2] <= 12
        and whole.directions is None
    )
    spread = torch.linalg.svdvals(
        torch.linalg.solve(whole.root(), few.root().double())
    ).detach()
    assert float((spread - 1).abs().max()) < 4e-3
    assert (
        float(torch.linalg.svdvals(few.root()).detach().min()) < 1.8
    )  # not just the prior
    torch.testing.assert_close(sb.kl(net).double(), sb.kl(exact), rtol=0.02, atol=0.02)
    torch.testing.assert_close(
        few.variances().double(), whole.variances(), rtol=0.01, atol=0.0
    )
    linear, slow = (
        sb.predict_linearised(m, x.to(m[0].weight.dtype)).probs.double()
        for m in (net, exact)
    )
    torch.testing.assert_close(linear, slow, rtol=2e-3, atol=2e-3)
    with sb.fixed_draws(net, 8000, seed=0):
        drawn = few.values()
        own = torch.cat([drawn.r, drawn.s], 1)[::members].detach()
        want = few.covariance()[0].detach()
    assert float((own.T.cov() - want).abs().max()) < 0.5  # of 4, by 4,000 draws
    path = sb.save(net, tmp_path / "posterior")
    again = sb.load(sb.debayesianize(base), path)
    assert torch.equal(
        sb.predict(again, x, 6, seed=0).probs, sb.predict(net, x, 6, seed=0).probs
    )
    assert (path / "posterior.safetensors").stat().st_size < 2 * members * (
        50 * 13 + 22 * 13 + 200
    ) * 4
    assert "of 50 directions" in str(sb.summary(net))
    if members > 1:
        sb.keep_members(net, members=[1])
        assert (
            few.directions.shape[0] == 1
            and sb.predict(net, x, 3).probs.isfinite().all()
        )


def test_directions_that_float32_cannot_tell_are_kept_whole() -> None:
    for most in (1e6, 1e12):
        q = sb.bayesianize(nn.Linear(8, 6), sb.JointNormal()).posterior["weight"]
        block, line = (
            SiteCurvature(q),
            nn.functional.normalize(torch.randn(14, 1).double(), dim=0),
        )
        block.values[0] = most * line @ line.T
        count = block.directions(1.0, 1.0)
        assert count == (1 if most == 1e6 else None)
        block.fit(1.0, 1.0, count)
        assert float((line.T @ q.root()[0].double()).norm().detach()) == pytest.approx(
            most**-0.5, rel=2e-3
        )


def test_directions_train_and_weigh_like_any_covariance() -> None:
    net = sb.bayesianize(
        nn.Linear(4, 3), sb.JointNormal(directions=2, scale_init=0.3)
    ).double()
    q = net.posterior["weight"]
    sb.kl(net).backward()
    assert q.directions.grad.abs().sum() > 0  # where they start
    with torch.no_grad():
        q.directions.normal_(0, 0.4)
    root = q.root()[0]
    normal = torch.distributions.MultivariateNormal(
        torch.ones(7).double(), root @ root.T
    )
    prior = torch.distributions.MultivariateNormal(
        torch.ones(7).double(), 0.01 * torch.eye(7).double()
    )
    torch.testing.assert_close(
        sb.kl(net), torch.distributions.kl_divergence(normal, prior)
    )
    sb.kl(net).backward()
    assert q.directions.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="directions are of factors"):
        sb.JointNormal(over="weights", directions=2)
    with pytest.raises(
        ValueError, match="directions must be a whole number, not negative, got 2.5"
    ):
        sb.JointNormal(directions=2.5)  # type: ignore[arg-type]


def test_biases_beside_factors_have_the_curvature_of_brute_force() -> None:
    """Real targets take them in: J^T J / noise^2 + precision by derivatives of each layer's own numbers."""
    net, (x, y) = mlp(1), data(classes=None, outputs=1)[0]
    plain = copy.deepcopy(net)
    fit = sb.laplace(
        net, [(x, y)], "gaussian", prior=sb.Normal(0.0, 2.0), likelihood_std=0.5
    )
    far = 0.0
    for name in ("0", "2"):
        weight, bias = (
            plain.get_parameter(f"{name}.weight"),
            plain.get_parameter(f"{name}.bias"),
        )
        n = len(bias)

        def outputs(
            numbers: Tensor, name: str = name, weight: Tensor = weight, n: int = n
        ) -> Tensor:
            r, s, b = numbers.split([n, weight.shape[1], n])
            return functional_call(
                plain,
                {f"{name}.weight": weight * torch.outer(r, s), f"{name}.bias": b},
                (x,),
            )[:, 0]

        numbers = torch.cat([torch.ones(n + weight.shape[1]).double(), bias.detach()])
        jacobian = jacrev(outputs)(numbers).detach()
        exact = jacobian.mT @ jacobian / 0.25 + torch.eye(len(numbers)) / 4.0
        torch.testing.assert_close(
            net.get_submodule(name).posterior["weight"].covariance()[0], exact.inverse()
        )  # type: ignore[operator, index]
        far += float(
            0.5
            * (
                numbers.square().sum() / 4
                + exact.logdet()
                - len(numbers) * math.log(0.25)
            )
        )
    assert fit.log_evidence == pytest.approx(fit.log_likelihood - far)
    drawn = sb.predict_linearised(
        net, x, "gaussian", likelihood_std=0.5, draws=4000, seed=0
    ).samples.var(0)
    torch.testing.assert_close(
        drawn, sb.predict_linearised(net, x, "gaussian").epistemic, rtol=0.15, atol=1e-3
    )


def test_noise_is_found_where_layers_determine_more_than_there_are_targets() -> None:
    """Each by its own account; the evidence still has a maximum."""
    net, x = mlp(1), torch.randn(12, 4).double()
    fit = sb.laplace(
        net, [(x, net(x).detach() + 1e-3 * torch.randn(12, 1).double())], "gaussian"
    )
    curvature = sum_curvature(
        net, labelled_batches(net, [(x, torch.zeros(12, 1).double())]), "gaussian"
    )
    given = [
        s / fit.likelihood_std**2
        for block in curvature.blocks
        for s in block.spectrum()
    ]
    gamma = sum(
        float((s / (s + p)).sum())
        for s, p in zip(given, fit.prior_precision.values(), strict=True)
    )
    assert sum(map(len, given)) > 12 and gamma < 12
    squares = (
        -2
        * fit.likelihood_std**2
        * (
            fit.log_likelihood
            + 12 * math.log(fit.likelihood_std * math.sqrt(2 * math.pi))
        )
    )
    assert fit.likelihood_std**2 == pytest.approx(squares / (12 - gamma), rel=1e-6)


def test_draws_that_are_off_on_average_say_so() -> None:
    """Of r and s that vary against each other, the mean of the product is the product of means plus a covariance."""
    torch.manual_seed(0)
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64) + 0.3
    net = nn.Linear(3, 1).double().eval()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 2.0, -1.0]]))
        net.bias.fill_(0.3)
    sb.laplace(net, [(x, y)], "gaussian", likelihood_std=0.1)
    sb.predict_linearised(
        net, x, likelihood="gaussian", likelihood_std=0.1
    )  # says nothing
    (posterior,) = posteriors_of(net)
    with (
        torch.no_grad(),
        pytest.warns(
            UserWarning, match="vary against each other .* predict_linearised"
        ),
    ):
        drawn = (
            sb.sample(
                net, torch.eye(3, dtype=torch.float64), draws=20_000, seed=0
            ).mean(0)
            - 0.3
        )
    off = (drawn[:, 0] / torch.tensor([1.0, 2.0, -1.0]) - 1).abs().max()
    torch.testing.assert_close(float(off), posterior.entangled(), rtol=0.1, atol=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.laplace(
            net, [(x, y)], "gaussian", likelihood_std=0.1, prior=sb.Normal(1.0, 0.2)
        )
        sb.predict(net, x, draws=2, likelihood="gaussian")
