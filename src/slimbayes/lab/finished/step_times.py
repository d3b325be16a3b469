"""How long a training step of a posterior takes, beside that of a point estimate (k-tied Normal, Table 4)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

import torch
from torch import nn

import slimbayes as sb

if TYPE_CHECKING:
    from slimbayes.lab.finished.diagnose import Case, Found

_ROWS, _TRAINING_ROWS, _WARM = 32, 60_000, 5
_PRIOR = sb.Normal(0.0, 0.3)
POSTERIORS: dict[str, sb.Config] = {
    "point": sb.Deterministic(),
    "mean-field": sb.MeanField(prior=_PRIOR),
    "2-tied": sb.KTied(rank=2, prior=_PRIOR),
}


def step_times(case: Case) -> Found:
    """Milliseconds of a step of `posterior` over `steps` steps, taken in turn with those of a point estimate: a machine
    that slows down slows both. Steps are eager, with Adam and a GPU waited for; `step_ratio` is of medians."""
    device = case.execution.device
    torch.manual_seed(case.seed)
    own, point = _step(POSTERIORS[case.options["posterior"]], device), _step(POSTERIORS["point"], device)
    taken: list[tuple[float, float]] = []
    for _ in range(int(case.options.get("steps", 300)) + _WARM):
        taken.append((_timed(own, device), _timed(point, device)))
    mine, theirs = zip(*taken[_WARM:], strict=True)
    numbers = {
        "step_ms": fmean(mine),
        "step_ms_sem": stdev(mine) / math.sqrt(len(mine)),
        "step_ratio": median(mine) / median(theirs),
    }
    return numbers, numbers | {"median_ms": median(mine), "device": device.type, "torch": torch.__version__}


def _step(config: sb.Config, device: torch.device) -> Callable[[], None]:
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model = sb.bayesianize(net, config).to(device)
    x, y = torch.randn(_ROWS, 784, device=device), torch.randint(10, (_ROWS,), device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        sb.elbo(sb.categorical(sb.sample(model, x), y), model, _TRAINING_ROWS).loss.backward()
        optimizer.step()

    return step


def _timed(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
