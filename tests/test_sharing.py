"""Draws that share work at prediction, and stacking weights: the same numbers as without, from less work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slimbayes.sharing import shared
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models
from slimbayes.engine.passes import posteriors_of

pytestmark = pytest.mark.usefixtures("last_draws")


class Residual(nn.Module):
    """A shortcut from before the first norm, a module used twice, and a branch that nothing random reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1, self.conv = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
        self.bn2, self.side = nn.BatchNorm2d(6), nn.Conv2d(3, 6, 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.conv(torch.relu(self.bn1(y)))
        y = y + self.conv(torch.relu(self.bn2(y))) + self.side(x)
        return self.fc(y.mean((2, 3)))


METHODS: dict[str, Any] = {
    "emp": sb.ModelPatch(components=2, jitter=0.5),
    "emp-output": sb.ModelPatch(components=2, jitter=0.5, patch="norm+output"),
    "emp-learned": sb.ModelPatch(components=2, jitter=0.5, learn_probs=True),
    "emp-example": sb.ModelPatch(components=2, jitter=0.5, draws="example"),
    "ecmp": sb.ModelPatch(components=2, jitter=0.5, cross=True),
    "last-layer": {"fc": sb.Rank1(members=2)},
    "batch-ensemble": {"bn2|fc": sb.BatchEnsemble(members=2)},
    "mean-field": sb.MeanField(scale_init=0.1),
    "dropout": sb.MCDropout(before="bn2", rate=0.3),
    "ensemble-layer": {"bn2": sb.Ensemble(members=2, init="copies", jitter=0.5), "fc": sb.ModelPatch(components=2, jitter=0.5)},
    "mix": {"bn.*": sb.ModelPatch(components=2, jitter=0.5), "fc": sb.DropConnect(rate=0.3)},
}


def _counted(model: nn.Module, name: str) -> list[int]:
    """Rows that one layer's kernel really sees, call by call."""
    seen: list[int] = []
    layer: Any = model.get_submodule(name)
    plain = layer._conv_forward
    layer._conv_forward = lambda x, *rest: (seen.append(len(x)), plain(x, *rest))[1]
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_shared_passes_give_the_same_outputs(method: str) -> None:
    torch.manual_seed(0)
    model, x = sb.bayesianize(Residual().eval(), METHODS[method]), torch.randn(5, 3, 6, 6)
    torch.manual_seed(1)
    expected = sb.sample(model, x, draws=12)
    torch.manual_seed(1)
    with torch.no_grad(), shared(model, 0):
        torch.testing.assert_close(sb.sample(model, x, draws=12), expected, rtol=1e-5, atol=1e-6)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if m is not model)


def test_modules_run_once_for_each_prefix_that_draws_agree_on() -> None:
    model, x = sb.bayesianize(Residual().eval(), METHODS["emp"]), torch.randn(5, 3, 6, 6)
    stem, conv = _counted(model, "stem"), _counted(model, "conv")
    torch.manual_seed(0)
    with torch.no_grad(), shared(model, 0):
        sb.sample(model, x, draws=16)
    assert stem == [5]  # nothing drawn yet: once
    assert conv == [2 * 5, 4 * 5]  # two components of the first norm, then two times two


def test_sharing_ends_where_draws_are_real_numbers_or_mostly_differ() -> None:
    x = torch.randn(5, 3, 6, 6)
    for config, expected in ((METHODS["ecmp"], [80, 80]), (sb.ModelPatch(components=16, jitter=0.5), [80, 80]), (METHODS["last-layer"], [5, 5])):
        model = sb.bayesianize(Residual().eval(), config)
        conv = _counted(model, "conv")
        torch.manual_seed(3)
        with torch.no_grad(), shared(model, 0):
            sb.sample(model, x, draws=16 // sb.members(model))
        assert conv == expected


def test_where_the_first_pass_shares_nothing_no_hooks_stay() -> None:
    model = sb.bayesianize(models.regression_net(6).eval(), sb.ModelPatch(cross=True, init="uniform"))
    x = torch.randn(4, 6)
    with torch.no_grad(), shared(model, 0):
        sb.sample(model, x, draws=8)
        assert model.dense1._forward_pre_hooks
        sb.sample(model, x, draws=8)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if m is not model)


