"""Radial posteriors against their definition; the contract compares the KL with an average over draws."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.posteriors import METHODS, radial
from slimbayes.posteriors.configs import weights as config

ROOT = Path(__file__).parents[2]


def test_a_single_weight_has_the_kl_of_a_gaussian() -> None:
    prior = sb.Normal(0.3, 0.7)
    nets = [
        sb.bayesianize(nn.Linear(1, 1, bias=False), c)
        for c in (sb.Radial(prior=prior), sb.MeanField(prior=prior))
    ]
    for net in nets:
        nn.init.constant_(net.weight, 0.5)
        nn.init.constant_(net.posterior["weight"].weight_log_scale, -1.1)
    torch.testing.assert_close(sb.kl(nets[0]), sb.kl(nets[1]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 40])
def test_the_distance_from_the_mean_is_half_normal_whatever_the_size(size: int) -> None:
    net = sb.bayesianize(
        nn.Linear(size, size, bias=False), sb.Radial(scale_init=0.5, scale_jitter=0.0)
    ).double()
    with torch.no_grad():
        weights = sb.sample(
            net, torch.eye(size).double(), draws=4000
        )  # each output row is a column of the weight
        length = (weights - net.weight.T).flatten(1).norm(dim=1) / 0.5
    assert length.mean().item() == pytest.approx(math.sqrt(2 / math.pi), abs=0.05)
    assert length.square().mean().item() == pytest.approx(1.0, abs=0.1)


def test_the_entropy_of_directions_is_that_of_draws() -> None:
    """An average of -log density over draws in three dimensions, where the area of the sphere is 4 pi."""
    length = torch.randn(200_000, dtype=torch.float64).abs()
    log_density = (
        math.log(2)
        + sb.Normal(0.0, 1.0).log_prob(length)
        - math.log(4 * math.pi)
        - 2 * length.log()
    )
    assert radial.direction_entropy(3) == pytest.approx(
        -log_density.mean().item(), abs=0.02
    )


def test_padding_words_and_pruned_weights_stay() -> None:
    net = sb.bayesianize(nn.Embedding(5, 3, padding_idx=2), sb.Radial(scale_init=0.5))
    drawn = sb.sample(net, torch.arange(5), draws=3)
    assert torch.equal(drawn[:, 2], net.weight[2].expand(3, 3))
    assert (drawn[:, 0] != net.weight[0]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": sb.Cauchy()}, "Normal prior, got Cauchy"),
        ({"scale_init": 0.0}, "scale_init must be positive"),
        ({"scale_jitter": -1.0}, "scale_jitter must not be negative"),
    ],
)
def test_bad_options_are_refused_in_words(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sb.Radial(**options)


def test_a_file_is_all_that_a_method_needs() -> None:
    """The list of methods, and the choices of experiment configs, come from the files."""
    from slimbayes.lab.configs.files import validate

    assert METHODS["Radial"] is sb.Radial
    experiment = validate(
        {
            "name": "try",
            "data": {"name": "digits"},
            "model": {"kind": "small_cnn", "width": 8},
            "method": {
                "kind": "Radial",
                "prior": {"kind": "Normal", "loc": 0.0, "scale": 0.3},
            },
            "train": {"epochs": 1, "optimizer": {"kind": "AdamW", "lr": 0.01}},
        }
    )
    assert experiment.method.build() == sb.Radial(prior=sb.Normal(0.0, 0.3))


def test_the_page_on_adding_a_method_shows_this_file() -> None:
    page = (ROOT / "docs" / "adding_a_method.md").read_text()
    file = Path(radial.__file__).read_text() + Path(config.__file__).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    shown = [block for block in blocks if not block.startswith("import slimbayes")]
    assert len(shown) >= 3 and all(block in file for block in shown)
    assert all(
        part in "".join(shown)
        for part in (
            "class Radial(",
            "def draw(",
            "def kl(",
            "def direction_entropy(",
        )
    )
