"""A built wheel or source distribution in a fresh environment, outside of the checkout: library, command, completion.

    python lab/tests/installed.py torch==2.13.0 dist         # needs the network; `make release-check`

test_package.py does what takes little of it, with the packages that are installed already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SMALLEST = Path(__file__).resolve().parents[2] / "tests" / "smallest_install.py"
ROWS = "".join(
    f"{i % 7},{i % 5},{0.5 * (i % 7) - i % 5 + i / 100}\n" for i in range(60)
)


def run(folder: Path, *words: object) -> str:
    """What a command prints; one that fails is told with what it said."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "SLIMBAYES"))
    }
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, words))} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
    return done.stdout


def check_command(bin: Path, folder: Path) -> None:
    """A config for a csv, configs that came along, the module, completion for a shell: what needs no torch."""
    slimbayes = bin / "slimbayes"
    (folder / "mine.csv").write_text("width,height,price\n" + ROWS)
    run(folder, slimbayes, "init", "mine.csv", "--target", "price")
    run(folder, slimbayes, "config", "check", "mine.yaml")
    tables = run(folder, bin / "python", "-m", "slimbayes_lab", "reproduce", "--list")
    assert "rank1/table2" in tables, tables
    script = run(
        folder, "bash", "-c", f"{slimbayes} --show-completion; exit $?"
    )  # for the shell that calls it
    assert "complete -o default -F _slimbayes_completion slimbayes" in script, script


def check_run(bin: Path, folder: Path) -> None:
    """From that csv to predictions."""
    run(
        folder,
        bin / "slimbayes",
        "fit",
        "mine.yaml",
        "--out",
        "run",
        "--set",
        "train.epochs=1",
    )
    run(
        folder,
        bin / "slimbayes",
        "predict",
        "run",
        "mine.csv",
        "-o",
        "out.csv",
        "--level",
        "0.9",
    )
    header, *rows = (folder / "out.csv").read_text().splitlines()
    assert len(rows) == 60 and {"mean", "std", "low", "high"} <= set(
        header.split(",")
    ), header


def main(torch: str, dist: str) -> None:
    """Try both wheels together, then both source distributions."""
    for pattern in ("*.whl", "*.tar.gz"):
        built = [file.resolve() for file in sorted(Path(dist).glob(pattern))]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            venv.create(folder / "venv", with_pip=True)
            python = folder / "venv" / "bin" / "python"
            run(folder, python, "-m", "pip", "install", "--quiet", torch, *built)
            where = run(
                folder, python, "-c", "import slimbayes; print(slimbayes.__file__)"
            ).strip()
            assert Path(where).is_relative_to(folder.resolve()), where
            run(folder, python, "-I", SMALLEST)
            check_command(python.parent, folder)
            check_run(python.parent, folder)
        print(f"{', '.join(file.name for file in built)} work in a fresh environment")


if __name__ == "__main__":
    main(*sys.argv[1:])
