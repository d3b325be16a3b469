"""Peak memory of work on many rows.

    python benchmarks/memory.py --what library|cli [--rows 1000000] [--train-rows 5000000] [--out FILE]

"library": `predict` without samples on that many rows, in one tensor and in batches made on the way.
"cli": a run is trained on a small table; then `slimbayes predict` reads a csv of that many rows and writes a csv, a
JSON file and an archive, and a table of `train-rows` rows is read as for training. Each measurement runs in a process
of its own. Peaks are the process's (VmHWM), in MiB; "above" is what is left without the peak of the same process on a
hundred rows: interpreter, torch, lab and model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, CLASSES, COLUMNS = 8, 10, 4
PEAK = "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
FIT = """
import sys, torch
from pathlib import Path
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.configs.files import validate
from slimbayes_lab.execution import Execution
from slimbayes_lab.runs.fit import fit
x, y = torch.randn(400, {features}), torch.arange(400) % {classes}
data = Dataset("mine", {{"train": Split(x[:300], y[:300]), "test": Split(x[300:], y[300:])}})
tree = {{"name": "memory", "data": {{"name": "mine"}}, "model": {{"kind": "mlp", "hidden": [32]}},
        "method": {{"kind": "Rank1", "members": 2}}, "train": {{"epochs": 1, "batch": 100,
        "optimizer": {{"kind": "AdamW", "lr": 0.01}}}}, "evaluate": {{"examples": 0}}}}
fit(validate(tree), Path(sys.argv[1]), Execution(accelerator="cpu", workers=0), dataset=data)
"""
LIBRARY = """
import sys, torch, slimbayes as sb
from torch import nn
rows, whole = int(sys.argv[1]), sys.argv[2] == "tensor"
layers = (nn.Linear({features}, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, {classes}))
model = sb.bayesianize(nn.Sequential(*layers), sb.Rank1(members=4))
pieces = (torch.randn(min(1024, rows - start), {features}) for start in range(0, rows, 1024))
pred = sb.predict(model, torch.randn(rows, {features}) if whole else pieces, keep_samples=False, seed=0)
print(sum(t.numel() * t.element_size() for t in (pred.by_member, pred.aleatoric, pred.epistemic)))
"""
PREDICT = """
import sys
from pathlib import Path
from slimbayes_lab.finished.predict_file import predict_file
predict_file(*map(Path, sys.argv[1:4]), draws=2, accelerator="cpu")
"""
READ = """
import sys
from slimbayes_lab.data import load
load("uci/year", sys.argv[1])
"""
TRAIN = """
import sys
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.tasks.task import open_task
open_task(Data(name="uci/year"), sys.argv[1])
"""


def measured(code: str, *words: object) -> dict[str, float]:
    """Seconds and peak memory of a program."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code + PEAK, *map(str, words)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    *printed, peak = map(int, done.stdout.split())
    spent = {
        "seconds": round(time.perf_counter() - start, 1),
        "peak": round(peak / 1024, 1),
    }
    return spent | ({"printed": printed[0]} if printed else {})


def write_rows(file: Path, rows: int, columns: int, names: bool) -> Path:
    source = np.random.default_rng(0)
    with open(file, "w") as stream:
        stream.write(",".join(f"c{i}" for i in range(columns)) + "\n" if names else "")
        for start in range(0, rows, 10_000):
            block = source.normal(size=(min(10_000, rows - start), columns))
            stream.writelines(
                ",".join(f"{v:.6g}" for v in line) + "\n" for line in block.tolist()
            )
    return file


def library(rows: int, train_rows: int) -> dict[str, Any]:
    """Rows through `predict`; "above" is also without the inputs and the result."""
    found: dict[str, Any] = {"rows": rows, "torch": measured("import torch\n")}
    for form in ("tensor", "batches"):
        code = LIBRARY.format(features=FEATURES, classes=CLASSES)
        least, most = measured(code, 100, form), measured(code, rows, form)
        inputs = 4 * rows * FEATURES / 2**20 if form == "tensor" else 0.0
        held = inputs + most.pop("printed", 0.0) / 2**20
        above = round(most["peak"] - least["peak"] - held, 1)
        found[form] = {
            "least": least["peak"],
            **most,
            "inputs and result": round(held, 1),
            "above": above,
        }
    return found


def cli(rows: int, train_rows: int) -> dict[str, Any]:
    """Rows through the command line's own functions."""
    found: dict[str, Any] = {
        "rows": rows,
        "train_rows": train_rows,
        "torch": measured("import torch\n"),
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        measured(FIT.format(features=FEATURES, classes=CLASSES), folder / "run")
        small, large = (
            write_rows(folder / f"{n}.csv", n, FEATURES, False) for n in (100, rows)
        )
        for kind in ("csv", "json", "npz"):
            least = measured(PREDICT, folder / "run", small, folder / f"p.{kind}")
            most = measured(PREDICT, folder / "run", large, folder / f"p.{kind}")
            above = {"above": round(most["peak"] - least["peak"], 1)}
            found[f"predict to {kind}"] = {"least": least["peak"], **most, **above}
        for count in (1000, train_rows):
            (folder / str(count) / "uci").mkdir(parents=True)
            write_rows(folder / str(count) / "uci" / "year.csv", count, COLUMNS, True)
        for name, code in (
            ("read a table", READ),
            ("read and split it for training", TRAIN),
        ):
            least, most = (
                measured(code, folder / str(count)) for count in (1000, train_rows)
            )
            found[name] = {
                "least": least["peak"],
                **most,
                "above": round(most["peak"] - least["peak"], 1),
            }
    return found


WHAT: dict[str, Callable[[int, int], dict[str, Any]]] = {"library": library, "cli": cli}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=list(WHAT), required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--train-rows", type=int, default=5_000_000)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    text = json.dumps(
        {chosen.what: WHAT[chosen.what](chosen.rows, chosen.train_rows)}, indent=1
    )
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
