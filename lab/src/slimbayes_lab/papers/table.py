"""From records of runs to a table beside the paper's: `table.json` with every number, `table.md` to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from slimbayes.files import write_json, write_text
from slimbayes.metrics.corruption import ALEXNET, ALEXNET_CLEAN, corruption_errors
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import Scale
from slimbayes_lab.data import CORRUPTIONS
from slimbayes_lab.papers.rows import UNITS, PaperRow, claim_lines
from slimbayes_lab.report.metric import bootstrap_interval
from slimbayes_lab.report.record import Record

Numbers = dict[str, float]
_SIZES = ("parameters", "overhead")  # columns of every table


@dataclass(frozen=True)
class RowResult:
    """One row with one seed: its run, record and numbers. Rows that train nothing have numbers alone."""

    row: PaperRow
    seed: int
    numbers: Numbers
    record: Record | None = None
    folder: Path | None = None
    setting: str = ""
    files: tuple[str, ...] = ()  # of its diagnostics


def draws_of(record: Record, asked: int | None) -> int:
    """The number of draws to report: that asked for, or the largest one below it, or the largest of all."""
    there = sorted({e.draws for e in record.evaluations if e.role == "test"})
    below = [n for n in there if asked is None or n <= asked]
    return (below or there)[-1]


def scores_of_record(record: Record, draws: int) -> Numbers:
    """Scores of test rows and of validation rows (`validation_`), means over corruptions (`corrupted_`), those of one
    severity (`severity1_`) and members (`member_`), diversity, parameters."""
    out: Numbers = {}
    for e in (e for e in record.evaluations if e.role == "test" and e.draws == draws):
        out |= e.metrics | e.diversity
        out |= {
            f"member_{name}": fmean(one[name] for one in e.members)
            for name in (e.members[0] if e.members else ())
        }
    for e in (
        e for e in record.evaluations if e.role == "validation" and e.draws == draws
    ):
        out |= {f"validation_{name}": value for name, value in e.metrics.items()}
    corrupted = [
        e for e in record.evaluations if e.role == "corruption" and e.draws == draws
    ]
    for name in ("nll", "accuracy", "ece") if corrupted else ():
        out[f"corrupted_{name}"] = fmean(e.metrics[name] for e in corrupted)
    for severity in sorted({e.severity for e in corrupted}):
        some = [e.metrics for e in corrupted if e.severity == severity]
        out |= {
            f"severity{severity}_{name}": fmean(m[name] for m in some)
            for name in ("nll", "accuracy", "ece")
        }
    rates = error_rates(record, draws)
    if record.data.startswith("imagenet") and all(
        len(rates.get(c, ())) == 5 for c in CORRUPTIONS
    ):
        out |= corruption_against(
            {c: rates[c] for c in ("clean", *CORRUPTIONS)},
            {**ALEXNET, "clean": ALEXNET_CLEAN},
        )
    size = record.parameters
    return out | {
        "parameters": float(size.total),
        "overhead": size.total / size.plain - 1,
    }


def relative_errors(result: RowResult, results: Iterable[RowResult]) -> Numbers:
    """Errors on corrupted rows in percent of another row's with the same seed (Chang et al. 2019, D.4).

    Nothing where that row has not been run.
    """
    wanted = (result.row.paper.relative_to, result.seed)
    against = next(
        (other for other in results if (other.row.stem, other.seed) == wanted), None
    )
    if against is None or against.record is None or result.record is None:
        return {}
    ours = error_rates(result.record, draws_of(result.record, result.row.paper.draws))
    theirs = error_rates(
        against.record, draws_of(against.record, against.row.paper.draws)
    )
    corrupted = [rates for name, rates in theirs.items() if name != "clean"]
    return (
        corruption_against(ours, theirs)
        if len(ours) > 1 and all(map(sum, corrupted))
        else {}
    )


@dataclass(frozen=True)
class Reproduction:
    """What has been found so far of a table or figure, and which rows failed and why."""

    name: str
    scale: Scale
    rows: Sequence[PaperRow]
    results: list[RowResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def write(self, out: Path) -> None:
        """Write both files into a folder."""
        found = self.summary()
        write_json(out / "table.json", found)
        write_text(out / "table.md", markdown(found))

    def summary(self) -> dict[str, Any]:
        """Everything as JSON holds it: for each row ours (mean, standard error, number of seeds) and the paper's."""
        rows, paper = [self._entry(row) for row in self.rows], self.rows[0].paper
        scores = {
            row.stem: {r.seed: self._numbers(r) for r in self._of(row)}
            for row in self.rows
        }
        return {
            "name": self.name, "place": paper.place, "scale": self.scale, "rows": rows,
            "claims": [claim.judged(scores) for claim in paper.claims if {claim.better, claim.than} <= scores.keys()],
            "failures": self.failures,
        }  # fmt: skip

    def _of(self, row: PaperRow) -> list[RowResult]:
        return [r for r in self.results if r.row.name == row.name]

    def _numbers(self, result: RowResult) -> Numbers:
        return result.numbers | relative_errors(result, self.results)

    def _entry(self, row: PaperRow) -> dict[str, Any]:
        mine = self._of(row)
        numbers = [self._numbers(r) for r in mine]
        paper, record = row.paper, mine[0].record if mine else None
        entry: dict[str, Any] = {
            "row": row.stem, "label": paper.row, "note": paper.note, "seeds": [r.seed for r in mine],
            "settings": sorted({r.setting for r in mine if r.setting}), "ours": averages(numbers, paper.units),
            "paper": paper.numbers, "paper_errors": paper.errors, "units": paper.units,
            "shows": [*paper.numbers, *paper.shows], "runs": [r.folder.name for r in mine if r.folder],
            "files": [f for r in mine for f in r.files],
        }  # fmt: skip
        if record is None:
            return entry
        # A diagnostic may count another posterior than the record's.
        size = round(numbers[0].get("parameters", record.parameters.total))
        seconds = [round(r.record.cost.train_seconds, 1) for r in mine if r.record]
        return entry | {
            "method": record.method, "draws": draws_of(record, paper.draws), "parameters": size,
            "overhead": size / record.parameters.plain - 1, "train_seconds": seconds,
        }  # fmt: skip


