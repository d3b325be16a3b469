"""Faults met in whole models of text, series, tables and agents nobody here wrote: a stand-in for each mechanism."""

import pickle
from abc import ABC
from copy import deepcopy
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from covering import each
from torch import Tensor, nn
from torch.distributions import Dirichlet, StudentT

import slimbayes as sb

Row = TypeVar("Row")
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class DroppedWeights(nn.Module):
    """A layer whose weight is a plain tensor, made anew from one of the module around it in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(4, 3)
        self.raw = self.layer.weight
        del self.layer.weight
        self.layer.weight = self.raw.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = (
            F.dropout(self.raw, 0.2) if self.training else self.raw.clone()
        )
        return self.layer(x)


@pytest.mark.parametrize(
    "config",
    [
        sb.Rank1(members=2),
        sb.BatchEnsemble(members=2),
        sb.Ensemble(members=2, init="copies"),
    ],
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_a_trial_does_not_make_a_dropped_weight_a_parameter(config: sb.Config) -> None:
    net = sb.bayesianize(DroppedWeights().train(), config)
    names = [name for name, _ in net.named_parameters()]
    for _ in range(2):
        net(X).sum().backward()
        assert [name for name, _ in net.named_parameters()] == names


def test_a_draw_of_a_weight_that_is_set_in_each_call_is_not_written_out() -> None:
    net = sb.bayesianize(DroppedWeights().eval(), sb.MeanField(scale_init=0.1))
    with torch.no_grad():
        assert sb.sample(net, X, draws=3).std(0).min() > 0
    with (
        sb.fixed_draws(net),
        torch.no_grad(),
        pytest.raises(ValueError, match="sets it anew in each call"),
    ):
        sb.materialize(net, draw=0)


def test_copies_have_the_padding_row_of_the_network() -> None:
    table = nn.Embedding(6, 4, padding_idx=0)
    head = nn.Linear(4, 6, bias=False)
    nn.init.normal_(table.weight)
    head.weight = table.weight  # the row of the padding is what its logit is made with
    plain = nn.Sequential(table, head)
    net = sb.bayesianize(deepcopy(plain), sb.Ensemble(members=2, init="copies"))
    words = torch.randint(6, (3, 5))
    for out in sb.sample(net, words):
        torch.testing.assert_close(out, plain(words))
    jittered: Any = sb.bayesianize(
        deepcopy(plain), sb.Ensemble(members=2, init="copies", jitter=0.5)
    )
    other = jittered.posterior["members"].others[0][0].weight
    assert torch.equal(other[0], table.weight[0])
    assert not torch.isclose(other[1:], table.weight[1:]).any()


class BrokenStart(nn.Module):
    """Its own way to start its parameters does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.child = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.weight[0, 0, 0] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.child(x), self.weight)


def test_members_start_where_a_network_cannot_start_itself() -> None:
    plain = BrokenStart()
    with pytest.warns(UserWarning, match="do not start as torch starts them"):
        net: Any = sb.bayesianize(deepcopy(plain), sb.Ensemble(members=2))
    for name, other in net.posterior["members"].others[0].named_parameters():
        own = plain.get_parameter(name)
        assert torch.equal(
            other.sort().values.flatten().sort().values, own.flatten().sort().values
        )  # in another order
        assert not torch.equal(other, own)


