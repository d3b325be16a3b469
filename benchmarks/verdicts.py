"""docs/reproduction.md: what the papers claim (lab/experiments/claims.yaml), and whether the kept records bear it out.

    python benchmarks/verdicts.py

A comparison holds where the 95 % t interval of its paired differences lies on the claim's side of zero. Pairs
are seeds, splits, or whatever `*` stands for in the names of rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from slimbayes_lab.papers.rows import FEWEST, Claim
from slimbayes_lab.papers.table import draws_of, scores_of_record
from slimbayes_lab.report import kept
from slimbayes_lab.report.metric import mean, t_interval
from slimbayes_lab.report.record import read

ROOT = Path(__file__).resolve().parents[1]
CLAIMS, PAGE = (
    ROOT / "lab" / "experiments" / "claims.yaml",
    ROOT / "docs" / "reproduction.md",
)
COUNTED = ("overhead", "parameters")  # the same with every seed
read = cache(read)  # many claims are about the same runs
Rows = dict[
    str, dict[Any, dict[str, float]]
]  # scores by row and by what pairs are made of


class Judged(NamedTuple):
    """One comparison: where it was made, between what, and what came out."""

    where: str
    what: str
    verdict: str
    effect: str
    command: str


# --- sources ---


def rows_of(source: Mapping[str, Any], root: Path = ROOT) -> dict[str, Rows]:
    """Scores of a source's rows, by data set; one without a name where the source has only one."""
    if "records" in source:
        return {"": _records(kept.glob(root, source["records"]))}
    if "table" in source:
        return {"": _table(root / source["table"])}
    return _splits(kept.glob(root, source["splits"]))


def _splits(files: Sequence[Path]) -> dict[str, Rows]:
    """Files of a set and a method, with a list of numbers for each score, one for each split."""
    found: dict[str, Rows] = {}
    for one in map(kept.load, files):
        numbers = {
            name: values for name, values in one.items() if isinstance(values, list)
        }
        each = [
            dict(zip(numbers, split, strict=True))
            for split in zip(*numbers.values(), strict=True)
        ]
        found.setdefault(one["set"], {})[one["method"]] = dict(enumerate(each))
    return found


def _records(files: Sequence[Path]) -> Rows:
    found: Rows = {}
    for record in map(read, files):
        # Records of stays were named with their data and seed.
        name = record.name.removeprefix(f"{record.data} ").removesuffix(
            f" {record.seed}"
        )
        found.setdefault(name, {})[record.seed] = scores_of_record(
            record, draws_of(record, None)
        )
    return found


def _table(file: Path) -> Rows:
    """Rows of a `table.json`: numbers of each seed where diagnostics kept them, else the mean."""
    found: Rows = {}
    for row in kept.load(file)["rows"] if kept.exists(file) else ():
        scores = {
            name: one["mean"]
            for name, one in row["ours"].items()
            if isinstance(one["mean"], float | int)
        }
        for seed in row["seeds"]:
            mine = [
                file.parent / f
                for f in row["files"]
                if f.startswith(f"diagnostics/{row['row']}-{seed}-")
            ]
            numbers = [kept.load(f)["numbers"] for f in mine if f.suffix == ".json"]
            alone = scores if len(row["seeds"]) == 1 else {}
            found.setdefault(row["row"], {})[seed] = alone | {
                k: v for one in numbers for k, v in one.items()
            }
    return found


# --- comparisons ---


def judged(
    evidence: Mapping[str, Any], sources: Mapping[str, Any], root: Path = ROOT
) -> list[Judged]:
    """What a claim's piece of evidence says, once for each data set it is about."""
    source = sources[evidence["source"]]
    found = rows_of(source, root)
    names = list(found) if evidence.get("data") == "*" else [evidence.get("data", "")]
    than = (
        evidence["than"]
        if isinstance(evidence["than"], str)
        else f"{evidence['than']:g}"
    )
    if "than_score" in evidence:
        than = evidence["than_score"]
    what = f"{evidence.get('better') if evidence['better'] != '*' else ''} {evidence['score']} against {than}".strip()
    out = []
    for name in names or [""]:
        differences = _differences(found.get(name, {}), evidence)
        fewest = 1 if evidence["score"] in COUNTED else FEWEST
        verdict, effect = _verdict(
            differences, _sign(evidence), evidence.get("margin", 0.0), fewest
        )
        where = name or source["at"]
        out.append(
            Judged(where, what.replace("_", " "), verdict, effect, source["command"])
        )
    return out


def _differences(rows: Rows, evidence: Mapping[str, Any]) -> list[float]:
    """Better less worse, for each pair that has both."""
    score, ours = evidence["score"], _replicates(rows, evidence["better"])
    if not isinstance(evidence["than"], str):
        return [one[score] - evidence["than"] for one in ours.values() if score in one]
    theirs, other = (
        _replicates(rows, evidence["than"]),
        evidence.get("than_score", score),
    )
    shared = [
        key
        for key in ours
        if key in theirs and score in ours[key] and other in theirs[key]
    ]
    return [ours[key][score] - theirs[key][other] for key in shared]


