"""Training posteriors over a frozen model: what trains, what is saved, members as plain models, and other adapters."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x))


def train(net: nn.Module, steps: int = 3) -> None:
    net.train()
    optimizer = torch.optim.SGD(
        [p for p in net.parameters() if p.requires_grad], lr=0.1
    )
    for _ in range(steps):
        x, y = torch.randn(12, 4), torch.randint(3, (12,))
        optimizer.zero_grad()
        sb.elbo(sb.categorical(sb.sample(net, x), y), net, num_data=100).loss.backward()
        optimizer.step()
    net.eval()


def names(net: nn.Module) -> set[str]:
    return {name for name, p in net.named_parameters() if p.requires_grad}


def test_posteriors_train_alone_and_the_model_thaws_when_it_is_plain_again() -> None:
    net = Net()
    before = {name: p.clone() for name, p in net.named_parameters()}
    net.body[0].bias.requires_grad_(False)
    sb.bayesianize(net, sb.Rank1(members=2), train="posterior")
    assert names(net) and all(".posterior." in name for name in names(net))
    train(net)
    assert all(torch.equal(p, net.get_parameter(name)) for name, p in before.items())
    assert any(bool((p.r.loc != 1).any()) for p in posteriors_of(net))
    assert names(sb.debayesianize(net)) == before.keys() - {"body.0.bias"}


@pytest.mark.slow
def test_biases_of_members_train_where_those_of_the_layer_do() -> None:
    """They have no prior: in a network that fits its data already Adam would take them anywhere."""
    net = sb.bayesianize(
        Net(), sb.Rank1(members=3), train="posterior+head", head="classifier"
    )
    offsets = {
        name
        for name, _ in net.named_parameters()
        if name.endswith("posterior.weight.bias")
    }
    assert len(offsets) > 1 and offsets & names(net) == {
        "classifier.posterior.weight.bias"
    }
    sb.keep_members(net, members=[0, 2])
    assert offsets & names(net) == {"classifier.posterior.weight.bias"}
    alone = sb.bayesianize(Net(), sb.Rank1(members=3), train="posterior")
    assert not offsets & names(alone) and offsets <= names(
        sb.bayesianize(Net(), sb.Rank1(members=3))
    )
    fits = nn.Linear(2, 2).eval()
    with torch.no_grad():
        fits.weight.copy_(20 * torch.eye(2))
    x, y = torch.tensor([[1.0, 0.0], [0.0, 0.9]]), torch.tensor([0, 1])
    tuned = sb.bayesianize(
        fits, sb.Rank1(members=2, prior=sb.Normal(1.0, 0.1)), train="posterior"
    ).train()
    optimizer = torch.optim.Adam(sb.param_groups(tuned), 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        sb.elbo(
            sb.categorical(sb.sample(tuned, x), y), tuned, num_data=2
        ).loss.backward()
        optimizer.step()
    assert all(
        torch.equal(sb.materialize(tuned.eval(), member=k).bias, fits.bias)
        for k in (0, 1)
    )


@pytest.mark.parametrize("head", ["classifier", None, nn.Linear])
def test_a_head_trains_and_is_saved_with_the_posterior(
    head: Any, tmp_path: Path
) -> None:
    plain = Net()
    net = sb.bayesianize(
        copy.deepcopy(plain),
        sb.Rank1(members=2),
        "body.0",
        train="posterior+head",
        head=head,
    )
    heads = {"classifier.weight", "classifier.bias"} | (
        {"body.0.weight", "body.0.bias"} if head is nn.Linear else set()
    )
    assert {name for name in names(net) if ".posterior." not in name} == heads
    train(net)
    assert not torch.equal(net.classifier.weight, plain.classifier.weight)
    path = sb.save(net, tmp_path / "adapter")
    again = sb.load(copy.deepcopy(plain), path)
    assert all(
        torch.equal(again.state_dict()[name], tensor)
        for name, tensor in net.state_dict().items()
    )
    assert names(again) == names(net)
    assert not torch.equal(
        net.body[1].running_mean, plain.body[1].running_mean
    )  # statistics move by themselves
    if head is not nn.Linear:  # with all of them nothing of the base is left
        other = Net()
        with pytest.raises(sb.CheckpointError, match="other weights"):
            sb.load(other, path)
        assert names(other) == {name for name, _ in other.named_parameters()}
    whole = sb.load(Net(), sb.save(net, tmp_path / "whole", base=True))
    assert all(
        torch.equal(whole.state_dict()[name], tensor)
        for name, tensor in net.state_dict().items()
    )


def test_norms_that_are_named_as_heads_train(tmp_path: Path) -> None:
    plain = Net()
    net = sb.bayesianize(
        copy.deepcopy(plain),
        sb.Rank1(members=2),
        train="posterior+head",
        head=r"classifier|body\.1",
    )
    trains = {name for name in names(net) if ".posterior." not in name}
    assert trains == {
        "body.1.weight",
        "body.1.bias",
        "classifier.weight",
        "classifier.bias",
    }
    train(net)
    assert not torch.equal(net.body[1].weight, plain.body[1].weight)
    again = sb.load(copy.deepcopy(plain), sb.save(net, tmp_path / "adapter"))
    assert names(again) == names(net)
    assert all(
        torch.equal(again.state_dict()[name], tensor)
        for name, tensor in net.state_dict().items()
    )
    fitted = sb.bayesianize(
        copy.deepcopy(plain),
        sb.Rank1(members=2),
        train="posterior+head",
        head="classifier",
    )
    del fitted.body[1]  # a norm that was taken out since is no obstacle
    assert sb.save(fitted, tmp_path / "less").exists()


def test_whole_names_and_last_parts_of_names_go_together() -> None:
    net = sb.bayesianize(Net(), sb.Rank1(members=2), include="classifier|0")
    assert {row.name for row in sb.summary(net).rows if row.status == "converted"} == {
        "classifier",
        "body.0",
    }


def test_heads_of_parts_and_of_single_layers_come_back(tmp_path: Path) -> None:
    layer = nn.Linear(4, 3)
    alone = sb.bayesianize(
        copy.deepcopy(layer), sb.Rank1(members=1), train="posterior+head"
    )
    nn.init.normal_(alone.weight)
    again = sb.load(copy.deepcopy(layer), sb.save(alone, tmp_path / "alone"))
    assert torch.equal(again.weight, alone.weight) and again.weight.requires_grad
    plain = Net()
    part = copy.deepcopy(plain)
    sb.bayesianize(part.body, sb.Rank1(members=1), train="posterior+head", head="0")
    nn.init.normal_(part.body[0].weight)
    again = sb.load(copy.deepcopy(plain), sb.save(part, tmp_path / "part"))
    assert all(
        torch.equal(again.state_dict()[name], tensor)
        for name, tensor in part.state_dict().items()
    )
    assert names(again) == names(part)


def test_what_trains_is_asked_for_in_words() -> None:
    for options, message in (
        (
            {"train": "posteriors"},
            r"unknown train 'posteriors'; did you mean 'posterior'",
        ),
        (
            {"train": "posterior", "head": "classifier"},
            r'give train="posterior\+head" too',
        ),
        (
            {"train": "posterior+head", "head": "clasifier"},
            r"head='clasifier' matches no",
        ),
    ):
        net = Net()
        with pytest.raises(ValueError, match=message):
            sb.bayesianize(net, sb.Rank1(), **options)
        assert not posteriors_of(net) and all(p.requires_grad for p in net.parameters())
    net = sb.bayesianize(nn.Linear(10, 10), sb.Rank1(members=1), train="posterior")
    assert (
        str(sb.trainable(net)) == "40 of 150 parameters train (26.67%)"
        and sb.trainable(net).share == 40 / 150
    )


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return {
        "conv": (conv.eval(), torch.randn(4, 2, 5, 5)),
        "attention": (attention.eval(), torch.randn(4, 3, 8)),
        "lstm": (nn.LSTM(4, 5, batch_first=True).eval(), torch.randn(4, 3, 4)),
    }


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("kind", list(models()))
def test_a_member_as_a_plain_model_is_that_member(kind: str) -> None:
    net, x = models()[kind]
    sb.bayesianize(net, sb.BatchEnsemble(members=3))
    for p in posteriors_of(net):
        if p.bias is not None:
            nn.init.normal_(p.bias)
    drawn = first(sb.sample(net, x))
    for k in range(3):
        torch.testing.assert_close(
            first(sb.materialize(net, member=k)(x)), drawn[k], rtol=1e-4, atol=1e-5
        )
    kept = first(sb.sample(sb.keep_members(copy.deepcopy(net), [2, 0]), x))
    torch.testing.assert_close(kept, drawn[[2, 0]], rtol=1e-4, atol=1e-5)
    assert (
        type(sb.materialize(net, member=0)) is type(models()[kind][0])
        and sb.members(net) == 3
    )


def test_the_mean_of_members_has_their_mean_weights() -> None:
    net = sb.bayesianize(
        nn.Linear(4, 3), sb.Rank1(members=3, mean_init=sb.Normal(1.0, 0.5))
    )
    p = net.posterior["weight"]
    nn.init.normal_(p.bias)
    average = sb.materialize(net, member="mean")
    expected = (
        sum(net.weight * torch.outer(p.r.loc[k, 0], p.s.loc[k, 0]) for k in range(3))
        / 3
    )
    torch.testing.assert_close(average.weight, expected)
    torch.testing.assert_close(average.bias, net.bias + p.bias.sum(0) / 3)
    for config in (
        sb.KTied(),
        sb.MeanField(),
        sb.JointNormal(over="weights"),
    ):
        layer = nn.Linear(4, 3)
        own = layer.weight.detach().clone()
        torch.testing.assert_close(
            sb.materialize(sb.bayesianize(layer, config), member=0).weight, own
        )
    with pytest.raises(ValueError, match="has no mean that is one network"):
        sb.materialize(
            sb.bayesianize(nn.Linear(4, 3), sb.Mixture(components=2)), member=0
        )
    with pytest.raises(
        ValueError, match=r'member must be "mean" or a number from 0 to 2, got 3'
    ):
        sb.materialize(net, member=3)


@pytest.mark.parametrize(
    "configs",
    [
        {
            "body.0|classifier": sb.Rank1(
                members=4, posterior="point", mean_init=sb.Normal(1.0, 0.5)
            )
        },
        {
            "body.0": sb.BatchEnsemble(members=4),
            "body.1": sb.MemberNorm(members=4, affine=True),
        },
        sb.Ensemble(members=4),
    ],
    ids=["rank1", "norms", "ensemble"],
)
def test_kept_members_are_those_members(configs: Any, tmp_path: Path) -> None:
    net, x = sb.bayesianize(Net().eval(), configs), torch.randn(5, 4)
    for p in posteriors_of(net):
        for tensor in (
            *p.parameters(),
            *(b for n, b in p.named_buffers() if "running" in n),
        ):
            nn.init.uniform_(tensor, 0.5, 1.5)
    before = sb.sample(net, x)
    kept = sb.keep_members(copy.deepcopy(net), [3, 0, 2])
    torch.testing.assert_close(
        sb.sample(kept, x), before[[3, 0, 2]], rtol=1e-4, atol=1e-5
    )
    again = sb.load(Net().eval(), sb.save(kept, tmp_path / "kept", base=True))
    assert torch.equal(sb.sample(again, x), sb.sample(kept, x))
    one = sb.keep_members(kept, [1])
    torch.testing.assert_close(sb.sample(one, x), before[[0]], rtol=1e-4, atol=1e-5)


def test_members_that_are_none_are_refused() -> None:
    net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=3))
    for members in ([], [0, 0], [3], [-1]):
        with pytest.raises(
            ValueError, match="different numbers of members from 0 to 2"
        ):
            sb.keep_members(net, members)
    mixed = sb.bayesianize(
        nn.Linear(4, 3), sb.Mixture(components=2, assignment="model")
    )
    with pytest.raises(ValueError, match="cannot be told apart"):
        sb.keep_members(mixed, [0])


class Tower(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.score, self.again = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
            again,
        )

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.v_proj(torch.tanh(self.q_proj(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(
            checkpoint(self.block, x, use_reentrant=False)
            if self.again
            else self.block(x)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_of_a_frozen_model_give_the_same_gradients(
    dtype: torch.dtype,
) -> None:
    plain, x, y = Tower().to(dtype), torch.randn(6, 4).to(dtype), torch.randint(3, (6,))
    gradients = []
    for again in (False, True):
        net = sb.bayesianize(
            copy.deepcopy(plain),
            sb.Rank1(members=2, scale_jitter=0.0),
            train="posterior",
        )
        net.again = again
        for p in posteriors_of(net):
            assert p.r.loc.dtype == torch.float32  # however narrow the base is
            nn.init.constant_(p.r.loc, 1.1)
            nn.init.constant_(p.s.loc, 0.9)
        loss = sb.elbo(
            sb.categorical(sb.sample(net, x, seed=3).float(), y), net, num_data=100
        ).loss
        loss.backward()
        assert all(
            p.grad is None
            for name, p in net.named_parameters()
            if ".posterior." not in name
        )
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


class Int8Linear(nn.Linear):
    """Stores its weight as bitsandbytes' layers do: integers and a scale for each output."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.bias = layer.bias
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == torch.int8
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def test_layers_of_integers_take_factors(tmp_path: Path) -> None:
    plain = nn.Sequential(
        Int8Linear(nn.Linear(4, 8)), nn.Tanh(), Int8Linear(nn.Linear(8, 3, bias=False))
    ).eval()
    float_net = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)
    ).eval()
    with torch.no_grad():
        for i in (0, 2):
            float_net[i].weight.copy_(plain[i].weight * plain[i].scale)
        float_net[0].bias.copy_(plain[0].bias)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    nets = []
    for net in (copy.deepcopy(plain), float_net):
        torch.manual_seed(3)
        nets.append(
            sb.bayesianize(net, sb.Rank1(members=2, scale_init=0.1), train="posterior")
        )
    for run in (
        lambda net: sb.sample(net, x, draws=6, seed=1),
        lambda net: sb.sample(net, x, seed=1, parallel=False),
        lambda net: sb.predict(net, x, draws=6, seed=1).probs,
    ):
        torch.testing.assert_close(run(nets[0]), run(nets[1]), rtol=1e-4, atol=1e-5)
    net = nets[0]
    sb.elbo(sb.categorical(sb.sample(net, x), y), net, num_data=100).loss.backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    again = sb.load(copy.deepcopy(plain), sb.save(net, tmp_path / "posterior"))
    assert torch.equal(
        sb.predict(again, x, seed=1).probs, sb.predict(net, x, seed=1).probs
    )
    copied = copy.deepcopy(net)
    assert torch.equal(
        sb.predict(copied, x, seed=1).probs, sb.predict(net, x, seed=1).probs
    )
    assert torch.equal(sb.debayesianize(copied)(x), plain(x))
    with pytest.raises(ValueError, match="integers cannot take factors in"):
        sb.materialize(net, member=0)
    fit = sb.laplace(copy.deepcopy(plain), [(x, y)])
    assert fit.log_evidence < 0
    with pytest.raises(ValueError, match="No layer would be converted"):
        sb.bayesianize(copy.deepcopy(plain), sb.KTied())


