"""Faults that users of models nobody here wrote would have met: each against a slow or independent answer."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import each
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "config",
    [
        sb.MeanField(),
        sb.KTied(),
        sb.DropConnect(),
        sb.ModelPatch(patch=".*", components=2),
    ],
)
def test_the_padding_word_of_folded_draws_does_not_learn(config: Any) -> None:
    net = sb.bayesianize(
        nn.Sequential(
            nn.Embedding(9, 4, padding_idx=3), nn.Flatten(), nn.Linear(12, 2)
        ),
        config,
    )
    words = torch.tensor([[1, 3, 5], [3, 3, 2]])
    gradients = []
    for parallel in (True, False):
        net.zero_grad()
        sb.sample(
            net, words, draws=8, seed=1, parallel=parallel
        ).square().sum().backward()
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
def test_modules_with_two_names_are_saved_and_loaded(
    options: Any, tmp_path: Path
) -> None:
    plain = Updater()
    net = sb.bayesianize(
        copy.deepcopy(plain), sb.Rank1(members=2), include=".*0", **options
    )
    if options:
        net.net[2].weight.data.add_(1.0)
    again = sb.load(plain, sb.save(net, tmp_path / "posterior"))
    torch.testing.assert_close(
        sb.sample(again, X, seed=0), sb.sample(net, X, seed=0), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_layers_that_are_parametrised_after_their_conversion_become_plain_again(
    norm: Any,
) -> None:
    net, same = mlp(), mlp()
    same.load_state_dict(net.state_dict())
    sb.bayesianize(net, sb.MeanField(scale_init=0.2))
    for model in (net, same):
        torch.manual_seed(0)
        norm(model[0])
        model.eval()
    with sb.fixed_draws(net, 2):
        torch.testing.assert_close(sb.materialize(net, draw=1)(X), sb.sample(net, X)[1])
    plain = sb.debayesianize(net)
    assert parametrize.is_parametrized(plain[0], "weight") and not sb.kl(plain)
    torch.testing.assert_close(plain(X), same(X), rtol=0, atol=0)


@pytest.mark.parametrize("end", [nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_probabilities_are_no_logits(end: nn.Module, tmp_path: Path) -> None:
    net = sb.bayesianize(nn.Sequential(*mlp(), end), sb.Rank1(members=2))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    if isinstance(end, nn.LogSoftmax):  # logarithms of probabilities are logits
        with sb.fixed_draws(net, seed=0):
            outputs = sb.sample(net, X)
        torch.testing.assert_close(sb.predict(net, X, seed=0).samples, outputs.exp())
        return
    file = tmp_path / "net.pt2"
    for use in (
        lambda: sb.predict(net, X),
        lambda: sb.categorical(sb.sample(net, X), labels),
        lambda: sb.export(net, X, file, likelihood="categorical"),
    ):
        with pytest.raises(ValueError, match="probabilities already"):
            use()


def test_a_sigmoid_before_a_bernoulli_likelihood_is_told() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), sb.Rank1(members=2)
    )
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
    with (
        pytest.warns(sb.SlimbayesWarning)
        if isinstance(config, sb.Ensemble)
        else nullcontext()
    ):
        sb.save(net, tmp_path / "posterior")
    for folder in (path, tmp_path / "posterior"):
        again = sb.load(copy.deepcopy(plain), folder)
        torch.testing.assert_close(
            sb.sample(again, X, seed=0), sb.sample(net, X, seed=0), rtol=0, atol=0
        )
    with sb.fixed_draws(net, "mean"):
        of_one = sb.sample(net, X)[1]
    torch.testing.assert_close(sb.materialize(net, member=1)(X), of_one)
    assert sb.materialize(net, member="mean")(X).shape == (6, 3)


class Fourier(nn.Module):
    """Random features that are no part of its state, and a function that members may have different."""

    def __init__(self, function: Any = torch.tanh) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(4, 8), persistent=False)
        self.function, self.head = function, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(x @ self.directions))


@pytest.mark.parametrize(
    "functions", [(torch.tanh,) * 3, (torch.tanh, torch.sin, torch.relu)]
)
def test_members_that_differ_past_their_state(functions: Any, tmp_path: Path) -> None:
    nets = [Fourier(function) for function in functions]
    wanted = torch.stack([net(X) for net in nets])
    net = sb.ensemble(nets)
    torch.testing.assert_close(sb.sample(net, X), wanted)
    with pytest.warns(sb.SlimbayesWarning, match="differs between members"):
        sb.save(net, tmp_path / "all")
    with pytest.raises(ValueError, match="Members differ in"):
        sb.keep_members(net, [1, 0])
    torch.testing.assert_close(
        sb.sample(sb.keep_members(net, [0, 2]), X), wanted[[0, 2]]
    )


class Overwrites(nn.Module):
    """Writes into what it is given: the tensor, and the mapping that holds it."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.net, self.mixes = mlp(), mixes

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["x"].sub_(0.5).mul_(2.0)
        x = batch.pop("x")
        return self.net(x - x.mean(0) if self.mixes else x)