def averages(
    numbers: Sequence[Numbers], units: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Mean, standard error, 95 % bootstrap interval and number of seeds of each score, in printed units.

    What is not finite stands in place of the mean.
    """
    out: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(n for one in numbers for n in one):
        values = [
            one[name] * UNITS[units.get(name, "")] for one in numbers if name in one
        ]
        odd = sorted({str(value) for value in values if not math.isfinite(value)})
        error = (
            stdev(values) / math.sqrt(len(values))
            if len(values) > 1 and not odd
            else None
        )
        if (
            len(numbers) == 1 and f"{name}_sem" in numbers[0]
        ):  # over rows, where a diagnostic has it
            error = numbers[0][f"{name}_sem"] * UNITS[units.get(name, "")]
        # JSON has no word for NaN or infinity: they are written as text.
        found = {
            "mean": "/".join(odd) if odd else fmean(values),
            "error": error,
            "count": len(values),
        }
        out[name] = found | {"interval": bootstrap_interval(values)}
    return out


def describe_setting(experiment: Experiment, scale: Scale) -> str:
    """A run's setting in a line.

    Example:
        >>> from slimbayes_lab.papers.rows import find
        >>> describe_setting(find("rank1/table2/mfvi")[0].experiment("small"), "small")
        "small: cifar10, up to 1,000 rows, wrn (depth 10, width 1), 3 epochs - not the paper's setting"
    """
    data, sizes = experiment.data, dict(experiment.resolved["model"])
    kind = sizes.pop("kind")
    shape = ", ".join(
        f"{n} {'-'.join(map(str, v)) if isinstance(v, list) else v}"
        for n, v in sizes.items()
    )
    rows = f"up to {data.train_limit:,} rows" if data.train_limit else "all rows"
    text = f"{data.name}, {rows}, {kind}{f' ({shape})' if shape else ''}, {experiment.train.epochs:,} epochs"
    return f"{scale}: {text}" + (
        " - not the paper's setting" if scale == "small" else ""
    )


def markdown(found: Mapping[str, Any]) -> str:
    """The table to read, ours above the paper's, from a `Reproduction.summary()`."""
    rows = found["rows"]
    shown = dict.fromkeys(
        name for row in rows for name in (row["shows"] or list(row["ours"])[:6])
    )
    decimals = {name: _decimals(rows, name) for name in shown if name not in _SIZES}
    unit = {name: f" [{u}]" for row in rows for name, u in row["units"].items() if u}
    scores = [name.replace("_", " ") + unit.get(name, "") for name in decimals]
    lines = [f"# {found['name']}: {found['place']}", "", *_remarks(found), ""]
    lines += [
        _line(["", *scores, "draws", "seeds", *_SIZES]),
        "|---|" + "---:|" * (len(decimals) + 4),
    ]
    for row in rows:
        ours = [
            _value(row["ours"].get(name), digits) for name, digits in decimals.items()
        ]
        size = (
            [f"{row['parameters']:,}", f"{row['overhead']:.2%}"]
            if "parameters" in row
            else ["", ""]
        )
        lines.append(
            _line(
                [
                    row["label"],
                    *ours,
                    str(row.get("draws", "")),
                    str(len(row["seeds"]) or "none"),
                    *size,
                ]
            )
        )
        if row["paper"]:
            theirs = [_printed(row, name, digits) for name, digits in decimals.items()]
            size = [
                f"*{row['paper'][name]:,.10g}{row['units'].get(name, '')}*"
                if name in row["paper"]
                else ""
                for name in _SIZES
            ]
            lines.append(_line(["*paper*", *theirs, "", "", *size]))
    if claims := claim_lines(
        found.get("claims", ()), {row["row"]: row["label"] for row in rows}
    ):
        lines += [
            "",
            "What the paper claims, and differences here over the same seeds:",
            "",
            *claims,
        ]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _remarks(found: Mapping[str, Any]) -> list[str]:
    """Scale, what rows differ in, and what failed."""
    rows = found["rows"]
    settings: list[
        tuple[str, str, str]
    ] = []  # data, the rest of a setting, label; data that share the rest, a line
    for row in rows:
        for text in row["settings"]:
            data, _, rest = text.partition(": ")[2].partition(", ")
            settings.append((data, rest, row["label"]))
    out, sharing = [], _grouped((rest, label) for _, rest, label in settings)
    for rest, labels in sharing.items():
        names = dict.fromkeys(data for data, other, _ in settings if other == rest)
        whose = f" ({_labels(labels)})" if len(sharing) > 1 else ""
        out.append(f"- {found['scale']}: {', '.join(names)}; {rest}{whose}")
    out.append(
        "- Ours: mean and its 95 % bootstrap interval over seeds (± standard error over rows with one seed)."
    )
    out.append("- In italics: what the paper prints.")
    for note, labels in _grouped(
        (row["note"], row["label"]) for row in rows if row["note"]
    ).items():
        out.append(
            f"- {_labels(labels) if len(labels) < len(rows) else 'All rows'}: {note}"
        )
    return out + [
        f"- **{line}" for line in failure_lines(found["failures"], " failed:** ")
    ]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out


def _labels(labels: Sequence[str]) -> str:
    return (
        "; ".join(labels)
        if len(labels) <= 8
        else f"{len(labels)} rows: {labels[0]}; ...; {labels[-1]}"
    )


def failure_lines(failures: Mapping[str, str], then: str = ": ") -> list[str]:
    """A line for each reason, with the runs that failed for it."""
    reasons = _grouped((reason, name) for name, reason in failures.items())
    return [f"{'; '.join(names)}{then}{reason}" for reason, names in reasons.items()]


def _decimals(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Decimals of a column: those the paper prints, or enough for three digits."""
    printed = [row["paper"][name] for row in rows if name in row["paper"]]
    if printed:
        return max(
            len(f"{value!r}".partition(".")[2]) if value != int(value) else 0
            for value in printed
        )
    found = [row["ours"][name]["mean"] for row in rows if name in row["ours"]]
    size = max(
        (abs(value) for value in found if not isinstance(value, str)), default=1.0
    )
    return (
        0
        if size >= 1000
        else max(0, 3 - math.floor(math.log10(size)))
        if size > 0
        else 3
    )


def _value(found: Mapping[str, Any] | None, decimals: int) -> str:
    if found is None:
        return "-"
    if isinstance(found["mean"], str):  # nan or inf
        return found["mean"]
    interval = found.get("interval")  # tables of before have none
    if interval is None and found["error"] is not None:
        return f"{found['mean']:,.{decimals}f} ± {found['error']:,.{decimals}f}"
    spread = (
        ""
        if interval is None
        else f" [{', '.join(f'{end:,.{decimals}f}' for end in interval)}]"
    )
    return f"{found['mean']:,.{decimals}f}{spread}"


def _printed(row: Mapping[str, Any], name: str, decimals: int) -> str:
    if name not in row["paper"]:
        return ""
    error = row["paper_errors"].get(name)
    shown = (
        ""
        if error is None
        else f" ± {error:g}"
        if error
        else f" ± {error:.{decimals}f}"
    )
    return f"*{row['paper'][name]:,.{decimals}f}{shown}*"


def error_rates(record: Record, draws: int) -> dict[str, Any]:
    """Top-1 errors: "clean", of test rows, and by corruption, severity by severity."""
    tests = [
        e.metrics for e in record.evaluations if e.role == "test" and e.draws == draws
    ]
    out: dict[str, Any] = (
        {"clean": 1 - tests[0]["accuracy"]} if tests and "accuracy" in tests[0] else {}
    )
    found = [
        e for e in record.evaluations if e.role == "corruption" and e.draws == draws
    ]
    for e in sorted(found, key=lambda e: e.severity):
        out.setdefault(e.corruption or "", []).append(1 - e.metrics["accuracy"])
    return out


def corruption_against(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, float]:
    """Mean corruption error (mCE), that of each corruption, and the relative one (rmCE) where it has a meaning."""
    absolute = corruption_errors(
        ours, {name: rates for name, rates in theirs.items() if name != "clean"}
    )
    out = {"corruption_error": absolute.mce}
    out |= {f"error_{name}": value for name, value in absolute.by_corruption.items()}
    # A reference that corruption does not harm has nothing to be relative to.
    harmed = all(
        sum(rates) > len(rates) * theirs["clean"] + 1e-9
        for name, rates in theirs.items()
        if name != "clean"
    )
    if harmed:
        relative = corruption_errors(ours, theirs)
        out |= {"relative_corruption_error": relative.rmce}
        out |= {
            f"relative_error_{name}": value
            for name, value in relative.relative_by_corruption.items()
        }
    return out