def _replicates(rows: Rows, name: str) -> dict[Any, dict[str, float]]:
    if "*" not in name:
        return rows.get(name, {})
    pattern = re.compile(re.escape(name).replace(r"\*", "(.*)"))
    hits = [(match.group(1), seed, one) for row in rows for match in [pattern.fullmatch(row)] if match
            for seed, one in rows[row].items()]  # fmt: skip
    return {(part, seed): one for part, seed, one in hits}


def _sign(evidence: Mapping[str, Any]) -> int:
    """-1 where less is better."""
    if "less" in evidence:
        return -1 if evidence["less"] else 1
    return Claim(better="", than="", score=evidence["score"]).sign


def _verdict(
    differences: Sequence[float], sign: int, margin: float, fewest: int
) -> tuple[str, str]:
    if not differences:
        return "not run", ""
    average, interval = mean(differences), t_interval(differences)
    if not math.isfinite(average):
        return "undecided", "a score is not finite"
    effect = f"{average:+.3g}"
    agrees, pairs = sign * average + margin > 0, len(differences)
    if fewest == 1:
        return "holds" if agrees else "does not hold", effect
    if interval is None or pairs < fewest:
        word = (
            ("agree" if agrees else "do not agree")
            if pairs > 1
            else "agrees"
            if agrees
            else "does not agree"
        )
        return (
            "undecided",
            f"{effect}, {'one pair' if pairs == 1 else f'{pairs} pairs'} {word}",
        )
    effect += f" [{interval[0]:+.3g}, {interval[1]:+.3g}], {pairs} pairs"
    low, high = sorted(sign * end + margin for end in interval)
    return "holds" if low > 0 else "does not hold" if high < 0 else "undecided", effect


def summed(every: Sequence[Judged]) -> str:
    """The verdict on a claim from those on its pieces of evidence."""
    run = [one for one in every if one.verdict != "not run"]
    if not run:
        return "not run"
    holding = [one for one in run if one.verdict == "holds"]
    if len(holding) == len(run):
        return "holds"
    if holding:
        places = dict.fromkeys(one.where for one in holding)
        mixed = any(one.where in places for one in run if one.verdict != "holds")
        return "holds when: " + "; ".join(
            dict.fromkeys(one.what if mixed else one.where for one in holding)
        )
    verdicts = {one.verdict for one in run}
    return (
        verdicts.pop()
        if len(verdicts) == 1
        else "does not hold"
        if "does not hold" in verdicts
        else "undecided"
    )


# --- the page ---


def page(claims: Mapping[str, Any], root: Path = ROOT) -> str:
    lines = [
        "# What the papers claim, and what came out here",
        "",
        "Generated by `make reproduction` from lab/experiments/claims.yaml and the kept records; do not edit.",
        "",
        "A comparison *holds* where the 95 % t interval of its paired differences lies on the claim's side of "
        "zero, *does not hold* where it lies on the other side, and is *undecided* where it holds zero or there are "
        f"fewer than {FEWEST} pairs. A claim *holds "
        "when* some of its comparisons hold. Differences are of the better less the worse. Settings are smaller than "
        "the papers' unless they say otherwise: what does not hold here may hold there.",
    ]
    counts: dict[str, int] = {}
    body: list[str] = []
    for paper in claims["papers"].values():
        body += [
            "",
            f"## {paper['title']}",
            "",
            "| claim | place | verdict | differences, 95 % intervals |",
            "|---|---|---|---|",
        ]
        for claim in paper["claims"]:
            every = [
                one
                for evidence in claim["evidence"]
                for one in judged(evidence, claims["sources"], root)
            ]
            verdict = summed(every)
            counts[verdict.partition(":")[0]] = (
                counts.get(verdict.partition(":")[0], 0) + 1
            )
            body.append(
                f"| {claim['claim']} | {claim['place']} | **{verdict}** | {_evidence(every)} |"
            )
    total = ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
    lines += [
        "",
        f"{sum(counts.values())} claims: {total}.",
        *body,
        "",
        "## Commands",
        "",
    ]
    for source in claims["sources"].values():
        lines.append(f"- {source['at']}: {source['setting']}. `{source['command']}`")
    return "\n".join(lines) + "\n"


def _evidence(every: Sequence[Judged]) -> str:
    return "<br>".join(
        f"{one.where}: {one.what} {f'{one.effect}, ' if one.effect else ''}{one.verdict}"
        for one in every
    )


def main() -> None:
    PAGE.write_text(page(yaml.safe_load(CLAIMS.read_text())))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
