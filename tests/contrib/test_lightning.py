"""The LightningModule adapter under a real Trainer, on a CPU."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb

pytest.importorskip("pytorch_lightning")

import pytorch_lightning as pl

from slimbayes.contrib.lightning import BayesModule

pytestmark = [
    # The Trainer's hints about workers, intervals and devices.
    pytest.mark.filterwarnings(
        "ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|GPU available|tensorboard|isinstance\\(treespec|Checkpoint directory):"
    ),
]


def blobs(rows: int = 240) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    y = torch.arange(rows) % 3
    return torch.randn(rows, 4, generator=source) + 3 * nn.functional.one_hot(y, 4), y


def loader(rows: int = 240, batch: int = 40, real: bool = False) -> Any:
    x, y = blobs(rows)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) if real else y), batch)


def network(config: Any = None, out: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return sb.bayesianize(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, out)),
        config or sb.Rank1(members=2),
    )


def trainer(folder: Path, epochs: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def fast(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rows.append(
            {n: float(trainer.callback_metrics[n]) for n in ("loss", "nll", "kl")}
        )


@pytest.mark.slow
def test_it_learns_judges_and_predicts(tmp_path: Path) -> None:
    module, seen = (
        BayesModule(network(), num_data=240, optimizer=fast, predict_draws=8),
        Losses(),
    )
    runs = trainer(tmp_path, 15, callbacks=[seen])
    runs.fit(module, loader(), loader())
    losses = [row["loss"] for row in seen.rows]
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    scores = {name: float(value) for name, value in runs.callback_metrics.items()}
    assert scores["val_accuracy"] > 0.9
    (tested,) = runs.test(module, loader(), verbose=False)
    assert tested.keys() == {"test_nll", "test_accuracy", "test_brier", "test_ece"}
    predictions = runs.predict(module, loader())
    assert [type(p) for p in predictions] == [sb.Prediction] * 6 and predictions[
        0
    ].count == 8
    # Logged scores are those of all rows at once, not means over batches: each row counts once.
    torch.manual_seed(5)
    whole = sb.predict(module.model, blobs()[0], draws=512)
    assert tested["test_nll"] == pytest.approx(
        -whole.log_prob(blobs()[1]).mean().item(), abs=0.05
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_kl_is_scaled_once(tmp_path: Path, accumulate: int) -> None:
    """The gradient that the optimizer sees is that of mean nll + weight KL / N, however batches are cut."""
    module, before = (
        BayesModule(network(), num_data=1000, kl_schedule=lambda step: 0.25, seed=3),
        network(),
    )
    grads: list[dict[str, Tensor]] = []

    class Look(pl.Callback):
        def on_before_optimizer_step(
            self, trainer: pl.Trainer, module: Any, optimizer: Any
        ) -> None:
            grads.append(
                {n: p.grad.clone() for n, p in module.model.named_parameters()}
            )

    seen = Losses()
    trainer(
        tmp_path,
        1,
        callbacks=[Look(), seen],
        accumulate_grad_batches=accumulate,
        limit_train_batches=accumulate,
    ).fit(module, loader())
    expected = sb.kl(before) / 1000
    assert seen.rows[0]["kl"] == pytest.approx(expected.item(), rel=1e-6)
    assert seen.rows[0]["loss"] == pytest.approx(
        seen.rows[0]["nll"] + 0.25 * expected.item(), rel=1e-6
    )
    from slimbayes.seeds import seed_everything

    x, y = blobs()
    for index in range(accumulate):
        seed_everything(3, "step", 0, index)
        rows = slice(40 * index, 40 * index + 40)
        nll = sb.categorical(sb.sample(before, x[rows]), y[rows])
        (sb.elbo(nll, before, 1000, 0.25).loss / accumulate).backward()
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(grads[0][name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_the_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 1.0

    module = BayesModule(network(), num_data=240, kl_schedule=schedule)
    trainer(tmp_path, 2, accumulate_grad_batches=2).fit(module, loader())
    assert asked == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.slow
def test_real_targets(tmp_path: Path) -> None:
    module = BayesModule(
        network(sb.MeanField(), out=1),
        num_data=240,
        likelihood="gaussian",
        optimizer=fast,
        likelihood_std=0.5,
    )
    runs = trainer(tmp_path, 20)
    runs.fit(module, loader(real=True))
    (tested,) = runs.test(module, loader(real=True), verbose=False)
    assert (
        tested.keys() == {"test_rmse", "test_lpd", "test_crps"}
        and tested["test_rmse"] < 1.5
    )


def test_outputs_may_be_among_others_as_in_predict() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": x, "logits": self.head(x)}

    model, (x, y) = sb.bayesianize(Named(), sb.BatchEnsemble(members=2)), blobs(12)
    expected = sb.categorical(sb.sample(model, x)["logits"], y)
    torch.testing.assert_close(
        BayesModule(model, num_data=12).terms(x, y).nll, expected
    )


def test_probabilities_for_labels_are_judged_by_their_cross_entropy(
    tmp_path: Path,
) -> None:
    x, y = blobs()
    soft = 0.8 * nn.functional.one_hot(y, 3) + 0.2 / 3
    model = network(sb.BatchEnsemble(members=2))
    runs, module = trainer(tmp_path, 1), BayesModule(model, 240, predict_draws=2)
    rows = DataLoader(TensorDataset(x, soft), batch_size=60)
    runs.fit(module, rows, rows)
    (tested,) = runs.test(module, rows, verbose=False)
    slow = -(soft * sb.predict(model, x).log_probs).sum(1).mean()
    assert tested == {"test_nll": pytest.approx(float(slow), rel=1e-4)}


@pytest.mark.parametrize("case", ["yes or no", "some without a label"])
def test_targets_that_train_are_judged(case: str, tmp_path: Path) -> None:
    x, y = blobs()
    binary = case != "some without a label"
    y = (
        (y == 0).float()
        if binary
        else torch.where(torch.arange(len(y)) % 3 == 0, -100, y)
    )
    rows = DataLoader(TensorDataset(x, y[:, None] if binary else y), batch_size=60)
    model = network(sb.BatchEnsemble(members=2), out=1 if binary else 3)
    module = BayesModule(
        model, 240, "bernoulli" if binary else "categorical", predict_draws=2
    )
    runs = trainer(tmp_path, 1)
    runs.fit(module, rows)
    (tested,) = runs.test(module, rows, verbose=False)
    chance = (
        sb.predict(model, x, likelihood=module.likelihood).member_probs.mean(0).double()
    )
    chance = torch.stack([1 - chance, chance], 1) if binary else chance
    kept = y != -100
    slow = -chance[kept].gather(1, y[kept].long()[:, None]).log().mean()
    assert tested["test_nll"] == pytest.approx(float(slow), rel=1e-4)


def test_groups_and_schedulers_are_passed_on() -> None:
    def both(groups: list[dict[str, Any]]) -> dict[str, Any]:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }

    made = BayesModule(
        network(), num_data=9, optimizer=both, weight_decay=0.3
    ).configure_optimizers()
    assert [group["weight_decay"] for group in made["optimizer"].param_groups] == [
        0.3,
        0.0,
    ]
    usual = BayesModule(network(), num_data=9).configure_optimizers()
    assert isinstance(usual, torch.optim.AdamW) and {
        group["lr"] for group in usual.param_groups
    } == {1e-3}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="did you mean 'categorical'"):
        BayesModule(network(), num_data=9, likelihood="categorial")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size of the training set"):
        BayesModule(network(), num_data=0)
    with pytest.raises(ValueError, match="bayesianize"):
        BayesModule(nn.Linear(2, 2), num_data=9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, None])
def test_resuming_at_an_epoch_s_end_is_exact_with_a_seed_and_a_fixed_order(
    tmp_path: Path, seed: int | None
) -> None:
    def train(epochs: int, name: str, start: Path | None = None) -> dict[str, Tensor]:
        module = BayesModule(network(), num_data=240, optimizer=fast, seed=seed)
        keep = pl.callbacks.ModelCheckpoint(
            tmp_path / name, save_last=True, save_top_k=0
        )
        trainer(tmp_path, epochs, callbacks=[keep], enable_checkpointing=True).fit(
            module, loader(), ckpt_path=start
        )
        return module.model.state_dict()

    whole = train(4, "whole")
    train(2, "part")
    resumed = train(4, "part", tmp_path / "part" / "last.ckpt")
    same = all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert same == (seed is not None)  # the Trainer does not save the generator's state


def test_with_the_lightning_package_too() -> None:
    pytest.importorskip(
        "lightning",
        reason="the `lightning` package is not installed; pytorch_lightning is tested above",
    )
    code = (
        "import lightning as L; from slimbayes.contrib.lightning import BayesModule; "
        "assert issubclass(BayesModule, L.LightningModule)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WORKER = """
