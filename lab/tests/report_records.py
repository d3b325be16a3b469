"""Made-up records for the tests of reports. Every number follows from formulas below, not from a training run."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from slimbayes_lab.report.record import (
    Evaluation,
    Example,
    ParameterCounts,
    Record,
    Reliability,
    RiskCoverage,
    RunCost,
)

CORRUPTIONS = [f"corruption {i:02d}" for i in range(19)]
CLASSES = [
    "airplane",
    "car",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]
# method: (skill, calibration gap, members, parameter ratio); larger skill is better
METHODS = {
    "deterministic": (0.0, 0.050, 1, 1.0),
    "mc-dropout": (0.15, 0.035, 1, 1.0),
    "batch-ensemble": (0.25, 0.030, 4, 1.004),
    "rank1-gaussian": (0.45, 0.015, 4, 1.012),
    "rank1-cauchy": (0.55, 0.010, 4, 1.012),
    "deep-ensemble": (0.60, 0.012, 4, 4.0),
}


def png(rng: np.random.Generator, size: int = 32) -> str:
    """A small smooth picture as a data URL, written without an image library."""
    y, x = np.mgrid[0:size, 0:size] / size
    waves = [
        np.sin(
            2
            * math.pi
            * (rng.uniform(0.3, 1.5) * x + rng.uniform(0.3, 1.5) * y + rng.uniform())
        )
        for _ in range(3)
    ]
    pixels = np.stack(
        [(127 + 110 * wave).astype(np.uint8) // 24 * 24 for wave in waves], -1
    )
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(raw, 9))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def scores(
    rng: np.random.Generator, skill: float, gap: float, hardness: float, draws: int
) -> dict[str, float]:
    """Scores that fall with hardness and rise with skill; more draws help a little."""
    error = min(
        0.9,
        (0.06 - 0.02 * skill) * math.exp(1.9 * hardness) * (1 + 0.05 / draws)
        + rng.normal(0, 0.0012),
    )
    ece = abs(gap * (1 + 4 * hardness) * (1 + 0.2 / draws) + rng.normal(0, 0.0008))
    nll = 3.1 * error * (1 + 6 * ece) + rng.normal(0, 0.002)
    return {
        "accuracy": 1 - error,
        "top5": 1 - error / 6,
        "nll": nll,
        "brier": 1.5 * error,
        "ece": ece,
        "mce": 3 * ece,
        "adaptive_ece": 0.95 * ece,
        "classwise_ece": 0.3 * ece,
        "aurc": error**1.7,
        "entropy": 2 * error,
        "epistemic": 0.3 * error * skill,
    }


def reliability(accuracy: float, gap: float, rows: int) -> Reliability:
    """Fifteen bins, most rows sure."""
    middles = (np.arange(15) + 0.5) / 15
    weights = np.exp(7 * middles * accuracy) * (middles > 0.2)
    counts = (rows * weights / weights.sum()).astype(int)
    keep = counts > 0
    hit = np.clip(middles - 4 * gap * np.sin(math.pi * middles), 0, 1)
    return Reliability(
        confidence=middles[keep].tolist(),
        accuracy=hit[keep].tolist(),
        count=counts[keep].tolist(),
    )


def evaluations(
    rng: np.random.Generator, method: str, corruptions: list[str], draws: list[int]
) -> list[Evaluation]:
    """Test, corrupted, shifted and unfamiliar sets."""
    skill, gap, members, _ = METHODS.get(method, (0.3, 0.03, 4, 1.01))
    made = []
    for count in draws:
        clean = scores(rng, skill, gap, 0.0, count)
        error = 1 - clean["accuracy"]
        alone = (
            [scores(rng, skill - 0.5, gap * 1.6, 0.0, count) for _ in range(members)]
            if members > 1
            else []
        )
        varied = (
            {
                "disagreement": error * (0.5 + skill),
                "normalised_disagreement": 0.5 + skill + rng.normal(0, 0.02),
                "kl": 0.1 + skill / 5,
                "cosine": 1 - error,
            }
            if members > 1
            else {}
        )
        coverage = np.linspace(0.005, 1, 200)
        curve = RiskCoverage(
            coverage=coverage.tolist(), risk=(error * coverage ** (2 + skill)).tolist()
        )
        made.append(
            Evaluation(
                data="synthetic/test",
                role="test",
                draws=count,
                rows=10_000,
                metrics=clean,
                members=alone,
                diversity=varied,
                reliability=reliability(clean["accuracy"], gap, 10_000),
                risk_coverage=curve,
            )
        )
        for i, corruption in enumerate(corruptions):
            for severity in range(1, 6):
                hardness = (
                    severity / 5 * (0.35 + 0.65 * i / max(1, len(corruptions) - 1))
                )
                hard = scores(rng, skill, gap, hardness, count)
                made.append(
                    Evaluation(
                        data="synthetic-c",
                        role="corruption",
                        corruption=corruption,
                        severity=severity,
                        draws=count,
                        rows=10_000,
                        metrics=hard,
                        reliability=reliability(
                            hard["accuracy"], gap * (1 + hardness), 10_000
                        ),
                    )
                )
        for k, name in enumerate(("street numbers", "textures")):
            auroc = 0.88 + 0.1 * skill - 0.03 * k + rng.normal(0, 0.004)
            made.append(
                Evaluation(
                    data=name,
                    role="ood",
                    draws=count,
                    rows=20_000,
                    metrics={
                        "auroc": auroc,
                        "aucpr": auroc - 0.05,
                        "fpr95": 1.2 - auroc,
                    },
                )
            )
    made.append(
        Evaluation(
            data="synthetic-v2",
            role="shift",
            draws=draws[-1],
            rows=2_000,
            metrics=scores(rng, skill, gap, 0.3, draws[-1]),
        )
    )
    return made


def examples(rng: np.random.Generator, count: int = 8) -> list[Example]:
    """Rows the model is most and least sure of."""
    made = []
    for i in range(2 * count):
        sure = i < count
        label, other = CLASSES[i % 10], CLASSES[(i * 3 + 1) % 10]
        made.append(
            Example(
                index=100 + 7 * i,
                sure="most" if sure else "least",
                label=label,
                predicted=label if sure or i % 3 else other,
                confidence=0.999 if sure else 0.3 + 0.02 * (i - count),
                entropy=0.01 if sure else 1.6,
                epistemic=0.001 if sure else 0.4,
                image=png(rng),
            )
        )
    return made


def record(
    name: str = "rank1-gaussian",
    seed: int = 0,
    *,
    data: str = "synthetic-10",
    corruptions: int = 19,
    draws: tuple[int, ...] = (1, 4, 16),
    epochs: int = 60,
    pictures: int = 8,
    **changes: Any,
) -> Record:
    """A classifier's record."""
    rng = np.random.default_rng([seed, sum(map(ord, name))])
    ratio = METHODS.get(name, (0.3, 0.03, 4, 1.01))[3]
    curve = [
        {
            "epoch": float(e),
            "step": 390.0 * e,
            "loss": 2.3 * math.exp(-e / 15) + 0.1,
            "nll": 2.2 * math.exp(-e / 14) + 0.05 * rng.random(),
            "kl": 50 * (1 - math.exp(-e / 20)),
            "kl_weight": min(1.0, e / 30),
            "lr": 0.1 * 0.5 * (1 + math.cos(math.pi * e / epochs)),
        }
        for e in range(epochs)
    ]
    fields: dict[str, Any] = {
        "name": name,
        "method": f"{name.replace('-', ' ')}, wide network",
        "data": data,
        "seed": seed,
        "config": {"method": {"kind": name}, "train": {"epochs": epochs}, "seed": seed},
        "config_hash": f"{seed:064x}",
        "commands": [f"slimbayes run {name}.yaml --set seed={seed}"],
        "classes": CLASSES,
        "parameters": ParameterCounts(plain=36_489_290, total=int(36_489_290 * ratio)),
        "curve": curve,
        "evaluations": evaluations(rng, name, CORRUPTIONS[:corruptions], list(draws)),
        "examples": examples(rng, pictures),
        "environment": {
            "commit": "0" * 40,
            "python": "3.11.7",
            "torch": "2.13.0",
            "gpu": "one made-up GPU",
        },
        "cost": RunCost(
            train_seconds=4000 * ratio + 60 * seed,
            seconds_per_epoch=61.0 * ratio,
            evaluate_seconds=33.0,
            peak_memory=int(6e9 * ratio),
        ),
    }
    return Record(**(fields | changes))


