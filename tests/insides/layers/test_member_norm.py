"""Batch norm with statistics for each member, against K separate torch layers in a slow loop.

Sizes: K members, R rows, C channels.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import pairwise
from slimbayes_lab import models
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils._python_dispatch import TorchDispatchMode

import slimbayes as sb
from slimbayes.engine import noise, passes
from slimbayes.engine.locate import layout_of
from slimbayes.engine.passes import Pass

pytestmark = pytest.mark.usefixtures("last_draws")

K, C = 3, 5
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(C), (C,)),
    "1d-sequence": (lambda: nn.BatchNorm1d(C), (C, 4)),
    "2d": (lambda: nn.BatchNorm2d(C), (C, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(C), (C, 2, 3, 2)),
    "momentum": (lambda: nn.BatchNorm2d(C, momentum=0.7, eps=0.1), (C, 3, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(C, momentum=None), (C, 3, 2)),
    "no-statistics": (lambda: nn.BatchNorm1d(C, track_running_stats=False), (C,)),
    "no-scale": (lambda: nn.BatchNorm2d(C, affine=False), (C, 3, 2)),
    "nothing": (
        lambda: nn.BatchNorm1d(C, affine=False, track_running_stats=False),
        (C,),
    ),
}
every_layer = pytest.mark.parametrize("case", LAYERS)


def made(case: str, affine: bool = False, members: int = K) -> Any:
    """A converted layer, in double precision, with scales and statistics of its members apart."""
    layer: Any = sb.bayesianize(
        LAYERS[case][0]().double(), sb.MemberNorm(members=members, affine=affine)
    )
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(
                tensor, 0.5, 1.5
            ) if "mean" not in name else nn.init.normal_(tensor)
    return layer


def input_of(case: str, rows: int) -> Tensor:
    return (2 * torch.randn(rows, *LAYERS[case][1]) + 0.5).double()


def separate(layer: Any) -> list[Any]:
    """Each member as a torch layer of its own; they share the layer's scale and bias where the members do."""
    posterior, out = layer.posterior["weight"], []
    shared = {
        n: None if p is None else nn.Parameter(p.detach().clone())
        for n, p in (("weight", layer.weight), ("bias", layer.bias))
    }
    for k in range(posterior.members):
        one = copy.deepcopy(sb.debayesianize(copy.deepcopy(layer)))
        one.weight, one.bias = shared["weight"], shared["bias"]
        if k and posterior.weight is not None:
            one.weight, one.bias = (
                nn.Parameter(posterior.weight[k - 1].clone()),
                nn.Parameter(posterior.bias[k - 1].clone()),
            )
        if k and posterior.running_mean is not None:
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                getattr(one, name).copy_(getattr(posterior, name)[k - 1])
        out.append(one)
    return out


def by_hand(nets: list[Any], x: Tensor, member: list[int]) -> Tensor:
    """Every member on its rows."""
    out = torch.empty_like(x)
    for k, one in enumerate(nets):
        rows = [i for i, m in enumerate(member) if m == k]
        if rows:
            out[rows] = one(x[rows])
    return out


