"""Ensemble Model Patching (Chang et al. 2019): its family, gradients, KL, penalties, sizes and parameter counts (F31 to
F37).

Draws are read off outputs, not off the library: a layer that is fed unit vectors shows its weights, and which component
each of them came from. Sizes: K components, L patched layers, S draws, B rows.
"""

import copy
import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from covering import each, pairwise
from oracle import shapes_alone
from scipy import integrate, stats
from slimbayes_lab.models import deep_mlp, imdb_lstm, pyramidnet, resnet18
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer

pytestmark = pytest.mark.usefixtures("last_draws")

RARE = 1e-4  # a test of chance fails a correct library this often; the seed is fixed


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def toy() -> nn.Sequential:
    """Three layers that can be patched (norm1, norm2, out), with statistics and scales that are not the neutral
    ones."""
    layers = OrderedDict(
        a=nn.Linear(3, 4),
        norm1=nn.BatchNorm1d(4),
        act1=nn.Tanh(),
        b=nn.Linear(4, 4),
        norm2=nn.LayerNorm(4),
        act2=nn.Tanh(),
        out=nn.Linear(4, 2),
    )
    net = nn.Sequential(layers)
    for p in (*net.norm1.parameters(), *net.norm2.parameters(), net.norm1.running_mean):
        nn.init.normal_(p, 0.5)
    nn.init.uniform_(net.norm1.running_var, 0.5, 2.0)
    return net


PATCHED = ("norm1", "norm2", "out")


def patched(net: nn.Module, **options: Any) -> nn.Module:
    """EMP on the three layers, with components that differ a lot."""
    return sb.bayesianize(
        net,
        sb.ModelPatch(
            **({"components": 3, "patch": "norm+output", "jitter": 0.5} | options)
        ),
    )


def components(layer: Any, site: str = "weight") -> tuple[Tensor, Tensor | None]:
    """All K weights and biases of a layer, its own first."""
    posterior = layer.posterior[site]
    weight = torch.cat([getattr(layer, site)[None], posterior.weight])
    return weight, None if posterior.bias is None else torch.cat(
        [getattr(layer, site.replace("weight", "bias"))[None], posterior.bias]
    )


def network(net: nn.Module, picks: dict[str, int]) -> nn.Module:
    """A plain copy of the network with one component in each patched layer, written in by hand."""
    out = sb.debayesianize(copy.deepcopy(net))
    with torch.no_grad():
        for name, k in picks.items():
            weights, biases = components(net.get_submodule(name))
            out.get_submodule(name).weight.copy_(weights[k])
            if biases is not None:
                out.get_submodule(name).bias.copy_(biases[k])
    return out


def every_pick(
    net: nn.Module, names: tuple[str, ...] = PATCHED
) -> list[dict[str, int]]:
    counts = [len(components(net.get_submodule(name))[0]) for name in names]
    return [
        dict(zip(names, z, strict=True)) for z in itertools.product(*map(range, counts))
    ]


def uniform_p(counts: Any, expected: Any) -> float:
    """P-value of a chi-square test of counts; cells that cannot occur must be empty."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert (counts[expected == 0] == 0).all()
    return stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


def independent_p(a: Tensor, b: Tensor, size: int) -> float:
    """P-value of independence of two columns of integers in [0, size)."""
    table = torch.zeros(size, size).index_put((a, b), torch.ones(()), accumulate=True)
    return stats.chi2_contingency(table.numpy()).pvalue


def weights_of_draws(layer: nn.Module, draws: int) -> tuple[Tensor, Tensor]:
    """Weights (S, out, in) and biases (S, out) of a dense layer's draws, read off its outputs for unit vectors and
    zero."""
    n = layer.in_features
    y = sb.sample(
        layer, torch.cat([torch.eye(n), torch.zeros(1, n)]), draws=draws
    ).detach()
    return (y[:, :n] - y[:, n:]).transpose(1, 2), y[:, n]


def scales_of_draws(layer: nn.Module, draws: int) -> tuple[Tensor, Tensor]:
    """Scales and biases (S, C) of a batch norm's draws in eval mode, read off its outputs."""
    mean, std = layer.running_mean, (layer.running_var + layer.eps).sqrt()
    y = sb.sample(layer.eval(), torch.stack([mean + std, mean]), draws=draws).detach()
    return y[:, 0] - y[:, 1], y[:, 1]


def which(values: Tensor, choices: Tensor) -> Tensor:
    """Index of the component (K, ...) that each value (S, ...) equals, element by element; refuses values that equal
    none."""
    gap = (values.unsqueeze(1) - choices.detach().unsqueeze(0)).abs()
    assert gap.amin(1).max() < 1e-9
    return gap.argmin(1)


# F31: one component is the plain network; enumeration -----------------------------------------------------------------


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 2),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(36, 3),
        )


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("call", ["bare", "sample"])
def test_one_component_is_the_plain_network_bit_for_bit(cross: bool, call: str) -> None:
    """F31: K = 1 in training and eval mode: outputs, gradients, trained weights and batch norm's statistics."""
    plain = Images()
    net = sb.bayesianize(
        copy.deepcopy(plain),
        sb.ModelPatch(components=1, cross=cross, patch="norm+output"),
    )
    assert len(posteriors_of(net)) == 3
    run = net if call == "bare" else (lambda x: sb.sample(net, x)[0])
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, net)
    ]
    for _ in range(3):
        x = torch.randn(5, 2, 6, 6)
        for forward, optimizer in zip((plain, run), optimizers):
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            optimizer.step()
    state = net.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    x = torch.randn(5, 2, 6, 6)
    assert torch.equal(run(x), plain(x))
    plain.eval(), net.eval()
    assert torch.equal(run(x), plain(x))


def outputs_of_every_pick(
    net: nn.Module, x: Tensor
) -> tuple[list[dict[str, int]], Tensor]:
    picks = every_pick(net)
    with torch.no_grad():
        return picks, torch.stack([network(net, z).eval()(x) for z in picks])


@pytest.mark.parametrize("probs", [None, (0.6, 0.3, 0.1), (0.0, 0.25, 0.75)])
def test_every_draw_is_one_of_the_enumerated_networks_and_their_mean_is_the_limit(
    probs: tuple[float, ...] | None,
) -> None:
    """F31: K^L different networks; every draw is one of them, with the product of its picks' probabilities."""
    net = patched(toy(), probs=probs).eval()
    x = torch.randn(4, 3)
    picks, outputs = outputs_of_every_pick(net, x)
    assert len(picks) == 27 and len(outputs.flatten(1).unique(dim=0)) == 27
    draws = 4000
    with torch.no_grad():
        y = sb.sample(net, x, draws=draws)
    gap = (y.flatten(1)[:, None] - outputs.flatten(1)).abs().amax(2)
    assert gap.amin(1).max() < 1e-10
    p = probs or (1 / 3,) * 3
    weight = torch.tensor([math.prod(p[k] for k in z.values()) for z in picks])
    assert uniform_p(gap.argmin(1).bincount(minlength=27), weight * draws) > RARE
    exact = (weight[:, None] * outputs.flatten(1)).sum(0)
    spread = (weight[:, None] * (outputs.flatten(1) - exact) ** 2).sum(
        0
    ).sqrt() / math.sqrt(draws)
    assert ((y.flatten(1).mean(0) - exact).abs() < 5 * spread).all()


@pytest.mark.slow
def test_the_bare_call_draws_from_the_same_networks() -> None:
    net = patched(toy()).eval()
    x = torch.randn(4, 3)
    _, outputs = outputs_of_every_pick(net, x)
    seen = set()
    with torch.no_grad():
        for _ in range(400):  # 27 networks: one is missed with probability 7e-6
            gap = (outputs - net(x)).abs().amax((1, 2))
            assert gap.min() < 1e-10
            seen.add(int(gap.argmin()))
    assert len(seen) == 27


@pytest.mark.slow
@pytest.mark.parametrize("draws", [2, 7])
def test_a_folded_batch_equals_the_networks_of_its_draws_on_convolutions(
    draws: int,
) -> None:
    """Fewer and more draws than components: they take different routes through the matrix layers."""
    net = patched(Images(), patch=r"[0346]", components=3).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    x = torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        y = sb.sample(net, x, draws=draws)
        picks = every_pick(net, ("0", "3", "6"))
        weights, biases = components(net[4])
        outputs = [
            network(net, z | {"4": k}).eval()(x) for z in picks for k in range(3)
        ]
        assert all(
            sum(torch.allclose(output, one, atol=1e-10) for output in outputs) == 1
            for one in y
        )
    assert weights.shape == (3, 4) and biases.shape == (3, 4)


# F32: gradients -------------------------------------------------------------------------------------------------------


def picks_of_pass(net: nn.Module) -> dict[str, int]:
    return {
        name: int(net.get_submodule(name).posterior["weight"].values().weight)
        for name in PATCHED
    }


