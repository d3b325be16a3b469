"""Sums over the weights of a matrix: their values, derivatives and plain twins."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import each, pairwise
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.distributions import joining, sums
from slimbayes.distributions.kl import kl, summed_kl
from slimbayes.distributions.scales import rho_from_scale, scale_from_rho

FACTORS = [(5, 4, 1), (5, 4, 2), (1, 7, 3)]


def factors(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    u, v = torch.rand(m, k, dtype=dtype) + 0.1, torch.rand(n, k, dtype=dtype) + 0.1
    return u.requires_grad_(), v.requires_grad_()


def of_scales(u: Tensor, v: Tensor) -> Tensor:
    return sums.kl_of_scales(u, 0.3) + sums.kl_of_scales(v, -0.2)


def squares(u: Tensor, v: Tensor) -> Tensor:
    return sums.squared_norm(u) + 2 * sums.squared_norm(v[0])


def shifted(u: Tensor, v: Tensor) -> Tensor:
    return (
        sums.mean_plus_noise(
            u, u.square(), torch.linspace(-1, 2, u.numel(), dtype=u.dtype).view_as(u)
        )
        * v[0]
    )


EVERY: list[Callable[[Tensor, Tensor], Tensor]] = [
    sums.outer,
    sums.sum_log_outer,
    of_scales,
    squares,
    shifted,
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "size"), each(EVERY, FACTORS))
def test_first_and_second_derivatives_are_right(
    function: Any, size: tuple[int, int, int]
) -> None:
    assert torch.autograd.gradcheck(function, factors(*size))
    assert torch.autograd.gradgradcheck(function, factors(*size))


@pytest.mark.parametrize(
    ("function", "dtype"), each(EVERY, [torch.float32, torch.float64])
)
def test_twins_agree(
    function: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[Tensor]:
        u, v = factors(30, 20, 3, dtype)
        y = function(u, v)
        y.square().sum().backward()
        assert u.grad is not None and v.grad is not None
        return [y.detach(), u.grad, v.grad]

    mine = results()
    monkeypatch.setattr(sums, "needs_autograd", lambda x: True)
    for one, other in zip(mine, results(), strict=True):
        assert one.dtype == other.dtype
        # The twin of `kl_of_scales` in float32 adds up gradients that nearly cancel.
        torch.testing.assert_close(
            one, other, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-4
        )


def test_sums_run_inside_transforms_and_autocast() -> None:
    u, v = factors(4, 3, 2, torch.float32)
    expected = torch.autograd.grad(sums.sum_log_outer(u, v), u)[0]
    torch.testing.assert_close(
        torch.func.grad(lambda u: sums.sum_log_outer(u, v))(u.detach()), expected
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = sums.outer(u, v)
        assert y.dtype == torch.float32
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), u)[0], v.sum(0).expand(4, 2)
        )


def test_squares_of_many_float32_keep_their_digits() -> None:
    x = torch.full((4096, 1024), 0.1)
    assert sums.squared_norm(x).item() == pytest.approx(4096 * 1024 * 0.1**2, rel=1e-5)
    x = torch.zeros(3, 4, requires_grad=True)
    sums.squared_norm(x).backward()
    assert torch.equal(x.grad, torch.zeros(3, 4))  # type: ignore[arg-type]


PRIORS: list[Any] = [
    sb.Normal(0.1, 0.3),
    sb.HeNormal(),
    sb.TiedMean(0.2),
    sb.EmpiricalBayes(),
    sb.ScaleMixture(),
]


@pytest.mark.parametrize(
    ("rank", "prior", "start"), pairwise([1, 2, 3], PRIORS, [0.05, 1e-30])
)
def test_k_tied_kl_and_gradients_equal_those_of_its_log_scales(
    rank: int, prior: Any, start: float
) -> None:

    layer = nn.Conv2d(4, 5, 3, dtype=torch.float64)
    net: Any = sb.bayesianize(
        layer, sb.KTied(rank=rank, prior=prior, scale_init=start, scale_jitter=0.7)
    )
    posterior = net.posterior["weight"]
    parameters = [net.weight, posterior.log_u, posterior.log_v]
    expected = prior.for_layer(36).gaussian_kl(net.weight, posterior.log_scale())
    torch.testing.assert_close(sb.kl(net), expected)
    gradients = [
        torch.autograd.grad(y, parameters, allow_unused=True)
        for y in (sb.kl(net), expected)
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("gap", [60.0, 200.0])
def test_k_tied_kl_of_extreme_factors_is_right(gap: float) -> None:
    """log u high, log v low: their products are ordinary, though neither factor is a float32."""
    net: Any = sb.bayesianize(
        nn.Linear(3, 4, bias=False), sb.KTied(rank=2, scale_jitter=0.0, scale_init=0.1)
    )
    expected = sb.kl(net).item()
    posterior = net.posterior["weight"]
    with torch.no_grad():
        posterior.log_u += gap
        posterior.log_v -= gap
    assert sb.kl(net).item() == pytest.approx(expected, rel=1e-5)
    sb.kl(net).backward()
    assert (
        posterior.log_u.grad.isfinite().all() and posterior.log_v.grad.isfinite().all()
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_k_tied_kl_at_the_prior_is_zero_in_float32(rank: int) -> None:
    net: Any = sb.bayesianize(
        nn.Linear(600, 500, bias=False),
        sb.KTied(
            rank=rank, prior=sb.Normal(0.0, 0.3), scale_init=0.3, scale_jitter=0.0
        ),
    )
    nn.init.zeros_(net.weight)
    assert abs(sb.kl(net).item()) < 0.02  # of 300,000 terms


def test_local_noise_in_float16_has_the_scale_of_the_weights() -> None:
    """Scales of 0.01 on one input of 1 give outputs of standard deviation 0.01, and not the root of a floor."""
    net = sb.bayesianize(
        nn.Linear(1, 1, bias=False), sb.MeanField(estimator="local", scale_jitter=0.0)
    ).half()
    nn.init.zeros_(net.weight)
    y = net(torch.ones(4000, 1, dtype=torch.float16)).detach().float()
    assert y.std().item() == pytest.approx(0.01, rel=0.1)
    assert math.isfinite(y.sum().item())


def test_squared_norms_of_many_tensors() -> None:
    """Value and gradients as in plain operations, of several types, some without gradients, and twice."""
    torch.manual_seed(0)
    some = [
        torch.randn(3, 4),
        torch.randn(5).double(),
        torch.randn(()),
        torch.randn(2, 0),
        torch.randn(4).bfloat16(),
    ]
    leaves = [t.requires_grad_(i != 2) for i, t in enumerate(some)]
    total = sums.squared_norms(leaves)
    wanted = sum(t.double().square().sum() for t in leaves)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    got = torch.autograd.grad(total.sin(), [leaves[0], leaves[1]], create_graph=True)
    for g, leaf in zip(got, (leaves[0], leaves[1]), strict=True):
        torch.testing.assert_close(
            g, (wanted.cos() * 2 * leaf).to(leaf.dtype), rtol=1e-5, atol=1e-6
        )
    (second,) = torch.autograd.grad(got[1].sum(), leaves[1])
    direct = 2 * wanted.cos() - 4 * wanted.sin() * leaves[1] * leaves[1].sum()
    torch.testing.assert_close(second, direct.detach(), rtol=1e-5, atol=1e-6)


def test_squared_norms_on_a_gpu_are_those_on_a_cpu() -> None:
    """Which sums the norms of whole tensors, here of some that say they are there."""

    class OnGpu(Tensor):
        is_cuda = True

    some = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(2).double()]
    for few in (some[:2], some):
        there, context = (
            [few[0].as_subclass(OnGpu), *few[1:]],
            SimpleNamespace(save_for_backward=lambda *tensors: None),
        )
        found = sums._SquaredNorms.forward(context, there, [])
        torch.testing.assert_close(
            found.as_subclass(Tensor), sums.squared_norms(few), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("q", [sb.Normal, sb.Cauchy, sb.LogNormal])
def test_the_kl_of_many_factors_in_one_operation(q: Any) -> None:
    """As by element, with first and second derivatives, also where some factors rest; zero at the prior."""
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, 1, c).double().requires_grad_(c != 2) for c in (3, 1, 2) * 2
    ]

    def total(*leaves: Tensor) -> Tensor:
        return summed_kl(q, q(0.5, 0.7), leaves[:3], leaves[3:])

    def direct(*leaves: Tensor) -> Tensor:
        pairs = zip(leaves[:3], leaves[3:], strict=True)
        return sum(
            kl(q(loc, scale_from_rho(rho)), q(0.5, 0.7)).sum() for loc, rho in pairs
        )

    torch.testing.assert_close(total(*leaves), direct(*leaves))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for again in (
        False,
        True,
    ):  # where a second derivative is to follow, the first is computed another way
        found = (
            torch.autograd.grad(f(*leaves).sin(), wanted, create_graph=again)
            for f in (total, direct)
        )
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(total, leaves) and torch.autograd.gradgradcheck(
        total, leaves
    )
    at = torch.full((2, 1, 4), 0.5), torch.full((2, 1, 4), rho_from_scale(0.7))
    assert float(summed_kl(q, q(0.5, 0.7), [at[0]], [at[1]])) == pytest.approx(
        0.0, abs=1e-6
    )
    wide = summed_kl(sb.Normal, sb.Cauchy(1.0, 0.1), leaves[:3], leaves[3:])
    pairs = zip(leaves[:3], leaves[3:], strict=True)
    apart = [
        kl(sb.Normal(loc, scale_from_rho(rho)), sb.Cauchy(1.0, 0.1)).sum()
        for loc, rho in pairs
    ]
    torch.testing.assert_close(wide, sum(apart))


@pytest.mark.slow
def test_many_parameters_side_by_side_have_the_gradients_of_a_cat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(joining.MANY, "cpu", 8)
    parts = [
        torch.randn(3, 1, n, dtype=torch.float64, requires_grad=True)
        for n in range(1, 10)
    ]
    whole = joining.side_by_side(parts, 2)
    plain = torch.cat(parts, 2)
    assert torch.equal(whole, plain) and whole.grad_fn.name() != plain.grad_fn.name()
    weights = torch.randn_like(plain)
    found, wanted = (
        torch.autograd.grad((t.sin() * weights).sum(), parts) for t in (whole, plain)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert all(g.is_contiguous() for g in found), (
        "what is not dense is copied when it is kept"
    )
    assert torch.autograd.gradgradcheck(
        lambda *xs: joining.side_by_side(xs, 2).pow(3), parts
    )


def many_layers(monkeypatch: pytest.MonkeyPatch, shares: bool) -> nn.Module:
    """A net whose KL sends its gradient through what draws are made from, or not."""
    monkeypatch.setitem(joining.MANY, "cpu", 2 if shares else 10**9)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    return sb.bayesianize(net, sb.Rank1(members=2, scale_init=0.3))


def step(net: nn.Module, how: str) -> list[Tensor]:
    """Gradients of draws and KL, for steps of some kind."""
    x = torch.linspace(-1, 1, 20).view(5, 4)
    parameters = list(net.parameters())
    nll = sb.sample(net, x, seed=3).square().mean()
    if how == "changed":
        for p in parameters:
            p.data.mul_(1.5)  # leaves no trace
    kl = sb.kl(net)
    if how == "apart":
        nll.backward()
        (2 * kl).backward()
    elif how == "the KL alone":
        (0 * nll).backward()
        del nll
        sb.kl(net).backward()
    elif how == "twice":
        (first,) = torch.autograd.grad(
            kl, net[2].posterior["weight"].r.rho, create_graph=True
        )
        (first.square().sum() + nll).backward()
    else:
        (nll + 2 * kl).backward()
    return [kl.detach(), *(p.grad for p in parameters)]


@pytest.mark.parametrize(
    "how", ["together", "apart", "changed", "the KL alone", "twice"]
)
def test_a_kl_that_joins_the_gradients_of_draws(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    expected = step(many_layers(monkeypatch, shares=False), how)
    net = many_layers(monkeypatch, shares=True)
    torch.testing.assert_close(step(net, how), expected)
    net.zero_grad()
    for (
        module
    ) in net.modules():  # parameters of another make: nothing may lead to the old ones
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    kl = sb.kl(net)
    kl.backward()
    assert all(
        p.grad is not None
        for name, p in net.named_parameters()
        if name.endswith(("loc", "rho"))
    )


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("factors", [(0.1, 0.1, 0.1, 0.1), (0.1, 0.2, 0.3, 0.4)])
def test_a_penalty_that_joins_the_gradients_of_draws(
    monkeypatch: pytest.MonkeyPatch, cross: bool, factors: tuple[float, ...]
) -> None:
    """Together, where one factor serves all, and where factors leave scales and biases apart."""
    found = []
    for many in (10**9, 2):
        monkeypatch.setitem(joining.MANY, "cpu", many)
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Linear(6, 5),
            nn.BatchNorm1d(5),
        )
        sb.bayesianize(
            net,
            sb.ModelPatch(
                components=3, patch="norm", cross=cross, init="uniform", tau=None
            ),
        )
        out = net(torch.randn(7, 4))
        for p in net.parameters():
            p.data.mul_(1.5)
        (out.square().mean() + sb.l2(net, *factors)).backward()
        found.append([p.grad for p in net.parameters()])
        assert bool(list(joining._JOINED.values())) == (many == 2)
        del out
    torch.testing.assert_close(*found)


def test_tensors_that_count_twice_do_so_in_their_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(joining.MANY, "cpu", 2)
    a, b, held = (
        torch.ones(2, requires_grad=True),
        torch.ones(3, requires_grad=True),
        [],
    )
    joining.side_by_side([a, b], 0, held)
    for tensors, wanted in (([a, b], 2.0), ([a, b, a], 4.0)):
        (gradient,) = torch.autograd.grad(sums.squared_norms(tensors), a)
        assert torch.equal(gradient, torch.full((2,), wanted))


def test_what_draws_were_made_from_goes_with_their_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = joining.joined
    net = many_layers(monkeypatch, shares=True)
    locs = [p for name, p in net.named_parameters() if name.endswith("loc")]
    out = sb.sample(net, torch.zeros(5, 4))
    assert (
        joined(locs) is not None
        and joined(locs[:-1]) is None
        and joined(locs[1:]) is None
    )
    locs[1].requires_grad_(False)
    assert joined(locs) is None
    locs[1].requires_grad_()
    del out
    assert joined(locs) is None
    with torch.no_grad():
        kept = sb.sample(net, torch.zeros(5, 4))
    assert joined(locs) is None and not kept.requires_grad
    with sb.fixed_draws(net):
        for _ in range(3):
            out = sb.sample(net, torch.zeros(5, 4))
        assert joined(locs) is not None
        del out
        assert joined(locs) is None, "calls of a held pass leave nothing in it"


def test_a_factor_that_was_frozen_when_it_was_drawn_has_its_kls_gradient_once_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(joining.MANY, "cpu", 8)
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(9)])
    sb.bayesianize(net, sb.Rank1(members=2))
    rho = net[4].posterior["weight"].r.rho.requires_grad_(False)
    outputs = sb.sample(net, torch.ones(2, 3))  # its graph stands
    rho.requires_grad_(True)
    beside = torch.autograd.grad(sb.kl(net), rho)[0]
    del outputs
    torch.testing.assert_close(
        beside, torch.autograd.grad(sb.kl(net), rho)[0], rtol=0, atol=0
    )
