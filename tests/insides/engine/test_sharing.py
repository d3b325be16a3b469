"""Draws that share work at prediction, and stacking weights: the same numbers as without, from less work."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slimbayes_lab import models
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of


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
    "ensemble-layer": {
        "bn2": sb.Ensemble(members=2, init="copies", jitter=0.5),
        "fc": sb.ModelPatch(components=2, jitter=0.5),
    },
    "mix": {
        "bn.*": sb.ModelPatch(components=2, jitter=0.5),
        "fc": sb.DropConnect(rate=0.3),
    },
}


def _counted(model: nn.Module, name: str) -> list[int]:
    """Rows that one layer's kernel really sees, call by call."""
    seen: list[int] = []
    layer: Any = model.get_submodule(name)
    plain = layer._conv_forward
    layer._conv_forward = lambda x, *rest: (seen.append(len(x)), plain(x, *rest))[1]
    return seen


def _hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    )


def _both(model: nn.Module, x: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Predictions of the same draws with and without sharing."""
    out = []
    for share in (True, False):
        torch.manual_seed(1)
        out.append(
            sb.predict(model, x, draws=draws * sb.members(model), share=share).samples
        )
    return out[0], out[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_shared_passes_give_the_same_outputs(method: str) -> None:
    torch.manual_seed(0)
    model, x = (
        sb.bayesianize(Residual().eval(), METHODS[method]),
        torch.randn(5, 3, 6, 6),
    )
    shared, apart = _both(model, x, 12)
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-6)
    assert len(shared.flatten(1).unique(dim=0)) > 1  # draws differ at all
    assert _hooks(model) == 0


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # Every draw picks one of four networks: each runs once, and the stem once for all.
        ("emp", {"stem": [5], "side": [20], "conv": [20, 20]}),
        # Draws are real numbers from the first norm on: the stem is all they share.
        ("ecmp", {"stem": [5], "side": [80], "conv": [80, 80]}),
        # Only the last layer draws. A module that runs twice in a forward is not shared.
        ("last-layer", {"stem": [5], "side": [5], "conv": [80, 80]}),
        # The first layer draws: nothing comes before.
        ("mean-field", {"stem": [], "side": [], "conv": []}),
    ],
)
def test_modules_run_once_where_no_draw_has_been_used(
    method: str, expected: dict[str, list[int]]
) -> None:
    model, x = (
        sb.bayesianize(Residual().eval(), METHODS[method]),
        torch.randn(5, 3, 6, 6),
    )
    draws = 16
    plain = [
        name for name in expected if not hasattr(model.get_submodule(name), "posterior")
    ]
    sb.predict(model, x, draws=draws, share=False)  # locates rows
    seen = {name: _counted(model, name) for name in plain}
    torch.manual_seed(0)
    sb.predict(model, x, draws=draws)
    assert seen == {name: expected[name] for name in plain}
    for rows in seen.values():
        rows.clear()
    sb.predict(model, x, draws=draws, share=False)
    assert all(set(rows) == {80} for rows in seen.values())
    for rows in seen.values():
        rows.clear()
    with torch.no_grad():
        sb.sample(model, x, draws=draws)  # sharing is predict's alone
    assert all(set(rows) == {80} for rows in seen.values())


class Noisy(nn.Module):
    """A body with noise of the user's own, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.fc = (
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(F.dropout(self.body(x), 0.5, training=True)))


class NoisyBody(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.dropout(input, 0.5, training=True))


def test_modules_with_noise_of_their_own_are_not_shared() -> None:
    model = sb.bayesianize(
        nn.Sequential(NoisyBody(6, 8), nn.Linear(8, 3)),
        {"1": sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0))},
    )
    samples = sb.predict(model, torch.randn(7, 6), draws=8).samples
    assert (
        len(samples.flatten(1).unique(dim=0)) == 8
    )  # members are alike: only the noise tells draws apart


def test_draws_that_picked_alike_keep_the_users_own_noise() -> None:
    model = sb.bayesianize(Noisy(), sb.ModelPatch(components=2, jitter=0.5))
    samples = sb.predict(model, torch.randn(7, 6), draws=12).samples
    assert len(samples.flatten(1).unique(dim=0)) == 12


def test_hooks_and_training_flags_are_put_back_whatever_happens() -> None:
    model, x = (
        sb.bayesianize(Residual(), METHODS["last-layer"]),
        torch.randn(5, 3, 6, 6),
    )
    model.conv.eval()
    flags = [m.training for m in model.modules()]
    sb.predict(model, x, draws=8)
    assert _hooks(model) == 0 and [m.training for m in model.modules()] == flags
    handle = model.side.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sb.predict(model, x, draws=8)
    handle.remove()
    assert _hooks(model) == 0 and [m.training for m in model.modules()] == flags
    shared, apart = _both(model, x, 4)
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-6)