@pytest.mark.parametrize("probs", [None, (0.7, 0.3)])
def test_gradients_of_single_draws_average_to_the_gradient_of_the_expected_loss(
    probs: tuple[float, ...] | None,
) -> None:
    """F32: over all K^L picks; autograd on hand-made networks is the reference."""
    net = patched(toy(), components=2, probs=probs).eval()
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    names = [name for name, _ in net.named_parameters()]
    single: dict[tuple[int, ...], list[Tensor]] = {}
    while len(single) < 8:
        loss = (sb.sample(net, x)[0] - target).square().mean()
        z = tuple(picks_of_pass(net).values())
        single.setdefault(
            z, list(torch.autograd.grad(loss, list(net.parameters())))
        )  # would refuse a parameter without gradient

    p = probs or (0.5, 0.5)
    plain, expected = sb.debayesianize(copy.deepcopy(net)), torch.zeros(())
    for z in single:
        state = dict(net.named_parameters())
        for name, k in zip(PATCHED, z):
            weights, biases = components(net.get_submodule(name))
            state |= {f"{name}.weight": weights[k], f"{name}.bias": biases[k]}
        out = functional_call(
            plain, {n: t for n, t in state.items() if "posterior" not in n}, (x,)
        )
        expected = (
            expected + math.prod(p[k] for k in z) * (out - target).square().mean()
        )
    exact = torch.autograd.grad(expected, list(net.parameters()))
    for i, name in enumerate(names):
        average = sum(
            math.prod(p[k] for k in z) * grads[i] for z, grads in single.items()
        )
        torch.testing.assert_close(average, exact[i], rtol=1e-9, atol=1e-12, msg=name)


def test_only_the_picked_component_gets_a_gradient_and_the_others_get_zero_not_none() -> (
    None
):
    net = patched(toy(), components=3)
    seen = set()
    for _ in range(30):
        net.zero_grad(set_to_none=True)
        sb.sample(net, torch.randn(5, 3)).square().sum().backward()
        for name, k in picks_of_pass(net).items():
            layer = net.get_submodule(name)
            for own, others in (
                (layer.weight, layer.posterior["weight"].weight),
                (layer.bias, layer.posterior["weight"].bias),
            ):
                grads = torch.cat([own.grad[None], others.grad])
                assert [bool(g.any()) for g in grads] == [j == k for j in range(3)]
            seen.add((name, k))
    assert len(seen) == 9


def test_the_mean_gradient_of_each_component_is_its_share_of_the_gradient() -> None:
    """F32: with K equal components and a linear loss, each gets 1/K of what a single one would get."""
    layer = sb.bayesianize(
        nn.BatchNorm1d(3), sb.ModelPatch(components=4, init="ones")
    ).eval()
    x, draws = torch.randn(6, 3), 4000
    sb.sample(layer, x, draws=draws).sum().div(draws).backward()
    whole = (x / (1 + layer.eps) ** 0.5).sum(0)
    share = (
        torch.cat([layer.weight.grad[None], layer.posterior["weight"].weight.grad])
        / whole
    )
    assert uniform_p((share[:, 0] * draws).round().numpy(), [draws / 4] * 4) > RARE
    torch.testing.assert_close(share.sum(0), torch.ones(3))
    torch.testing.assert_close(
        share, share[:, :1].expand(4, 3)
    )  # one pick for the layer


# F33: how picks are shared --------------------------------------------------------------------------------------------


def dense(config: sb.Config) -> Any:
    return sb.bayesianize(nn.Linear(3, 2), config)


def test_ecmp_picks_every_element_uniformly_and_independently() -> None:
    """F33: marginals of all weights and biases, and all pairs of elements."""
    layer = dense(sb.ModelPatch(components=3, cross=True, patch=".*", jitter=1.0))
    weights, biases = weights_of_draws(layer, 3000)
    all_weights, all_biases = components(layer)
    z = torch.cat(
        [which(weights, all_weights).flatten(1), which(biases, all_biases)], 1
    )
    assert z.shape == (3000, 8)
    marginal = [uniform_p(z[:, i].bincount(minlength=3), [1000] * 3) for i in range(8)]
    assert min(marginal) > RARE
    pairs = [
        independent_p(z[:, i], z[:, j], 3)
        for i, j in itertools.combinations(range(8), 2)
    ]
    assert min(pairs) > RARE
    assert stats.kstest(pairs, "uniform").pvalue > RARE  # not all too good either


def test_emp_picks_once_for_weight_and_bias_together() -> None:
    layer = dense(sb.ModelPatch(components=3, patch=".*", jitter=1.0))
    weights, biases = weights_of_draws(layer, 3000)
    all_weights, all_biases = components(layer)
    z = torch.cat(
        [which(weights, all_weights).flatten(1), which(biases, all_biases)], 1
    )
    assert (z == z[:, :1]).all()
    assert uniform_p(z[:, 0].bincount(minlength=3), [1000] * 3) > RARE
    assert independent_p(z[:-1, 0], z[1:, 0], 3) > RARE  # from draw to draw


@pytest.mark.parametrize("cross", [False, True])
def test_scale_and_bias_of_a_norm_share_their_pick_in_emp_only(cross: bool) -> None:
    layer = nn.BatchNorm1d(4)
    nn.init.normal_(layer.bias)
    nn.init.uniform_(layer.running_mean)
    layer = sb.bayesianize(layer, sb.ModelPatch(components=3, cross=cross, jitter=0.7))
    scales, biases = scales_of_draws(layer, 3000)
    all_scales, all_biases = components(layer)
    z, zb = which(scales, all_scales), which(biases, all_biases)
    if not cross:
        assert (z == z[:, :1]).all() and torch.equal(z, zb)
        return
    for c in range(4):
        assert independent_p(z[:, c], zb[:, c], 3) > RARE
        assert uniform_p(z[:, c].bincount(minlength=3), [1000] * 3) > RARE
        assert uniform_p(zb[:, c].bincount(minlength=3), [1000] * 3) > RARE


