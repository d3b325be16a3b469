"""A LightningModule around a converted model, for people who already train with Lightning's Trainer.

    model = sb.bayesianize(net, sb.Rank1(members=4))
    module = BayesModule(model, num_data=len(train_set))
    Trainer(max_epochs=10).fit(module, train_loader, validation_loader)

It belongs to `lightning` if that was imported before this file, else to `pytorch_lightning`: the two do not take each
other's modules. A Trainer does not resume bit for bit, since its checkpoints hold neither the state of the random
generators nor the place in a shuffled epoch; `slimbayes fit` does. With `seed=`, checkpoints at epoch ends and a loader
whose order depends on the epoch alone, only that last place is missing (docs/sweeps.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from slimbayes import metrics
from slimbayes.convert.bayesianize import conversions_of
from slimbayes.prediction.batches import IGNORED
from slimbayes.prediction.predict import find_output, predict
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import members, sample
from slimbayes.seeds import seed_everything
from slimbayes.train import schedules
from slimbayes.train.elbo import ELBO, elbo
from slimbayes.train.likelihoods import Form, LikelihoodName, likelihood_named
from slimbayes.train.optim import networks_of, param_groups

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule
else:
    other = "lightning" in sys.modules or not find_spec("pytorch_lightning")
    try:
        LightningModule = import_module(
            "lightning.pytorch" if other else "pytorch_lightning"
        ).LightningModule
    except ModuleNotFoundError as error:
        raise ImportError(
            'slimbayes.contrib.lightning needs Lightning: pip install "slimbayes[lightning]"'
        ) from error

_EACH = 8  # draws of each member in a prediction, by default

Optimizers = Callable[[list[dict[str, Any]]], Any]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What trains a module that names no optimizer: AdamW with a learning rate of 0.001."""
    return torch.optim.AdamW(groups, lr=1e-3)


