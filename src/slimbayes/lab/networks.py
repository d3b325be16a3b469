"""The networks and augmentations that a config can name, with the bounds of their options.

    {kind: wrn, depth: 16, width: 4}        slimbayes.models.wrn(depth=16, width=4, classes=...)

`kind` is a function of `slimbayes.models` or `slimbayes.data`, looked up when it is built: configs are checked without
torch. Options and defaults are the function's own, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from slimbayes.lab.choices import Options

Size = Annotated[int, Field(ge=1, le=1_000_000)]


class Named(Options):
    """A function of ours by name: its options, but for those in `filled`, which the data fill in."""

    home: ClassVar[str] = "slimbayes.models"
    filled: ClassVar[tuple[str, ...]] = ("classes",)
    kind: str

    def network(self, facts: Mapping[str, Any], data: str) -> Any:
        """The network of these options and of what the data say about it."""
        if missing := ", ".join(name for name in self.filled if name not in facts):
            raise ValueError(f"{self.kind} needs {missing}, which {data} does not say: it is no network for this data.")
        return self.build(**{name: facts[name] for name in self.filled})

    def build(self, **filled: Any) -> Any:
        """What the function makes of these options."""
        options = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        return getattr(import_module(self.home), self.kind)(**options, **filled)


class MLP(Named):
    filled: ClassVar = ("classes", "inputs")
    kind: Literal["mlp"]
    hidden: Annotated[tuple[Size, ...], Field(max_length=1000)] = (400, 400)


class RegressionNet(Named):
    filled: ClassVar = ("inputs", "outputs")
    kind: Literal["regression_net"]
    hidden: Size = 50
    norm: bool = True


class LeNet(Named):
    filled: ClassVar = ("classes", "channels", "size")
    kind: Literal["lenet"]
    kernel: Annotated[int, Field(ge=1, le=1000)] = 5


class SmallResNet(Named):
    kind: Literal["small_resnet"]


class SmallCNN(Named):
    filled: ClassVar = ("classes", "channels")
    kind: Literal["small_cnn"]
    width: Size = 32


class WRN(Named):
    kind: Literal["wrn"]
    depth: Annotated[int, Field(ge=10, le=10_000)] = 28
    width: Annotated[int, Field(ge=1, le=10_000)] = 10

    @model_validator(mode="after")
    def _blocks(self) -> WRN:
        if (self.depth - 4) % 6:
            raise ValueError(f"wrn: depth must be 6 n + 4 (10, 16, 22, 28, ...), got {self.depth}")
        return self


class PyramidNet(Named):
    kind: Literal["pyramidnet"]
    depth: Annotated[int, Field(ge=8, le=10_000)] = 110
    alpha: Annotated[float, Field(ge=0, le=10_000)] = 270

    @model_validator(mode="after")
    def _blocks(self) -> PyramidNet:
        if (self.depth - 2) % 6:
            raise ValueError(f"pyramidnet: depth must be 6 n + 2 (8, 14, ..., 110), got {self.depth}")
        return self


class ResNet(Named):
    kind: Literal["resnet18", "resnet50"]
    small_images: bool = False


class ImdbLSTM(Named):
    filled: ClassVar = ("vocabulary",)
    kind: Literal["imdb_lstm"]
    embedding: Size = 128
    units: Size = 128


class MortalityLSTM(Named):
    filled: ClassVar = ("vocabulary",)
    kind: Literal["mortality_lstm"]
    embedding: Size = 32
    units: Size = 512
    hidden: Size = 512


class PadCropFlip(Named):
    home: ClassVar = "slimbayes.data"
    filled: ClassVar = ("images", "fill", "generator")
    kind: Literal["pad_crop_flip"]
    pad: Annotated[int, Field(ge=0, le=10_000)] = 4
    flip: bool = True


class ResizedCrop(Named):
    home: ClassVar = "slimbayes.data"
    filled: ClassVar = ("images", "generator")
    kind: Literal["resized_crop"]
    size: Annotated[int, Field(ge=1, le=10_000)]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    @model_validator(mode="after")
    def _boxes(self) -> ResizedCrop:
        (small, large), (tall, wide) = self.scale, self.ratio
        if not 0 < small <= large <= 1 or not 0 < tall <= wide:
            raise ValueError("scale must lie in (0, 1] and ratio above 0, least first")
        return self


Network = Annotated[
    MLP | RegressionNet | LeNet | SmallResNet | SmallCNN | WRN | PyramidNet | ResNet | ImdbLSTM | MortalityLSTM,
    Field(discriminator="kind"),
]
Augmentation = Annotated[PadCropFlip | ResizedCrop, Field(discriminator="kind")]
