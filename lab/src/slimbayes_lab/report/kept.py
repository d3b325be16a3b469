"""Runs kept in one JSON-lines file: each line is a JSON file of some folder, with the place it had there.

    rank1.jsonl/table4/mortality-emp-0123456789ab/record.json       a path into such a file

Such paths are made, shortened and compared like those of files. Curves are kept by columns, with six digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from slimbayes.files import write_text
from slimbayes.untrusted import parse_json, read_file

DIGITS = 6
LIMIT = 64 << 20  # bytes of such a file


def is_kept(path: Path) -> bool:
    """Whether a path is one into a JSON-lines file."""
    return any(part.endswith(".jsonl") for part in path.parts)


def glob(folder: Path, pattern: str) -> list[Path]:
    """Paths below a folder, or below a place in a JSON-lines file, that fit a pattern, sorted."""
    whole = folder / pattern
    if not is_kept(whole):
        return sorted(folder.glob(pattern))
    file, wanted = _parted(whole)
    if not file.exists():
        return []
    return sorted(file / place for place in _lines(file) if _fits(place, wanted))


def records(folder: Path) -> list[Path]:
    """Paths of the records of runs below a place in a JSON-lines file, sorted."""
    return [path for path in glob(folder, "**/*.json") if "config_hash" in load(path)]


def exists(path: Path) -> bool:
    """Whether there is such a file or folder, on the disk or in a JSON-lines file."""
    if not is_kept(path):
        return path.exists()
    file, place = _parted(path)
    return file.exists() and (place in _lines(file) or bool(glob(path, "**/*")))


def load(path: Path) -> Any:
    """What a JSON file holds, on the disk or in a JSON-lines file; not to be changed.

    Raises: OSError, or ValueError where it is no JSON.
    """
    if not is_kept(path):
        return parse_json(read_file(path))
    file, place = _parted(path)
    try:
        return _lines(file)[place]
    except KeyError:
        raise FileNotFoundError(2, f"{file} has no line of this place", place) from None


def keep(file: Path, contents: Mapping[str, Any]) -> None:
    """Add what JSON files hold, by their places, to a JSON-lines file; lines of the same places are replaced."""
    lines = {**(_lines(file) if file.exists() else {}), **contents}
    text = [
        json.dumps(
            {"place": place, "content": _packed(lines[place])},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for place in sorted(lines)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "\n".join(text) + "\n")


def _parted(path: Path) -> tuple[Path, str]:
    """The JSON-lines file of a path, and the place in it."""
    file = next(
        one for one in reversed([path, *path.parents]) if one.name.endswith(".jsonl")
    )
    return file, path.relative_to(file).as_posix()


def _fits(place: str, pattern: str) -> bool:
    """As `Path.glob` has it: `*` is one name, `**/` any number of folders."""
    start, anywhere, end = f"/{pattern}".partition("/**/")
    parts, first = PurePosixPath(place).parts, PurePosixPath(start.lstrip("/")).parts
    last = PurePosixPath(end).parts
    if len(parts) < len(first) + len(last):
        return False
    if not anywhere and len(parts) > len(first):
        return False
    ends = parts[len(parts) - len(last) :]
    return all(map(fnmatchcase, parts, first)) and all(map(fnmatchcase, ends, last))


def _lines(file: Path) -> dict[str, Any]:
    """What each line holds, by its place."""
    about = file.stat()
    return _read(file, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _read(file: Path, changed: int, size: int) -> dict[str, Any]:
    lines = read_file(file, LIMIT).decode().splitlines()
    return {one["place"]: _unpacked(one["content"]) for one in map(parse_json, lines)}


def _packed(content: Any) -> Any:
    """With the curve of a record by columns; None where a row has nothing."""
    if not isinstance(content, dict) or not content.get("curve"):
        return content
    names = dict.fromkeys(name for row in content["curve"] for name in row)
    columns = {
        name: [_rounded(row.get(name)) for row in content["curve"]] for name in names
    }
    return content | {"curve": columns}


def _unpacked(content: Any) -> Any:
    if not isinstance(content, dict) or not isinstance(content.get("curve"), dict):
        return content
    columns = content["curve"]
    rows = [
        {
            name: value
            for name, value in zip(columns, values, strict=True)
            if value is not None
        }
        for values in zip(*columns.values(), strict=True)
    ]
    return content | {"curve": rows}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