@pytest.mark.parametrize("cross", [False, True])
def test_layers_pick_independently_of_each_other(cross: bool) -> None:
    net = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)).eval()
    net = sb.bayesianize(net, sb.ModelPatch(components=2, cross=cross, jitter=0.3))
    (a, _), (b, _) = components(net[0]), components(net[1])
    y = sb.sample(net, torch.ones(1, 1), draws=3000).detach().flatten() * (1 + 1e-5)
    products = (
        a * b.T
    ).flatten()  # four products of the two layers' scales; biases are zero
    z = which(y[:, None], products[:, None]).flatten()
    assert uniform_p(z.bincount(minlength=4), [750] * 4) > RARE


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kinds", [(nn.Linear, nn.Linear), (nn.Linear, nn.LayerNorm)])
def test_matrices_pick_independently_of_each_other_and_of_norms(
    kinds: Any, cross: bool
) -> None:
    """Two layers side by side on inputs that show one weight of each: every pair of picks is equally likely."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Linear(2, 2) if kind is nn.Linear else kind(2) for kind in kinds
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], 1)

    net = sb.bayesianize(
        Pair(),
        sb.Mixture(
            components=2, assignment="element" if cross else "layer", jitter=1.0
        ),
    )
    for layer in (net.a, net.b):  # biases apart would blur which scale was picked
        nn.init.zeros_(layer.bias)
        nn.init.zeros_(layer.posterior["weight"].bias)
    x = torch.tensor([[1.0, 0.0]])
    y = sb.sample(net, x, draws=3000).detach()[:, 0]
    z = []
    for column, layer in ((0, net.a), (2, net.b)):
        weights, biases = components(layer)
        z.append(
            which(
                y[:, column, None],
                torch.stack(
                    [
                        layer.linear_map("weight").op(x, w, b)[0, :1]
                        for w, b in zip(weights, biases)
                    ]
                ),
            )[:, 0]
        )
    assert independent_p(*z, 2) > RARE
    assert uniform_p((2 * z[0] + z[1]).bincount(minlength=4), [750] * 4) > RARE


@pytest.mark.parametrize("cross", [False, True])
def test_probabilities_that_are_not_uniform_are_respected(cross: bool) -> None:
    probs = (0.5, 0.0, 0.2, 0.3)
    layer = dense(
        sb.ModelPatch(components=4, cross=cross, probs=probs, patch=".*", jitter=1.0)
    )
    weights, _ = weights_of_draws(layer, 3000)
    z = which(weights, components(layer)[0]).flatten(1)
    for i in range(z.shape[1]):
        assert uniform_p(z[:, i].bincount(minlength=4), 3000 * np.array(probs)) > RARE


@pytest.mark.parametrize(
    "config",
    [
        sb.DropConnect(rate=0.0),
        sb.Mixture(components=2, probs=(1.0, 0.0)),
        sb.Mixture(components=2, probs=(1.0, 0.0), assignment="element"),
    ],
)
def test_a_component_of_probability_zero_is_never_picked(config: sb.Config) -> None:
    """One weight in 3e7 would be, for float32 noise."""
    layer = sb.bayesianize(nn.Linear(3, 2).float(), config)
    posterior = layer.posterior["weight"]
    rare = torch.full((1, posterior.widths(False)[0]), 6.0, dtype=torch.float32)
    x = torch.eye(3, dtype=torch.float32)
    with sb.fixed_draws(layer):
        posterior.current.noise[posterior.key] = posterior.noise._replace(block=rare)
        torch.testing.assert_close(
            sb.sample(layer, x)[0], F.linear(x, layer.weight, layer.bias)
        )


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", ["norm", "matrix"])
def test_layers_may_have_different_probabilities(kind: str, cross: bool) -> None:
    """Equally many components, so their picks are made together."""
    probs = {"0": (0.8, 0.2), "1": (0.3, 0.7)}
    net = nn.Sequential(
        *(nn.LayerNorm(2) if kind == "norm" else nn.Linear(2, 2) for _ in range(2))
    )
    sb.bayesianize(
        net,
        {
            name: sb.ModelPatch(components=2, cross=cross, probs=p, jitter=1.0)
            for name, p in probs.items()
        },
    )
    seen: dict[str, Tensor] = {}
    for name, layer in net.named_children():
        layer.register_forward_hook(
            lambda module, args, output, name=name: seen.update(
                {name: (args[0], output)}
            )
        )
    sb.sample(net, torch.randn(1, 2), draws=2000)
    for name, layer in net.named_children():
        (x, y), (weights, biases) = seen[name], components(layer)
        both = (
            [
                layer.linear_map("weight").op(x, w, b)
                for w, b in itertools.product(weights, biases)
            ]
            if cross and kind == "norm"
            else None
        )
        if kind == "norm" and cross:
            z = (
                torch.stack([(y - option)[:, 0].abs() for option in both]).argmin(0)
                // 2
            )
        elif cross:
            options = [
                sum(t)
                for t in itertools.product(
                    *((weights[:, 0, i, None] * x[:, i]).unbind() for i in range(2)),
                    biases[:, 0, None].expand(2, 2000).unbind(),
                )
            ]
            z = (
                torch.stack([(y[:, 0] - option).abs() for option in options]).argmin(0)
                // 4
            )
        else:
            z = torch.stack(
                [
                    (y - layer.linear_map("weight").op(x, w, b)).abs().amax(1)
                    for w, b in zip(weights, biases)
                ]
            ).argmin(0)
        assert uniform_p(z.bincount(minlength=2), 2000 * np.array(probs[name])) > RARE


# Learned probabilities ------------------------------------------------------------------------------------------------


def learned(assignment: str = "layer", **options: Any) -> Any:
    return dense(
        sb.Mixture(
            **(
                {
                    "components": 3,
                    "assignment": assignment,
                    "learn_probs": True,
                    "probs": (0.5, 0.3, 0.2),
                    "jitter": 1.0,
                }
                | options
            )
        )
    )


@pytest.mark.parametrize("assignment", ["layer", "element"])
def test_learned_probabilities_pick_one_component_with_their_probability(
    assignment: str,
) -> None:
    layer = learned(assignment)
    weights, biases = weights_of_draws(layer, 3000)
    z = torch.cat(
        [
            which(weights, components(layer)[0]).flatten(1),
            which(biases, components(layer)[1]),
        ],
        1,
    )
    for i in range(z.shape[1]):
        assert (
            uniform_p(z[:, i].bincount(minlength=3), 3000 * np.array([0.5, 0.3, 0.2]))
            > RARE
        )
    assert bool((z == z[:, :1]).all()) == (assignment == "layer")


def test_the_forward_of_a_learned_pick_is_exactly_one_hot() -> None:
    layer = learned("element")
    sb.sample(layer, torch.randn(4, 3), draws=300)
    assert layer.posterior["weight"].values().weight.unique().tolist() == [0.0, 1.0]


def straight_through(gap: float) -> float:
    """E[s (1 - s)] of s = sigmoid(gap + logistic noise): the mean derivative of a relaxed Bernoulli, by quadrature over
    the noise."""

    def integrand(u: float) -> float:
        s = math.exp(gap) * u / (1 - u + math.exp(gap) * u)
        return s * (1 - s)

    return integrate.quad(integrand, 0, 1)[0]


@pytest.mark.parametrize("p", [0.5, 0.2, 0.9])
def test_the_straight_through_gradient_points_the_right_way_with_a_known_bias(
    p: float,
) -> None:
    """For two components and a linear loss c_1 z_1 + c_2 z_2 the exact gradient of the logits is p (1 - p) (c_1 - c_2).

    The estimator's mean is E[s (1 - s)] (c_1 - c_2) with s the relaxed pick: the same sign, two thirds of it at p =
    1/2, 17 % more than it at p = 0.9.
    """
    layer = dense(
        sb.Mixture(components=2, learn_probs=True, probs=(p, 1 - p), jitter=1.0)
    )
    draws, parts = 500, []
    cost = torch.randn(2, 3)  # the loss is linear in the weights, so in the pick
    for _ in range(20):
        y = sb.sample(layer, torch.eye(3), draws=draws)
        loss = (y.transpose(1, 2) * cost).sum() / draws
        parts.append(torch.autograd.grad(loss, layer.posterior["weight"].logits)[0])
    grads = torch.stack(parts)
    weights, biases = components(layer)
    c = ((weights + biases[..., None]) * cost).sum((1, 2)).detach()
    gap = float(c[0] - c[1])
    mean, error = grads.mean(0), grads.std(0) / math.sqrt(len(grads))
    exact = p * (1 - p) * gap
    biased = straight_through(math.log(p / (1 - p))) * gap
    torch.testing.assert_close(mean[0], -mean[1])
    assert abs(mean[0] - biased) < 5 * error[0]
    assert mean[0] * exact > 0
    assert math.isclose(
        biased / exact, {0.5: 2 / 3, 0.2: 0.8625, 0.9: 1.1665}[p], rel_tol=1e-3
    )


@pytest.mark.parametrize(("assignment", "picks"), [("layer", 1), ("element", 8)])
def test_the_kl_of_learned_probabilities_counts_every_pick(
    assignment: str, picks: int
) -> None:
    layer = learned(assignment, tau=None)
    q = torch.distributions.Categorical(torch.tensor([0.5, 0.3, 0.2]))
    uniform = torch.distributions.Categorical(torch.ones(3))
    torch.testing.assert_close(
        sb.kl(layer), picks * torch.distributions.kl_divergence(q, uniform)
    )
    torch.testing.assert_close(
        sb.kl(
            dense(
                sb.Mixture(
                    components=3, assignment=assignment, learn_probs=True, tau=None
                )
            )
        ),
        torch.zeros(()),
    )


def test_learned_probabilities_move_towards_the_better_component() -> None:
    layer = nn.BatchNorm1d(2).eval()
    sb.bayesianize(layer, sb.ModelPatch(components=2, learn_probs=True, tau=None))
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.posterior["weight"].weight.fill_(3.0)
    optimizer = torch.optim.Adam([layer.posterior["weight"].logits], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        x = torch.randn(8, 2)
        sb.sample(layer, x, draws=4).sub(3 * x).square().mean().backward()
        optimizer.step()
    assert layer.posterior["weight"].probabilities()[1] > 0.9


# F34: Eq. 1 and its special cases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", ["forward", "example"])
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_input_assignment_is_inverted_dropout_of_the_inputs(
    kind: str, draws: str
) -> None:
    """F34: an invertible layer is undone, which shows its inputs: each channel is zero or x / (1 - p)."""
    rate = 0.3
    layer = nn.Linear(6, 6) if kind == "dense" else nn.Conv2d(6, 6, 1)
    config = sb.Mixture(
        components=2, assignment="input", zero=True, probs=(1 - rate, rate), draws=draws
    )
    x = torch.rand(5, 6) + 0.5 if kind == "dense" else torch.rand(5, 6, 2, 3) + 0.5
    layer = sb.bayesianize(layer, config)
    assert sum(p.numel() for p in posteriors_of(layer)[0].parameters()) == 0
    y = sb.sample(layer, x, draws=400).detach().movedim(2, -1) - layer.bias.detach()
    inputs = (
        torch.linalg.solve(layer.weight.detach().view(6, 6), y.unsqueeze(-1))
        .squeeze(-1)
        .movedim(-1, 2)
    )
    mask = (inputs / x).round(decimals=6)
    assert set(mask.unique().tolist()) == {0.0, round(1 / (1 - rate), 6)}
    kept = (mask > 0).flatten(3)[..., 0] if kind == "convolution" else mask > 0
    assert torch.equal(
        mask > 0,
        (kept[..., None, None] if kind == "convolution" else kept).expand_as(mask),
    )  # all places alike
    if draws == "forward":
        assert (kept == kept[:, :1]).all()
        kept = kept[:, 0]
    else:
        assert not (kept == kept[:, :1]).all()
        assert independent_p(kept[:, 0, 0].long(), kept[:, 1, 0].long(), 2) > RARE
    assert abs(
        stats.binomtest(int((~kept).sum()), kept.numel(), rate).proportion_estimate
        - rate
    ) < 5 * math.sqrt(rate * (1 - rate) / kept.numel())
    flat = kept.flatten(0, -2).long()
    assert (
        min(
            independent_p(flat[:, i], flat[:, j], 2)
            for i, j in itertools.combinations(range(6), 2)
        )
        > RARE
    )


def test_dropconnect_drops_single_weights_and_never_biases() -> None:
    """F34: elementwise picks with the last component at zero; E[W] is the layer's own weight."""
    layer = dense(sb.DropConnect(rate=0.25))
    weights, biases = weights_of_draws(layer, 3000)
    torch.testing.assert_close(biases, layer.bias.detach().expand(3000, 2))
    z = which(
        weights, torch.stack([layer.weight / 0.75, torch.zeros_like(layer.weight)])
    ).flatten(1)
    for i in range(6):
        assert uniform_p(z[:, i].bincount(minlength=2), [2250, 750]) > RARE
    assert (
        min(
            independent_p(z[:, i], z[:, j], 2)
            for i, j in itertools.combinations(range(6), 2)
        )
        > RARE
    )
    assert (
        (weights.mean(0) - layer.weight).abs()
        < 5 * layer.weight.abs() * math.sqrt(0.25 / 0.75 / 3000)
    ).all()
    same = dense(
        sb.Mixture(components=2, assignment="element", zero=True, probs=(0.75, 0.25))
    )
    same.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3)
    torch.manual_seed(5)
    first = sb.sample(layer, x, draws=3)
    torch.manual_seed(5)
    assert torch.equal(first, sb.sample(same, x, draws=3))