def test_a_dimension_that_only_looks_like_the_batch_is_left_alone() -> None:
    class Transposed(nn.Module):
        """Its Linear sees (features, rows): as many features as folded rows."""

        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.mix(x.t()).t())

    model, x = sb.bayesianize(Transposed().eval(), sb.ModelPatch(components=2, jitter=0.5)), torch.randn(3, 12)
    torch.manual_seed(0)
    expected = sb.sample(model, x, draws=4)
    torch.manual_seed(0)
    with torch.no_grad(), shared(model, 0):
        torch.testing.assert_close(sb.sample(model, x, draws=4), expected)


def _enumerated(net: nn.Module, x: Tensor) -> Tensor:
    """Outputs of all 25 networks that two norms with five components make, from plain copies."""
    sites = [(layer, layer.posterior["weight"]) for layer in (net.norm1, net.norm2)]
    outputs = []
    plain = models.regression_net(x.shape[1]).eval()
    for i in range(5):
        for j in range(5):
            own = {n: t for n, t in net.state_dict().items() if "posterior" not in n}
            for (_, p), k, name in zip(sites, (i, j), ("norm1", "norm2"), strict=True):
                if k:
                    own |= {f"{name}.weight": p.weight[k - 1], f"{name}.bias": p.bias[k - 1]}
            plain.load_state_dict(own)
            outputs.append(plain(x))
    return torch.stack(outputs).detach()


