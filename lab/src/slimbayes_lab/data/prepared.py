"""Data sets that are kept as tensors: converted once, and mapped into memory from then on.

    <root>/<name>/<split>.safetensors     the tensors x and y
    <root>/<name>/prepared.json           the SHA-256 of each of these files, and what they hold; written last

Every file is written aside and put in its place at once. Processes that prepare the same files write the same bytes, so
they do not disturb one another.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimbayes.errors import brief
from slimbayes.files import claim_folder, replacing, write_bytes
from slimbayes.untrusted import (
    check_form,
    check_regular,
    open_file,
    parse_json,
    read_file,
)
from slimbayes_lab.data.dataset import Dataset, Found, Split

FORMAT = 1
MANIFEST = "prepared.json"
_FORM = {
    "format": int,
    "name": str,
    "sha256": {str: str},
    "classes": [str],
    "vocabulary": [str],
    "columns": [str],
}


def save(data: Dataset, root: Path | str) -> Path:
    """Keep a data set where `load(data.name, root)` finds it, in place of the files it came from; return its folder.

    It serves sets that other packages read: torchvision's CIFAR10, for one, through `as_split`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from slimbayes_lab.data import load
        >>> rows = Split(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([3, 7]))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = save(Dataset("cifar10", {"test": rows}, tuple("abcdefghij")), root)
        ...     load("cifar10", root).test.y
        tensor([3, 7])
    """
    folder = Path(root).expanduser() / data.name
    for rows in data.splits.values():
        if not isinstance(rows, Split):
            raise ValueError(
                f"{data.name} is a folder of images of many sizes, decoded one by one, and is not kept as arrays."
            )
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder, [*(_file(folder, s).name for s in data.splits), MANIFEST])
    digests = {}
    for split, rows in data.splits.items():
        assert isinstance(rows, Split)
        file = _file(folder, split)
        try:
            with replacing(file) as draft:
                save_file({"x": rows.x.contiguous(), "y": rows.y.contiguous()}, draft)
                digests[split] = sha256(draft)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}") from error
    manifest = {
        "format": FORMAT,
        "name": data.name,
        "sha256": digests,
        "classes": data.classes,
        "vocabulary": data.vocabulary,
        "columns": data.columns,
    }
    write_bytes(folder / MANIFEST, json.dumps(manifest).encode())
    return folder


def find_prepared(name: str, root: Path) -> Found | None:
    """What `save` has kept of a set, if anything."""
    folder = root / name
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        manifest = parse_json(read_file(file))
        check_form(manifest, _FORM)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read or is damaged: {error}. {_remedy(name)}"
        ) from error
    if manifest["format"] != FORMAT or manifest["name"] != name:
        got = f"{brief(manifest['name'])} in format {manifest['format']}"
        raise ValueError(
            f"{file} is of {got}, needed is {name!r} in format {FORMAT}. {_remedy(name)}"
        )
    digests = manifest["sha256"]
    return Found(
        {
            split: partial(_read, _file(folder, split), digest, name)
            for split, digest in digests.items()
        },
        tuple(manifest["classes"]),
        lambda: tuple(manifest["vocabulary"]),
        lambda: [_file(folder, split) for split in digests],
        lambda: tuple(manifest["columns"]),
    )


def _read(file: Path, digest: str, name: str) -> Split:
    """A split as a map of its file, which must have this digest; writing to its tensors changes memory only."""
    try:
        check_regular(file)
        if sha256(file) != digest:
            raise ValueError(f"its SHA-256 is not the one in {MANIFEST}")
        with safe_open(file, "pt") as stored:
            return Split(stored.get_tensor("x"), stored.get_tensor("y"))
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(
            f"{file} is missing or damaged: {error}. {_remedy(name)}"
        ) from error


def sha256(file: Path) -> str:
    """The digest of a file, which is read in blocks."""
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split.replace('/', '-')}.safetensors"


def _remedy(name: str) -> str:
    return f"Prepare {name} again, or remove {MANIFEST} to read the set's own files."