def test_dropconnect_may_drop_for_every_row_and_carry_a_prior() -> None:
    layer = dense(sb.DropConnect(rate=0.25, draws="example", tau=2.0, rho=3.0))
    kept = (
        2.0 / 2 * 0.75 * (layer.weight / 0.75).square().sum()
        + 3.0 / 2 * layer.bias.square().sum()
    )
    torch.testing.assert_close(sb.kl(layer), kept)
    assert float(sb.kl(dense(sb.DropConnect()))) == 0.0  # left to weight decay
    y = (
        layer(
            torch.ones(400, 1).expand(400, 3) * torch.tensor([1.0, 0.0, 0.0])
        ).detach()
        - layer.bias.detach()
    )
    z = which(y, torch.stack([layer.weight[:, 0] / 0.75, torch.zeros(2)]))
    assert uniform_p(z.flatten().bincount(minlength=2), [600, 200]) > RARE
    assert independent_p(z[:, 0], z[:, 1], 2) > RARE


def test_dropconnect_leaves_embeddings_alone_unless_they_are_named() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))

    def names(model: nn.Module) -> list[str]:
        return [r.name for r in sb.summary(model).rows if r.status == "converted"]

    assert names(sb.bayesianize(net(), sb.DropConnect())) == ["1"]
    assert names(sb.bayesianize(net(), sb.DropConnect(), include=".*")) == ["0", "1"]


def test_a_zero_component_in_general_keeps_the_mean() -> None:
    """K = 3 with the last at zero: the two others are divided by the probability of not being zero; biases are not
    mixed."""
    layer = dense(
        sb.Mixture(
            components=3,
            zero=True,
            assignment="element",
            probs=(0.5, 0.3, 0.2),
            jitter=1.0,
        )
    )
    assert (
        layer.posterior["weight"].weight.shape == (1, 2, 3)
        and layer.posterior["weight"].bias is None
    )
    weights, biases = weights_of_draws(layer, 3000)
    torch.testing.assert_close(biases, layer.bias.detach().expand(3000, 2))
    other = layer.posterior["weight"].weight[0]
    z = which(
        weights, torch.stack([layer.weight / 0.8, other / 0.8, torch.zeros(2, 3)])
    ).flatten(1)
    for i in range(6):
        assert uniform_p(z[:, i].bincount(minlength=3), [1500, 900, 600]) > RARE


def test_model_assignment_is_an_explicit_ensemble() -> None:
    """F34: one pick for all layers; every component is a network of its own, present in every sample."""
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    net = sb.bayesianize(net, sb.Mixture(components=3, assignment="model", jitter=0.8))
    x = torch.randn(4, 3)
    alone = torch.stack([network(net, {"0": k, "1": k, "3": k})(x) for k in range(3)])
    assert sb.members(net) == 3
    torch.testing.assert_close(sb.sample(net, x), alone)
    torch.testing.assert_close(sb.sample(net, x, draws=6), torch.cat([alone, alone]))
    torch.testing.assert_close(sb.sample(net, x, parallel=False), alone)
    many = torch.randn(
        7, 3
    )  # rows of a bare call are shared out in blocks of 3, 2 and 2
    alone = torch.stack(
        [network(net, {"0": k, "1": k, "3": k})(many) for k in range(3)]
    )
    firsts = set()
    for _ in range(40):
        gap = (alone - net(many)).abs().amax(2)
        assert gap.amin(0).max() < 1e-10
        member = gap.argmin(0).tolist()
        assert [member.index(k) for k in dict.fromkeys(member)] == [0, 3, 5]
        assert [(k - member[0]) % 3 for k in dict.fromkeys(member)] == [0, 1, 2]
        firsts.add(member[0])
    assert firsts == {0, 1, 2}


@pytest.mark.parametrize("zero", [False, True])
def test_sigma_adds_normal_noise_around_the_picked_component(zero: bool) -> None:
    """Eq. 1: the noise of every weight and bias has mean zero, variance sigma^2, and no correlation."""
    sigma, draws = 0.05, 4000
    layer = dense(
        sb.Mixture(
            components=2, assignment="element", sigma=sigma, jitter=5.0, zero=zero
        )
    )
    weights, biases = weights_of_draws(layer, draws)
    values = torch.cat([weights.flatten(1), biases], 1)
    others = torch.zeros(1, 2, 3) if zero else layer.posterior["weight"].weight
    own = layer.weight * 2 if zero else layer.weight
    all_weights = torch.cat([own[None], others]).flatten(1)
    all_biases = layer.bias.expand(2, 2) if zero else components(layer)[1]
    choices = torch.cat([all_weights, all_biases], 1).detach()
    gap = values.unsqueeze(1) - choices
    clear = (
        choices[0] - choices[1]
    ).abs() > 8 * sigma  # where it is plain which one was picked
    clear |= choices[0] == choices[1]
    noise = (
        gap.gather(1, gap.abs().argmin(1, keepdim=True)).squeeze(1)[:, clear] / sigma
    )
    assert clear.sum() >= 5
    assert (noise.mean(0).abs() < 5 / math.sqrt(draws)).all()
    assert ((noise.var(0) - 1).abs() < 5 * math.sqrt(2 / draws)).all()
    assert min(stats.kstest(column, "norm").pvalue for column in noise.T.numpy()) > RARE
    correlation = torch.corrcoef(noise.T).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(draws)


# F35: the KL ----------------------------------------------------------------------------------------------------------


def log_mixture(x: Tensor, centres: Tensor, p: Tensor, sigma: float) -> Tensor:
    """Log density of x (S, D) under sum_k p_k N(centre_k, sigma^2 I)."""
    squares = (x[:, None] - centres).square().sum(-1)
    d = x.shape[1]
    return torch.logsumexp(p.log() - squares / (2 * sigma**2), 1) - d / 2 * math.log(
        2 * math.pi * sigma**2
    )


@pytest.mark.parametrize("assignment", ["layer", "element"])
@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_eq_8_is_the_monte_carlo_kl_up_to_its_constant(
    assignment: str, tau: float
) -> None:
    """F35: for components that do not overlap KL(q || p) = Eq. 8 + D/2 (tau sigma^2 - 1 - log(tau sigma^2)) - (picks)
    H(p)."""
    sigma, probs, draws = 0.01, (0.5, 0.3, 0.2), 3000
    p = torch.tensor(probs)
    layer = dense(
        sb.Mixture(
            components=3,
            assignment=assignment,
            sigma=sigma,
            probs=probs,
            jitter=3.0,
            tau=tau,
        )
    )
    for scale in (
        1.0,
        1.7,
    ):  # the constant is the same for two settings of the parameters
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(scale)
        weights, biases = components(layer)
        centres = torch.cat([weights.flatten(1), biases], 1).detach()
        drawn = weights_of_draws(layer, draws)
        x = torch.cat([drawn[0].flatten(1), drawn[1]], 1).detach()
        if assignment == "layer":
            log_q = log_mixture(x, centres, p, sigma)
        else:
            log_q = sum(
                log_mixture(x[:, i : i + 1], centres[:, i : i + 1], p, sigma)
                for i in range(8)
            )
        log_p = torch.distributions.Normal(0.0, tau**-0.5).log_prob(x).sum(1)
        ratio = log_q - log_p
        constant = 4 * (tau * sigma**2 - 1 - math.log(tau * sigma**2)) + (
            1 if assignment == "layer" else 8
        ) * float((p * p.log()).sum())
        assert abs(
            float(ratio.mean()) - float(sb.kl(layer).detach()) - constant
        ) < 5 * float(ratio.std()) / math.sqrt(draws)


def test_the_gradient_of_the_kl_is_tau_p_times_each_component() -> None:
    """F35: tau p_k M_k for weights, rho p_k m_k for biases, in EMP and ECMP alike."""
    for cross in (False, True):
        layer = dense(
            sb.ModelPatch(
                components=3,
                cross=cross,
                patch=".*",
                probs=(0.5, 0.3, 0.2),
                tau=2.0,
                rho=0.7,
            )
        )
        sb.kl(layer).backward()
        weights, biases = components(layer)
        p, posterior = torch.tensor([0.5, 0.3, 0.2]), layer.posterior["weight"]
        torch.testing.assert_close(
            torch.cat([layer.weight.grad[None], posterior.weight.grad]),
            2.0 * p[:, None, None] * weights,
        )
        torch.testing.assert_close(
            torch.cat([layer.bias.grad[None], posterior.bias.grad]),
            0.7 * p[:, None] * biases,
        )


def test_the_kl_of_dropout_counts_its_components_as_they_are_drawn() -> None:
    """Eq. 2: the kept component is W / (1 - p) with probability 1 - p; a bias that is never dropped counts fully."""
    layer = dense(
        sb.Mixture(
            components=2,
            assignment="input",
            zero=True,
            probs=(0.8, 0.2),
            tau=2.0,
            rho=3.0,
        )
    )
    expected = (
        2.0 * 0.8 / 2 * (layer.weight / 0.8).square().sum()
        + 3.0 / 2 * layer.bias.square().sum()
    )
    torch.testing.assert_close(sb.kl(layer), expected)


def entropy_of_mixture(centres: np.ndarray, p: np.ndarray) -> float:
    def integrand(x: float) -> float:
        q = float((p * stats.norm.pdf(x, centres)).sum())
        return -q * math.log(q) if q > 0 else 0.0

    low, high = centres.min() - 9, centres.max() + 9
    return integrate.quad(integrand, low, high, limit=500, points=list(centres))[0]


