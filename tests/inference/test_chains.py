"""Chains over factors against closed forms, quadrature and each other."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.inference.density import _cycles

PRIOR = sb.Normal(1.0, 0.5)
CENTRE, SPREAD = 1.4, 0.25  # of a Gaussian likelihood of each factor by itself


def gaussian_loss(model: nn.Module) -> Tensor:
    """-log N(CENTRE; factor, SPREAD), summed over factors: a posterior that is known."""
    factors = [f.loc.flatten(1) for p in posteriors_of(model) for f in (p.r, p.s)]
    return (0.5 * ((torch.cat(factors, 1) - CENTRE) / SPREAD).square()).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "temperature", "options"),
    [
        (
            "hmc",
            1.0,
            {"leapfrog": 7, "burn_in": 50, "thin": 1, "draws": 25, "step_size": 0.05},
        ),
        ("sgld", 1.0, {"burn_in": 100, "thin": 15, "draws": 20, "step_size": 0.01}),
        (
            "sghmc",
            1.0,
            {
                "burn_in": 100,
                "thin": 15,
                "draws": 20,
                "step_size": 0.002,
                "friction": 0.2,
            },
        ),
        (
            "sghmc",
            0.25,
            {
                "burn_in": 100,
                "thin": 15,
                "draws": 20,
                "step_size": 0.002,
                "friction": 0.2,
            },
        ),
    ],
)
def test_chains_find_a_posterior_that_is_known(
    method: Any, temperature: float, options: dict[str, Any]
) -> None:
    net = nn.Linear(3, 2).eval()
    found = sb.sample_posterior(
        net,
        gaussian_loss,
        method,
        chains=40,
        prior=PRIOR,
        temperature=temperature,
        seed=0,
        **options,
    )
    precision = SPREAD**-2 + PRIOR.scale**-2
    mean = (CENTRE * SPREAD**-2 + PRIOR.loc * PRIOR.scale**-2) / precision
    assert found.states.shape == (40, options["draws"], 5)
    drawn = found.states.flatten(0, 1)
    scale = math.sqrt(temperature / precision)
    torch.testing.assert_close(
        drawn.mean(0), torch.full((5,), mean), rtol=0, atol=0.25 * scale
    )
    torch.testing.assert_close(drawn.std(0), torch.full((5,), scale), rtol=0.15, atol=0)
    if method == "hmc":
        assert 0.6 < found.acceptance < 0.99 and found.step_size != 0.05


@pytest.mark.slow
def test_chains_without_noise_end_at_the_mode_where_laplace_takes_over() -> None:
    model, batches = net(), [tuple(map(torch.cat, zip(*blobs(), strict=True)))]
    start = copy.deepcopy(model)
    sb.sample_posterior(
        model,
        batches,
        chains=1,
        draws=1,
        burn_in=300,
        temperature=1e-10,
        prior=PRIOR,
        step_size=0.05,
    )
    factors = [f.loc for p in posteriors_of(model) for f in (p.r, p.s)]

    def slope(model: nn.Module) -> float:
        ((x, y),) = batches
        nll = nn.functional.cross_entropy(sb.sample(model, x)[0], y, reduction="sum")
        log_prior = sum(PRIOR.log_prob(f).sum() for f in factors)
        return float(
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(nll - log_prior, factors)]
            ).norm()
        )

    at_mode = slope(model)
    for f in factors:
        nn.init.ones_(f)
    assert at_mode < 0.01 * slope(model)
    assert torch.equal(model[0].weight, start[0].weight)
    assert (
        sb.laplace(model, batches, prior=PRIOR).model is model
        and sb.members(model) == 1
    )


@pytest.mark.slow
def test_hmc_agrees_with_quadrature_on_a_network() -> None:
    """One weight with one factor on either side: the posterior of (r, s) is a plane that a grid covers."""
    x, y = torch.linspace(-1, 1, 12)[:, None], torch.linspace(-1, 1, 12)[:, None] * 1.5
    net = nn.Linear(1, 1, bias=False).eval()
    nn.init.constant_(net.weight, 1.0)
    prior, sigma = sb.Normal(1.0, 0.3), 0.5
    line = torch.linspace(-0.5, 2.5, 400)
    product = torch.outer(line, line)
    log_p = prior.log_prob(line)[:, None] + prior.log_prob(line)[None]
    log_p = (
        log_p
        - 0.5
        * (y - product.flatten()[None, :] * x).square().sum(0).view_as(product)
        / sigma**2
    )
    p = log_p.flatten().softmax(0)
    mean = float((p * product.flatten()).sum())
    deviation = math.sqrt(float((p * (product.flatten() - mean).square()).sum()))
    found = sb.sample_posterior(
        net, [(x[:7], y[:7]), (x[7:], y[7:])], "hmc", "gaussian", chains=50, draws=16, burn_in=30, thin=1,
        step_size=0.1, leapfrog=5, prior=prior, likelihood_std=sigma, seed=1,
    )  # fmt: skip
    slopes = sb.sample(net, torch.ones(1, 1)).flatten()
    torch.testing.assert_close(
        slopes, found.states.prod(2).T.flatten()
    )  # state by state, chain by chain
    assert slopes.mean().item() == pytest.approx(mean, abs=0.2 * deviation)
    assert slopes.std().item() == pytest.approx(deviation, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "temperature", "options"),
    [
        (
            "hmc",
            1.0,
            {"burn_in": 50, "thin": 1, "draws": 30, "step_size": 0.02, "leapfrog": 8},
        ),
        ("sgld", 1.0, {"burn_in": 500, "thin": 20, "draws": 20, "step_size": 0.02}),
        (
            "sghmc",
            0.25,
            {
                "burn_in": 250,
                "thin": 15,
                "draws": 20,
                "step_size": 0.004,
                "friction": 0.2,
            },
        ),
    ],
)
def test_chains_agree_with_bayesian_linear_regression_on_batches_of_unequal_sizes(
    method: Any, temperature: float, options: dict[str, Any]
) -> None:
    """Given the one factor r the others are a conjugate regression; r itself is summed over on a line."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(45, 3, generator=source, dtype=torch.float64)
    y = x @ x.new_tensor([1.2, 0.7, 1.0]) + 0.5 * torch.randn(
        45, generator=source, dtype=torch.float64
    )
    y[40:] += 1.0  # the rows of the small batch are unlike the others
    line = torch.linspace(-1, 3, 801, dtype=torch.float64)
    precision = (
        line.square()[:, None, None] * (x.T @ x) / 0.25 + torch.eye(3) / 0.09
    ) / temperature
    mean = torch.linalg.solve(
        precision, (line[:, None] * (x.T @ y) / 0.25 + 1 / 0.09) / temperature
    )
    log_p = -0.5 * ((line - 1) / 0.3).square() / temperature - 0.5 * torch.logdet(
        precision
    )
    p = (log_p + 0.5 * torch.einsum("ai,aij,aj->a", mean, precision, mean)).softmax(0)
    centre = torch.cat([p @ line[:, None], p @ mean])
    spread = (p @ (torch.cat([line[:, None], mean], 1) - centre).square()).sqrt()
    spread[1:] = (
        spread[1:].square() + p @ torch.linalg.inv(precision).diagonal(dim1=1, dim2=2)
    ).sqrt()
    net = nn.Linear(3, 1, bias=False).eval()
    nn.init.ones_(net.weight)
    batches = list(zip(x.float().split(20), y.float()[:, None].split(20), strict=True))
    prior = sb.Normal(1.0, 0.3)
    found = sb.sample_posterior(
        net,
        batches,
        method,
        "gaussian",
        chains=60,
        prior=prior,
        likelihood_std=0.5,
        temperature=temperature,
        seed=1,
        **options,
    )
    drawn = found.states.double().flatten(0, 1)
    torch.testing.assert_close(
        (drawn.mean(0) - centre) / spread, torch.zeros(4).double(), rtol=0, atol=0.3
    )
    torch.testing.assert_close(
        drawn.std(0) / spread, torch.ones(4).double(), rtol=0, atol=0.12
    )


