"""Tables as Markdown: ours above the paper's, what rows differ in, and what failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slimbayes.lab.rows import listings

_SIZES = ("parameters", "overhead")  # columns of every table


def markdown(found: Mapping[str, Any]) -> str:
    """The table to read, ours above the paper's, from what `tables.summary` gives."""
    rows = found["rows"]
    shown = dict.fromkeys(name for row in rows for name in (row["shows"] or list(row["ours"])[:6]))
    columns = [name for name in shown if name not in _SIZES]
    decimals = {name: _decimals(rows, name) for name in columns}
    unit = {name: u for row in rows for name, u in row["units"].items() if u}
    head = [
        "",
        *(f"{name.replace('_', ' ')}{f' [{unit[name]}]' if name in unit else ''}" for name in columns),
        "draws",
        "seeds",
        *_SIZES,
    ]
    lines = [
        f"# {found['name']}: {found['place']}",
        "",
        *_remarks(found),
        "",
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * (len(head) - 1),
    ]
    for row in rows:
        ours = [_value(row["ours"].get(name), decimals[name]) for name in columns]
        size = [f"{row['parameters']:,}", f"{row['overhead']:.2%}"] if "parameters" in row else ["", ""]
        lines.append(
            "| "
            + " | ".join([row["label"], *ours, str(row.get("draws", "")), str(len(row["seeds"]) or "none"), *size])
            + " |"
        )
        if row["paper"]:
            printed = [_printed(row, name, decimals[name]) for name in columns]
            sizes = [
                f"*{row['paper'][name]:,g}{row['units'].get(name, '')}*" if name in row["paper"] else ""
                for name in _SIZES
            ]
            lines.append("| " + " | ".join(["*paper*", *printed, "", "", *sizes]) + " |")
    return "\n".join(lines) + "\n"


def _remarks(found: Mapping[str, Any]) -> list[str]:
    """Scale, what rows differ in, and what failed."""
    settings: dict[str, tuple[list[str], list[str]]] = {}
    for row in found["rows"]:
        for setting in row["settings"]:
            data, _, rest = setting.partition(": ")[2].partition(", ")
            names, labels = settings.setdefault(rest, ([], []))
            names.append(data)
            labels.append(row["label"])
    several = len(settings) > 1
    out = [
        f"- {found['scale']}: {', '.join(dict.fromkeys(names))}; {rest}{f' ({_labels(labels)})' if several else ''}"
        for rest, (names, labels) in settings.items()
    ]
    out.append("- Ours: mean ± standard error over seeds. In italics: what the paper prints.")
    notes: dict[str, list[str]] = {}
    for row in found["rows"]:
        if row["note"]:
            notes.setdefault(row["note"], []).append(row["label"])
    out += [
        f"- {_labels(labels) if len(labels) < len(found['rows']) else 'All rows'}: {note}"
        for note, labels in notes.items()
    ]
    return out + [f"- **{line}" for line in failed(found["failures"], "failed:** ")]


def _labels(labels: Sequence[str]) -> str:
    return "; ".join(labels) if len(labels) <= 8 else f"{len(labels)} rows: {labels[0]}; ...; {labels[-1]}"


def failed(failures: Mapping[str, str], word: str = "") -> list[str]:
    """A line for each reason, with the runs that failed for it.

    Example:
        >>> failed({"a, seed 0": "no data.", "b, seed 0": "no data."})
        ['a, seed 0; b, seed 0: no data.']
    """
    reasons: dict[str, list[str]] = {}
    for name, reason in failures.items():
        reasons.setdefault(reason, []).append(name)
    return [f"{'; '.join(names)}{f' {word}' if word else ': '}{reason}" for reason, names in reasons.items()]


def _decimals(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Decimals of a column: those the paper prints, or enough for three digits."""
    printed = [row["paper"][name] for row in rows if name in row["paper"]]
    if printed:
        return max(len(f"{value!r}".partition(".")[2]) if value != int(value) else 0 for value in printed)
    found = [row["ours"][name]["mean"] for row in rows if name in row["ours"]]
    size = max((abs(value) for value in found if not isinstance(value, str)), default=1.0)
    return 0 if size >= 1000 else max(0, 3 - math.floor(math.log10(size))) if size > 0 else 3


def _value(found: Mapping[str, Any] | None, decimals: int) -> str:
    if found is None:
        return "-"
    if isinstance(found["mean"], str):  # nan or inf
        return found["mean"]
    error = "" if found["error"] is None else f" ± {found['error']:,.{decimals}f}"
    return f"{found['mean']:,.{decimals}f}{error}"


def _printed(row: Mapping[str, Any], name: str, decimals: int) -> str:
    if name not in row["paper"]:
        return ""
    error = row["paper_errors"].get(name)
    shown = "" if error is None else f" ± {error:g}" if error else f" ± {error:.{decimals}f}"
    return f"*{row['paper'][name]:,.{decimals}f}{shown}*"


def overview(paper: str) -> str:
    """A Markdown table of a paper's tables and figures with the commands that reproduce them, for its README.

    Example:
        >>> overview("rank1").splitlines()[2]
        '| Table 1 | `slimbayes reproduce rank1/table1` | 5 |'
    """
    lines = ["| | command | rows |", "|---|---|---:|"]
    lines += [
        f"| {one.place} | `slimbayes reproduce {one.name}` | {one.rows} |"
        for one in listings()
        if one.name.startswith(f"{paper}/")
    ]
    return "\n".join(lines)
