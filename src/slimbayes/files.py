"""Files that are whole or not there: written aside, synced and renamed, so that a crash leaves the old or the new one.

write_text, write_json, write_csv, write_bytes      one file
write_folder, read_folder                           a folder with the sha256 of each file in its manifest.json
"""

import csv
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimbayes.errors import brief, cut
from slimbayes.untrusted import parse_json, read_file

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that is damaged or does not fit; the message says what is wrong and where."""


def as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def write_bytes(file: Path, data: bytes) -> None:
    """Replace a file at once: whoever reads it sees the old one or the new one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(Path(folder, "note"), "done")
        ...     Path(folder, "note").read_text(), [p.name for p in Path(folder).iterdir()]
        ('done', ['note'])
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        _write_synced(draft, data)
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_text(file: Path, text: str) -> None:
    """Replace a text file at once, in UTF-8, its line ends as they are."""
    write_bytes(file, text.encode())


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file at once."""
    write_bytes(file, as_json(data))


def write_csv(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a CSV file at once; its columns are the names in all lines, in the order they appear."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_text(file, text.getvalue())


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a folder at once, with its manifest; a former one is replaced only when the new one is complete.

    The former one steps aside as "<name>.previous" for the moment between two renames.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (path / "manifest.json").exists() and any(path.iterdir()):
        raise CheckpointError(f"{path} exists and is not a slimbayes checkpoint; refusing to replace it.")
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = as_json({"format": FORMAT, "sha256": hashes})
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, data in {**files, "manifest.json": manifest}.items():
            _write_synced(draft / name, data)
        sync_folder(draft)
        os.chmod(draft, 0o755)
        _replace_folder(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def read_folder(folder: Path, needed: set[str]) -> dict[str, bytes]:
    """All files of a folder after comparing each with the manifest, which must list those needed."""
    files = {}
    for name, expected in _read_manifest(folder, needed).items():
        try:
            files[name] = read_file(folder / name, limit=math.inf)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}.") from error
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise CheckpointError(
                f"{folder / name} is damaged: its sha256 differs from the manifest's. Restore it from a copy."
            )
    return files


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(folder: Path, needed: set[str]) -> dict[str, str]:
    """The sha256 of each file, by its name."""
    file = folder / "manifest.json"
    try:
        manifest = parse_json(read_file(file))
        version, hashes = manifest["format"], manifest["sha256"]
        named = all(isinstance(n, str) and Path(n).name == n and isinstance(h, str) for n, h in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {cut(str(error))}.") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has format {brief(version)}; this version of slimbayes reads format {FORMAT}.")
    if not named or not needed <= set(hashes):
        raise CheckpointError(f"{file} is damaged: it does not list {' and '.join(sorted(needed))}.")
    return hashes


def _replace_folder(draft: Path, path: Path) -> None:
    previous = path.with_name(path.name + ".previous")
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(path, previous)
    os.rename(draft, path)
    sync_folder(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _write_synced(file: Path, data: bytes) -> None:
    with open(file, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