def test_entropy_bounds_have_the_corrected_direction() -> None:
    """D.4: sum p_k H_k <= H(q) <= sum p_k H_k + H(p); Eq. 7 prints the first as an upper bound. Separated components
    reach the second."""
    p = np.array([0.5, 0.3, 0.2])
    average, extra = 0.5 * (1 + math.log(2 * math.pi)), float(-(p * np.log(p)).sum())
    for spread, near in ((0.0, average), (1.0, None), (30.0, average + extra)):
        value = entropy_of_mixture(spread * np.arange(3.0), p)
        assert average - 1e-9 <= value <= average + extra + 1e-9
        assert near is None or math.isclose(value, near, abs_tol=1e-6)


# Eq. 6 and the four-factor penalty ------------------------------------------------------------------------------------


def square(*tensors: Tensor) -> float:
    return sum(float(t.detach().square().sum()) for t in tensors)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)
        self.token = nn.Parameter(torch.randn(1, 4))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(
            self.norm(self.lstm(self.embed(ids) + self.token + self.shift)[0][:, -1])
        )


def hand_sums(net: nn.Module, patched_names: list[str]) -> list[float]:
    """The four sums, layer by layer and component by component."""
    sums = [0.0] * 4
    for name, layer in net.named_modules():
        if ".posterior" in f".{name}":
            continue
        for own, parameter in layer.named_parameters(recurse=False):
            is_weight = own.startswith("weight") or own == "token"
            if name in patched_names and not own.startswith("bias_hh"):
                site = own.replace("bias", "weight")
                posterior = layer.posterior[site]
                sums[0 if is_weight else 1] += square(
                    parameter, *(posterior.weight if is_weight else posterior.bias)
                )
            else:
                sums[2 if is_weight else 3] += square(parameter)
    return sums


PENALISED = [
    pytest.param(lambda: patched(toy()), ["norm1", "norm2", "out"], id="mlp"),
    pytest.param(
        lambda: patched(toy(), cross=True, patch="norm"),
        ["norm1", "norm2"],
        id="mlp-ecmp",
    ),
    pytest.param(lambda: patched(Images()), ["1", "4", "6"], id="convnet"),
    pytest.param(
        lambda: patched(Images(), patch="norm+input"),
        ["0", "1", "4"],
        id="convnet-input",
    ),
    pytest.param(lambda: patched(Recurrent()), ["norm", "head"], id="lstm-shared"),
    pytest.param(
        lambda: sb.bayesianize(
            Recurrent(), sb.Mixture(components=3), include="lstm|head"
        ),
        ["lstm", "head"],
        id="lstm-patched",
    ),
]


@pytest.mark.parametrize(("build", "names"), PENALISED)
def test_l2_has_the_four_sums_of_appendix_c_1(build: Any, names: list[str]) -> None:
    net = build()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases of norms start at zero
    sums = hand_sums(net, names)
    assert all(s > 0 for s in sums)
    factors = ("patched_weights", "patched_biases", "shared_weights", "shared_biases")
    for factor, expected in zip(factors, sums, strict=True):
        assert math.isclose(
            float(sb.l2(net, **{factor: 1.0}).detach()), expected, rel_tol=1e-6
        )
    assert math.isclose(
        float(sb.l2(net, 0.1, 0.2, 0.3, 0.4).detach()),
        float(np.dot([0.1, 0.2, 0.3, 0.4], sums)),
        rel_tol=1e-6,
    )
    assert float(sb.l2(net)) == 0.0


def test_l2_keeps_double_precision() -> None:
    layer = dense(sb.Mixture(components=2))
    expected = sum(p.detach().square().sum() for p in layer.parameters())
    torch.testing.assert_close(sb.l2(layer, 1.0, 1.0), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("build", "names"), PENALISED[:3])
def test_eq_6_is_the_kl_plus_l2_of_what_is_shared(build: Any, names: list[str]) -> None:
    """The paper's own penalty: tau p_k / 2 on components, tau / 2 on what is shared, the last sum over shared
    layers."""
    net = build()
    sums = hand_sums(net, names)
    eq_6 = sums[0] / 3 / 2 + sums[1] / 3 / 2 + sums[2] / 2 + sums[3] / 2
    assert math.isclose(
        float(
            (sb.kl(net) + sb.l2(net, shared_weights=0.5, shared_biases=0.5)).detach()
        ),
        eq_6,
        rel_tol=1e-6,
    )


def test_l2_reaches_every_component_with_its_gradient() -> None:
    net = patched(toy())
    sb.l2(net, 0.5, 0.5, 0.5, 0.5).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, p.detach(), msg=name)


def test_l2_does_not_touch_learned_probabilities() -> None:
    net = patched(toy(), learn_probs=True, probs=(0.6, 0.3, 0.1))
    sb.l2(net, 1.0, 1.0, 1.0, 1.0).backward()
    assert all(
        p.posterior["weight"].logits.grad is None
        for p in (net.norm1, net.norm2, net.out)
    )


def test_l2_covers_every_member_of_an_ensemble() -> None:
    net = sb.bayesianize(nn.Linear(3, 2), sb.Ensemble(members=3, init="copies"))
    assert math.isclose(
        float(sb.l2(net, 1.0, 1.0, 1.0, 1.0).detach()),
        3 * square(net.weight, net.bias),
        rel_tol=1e-6,
    )


def decayed(net: nn.Module, **options: Any) -> dict[str, float]:
    """Weight decay of every parameter by name; each must be in exactly one group."""
    names = {id(p): name for name, p in net.named_parameters()}
    groups = sb.param_groups(net, weight_decay=0.1, **options)
    found = [
        (names[id(p)], group["weight_decay"])
        for group in groups
        for p in group["params"]
    ]
    assert sorted(n for n, _ in found) == sorted(names.values())
    return dict(found)


def test_weight_decay_covers_components_only_where_no_prior_does() -> None:
    """tau=None leaves every component to weight decay; a tau in the KL leaves none of them."""
    free, bound = decayed(patched(toy(), tau=None)), decayed(patched(toy(), tau=1.0))
    assert set(free.values()) == {0.1}
    for name, decay in bound.items():
        assert decay == (0.0 if name.split(".")[0] in PATCHED else 0.1), name


def test_weight_decay_equals_l2_on_a_patched_network() -> None:
    """lambda |w|^2 is weight_decay 2 lambda, for all components also while they are not picked."""
    a = patched(toy(), tau=None)
    b = copy.deepcopy(a)
    optimizers = [
        torch.optim.SGD(sb.param_groups(a, weight_decay=0.2), lr=0.1),
        torch.optim.SGD(b.parameters(), lr=0.1),
    ]
    for step in range(5):
        x = torch.randn(4, 3)
        for net, optimizer, penalty in (
            (a, optimizers[0], 0.0),
            (b, optimizers[1], 0.1),
        ):
            torch.manual_seed(step)
            optimizer.zero_grad()
            (
                sb.sample(net, x).square().mean()
                + sb.l2(net, penalty, penalty, penalty, penalty)
            ).backward()
            optimizer.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_weight_decay_leaves_learned_probabilities_alone() -> None:
    decay = decayed(patched(toy(), tau=None, learn_probs=True))
    assert {name: d for name, d in decay.items() if name.endswith("logits")} == {
        f"{n}.posterior.weight.logits": 0.0 for n in PATCHED
    }


# F37: counts ----------------------------------------------------------------------------------------------------------


def counted(build: Any, config: sb.Config) -> tuple[int, int]:
    with shapes_alone():
        net = build()
        cost = sb.estimate_cost(net, config)
        report = sb.summary(sb.bayesianize(net, config))
    actual = sum(p.numel() for p in net.parameters())
    assert report.after == actual == cost.parameters + cost.extra_parameters
    assert report.before == cost.parameters
    return report.before, report.after


PATCH = sb.ModelPatch(components=5, patch="norm+output")


