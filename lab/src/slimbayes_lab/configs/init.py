"""`slimbayes init`: a commented config for a file of one's own, after looking at it.

Every text that comes from the file is written as a JSON string, so that no name can add a line to the config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimbayes.columns import FEW, Column
from slimbayes.distributions.scales import dropout_scale
from slimbayes.errors import cut, did_you_mean
from slimbayes_lab.configs.files import ConfigError, validate
from slimbayes_lab.configs.own import feature_kind, target_is_class
from slimbayes_lab.configs.yaml_text import parse
from slimbayes_lab.data.cells import days_of
from slimbayes_lab.data.table_files import TABLES, TableFile, look

_HEAD = "# Written by `slimbayes init` after a look at the data. Train with: slimbayes fit {file}\n"
_LEFT = "    # "  # of lines about columns that are left out
_SHOWN = 6  # values of a column, in a comment
_COMMON = (
    "  test: 0.2  # share of the rows, drawn by chance; `held_out: last` takes the last ones",
    "  validation: 0.2  # of the training rows, to stop by",
)
_MEMBERS = ("  {kind: Rank1, members: 4, prior: {kind: Normal, loc: 1.0, scale: 0.3}}",)
_FACTORS = (
    "{kind: Rank1, members: 8, mean_init: {kind: Normal, loc: 1.0, scale: 0.5}, "
    f"prior: {{kind: Normal, loc: 1.0, scale: 0.3}}, scale_init: {dropout_scale(0.05)}}}"
)


@dataclass(frozen=True)
class Plan:
    """What was seen: lines of the data section, the network, the method, rows, and whether targets are classes."""

    data: Sequence[str]
    model: str
    method: Sequence[str]
    rows: int
    classes: bool


def config_text(
    path: Path, out: Path, target: str | None = None, header: bool | None = None
) -> str:
    """The config for a table (.csv, .tsv, .parquet), arrays (.npz) or a folder of pictures.

    Args:
        target: the column that is predicted, by default the last one.
        header: whether a csv's first line has names, as `look` takes it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there.")
    if path.is_dir():
        plan = _pictures(path)
    elif path.suffix.lower() in TABLES:
        plan = _table(path, target, header)
    elif path.suffix.lower() == ".npz":
        plan = _arrays(path)
    else:
        raise ConfigError(
            f"{path}: data come as {', '.join(TABLES)}, .npz or a folder with a folder of pictures for each class."
        )
    lines = [
        f"name: {_quoted(path.stem[:200] or 'data')}",
        "seed: 0",
        "data:",
        *plan.data,
    ]
    lines += ["", f"model: {plan.model}", "method:", *plan.method, "", *_training(plan)]
    text = _HEAD.format(file=_quoted(str(out))) + "\n".join(lines) + "\n"
    validate(parse(text), str(out))
    return text


def left_out(text: str) -> list[str]:
    """What a config says about columns that it leaves out."""
    return [
        line.removeprefix(_LEFT) for line in text.splitlines() if line.startswith(_LEFT)
    ]


