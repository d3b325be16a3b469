"""The papers' networks: their architecture, and every parameter count that the papers print."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import each
from oracle import shapes_alone
from slimbayes_lab import models
from torch import Tensor, nn

import slimbayes as sb

RANKS = [None, 1, 2, 3]


def method(rank: int | None, **options: Any) -> sb.Config:
    return sb.MeanField(**options) if rank is None else sb.KTied(rank=rank, **options)


# Counts of the k-tied paper, Table 5 and Figure 6 (D.9) ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "count"), zip(RANKS, [956_820, 481_614, 484_008, 486_402], strict=True)
)
def test_mlp_counts(rank: int | None, count: int) -> None:
    """All kernels and biases; biases are never tied. The paper prints 957, 482, 484, 486 thousand."""
    assert (
        models.keras_count(sb.bayesianize(models.mlp(), method(rank, bias="gaussian")))
        == count
    )


@pytest.mark.parametrize(
    ("rank", "count"),
    zip(RANKS, [4_405_320, 2_262_188, 2_267_408, 2_272_628], strict=True),
)
def test_lenet_counts(rank: int | None, count: int) -> None:
    """Dense kernels are tied, convolutions and biases mean-field. Printed: 4,405, 2,262, 2,268 (92 short), 2,273."""
    configs = {
        "conv.*": method(None, bias="gaussian"),
        "dense.*": method(rank, bias="gaussian"),
    }
    assert models.keras_count(sb.bayesianize(models.lenet(), configs)) == count


def test_the_text_of_the_paper_gives_another_lenet() -> None:
    """With the 3 x 3 kernels of Appendix D.1 the printed 4,405 thousand is out of reach."""
    assert (
        models.keras_count(
            sb.bayesianize(models.lenet(kernel=3), method(None, bias="gaussian"))
        )
        == 4_336_712
    )


@pytest.mark.parametrize(
    ("rank", "count"),
    zip(RANKS, [2_822_656, 2_692_864, 2_694_144, 2_695_424], strict=True),
)
def test_lstm_counts(rank: int | None, count: int) -> None:
    """The two LSTM kernels; the printed 2,823, 2,693, 2,694, 2,695 leave the final dense layer out."""
    net = sb.bayesianize(models.imdb_lstm(), method(rank), include="lstm")
    assert models.keras_count(net) - 129 == count
    assert models.keras_count(net.dense) == 129


@pytest.mark.parametrize(
    ("rank", "count"),
    zip(RANKS, [9_814_026, 4_929_711, 4_946_964, 4_964_217], strict=True),
)
def test_resnet_counts(rank: int | None, count: int) -> None:
    """All 14 kernels, biases as points: Table 5, to the last digit, with moving statistics."""
    assert (
        models.keras_count(sb.bayesianize(models.small_resnet(), method(rank))) == count
    )


def test_keras_count_conventions() -> None:
    """Moving statistics count, torch's second recurrent bias does not, shared parameters count once."""
    assert models.keras_count(nn.BatchNorm1d(5)) == 20
    assert models.keras_count(nn.BatchNorm1d(5, track_running_stats=False)) == 10
    assert models.keras_count(nn.LSTM(6, 4)) == 4 * ((6 + 4) * 4 + 4)
    assert models.keras_count(nn.LSTM(6, 4, bidirectional=True)) == 2 * 4 * (
        (6 + 4) * 4 + 4
    )
    assert models.keras_count(nn.GRU(6, 4)) == 3 * (
        (6 + 4) * 4 + 2 * 4
    )  # Keras's GRU has two biases too
    layer = nn.Linear(3, 3)
    assert models.keras_count(nn.Sequential(layer, nn.ReLU(), layer)) == 12


# Architectures of the k-tied paper (C.5)


