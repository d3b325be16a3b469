"""Does a table's row that is far from the data look far? NLL and OOD detection with and without `distance`; noise floors.

    python benchmarks/distance.py run --data DIR --out lab/results/far.json      # some ten minutes on one core
    python benchmarks/distance.py confirm --data DIR --out lab/results/far.json  # adds seeds and sets that nothing was chosen on
    python benchmarks/distance.py page                                       # writes docs/distance.md from lab/results/far.json

Each seed holds out the top fifth of one feature (the far end), splits the rest into training, validation and test rows,
and trains a small network. Rows of the other sets, standardised by themselves, are a second kind of unfamiliar rows.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import table as markdown
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.train import heteroscedastic, likelihoods

ROOT = Path(__file__).parents[1]
REGRESSION = (
    "concrete", "energy", "wine-quality-red", "yacht", "bostonhousing", "kin8nm", "power-plant",
)  # fmt: skip
CLASSES = ("breast_cancer", "wine", "digits")
FRESH = (
    "naval-propulsion-plant",
    "protein-tertiary-structure",
    "diabetes",
    "iris",
)  # looked at in no choice of a rule
REAL = (*REGRESSION, *FRESH[:3])
SEEDS, EPOCHS, MOST = 5, 40, 1000
BOUNDS = (
    (1e-4, 0.3),
    (0.03, 0.3),
    (0.1, 0.3),
    (0.03, 1.0),
    (0.1, 1.0),
)  # least noise, and a softplus of one
METHODS: dict[str, Callable[[], Any]] = {
    "plain": sb.Deterministic,
    "rank-1 Normal": lambda: sb.Rank1(members=4, mean_init=sb.Normal(1.0, 0.5)),
}


def table(name: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, P) and targets (n,) of a set."""
    if (data / f"{name}.npz").is_file():
        found = np.load(data / f"{name}.npz")
        return found["X"].astype(np.float64), found["y"].reshape(len(found["y"]), -1)[
            :, 0
        ].astype(np.float64)
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    return bunch.data.astype(np.float64), bunch.target


