"""One training step: rows, scaling, augmentation, draws, ELBO, backward, optimizer. On a GPU it is one CUDA graph.

Everything a step needs from the host is written into tensors before it: rows, the KL's weight, the learning rates.
It reads nothing back; losses go to a history that the host looks at now and then.

Sizes: B rows of a step, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from slimbayes.diagnostics import GradientSNR
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.prediction.sample import sample
from slimbayes.seeds import seed_everything
from slimbayes.train.elbo import ELBO, check_finite, elbo
from slimbayes.train.likelihoods import LIKELIHOODS
from slimbayes.train.optim import l2, networks_of
from slimbayes.train.recorded import record
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.train import set_rate
from slimbayes_lab.data import Split
from slimbayes_lab.data.folders import ImageFolder
from slimbayes_lab.runs.predictor import Predictor, total_draws
from slimbayes_lab.tasks.task import crops_pictures

Batch = tuple[
    Tensor, ...
]  # row numbers (B,) of a set that is on the device, or inputs and targets


@dataclass
class TrainingStep:
    """A network, its optimizer and the losses of the current epoch.

    Attributes:
        predictor: the converted network, and what it is trained for.
        call: the network as it is run: perhaps compiled, and inside a process group's wrapper.
        history: loss, nll and KL of each step of the epoch, (steps, 3), on the device.
        failed: zero, and one from the first loss on that is not finite; updates stop with it.
        networks: parameters of each of those that share nothing; their losses are summed, and their mean is noted.
    """

    predictor: Predictor
    call: nn.Module
    optimizer: torch.optim.Optimizer
    fabric: Any
    steps_per_epoch: int

    def __post_init__(self) -> None:
        self.experiment, self.network, self.task, self.likelihood = self.predictor
        self.device = device = next(self.network.parameters()).device
        self.history = torch.zeros(self.steps_per_epoch, 3, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.kl_weight, self.failed = (
            torch.ones((), device=device),
            torch.zeros((), device=device),
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: Batch = ()
        train, self.noise = self.experiment.train, self.predictor.training_noise
        # The likelihood of a mixture has no parts that could be summed.
        summed = train.ensemble_loss == "sum" and train.form == "average"
        self.networks = (
            networks_of(self.network) if summed else [list(self.network.parameters())]
        )
        if device.type == "cuda":
            self.optimizer.found_inf = self.failed  # type: ignore[attr-defined]  # fused ones skip their update by it

    def __call__(self, batch: Batch, step: int, kl_weight: float, rate: float) -> None:
        """Train on a batch. On a CPU, FloatingPointError says that a loss is not finite."""
        seed_everything(self.experiment.seed, "step", step)
        set_rate(self.optimizer, rate)
        self.kl_weight.fill_(kl_weight)
        self.position.fill_(step % self.steps_per_epoch)
        if self.graph is None:
            self.once(batch)
            return
        for static, given in zip(self.static, batch, strict=True):
            static.copy_(given, non_blocking=True)
        self.graph.replay()

    def once(self, batch: Batch) -> None:
        """The step itself, without a word from the host."""
        clip = self.experiment.train.clip
        self.optimizer.zero_grad(set_to_none=True)
        found = self._elbo(*self.rows(batch))
        self.fabric.backward(found.loss * len(self.networks))
        terms = torch.stack([term.detach() for term in found])
        if clip:
            for parameters in self.networks:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
        if self.fabric.world_size > 1:
            dist.all_reduce(terms)
            terms /= self.fabric.world_size
        self.failed.copy_(
            torch.maximum(self.failed, (~terms[0].isfinite()).float())
        )  # in all processes alike
        if self.device.type == "cpu" and bool(self.failed):
            raise FloatingPointError
        self.optimizer.step()
        self.history.index_copy_(0, self.position, terms[None])

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """This process's inputs and targets: every world-th row.

        All of the batch is augmented first, so that a row's crop is the same whatever the number of processes.
        """
        task, augment = self.task, self.experiment.augment
        if len(batch) == 1:
            assert isinstance(task.train, Split)  # folders of pictures arrive decoded
            batch = (
                task.train.x.index_select(0, batch[0]),
                task.train.y.index_select(0, batch[0]),
            )
        x, y = task.scaling(batch[0]), batch[1]
        cropped = isinstance(task.train, ImageFolder) and crops_pictures(
            self.experiment
        )
        if augment is not None and not cropped:
            x = augment.build(images=x)
        x, y = (t[self.fabric.global_rank :: self.fabric.world_size] for t in (x, y))
        channels_last = self.device.type == "cuda" and task.images
        return (
            x.contiguous(memory_format=torch.channels_last) if channels_last else x
        ), y

    def _elbo(self, x: Tensor, y: Tensor) -> ELBO:
        train = self.experiment.train
        draws = total_draws(self.network, train.draws)
        outputs = sample(self.call, x, draws=draws, rows=train.rows)
        if train.rows == "split":
            outputs = outputs.flatten(0, 1)[None]  # each row was seen by one draw
        nll = LIKELIHOODS[self.likelihood].nll(
            outputs.float(), y, train.form, self.noise
        )
        found = elbo(nll, self.network, len(self.task.train), self.kl_weight)
        if train.l2:
            found = found._replace(
                loss=found.loss
                + l2(self.network, **train.l2.model_dump()) / len(self.networks)
            )
        return found

    # --- recording it as a CUDA graph ---

    def capture(self, batch: Batch) -> str | None:
        """Record the step as one CUDA graph; returns why not, if so. Network and optimizer are as before."""
        self.static = tuple(t.clone() for t in batch)
        tensors = [
            *self.network.state_dict().values(),
            self.history,
            self.failed,
        ]
        try:
            self.graph, _ = record(
                lambda: self.once(self.static), tensors, self.optimizer
            )
        except Exception as error:  # whatever a model does that cannot be recorded, it can still be trained
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    # --- numbers that are not finite ---

    def broken_parameter(self) -> str | None:
        """The name of a parameter that is NaN or infinite, the same in all processes."""
        local = {
            n: p.to_local() if hasattr(p, "to_local") else p
            for n, p in self.network.named_parameters()
        }
        bad = torch.stack([~p.detach().isfinite().all() for p in local.values()])
        if (
            self.fabric.world_size > 1
        ):  # a shard is looked at by one process, and all must agree
            bad = self.fabric.all_reduce(bad.float(), reduce_op="sum") > 0
        return list(local)[int(bad.nonzero()[0])] if bool(bad.any()) else None

    def explain(self, batch: Batch) -> str:
        """A sentence on where numbers stop being finite: parameters, or the first such layer."""
        x, _ = self.rows(batch)
        try:
            check_finite(self.network)
        except FloatingPointError as error:
            return str(error)
        return self._first_layer(x)

    @torch.no_grad()
    def _first_layer(self, x: Tensor) -> str:
        names = {
            module: name
            for name, module in self.network.named_modules()
            if not any(module.children())
        }
        found: list[str] = []

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if (
                module in names
                and isinstance(output, Tensor)
                and not bool(output.isfinite().all())
            ):
                found.append(names[module])

        with register_module_forward_hook(look):
            sample(
                self.network,
                x,
                draws=total_draws(self.network, self.experiment.train.draws),
                rows=self.experiment.train.rows,
            )
        if found:
            return f"The first layer whose output is NaN or infinite is {found[0]!r}."
        return "All layers' outputs are finite, so it is the likelihood, the KL or the penalty that is not."


# --- what is noted of a posterior while it trains ---
#
# column of the curve     with `train.track`   what
# mean_scale.LAYER.W      scales               mean posterior standard deviation (k-tied Normal, Figure 10)
# scales_1.LAYER.W        scales               share of the variance of the scales that one singular value explains
# scales_2.LAYER.W        scales               and two
# snr.LAYER               snr                  mean signal-to-noise ratio of the gradients of the scales, over the
#                                              epoch's last ten steps, parameters moving (Figure 6, right)
# snr_median.LAYER        snr                  median over the same gradients

WINDOW = 10  # steps
_SAVED = "tracked/"


class Tracker:
    """Looks at a network after its steps and epochs; it draws nothing, so training is the same without it."""

    def __init__(
        self, experiment: Experiment, network: nn.Module, steps_per_epoch: int
    ) -> None:
        self.network, self.steps, self.wanted = (
            network,
            steps_per_epoch,
            experiment.train.track,
        )
        if "snr" in self.wanted and steps_per_epoch < 2:
            raise ValueError(
                "train.track: a signal-to-noise ratio needs two steps in an epoch; take a smaller batch."
            )
        window = min(WINDOW, steps_per_epoch)
        self.snr = GradientSNR(network, window) if "snr" in self.wanted else None
        if "scales" in self.wanted:
            gaussian_sites(network)  # refuses a network that has none

    def after(self, step: int) -> None:
        """Take the gradients of a step, as clipped, if it is one of an epoch's last."""
        if self.snr is not None and step % self.steps >= self.steps - self.snr.window:
            self.snr.update()

    def columns(self) -> dict[str, float]:
        """What an epoch adds to the curve; numbers that are not finite are left out."""
        found: dict[str, float] = {}
        if "scales" in self.wanted:
            for weight, posterior in gaussian_sites(self.network).items():
                scales = posterior.scales()
                squares = torch.linalg.svdvals(scales).square()
                found[f"mean_scale.{weight}"] = float(scales.mean())
                found |= {
                    f"scales_{k}.{weight}": float(squares[:k].sum() / squares.sum())
                    for k in (1, 2)
                }
        if self.snr is not None:
            found |= {
                f"snr.{layer}": ratio for layer, ratio in self.snr.result().items()
            }
            found |= {
                f"snr_median.{layer}": ratio
                for layer, ratio in self.snr.result("median").items()
            }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint inside of an epoch's last steps needs; nothing elsewhere."""
        if self.snr is None or self.snr.steps % self.snr.window == 0:
            return {}
        steps = torch.tensor(self.snr.steps)
        return {f"{_SAVED}steps": steps} | {
            f"{_SAVED}{n}": h for n, h in self.snr.history.items()
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        if self.snr is not None and f"{_SAVED}steps" in saved:
            self.snr.steps = int(saved[f"{_SAVED}steps"])
            for name, history in self.snr.history.items():
                history.copy_(saved[f"{_SAVED}{name}"])
