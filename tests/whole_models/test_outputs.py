"""More faults that users of models nobody here wrote would have met: which rows layers meet, what calls leave behind,
and what a model returns.
"""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import each, pairwise
from test_calls import X, by_member, mlp
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import slimbayes as sb


class Observed(nn.Module):
    """Notes what passes through while it trains, for use in eval mode, as observers of quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * h.detach().mean(0))
            return self.last(h)
        return self.last(h - self.centre)


@pytest.mark.parametrize("normed", [False, True])
def test_members_at_once_keep_what_a_call_leaves_in_them(normed: bool) -> None:
    made = (
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)))
        if normed
        else Observed()
    )
    net = sb.bayesianize(
        made, sb.Ensemble(members=3, init="copies", jitter=0.3)
    ).train()
    with sb.fixed_draws(net):
        members = [sb.materialize(net, draw=j).train() for j in range(3)]
    for _ in range(3):
        torch.testing.assert_close(
            sb.sample(net, X), torch.stack([member(X) for member in members])
        )
    wanted = torch.stack([member.eval()(X) for member in members])
    torch.testing.assert_close(sb.sample(net.eval(), X), wanted)


class Biased(nn.Module):
    """Attention with a bias for all positions, of its own or given by the block before, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.last = nn.Embedding(4, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.bias(torch.arange(4)) if bias is None else bias
        return self.last((x @ x.mT + bias).softmax(-1) @ x), bias


class Biases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Biased(), Biased()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(*self.first(x))[0]


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_what_members_that_began_alike_give_without_rows_is_their_own() -> None:
    net, x = Biases(), torch.randn(6, 4, 8)
    sb.bayesianize(net.first, sb.Ensemble(members=3, init="copies"))
    sb.sample(net, x)
    for parameter in net.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    with sb.fixed_draws(net):
        wanted = torch.stack([sb.materialize(net, draw=j)(x) for j in range(3)])
    torch.testing.assert_close(sb.sample(net, x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [sb.BatchEnsemble(members=2), sb.MeanField(), sb.Ensemble(members=2)]
)
def test_models_that_collect_hidden_states_by_hooks_give_each_once(config: Any) -> None:
    transformers = pytest.importorskip("transformers")
    size = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    net = transformers.BertModel(
        transformers.BertConfig(**size, intermediate_size=8, max_position_embeddings=9)
    )
    net, words = sb.bayesianize(net.eval(), config).eval(), torch.randint(0, 20, (3, 5))
    with sb.fixed_draws(net, 2 * sb.members(net)), torch.no_grad():
        plain = [
            sb.materialize(net, draw=j)(words, output_hidden_states=True).hidden_states
            for j in range(2)
        ]
        for parallel in ("auto", False, "auto"):
            found = sb.sample(
                net, words, output_hidden_states=True, parallel=parallel
            ).hidden_states
            assert len(found) == len(plain[0]) == 3
            for layer, one in enumerate(found):
                torch.testing.assert_close(
                    one[:2], torch.stack([states[layer] for states in plain])
                )


class SomeRows(nn.Module):
    """Runs a part of it on some of the rows: those that are said to be valid, or that it is not sure of."""

    def __init__(self, sure: float | None) -> None:
        super().__init__()
        self.first, self.again, self.last = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )
        self.register_buffer("sure", torch.tensor(torch.nan if sure is None else sure))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        h = self.first(x).tanh()
        some = valid if self.sure.isnan() else h[:, 0] < self.sure
        return self.last(h.index_put((some,), self.again(h[some]))).tanh()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sure", "count", "config"),
    pairwise(
        [None, 2.0],
        [6, 4, 1, 0],
        [
            sb.Rank1(members=2, scale_init=0.3),
            sb.BatchEnsemble(members=2),
            sb.MeanField(),
            sb.Ensemble(members=2),
        ],
    ),
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_layers_that_meet_some_of_the_rows_later(
    config: Any, count: int, sure: float | None
) -> None:
    net, x = sb.bayesianize(SomeRows(sure), config).eval(), torch.randn(12, 4)
    every, valid = torch.ones(12, dtype=torch.bool), torch.randperm(12) < count
    sb.sample(net, x, every, draws=4), net(x, every)
    net.sure.fill_(net.sure * 0)
    with sb.fixed_draws(net, 4):
        wanted = torch.stack([sb.materialize(net, draw=j)(x, valid) for j in range(4)])
        by_member(net(x, valid), wanted)
        torch.testing.assert_close(sb.sample(net, x, valid), wanted)


class Mixes(nn.Module):
    """Experts that each run on the rows whose scores lead to them."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.experts = (
            nn.Linear(4, 3),
            nn.ModuleList([nn.Linear(4, 5) for _ in range(3)]),
        )
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.score(x).argmax(-1), x.new_zeros(len(x), 5)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                out[chosen == k] = expert(x[chosen == k])
        return self.last(out)


@pytest.mark.filterwarnings("ignore:slimbayes")
@pytest.mark.parametrize("seed", [17, 27])
def test_experts_that_get_other_rows_of_each_draw(seed: int) -> None:
    torch.manual_seed(seed)
    net = sb.bayesianize(Mixes(), sb.MeanField(scale_init=0.2)).eval()
    for x in torch.randn(4, 6, 4):
        with sb.fixed_draws(net, 2, seed=1):
            wanted = torch.stack([sb.materialize(net, draw=j)(x) for j in range(2)])
            torch.testing.assert_close(sb.sample(net, x), wanted)


def test_intervals_without_noise_are_told_to_be_those_of_the_mean() -> None:
    found = sb.predict(
        sb.bayesianize(nn.Linear(4, 1), sb.MeanField()),
        X,
        draws=8,
        likelihood="gaussian",
    )
    with pytest.warns(sb.SlimbayesWarning, match=r"those of the mean.*likelihood_std="):
        found.interval(0.9)
    sb.predict(
        sb.bayesianize(nn.Linear(4, 1), sb.MeanField()),
        X,
        likelihood="gaussian",
        likelihood_std=0.1,
    ).interval(0.9)
    sb.predict(sb.bayesianize(mlp(), sb.MeanField()), X, draws=8).interval(0.9)


class Decides(nn.Module):
    """Returns an object of somebody's, as policies return distributions: perhaps of rows that act on each other."""

    def __init__(self, makes: Any, mixes: bool) -> None:
        super().__init__()
        self.net, self.makes, self.mixes = mlp(), makes, mixes

    def forward(self, x: Tensor) -> Any:
        h = self.net(x)
        return self.makes(h - h.mean(0) if self.mixes else h)

    def act(self, x: Tensor) -> Any:
        return self.makes(self.net(x))


class Answer:
    def __init__(self, scores: Tensor) -> None:
        self.logits = scores


class Mapped(dict[str, Any]):
    """A mapping that has its items as attributes, too."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__(logits=scores, more=[scores, "words"])
        self.__dict__ = self


def normal(scores: Tensor) -> Any:
    return torch.distributions.Independent(
        torch.distributions.Normal(scores, scores.exp()), 1
    )


def told_by(answer: Any) -> Tensor:
    return (
        answer.mean
        if isinstance(answer, torch.distributions.Independent)
        else answer.logits
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mixes", "makes"),
    pairwise(
        [
            sb.BatchEnsemble(members=3),
            sb.MeanField(scale_init=0.2),
            sb.Ensemble(members=3),
        ],
        [False, True],
        [Answer, Mapped, normal, lambda h: torch.distributions.Categorical(logits=h)],
    ),
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_outputs_that_are_objects_of_somebody(
    config: Any, mixes: bool, makes: Any
) -> None:
    net = sb.bayesianize(Decides(makes, mixes), config).eval()
    with sb.fixed_draws(net, 4, seed=0):
        plain = [sb.materialize(net, draw=j)(X) for j in range(4)]
        wanted = torch.stack([told_by(one) for one in plain])
        found = sb.sample(net, X)
        torch.testing.assert_close(told_by(found), wanted)
        if makes is normal:
            assert found.batch_shape == wanted.shape[:2] and found.event_shape == (3,)
            torch.testing.assert_close(
                found.log_prob(X[:, :3]),
                torch.stack([p.log_prob(X[:, :3]) for p in plain]),
            )
        by_member(told_by(net(X)), wanted)
    name = "mean" if makes is normal else "logits"
    samples = sb.predict(
        net, X, draws=4, seed=0, likelihood="gaussian", output=name
    ).samples
    torch.testing.assert_close(samples, wanted)
    if isinstance(config, sb.Ensemble):
        with pytest.raises(ValueError, match="which nobody can join"):
            net.act(X)
    net.makes = lambda h: {h}
    with pytest.raises(ValueError, match="gave a set each"):
        sb.sample(net.train(), X)


class Flow(nn.Module):
    """A distribution whose transforms hold what was drawn, and what is the same for all draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("ends", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Any:
        h, base = self.net(x), torch.distributions.Normal(torch.zeros(3), torch.ones(3))
        drawn = torch.distributions.ComposeTransform(
            [torch.distributions.AffineTransform(h, h.exp())]
        )
        fixed = torch.distributions.AffineTransform(self.ends, 2 * self.ends)
        return torch.distributions.TransformedDistribution(
            base, [drawn, torch.distributions.TanhTransform(), fixed]
        )


@pytest.mark.parametrize(
    "config",
    [sb.BatchEnsemble(members=3), sb.MeanField(scale_init=0.2), sb.Ensemble(members=3)],
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_transforms_of_a_distribution_are_those_of_each_draw(config: Any) -> None:
    net = sb.bayesianize(Flow(), config).eval()
    x, y = (
        torch.randn(6, 4),
        1.5 * torch.ones(6, 3),
    )  # as many rows as draws: what is not stacked would broadcast
    with sb.fixed_draws(net, 6, seed=0):
        plain = [sb.materialize(net, draw=j)(x) for j in range(6)]
        wanted = torch.stack([one.log_prob(y) for one in plain])
        found = sb.sample(net, x)
        torch.testing.assert_close(found.log_prob(y), wanted)
        by_member(net(x).log_prob(y), wanted)
    assert (
        found.batch_shape == (6, 6, 3)
        and found.rsample((2,)).shape == (2, 6, 6, 3)
        and wanted.std(0).min() > 0
    )


class Matrix:
    """A matrix that is computed when it is asked for, of a size that was known before."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.size = scores, scores.shape[-1]


class Process(torch.distributions.Normal):
    def __init__(self, scores: Tensor) -> None:
        super().__init__(scores, scores.exp())
        self.matrix = Matrix(scores)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_distributions_with_what_nobody_can_stack_stay_those_of_each_draw() -> None:
    net = sb.bayesianize(
        Decides(Process, mixes=False), sb.BatchEnsemble(members=3)
    ).eval()
    with sb.fixed_draws(net):
        wanted = [sb.materialize(net, draw=j)(X).matrix.scores for j in range(3)]
        torch.testing.assert_close(
            [one.matrix.scores for one in sb.sample(net, X).parts], wanted
        )


class Holder:
    """Numbers, words, functions and what it lies in itself, beside scores."""

    def __init__(self, scores: Tensor, function: Any) -> None:
        self.scores, self.mean, self.sign, self.part = (
            scores,
            scores.mean().item(),
            "+-"[int(scores[0, 0] > 0)],
            Answer(scores),
        )
        self.part.whole, self.function = self, function


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_all_that_an_object_holds_is_that_of_each_draw() -> None:
    net = sb.bayesianize(
        Decides(lambda h: Holder(h, abs), mixes=False), sb.BatchEnsemble(members=3)
    ).eval()
    found = sb.sample(net, X)
    torch.testing.assert_close(found.part.logits, found.scores)
    torch.testing.assert_close(
        found.mean, found.scores.detach().mean((1, 2)), check_dtype=False
    )
    signs = ["+-"[int(s > 0)] for s in found.scores[:, 0, 0]]
    assert (
        found.sign == signs[0]
        if len(set(signs)) == 1
        else list(found.sign.parts) == signs
    )
    net.makes = lambda h: Holder(
        h, lambda: h
    )  # nobody sees which draw a function was made in
    found = sb.sample(net.train(), X)
    assert [torch.equal(one.function(), one.scores) for one in found.parts] == [
        True
    ] * 3


class Lazy(nn.Module):
    """Returns what calls its layers later, as conditional flows do."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.first, self.net, self.how = nn.Linear(4, 4), mlp(), how

    def later(self, h: Tensor) -> Tensor:
        return self.net(h)

    def forward(self, x: Tensor) -> Any:
        return Holder(self.first(x), self.how(self, x))


@pytest.mark.parametrize(
    ("how", "config"),
    each(
        [
            lambda net, x: functools.partial(net.later, x),
            lambda net, x: net.later,
            lambda net, x: lambda: net.net(x),
            lambda net, x: Answer({"net": [net.net]}),  # type: ignore[arg-type]
        ],
        [sb.BatchEnsemble(members=3), sb.MeanField(scale_init=0.2)],
    ),
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_what_calls_layers_after_the_draws_are_gone_is_told(
    how: Any, config: Any
) -> None:
    with pytest.warns(
        UserWarning, match="What it returned calls them later, when each draws anew"
    ):
        sb.bayesianize(Lazy(how), config)(X)
    for options in ({}, {"parallel": False}):
        with (
            pytest.warns(UserWarning, match="calls them later"),
            pytest.raises(ValueError, match="after the draws are"),
        ):
            sb.sample(sb.bayesianize(Lazy(how), config), X, draws=2, **options)


class Reports(nn.Module):
    """Returns numbers, words and arrays beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.net(x)
        word = "high" if scores[0, 0] > scores[0, 1] else "low"
        return {
            "scores": scores,
            "mean": scores.mean().item(),
            "word": word,
            "array": scores.detach().numpy(),
            "n": 3,
        }


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_numbers_and_words_that_draws_return_are_their_own() -> None:
    net = sb.bayesianize(Reports(), sb.MeanField(scale_init=0.5)).eval()
    with sb.fixed_draws(net, 8, seed=0):
        found, plain = (
            sb.sample(net, X),
            [sb.materialize(net, draw=j)(X) for j in range(8)],
        )
    torch.testing.assert_close(
        found["mean"], torch.tensor([one["mean"] for one in plain])
    )
    torch.testing.assert_close(found["array"], found["scores"].detach())
    assert [found["word"].of(j) for j in range(8)] == [
        one["word"] for one in plain
    ] and found["n"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "parallel"),
    each(
        [
            sb.MeanField(scale_init=0.3),
            sb.BatchEnsemble(members=3),
            sb.Ensemble(members=3),
        ],
        ["auto", False],
    ),
)
def test_steps_with_a_cache_are_those_of_the_draws_that_filled_it(
    config: Any, parallel: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    size = {
        "vocab_size": 20,
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "initializer_range": 0.5,
    }
    plain = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=1)
    ).eval()
    net, words = sb.bayesianize(plain, config).eval(), torch.randint(0, 20, (3, 6))
    with sb.fixed_draws(net, 3), torch.no_grad():
        wanted = [
            sb.materialize(net, draw=j)(words, use_cache=False).logits[:, -1]
            for j in range(3)
        ]
        cache = sb.sample(net, words[:, :4], parallel=parallel).past_key_values
        for step in (4, 5):
            found = sb.sample(
                net, words[:, step : step + 1], past_key_values=cache, parallel=parallel
            )
            cache = found.past_key_values
        torch.testing.assert_close(found.logits[:, :, -1], torch.stack(wanted))
    with pytest.raises(ValueError, match="belongs to the 3 draws that filled it"):
        sb.sample(net, words[:, 5:], past_key_values=cache)
    if not isinstance(config, sb.Ensemble):
        with pytest.warns(sb.SlimbayesWarning, match="other draws than this one"):
            net(words[:, 4:5], past_key_values=net(words[:, :4]).past_key_values)


class Twice(nn.Linear):
    """A layer of a type that nobody knows, which reads its weight in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.weight, self.bias).tanh()


class Rerun(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.last, self.reentrant = (
            nn.Linear(4, 8),
            Twice(8, 8),
            nn.Linear(8, 3),
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = (
            self.second(h)
            if self.reentrant is None
            else checkpoint(self.second, h, use_reentrant=self.reentrant)
        )
        return self.last(h)


@pytest.mark.parametrize(
    ("config", "bare"),
    each(
        [
            sb.BatchEnsemble(members=3),
            sb.Rank1(members=3),
            sb.MeanField(),
            sb.ModelPatch(patch=".*"),
            sb.DropConnect(),
        ],
        [False, True],
    ),
)
@pytest.mark.slow
def test_layers_of_other_types_are_rerun_with_their_draws(
    config: Any, bare: bool
) -> None:
    gradients = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        net = sb.bayesianize(Rerun(reentrant), config)
        torch.manual_seed(1)
        out = net(X) if bare else sb.sample(net, X, draws=2)
        (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = (
            nn.Embedding(9, 4, scale_grad_by_freq=True),
            nn.Linear(4, 3),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(words).mean(1))


@pytest.mark.parametrize(
    "config",
    [sb.Rank1(members=3), sb.MeanField(estimator="flipout"), sb.Ensemble(members=3)],
)
def test_gradients_divided_by_how_often_a_word_occurs_are_those_of_each_draw(
    config: Any,
) -> None:
    net, words, gradients = (
        sb.bayesianize(Rare(), config),
        torch.randint(0, 9, (6, 5)),
        [],
    )
    for parallel in (False, "auto"):
        net.zero_grad()
        with (
            pytest.warns(UserWarning, match="how often a word occurs")
            if parallel
            else nullcontext()
        ):
            sb.sample(
                net, words, draws=2, seed=1, parallel=parallel
            ).square().sum().backward()
        gradients.append(net.table.weight.grad)
    net(words)  # rows share out the members, as before
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "config",
    [sb.MeanField(), sb.ModelPatch(patch=".*"), sb.Rank1(members=2, scale_init=0.1)],
)
def test_tables_with_sparse_gradients_learn(config: Any) -> None:
    words, gradients = torch.randint(0, 9, (6, 5)), []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = sb.bayesianize(
            nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3)),
            config,
            include=".*",
        )
        sb.sample(net, words, draws=2, seed=0).square().sum().backward()
        found = net[0].weight.grad
        gradients.append(found.to_dense() if found.is_sparse else found)
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_bags_divide_gradients_by_how_often_a_word_occurs() -> None:
    words, gradients = torch.randint(0, 9, (6, 5)), []
    for table in (nn.EmbeddingBag, nn.Embedding):
        torch.manual_seed(0)
        net = sb.bayesianize(
            nn.Sequential(table(9, 4, scale_grad_by_freq=True)), sb.MeanField()
        )
        out = sb.sample(net, words, draws=2, seed=0)
        (out if out.dim() == 3 else out.mean(2)).square().sum().backward()
        gradients.append(net[0].weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "config",
    [sb.BatchEnsemble(members=3), sb.MeanField(scale_init=0.2), sb.Ensemble(members=3)],
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_norms_without_running_statistics_are_those_of_each_draw_when_nothing_trains(
    config: Any,
) -> None:
    layers = (
        nn.Linear(4, 8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(8, 3),
    )
    net = sb.bayesianize(nn.Sequential(*layers), config, include="0|3").eval()
    with sb.fixed_draws(net, 4, seed=0):
        wanted = torch.stack([sb.materialize(net, draw=j)(X) for j in range(4)])
        torch.testing.assert_close(sb.sample(net, X), wanted)
        by_member(net(X), wanted)
    torch.testing.assert_close(
        sb.predict(net, X, draws=4, seed=0).samples, wanted.softmax(-1)
    )


class Compares(nn.Module):
    """A method calls a part with all rows, and with some."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def compared(self, x: Tensor) -> Tensor:
        return (self.net(x)[:4] - self.net(x[:4])).abs().amax()


@pytest.mark.parametrize(
    "config", [sb.MeanField(), sb.KTied(), sb.DropConnect(), sb.ModelPatch(patch=".*")]
)
def test_a_method_has_one_draw_however_many_rows_its_parts_meet(config: Any) -> None:
    assert sb.bayesianize(Compares(), config).compared(X) < 1e-5
    several = sb.bayesianize(Compares(), sb.BatchEnsemble(members=3))
    with pytest.warns(sb.SlimbayesWarning, match="with 6 and 4 rows"):
        several.compared(X)
    with sb.fixed_draws(sb.keep_members(several, [1])) as one:
        assert one.compared(X) < 1e-5


class Called(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def __call__(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize(
    "config", [sb.BatchEnsemble(members=3), sb.Ensemble(members=3)]
)
def test_models_without_a_forward_are_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="Rename it to forward"):
        sb.bayesianize(Called(), config)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_tracing_a_converted_model_names_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="slimbayes.export"):
        torch.jit.trace(sb.bayesianize(mlp(), sb.MeanField()), X)
    traced = torch.jit.trace(
        sb.materialize(sb.bayesianize(mlp(), sb.MeanField()), member=0), X
    )
    assert traced(X).shape == (6, 3)
