"""Tables and figures of papers: a YAML file each, whose rows are configs with what the paper printed beside them.

lab/experiments/<paper>/<table or figure>.yaml          files without `paper.table` or `paper.figure` are what tables share

paper:
  table: Table 2                                    or figure: Figure 5
  columns: [nll, accuracy]
  units: {accuracy: "%"}                            as printed; without one, a score is as the record has it
  diagnostic: spectrum                              one or several of `slimbayes_lab.papers.diagnostics`
  claims: [{better: rank1-gaussian, than: deterministic, score: nll}]
rows:                                               see configs/files.py
  mfvi: {method: {kind: MeanField}, paper: {row: MFVI BNN, numbers: [0.214, 94.7]}}

A claim holds where the 95 % t interval of the paired differences lies on its side of zero, over three seeds at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)

from slimbayes.errors import brief, cut, did_you_mean
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import ConfigError, Scale, load, read_tree, row_names
from slimbayes_lab.report.metric import mean, metric, t_interval

UNITS = {
    "": 1.0,
    "%": 100.0,
    "k": 1e-3,
    "M": 1e-6,
}  # from a record's numbers to printed ones


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
        diagnostic, options: functions of `slimbayes_lab.papers.diagnostics` and their arguments.
        claims: what the paper says of the table's rows, each judged over seeds.
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
    diagnostic: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda v: [v] if isinstance(v, str) else v or []),
    ] = ()
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
                raise ValueError(
                    f"there are {len(columns)} columns, but {len(numbers)} numbers"
                )
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
        overrides = [f"seed={seed}"] + (
            [f"data.split={seed}"] if self.paper.repeat == "data.split" else []
        )
        return load(f"{self.file}#{self.stem}", overrides, scale)


def roots() -> list[Path]:
    """Folders that may hold the experiments: ./experiments, the repository's, the installed copy."""
    package = Path(__file__).resolve().parents[1]
    places = [
        Path("experiments"),
        package.parents[1] / "experiments",
        package / "experiments",
    ]
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
            names = [
                row
                for row in row_names(read_tree(file))
                if fnmatchcase(row, wanted or "*")
            ]
            if names:
                return [_row(file, f"{paper}/{table}/{row}") for row in names]
    known = list(listings(folders))
    hint = did_you_mean(name, known) if known else ": no experiments folder was found."
    raise ConfigError(f"There is no table or figure {brief(name)}{hint}")


def listings(folders: Sequence[Path] | None = None) -> dict[str, tuple[str, int]]:
    """Every table and figure there is, with what the paper calls it and how many rows it has."""
    found: dict[str, tuple[str, int]] = {}
    for file in (
        file
        for root in (roots() if folders is None else folders)
        for file in root.glob("*/*.yaml")
    ):
        tree = read_tree(file)
        place = tree.get("paper", {}).get("table") or tree.get("paper", {}).get(
            "figure"
        )
        if place:
            found.setdefault(
                f"{file.parent.name}/{file.stem}", (place, len(row_names(tree)))
            )
    return dict(sorted(found.items(), key=lambda item: _by_number(item[0])))


def list_all() -> list[str]:
    """A line for each table and figure that can be reproduced, its name first."""
    return [
        f"{name:<20} {place}, {rows} row{'s' if rows > 1 else ''}"
        for name, (place, rows) in listings().items()
    ]


def _by_number(name: str) -> tuple[str, bool, int, str]:
    """Papers by name, tables before figures, each by number."""
    paper, _, place = name.partition("/")
    digits = "".join(c for c in place.partition("-")[0] if c.isdigit())
    return paper, not place.startswith("table"), int(digits or 0), place


def _row(file: Path, name: str) -> PaperRow:
    place = f"{file}#{name.rpartition('/')[2]}"
    tree = read_tree(Path(place))
    if "paper" not in tree:
        raise ConfigError(
            f"{place} needs a section `paper` that says which row it is: {{row: ..., numbers: ...}}."
        )
    try:
        return PaperRow(
            name, file, Printed.model_validate(tree["paper"]), "data" in tree
        )
    except ValidationError as error:
        faults = [
            (".".join(map(str, ("paper", *f["loc"]))), f["msg"])
            for f in error.errors(include_url=False)
        ]
        told = "; ".join(f"{cut(path)}: {cut(fault)}" for path, fault in faults[:5])
        raise ConfigError(f"{place}: {told}.") from error


FEWEST = 3  # seeds that can decide: two agree by chance half of the time
BySeed = Mapping[int, Mapping[str, float]]  # scores of a row, for each seed
PREFIXES = ("corrupted_", "validation_", "member_")
_LOWER = (
    "corruption_error",
    "relative_corruption_error",
    "error_",
    "neg_elbo",
)  # how such names begin


class Claim(BaseModel):
    """One row is better than another in a score; rows by their names in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    better: str
    than: str
    score: str

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        name = self.score
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        lower = name.startswith(_LOWER) or metric(name).better == "lower"
        if not lower and not name.startswith("snr") and metric(name).better != "higher":
            raise ValueError(
                f"claims: nobody says whether more or less of {self.score!r} is better."
            )
        return -1 if lower else 1

    def judged(self, rows: Mapping[str, BySeed]) -> dict[str, Any]:
        """The claim, the mean difference and its interval over the seeds that both rows have, and a verdict."""
        ours, theirs = rows.get(self.better, {}), rows.get(self.than, {})
        shared = [
            s
            for s in ours
            if s in theirs and self.score in ours[s] and self.score in theirs[s]
        ]
        differences = [ours[s][self.score] - theirs[s][self.score] for s in shared]
        interval = t_interval(differences)
        found = {
            **self.model_dump(),
            "seeds": len(shared),
            "difference": None,
            "interval": interval,
        }
        if not shared:
            return found | {"verdict": "not run"}
        average = mean(differences)
        if not math.isfinite(average):
            return found | {"verdict": "undecided: a score is not finite"}
        return found | {
            "difference": average,
            "verdict": self._verdict(differences, interval),
        }

    def _verdict(
        self, differences: Sequence[float], interval: tuple[float, float] | None
    ) -> str:
        agrees = all(self.sign * difference > 0 for difference in differences)
        if interval is None:
            return f"one seed, which {'agrees' if agrees else 'does not agree'}"
        if len(differences) < FEWEST:
            return f"two seeds, which {'agree' if agrees else 'do not both agree'}"
        low, high = sorted(self.sign * end for end in interval)
        return (
            "holds"
            if low > 0
            else "does not hold: it is the other way round"
            if high < 0
            else "undecided"
        )


def claim_lines(
    claims: Sequence[Mapping[str, Any]], labels: Mapping[str, str]
) -> list[str]:
    """Lines about judged claims, as a table has them."""
    lines = []
    for claim in claims:
        ours, theirs, score = (
            labels[claim["better"]],
            labels[claim["than"]],
            claim["score"].replace("_", " "),
        )
        text = f"- {ours} better than {theirs} in {score}: **{claim['verdict']}**"
        if claim["difference"] is not None:
            text += f", {claim['difference']:+.4g}"
        if claim["interval"] is not None:
            low, high = claim["interval"]
            text += f" [{low:+.4g}, {high:+.4g}] over {claim['seeds']} seeds"
        lines.append(text)
    return lines
