"""Variational inference against known optima, exact gradients, and vectorised against single models (R13, R15, R16)."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from covering import each, pairwise
from scipy import optimize, stats
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import slimbayes as sb

pytestmark = pytest.mark.usefixtures("last_draws")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# R13: the optimum of the ELBO -----------------------------------------------------------------------------------------
#
# A Linear(d, 1) with known W, r fixed at one and s ~ q: y_n = sum_j W_j s_j x_nj + noise is linear in s. With Gaussian
# noise and prior the exact posterior of s is Gaussian with precision P, so the best factorised Gaussian has variances 1
# / P_jj and the exact mean. Other families have no such formula, but where every row has one nonzero input the factors
# part, and each is a problem in two numbers that scipy solves.


def oracle_net(weight: Tensor, **config: Any) -> Any:
    """A linear layer without bias in which only q(s) is trained."""
    net = nn.Linear(len(weight), 1, bias=False)
    net.weight.data.copy_(weight)
    net = sb.bayesianize(
        net,
        sb.Rank1(
            **({"members": 1, "random": "s", "scale_init": 0.1, "clip": None} | config)
        ),
    )
    net.weight.requires_grad_(False)
    net.posterior["weight"].r.loc.data.fill_(1.0)
    net.posterior["weight"].r.loc.requires_grad_(False)
    return net


def fit(
    net: Any, loss: Callable[[], Tensor], steps: int, lr: float = 0.05
) -> tuple[np.ndarray, np.ndarray]:
    """Adam, then the mean of the second half of its path against gradient noise: loc and scale of q(s), (K, d)."""
    optimizer = torch.optim.Adam(
        [p for p in net.parameters() if p.requires_grad], lr=lr
    )
    path = []
    for step in range(steps):
        if step == steps // 3:
            optimizer.param_groups[0]["lr"] = lr / 5
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if step >= steps // 2:
            q = net.posterior["weight"].s.distribution()
            path.append(torch.stack([q.loc[:, 0], q.scale[:, 0]]).detach().numpy())
    loc, scale = np.mean(path, axis=0)
    return loc, scale


def regression(
    correlated: bool, d: int = 16, n: int = 40
) -> tuple[Tensor, Tensor, Tensor, float]:
    """X, y, W and the noise of a problem in which data outweigh the prior N(1, .5^2) three to ten times."""
    rng, noise = np.random.default_rng(0), 0.5
    weight = rng.choice([-1, 1], d) * rng.uniform(0.5, 1.5, d)
    columns = np.linalg.qr(rng.normal(size=(n, d)))[0]
    if correlated:
        columns = columns @ np.linalg.cholesky(0.6 * np.eye(d) + 0.4).T
    x = columns * noise * np.sqrt(rng.uniform(12, 40, d)) / np.abs(weight)
    y = x @ (weight * rng.normal(1, 0.5, d)) + noise * rng.normal(size=n)
    return torch.tensor(x), torch.tensor(y), torch.tensor(weight), noise


def gaussian_optimum(
    x: Tensor, y: Tensor, weight: Tensor, noise: float, members: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of the best factorised q(s) under N(1, .5^2); a member sees 1 / members of the likelihood."""
    design = (x * weight).numpy() / noise / math.sqrt(members)
    precision = design.T @ design + np.eye(len(weight)) / 0.25
    mean = np.linalg.solve(
        precision, design.T @ y.numpy() / noise / math.sqrt(members) + 1 / 0.25
    )
    return mean, 1 / np.sqrt(np.diag(precision))


