"""predict(draws="exact") against networks that are built by hand from their components, and what it refuses."""

import copy
import itertools

import pytest
import torch
from torch import nn

import slimbayes as sb


def patched(components: int = 3, probs=None, **options) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    net(torch.randn(50, 4))
    config = sb.ModelPatch(
        components=components, patch="norm+output", jitter=0.8, probs=probs, **options
    )
    return sb.bayesianize(net, config).eval()


def by_hand(net: nn.Module, x: torch.Tensor, picks: dict[int, int]) -> torch.Tensor:
    """The plain network with a component of each patched layer written into it."""
    plain = sb.debayesianize(copy.deepcopy(net)).eval()
    for layer, k in picks.items():
        posterior = net[layer].posterior["weight"]
        if k:
            plain[layer].weight.data.copy_(posterior.weight[k - 1])
            plain[layer].bias.data.copy_(posterior.bias[k - 1])
    return plain(x).detach()


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("probs", [None, (0.5, 0.3, 0.2)])
def test_it_is_the_average_over_all_networks_built_by_hand(probs, learn):
    net, x = patched(probs=probs, learn_probs=learn), torch.randn(7, 4)
    p = probs or (1 / 3,) * 3
    expected = sum(
        p[i] * p[j] * by_hand(net, x, {1: i, 3: j}).softmax(-1)
        for i, j in itertools.product(range(3), repeat=2)
    )
    found = sb.predict(net, x, draws="exact")
    torch.testing.assert_close(found.probs, expected)
    assert found.count == 9
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    for chunk in (9, 14):  # some networks at a time
        torch.testing.assert_close(
            sb.predict(net, x, draws="exact", chunk=chunk).probs, expected
        )


def test_many_draws_come_near_it_and_it_needs_no_seed():
    net, x = patched(probs=(0.6, 0.3, 0.1)), torch.randn(7, 4)
    exact = sb.predict(net, x, draws="exact")
    drawn = sb.predict(net, x, draws=20_000, seed=0)
    torch.testing.assert_close(exact.probs, drawn.probs, atol=0.01, rtol=0)
    torch.testing.assert_close(exact.epistemic, drawn.epistemic, atol=0.01, rtol=0)
    assert torch.equal(exact.probs, sb.predict(net, x, draws="exact").probs)


def test_components_that_are_never_picked_do_not_count():
    net, x = patched(probs=(0.0, 0.4, 0.6)), torch.randn(7, 4)
    found = sb.predict(net, x, draws="exact")
    assert found.count == 4
    torch.testing.assert_close(
        found.probs, sb.predict(net, x, draws=20_000, seed=0).probs, atol=0.01, rtol=0
    )


def test_picks_of_elements_and_members_are_counted_too():
    x = torch.randn(6, 2)
    torch.manual_seed(0)
    dropped = sb.bayesianize(nn.Linear(2, 1), sb.DropConnect(rate=0.25))
    weight, bias = dropped.weight.detach().squeeze(0) / 0.75, dropped.bias.detach()
    masks = [(a, b) for a in (0.0, 1.0) for b in (0.0, 1.0)]
    outputs = torch.stack([x @ (weight * torch.tensor(m)) + bias for m in masks])
    shares = torch.tensor([0.25 ** (2 - sum(m)) * 0.75 ** sum(m) for m in masks])
    found = sb.predict(dropped, x, draws="exact", likelihood="gaussian")
    mean = (shares[:, None] * outputs).sum(0)
    torch.testing.assert_close(found.mean.squeeze(-1), mean)
    variance = (shares[:, None] * (outputs - mean) ** 2).sum(0)
    torch.testing.assert_close(found.epistemic.squeeze(-1), variance)

    ensemble = sb.bayesianize(nn.Linear(2, 3), sb.Ensemble(members=4))
    torch.testing.assert_close(
        sb.predict(ensemble, x, draws="exact").probs, sb.predict(ensemble, x).probs
    )


def test_too_many_networks_and_draws_that_cannot_be_counted_are_refused():
    x = torch.randn(6, 4)
    layers = [module for _ in range(8) for module in (nn.Linear(4, 4), nn.LayerNorm(4))]
    deep = sb.bayesianize(nn.Sequential(*layers), sb.ModelPatch(components=5))
    with pytest.raises(
        ValueError, match=r"would run 390,625 networks, and runs 4,096 at most"
    ):
        sb.predict(deep, x, draws="exact")
    crossed = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 40), nn.LayerNorm(40)), sb.ModelPatch(cross=True)
    )
    with pytest.raises(ValueError, match=r"would run 10\^56 networks"):
        sb.predict(crossed, x, draws="exact")
    with pytest.raises(ValueError, match="are no picks from given components"):
        sb.predict(sb.bayesianize(nn.Linear(4, 3), sb.MeanField()), x, draws="exact")
    with pytest.raises(ValueError, match="are no picks from given components"):
        sb.predict(
            sb.bayesianize(
                nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), sb.MCDropout()
            ),
            x,
            draws="exact",
        )
    net = patched()
    with sb.fixed_draws(net), pytest.raises(ValueError, match="inside `fixed_draws`"):
        sb.predict(net, x, draws="exact")
    with pytest.raises(ValueError, match="at least one draw.* or 'exact'"):
        sb.predict(net, x, draws="all")