@pytest.mark.parametrize(
    ("config", "mixes"),
    each(
        [sb.MeanField(scale_init=0.2), sb.BatchEnsemble(members=3), sb.Deterministic()],
        [False, True],
    ),
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_models_that_write_into_their_inputs(config: Any, mixes: bool) -> None:
    net, given = sb.bayesianize(Overwrites(mixes), config).eval(), {"x": X.clone()}
    with sb.fixed_draws(net, 4, seed=0):
        total = 1 if isinstance(config, sb.Deterministic) else 4
        wanted = torch.stack(
            [sb.materialize(net, draw=j)({"x": X.clone()}) for j in range(total)]
        )
        for parallel in (False, "auto"):
            torch.testing.assert_close(
                sb.sample(net, given, parallel=parallel)[:total], wanted
            )
    for chunk in (
        None,
        6,
    ):  # all draws at once, and one after the other
        probs = sb.predict(
            net, {"batch": given}, draws=4, seed=0, chunk=chunk, parallel=False
        ).samples
        torch.testing.assert_close(probs, wanted.softmax(-1).expand_as(probs))
    assert torch.equal(given["x"], X)


def test_draws_begin_with_the_same_cache() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    plain = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=1)
    ).eval()
    words = torch.randint(0, 20, (3, 5))
    cache = plain(words[:, :3], use_cache=True).past_key_values  # with gradients
    net = sb.bayesianize(copy.deepcopy(plain), sb.MeanField(scale_init=0.2)).eval()
    with sb.fixed_draws(net, 3), torch.no_grad():
        caches = [plain(words[:, :3], use_cache=True).past_key_values for _ in range(3)]
        wanted = [
            sb.materialize(net, draw=j)(words[:, 3:], past_key_values=caches[j]).logits
            for j in range(3)
        ]
        for parallel in (False, "auto"):
            found = sb.sample(
                net, words[:, 3:], past_key_values=cache, parallel=parallel
            ).logits
            torch.testing.assert_close(found, torch.stack(wanted))


class Keeps(nn.Module):
    """Returns the rows that it is sure of, which differ from draw to draw: at first there may be none, or as many."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.score = nn.Linear(4, 3)
        self.score.bias.data.fill_(bias)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        return scores[scores[:, 0] > 0]


@pytest.mark.parametrize(("seed", "bias"), each(range(5), [-3.0, 0.0, 2.0]))
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_rows_that_draws_keep_are_never_mixed_up(seed: int, bias: float) -> None:
    torch.manual_seed(seed)
    net, many = (
        sb.bayesianize(Keeps(bias), sb.MeanField(scale_init=0.7)).eval(),
        torch.randn(7, 4),
    )
    for x in (many[:6], many):
        with sb.fixed_draws(net, 3, seed=seed):
            wanted = [sb.materialize(net, draw=j)(x) for j in range(3)]
            if len({len(kept) for kept in wanted}) > 1:
                with pytest.raises(ValueError, match="different shapes"):
                    sb.sample(net, x)
            else:
                torch.testing.assert_close(sb.sample(net, x), torch.stack(wanted))


def test_a_loader_that_shuffles_is_told() -> None:
    net, data = (
        sb.bayesianize(mlp(), sb.Rank1(members=2)),
        TensorDataset(X, torch.arange(6)),
    )
    with pytest.warns(sb.SlimbayesWarning, match="shuffles"):
        sb.predict(net, DataLoader(data, batch_size=4, shuffle=True))
    in_order = sb.predict(net, DataLoader(data, batch_size=4), seed=0)
    torch.testing.assert_close(in_order.probs, sb.predict(net, X, seed=0).probs)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh()),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.body(x))
        return scores, scores.logsumexp(-1)


def by_member(outputs: Tensor, every: Tensor) -> list[int]:
    """Which member each row is of."""
    apart = (every - outputs).abs().flatten(2).amax(-1)
    assert apart.amin(0).max() < 1e-5
    return apart.argmin(0).tolist()


@pytest.mark.parametrize(
    "config", [sb.BatchEnsemble(members=3), sb.Ensemble(members=3)]
)
def test_methods_share_rows_out_among_held_draws(config: Any) -> None:
    net = sb.bayesianize(Agent(), config)
    with sb.fixed_draws(net):
        every = sb.sample(net, X)
        scores, values = net.act(X)
    assert by_member(scores, every) == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(values, scores.logsumexp(-1))


class Uses(nn.Module):
    """Calls a method of a part beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.agent, self.last = Agent(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.agent(x) + self.agent.act(x)[0].tanh())


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_methods_of_a_copied_part_are_those_of_its_members() -> None:
    net = Uses().eval()
    sb.bayesianize(net.agent, sb.Ensemble(members=3))
    with sb.fixed_draws(net):
        wanted = torch.stack([sb.materialize(net, draw=j)(X) for j in range(3)])
    for parallel in ("auto", False):
        torch.testing.assert_close(sb.sample(net, X, parallel=parallel), wanted)
    assert wanted.std(0).min() > 0


