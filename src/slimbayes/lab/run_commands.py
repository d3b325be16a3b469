"""Commands that look at a finished run, use it, or make another of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets; $SLIMBAYES_DATA by default.")]
Accelerator = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Trust files that may run code: runs with model.python, .pt2 files.")
]


def init(
    data: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .csv, .tsv, .parquet or .npz, or a folder of pictures.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The config; ./<name>.yaml by default.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict; the last one by default.")] = None,
    header: Annotated[
        bool | None, typer.Option("--header/--no-header", help="Whether a csv's first line has names; else it is seen.")
    ] = None,
) -> None:
    """Look at data of your own and write a commented config for them."""
    from slimbayes.files import write_text
    from slimbayes.lab.config_rows import ConfigError
    from slimbayes.lab.init_config import config_text

    file = output or Path(f"{data.resolve().stem or 'data'}.yaml")
    if file.exists():
        raise ConfigError(f"{file} is there already. Choose another name with -o.")
    write_text(file, config_text(data, file, target, header))
    typer.echo(f"{file} is written. Look through it, then: slimbayes fit {file}")


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    draws: Annotated[int, typer.Option(help="Draws of each member, for scores.", min=1, max=10_000)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Look at a run's posterior: ELBO, calibration, k-hat; of Gaussian ones spectrum, truncation, gradient noise."""
    from slimbayes.lab.diagnose_run import diagnose_run, lines
    from slimbayes.lab.execution import Execution
    from slimbayes.lab.own_config import code_allowed

    with code_allowed(allow_code):
        found = diagnose_run(run, Execution(accelerator=accelerator, data_dir=data_dir), draws)
    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))


def stack(
    run: Annotated[Path, typer.Argument(help="Run directory of an Ensemble, or of ModelPatch without cross.")],
    out: Annotated[Path | None, typer.Option(help="New run directory; RUN-stacked by default.")] = None,
    draws: Annotated[int, typer.Option(help="Networks to look at, for ModelPatch.", min=1)] = 200,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Weigh a run's members or components by its validation rows (stacking), and judge it again."""
    from slimbayes.lab.bars import Bars, print_scores
    from slimbayes.lab.execution import Execution
    from slimbayes.lab.own_config import code_allowed
    from slimbayes.lab.stack_run import lines, stack_run

    with Bars("stacked") as bars, code_allowed(allow_code):
        folder, weights = stack_run(run, out, Execution(accelerator=accelerator, data_dir=data_dir), bars, draws)
    typer.echo("\n".join(lines(weights)))
    print_scores(folder)


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    inputs: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Rows: .npy, .npz (array x), .csv, .parquet, images.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where predictions go: .csv, .json or .npz.")],
    draws: Annotated[int, typer.Option(help="Draws of each member.", min=1, max=10_000)] = 16,
    level: Annotated[
        float, typer.Option(help="Probability that intervals of real targets hold them.", min=0.01, max=0.999)
    ] = 0.9,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Predict rows of your own, with uncertainty."""
    from slimbayes.lab.own_config import code_allowed
    from slimbayes.lab.predict_file import predict_file

    with code_allowed(allow_code):
        rows = predict_file(run, inputs, output, draws, accelerator, level)
    typer.echo(f"{rows} predictions in {output}")


def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    to: Annotated[Literal["onnx", "pt2"], typer.Option(help="Format: for onnxruntime, or for torch.")] = "onnx",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file; ./<run>.<to> by default.")] = None,
    draws: Annotated[int, typer.Option(help="Draws of each member; they are in the file.", min=1, max=10_000)] = 16,
    accelerator: Accelerator = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Write a run as one file that predicts without slimbayes; `slimbayes serve` takes .onnx files."""
    from slimbayes.lab.config_rows import ConfigError
    from slimbayes.lab.export_run import export_run
    from slimbayes.lab.own_config import code_allowed

    file = output or Path(f"{run.resolve().name}.{to}")
    if file.suffix != f".{to}":
        raise ConfigError(f"-o must end in .{to}, as --to says, got {file}.")
    with code_allowed(allow_code):
        made = export_run(run, file, draws, accelerator)
    shape = " x ".join("rows" if size is None else str(size) for size in made.inputs["input"])
    typer.echo(f"{file}: {shape} -> {', '.join(made.outputs)}, of {made.draws} draws")
