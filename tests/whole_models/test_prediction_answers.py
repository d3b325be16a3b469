"""What demanding users met around the core: numbers against slow ones, and plain answers where there was a crash."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.sklearn import BayesRegressor


def test_no_rows_and_half_precision_are_predictions_too() -> None:
    pred = sb.Prediction.from_outputs(torch.randn(4, 5, 3))
    assert len(pred[[]]) == 0 and pred[[]].probs.shape == (0, 3)
    table = pytest.importorskip("pandas") and pred.to(torch.bfloat16).to_pandas()
    assert table["confidence"].tolist() == pytest.approx(
        pred.confidence.tolist(), abs=0.02
    )


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()


def test_one_pass_takes_binary_targets_as_the_loss_does() -> None:
    x, y = torch.randn(20, 4), torch.randint(2, (20, 1)).float()
    fits = [
        sb.laplace(net(), [(x, target)], likelihood="bernoulli")
        for target in (y, y[:, 0])
    ]
    nll = nn.functional.binary_cross_entropy_with_logits(net()(x), y, reduction="sum")
    assert fits[0].log_likelihood == pytest.approx(-float(nll.detach()), rel=1e-5)
    assert fits[0].log_evidence == fits[1].log_evidence


def test_what_is_given_in_place_of_numbers_is_named() -> None:
    model, rows = sb.bayesianize(net(), sb.Rank1(members=2)), torch.randn(6, 4)
    with pytest.raises(
        ValueError, match="num_data must be the size of the training set"
    ):
        sb.elbo(torch.tensor(1.0), model, [rows])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draw_log_prob"):
        sb.stacking_weights(sb.predict(model, rows, likelihood="bernoulli"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="distance takes batches"):
        sb.distance(model, rows)
    with pytest.raises(ValueError, match="noise must be"):
        BayesRegressor(noise=None).fit(rows.numpy(), rows[:, 0].numpy())
