"""What the EMP paper leaves open about its regressions, each reading tried in turn on the set that is shipped.

    python experiments/emp/variants.py                                         about 15 minutes on one core

Writes results/emp/variants.json: one record of regression.py for each reading.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from readers import read
from regression import Job, Setting, experiment, write
from tables import METHODS, RESULTS, show_variants

VARIANTS: dict[str, dict[str, Any]] = {
    "as in the tables": {},
    "loss tau/2 of the squared error, tau = 0.1": {"fit_precision": 0.1},
    "weight decay 0.01 / batch size": {"weight_decay": 1e-4},
    "decoupled weight decay": {"decay": "decoupled"},
    "members trained separately": {"members": "sum"},
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Readings of the EMP paper's regressions.")
    parser.add_argument("--data", default="yacht")
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=Setting.epochs)
    parser.add_argument("--draws", type=int, default=Setting.draws)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "variants.json")
    args = parser.parse_args(argv)
    table, base = read(args.data, args.data_dir), Setting(epochs=args.epochs, draws=args.draws)
    records: dict[str, Any] = {}
    for name, changes in VARIANTS.items():
        print(f"\n{name}")
        methods = ("Ensemble",) if "members" in changes else METHODS  # the others have one member
        jobs = [
            Job(table, index, method, replace(base, **changes), args.seed)
            for index in args.splits
            for method in methods
        ]
        records[name] = experiment(jobs, args.workers)
        write({"variants": records}, args.out)
    print(f"\n{show_variants({'variants': records})}\n\nwritten to {args.out}")
    return records


if __name__ == "__main__":
    main()