def test_threads_share_apart() -> None:
    model = sb.bayesianize(Residual(), {"fc": sb.BatchEnsemble(members=2)})
    batches = [torch.randn(n, 3, 6, 6) for n in (3, 5, 7, 4)]
    expected = [sb.predict(model, x, draws=4, share=False).samples for x in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda x: sb.predict(model, x, draws=4).samples, batches * 4)
        )
    for samples, alone in zip(found, expected * 4, strict=True):
        torch.testing.assert_close(samples, alone, rtol=1e-5, atol=1e-6)
    assert _hooks(model) == 0 and model.training


def test_a_dimension_that_only_looks_like_the_batch_is_left_alone() -> None:
    class Transposed(nn.Module):
        """Its Linear sees (features, rows): as many features as folded rows."""

        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(3, 3), nn.LayerNorm(12)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.cat([self.mix(part.t()).t() for part in x.split(3)]))

    model, x = (
        sb.bayesianize(Transposed().eval(), sb.ModelPatch(components=2, jitter=0.5)),
        torch.randn(3, 12),
    )
    shared, apart = _both(model, x, 4)
    torch.testing.assert_close(shared, apart)


def test_where_draws_run_one_by_one_nothing_is_shared() -> None:
    """A Linear over (features, rows) mixes rows, so draws cannot share a forward; predictions are right."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(3, 3), nn.LayerNorm(12)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.mix(x.t()).t())

    model, x = (
        sb.bayesianize(Mixing().eval(), sb.ModelPatch(components=2, jitter=0.5)),
        torch.randn(3, 12),
    )
    with pytest.warns(UserWarning, match="draw by draw"):
        shared, apart = _both(model, x, 4)
    torch.testing.assert_close(shared, apart)


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
                    own |= {
                        f"{name}.weight": p.weight[k - 1],
                        f"{name}.bias": p.bias[k - 1],
                    }
            plain.load_state_dict(own)
            outputs.append(plain(x))
    return torch.stack(outputs).detach()


def test_ten_thousand_draws_of_25_networks_run_25() -> None:
    torch.manual_seed(0)
    net = sb.bayesianize(models.regression_net(6).eval(), sb.ModelPatch(init="uniform"))
    x = torch.randn(7, 6)
    rows: list[int] = []
    sb.sample(net, x, draws=25)  # locates rows
    net.dense1.register_forward_hook(lambda layer, args, out: rows.append(len(out)))
    pred = sb.predict(net, x, draws=10_000, likelihood="gaussian", likelihood_std=0.3)
    assert sum(rows) <= 25 * 7
    every = _enumerated(net, x)
    distance = torch.cdist(
        pred.samples.flatten(1),
        every.flatten(1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    assert distance.amin(1).max() < 1e-4  # each draw is one of the 25
    counts = distance.argmin(1).bincount(minlength=25)
    assert (
        (counts - 400.0).square() / 400.0
    ).sum() < 60  # chi-square with 24 degrees of freedom
    torch.testing.assert_close(pred.mean, every.mean(0), rtol=0.05, atol=0.02)
    loose = sb.predict(
        net,
        x,
        draws=10_000,
        likelihood="gaussian",
        likelihood_std=0.3,
        keep_samples=False,
        chunk=40,
    )
    torch.testing.assert_close(loose.epistemic, pred.epistemic, rtol=0.1, atol=1e-3)


def test_predict_without_sharing_agrees() -> None:
    model, x = sb.bayesianize(Residual(), METHODS["ecmp"]), torch.randn(5, 3, 6, 6)
    torch.manual_seed(0)
    first = sb.predict(model, x, draws=6)
    torch.manual_seed(0)
    torch.testing.assert_close(
        sb.predict(model, x, draws=6, share=False).samples,
        first.samples,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_default_chunk_cuts_draws_but_never_the_batch() -> None:
    model = sb.bayesianize(nn.Linear(2**12, 2), sb.MeanField())
    rows: list[int] = []
    sb.predict(model, torch.zeros(2**9, 2**12), draws=9)  # locates rows
    model.register_forward_hook(lambda layer, args, out: rows.append(len(out)))
    sb.predict(model, torch.zeros(2**9, 2**12), draws=9, keep_samples=False)
    assert rows == [
        4 * 2**9,
        4 * 2**9,
        2**9,
    ]  # 2^23 numbers are four repetitions of 2^21
    rows.clear()
    sb.predict(model, torch.zeros(2**9, 2**12), draws=9, chunk=2**9)
    assert rows == [2**9] * 9


def _blobs(n: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(2, (n,))
    return torch.randn(n, 2) + 2.0 * y.unsqueeze(1), y


def test_stacking_an_ensemble_prefers_the_good_member_and_predict_follows(
    tmp_path: Any,
) -> None:
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
    torch.testing.assert_close(
        pred.probs, torch.einsum("k,knc->nc", weights, pred.member_probs)
    )
    again = sb.load(nn.Linear(2, 2), sb.save(model, tmp_path / "p", base=True))
    torch.testing.assert_close(sb.predict(again, x).probs, pred.probs)
    assert sb.predict(model, iter(x.split(50))).weights is not None


@pytest.mark.parametrize("learn", [False, True])
def test_stacking_patched_layers_moves_probability_to_good_components(
    learn: bool,
) -> None:
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.LayerNorm(2, eps=10.0), nn.Linear(2, 2)),
        sb.ModelPatch(components=2, patch="norm+output", jitter=0.0, learn_probs=learn),
    ).eval()
    _, output = posteriors_of(model)
    x = torch.randn(400, 2)
    y = (x[:, 0] > x[:, 1]).long()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-5.0, 5.0], [5.0, -5.0]]))
        model[1].bias.zero_()
        output.weight.copy_(
            -model[1].weight[None]
        )  # the second component has the classes swapped
        output.bias.zero_()
    uniform = sb.predict(model, x, draws=400).log_prob(y).mean()
    found = sb.stack(model, x, y, draws=64)
    assert (
        found["1.weight"][0] > 0.9 and abs(found["0.weight"][0] - 0.5) < 0.1
    )  # the norm's components are equal
    torch.testing.assert_close(output.probabilities(), found["1.weight"])
    assert sb.predict(model, x, draws=400).log_prob(y).mean() > uniform + 0.1


@pytest.mark.parametrize(
    "config",
    [
        sb.Rank1(members=2),
        sb.ModelPatch(cross=True, patch="output"),
        sb.Deterministic(),
    ],
)
def test_stacking_refuses_what_it_cannot_reweight(config: sb.Config) -> None:
    model: Callable[..., Any] = sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), config)
    with pytest.raises(ValueError, match="stack is for an Ensemble"):
        sb.stack(model, *_blobs(5))


def test_a_plain_model_has_the_same_prediction_in_every_draw() -> None:
    model = sb.bayesianize(nn.Linear(2, 2), sb.Deterministic())
    pred = sb.predict(model, torch.randn(3, 2), draws=4)
    assert pred.samples.shape == (4, 3, 2) and pred.epistemic.abs().max() < 1e-6


def test_windows_of_one_row_stay_together_where_rows_do_not_divide_evenly() -> None:
    """3 rows of 2 windows, 2 held draws: rows 0 and 1 with their windows belong to the first, row 2 to the second."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    for config in (
        sb.Mixture(components=2, assignment="model", jitter=1.0),
        sb.ModelPatch(components=2, patch="fc", jitter=1.0),
    ):
        net = sb.bayesianize(Windows(), config)
        x = torch.randn(1, 1, 3).expand(
            3, 2, 3
        )  # all windows alike: outputs differ by their draw alone
        with sb.fixed_draws(net, 2):
            y = net(x)
        assert torch.equal(y[:, 0], y[:, 1])
        torch.testing.assert_close(y[0], y[1])


