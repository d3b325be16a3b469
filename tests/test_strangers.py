"""Faults that users of models nobody here wrote would have met: each against a slow or independent answer."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import slimbayes as sb

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "config", [sb.MeanField(), sb.KTied(), sb.DropConnect(), sb.ModelPatch(patch=".*", components=2)]
)
def test_the_padding_word_of_folded_draws_does_not_learn(config: Any) -> None:
    net = sb.bayesianize(nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.Flatten(), nn.Linear(12, 2)), config)
    words = torch.tensor([[1, 3, 5], [3, 3, 2]])
    gradients = []
    for fold in (True, False):
        net.zero_grad()
        sb.sample(net, words, draws=8, seed=1, fold=fold).square().sum().backward()
        gradients.append(net[0].weight.grad)
    assert not gradients[0][3].any() and gradients[0][5].any()
    torch.testing.assert_close(*gradients)


class Updater(nn.Module):
    """Holds a network that is held by another, too, as a projection updater of linear attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.updates = nn.ModuleDict({"instance": self.net})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("options", [{}, {"train": "posterior+head"}])
def test_modules_with_two_names_are_saved_and_loaded(options: Any, tmp_path: Path) -> None:
    plain = Updater()
    net = sb.bayesianize(copy.deepcopy(plain), sb.Rank1(members=2), include=".*0", **options)
    if options:
        net.net[2].weight.data.add_(1.0)
    again = sb.load(plain, sb.save(net, tmp_path / "posterior"))
    torch.testing.assert_close(sb.sample(again, X, seed=0), sb.sample(net, X, seed=0), rtol=0, atol=0)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_layers_that_are_parametrised_after_their_conversion_become_plain_again(norm: Any) -> None:
    net, same = mlp(), mlp()
    same.load_state_dict(net.state_dict())
    sb.bayesianize(net, sb.MeanField(scale_init=0.2))
    for model in (net, same):
        torch.manual_seed(0)
        norm(model[0])
        model.eval()
    with sb.frozen(net, draws=2):
        torch.testing.assert_close(sb.write_out(net, 1)(X), sb.sample(net, X)[1])
    plain = sb.debayesianize(net)
    assert parametrize.is_parametrized(plain[0], "weight") and not sb.kl(plain)
    torch.testing.assert_close(plain(X), same(X), rtol=0, atol=0)


@pytest.mark.parametrize("end", [nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_probabilities_are_no_logits(end: nn.Module) -> None:
    net = sb.bayesianize(nn.Sequential(*mlp(), end), sb.Rank1(members=2))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    if isinstance(end, nn.LogSoftmax):  # logarithms of probabilities are logits
        with sb.frozen(net, draws=1, seed=0):
            outputs = sb.sample(net, X)
        torch.testing.assert_close(sb.predict(net, X, seed=0).samples, outputs.exp())
        return
    for use in (lambda: sb.predict(net, X), lambda: sb.categorical(sb.sample(net, X), labels)):
        with pytest.raises(ValueError, match="probabilities already"):
            use()


def test_a_sigmoid_before_a_bernoulli_likelihood_is_told() -> None:
    net = sb.bayesianize(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), sb.Rank1(members=2))
    with pytest.warns(sb.SlimbayesWarning, match="takes logits"):
        sb.predict(net, X, likelihood="bernoulli")
    sb.predict(net[:1], X, likelihood="bernoulli")


class Extra(nn.Linear):
    """A layer that keeps more than tensors in its state, as layers of reduced precision and neural operators do."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 2}


@pytest.mark.parametrize("config", [sb.Rank1(members=2), sb.Ensemble(members=3)])
def test_models_whose_state_is_more_than_tensors(config: Any, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Extra(8, 3))
    net = sb.bayesianize(copy.deepcopy(plain), config)
    with pytest.warns(sb.SlimbayesWarning, match="_extra_state is no tensor"):
        path = sb.save(net, tmp_path / "whole", base=True)
    with pytest.warns(sb.SlimbayesWarning) if isinstance(config, sb.Ensemble) else nullcontext():
        sb.save(net, tmp_path / "posterior")
    for folder in (path, tmp_path / "posterior"):
        again = sb.load(copy.deepcopy(plain), folder)
        torch.testing.assert_close(sb.sample(again, X, seed=0), sb.sample(net, X, seed=0), rtol=0, atol=0)
    with sb.mean(net):
        of_one = sb.sample(net, X)[1]
    torch.testing.assert_close(sb.merge(net, 1)(X), of_one)
    assert sb.merge(net, "mean")(X).shape == (6, 3)


class Fourier(nn.Module):
    """Random features that are no part of its state, and a function that members may have different."""

    def __init__(self, function: Any = torch.tanh) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(4, 8), persistent=False)
        self.function, self.head = function, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(x @ self.directions))


@pytest.mark.parametrize("functions", [(torch.tanh,) * 3, (torch.tanh, torch.sin, torch.relu)])
def test_members_that_differ_past_their_state(functions: Any, tmp_path: Path) -> None:
    nets = [Fourier(function) for function in functions]
    wanted = torch.stack([net(X) for net in nets])
    net = sb.ensemble(nets)
    torch.testing.assert_close(sb.sample(net, X), wanted)
    with pytest.warns(sb.SlimbayesWarning, match="differs between members"):
        sb.save(net, tmp_path / "all")
    with pytest.raises(ValueError, match="Members differ in"):
        sb.select(net, [1, 0])
    torch.testing.assert_close(sb.sample(sb.select(net, [0, 2]), X), wanted[[0, 2]])
