"""The `slimbayes` command. It starts without torch: each command imports what it needs when it runs.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 3 data or files are missing, 4 training diverged,
143 stopped on request with a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from slimbayes.errors import SlimbayesWarning
from slimbayes_lab.run_commands import (
    COMMANDS,
    Accelerator,
    AllowCode,
    AsJson,
    DataDir,
    Force,
    RunFolder,
    print_scores,
)
from slimbayes_lab.run_commands import app as data_app

_CODES = {
    "ConfigError": 2, "RunError": 1, "Incomplete": 1, "CheckpointError": 1, "RecordError": 3, "Diverged": 4,
    "OwnCodeError": 2, "FileExistsError": 2, "FloatingPointError": 4, "Stopped": 143, "ImportError": 3, "ModuleNotFoundError": 3,
}  # fmt: skip


class Command(typer.core.TyperGroup):
    """Tells errors that a user can mend as one message and an exit code; others as they are."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            missing = isinstance(error, FileNotFoundError | PermissionError)
            usual = (
                3 if missing else 1 if isinstance(error, ValueError | OSError) else None
            )
            code = _CODES.get(type(error).__name__, usual)
            if code is None:
                raise
            advice = (
                '; pip install "slimbayes-lab"'
                if isinstance(error, ModuleNotFoundError)
                else ""
            )
            typer.secho(f"{error}{advice}", fg=typer.colors.RED, err=True)
            raise typer.Exit(code) from None


app = typer.Typer(
    cls=Command,
    help="Train, evaluate, compare and show Bayesian neural nets.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
config_app = typer.Typer(
    help="Check configs, print them resolved, and write their JSON Schema.",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        help="Change a field: [bold]train.epochs=5[/]. May be given again.",
        metavar="PATH=VALUE",
    ),
]
Runs = Annotated[
    list[Path], typer.Argument(help="Run directories, or folders of them.")
]
Scale = Annotated[
    Literal["full", "small"],
    typer.Option(help="'small' lays the file's small values over the others."),
]


@app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="YAML file of the experiment.")],
    out: Annotated[
        Path | None, typer.Option(help="Run directory; runs/<name>-<hash> by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the latest checkpoint.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    scale: Scale = "full",
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    devices: Annotated[
        int, typer.Option(help="Processes on this machine, one for each device.")
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    strategy: Annotated[
        Literal["auto", "ddp", "fsdp"],
        typer.Option(help="How processes share the model."),
    ] = "auto",
    compile: Annotated[
        bool | None,
        typer.Option(help="torch.compile the network; by default on a GPU."),
    ] = None,
    graph: Annotated[
        bool | None,
        typer.Option(help="Record the step as a CUDA graph; by default on one GPU."),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that decode image folders.")
    ] = 4,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between checkpoints; by default at epoch ends, a minute apart."
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves for TensorBoard too.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option(help="Evaluate and write the record when training is done.")
    ] = True,
) -> None:
    """Train an experiment in a run directory and evaluate it. A finished run is left as it is."""
    from slimbayes_lab.configs.files import load
    from slimbayes_lab.execution import Execution
    from slimbayes_lab.runs.fit import fit as train
    from slimbayes_lab.runs.folder import default_folder
    from slimbayes_lab.runs.watchers import Bars

    experiment = load(config, overrides, scale)
    folder = out or default_folder(experiment)
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
    ):  # torchrun has started the processes; its restarts go on where they were
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
        resume = resume or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
    execution = Execution(
        accelerator=accelerator, devices=devices, nodes=nodes, strategy=strategy, compile=compile, graph=graph,
        workers=workers, checkpoint_every=checkpoint_every, tensorboard=tensorboard, data_dir=data_dir,
    )  # fmt: skip
    with Bars(experiment.name) as bars:
        train(experiment, folder, execution, resume, bars, judge=evaluate)
    if evaluate and int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0:
        print_scores(folder)