def blobs(rows: int = 60) -> list[tuple[Tensor, Tensor]]:
    y = torch.arange(rows) % 3
    x = torch.randn(
        rows, 4, generator=torch.Generator().manual_seed(1)
    ) + 2 * nn.functional.one_hot(y, 4)
    return list(zip(x.split(25), y.split(25), strict=True))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sghmc", "sgld", "cyclical", "hmc"])
def test_states_are_members_that_predict_and_are_saved(
    method: Any, tmp_path: Any
) -> None:
    model, x = net(), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {
        "chains": 2,
        "draws": 4,
        "burn_in": 6,
        "thin": 2,
        "cycles": 2,
        "seed": 3,
    }
    found = sb.sample_posterior(model, blobs(), method, leapfrog=2, **options)
    assert sb.members(model) == 8 and found.log_density.shape == (2, 4)
    assert sb.predict(model, x).member_probs.shape == (8, 6, 3)
    again = sb.load(copy.deepcopy(plain), sb.save(model, tmp_path / "chains"))
    assert torch.equal(sb.sample(again, x), sb.sample(model, x))
    # State 2 of chain 1, written into weights by hand.
    state = dict(plain.named_parameters())
    r0, s0, r2, s2 = found.states[1, 2].split([5, 4, 3, 5])
    weights = {
        "0.weight": state["0.weight"] * torch.outer(r0, s0),
        "2.weight": state["2.weight"] * torch.outer(r2, s2),
    }
    expected = torch.func.functional_call(plain, weights, (x,))
    torch.testing.assert_close(sb.sample(model, x)[2 * 2 + 1], expected)
    other = net()
    other.load_state_dict(plain.state_dict())
    twice = sb.sample_posterior(other, blobs(), method, leapfrog=2, **options)
    assert torch.equal(twice.states, found.states) and bool(
        found.states.std(1).gt(0).any()
    )
    if method == "hmc":  # of all data, at the state itself
        pred = torch.cat([expected_logits(plain, weights, x) for x, _ in blobs()])
        nll = nn.functional.cross_entropy(
            pred, torch.cat([y for _, y in blobs()]), reduction="sum"
        )
        log_prior = sb.Normal(1.0, 0.1).log_prob(found.states[1, 2]).sum()
        assert found.log_density[1, 2].item() == pytest.approx(
            (log_prior - nll).item(), rel=1e-4
        )