def test_parts_called_one_after_another_are_told_of_their_members() -> None:
    net = sb.bayesianize(Agent(), sb.BatchEnsemble(members=3))
    net.body(X), net.body(X), net(X), net.act(X)
    features = nn.Sequential(*list(net.children()))  # the usual way to cut a head off
    with pytest.warns(
        sb.SlimbayesWarning, match="head.* is called by itself after another part"
    ):
        features(X)
    with sb.fixed_draws(net):
        assert by_member(features(X), sb.sample(net, X)) == [0, 0, 1, 1, 2, 2]


def test_empty_batches_at_any_call() -> None:
    net = sb.bayesianize(mlp(), sb.BatchEnsemble(members=3)).train()
    for rows in (6, 6, 0, 3, 0, 0, 6, 0, *(0,) * 10):
        assert net(X[:rows]).shape == (rows, 3)


class Graph:
    """A batch of graphs as one object, as graph libraries give it."""

    def __init__(self) -> None:
        self.x, self.edges = (
            torch.randn(7, 4),
            torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 6]]),
        )
        self.of = torch.tensor([0, 0, 0, 1, 1, 1, 1])


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, graph: Graph) -> Tensor:
        graph.x = self.first(
            graph.x
        )  # and the next draw is to begin with the graph that was given
        graph.x = graph.x.tanh().index_add(0, graph.edges[1], graph.x[graph.edges[0]])
        return self.last(torch.zeros(2, 4).index_add(0, graph.of, graph.x))


@pytest.mark.parametrize(
    "config",
    [sb.Rank1(members=2, scale_init=0.3), sb.MeanField(), sb.Ensemble(members=3)],
)
def test_inputs_that_are_objects_of_somebody(config: Any) -> None:
    net, graph = sb.bayesianize(Messages(), config).eval(), Graph()
    with sb.fixed_draws(net, 4, seed=0), torch.no_grad():
        wanted = torch.stack(
            [sb.materialize(net, draw=j)(copy.copy(graph)) for j in range(4)]
        )
        torch.testing.assert_close(sb.sample(net, graph), wanted)
    torch.testing.assert_close(
        sb.predict(net, iter([graph]), draws=4, seed=0).samples, wanted.softmax(-1)
    )
    for use in (
        lambda: sb.sample(net, "text"),
        lambda: sb.predict(net, iter(["text"])),
    ):
        with pytest.raises(ValueError, match="no tensor"):
            use()


def test_a_part_of_one_member_alone_is_told_to_be_new() -> None:
    net = sb.bayesianize(Agent(), sb.Ensemble(members=3))
    copy.deepcopy(net)(X), net(X), net.act(X)
    net.head = nn.Linear(8, 3)
    with pytest.warns(sb.SlimbayesWarning, match="head of .* into member 0 alone"):
        sb.sample(net, X)
    assert not any(
        "_slimbayes_member" in m.__dict__ for m in sb.debayesianize(net).modules()
    )


def test_a_layer_that_was_resized_since_is_named() -> None:
    net = sb.bayesianize(mlp(), sb.MeanField())
    net[2].weight = nn.Parameter(torch.randn(5, 8))
    with pytest.raises(
        ValueError,
        match=r"layer '2' is \(5, 8\), but its posterior was made for \(3, 8\)",
    ):
        sb.predict(net, X)
