"""What demanding users met around the core: numbers against slow ones, and plain answers where there was a crash."""

import pytest
import torch

import slimbayes as sb


def test_no_rows_and_half_precision_are_predictions_too() -> None:
    pred = sb.Prediction.from_outputs(torch.randn(4, 5, 3))
    assert len(pred[[]]) == 0 and pred[[]].probs.shape == (0, 3)
    table = pytest.importorskip("pandas") and pred.to(torch.bfloat16).to_pandas()
    assert table["confidence"].tolist() == pytest.approx(pred.confidence.tolist(), abs=0.02)