def expected_logits(plain: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(plain, weights, (x,))


def test_chains_start_where_a_converted_model_is() -> None:
    model = sb.bayesianize(
        net(),
        sb.Rank1(members=2, mean_init=sb.Normal(1.0, 0.5), prior=sb.Normal(1.0, 2.0)),
    )
    for p in posteriors_of(model):
        nn.init.normal_(p.bias)
    x = torch.randn(6, 4)
    means = [sb.materialize(model, member=k)(x) for k in range(2)]
    sb.sample_posterior(
        model, blobs(), "sgld", chains=4, draws=1, burn_in=0, thin=1, step_size=1e-9
    )
    for k in range(4):
        torch.testing.assert_close(
            sb.sample(model, x)[k], means[k % 2], rtol=1e-3, atol=1e-3
        )


def test_batches_of_any_size_estimate_the_density_of_all_data() -> None:
    x, y = (torch.cat(parts) for parts in zip(*blobs(), strict=True))
    batches = [
        (x[:40], y[:40]),
        (x[:3], torch.full((3,), -100)),
        (x[40:55], y[40:55]),
        (x[55:], y[55:]),
    ]
    model = net()
    found = sb.sample_posterior(
        model,
        batches,
        "sgld",
        chains=2,
        draws=3,
        burn_in=0,
        thin=1,
        step_size=1e-12,
        seed=0,
    )
    nll = nn.functional.cross_entropy(
        sb.sample(model, x)[:2].flatten(0, 1), y.repeat(2), reduction="none"
    ).view(2, -1)
    expected = sb.Normal(1.0, 0.1).log_prob(found.states[:, 0]).sum(1) - nll.sum(1)
    torch.testing.assert_close(found.log_density.mean(1), expected)
    exact = sb.sample_posterior(
        net(),
        batches,
        "hmc",
        chains=2,
        draws=1,
        burn_in=0,
        thin=1,
        step_size=1e-6,
        seed=0,
    )
    assert bool(
        exact.log_density.isfinite().all()
    )  # though one of the batches has no targets


def test_a_temperature_leaves_the_rate_of_the_weights_alone() -> None:
    warm, cold = net(), net()
    cold.load_state_dict(warm.state_dict())
    for model, temperature in ((warm, 1.0), (cold, 0.01)):
        sb.sample_posterior(
            model, blobs(), "sgld", chains=2, draws=1, burn_in=4, thin=1, base_lr=0.1, step_size=1e-9, seed=0,
            temperature=temperature,
        )  # fmt: skip
    torch.testing.assert_close(cold[0].weight, warm[0].weight, rtol=1e-3, atol=1e-4)


def test_weights_move_while_chains_burn_in_and_stay_afterwards() -> None:
    model = net()
    before = {name: p.clone() for name, p in model.named_parameters()}
    sb.sample_posterior(
        model, blobs(), "sgld", chains=2, draws=2, burn_in=5, thin=1, base_lr=0.1
    )
    assert not torch.equal(model[0].weight, before["0.weight"])
    still = net()
    before = {name: p.clone() for name, p in still.named_parameters()}
    sb.sample_posterior(
        still, blobs(), "sgld", chains=2, draws=2, burn_in=0, thin=1, base_lr=0.1
    )
    assert all(torch.equal(p, still.get_parameter(name)) for name, p in before.items())


def test_cycles_fall_as_a_cosine_and_draw_at_their_ends() -> None:
    steps = list(_cycles(0.2, draws=6, thin=2, cycles=3))
    assert len(steps) == 3 * 20 and sum(keep for *_, keep in steps) == 6
    for start in (0, 20, 40):
        sizes, noisy, kept = zip(*steps[start : start + 20], strict=True)
        assert (
            sizes[0] == 0.2
            and sizes[10] == pytest.approx(0.1)
            and list(sizes) == sorted(sizes, reverse=True)
        )
        assert not any(noisy[:16]) and all(noisy[16:])
        assert [place for place, keep in enumerate(kept) if keep] == [17, 19]


@pytest.mark.slow
def test_laplace_is_near_long_chains() -> None:
    """With much data the posterior of factors is nearly Gaussian, and so are both predictions."""
    model, batches = net(), [tuple(map(torch.cat, zip(*blobs(300), strict=True)))]
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(100):
        loss = sum(
            nn.functional.cross_entropy(model(x), y, reduction="sum")
            for x, y in batches
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prior, x, fitted = sb.Normal(1.0, 0.2), 2 * torch.randn(40, 4), copy.deepcopy(model)
    sb.laplace(fitted, batches, prior=prior)
    sb.sample_posterior(
        model,
        batches,
        "hmc",
        chains=40,
        draws=8,
        burn_in=30,
        thin=2,
        leapfrog=6,
        step_size=0.05,
        prior=prior,
        seed=0,
    )
    truth = sb.predict(model, x)
    for near in (
        sb.predict_linearised(fitted, x, draws=400, seed=0),
        sb.predict(fitted, x, draws=400, seed=0),
    ):
        assert (
            float(0.5 * (near.probs - truth.probs).abs().sum(1).mean()) < 0.02
        )  # total variation
        assert bool((near.label == truth.label).float().mean() > 0.9)
        spread, expected = near.samples.std(0), truth.samples.std(0)
        assert float(spread.sum() / expected.sum()) == pytest.approx(1.0, abs=0.15)
        assert (
            float(
                torch.corrcoef(torch.stack([spread.flatten(), expected.flatten()]))[
                    0, 1
                ]
            )
            > 0.95
        )


def test_chains_that_diverge_say_so_and_change_nothing() -> None:
    model = net()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(
        FloatingPointError,
        match=r"chain \d+ diverged at step \d+.*Lower step_size=1e\+30",
    ):
        sb.sample_posterior(
            model, blobs(), "sgld", step_size=1e30, chains=2, draws=2, burn_in=30
        )
    with pytest.raises(
        FloatingPointError, match=r"chains stand still.*Lower step_size"
    ):
        sb.sample_posterior(
            model, blobs(), "hmc", step_size=50.0, chains=2, draws=2, burn_in=0, thin=1
        )
    assert not posteriors_of(model) and all(
        torch.equal(t, before[n]) for n, t in model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nuts"}, "unknown method 'nuts'"),
        ({"chains": 0}, "chains must be a whole number of at least 1, got 0"),
        ({"chains": 100, "draws": 100}, "more members than a model holds"),
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"likelihood_std": 0.0}, "likelihood_std must be positive"),
        ({"friction": -1.0}, "friction must be above 0 and at most 1, got -1.0"),
        (
            {"method": "hmc", "leapfrog": 0},
            "leapfrog must be a whole number of at least 1",
        ),
        (
            {"method": "hmc", "base_lr": 0.1},
            "with no other method: got base_lr=0.1 for 'hmc'",
        ),
        (
            {"method": "cyclical", "base_lr": 0.1},
            "for 'cyclical'",
        ),  # its first states come before weights are at rest
        ({"burn_in": -1}, "burn_in must be a whole number, not negative"),
        ({"data": []}, "the loader is empty"),
        ({"data": [torch.randn(3, 4)]}, "without targets"),
        (
            {"data": iter([(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))])},
            "can be read once: give a list",
        ),
        (
            {
                "data": [(torch.randn(3, 4), torch.full((3, 3), -100))],
                "likelihood": "bernoulli",
            },
            "0, 1 or a probability",
        ),
        (
            {
                "data": [(torch.randn(3, 4), torch.full((3, 3), math.nan))],
                "likelihood": "gaussian",
            },
            "must be finite",
        ),
        (
            {"data": [(torch.randn(3, 4), torch.tensor([0, 7, 1]))]},
            r"class indices from 0 to \d, got 7 in row 1",
        ),
    ],
)
def test_bad_input_is_said_in_words(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        sb.sample_posterior(model, **{"data": blobs(), **options})
    assert not posteriors_of(model)
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        sb.sample_posterior(net().train(), blobs())
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(
        FloatingPointError, match="are NaN or infinite"
    ):  # not that a step is too long
        sb.sample_posterior(model, blobs())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_arviz_judges_chains() -> None:
    arviz = pytest.importorskip("arviz", reason="ArviZ is not installed")
    model = nn.Linear(3, 2).eval()
    found = sb.sample_posterior(
        model,
        gaussian_loss,
        "hmc",
        chains=4,
        draws=50,
        burn_in=50,
        thin=1,
        leapfrog=7,
        prior=PRIOR,
        seed=0,
    )
    data = found.to_arviz()
    assert float(arviz.rhat(data)["log_density"]) < 1.2
    assert float(arviz.ess(data)["factors"].min()) > 40


def test_diagnostics_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "arviz", None)
    chains = sb.Chains(net(), torch.zeros(1, 1, 1), torch.zeros(1, 1), 1.0, 0.1)
    with pytest.raises(ImportError, match="pip install arviz"):
        chains.to_arviz()
