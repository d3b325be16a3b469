"""Calibration and corruption errors (F20, F39)."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import slimbayes as sb
from slimbayes.metrics import ALEXNET, calibration, corruption_errors

# Calibration -----------------------------------------------------------------------------------------------------------


def two_classes(confidence: list[float], right: list[int]) -> tuple[Tensor, Tensor]:
    """Predictions of class one with the given probability, which may be below one half; right: whether class one is true."""
    p = torch.tensor(confidence)
    return torch.stack([1 - p, p], -1), torch.tensor(right)


def loop_calibration(probs: Tensor, target: Tensor, bins: int, drop: int) -> tuple[float, float, list[int]]:
    """Appendix D.2, one bin and one row at a time."""
    inside: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for row, y in zip(probs.tolist(), target.tolist(), strict=True):
        p = max(row)
        for r in range(bins):
            if (r / bins < p or r == 0) and (p <= (r + 1) / bins or r == bins - 1):
                inside[r].append((p, row.index(p) == y))
    gaps = [abs(sum(ok for _, ok in b) - sum(p for p, _ in b)) / len(b) if b else 0.0 for b in inside]
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
    probs = (spread * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).softmax(-1)
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
    assert calibration(probs.square() / probs.square().sum(-1, keepdim=True), target).ece > 0.05  # overconfident


@pytest.mark.parametrize(("confidence", "right"), [(0.9, 10), (0.9, 5), (0.6, 9), (0.55, 0), (1.0, 10), (1.0, 3)])
def test_constant_confidence(confidence: float, right: int) -> None:
    """F20: confidence c and accuracy a give |a - c| for both errors, also with p = 1 exactly."""
    probs, target = two_classes([confidence] * 10, [1] * right + [0] * (10 - right))
    result = calibration(probs, target)
    assert (result.ece, result.mce) == pytest.approx((abs(right / 10 - confidence),) * 2, abs=1e-6)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bins", [10, 15, 20, 100])
def test_a_probability_on_an_edge_belongs_to_the_bin_below(dtype: torch.dtype, bins: int) -> None:
    """0.15 is on the edge of 20 bins, whichever way its precision rounds it: (0.10, 0.15]. The next number up is beyond it."""
    for r in range(bins // 2 + 1, bins):
        edge = torch.tensor([r / bins], dtype=dtype)
        above = torch.nextafter(edge, torch.ones_like(edge))
        for p, expected in ((edge, r - 1), (above, r)):
            assert calibration(p, torch.tensor([1]), bins, drop=0).count.argmax() == expected


@pytest.mark.parametrize(("classes", "top", "expected"), [(8, 0.15, 2), (3, 0.35, 6), (10, 0.1, 1), (2, 0.55, 10)])
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
    assert (int(result.count[14]), bool(result.kept[14]), bool(result.kept[19])) == (5, False, True)
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
    one, two = calibration(p, target.to(kind)), calibration(torch.stack([1 - p, p], -1), target)
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
    assert calibration(pred, labels).ece == calibration(pred.probs.flatten(0, 2), labels.flatten()).ece
    for shape in ((100,), (100, 2)):
        pred, yes = sb.Prediction.from_outputs(torch.randn(3, *shape), "bernoulli"), torch.randint(2, shape).float()
        flat = calibration(pred.probs.flatten(), yes.flatten()).ece
        assert calibration(pred, yes).ece == pytest.approx(flat, rel=1e-6)
    with pytest.raises(AttributeError, match="likelihood 'gaussian'"):
        calibration(sb.Prediction.from_outputs(torch.randn(3, 9), "gaussian"), torch.zeros(9))


def test_the_rank1_papers_rule_agrees_away_from_edges() -> None:
    """bins=15 and drop=0 is the calibration error of the rank-1 paper: floor(15 p) differs on edges alone."""
    probs, target = torch.randn(800, 10).mul(2).softmax(1), torch.randint(10, (800,))
    confidence, label = probs.double().max(1)
    index = (15 * confidence).long().clamp(max=14)
    expected = sum(
        abs(float((label == target)[index == r].double().sum() - confidence[index == r].sum())) / 800 for r in range(15)
    )
    assert calibration(probs, target, bins=15, drop=0).ece == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("probs", "target", "changes", "match"),
    [
        (torch.full((4, 2), 0.5), torch.zeros(3, dtype=torch.long), {}, r"got shapes \(4, 2\) and \(3,\)"),
        (torch.full((4, 2), 0.5), torch.zeros(4, 2, dtype=torch.long), {}, r"got shapes \(4, 2\) and \(4, 2\)"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), {}, r"N >= 1, got shapes \(0, 2\)"),
        (torch.tensor(0.5), torch.tensor(1), {}, r"got shapes \(\) and \(\)"),
        (torch.tensor([[math.nan, 0.5]]), torch.tensor([0]), {}, r"lie in \[0, 1\], got nan"),
        (torch.tensor([[-0.5, 1.5]]), torch.tensor([0]), {}, r"lie in \[0, 1\], got -0.5; logits need a softmax"),
        (torch.tensor([1.5]), torch.tensor([0]), {}, r"lie in \[0, 1\], got 1.5"),
        (torch.tensor([[0.5, 0.4]]), torch.tensor([0]), {}, "sum to 1, got 0.9000"),
        (torch.tensor([[1, 0]]), torch.tensor([0]), {}, "got dtype torch.int64"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), {}, "class indices from 0 to 1, got 2"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), {}, "class indices from 0 to 1, got -1"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), {}, "class indices from 0 to 1, got dtype"),
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


# Corruptions -----------------------------------------------------------------------------------------------------------

PLAIN = {"clean": 0.2, "fog": [0.3, 0.5, 0.6], "snow": [0.25, 0.4, 0.7]}


def test_a_reference_against_itself_is_a_hundred() -> None:
    """F39, for both forms and every corruption."""
    result = corruption_errors(PLAIN, PLAIN)
    assert (result.mce, result.rmce) == pytest.approx((100, 100), abs=1e-12)
    assert set(result.by_corruption) == set(result.relative_by_corruption) == {"fog", "snow"}
    assert [*result.by_corruption.values(), *result.relative_by_corruption.values()] == pytest.approx(
        [100] * 4, abs=1e-12
    )


def test_corruption_errors_by_hand() -> None:
    """Errata D.4: the reference's clean error in the denominator, and each clean error once per severity."""
    ours = {"clean": 0.1, "fog": [0.2, 0.4, 0.5], "snow": [0.2, 0.4, 0.75]}
    result = corruption_errors(ours, PLAIN)
    assert result.by_corruption == pytest.approx({"fog": 100 * 1.1 / 1.4, "snow": 100 * 1.35 / 1.35})
    assert result.relative_by_corruption == pytest.approx(
        {"fog": 100 * (1.1 - 0.3) / (1.4 - 0.6), "snow": 100 * (1.35 - 0.3) / (1.35 - 0.6)}
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
    """Its published errors are means over severities, fifteen of them; without a clean one there is no relative error."""
    assert len(ALEXNET) == 15
    assert {len(rates) for rates in ALEXNET.values()} == {5}
    rng = random.Random(0)
    ours = {"clean": 0.3, **{name: [rng.random() for _ in range(5)] for name in ALEXNET}}
    result = corruption_errors(ours, ALEXNET)
    by_mean = {name: 100 * (sum(ours[name]) / 5) / ALEXNET[name][0] for name in ALEXNET}  # how the rank-1 code puts it
    assert result.by_corruption == pytest.approx(by_mean)
    assert result.mce == pytest.approx(sum(by_mean.values()) / 15)
    assert math.isnan(result.rmce)
    assert result.relative_by_corruption == {}


@pytest.mark.parametrize(
    ("ours", "reference", "kind", "match"),
    [
        ({"clean": 0.2, "fog": [0.3]}, PLAIN, ValueError, r"only in errors: \[\], only in reference: \['snow'\]"),
        ({**PLAIN, "frost": [0.3]}, PLAIN, ValueError, r"only in errors: \['frost'\]"),
        ({"clean": 0.2}, {"clean": 0.2}, ValueError, "at least one"),
        ({**PLAIN, "fog": [0.3, 0.4]}, PLAIN, ValueError, "fog: errors has 2 severities, reference 3"),
        ({**PLAIN, "fog": []}, PLAIN, ValueError, "errors, fog: .*at least one severity"),
        (
            {**PLAIN, "fog": 0.3},
            PLAIN,
            TypeError,
            "errors, fog: a sequence of error rates is needed, one per severity, got 0.3",
        ),
        ({**PLAIN, "fog": [30, 50, 60]}, PLAIN, ValueError, "errors, fog: .*fraction between 0 and 1, got 30"),
        ({**PLAIN, "clean": math.nan}, PLAIN, ValueError, "errors, clean: .*got nan"),
        (PLAIN, {**PLAIN, "snow": [-0.1, 0.2, 0.3]}, ValueError, "reference, snow: .*got -0.1"),
        ({"fog": [0.1] * 3, "snow": [0.1] * 3}, PLAIN, ValueError, '"clean" error rate, so errors needs one'),
        (PLAIN, {**PLAIN, "snow": [0.0, 0.0, 0.0]}, ValueError, "snow: .*are zero"),
        (
            PLAIN,
            {**PLAIN, "snow": [0.2, 0.2, 0.2]},
            ValueError,
            'snow: .*no more than its clean rate 0.2.*leave "clean" out',
        ),
        (PLAIN, {**PLAIN, "snow": [0.1, 0.1, 0.1]}, ValueError, "snow: .*no more than its clean rate 0.2"),
    ],
)
def test_errors_that_cannot_be_compared_name_the_corruption(
    ours: Any, reference: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        corruption_errors(ours, reference)
