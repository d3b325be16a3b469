"""Opening a data set by its name. Nothing is downloaded: errors say what to put where.

data = slimbayes.data.load("cifar10", root="~/data")     # or set SLIMBAYES_DATA
data.to("cuda").train.x                                  # uint8 (50000, 3, 32, 32)
slimbayes.data.prepare("cifar10", root="~/data")         # from now on load maps arrays instead of decoding files

A prepared set is one safetensors file for each split, mapped into memory instead of read: pages come when touched.

    <root>/.slimbayes-cache/<name>/<split>.safetensors          tensors x and y, and what they were made from

A file is written aside and put in its place at once, so whatever stops the writing leaves an earlier one as it was. A
source is the same as before if its size and time are, or else its SHA-256 is: copying a set does not spoil its cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimbayes.data.dataset import Dataset, Found, Split
from slimbayes.data.sources import SOURCES, find, root_folder
from slimbayes.data.stays import mortality
from slimbayes.files import claim_folder, replacing
from slimbayes.untrusted import check_regular, open_file

FORMAT = (
    "3"  # of a cache: raise it when a reader gives other numbers for the same files
)
CACHE = ".slimbayes-cache"
Progress = Callable[[int, int, str], None]


def load(
    name: str,
    root: Path | str | None = None,
    splits: Sequence[str] | None = None,
    cache: Path | str | None = None,
) -> Dataset:
    """A data set from the folder `root`, or else from $SLIMBAYES_DATA; all of its splits, or those named.

    Where `prepare` has made a cache of the files as they are now, its tensors are mapped into memory; writing to such a
    tensor changes memory only. `cache` is the folder that `prepare` was told to use, if any.

    Raises FileNotFoundError where the set is not there, with the files it looked for and where they are officially had,
    and ValueError where a file is broken, with the file, the record and what was expected.

    Example:
        >>> load("mnist", root="/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: No mnist: looked in /nowhere/mnist, /nowhere/MNIST/raw for ...
    """
    folder, found = root_folder(root), find(name, root)
    if isinstance(splits, str):
        raise TypeError(
            f"splits must be a list of names, got the text {splits!r}: write [{splits!r}]."
        )
    names = list(found.splits) if splits is None else splits
    if unknown := [split for split in names if split not in found.splits]:
        raise ValueError(
            f"{name} has no split {unknown[0]!r} here, it has: {', '.join(found.splits)}."
        )
    kept = _cache_folder(name, folder, cache)
    if all(_cache_file(kept, split).is_file() for split in names):
        try:
            read, vocabulary = _read_cache(kept, name, found.files(), folder, names)
            return Dataset(name, read, found.classes, vocabulary, found.columns())
        except Unusable as error:
            advice = f"Reading the files of {name}; prepare it again."
            warnings.warn(
                f"The cache {kept} is not used: {error}. {advice}", stacklevel=2
            )
    read_now = {split: found.splits[split]() for split in names}
    return Dataset(name, read_now, found.classes, found.vocabulary(), found.columns())


def load_bags(
    name: str,
    root: Path | str | None = None,
    precision: float = 1.0,
    aggregate_older_than: float | None = None,
    count: int = 5,
    tokens_per_bag: int | None = None,
) -> Dataset:
    """A set of health records with bags of another width than `load` gives them; arguments as in `mortality`.

    Example:
        >>> load_bags("physionet2012", root="/nowhere", precision=24.0)
        Traceback (most recent call last):
        ...
        FileNotFoundError: No physionet2012: looked in /nowhere/physionet2012 for ...
    """
    found = find(name, root)
    if found.stays is None:
        raise ValueError(
            f"{name} is no set of health records: there is nothing in it to put into bags."
        )
    data = mortality(
        found.stays(), None, precision, aggregate_older_than, count, tokens_per_bag
    )
    return replace(data, name=name)


def prepare(
    name: str,
    root: Path | str | None = None,
    out: Path | str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Keep a set as tensors that `load` maps into memory, unless they are up to date, and return their folder.

    The folder is `out`, or else <name> under $SLIMBAYES_CACHE, or else under <root>/.slimbayes-cache. Folders of images
    are refused: training crops pictures of many sizes, so arrays of one size would be another data set.

    Args:
        progress: called with (splits done, splits in all, the one that comes next).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "yacht.csv").write_text("length,drag\\n1.0,2.0\\n3.0,4.0\\n")
        ...     folder = prepare("uci/yacht", root)
        ...     folder.relative_to(root).as_posix(), load("uci/yacht", root).splits["all"].x.tolist()
        ('.slimbayes-cache/uci/yacht', [[1.0], [3.0]])
    """
    folder, found = root_folder(root), find(name, root)
    target = _cache_folder(name, folder, out)
    if not (files := found.files()):
        raise ValueError(
            f"{name} is a folder of images of many sizes, decoded one by one, and is not kept as arrays."
        )
    try:
        _read_cache(target, name, files, folder, list(found.splits))
        return target
    except Unusable:
        pass  # not there, or what is to be replaced
    try:
        _write_cache(
            target, name, found, folder, progress or (lambda done, total, split: None)
        )
    except Unusable as error:
        raise ValueError(
            f"{name}: {error} while it was being read; prepare it again."
        ) from error
    return target


def available(root: Path | str | None = None) -> dict[str, list[str]]:
    """Every data set under `root` or $SLIMBAYES_DATA with the names of its splits; nothing is read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     available(folder)
        {}
    """
    here, folder = {}, root_folder(root)
    for name in SOURCES:
        try:
            here[name] = list(find(name, folder).splits)
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            warnings.warn(f"{name} is there but cannot be read: {error}", stacklevel=2)
    return here


# --- what the files hold, and what was published ---


@dataclass(frozen=True)
class Facts:
    """What the files of a set hold; `differences` says in words where it is not the published one."""

    name: str
    rows: dict[str, int]
    classes: dict[str, dict[str, int]]
    sha256: dict[str, str]
    differences: list[str]


def inspect(name: str, root: Path | str | None = None) -> Facts:
    """Read all files of a set, never its cache, and compare it with what was published; image folders are counted."""
    folder, found = root_folder(root), find(name, root)
    source = SOURCES[name]
    facts = Facts(
        name,
        {},
        {},
        {_shown(file, folder): _sha256(file) for file in found.files()},
        [],
    )
    for split, read in found.splits.items():  # one in memory at a time
        y = (rows := read()).y
        facts.rows[split] = len(rows)
        if found.classes and y.dim() == 1 and not y.is_floating_point():
            counts = y.bincount(minlength=len(found.classes)).tolist()
            facts.classes[split] = dict(zip(found.classes, counts, strict=True))
            if source.balanced and len(set(counts)) > 1:
                spread = f"{min(counts)} to {max(counts)} rows in a class"
                facts.differences.append(
                    f"{name} {split}: {spread}, published are equal numbers."
                )
        if source.published.get(split, len(rows)) != len(rows):
            facts.differences.append(
                f"{name} {split}: {len(rows)} rows, published are {source.published[split]}."
            )
    return facts


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Read all files of a set and say where its counts or class balance differ from the published ones, if anywhere."""
    return inspect(name, root).differences


# --- the cache ---


def _cache_folder(name: str, root: Path, given: Path | str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    shared = os.environ.get("SLIMBAYES_CACHE")
    return (Path(shared).expanduser() if shared else root / CACHE) / name


class Unusable(Exception):
    """There is a cache, but it may not be used: the message says why."""


def _cache_file(folder: Path, split: str) -> Path:
    return folder / f"{split.replace('/', '-')}.safetensors"


def _read_cache(
    folder: Path, name: str, files: Sequence[Path], root: Path, splits: Sequence[str]
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """The named splits and the vocabulary, if they were made of exactly these files, as they are now."""
    found: dict[str, Split] = {}
    about: dict[str, str] = {}
    for split in splits:
        try:
            check_regular(_cache_file(folder, split))
            with safe_open(_cache_file(folder, split), "pt") as stored:
                former, about = about, stored.metadata() or {}
                if (made := (about.get("name"), about.get("format"))) != (name, FORMAT):
                    raise Unusable(
                        f"it is of {made[0]!r} in format {made[1]!r}, needed is {name!r} in format {FORMAT}"
                    )
                if about != former:
                    _compare(json.loads(about["sources"]), files, root)
                found[split] = Split(stored.get_tensor("x"), stored.get_tensor("y"))
        except (
            SafetensorError,
            ValueError,
            KeyError,
            OSError,
            RecursionError,
        ) as error:
            raise Unusable(f"it is damaged: {type(error).__name__}: {error}") from error
    return found, tuple(json.loads(about.get("vocabulary", "[]")))


def _write_cache(
    folder: Path, name: str, found: Found, root: Path, progress: Progress
) -> None:
    """All splits of a set, one at a time in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    if CACHE not in folder.parts:  # the user chose it
        names = [_cache_file(folder, split).name for split in found.splits]
        claim_folder(folder, names)
    files = found.files()
    sources = [_entry(file, root) for file in files]
    about = {"format": FORMAT, "name": name, "sources": json.dumps(sources)}
    for number, (split, read_split) in enumerate(found.splits.items()):
        progress(number, len(found.splits), split)
        rows = read_split()
        assert isinstance(rows, Split)  # image folders have no files to compare
        target = _cache_file(folder, split)
        try:
            with replacing(target) as draft:
                tensors = {"x": rows.x.contiguous(), "y": rows.y.contiguous()}
                save_file(
                    tensors,
                    draft,
                    {**about, "vocabulary": json.dumps(found.vocabulary())},
                )
                _compare(sources, files, root)
        except SafetensorError as error:
            raise OSError(f"{target} cannot be written: {error}") from error
    progress(len(found.splits), len(found.splits), "done")


def _compare(
    sources: Sequence[dict[str, Any]], files: Sequence[Path], root: Path
) -> None:
    """Raise Unusable where files are not those recorded; content is read only where size and time leave a doubt."""
    recorded, now = (
        {entry["file"]: entry for entry in sources},
        {_shown(file, root): file for file in files},
    )
    if odd := sorted(set(recorded) ^ set(now)):
        raise Unusable(
            f"the source has other files than it was made from, such as {odd[0]}"
        )
    for name, file in now.items():
        old, new = recorded[name], file.stat()
        if new.st_size != old["size"] or (
            new.st_mtime_ns != old["mtime_ns"] and _sha256(file) != old["sha256"]
        ):
            raise Unusable(f"its source {name} has changed")


def _entry(file: Path, root: Path) -> dict[str, Any]:
    now = file.stat()
    return {
        "file": _shown(file, root),
        "size": now.st_size,
        "mtime_ns": now.st_mtime_ns,
        "sha256": _sha256(file),
    }


def _sha256(file: Path) -> str:
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _shown(file: Path, root: Path) -> str:
    """The name of a file under the root."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)