def test_errors_of_layers_of_integers_are_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = sb.bayesianize(
        nn.Sequential(Int8Linear(nn.Linear(4, 3))).eval(),
        sb.Rank1(members=2),
        train="posterior",
    )
    assert sb.predict(net, torch.randn(6, 4)).probs.shape == (6, 3)

    def fail(self: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(Int8Linear, "forward", fail)
    with pytest.raises(
        RuntimeError, match="no kernel for this"
    ):  # not that floats are to be made integers
        sb.predict(net, torch.randn(6, 4))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_bitsandbytes_layers_take_factors(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def eight_bits(layer: nn.Linear) -> nn.Module:
        stored = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, has_fp16_weights=False
        )
        stored.load_state_dict(layer.state_dict())
        return stored.to("cpu")

    plain = nn.Sequential(
        eight_bits(nn.Linear(8, 8)), nn.Tanh(), eight_bits(nn.Linear(8, 4))
    ).eval()
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    plain(x)  # stores the weights as integers
    assert plain[0].weight.dtype == torch.int8
    net = sb.bayesianize(
        copy.deepcopy(plain), sb.Rank1(members=2, posterior="point"), train="posterior"
    )
    s, r = (getattr(net[0].posterior["weight"], name).loc[1, 0] for name in "sr")
    hidden = (plain[0](x * s) - plain[0].bias) * r + plain[0].bias
    s, r = (getattr(net[2].posterior["weight"], name).loc[1, 0] for name in "sr")
    wanted = (plain[2](hidden.tanh() * s) - plain[2].bias) * r + plain[2].bias
    outputs = sb.sample(net, x)
    torch.testing.assert_close(outputs[1], wanted, rtol=1e-2, atol=1e-2)
    sb.elbo(sb.categorical(outputs, y), net, num_data=100).loss.backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    again = sb.load(copy.deepcopy(plain), sb.save(net, tmp_path / "posterior"))
    assert torch.equal(
        sb.predict(again, x, seed=1).probs, sb.predict(net, x, seed=1).probs
    )
    assert sb.laplace(copy.deepcopy(plain), [(x, y)]).log_evidence < 0
    with pytest.raises(
        ValueError, match="takes inputs of width 8"
    ):  # and says nothing of integers
        sb.predict(net, torch.randn(6, 5))


@pytest.mark.parametrize("before", [True, False], ids=["lora-first", "posterior-first"])
def test_lora_before_or_after(before: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False
    )
    x, y = torch.randn(6, 4), torch.randint(3, (6,))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(Tower(), config) if before else Tower()

    net = build()
    if before:  # a posterior over LoRA's own factors is one line
        sb.bayesianize(net, sb.Rank1(members=2), include=r".*lora_[AB].*")
        converted = [
            row.name for row in sb.summary(net).rows if row.status == "converted"
        ]
        assert len(converted) == 4 and all("lora_" in name for name in converted)
    else:
        sb.bayesianize(net, sb.Rank1(members=2), include="score", train="posterior")
        net = peft.get_peft_model(net, config)
        for p in posteriors_of(net):  # peft freezes all but its own
            p.requires_grad_(True)
    trains = names(net)
    assert any("lora_A" in name for name in trains) and any(
        ".posterior." in name for name in trains
    )
    assert not any(name.endswith("q_proj.base_layer.weight") for name in trains)
    outputs = sb.sample(net, x)
    assert outputs.shape == (2, 6, 3) and not torch.equal(outputs[0], outputs[1])
    sb.elbo(sb.categorical(outputs, y), net, num_data=100).loss.backward()
    assert all(net.get_parameter(name).grad is not None for name in trains)
    if before:
        path = sb.save(net, tmp_path / "posterior")
        again = sb.load(build(), path)
        assert torch.equal(
            sb.predict(again, x, seed=1).probs, sb.predict(net, x, seed=1).probs
        )