def regression(
    name: str = "k-tied", seed: int = 0, *, data: str = "synthetic-line", **changes: Any
) -> Record:
    """A record of a model with a real target: no classes, members, corruptions or pictures."""
    rng = np.random.default_rng([seed, len(name)])
    noise = rng.normal(0, 0.02)
    test = [
        Evaluation(
            data=f"{data}/test",
            role="test",
            draws=count,
            rows=60,
            metrics={
                "rmse": 2.9 + noise + 0.3 / count,
                "lpd": -2.46 - noise,
                "crps": 1.5 + noise,
                "coverage95": 0.94 + noise / 5,
            },
        )
        for count in (1, 16)
    ]
    empty: dict[str, Any] = {
        "classes": [],
        "examples": [],
        "evaluations": test,
        "method": name,
    }
    return record(
        name, seed, data=data, epochs=20, corruptions=0, pictures=0, **(empty | changes)
    )


def save(folder: Path, *records: Record) -> list[Path]:
    """Write run directories and give their paths."""
    paths = []
    for i, one in enumerate(records):
        run = folder / f"run-{i:03d}"
        run.mkdir(parents=True)
        (run / "record.json").write_text(one.model_dump_json())
        paths.append(run)
    return paths


def standard(folder: Path, seeds: int = 3) -> list[Path]:
    """Six methods, some seeds each."""
    return save(
        folder, *(record(name, seed) for name in METHODS for seed in range(seeds))
    )


def hostile(text: str, **changes: Any) -> Record:
    """A record that holds a text wherever it can hold one."""
    sets = [
        Evaluation(
            data=text, role=role, corruption=text if role == "corruption" else None, severity=severity, draws=draws,
            rows=1, metrics={"nll": 0.1 + len(text), text: 1.0 * draws}, members=[{"nll": 0.1, text: 0.2}] * 2,
            diversity={"kl": 0.1, text: 0.3},
        )
        for role, severity in (("test", 0), ("corruption", 1), ("shift", 0), ("ood", 0))
        for draws in (1, 2)
    ]  # fmt: skip
    shown = Example(
        index=1, sure="most", label=text, predicted=text, confidence=1, entropy=0, epistemic=0,
        image=f'data:image/svg+xml,x" onerror="alert(1){text}',
    )  # fmt: skip
    given: dict[str, Any] = {
        "evaluations": sets, "examples": [shown], "commands": [text], "config": {text: text}, "classes": [text],
        "method": text, "environment": {text: text}, "curve": [{"epoch": 0.0, text: 1.0}, {"epoch": 1.0, text: 2.0}],
    }  # fmt: skip
    return record(text, 0, **given | changes)
