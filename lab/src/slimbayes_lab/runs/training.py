"""One run under way: epochs, steps, and what happens between them.

for epoch:   order = permutation(seed, epoch)
    for step:    noise, crops and dropout from seed (seed, step);  draws, ELBO, backward, optimizer     (step.py)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.files import CheckpointError, write_csv
from slimbayes.seeds import generator, seed_everything
from slimbayes.train.elbo import silent_of_dwarfed, warn_of_dwarfed
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.execution import Execution, leave_together, noting_signals
from slimbayes_lab.runs.checkpoints import (
    latest_checkpoint,
    restore,
    save_checkpoint,
    sharded_like,
    state_of,
)
from slimbayes_lab.runs.folder import RunError, append_steps, forget_steps, tensorboard
from slimbayes_lab.runs.predictor import Predictor, build_network, likelihood_of
from slimbayes_lab.runs.step import Batch, Tracker, TrainingStep
from slimbayes_lab.runs.trained import save_network
from slimbayes_lab.runs.watchers import Watcher
from slimbayes_lab.tasks.task import open_task, pictures

MINUTE = 60.0
_ADVICE = "lower the learning rate or clip gradients."


class Stopped(RuntimeError):
    """The run was asked to stop and left a checkpoint."""


class Diverged(RuntimeError):
    """A loss was not finite; the message names step and layer, and the last good checkpoint is still there."""


class Training:
    """A network, its data and its place in training."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        execution: Execution,
        fabric: Any,
        watcher: Watcher,
        network: nn.Module | None,
        dataset: Dataset | None,
    ) -> None:
        self.experiment, self.folder, self.execution = experiment, folder, execution
        self.fabric, self.watcher = fabric, watcher
        self.task = open_task(experiment.data, execution.data_dir, dataset).to(
            fabric.device
        )
        self.identity = {
            "hash": experiment.hash,
            "data": self.task.sha256,
        }  # what its own checkpoints say
        self.batch = min(experiment.train.batch, len(self.task.train))
        if self.batch % fabric.world_size:
            raise RunError(
                f"A batch of {self.batch} rows cannot be shared out among {fabric.world_size} processes evenly."
            )
        self.steps_per_epoch = len(self.task.train) // self.batch
        self.network = build_network(experiment, self.task, network).to(fabric.device)
        if fabric.device.type == "cuda" and self.task.images:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        likelihood = likelihood_of(experiment, self.task, self.network)
        if isinstance(self.task.train, Split):
            sb.check_targets(
                self.task.train.y, likelihood, len(self.task.classes) or None
            )
        self.predictor = Predictor(experiment, self.network, self.task, likelihood)
        self.step = self.saved_step = 0
        self.curve: list[dict[str, float]] = []
        self.best: dict[str, Any] = {}
        self.seconds: list[float] = []  # of each epoch
        self.signals: list[int] = []  # that asked to stop
        self.captures = execution.captures(fabric.device, fabric.world_size)
        self.stepper = self._stepper()
        self.tracker = Tracker(experiment, self.network, self.steps_per_epoch)
        self.saved_at, self.written_at = time.monotonic(), 0.0

    def _stepper(self) -> TrainingStep:
        train, module = (
            self.experiment.train,
            self.execution.compiled(self.network, self.fabric.device),
        )
        if (
            self.execution.strategy == "fsdp"
        ):  # shards first: the optimizer is for what is left of each parameter
            call = self.fabric.setup_module(module)
            optimizer = self.fabric.setup_optimizers(
                train.build_optimizer(self.network)
            )
        else:
            call, optimizer = self.fabric.setup(
                module, train.build_optimizer(self.network, self.captures)
            )
        return TrainingStep(
            self.predictor, call, optimizer.optimizer, self.fabric, self.steps_per_epoch
        )

    # --- the loop ---

    def run(self, resume: bool) -> None:
        """Train to the end, from the latest checkpoint if asked to."""
        if resume:
            self._resume()
        if self.step == 0 and self.fabric.global_rank == 0:
            (self.folder / "steps.csv").unlink(missing_ok=True)
        total = self.experiment.train.epochs * self.steps_per_epoch
        self.watcher.begin("training", total, self.step)
        if self.captures and self.step < total:
            self.network.train()
            if reason := self.stepper.capture(self._batch_of(self.step)):
                told = "The step cannot be recorded as a CUDA graph, so it runs operation by operation"
                self.watcher.say(f"{told} ({reason}).")
        # A start far from the prior comes nearer by itself: the last epoch tells, not the first step.
        with noting_signals(self.signals), silent_of_dwarfed(self.network):
            while self.step < total and not self._stops_early():
                self._epoch()
        if self.curve:
            warn_of_dwarfed(
                self.network, self.curve[-1]["kl_weight"] * self.curve[-1]["kl"]
            )
        if self.step != self.saved_step:
            self._save()  # should the evaluation be cut short, nothing is trained again
        self._finish()

    def _epoch(self) -> None:
        start, epoch, train = (
            time.perf_counter(),
            self.step // self.steps_per_epoch,
            self.experiment.train,
        )
        self.network.train()
        for batch in self._batches(epoch, self.step % self.steps_per_epoch):
            kl_weight, rate = (
                at(self.step, self.steps_per_epoch)
                for at in (train.kl_weight, train.rate)
            )
            try:
                self.stepper(batch, self.step, kl_weight, rate)
            except FloatingPointError:
                raise self._diverged(self.step) from None
            self.tracker.after(self.step)
            self.step += 1
            self.watcher.move(self.step)
            if self.step % self.steps_per_epoch:
                self._between_steps()
        losses = self.stepper.history.double().cpu()
        bad = (~losses.isfinite().all(1)).nonzero()
        if len(bad):
            raise self._diverged(epoch * self.steps_per_epoch + int(bad[0]))
        self._check_weights()
        self.seconds.append(time.perf_counter() - start)
        self._note(epoch, losses)
        self._between_steps(epoch_ends=True)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """The rest of an epoch's batches: row numbers where the set is on the device, else decoded images."""
        rows, device = self.task.train, self.fabric.device
        order = torch.randperm(
            len(rows), generator=generator(self.experiment.seed, "order", epoch)
        )
        order = order[: self.steps_per_epoch * self.batch]
        if isinstance(rows, Split):
            yield from (
                (numbers,) for numbers in order.to(device).split(self.batch)[first:]
            )
            return
        loader: Any = torch.utils.data.DataLoader(
            pictures(rows, self.experiment, epoch),
            batch_sampler=[
                numbers.tolist() for numbers in order.split(self.batch)[first:]
            ],
            num_workers=self.execution.workers,
            pin_memory=device.type == "cuda",
        )
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def _batch_of(self, step: int) -> Batch:
        return next(
            self._batches(step // self.steps_per_epoch, step % self.steps_per_epoch)
        )

    def _note(self, epoch: int, losses: Tensor) -> None:
        """Add an epoch to the curve, with scores on validation rows where there are any."""
        train, last = self.experiment.train, self.step - 1
        row: dict[str, float] = {"epoch": epoch + 1, "step": self.step}
        row |= dict(zip(("loss", "nll", "kl"), losses.mean(0).tolist(), strict=True))
        row["kl_weight"] = train.kl_weight(last, self.steps_per_epoch)
        row["lr"] = train.optimizer.lr * train.rate(last, self.steps_per_epoch)
        row |= self.tracker.columns()
        scores = self.predictor.scores_after(epoch + 1, self.execution.workers)
        row |= self.fabric.broadcast(
            scores
        )  # each process drew its own noise, and all must agree when to stop
        if train.early_stop and row["validation_nll"] < self.best.get(
            "nll", float("inf")
        ):
            weights = {
                n: t.detach().clone() for n, t in self.network.state_dict().items()
            }
            self.best = {
                "nll": row["validation_nll"],
                "epoch": epoch + 1,
                "weights": weights,
            }
        self.curve.append(row)
        self.watcher.move(
            self.step,
            f"nll {row['nll']:.4f}, kl {row['kl']:.4f} x {row['kl_weight']:.3g} per datum",
        )
        if self.fabric.global_rank == 0:
            if (
                time.monotonic() - self.written_at > 0.5
            ):  # rewritten whole: not for each of thousands of short epochs
                write_csv(self.folder / "metrics.csv", self.curve)
                self.written_at = time.monotonic()
            append_steps(
                self.folder / "steps.csv", epoch * self.steps_per_epoch, losses
            )
            if self.execution.tensorboard:
                tensorboard(self.folder, row)

    def _stops_early(self) -> bool:
        stop = self.experiment.train.early_stop
        return bool(
            stop
            and self.best
            and self.curve
            and self.curve[-1]["epoch"] - self.best["epoch"] >= stop.patience
        )

    def _finish(self) -> None:
        """Leave the network with the weights that count and save it."""
        if self.best:
            self.network.load_state_dict(self.best["weights"])
        if self.fabric.global_rank == 0:
            write_csv(self.folder / "metrics.csv", self.curve)
        elif self.execution.strategy != "fsdp":
            return  # of a network that every process has whole, one writes; of a sharded one all take part
        try:
            save_network(self.folder, self.network)
        except OSError as error:
            raise RunError(
                f"What was learned could not be saved in {self.folder}: {error}. Make room and run again with --resume."
            ) from error

    # --- what happens between steps ---

    def _between_steps(self, epoch_ends: bool = False) -> None:
        every = self.execution.checkpoint_every
        if every:
            due = self.step % every == 0
        else:
            due = epoch_ends and time.monotonic() - self.saved_at > MINUTE
            if epoch_ends and self.fabric.world_size > 1:
                due = self.fabric.broadcast(
                    due
                )  # clocks differ, and all processes save a sharded model together
        stop = self._stop_asked()
        if due or stop:
            self._save()
        if stop:
            leave_together(self.fabric)  # nobody goes before the checkpoint is written
            raise Stopped(
                f"Stopped after step {self.step}; the checkpoint is in {self.folder}. Continue with --resume."
            )

    def _stop_asked(self) -> bool:
        if self.fabric.world_size == 1:
            return bool(self.signals)
        if self.step % 20:  # processes agree now and then: asking costs a round trip
            return False
        asked = torch.tensor(float(bool(self.signals)), device=self.fabric.device)
        return bool(self.fabric.all_reduce(asked, reduce_op="sum") > 0)

    def _save(self) -> None:
        if self.fabric.device.type == "cuda" and bool(self.stepper.failed):
            raise self._diverged(self.step - 1)
        self._check_weights()
        extra = {"history": self.stepper.history} | self.tracker.state()
        facts: dict[str, Any] = {
            "curve": self.curve,
            "seconds": self.seconds,
            **self.identity,
        }
        if self.best:
            extra |= {f"best/{n}": t for n, t in self.best["weights"].items()}
            facts["best"] = {"nll": self.best["nll"], "epoch": self.best["epoch"]}
        tensors = state_of(self.network, self.stepper.optimizer, extra)
        try:
            if self.fabric.global_rank == 0:
                save_checkpoint(self.folder / "checkpoints", self.step, tensors, facts)
        except OSError as error:
            raise RunError(
                f"The checkpoint after step {self.step} could not be written: {error}. The one before it is intact; "
                f"make room and --resume."
            ) from error
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def _resume(self) -> None:
        place = self.folder / "checkpoints"
        found = latest_checkpoint(place, self.identity, self.network)
        if found is None:
            if any(place.glob("step-*[0-9]")):
                raise CheckpointError(
                    f"None of the checkpoints in {place} can be used: they are of another config, of other data, or "
                    f"damaged. Remove them to start from the beginning, or choose another directory with --out."
                )
            return
        tensors, facts = found
        extra = restore(tensors, self.network, self.stepper.optimizer)
        self.step = self.saved_step = facts["step"]
        self.curve, self.seconds = facts["curve"], facts["seconds"]
        self.stepper.history.copy_(extra["history"])
        self.tracker.restore(extra)
        if "best" in facts:
            here = self.network.state_dict().items()
            weights = {
                n: sharded_like(extra[f"best/{n}"].to(self.fabric.device), t)
                for n, t in here
            }
            self.best = facts["best"] | {"weights": weights}
        if self.fabric.global_rank == 0:
            forget_steps(
                self.folder / "steps.csv",
                self.step // self.steps_per_epoch * self.steps_per_epoch,
            )
        self.watcher.say(f"Resuming after step {self.step}.")

    # --- numbers that are not finite ---

    def _check_weights(self) -> None:
        """Stop if the last update made weights NaN or infinite: its loss, computed before, need not have been."""
        if name := self.stepper.broken_parameter():
            raise Diverged(
                f"The update of step {self.step - 1} made the parameter {name} NaN or infinite. The last good "
                f"checkpoint is kept in {self.folder}; {_ADVICE}"
            )

    def _diverged(self, step: int) -> Diverged:
        batch = self._batch_of(step)
        seed_everything(self.experiment.seed, "step", step)
        return Diverged(
            f"The loss of step {step} is not finite. {self.stepper.explain(batch)} The last good checkpoint is kept in "
            f"{self.folder}; {_ADVICE}"
        )