def split(name: str, data: Path, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Training, validation, test and far rows, standardised on the training rows."""
    x, y = table(name, data)
    random = np.random.RandomState(seed)
    few = random.permutation(len(x))[:MOST]
    x, y = x[few], y[few]
    feature = random.choice(
        [j for j in range(x.shape[1]) if len(np.unique(x[:, j])) >= 5]
    )
    away = x[:, feature] > np.quantile(x[:, feature], 0.8)
    if away.sum() < 10:
        away = x[:, feature] <= np.quantile(x[:, feature], 0.2)
    near = random.permutation(np.flatnonzero(~away))
    cuts = int(0.7 * len(near)), int(0.85 * len(near))
    parts = dict(
        zip(("train", "validation", "test"), np.split(near, cuts)),
        far=np.flatnonzero(away),
    )
    x = scaled(x, x[parts["train"]])
    if name in REAL:
        y = scaled(y, y[parts["train"]])
    kind = torch.float32 if name in REAL else torch.long
    return {
        k: (torch.tensor(x[i], dtype=torch.float32), torch.tensor(y[i], dtype=kind))
        for k, i in parts.items()
    }


def scaled(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    spread = by.std(0)
    return (values - by.mean(0)) / np.where(spread > 1e-9, spread, 1.0)


def others(name: str, data: Path, width: int) -> Tensor:
    """Rows of the other sets, their columns repeated or cut to this width."""
    rows = []
    for other in (*REGRESSION, *CLASSES):
        if other != name:
            x, _ = table(other, data)
            x = scaled(x, x)[np.random.RandomState(0).permutation(len(x))[:60]]
            rows.append(x[:, np.arange(width) % x.shape[1]])
    return torch.tensor(np.concatenate(rows), dtype=torch.float32)


def train(
    config: Any, rows: tuple[Tensor, Tensor], outputs: int, seed: int, likelihood: str
) -> nn.Module:
    x, y = rows
    torch.manual_seed(seed)
    body = [
        nn.Linear(x.shape[1], 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    ]
    net: nn.Module = nn.Sequential(*body)
    bayes = not isinstance(config, sb.Deterministic)
    net = sb.bayesianize(net, config) if bayes else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    nll = likelihoods.likelihood_named(likelihood)
    for _ in range(EPOCHS):
        for i in torch.randperm(len(x)).split(64):
            drawn = sb.sample(net, x[i]) if bayes else net(x[i])[None]
            loss = nll.nll(drawn, y[i], "average") + (
                sb.kl(net) / len(x) if bayes else 0.0
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net if bayes else sb.bayesianize(net, config)


def auroc(near: Tensor, away: Tensor) -> float:
    metric = sb.metrics.AUROC()
    metric.update(
        torch.cat([near, away]),
        torch.cat([torch.zeros(len(near)), torch.ones(len(away))]).long(),
    )
    return float(metric.compute())


def scores(
    net: nn.Module, parts: dict[str, Any], other: Tensor, likelihood: str, near: Any
) -> dict[str, float]:
    """NLL of test and far rows; AUROC of far and of other rows against test rows, by distance or by uncertainty."""
    x = {**{name: rows[0] for name, rows in parts.items()}, "other": other}
    names = ("test", "far", "other")
    draws = 8 * sb.members(net)
    pred = {
        n: sb.predict(
            net,
            x[n],
            draws=draws,
            likelihood=likelihood,
            likelihood_std=1.0,
            seed=0,
            distance=near,
        )
        for n in names
    }
    score = {
        name: p.total if p.distance is None else p.distance for name, p in pred.items()
    }
    found = {
        f"{n}_nll": float(-pred[n].log_prob(parts[n][1]).mean())
        for n in ("test", "far")
    }
    return {
        **found,
        **{f"{n}_auroc": auroc(score["test"], score[n]) for n in ("far", "other")},
    }


def compare(
    name: str, seed: int, data: Path, parts: dict[str, Any], methods: Sequence[str]
) -> list[dict[str, Any]]:
    """Scores of each method on one split, with and without distances."""
    likelihood = "heteroscedastic_gaussian" if name in REAL else "categorical"
    outputs = 2 if name in REAL else int(table(name, data)[1].max()) + 1
    other, rows = others(name, data, parts["train"][0].shape[1]), []
    for method in methods:
        net = train(METHODS[method](), parts["train"], outputs, seed, likelihood)
        near = sb.distance(net, [parts["train"]], likelihood)
        for which in (None, near):
            cell = {
                "set": name,
                "seed": seed,
                "method": method,
                "far": which is not None,
            }
            rows.append({**cell, **scores(net, parts, other, likelihood, which)})
    return rows


def confirm(data: Path, out: Path) -> None:
    """Plain networks on seeds, and on sets, that played no part in choosing the rules; added to the record."""
    found = json.loads(out.read_text())
    found["fresh"] = [
        cell
        for name in (*REGRESSION, *CLASSES, *FRESH)
        for seed in range(SEEDS, 2 * SEEDS)
        for cell in compare(name, seed, data, split(name, data, seed), ["plain"])
    ]
    out.write_text(json.dumps(found, indent=0) + "\n")


def run(data: Path, out: Path) -> None:
    began, rows, floors = time.time(), [], []
    for name in (*REGRESSION, *CLASSES):
        for seed in range(SEEDS):
            parts = split(name, data, seed)
            rows += compare(name, seed, data, parts, list(METHODS))
            for floor, unit in BOUNDS if name in REGRESSION else ():
                floors.append(with_noise(floor, unit, name, parts, seed))
        print(f"{name} {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    versions = {
        "torch": torch.__version__,
        "seeds": SEEDS,
        "epochs": EPOCHS,
        "rows": MOST,
    }
    versions |= {"commit": commit.stdout.strip()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"about": versions, "rows": rows, "floors": floors}, indent=0) + "\n"
    )


def with_noise(
    floor: float, unit: float, name: str, parts: dict[str, Any], seed: int
) -> dict[str, Any]:
    """NLL of validation and far rows of a plain network whose noise has another floor and unit."""
    before = heteroscedastic.LEAST_NOISE, heteroscedastic.UNIT_NOISE
    heteroscedastic.LEAST_NOISE, heteroscedastic.UNIT_NOISE = floor, unit
    try:
        net = train(
            sb.Deterministic(), parts["train"], 2, seed, "heteroscedastic_gaussian"
        )
        cell: dict[str, Any] = {"set": name, "seed": seed, "floor": floor, "unit": unit}
        for part in ("validation", "far"):
            pred = sb.predict(
                net,
                parts[part][0],
                likelihood="heteroscedastic_gaussian",
                likelihood_std=1.0,
            )
            cell[part] = float(-pred.log_prob(parts[part][1]).mean())
        return cell
    finally:
        heteroscedastic.LEAST_NOISE, heteroscedastic.UNIT_NOISE = before


def page(found: dict[str, Any]) -> str:
    """docs/distance.md: words around tables of means over seeds."""
    text = (Path(__file__).parent / "distance_page.md").read_text()
    tables = {"main": main_table(found["rows"]), "fresh": main_table(found["fresh"])}
    longer = json.loads(
        (ROOT / "lab" / "results" / "defaults" / "noise.json").read_text()
    )
    tables |= {
        "floors": floor_table(found["floors"]),
        "longer": longer_table(longer["cells"]),
    }
    return text.format(**tables, command=longer["about"]["command"], **found["about"])


def mean(cells: list[dict[str, Any]], field: str, **where: Any) -> float:
    return float(
        np.mean([c[field] for c in cells if all(c[k] == v for k, v in where.items())])
    )


def shown(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0e}".replace("e+0", "e")


def main_table(rows: list[dict[str, Any]]) -> str:
    sets = list(dict.fromkeys(r["set"] for r in rows))
    methods = list(dict.fromkeys((r["method"], r["far"]) for r in rows))
    names = [f"{method}{', distance' if near else ''}" for method, near in methods]
    lines = [["set", *names]]
    for name in sets:
        cells = []
        for method, near in methods:
            of = {"set": name, "method": method, "far": near}
            nll = [shown(mean(rows, f, **of)) for f in ("test_nll", "far_nll")]
            found = [
                f"{mean(rows, f, **of):.2f}".lstrip("0")
                for f in ("far_auroc", "other_auroc")
            ]
            cells.append(" / ".join(nll) + "; " + " / ".join(found))
        lines.append([name, *cells])
    return "\n".join(markdown(lines))


def floor_table(cells: list[dict[str, Any]]) -> str:
    sets = list(dict.fromkeys(c["set"] for c in cells))
    bounds = [
        {"floor": floor, "unit": unit}
        for floor, unit in dict.fromkeys((c["floor"], c["unit"]) for c in cells)
    ]
    lines = [["set", *(f"floor {b['floor']:g}, unit {b['unit']:g}" for b in bounds)]]
    for name in sets:
        pairs = [
            [mean(cells, part, set=name, **b) for part in ("validation", "far")]
            for b in bounds
        ]
        lines.append([name, *(" / ".join(map(shown, pair)) for pair in pairs)])
    lines.append(
        ["mean, validation", *(shown(mean(cells, "validation", **b)) for b in bounds)]
    )
    return "\n".join(markdown(lines))


def longer_table(cells: list[dict[str, Any]]) -> str:
    """Means over the regression tasks of benchmarks/defaults.py, for each rule, method and start."""
    rules = [
        {"floor": f, "unit": u}
        for f, u in dict.fromkeys((c["floor"], c["unit"]) for c in cells)
    ]
    lines = [["method", *(f"floor {r['floor']:g}, unit {r['unit']:g}" for r in rules)]]
    names = {
        "plain": "plain",
        "r1n-0.2": "rank-1 Normal",
        "mf-he-flip-t0.01": "mean-field",
    }
    for candidate, method in names.items():
        for start, words in (("scratch", "from scratch"), ("trained", "trained on")):
            of = {"candidate": candidate, "start": start}
            pairs = [
                [
                    shown(mean(cells, f"validation_{what}", **of, **rule))
                    for what in ("nll", "shifted_nll")
                ]
                for rule in rules
            ]
            lines.append([f"{method}, {words}", *map(" / ".join, pairs)])
    return "\n".join(markdown(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "confirm", "page"])
    parser.add_argument("--data", type=Path, help="folder of the UCI sets, <name>.npz")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "lab" / "results" / "far.json"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "run":
        run(chosen.data, chosen.out)
    elif chosen.what == "confirm":
        confirm(chosen.data, chosen.out)
    else:
        (ROOT / "docs" / "distance.md").write_text(
            page(json.loads(chosen.out.read_text()))
        )


if __name__ == "__main__":
    main()