def fit_regression(
    correlated: bool, draws: str, kl_weight: float = 1.0, members: int = 1
) -> tuple[float, float]:
    """Mean ratio of fitted to best scale, and mean distance of the means in units of the best scale."""
    x, y, weight, noise = regression(correlated)
    net = oracle_net(weight, members=members, prior=sb.Normal(1.0, 0.5), draws=draws)

    def loss() -> Tensor:
        mean = sb.sample(net, x, draws=8 if draws == "example" else 24)[..., 0]
        return sb.elbo(
            sb.gaussian(mean, y, noise), net, num_data=len(y), kl_weight=kl_weight
        ).loss

    loc, scale = fit(net, loss, 180)
    best_loc, best_scale = gaussian_optimum(x, y, weight, noise, members)
    return float((scale / best_scale).mean()), float(
        (np.abs(loc - best_loc) / best_scale).mean()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correlated", "draws"), [(False, "example"), (True, "member")]
)
def test_gaussian_posteriors_reach_their_analytic_optimum(
    correlated: bool, draws: str
) -> None:
    """R13: scales within 3 % on average, means within a tenth of one; the ELBO sees marginals, so draws= is free."""
    ratio, distance = fit_regression(correlated, draws)
    assert ratio == pytest.approx(1.0, abs=0.03)
    assert distance < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("kl_weight", "draws"), [(2.0, "member"), (0.5, "example")])
def test_a_misweighted_kl_misses_the_optimum(kl_weight: float, draws: str) -> None:
    """R13: the oracle has teeth: the scale is off by about sqrt(kl_weight)."""
    ratio, _ = fit_regression(False, draws, kl_weight)
    assert abs(ratio - 1) > 0.1
    assert ratio == pytest.approx(math.sqrt(kl_weight), rel=0.1)


@pytest.mark.slow
def test_members_share_the_likelihood_and_each_pay_their_kl() -> None:
    """R13, A.5: average NLL and summed KL, so each of K members fits 1 / K of the likelihood."""
    ratio, distance = fit_regression(False, "member", members=3)
    assert ratio == pytest.approx(1.0, abs=0.03)
    assert distance < 0.1


def parted(seed: int, d: int = 8, each: int = 20) -> tuple[Tensor, Tensor, np.ndarray]:
    """X with one nonzero input in every row, W, and the index of that input."""
    rng = np.random.default_rng(seed)
    index = np.repeat(np.arange(d), each)
    x = np.zeros((d * each, d))
    x[np.arange(d * each), index] = rng.choice([-1, 1], d * each) * rng.uniform(
        0.5, 1.5, d * each
    )
    return (
        torch.tensor(x),
        torch.tensor(rng.choice([-1, 1], d) * rng.uniform(0.5, 1.5, d)),
        index,
    )


def numeric_optimum(
    objective: Callable[[float, float], float], start: tuple[float, float]
) -> tuple[float, float]:
    """The best location and scale."""
    found = optimize.minimize(
        lambda v: objective(v[0], math.exp(v[1])),
        [start[0], math.log(start[1])],
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-10},
    )
    assert found.success
    return found.x[0], math.exp(found.x[1])


Z = np.linspace(-9, 9, 1001)
Z_WEIGHT = stats.norm.pdf(Z) / stats.norm.pdf(Z).sum()

