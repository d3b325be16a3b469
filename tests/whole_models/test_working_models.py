"""Whole models as engineers write them (working_models.py), under one method each, in turn: what a converted model
returns is what plain models with its drawn weights return, batch after batch, in training and in prediction.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
import working_models as wm
from covering import each
from oracle import assert_equal, assert_rows_of_draws, held, leaves
from torch import Tensor, nn
from working_models import B, C, whole

import slimbayes as sb
from slimbayes.engine.trial import without_validation

METHODS: dict[str, Any] = {
    "batch-ensemble": sb.BatchEnsemble(members=3),
    "rank1-example": sb.Rank1(members=3, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5)),
    "mean-field": sb.MeanField(scale_init=0.2, bias="gaussian"),
    "emp": sb.ModelPatch(components=3, jitter=0.5, patch=".*"),
    "k-tied": sb.KTied(rank=1),
    "ensemble": sb.Ensemble(members=3, init="copies", jitter=0.5),
    "rank1-member": sb.Rank1(
        members=3, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5), draws="member"
    ),
    "flipout": sb.MeanField(scale_init=0.2, estimator="flipout"),
}


def recommended(rows: int, offsets: bool = True) -> tuple[Any, ...]:
    shared = (whole(9, rows), whole(11, rows), torch.randn(rows, 4))
    if not offsets:
        return (*shared, whole(20, rows, 3))
    lengths = torch.randint(1, 4, (rows,))
    return (*shared, whole(20, int(lengths.sum())), lengths.cumsum(0) - lengths)


def graphs(rows: int) -> tuple[Any, ...]:
    return (
        torch.randn(3 * rows, 4),
        whole(3 * rows, 2, 4 * rows),
        torch.arange(rows).repeat_interleave(3),
    )


def padded_ids(rows: int) -> tuple[Any, ...]:
    return (
        (
            torch.randint(1, 15, (rows, 7))
            * (torch.arange(7) < torch.randint(1, 8, (rows, 1)))
        ),
    )


def steps_of_replay(rows: int) -> tuple[Any, ...]:
    return (
        torch.randn(rows, 4),
        whole(2, rows),
        torch.randn(rows),
        torch.randn(rows, 4),
        whole(2, rows).float(),
    )


Case = tuple[
    Callable[[], nn.Module], Callable[[int], tuple[Any, ...]], Any
]  # what makes it, its inputs, output's rows
CASES: dict[str, Case] = {
    "recommender": (wm.Recommender, lambda n: recommended(n, False), 0),
    "recommender-offsets": (wm.Recommender, recommended, None),
    "multi-task": (wm.MultiTask, lambda n: ({"x": torch.randn(n, 5)},), 0),
    "multi-task-loss": (
        wm.MultiTask,
        lambda n: ({"x": torch.randn(n, 5), "kind_target": whole(C, n)},),
        None,
    ),
    "translator": (wm.Translator, lambda n: (whole(12, n, 5), whole(10, n, 4)), 0),
    "unet": (wm.UNet, lambda n: (torch.randn(n, 1, 11, 9),), 0),
    "graph": (wm.GraphNet, graphs, None),
    "points": (wm.PointNet, lambda n: (torch.randn(n, 10, 3),), 0),
    "simclr": (wm.SimCLR, lambda n: (torch.randn(n, 5), torch.randn(n, 5)), None),
    "simclr-loss": (
        wm.SimCLR,
        lambda n: (torch.randn(n, 5), torch.randn(n, 5), True),
        None,
    ),
    "triplet": (wm.Triplet, lambda n: tuple(torch.randn(n, 5) for _ in range(3)), 0),
    "dqn": (wm.DQN, steps_of_replay, 0),
    "denoiser": (
        wm.Denoiser,
        lambda n: (torch.randn(n, 1, 5, 5), whole(50, n), whole(C, n)),
        None,
    ),
    "hyper": (wm.HyperNetwork, lambda n: (torch.randn(n, 4), torch.randn(n, 3)), 0),
    "hyper-shared": (
        wm.SharedHyperNetwork,
        lambda n: (torch.randn(n, 4), torch.randn(3)),
        None,
    ),
    "ode": (wm.AdaptiveODE, lambda n: (torch.randn(n, 4) * 2,), None),
    "sorted": (wm.SortedLSTM, padded_ids, None),
    "experts": (wm.Experts, lambda n: (torch.randn(n, 5),), None),
    "experts-full": (lambda: wm.Experts(2), lambda n: (torch.randn(n, 5),), None),
    "tabular": (
        wm.TabularTransformer,
        lambda n: (torch.randn(n, 3), torch.stack([whole(4, n), whole(7, n)], 1)),
        0,
    ),
    "early-exit": (wm.EarlyExit, lambda n: (torch.randn(n, 5) * 2,), None),
}
PAIRS = list(zip(CASES, cycle(METHODS)))


def converted(make: Callable[[], nn.Module], method: str) -> nn.Module:
    torch.manual_seed(2)
    return sb.bayesianize(make(), METHODS[method])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), PAIRS)
@pytest.mark.filterwarnings("ignore:(?s).*(draw by draw|never called|looked again)")
@torch.no_grad()
def test_draws_are_written_out_models_batch_after_batch(name: str, method: str) -> None:
    make, inputs, rows = CASES[name]
    model = converted(make, method)
    draws = 3
    for training in (False, True):
        model.train(training)
        for count in (B, 4):
            args = inputs(count)
            random.seed(count)
            with sb.fixed_draws(model, 3):
                plains = held(model, 3)
                outputs, bare = sb.sample(model, *args), None
                if not (
                    training and name == "translator"
                ):  # which tosses a coin at each call
                    bare = model(*args)
            if bare is None:
                continue
            expected = [leaves(plain(*args)) for plain in plains]
            assert_equal(
                outputs,
                [torch.stack(parts) for parts in zip(*expected)],
                f"training={training}",
            )
            assert_rows_of_draws(
                bare, expected, 0 if training and name == "early-exit" else rows
            )
            one_by_one = sb.sample(model, *args, draws=draws, seed=1, parallel=False)
            assert_equal(
                sb.sample(model, *args, draws=draws, seed=1), one_by_one, "another fold"
            )


@pytest.mark.parametrize(
    "name", ["tabular", "multi-task", "translator", "dqn", "hyper", "triplet"]
)
@torch.no_grad()
def test_rows_that_are_left_alone_fold_without_a_word(name: str) -> None:
    make, inputs, _ = CASES[name]
    model = converted(make, "batch-ensemble")
    args = inputs(B)
    sb.sample(model, *args, seed=1, parallel=True)
    sb.sample(
        model.train(), *args, seed=1, parallel=True
    )  # the translator's coin is the same for all its trials


# State between calls --------------------------------------------------------------------------------------------------


class Rebinds(nn.Module):
    """Keeps a running mean by binding the buffer's name to another tensor, a list and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.seen, self.count = nn.Linear(4, C), [], 0
        self.register_buffer("memory", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.memory = 0.9 * self.memory + 0.1 * h.detach().mean(0)
        self.count += 1
        self.seen.append(len(x))
        return h


@pytest.mark.parametrize("method", ["batch-ensemble", "mean-field", "emp", "ensemble"])
def test_locating_rows_leaves_nothing_in_a_model(method: str) -> None:
    model, x = converted(Rebinds, method), torch.randn(B, 4)
    random.seed(3)
    expected = random.random()
    random.seed(3)
    out = sb.sample(model, x, seed=0)
    assert random.random() == expected
    calls = {p: m for p, m in model.named_modules() if isinstance(m, Rebinds)}
    assert (
        all(m.count <= 1 and len(m.seen) == m.count for m in calls.values())
        and model.count == 1
    )
    if method != "ensemble":
        assert_equal(model.memory, 0.1 * out.flatten(0, 1).mean(0).detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "make"),
    each(
        ["batch-ensemble", "rank1-example", "mean-field", "emp", "ensemble"],
        [wm.Remembering, wm.Queue, wm.Prototypes],
    ),
)
@torch.no_grad()
def test_draws_that_keep_something_between_calls_keep_it_apart(
    make: Any, method: str
) -> None:
    model = converted(make, method)
    with (
        warnings.catch_warnings(record=True) as said,
        sb.fixed_draws(model, 3),
    ):
        warnings.simplefilter("always")
        plains = held(model, 3)
        for _ in range(3):
            x = torch.randn(B, 4)
            assert_equal(
                sb.sample(model, x), torch.stack([plain(x) for plain in plains])
            )
    assert sum("draw by draw" in str(w.message) for w in said) == 1
    with sb.fixed_draws(model, 3):  # one after another without being told by a proof
        plains = held(model, 3)
        for _ in range(2):
            assert_equal(
                sb.sample(model, x, parallel=False),
                torch.stack([plain(x) for plain in plains]),
            )


