"""Any two methods go together in one model, by name pattern: draws, members, KL, checkpoints and the way back."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import first_met, marked
from torch import Tensor, nn

import slimbayes as sb

pytestmark = pytest.mark.usefixtures("last_draws")

METHODS: dict[str, sb.Config] = {
    "rank1": sb.Rank1(members=2),
    "rank1-member": sb.Rank1(members=3, draws="member"),
    "batch-ensemble": sb.BatchEnsemble(members=2),
    "mean-field": sb.MeanField(scale_init=0.1),
    "k-tied": sb.KTied(rank=1, estimator="flipout", scale_init=0.1),
    "emp": sb.ModelPatch(components=3, jitter=0.5),
    "ecmp": sb.ModelPatch(components=3, cross=True, jitter=0.5, draws="example"),
    "dropout": sb.MCDropout(rate=0.3),
    "drop-connect": sb.DropConnect(rate=0.3),
    "ensemble": sb.Ensemble(members=2, init="copies", jitter=0.5),
}


class Net(nn.Module):
    """A residual block with a norm: two places for two methods, and a norm that may belong to either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + torch.relu(self.norm(self.a(x))))


# Each two once, every other time the other way round.
MET = list(itertools.combinations_with_replacement(METHODS, 2))
MET = [pair if place % 2 else pair[::-1] for place, pair in enumerate(MET)]
PAIRS = marked(MET, first_met(MET))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_methods_share_one_model(first: str, second: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, x = Net().eval(), torch.randn(5, 4)
    configs: dict[str, Any] = {
        "a": METHODS[first],
        "b": METHODS[second],
        "norm": sb.ModelPatch(components=2, jitter=0.5),
    }
    net = sb.bayesianize(copy.deepcopy(plain), configs)
    k = math.lcm(METHODS[first].members, METHODS[second].members)
    assert sb.members(net) == k and sb.sample(net, x, draws=2 * k).shape == (
        2 * k,
        5,
        3,
    )
    assert net(x).shape == (5, 3) and net(x[:3]).shape == (3, 3)
    apart = sum(
        float(sb.kl(getattr(net, name)).detach()) for name in ("a", "b", "norm")
    )
    assert float(sb.kl(net).detach()) == pytest.approx(apart, rel=1e-5)
    (sb.sample(net, x).square().mean() + sb.kl(net)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    with sb.fixed_draws(net, 2 * k):
        torch.testing.assert_close(
            sb.sample(net, x)[:, :2], sb.sample(net, x[:2]), rtol=1e-4, atol=1e-5
        )
    again = sb.load(copy.deepcopy(plain), sb.save(net, tmp_path / "posterior"))
    torch.manual_seed(1)
    expected = sb.predict(net, x, draws=3 * k).samples
    torch.manual_seed(1)
    assert torch.equal(sb.predict(again, x, draws=3 * k).samples, expected)
    assert [r.status for r in sb.summary(again).rows] == ["converted"] * 3
    sb.debayesianize(net)
    assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ensemble", "batch-ensemble"),
        ("batch-ensemble", "ensemble"),
        ("ensemble", "ensemble"),
    ],
)
def test_members_of_different_methods_are_matched_row_by_row(
    first: str, second: str
) -> None:
    """In a bare call a row that the first layer gives to member k must meet member k in the second."""
    net = sb.bayesianize(Net().eval(), {"a": METHODS[first], "b": METHODS[second]})
    x = torch.randn(7, 4)
    together = sb.sample(net, x)
    for _ in range(10):
        bare = net(x)
        nearest = (together - bare).abs().amax(-1).amin(0)
        assert nearest.max() < 1e-5


def test_the_kl_of_many_patched_layers_is_the_sum_of_their_own() -> None:
    net = nn.Sequential(
        *(
            m
            for _ in range(4)
            for m in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
        )
    )
    configs = {
        "[0-4]": sb.ModelPatch(components=3, jitter=0.5, tau=2.0, rho=0.5),
        "[5-7]": sb.ModelPatch(
            components=3, jitter=0.5, cross=True, probs=(0.2, 0.3, 0.5)
        ),
        "8|10": sb.ModelPatch(components=2, jitter=0.5, learn_probs=True),
        "9": sb.DropConnect(rate=0.2, tau=1.0),
        "11": sb.ModelPatch(components=1),
    }
    sb.bayesianize(net, configs)
    for name, parameter in net.named_parameters():
        if name.endswith("logits"):
            nn.init.normal_(parameter)
    apart = sum(
        float(p.kl().detach()) for layer in net for site, p in layer.posterior.items()
    )
    assert float(sb.kl(net).detach()) == pytest.approx(apart, rel=1e-5)