def kernels(net: nn.Module) -> list[Tensor]:
    return [m.weight for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def test_mlp_is_dense_layers_with_relu_between() -> None:
    net, x = models.mlp(12, (7, 5), 3), torch.randn(4, 3, 4)
    y = x.flatten(1)
    for i, (w, b) in enumerate(
        (m.weight, m.bias) for m in net if isinstance(m, nn.Linear)
    ):
        y = (F.relu(y) if i else y) @ w.T + b
    torch.testing.assert_close(net(x), y)
    assert [tuple(w.shape) for w in kernels(models.mlp())] == [
        (400, 784),
        (400, 400),
        (10, 400),
    ]


def test_lenet_halves_twice_and_keeps_size_in_convolutions() -> None:
    net, x = models.lenet(classes=7, channels=1, size=8), torch.randn(2, 1, 8, 8)
    y = F.max_pool2d(
        F.relu(F.conv2d(x, net.conv1.weight, net.conv1.bias, padding=2)), 2
    )
    y = F.max_pool2d(
        F.relu(F.conv2d(y, net.conv2.weight, net.conv2.bias, padding=2)), 2
    )
    y = F.relu(F.linear(y.flatten(1), net.dense1.weight, net.dense1.bias))
    torch.testing.assert_close(net(x), F.linear(y, net.dense2.weight, net.dense2.bias))
    assert [tuple(w.shape) for w in kernels(models.lenet())] == [
        (32, 3, 5, 5),
        (64, 32, 5, 5),
        (512, 4096),
        (100, 512),
    ]
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
    assert [(s.in_channels, s.out_channels) for s in shortcuts] == [
        (64, 64),
        (64, 128),
        (128, 256),
        (256, 512),
    ]


def test_small_resnet_shortcut_starts_after_the_first_activation() -> None:
    block = models.small_resnet().block2.eval()
    x = torch.randn(2, 64, 6, 6)
    active = F.relu(block.norm1(x))
    y = F.conv2d(
        F.pad(active, (0, 1, 0, 1)), block.conv1.weight, block.conv1.bias, stride=2
    )
    y = F.conv2d(
        F.relu(block.norm2(y)), block.conv2.weight, block.conv2.bias, padding=1
    )
    torch.testing.assert_close(
        block(x),
        y + F.conv2d(active, block.shortcut.weight, block.shortcut.bias, stride=2),
    )
    assert block(torch.randn(1, 64, 7, 5)).shape == (
        1,
        128,
        4,
        3,
    )  # sizes round up, as with "same" padding


@pytest.mark.parametrize(
    ("net", "scale"),
    [(models.mlp(), None), (models.lenet(), None), (models.small_resnet(), 0.1)],
    ids=["mlp", "lenet", "resnet"],
)
def test_kernels_start_as_the_paper_says(net: nn.Module, scale: float | None) -> None:
    """He initialisation, and Normal(0, 0.1) for the ResNet; biases at zero."""
    for w in kernels(net):
        expected = math.sqrt(2 / w[0].numel()) if scale is None else scale
        assert w.std().item() == pytest.approx(
            expected, rel=5 / math.sqrt(w.numel())
        )  # seven standard errors
        assert abs(w.mean().item()) < 5 * expected / math.sqrt(w.numel())
    assert all(
        not m.bias.any() for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))
    )


NETWORKS: dict[str, Any] = {
    "mlp": (lambda: models.mlp(16, (8, 8), 3), lambda: torch.randn(4, 16), None),
    "lenet": (
        lambda: models.lenet(classes=3, size=8),
        lambda: torch.randn(4, 3, 8, 8),
        None,
    ),
    "lstm": (
        lambda: models.imdb_lstm(30, 6, 5),
        lambda: torch.randint(30, (4, 7)),
        "lstm",
    ),
    "resnet": (lambda: models.small_resnet(), lambda: torch.randn(4, 3, 8, 8), None),
    "wrn": (lambda: models.wrn(10, 1), lambda: torch.randn(4, 3, 8, 8), None),
    "pyramidnet": (
        lambda: models.pyramidnet(8, 12, 3),
        lambda: torch.randn(4, 3, 8, 8),
        None,
    ),
    "regression": (
        lambda: models.regression_net(5, 2),
        lambda: torch.randn(4, 5),
        None,
    ),
    "deep_mlp": (lambda: models.deep_mlp(2, 8, 5), lambda: torch.randn(4, 2), None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "name"), each(["reparam", "flipout"], NETWORKS))
