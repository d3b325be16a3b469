"""One run under way: epochs, steps, and what happens between them.

for epoch:   order = permutation(seed, epoch)
    for step:    noise, crops and dropout from seed (seed, step);  draws, likelihood, KL, backward, optimizer     (step.py)
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import slimbayes as sb
from slimbayes.data import Dataset, Split
from slimbayes.files import CheckpointError, write_csv
from slimbayes.lab.checkpoints import latest_state, restore, save_state, sharded_like
from slimbayes.lab.config import Experiment
from slimbayes.lab.crops import crops
from slimbayes.lab.execution import Execution, Watcher
from slimbayes.lab.faults import explain
from slimbayes.lab.judge import judge_validation
from slimbayes.lab.logs import append_steps, forget_steps, tensorboard
from slimbayes.lab.network import build_network, likelihood_of
from slimbayes.lab.optimizers import build_optimizer, kl_weight, rate
from slimbayes.lab.run_folder import RunError
from slimbayes.lab.seeds import generator, seed_everything
from slimbayes.lab.step import NonFinite, Step
from slimbayes.lab.task import open_task

MINUTE = 60.0


class Stopped(RuntimeError):
    """The run was asked to stop and left a checkpoint."""


class Diverged(RuntimeError):
    """A loss was not finite; the message names step and layer, and the last good checkpoint is still there."""


def leave_together(fabric: Any) -> None:
    """End the group of processes: the first goes on alone, and draws as one process does."""
    fabric.barrier()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Gloo's threads drop their last tensors under Python's lock. Were the group destroyed at that moment, by whoever lets go of it last, both would
        # wait for ever; so they are given time, and the group is kept until the process ends.
        _LEFT.append(torch.distributed.group.WORLD)
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


_LEFT: list[Any] = []


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
        self.task = open_task(experiment.data, execution.data_dir, dataset).to(fabric.device)
        train, rows = experiment.train, len(self.task.train)
        self.batch = min(train.batch, rows)
        if self.batch % (fabric.world_size * train.accumulate):
            raise RunError(
                f"A batch of {self.batch} rows cannot be shared out among {fabric.world_size} processes and {train.accumulate} pieces evenly."
            )
        self.steps_per_epoch = rows // self.batch
        self.network = build_network(experiment, self.task, network).to(fabric.device)
        if fabric.device.type == "cuda" and self.task.images:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.likelihood = likelihood_of(self.task, self.network)
        self.rate, self.kl_weight = rate(train, self.steps_per_epoch), kl_weight(train, self.steps_per_epoch)
        self.step, self.saved_step, self.curve = 0, 0, []  # type: tuple[int, int, list[dict[str, float]]]
        self.best: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.asked_to_stop = False
        self.stepper = self._stepper()
        self.saved_at, self.written_at = time.monotonic(), 0.0

    def _stepper(self) -> Step:
        captures = self.execution.captures(self.fabric.device, self.fabric.world_size)
        compiled = self.execution.compiles(self.fabric.device)
        sharded = self.execution.strategy == "fsdp"
        module: Any = torch.compile(self.network, dynamic=False) if compiled else self.network
        if compiled:
            _compiler_settings()
        if sharded:
            call = self.fabric.setup_module(module)
            optimizer = self.fabric.setup_optimizers(build_optimizer(self.experiment.train, self.network))
        else:
            optimizer = build_optimizer(self.experiment.train, self.network, captures)
            call, optimizer = self.fabric.setup(module, optimizer)
        return Step(
            self.experiment,
            self.task,
            self.likelihood,
            call,
            self.network,
            optimizer.optimizer,
            self.fabric,
            self.steps_per_epoch,
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
        self._capture()
        with on_signals(self.ask_to_stop):
            while self.step < total and not self._stops_early():
                self._epoch()
        if self.step != self.saved_step:
            self._save()  # should the evaluation be cut short, nothing is trained again
        self._finish()

    def _epoch(self) -> None:
        start, epoch = time.perf_counter(), self.step // self.steps_per_epoch
        self.network.train()
        for batch in self._batches(epoch, self.step % self.steps_per_epoch):
            try:
                self.stepper(batch, self.step, self.kl_weight(self.step), self.rate(self.step))
            except NonFinite:
                raise self._diverged(batch, self.step) from None
            self.step += 1
            self.watcher.move(self.step)
            if self.step % self.steps_per_epoch:
                self._between_steps()
        losses = self.stepper.history.double().cpu()
        bad = (~losses.isfinite().all(1)).nonzero()
        if len(bad):
            raise self._diverged((), epoch * self.steps_per_epoch + int(bad[0]))
        self._check_weights()
        self.seconds.append(time.perf_counter() - start)
        self._note(epoch, losses)
        self._between_steps(epoch_ends=True)

    def _batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, ...]]:
        """The rest of an epoch's batches: row numbers where the set is on the device, else decoded images."""
        rows = self.task.train
        order = torch.randperm(len(rows), generator=generator(self.experiment.seed, "order", epoch))
        pieces = order[: self.steps_per_epoch * self.batch].split(self.batch)[first:]
        if isinstance(rows, Split):
            for piece in order.to(self.fabric.device)[: self.steps_per_epoch * self.batch].split(self.batch)[first:]:
                yield (piece,)
            return
        cuda = self.fabric.device.type == "cuda"
        pictures, batches = crops(rows, self.experiment, epoch), [piece.tolist() for piece in pieces]
        loader: Any = torch.utils.data.DataLoader(
            pictures, batch_sampler=batches, num_workers=self.execution.workers, pin_memory=cuda
        )
        for x, y in loader:
            yield x.to(self.fabric.device, non_blocking=True), y.to(self.fabric.device, non_blocking=True)

    def _note(self, epoch: int, losses: Tensor) -> None:
        """Add an epoch to the curve, with scores on validation rows where there are any."""
        loss, nll, kl = losses.mean(0).tolist()
        last = self.step - 1
        lr = self.experiment.train.optimizer.lr * self.rate(last)
        row = {
            "epoch": epoch + 1,
            "step": self.step,
            "loss": loss,
            "nll": nll,
            "kl": kl,
            "kl_weight": self.kl_weight(last),
            "lr": lr,
        }
        if self.task.validation is not None:
            with self.stepper.averaged():
                scores = judge_validation(self.network, self.task, self.likelihood, self.experiment, epoch)
            row |= self.fabric.broadcast(scores)  # each process drew its own noise, and all must agree when to stop
            if self.experiment.train.early_stop and row["validation_nll"] < self.best.get("nll", float("inf")):
                self.best = {"nll": row["validation_nll"], "epoch": epoch + 1, "weights": self._weights()}
        self.curve.append(row)
        self.watcher.move(self.step, f"loss {loss:.4f}")
        if self.fabric.global_rank == 0:
            if time.monotonic() - self.written_at > 0.5:  # rewritten whole: not for each of thousands of short epochs
                self._write_curve()
            append_steps(self.folder / "steps.csv", epoch * self.steps_per_epoch, losses)
            if self.execution.tensorboard:
                tensorboard(self.folder, row)

    def _write_curve(self) -> None:
        write_csv(self.folder / "metrics.csv", self.curve)
        self.written_at = time.monotonic()

    def _stops_early(self) -> bool:
        stop = self.experiment.train.early_stop
        return bool(stop and self.best and self.curve and self.curve[-1]["epoch"] - self.best["epoch"] >= stop.patience)

    def _weights(self) -> dict[str, Tensor]:
        with self.stepper.averaged():
            return {n: t.detach().clone() for n, t in self.network.state_dict().items()}

    def _finish(self) -> None:
        """Leave the network with the weights that count and save it."""
        if self.best:
            self.network.load_state_dict(self.best["weights"])
        elif self.stepper.averages:
            own = dict(self.network.named_parameters())
            with torch.no_grad():
                for name, value in self.stepper.averages.items():
                    own[name].copy_(value)
        if self.fabric.global_rank == 0:
            self._write_curve()
        if self.fabric.global_rank > 0 and self.execution.strategy != "fsdp":
            return  # of a network that every process has whole, one writes; of a sharded one all take part
        try:
            sb.save(self.network, self.folder / "posterior")
            sb.save(self.network, self.folder / "model", base=True)
        except OSError as error:
            raise RunError(
                f"What was learned could not be saved in {self.folder}: {error}. Make room and run again with --resume."
            ) from error

    # --- what happens between steps ---

    def _between_steps(self, epoch_ends: bool = False) -> None:
        every = self.execution.checkpoint_every
        due = self.step % every == 0 if every else epoch_ends and time.monotonic() - self.saved_at > MINUTE
        if not every and epoch_ends and self.fabric.world_size > 1:
            due = self.fabric.broadcast(due)  # clocks differ, and all processes save a sharded model together
        stop = self._stop_asked()
        if due or stop:
            self._save()
        if stop:
            leave_together(self.fabric)  # nobody goes before the checkpoint is written
            raise Stopped(
                f"Stopped after step {self.step}; the checkpoint is in {self.folder}. Continue with --resume."
            )

    def _check_weights(self) -> None:
        """Stop if the update of the last step made weights NaN or infinite: its loss, computed before, need not have been."""
        local = [(n, p.to_local() if isinstance(p, DTensor) else p) for n, p in self.network.named_parameters()]
        bad = torch.stack([~p.detach().isfinite().all() for _, p in local])
        if self.fabric.world_size > 1:  # a shard is looked at by one process, and all must agree
            bad = self.fabric.all_reduce(bad.float(), reduce_op="sum") > 0
        if bool(bad.any()):
            name = local[int(bad.nonzero()[0])][0]
            raise Diverged(
                f"The update of step {self.step - 1} made the parameter {name} NaN or infinite. The last good checkpoint is kept in {self.folder}; "
                "lower the learning rate or clip gradients."
            )

    def _stop_asked(self) -> bool:
        if self.fabric.world_size == 1:
            return self.asked_to_stop
        if self.step % 20:  # processes agree now and then: asking costs a round trip
            return False
        return bool(
            self.fabric.all_reduce(torch.tensor(float(self.asked_to_stop), device=self.fabric.device), reduce_op="sum")
            > 0
        )

    def _save(self) -> None:
        if self.fabric.device.type == "cuda" and bool(self.stepper.failed):
            raise self._diverged((), self.step - 1)
        self._check_weights()
        extra = {"history": self.stepper.history} | {f"average/{n}": t for n, t in self.stepper.averages.items()}
        facts: dict[str, Any] = {"curve": self.curve, "hash": self.experiment.hash, "seconds": self.seconds}
        if self.best:
            extra |= {f"best/{n}": t for n, t in self.best["weights"].items()}
            facts["best"] = {"nll": self.best["nll"], "epoch": self.best["epoch"]}
        try:
            save_state(
                self.folder / "checkpoints",
                self.step,
                self.network,
                self.stepper.optimizer,
                extra,
                facts,
                self.fabric.global_rank == 0,
            )
        except OSError as error:
            raise RunError(
                f"The checkpoint after step {self.step} could not be written: {error}. The one before it is intact; make room and --resume."
            ) from error
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def _resume(self) -> None:
        found = latest_state(self.folder / "checkpoints")
        if found is None:
            return
        tensors, facts = found
        if facts.get("hash") != self.experiment.hash:
            raise CheckpointError(f"The checkpoints in {self.folder} are of another config.")
        extra = restore(tensors, self.network, self.stepper.optimizer)
        self.step, self.curve, self.seconds = facts["step"], facts["curve"], facts.get("seconds", [])
        self.saved_step = self.step
        self.stepper.history.copy_(extra["history"])
        for name, average in self.stepper.averages.items():
            average.copy_(sharded_like(extra[f"average/{name}"], average))
        if "best" in facts:
            weights = {
                n: sharded_like(extra[f"best/{n}"].to(self.fabric.device), t)
                for n, t in self.network.state_dict().items()
            }
            self.best = facts["best"] | {"weights": weights}
        if self.fabric.global_rank == 0:
            forget_steps(self.folder / "steps.csv", self.step // self.steps_per_epoch * self.steps_per_epoch)
        self.watcher.say(f"Resuming after step {self.step}.")

    def _capture(self) -> None:
        if not self.execution.captures(self.fabric.device, self.fabric.world_size):
            return
        batch = next(self._batches(self.step // self.steps_per_epoch, self.step % self.steps_per_epoch), None)
        if batch is not None:
            self.network.train()
            reason = self.stepper.capture(batch)
            if reason:
                self.watcher.say(
                    f"The step cannot be recorded as a CUDA graph, so it runs operation by operation ({reason})."
                )

    def _diverged(self, batch: tuple[Tensor, ...], step: int) -> Diverged:
        batch = batch or next(self._batches(step // self.steps_per_epoch, step % self.steps_per_epoch))
        seed_everything(self.experiment.seed, "step", step)
        told = explain(self.network, self.stepper, batch)
        return Diverged(
            f"The loss of step {step} is not finite. {told} The last good checkpoint is kept in {self.folder}; lower the learning rate or clip gradients."
        )

    def cost(self) -> dict[str, Any]:
        """Seconds of training and of each epoch, and the peak memory in bytes."""
        cuda = self.fabric.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"train_seconds": sum(self.seconds), "epoch_seconds": self.seconds, "peak_memory": peak}

    def ask_to_stop(self) -> None:
        """Stop between two steps, with a checkpoint."""
        self.asked_to_stop = True


@contextmanager
def on_signals(ask: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `ask`; former handlers come back afterwards. Threads other than the main one see no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, lambda *_: ask()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _compiler_settings() -> None:
    import torch._inductor.config as inductor

    # torch 2.11's compiler fails an assertion of its own when it joins batch norm's sums with a factor's.
    if hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False
