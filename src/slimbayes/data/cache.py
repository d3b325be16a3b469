"""A set as one safetensors file for each split, mapped into memory instead of read: pages come when touched.

    <root>/.slimbayes-cache/<name>/<split>.safetensors          tensors x and y, and what they were made from

A file is written aside and put in its place at once, so whatever stops the writing leaves an earlier one as it was. A
source is the same as before if its size and time are, or else its SHA-256 is: copying a set does not spoil its cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimbayes.data.dataset import Found, Split
from slimbayes.files import replacing

FORMAT = "3"  # raise it when a reader gives other numbers for the same files
Progress = Callable[[int, int, str], None]


class Unusable(Exception):
    """There is a cache, but it may not be used: the message says why."""


def file_of(folder: Path, split: str) -> Path:
    return folder / f"{split.replace('/', '-')}.safetensors"


def read(
    folder: Path, name: str, files: Sequence[Path], root: Path, splits: Sequence[str]
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """The named splits and the vocabulary, if they were made of exactly these files, as they are now."""
    found: dict[str, Split] = {}
    about: dict[str, str] = {}
    for split in splits:
        try:
            with safe_open(file_of(folder, split), "pt") as stored:
                former, about = about, stored.metadata() or {}
                if (made := (about.get("name"), about.get("format"))) != (name, FORMAT):
                    raise Unusable(f"it is of {made[0]!r} in format {made[1]!r}, needed is {name!r} in format {FORMAT}")
                if about != former:
                    _compare(json.loads(about["sources"]), files, root)
                found[split] = Split(stored.get_tensor("x"), stored.get_tensor("y"))
        except (SafetensorError, ValueError, KeyError, OSError, RecursionError) as error:
            raise Unusable(f"it is damaged: {type(error).__name__}: {error}") from error
    return found, tuple(json.loads(about.get("vocabulary", "[]")))


def write(folder: Path, name: str, found: Found, root: Path, progress: Progress) -> None:
    """All splits of a set, one at a time in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    files = found.files()
    sources = [_entry(file, root) for file in files]
    about = {"format": FORMAT, "name": name, "sources": json.dumps(sources)}
    for number, (split, read_split) in enumerate(found.splits.items()):
        progress(number, len(found.splits), split)
        rows = read_split()
        if not isinstance(rows, Split):
            raise TypeError(f"The split {split} is decoded image by image: there are no arrays to keep.")
        target = file_of(folder, split)
        try:
            with replacing(target) as draft:
                tensors = {"x": rows.x.contiguous(), "y": rows.y.contiguous()}
                save_file(tensors, draft, {**about, "vocabulary": json.dumps(found.vocabulary())})
                _compare(sources, files, root)
        except SafetensorError as error:
            raise OSError(f"{target} cannot be written: {error}") from error
    progress(len(found.splits), len(found.splits), "done")


def _compare(sources: Sequence[dict[str, Any]], files: Sequence[Path], root: Path) -> None:
    """Raise Unusable where files are not those recorded; content is read only where size and time leave a doubt."""
    recorded, now = {entry["file"]: entry for entry in sources}, {shown(file, root): file for file in files}
    if odd := sorted(set(recorded) ^ set(now)):
        raise Unusable(f"the source has other files than it was made from, such as {odd[0]}")
    for name, file in now.items():
        old, new = recorded[name], file.stat()
        if new.st_size != old["size"] or (new.st_mtime_ns != old["mtime_ns"] and sha256(file) != old["sha256"]):
            raise Unusable(f"its source {name} has changed")


def _entry(file: Path, root: Path) -> dict[str, Any]:
    now = file.stat()
    return {"file": shown(file, root), "size": now.st_size, "mtime_ns": now.st_mtime_ns, "sha256": sha256(file)}


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shown(file: Path, root: Path) -> str:
    """The name of a file under the root."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)