def assert_same(layer: Any, nets: list[Any]) -> None:
    """Statistics, parameters' gradients and counts of a layer are those of separate ones."""
    for ours, theirs in zip(separate(layer), nets, strict=True):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(
                ours.state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name
            )
    posterior = layer.posterior["weight"]
    for name in ("weight", "bias"):
        if getattr(layer, name) is not None:
            gradients = [
                getattr(layer, name).grad,
                *([] if posterior.weight is None else getattr(posterior, name).grad),
            ]
            for ours, theirs in zip(gradients, nets, strict=False):
                torch.testing.assert_close(
                    ours, getattr(theirs, name).grad, rtol=1e-9, atol=1e-9
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "draws", "affine"), pairwise(LAYERS, [1, 2], [False, True])
)
def test_training_and_prediction_equal_separate_layers(
    case: str, draws: int, affine: bool
) -> None:
    layer, rows = made(case, affine), 4
    nets = separate(layer)
    member = [i // rows % K for i in range(draws * K * rows)]
    for _ in range(3):
        ours, theirs = (
            (x := input_of(case, len(member))).requires_grad_(),
            x.detach().clone().requires_grad_(),
        )
        target = torch.randn_like(x)
        y, expected = (
            sb.sample(layer, ours, draws=draws * K, rows="split").flatten(0, 1),
            by_hand(nets, theirs, member),
        )
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        (y - target).square().sum().backward()
        (expected - target).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    assert_same(layer, nets)
    layer.eval(), [one.eval() for one in nets]
    x = input_of(case, len(member))
    torch.testing.assert_close(
        sb.sample(layer, x, draws=draws * K, rows="split").flatten(0, 1),
        by_hand(nets, x, member),
        rtol=1e-12,
        atol=1e-12,
    )
    assert_same(layer, nets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rows", "training"), pairwise(LAYERS, [1, 2, 7, 9], [True, False])
)
def test_a_bare_call_shares_rows_out(case: str, rows: int, training: bool) -> None:
    layer = made(case).train(training)
    nets = [one.train(training) for one in separate(layer)]
    before, firsts = copy.deepcopy(layer.state_dict()), set()
    smallest = rows // K if rows >= K else 1
    fails = (
        (training or not layer.track_running_stats)
        and len(LAYERS[case][1]) == 1
        and smallest == 1
    )
    for _ in range(8):
        x = input_of(case, rows)
        if fails:
            with pytest.raises(
                ValueError,
                match=r"weight: every member's statistics need more than one value for each channel.*"
                r"2 rows or more for each of the 3",
            ):
                layer(x)
            continue
        y, first = layer(x), int(layer.posterior["weight"].current.first)
        firsts.add(first % K)
        torch.testing.assert_close(
            y,
            by_hand(nets, x, [(i * K // rows + first) % K for i in range(rows)]),
            rtol=1e-12,
            atol=1e-12,
        )
    if fails:  # and leaves everything as it was
        assert all(torch.equal(t, before[n]) for n, t in layer.state_dict().items())
    else:
        assert_same(layer, nets)
        assert len(firsts) > 1


@every_layer
def test_one_member_at_a_time_moves_its_own_statistics(case: str) -> None:
    layer = made(case)
    nets = separate(layer)
    for k in (2, 0, 2, 1):
        x = input_of(case, 4)
        y = passes.run(
            noise.draw(passes.posteriors_of(layer), Pass(1, 4, first=k, rowwise=False)),
            layer,
            x,
        )
        torch.testing.assert_close(y, nets[k](x), rtol=1e-12, atol=1e-12)
    assert_same(layer, nets)
    x = input_of(case, 4)
    torch.testing.assert_close(
        sb.sample(layer, x, parallel=False),
        torch.stack([one(x) for one in nets]),
        rtol=1e-12,
        atol=1e-12,
    )
    assert_same(layer, nets)


@every_layer
def test_a_single_member_is_the_plain_layer_bit_for_bit(case: str) -> None:
    layer = made(case, affine=True, members=1)
    (plain,) = separate(layer)
    for training in (True, True, False):
        layer.train(training), plain.train(training)
        x = input_of(case, 4)
        assert torch.equal(sb.sample(layer, x)[0], plain(x)) and torch.equal(
            layer(x), plain(x)
        )
    assert all(
        torch.equal(layer.state_dict()[n], t) for n, t in plain.state_dict().items()
    )
    assert list(layer.state_dict()) == list(plain.state_dict())


def test_members_see_only_their_rows() -> None:
    layer, x = made("2d"), input_of("2d", 4 * K)
    changed = x.clone()
    changed[4:8] *= 10
    before, after = (
        sb.sample(copy.deepcopy(layer), rows, rows="split") for rows in (x, changed)
    )
    assert (
        torch.equal(before[0], after[0])
        and torch.equal(before[2], after[2])
        and not torch.allclose(before[1], after[1])
    )
    rows = x.clone().requires_grad_()
    sb.sample(layer, rows, rows="split")[1].square().sum().backward()
    assert [bool(part.any()) for part in rows.grad.split(4)] == [False, True, False]


class Windows(nn.Module):
    """Cuts each row into windows that go through the norm as rows of their own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("training", [True, False])
def test_windows_belong_to_the_member_of_their_row(training: bool) -> None:
    net = sb.bayesianize(
        Windows(nn.BatchNorm1d(C)).double(), sb.MemberNorm(members=K)
    ).train(training)
    nets = [one.train(training) for one in separate(net.norm)]
    x = torch.randn(5, 2, C).double()
    y, first = net(x), int(net.norm.posterior["weight"].current.first)
    member = [(i * K // 5 + first) % K for i in range(5) for _ in range(2)]
    torch.testing.assert_close(y.flatten(0, 1), by_hand(nets, x.flatten(0, 1), member))


def test_a_held_pass_keeps_members() -> None:
    layer = made("2d").eval()
    nets = [one.eval() for one in separate(layer)]
    x = input_of("2d", 7)
    with sb.fixed_draws(layer, 2 * K):
        torch.testing.assert_close(
            sb.sample(layer, x), torch.stack([one(x) for one in nets] * 2)
        )
        torch.testing.assert_close(
            layer(x), by_hand(nets, x, [i * 2 * K // 7 % K for i in range(7)])
        )


def test_one_row_that_stands_for_all_is_seen_by_every_member() -> None:
    class Token(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.token = norm, nn.Buffer(input_of("2d", 1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.token)

    layer, x = made("2d").eval(), input_of("2d", 2)
    nets = [one.eval() for one in separate(layer)]
    net = sb.bayesianize(
        Token(nn.BatchNorm2d(C)).double(), sb.MemberNorm(members=K)
    ).eval()
    net.norm = layer
    expected = by_hand(
        nets, net.token.expand(2 * K, *x.shape[1:]), [0, 0, 1, 1, 2, 2]
    ).unflatten(0, (K, 2))
    torch.testing.assert_close(sb.sample(net, x, parallel=True), x + expected)


class Net(nn.Module):
    """Convolution, norm, dense: for members of another method."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc, self.norm = (
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.Linear(4, 3),
            nn.LayerNorm(3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3))))


def network(affine: bool = False) -> Any:
    members = sb.BatchEnsemble(members=K, mean_init=sb.Normal(1.0, 0.5))
    return sb.bayesianize(
        Net(), {r"bn|norm": sb.MemberNorm(members=K, affine=affine), r".*": members}
    )


def test_members_of_a_network_normalise_apart() -> None:
    net = network().double()
    alone, x = copy.deepcopy(net), torch.randn(6, 2, 5, 5).double()
    for _ in range(2):
        torch.testing.assert_close(
            sb.sample(net, x, draws=2 * K)[:K], sb.sample(alone, x, parallel=False)
        )
    means = torch.cat(
        [net.bn.running_mean[None], net.bn.posterior["weight"].running_mean]
    )
    assert (means[0] - means[1]).abs().max() > 0.01 and (
        means[1] - means[2]
    ).abs().max() > 0.01
    # Folded draws count twice as many values, so that only the means agree.
    torch.testing.assert_close(
        means,
        torch.cat(
            [alone.bn.running_mean[None], alone.bn.posterior["weight"].running_mean]
        ),
    )
    net.eval()
    torch.testing.assert_close(sb.sample(net, x), sb.sample(net, x, parallel=False))
    torch.manual_seed(1)
    expected = sb.predict(net, x, draws=8, share=False).samples
    torch.manual_seed(1)
    torch.testing.assert_close(sb.predict(net, x, draws=8).samples, expected)


def test_what_comes_before_the_first_member_norm_is_computed_once() -> None:
    net = sb.bayesianize(
        Net().eval(), sb.MemberNorm(members=2)
    )  # nothing else tells draws apart
    net.bn.posterior["weight"].running_mean.add_(1.0)
    x, seen = torch.randn(6, 2, 5, 5), []
    sb.sample(net, x, draws=8)  # locates rows
    net.conv.register_forward_hook(
        lambda module, args, output: seen.append(len(output))
    )
    net.fc.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    shared, apart = (
        sb.predict(net, x, draws=8, share=share).samples for share in (True, False)
    )
    torch.testing.assert_close(shared, apart)
    assert seen == [6, 8 * 6, 8 * 6, 8 * 6] and not torch.allclose(shared[0], shared[1])


def test_a_second_conversion_adds_member_norms_to_any_method() -> None:
    net = sb.bayesianize(Net(), sb.Rank1(members=K))
    sb.bayesianize(net, sb.MemberNorm(members=sb.members(net)))
    rows = {row.name: row for row in sb.summary(net).rows}
    assert [rows[n].status for n in ("conv", "bn", "fc", "norm")] == [
        "converted",
        "converted",
        "converted",
        "skipped",
    ]
    assert rows["bn"].detail == "MemberNorm(members=3)"
    assert (
        sb.sample(net, torch.randn(4, 2, 5, 5)).shape == (K, 4, 3)
        and type(net).plain is Net
        and type(net).__bases__[-1] is Net
    )
    with pytest.raises(ValueError, match="bn .*converted already"):
        sb.bayesianize(net, sb.MemberNorm(members=K), strict=True)


def test_other_layers_stay_and_say_why() -> None:
    rows = {row.name: row for row in sb.summary(network()).rows}
    assert (
        rows["norm"].status == "skipped"
        and rows["norm"].detail
        == "its statistics are those of one row: members have their own already"
    )
    rows = {
        row.name: row for row in sb.summary(sb.bayesianize(Net(), sb.MemberNorm())).rows
    }
    assert (
        rows["fc"].detail == "not among the layers that MemberNorm(members=4) is for"
        and "one row" in rows["norm"].detail
    )
    with pytest.raises(
        ValueError,
        match="MemberNorm looked for batch norm .*found none among: LayerNorm",
    ):
        sb.bayesianize(Net(), {"norm": sb.MemberNorm(), "fc": sb.Rank1()})
    with pytest.raises(
        ValueError, match="members must be a whole number of at least 1, got 0"
    ):
        sb.MemberNorm(members=0)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "momentum"), [("sample", 0.1), ("bare", None)])
