"""The rows of the papers' tables and figures: one YAML file each, a config with what the paper printed beside it.

experiments/<paper>/<table or figure>/<row>.yaml        files directly under <paper> are shared bases, which rows extend

paper:
  table: Table 2                       or figure: Figure 5
  row: Rank-1 BNN, Gaussian
  numbers: {nll: 0.128, accuracy: 96.3}
  units: {accuracy: "%"}               as printed; without one, a metric is as the record has it
  diagnostic: spectrum                 one or several of `slimbayes.lab.diagnose`, run on the trained network
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

import slimbayes
from slimbayes.errors import did_you_mean
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, load, read_tree

Scale = Literal["full", "small"]
UNITS = {"": 1.0, "%": 100.0, "k": 1e-3, "M": 1e-6}  # from a record's numbers to printed ones


def _several(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


def _nothing(value: Any) -> Any:
    return {} if value is None else value


Numbers = Annotated[dict[str, float], BeforeValidator(_nothing)]


class Paper(BaseModel):
    """What a row stands for.

    Attributes:
        table, figure: as the paper counts them; one of the two.
        row: its name in the paper.
        order: its place among the rows.
        numbers, errors: what is printed, and its standard errors where there are any.
        units: of printed numbers: "%", "k" (thousands) or "M" (millions).
        shows: further metrics to show, such as those of a figure, of which nothing is printed.
        draws: of each member; by default the largest number that is evaluated.
        repeat: what each of `--seeds` sets: the seed alone, or the standard split of the data too.
        relative_to: the row whose errors on corrupted rows count as 100.
        diagnostic, options: functions of `slimbayes.lab.diagnose` and their arguments.
        note: how the row differs from the paper's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    table: str | None = None
    figure: str | None = None
    row: str
    order: int = 0
    numbers: Numbers = {}
    errors: Numbers = {}
    units: dict[str, Literal["", "%", "k", "M"]] = {}
    shows: tuple[str, ...] = ()
    draws: int | None = None
    repeat: Literal["seed", "data.split"] = "seed"
    relative_to: str | None = None
    diagnostic: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    options: dict[str, Any] = {}
    note: str = ""

    @property
    def place(self) -> str:
        return self.table or self.figure or ""


@dataclass(frozen=True)
class Row:
    """One row: its name ("rank1/table2/mfvi"), file and what the paper says of it. `trains` is False where there is nothing to train."""

    name: str
    file: Path
    paper: Paper
    trains: bool

    @property
    def stem(self) -> str:
        return self.file.stem

    def experiment(self, scale: Scale = "full", seed: int = 0) -> Experiment:
        """The row's config at a scale, for one of the seeds."""
        overrides = [f"seed={seed}"] + ([f"data.split={seed}"] if self.paper.repeat == "data.split" else [])
        return load(self.file, overrides, scale)


@dataclass(frozen=True)
class Listing:
    """One table or figure that can be reproduced: its name, what it is called in the paper, and how many rows it has."""

    name: str
    place: str
    rows: int


def roots() -> list[Path]:
    """Folders that may hold the experiments: ./experiments, the repository's, the installed copy."""
    package = Path(slimbayes.__file__).resolve().parent
    places = [Path("experiments"), package.parents[1] / "experiments", package / "experiments"]
    return [place for place in places if place.is_dir()]


def find(name: str, folders: Sequence[Path] | None = None) -> list[Row]:
    """The rows of a table or figure, in the paper's order, or those of them that a third part of the name picks.

    Args:
        name: "<paper>/<table or figure>", or that and "/<row>", in which * stands for anything: "emp/table12/yacht-*".
        folders: where to look; by default `roots()`.

    Example:
        >>> [row.stem for row in find("rank1/table8/rank1-*")], find("rank1/table2/mfvi")[0].paper.row
        (['rank1-gaussian-1', 'rank1-gaussian-4', 'rank1-gaussian-25'], 'MFVI BNN')
    """
    name = name.strip().strip("/").removesuffix(".yaml")
    for root in roots() if folders is None else folders:
        parts = name.split("/")
        if len(parts) in (2, 3) and (
            files := list((root / parts[0] / parts[1]).glob(f"{parts[2] if parts[2:] else '*'}.yaml"))
        ):
            rows = [_row(file, f"{parts[0]}/{parts[1]}/{file.stem}") for file in files]
            return sorted(rows, key=lambda row: (row.paper.order, row.stem))
    known = [listed.name for listed in listings(folders)]
    raise ConfigError(
        f"There is no table or figure {name!r}{did_you_mean(name, known) if known else ': no experiments folder was found.'}"
    )


def listings(folders: Sequence[Path] | None = None) -> list[Listing]:
    """Every table and figure there is, papers in alphabetical order.

    Example:
        >>> [listed.place for listed in listings() if listed.name == "emp/table12"]
        ['Table 12']
    """
    found: dict[str, Listing] = {}
    for root in roots() if folders is None else folders:
        for folder in sorted(p for p in root.glob("*/*") if p.is_dir()):
            name, files = f"{folder.parent.name}/{folder.name}", sorted(folder.glob("*.yaml"))
            if name not in found and files and "paper" in read_tree(files[0]):  # other configs may lie beside
                found[name] = Listing(name, _row(files[0], name).paper.place, len(files))
    return sorted(found.values(), key=_by_number)


def _by_number(listed: Listing) -> tuple[str, bool, int, str]:
    """Papers by name, tables before figures, each by number."""
    paper, _, place = listed.name.partition("/")
    digits = "".join(c for c in place.partition("-")[0] if c.isdigit())
    return paper, not place.startswith("table"), int(digits or 0), place


def _row(file: Path, name: str) -> Row:
    tree: Mapping[str, Any] = read_tree(file)
    said = tree.get("paper")
    if not isinstance(said, Mapping):
        raise ConfigError(
            f"{file} needs a section `paper` that says which row it is: {{table: ..., row: ..., numbers: ...}}."
        )
    try:
        return Row(name, file, Paper.model_validate(said), "data" in tree)
    except ValidationError as error:
        faults = "; ".join(
            f"paper.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False)
        )
        raise ConfigError(f"{file}: {faults}.") from error