def test_shared_parameters_with_a_sigma_of_machine_epsilon_are_point_estimates() -> (
    None
):
    """Eq. 3: a Gaussian of that width around each shared weight, which is a posterior of its own here, moves outputs by
    a few roundings of float32; so sigma is zero unless it is asked for."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5)
    ).float()
    epsilon = torch.finfo(torch.float32).eps
    shared = sb.MeanField(scale_init=epsilon, scale_jitter=0.0, bias="gaussian")
    x, patch = (
        torch.randn(16, 20, dtype=torch.float32),
        sb.ModelPatch(components=3, patch="norm"),
    )
    noisy: Any = sb.bayesianize(copy.deepcopy(net), {"1": patch, "0|3": shared}).eval()
    plain: Any = sb.bayesianize(copy.deepcopy(net), patch).eval()
    plain[1].load_state_dict(noisy[1].state_dict())
    drawn = sb.sample(noisy, x, draws=64).detach().softmax(-1)
    exact = sb.predict(plain, x, draws="exact").samples  # three networks
    distance = (drawn[:, None] - exact[None]).flatten(2).abs().amax(-1).amin(1)
    assert 0 < float(distance.max()) < 20 * epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "config", "before", "after", "percent"),
    [
        (
            resnet18,
            sb.MeanField(bias="gaussian"),
            11_689_512,
            23_369_424,
            99.92,
        ),  # printed as 23.4M; PBP's are as many
        (resnet18, sb.DropConnect(), 11_689_512, 11_689_512, 0.0),
        (
            resnet18,
            sb.Ensemble(members=5, init="copies"),
            11_689_512,
            58_447_560,
            400.0,
        ),
        (deep_mlp, PATCH, 1_009_900, 1_129_100, 11.803),
        (deep_mlp, sb.DropConnect(), 1_009_900, 1_009_900, 0.0),
    ],
)
def test_parameter_counts_of_tables_1_and_3(
    build: Any, config: sb.Config, before: int, after: int, percent: float
) -> None:
    """F37: ResNet-18 and the MLP of the paper, to the last parameter; test_experiment_configs.py counts the others."""
    assert counted(build, config) == (before, after)
    digits = 4 if percent < 2 else 2 if percent < 100 else 1
    assert round(100 * (after - before) / before, digits) == round(percent, digits)


@pytest.mark.parametrize(
    ("network", "printed"), [(11_689_512, 3_510), (28_511_307, 8_550)]
)
def test_multiplicative_flows_of_table_1_have_300_numbers_for_each_weight(
    network: int, printed: int
) -> None:
    """Table 1 prints millions and [29900 %]: two steps of a flow over all weights, each with three maps to or from 50
    hidden units (masked RealNVP), and no count for means and scales."""
    weights = 7
    steps = [
        nn.Linear(weights, 50, bias=False),
        *(nn.Linear(50, weights, bias=False) for _ in range(2)),
    ] * 2
    each = sum(p.numel() for step in steps for p in step.parameters()) / weights
    assert 100 * (each - 1) == 29900
    assert float(f"{each * network / 1e6:.3g}") == printed
    assert float(f"{(each + 2) * network / 1e6:.3g}") != printed


@pytest.mark.parametrize("k", [1, 2, 7])
def test_overhead_formulas_of_section_3_3(k: int) -> None:
    """2 (K - 1) N_2 for a norm layer; (K - 1) (I + 1) O for a dense layer; (K - 1) k^2 I O for a convolution without
    bias."""

    def extra(net: nn.Module, patch: str) -> int:
        report = sb.summary(
            sb.bayesianize(net, sb.ModelPatch(components=k, patch=patch))
        )
        return report.after - report.before

    assert (
        extra(nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11)), "norm")
        == 2 * (k - 1) * 11
    )
    assert (
        extra(nn.Sequential(nn.Conv2d(6, 11, 3), nn.BatchNorm2d(11)), "norm")
        == 2 * (k - 1) * 11
    )
    dense_ends = nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    assert extra(dense_ends, "input+output") == (k - 1) * ((4 + 1) * 5 + (8 + 1) * 3)
    conv_ends = nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=False),
        nn.Conv2d(5, 7, 2),
        nn.Conv2d(7, 4, 5, bias=False),
    )
    assert extra(conv_ends, "input+output") == (k - 1) * (3**2 * 2 * 5 + 5**2 * 7 * 4)


# Effective ensemble size ----------------------------------------------------------------------------------------------


def log_size(net: nn.Module, config: Any, **options: Any) -> float:
    return sb.summary(sb.bayesianize(net, config, **options)).log_ensemble_size


def test_effective_ensemble_sizes_of_table_3() -> None:
    """K^L for EMP, K^elements for ECMP, 2^(weights) for DropConnect, 2^(inputs) for dropout; members count once."""
    three = math.log(3)
    assert math.isclose(
        log_size(toy(), sb.ModelPatch(components=3, patch="norm+output")), 3 * three
    )
    elements = 2 * 4 + 2 * 4 + (4 * 2 + 2)
    assert math.isclose(
        log_size(toy(), sb.ModelPatch(components=3, patch="norm+output", cross=True)),
        elements * three,
    )
    assert math.isclose(
        log_size(toy(), sb.DropConnect()), (3 * 4 + 4 * 4 + 4 * 2) * math.log(2)
    )
    assert math.isclose(
        log_size(toy(), sb.MCDropout(before="a|b|out", unit="channel")),
        (3 + 4 + 4) * math.log(2),
    )
    assert math.isclose(log_size(toy(), sb.Ensemble(members=3, init="copies")), three)
    assert math.isclose(
        log_size(toy(), sb.Mixture(components=3, assignment="model")), three
    )
    assert math.isclose(log_size(toy(), sb.BatchEnsemble(members=3)), three)
    assert log_size(toy(), sb.ModelPatch(components=1)) == 0.0
    assert log_size(toy(), sb.Deterministic()) == 0.0
    assert log_size(toy(), sb.Mixture(components=2, sigma=0.1)) == math.inf
    assert log_size(toy(), sb.MeanField()) == math.inf
    mixed = {
        "norm.*": sb.ModelPatch(components=3),
        "out": sb.Ensemble(members=4),
        "b": sb.BatchEnsemble(members=4),
    }
    assert math.isclose(log_size(toy(), mixed), 2 * three + math.log(4))


def test_the_effective_ensemble_size_in_words() -> None:
    def text(config: Any) -> str:
        report = sb.summary(sb.bayesianize(toy(), config))
        assert f"effective ensemble size {report.ensemble_size}" in str(report)
        return report.ensemble_size

    assert text(sb.ModelPatch(components=3, patch="norm+output")) == "27"
    assert text(sb.ModelPatch(components=99, patch="norm+output")) == "970,299"
    assert text(sb.ModelPatch(components=100, patch="norm+output")) == "10^6.0"
    assert (
        text(sb.ModelPatch(components=10, patch="norm+output", cross=True)) == "10^26.0"
    )
    assert text(sb.MeanField()) == "infinite (continuous)"
    report = sb.summary(sb.bayesianize(toy(), sb.MeanField()))
    assert report.to_dict()["log_ensemble_size"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "layers"), [(resnet18, 21), (pyramidnet, 165), (deep_mlp, 100)]
)
def test_effective_sizes_of_the_papers_networks(build: Any, layers: int) -> None:
    """5^L patched layers: 20 norms of ResNet-18, 164 of PyramidNet, 99 of the MLP, and the output."""
    with shapes_alone():
        assert math.isclose(log_size(build(), PATCH), layers * math.log(5))


# F36 and prediction ---------------------------------------------------------------------------------------------------


def test_the_printed_running_mean_is_too_small_and_predict_returns_the_true_one() -> (
    None
):
    """F36: Algorithm 1 divides by s + 1 from s = 1 on, which gives sum / (S + 1)."""
    net = patched(toy()).eval()
    x, draws = torch.randn(4, 3), 7
    _, outputs = outputs_of_every_pick(net, x)
    pred = sb.predict(net, x, draws=draws)
    samples = pred.samples
    assert samples.shape == (draws, 4, 2)
    probabilities = outputs.softmax(-1)
    assert all((probabilities - s).abs().amax((1, 2)).min() < 1e-10 for s in samples)
    printed = corrected = torch.zeros(4, 2)
    for s in range(1, draws + 1):
        printed = printed + (samples[s - 1] - printed) / (s + 1)
        corrected = corrected + (samples[s - 1] - corrected) / s
    torch.testing.assert_close(printed, samples.sum(0) / (draws + 1))
    torch.testing.assert_close(corrected, samples.mean(0))
    torch.testing.assert_close(pred.probs, samples.mean(0))
    torch.testing.assert_close(pred.probs.sum(-1), torch.ones(4))
    assert (printed.sum(-1) - draws / (draws + 1)).abs().max() < 1e-12


@pytest.mark.parametrize("chunk", [None, 8, 20])
def test_predict_approaches_the_enumerated_predictive_distribution(
    chunk: int | None,
) -> None:
    net = patched(toy()).eval()
    x = torch.randn(4, 3)
    _, outputs = outputs_of_every_pick(net, x)
    probabilities = outputs.softmax(-1)
    exact = probabilities.mean(0)
    pred = sb.predict(net, x, draws=2000, chunk=chunk)
    assert pred.count == 2000
    assert (
        (pred.probs - exact).abs() < 5 * probabilities.std(0) / math.sqrt(2000)
    ).all()
    z = which(
        pred.samples.flatten(1), probabilities.flatten(1)
    )  # element by element: no two networks may be mixed
    assert (z == z[:, :1]).all()
    assert uniform_p(z[:, 0].bincount(minlength=27), [2000 / 27] * 27) > RARE


# Rows of one draw -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cross", "draws", "call"),
    pairwise([False, True], ["forward", "example"], ["sample", "bare"]),
)
def test_rows_of_a_draw_share_their_picks_unless_draws_is_example(
    cross: bool, draws: str, call: str
) -> None:
    net = patched(toy(), cross=cross, draws=draws).eval()
    x = torch.randn(1, 3).expand(64, 3)
    with torch.no_grad():
        y = (
            sb.sample(net, x, draws=2)
            if call == "sample"
            else torch.stack([net(x), net(x)])
        )
        _, outputs = outputs_of_every_pick(net, x[:1])
    if not cross:
        assert (y.flatten(0, 1)[:, None] - outputs[:, 0]).abs().amax(2).amin(
            1
        ).max() < 1e-10
    different = [len(one.round(decimals=9).unique(dim=0)) for one in y]
    assert different == [1, 1] if draws == "forward" else min(different) > 10


def test_per_example_picks_of_a_dense_layer_are_uniform_and_independent_between_rows() -> (
    None
):
    layer = dense(sb.ModelPatch(components=3, draws="example", patch=".*", jitter=1.0))
    x = torch.randn(1, 3)
    weights, biases = components(layer)
    choices = torch.einsum("koi,i->ko", weights, x[0]) + biases
    z = which(
        sb.sample(layer, x.expand(2, 3), draws=2000).detach().flatten(0, 1), choices
    )
    assert (z == z[:, :1]).all()
    z = z[:, 0].view(2000, 2)
    assert uniform_p(z.flatten().bincount(minlength=3), [4000 / 3] * 3) > RARE
    assert independent_p(z[:, 0], z[:, 1], 3) > RARE


def test_a_held_draw_is_one_network_for_every_row_and_call() -> None:
    net = patched(toy(), draws="example").eval()
    x = torch.randn(6, 3)
    _, outputs = outputs_of_every_pick(net, x)
    with torch.no_grad(), sb.fixed_draws(net, 4):
        y = sb.sample(net, x)
        assert all((outputs - one).abs().amax((1, 2)).min() < 1e-10 for one in y)
        torch.testing.assert_close(sb.sample(net, x[:2]), y[:, :2])


# Statistics -----------------------------------------------------------------------------------------------------------


def test_running_statistics_are_kept_once_and_are_those_of_the_plain_layer() -> None:
    """D.1: only scale and bias have components; the statistics follow the inputs, whatever was picked."""
    plain = nn.BatchNorm1d(4)
    net = sb.bayesianize(
        nn.Sequential(copy.deepcopy(plain), nn.Linear(4, 2)),
        sb.ModelPatch(components=5),
    )
    assert not [
        name for name in net.state_dict() if "running" in name and "posterior" in name
    ]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(10):
        x = 2 * torch.randn(8, 4) + 1
        plain(x)
        optimizer.zero_grad()
        (net(x).square().mean() + sb.kl(net) / 100).backward()
        optimizer.step()
    for name, value in plain.named_buffers():
        assert torch.equal(net[0].get_buffer(name), value), name


def test_folded_draws_count_as_one_batch_for_the_statistics() -> None:
    plain = nn.BatchNorm1d(4)
    layer = sb.bayesianize(copy.deepcopy(plain), sb.ModelPatch(components=3))
    x = torch.randn(8, 4)
    plain(x.repeat(6, 1))
    sb.sample(layer, x, draws=6)
    assert int(layer.num_batches_tracked) == 1
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, plain.running_var)


# How components start -------------------------------------------------------------------------------------------------


def started(init: Any, jitter: float = 0.05) -> tuple[nn.Module, nn.Module]:
    net = nn.Sequential(nn.Linear(3, 400), nn.BatchNorm1d(400), nn.Linear(400, 50))
    nn.init.normal_(net[1].weight, 2.0)
    nn.init.normal_(net[1].bias, -1.0)
    plain = copy.deepcopy(net)
    return plain, sb.bayesianize(
        net, sb.ModelPatch(components=4, patch="norm+output", init=init, jitter=jitter)
    )


@pytest.mark.parametrize(
    ("init", "value"), [("ones", 1.0), (0.2, 0.2), (3, 3.0), ("uniform", None)]
)
def test_scales_start_where_init_says_the_own_one_included(
    init: Any, value: float | None
) -> None:
    plain, net = started(init)
    scales, biases = components(net[1])
    assert not biases.any()
    if value is not None:
        assert (scales == value).all()
    else:
        assert stats.kstest(scales.detach().flatten().numpy(), "uniform").pvalue > RARE
        assert len(scales.unique()) == scales.numel()
    assert torch.equal(net[2].weight, plain[2].weight) and torch.equal(
        net[2].bias, plain[2].bias
    )
    others = net[2].posterior["weight"]
    for p in (
        others.weight,
        others.bias,
    ):  # a matrix has no ones to start at: it starts as torch starts it
        assert (
            stats.kstest(
                p.detach().flatten().numpy() * 20, stats.uniform(-1, 2).cdf
            ).pvalue
            > RARE
        )


def test_copies_are_the_own_weights_with_jitter_relative_to_their_size() -> None:
    plain, net = started("copies", jitter=0.1)
    for layer, before in ((net[1], plain[1]), (net[2], plain[2])):
        for own, others in (
            (before.weight, layer.posterior["weight"].weight),
            (before.bias, layer.posterior["weight"].bias),
        ):
            noise = (
                ((others - own) / own.square().mean().sqrt() / 0.1)
                .detach()
                .flatten()
                .numpy()
            )
            assert stats.kstest(noise, "norm").pvalue > RARE
        assert torch.equal(layer.weight, before.weight) and torch.equal(
            layer.bias, before.bias
        )
    _, net = started("copies", jitter=0.0)
    assert (components(net[1])[0] == net[1].weight).all() and (
        components(net[2])[1] == net[2].bias
    ).all()


def test_fresh_components_start_as_torch_starts_dense_and_convolutional_layers() -> (
    None
):
    plain, net = started("fresh")
    scales, biases = components(net[1])
    assert torch.equal(net[1].weight, plain[1].weight) and torch.equal(
        net[1].bias, plain[1].bias
    )
    assert (scales[1:] == 1).all() and not biases[1:].any()
    assert torch.equal(net[2].weight, plain[2].weight)
    conv = sb.bayesianize(
        nn.Conv2d(8, 40, 3, groups=2), sb.Mixture(components=3, init="fresh")
    )
    for layer, bound in ((net[2], 400**-0.5), (conv, (4 * 9) ** -0.5)):
        for p in (layer.posterior["weight"].weight, layer.posterior["weight"].bias):
            assert (
                stats.kstest(
                    p.detach().flatten().numpy() / bound, stats.uniform(-1, 2).cdf
                ).pvalue
                > RARE
            )


@pytest.mark.parametrize(
    ("build", "site"),
    [
        (lambda: nn.Embedding(500, 8), "weight"),
        (lambda: nn.LSTM(100, 4), "weight_ih_l0"),
        (lambda: nn.ConvTranspose2d(4, 64, 3), "weight"),
        (lambda: nn.MultiheadAttention(16, 2), "q"),
    ],
)
def test_fresh_components_have_the_size_torch_gives_other_layers(
    build: Any, site: str
) -> None:
    layer = sb.bayesianize(build(), sb.Mixture(components=2, init="fresh"))
    fresh = layer.posterior[site].weight
    assert 0.85 < (fresh.std() / layer.linear_map(site).weight.std()) < 1.15


def test_fresh_components_of_attentions_output_are_fresh() -> None:
    layer = sb.bayesianize(
        nn.MultiheadAttention(16, 2), sb.Mixture(components=3, init="fresh")
    )
    assert not torch.equal(layer.posterior["q"].weight[0], layer.linear_map("q").weight)
    assert not torch.equal(layer.posterior["out"].weight[0], layer.out_proj.weight)


def test_a_conversion_that_fails_leaves_every_weight_as_it_was() -> None:
    from transformers.pytorch_utils import Conv1D

    net = nn.Sequential(nn.LayerNorm(4), Conv1D(3, 4))
    nn.init.normal_(net[0].weight)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError,
        match="a Conv1D has no reset_parameters to start components afresh; use init='copies'",
    ):
        sb.bayesianize(net, sb.ModelPatch(patch="norm+output", init="ones"))
    assert [type(m) for m in net] == [nn.LayerNorm, Conv1D]
    assert all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )


def test_regularised_training_separates_components_that_start_alike() -> None:
    net = sb.bayesianize(toy(), sb.ModelPatch(components=3, init="ones", tau=None))
    optimizer = torch.optim.SGD(sb.param_groups(net, weight_decay=0.01), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        sb.sample(net, torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    scales, _ = components(net.norm1)
    assert len(scales.unique(dim=0)) == 3


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["before", "after", "half"])
def test_probabilities_keep_their_precision_in_a_model_of_half_precision(
    cast: str,
) -> None:
    """0.995 is 0.9961 in bfloat16: a rate of 0.005 would become 0.0039."""
    torch.set_default_dtype(torch.float32)
    layer = nn.Linear(200, 200)
    if cast == "before":
        layer.bfloat16()
    sb.bayesianize(layer, sb.DropConnect(rate=0.005))
    layer = layer.half() if cast == "half" else layer.bfloat16()
    posterior = layer.posterior["weight"]
    assert (
        posterior.probs.dtype == torch.float32
        and posterior.probs.tolist() == torch.tensor([0.995, 0.005]).tolist()
    )
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
        dropped = sum(
            int(
                (
                    sb.sample(layer, torch.eye(200, dtype=layer.weight.dtype), draws=2)
                    == 0
                ).sum()
            )
            for _ in range(5)
        )
    assert abs(dropped - 2000) < 5 * math.sqrt(400_000 * 0.005)


def test_a_model_made_on_the_meta_device_can_be_given_memory() -> None:
    with torch.device("meta"):
        layer = dense(sb.Mixture(components=3))
    state = dense(sb.Mixture(components=3)).state_dict()
    layer.to_empty(device="cpu").load_state_dict(state)
    assert layer.posterior["weight"].probs.sum() == 1


def test_a_patched_model_of_half_precision_keeps_its_kl_in_single_precision() -> None:
    torch.set_default_dtype(torch.float32)
    net = patched(toy())
    exact = sb.kl(net)
    half = sb.kl(net.bfloat16())
    assert half.dtype == torch.float32 and abs(half / exact - 1) < 0.01
    assert (
        sb.sample(net.eval(), torch.randn(4, 3).bfloat16(), draws=4).dtype
        == torch.bfloat16
    )


# Where patches go -----------------------------------------------------------------------------------------------------


def converted(net: nn.Module) -> set[str]:
    return {name for name, m in net.named_modules() if isinstance(m, BayesLayer)}


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (None, {"norm1", "norm2"}),
        ("norm", {"norm1", "norm2"}),
        ("output", {"out"}),
        ("input", {"a"}),
        ("input+output", {"a", "out"}),
        ("norm+input+output", {"a", "norm1", "norm2", "out"}),
        ("output+norm", {"norm1", "norm2", "out"}),
        (r"norm\d", {"norm1", "norm2"}),
        ("norm1|b", {"norm1", "b"}),
    ],
)
def test_patch_picks_layers_by_role_or_by_name(
    patch: str | None, expected: set[str]
) -> None:
    net = sb.bayesianize(toy(), sb.ModelPatch(patch=patch))
    assert converted(net) == expected
    rows = {r.name: r for r in sb.summary(net).rows}
    assert set(rows) == {"a", "norm1", "b", "norm2", "out"}
    for name, row in rows.items():
        assert row.status == ("converted" if name in expected else "skipped")
        assert row.detail == (
            "ModelPatch(EMP, components=5)"
            if name in expected
            else "not among the layers that ModelPatch(EMP, components=5) is for"
        )


def test_include_and_mappings_pick_layers_without_a_patch() -> None:
    assert converted(sb.bayesianize(toy(), sb.ModelPatch(), include="a|norm2")) == {
        "a",
        "norm2",
    }
    assert converted(sb.bayesianize(toy(), sb.ModelPatch(), include=nn.Linear)) == {
        "a",
        "b",
        "out",
    }
    assert converted(
        sb.bayesianize(toy(), sb.ModelPatch(patch="norm"), exclude="norm1")
    ) == {"norm2"}
    assert converted(
        sb.bayesianize(toy(), sb.ModelPatch(patch="norm"), include="a|norm2")
    ) == {"norm2"}
    mapping = {
        "norm1": sb.ModelPatch(components=2),
        "norm2|out": sb.ModelPatch(components=3, cross=True),
        "b": sb.Rank1(members=2),
    }
    net = sb.bayesianize(toy(), mapping)
    assert converted(net) == {"norm1", "norm2", "out", "b"}
    details = {r.name: r.detail for r in sb.summary(net).rows}
    assert (
        details["norm1"] == "ModelPatch(EMP, components=2)"
        and details["out"] == "ModelPatch(ECMP, components=3)"
    )
    assert sb.sample(net, torch.randn(4, 3), draws=6).shape == (6, 4, 2)


def test_timms_models_name_their_output_layer() -> None:
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.body = nn.Linear(3, 4)

        def get_classifier(self) -> nn.Module:
            return self.head

    assert converted(sb.bayesianize(Timm(), sb.ModelPatch(patch="output"))) == {"head"}


def test_norms_without_scales_are_left_out_of_patch_norm() -> None:
    net = nn.Sequential(
        nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4), nn.BatchNorm1d(4)
    )
    assert converted(sb.bayesianize(net, sb.ModelPatch())) == {"2"}


@pytest.mark.parametrize(
    "config",
    [
        sb.ModelPatch(
            components=3, cross=True, probs=(0.5, 0.25, 0.25), init=0.2, tau=None
        ),
        sb.Mixture(components=2, zero=True, sigma=0.1),
        sb.DropConnect(rate=0.3),
        sb.MCDropout(rate=0.2, before="norm"),
        sb.Ensemble(members=3),
    ],
)
def test_configs_survive_json(config: sb.Config) -> None:
    import json

    again = sb.config_from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [sb.ModelPatch, sb.Mixture])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"components": 0}, "components must be a whole number of at least 1, got 0"),
        ({"components": 2.0}, "components must be a whole number"),
        ({"components": True}, "components must be a whole number"),
        ({"components": 2, "probs": (0.5, 0.6)}, "whose sum is 1.1"),
        ({"components": 3, "probs": (0.5, 0.5)}, "probs must be 3 numbers"),
        ({"components": 2, "probs": (1.5, -0.5)}, "none negative"),
        ({"components": 2, "probs": (math.nan, 1.0)}, "probs must be 2 numbers"),
        (
            {"components": 2, "probs": (1.0, 0.0), "learn_probs": True},
            "starts at zero cannot be learned",
        ),
        ({"draws": "row"}, "unknown draws 'row'"),
        ({"init": "copy"}, "unknown init 'copy'"),
        ({"jitter": -0.1}, "jitter must not be negative"),
        ({"tau": -1.0}, "tau is a precision"),
        ({"rho": -1.0}, "rho is a precision"),
        ({"tau": None, "rho": 1.0}, "rho=1.0 without tau"),
    ],
)
def test_impossible_values_are_refused_with_what_was_got(
    config: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(
        ValueError, match="(?s)" + config.__name__ + ".*" + words.replace(".", r"\.")
    ):
        config(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"assignment": "weight"}, "unknown assignment"),
        ({"components": 1, "zero": True}, "at least 2"),
        ({"assignment": "input"}, "assignment='input' is dropout's"),
        (
            {"assignment": "input", "components": 3, "zero": True},
            "components=2 and zero=True",
        ),
        ({"assignment": "model", "learn_probs": True}, "assignment='model'"),
        ({"assignment": "model", "draws": "example"}, "assignment='model'"),
        ({"assignment": "model", "zero": True}, "assignment='model'"),
        ({"components": 2, "zero": True, "probs": (0.0, 1.0)}, "probability one"),
        ({"sigma": -0.1}, "sigma must not be negative"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sb.Mixture(**options)


def test_unequal_members_are_refused_since_samples_hold_each_once() -> None:
    with pytest.raises(ValueError, match="probs"):
        sb.Mixture(components=2, assignment="model", probs=(0.9, 0.1))


@pytest.mark.parametrize(
    ("build", "patch", "words"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 2)),
            None,
            ["norm layers with scales", "of type Linear"],
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False)),
            "norm",
            ["norm layers with scales", "found none"],
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(2)),
            "output",
            ["an output layer", "dense", "BatchNorm1d"],
        ),
        (lambda: nn.Sequential(nn.BatchNorm1d(2)), "norm+input", ["an input layer"]),
        (lambda: toy(), "conv.*", ["whole name matches 'conv.*'", "norm1"]),
        (lambda: toy(), "norm + output", ["whole name matches 'norm + output'"]),
    ],
)
def test_a_patch_that_finds_nothing_says_what_it_looked_for(
    build: Any, patch: str | None, words: list[str]
) -> None:
    net = build()
    before = [type(m) for m in net.modules()]
    with pytest.raises(ValueError) as error:
        sb.bayesianize(net, sb.ModelPatch(patch=patch))
    assert all(word in str(error.value) for word in [*words, "ModelPatch(patch="])
    assert [type(m) for m in net.modules()] == before


def test_a_patch_that_is_no_regular_expression_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError,
        match=r"patch='norm\(' is neither norm, output, input nor a regular expression",
    ):
        sb.ModelPatch(patch="norm(")


@pytest.mark.parametrize("config", [sb.ModelPatch(), sb.Mixture()])
def test_a_norm_without_scale_cannot_be_patched_by_name(config: sb.Config) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    reason = "it has no scale or bias to put components on (affine=False)"
    with pytest.raises(ValueError, match=rf"1 \(BatchNorm1d\): {re.escape(reason)}"):
        sb.bayesianize(net, config, include=".*", strict=True)
    assert type(net[0]) is nn.Linear and type(net[1]) is nn.BatchNorm1d
    sb.bayesianize(net, config, include=".*")
    assert type(net[0]) is not nn.Linear and type(net[1]) is nn.BatchNorm1d
    assert {row.name: row.detail for row in sb.summary(net).rows}["1"] == reason


# Inputs without rows --------------------------------------------------------------------------------------------------


class Token(nn.Module):
    """A layer on a learned token that is the same for all rows: it has one row, which stands for all."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 4)), layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.token)