import sys, torch, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import pytorch_lightning as pl
from test_lightning import network, loader, fast
from slimbayes.contrib.lightning import BayesModule
devices = int(sys.argv[3])
pl.seed_everything(1, verbose=False)
module = BayesModule(network(), num_data=240, optimizer=lambda g: torch.optim.SGD(g, lr=0.1))
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
    logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    limit_train_batches=2)
trainer.fit(module, loader(batch=40 // devices))
if trainer.global_rank == 0:
    torch.save({"kl": trainer.callback_metrics["kl"], "weights": module.model.state_dict()}, sys.argv[2])
"""


@pytest.mark.skipif(
    not os.environ.get("SLIMBAYES_SLOW"), reason="takes a minute; set SLIMBAYES_SLOW=1"
)
def test_two_processes_take_the_step_of_one(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    found = []
    for devices in (1, 2):
        file = tmp_path / f"{devices}.pt"
        subprocess.run(
            [
                sys.executable,
                str(script),
                str(Path(__file__).parent),
                str(file),
                str(devices),
            ],
            check=True,
            timeout=120,
        )
        found.append(torch.load(file, weights_only=True))
    # A KL counted twice would pull twice as hard; rows are dealt out differently, so weights agree only roughly.
    assert found[0]["kl"] == pytest.approx(found[1]["kl"].item(), rel=1e-2)
    for name, one in found[0]["weights"].items():
        torch.testing.assert_close(one, found[1]["weights"][name], rtol=0.1, atol=0.05)


def test_members_of_an_ensemble_train_as_they_would_alone(tmp_path: Path) -> None:
    """Six steps of SGD with the sum of the members' losses: each ends where its network does by itself."""
    model = network(sb.Ensemble(members=3))
    alone = [
        sb.debayesianize(copy.deepcopy(model)),
        *(copy.deepcopy(m) for m in model.posterior["members"].others),
    ]
    module = BayesModule(
        model, num_data=240, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    trainer(tmp_path, 1).fit(module, loader())
    after = [sb.debayesianize(copy.deepcopy(model)), *model.posterior["members"].others]
    for plain, member in zip(alone, after, strict=True):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                member.get_parameter(name), parameter, rtol=0, atol=1e-6
            )
