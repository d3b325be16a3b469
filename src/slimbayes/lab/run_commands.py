"""Commands that look at a finished run, use it, or make another of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets; $SLIMBAYES_DATA by default.")]
Accelerator = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    draws: Annotated[int, typer.Option(help="Draws of each member, for scores.", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Look at a run's posterior: ELBO, calibration, k-hat; of Gaussian ones spectrum, truncation, gradient noise."""
    from slimbayes.lab.diagnose_run import diagnose_run, lines
    from slimbayes.lab.execution import Execution

    found = diagnose_run(run, Execution(accelerator=accelerator, data_dir=data_dir), draws)
    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))


def stack(
    run: Annotated[Path, typer.Argument(help="Run directory of an Ensemble, or of ModelPatch without cross.")],
    out: Annotated[Path | None, typer.Option(help="New run directory; RUN-stacked by default.")] = None,
    draws: Annotated[int, typer.Option(help="Networks to look at, for ModelPatch.", min=1)] = 200,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Weigh a run's members or components by its validation rows (stacking), and judge it again."""
    from slimbayes.lab.bars import Bars, print_scores
    from slimbayes.lab.execution import Execution
    from slimbayes.lab.stack_run import lines, stack_run

    with Bars("stacked") as bars:
        folder, weights = stack_run(run, out, Execution(accelerator=accelerator, data_dir=data_dir), bars, draws)
    typer.echo("\n".join(lines(weights)))
    print_scores(folder)


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="Rows: .npy, .npz (array x), .csv, or images.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where predictions go: .csv, .json or .npz.")],
    draws: Annotated[int, typer.Option(help="Draws of each member.", min=1)] = 16,
    accelerator: Accelerator = "auto",
) -> None:
    """Predict rows of your own, with uncertainty."""
    from slimbayes.lab.predict_file import predict_file

    rows = predict_file(run, inputs, output, draws, accelerator)
    typer.echo(f"{rows} predictions in {output}")
