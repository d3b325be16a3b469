"""The Record of a run: all that a report, a table or a comparison needs, as one JSON file. It needs no torch.

A run directory holds `record.json`. `environment` and `cost` are measurements of a machine; the rest is a function of
the config and the data alone, bit for bit on a CPU, and `Record.digest` names it. The file's last field is the sha256
of all bytes before it, so that `read` notices any change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from slimbayes.errors import brief, cut
from slimbayes.files import write_bytes
from slimbayes.untrusted import parse_json, read_file
from slimbayes_lab.report import kept

FORMAT = 1
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n')


# JSON has no word for NaN or infinity: they are written as text, which pydantic reads.
Number = Annotated[
    float, PlainSerializer(lambda value: value if math.isfinite(value) else str(value))
]
Role = Literal["test", "validation", "corruption", "shift", "ood"]
Whole = Annotated[
    int, Field(gt=-(2**63), lt=2**63)
]  # arithmetic on larger ones fails, or takes for ever


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reliability(Frozen):
    """Rows binned by confidence, empty bins left out: mean confidence, accuracy and number of rows of each bin."""

    confidence: list[Number]
    accuracy: list[Number]
    count: list[Whole]


class RiskCoverage(Frozen):
    """Error among the rows the model is surest of, by the share of rows that is kept."""

    coverage: list[Number]
    risk: list[Number]


class Evaluation(Frozen):
    """Scores on one set of rows with one number of draws.

    Names of `metrics` are those of report/metric.py; shares lie in [0, 1]. `members` has the scores of each member by
    itself, `diversity` compares them.
    """

    data: str
    role: Role
    corruption: str | None = None
    severity: Whole = 0
    draws: Whole  # of each member
    rows: Whole
    metrics: dict[str, Number]
    members: list[dict[str, Number]] = []
    diversity: dict[str, Number] = {}
    reliability: Reliability | None = None
    risk_coverage: RiskCoverage | None = None


class Example(Frozen):
    """A test row the model is most or least sure of. `image` is a PNG as a data URL, None where rows are no images."""

    index: Whole
    sure: Literal["most", "least"]
    label: str
    predicted: str
    confidence: Number
    entropy: Number
    epistemic: Number
    image: str | None = None


class ParameterCounts(Frozen):
    """How many numbers the plain network trains, and how many the converted one does."""

    plain: Whole
    total: Whole

    @property
    def growth(self) -> float | None:
        """The ratio of both; None where the plain network trains nothing."""
        return self.total / self.plain if self.plain else None


class RunCost(Frozen):
    """What the run took. Peak memory is the device's on a GPU, the process's on a CPU, in bytes."""

    train_seconds: Number
    seconds_per_epoch: Number  # median
    evaluate_seconds: Number = 0.0
    peak_memory: Whole | None = None


class Diagnostics(Frozen):
    """What to know before a posterior is trusted; None and nan where a method has no such thing. Numbers are per datum.

    `warnings` has a sentence with a remedy for each thing that looks wrong.
    """

    nll: Number
    kl: Number
    kl_weight: Number = 1.0  # what the KL was multiplied with in the end
    elements: int = 0  # of the posterior that have a prior each
    at_prior: Number = math.nan  # share of elements that did not leave the prior
    collapsed: Number = math.nan  # share of elements whose scale is next to nothing
    label_changes: Number = (
        math.nan
    )  # share of rows that some draw labels otherwise than most do
    k_hat: Number | None = None
    k_hat_note: str = ""  # its verdict, or why there is none
    nonfinite_steps: int = 0
    warnings: list[str] = []


class Record(Frozen):
    """One run. `curve` has a row for each epoch: epoch, step, loss, nll, kl, kl_weight, lr, and validation scores."""

    format: int = FORMAT
    name: str
    method: str  # in a few words, for tables
    data: str
    seed: Whole
    config: dict[str, Any]
    config_hash: str
    commands: list[str]
    status: Literal["finished", "stopped early"] = "finished"
    classes: list[str] = []
    parameters: ParameterCounts
    curve: list[dict[str, Number]] = []
    evaluations: list[Evaluation] = []
    examples: list[Example] = []
    environment: dict[str, str] = {}  # commit, versions, hardware
    cost: RunCost
    data_sha256: str = ""  # of the rows it was trained and tested on; none in records of before it was noted
    diagnostics: Diagnostics | None = None

    @property
    def digest(self) -> str:
        """sha256 of everything but `environment`, `cost`, `commands` and what older records have not: equal for equal
        configs on one kind of CPU.
        """
        data = self.model_dump(
            mode="json",
            exclude={"environment", "cost", "commands", "data_sha256", "diagnostics"},
        )
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class RecordError(ValueError):
    """A record that is missing, damaged or of a newer format; the message names the file."""


def write(file: Path, record: Record) -> None:
    """Write a record and the sha256 that seals it, at once."""
    said = record.model_dump_json().encode().removesuffix(b"}")
    write_bytes(
        file, said + f',"sha256":"{hashlib.sha256(said).hexdigest()}"}}\n'.encode()
    )


def read(run: Path | str) -> Record:
    """The record of a run directory, or of a JSON file; one that was changed since it was written is refused.

    Runs that are kept in one file (report/kept.py) have no seal.

    Example:
        >>> read("/nowhere")
        Traceback (most recent call last):
        ...
        slimbayes_lab.report.record.RecordError: /nowhere/record.json cannot be read: ...
    """
    path = Path(run)
    file = path if path.suffix == ".json" else path / "record.json"
    try:
        raw = None if kept.is_kept(file) else read_file(file)
        data = kept.load(file) if raw is None else parse_json(raw)
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RecordError(
            f"{file} is damaged: it is not JSON ({cut(str(error))})."
        ) from error
    if (
        isinstance(data, dict)
        and isinstance(data.get("format"), int)
        and data["format"] > FORMAT
    ):
        raise RecordError(
            f"{file} has format {brief(data['format'])}, made by a newer slimbayes; this one reads up to {FORMAT}."
        )
    if raw is not None and isinstance(data, dict):
        _check_seal(data.pop("sha256", None), raw, file)
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise RecordError(
            f"{file} is damaged: {cut(where)}: {cut(first['msg'])}."
        ) from None


def _check_seal(seal: Any, raw: bytes, file: Path) -> None:
    if seal is None:
        note_unsealed("Records without a sha256")
    elif (
        not (end := _SEAL.search(raw, len(raw) - 80))
        or hashlib.sha256(raw[: end.start()]).hexdigest() != seal
    ):
        raise RecordError(
            f"{file} is damaged, or was edited: it does not fit its sha256. Restore it from a copy, or run `slimbayes "
            f"evaluate {file.parent}`."
        )


@cache
def note_unsealed(what: str) -> None:
    """Say once that such files are not compared with a sum: an old folder has hundreds."""
    logging.getLogger("slimbayes").warning(
        f"{what}, of an older slimbayes, are read unchecked."
    )
