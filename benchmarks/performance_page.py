"""docs/performance.md, made from a record of benchmarks/gpu.py: targets, what was measured, and why some are missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cells import table

Row = dict[str, Any]
Table = dict[tuple[str, str, str], Row]  # by case, mode and method
BUSY = 0.85  # a GPU that is idle for more than the rest of the time waits for Python
# What is kept beyond a plain network's activations, by case.
MEMORY = {
    "wrn-rank1": " The gradient of a factor of outputs needs what a convolution gave before the factor met it, where a "
    "plain residual block keeps the sum alone: one activation more for each block, and one for each shortcut."
}
ON_CPU = {"small"}  # cases that belong to a CPU, wherever they run
COLUMNS = {
    "train": "step",
    "predict": "prediction",
    "peak": "memory",
    "seconds": "s per epoch",
}


class Target(NamedTuple):
    """A number that we want to reach: of the best of some methods of a case in a mode."""

    workload: str
    case: str
    mode: str
    methods: tuple[str, ...]
    number: str  # train_ratio, predict_ratio, peak_ratio or seconds
    goal: float
    before: float | None = None  # measured on an H200 before the kernels
    rivals: tuple[str, ...] = ()  # methods of the case, or "case/method"

    @property
    def what(self) -> str:
        mode = ", eager" if self.mode == "eager" else ""
        return COLUMNS[self.number.split("_")[0]] + mode


def several(
    workload: str,
    case: str,
    methods: str | tuple[str, ...],
    numbers: dict[str, tuple[float, float | None]],
    rivals: tuple[str, ...] = (),
) -> list[Target]:
    """Targets of one method; numbers such as {"step eager": (goal, before)}."""
    names = {
        "step": "train_ratio",
        "prediction": "predict_ratio",
        "memory": "peak_ratio",
        "epoch": "seconds",
    }
    methods = (methods,) if isinstance(methods, str) else methods
    out = []
    for words, (goal, before) in numbers.items():
        what, _, mode = words.partition(" ")
        out.append(
            Target(
                workload,
                case,
                mode or "compiled",
                methods,
                names[what],
                goal,
                before,
                rivals,
            )
        )
    return out


_BT = ("bayesian-torch reparam", "bayesian-torch flipout")
_WAYS = ("{}", "{}, loss compiled")  # the network, or all that gives the loss


def both(*names: str) -> tuple[str, ...]:
    """The methods compiled in both ways."""
    return tuple(way.format(name) for name in names for way in _WAYS)


_BATCH = both("torch-uncertainty BatchEnsemble")
_BAYES = both(*_BT, "torch-uncertainty BayesLinear")
_TIED = both("2-tied reparam", "2-tied flipout", "2-tied local")
_LORA = ("LoRA", "LoRA (all layers)")
TARGETS: list[Target] = [
    *several(
        "WRN-28-10, rank-1 per example", "wrn-rank1", "rank-1 per example",
        {"step": (1.10, 1.15), "memory": (1.15, 1.30), "prediction": (1.03, 1.14)},
        ("wrn-batch/torch-uncertainty BatchEnsemble",),
    ),
    *several("WRN-28-10, rank-1 per member", "wrn-rank1", "rank-1 per member", {"step": (1.06, 1.24)}),
    *several(
        "MLP 4 x 4096, rank-1 per example", "mlp", both("rank-1 per example"),
        {"step": (1.20, 2.5), "step eager": (1.4, 3.1), "prediction": (1.10, 3.75), "memory": (1.15, 3.7)}, both(*_BT),
    ),
    *several(
        "MLP 4 x 4096, BatchEnsemble", "mlp", both("BatchEnsemble"),
        {"step": (1.10, 1.85), "prediction": (1.00, 2.1)}, _BATCH,
    ),
    *several(
        "MLP 4 x 4096, rank-1 per member", "mlp", both("rank-1 per member"),
        {"step": (1.10, 2.4), "prediction": (1.00, 2.4)},
    ),
    *several(
        f"MLP 2 x 4096, 2-tied, fastest of {len(_TIED)}", "dense", _TIED,
        {"step": (1.25, 1.57), "memory": (1.2, None)}, _BAYES,
    ),
    *several("WRN-28-10, 2-tied flipout", "wrn-gaussian", "2-tied flipout", {"step": (1.5, None)}, _BT[1:]),
    *several("WRN-28-10, mean-field flipout", "wrn-gaussian", "mean-field flipout", {"step": (1.5, None)}, _BT[1:]),
    *several("ResNet-18, EMP", "resnet18", "EMP", {"step": (1.03, None), "step eager": (1.10, 1.61)}),
    *several("ResNet-18, ECMP", "resnet18", "ECMP", {"step": (1.03, None), "step eager": (1.10, 1.59)}),
    *several("PyramidNet-110, EMP", "pyramid-emp", "EMP", {"step": (1.03, None), "step eager": (1.10, 1.25)}),
    *several("PyramidNet-110, ECMP", "pyramid-ecmp", "ECMP", {"step": (1.03, None), "step eager": (1.10, 1.30)}),
    *several(
        "GPT-2 small, frozen base", "gpt2", "rank-1, frozen base",
        {"step": (0.95, 1.37), "step eager": (1.1, 1.61)}, _LORA,
    ),
    *several(
        "GPT-2 small, all trained", "gpt2", "rank-1, all trained", {"step": (1.10, 2.16), "step eager": (1.25, 1.78)}
    ),
    *several(
        "ViT-B/16, frozen base", "vit", "rank-1, frozen base",
        {"step eager": (1.15, 2.87), "step": (1.05, None)}, _LORA[:1],
    ),
    *several("LSTM, per example", "lstm", "rank-1 per example", {"step eager": (3.0, 11.2), "step": (3.0, None)}),
    *several("LSTM, per member", "lstm", "rank-1 per member", {"step eager": (1.3, 2.65), "step": (1.3, None)}),
    *several("Lab, WRN-16-4, plain", "lab", "plain", {"epoch graph": (0.65, 0.81)}),
    *several("Lab, WRN-16-4, rank-1 K=4", "lab", "rank1", {"epoch graph": (2.0, 2.70)}),
    *several("Lab, WRN-16-4, rank-1 split", "lab", "rank1-split", {"epoch graph": (0.75, 1.11)}),
    *several("Lab, WRN-16-4, BatchEnsemble", "lab", "batchensemble", {"epoch graph": (2.0, 3.40)}),
    *several("Lab, WRN-16-4, 2-tied flipout", "lab", "ktied-flipout", {"epoch graph": (1.4, 2.73)}),
    *several(
        "MLP 64-256-256-10 on a CPU, rank-1", "small", both("rank-1 per example"),
        {"step eager": (2.0, 8.5), "step": (2.0, None)},
    ),
]  # fmt: skip


def page(record: dict[str, Any], cpu: dict[str, Any] | None = None) -> str:
    """docs/performance.md; rows of cases for a CPU are those of a record of their own, if there is one."""
    if cpu is not None:
        kept = [row for row in record["results"] if row["case"] not in ON_CPU]
        record = record | {
            "results": kept + [row for row in cpu["results"] if row["case"] in ON_CPU]
        }
        record["note"] = " ".join(
            [*([record["note"]] if "note" in record else []), _of_cpu(cpu["machine"])]
        )
    rows: Table = {
        (row["case"], row["mode"], row["method"]): row for row in record["results"]
    }
    parts = [
        _head(record, rows),
        _targets(rows),
        _missed(rows),
        _steps(rows),
        _scale(record["results"]),
    ]
    parts.append(_rest(record))
    return "\n".join(line for part in parts for line in [*part, ""]).rstrip() + "\n"


def _of_cpu(machine: dict[str, Any]) -> str:
    return (
        f"Rows on a CPU (`make bench`): {machine['device']}, {machine['cores']} cores, {machine['threads']} threads; "
        f"torch {machine['torch']}, python {machine['python']}."
    )


def measured(target: Target, rows: Table, mode: str = "") -> tuple[Row, float] | None:
    """The row of the method with the fastest step, for its memory too, and its number; None if it has none."""
    some = [
        rows.get((target.case, mode or target.mode, method), {})
        for method in target.methods
    ]
    speed = "seconds" if target.number == "seconds" else "train_ratio"
    some = [row for row in some if row.get(speed) is not None]
    best = min(some, key=lambda row: row[speed], default={})
    return None if best.get(target.number) is None else (best, best[target.number])


def recorded(target: Target, rows: Table) -> tuple[Row, float] | None:
    """The row and number of a compiled target with every variant as one CUDA graph."""
    return measured(target, rows, "recorded") if target.mode == "compiled" else None


def state(target: Target, rows: Table) -> str:
    """Met, missed, unclear or not measured; compiled targets as graphs or launched by Python, whichever is nearer.

    Unclear is a target within the quartiles of what was measured. Numbers count in the digits that goals are given in.
    """
    first = measured(target, rows)
    if first is None:
        return "not measured"
    found = [some for some in (first, recorded(target, rows)) if some is not None]
    halves = [(number, _half(row, target.number)) for row, number in found]
    spans = [
        (round(number - half, 2), round(number + half, 2)) for number, half in halves
    ]
    if any(high <= target.goal for _, high in spans):
        return "met"
    return "missed" if all(low > target.goal for low, _ in spans) else "unclear"


def _head(record: dict[str, Any], rows: Table) -> list[str]:
    said = {
        key: value
        for key, value in record["machine"].items()
        if key not in ("device", "cores", "threads")
    }
    states = [state(target, rows) for target in TARGETS]
    counted = {
        name: states.count(name)
        for name in ("met", "missed", "unclear", "not measured")
    }
    return [
        "# What it costs",
        "",
        "Generated by `python benchmarks/gpu.py --table FILE.json`; do not edit. `make bench-gpu` measures all of it.",
        "",
        f"{record['machine']['device']}, {record['machine']['cores']} cores; "
        f"{', '.join(f'{name} {version}' for name, version in said.items())}; {record['seconds']:.0f} seconds in all.",
        "",
        "A ratio is to the plain network on as many rows, in the same mode (compiled or eager), within one run: the",
        "median over rounds in which all take turns, ± half of the distance between the quartiles. A step is draw,",
        "forward, KL, backward and Adam, in bfloat16",
        "autocast; memory is the peak of a step, parameters and optimizer included. Rivals run on the same network and",
        "rows, beside ours. `recorded` is the compiled step, plain and ours, as one CUDA graph, which is how the lab",
        "trains, and `sb.recorded(step, model, optimizer)` does it to a loop of your own: Python has no part in it. A",
        "compiled target is met if either number reaches it, and unclear where it lies within ±.",
        "",
        "`before` is an earlier version on the same kind of GPU, in other runs.",
        *([record["note"]] if "note" in record else []),
        *_older(record),
        "",
        f"**{len(TARGETS)} targets: {', '.join(f'{count} {name}' for name, count in counted.items())}.**",
    ]  # fmt: skip


def _older(record: dict[str, Any]) -> list[str]:
    """Which rows were not measured again when others were."""
    older: dict[tuple[str, str], list[str]] = {}
    anew = {
        (row["case"], row["mode"]) for row in record["results"] if not row.get("older")
    }
    for row in record["results"]:
        if row.get("older"):
            older.setdefault((row["case"], row["mode"]), []).append(row["method"])
    found = sorted(
        f"{at[0]} ({at[1]}{': ' + ', '.join(some) if at in anew else ''})"
        for at, some in older.items()
    )
    return (
        [f"Of an earlier version, and not measured since: {', '.join(found)}."]
        if found
        else []
    )


def _targets(rows: Table) -> list[str]:
    lines = [["workload", "what", "before", "target", "now", "recorded", "", "rivals"]]
    for target in TARGETS:
        said = state(target, rows)
        found = [_ratio(one(target, rows), target) for one in (measured, recorded)]
        goals = [
            target.workload,
            target.what,
            _number(target.before),
            _number(target.goal),
        ]
        lines.append(
            [
                *goals,
                *found,
                f"**{said}**" if said == "missed" else said,
                _rivals(target, rows),
            ]
        )
    return ["## Targets", "", *table(lines)]


def _rivals(target: Target, rows: Table) -> str:
    cells = []
    for rival in target.rivals:
        case, _, name = rival.rpartition("/")
        row = rows.get((case or target.case, target.mode, name), {})
        eager = rows.get((case or target.case, "eager", name), {})
        if row.get(target.number) is not None:
            cells.append(f"{name} {_number(row[target.number])}")
        elif eager.get(target.number) is not None:
            cells.append(f"{name} {_number(eager[target.number])} eager")
    return ", ".join(cells)


def _ratio(found: tuple[Row, float] | None, target: Target) -> str:
    if not found:
        return "-"
    way = (
        ", loss compiled"
        if found[0].get("method", "").endswith("loss compiled")
        else ""
    )
    return _number(found[1]) + _spread(found[0], target.number) + way


def _spread(row: Row, number: str) -> str:
    """Half of the distance between the quartiles of a ratio over rounds, where it matters."""
    half = _half(row, number)
    return f" ± {half:.2f}" if half else ""


def _half(row: Row, number: str) -> float:
    name, _, unit = number.rpartition("_")
    half = (row.get(f"{name}_spread") or 0.0) / 2 if unit == "ratio" else 0.0
    return half if half >= 0.05 else 0.0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _missed(rows: Table) -> list[str]:
    lines = []
    for target in TARGETS:
        found = measured(target, rows)
        if found is not None and state(target, rows) != "met":
            plain = rows.get((target.case, target.mode, "plain"), {})
            lines.append(
                f"- {target.workload}, {target.what}: {_reading(target, found[0], plain)}"
            )
    rule = f"From a profile of one call. A GPU busy for less than {BUSY:.0%} of the time is read as waiting for Python."
    return [
        "## Why targets are missed or unclear",
        "",
        rule,
        "",
        *(lines or ["None is."]),
    ]


def _reading(target: Target, row: Row, plain: Row) -> str:
    kind = target.number.split("_")[0]
    if kind == "peak":
        return f"{row['peak_mib']:.0f} MiB, plain {plain['peak_mib']:.0f}.{MEMORY.get(target.case, '')}"
    ours, theirs = row.get(f"{kind}_profile"), plain.get(f"{kind}_profile", {})
    if ours is None:
        return "; ".join(row.get("messages", [])) or "no profile."
    if "error" in ours:
        return f"no profile: {ours['error']}"
    if "busy_ms" not in ours:
        return f"{ours['kernels']} operations, plain {theirs.get('kernels', 0)}."
    wall, busy = row[f"{kind}_ms"], ours["busy_ms"]
    text = f"the GPU is busy for {busy:.2f} of {wall:.2f} ms with {ours['kernels']} kernels"
    text += (
        f" and {row['graph_breaks']} graph breaks" if row.get("graph_breaks") else ""
    )
    if "busy_ms" in theirs:
        text += f", plain {theirs['busy_ms']:.2f} of {plain[f'{kind}_ms']:.2f} ms with {theirs['kernels']}"
    if busy > 1.1 * wall:
        return f"{text}: others used the GPU while it was profiled, which says nothing then."
    if busy < BUSY * wall:
        return f"{text}: bound by Python."
    longest = ", ".join(
        f"`{name[:48]}` x {count} {ms:.2f} ms"
        for name, count, ms in ours["longest"][:3]
    )
    return f"{text}: bound by kernels; the longest are {longest}."


def _steps(rows: Table) -> list[str]:
    lines = ["## Everything measured", "", "Ratios to plain, and milliseconds."]
    for case in dict.fromkeys(
        key[0] for key in rows if not key[0].startswith(("scale", "lab"))
    ):
        mine = {key: row for key, row in rows.items() if key[0] == case}
        heads = [
            (m, k)
            for m in ("compiled", "recorded", "eager")
            for k in ("train", "predict", "peak")
            if _any(mine, m, k)
        ]
        shown = [["", *(f"{COLUMNS[kind]}, {mode}" for mode, kind in heads)]]
        for method in dict.fromkeys(
            key[2] for key in mine if key[2] not in ("rest", "all")
        ):
            shown.append(
                [
                    method,
                    *(
                        _cell(rows.get((case, mode, method), {}), kind)
                        for mode, kind in heads
                    ),
                ]
            )
        lines += ["", f"### {next(iter(mine.values()))['sizes']}", "", *table(shown)]
    lab = [row for key, row in rows.items() if key[0] == "lab" and "seconds" in row]
    if lab:
        shown = [
            [row["method"], f"{row['seconds']:.2f}", "; ".join(row["messages"])]
            for row in lab
        ]
        lines += [
            "",
            f"### Lab: {lab[0]['sizes']}",
            "",
            *table([["", "s per epoch", "remarks"], *shown]),
        ]
    return lines


def _any(rows: Table, mode: str, kind: str) -> bool:
    return any(
        key[1] == mode and row.get(f"{kind}_ratio") is not None
        for key, row in rows.items()
    )


def _cell(row: Row, kind: str) -> str:
    if row.get(f"{kind}_ratio") is None:
        return "fails" if "error" in row else "-"
    size = (
        f"{row['peak_mib']:.0f} MiB" if kind == "peak" else f"{row[f'{kind}_ms']:.2f}"
    )
    return f"{row[f'{kind}_ratio']:.2f}{_spread(row, f'{kind}_ratio')} ({size})"


def _scale(results: Iterable[Row]) -> list[str]:
    found = [
        row
        for row in results
        if row["case"].startswith("scale") and row["method"] != "all"
    ]
    if not found:
        return []
    lines = ["## Scale"]
    for case in dict.fromkeys(row["case"] for row in found):
        mine = [row for row in found if row["case"] == case]
        heads = {
            "train_ms": "step, ms",
            "train_ratio": "ratio",
            "predict_ms": "prediction, ms",
            "predict_ratio": "ratio",
        }
        heads |= {"peak_mib": "peak MiB"} if _sound(mine) else {}
        heads = {
            key: head
            for key, head in heads.items()
            if any(row.get(key) for row in mine)
        }
        shown = [["", *heads.values()]]
        for row in mine:
            cells = [
                _number(row.get(key)) + _spread(row, key)
                if "error" not in row
                else "fails"
                for key in heads
            ]
            shown.append([row["method"], *cells])
        lines += ["", f"### {mine[0]['sizes']}", "", *table(shown)]
        if not _sound(mine):
            lines += [
                "",
                "Its peaks of memory are wrong and left out: what builds before had taken was given back.",
            ]
    return lines


def _sound(rows: Sequence[Row]) -> bool:
    """Whether peaks may be right: above zero, and no row's below that of the plain network of its size before it."""
    least = 0.0
    for row in rows:
        peak = row.get("peak_mib")
        least = (peak or 0.0) if row["method"].endswith("plain") else least
        if peak is not None and (peak <= 0 or peak < least):
            return False
    return True


def _rest(record: dict[str, Any]) -> list[str]:
    lines = [
        f"- {row['case']}, {row['mode']}, {row['method']}: {row['error'].replace('|', '/')[:160]}"
        for row in record["results"] if "error" in row
    ]  # fmt: skip
    lines += [f"- {words.replace('|', '/')[:160]}" for words in record["not_run"]]
    for row in record["results"]:
        for kind in ("train", "predict"):
            if f"{kind}_error" in row:
                why = row[f"{kind}_error"].replace("|", "/")[:160]
                lines.append(
                    f"- {row['case']}, {row['mode']}, {row['method']}, {COLUMNS[kind]}: {why}"
                )
    return ["## Not measured", "", *lines] if lines else []