def test_compiles_as_one_graph_that_trains(call: str, momentum: float | None) -> None:
    net = network(affine=True)
    net.bn.momentum = momentum
    eager, x = copy.deepcopy(net), torch.randn(7, 2, 5, 5)
    torch._dynamo.reset()
    for model in (eager, net):  # a graph needs rows to be located before
        torch.manual_seed(1)
        with torch.no_grad():
            model(x)
    compiled: Any = torch.compile(net, fullgraph=True, backend="eager")
    for _ in range(2):
        outputs = []
        for model in (eager, compiled):
            torch.manual_seed(2)
            outputs.append(sb.sample(model, x) if call == "sample" else model(x))
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(
            net.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name
        )
    for (name, p), q in zip(eager.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4, msg=name)


class NoQuestions(TorchDispatchMode):
    """Refuses operations that make the host wait for the device, or copy numbers of its own there: no CUDA graph could
    record them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func.overloadpacket.__name__ not in (
            "_local_scalar_dense",
            "nonzero",
            "equal",
            "lift_fresh",
            "bincount",
            "masked_select",
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@every_layer
def test_asks_the_device_nothing(case: str, training: bool) -> None:
    layer = made(case).train(training)
    sb.sample(
        layer, input_of(case, 7), draws=2
    )  # locating the rows of a kind of input asks, once
    with NoQuestions():
        for rows in (6, 7):
            layer(input_of(case, rows))
            sb.sample(
                layer, input_of(case, rows).requires_grad_(), draws=2
            ).sum().backward()
            sb.sample(layer, input_of(case, rows), parallel=False)


@pytest.mark.parametrize("draws", [1, 2])
def test_keeps_the_memory_format_and_half_precision(draws: int) -> None:
    layer = sb.bayesianize(nn.BatchNorm2d(4), sb.MemberNorm(members=2))
    x = torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    for training in (True, False):
        posteriors = passes.posteriors_of(layer.train(training))
        current = noise.draw(posteriors, Pass(2 * draws, 8))
        current.layout = layout_of(layer, (x,), {}, posteriors)
        assert passes.run(current, layer, x).is_contiguous(
            memory_format=torch.channels_last
        )
        with torch.autocast("cpu", torch.bfloat16):
            half = passes.run(current, layer, x.bfloat16())
        assert (
            half.dtype == torch.bfloat16 and layer.running_mean.dtype == torch.float32
        )
        assert half.isfinite().all()


def test_several_passes_before_one_backward() -> None:
    net, x = network(affine=True), torch.randn(6, 2, 5, 5)
    outputs = [
        sb.sample(net, x),
        net(x),
        sb.sample(net.eval(), x),
        sb.sample(net.train(), x, parallel=False),
    ]
    sum(y.square().sum() for y in outputs).backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_saved_statistics_come_back_and_member_0_is_the_layer(tmp_path: Path) -> None:
    net, x = network(affine=True), torch.randn(6, 2, 5, 5)
    for _ in range(3):
        sb.sample(net, x)
    again = sb.load(
        Net(), sb.save(net.eval(), tmp_path / "posterior", base=True)
    ).eval()
    assert all(
        torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items()
    )
    assert torch.equal(sb.sample(net, x), sb.sample(again, x))
    assert net.bn.posterior["weight"].num_batches_tracked.tolist() == [3, 3]
    mean = net.bn.running_mean.clone()
    assert (
        torch.equal(sb.debayesianize(net).bn.running_mean, mean)
        and type(net.bn) is nn.BatchNorm2d
    )


def test_statistics_are_reset_for_every_member() -> None:
    net, data = network().double(), [torch.randn(6, 2, 5, 5).double() for _ in range(3)]
    for x in data:
        sb.sample(net, 5 + x)
    update_bn(data, net)  # sets a cumulative average going, with bare calls
    posterior = net.bn.posterior["weight"]
    assert (
        posterior.num_batches_tracked.tolist() == [3, 3]
        and (posterior.running_mean.abs() < 2).all()
    )


def test_scales_of_members_are_weights_like_the_layers_own() -> None:
    net = network(affine=True)
    assert (
        torch.equal(net.bn.posterior["weight"].weight, net.bn.weight.expand(2, -1))
        and float(sb.kl(net)) == 0
    )
    groups = sb.param_groups(
        net, {"kernels": 1.0, "norms": 2.0}, lr=1.0, posterior_lr_multiplier=0.5
    )
    found = {id(p): (g["weight_decay"], g["lr"]) for g in groups for p in g["params"]}
    assert (
        found[id(net.bn.posterior["weight"].weight)] == (2.0, 1.0)
        and found[id(net.fc.posterior["weight"].r.loc)][1] == 0.5
    )


def test_resnet50_counts_what_the_papers_code_would_have_had() -> None:
    with torch.device("meta"):
        net = models.resnet50(classes=1000)
    extra = sb.estimate_cost(
        net, sb.MemberNorm(members=4, affine=True)
    ).extra_parameters
    assert extra == 3 * 53_120  # 26.14 million parameters instead of 26.0
    assert sb.estimate_cost(net, sb.MemberNorm(members=4)).extra_parameters == 0
