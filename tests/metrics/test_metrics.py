"""Metrics against scikit-learn, torchmetrics where it is right, closed forms and slow loops (F19, F20, F30, F38, F39).

Sizes: N rows, C classes, K members, M draws.
"""

import copy
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from covering import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("torchmetrics")

import torchmetrics
from scipy import integrate, stats

import slimbayes as sb
from slimbayes import metrics as sm
from slimbayes.metrics import (
    ALEXNET,
    ALEXNET_CLEAN,
    calibration,
    corruption_errors,
    crps_mixture,
    crps_samples,
)

N, C, K, M = 97, 7, 4, 9
CLASSES = [
    "Accuracy",
    "TopK",
    "NLL",
    "Brier",
    "ECE",
    "MCE",
    "AdaptiveECE",
    "ClasswiseECE",
    "AURC",
]
Batch = tuple[Any, ...]


def logits_and_target(
    rows: int = N, classes: int = C, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    target = (
        torch.distributions.Categorical(logits=logits)
        .probs.multinomial(1, generator=generator)
        .squeeze(1)
    )
    flip = (
        torch.rand(rows, generator=generator) < 0.2
    )  # so that not even the calibrated parts are perfect
    return logits, torch.where(flip, target.roll(1), target)


def probs_and_target(
    rows: int = N, classes: int = C, seed: int = 0
) -> tuple[Tensor, Tensor]:
    logits, target = logits_and_target(rows, classes, seed)
    return (logits / 0.7).softmax(-1).float(), target


def members(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(K, N, C, generator=generator).mul(1.5).softmax(-1)


def ood_rows() -> tuple[Tensor, Tensor]:
    """Entropies, rounded for ties, of which some lie above one."""
    scores = (
        torch.rand(N, generator=torch.Generator().manual_seed(3))
        .mul(2.5)
        .mul(20)
        .round()
        .div(20)
    )
    label = (
        scores + torch.randn(N, generator=torch.Generator().manual_seed(4)) > 1.5
    ).long()
    return scores, label


def real_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(M, N, generator=generator), torch.randn(N, generator=generator)


def rows(
    *tensors: Any, dims: tuple[int, ...] | None = None
) -> Callable[[int, int], Batch]:
    """A batch is a slice of rows, which lie along the given dimension of each tensor."""
    dims = dims or (0,) * len(tensors)
    return lambda start, stop: tuple(
        t.narrow(d, start, stop - start) for t, d in zip(tensors, dims, strict=True)
    )


# Every metric: how to make it, and a slice of its inputs.
CASES: dict[str, tuple[Callable[[], Any], Callable[[int, int], Batch]]] = {
    **{
        name: (lambda name=name: make(name), rows(*probs_and_target()))
        for name in CLASSES
    },
    "binary ECE": (
        lambda: sm.ECE(),
        rows(probs_and_target(N, 2)[0][:, 1], probs_and_target(N, 2)[1]),
    ),
    "tfp Brier": (lambda: sm.Brier(convention="tfp"), rows(*probs_and_target())),
    "SoftLabelNLL": (
        lambda: sm.SoftLabelNLL(),
        rows(probs_and_target()[0], torch.arange(N * C).reshape(N, C) % 11 + 1),
    ),
    **{
        name: (lambda name=name: getattr(sm, name)(), rows(*ood_rows()))
        for name in ("AUROC", "AUCPR", "FPR95")
    },
    **{
        name: (lambda name=name: getattr(sm, name)(), rows(members(), dims=(1,)))
        for name in ("Disagreement", "PairwiseKL", "CosineSimilarity")
    },
    "NormalisedDisagreement": (
        lambda: sm.NormalisedDisagreement(),
        rows(members(), probs_and_target()[1], dims=(1, 0)),
    ),
    "RMSE": (lambda: sm.RMSE(), rows(real_rows()[0][0], real_rows()[1])),
    "LPD": (
        lambda: sm.LPD(),
        rows(*real_rows(), torch.full((M, N), 0.5), dims=(1, 0, 1)),
    ),
    "CRPS": (lambda: sm.CRPS(), rows(*real_rows(), dims=(1, 0))),
    "mixture CRPS": (
        lambda: sm.CRPS(),
        rows(*real_rows(), torch.full((M, N), 0.5), dims=(1, 0, 1)),
    ),
    "IntervalCoverage": (
        lambda: sm.IntervalCoverage(0.8),
        rows(*real_rows(), dims=(1, 0)),
    ),
}
CUTS = [0, 20, 25, 39, 40, 59, 61, 78, 80, N]  # uneven


def make(name: str) -> Any:
    return (
        getattr(sm, name)(classes=C) if name == "ClasswiseECE" else getattr(sm, name)()
    )


def score(name: str, cuts: list[int]) -> Any:
    build, batch = CASES[name]
    metric = build()
    for start, stop in itertools.pairwise(cuts):
        metric.update(*batch(start, stop))
    return metric


def one_shot(name: str) -> float:
    return float(score(name, [0, N]).compute())


def value(metric: Any, *batch: Any) -> float:
    metric.update(*batch)
    return float(metric.compute())


def test_every_public_metric_is_a_case() -> None:
    classes = {name for name in sm._HOME if name != "ood_score"}
    assert classes == {name.split()[-1] for name in CASES}
    assert set(sm._HOME) <= set(dir(sm))
    for name in classes:
        assert issubclass(getattr(sm, name), torchmetrics.Metric)


# Batches and processes


@pytest.mark.parametrize("name", CASES)
def test_uneven_batches_equal_one_shot(name: str) -> None:
    expected = one_shot(name)
    metric = score(name, CUTS)
    result = metric.compute()
    assert isinstance(result, Tensor) and result.shape == () and math.isfinite(result)
    assert float(result) == pytest.approx(expected, abs=1e-6, rel=1e-9)
    assert float(copy.deepcopy(metric).compute()) == float(result)
    metric.reset()
    with pytest.raises(ValueError, match="has seen no rows; call update first"):
        metric.compute()


@pytest.mark.parametrize("name", CASES)
def test_merged_states_equal_one_process(name: str) -> None:
    """In either order, and with a process that saw nothing."""
    build, batch = CASES[name]
    for backwards in (False, True):
        parts = [build(), build(), build()]
        for i, (start, stop) in enumerate(itertools.pairwise(CUTS)):
            parts[i % 2].update(*batch(start, stop))
        if backwards:
            parts.reverse()
        for part in parts[1:]:
            parts[0].merge_state(part)
        assert float(parts[0].compute()) == pytest.approx(
            one_shot(name), abs=1e-6, rel=1e-9
        )


def worker(rank: int, folder: Path) -> None:
    """Two scores of every metric: with the batches dealt out in turn, and with all of them on rank 0."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    result: dict[str, list[float]] = {}
    for name, (build, batch) in CASES.items():
        result[name] = []
        for share in (2, 1):
            metric = build()
            for i, (start, stop) in enumerate(itertools.pairwise(CUTS)):
                if i % share == rank:
                    metric.update(*batch(start, stop))
            result[name].append(float(metric.compute()))
        if name == "AURC":
            result[name].append(float(metric.curve()[1].mean()))
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs gloo",
)
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Real sync, also where one process has no data: its empty lists must join the others' in their type."""
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    codes = forks.exit_codes(
        [forks.start(worker, rank, tmp_path, log=logs[rank]) for rank in (0, 1)], 100
    )
    assert codes == [0, 0], "".join(log.read_text() for log in logs)
    for rank in (0, 1):
        for name, found in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert found == pytest.approx(
                [one_shot(name)] * len(found), abs=1e-6, rel=1e-9
            ), (rank, name)


def test_a_collection_does_not_mix_up_metrics() -> None:
    """torchmetrics lets metrics with equal first states share an update: here after a batch they all judge alike."""
    each = {
        "top1": sm.TopK(1),
        "top3": sm.TopK(3),
        "accuracy": sm.Accuracy(),
        "ece": sm.ECE(),
        "mce": sm.MCE(drop=2),
        "aurc": sm.AURC(),
    }
    each |= {"adaptive": sm.AdaptiveECE(), "wide": sm.ECE(bins=20)}
    together = torchmetrics.MetricCollection(copy.deepcopy(each))
    first = torch.eye(C), torch.arange(C)
    for batch in (first, probs_and_target()):
        together.update(*batch)
        for metric in each.values():
            metric.update(*batch)
    assert {k: float(v) for k, v in together.compute().items()} == {
        k: float(m.compute()) for k, m in each.items()
    }
    groups = [set(group) for group in together.compute_groups.values()]
    assert {"ece", "mce"} in groups and {"aurc", "adaptive"} in groups
    covered = torchmetrics.MetricCollection(
        {"a": sm.IntervalCoverage(0.5), "b": sm.IntervalCoverage(0.9)}
    )
    covered.update(torch.zeros(1, 3), torch.zeros(3), 1.0)
    covered.update(torch.zeros(1, 1), torch.ones(1), 1.0)
    assert {k: float(v) for k, v in covered.compute().items()} == {"a": 0.75, "b": 1.0}


def test_forward_gives_the_batch_and_keeps_the_sum() -> None:
    metric, (probs, target) = sm.NLL(), probs_and_target()
    batches = [
        float(metric(probs[:30], target[:30])),
        float(metric(probs[30:], target[30:])),
    ]
    assert float(metric.compute()) == pytest.approx(
        (30 * batches[0] + (N - 30) * batches[1]) / N
    )


def test_scores_may_be_overwritten_after_update() -> None:
    scores = torch.tensor([0.1, 0.9], dtype=torch.float64, requires_grad=True)
    metric = sm.AUROC()
    metric.update(scores, torch.tensor([0.0, 1.0], dtype=torch.float64))
    with torch.no_grad():
        scores.zero_()
    assert float(metric.compute()) == 1
    assert not metric.compute().requires_grad


# Classes


def test_scores_equal_scikit_learn_and_torchmetrics() -> None:
    from sklearn.metrics import (
        accuracy_score,
        brier_score_loss,
        log_loss,
        top_k_accuracy_score,
    )
    from torchmetrics.classification import MulticlassAccuracy

    probs, target = probs_and_target()
    exact, y = (
        (probs.double() / probs.double().sum(-1, keepdim=True)).numpy(),
        target.numpy(),
    )
    assert value(sm.Accuracy(), probs, target) == pytest.approx(
        accuracy_score(y, exact.argmax(1))
    )
    assert value(sm.NLL(), probs, target) == pytest.approx(
        log_loss(y, exact, labels=range(C)), abs=1e-6
    )
    assert value(sm.Brier(), probs, target) == pytest.approx(
        brier_score_loss(y, exact, labels=range(C)), abs=1e-6
    )
    for k in (1, 3, 5, C):
        assert value(sm.TopK(k), probs, target) == pytest.approx(
            top_k_accuracy_score(y, exact, k=k, labels=range(C)) if k < C else 1.0
        )
        theirs = MulticlassAccuracy(C, top_k=k, average="micro")
        assert value(sm.TopK(k), probs, target) == pytest.approx(
            value(theirs, probs, target)
        )


def test_binary_scores_are_those_of_two_classes() -> None:
    from sklearn.metrics import brier_score_loss, log_loss

    two, target = probs_and_target(N, 2)
    p = two[:, 1].double()
    assert value(sm.NLL(), p, target) == pytest.approx(
        log_loss(target.numpy(), p.numpy())
    )
    assert value(sm.Brier(), p, target) == pytest.approx(
        2 * brier_score_loss(target.numpy(), p.numpy())
    )
    for name in CLASSES:
        if name != "TopK":
            build = (
                (lambda: sm.ClasswiseECE(2))
                if name == "ClasswiseECE"
                else getattr(sm, name)
            )
            assert value(build(), p, target) == pytest.approx(
                value(build(), torch.stack([1 - p, p], -1), target)
            ), name


def test_brier_tfp_is_one_less() -> None:
    """F30: sum p^2 - 2 p_y, and the table's -0.761 is the standard 0.239."""
    probs, target = probs_and_target()
    tfp = (
        probs.double().square().sum(-1) - 2 * probs.double()[torch.arange(N), target]
    ).mean()
    assert value(sm.Brier(convention="tfp"), probs, target) == pytest.approx(
        float(tfp), abs=1e-6
    )
    assert value(sm.Brier(), probs, target) == pytest.approx(float(tfp) + 1, abs=1e-6)


def test_perfect_and_worst_predictions() -> None:
    target = torch.arange(C)
    perfect, worst = torch.eye(C), torch.eye(C).roll(1, 1)
    expected = {
        "Accuracy": (1, 0),
        "NLL": (0, math.inf),
        "Brier": (0, 2),
        "ECE": (0, 1),
        "MCE": (0, 1),
    }
    expected |= {"AdaptiveECE": (0, 1), "ClasswiseECE": (0, 2 / C), "AURC": (0, 1)}
    for name, (best, least) in expected.items():
        assert value(make(name), perfect, target) == pytest.approx(best), name
        assert value(make(name), worst, target) == pytest.approx(least), name
    assert value(sm.TopK(1), perfect, target) == 1
    assert value(sm.TopK(C), worst, target) == 1
    uniform = torch.full((C, C), 1 / C)
    assert value(sm.NLL(), uniform, target) == pytest.approx(math.log(C))
    assert value(sm.Brier(), uniform, target) == pytest.approx(1 - 1 / C)
    assert value(sm.TopK(2), uniform, target) == pytest.approx(
        2 / C
    )  # of equal probabilities the first two


def test_predictions_of_all_kinds() -> None:
    logits, target = torch.randn(3, N, C), torch.randint(C, (N,))
    pred = sb.Prediction.from_outputs(logits, members=3, weights=[0.5, 0.3, 0.2])
    for name in CLASSES:
        assert value(make(name), pred, target) == pytest.approx(
            value(make(name), pred.probs, target), rel=1e-6
        )
    assert value(sm.NLL(), pred, target) == pytest.approx(
        -float(pred.log_prob(target).mean()), abs=1e-6
    )
    pixels, labels = (
        sb.Prediction.from_outputs(torch.randn(3, 4, 5, 6)),
        torch.randint(6, (4, 5)),
    )
    assert value(sm.Brier(), pixels, labels) == value(
        sm.Brier(), pixels.probs.flatten(0, 1), labels.flatten()
    )
    binary, yes = (
        sb.Prediction.from_outputs(torch.randn(3, 10, 2), "bernoulli"),
        torch.randint(2, (10, 2)).float(),
    )
    flat = value(sm.NLL(), binary.probs.flatten(), yes.flatten())
    assert value(sm.NLL(), binary, yes) == pytest.approx(flat, rel=1e-6)
    with pytest.raises(AttributeError, match="likelihood 'gaussian'"):
        sm.NLL().update(
            sb.Prediction.from_outputs(torch.randn(3, 9), "gaussian"), torch.zeros(9)
        )


def test_soft_labels() -> None:
    """CIFAR-10H: counts as probabilities; certain labels give the NLL; the entropy is the least."""
    probs, target = probs_and_target()
    counts = torch.randint(0, 50, (N, C)) + torch.nn.functional.one_hot(target, C)
    share = counts.double() / counts.sum(-1, keepdim=True)
    slow = np.mean(
        [
            -sum(q * math.log(p) for q, p in zip(*pair, strict=True))
            for pair in zip(share.tolist(), probs.tolist(), strict=True)
        ]
    )
    assert value(sm.SoftLabelNLL(), probs, counts) == pytest.approx(slow)
    assert value(sm.SoftLabelNLL(), probs, share) == pytest.approx(slow)
    assert value(
        sm.SoftLabelNLL(), probs, torch.nn.functional.one_hot(target, C)
    ) == pytest.approx(value(sm.NLL(), probs, target))
    assert value(sm.SoftLabelNLL(), share, counts) == pytest.approx(
        float(torch.special.entr(share).sum(-1).mean())
    )
    assert value(sm.SoftLabelNLL(), torch.eye(2), torch.eye(2)) == 0  # 0 log 0
    assert value(
        sm.SoftLabelNLL(), torch.tensor([0.25]), torch.tensor([[3, 1]])
    ) == pytest.approx(stats.entropy([0.75, 0.25]))
    assert value(sm.SoftLabelNLL(), probs[None], counts[None]) == pytest.approx(
        slow
    )  # many targets of one row


# Confidence


@pytest.mark.parametrize(("bins", "drop"), [(15, 0), (20, 5), (10, 3), (1, 0)])
def test_ece_and_mce_equal_the_function(bins: int, drop: int) -> None:
    probs, target = probs_and_target()
    result = calibration(probs, target, bins, drop)
    assert value(sm.ECE(bins, drop), probs, target) == result.ece
    assert value(sm.MCE(bins, drop), probs, target) == result.mce


def test_the_drop_rule_sees_all_batches() -> None:
    """F39: a bin of five is dropped and of six kept, however they arrive."""
    metric = sm.MCE(bins=20, drop=5)
    for rows in (3, 2):
        metric.update(torch.full((rows,), 0.72), torch.zeros(rows))
    assert math.isnan(metric.compute())
    metric.update(torch.full((1,), 0.72), torch.zeros(1))
    assert float(metric.compute()) == pytest.approx(0.72, abs=1e-6)


def test_ece_where_torchmetrics_is_wrong() -> None:
    """F20: certainty is in the last bin. torchmetrics counts it as a bin of its own, apart from 0.96."""
    theirs = torchmetrics.classification.MulticlassCalibrationError
    p, target = torch.tensor([0.96, 1.0]), torch.tensor([1, 0])
    probs = torch.stack([1 - p, p], -1)
    assert value(sm.ECE(), probs, target) == pytest.approx(
        0.48, abs=1e-6
    )  # one bin, 98% sure, half right
    assert value(theirs(2, n_bins=15), probs, target) == pytest.approx(
        (0.04 + 1) / 2, abs=1e-6
    )
    assert value(theirs(2, n_bins=1, norm="max"), probs, target) == pytest.approx(
        1, abs=1e-6
    )  # of a single bin!
    assert value(sm.MCE(1), probs, target) == pytest.approx(0.48, abs=1e-6)
    probs, target = probs_and_target(400, 3, seed=2)  # elsewhere they agree
    assert value(sm.ECE(), probs, target) == pytest.approx(
        value(theirs(3, n_bins=15), probs, target), abs=1e-6
    )
    assert value(sm.MCE(), probs, target) == pytest.approx(
        value(theirs(3, n_bins=15, norm="max"), probs, target), abs=1e-6
    )


def test_adaptive_bins_equal_a_slow_loop() -> None:
    probs, target = probs_and_target()
    pairs = sorted(
        (
            (max(row), row.index(max(row)) == y)
            for row, y in zip(probs.tolist(), target.tolist(), strict=True)
        ),
        reverse=True,
    )
    for bins in (1, 4, 15, N, 2 * N):
        inside: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
        for i, pair in enumerate(pairs):
            inside[i * bins // N].append(pair)
        assert max(map(len, inside)) - min(map(len, inside)) <= 1
        slow = sum(abs(sum(ok - p for p, ok in b)) for b in inside) / N
        assert value(sm.AdaptiveECE(bins), probs, target) == pytest.approx(slow)


def test_classwise_equals_a_slow_loop() -> None:
    probs, target = probs_and_target()
    total = 0.0
    for c, r in itertools.product(range(C), range(10)):
        inside = [i for i in range(N) if math.ceil(10 * float(probs[i, c])) - 1 == r]
        total += (
            abs(sum(float(target[i] == c) - float(probs[i, c]) for i in inside)) / N
        )
    assert value(sm.ClasswiseECE(C, bins=10), probs, target) == pytest.approx(
        total / C, abs=1e-6
    )


def test_risk_coverage_equals_a_slow_loop() -> None:
    probs, target = probs_and_target()
    order = sorted(range(N), key=lambda i: -float(probs[i].max()))
    wrong = [int(probs[i].argmax() != target[i]) for i in order]
    risks = [sum(wrong[:k]) / k for k in range(1, N + 1)]
    metric = sm.AURC()
    assert value(metric, probs, target) == pytest.approx(np.mean(risks))
    coverage, risk = metric.curve()
    assert risk.tolist() == pytest.approx(risks)
    assert coverage.tolist() == pytest.approx([k / N for k in range(1, N + 1)])
    assert float(risk[-1]) == pytest.approx(1 - value(sm.Accuracy(), probs, target))
    assert metric.compute() == metric.curve()[1].mean()  # curve leaves the states alone


def test_ties_are_an_average_over_orders() -> None:
    """Three equal confidences, one right: AURC is the mean over all orders."""
    probs, target = torch.tensor([0.9, 0.7, 0.7, 0.7]), [1, 1, 0, 0]
    every = [
        np.mean([sum(1 - t for t in order[:k]) / k for k in range(1, 5)])
        for order in ([1, *p] for p in itertools.permutations(target[1:]))
    ]
    assert value(sm.AURC(), probs, torch.tensor(target)) == pytest.approx(
        np.mean(every)
    )


unit = st.lists(
    st.tuples(st.floats(0, 1, width=32), st.integers(0, 1)), min_size=1, max_size=30
)


@pytest.mark.slow
@given(unit, st.integers(1, 20), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_bounds_and_order(pairs: list[tuple[float, int]], bins: int, rng: Any) -> None:
    """ECE <= MCE <= 1, 0 <= Brier <= 2, and the order of rows changes nothing, not even among ties."""
    builds = [
        lambda: sm.ECE(bins),
        lambda: sm.MCE(bins),
        lambda: sm.AdaptiveECE(bins),
        lambda: sm.ClasswiseECE(2, bins),
        sm.AURC,
        sm.Brier,
        sm.Accuracy,
    ]
    shuffled = rng.sample(pairs, len(pairs))
    found = [
        [
            value(
                build(),
                torch.tensor([p for p, _ in some]),
                torch.tensor([y for _, y in some]),
            )
            for build in builds
        ]
        for some in (pairs, shuffled)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-9)
    ece, mce, adaptive, classwise, aurc, brier, _ = found[0]
    assert -1e-12 <= ece <= mce + 1e-12 and mce <= 1 and 0 <= brier <= 2
    assert all(0 <= v <= 1 + 1e-12 for v in (adaptive, classwise, aurc))
    assert (
        adaptive <= 1
        and ece
        >= abs(sum(max(p, 1 - p) - ((p > 0.5) == y) for p, y in pairs)) / len(pairs)
        - 1e-6
    )


# Ranking


def slow_fpr(scores: list[float], label: list[int], recall: float) -> float:
    positive = [s for s, y in zip(scores, label, strict=True) if y]
    negative = [s for s, y in zip(scores, label, strict=True) if not y]
    return min(
        sum(s >= t for s in negative) / len(negative)
        for t in scores
        if sum(s >= t for s in positive) >= recall * len(positive) - 1e-9
    )


def test_ranking_equals_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    scores, label = ood_rows()
    assert value(sm.AUROC(), scores, label) == pytest.approx(
        roc_auc_score(label, scores)
    )
    assert value(sm.AUCPR(), scores, label) == pytest.approx(
        average_precision_score(label, scores)
    )
    for recall in (0.5, 0.8, 0.95, 1.0):
        assert value(sm.FPR95(recall), scores, label) == pytest.approx(
            slow_fpr(scores.tolist(), label.tolist(), recall)
        )


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(-5, 5), st.integers(0, 1)), min_size=2, max_size=40
    ).filter(lambda v: {y for _, y in v} == {0, 1})
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_ranking_with_ties(pairs: list[tuple[int, int]]) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    scores, label = [float(s) for s, _ in pairs], [y for _, y in pairs]
    s, y = torch.tensor(scores), torch.tensor(label)
    assert value(sm.AUROC(), s, y) == pytest.approx(roc_auc_score(label, scores))
    assert value(sm.AUROC(), -s, 1 - y) == pytest.approx(value(sm.AUROC(), s, y))
    assert value(sm.AUCPR(), s, y) == pytest.approx(
        average_precision_score(label, scores)
    )
    assert value(sm.FPR95(), s, y) == pytest.approx(slow_fpr(scores, label, 0.95))


def test_ranking_ends() -> None:
    s, y = torch.arange(40.0), (torch.arange(40) >= 20).bool()
    assert [value(m(), s, y) for m in (sm.AUROC, sm.AUCPR, sm.FPR95)] == [1, 1, 0]
    assert [value(m(), -s, y) for m in (sm.AUROC, sm.FPR95)] == [0, 1]
    assert [value(m(), torch.zeros(40), y) for m in (sm.AUROC, sm.AUCPR, sm.FPR95)] == [
        0.5,
        0.5,
        1,
    ]
    nineteen = torch.cat(
        [torch.arange(19) + 100.0, torch.tensor([-1.0])]
    )  # 19 of 20 found is 95%
    assert value(sm.FPR95(), torch.cat([torch.arange(20.0), nineteen]), y) == 0
    hundred = torch.cat(
        [torch.arange(55) + 10.0, -torch.arange(45) - 1.0, torch.zeros(1)]
    )  # 55 of 100 found is 55%
    assert value(sm.FPR95(recall=0.55), hundred, torch.tensor([1] * 100 + [0])) == 0


def test_scores_above_one_keep_their_ranking_across_batches() -> None:
    """By default torchmetrics puts only batches with a score above 1 through a sigmoid."""
    for metric in (sm.AUROC(), sm.AUCPR()):
        metric.update(torch.tensor([0.9, 0.8]), torch.tensor([0, 0]))
        metric.update(torch.tensor([1.5, 1.0]), torch.tensor([1, 1]))
        assert float(metric.compute()) == 1


def test_infinite_scores_rank_as_the_largest_and_the_smallest() -> None:
    infinite = torch.tensor([math.inf, math.inf, 0.0, math.inf, -math.inf, -math.inf])
    label = torch.tensor([1, 0, 0, 1, 0, 1])
    for metric in (sm.AUROC, sm.AUCPR, sm.FPR95):
        assert value(metric(), infinite, label) == value(
            metric(), infinite.clamp(-9, 9), label
        )


def test_ood_scores() -> None:
    pred = sb.Prediction.from_outputs(torch.randn(6, N, C), members=3)
    assert torch.allclose(sm.ood_score(pred), pred.entropy, atol=1e-6)
    assert torch.allclose(
        sm.ood_score(pred.probs, "entropy"),
        torch.distributions.Categorical(pred.probs).entropy(),
        atol=1e-6,
    )
    assert torch.equal(sm.ood_score(pred, "confidence"), 1 - pred.confidence)
    assert torch.equal(sm.ood_score(pred, "mutual_information"), pred.epistemic)
    binary = sb.Prediction.from_outputs(torch.randn(6, N), "bernoulli")
    assert torch.allclose(sm.ood_score(binary), binary.entropy, atol=1e-6)
    target = torch.arange(N) % 2
    assert value(sm.AUCPR(), binary, target) == value(
        sm.AUCPR(), binary.probs, target
    )  # also for classes, as in MIMIC
    with pytest.raises(TypeError, match="needs a Prediction"):
        sm.ood_score(pred.probs, "mutual_information")
    with pytest.raises(ValueError, match="at least two draws, got 1"):
        sm.ood_score(
            sb.Prediction.from_outputs(torch.randn(1, 2, 3)), "mutual_information"
        )
    with pytest.raises(ValueError, match="got 'energy'"):
        sm.ood_score(pred, "energy")  # type: ignore[arg-type]


# Diversity


def test_diversity_equals_a_slow_loop() -> None:
    each, target = members().double(), probs_and_target()[1]
    each = each / each.sum(-1, keepdim=True)
    pairs = list(itertools.combinations(each.numpy(), 2))
    disagree = np.mean([(p.argmax(1) != q.argmax(1)).mean() for p, q in pairs])
    assert value(sm.Disagreement(), each) == pytest.approx(disagree)
    assert value(sm.PairwiseKL(), each) == pytest.approx(
        np.mean([stats.entropy(p, q, axis=1).mean() for p, q in pairs])
    )
    cosine = [
        (p @ q) / np.linalg.norm(p) / np.linalg.norm(q)
        for one, other in pairs
        for p, q in zip(one, other, strict=True)
    ]
    assert value(sm.CosineSimilarity(), each) == pytest.approx(np.mean(cosine))
    error = float((each.mean(0).argmax(-1) != target).double().mean())
    assert value(sm.NormalisedDisagreement(), each, target) == pytest.approx(
        disagree / (error + 1e-7)
    )


def test_identical_and_opposite_members() -> None:
    """F19."""
    same = members()[:1].expand(K, N, C)
    target = same[0].argmax(-1)
    assert value(sm.Disagreement(), same) == 0
    assert value(sm.PairwiseKL(), same) == pytest.approx(0, abs=1e-12)
    assert value(sm.CosineSimilarity(), same) == pytest.approx(1)
    assert value(sm.NormalisedDisagreement(), same, target) == 0  # and no error at all
    apart = torch.stack(
        [torch.eye(3), torch.eye(3).roll(1, 1), torch.eye(3).roll(2, 1)]
    )
    assert [
        value(m(), apart) for m in (sm.Disagreement, sm.CosineSimilarity, sm.PairwiseKL)
    ] == [1, 0, math.inf]


@pytest.mark.slow
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(2, 5))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_diversity_ignores_the_order_of_members(
    seed: int, k: int, classes: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    each = (
        torch.randn(k, 8, classes, generator=generator, dtype=torch.float64)
        .mul(3)
        .softmax(-1)
    )
    other = each[torch.randperm(k, generator=generator)]
    for build in (sm.Disagreement, sm.CosineSimilarity):
        assert 0 <= value(build(), each) <= 1 + 1e-12
        assert value(build(), each) == pytest.approx(value(build(), other))
    both_ways = [
        value(sm.PairwiseKL(), e) + value(sm.PairwiseKL(), e.flip(0))
        for e in (each, other)
    ]
    assert both_ways[0] == pytest.approx(both_ways[1])
    assert value(sm.PairwiseKL(), each) >= 0


def test_diversity_takes_predictions() -> None:
    pred, target = (
        sb.Prediction.from_outputs(torch.randn(6, N, C), members=3),
        torch.randint(C, (N,)),
    )
    assert value(sm.Disagreement(), pred) == value(sm.Disagreement(), pred.member_probs)
    assert value(sm.NormalisedDisagreement(), pred, target) == value(
        sm.NormalisedDisagreement(), pred.member_probs, target
    )
    binary = sb.Prediction.from_outputs(torch.randn(4, N), "bernoulli", members=2)
    p = binary.member_probs
    assert value(sm.PairwiseKL(), p) == pytest.approx(
        value(sm.PairwiseKL(), torch.stack([1 - p, p], -1))
    )
    assert value(sm.PairwiseKL(), binary) == pytest.approx(
        value(sm.PairwiseKL(), p), rel=1e-6
    )
    yes = torch.arange(N) % 2
    assert value(sm.NormalisedDisagreement(), binary, yes) == value(
        sm.NormalisedDisagreement(), p, yes
    )


# Real targets


def test_rmse_and_lpd() -> None:
    from sklearn.metrics import root_mean_squared_error

    pred = sb.Prediction.from_outputs(
        torch.randn(M, N, 2), "gaussian", likelihood_std=0.7
    )
    target = torch.randn(N, 2)
    assert value(sm.RMSE(), pred, target) == pytest.approx(
        root_mean_squared_error(target.flatten(), pred.mean.flatten())
    )
    theirs = torchmetrics.MeanSquaredError(squared=False)
    assert value(sm.RMSE(), pred, target) == pytest.approx(
        value(theirs, pred.mean.flatten(), target.flatten()), rel=1e-5
    )
    assert value(sm.LPD(), pred, target) == pytest.approx(
        float(pred.log_prob(target).mean()), abs=1e-5
    )
    assert value(sm.LPD(), pred, target) == value(
        sm.LPD(), pred.samples, target, pred.noise.sqrt()
    )
    mean_log = float(pred.draw_log_prob(target).mean())
    assert value(sm.LPD(), pred, target) >= mean_log  # F38: Jensen
    perfect = sb.Prediction.from_outputs(
        target[None], "gaussian", likelihood_std=0.1**-0.5
    )
    assert value(sm.LPD(), perfect, target) == pytest.approx(-2.0702, abs=1e-4)


def test_weights_enter_every_distribution() -> None:
    """A member of weight one is alone."""
    outputs, target = torch.randn(4, N), torch.randn(N)
    for noise in (0.5, 0.0):
        weighted = sb.Prediction.from_outputs(
            outputs, "gaussian", members=2, likelihood_std=noise, weights=[1.0, 0.0]
        )
        alone = sb.Prediction.from_outputs(
            outputs[::2], "gaussian", likelihood_std=noise
        )
        for build in (
            sm.RMSE,
            sm.CRPS,
            *([sm.LPD, sm.IntervalCoverage] if noise else []),
        ):
            assert value(build(), weighted, target) == pytest.approx(
                value(build(), alone, target), abs=1e-6
            )
    uneven = sb.Prediction.from_outputs(
        outputs, "gaussian", members=2, likelihood_std=0.5, weights=[0.75, 0.25]
    )
    assert value(sm.LPD(), uneven, target) == pytest.approx(
        float(uneven.log_prob(target).mean()), abs=1e-5
    )
    repeated = outputs[[0, 0, 0, 1, 2, 2, 2, 3]]
    assert value(sm.CRPS(), uneven, target) == pytest.approx(
        value(sm.CRPS(), repeated, target, 0.5)
    )


def slow_crps(cdf: Callable[[Any], Any], y: float, ends: list[float]) -> float:
    """The integral that defines it, piece by piece."""
    knots = sorted({*ends, y})
    return sum(
        integrate.quad(lambda x: (cdf(x) - (x >= y)) ** 2, a, b, limit=200)[0]
        for a, b in itertools.pairwise(knots)
    )


@pytest.mark.slow
def test_crps_is_the_integral() -> None:
    rng = np.random.default_rng(0)
    weights = np.array([0.5, 0.2, 0.3])
    for _ in range(8):
        x, s, y = rng.normal(size=3), rng.uniform(0.1, 2, 3), rng.normal()
        tensors = torch.tensor(x)[:, None], torch.tensor(s)[:, None], torch.tensor([y])
        far = [-20.0, 20.0]
        step = slow_crps(lambda t, x=x: ((x <= t) * weights).sum(), y, [*far, *x])
        assert float(
            crps_samples(tensors[0], tensors[2], torch.tensor(weights))
        ) == pytest.approx(step, abs=1e-6)
        smooth = slow_crps(
            lambda t, x=x, s=s: (stats.norm.cdf(t, x, s) * weights).sum(), y, [*far, *x]
        )
        assert float(crps_mixture(*tensors, torch.tensor(weights))) == pytest.approx(
            smooth, abs=1e-6
        )
        single = slow_crps(
            lambda t, x=x, s=s: stats.norm.cdf(t, x[0], s[0]), y, [*far, x[0]]
        )
        assert float(
            crps_mixture(tensors[0][:1], tensors[1][:1], tensors[2])
        ) == pytest.approx(single, abs=1e-6)
        z = (y - x[0]) / s[0]
        closed = s[0] * (
            z * (2 * stats.norm.cdf(z) - 1)
            + 2 * stats.norm.pdf(z)
            - 1 / math.sqrt(math.pi)
        )
        assert float(
            crps_mixture(tensors[0][:1], tensors[1][:1], tensors[2])
        ) == pytest.approx(closed)


def test_crps_forms_agree() -> None:
    values, target = real_rows()
    pairs = (values[:, None] - values[None]).abs().double().mean((0, 1)) / 2
    slow = (values - target).abs().double().mean(0) - pairs
    assert torch.allclose(crps_samples(values, target), slow, atol=1e-6)
    theirs = torchmetrics.functional.regression.continuous_ranked_probability_score(
        values.T, target
    )
    assert value(sm.CRPS(), values, target) == pytest.approx(float(theirs), abs=1e-6)
    assert torch.allclose(
        crps_mixture(values, torch.zeros(()), target), slow, atol=1e-6
    )  # points
    assert torch.allclose(
        crps_mixture(values, torch.full((), 1e-7), target), slow, atol=1e-6
    )
    assert value(sm.CRPS(), values[:1], target) == pytest.approx(
        float((values[0] - target).abs().mean())
    )
    assert torch.allclose(
        crps_samples(values + 1e6, target + 1e6),
        crps_samples((values + 1e6) - 1e6, (target + 1e6) - 1e6),
    )
    draws = torch.randn(40_001, 1, dtype=torch.float64)  # all pairs would need 12 GiB
    assert float(crps_samples(draws, torch.zeros(1))) == pytest.approx(
        (math.sqrt(2) - 1) / math.sqrt(math.pi), abs=0.01
    )


def test_coverage() -> None:
    values, target = real_rows()
    low, high = np.quantile(values.numpy(), [0.1, 0.9], axis=0)
    inside = ((low <= target.numpy()) & (target.numpy() <= high)).mean()
    assert value(sm.IntervalCoverage(0.8), values, target) == pytest.approx(inside)
    assert value(
        sm.IntervalCoverage(0.8), (torch.tensor(low), torch.tensor(high)), target
    ) == pytest.approx(inside)
    pred = sb.Prediction.from_outputs(values, "gaussian")
    with pytest.warns(sb.SlimbayesWarning, match="no observation noise"):
        assert value(sm.IntervalCoverage(0.8), pred, target) == pytest.approx(inside)
    y = torch.randn(20_000, dtype=torch.float64)
    for level in (0.5, 0.9, 0.99):
        assert value(
            sm.IntervalCoverage(level), torch.zeros(1, len(y)), y, 1.0
        ) == pytest.approx(level, abs=0.015)
        half = stats.norm.ppf(0.5 + level / 2)
        assert value(
            sm.IntervalCoverage(level), torch.zeros(1, len(y)), y, 1.0
        ) == pytest.approx(float((y.abs() <= half).double().mean()))
    noisy = sb.Prediction.from_outputs(values, "gaussian", likelihood_std=0.5)
    drawn = noisy.interval(0.8)
    assert value(sm.IntervalCoverage(0.8), noisy, target) == pytest.approx(
        value(sm.IntervalCoverage(0.8), drawn, target)
    )


# The calibration function


def two_classes(confidence: list[float], right: list[int]) -> tuple[Tensor, Tensor]:
    """Predictions of class one with the given probability, perhaps below one half; right: whether it is true."""
    p = torch.tensor(confidence)
    return torch.stack([1 - p, p], -1), torch.tensor(right)


def loop_calibration(
    probs: Tensor, target: Tensor, bins: int, drop: int
) -> tuple[float, float, list[int]]:
    """Appendix D.2, one bin and one row at a time."""
    inside: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for row, y in zip(probs.tolist(), target.tolist(), strict=True):
        p = max(row)
        for r in range(bins):
            if (r / bins < p or r == 0) and (p <= (r + 1) / bins or r == bins - 1):
                inside[r].append((p, row.index(p) == y))
    gaps = [
        abs(sum(ok for _, ok in b) - sum(p for p, _ in b)) / len(b) if b else 0.0
        for b in inside
    ]
    kept = [r for r in range(bins) if len(inside[r]) > drop]
    ece = sum(len(inside[r]) / len(target) * gaps[r] for r in kept)
    return ece, max((gaps[r] for r in kept), default=math.nan), [len(b) for b in inside]


@given(
    st.integers(0, 2**31),
    st.integers(1, 400),
    st.integers(1, 30),
    st.integers(0, 8),
    st.integers(2, 10),
    st.floats(0.1, 8),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_calibration_equals_a_slow_loop(
    seed: int, rows: int, bins: int, drop: int, classes: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = (
        spread * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    ).softmax(-1)
    target = torch.randint(classes, (rows,), generator=generator)
    ece, mce, count = loop_calibration(probs, target, bins, drop)
    ours = calibration(probs, target, bins, drop)
    assert ours.count.tolist() == count
    assert ours.kept.tolist() == [c > drop for c in count]
    if any(ours.kept):
        assert (ours.ece, ours.mce) == pytest.approx((ece, mce), abs=1e-12)
        assert ours.ece <= ours.mce
    else:
        assert math.isnan(ours.ece) and math.isnan(ours.mce)


def test_calibrated_predictions_have_almost_no_error() -> None:
    """F20: labels drawn from the predicted probabilities."""
    probs = (2 * torch.randn(200_000, 4, dtype=torch.float64)).softmax(-1)
    target = torch.multinomial(probs, 1).squeeze(1)
    result = calibration(probs, target)
    assert result.ece < 0.005
    assert result.mce < 0.03
    assert (
        calibration(probs.square() / probs.square().sum(-1, keepdim=True), target).ece
        > 0.05
    )  # overconfident


@pytest.mark.parametrize(
    ("confidence", "right"),
    [(0.9, 10), (0.9, 5), (0.6, 9), (0.55, 0), (1.0, 10), (1.0, 3)],
)
def test_constant_confidence(confidence: float, right: int) -> None:
    """F20: confidence c and accuracy a give |a - c| for both errors, also with p = 1 exactly."""
    probs, target = two_classes([confidence] * 10, [1] * right + [0] * (10 - right))
    result = calibration(probs, target)
    assert (result.ece, result.mce) == pytest.approx(
        (abs(right / 10 - confidence),) * 2, abs=1e-6
    )
    assert result.accuracy.nansum().item() == pytest.approx(right / 10)
    assert result.confidence.nansum().item() == pytest.approx(confidence)
    assert result.count.sum() == 10


@pytest.mark.parametrize("bins", [1, 15, 20])
def test_ends_of_the_unit_interval(bins: int) -> None:
    """F20: certainty lies in the last bin; rounding may have taken it a little above one."""
    sure = torch.tensor([[1.0, 0.0], [1.0 + 1e-6, 0.0]])
    result = calibration(sure, torch.tensor([0, 1]), bins=bins, drop=0)
    assert result.count.tolist() == [0] * (bins - 1) + [2]
    assert len(result.edges) == bins + 1
    assert (result.edges[0], result.edges[-1]) == (0, 1)
    assert result.ece == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("dtype", "bins"),
    each([torch.float32, torch.float64, torch.bfloat16], [10, 15, 20, 100]),
)
def test_a_probability_on_an_edge_belongs_to_the_bin_below(
    dtype: torch.dtype, bins: int
) -> None:
    """0.15 is on the edge of 20 bins, whichever way its precision rounds it: (0.10, 0.15]. The next number is not."""
    for r in range(bins // 2 + 1, bins):
        edge = torch.tensor([r / bins], dtype=dtype)
        above = torch.nextafter(edge, torch.ones_like(edge))
        for p, expected in ((edge, r - 1), (above, r)):
            assert (
                calibration(p, torch.tensor([1]), bins, drop=0).count.argmax()
                == expected
            )


@pytest.mark.parametrize(
    ("classes", "top", "expected"),
    [(8, 0.15, 2), (3, 0.35, 6), (10, 0.1, 1), (2, 0.55, 10)],
)
def test_edges_below_one_half(classes: int, top: float, expected: int) -> None:
    """float32 has 0.15, 0.35 and 0.55 a little off 3/20, 7/20 and 11/20."""
    probs = torch.tensor([[top] + [(1 - top) / (classes - 1)] * (classes - 1)])
    assert calibration(probs, torch.tensor([0]), drop=0).count.argmax() == expected


def test_bins_of_five_are_dropped_and_of_six_are_kept() -> None:
    """F39: at most 5 predictions leave both errors, but still count in n."""
    five = two_classes([0.72] * 5 + [0.97] * 15, [0] * 5 + [1] * 15)
    result = calibration(*five)
    assert result.ece == pytest.approx(15 / 20 * 0.03, abs=1e-6)
    assert result.mce == pytest.approx(0.03, abs=1e-6)
    assert (int(result.count[14]), bool(result.kept[14]), bool(result.kept[19])) == (
        5,
        False,
        True,
    )
    assert result.accuracy[14] == 0  # the diagram still has it
    six = two_classes([0.72] * 6 + [0.97] * 14, [0] * 6 + [1] * 14)
    result = calibration(*six)
    assert result.ece == pytest.approx(6 / 20 * 0.72 + 14 / 20 * 0.03, abs=1e-6)
    assert result.mce == pytest.approx(0.72, abs=1e-6)
    assert calibration(*five, drop=0).mce == pytest.approx(0.72, abs=1e-6)


def test_nothing_kept_is_no_error_of_zero() -> None:
    result = calibration(*two_classes([0.9] * 3, [0] * 3))
    assert math.isnan(result.ece)
    assert math.isnan(result.mce)
    assert result.count.sum() == 3


@pytest.mark.parametrize("kind", [torch.long, torch.float32, torch.bool])
def test_binary_probabilities_equal_two_classes(kind: torch.dtype) -> None:
    """p stands for (1 - p, p): below one half the prediction is class zero."""
    p, target = torch.rand(500, dtype=torch.float64), torch.randint(2, (500,))
    one, two = (
        calibration(p, target.to(kind)),
        calibration(torch.stack([1 - p, p], -1), target),
    )
    assert (one.ece, one.mce) == (two.ece, two.mce)
    assert torch.equal(one.count, two.count)
    assert one.count[:10].sum() == 0


def test_calibration_takes_predictions() -> None:
    """Classes, pixels, and binary targets of one or two dimensions."""
    logits, target = torch.randn(3, 200, 5), torch.randint(5, (200,))
    pred = sb.Prediction.from_outputs(logits)
    assert calibration(pred, target).ece == calibration(pred.probs, target).ece
    pixels, labels = torch.randn(3, 4, 5, 6, 7), torch.randint(7, (4, 5, 6))
    pred = sb.Prediction.from_outputs(pixels, class_dim=-1)
    assert (
        calibration(pred, labels).ece
        == calibration(pred.probs.flatten(0, 2), labels.flatten()).ece
    )
    for shape in ((100,), (100, 2)):
        pred, yes = (
            sb.Prediction.from_outputs(torch.randn(3, *shape), "bernoulli"),
            torch.randint(2, shape).float(),
        )
        flat = calibration(pred.probs.flatten(), yes.flatten()).ece
        assert calibration(pred, yes).ece == pytest.approx(flat, rel=1e-6)
    with pytest.raises(AttributeError, match="likelihood 'gaussian'"):
        calibration(
            sb.Prediction.from_outputs(torch.randn(3, 9), "gaussian"), torch.zeros(9)
        )


def test_the_rank1_papers_rule_agrees_away_from_edges() -> None:
    """bins=15 and drop=0 is the calibration error of the rank-1 paper: floor(15 p) differs on edges alone."""
    probs, target = torch.randn(800, 10).mul(2).softmax(1), torch.randint(10, (800,))
    confidence, label = probs.double().max(1)
    index = (15 * confidence).long().clamp(max=14)
    expected = sum(
        abs(
            float(
                (label == target)[index == r].double().sum()
                - confidence[index == r].sum()
            )
        )
        / 800
        for r in range(15)
    )
    assert calibration(probs, target, bins=15, drop=0).ece == pytest.approx(
        expected, abs=1e-9
    )


@pytest.mark.parametrize(
    ("probs", "target", "changes", "match"),
    [
        (
            torch.full((4, 2), 0.5),
            torch.zeros(3, dtype=torch.long),
            {},
            r"got shapes \(4, 2\) and \(3,\)",
        ),
        (
            torch.full((4, 2), 0.5),
            torch.zeros(4, 2, dtype=torch.long),
            {},
            r"got shapes \(4, 2\) and \(4, 2\)",
        ),
        (
            torch.zeros(0, 2),
            torch.zeros(0, dtype=torch.long),
            {},
            r"N >= 1, got shapes \(0, 2\)",
        ),
        (torch.tensor(0.5), torch.tensor(1), {}, r"got shapes \(\) and \(\)"),
        (
            torch.tensor([[math.nan, 0.5]]),
            torch.tensor([0]),
            {},
            r"lie in \[0, 1\], got nan",
        ),
        (
            torch.tensor([[-0.5, 1.5]]),
            torch.tensor([0]),
            {},
            r"lie in \[0, 1\], got -0.5; logits need a softmax",
        ),
        (torch.tensor([1.5]), torch.tensor([0]), {}, r"lie in \[0, 1\], got 1.5"),
        (torch.tensor([[0.5, 0.4]]), torch.tensor([0]), {}, "sum to 1, got 0.9000"),
        (torch.tensor([[1, 0]]), torch.tensor([0]), {}, "got dtype torch.int64"),
        (
            torch.tensor([[0.5, 0.5]]),
            torch.tensor([2]),
            {},
            "class indices from 0 to 1, got 2",
        ),
        (
            torch.tensor([[0.5, 0.5]]),
            torch.tensor([-1]),
            {},
            "class indices from 0 to 1, got -1",
        ),
        (
            torch.tensor([[0.5, 0.5]]),
            torch.tensor([0.0]),
            {},
            "class indices from 0 to 1, got dtype",
        ),
        (torch.tensor([0.5]), torch.tensor([2]), {}, "must be 0 or 1, got 2"),
        (torch.tensor([0.5]), torch.tensor([1]), {"bins": 0}, "bins=0"),
        (torch.tensor([0.5]), torch.tensor([1]), {"drop": -1}, "drop=-1"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    probs: Tensor, target: Tensor, changes: dict[str, int], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        calibration(probs, target, **changes)


# The corruption function

PLAIN = {"clean": 0.2, "fog": [0.3, 0.5, 0.6], "snow": [0.25, 0.4, 0.7]}


def test_a_reference_against_itself_is_a_hundred() -> None:
    """F39, for both forms and every corruption."""
    result = corruption_errors(PLAIN, PLAIN)
    assert (result.mce, result.rmce) == pytest.approx((100, 100), abs=1e-12)
    assert (
        set(result.by_corruption)
        == set(result.relative_by_corruption)
        == {"fog", "snow"}
    )
    assert [
        *result.by_corruption.values(),
        *result.relative_by_corruption.values(),
    ] == pytest.approx([100] * 4, abs=1e-12)


def test_corruption_errors_by_hand() -> None:
    """Errata D.4: the reference's clean error in the denominator, and each clean error once per severity."""
    ours = {"clean": 0.1, "fog": [0.2, 0.4, 0.5], "snow": [0.2, 0.4, 0.75]}
    result = corruption_errors(ours, PLAIN)
    assert result.by_corruption == pytest.approx(
        {"fog": 100 * 1.1 / 1.4, "snow": 100 * 1.35 / 1.35}
    )
    assert result.relative_by_corruption == pytest.approx(
        {
            "fog": 100 * (1.1 - 0.3) / (1.4 - 0.6),
            "snow": 100 * (1.35 - 0.3) / (1.35 - 0.6),
        }
    )
    assert result.mce == pytest.approx(100 * (1.1 / 1.4 + 1) / 2)
    assert result.rmce == pytest.approx(100 * (0.8 / 0.8 + 1.05 / 0.75) / 2)


def test_numbers_of_every_kind_and_order_are_taken() -> None:
    ours = {
        "snow": torch.tensor([0.25, 0.4, 0.7], dtype=torch.float64),
        "clean": torch.tensor(0.2, dtype=torch.float64),
        "fog": (0.3, 0.5, 0.6),
    }
    assert corruption_errors(ours, PLAIN).rmce == pytest.approx(100)


def test_alexnet_gives_the_absolute_error_alone() -> None:
    """Its published errors are fifteen means over severities; without a clean one there is no relative error."""
    assert len(ALEXNET) == 15
    assert {len(rates) for rates in ALEXNET.values()} == {5}
    rng = random.Random(0)
    ours = {
        "clean": 0.3,
        **{name: [rng.random() for _ in range(5)] for name in ALEXNET},
    }
    result = corruption_errors(ours, ALEXNET)
    by_mean = {
        name: 100 * (sum(ours[name]) / 5) / ALEXNET[name][0] for name in ALEXNET
    }  # how the rank-1 code puts it
    assert result.by_corruption == pytest.approx(by_mean)
    assert result.mce == pytest.approx(sum(by_mean.values()) / 15)
    assert math.isnan(result.rmce)
    assert result.relative_by_corruption == {}


def test_alexnets_clean_error_gives_the_printed_relative_error() -> None:
    """ResNet-50 of Hendrycks & Dietterich 2019, Table 1: mCE 76.7 and relative mCE 105.0, from its rounded columns."""
    printed = (80, 82, 83, 75, 89, 78, 80, 78, 75, 66, 57, 71, 85, 77, 77)
    ours = {
        name: [ce / 100 * rates[0]] * 5
        for ce, (name, rates) in zip(printed, ALEXNET.items(), strict=True)
    }
    result = corruption_errors(
        {**ours, "clean": 0.239}, {**ALEXNET, "clean": ALEXNET_CLEAN}
    )
    assert result.mce == pytest.approx(76.7, abs=0.5) and result.rmce == pytest.approx(
        105.0, abs=0.5
    )


@pytest.mark.parametrize(
    ("ours", "reference", "kind", "match"),
    [
        (
            {"clean": 0.2, "fog": [0.3]},
            PLAIN,
            ValueError,
            r"only in errors: \[\], only in reference: \['snow'\]",
        ),
        ({**PLAIN, "frost": [0.3]}, PLAIN, ValueError, r"only in errors: \['frost'\]"),
        ({"clean": 0.2}, {"clean": 0.2}, ValueError, "at least one"),
        (
            {**PLAIN, "fog": [0.3, 0.4]},
            PLAIN,
            ValueError,
            "fog: errors has 2 severities, reference 3",
        ),
        (
            {**PLAIN, "fog": []},
            PLAIN,
            ValueError,
            "errors, fog: .*at least one severity",
        ),
        (
            {**PLAIN, "fog": 0.3},
            PLAIN,
            TypeError,
            "errors, fog: a sequence of error rates is needed, one per severity, got 0.3",
        ),
        (
            {**PLAIN, "fog": [30, 50, 60]},
            PLAIN,
            ValueError,
            "errors, fog: .*fraction between 0 and 1, got 30",
        ),
        ({**PLAIN, "clean": math.nan}, PLAIN, ValueError, "errors, clean: .*got nan"),
        (
            PLAIN,
            {**PLAIN, "snow": [-0.1, 0.2, 0.3]},
            ValueError,
            "reference, snow: .*got -0.1",
        ),
        (
            {"fog": [0.1] * 3, "snow": [0.1] * 3},
            PLAIN,
            ValueError,
            '"clean" error rate, so errors needs one',
        ),
        (PLAIN, {**PLAIN, "snow": [0.0, 0.0, 0.0]}, ValueError, "snow: .*are zero"),
        (
            PLAIN,
            {**PLAIN, "snow": [0.2, 0.2, 0.2]},
            ValueError,
            'snow: .*no more than its clean rate 0.2.*leave "clean" out',
        ),
        (
            PLAIN,
            {**PLAIN, "snow": [0.1, 0.1, 0.1]},
            ValueError,
            "snow: .*no more than its clean rate 0.2",
        ),
    ],
)
def test_errors_that_cannot_be_compared_name_the_corruption(
    ours: Any, reference: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        corruption_errors(ours, reference)


# Bad input

LONG = torch.long


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("probs", "target", "match"),
    [
        (
            torch.full((4, C), 1 / C),
            torch.zeros(3, dtype=LONG),
            r"got shapes \(4, 7\) and \(3,\)",
        ),
        (torch.full((4, C), 1 / C), torch.zeros(4, C, dtype=LONG), r"got shapes"),
        (torch.zeros(0, C), torch.zeros(0, dtype=LONG), "N >= 1"),
        (torch.full((1, C), math.nan), torch.tensor([0]), "got nan"),
        (torch.full((1, C), 2.0), torch.tensor([0]), "logits need a softmax"),
        (torch.full((1, C), 0.1), torch.tensor([0]), "sum to 1, got 0.7000"),
        (torch.full((1, C), 1 / C), torch.tensor([C]), "from 0 to 6, got 7"),
        (torch.full((1, C), 1 / C), torch.tensor([-1]), "from 0 to 6, got -1"),
        (torch.full((1, C), 1 / C), torch.tensor([0.0]), "got dtype torch.float32"),
    ],
)
@pytest.mark.slow
def test_bad_classes_are_refused_and_leave_no_trace(
    name: str, probs: Tensor, target: Tensor, match: str
) -> None:
    metric = make(name)
    expected = value(make(name), *probs_and_target())
    with pytest.raises(ValueError, match=match):
        metric.update(probs, target)
    assert value(metric, *probs_and_target()) == expected


@pytest.mark.parametrize(
    ("build", "batch", "kind", "match"),
    [
        (
            lambda: sm.Accuracy(),
            ([[0.5, 0.5]], torch.tensor([0])),
            TypeError,
            "must be a tensor, got list",
        ),
        (
            lambda: sm.Accuracy(),
            (torch.tensor([[0.5, 0.5]]), [0]),
            TypeError,
            "Targets must be a tensor, got list",
        ),
        (
            lambda: sm.TopK(3),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([0])),
            ValueError,
            "k=3 needs at least as many classes, got 2",
        ),
        (
            lambda: sm.ClasswiseECE(3),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([0])),
            ValueError,
            "for 3 classes, got probabilities of 2",
        ),
        (
            lambda: sm.SoftLabelNLL(),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([0])),
            ValueError,
            r"shape \(1, 2\)",
        ),
        (
            lambda: sm.SoftLabelNLL(),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([[-1, 2]])),
            ValueError,
            "got -1",
        ),
        (
            lambda: sm.SoftLabelNLL(),
            (torch.tensor([[0.5, 0.5]]), torch.tensor([[0, 0]])),
            ValueError,
            "row of zeros",
        ),
        (
            lambda: sm.AUROC(),
            (torch.tensor([0.5, 0.1]), torch.tensor([0])),
            ValueError,
            r"got \(2,\) and \(1,\)",
        ),
        (
            lambda: sm.AUROC(),
            (torch.tensor([math.nan]), torch.tensor([0])),
            ValueError,
            "got nan",
        ),
        (
            lambda: sm.AUROC(),
            (torch.tensor([0.5]), torch.tensor([2])),
            ValueError,
            "0 or 1, got 2",
        ),
        (
            lambda: sm.AUROC(),
            (sb.Prediction.from_outputs(torch.randn(2, 1, 3)), torch.tensor([1])),
            TypeError,
            "use ood_score",
        ),
        (
            lambda: sm.AUCPR(),
            (torch.tensor([0.5]), torch.tensor([1])),
            ValueError,
            "both kinds, got 1 rows, all positive",
        ),
        (
            lambda: sm.FPR95(),
            (torch.tensor([0.5]), torch.tensor([0])),
            ValueError,
            "both kinds, got 1 rows, all negative",
        ),
        (
            lambda: sm.Disagreement(),
            (torch.full((1, 3, 2), 0.5),),
            ValueError,
            r"K >= 2 members .* got shape \(1, 3, 2\)",
        ),
        (
            lambda: sm.PairwiseKL(),
            (torch.full((2, 3, 2), 0.4),),
            ValueError,
            "sum to 1",
        ),
        (
            lambda: sm.NormalisedDisagreement(),
            (torch.full((2, 3, 2), 0.5), torch.tensor([0])),
            ValueError,
            r"\(3, 2\) and \(1,\)",
        ),
        (
            lambda: sm.RMSE(),
            (torch.zeros(3), torch.zeros(3, 1)),
            ValueError,
            r"equal shapes .* got \(3,\) and \(3, 1\)",
        ),
        (
            lambda: sm.RMSE(),
            (torch.zeros(1), torch.tensor([math.nan])),
            ValueError,
            "Targets must be finite",
        ),
        (
            lambda: sm.RMSE(),
            (sb.Prediction.from_outputs(torch.randn(2, 1, 3)), torch.zeros(1)),
            TypeError,
            "of categorical targets",
        ),
        (
            lambda: sm.LPD(),
            (torch.zeros(2, 1), torch.zeros(1)),
            ValueError,
            "density needs observation noise",
        ),
        (
            lambda: sm.CRPS(),
            (torch.zeros(1), torch.zeros(1)),
            ValueError,
            r"Draws \(M, N, ...\)",
        ),
        (
            lambda: sm.CRPS(),
            (torch.zeros(2, 3), torch.zeros(2)),
            ValueError,
            r"got \(3,\) and \(2,\)",
        ),
        (
            lambda: sm.CRPS(),
            (torch.tensor([[0.0], [math.inf]]), torch.zeros(1)),
            ValueError,
            "Draws must be finite",
        ),
        (
            lambda: sm.CRPS(),
            (torch.zeros(2, 1), torch.zeros(1), -1.0),
            ValueError,
            "not negative",
        ),
        (
            lambda: sm.CRPS(),
            (torch.zeros(2, 1), torch.zeros(1), torch.ones(3)),
            ValueError,
            r"broadcast .* got shape \(3,\)",
        ),
        (
            lambda: sm.CRPS(),
            (
                sb.Prediction.from_outputs(torch.zeros(2, 1), "gaussian"),
                torch.zeros(1),
                1.0,
            ),
            ValueError,
            "knows its noise",
        ),
        (
            lambda: sm.IntervalCoverage(),
            ((torch.zeros(2), torch.ones(1)), torch.zeros(1)),
            ValueError,
            r"got \(2,\) and \(1,\)",
        ),
        (lambda: sm.TopK(0), (), ValueError, "k=0"),
        (lambda: sm.Brier("half"), (), ValueError, "got 'half'"),
        (lambda: sm.ECE(bins=0), (), ValueError, "bins=0"),
        (lambda: sm.MCE(drop=-1), (), ValueError, "drop=-1"),
        (lambda: sm.AdaptiveECE(0), (), ValueError, "bins=0"),
        (lambda: sm.ClasswiseECE(1), (), ValueError, "classes >= 2, got 1"),
        (lambda: sm.FPR95(recall=0), (), ValueError, "got 0"),
        (lambda: sm.IntervalCoverage(1.0), (), ValueError, "got 1.0"),
    ],
)
def test_bad_input_is_refused_in_words(
    build: Callable[[], Any], batch: Batch, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        value(build(), *batch)


# Import


@pytest.mark.slow
def test_the_core_imports_torch_and_safetensors_alone() -> None:
    """Nor do functions of metrics need more; a class says what to install."""
    code = """
import sys, torch, safetensors.torch
before = set(sys.modules)
import slimbayes
new = {m.split(".")[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new <= {"slimbayes", "torch", "safetensors"}, new
assert not torch.cuda.is_initialized()
import slimbayes.metrics, slimbayes.diagnostics
assert not {"torchmetrics", "lightning_utilities", "scipy", "sklearn", "matplotlib", "numpy.f2py"} & set(sys.modules)
slimbayes.bayesianize(torch.nn.Linear(3, 2), slimbayes.Rank1())
assert "torch._dynamo" not in sys.modules  # as long as nothing is compiled
sys.modules["torchmetrics"] = None  # as if it were not installed
from slimbayes.metrics import calibration, crps_samples
try:
    from slimbayes.metrics import NLL
except ImportError as error:
    assert 'slimbayes.metrics.NLL needs torchmetrics: pip install "slimbayes[metrics]"' in str(error), error
else:
    raise SystemExit("NLL was imported")
assert not hasattr(slimbayes.metrics, "F1")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