@torch.no_grad()
def test_a_state_that_is_set_by_hand_is_where_all_draws_begin() -> None:
    model, x = converted(wm.Remembering, "mean-field"), torch.randn(B, 4)
    with sb.fixed_draws(model, 3):
        first = sb.sample(model, x, parallel=False)
        model.hidden = None
        assert_equal(sb.sample(model, x, parallel=False), first)
        assert float((sb.sample(model, x, parallel=False) - first).abs().max()) > 1e-3


class Nested(nn.Module):
    """Keeps a mean in a tensor within a mapping within a list, beside tensors that cannot be compared, a tensor that it
    makes larger, and a generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cache, self.generator = (
            nn.Linear(4, C),
            [{"mean": torch.zeros(C)}],
            torch.Generator(),
        )
        self.without = torch.empty(3, device="meta")
        self.register_buffer("graph", torch.eye(C).to_sparse())
        self.register_buffer("room", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.graph @ self.a(x).T).T
        self.room.resize_(2).fill_(0)
        torch.rand(1, generator=self.generator)
        self.cache[0]["mean"].mul_(0.5).add_(h.detach().mean(0))
        return h + self.cache[0]["mean"]


@pytest.mark.filterwarnings("ignore:(?s).*keeps 'cache'")
@torch.no_grad()
def test_what_lies_within_containers_is_kept_apart_and_tensors_of_any_kind_are_taken() -> (
    None
):
    model, x = sb.bayesianize(Nested(), sb.MeanField(scale_init=0.2)), torch.randn(B, 4)
    with sb.fixed_draws(model, 3):
        plains = [sb.materialize(model, draw=j) for j in range(3)]
        for _ in range(3):
            assert_equal(
                sb.sample(model, x), torch.stack([plain(x) for plain in plains])
            )
    calls = torch.Generator()
    for _ in range(9):
        torch.rand(1, generator=calls)
    assert torch.equal(
        model.generator.get_state(), calls.get_state()
    )  # none by a trial


def test_statistics_of_norms_are_shared_by_draws_one_by_one() -> None:
    model = converted(lambda: wm.UNet(nn.BatchNorm2d), "batch-ensemble")
    sb.sample(model, torch.randn(B, 1, 8, 8), parallel=False)
    assert int(model.one[1].num_batches_tracked) == 3


# Branches that depend on numbers --------------------------------------------------------------------------------------


def sure_by(reads: Callable[[Tensor], Any]) -> type[wm.EarlyExit]:
    """A net that leaves early where all rows are sure, as `reads` tells from their confidences."""

    class Exits(wm.EarlyExit):
        def forward(self, x: Tensor) -> Tensor:
            for block, leave in zip(self.blocks, self.exits, strict=True):
                x = x + torch.relu(block(x))
                logits = leave(x)
                if reads(logits.softmax(-1).amax(-1)):
                    break
            return logits

    return Exits


@pytest.mark.parametrize(
    "reads",
    [
        lambda c: (c > 0.99).all(),
        lambda c: (c > 0.99).sum() == len(c),
        lambda c: (c > 0.99).float().mean().item() == 1,
        lambda c: not torch.any(~(c > 0.99)),
        lambda c: ((c > 0.99) & (c < 2)).all(),
        lambda c: c.detach().numpy().min() > 0.99,
    ],
    ids=["all", "sum", "mean", "any", "and", "numpy"],
)
@pytest.mark.filterwarnings("ignore:(?s).*never called")
@torch.no_grad()
def test_a_branch_on_all_rows_is_seen_before_it_is_taken(reads: Any) -> None:
    model, x = converted(sure_by(reads), "rank1-example"), torch.randn(B, 5)
    with pytest.raises(ValueError, match="decides what the model does"):
        sb.sample(model, 0.1 * x, parallel=True)  # of which no row is sure


@torch.no_grad()
def test_a_look_for_what_is_no_number_keeps_rows_apart() -> None:
    def reads(confidence: Tensor) -> bool:
        return bool(
            torch.isnan(confidence).any() or not torch.isfinite(confidence).all()
        )

    sb.sample(
        converted(sure_by(reads), "rank1-example"), torch.randn(B, 5), parallel=True
    )


@pytest.fixture
def validating() -> Iterator[None]:
    """Distributions that look at their parameters, which torch.compile ends for the whole process."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("validating")