def test_converted_networks_take_a_training_step(name: str, estimator: Any) -> None:
    """Every posterior parameter and every mean gets a finite gradient, and draws differ."""
    build, inputs, include = NETWORKS[name]
    net = sb.bayesianize(
        build(), sb.KTied(rank=2, estimator=estimator), include=include
    )
    x = inputs()
    out = sb.sample(net, x, draws=2)
    assert not torch.equal(out[0], out[1])
    sb.elbo(out.square().mean(), net, num_data=100).loss.backward()
    for key, p in net.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and bool(p.grad.isfinite().all()), key
    assert all(
        bool(p.grad.any()) for key, p in net.named_parameters() if ".posterior." in key
    )


# Counts of the rank-1 and the EMP paper (D.7, D.8) --------------------------------------------------------------------


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The network without its memory, which is all that counting needs."""
    with shapes_alone():
        return build()


def parts(net: nn.Module) -> dict[str, int]:
    """Parameters of convolutions and of dense layers, number of batch norms and of their channels, all parameters."""
    norms = [
        m for m in net.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))
    ]
    return {
        "conv": sum(
            p.numel()
            for m in net.modules()
            if isinstance(m, nn.Conv2d)
            for p in m.parameters()
        ),
        "dense": sum(
            p.numel()
            for m in net.modules()
            if isinstance(m, nn.Linear)
            for p in m.parameters()
        ),
        "norms": len(norms),
        "channels": sum(m.num_features for m in norms),
        "total": sum(p.numel() for p in net.parameters()),
    }


COUNTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int, int, int]]] = {
    "wrn-28-10 C10": (models.wrn, (36_461_232 - 6_400, 6_410, 25, 8_976, 36_479_194)),
    "wrn-28-10 C100": (
        partial(models.wrn, classes=100),
        (36_461_232 - 6_400, 64_100, 25, 8_976, 36_536_884),
    ),
    "resnet18": (models.resnet18, (11_166_912, 513_000, 20, 4_800, 11_689_512)),
    "resnet50": (
        models.resnet50,
        (25_502_912 - 2_048_000, 2_049_000, 53, 26_560, 25_557_032),
    ),
    "pyramidnet": (models.pyramidnet, (28_432_809, 28_700, 164, 24_899, 28_511_307)),
    "deep_mlp": (models.deep_mlp, (0, 100 + 980_000 + 10_000, 99, 9_900, 1_009_900)),
    "regression": (
        partial(models.regression_net, 13),
        (0, 13 * 50 + 50 + 50 + 1, 2, 63, 877),
    ),
    "regression, no norm": (
        partial(models.regression_net, 13, 2, 100, norm=False),
        (0, 1_400 + 202, 0, 0, 1_602),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parts_of_the_networks_have_the_papers_sizes(name: str) -> None:
    build, expected = COUNTS[name]
    assert tuple(parts(on_meta(build)).values()) == expected


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (partial(models.wrn, 28, 5), 9_132_634),
        (partial(models.wrn, 28, 5, 100), 9_161_524),
        (models.resnet50, 25_557_032),  # torchvision's `num_params`
    ],
)
def test_other_sizes_have_the_known_totals(
    build: Callable[[], nn.Module], count: int
) -> None:
    assert sum(p.numel() for p in on_meta(build).parameters()) == count


@pytest.mark.parametrize(
    ("build", "plain", "patched"),
    [
        (models.resnet18, 11_689_512, 13_779_912),
        (models.pyramidnet, 28_511_307, 28_825_299),
        (models.deep_mlp, 1_009_900, 1_129_100),
    ],
)
def test_five_patches_of_norms_and_output_give_table_3(
    build: Callable[[], nn.Module], plain: int, patched: int
) -> None:
    """D.7: four more copies of all batch norms and of the last layer, its bias included where there is one."""
    net = on_meta(build)
    total, output = parts(net), list(net.modules())[-1]
    assert isinstance(output, nn.Linear)
    extra = 2 * total["channels"] + sum(p.numel() for p in output.parameters())
    assert (total["total"], total["total"] + 4 * extra) == (plain, patched)


def test_pyramidnet_widens_by_five_filters_in_each_block() -> None:
    """d_i = 16 + 5 i; in general 16 + alpha i / (3 n), rounded."""
    convs = [
        m for m in on_meta(models.pyramidnet).modules() if isinstance(m, nn.Conv2d)
    ]
    assert [c.out_channels for c in convs] == [16] + [
        16 + 5 * i for i in range(1, 55) for _ in range(2)
    ]
    convs = [
        m
        for m in on_meta(lambda: models.pyramidnet(14, 20)).modules()
        if isinstance(m, nn.Conv2d)
    ]
    assert [c.out_channels for c in convs[1::2]] == [
        19,
        23,
        26,
        29,
        33,
        36,
    ]  # 16 + 3.33 i


@pytest.mark.parametrize("depth", [4, 27, 30, -2])
def test_wrn_refuses_other_depths(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"6 n \+ 4 .* got {depth}\."):
        models.wrn(depth)


@pytest.mark.parametrize("depth", [2, 28, 111, -4])
def test_pyramidnet_refuses_other_depths(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"6 n \+ 2 .* got {depth}\."):
        models.pyramidnet(depth)


def test_networks_refuse_impossible_widths() -> None:
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        models.wrn(10, 0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        models.pyramidnet(8, -1)
    with pytest.raises(ValueError, match="at least 1 dense layer, got 0"):
        models.deep_mlp(depth=0)


# ResNet under torchvision's names -------------------------------------------------------------------------------------

STAGES = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
BOTTLENECKS = ("resnet50",)


def norm_entries(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    vectors = {
        f"{name}.{key}": (channels,)
        for key in ("weight", "bias", "running_mean", "running_var")
    }
    return vectors | {f"{name}.num_batches_tracked": ()}


def torchvision_entries(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's state_dict in its order, from the rule by which they are made."""
    entries: dict[str, tuple[int, ...]] = {
        "conv1.weight": (64, 3, 7, 7)
    } | norm_entries("bn1", 64)
    n_in = 64
    for stage, count in enumerate(STAGES[name], start=1):
        width = 32 * 2**stage
        for i in range(count):
            block = f"layer{stage}.{i}"
            kernels = (
                [(width, 3), (width, 3)]
                if name not in BOTTLENECKS
                else [(width, 1), (width, 3), (4 * width, 1)]
            )
            first = n_in
            for j, (n_out, size) in enumerate(kernels, start=1):
                entries |= {
                    f"{block}.conv{j}.weight": (n_out, n_in, size, size)
                } | norm_entries(f"{block}.bn{j}", n_out)
                n_in = n_out
            if i == 0 and (stage > 1 or name in BOTTLENECKS):
                entries |= {
                    f"{block}.downsample.0.weight": (n_in, first, 1, 1)
                } | norm_entries(f"{block}.downsample.1", n_in)
    return entries | {"fc.weight": (1000, n_in), "fc.bias": (1000,)}