class Sampler(nn.Module):
    """Returns a draw of a distribution that torch makes of gamma variables."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.layer, self.family = nn.Linear(4, 3), family

    def forward(self, x: Tensor) -> Tensor:
        y = F.softplus(self.layer(x))
        return (
            StudentT(y + 2, y).sample()
            if self.family == "t"
            else y * Dirichlet(y).sample()
        )


@pytest.mark.parametrize("family", ["t", "dirichlet"])
def test_models_that_draw_gamma_variables_fold_and_follow_the_seed(family: str) -> None:
    net = sb.bayesianize(Sampler(family).eval(), sb.Rank1(members=2))
    first, again, other = (
        sb.sample(net, X, draws=2, seed=s, parallel=True) for s in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with sb.fixed_draws(net, seed=5):
        held = [sb.sample(net, X) for _ in range(2)]
    assert not torch.equal(*held)  # the network is held, what it draws is not
    one, two = (
        sb.predict(
            net, X, draws=2, seed=6, likelihood="gaussian", likelihood_std=1.0
        ).samples
        for _ in range(2)
    )
    assert torch.equal(one, two)


class Abstract(ABC, nn.Module):
    """Begins with a class that has no attributes: in memory it is not laid out as other modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Typed(Generic[Row], Abstract):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Bilinear(Generic[Row], nn.Module):
    """A layer of a type of its own, laid out so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("cls", "config"),
    each(
        [Abstract, Typed, Bilinear],
        [sb.Rank1(members=2), sb.Ensemble(members=2, init="copies", jitter=0.1)],
    ),
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_models_that_begin_with_an_abstract_or_a_generic_class(
    cls: Any, config: sb.Config
) -> None:
    plain = cls().eval()
    net = sb.bayesianize(deepcopy(plain), config)
    assert type(net).__mro__[-1] is object
    assert isinstance(net, cls)
    with torch.no_grad(), sb.fixed_draws(net, 4, seed=1):
        outputs = sb.sample(net, X)
        for j, out in enumerate(outputs):
            torch.testing.assert_close(sb.materialize(net, draw=j)(X), out)
        assert outputs.std(0).max() > 0
    for other in (deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(sb.sample(other, X, seed=2), sb.sample(net, X, seed=2))
    back = sb.debayesianize(net)
    assert type(back) is cls
    assert torch.equal(back(X), plain(X))


class Noisy(nn.Linear):
    """Its weight is a property, of a mean and of noise that is switched off."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        del self.weight
        self.weight_mean, self.weight_scale = (
            nn.Parameter(torch.randn(3, 4)),
            nn.Parameter(torch.ones(3, 4)),
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.weight_mean + 0.0 * self.weight_scale


@pytest.mark.parametrize(
    "config", [sb.Rank1(members=2), sb.MeanField(scale_init=0.2), sb.MatrixNormal()]
)
def test_layers_that_compute_their_weight_by_a_property_run_their_own_forward(
    config: sb.Config,
) -> None:
    net = sb.bayesianize(nn.Sequential(Noisy(), nn.Tanh()).eval(), config)
    with torch.no_grad(), sb.fixed_draws(net, 2 * sb.members(net), seed=1):
        outputs = sb.sample(net, X)
        for j, out in enumerate(outputs):
            torch.testing.assert_close(sb.materialize(net, draw=j)(X), out)
    assert outputs.std(0).min() > 0
    torch.testing.assert_close(
        sb.sample(net, X, seed=3, draws=2),
        sb.sample(net, X, seed=3, draws=2, parallel=False),
    )


class Decoder(nn.Module):
    """Returns a list with an entry for each row, as a decoder of labels does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y, [int(row.argmax()) for row in y]


def test_a_list_of_an_entry_for_each_row_is_told_in_words() -> None:
    net = sb.bayesianize(
        Decoder().eval(), sb.Ensemble(members=3, init="copies", jitter=0.5)
    )
    with pytest.warns(
        UserWarning, match="the number of outputs depends on the number of rows"
    ):
        y, labels = sb.sample(net, X)
    every = [
        torch.as_tensor(label).expand(3) for label in labels
    ]  # what draws agree on is one for all
    assert torch.equal(torch.stack(every, 1), y.argmax(-1))


def test_members_with_parts_that_have_no_numbers_are_saved(tmp_path: Any) -> None:
    shell = nn.Linear(4, 4)
    shell.shadow = torch.empty(3, device="meta")  # type: ignore[assignment]
    net = sb.bayesianize(
        deepcopy(shell), sb.Ensemble(members=2, init="copies", jitter=0.1)
    )
    sb.save(net, tmp_path / "net", base=True)
    assert torch.equal(
        sb.sample(sb.load(shell, tmp_path / "net"), X), sb.sample(net, X)
    )