class Turns(nn.Module):
    """A stem that runs ahead of the first draw, or behind it when anything is in `late`, which no mode tells."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.late: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            h = self.a(x)
            return self.b(torch.tanh(self.stem(x + h) + h))
        return self.b(torch.tanh(self.stem(x) + self.a(x)))


def test_a_module_is_not_shared_once_a_draw_was_used() -> None:
    """The proof found the stem ahead of all draws; what a model does later may differ."""
    model, x = (
        sb.bayesianize(Turns(), {"[ab]": sb.BatchEnsemble(members=3)}),
        torch.randn(5, 4),
    )
    sb.predict(model, x)
    model.late.append(1)
    shared, apart = _both(model, x, 2)
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-6)


class Packed(nn.Module):
    """A plain LSTM over packed sequences ahead of what is drawn, which a module of its own packs, or the model."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.pack, self.lstm, self.head = (
            Packs(),
            nn.LSTM(4, 8, batch_first=True),
            nn.Linear(8, 3),
        )
        self.inside = inside

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = self.pack(x, lengths) if self.inside else pack(x, lengths)
        return self.head(self.lstm(packed)[1][0][-1])


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return pack(self.first(x), lengths)


def pack(x: Tensor, lengths: Tensor) -> Any:
    return nn.utils.rnn.pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=False
    )


@pytest.mark.parametrize("inside", [False, True])
def test_packed_sequences_ahead_of_draws_are_not_cut(inside: bool) -> None:
    net = sb.bayesianize(
        Packed(inside), sb.BatchEnsemble(members=3), include="head"
    ).eval()
    inputs = torch.randn(6, 5, 4), torch.tensor([5, 3, 4, 2, 5, 1])
    alone = sb.predict(net, inputs, seed=1, parallel=False).probs
    torch.testing.assert_close(sb.predict(net, inputs, seed=1).probs, alone)
