"""Folders of files that are whole or not there: written aside, synced and renamed, with the sha256 of each file in manifest.json."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that is damaged or does not fit; the message says what is wrong and where."""


def as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a folder at once, with its manifest; a former one of the same name is replaced only when the new one is complete.

    It steps aside as "<name>.previous" for the moment between two renames.
    """
    manifest = as_json({"format": FORMAT, "sha256": {n: hashlib.sha256(d).hexdigest() for n, d in files.items()}})
    return _write_atomically(path, {**files, "manifest.json": manifest})


def read_folder(folder: Path, needed: set[str]) -> dict[str, bytes]:
    """All files of a folder after comparing each with the manifest, which must list those needed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        version, hashes = manifest["format"], manifest["sha256"]
        named = all(isinstance(n, str) and Path(n).name == n and isinstance(h, str) for n, h in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'manifest.json'} is missing or damaged: {error}.") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has format {version!r}; this version of slimbayes reads format {FORMAT}.")
    if not named or not needed <= set(hashes):
        raise CheckpointError(
            f"{folder / 'manifest.json'} is damaged: it does not list {' and '.join(sorted(needed))}."
        )
    files = {}
    for name, expected in hashes.items():
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}.") from error
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise CheckpointError(
                f"{folder / name} is damaged: its sha256 differs from the manifest's. Restore it from a copy."
            )
    return files


def _write_atomically(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (path / "manifest.json").exists() and any(path.iterdir()):
        raise CheckpointError(f"{path} exists and is not a slimbayes checkpoint; refusing to replace it.")
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    previous = path.with_name(path.name + ".previous")
    try:
        for name, data in files.items():
            _write_synced(temporary / name, data)
        _sync(temporary)
        os.chmod(temporary, 0o755)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(path, previous)
        os.rename(temporary, path)
        _sync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _write_synced(file: Path, data: bytes) -> None:
    with open(file, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
