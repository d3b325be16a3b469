"""What a request asks, and how it is answered: rows and predictions as JSON, .npy or Arrow.

Nothing is unpickled. Whoever wrote a body may lie in it, so no more is made room for than it has bytes, and Arrow is
taken only of plain types, uncompressed and validated.

Sizes: N rows.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import HTTPException, Request

from slimbayes.data.archives import DAMAGE, npy_blocks
from slimbayes.errors import brief, cut
from slimbayes.lab.finished.predict_file import Columns
from slimbayes.lab.finished.serve_model import Named, Served
from slimbayes.untrusted import parse_json

JSON, NPY, ARROW = (
    "application/json",
    "application/x-npy",
    "application/vnd.apache.arrow.stream",
)
_BATCHES = {
    2: 1,
    3: None,
}  # kinds of Arrow's messages with data: where in a dictionary batch its record batch is
_COMPRESSION = 3  # field of a record batch


_BINARY = {"schema": {"type": "string", "format": "binary"}}
_OPTIONS = {
    "draws": {"type": "integer", "minimum": 1},
    "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
}
BODY = {
    "parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in _OPTIONS.items()],
    "requestBody": {"required": True, "content": {NPY: _BINARY, ARROW: _BINARY, JSON: {"schema": {
        "type": "object", "required": ["rows"], "additionalProperties": False,
        "properties": {"rows": {"type": "array"}, **_OPTIONS}}}}},
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a server takes: bytes of a body, rows and draws of a request, and seconds to wait in the queue, for a body
    to arrive, and for an answer."""

    body: int = 1 << 20
    rows: int = 1024
    draws: int = 64
    wait: float = 0.25
    arrive: float = 10.0
    answer: float = 30.0


async def body_of(request: Request, limits: Limits) -> bytes:
    """A request's body, refused as soon as it is too long or too slow, whatever its headers say."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.arrive):
            async for part in request.stream():
                size += len(part)
                if size > limits.body:
                    raise HTTPException(
                        413,
                        f"A body may have {limits.body:,} bytes.",
                        {"Connection": "close"},
                    )
                parts.append(part)
    except TimeoutError:
        raise HTTPException(
            408, "The body did not arrive in time.", {"Connection": "close"}
        ) from None
    return b"".join(parts)


def media(kind: str) -> str:
    """A content type without its parameters."""
    return kind.partition(";")[0].strip().lower()


def read_request(
    body: bytes, kind: str, query: Mapping[str, str], model: Served, limits: Limits
) -> tuple[np.ndarray, tuple[str, ...], int, float | None]:
    """Rows as the model takes them, notes on them, draws and level of a request, from its body or its address."""
    kind = media(kind) or JSON
    if kind not in (JSON, NPY, ARROW):
        raise HTTPException(415, f"Rows come as {JSON}, {NPY} or {ARROW}.")
    try:
        options = {name: parse_json(value) for name, value in query.items()}
        rows: np.ndarray | Named
        if kind == JSON:
            rows, more = _json(body)
            options |= more
        else:
            rows = _npy(body) if kind == NPY else _arrow(body, limits.rows)
        if unknown := sorted(set(options) - {*_OPTIONS}):
            raise ValueError(
                f"unknown key {brief(unknown[0])}; known are rows, draws and level"
            )
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, cut(f"The request cannot be read: {error}")) from error
    count = (
        len(next(iter(rows.values()), ()))
        if isinstance(rows, dict)
        else len(rows)
        if rows.ndim
        else 0
    )
    if not 1 <= count <= limits.rows:
        raise HTTPException(
            422, f"rows: from 1 to {limits.rows:,} rows are answered, got {count:,}."
        )
    try:
        taken, notes = model.check(rows)
    except (ValueError, RuntimeError, TypeError) as error:
        raise HTTPException(422, cut(str(error))) from error
    return taken, notes, _draws(options, model, limits.draws), _level(options, model)


def write_answer(
    found: Columns, accept: str, notes: Sequence[str]
) -> tuple[bytes, str]:
    """Predictions as Arrow or .npy if a client accepts that, or as JSON with notes, and their content type."""
    wanted = [media(one) for one in accept.split(",")]
    if NPY in wanted:
        return _npy_of(found), NPY
    lists = {name: values.tolist() for name, values in found.items()}
    if ARROW not in wanted:
        told = {"predictions": lists} | ({"notes": notes} if notes else {})
        return json.dumps(told, separators=(",", ":"), allow_nan=False).encode(), JSON
    arrow, out = _pyarrow(), io.BytesIO()
    table = arrow.table(lists)
    with arrow.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return out.getvalue(), ARROW


def _npy_of(found: Columns) -> bytes:
    """An array (N,) with a field for each column: np.load(...)["mean"]."""
    table = np.empty(
        len(next(iter(found.values()))),
        [(name, one.dtype, one.shape[1:]) for name, one in found.items()],
    )
    for name, one in found.items():
        table[name] = one
    out = io.BytesIO()
    np.save(out, table, allow_pickle=False)
    return out.getvalue()


# --- bodies ---


def _npy(body: bytes) -> np.ndarray:
    """The array of a .npy body, of which no more is read, or made room for, than it has bytes."""
    blocks = npy_blocks(io.BytesIO(body))
    try:
        rows = next(blocks).numpy()
        more = next(blocks, None) is not None
    except (*DAMAGE, RecursionError, SyntaxError) as error:
        raise ValueError("the body is no .npy array of rows of numbers") from error
    if more or rows.dtype.kind not in "iuf":
        raise ValueError("rows must be a .npy array of numbers, as many as it says")
    return rows


def _json(body: bytes) -> tuple[np.ndarray | Named, dict[str, Any]]:
    """Rows, and what stands beside them."""
    options = parse_json(body)
    if not isinstance(options, dict) or "rows" not in options:
        raise ValueError('an object with "rows" is needed')
    rows = options.pop("rows")
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        return _by_name(rows), options
    array = np.asarray(rows)
    if array.dtype.kind not in "iuf":
        raise ValueError(
            "rows must be lists of numbers, all of one shape, or objects of values by column's name"
        )
    return array, options


def _by_name(rows: list[dict[str, Any]]) -> Named:
    for number, row in enumerate(rows):
        if odd := sorted(row.keys() ^ rows[0].keys()):
            there = "has" if odd[0] in row else "lacks"
            raise ValueError(
                f"row {number} {there} the column {brief(odd[0])}, unlike the first row"
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _arrow(body: bytes, most: int) -> Named:
    """The columns of an Arrow stream of at most so many rows."""
    arrow = _pyarrow()
    try:
        _refuse_compressed(body, arrow)
        with arrow.ipc.open_stream(body) as stream:
            names = stream.schema.names
            _check_schema(stream.schema, arrow.types)
            found: Named = {name: [] for name in names}
            for batch in stream:
                batch.validate(full=True)
                if names and len(found[names[0]]) + batch.num_rows > most:
                    raise ValueError(
                        f"rows: from 1 to {most:,} rows are answered, got more"
                    )
                for name, column in zip(names, batch.columns, strict=True):
                    found[name] += _values(column)
    except (
        arrow.ArrowException,
        struct.error,
        OSError,
        OverflowError,
        UnicodeDecodeError,
        IndexError,
    ) as error:
        raise ValueError("the body is no Arrow stream of plain columns") from error
    return found


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise HTTPException(
            415, 'Arrow needs pyarrow on the server: pip install "slimbayes[parquet]"'
        ) from error
    return pyarrow


def _check_schema(schema: Any, types: Any) -> None:
    """Refuse columns whose values may take more room than the body has bytes: nulls, views, and what is nested."""
    for one in schema:
        kind, lists = one.type, ("list", "large_list", "fixed_size_list")
        tests = [
            "integer",
            "floating",
            "boolean",
            "string",
            "large_string",
            "date",
            "timestamp",
        ]
        if types.is_dictionary(kind):
            kind, tests = kind.value_type, ["string", "large_string"]
        elif any(getattr(types, f"is_{name}")(kind) for name in lists):
            kind, tests = kind.value_type, ["integer", "floating"]
        if not any(getattr(types, f"is_{name}")(kind) for name in tests):
            raise ValueError(
                f"column {brief(one.name)} holds {brief(str(one.type))}: numbers, texts, truth values, dates and lists "
                f"of numbers are taken"
            )
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("two columns have one name")


def _values(column: Any) -> list[Any]:
    """A column's values. Words of a dictionary are shared, for a long one may stand in every row."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    words = column.dictionary.to_pylist()
    return [
        None if code is None else words[code] for code in column.indices.to_pylist()
    ]