def _quoted(value: str) -> str:
    """A text in quotes on one line; characters that YAML takes for line breaks, or not at all, are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _training(plan: Plan) -> Iterator[str]:
    batch = next(
        size
        for size, most in ((32, 1000), (128, 20_000), (512, 10**18))
        if plan.rows <= most
    )
    epochs = max(20, min(200, 2_000_000 // plan.rows))
    yield "train:"
    yield f"  epochs: {epochs}  # at most: it stops when the validation rows have not been predicted better for a while"
    yield f"  batch: {batch}"
    yield "  optimizer: {kind: AdamW, lr: 0.002}"
    yield "  weight_decay: 0.01"
    yield "  early_stop: {patience: 16}"
    if not plan.classes:
        yield "  noise: learned  # or heteroscedastic: another for each row"
    yield "evaluate: {draws: [4]}"


# --- tables ---


def _table(path: Path, target: str | None, header: bool | None) -> Plan:
    found, csv = look(path, header), path.suffix.lower() != ".parquet"
    if any(column.other_mark for column in found.columns.values()):
        other = look(path, header, decimal="comma")
        part_thousands = any(column.other_mark for column in other.columns.values())
        found = found if part_thousands else other
    name = list(found.columns)[-1] if target is None else target
    if name not in found.columns:
        raise ConfigError(
            f"--target: {path} has no column {_quoted(name[:80])}{did_you_mean(name, found.columns)}"
        )
    column = found.columns[name]
    doubtful = (
        column.kind == "number" and column.whole and 2 < len(column.values) <= FEW
    )
    classes = target_is_class(column, path, "classes" if doubtful else None)
    dropped = {
        n: why
        for n, c in found.columns.items()
        if n != name and (why := _unusable(found, c))
    }
    by_default = ". The last column: --target chooses" if target is None else ""
    data = [
        f"  {'csv' if csv else 'parquet'}: {_quoted(str(path))}  # {found.rows:,} rows",
        f"  target: {_quoted(name)}  # {_values(column)}{by_default}",
        f"  task: {'classes' if classes else 'regression'}{'  # regression, if they are counts' if doubtful else ''}",
    ]
    data += [f"  header: {str(found.header).lower()}"] if csv else []
    data += (
        ["  decimal: comma  # in '1,5' it parts the fraction, not thousands"]
        if found.decimal == "comma"
        else []
    )
    if dropped:
        data.append(f"  drop: [{', '.join(map(_quoted, dropped))}]")
        data += [f"{_LEFT}{_quoted(one)}: {why}" for one, why in dropped.items()]
    used = [c for n, c in found.columns.items() if n not in {name, *dropped}]
    if not used:
        raise ConfigError(f"{path} has no column to predict {_quoted(name)} from.")
    data.append("  # columns that are used:")
    data += [f"  #   {_quoted(c.name)}: {_values(c)}" for c in used]
    data.append(
        "  categories: []  # columns of numbers that are names of things, such as postcodes"
    )
    gaps = any(c.missing for c in used)
    data.append(
        f"  missing: {'impute  # with medians, beside columns that say where' if gaps else 'refuse'}"
    )
    method = [
        "  kind: ByName",
        "  layers:",
        f"    dense.*: {_FACTORS}",
        "    head: {kind: Ensemble, members: 8}",
    ]
    return Plan(
        [*data, *_COMMON],
        "{kind: table_net, hidden: [128, 128]}",
        method,
        found.rows,
        classes,
    )


def _unusable(found: TableFile, column: Column) -> str:
    """Why a column is left out; nothing if it is not."""
    if len(column.values) < 2:
        return "it is the same in all rows"
    lower = column.name.lower()
    nameless = found.header and column.name == next(iter(found.columns)) == "1"
    if (
        column.whole
        and len(column.values) >= min(1000, found.rows)
        and (lower in ("id", "index", "unnamed: 0") or lower[-3:] == "_id" or nameless)
    ):
        return "it numbers the rows"
    try:
        feature_kind(column, found.file)
        return ""
    except ValueError:
        line, first = column.odd
        shown = _quoted(first[:40])
    if column.kind == "date":
        try:
            days_of(first)
        except ValueError as error:
            return f"dates, but {shown} {error}"
        return "dates; used, if not dropped, with `dates: encode`"
    if column.dressed:
        return f"numbers with signs, such as {shown}: take the signs out to use them"
    if column.kind == "number" and column.changing:
        shown = _quoted(column.changing[1][:40])
        return f"no numbers, since {shown} loses zeros or digits: name it in `categories` to use it"
    return f"texts that hardly repeat, or a few texts among numbers (line {line}: {shown}): mend these to use it"


def _values(column: Column) -> str:
    """What a column holds, in a few words."""
    gaps = f", {column.missing:,} missing" if column.missing else ""
    if column.kind == "number" and not (column.whole and len(column.values) <= _SHOWN):
        return f"numbers{gaps}"
    shown = ", ".join(_quoted(value[:40]) for value in sorted(column.values)[:_SHOWN])
    more = (
        f", ... ({len(column.values):,} different ones)"
        if len(column.values) > _SHOWN
        else ""
    )
    return f"{shown}{more}{gaps}"


# --- arrays and pictures ---


def _arrays(path: Path) -> Plan:
    from slimbayes_lab.data.archives import npz_headers  # it needs torch, too

    try:
        found = npz_headers(path)
        (x, kind), (y, target) = (
            found[name if name in found else f"{name}_train"] for name in ("x", "y")
        )
    except (ValueError, OSError, KeyError) as error:
        why = f" ({cut(str(error))})" if isinstance(error, ValueError) else ""
        raise ConfigError(
            f"{path} needs the arrays x and y, or x_train, y_train, x_test and y_test{why}."
        ) from error
    if not x or not y:
        raise ConfigError(f"{path}: x and y must be arrays of rows.")
    classes = target.kind != "f"
    data = [
        f"  npz: {_quoted(str(path))}  # x {x} of {kind}, y {y} of {target}",
        f"  task: {'classes' if classes else 'regression'}",
    ]
    model = "{kind: small_cnn}" if len(x) == 4 else "{kind: mlp, hidden: [128, 128]}"
    if not classes:
        model = "{kind: regression_net, hidden: 128}  # or a function of your own: {python: package.module:function}"
    return Plan([*data, *_COMMON], model, _MEMBERS, x[0], classes)


def _pictures(path: Path) -> Plan:
    from slimbayes_lab.data.folders import (
        ImageFolder,
        decode,
    )  # they need torch, which tables and arrays do without

    folder = ImageFolder(path / "train" if (path / "train").is_dir() else path)
    if not len(folder):
        raise ConfigError(f"{path} must hold a folder of pictures for each class.")
    some = [decode(file).shape for file in folder.paths[:: max(1, len(folder) // 16)]]
    size = int(min(224, np.median([min(shape[1:]) for shape in some])))
    names = ", ".join(map(_quoted, folder.classes[:_SHOWN])) + (
        ", ..." if len(folder.classes) > _SHOWN else ""
    )
    data: list[Any] = [
        f"  images: {_quoted(str(path))}  # {len(folder):,} pictures of {len(folder.classes)} classes: {names}",
        f"  image_size: {size}  # pixels; the middle square of each picture is taken",
    ]
    model = "{kind: small_cnn}" if size <= 64 else "{kind: resnet18}"
    return Plan([*data, *_COMMON], model, _MEMBERS, len(folder), True)
