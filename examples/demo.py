"""The lab in three minutes: five methods on small digits, corrupted test data, and a report to open.

python examples/demo.py [--out demo] [--epochs 40]
"""

import argparse
import time
from pathlib import Path

from rich.console import Console

from slimbayes.lab.bars import Bars
from slimbayes.lab.config_files import load, read_tree
from slimbayes.lab.config_rows import row_names
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import fit
from slimbayes.report import compare, write_page

CONFIGS = Path(__file__).parents[1] / "experiments" / "demo" / "digits.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--epochs", type=int)
    args = parser.parse_args()
    start, console, runs = time.perf_counter(), Console(), []
    changes = [f"train.epochs={args.epochs}"] if args.epochs else []
    for row in row_names(read_tree(CONFIGS)):
        experiment = load(f"{CONFIGS}#{row}", changes)
        with Bars(f"{experiment.name:14}", Console(stderr=True)) as bars:
            runs.append(
                fit(
                    experiment,
                    args.out / f"{row}-{experiment.hash}",
                    Execution(accelerator="cpu", workers=0),
                    resume=True,
                    watcher=bars,
                )
            )
    for on in ("test", "corrupted"):
        console.print(compare(runs, on=on, metrics=("accuracy", "nll", "ece")).render())
    page = write_page(runs, args.out / "report.html", "Five ways to know what one does not know")
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s. Open [bold]{page}[/] in a browser.")


if __name__ == "__main__":
    main()