def _refuse_compressed(body: bytes, arrow: Any) -> None:
    """Refuse compressed columns, whose size once unpacked nobody bounds; whether they are stands in each message's
    flatbuffer (Arrow's Message.fbs)."""
    for message in arrow.ipc.MessageReader.open_stream(body):
        head = bytes(message.metadata)
        root = _number("<I", head, 0)
        kind = head[_field(head, root, 1)]
        if kind not in _BATCHES:
            continue
        batch = _inside(head, _field(head, root, 2))
        if (inner := _BATCHES[kind]) is not None:
            batch = _inside(head, _field(head, batch, inner))
        if _field(head, batch, _COMPRESSION):
            raise ValueError("the columns of an Arrow stream must not be compressed")


def _number(form: str, head: bytes, at: int) -> int:
    return int(struct.unpack_from(form, head, at)[0])


def _field(head: bytes, table: int, index: int) -> int:
    """Where a table of a flatbuffer has a field; 0 where it has none."""
    offsets = table - _number("<i", head, table)
    place = 4 + 2 * index
    offset = (
        _number("<H", head, offsets + place)
        if place < _number("<H", head, offsets)
        else 0
    )
    return table + offset if offset else 0


def _inside(head: bytes, at: int) -> int:
    return at + _number("<I", head, at)


# --- options ---


def _draws(options: dict[str, Any], model: Served, most: int) -> int:
    draws = options.get("draws")
    if draws is None:
        return model.draws or 1
    if model.draws is None:
        raise HTTPException(
            422, "draws: this exported model has its draws in the file; leave them out."
        )
    if isinstance(draws, bool) or not isinstance(draws, int) or not 1 <= draws <= most:
        raise HTTPException(
            422, f"draws must be a whole number from 1 to {most}, got {brief(draws)}."
        )
    return draws


def _level(options: dict[str, Any], model: Served) -> float | None:
    level = options.get("level")
    if level is None:
        return None
    if model.draws is None:
        raise HTTPException(
            422,
            "level: an exported model has means and variances, no intervals; serve the run.",
        )
    if (
        isinstance(level, bool)
        or not isinstance(level, int | float)
        or not 0 < level < 1
    ):
        raise HTTPException(
            422, f"level must lie strictly between 0 and 1, got {brief(level)}."
        )
    return float(level)
