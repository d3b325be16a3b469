"""What the files of a set hold, to be compared with what was published: rows, classes, checksums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slimbayes.data.cache import sha256, shown
from slimbayes.data.catalog import find, root_folder, source_of


@dataclass(frozen=True)
class Facts:
    """What the files of a set hold; `differences` says in words where it is not the published one."""

    name: str
    rows: dict[str, int]
    classes: dict[str, dict[str, int]]
    sha256: dict[str, str]
    differences: list[str]


def inspect(name: str, root: Path | str | None = None) -> Facts:
    """Read all files of a set, never its cache, and compare it with what was published; image folders are counted.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "yacht.csv").write_text("length,drag\\n1.0,2.0\\n3.0,4.0\\n")
        ...     inspect("uci/yacht", root).differences
        ['uci/yacht all: 2 rows, published are 308.']
    """
    source, folder = source_of(name), root_folder(root)
    found = find(source, folder)
    facts = Facts(name, {}, {}, {shown(file, folder): sha256(file) for file in found.files()}, [])
    for split, read in found.splits.items():  # one in memory at a time
        y = (rows := read()).y
        facts.rows[split] = len(rows)
        if found.classes and y.dim() == 1 and not y.is_floating_point():
            counts = y.bincount(minlength=len(found.classes)).tolist()
            facts.classes[split] = dict(zip(found.classes, counts, strict=True))
            if source.balanced and len(set(counts)) > 1:
                spread = f"{min(counts)} to {max(counts)} rows in a class"
                facts.differences.append(f"{name} {split}: {spread}, published are equal numbers.")
        if source.published.get(split, len(rows)) != len(rows):
            facts.differences.append(f"{name} {split}: {len(rows)} rows, published are {source.published[split]}.")
    return facts


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Read all files of a set and say where its counts or class balance differ from the published ones, if anywhere."""
    return inspect(name, root).differences
