"""The rank-1 paper's health-record experiment (Dusenberry et al. 2020, Table 4) on open data: PhysioNet 2012 instead of MIMIC-III.

    python experiments/health/physionet.py run --data DIR [--variants NAME ...] [--seeds 0 1]
    python experiments/health/physionet.py table                                    into README.md

DIR holds physionet2012 as `slimbayes.data.physionet2012` reads it. Trains `mortality_lstm` in each of its VARIANTS on set a, keeps the epoch
with the best likelihood on set b, tests on set c, and writes one record a run to results/health/. README.md says what is smaller than
in the paper.

Sizes: N stays, K members, S draws.
"""

import argparse
import copy
import hashlib
import json
import math
import platform
import re
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import slimbayes as sb
from slimbayes.data import Dataset, Split, mortality, physionet2012
from slimbayes.metrics import AUCPR, AUROC, ECE, NLL
from slimbayes.models.health import VARIANTS, mortality_lstm
from slimbayes.report.record import Cost, Evaluation, Parameters, Record, read
from slimbayes.train import schedules

ROOT = Path(__file__).parents[2]
CHUNK = (
    50  # stays at a time: vectors of more tokens no longer fit the cache, and the system hands out fresh pages for each
)
METRICS = {"nll": NLL, "aucpr": AUCPR, "auroc": AUROC, "ece": ECE}
# Table 4, MIMIC-III: validation NLL, AUC-PR, ECE, then test.
PAPER = {
    "deterministic": (0.211, 0.446, 0.0160, 0.213, 0.390, 0.0135), "BatchEnsemble": (0.215, 0.447, 0.0171, 0.215, 0.391, 0.0162),
    "Bayesian embeddings": (0.213, 0.449, 0.0193, 0.212, 0.391, 0.0160), "fully Bayesian": (0.220, 0.424, 0.0162, 0.221, 0.373, 0.0161),
    "rank-1 Gaussian": (0.209, 0.451, 0.0156, 0.209, 0.391, 0.0132), "rank-1 Cauchy": (0.207, 0.446, 0.0148, 0.211, 0.383, 0.0130),
    "deep ensemble": (0.202, 0.453, 0.0132, 0.206, 0.396, 0.0103),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What every variant shares. The paper's Gaussian model has 512 units, 512 hidden, learning rate 3.0e-4 and 25,000 steps."""

    units: int = 64
    hidden: int = 64
    embedding: int = 32
    bag_hours: float = 6.0
    tokens_per_bag: int = 96  # covers nine bags in ten; the latest are kept in the others
    epochs: int = 8
    batch: int = 32  # 128 with the copies for four members, as in the paper
    rate: float = 1e-3
    clip: float = 7.29  # Table 7
    annealed: float = 2 / 3  # share of the steps over which the KL's weight grows to 1
    samples: int = 20  # members x draws at test time; the paper has 25 draws of each member


def draws_of(net: nn.Module, settings: Settings) -> int:
    return max(1, settings.samples // sb.members(net))


def train(net: nn.Module, data: Dataset, settings: Settings) -> list[dict[str, float]]:
    """One draw a member and step; the net ends with the weights of the epoch that was best on "validation". Returns a row for each epoch."""
    rows, steps = len(data.train), math.ceil(len(data.train) / settings.batch)
    weight = schedules.linear(max(1, int(settings.annealed * settings.epochs * steps)))
    optimizer = torch.optim.Adam(net.parameters(), settings.rate)
    curve: list[dict[str, float]] = []
    best, kept = math.inf, copy.deepcopy(net.state_dict())
    for epoch in range(settings.epochs):
        begun, losses = time.perf_counter(), []
        net.train()
        for number, index in enumerate(torch.randperm(rows).split(settings.batch)):
            nll = sb.bernoulli(sb.sample(net, data.train.x[index]), data.train.y[index].float())
            terms = sb.elbo(nll, net, num_data=rows, kl_weight=weight(epoch * steps + number))
            optimizer.zero_grad()
            terms.loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), settings.clip)
            optimizer.step()
            losses.append((float(terms.loss.detach()), float(terms.nll.detach()), float(terms.kl.detach())))
        seconds = time.perf_counter() - begun
        loss, nll_, kl = (sum(column) / len(losses) for column in zip(*losses))
        seen = scores(net, data.splits["validation"], draws=1)["nll"]
        curve.append(
            {
                "epoch": epoch,
                "step": (epoch + 1) * steps,
                "loss": loss,
                "nll": nll_,
                "kl": kl,
                "validation_nll": seen,
                "seconds": seconds,
            }
        )
        if seen < best:
            best, kept = seen, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    return curve


