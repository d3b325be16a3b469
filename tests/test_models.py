"""The k-tied paper's networks: their architecture, and every parameter count the paper prints (its Table 5 and Figure 6)."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models

RANKS = [None, 1, 2, 3]


def method(rank: int | None, **options: Any) -> sb.Config:
    return sb.MeanField(**options) if rank is None else sb.KTied(rank=rank, **options)


# Counts (D.9) ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "count"), zip(RANKS, [956_820, 481_614, 484_008, 486_402], strict=True))
def test_mlp_counts(rank: int | None, count: int) -> None:
    """All kernels and biases; biases are never tied. The paper prints 957, 482, 484, 486 thousand."""
    assert models.keras_count(sb.bayesianize(models.mlp(), method(rank, bias="gaussian"))) == count


@pytest.mark.parametrize(("rank", "count"), zip(RANKS, [4_405_320, 2_262_188, 2_267_408, 2_272_628], strict=True))
def test_lenet_counts(rank: int | None, count: int) -> None:
    """The dense kernels are tied, convolutions and biases mean-field. Printed: 4,405, 2,262, 2,268 (we are 92 short), 2,273."""
    configs = {"conv.*": method(None, bias="gaussian"), "dense.*": method(rank, bias="gaussian")}
    assert models.keras_count(sb.bayesianize(models.lenet(), configs)) == count


def test_the_text_of_the_paper_gives_another_lenet() -> None:
    """With the 3 x 3 kernels of Appendix D.1 the printed 4,405 thousand is out of reach."""
    assert models.keras_count(sb.bayesianize(models.lenet(kernel=3), method(None, bias="gaussian"))) == 4_336_712


@pytest.mark.parametrize(("rank", "count"), zip(RANKS, [2_822_656, 2_692_864, 2_694_144, 2_695_424], strict=True))
def test_lstm_counts(rank: int | None, count: int) -> None:
    """The two LSTM kernels; the printed 2,823, 2,693, 2,694, 2,695 leave the final dense layer out."""
    net = sb.bayesianize(models.imdb_lstm(), method(rank), include="lstm")
    assert models.keras_count(net) - 129 == count
    assert models.keras_count(net.dense) == 129


@pytest.mark.parametrize(("rank", "count"), zip(RANKS, [9_814_026, 4_929_711, 4_946_964, 4_964_217], strict=True))
def test_resnet_counts(rank: int | None, count: int) -> None:
    """All 14 kernels, biases as points: Table 5, to the last digit, with moving statistics."""
    assert models.keras_count(sb.bayesianize(models.small_resnet(), method(rank))) == count


def test_keras_count_conventions() -> None:
    """Moving statistics count, torch's second recurrent bias does not, shared parameters count once."""
    assert models.keras_count(nn.BatchNorm1d(5)) == 20
    assert models.keras_count(nn.BatchNorm1d(5, track_running_stats=False)) == 10
    assert models.keras_count(nn.LSTM(6, 4)) == 4 * ((6 + 4) * 4 + 4)
    assert models.keras_count(nn.LSTM(6, 4, bidirectional=True)) == 2 * 4 * ((6 + 4) * 4 + 4)
    assert models.keras_count(nn.GRU(6, 4)) == 3 * ((6 + 4) * 4 + 2 * 4)  # Keras's GRU has two biases too
    layer = nn.Linear(3, 3)
    assert models.keras_count(nn.Sequential(layer, nn.ReLU(), layer)) == 12


def test_the_page_of_counts_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[1] / "experiments" / "k_tied"
    spec = importlib.util.spec_from_file_location("counts", folder / "counts.py")
    counts: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "counts", counts)  # dataclasses look their module up
    spec.loader.exec_module(counts)  # type: ignore[union-attr]
    assert counts.page() == (folder / "counts.md").read_text(), "run python experiments/k_tied/counts.py"


# Architectures (C.5) ---------------------------------------------------------------------------------------------------