def test_distributions_that_look_at_their_parameters_keep_rows_apart() -> None:
    class Draws(nn.Module):
        """The latent numbers of an autoencoder."""

        def __init__(self) -> None:
            super().__init__()
            self.read, self.write = nn.Linear(4, 6), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            mean, log_scale = self.read(x).chunk(2, -1)
            return self.write(
                torch.distributions.Normal(mean, log_scale.exp()).rsample()
            )

    model = sb.bayesianize(Draws(), sb.Rank1(members=3))
    assert sb.sample(model, torch.randn(B, 4), parallel=True).shape == (3, B, 4)
    with pytest.raises(
        ValueError, match="constraint"
    ):  # outside of trials they look as before
        torch.distributions.Normal(torch.zeros(2), -torch.ones(2))


@pytest.mark.usefixtures("validating")
def test_trials_of_several_threads_leave_distributions_as_they_were() -> None:
    first, second = (
        without_validation(),
        without_validation(),
    )  # one thread begins before, and ends before, another
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.distributions.Normal(torch.zeros(2), -torch.ones(2))
    second.__exit__(None, None, None)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(torch.zeros(2), -torch.ones(2))


def test_training_that_goes_another_way_is_found_out_within_a_few_calls() -> None:
    class Full(nn.Module):
        """Rows act on each other where one is large."""

        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            return self.after(h - h.mean(0) if float(x.max()) > 10 else h)

    torch.manual_seed(0)
    net = sb.bayesianize(
        Full().train(), sb.Rank1(members=2, mean_init=sb.Normal(1.0, 0.5))
    )
    small, large = torch.randn(4, 3), 20 + torch.randn(4, 3)
    sb.sample(net, small, seed=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            sb.sample(net, large, seed=0)
    assert sum("looked again" in str(w.message) for w in said) == 1
    assert_equal(
        sb.sample(net, large, seed=0), sb.sample(net, large, seed=0, parallel=False)
    )
