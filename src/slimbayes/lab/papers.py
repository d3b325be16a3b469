"""Tables and figures of papers: a YAML file each, whose rows are configs with what the paper printed beside them.

experiments/<paper>/<table or figure>.yaml          files without `paper.table` or `paper.figure` are what tables share

paper:
  table: Table 2                                    or figure: Figure 5
  columns: [nll, accuracy]
  units: {accuracy: "%"}                            as printed; without one, a score is as the record has it
  diagnostic: spectrum                              one or several of `slimbayes.lab.diagnose`
rows:                                               see config_rows.py
  mfvi: {method: {kind: MeanField}, paper: {row: MFVI BNN, numbers: [0.214, 94.7]}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

import slimbayes
from slimbayes.errors import brief, cut, did_you_mean
from slimbayes.lab.claims import Claim
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, load, read_tree
from slimbayes.lab.config_rows import row_names

Scale = Literal["full", "small"]
UNITS = {"": 1.0, "%": 100.0, "k": 1e-3, "M": 1e-6}  # from a record's numbers to printed ones


def _several(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


class Printed(BaseModel):
    """What a row stands for in the paper.

    Attributes:
        table, figure: as the paper counts them; one of the two.
        row: its name in the paper.
        columns: names of the scores printed; `numbers` and `errors` may then be lists in their order.
        numbers, errors: what is printed, and its standard errors where there are any.
        units: of printed numbers: "%", "k" (thousands) or "M" (millions).
        shows: further scores to show, such as those of a figure, of which nothing is printed.
        draws: of each member; by default the largest number that is evaluated.
        repeat: what each of `--seeds` sets: the seed alone, or the standard split of the data too.
        relative_to: the row whose errors on corrupted rows count as 100.
        diagnostic, options: functions of `slimbayes.lab.diagnose` and their arguments.
        claims: what the paper says of the table's rows, each judged over seeds (claims.py).
        note: how the row differs from the paper's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    table: str | None = None
    figure: str | None = None
    row: str
    columns: tuple[str, ...] = ()
    numbers: dict[str, float] = {}
    errors: dict[str, float] = {}
    units: dict[str, Literal["", "%", "k", "M"]] = {}
    shows: tuple[str, ...] = ()
    draws: int | None = None
    repeat: Literal["seed", "data.split"] = "seed"
    relative_to: str | None = None
    diagnostic: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    options: dict[str, Any] = {}
    claims: tuple[Claim, ...] = ()
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Numbers and errors that are lists, by the names of their columns; errors may be fewer."""
        if not isinstance(given, Mapping):
            return given
        columns, out = given.get("columns", []), dict(given)
        if isinstance(numbers := given.get("numbers"), list):
            if len(numbers) != len(columns):
                raise ValueError(f"there are {len(columns)} columns, but {len(numbers)} numbers")
            out["numbers"] = dict(zip(columns, numbers, strict=True))
        if isinstance(errors := given.get("errors"), list):
            out["errors"] = dict(zip(columns, errors, strict=False))
        return out

    @property
    def place(self) -> str:
        return self.table or self.figure or ""


@dataclass(frozen=True)
class PaperRow:
    """One row: its name ("rank1/table2/mfvi"), its table's file, and what the paper says of it.

    `trains` is False where there is nothing to train.
    """

    name: str
    file: Path
    paper: Printed
    trains: bool

    @property
    def stem(self) -> str:
        return self.name.rpartition("/")[2]

    def experiment(self, scale: Scale = "full", seed: int = 0) -> Experiment:
        """The row's config at a scale, for one of the seeds."""
        overrides = [f"seed={seed}"] + ([f"data.split={seed}"] if self.paper.repeat == "data.split" else [])
        return load(f"{self.file}#{self.stem}", overrides, scale)


def roots() -> list[Path]:
    """Folders that may hold the experiments: ./experiments, the repository's, the installed copy."""
    package = Path(slimbayes.__file__).resolve().parent
    places = [Path("experiments"), package.parents[1] / "experiments", package / "experiments"]
    return [place for place in places if place.is_dir()]


def find(name: str, folders: Sequence[Path] | None = None) -> list[PaperRow]:
    """The rows of a table or figure, in the paper's order, or those of them that a third part of the name picks.

    Args:
        name: "<paper>/<table or figure>", or that and "/<row>", in which * stands for anything: "emp/table12/yacht-*".
        folders: where to look; by default `roots()`.

    Example:
        >>> [row.stem for row in find("rank1/table8/rank1-*")], find("rank1/table2/mfvi")[0].paper.row
        (['rank1-gaussian-1', 'rank1-gaussian-4', 'rank1-gaussian-25'], 'MFVI BNN')
    """
    name = name.strip().strip("/").removesuffix(".yaml")
    paper, _, rest = name.partition("/")
    table, _, wanted = rest.partition("/")
    for root in roots() if folders is None else folders:
        file = root / paper / f"{table}.yaml"
        if paper and table and file.is_file():
            names = [row for row in row_names(read_tree(file)) if fnmatchcase(row, wanted or "*")]
            if names:
                return [_row(file, f"{paper}/{table}/{row}") for row in names]
    known = list(listings(folders))
    hint = did_you_mean(name, known) if known else ": no experiments folder was found."
    raise ConfigError(f"There is no table or figure {brief(name)}{hint}")


def listings(folders: Sequence[Path] | None = None) -> dict[str, tuple[str, int]]:
    """Every table and figure there is, with what the paper calls it and how many rows it has.

    Example:
        >>> listings()["emp/table12"]
        ('Table 12', 40)
    """
    found: dict[str, tuple[str, int]] = {}
    for file in (file for root in (roots() if folders is None else folders) for file in root.glob("*/*.yaml")):
        tree = read_tree(file)
        place = tree.get("paper", {}).get("table") or tree.get("paper", {}).get("figure")
        if place:
            found.setdefault(f"{file.parent.name}/{file.stem}", (place, len(row_names(tree))))
    return dict(sorted(found.items(), key=lambda item: _by_number(item[0])))


def _by_number(name: str) -> tuple[str, bool, int, str]:
    """Papers by name, tables before figures, each by number."""
    paper, _, place = name.partition("/")
    digits = "".join(c for c in place.partition("-")[0] if c.isdigit())
    return paper, not place.startswith("table"), int(digits or 0), place


def _row(file: Path, name: str) -> PaperRow:
    place = f"{file}#{name.rpartition('/')[2]}"
    tree = read_tree(Path(place))
    if "paper" not in tree:
        raise ConfigError(f"{place} needs a section `paper` that says which row it is: {{row: ..., numbers: ...}}.")
    try:
        return PaperRow(name, file, Printed.model_validate(tree["paper"]), "data" in tree)
    except ValidationError as error:
        faults = [(".".join(map(str, ("paper", *f["loc"]))), f["msg"]) for f in error.errors(include_url=False)]
        told = "; ".join(f"{cut(path)}: {cut(fault)}" for path, fault in faults[:5])
        raise ConfigError(f"{place}: {told}.") from error
