"""Opening a data set by its name. Nothing is downloaded: errors say what to put where.

data = slimbayes_lab.data.load("cifar10", root="~/data")     # or set SLIMBAYES_DATA
data.to("cuda").train.x                                  # uint8 (50000, 3, 32, 32)
slimbayes_lab.data.prepare("cifar10", root="~/data")         # from now on load maps arrays instead of decoding files
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimbayes_lab.data.dataset import Dataset, Found
from slimbayes_lab.data.prepared import save, sha256
from slimbayes_lab.data.sources import SOURCES, find, find_files, root_folder
from slimbayes_lab.data.stays import mortality


def load(
    name: str, root: Path | str | None = None, splits: Sequence[str] | None = None
) -> Dataset:
    """A data set from the folder `root`, or else from $SLIMBAYES_DATA; all of its splits, or those named.

    Where `prepare` has converted the set, its tensors are mapped into memory, once their digest is right; writing to
    such a tensor changes memory only. Otherwise the set's own files are read.

    Raises FileNotFoundError where the set is not there, with the files it looked for and where they are officially had,
    and ValueError where a file is broken, with the file, the record and what was expected.

    Example:
        >>> load("mnist", root="/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: No mnist: looked in /nowhere/mnist, /nowhere/MNIST/raw for ...
    """
    found = find(name, root)
    if isinstance(splits, str):
        raise TypeError(
            f"splits must be a list of names, got the text {splits!r}: write [{splits!r}]."
        )
    names = list(found.splits) if splits is None else splits
    if unknown := [split for split in names if split not in found.splits]:
        raise ValueError(
            f"{name} has no split {unknown[0]!r} here, it has: {', '.join(found.splits)}."
        )
    return _read(name, found, names)


def _read(name: str, found: Found, splits: Sequence[str]) -> Dataset:
    rows = {split: found.splits[split]() for split in splits}
    return Dataset(name, rows, found.classes, found.vocabulary(), found.columns())


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
    found = find_files(name, root)
    if found.stays is None:
        raise ValueError(
            f"{name} is no set of health records: there is nothing in it to put into bags."
        )
    data = mortality(
        found.stays(), None, precision, aggregate_older_than, count, tokens_per_bag
    )
    return replace(data, name=name)


def prepare(
    name: str, root: Path | str | None = None, out: Path | str | None = None
) -> Path:
    """Convert a set's files once to tensors that `load` maps into memory, and return their folder.

    It is <root>/<name>, or <out>/<name>, where `out` is then the root to load from. `load` does not look at the files
    any more: prepare the set again when they change. Folders of images are refused: training crops pictures of many
    sizes, so arrays of one size would be another data set.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "yacht.csv").write_text("length,drag\\n1.0,2.0\\n3.0,4.0\\n")
        ...     folder = prepare("uci/yacht", root)
        ...     folder.relative_to(root).as_posix(), load("uci/yacht", root).splits["all"].x.tolist()
        ('uci/yacht', [[1.0], [3.0]])
    """
    found = find_files(name, root)
    return save(
        _read(name, found, list(found.splits)),
        root_folder(root) if out is None else out,
    )


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
    """Read all files of a set, prepared or not, and compare it with what was published; image folders are counted."""
    folder, found = root_folder(root), find_files(name, root)
    source = SOURCES[name]
    facts = Facts(
        name,
        {},
        {},
        {_shown(file, folder): sha256(file) for file in found.files()},
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


def _shown(file: Path, root: Path) -> str:
    """The name of a file under the root."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)