def test_ten_thousand_draws_of_25_networks_run_25() -> None:
    torch.manual_seed(0)
    net = sb.bayesianize(models.regression_net(6).eval(), sb.ModelPatch(init="uniform"))
    x = torch.randn(7, 6)
    rows: list[int] = []
    net.dense1.register_forward_hook(lambda layer, args, out: rows.append(len(out)))
    pred = sb.predict(net, x, draws=10_000, likelihood="gaussian", scale=0.3)
    assert sum(rows) <= 25 * 7
    every = _enumerated(net, x)
    distance = torch.cdist(pred.samples.flatten(1), every.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    assert distance.amin(1).max() < 1e-4  # each draw is one of the 25
    counts = distance.argmin(1).bincount(minlength=25)
    assert ((counts - 400.0).square() / 400.0).sum() < 60  # chi-square with 24 degrees of freedom
    torch.testing.assert_close(pred.mean, every.mean(0), rtol=0.05, atol=0.02)
    loose = sb.predict(net, x, draws=10_000, likelihood="gaussian", scale=0.3, keep_samples=False, chunk=40)
    torch.testing.assert_close(loose.epistemic, pred.epistemic, rtol=0.1, atol=1e-3)


def test_predict_without_sharing_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = sb.bayesianize(Residual(), METHODS["ecmp"]), torch.randn(5, 3, 6, 6)
    torch.manual_seed(0)
    first = sb.predict(model, x, draws=6)
    torch.manual_seed(0)
    torch.testing.assert_close(sb.predict(model, x, draws=6, share=False).samples, first.samples, rtol=1e-5, atol=1e-6)


def test_default_chunk_cuts_draws_but_never_the_batch() -> None:
    model = sb.bayesianize(nn.Linear(2**12, 2), sb.MeanField())
    rows: list[int] = []
    model.register_forward_hook(lambda layer, args, out: rows.append(len(out)))
    sb.predict(model, torch.zeros(2**9, 2**12), draws=9, keep_samples=False)
    assert rows == [4 * 2**9, 4 * 2**9, 2**9]  # 2^23 numbers are four repetitions of 2^21
    rows.clear()
    sb.predict(model, torch.zeros(2**9, 2**12), draws=9, chunk=2**9)
    assert rows == [2**9] * 9


def _blobs(n: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(2, (n,))
    return torch.randn(n, 2) + 2.0 * y.unsqueeze(1), y


def test_stacking_an_ensemble_prefers_the_good_member_and_predict_follows(tmp_path: Any) -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(2, 2) for _ in range(3)]
    with torch.no_grad():  # one useful member, two that have classes swapped
        for net, sign in zip(nets, (1.0, -1.0, -1.0), strict=True):
            net.weight.copy_(sign * torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
            net.bias.copy_(sign * torch.tensor([2.0, -2.0]))
    model = sb.ensemble(nets)
    x, y = _blobs(200)
    before = sb.predict(model, x).log_prob(y).mean()
    weights = sb.stack(model, x, y)[""]
    assert weights[0] > 0.8 and weights.sum().item() == pytest.approx(1.0)
    pred = sb.predict(model, x)
    assert pred.log_prob(y).mean() > before
    torch.testing.assert_close(pred.probs, torch.einsum("k,knc->nc", weights, pred.member_probs))
    again = sb.load(nn.Linear(2, 2), sb.save(model, tmp_path / "p", base=True))
    torch.testing.assert_close(sb.predict(again, x).probs, pred.probs)
    assert sb.predict(model, iter(x.split(50))).weights is not None


@pytest.mark.parametrize("learn", [False, True])
def test_stacking_patched_layers_moves_probability_to_good_components(learn: bool) -> None:
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.LayerNorm(2, eps=10.0), nn.Linear(2, 2)), sb.ModelPatch(components=2, patch="norm+output", jitter=0.0, learn_probs=learn)
    ).eval()
    _, output = posteriors_of(model)
    x = torch.randn(400, 2)
    y = (x[:, 0] > x[:, 1]).long()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-5.0, 5.0], [5.0, -5.0]]))
        model[1].bias.zero_()
        output.weight.copy_(-model[1].weight[None])  # the second component has the classes swapped
        output.bias.zero_()
    uniform = sb.predict(model, x, draws=400).log_prob(y).mean()
    found = sb.stack(model, x, y, draws=64)
    assert found["1.weight"][0] > 0.9 and abs(found["0.weight"][0] - 0.5) < 0.1  # the norm's components are equal
    torch.testing.assert_close(output.probabilities(), found["1.weight"])
    assert sb.predict(model, x, draws=400).log_prob(y).mean() > uniform + 0.1


@pytest.mark.parametrize("config", [sb.Rank1(members=2), sb.ModelPatch(cross=True, patch="output"), sb.Deterministic()])
def test_stacking_refuses_what_it_cannot_reweight(config: sb.Config) -> None:
    model: Callable[..., Any] = sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), config)
    with pytest.raises(ValueError, match="stack is for an Ensemble"):
        sb.stack(model, *_blobs(5))


def test_a_plain_model_has_the_same_prediction_in_every_draw() -> None:
    model = sb.bayesianize(nn.Linear(2, 2), sb.Deterministic())
    pred = sb.predict(model, torch.randn(3, 2), draws=4)
    assert pred.samples.shape == (4, 3, 2) and pred.epistemic.abs().max() < 1e-6


def test_windows_of_one_row_stay_together_where_rows_do_not_divide_evenly() -> None:
    """3 rows of 2 windows under 2 held draws: rows 0 and 1 belong to the first draw, row 2 to the second, with all their windows."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    for config in (sb.Mixture(components=2, assignment="model", jitter=1.0), sb.ModelPatch(components=2, patch="fc", jitter=1.0)):
        net = sb.bayesianize(Windows(), config)
        x = torch.randn(1, 1, 3).expand(3, 2, 3)  # all windows alike: outputs differ by their draw alone
        with sb.frozen(net, draws=2 // sb.members(net)):
            y = net(x)
        assert torch.equal(y[:, 0], y[:, 1])
        torch.testing.assert_close(y[0], y[1])
