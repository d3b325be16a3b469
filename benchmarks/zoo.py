"""Every method on architectures nobody here wrote (zoo_models.py), and whether our promises hold (zoo_checks.py).

    python benchmarks/zoo.py [--only REGEX] [--methods rank1-normal,ktied] [--device cuda] [--workers 4]
                             [--limit-seconds 540] [--out lab/results/benchmarks/zoo.json [--add]]
    python benchmarks/zoo.py --list
    python benchmarks/zoo.py --table lab/results/benchmarks/zoo*.json        writes docs/zoo.md, of several runs

A pair is an architecture and a method. It holds if all of its checks do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cells import Workers, table
from cells import run_all as run_jobs
from timing import alarm, versions
from zoo_checks import (
    CHECKS,
    METHODS,
    OutOfTime,
    Plain,
    build_plain,
    check_pair,
    words_of,
)
from zoo_models import Architecture
from zoo_sequences import PACKAGES, architectures

import slimbayes as sb

PAIR_SECONDS = 180
Pairs = Sequence[dict[str, Any]]
_WIDEST = 160  # characters of a reason on the page


def run_architecture(
    name: str, methods: Sequence[str], device: str, deadline: float
) -> list[tuple[str, dict[str, Any]]]:
    """Its name and all its pairs. What the deadline leaves out, or cuts short, is listed under "not_run"."""
    architecture = next(one for one in architectures() if one.name == name)
    result: dict[str, Any] = {"pairs": [], "not_run": [], "not_built": {}}
    plain: Plain | None = None
    if time.time() < deadline:
        try:
            with warnings.catch_warnings(), alarm(_seconds_left(deadline), OutOfTime):
                warnings.simplefilter("ignore")
                plain = build_plain(architecture, torch.device(device))
        except (Exception, OutOfTime) as error:
            if time.time() < deadline:
                return [(name, result | {"not_built": {name: words_of(error)}})]
    for method in methods:
        pair = (
            None
            if plain is None or time.time() > deadline
            else _timed_pair(plain, architecture, method, deadline)
        )
        if pair is None:
            result["not_run"].append([name, method])
        else:
            result["pairs"].append(pair)
    return [(name, result)]


def _timed_pair(
    plain: Plain, architecture: Architecture, method: str, deadline: float
) -> dict[str, Any] | None:
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with alarm(_seconds_left(deadline), OutOfTime):
                found = check_pair(plain, METHODS[method])
        except (
            Exception,
            OutOfTime,
        ) as error:  # a deepcopy that fails, or the time limit
            if time.time() > deadline:
                return None
            states = dict.fromkeys(CHECKS, "not run") | {"convert": "fails"}
            found = {"checks": states, "errors": {"convert": words_of(error)}}
    texts = list(dict.fromkeys(" ".join(str(w.message).split())[:300] for w in said))
    return {
        "architecture": architecture.name,
        "package": architecture.package,
        "method": method,
        **found,
        "holds": all(value == "holds" for value in found["checks"].values()),
        "draw_by_draw": any("draw by draw" in text for text in texts),
        "warnings": texts[:5],
        "seconds": round(time.perf_counter() - start, 2),
    }


def _seconds_left(deadline: float) -> float:
    return max(
        0.1, min(PAIR_SECONDS, deadline - time.time() + 1)
    )  # so that what it stops is past the deadline


def run_all(
    names: Sequence[str],
    methods: Sequence[str],
    device: str,
    deadline: float,
    workers: int,
) -> dict[str, Any]:
    """Results of all architectures together, in the order of their names."""
    results: dict[str, dict[str, Any]] = {}

    def keep(found: list[tuple[str, dict[str, Any]]]) -> None:
        results.update(found)
        _progress(found[0][0], results)

    if workers <= 1:
        for name in names:
            keep(run_architecture(name, methods, device, deadline))
    else:
        jobs = [(run_architecture, name, methods, device, deadline) for name in names]
        with Workers(workers, _set_up) as pool:
            run_jobs(pool, jobs, keep, time.monotonic() + deadline - time.time())
    whole: dict[str, Any] = {"pairs": [], "not_run": [], "not_built": {}}
    for name in names:
        if name in results:
            whole["pairs"] += results[name]["pairs"]
            whole["not_run"] += results[name]["not_run"]
            whole["not_built"] |= results[name]["not_built"]
        elif time.time() > deadline:
            whole["not_run"] += [[name, method] for method in methods]
        else:
            whole["not_built"][name] = "the process died"
    return whole


def _set_up(threads: int = 1) -> None:
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = (
        False  # comparisons need full single precision
    )


def _progress(name: str, results: dict[str, Any]) -> None:
    pairs = results[name]["pairs"]
    state = (
        results[name]["not_built"].get(name)
        or f"{sum(p['holds'] for p in pairs)} of {len(pairs)} hold"
    )
    if pairs or results[name]["not_built"]:
        print(f"[{len(results)}] {name}: {state}", file=sys.stderr, flush=True)


# --- what was found, in words: failures for the terminal, and docs/zoo.md ---


def count(pairs: Pairs) -> str:
    return f"{sum(p['holds'] for p in pairs)} of {len(pairs)} pairs hold"


def failures(result: dict[str, Any]) -> str:
    """What fails and why, one line for each architecture and reason, and how many pairs hold."""
    rows = _grouped(result["pairs"])
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  [{row[2]}] {row[3][:_WIDEST]}"
        for row in rows
    ]
    lines += [f"not built: {name}: {why}" for name, why in result["not_built"].items()]
    if result["not_run"]:
        lines.append(f"{len(result['not_run'])} pairs not run")
    slow = sorted({p["architecture"] for p in result["pairs"] if p["draw_by_draw"]})
    lines += [f"draw by draw: {', '.join(slow)}"] if slow else []
    lines += [_tally(result["pairs"])] if result["pairs"] else []
    return "\n".join([*lines, count(result["pairs"])])


def _tally(pairs: Pairs) -> str:
    """Of the pairs in which a check ran, how many pass it."""
    ran = {
        check: [p["checks"][check] for p in pairs if p["checks"][check] != "not run"]
        for check in pairs[0]["checks"]
    }
    return "; ".join(
        f"{check} {states.count('holds')} of {len(states)}"
        for check, states in ran.items()
    )


def _failed(pair: dict[str, Any]) -> list[str]:
    return [check for check, state in pair["checks"].items() if state == "fails"]


def join_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several runs found: an architecture that a later one judged counts as there."""
    whole: dict[str, Any] = {"pairs": [], "not_run": [], "not_built": {}, "runs": []}
    for run in runs:
        judged = {p["architecture"] for p in run["pairs"]}
        whole["pairs"] = [
            p for p in whole["pairs"] if p["architecture"] not in judged
        ] + run["pairs"]
        whole["not_run"] = [
            pair for pair in whole["not_run"] if pair[0] not in judged
        ] + run["not_run"]
        whole["not_built"] |= run["not_built"]
        whole["runs"].append(
            {key: run[key] for key in ("device", "versions")} | {"count": len(judged)}
        )
    return whole