PAIRS = [
    ("normal", sb.Cauchy(1.0, 0.3), stats.cauchy(1.0, 0.3)),
    ("lognormal", sb.Normal(1.0, 0.5), stats.norm(1.0, 0.5)),
    ("lognormal", sb.LogNormal(0.0, 0.5), stats.lognorm(0.5)),
    ("lognormal", sb.HalfCauchy(1.0), stats.halfcauchy()),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prior", "density"),
    PAIRS,
    ids=[f"{f} under {type(p).__name__}" for f, p, _ in PAIRS],
)
def test_other_posteriors_reach_their_numeric_optimum(
    family: str, prior: Any, density: Any
) -> None:
    """R13: E[s] and E[s^2] give the Gaussian likelihood, a fine grid the KL, scipy the optimum of each factor."""
    x, weight, index = parted(1)
    rng, noise = np.random.default_rng(2), 1.0
    truth = np.exp(rng.normal(0, 0.3, len(weight)))
    y = (x @ (weight * torch.tensor(truth))) + noise * torch.tensor(
        rng.normal(size=len(x))
    )
    start = 1.0 if family == "normal" else 0.0
    net = oracle_net(weight, posterior=family, prior=prior, mean_init=sb.Point(start))

    def loss() -> Tensor:
        return sb.elbo(
            sb.gaussian(sb.sample(net, x, draws=16)[..., 0], y, noise),
            net,
            num_data=len(y),
        ).loss

    loc, scale = fit(net, loss, 180)
    ratios, distances = [], []
    for j, w in enumerate(weight.numpy()):
        rows = index == j
        inputs, targets = x.numpy()[rows, j] * w, y.numpy()[rows]

        def objective(
            m: float,
            v: float,
            inputs: np.ndarray = inputs,
            targets: np.ndarray = targets,
        ) -> float:
            s = m + v * Z
            entropy = (
                0.5 * math.log(2 * math.pi * math.e)
                + math.log(v)
                + (m if family == "lognormal" else 0)
            )
            s = np.exp(s) if family == "lognormal" else s
            first, second = Z_WEIGHT @ s, Z_WEIGHT @ s**2
            nll = (
                0.5
                * (second * inputs @ inputs - 2 * first * inputs @ targets)
                / noise**2
            )
            return nll - Z_WEIGHT @ density.logpdf(s) - entropy

        m, v = numeric_optimum(objective, (start, 0.2))
        ratios.append(scale[0, j] / v)
        distances.append(abs(loc[0, j] - m) / v)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.03)
    assert np.mean(distances) < 0.1


# A Cauchy q has neither mean nor variance, so the expected Gaussian, Laplace or Bernoulli log-likelihood (they fall
# like x^2 or |x|) is minus infinity and no optimum exists. Two problems have one: a likelihood that falls like log|x|,
# and any likelihood of clipped factors, which is what the library trains.


@pytest.mark.slow
def test_cauchy_posteriors_reach_their_analytic_objective_under_cauchy_noise() -> None:
    """R13: E log((y - w s)^2 + g^2) = log((y - w m)^2 + (g + |w| c)^2) for s ~ Cauchy(m, c), without clipping."""
    x, weight, index = parted(3)
    rng, width, prior = np.random.default_rng(4), 0.3, sb.Cauchy(1.0, 0.3)
    y = x @ (
        weight * torch.tensor(rng.normal(1, 0.4, len(weight)))
    ) + width * torch.tensor(rng.standard_cauchy(len(x)))
    net = oracle_net(weight, prior=prior, mean_init=sb.Point(1.0))

    def loss() -> Tensor:
        mean = sb.sample(net, x, draws=32)[..., 0]
        nll = torch.log1p(((y - mean) / width) ** 2).mean()
        return sb.elbo(nll, net, num_data=len(y)).loss

    loc, scale = fit(net, loss, 300)
    ratios, distances = [], []
    for j, w in enumerate(weight.numpy()):
        rows = index == j
        inputs, targets = x.numpy()[rows, j] * w, y.numpy()[rows]

        def objective(
            m: float,
            c: float,
            inputs: np.ndarray = inputs,
            targets: np.ndarray = targets,
        ) -> float:
            nll = np.log(
                (targets - inputs * m) ** 2 + (width + np.abs(inputs) * c) ** 2
            ).sum()
            return nll + math.log(((c + 0.3) ** 2 + (m - 1) ** 2) / (1.2 * c))

        m, c = numeric_optimum(objective, (1.0, 0.1))
        ratios.append(scale[0, j] / c)
        distances.append(abs(loc[0, j] - m) / c)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.03)
    assert np.mean(distances) < 0.1