@pytest.mark.parametrize("name", STAGES)
def test_resnets_have_torchvisions_names_and_shapes(name: str) -> None:
    net, expected = on_meta(getattr(models, name)), torchvision_entries(name)
    assert [(k, tuple(v.shape)) for k, v in net.state_dict().items()] == list(
        expected.items()
    )
    assert len(expected) == {"resnet18": 122, "resnet50": 320}[name]
    small = on_meta(
        partial(getattr(models, name), classes=10, small_images=True)
    ).state_dict()
    changed = {
        k: tuple(v.shape) for k, v in small.items() if tuple(v.shape) != expected[k]
    }
    assert changed == {
        "conv1.weight": (64, 3, 3, 3),
        "fc.weight": (10, expected["fc.weight"][1]),
        "fc.bias": (10,),
    }


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvisions_checkpoints_give_torchvisions_outputs(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs, ours = getattr(torchvision.models, name)(), getattr(models, name)()
    unsettle(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=0, atol=0)


# Forward passes again, from the state_dict alone ----------------------------------------------------------------------


def unsettle(net: nn.Module) -> None:
    """Give every batch norm statistics and affine parameters of its own, so that a norm in the wrong place shows."""
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
                for vector in (m.weight, m.running_var):
                    vector.uniform_(0.5, 1.5)
                for vector in (m.bias, m.running_mean):
                    vector.normal_(0, 0.3)


class Replay:
    """Operations by the names of their weights: norms with moving statistics, "same" convolutions, dense layers."""

    def __init__(self, net: nn.Module) -> None:
        unsettle(net)
        self.state = net.eval().state_dict()

    def norm(self, name: str, x: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (x.dim() - 2)
        w, b, mean, var = (
            self.state[f"{name}.{k}"].view(shape)
            for k in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / (var + 1e-5).sqrt() * w + b

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        w = self.state[f"{name}.weight"]
        return F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)

    def dense(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.state[f"{name}.weight"].T
        return y + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else y

    def resnet(self, x: Tensor, stages: tuple[int, ...], small: bool) -> Tensor:
        x = F.relu(self.norm("bn1", self.conv("conv1", x, 1 if small else 2)))
        x = x if small else F.max_pool2d(x, 3, 2, 1)
        for stage, count in enumerate(stages, start=1):
            for i in range(count):
                x = self.resnet_block(
                    f"layer{stage}.{i}", x, 2 if stage > 1 and i == 0 else 1
                )
        return self.dense("fc", x.mean((2, 3)))

    def resnet_block(self, name: str, x: Tensor, stride: int) -> Tensor:
        y, deep = x, f"{name}.conv3.weight" in self.state
        for j in (1, 2, 3) if deep else (1, 2):
            y = self.conv(
                f"{name}.conv{j}",
                F.relu(y) if j > 1 else y,
                stride if j == 1 + deep else 1,
            )
            y = self.norm(f"{name}.bn{j}", y)
        if f"{name}.downsample.0.weight" in self.state:
            x = self.norm(
                f"{name}.downsample.1", self.conv(f"{name}.downsample.0", x, stride)
            )
        return F.relu(x + y)

    def wrn(self, x: Tensor, blocks: int) -> Tensor:
        x = self.conv("stem", x)
        for group in (1, 2, 3):
            for i in range(blocks):
                name, stride = f"group{group}.{i}", 2 if group > 1 and i == 0 else 1
                y = self.conv(
                    f"{name}.conv1", F.relu(self.norm(f"{name}.norm1", x)), stride
                )
                y = self.conv(f"{name}.conv2", F.relu(self.norm(f"{name}.norm2", y)))
                x = y + (
                    self.conv(f"{name}.shortcut", x, stride)
                    if f"{name}.shortcut.weight" in self.state
                    else x
                )
        return self.dense("dense", F.relu(self.norm("norm", x)).mean((2, 3)))

    def pyramidnet(self, x: Tensor, blocks: int) -> Tensor:
        x = self.norm("bn1", self.conv("conv1", x))
        for group in (1, 2, 3):
            for i in range(blocks):
                name, stride = f"layer{group}.{i}", 2 if group > 1 and i == 0 else 1
                y = self.norm(
                    f"{name}.bn2",
                    self.conv(f"{name}.conv1", self.norm(f"{name}.bn1", x), stride),
                )
                y = self.norm(f"{name}.bn3", self.conv(f"{name}.conv2", F.relu(y)))
                short = torch.zeros_like(y)
                short[:, : x.shape[1]] = x if stride == 1 else halves(x)
                x = y + short
        return self.dense("fc", F.relu(self.norm("bn_final", x)).mean((2, 3)))


def halves(x: Tensor) -> Tensor:
    """Means of 2 x 2 squares, and of what is left of them at the lower and right edge of odd sizes."""
    height, width = x.shape[2:]
    rows = [
        [x[:, :, i : i + 2, j : j + 2].mean((2, 3)) for j in range(0, width, 2)]
        for i in range(0, height, 2)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_forward_from_its_state(name: str, small: bool) -> None:
    net, x = (
        getattr(models, name)(classes=5, small_images=small),
        torch.randn(2, 3, 17, 23),
    )
    torch.testing.assert_close(
        Replay(net).resnet(x, STAGES[name], small), net(x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("size", [(16, 16), (13, 10), (7, 5), (1, 1)])
@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2)])
def test_wrn_forward_from_its_state(
    depth: int, width: int, size: tuple[int, int]
) -> None:
    net, x = models.wrn(depth, width, classes=5), torch.randn(2, 3, *size)
    torch.testing.assert_close(
        Replay(net).wrn(x, (depth - 4) // 6), net(x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("size", [(16, 16), (13, 10), (7, 5), (1, 1)])
@pytest.mark.parametrize(("depth", "alpha"), [(8, 12), (14, 7.5)])
def test_pyramidnet_forward_from_its_state(
    depth: int, alpha: float, size: tuple[int, int]
) -> None:
    net, x = models.pyramidnet(depth, alpha, classes=5), torch.randn(2, 3, *size)
    torch.testing.assert_close(
        Replay(net).pyramidnet(x, (depth - 2) // 6), net(x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("norm", [True, False])
def test_regression_net_forward_from_its_state(norm: bool) -> None:
    net, x = models.regression_net(4, 2, hidden=6, norm=norm), torch.randn(3, 4)
    names = [name for name, _ in net.named_children()]
    assert names == (
        ["norm1", "dense1", "relu", "norm2", "dense2"]
        if norm
        else ["dense1", "relu", "dense2"]
    )
    assert all(
        w == pytest.approx(0.2)
        for m in net
        if isinstance(m, nn.BatchNorm1d)
        for w in m.weight.tolist()
    )
    replay = Replay(net)
    y = F.relu(replay.dense("dense1", replay.norm("norm1", x) if norm else x))
    torch.testing.assert_close(
        replay.dense("dense2", replay.norm("norm2", y) if norm else y), net(x)
    )


def test_deep_mlp_forward_from_its_state() -> None:
    net, x = models.deep_mlp(3, 5, 4), torch.randn(6, 3)
    replay, y = Replay(net), x
    for i in (1, 2, 3):
        y = F.relu(replay.norm(f"norm{i}", replay.dense(f"dense{i}", y)))
    torch.testing.assert_close(replay.dense("dense4", y), net(x))
    assert not any(
        name.startswith("dense") and name.endswith("bias") for name in replay.state
    )


# Starting weights, seeds and conversion -------------------------------------------------------------------------------

IMAGE_NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: models.resnet18(10, small_images=True), 20),
    "wrn": (lambda: models.wrn(10, 1), 9),
    "pyramidnet": (lambda: models.pyramidnet(14, 30, 10), 13),
}


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_convolutions_start_by_he(name: str) -> None:
    """Normal(0, sqrt(2 / fan)): fan-out in torchvision's and the PyramidNet authors' code, fan-in in the WRN."""
    net = IMAGE_NETWORKS[name][0]()
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            fan = (m.in_channels if name == "wrn" else m.out_channels) * m.kernel_size[
                0
            ] ** 2
            expected, spread = math.sqrt(2 / fan), 5 / math.sqrt(m.weight.numel())
            assert m.weight.std().item() == pytest.approx(
                expected, rel=spread
            )  # seven standard errors
            assert abs(m.weight.mean().item()) < spread * expected
        elif isinstance(m, nn.BatchNorm2d):
            assert (
                bool((m.weight == 1).all())
                and not m.bias.any()
                and (m.eps, m.momentum) == (1e-5, 0.1)
            )
    dense = list(net.modules())[-1]
    if name == "wrn":
        assert not dense.bias.any()
    else:  # torch's own start is uniform
        assert dense.weight.abs().max().item() <= 1 / math.sqrt(
            dense.in_features
        ) and bool(dense.bias.any())


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_same_seed_same_network(name: str) -> None:
    build = IMAGE_NETWORKS[name][0]
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build().state_dict())
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    assert not any(
        torch.equal(v, states[2][k]) for k, v in states[0].items() if v.dim() > 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_rank1_converts_every_convolution_and_runs(name: str) -> None:
    build, convs = IMAGE_NETWORKS[name]
    net = sb.bayesianize(build(), sb.Rank1(members=2))
    converted = [r.layer for r in sb.summary(net).rows if r.status == "converted"]
    assert (converted.count("Conv2d"), converted.count("Linear"), len(converted)) == (
        convs,
        1,
        convs + 1,
    )
    x = torch.randn(3, 3, 9, 11)
    for mode in (True, False):
        out = sb.sample(net.train(mode), x)
        assert (
            out.shape == (2, 3, 10)
            and bool(out.isfinite().all())
            and not torch.equal(out[0], out[1])
        )
