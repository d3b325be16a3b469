"""Planted bugs: does the suite see them?

    python tests/mutations.py                      all of them, each against the tests named beside it
    python tests/mutations.py kl-normal tie        some of them
    python tests/mutations.py --full-contract      with every method x layer x property, not the covering array
    python tests/mutations.py --out found.json     the same as JSON
    python tests/mutations.py --check              only look which mutations have lost their text

A mutation is a text of the source and what takes its place; the text must occur exactly once, and a mutation whose text
is gone is reported as stale, since it tests nothing any more. The source is copied, one bug is planted, and tests run
until the first failure. A survivor is a line that no test needs: write the test, or delete the line.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds for the tests of one mutation


@dataclass
class Outcome:
    """What became of a mutation: caught, survived or stale, and the test that caught it."""

    name: str
    file: str
    result: str
    test: str = ""
    seconds: float = 0.0


def place_of(mutation: Mutation, source: Path) -> Path | None:
    """The one file that holds a mutation's text once, wherever it has moved to."""
    found = [
        file
        for file in sorted(source.rglob("*.py"))
        if mutation.old in file.read_text()
    ]
    return (
        found[0]
        if len(found) == 1 and found[0].read_text().count(mutation.old) == 1
        else None
    )


def first_failure(source: Path, tests: list[str], options: list[str], log: Path) -> str:
    """Run tests against a copy of the source until one fails: its name, or "" if none did.

    The tests run in a fork, so that torch and transformers are imported once for all mutations.
    """
    child = os.fork()
    if not child:
        _run_tests(source, tests, options, log)
    late = time.monotonic() + LIMIT
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > late:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {LIMIT} seconds"
        time.sleep(0.1)
    if done[1] == 0:
        return ""
    failed = [
        line
        for line in log.read_text().splitlines()
        if line.startswith(("FAILED", "ERROR")) and "::" in line
    ]
    if not failed:  # no test of that name, or a file of tests cannot be imported
        raise RuntimeError(f"{' '.join(tests)} did not run:\n{log.read_text()[-2000:]}")
    return failed[0].split(" - ")[0].partition(" ")[2]


def _run_tests(
    source: Path, tests: list[str], options: list[str], log: Path
) -> NoReturn:
    """What the fork does; it must not return into the parent's code."""
    code = 1
    try:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ["PYTHONPATH"] = str(source)
        sys.path.insert(0, str(source))
        sys.dont_write_bytecode = (
            True  # a mutation and its undoing may be of one size and one second
        )
        import pytest

        fixed = ["-q", "-x", "-p", "no:xdist", "--tb=no"]
        early = [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]  # of what was imported before the fork
        code = int(pytest.main([*fixed, *early, *options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def plant(mutation: Mutation, source: Path, options: list[str]) -> Outcome:
    """Plant one bug, run the tests that should see it, and take it out again."""
    file, start = place_of(mutation, source), time.monotonic()
    if file is None:
        return Outcome(mutation.name, "", "stale")
    text = file.read_text()
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        for test in mutation.tests:  # one after another: the likeliest first
            failed = first_failure(
                source, shlex.split(f"tests/{test}"), options, source / "log.txt"
            )
            if failed:
                break
    finally:
        file.write_text(text)
    where = str(file.relative_to(source / "slimbayes"))
    return Outcome(
        mutation.name,
        where,
        "caught" if failed else "survived",
        failed,
        round(time.monotonic() - start, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="mutations to run; all by default")
    parser.add_argument("--full-contract", action="store_true")
    parser.add_argument(
        "--check", action="store_true", help="plant nothing, only name the stale ones"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        help="tests to run instead of those named beside each mutation",
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if unknown := set(given.names) - {m.name for m in MUTATIONS}:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}")
    if given.check:
        stale = [m.name for m in MUTATIONS if place_of(m, ROOT / "src") is None]
        print(
            f"{len(stale)} of {len(MUTATIONS)} mutations are stale: {', '.join(stale) or 'none'}"
        )
        return int(bool(stale))
    os.chdir(ROOT)
    import torch  # noqa: F401 (before the forks)
    import transformers.pytorch_utils  # noqa: F401

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(
            ROOT / "src" / "slimbayes",
            source / "slimbayes",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for mutation in [
            m for m in MUTATIONS if not given.names or m.name in given.names
        ]:
            chosen = Mutation(
                mutation.name,
                mutation.old,
                mutation.new,
                *(given.tests or mutation.tests),
            )
            outcomes.append(
                plant(
                    chosen, source, ["--full-contract"] if given.full_contract else []
                )
            )
            last = outcomes[-1]
            print(
                f"{last.result:9} {last.name:22} {last.seconds:6.1f} s  {last.file:28} {last.test}",
                flush=True,
            )
            if given.out:
                given.out.write_text(
                    json.dumps([asdict(o) for o in outcomes], indent=1) + "\n"
                )
    kinds = [o.result for o in outcomes]
    print(
        ", ".join(
            f"{kinds.count(kind)} {kind}" for kind in ("caught", "survived", "stale")
        )
    )
    return int(set(kinds) != {"caught"})


if __name__ == "__main__":
    raise SystemExit(main())
