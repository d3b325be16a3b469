"""What a run notes of its posterior while it trains, beside losses: scales, their spectrum, noise of their gradients.

column of the curve     with `train.track`   what
mean_scale.LAYER.W      scales               mean posterior standard deviation (k-tied Normal, Figure 10)
scales_1.LAYER.W        scales               share of the variance of the scales that one singular value explains
scales_2.LAYER.W        scales               and two
snr.LAYER               snr                  mean signal-to-noise ratio of the gradients of the scales, over the epoch's
                                             last ten steps, parameters moving (Figure 6, right)
snr_median.LAYER        snr                  median over the same gradients
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slimbayes.diagnostics import GradientSNR
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.lab.config import Experiment

WINDOW = 10  # steps
_SAVED = "tracked/"


class Tracker:
    """Looks at a network after its steps and epochs; it draws nothing, so training is the same without it."""

    def __init__(self, experiment: Experiment, network: nn.Module, steps_per_epoch: int) -> None:
        self.network, self.steps, self.wanted = network, steps_per_epoch, experiment.train.track
        if "snr" in self.wanted and steps_per_epoch < 2:
            raise ValueError("train.track: a signal-to-noise ratio needs two steps in an epoch; take a smaller batch.")
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
            for site in gaussian_sites(self.network):
                scales = site.scales()
                squares = torch.linalg.svdvals(scales).square()
                found[f"mean_scale.{site.name}"] = float(scales.mean())
                found |= {f"scales_{k}.{site.name}": float(squares[:k].sum() / squares.sum()) for k in (1, 2)}
        if self.snr is not None:
            found |= {f"snr.{layer}": ratio for layer, ratio in self.snr.result().items()}
            found |= {f"snr_median.{layer}": ratio for layer, ratio in self.snr.result("median").items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint inside of an epoch's last steps needs; nothing elsewhere."""
        if self.snr is None or self.snr.steps % self.snr.window == 0:
            return {}
        steps = torch.tensor(self.snr.steps)
        return {f"{_SAVED}steps": steps} | {f"{_SAVED}{n}": h for n, h in self.snr.history.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        if self.snr is not None and f"{_SAVED}steps" in saved:
            self.snr.steps = int(saved[f"{_SAVED}steps"])
            for name, history in self.snr.history.items():
                history.copy_(saved[f"{_SAVED}{name}"])
