"""Reproducing a table or a figure of a paper: run its rows, write what their records say beside the paper's numbers.

    reproduce("rank1/table2", Path("runs/table2"), Execution(data_dir=data), scale="small", seeds=[0, 1, 2])

    out/<name>-<hash>/             the run of a row and a seed (runs/folder.py); rows that share a config share a run
    out/diagnostics/               what diagnostics found, and their plots
    out/table.md, out/table.json   written anew after each run
    out/page.html                  of a figure: the report of its runs, with curves and scores by severity

Runs that have finished are skipped and others resumed, so it can be stopped at any time and called again. A row that
fails is named in the table and does not stop the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimbayes.errors import brief
from slimbayes.files import claim_folder, write_json
from slimbayes.untrusted import parse_json, read_file
from slimbayes_lab.configs.files import Scale
from slimbayes_lab.data.uci import standard_splits
from slimbayes_lab.execution import Execution
from slimbayes_lab.finished.diagnose import Case
from slimbayes_lab.papers.diagnostics import diagnose
from slimbayes_lab.papers.rows import PaperRow, find
from slimbayes_lab.papers.table import (
    Numbers,
    Reproduction,
    RowResult,
    describe_setting,
    draws_of,
    failure_lines,
    scores_of_record,
)
from slimbayes_lab.report.record import Evaluation, read
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.folder import default_folder
from slimbayes_lab.runs.training import Stopped
from slimbayes_lab.runs.watchers import Watcher


class Incomplete(RuntimeError):
    """Some rows failed; the table has the others, and the message says why."""


def reproduce(
    name: str,
    out: Path | None = None,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    scale: Scale = "full",
    seeds: Sequence[int] = (0,),
    watcher: Watcher = Watcher(),  # noqa: B008 (it keeps nothing)
    folders: Sequence[Path] | None = None,
) -> Path:
    """Run the rows of a table or figure and write the table.

    Args:
        name: "<paper>/<table or figure>", or that and "/<row>" for a single row.
        out: folder of the table; runs/<name> by default.
        scale: "small" lays each row's `small` values over its config.
        seeds: a run for each; of regressions on standard splits, seed s is split s, as far as a set has them.
        folders: where experiments are looked for, as in `find`.

    Returns: the folder, which holds `table.md` and `table.json`.

    Raises:
        FileExistsError: the folder holds files of these names that `reproduce` did not write.
        Incomplete: a row failed; the table is written all the same.
        Stopped: the run was asked to stop; call again to go on.
    """
    if not seeds:
        raise ValueError("reproduce needs at least one seed, got none.")
    table = Reproduction(name, scale, find(name, folders))
    out = out or Path("runs") / "/".join(table.rows[0].name.split("/")[:2])
    claim_folder(out, ("table.md", "table.json", "page.html", "diagnostics"))
    table.write(out)
    asked = [
        (row, seed)
        for row in table.rows
        for seed in dict.fromkeys(seeds)
        if seed < _splits(row, scale)
    ]
    for row, seed in asked:
        watcher.say(f"{row.name}, seed {seed}")
        try:
            table.results.append(_run(row, seed, out, execution, scale, watcher))
        except Stopped:
            raise
        except Exception as error:  # whatever it is, the other rows can still be run
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            table.failures[f"{row.stem}, seed {seed}"] = reason
            watcher.say(f"{row.name}, seed {seed}, failed: {reason}")
        table.write(out)
    _draw(table, out, watcher)
    if table.failures:
        told = " ".join(failure_lines(table.failures))
        raise Incomplete(f"{len(table.failures)} of {len(asked)} runs failed: {told}")
    return out


def _splits(row: PaperRow, scale: Scale) -> float:
    """How many standard splits a row's data have; seeds beyond them are passed over."""
    if not row.trains or row.paper.repeat != "data.split":
        return math.inf
    return standard_splits(row.experiment(scale).data.name)


def _draw(table: Reproduction, out: Path, watcher: Watcher) -> None:
    """Curves, scores by severity and their spread over corruption types of a figure's runs: a page beside its table."""
    folders = list(
        dict.fromkeys(
            result.folder for result in table.results if result.folder is not None
        )
    )
    if not folders or table.rows[0].paper.figure is None:
        return
    try:
        from slimbayes_lab.report import write_page

        write_page(
            folders, out / "page.html", f"{table.name}: {table.rows[0].paper.place}"
        )
    except ImportError as error:
        watcher.say(f"The page with the figure's charts is left out: {error}")


def _run(
    row: PaperRow,
    seed: int,
    out: Path,
    execution: Execution,
    scale: Scale,
    watcher: Watcher,
) -> RowResult:
    if not row.trains:
        case = Case(None, 1, seed, row.paper.options, execution)
        found, files = _diagnosed(row, case, out, f"{row.stem}-{seed}", "")
        return RowResult(row, seed, _numbers(found), files=files)
    experiment = row.experiment(scale, seed)
    folder = default_folder(experiment, out)
    fit(experiment, folder, execution, resume=True, watcher=watcher)
    record = read(folder)
    draws = draws_of(record, row.paper.draws)
    case = Case(folder, draws, seed, row.paper.options, execution)
    found, files = _diagnosed(
        row, case, out, f"{row.stem}-{seed}-{experiment.hash}", record.digest
    )
    if "corruption" in found:  # as if the record had them
        more = [
            Evaluation.model_validate(one) for one in found["corruption"]["details"]
        ]
        record = record.model_copy(update={"evaluations": [*record.evaluations, *more]})
    numbers = scores_of_record(record, draws) | _numbers(found)
    return RowResult(
        row, seed, numbers, record, folder, describe_setting(experiment, scale), files
    )


def _numbers(found: Mapping[str, Any]) -> Numbers:
    return {
        name: number
        for one in found.values()
        for name, number in one["numbers"].items()
    }


def _diagnosed(
    row: PaperRow, case: Case, out: Path, stem: str, digest: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What each of a row's diagnostics found, numbers and details, and the files that hold it; what an earlier call
    found of the same run is read again.
    """
    every: dict[str, Any] = {}
    files = []
    for name in row.paper.diagnostic:
        file = out / "diagnostics" / f"{stem}-{name}.json"
        key: dict[str, Any] = {
            "digest": digest,
            "options": case.options,
            "draws": case.draws,
        }
        found = _earlier(file, key)
        if found is None:
            file.parent.mkdir(exist_ok=True)
            mine, details = diagnose(
                name, replace(case, picture=file.with_suffix(".png"))
            )
            found = {**key, "numbers": mine, "details": details}
            write_json(file, found)
        every[name] = found
        files += [
            str(path.relative_to(out))
            for path in (file, file.with_suffix(".png"))
            if path.exists()
        ]
    return every, tuple(files)


def _earlier(file: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier call found of the same; None where the file is no such finding."""
    try:
        found: dict[str, Any] = parse_json(read_file(file))
        numeric = all(
            isinstance(number, int | float) for number in found["numbers"].values()
        )
        return (
            found
            if numeric and all(found[name] == value for name, value in key.items())
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def parse_seeds(text: str) -> list[int]:
    """Seeds from a command line: "0-3,7" is [0, 1, 2, 3, 7]."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        raise ValueError(
            f"--seeds takes whole numbers and ranges of them, such as 0,1,2 or 0-9, got {brief(text)}."
        )
    parts = [part.partition("-") for part in text.split(",")]
    return [
        seed
        for first, _, last in parts
        for seed in range(int(first), int(last or first) + 1)
    ]
