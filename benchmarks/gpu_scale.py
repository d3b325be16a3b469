"""How cost grows with members, draws, depth, width and the number of processes.

Each function gives {method: numbers}; methods are named by the value that varies, such as "K=8 rank-1 per example".
Steps are eager. SCALES says what a ratio is to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_cases import PLAIN, Trial, Variant, Work, mlp, ours
from slimbayes_lab import models
from timing import Rows, milliseconds, peak_mib, prepare, race
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine import noise


def steps(
    label: str, work: Work, variants: dict[str, Variant], device: torch.device
) -> Rows:
    """A training step of each variant, and of the plain network."""
    builds = {
        name: partial(Trial, work, variant, device, False)
        for name, variant in (PLAIN | variants).items()
    }
    trials, rows = prepare(builds, Trial.train, device)
    times = race(
        {name: trial.train for name, trial in trials.items()},
        "plain",
        device,
        rounds=9,
        seconds=1.0,
    )
    for name, found in times.items():
        rows[name] |= {f"train_{key}": value for key, value in found.items()}
    return {f"{label} {name}": row for name, row in rows.items()}


def rank1(members: int) -> dict[str, Variant]:
    return {
        "rank-1 per example": ours(sb.Rank1(members=members)),
        "rank-1 per member": ours(sb.Rank1(members=members, draws="member")),
    }


def by_members(device: torch.device, tiny: bool) -> Rows:
    width, batch = (12, 2) if tiny else (4096, 1024)
    rows: Rows = {}
    for k in (1, 2) if tiny else (1, 2, 4, 8, 16, 32):
        work = Work("", partial(mlp, *[width] * 5), k * batch, (width,))
        rows |= steps(f"K={k}", work, rank1(k), device)
    return rows


def by_depth(device: torch.device, tiny: bool) -> Rows:
    width, batch = (12, 8) if tiny else (1024, 4096)
    rows: Rows = {}
    for depth in (2, 4) if tiny else (4, 8, 16, 32, 64):
        work = Work("", partial(mlp, *[width] * (depth + 1)), batch, (width,))
        rows |= steps(f"depth={depth}", work, rank1(4), device)
    return rows


def by_width(device: torch.device, tiny: bool) -> Rows:
    batch = 8 if tiny else 4096
    rows: Rows = {}
    for width in (12, 16) if tiny else (512, 1024, 2048, 4096, 8192):
        work = Work("", partial(mlp, *[width] * 5), batch, (width,))
        rows |= steps(f"width={width}", work, rank1(4), device)
    return rows


def by_draws(device: torch.device, tiny: bool) -> Rows:
    """`predict` with more and more draws: time, and memory above what the model and the batch take."""
    torch.manual_seed(0)
    net = sb.bayesianize(
        models.wrn(10, 1) if tiny else models.wrn(16, 4), sb.Rank1(members=1)
    ).to(device)
    x = (
        torch.randn(2, 3, 8, 8, device=device)
        if tiny
        else torch.randn(256, 3, 32, 32, device=device)
    )
    rows: Rows = {}
    for draws in (1, 3) if tiny else (1, 2, 5, 10, 20, 50, 100, 200):

        def work(draws: int = draws) -> None:
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda"
            ):
                sb.predict(net, x, draws=draws, keep_samples=False)

        work()
        spent = sorted(milliseconds(work, device) for _ in range(3))[1]
        rows[f"S={draws}"] = {"predict_ms": spent, "peak_mib": peak_mib(work, device)}
    return rows


def by_processes(device: torch.device, tiny: bool) -> Rows:
    """A bare forward of the last of n processes, and the noise it draws; the others are made up."""
    width, batch = (8, 8) if tiny else (2048, 4096)
    torch.manual_seed(0)
    net = sb.bayesianize(mlp(*[width] * 5), sb.Rank1(members=4)).to(device)
    x = torch.randn(batch, width, device=device)
    works: dict[str, Callable[[], object]] = {}
    sizes: Sequence[int] = (1, 2) if tiny else (1, 2, 4, 8, 16, 32, 64)
    for n in sizes:

        def forward(n: int = n) -> None:
            with torch.no_grad(), patch.object(noise, "processes", lambda: (n - 1, n)):
                net(x)

        def draw(n: int = n) -> None:
            with patch.object(noise, "processes", lambda: (n - 1, n)):
                noise.standard_normal((batch, width), device, torch.float32)

        works |= {f"ranks={n} forward": forward, f"ranks={n} noise": draw}
    rows: Rows = {}
    for kind in ("forward", "noise"):
        chosen = {name: work for name, work in works.items() if name.endswith(kind)}
        found = race(chosen, f"ranks=1 {kind}", device, rounds=9, seconds=2.0)
        rows |= {
            name: {f"predict_{key}": value for key, value in row.items()}
            for name, row in found.items()
        }
    return rows


def by_sharing(device: torch.device, tiny: bool) -> Rows:
    """`predict` where draws have something in common, with that run once for all of them and without."""
    torch.manual_seed(0)
    draws, many = (3, 7) if tiny else (200, 10_000)
    last = sb.ModelPatch(patch=r"layer4.*bn.*|fc")
    cases: dict[str, tuple[nn.Module, Any, int]] = {
        "regression net, EMP": (models.regression_net(6), sb.ModelPatch(), many),
        "regression net, ECMP": (
            models.regression_net(6),
            sb.ModelPatch(cross=True),
            many,
        ),
    }
    if not tiny:
        resnet = partial(models.resnet18, classes=100, small_images=True)
        cases["ResNet-18, last stage and output EMP"] = (resnet(), last, draws)
        cases["ResNet-18, output rank-1"] = (
            resnet(),
            {"fc": sb.Rank1(members=1)},
            draws,
        )
    rows: Rows = {}
    for name, (plain, config, count) in cases.items():
        net = sb.bayesianize(plain.to(device), config)
        x = (
            torch.randn(31, 6, device=device)
            if "regression" in name
            else torch.randn(100, 3, 32, 32, device=device)
        )
        runs = {
            f"{name}, share {share}": partial(_predict, net, x, count, share)
            for share in (False, True)
        }
        found = race(runs, f"{name}, share False", device, rounds=5, seconds=3.0)
        rows |= {
            key: {f"predict_{word}": value for word, value in row.items()}
            for key, row in found.items()
        }
    return rows


def _predict(net: nn.Module, x: Tensor, draws: int, share: bool) -> None:
    likelihood: Any = "categorical" if x.dim() > 2 else "gaussian"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        sb.predict(
            net, x, draws=draws, share=share, keep_samples=False, likelihood=likelihood
        )


SCALES = {
    "members": (
        by_members,
        "MLP 4 x 4096, 1,024 rows for each member; a training step; ratios to plain",
    ),
    "depth": (
        by_depth,
        "MLP of width 1024, 4,096 rows, K = 4; a training step; ratios to plain",
    ),
    "width": (
        by_width,
        "MLP of four layers, 4,096 rows, K = 4; a training step; ratios to plain",
    ),
    "draws": (
        by_draws,
        "WRN-16-4, 256 images, rank-1; `predict(draws=S, keep_samples=False)`",
    ),
    "ranks": (
        by_processes,
        "MLP 4 x 2048, 4,096 rows: a bare forward, and 4096 x 2048 numbers of noise; ratios to one rank",
    ),
    "sharing": (
        by_sharing,
        "`predict(share=)`, S = 200 for 100 images, 10,000 for 31 rows; ratios to share=False",
    ),
}
