"""One training step: rows, scaling, augmentation, draws, likelihood, KL, backward, optimizer. On a GPU the whole of it is one CUDA graph.

    nll + kl_weight * KL / N + penalty

Everything a step needs from the host is written into tensors before it: which rows, the KL's weight, the learning rates. It reads nothing back; losses go
to a history that the host looks at now and then.

Sizes: B rows of a step, S draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimbayes.data import Split
from slimbayes.data.folders import ImageFolder
from slimbayes.engine.passes import processes
from slimbayes.lab.config import Experiment
from slimbayes.lab.crops import crops_pictures
from slimbayes.lab.optimizers import set_rate
from slimbayes.lab.seeds import seed_everything
from slimbayes.lab.task import Task
from slimbayes.prediction.prediction import Likelihood
from slimbayes.prediction.sample import sample
from slimbayes.train import elbo as objective
from slimbayes.train.optim import l2

Fetch = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Step:
    """A network, its optimizer and the losses of the current epoch.

    Attributes:
        call: the network as it is run: perhaps compiled, and inside a process group's wrapper.
        network: the converted network itself.
        history: loss, nll and KL of each step of the epoch, (steps, 3), on the device.
        failed: zero, and one from the first loss on that is not finite; updates stop with it.
        averages: running averages of the parameters by name, if asked for.
    """

    experiment: Experiment
    task: Task
    likelihood: Likelihood
    call: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    fabric: Any
    steps_per_epoch: int
    averages: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = next(self.network.parameters()).device
        self.device, self.channels_last = device, device.type == "cuda" and self.task.images
        self.history = torch.zeros(self.steps_per_epoch, 3, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.weight, self.failed = torch.ones((), device=device), torch.zeros((), device=device)
        build = self.experiment.augment
        done = isinstance(self.task.train, ImageFolder) and crops_pictures(self.experiment)
        self.augment = (lambda x: build.build(images=x)) if build and not done else None
        self.graph: Any = None
        self.static: tuple[Tensor, ...] = ()
        if self.experiment.train.ema and not self.averages:
            self.averages = {n: p.detach().clone() for n, p in self.network.named_parameters() if p.requires_grad}
        if device.type == "cuda":
            self.optimizer.found_inf = self.failed  # type: ignore[attr-defined]  # fused optimizers skip their update where it is one

    def __call__(self, batch: tuple[Tensor, ...], step: int, kl_weight: float, rate: float) -> None:
        """Train on a batch: row numbers (B,) of a set that is on the device, or inputs and targets."""
        seed_everything(self.experiment.seed, "step", step)
        set_rate(self.optimizer, rate)
        self.weight.fill_(kl_weight)
        self.position.fill_(step % self.steps_per_epoch)
        if self.graph is None:
            self.once(batch)
            return
        for static, given in zip(self.static, batch, strict=True):
            static.copy_(given, non_blocking=True)
        self.graph.replay()

    def once(self, batch: tuple[Tensor, ...]) -> None:
        """The step itself, without a word from the host."""
        train = self.experiment.train
        x, y = self.rows(batch)
        self.optimizer.zero_grad(set_to_none=True)
        terms = torch.zeros(3, device=self.device)
        pieces = zip(x.chunk(train.accumulate), y.chunk(train.accumulate), strict=True)
        for index, (rows, targets) in enumerate(pieces):
            with self.fabric.no_backward_sync(self.call, enabled=self._several and index < train.accumulate - 1):
                loss, nll, kl = self._loss(rows, targets)
                self.fabric.backward(loss / train.accumulate)
            terms += torch.stack([loss.detach(), nll.detach(), kl.detach()]) / train.accumulate
        if train.clip:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), train.clip)
        self._look(terms)
        self.optimizer.step()
        self._average()
        self.history.index_copy_(0, self.position, terms[None])

    @property
    def _several(self) -> bool:
        return processes()[1] > 1

    def rows(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """This process's inputs and targets: every world-th row. All of the batch is augmented first, so that a row's crop is the same
        whatever the number of processes."""
        rank, world = processes()
        if len(batch) == 2:
            x, y = batch
        else:
            assert isinstance(self.task.train, Split)  # folders of pictures arrive decoded
            x, y = self.task.train.x.index_select(0, batch[0]), self.task.train.y.index_select(0, batch[0])
        x = self.task.scaling(x, whole=self.experiment.augment is not None)
        if self.augment is not None:
            x = self.augment(x)
        if world > 1:
            x, y = x[rank::world], y[rank::world]
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x), y

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        train = self.experiment.train
        outputs = sample(self.call, x, draws=train.draws, rows=train.rows)
        if train.rows == "split":
            outputs = outputs.flatten(0, 1)[None]  # each row was seen by one draw
        nll = likelihood_loss(self.likelihood, outputs.float(), y, train.form, train.noise)
        kl = objective.kl(self.network) / len(self.task.train)
        loss = nll + self.weight * kl
        if train.l2:
            loss = loss + l2(self.network, **train.l2.model_dump())
        return loss, nll, kl

    def _look(self, terms: Tensor) -> None:
        """Average the losses over processes, and note one that is not finite, in all of them alike."""
        if self._several:
            dist.all_reduce(terms)
            terms /= processes()[1]
        bad = (~terms[0].isfinite()).float()
        torch.maximum(self.failed, bad, out=self.failed)
        if self.device.type == "cpu" and bool(self.failed):
            raise NonFinite

    @torch.no_grad()
    def _average(self) -> None:
        if self.averages:
            own = dict(self.network.named_parameters())
            decay = self.experiment.train.ema or 0.0
            torch._foreach_lerp_(list(self.averages.values()), [own[n].detach() for n in self.averages], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The network with its averaged weights, if there are any."""
        own = {n: p for n, p in self.network.named_parameters() if n in self.averages}
        kept = {n: p.detach().clone() for n, p in own.items()}
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(self.averages[n])
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in own.items():
                    p.copy_(kept[n])

    def capture(self, batch: tuple[Tensor, ...]) -> str | None:
        """Record the step as one CUDA graph; returns why that did not work, if so. The network and its optimizer are as before."""
        self.static = tuple(t.clone() for t in batch)
        kept = _snapshot(self)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(3):
                    self.once(self.static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.once(self.static)
            self.graph = graph
        except Exception as error:
            # Whatever a model does that cannot be recorded, it can still be trained step by step.
            torch.cuda.synchronize()
            self.graph = None
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            _put_back(self, kept)
        return None


class NonFinite(ArithmeticError):
    """A loss turned NaN or infinite; the network is as it was before that step."""


def likelihood_loss(kind: Likelihood, outputs: Tensor, y: Tensor, form: Any, noise: float | Tensor) -> Tensor:
    """Mean negative log-likelihood of targets under draws of outputs (S, B, ...)."""
    if kind == "categorical":
        return objective.categorical(outputs, y, form)
    if kind == "bernoulli":
        return objective.bernoulli(outputs, y.to(outputs.dtype), form)
    return objective.gaussian(outputs, y, noise, form)


def _snapshot(step: Step) -> list[tuple[Tensor, Tensor]]:
    tensors = [*step.network.state_dict().values(), *step.averages.values(), step.history, step.failed]
    tensors += [t for values in step.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    return [(t, t.detach().clone()) for t in tensors]


@torch.no_grad()
def _put_back(step: Step, kept: list[tuple[Tensor, Tensor]]) -> None:
    """Undo the steps that were run to record the graph, in place: the graph holds on to the very tensors."""
    known = {id(t) for t, _ in kept}
    for tensor, value in kept:
        tensor.copy_(value)
    for values in step.optimizer.state.values():
        for t in values.values():
            if isinstance(t, Tensor) and id(t) not in known:
                t.zero_()  # momentum and moments that those steps made: zero is where they start