@pytest.mark.parametrize(
    ("config", "build"),
    each(
        [
            sb.Mixture(components=3, jitter=1.0),
            sb.Mixture(components=3, assignment="element", jitter=1.0),
            sb.Mixture(components=3, assignment="model", jitter=1.0),
        ],
        [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4)],
    ),
)
def test_an_input_of_one_row_meets_every_draw(build: Any, config: sb.Config) -> None:
    net = sb.bayesianize(Token(build()), config, include="layer")
    y = sb.sample(net, torch.zeros(2, 4), draws=9).detach()
    assert torch.equal(y[:, 0], y[:, 1])
    assert len(y[:, 0].round(decimals=9).unique(dim=0)) > 1


def test_a_recurrent_network_mixes_matrix_by_matrix() -> None:
    """Each matrix of an LSTM is a site of its own; its second bias is not mixed. Against torch's LSTM with the picked
    weights."""
    net = imdb_lstm(vocabulary=9, embedding=3, units=2).double()
    for p in net.parameters():
        nn.init.normal_(p.data, 0, 0.5)
    sb.bayesianize(net, sb.Mixture(components=2, jitter=1.0), include="lstm")
    ids = torch.randint(9, (3, 5))
    with torch.no_grad():
        y = sb.sample(net, ids, draws=6)
        z = [
            net.lstm.posterior[f"weight_{kind}_l0"].values().weight
            for kind in ("ih", "hh")
        ]
        for j in range(6):
            plain = sb.debayesianize(copy.deepcopy(net))
            plain.lstm.weight_ih_l0.copy_(
                components(net.lstm, "weight_ih_l0")[0][z[0][j]]
            )
            plain.lstm.bias_ih_l0.copy_(
                components(net.lstm, "weight_ih_l0")[1][z[0][j]]
            )
            plain.lstm.weight_hh_l0.copy_(
                components(net.lstm, "weight_hh_l0")[0][z[1][j]]
            )
            torch.testing.assert_close(y[j], plain(ids))
    assert len({(int(a), int(b)) for a, b in zip(*z)}) > 1
