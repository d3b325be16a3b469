"""Commands about a finished run: look at it, make another of it, predict with it; and those about data sets.

torch and the readers are imported when a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from slimbayes_lab.data.catalog import Facts


DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the data sets; $SLIMBAYES_DATA by default."),
]
Accelerator = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunFolder = Annotated[Path, typer.Argument(help="Run directory.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the file if it is there already.")
]


def _allow(ctx: typer.Context, allowed: bool) -> bool:
    """Let code run as long as the command does."""
    from slimbayes_lab.configs.own import code_allowed

    ctx.with_resource(code_allowed(allowed))
    return allowed


_TRUST = "Trust runs whose config names code (model.python)."
AllowCode = Annotated[bool, typer.Option("--allow-code", help=_TRUST, callback=_allow)]


def print_scores(folder: Path) -> None:
    """Print what a finished run's record says about its rows and its posterior, and what to do about it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from slimbayes.diagnostics.check import lines
    from slimbayes_lab.report.metric import shown_in
    from slimbayes_lab.report.record import read

    record, console = read(folder), Console()
    rows = [e for e in record.evaluations if e.role in ("test", "shift", "ood")]
    names = [n for n in shown_in("terminal") if any(n in e.metrics for e in rows)]
    table = Table(title=Text(f"{record.name}: {record.method}"))
    for column in ("rows", "draws", *names):
        table.add_column(column, justify="right" if column != "rows" else "left")
    for e in rows:
        cells = [f"{e.metrics[n]:.4f}" if n in e.metrics else "" for n in names]
        table.add_row(Text(f"{e.data} ({e.role})"), str(e.draws), *cells)
    console.print(table)
    if found := record.diagnostics:
        for line in lines(
            dict(found), any("rmse" in e.metrics for e in record.evaluations)
        ):
            console.print(line, highlight=False, markup=False)
        if found.nonfinite_steps:
            console.print(
                f"steps that were not finite: {found.nonfinite_steps}", highlight=False
            )
        for warning in found.warnings:
            console.print(f"! {warning}", style="yellow", highlight=False, markup=False)
    print(f"record: {folder / 'record.json'}")


def diagnose(
    run: RunFolder,
    draws: Annotated[
        int, typer.Option(help="Draws of each member, for scores.", min=1, max=10_000)
    ] = 16,
    as_json: AsJson = False,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Look at a run's posterior: ELBO, calibration, k-hat; of Gaussian ones spectrum, truncation, gradient noise."""
    from slimbayes_lab.execution import Execution
    from slimbayes_lab.finished.diagnose import diagnose_run, diagnosis_lines

    found = diagnose_run(
        run, Execution(accelerator=accelerator, data_dir=data_dir), draws
    )
    typer.echo(
        json.dumps(found, indent=1) if as_json else "\n".join(diagnosis_lines(found))
    )


def stack(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run directory of an Ensemble, or of ModelPatch without cross."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="New run directory; RUN-stacked by default.")
    ] = None,
    draws: Annotated[
        int, typer.Option(help="Networks to look at, for ModelPatch.", min=1)
    ] = 200,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Weigh a run's members or components by its validation rows (stacking), and judge it again."""
    from slimbayes_lab.execution import Execution
    from slimbayes_lab.finished.stack_export import stack_run, weight_lines
    from slimbayes_lab.runs.watchers import Bars

    with Bars("stacked") as bars:
        folder, weights = stack_run(
            run, out, Execution(accelerator=accelerator, data_dir=data_dir), bars, draws
        )
    typer.echo("\n".join(weight_lines(weights)))
    print_scores(folder)


def predict(
    run: RunFolder,
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="Rows: .npy, .npz (array x), .csv, .parquet, images."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Where predictions go: .csv, .json or .npz."
        ),
    ],
    draws: Annotated[
        int, typer.Option(help="Draws of each member.", min=1, max=10_000)
    ] = 16,
    level: Annotated[
        float,
        typer.Option(
            help="Probability, by the model, that intervals of real targets hold them.",
            min=0.01,
            max=0.999,
        ),
    ] = 0.9,
    force: Force = False,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Predict rows of your own, with uncertainty."""
    from slimbayes.files import check_output
    from slimbayes_lab.finished.predict_file import predict_file

    check_output(output, force)
    rows = predict_file(run, inputs, output, draws, accelerator, level)
    typer.echo(f"{rows} prediction{'s' * (rows != 1)} in {output}")


def export(
    run: RunFolder,
    to: Annotated[
        Literal["onnx", "pt2"],
        typer.Option(help="Format: for onnxruntime, or for torch."),
    ] = "onnx",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file; ./<run>.<to> by default."),
    ] = None,
    draws: Annotated[
        int,
        typer.Option(
            help="Draws of each member; they are in the file.", min=1, max=10_000
        ),
    ] = 16,
    force: Force = False,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Write a run as one file that predicts without slimbayes."""
    from slimbayes.files import check_output
    from slimbayes_lab.configs.files import ConfigError
    from slimbayes_lab.execution import Execution
    from slimbayes_lab.finished.stack_export import export_run

    file = output or Path(f"{run.resolve().name}.{to}")
    if file.suffix != f".{to}":
        raise ConfigError(f"-o must end in .{to}, as --to says, got {file}.")
    check_output(file, force)
    made = export_run(run, file, Execution(accelerator=accelerator), draws)
    shape = " x ".join(
        "rows" if size is None else str(size) for size in made.inputs["input"]
    )
    typer.echo(f"{file}: {shape} -> {', '.join(made.outputs)}, of {made.draws} draws")


COMMANDS = (diagnose, stack, predict, export)

# --- slimbayes data: what sets are there, whether they are the published ones (exit code 1 if not), and converting them ---

app = typer.Typer(
    help="Data sets on disk: list them, check them, convert them to arrays.",
    no_args_is_help=True,
)

Name = Annotated[
    str,
    typer.Argument(
        help='A data set, such as "mnist" or "uci/yacht"; `list` names those that are there.'
    ),
]
_FILES = 12  # shown of a set


@app.command("list")
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Every data set that is there, with its splits."""
    from slimbayes_lab.data import available
    from slimbayes_lab.data.catalog import SOURCES, root_folder

    folder = root_folder(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: give --data-dir the folder that holds the data sets."
        )
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
    typer.echo(
        f"\n{len(here)} of {len(SOURCES)} known sets are in {folder}. Not there: {', '.join(absent) or 'none'}."
    )


@app.command()
def check(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Read a set in full and compare it with what was published; exit code 1 where it differs."""
    from slimbayes_lab.data.catalog import inspect

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
    lines += (
        [f"  and {len(sums) - _FILES:,} more files: --json lists them"]
        if len(sums) > _FILES
        else []
    )
    lines += [f"DIFFERS {line}" for line in facts.differences] or [
        "Rows and class balance are as published."
    ]
    return "\n".join(lines)


@app.command()
def prepare(
    name: Name,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Data folder to write <name>/ to; the --data-dir by default."
        ),
    ] = None,
) -> None:
    """Convert a set once to arrays that are mapped into memory instead of read."""
    from slimbayes_lab.data import prepare as prepare_

    typer.echo(str(prepare_(name, data_dir, out)))