def _said(run: dict[str, Any]) -> str:
    used = {
        name: number
        for name, number in run["versions"].items()
        if number != "not installed"
    }
    return f"{run['count']} on {run['device']} with {', '.join(f'{name} {number}' for name, number in used.items())}"


def page(runs: Sequence[dict[str, Any]], checks: Sequence[str]) -> str:
    """docs/zoo.md."""
    result = join_runs(runs)
    pairs: Pairs = result["pairs"]
    said = "; ".join(map(_said, result["runs"]))
    built = len({p["architecture"] for p in pairs})
    head = [
        "# Architectures nobody here wrote",
        "",
        "Generated by `python benchmarks/zoo.py --table lab/results/benchmarks/zoo*.json`; do not edit.",
        "A pair is an architecture and a method.",
        f"It holds if every check does: {', '.join(checks)} (benchmarks/zoo_checks.py says what they are).",
        "",
        f"**{count(pairs)}** on {built} architectures ({said}).",
    ]
    parts = [
        head,
        _counts(pairs),
        _by_check(pairs, checks),
        _reasons(pairs),
        _slow(pairs),
        _rest(result),
    ]
    return "\n".join(line for part in parts for line in [*part, ""]).rstrip() + "\n"


def _counts(pairs: Pairs) -> list[str]:
    packages, methods = (
        list(dict.fromkeys(p[key] for p in pairs)) for key in ("package", "method")
    )
    lines = [["package", *methods, "all"]]
    for package in [*packages, "all"]:
        rows = [p for p in pairs if package in (p["package"], "all")]
        lines.append(
            [
                package,
                *(_share([p for p in rows if p["method"] == one]) for one in methods),
                _share(rows),
            ]
        )
    return ["## How many pairs hold", "", *table(lines)]


def _share(pairs: Pairs) -> str:
    return f"{sum(p['holds'] for p in pairs)} of {len(pairs)}" if pairs else "-"