def kernels(net: nn.Module) -> list[Tensor]:
    return [m.weight for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def test_mlp_is_dense_layers_with_relu_between() -> None:
    net, x = models.mlp(12, (7, 5), 3), torch.randn(4, 3, 4)
    y = x.flatten(1)
    for i, (w, b) in enumerate((m.weight, m.bias) for m in net if isinstance(m, nn.Linear)):
        y = (F.relu(y) if i else y) @ w.T + b
    torch.testing.assert_close(net(x), y)
    assert [tuple(w.shape) for w in kernels(models.mlp())] == [(400, 784), (400, 400), (10, 400)]


def test_lenet_halves_twice_and_keeps_size_in_convolutions() -> None:
    net, x = models.lenet(classes=7, channels=1, size=8), torch.randn(2, 1, 8, 8)
    y = F.max_pool2d(F.relu(F.conv2d(x, net.conv1.weight, net.conv1.bias, padding=2)), 2)
    y = F.max_pool2d(F.relu(F.conv2d(y, net.conv2.weight, net.conv2.bias, padding=2)), 2)
    y = F.relu(F.linear(y.flatten(1), net.dense1.weight, net.dense1.bias))
    torch.testing.assert_close(net(x), F.linear(y, net.dense2.weight, net.dense2.bias))
    assert [tuple(w.shape) for w in kernels(models.lenet())] == [(32, 3, 5, 5), (64, 32, 5, 5), (512, 4096), (100, 512)]
    with pytest.raises(ValueError, match="multiple of 4, got 30"):
        models.lenet(size=30)


def test_lstm_reads_the_last_state_and_starts_as_keras_does() -> None:
    net, tokens = models.imdb_lstm(50, 6, 4), torch.randint(50, (3, 9))
    _, (hidden, _) = net.lstm(net.embedding(tokens))
    torch.testing.assert_close(net(tokens), net.dense(hidden[0])[:, 0])
    assert net.lstm.bias_ih_l0.tolist() == [0] * 4 + [1] * 4 + [0] * 8
    assert not net.lstm.bias_hh_l0.any() and not net.lstm.bias_hh_l0.requires_grad


def test_small_resnet_has_the_examples_parts() -> None:
    """14 kernels 4,901,568, biases 2,954, batch norm over 1,984 channels with Keras's constants."""
    net = models.small_resnet()
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    biases = [m.bias for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    assert len(kernels(net)) == 14 and sum(w.numel() for w in kernels(net)) == 4_901_568
    assert sum(b.numel() for b in biases) == 2_954
    assert len(norms) == 9 and sum(m.num_features for m in norms) == 1_984
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.01)}
    shortcuts = [net.get_submodule(f"block{i}").shortcut for i in (1, 2, 3, 4)]
    assert [(s.in_channels, s.out_channels) for s in shortcuts] == [(64, 64), (64, 128), (128, 256), (256, 512)]


def test_small_resnet_shortcut_starts_after_the_first_activation() -> None:
    block = models.small_resnet().block2.eval()
    x = torch.randn(2, 64, 6, 6)
    active = F.relu(block.norm1(x))
    y = F.conv2d(F.pad(active, (0, 1, 0, 1)), block.conv1.weight, block.conv1.bias, stride=2)
    y = F.conv2d(F.relu(block.norm2(y)), block.conv2.weight, block.conv2.bias, padding=1)
    torch.testing.assert_close(block(x), y + F.conv2d(active, block.shortcut.weight, block.shortcut.bias, stride=2))
    assert block(torch.randn(1, 64, 7, 5)).shape == (1, 128, 4, 3)  # sizes round up, as with "same" padding


@pytest.mark.parametrize(
    ("net", "scale"),
    [(models.mlp(), None), (models.lenet(), None), (models.small_resnet(), 0.1)],
    ids=["mlp", "lenet", "resnet"],
)
def test_kernels_start_as_the_paper_says(net: nn.Module, scale: float | None) -> None:
    """He initialisation, and Normal(0, 0.1) for the ResNet; biases at zero."""
    for w in kernels(net):
        expected = math.sqrt(2 / w[0].numel()) if scale is None else scale
        assert w.std().item() == pytest.approx(expected, rel=5 / math.sqrt(w.numel()))  # seven standard errors
        assert abs(w.mean().item()) < 5 * expected / math.sqrt(w.numel())
    assert all(not m.bias.any() for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


NETWORKS: dict[str, Any] = {
    "mlp": (lambda: models.mlp(16, (8, 8), 3), lambda: torch.randn(4, 16), None),
    "lenet": (lambda: models.lenet(classes=3, size=8), lambda: torch.randn(4, 3, 8, 8), None),
    "lstm": (lambda: models.imdb_lstm(30, 6, 5), lambda: torch.randint(30, (4, 7)), "lstm"),
    "resnet": (lambda: models.small_resnet(), lambda: torch.randn(4, 3, 8, 8), None),
}


@pytest.mark.parametrize("estimator", ["reparam", "flipout"])
@pytest.mark.parametrize("name", NETWORKS)
def test_converted_networks_take_a_training_step(name: str, estimator: Any) -> None:
    """Every posterior parameter and every mean gets a finite gradient, and draws differ."""
    build, inputs, include = NETWORKS[name]
    net = sb.bayesianize(build(), sb.KTied(rank=2, estimator=estimator), include=include)
    x = inputs()
    out = sb.sample(net, x, draws=2)
    assert not torch.equal(out[0], out[1])
    sb.elbo(out.square().mean(), net, num_data=100).loss.backward()
    for key, p in net.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and bool(p.grad.isfinite().all()), key
    assert all(bool(p.grad.any()) for key, p in net.named_parameters() if ".posterior." in key)
