"""experiments/health: the script from raw text files to the table in its page, in a few seconds, and the records that are kept."""

import importlib.util
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_health import HEAD

import slimbayes as sb
from slimbayes.data import Dataset, Split
from slimbayes.models.health import VARIANTS
from slimbayes.report.record import read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "health"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("health_physionet", FOLDER / "physionet.py")
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["health_physionet"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    yield module
    del sys.modules["health_physionet"]


def write_stays(root: Path, count: int = 24) -> Path:
    """The challenge's own text files, with hearts that beat faster in those who die."""
    draw, folder = random.Random(0), root / "physionet2012"
    for number, letter in enumerate("abc"):
        (folder / f"set-{letter}").mkdir(parents=True)
        rows = []
        for record in range(100 * number, 100 * number + count):
            dies = draw.random() < 0.4
            lines = "".join(f"{h:02}:15,HR,{draw.gauss(110 if dies else 80, 10):.0f}\n" for h in range(0, 48, 3))
            (folder / f"set-{letter}" / f"{record}.txt").write_text(
                f"Time,Parameter,Value\n00:00,RecordID,{record}\n00:00,Age,60\n{lines}"
            )
            rows.append(f"{record},1,1,1,-1,{dies:d}\n")
        (folder / f"Outcomes-{letter}.txt").write_text(HEAD + "".join(rows))
    return root


def test_from_text_files_to_a_table(script: Any, tmp_path: Path) -> None:
    root, out, page = write_stays(tmp_path / "data"), tmp_path / "out", tmp_path / "README.md"
    page.write_text("Before\n<!-- physionet -->\nold\n<!-- end physionet -->\nafter\n")
    small = [
        "--units",
        "4",
        "--hidden",
        "4",
        "--embedding",
        "4",
        "--epochs",
        "2",
        "--batch",
        "8",
        "--samples",
        "4",
        "--bag-hours",
        "12",
    ]
    names = ["deterministic", "rank-1 Gaussian"]
    command = [
        sys.executable,
        str(FOLDER / "physionet.py"),
        "run",
        "--data",
        str(root),
        "--out",
        str(out),
        "--seeds",
        "0",
        "1",
        "--variants",
        *names,
        *small,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [read(file) for file in sorted(out.glob("*.json"))]
    assert [(r.method, r.seed) for r in records] == [(name, seed) for name in names for seed in (0, 1)]
    assert all(str(tmp_path) not in file.read_text() for file in out.glob("*.json"))
    for record in records:
        assert [e.role for e in record.evaluations] == ["validation", "test"] and len(record.curve) == 2
        assert {"nll", "aucpr", "auroc", "ece"} == set(record.evaluations[1].metrics) and record.evaluations[
            1
        ].rows == 24
        assert record.evaluations[1].draws == (1 if record.method == "rank-1 Gaussian" else 4)  # four samples in all
    text = script.write_table(out, page)
    assert page.read_text() == f"Before\n<!-- physionet -->\n{text}\n<!-- end physionet -->\nafter\n"
    mean = sum(float(r.evaluations[1].metrics["nll"]) for r in records[:2]) / 2
    assert f"| {mean:.4f} ± " in text.split("\n")[2] and "rank-1 Cauchy" not in text
    deaths = records[0].config["deaths"]
    constant = -sum(
        p * math.log(q) for p, q in ((deaths["test"], deaths["train"]), (1 - deaths["test"], 1 - deaths["train"]))
    )
    assert f"*{constant:.4f}*" in text.split("\n")[-1]


def toy(rows: int = 60) -> Dataset:
    """One token decides."""
    y = torch.arange(rows) % 2
    x = (1 + y.int())[:, None, None].expand(rows, 3, 2).contiguous()
    return Dataset(
        "toy", {name: Split(x, y) for name in ("train", "validation", "test")}, ("survived", "died"), ("", "a", "b")
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_what_is_easy(script: Any, variant: str) -> None:
    settings = script.Settings(
        units=8, hidden=8, embedding=8, epochs=12, batch=10, rate=3e-2, samples=8, annealed=100.0
    )
    record = script.run(variant, 0, toy(), settings, "none")
    test = record.evaluations[1].metrics
    assert float(test["auroc"]) > 0.99 and float(test["nll"]) < 0.5 * math.log(2), test
    assert len(record.curve) == 12 and record.parameters.total >= record.parameters.plain
    best = min(float(row["validation_nll"]) for row in record.curve)
    if variant in (
        "deterministic",
        "BatchEnsemble",
        "deep ensemble",
    ):  # without draws the kept epoch gives its score again
        assert float(record.evaluations[0].metrics["nll"]) == pytest.approx(
            best, rel=1e-3
        )  # close to zero, where it is the smaller of rounding and 1 - p


def test_scores_against_plain_formulas(script: Any) -> None:
    torch.manual_seed(0)
    data = toy()
    net = sb.bayesianize(sb.models.mortality_lstm(3, 4, 4, 4), VARIANTS["deterministic"])
    split = Split(data.test.x, torch.randint(0, 2, (60,)))
    found = script.scores(net, split, draws=1)
    p, y = torch.sigmoid(net(split.x)).double().detach(), split.y
    assert found["nll"] == pytest.approx(float(-(y * p.log() + (1 - y) * (1 - p).log()).mean()), abs=1e-6)
    pairs = p[y == 1][:, None] - p[y == 0]
    assert found["auroc"] == pytest.approx(float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean()), abs=1e-6)


def test_the_page_shows_the_kept_records(script: Any) -> None:
    files = sorted((ROOT / "results" / "health").glob("physionet2012-*.json"))
    if not files:
        pytest.skip("NOT CHECKED: results/health holds no records of the experiment.")
    records = [read(file) for file in files]
    assert {r.method for r in records} == set(VARIANTS) and script.table(records) in (FOLDER / "README.md").read_text()
    for file in files:
        assert not any(word in json.dumps(json.loads(file.read_text())) for word in ("/tmp", "/home", "/root"))
