"""The lab in a minute and a half: five methods on small digits, three seeds each, corrupted test data, and a report.

python examples/demo.py [--out demo] [--epochs 30] [--seeds 3] [--jobs 2]
"""

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from slimbayes_lab.configs.files import load, read_tree, row_names
from slimbayes_lab.execution import Execution
from slimbayes_lab.report import compare, write_page
from slimbayes_lab.report.groups import load as load_records
from slimbayes_lab.report.tables import reasons
from slimbayes_lab.runs.fit import fit

from slimbayes.files import claim_folder

CONFIGS = Path(__file__).parents[1] / "lab" / "experiments" / "demo" / "digits.yaml"
WIDE = 140  # columns of a terminal


def run(place: str, changes: Sequence[str], out: Path) -> Path:
    """Train and judge one row of the table with one seed, or find that it is done."""
    experiment = load(place, changes)
    folder = out / f"{place.partition('#')[2]}-{experiment.hash}"
    return fit(experiment, folder, Execution(accelerator="cpu", workers=0), resume=True)


def run_all(
    seeds: int, changes: Sequence[str], out: Path, jobs: int, console: Console
) -> list[Path]:
    """Every row with every seed, some at a time."""
    rows = row_names(read_tree(CONFIGS))
    work = [
        (f"{CONFIGS}#{row}", [*changes, f"seed={seed}"], out)
        for seed in range(seeds)
        for row in rows
    ]
    runs: list[Path] = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        results = (
            pool.map(run, *zip(*work, strict=True))
            if jobs > 1
            else (run(*one) for one in work)
        )
        for (place, told, _), folder in zip(work, results, strict=True):
            runs.append(folder)
            console.print(
                f"{len(runs):2} of {len(work)}: {place.partition('#')[2]}, {told[-1]}",
                highlight=False,
            )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    start, console = time.perf_counter(), Console()
    changes = [f"train.epochs={args.epochs}"] if args.epochs else []
    claim_folder(args.out, ["report.html"])  # one that is there already is ours
    runs = run_all(args.seeds, changes, args.out, args.jobs, console)
    for on in ("test", "corrupted", "ood"):
        metrics = ("auroc",) if on == "ood" else ("accuracy", "nll", "ece")
        baseline = (
            "plain" if console.width >= WIDE else None
        )  # differences take as much room again
        console.print(compare(runs, on=on, baseline=baseline, metrics=metrics).render())
    for note in reasons(load_records(runs).groups):
        console.print(note, highlight=False)
    page = write_page(
        runs, args.out / "report.html", "Five ways to know what one does not know"
    )
    console.print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Open [bold]{page}[/] in a browser."
    )


if __name__ == "__main__":
    main()
