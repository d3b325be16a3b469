"""What a model plans once is planned again when it changes: its modules, their device and type, their weights."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine import modules, passes
from slimbayes.engine.modules import Tree, anchors_of, posteriors_of, tree_of


def stack(members: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return sb.bayesianize(
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), sb.Rank1(members=members)
    )


def names(model: nn.Module) -> list[str]:
    return [p.name for p in posteriors_of(model)]


def test_a_tree_is_read_again_when_modules_change() -> None:
    model = stack()
    first = tree_of(model)
    assert tree_of(model) is first and posteriors_of(model) is first.posteriors
    del model[1]  # torch gives the container a new dictionary
    assert names(model) == ["0.weight", "2.weight"]
    model[0] = nn.Linear(3, 3)
    assert names(model) == ["2.weight"]
    model.append(sb.bayesianize(nn.Linear(3, 3), sb.Rank1()))
    assert len(posteriors_of(model)) == 2
    assert sb.sample(model, torch.randn(4, 3)).shape[1:] == (4, 3)


def test_a_penalty_follows_the_parameters() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
        sb.ModelPatch(components=3, init="ones"),
    )
    shared = {"shared_weights": 1.0, "shared_biases": 1.0}
    first = float(sb.l2(net, **shared).detach())
    net[0].bias = nn.Parameter(
        torch.full((2,), 10.0)
    )  # a parameter that was not there when the roles were worked out
    second = float(sb.l2(net, **shared).detach())
    assert (
        abs(second - float(net[0].weight.square().sum().detach()) - 200.0) < 1e-3
        and second != first
    )
    net[0].bias.data.fill_(0.0)
    assert (
        abs(
            float(sb.l2(net, **shared).detach())
            - float(net[0].weight.square().sum().detach())
        )
        < 1e-5
    )
    net[0].register_parameter("extra", nn.Parameter(torch.ones(3)))
    assert abs(float(sb.l2(net, shared_biases=1.0).detach()) - 3.0) < 1e-6


def test_biases_of_layers_are_joined_to_those_of_members() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2)
    )
    net = sb.bayesianize(net, sb.Rank1(members=2, draws="member"))
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    posteriors, seen = posteriors_of(net), []
    handle = net.register_forward_hook(
        lambda *_: seen.append(dict(passes.innermost().values))
    )  # type: ignore[union-attr]
    y = sb.sample(net, torch.randn(3, 2, 3), seed=1)
    handle.remove()
    drawn = [seen[-1][p.key] for p in posteriors]
    own = [layer.bias for layer in (net[0], net[2], net[3])]
    assert all(d.own is bias for d, bias in zip(drawn, own, strict=True))
    offsets = [torch.cat([torch.zeros(1, p.bias.shape[1]), p.bias]) for p in posteriors]
    torch.testing.assert_close(
        [d.bias for d in drawn], [b + o for b, o in zip(own, offsets, strict=True)]
    )
    assert y.shape == (2, 3, 2)


def test_the_kl_follows_the_modules() -> None:
    model = stack()
    whole, last = sb.kl(model), sb.kl(model[2])
    model[2] = nn.Linear(3, 3)
    torch.testing.assert_close(sb.kl(model), whole - last)


def test_a_changed_parameter_counts_at_once() -> None:
    """Past the version counter, too, which writes into .data do not move."""
    model, x = stack(), torch.randn(4, 3)
    before, out = sb.kl(model), sb.sample(model, x, seed=0)
    model[0].posterior["weight"].r.loc.data.add_(1.0)
    assert sb.kl(model) > before
    assert not torch.allclose(sb.sample(model, x, seed=0), out)
    model[2].bias = nn.Parameter(torch.full((3,), 100.0))
    assert bool((sb.sample(model, x, seed=0).mean() > 50).all())


def test_another_type_of_parameters() -> None:
    model, x = stack(), torch.randn(4, 3)
    out = sb.sample(model, x, seed=0)
    model.double()
    assert sb.sample(model, x.double(), seed=0).dtype == torch.float64
    assert sb.kl(model).dtype == torch.float64
    model.float()
    torch.testing.assert_close(sb.sample(model, x, seed=0), out)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy]
)
def test_copies_plan_for_themselves(copied: object) -> None:
    model, x = stack(), torch.randn(4, 3)
    out = sb.sample(model, x, seed=0)
    other = copied(model)  # type: ignore[operator]
    torch.testing.assert_close(sb.sample(other, x, seed=0), out)
    assert other.__dict__["_slimbayes_tree"].modules[0] is other
    assert not pickle.loads(pickle.dumps(tree_of(model))).modules


@pytest.mark.slow
def test_plain_modules_keep_nothing_and_models_can_be_freed() -> None:
    net = nn.Linear(2, 2)
    assert posteriors_of(net) == [] and "_slimbayes_tree" not in net.__dict__
    model = stack()
    sb.sample(model, torch.randn(4, 3))
    assert "_slimbayes_tree" in model.__dict__
    assert "_slimbayes_tree" not in sb.debayesianize(model).__dict__
    model = stack()
    sb.sample(model, torch.randn(4, 3))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_layers_that_share_a_weight_have_a_bias_each() -> None:
    """They share a posterior, whose draws have the bias of one of them in them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            nn.init.zeros_(self.a.bias)
            nn.init.constant_(self.b.bias, 5.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.a(x), self.b(x)], 1)

    torch.manual_seed(0)
    model = sb.bayesianize(Tied(), sb.BatchEnsemble(members=2))
    assert len(posteriors_of(model)) == 1
    with torch.no_grad():
        out = sb.sample(model, torch.randn(4, 3))
    torch.testing.assert_close(out[:, :, 1] - out[:, :, 0], torch.full((2, 4, 3), 5.0))


def test_biases_train_as_they_did() -> None:
    """Gradients of a layer's own bias and of the members' offsets, against sums over rows by hand."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(3, 2), sb.BatchEnsemble(members=2))
    sb.sample(model, torch.randn(4, 3)).mul(
        torch.tensor([1.0, 10.0]).view(2, 1, 1)
    ).sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.full((2,), 44.0))
    torch.testing.assert_close(
        model.posterior["weight"].bias.grad, torch.full((1, 2), 40.0)
    )


def test_anchors_are_those_of_the_posteriors() -> None:
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        {"0": sb.MeanField(), "1": sb.ModelPatch(components=2)},
    )
    every = posteriors_of(model)
    for _ in range(2):
        assert all(a is p.anchor for a, p in zip(anchors_of(every), every, strict=True))
    moved = every[0]
    name = next(iter(moved._parameters))
    moved._parameters.pop(name)
    assert len(anchors_of(modules.Posteriors(every[1:]))) == len(every) - 1


def test_a_tree_of_nothing() -> None:
    assert Tree().modules == [] and not Tree().stands(nn.Linear(1, 1))
    assert passes.posteriors_of is posteriors_of