@pytest.mark.slow
def test_clipped_cauchy_posteriors_reach_their_numeric_optimum_on_labels() -> None:
    """R13, F6: the likelihood sees clip(s), the KL the whole Cauchy; expectation by a grid uniform in probability."""
    x, weight, index = parted(5, each=30)
    rng, clip = np.random.default_rng(6), 4.0
    logits = (x @ weight).numpy() * 1.5
    y = torch.tensor(
        (rng.uniform(size=len(x)) < 1 / (1 + np.exp(-logits))).astype(float)
    )
    net = oracle_net(
        weight,
        prior=sb.Cauchy(1.0, 0.5),
        mean_init=sb.Point(1.0),
        scale_init=0.3,
        clip=clip,
    )

    def loss() -> Tensor:
        return sb.elbo(
            sb.bernoulli(sb.sample(net, x, draws=24)[..., 0], y), net, num_data=len(y)
        ).loss

    loc, scale = fit(net, loss, 300)
    tangent = np.tan(np.pi * ((np.arange(500) + 0.5) / 500 - 0.5))
    ratios, distances = [], []
    for j, w in enumerate(weight.numpy()):
        rows = index == j
        signed = x.numpy()[rows, j] * w * (2 * y.numpy()[rows] - 1)

        def objective(m: float, c: float, signed: np.ndarray = signed) -> float:
            s = np.clip(m + c * tangent, -clip, clip)
            nll = np.logaddexp(0, -np.outer(signed, s)).mean(1).sum()
            return nll + math.log(((c + 0.5) ** 2 + (m - 1) ** 2) / (2 * c))

        m, c = numeric_optimum(objective, (1.0, 0.3))
        ratios.append(scale[0, j] / c)
        distances.append(abs(loc[0, j] - m) / c)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.03)
    assert np.mean(distances) < 0.1


# R15: gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["example", "member"])
def test_elbo_gradient_is_unbiased(draws: str) -> None:
    """R15: the mean gradient over 100,000 draws within four standard errors of the analytic one, for both."""
    x, y, weight, noise = regression(False, d=4, n=10)
    net = oracle_net(weight, prior=sb.Normal(1.0, 0.5), draws=draws, scale_init=0.3)
    factor, batches = net.posterior["weight"].s, []
    for _ in range(100):
        net.zero_grad()
        mean = sb.sample(net, x, draws=1000)[..., 0]
        sb.elbo(sb.gaussian(mean, y, noise), net, num_data=len(y)).loss.backward()
        batches.append(
            torch.stack([factor.loc.grad.flatten(), factor.rho.grad.flatten()]).numpy()
        )
    loc, rho = (
        factor.loc.detach().flatten().numpy(),
        factor.rho.detach().flatten().numpy(),
    )
    scale = np.log1p(np.exp(rho)) + 1e-7
    design = (x * weight).numpy() / noise
    by_loc = design.T @ (design @ loc - y.numpy() / noise) + (loc - 1) / 0.25
    by_scale = (design**2).sum(0) * scale + scale / 0.25 - 1 / scale
    expected = np.stack([by_loc, by_scale / (1 + np.exp(-rho))]) / len(y)
    error = np.std(batches, 0, ddof=1) / 10
    assert (np.abs(np.mean(batches, 0) - expected) < 4 * error).all()
    assert (np.abs(expected) > 4 * error).mean() > 0.8  # zeros would not pass


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]
LAYERS: dict[str, Case] = {
    "Linear": (lambda: nn.Linear(3, 2), lambda: (torch.randn(3, 3),)),
    "Linear 3d": (lambda: nn.Linear(3, 2), lambda: (torch.randn(3, 2, 3),)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 2, padding=1), lambda: (torch.randn(3, 2, 4),)),
    "Conv2d": (
        lambda: nn.Conv2d(2, 3, 2, stride=2),
        lambda: (torch.randn(3, 2, 4, 4),),
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 2, 2), lambda: (torch.randn(3, 2, 2, 3, 2),)),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(2, 3, 2),
        lambda: (torch.randn(3, 2, 3),),
    ),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(2, 3, 2, stride=2),
        lambda: (torch.randn(3, 2, 2, 2),),
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 2, 2),
        lambda: (torch.randn(3, 2, 1, 2, 2),),
    ),
    "Embedding": (lambda: nn.Embedding(4, 3), lambda: (ids(4, 3, 2),)),
    "Embedding padded": (
        lambda: nn.Embedding(4, 3, padding_idx=1),
        lambda: (ids(4, 3, 2),),
    ),
    "EmbeddingBag sum": (
        lambda: nn.EmbeddingBag(4, 3, mode="sum"),
        lambda: (ids(4, 3, 2),),
    ),
    "EmbeddingBag mean": (
        lambda: nn.EmbeddingBag(4, 3, mode="mean", padding_idx=1),
        lambda: (ids(4, 3, 3),),
    ),
    "EmbeddingBag max": (
        lambda: nn.EmbeddingBag(6, 3, mode="max"),
        lambda: (torch.arange(6).view(3, 2),),
    ),
    "LSTM": (lambda: nn.LSTM(2, 2, batch_first=True), lambda: (torch.randn(3, 2, 2),)),
    "GRU": (lambda: nn.GRU(2, 2, batch_first=True), lambda: (torch.randn(3, 2, 2),)),
    "RNN": (lambda: nn.RNN(2, 2, batch_first=True), lambda: (torch.randn(3, 2, 2),)),
    "LSTMCell": (
        lambda: nn.LSTMCell(2, 2),
        lambda: (torch.randn(3, 2), (torch.randn(3, 2), torch.randn(3, 2))),
    ),
    "GRUCell": (
        lambda: nn.GRUCell(2, 2),
        lambda: (torch.randn(3, 2), torch.randn(3, 2)),
    ),
    "RNNCell": (
        lambda: nn.RNNCell(2, 2),
        lambda: (torch.randn(3, 2), torch.randn(3, 2)),
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        lambda: (torch.randn(3, 2, 2),) * 3,
    ),
}
FAMILIES = ["normal", "cauchy", "lognormal", "point"]


