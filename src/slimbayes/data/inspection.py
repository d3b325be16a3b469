"""What the files of a set hold, to be compared with what was published: rows, classes, means, checksums.

Sizes: N rows, C channels, P features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.cache import sha256, shown
from slimbayes.data.catalog import Source, find, root_folder, source_of
from slimbayes.data.dataset import Split
from slimbayes.data.folders import ImageFolder


@dataclass(frozen=True)
class SplitFacts:
    """`published` is None where no count was. Means and standard deviations are of channels in units of 255, or of
    features; none for tokens."""

    rows: int
    published: int | None
    classes: dict[str, int]
    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class Facts:
    """`sha256` has the files of the set by their names under the root; `differences` says in words where the set is not
    the published one."""

    name: str
    splits: dict[str, SplitFacts]
    sha256: dict[str, str]
    differences: list[str]


def inspect(name: str, root: Path | str | None = None) -> Facts:
    """Reads all files of a set, never its cache. Folders of images are counted, not decoded.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "yacht.csv").write_text("length,drag\\n1.0,2.0\\n3.0,4.0\\n")
        ...     facts = inspect("uci/yacht", root)
        >>> facts.splits["all"].mean, facts.splits["all"].std, facts.differences
        ([2.0], [1.0], ['uci/yacht all: 2 rows, published are 308.'])
    """
    source, folder = source_of(name), root_folder(root)
    found = find(source, folder)
    splits = {  # one in memory at a time
        split: _facts(part.read(), source.published.get(split), found.classes) for split, part in found.parts.items()
    }
    sums = {shown(file, folder): sha256(file) for file in found.files()}
    return Facts(name, splits, sums, [line for split in splits for line in _differences(source, split, splits[split])])


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Reads all files of a set and says where its counts or class balance differ from the published ones: an empty list
    where none does."""
    return inspect(name, root).differences


def _differences(source: Source, split: str, facts: SplitFacts) -> list[str]:
    report = []
    if facts.published not in (None, facts.rows):
        report.append(f"{source.name} {split}: {facts.rows} rows, published are {facts.published}.")
    counts = facts.classes.values()
    if source.balanced and len(set(counts)) > 1:
        spread = f"{min(counts)} to {max(counts)} rows in a class"
        report.append(f"{source.name} {split}: {spread}, published are equal numbers.")
    return report


def _facts(rows: Split | ImageFolder, published: int | None, names: tuple[str, ...]) -> SplitFacts:
    counts: dict[str, int] = {}
    if names and rows.y.dim() == 1 and not rows.y.is_floating_point():
        counts = dict(zip(names, rows.y.bincount(minlength=len(names)).tolist()))
    mean, std = moments(rows.x) if isinstance(rows, Split) else ([], [])
    return SplitFacts(len(rows), published, counts, mean, std)


def moments(x: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W), in units of 255, or of each feature of
    a table (N, P).

    Example:
        >>> moments(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
        ([0.5], [0.5])
    """
    if not len(x):
        return [], []
    if x.dtype == torch.uint8 and x.dim() == 4:  # counts of the 256 values: exact, and no copy of all pixels as floats
        levels = torch.arange(256, dtype=torch.float64, device=x.device) / 255
        shares = [_counts(x[:, c]) / x[:, c].numel() for c in range(x.shape[1])]
        means = [float(share @ levels) for share in shares]
        return means, [float(share @ (levels - mean) ** 2) ** 0.5 for share, mean in zip(shares, means)]
    if x.is_floating_point() and x.dim() == 2:
        return x.double().mean(0).tolist(), x.double().std(0, correction=0).tolist()
    return [], []


def _counts(pixels: Tensor) -> Tensor:
    """How often each of the 256 values occurs, a few thousand images at a time: bincount takes eight bytes for a
    pixel."""
    return torch.stack([piece.flatten().bincount(minlength=256) for piece in pixels.split(4096)]).sum(0).double()
