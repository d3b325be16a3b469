"""What an experiment is: data, network, method, training and evaluation, as closed types.

    name: rank1-cauchy
    data: {name: cifar10}
    model: {kind: wrn, depth: 16, width: 4}
    method: {kind: Rank1, members: 4, prior: {kind: Cauchy, loc: 1.0, scale: 0.1}}
    train: {epochs: 30, optimizer: {kind: SGD, lr: 0.1}, schedule: {kind: Step, milestones: [0.5, 0.75]}}
    evaluate: {draws: [1, 4], corruptions: standard, ood: [cifar100]}

Everything that shapes the result is in it, and its hash names the run; machines and folders are not (execution.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from slimbayes.errors import brief, did_you_mean
from slimbayes.posteriors import METHODS
from slimbayes.posteriors.configs.base import Config
from slimbayes_lab.configs.choices import (
    AUGMENTATIONS,
    NETWORKS,
    Choice,
    Named,
    OneOf,
    Options,
    choices,
)
from slimbayes_lab.configs.own import OwnFiles, PythonNet
from slimbayes_lab.configs.train import Count, Positive, Train

FORMAT: Final = 1
# Names of slimbayes_lab.data.CORRUPTIONS, which need torch; a test compares.
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip


def _compiles(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return text


Name = Annotated[str, Field(min_length=1, max_length=200)]
Pattern = Annotated[str, Field(max_length=1000), AfterValidator(_compiles)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_METHODS = choices(METHODS.values())


class Bags(Options):
    """How health records become bags of tokens, as in `slimbayes_lab.data.mortality`.

    Attributes:
        precision: hours in a bag (24 in the rank-1 paper).
        aggregate_older_than: what is older than so many hours shares one bag; None: there is no such bag.
        count: buckets of each feature's values.
        tokens_per_bag: only so many, the latest; None keeps all.
    """

    precision: Positive = 1.0
    aggregate_older_than: Positive | None = None
    count: Annotated[int, Field(ge=1, le=1000)] = 5
    tokens_per_bag: Count | None = None


class Data(OwnFiles):
    """Which rows are trained and tested on: a set that is known by name, or data of one's own (`OwnFiles`).

    Attributes:
        name: a set that `slimbayes data list` knows, or "digits", 1,797 small images that come with scikit-learn; of
            data of one's own the name of the file, unless it is given another.
        split: of the standard splits of a UCI set.
        validation: share of the training rows that is held out; or the name of one of the set's own splits
            (PhysioNet 2012 has "validation", its set b), which leaves all training rows to train on.
        held_out: "drawn" takes a share at random by `seed`, "last" the last rows as they are stored (the k-tied paper).
        train_limit, test_limit: only so many rows, drawn with `seed`.
        scaling: "standard" takes the training rows' mean from images and tables and divides by their deviation, by
            channel or feature; "unit" leaves images in [0, 1], "signed" stretches them to [-1, 1], and both leave other
            numbers as they are. "quantile", for tables of one's own, maps columns to normal distributions by ranks.
        image_size: what image folders (ImageNet) are cut to: the shorter side becomes 8/7 of it, the centre is taken.
            With the augmentation resized_crop, training pictures are cropped at random from the full picture instead.
        bags: of health records; as `slimbayes_lab.data.load` has them where it is left out.
        seed: of these draws; the run's own seed leaves the rows alone.
    """

    name: Annotated[str, Field(max_length=200)] = ""
    split: Annotated[int, Field(ge=0, lt=2**31)] = 0
    validation: Annotated[float, Field(ge=0, lt=1)] | Name = 0.0
    held_out: Literal["drawn", "last"] = "drawn"
    train_limit: Count | None = None
    test_limit: Count | None = None
    scaling: Literal["standard", "unit", "signed", "quantile"] = "standard"
    image_size: Annotated[int, Field(ge=1, le=10_000)] = 224
    bags: Bags | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _whole(self) -> Data:
        if not self.name:
            raise ValueError(
                "name is missing, or a file of your own: csv, parquet, npz or images."
            )
        if self.scaling == "quantile" and not self.table:
            raise ValueError(
                "scaling: quantile is for tables of your own: csv or parquet."
            )
        return self


class ByName(Options):
    """Different methods for different layers: from patterns of names to methods, the first that matches counts."""

    kind: Literal["ByName"]
    layers: Annotated[
        dict[Pattern, Annotated[Choice, OneOf(_METHODS)]], Field(min_length=1)
    ]

    def build(self) -> dict[str, Config]:
        return {pattern: method.build() for pattern, method in self.layers.items()}


class Evaluate(Options):
    """What it is judged on.

    Attributes:
        draws: of each member; scores for every number here come from the same draws, the first so many of them.
            "exact" runs every network that the picks of a method can make, once (EMP paper, B.4); the record then has
            their number.
        batch: rows at once.
        corruptions: names, or "standard" (all 15), "none".
        shift: sets with the same classes (cifar10h), ood: sets of other classes (cifar100 for cifar10).
        limit: rows of each of these sets at most.
        bins: of the calibration errors.
        examples: so many rows that it is most and least sure of are kept.
    """

    draws: (
        Literal["exact"]
        | Annotated[
            tuple[Annotated[int, Field(ge=1, le=10_000)], ...], Field(min_length=1)
        ]
    ) = (1,)
    batch: Count = 500
    corruptions: Literal["none", "standard"] | tuple[str, ...] = "none"
    severities: Annotated[
        tuple[Annotated[int, Field(ge=1, le=5)], ...], Field(min_length=1)
    ] = (1, 2, 3, 4, 5)
    shift: tuple[Name, ...] = ()
    ood: tuple[Name, ...] = ()
    limit: Count | None = None
    bins: Annotated[int, Field(ge=1, le=1_000_000)] = 15
    examples: Annotated[int, Field(ge=0, le=50)] = 8

    @property
    def corruption_names(self) -> tuple[str, ...]:
        named = {"none": (), "standard": CORRUPTIONS}
        return (
            named[self.corruptions]
            if isinstance(self.corruptions, str)
            else self.corruptions
        )

    @model_validator(mode="after")
    def _known(self) -> Evaluate:
        for name in self.corruption_names:
            if name not in CORRUPTIONS:
                raise ValueError(
                    f"unknown corruption {brief(name)}{did_you_mean(name, CORRUPTIONS)}"
                )
        return self


class Experiment(Options):
    """One run, but for where it runs. `include` and `exclude` are patterns of the names of layers to convert or not."""

    format: Literal[1] = 1
    name: Name
    seed: Seed = 0
    data: Data
    model: Annotated[Named | PythonNet, OneOf((*NETWORKS, PythonNet))]
    method: Annotated[Choice | ByName, OneOf((*_METHODS, ByName))]
    include: Pattern | None = None
    exclude: Pattern | None = None
    augment: Annotated[Named, OneOf(AUGMENTATIONS)] | None = None
    train: Train
    evaluate: Evaluate = Evaluate()

    @model_validator(mode="after")
    def _fits(self) -> Experiment:
        if self.train.early_stop and not self.data.validation:
            raise ValueError(
                "train.early_stop watches validation rows: set data.validation to the share to hold out."
            )
        return self

    @property
    def noise(self) -> float | Literal["learned", "heteroscedastic"]:
        """Noise of real targets, as `train.noise` says or by default."""
        if self.train.noise is not None:
            return self.train.noise
        learns = self.data.source is not None or self.data.name.startswith("uci/")
        return "learned" if learns else 1.0

    @property
    def resolved(self) -> dict[str, Any]:
        """Every field, defaults written out, as JSON holds it."""
        tree = self.model_dump(mode="json", exclude={"method"}) | {
            "method": _written(self.method)
        }
        tree["train"]["noise"] = self.noise
        return tree

    @property
    def hash(self) -> str:
        """Names the run: the sha256, shortened, of `resolved`."""
        tree = self.resolved
        if isinstance(self.method, ByName):  # the first pattern that matches counts
            tree["method"]["layers"] = list(tree["method"]["layers"].items())
        written = json.dumps(tree, sort_keys=True).encode()
        return hashlib.sha256(written).hexdigest()[:12]

    @property
    def method_text(self) -> str:
        """The method in a few words."""
        built = self.method.build()
        if isinstance(built, dict):
            return ", ".join(
                f"{pattern}: {config.describe()}" for pattern, config in built.items()
            )
        return built.describe()


def _written(method: Choice | ByName) -> dict[str, Any]:
    """A method as the library writes it: what its defaults depend on is settled there."""
    if isinstance(method, ByName):
        layers = {pattern: _written(one) for pattern, one in method.layers.items()}
        return {"kind": "ByName", "layers": layers}
    written: dict[str, Any] = json.loads(json.dumps(method.build().to_dict()))
    return written
