"""Where the numbers come from: examples of predictions, commands, configs and machines."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slimbayes.report.record import Example, Record
from slimbayes.report.runs import Group

SHOWN = 8  # examples of each kind, for each name
PICTURES = 200_000  # characters of pictures on the whole page
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class Picture:
    """An example ready to show; `image` is None where there is none, or none that is safe."""

    example: Example
    image: str | None
    right: bool


@dataclass(frozen=True)
class Gallery:
    """The examples of one run."""

    group: Group
    seed: int
    most: tuple[Picture, ...]
    least: tuple[Picture, ...]
    left_out: int  # for want of room


@dataclass(frozen=True)
class Origin:
    """How the runs of a group were made."""

    group: Group
    commands: tuple[str, ...]
    config: str


@dataclass(frozen=True)
class Machine:
    """An environment and the runs that were made in it."""

    runs: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]


def galleries(groups: Sequence[Group], room: int = PICTURES) -> list[Gallery]:
    """Rows each model is most and least sure of, from its first run that has examples. `room` is shared equally."""
    found = [(group, next((record for record in group.records if record.examples), None)) for group in groups]
    kept = [(group, record) for group, record in found if record]
    return [_gallery(group, record, room // len(kept)) for group, record in kept]


def _gallery(group: Group, record: Record, room: int) -> Gallery:
    sides: dict[str, list[Picture]] = {"most": [], "least": []}
    for example in _alternating(record.examples):
        # A page shows nothing but PNG data: any other address could load something or be taken for markup.
        image = example.image if example.image and _PICTURE.fullmatch(example.image) else None
        room -= len(image or "")
        if room >= 0:
            sides[example.sure].append(Picture(example, image, example.label == example.predicted))
    shown = sum(map(len, sides.values()))
    return Gallery(group, record.seed, tuple(sides["most"]), tuple(sides["least"]), len(record.examples) - shown)


def _alternating(examples: Sequence[Example]) -> list[Example]:
    """The first examples of each kind in turns, so that both get pictures when room is short."""
    most, least = ([example for example in examples if example.sure == sure][:SHOWN] for sure in ("most", "least"))
    return [example for pair in itertools.zip_longest(most, least) for example in pair if example]


def origins(groups: Sequence[Group]) -> list[Origin]:
    """The commands of every run, each once, and the config of the first."""
    return [
        Origin(
            group,
            tuple(dict.fromkeys(command for record in group.records for command in record.commands)),
            json.dumps(group.records[0].config, indent=2, ensure_ascii=False, default=str),
        )
        for group in groups
    ]


def machines(groups: Sequence[Group]) -> list[Machine]:
    """The environments, each once, with the runs made there."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for group in groups:
        for record in group.records:
            found.setdefault(tuple(sorted(record.environment.items())), []).append(
                f"{record.data} / {record.name} / seed {record.seed}"
            )
    return [Machine(tuple(runs), facts) for facts, runs in found.items() if facts]