def _by_check(pairs: Pairs, checks: Sequence[str]) -> list[str]:
    states = ("holds", "fails", "not run")
    found = {check: [p["checks"][check] for p in pairs] for check in checks}
    lines = [
        [check, *(mine.count(state) for state in states)]
        for check, mine in found.items()
    ]
    return ["## By check", "", *table([["check", *states], *lines])]


def _grouped(pairs: Pairs) -> list[tuple[str, str, str, str]]:
    """Architecture, checks, methods and reason of failures; one row for one reason, whatever numbers it holds."""
    methods: dict[tuple[str, str, str], list[str]] = {}
    said: dict[str, str] = {}
    for pair in pairs:
        for check in _failed(pair):
            why = pair["errors"].get(check, "")
            alike = re.sub(r"\d", "", why)[:_WIDEST]
            said.setdefault(pair["architecture"] + alike, why)
            methods.setdefault((pair["architecture"], check, alike), []).append(
                pair["method"]
            )
    checks: dict[tuple[str, str, str], list[str]] = {}
    for (name, check, alike), which in methods.items():
        checks.setdefault((name, ", ".join(which), alike), []).append(check)
    return [
        (name, ", ".join(some), which, said[name + alike])
        for (name, which, alike), some in checks.items()
    ]


def _reasons(pairs: Pairs) -> list[str]:
    rows = _grouped(pairs)
    if not rows:
        return ["## What fails", "", "Nothing."]
    lines = [(*where, _cell(why)) for *where, why in rows]
    return [
        "## What fails",
        "",
        *table([("architecture", "checks", "methods", "reason"), *lines]),
    ]


def _cell(text: str) -> str:
    short = text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _slow(pairs: Pairs) -> list[str]:
    rows: dict[str, list[str]] = {}
    for pair in pairs:
        if pair["draw_by_draw"]:
            rows.setdefault(pair["architecture"], []).append(pair["method"])
    lines = [f"- {name}: {', '.join(methods)}" for name, methods in rows.items()] or [
        "None."
    ]
    return [
        "## Run draw by draw",
        "",
        "These mix or reorder the rows of a batch, so their draws are not folded into it.",
        "",
        *lines,
    ]


def _rest(result: dict[str, Any]) -> list[str]:
    lines = [
        f"- {name} was not built: {_cell(why)}"
        for name, why in result["not_built"].items()
    ]
    if result["not_run"]:
        lines.append(
            f"- {len(result['not_run'])} pairs were not run, for lack of time."
        )
    return ["## Not judged", "", *lines] if lines else []


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    if chosen.table:
        chosen.docs.write_text(
            page([json.loads(file.read_text()) for file in chosen.table], CHECKS)
        )
        print(f"wrote {chosen.docs}")
        return 0
    names = [one.name for one in architectures() if re.search(chosen.only, one.name)]
    methods = chosen.methods.split(",") if chosen.methods else list(METHODS)
    if unknown := [m for m in methods if m not in METHODS]:
        raise SystemExit(
            f"--methods knows no {', '.join(unknown)}; choose from {','.join(METHODS)}."
        )
    if not names:
        raise SystemExit(
            f"--only {chosen.only!r} matches no architecture of the packages installed; see --list."
        )
    if chosen.list:
        print(
            "\n".join(
                [*names, f"{len(names)} architectures; methods: {', '.join(methods)}"]
            )
        )
        return 0
    _set_up(torch.get_num_threads())
    start = time.time()
    found = run_all(
        names, methods, chosen.device, start + chosen.limit_seconds, chosen.workers
    )
    owners = (
        importlib.metadata.packages_distributions()
    )  # what is imported as kan is installed as pykan
    installed = versions("torch", *(owners.get(name, [name])[0] for name in PACKAGES))
    made_by = {
        "python": platform.python_version(),
        "slimbayes": sb.__version__,
    } | installed
    result = {
        "versions": made_by,
        "device": chosen.device,
        "seconds": round(time.time() - start, 1),
        **found,
    }
    if chosen.add and chosen.out.exists():
        joined = join_runs([json.loads(chosen.out.read_text()), result])
        result |= {key: joined[key] for key in ("pairs", "not_run", "not_built")}
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    print(failures(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="architectures whose name matches, such as '^timm/'",
    )
    parser.add_argument("--methods", help=f"some of {','.join(METHODS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=float("inf"),
        help="then stop and list the rest as not run",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--add", action="store_true", help="keep what --out has of other architectures"
    )
    parser.add_argument("--list", action="store_true", help="what would run")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE.json",
        help="write --docs from earlier runs and do nothing else",
    )
    parser.add_argument("--docs", type=Path, default=Path("docs/zoo.md"))
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