class BayesModule(LightningModule):  # type: ignore[misc]
    """Trains a converted model by its ELBO and judges it with slimbayes' metrics. Batches are (inputs, targets).

    It logs loss, nll and kl (per datum, without its weight) in training; val_ and test_ nll, accuracy, brier and ece of
    classes, or rmse, lpd and crps of real targets; where classes have probabilities for labels, the nll alone.
    `predict_step` gives a `Prediction`.

    Args:
        model: a converted model.
        num_data: as in `elbo`: rows of the training set, of all processes together, not of a batch.
        likelihood: what the outputs parameterise.
        draws: number of draws in a training step; by default one of each member.
        predict_draws: number of draws in validation, test and prediction; by default eight of each member.
        optimizer: from parameter groups (`slimbayes.param_groups`) to anything `configure_optimizers` may return.
        weight_decay: of the network's own parameters.
        kl_schedule: the KL's weight after so many optimizer steps, from `slimbayes.train.schedules`.
        temperature: as in `elbo`; below 1 for a tempered posterior.
        form: how draws join in the likelihood.
        likelihood_std: standard deviation of the targets' noise, of "gaussian"; of the targets, of
            "heteroscedastic_gaussian".
        seed: makes the random numbers of each training step a function of it and of the step.

    Example:
        >>> import slimbayes as sb
        >>> module = BayesModule(sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)), num_data=100)
        >>> terms = module.terms(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
        >>> torch.equal(terms.loss, terms.nll + terms.kl)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        likelihood: LikelihoodName = "categorical",
        draws: int | None = None,
        predict_draws: int | None = None,
        optimizer: Optimizers = adamw,
        weight_decay: float | Mapping[str, float] = 0.0,
        kl_schedule: schedules.Schedule | None = None,
        form: Form = "average",
        likelihood_std: float = 1.0,
        seed: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        conversions_of(model)  # says what to do if it is not converted
        self.meaning = likelihood_named(likelihood)
        if not num_data > 0:
            raise ValueError(
                f"num_data must be the size of the training set, at least 1, got {num_data!r}."
            )
        self.model, self.num_data, self.likelihood = model, num_data, likelihood
        self.draws = draws
        self.predict_draws = (
            _EACH * members(model) if predict_draws is None else predict_draws
        )
        self.optimizer, self.weight_decay = optimizer, weight_decay
        self.kl_schedule = kl_schedule or schedules.constant()
        self.form, self.likelihood_std, self.seed, self.temperature = (
            form,
            likelihood_std,
            seed,
            temperature,
        )
        self.scores = nn.ModuleDict(
            {stage: nn.ModuleDict(self._metrics()) for stage in ("val", "test")}
        )

    def _metrics(self) -> dict[str, nn.Module]:
        if self.meaning.discrete:
            found = {"nll": metrics.NLL(), "accuracy": metrics.Accuracy()}
            return {
                **found,
                "brier": metrics.Brier(),
                "ece": metrics.ECE(),
                "soft": metrics.SoftLabelNLL(),
            }
        return {"rmse": metrics.RMSE(), "lpd": metrics.LPD(), "crps": metrics.CRPS()}

    def forward(self, x: Any) -> Any:
        """Outputs (S, B, ...) of the model under the draws of a training step."""
        if isinstance(x, Mapping):
            return sample(self.model, draws=self.draws, **x)
        return sample(
            self.model, *(x if isinstance(x, tuple | list) else (x,)), draws=self.draws
        )

    def terms(self, x: Any, y: Tensor, kl_weight: float = 1.0) -> ELBO:
        """Loss, nll and kl of a batch."""
        nll = self.meaning.nll(find_output(self(x)), y, self.form, self.likelihood_std)
        return elbo(
            nll, self.model, self.num_data, kl_weight, temperature=self.temperature
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.seed is not None:
            seed_everything(self.seed, "step", self.global_step, batch_idx)
        x, y = batch
        terms = self.terms(x, y, self.kl_schedule(self.global_step))
        for name in ("loss", "nll", "kl"):
            self.log(
                name,
                getattr(terms, name).detach(),
                prog_bar=name == "loss",
                batch_size=len(y),
            )
        # Members of a deep ensemble each train as they would alone: their losses are summed.
        return (
            terms.loss * len(networks_of(self.model))
            if self.form == "average"
            else terms.loss
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._judge("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._judge("test", batch)

    def _judge(self, stage: str, batch: Any) -> None:
        x, y = batch
        prediction, scores = self._predict(x), self.scores[stage]
        if self.likelihood == "bernoulli" and y.dim() > 1 and y.shape[-1] == 1:
            y = y.squeeze(-1)  # as predictions are
        elif self.likelihood == "categorical" and bool((y == IGNORED).any()):
            kept = y != IGNORED
            prediction, y = (
                Prediction.from_outputs(prediction.log_probs[kept].unsqueeze(0)),
                y[kept],
            )
            if not len(y):
                return
        assert isinstance(scores, nn.ModuleDict)
        soft = self.likelihood == "categorical" and y.is_floating_point()
        for name, metric in scores.items():
            if (name == "soft") != soft:
                continue
            assert isinstance(metric, Metric)
            metric.update(prediction, y)
            shown = "nll" if soft else name
            bar = shown in ("nll", "rmse")
            self.log(
                f"{stage}_{shown}",
                metric,
                on_step=False,
                on_epoch=True,
                prog_bar=bar,
                batch_size=len(y),
            )

    def predict_step(
        self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> Prediction:
        """The prediction of a batch; of (inputs, targets) the targets are left alone."""
        return self._predict(
            batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
        )

    def _predict(self, x: Any) -> Prediction:
        std = 0.0 if self.meaning.discrete else self.likelihood_std
        inputs = tuple(x) if isinstance(x, list) else x
        return predict(
            self.model,
            inputs,
            draws=self.predict_draws,
            likelihood=self.likelihood,
            likelihood_std=std,
        )

    def configure_optimizers(self) -> Any:
        return self.optimizer(param_groups(self.model, self.weight_decay))
