"""`slimbayes data`: what data sets are there, whether they are the published ones, and their cache.

    slimbayes data list     --data-dir ~/data
    slimbayes data check    mnist --data-dir ~/data      exit code 1 where counts differ from the published ones
    slimbayes data prepare  cifar10 --data-dir ~/data

torch and the readers are imported when a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slimbayes.data.catalog import Facts

app = typer.Typer(help="Data sets on disk: list them, check them, keep them as arrays.", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="SLIMBAYES_DATA", help="Folder that holds the data sets.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Name = Annotated[
    str, typer.Argument(help='A data set, such as "mnist" or "uci/yacht"; `list` names those that are there.')
]
_FILES = 12  # shown of a set
_BROKEN = 2


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors of users and of their files as one line, and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        text = (
            f"{error.strerror}" if isinstance(error, OSError) and error.strerror and not error.filename else str(error)
        )
        typer.echo(f"Error: {' '.join(text.split())}", err=True)
        raise typer.Exit(_BROKEN) from error


@app.command("list")
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Every data set that is there, with its splits."""
    with _plain_errors():
        from slimbayes.data import available
        from slimbayes.data.catalog import SOURCES, root_folder

        folder = root_folder(data_dir)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: give --data-dir the folder that holds the data sets.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here = available(folder)
    for warning in caught:
        typer.echo(f"Warning: {warning.message}", err=True)
    if as_json:
        typer.echo(json.dumps(here, indent=1))
        return
    for name, splits in here.items():
        more = f" and {len(splits) - 6} more" if len(splits) > 6 else ""
        typer.echo(f"{name:<32} {', '.join(splits[:6])}{more}")
    absent = [name for name in SOURCES if name not in here]
    typer.echo(f"\n{len(here)} of {len(SOURCES)} known sets are in {folder}. Not there: {', '.join(absent) or 'none'}.")


@app.command()
def check(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Read a set in full and compare it with what was published; exit code 1 where it differs."""
    with _plain_errors():
        from slimbayes.data.catalog import inspect

        facts = inspect(name, data_dir)
    typer.echo(json.dumps(asdict(facts), indent=1) if as_json else _report(facts))
    if facts.differences:
        raise typer.Exit(1)


def _report(facts: Facts) -> str:
    lines = [facts.name]
    for split, rows in facts.rows.items():
        counts = facts.classes.get(split, {})
        spread = f", {min(counts.values()):,} to {max(counts.values()):,} in each of {len(counts)} classes"
        lines.append(f"  {split}: {rows:,} rows" + (spread if counts else ""))
    sums = [f"  sha256 {digest}  {file}" for file, digest in facts.sha256.items()]
    lines += sums[:_FILES] or ["  (images are counted, not read: no sha256)"]
    lines += [f"  and {len(sums) - _FILES:,} more files: --json lists them"] if len(sums) > _FILES else []
    lines += [f"DIFFERS {line}" for line in facts.differences] or ["Rows and class balance are as published."]
    return "\n".join(lines)


@app.command()
def prepare(
    name: Name,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder; <data-dir>/.slimbayes-cache/<name> by default.")] = None,
) -> None:
    """Keep a set as arrays that are mapped into memory instead of read."""
    with _plain_errors():
        from slimbayes.data import prepare as prepare_
        from slimbayes.lab.bars import Bars

        with Bars(name) as bars:

            def show(done: int, total: int, split: str) -> None:
                if not done:
                    bars.begin("as arrays", total)
                bars.move(done, split)

            folder = prepare_(name, data_dir, out, show)
    typer.echo(str(folder))
