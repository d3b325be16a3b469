"""Write `reference.safetensors`: what the library of this commit makes of all cases.

    PYTHONPATH=tests python -m reference.write

Refuses to run in a tree with uncommitted changes, and to write numbers that are not those
of the papers' equations. Its metadata say which commit they come from.
"""

import subprocess
import sys

import numpy as np
import torch
from reference import adapter, paper
from reference.cases import CASES
from reference.comparison import FILE, assert_same
from safetensors.torch import save_file


def git(*arguments: str) -> str:
    command = ["git", "-C", str(FILE.parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    if git("status", "--porcelain").strip():
        sys.exit("The tree has uncommitted changes: commit them, then write again.")
    tensors = {}
    for name, case in CASES.items():
        record = paper.make(case)
        found = adapter.compute(case, record)
        found.pop(adapter.ONE_BY_ONE, None)
        assert_same(found, paper.compute(case, record), case)
        for key, value in (record | found).items():
            tensors[f"{name}|{key}"] = value.contiguous().clone()
    metadata = {
        "commit": git("rev-parse", "HEAD").strip(),
        "library": git("log", "-1", "--format=%H", "--", "../../src").strip(),
        "gone": " ".join(name for name, case in CASES.items() if case.gone),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    save_file(tensors, FILE, metadata)
    size = FILE.stat().st_size / 2**20
    print(f"{len(CASES)} cases, {len(tensors)} tensors, {size:.2f} MiB: {FILE}")


if __name__ == "__main__":
    main()