@app.command()
def evaluate(
    run: RunFolder,
    draws: Annotated[
        str | None,
        typer.Option(help="Draws of each member, joined by commas: 1,4,25; or exact."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    workers: Annotated[
        int, typer.Option(help="Processes that decode image folders.")
    ] = 4,
    allow_code: AllowCode = False,
) -> None:
    """Judge a trained run again: on test, corrupted, shifted and unfamiliar rows. Writes its record anew."""
    from slimbayes_lab.execution import Execution
    from slimbayes_lab.runs.fit import evaluate_run

    wanted = [
        *overrides,
        *(
            [f"evaluate.draws={draws if draws == 'exact' else f'[{draws}]'}"]
            if draws
            else []
        ),
    ]
    evaluate_run(
        run,
        wanted,
        Execution(accelerator=accelerator, data_dir=data_dir, workers=workers),
    )
    print_scores(run)


@app.command()
def init(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .csv, .tsv, .parquet or .npz, or a folder of pictures.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The config; ./<name>.yaml by default."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Column to predict; the last one by default.")
    ] = None,
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether a csv's first line has names; else it is seen.",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Look at data of your own and write a commented config for them."""
    from slimbayes.files import check_output, write_text
    from slimbayes_lab.configs.init import config_text, left_out

    file = output or Path(f"{data.resolve().stem or 'data'}.yaml")
    check_output(file, force)
    text = config_text(data, file, target, header)
    write_text(file, text)
    for why in left_out(text):
        typer.echo(f"left out: {why}")
    typer.echo(
        f"{file} is written. Look through it, then: slimbayes fit {shlex.quote(str(file))}"
    )


for command in COMMANDS:
    app.command()(command)


@app.command()
def compare(
    runs: Runs,
    baseline: Annotated[
        str | None, typer.Option(help="Run the others are compared with, seed by seed.")
    ] = None,
    metric: Annotated[
        list[str], typer.Option(help="Scores to show; may be given again.")
    ] = [],  # noqa: B006
    on: Annotated[
        str,
        typer.Option(
            help="Rows: test, validation, corrupted, shift, ood, or a set's name."
        ),
    ] = "test",
    severity: Annotated[
        int | None, typer.Option(help="Of corrupted rows; all by default.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(help="Draws of each member; the most of each run by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put runs side by side, with bootstrap intervals and paired differences over seeds."""
    from rich.console import Console

    from slimbayes_lab.report import compare as table

    made = table(
        runs,
        baseline=baseline,
        metrics=metric or None,
        on=on,
        severity=severity,
        draws=draws,
    )
    typer.echo(json.dumps(made.to_dict(), indent=1)) if as_json else Console().print(
        made.render()
    )


@app.command()
def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Its title.")] = None,
    force: Force = False,
) -> None:
    """Write one self-contained page about runs, from their records alone."""
    from slimbayes.files import check_output
    from slimbayes_lab.report import write_page

    check_output(output, force)
    page = write_page(runs, output, title)
    typer.echo(f"{page} ({page.stat().st_size / 1e6:.1f} MB): open it in a browser")


@app.command()
def sweep(
    config: Annotated[
        Path,
        typer.Argument(help="YAML file; all its rows are run, or file.yaml#row alone."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run directories.")] = Path(
        "runs"
    ),
    over: Annotated[
        list[str],
        typer.Option(
            help="Values to combine: [bold]seed=[0,1,2][/]. May be given again.",
            metavar="PATH=[VALUE,...]",
        ),
    ] = [],  # noqa: B006
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and do nothing.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006
    scale: Scale = "full",
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
    compile: Annotated[
        bool | None,
        typer.Option(help="torch.compile the networks; by default on a GPU."),
    ] = None,
    limit_seconds: Annotated[
        float, typer.Option(help="Stop then, with checkpoints; call again to go on.")
    ] = math.inf,
) -> None:
    """Run seeds x methods x data sets; finished runs are skipped, others continued."""
    from slimbayes_lab.sweep import sweep as run_sweep

    failed = run_sweep(
        config,
        out,
        over,
        jobs,
        dry,
        overrides,
        scale,
        data_dir,
        accelerator,
        compile,
        limit_seconds,
    )
    if failed:
        raise typer.Exit(1)


@app.command()
def reproduce(
    table: Annotated[
        str, typer.Argument(help="Paper and table or figure: rank1/table2.")
    ] = "",
    scale: Scale = "full",
    seeds: Annotated[
        str, typer.Option(help="Seeds, joined by commas: 0,1,2 or 0-9.")
    ] = "0",
    out: Annotated[
        Path | None, typer.Option(help="Folder; runs/<paper>/<table> by default.")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List what there is.")
    ] = False,
    show_status: Annotated[
        bool,
        typer.Option(
            "--status", help="Say which rows have records, at which scale; run nothing."
        ),
    ] = False,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Run the rows of a paper's table and write ours beside the paper's numbers."""
    if show_status:
        from slimbayes_lab.papers.status import overview, status

        typer.echo("\n".join(status(table, out) if table else overview()))
        return
    if list_all or not table:
        from slimbayes_lab.papers import rows as papers

        typer.echo("\n".join(papers.list_all()))
        return
    from slimbayes.untrusted import read_file
    from slimbayes_lab.execution import Execution
    from slimbayes_lab.papers.reproduce import parse_seeds
    from slimbayes_lab.papers.reproduce import reproduce as run_rows
    from slimbayes_lab.runs.watchers import Bars

    execution = Execution(accelerator=accelerator, data_dir=data_dir)
    with Bars() as bars:
        folder = run_rows(table, out, execution, scale, parse_seeds(seeds), bars)
    typer.echo(read_file(folder / "table.md").decode())


@config_app.command("check")
def config_check(
    config: Path,
    overrides: Overrides = [],  # noqa: B006
    scale: Scale = "full",
) -> None:
    """Say whether a config is valid, and everything that is wrong with it."""
    from slimbayes_lab.configs.files import load

    experiment = load(config, overrides, scale)
    typer.echo(
        f"{config} is valid: {experiment.name}, {experiment.method_text} on {experiment.data.name}, {experiment.hash}"
    )


@config_app.command("show")
def config_show(config: Path, overrides: Overrides = [], scale: Scale = "full") -> None:  # noqa: B006
    """Print a config with everything it extends and every default written out."""
    from slimbayes_lab.configs.files import load
    from slimbayes_lab.configs.yaml_text import dump

    typer.echo(dump(load(config, overrides, scale).resolved), nl=False)


@config_app.command("schema")
def config_schema(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File; the terminal by default."),
    ] = None,
    force: Force = False,
) -> None:
    """The JSON Schema of configs, for completion and checks in editors."""
    from slimbayes.files import check_output, write_text
    from slimbayes_lab.configs.experiment import Experiment

    text = json.dumps(Experiment.model_json_schema(), indent=1)
    if output is None:
        typer.echo(text)
        return
    check_output(output, force)
    write_text(output, text + "\n")


def main() -> None:
    """The entry point, under one name: completion of `python -m slimbayes_lab` would be a script for python itself."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, kind, *place: (
        f"! {message}\n"
        if issubclass(kind, SlimbayesWarning)
        else usual(message, kind, *place)
    )
    app(prog_name="slimbayes")