def converted(
    name: str, dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """The plain layer, its converted copy and inputs of three rows."""
    build, make = LAYERS[name]
    plain, inputs = (
        build().to(dtype),
        pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, make()),
    )
    family = config.get("posterior", "normal")
    start = sb.Normal(0.0 if family == "lognormal" else 1.0, 0.3)
    chosen = {"members": 2, "scale_init": 0.1, "mean_init": start} | config
    net = sb.bayesianize(
        copy.deepcopy(plain), sb.Rank1(**chosen), include=".*"
    )  # by name: embeddings are left alone otherwise
    with torch.no_grad():
        for key, p in net.named_parameters():
            if "posterior" in key and key.endswith("bias"):
                p.normal_()
    return plain, net, inputs


def only(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.slow
@pytest.mark.parametrize(
    (
        "name",
        "family",
    ),  # each layer with two families: what factors are drawn from is no concern of layers
    [
        (name, FAMILIES[(i + j) % 4])
        for i, name in enumerate(LAYERS)
        for j in (0, 1)
        if name != "Embedding padded"  # torch zeroes the padding word's gradient
    ],
)
def test_gradients_of_every_layer_and_family_are_exact(name: str, family: str) -> None:
    """R15: gradcheck along random directions, noise held fixed: weights, biases, posterior parameters and the input."""
    _, net, inputs = converted(
        name, posterior=family, rank=2 if name == "Linear" else 1
    )
    names = [n for n, _ in net.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(11)
        return only(
            torch.func.functional_call(
                net, dict(zip(names, parameters, strict=True)), (x, *inputs[1:])
            )
        )

    x = inputs[0].clone().requires_grad_(inputs[0].is_floating_point())
    leaves = [p.detach().clone().requires_grad_() for p in net.parameters()]
    assert torch.autograd.gradcheck(
        run, (x, *leaves), atol=1e-5, rtol=1e-4, fast_mode=True
    )
    grads = torch.autograd.grad(
        run(x, *leaves).square().sum(), leaves, allow_unused=True
    )
    silent = {
        n for n, g in zip(names, grads, strict=True) if g is None or not bool(g.any())
    }
    assert silent <= {
        "posterior.k.bias"
    }  # a shift of all keys shifts all scores of a query, which softmax ignores


# R16: vectorised = single models --------------------------------------------------------------------------------------


def single_model(plain: nn.Module, net: Any, n: int) -> nn.Module:
    """The plain layer with the weights of draw n of the last pass written in, without the library's own arithmetic."""
    out = copy.deepcopy(plain)
    swapped = isinstance(
        out, (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvTransposeNd)
    )  # weight is (in, out)
    for site, posterior in net.posterior.items():
        drawn = posterior.values()
        lines = drawn.r, drawn.s, posterior._offsets(drawn)
        r, s, offset = (None if t is None else t[n].detach() for t in lines)
        r, s = torch.atleast_2d(r), torch.atleast_2d(s)
        mask = torch.einsum("pi,po->io" if swapped else "pi,po->oi", s, r) / len(r)
        with torch.no_grad():
            if isinstance(out, nn.MultiheadAttention) and site != "out":
                rows = slice(
                    "qkv".index(site) * out.embed_dim,
                    ("qkv".index(site) + 1) * out.embed_dim,
                )
                weight, bias = out.in_proj_weight[rows], out.in_proj_bias[rows]
            else:
                owner = out.out_proj if site == "out" else out
                key = "weight" if site == "out" else site
                weight, bias = (
                    getattr(owner, key),
                    getattr(owner, key.replace("weight", "bias"), None),
                )
            weight.mul_(mask.view(*mask.shape, *[1] * (weight.dim() - 2)))
            if offset is not None:
                bias.add_(offset)
    return out


def check_against_single_models(
    name: str, dtype: torch.dtype, tolerance: float, passes: int, **config: Any
) -> None:
    plain, net, inputs = converted(name, dtype, **config)
    y = (
        only(sb.sample(net, *inputs, draws=passes * sb.members(net)))
        .detach()
        .flatten(0, 1)
    )
    drawn = next(iter(net.posterior.values())).values().r.shape[0]
    assert drawn == (
        len(y)
        if config["draws"] == "example" and config["posterior"] != "point"
        else len(y) // 3
    )
    assert y.dtype == dtype
    rows = len(y) // drawn  # a draw serves one row, or all three rows of its block
    for n in range(drawn):
        model, first = single_model(plain, net, n), n * rows % 3
        part = pytree.tree_map(lambda t, first=first: t[first : first + rows], inputs)
        torch.testing.assert_close(
            y[n * rows : (n + 1) * rows],
            only(model(*part)).detach(),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "draws"), pairwise(LAYERS, FAMILIES, ["example", "member"])
)
def test_vectorised_members_equal_single_models(
    name: str, family: str, draws: str
) -> None:
    """R16: every row of the folded batch against a plain torch layer that holds its draw's weights, to 1e-12."""
    check_against_single_models(
        name, torch.float64, 1e-12, 2, posterior=family, draws=draws
    )


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "name"), each(["example", "member"], LAYERS))
def test_vectorised_members_equal_single_models_in_float32(
    name: str, draws: str
) -> None:
    """R16: to 1e-5."""
    check_against_single_models(
        name, torch.float32, 1e-5, 2, posterior="normal", draws=draws
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_lone_draw_equals_a_single_model(name: str) -> None:
    """R16 for S = 1, where the factors are multiplied into the weights."""
    check_against_single_models(
        name, torch.float64, 1e-12, 1, posterior="normal", draws="member", members=1
    )


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "name"), each(["example", "member"], LAYERS))
def test_averaged_products_equal_single_models(name: str, draws: str) -> None:
    """R16 for rank=2: W' = W o (r_1 s_1^T + r_2 s_2^T) / 2."""
    check_against_single_models(
        name, torch.float64, 1e-12, 2, posterior="normal", draws=draws, rank=2
    )


@pytest.mark.parametrize("name", LAYERS)
def test_one_unit_point_member_is_the_plain_layer_bit_for_bit(name: str) -> None:
    """R16: sigma = 0, K = 1, unit factors, in float32."""
    plain, net, inputs = converted(
        name, torch.float32, posterior="point", members=1, mean_init=sb.Point(1.0)
    )
    for y in (only(net(*inputs)), only(sb.sample(net, *inputs))[0]):
        expected = only(plain(*inputs))
        assert torch.equal(y, expected)
