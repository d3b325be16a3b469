"""Opening a data set by name. Nothing is ever downloaded: a set that is not there gives an error that says what to put where.

data = slimbayes.data.load("cifar10", root="~/data")     # or set SLIMBAYES_DATA
data.to("cuda").train.x                                  # uint8 (50000, 3, 32, 32)
slimbayes.data.prepare("cifar10", root="~/data")         # from now on load maps arrays instead of decoding files
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slimbayes.data import cache as caches
from slimbayes.data.catalog import SOURCES as SOURCES
from slimbayes.data.catalog import find, root_folder, source_of
from slimbayes.data.dataset import Dataset, Found, Split


def load(
    name: str, root: Path | str | None = None, splits: Sequence[str] | None = None, cache: Path | str | None = None
) -> Dataset:
    """A data set from the folder `root`, or else from $SLIMBAYES_DATA; all of its splits, or those named.

    Where `prepare` has made a cache of the files as they are now, its arrays are mapped into memory; writing to such a tensor changes memory only.
    A cache that is out of date or damaged gives a warning and the files are read. `cache` is the folder that `prepare` was told to use, if any.

    Raises FileNotFoundError where the set is not there, with the files it looked for and where they are officially had, and ValueError
    where a file is broken, with the file, the record and what was expected.

    Example:
        >>> load("mnist", root="/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: No mnist: looked in /nowhere/mnist, /nowhere/MNIST/raw for ...
    """
    source, folder = source_of(name), root_folder(root)
    found = find(source, folder)
    if isinstance(splits, str):
        raise TypeError(f"splits must be a list of names, got the text {splits!r}: write [{splits!r}].")
    for split in splits or ():
        if split not in found.parts:
            raise ValueError(f"{name} has no split {split!r} here, it has: {', '.join(found.parts)}.")
    names = list(found.parts) if splits is None else splits
    return _from_cache(_cache_folder(name, folder, cache), name, found, folder, names) or _from_files(
        name, found, names
    )


def prepare(
    name: str, root: Path | str | None = None, out: Path | str | None = None, progress: caches.Progress | None = None
) -> Path:
    """Keeps a set as arrays that `load` maps into memory, and returns their folder; one that is up to date is left alone.

    The folder is `out`, or else <name> under $SLIMBAYES_CACHE, or else under <root>/.slimbayes-cache. Whatever interrupts the writing,
    an earlier cache stays as it was and no part of a new one is ever used. Sets of folders of images are refused: their pictures have many
    sizes, and training crops them from the full picture, so arrays of one size would be another data set.

    Args:
        progress: called with (rows done, rows in all, what is being done).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "yacht.csv").write_text("length,drag\\n1.0,2.0\\n3.0,4.0\\n")
        ...     folder = prepare("uci/yacht", root)
        ...     folder.relative_to(root).as_posix(), load("uci/yacht", root).splits["all"].x.tolist()
        ('.slimbayes-cache/uci/yacht', [[1.0], [3.0]])
    """
    source, folder = source_of(name), root_folder(root)
    found, target = find(source, folder), _cache_folder(name, folder, out)
    files = found.files()
    if not files:
        raise ValueError(
            f"{name} is a folder of images of many sizes, decoded one by one, and is not kept as arrays: training crops them from the full picture."
        )
    if (target / caches.MANIFEST).is_file():
        try:
            caches.read(target, name, files, folder, list(found.parts))
            return target
        except caches.Unusable:
            pass  # what is to be replaced
    try:
        caches.write(target, name, found, files, folder, progress or (lambda done, total, what: None))
    except caches.Unusable as error:
        raise ValueError(f"{name}: {error} while it was being read; prepare it again.") from error
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise PermissionError(
            error.errno, f"{target} cannot be written: pass another folder as out, or set SLIMBAYES_CACHE"
        ) from error
    return target


def available(root: Path | str | None = None) -> dict[str, dict[str, int]]:
    """Every data set under `root` or $SLIMBAYES_DATA with the number of rows of its splits; images are not decoded.

    A set whose files are broken is left out with a warning that says why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     available(folder)
        {}
    """
    here, folder = {}, root_folder(root)
    for name, source in SOURCES.items():
        try:
            found = find(source, folder)
            here[name] = {split: part.count() for split, part in found.parts.items()}
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            warnings.warn(f"{name} is there but cannot be read: {error}", stacklevel=2)
    return here


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Reads all files of a set and says where its counts or class balance differ from the published ones: an empty list where none does."""
    found = find(source_of(name), root_folder(root))
    return differences(_from_files(name, found, list(found.parts)))


def differences(data: Dataset) -> list[str]:
    """Where the counts or the class balance of a set differ from the published ones."""
    source, report = source_of(data.name), []
    for split, rows in data.splits.items():
        expected = source.published.get(split, len(rows))
        if len(rows) != expected:
            report.append(f"{data.name} {split}: {len(rows)} rows, published are {expected}.")
        if source.balanced and isinstance(rows, Split):
            counts = rows.y.bincount(minlength=len(data.classes))
            if len(counts.unique()) > 1:
                report.append(
                    f"{data.name} {split}: {int(counts.min())} to {int(counts.max())} rows in a class, published are equal numbers."
                )
    return report


def _from_files(name: str, found: Found, splits: Sequence[str]) -> Dataset:
    read = {split: found.parts[split].read() for split in splits}
    return Dataset(name, read, found.classes, found.vocabulary(), found.columns())


def _from_cache(cache: Path, name: str, found: Found, root: Path, splits: Sequence[str]) -> Dataset | None:
    if not (cache / caches.MANIFEST).is_file():
        return None
    try:
        return replace(caches.read(cache, name, found.files(), root, splits), columns=found.columns())
    except caches.Unusable as error:
        warnings.warn(
            f"The cache {cache} is not used: {error}. Reading the files of {name}; prepare it again.", stacklevel=3
        )
        return None


def _cache_folder(name: str, root: Path, given: Path | str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    shared = os.environ.get("SLIMBAYES_CACHE")
    return (Path(shared).expanduser() if shared else root / ".slimbayes-cache") / name