def scores(net: nn.Module, split: Split, draws: int) -> dict[str, float]:
    """Negative log-likelihood, areas under both curves and calibration error (15 bins) of the averaged probabilities."""
    metrics = {name: metric() for name, metric in METRICS.items()}
    for x, y in zip(split.x.split(CHUNK), split.y.split(CHUNK)):
        prediction = sb.predict(net, x, draws=draws, chunk=4 * CHUNK, likelihood="bernoulli", keep_samples=False)
        for metric in metrics.values():
            metric.update(prediction, y)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def run(variant: str, seed: int, data: Dataset, settings: Settings, command: str) -> Record:
    """One variant with one seed, from its start to its scores."""
    torch.manual_seed(seed)
    plain = mortality_lstm(len(data.vocabulary), settings.embedding, settings.units, settings.hidden)
    before = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    net = sb.bayesianize(plain, VARIANTS[variant])
    begun = time.perf_counter()
    curve = train(net, data, settings)
    trained = time.perf_counter()
    draws = draws_of(net, settings)
    roles = (("validation", "validation"), ("test", "test"))
    found = [
        Evaluation(
            data=data.name, role=role, draws=draws, rows=len(data.splits[s]), metrics=scores(net, data.splits[s], draws)
        )
        for role, s in roles
    ]
    shares = {name: float(split.y.double().mean()) for name, split in data.splits.items()}
    config = asdict(settings) | {
        "variant": variant,
        "model": "mortality_lstm",
        "vocabulary": len(data.vocabulary),
        "deaths": shares,
    }
    return Record(
        name=f"physionet2012 {variant} {seed}", method=variant, data=data.name, seed=seed, config=config,
        config_hash=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16], commands=[command],
        classes=list(data.classes), evaluations=found,
        parameters=Parameters(plain=before, total=sum(p.numel() for p in net.parameters() if p.requires_grad)),
        curve=[{k: v for k, v in row.items() if k != "seconds"} for row in curve],
        environment={"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine(), "threads": str(torch.get_num_threads())},
        cost=Cost(
            train_seconds=trained - begun, seconds_per_epoch=median(row["seconds"] for row in curve),
            evaluate_seconds=time.perf_counter() - trained, peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ),
    )  # fmt: skip


# Table -----------------------------------------------------------------------------------------------------------------


def table(records: list[Record]) -> str:
    """Mean over seeds, with the spread between them, of every variant; the paper's numbers on its own data beside them."""
    lines = [
        "| variant | parameters | seeds | val. NLL | AUC-PR | ECE | test NLL | AUC-PR | AUROC | ECE | KL / N | s to train | *MIMIC-III, test: NLL* | *AUC-PR* | *ECE* |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in (name for name in VARIANTS if any(r.method == name for r in records)):
        mine = [r for r in records if r.method == variant]
        validation, test = (
            [e.metrics for r in mine for e in r.evaluations if e.role == role] for role in ("validation", "test")
        )
        cells = [_cell(validation, k, d) for k, d in (("nll", 4), ("aucpr", 3), ("ece", 4))] + [
            _cell(test, k, d) for k, d in (("nll", 4), ("aucpr", 3), ("auroc", 3), ("ece", 4))
        ]
        paper = [f"*{value}*" for value in PAPER[variant][3:]]
        divergence = f"{sum(float(r.curve[-1]['kl']) for r in mine) / len(mine):.2f}"
        seconds = f"{sum(float(r.cost.train_seconds) for r in mine) / len(mine):.0f}"
        lines.append(
            "| "
            + " | ".join(
                [variant, f"{mine[0].parameters.total:,}", str(len(mine)), *cells, divergence, seconds, *paper]
            )
            + " |"
        )
    deaths = records[0].config["deaths"]
    constant = {
        name: -(deaths[name] * math.log(deaths["train"]) + (1 - deaths[name]) * math.log(1 - deaths["train"]))
        for name in ("validation", "test")
    }
    lines.append(
        f"| *share of deaths in set a, for all* | *0* | | *{constant['validation']:.4f}* | *{deaths['validation']:.3f}* | | *{constant['test']:.4f}* | *{deaths['test']:.3f}* | *0.500* | | | | | | |"
    )
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]], name: str, digits: int) -> str:
    values = [float(row[name]) for row in rows]
    spread = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.{digits}f}{spread}"


def slug(variant: str) -> str:
    return re.sub("[^a-z0-9]+", "-", variant.lower())


def write_table(folder: Path, page: Path) -> str:
    files = sorted(folder.glob("physionet2012-*.json"))
    if not files:
        raise SystemExit(f"{folder} has no physionet2012-*.json: run the experiment first.")
    text, old = table([read(file) for file in files]), page.read_text()
    before, after = old.split("<!-- physionet -->")[0], old.split("<!-- end physionet -->")[1]
    page.write_text(f"{before}<!-- physionet -->\n{text}\n<!-- end physionet -->{after}")
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    fit = commands.add_parser("run")
    fit.add_argument("--data", type=Path, required=True, help="folder that holds physionet2012")
    fit.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    fit.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    for name, value in asdict(Settings()).items():
        fit.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    show = commands.add_parser("table")
    show.add_argument("--page", type=Path, default=Path(__file__).with_name("README.md"))
    for command in (fit, show):
        command.add_argument("--out", type=Path, default=ROOT / "results" / "health")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.command == "table":
        print(write_table(args.out, args.page))
        return
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    data = mortality(
        physionet2012(args.data / "physionet2012"), precision=settings.bag_hours, tokens_per_bag=settings.tokens_per_bag
    )
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for variant in args.variants:
            command = f'python experiments/health/physionet.py run --data DIR --variants "{variant}" --seeds {seed}'
            record = run(variant, seed, data, settings, command)
            (args.out / f"physionet2012-{slug(variant)}-{seed}.json").write_text(
                record.model_dump_json(indent=1) + "\n"
            )
            print(
                f"{variant:22} seed {seed}",
                {k: round(float(v), 4) for k, v in record.evaluations[1].metrics.items()},
                f"{record.cost.train_seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
