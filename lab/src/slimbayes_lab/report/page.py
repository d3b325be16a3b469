"""One self-contained HTML page from records: charts, tables, examples, commands. It opens from disk without a network.

Safety: the template escapes all text; data for scripts is JSON in which no tag can close; the page's security policy
runs only the two scripts whose hashes it names, allows inline pictures, forbids `eval`, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined

from slimbayes.files import write_text
from slimbayes_lab.report import figures, tables
from slimbayes_lab.report.charts import PALETTE
from slimbayes_lab.report.figures import Figure
from slimbayes_lab.report.groups import CORRUPTED, LoadedRuns, RunGroup, load, main_set
from slimbayes_lab.report.metric import printable
from slimbayes_lab.report.record import Example, Record
from slimbayes_lab.report.tables import PageTable, reasons

SHOWN = 8  # examples of each kind, for each name
PICTURES = 200_000  # characters of pictures on the whole page
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class Gallery:
    """The rows that one run is most and least sure of; `left_out` were too many for the page."""

    kind: ClassVar = "gallery"
    group: RunGroup
    seed: int
    most: list[Example]
    least: list[Example]
    left_out: int


PagePart = PageTable | Figure | Gallery


@dataclass(frozen=True)
class Chapter:
    """All that is told about one data set: `sections` by heading, judged on so many `rows`."""

    data: str
    groups: tuple[RunGroup, ...]
    rows: int | None
    sections: dict[str, list[PagePart]]


def write_page(
    runs: Sequence[Path | str], out: Path | str, title: str | None = None
) -> Path:
    """Write a page about runs, and say where it is.

    Records that are damaged or of a newer format are left out, and the page says so; if none is left, a RecordError
    says why. The same records give the same bytes.

    Args:
        runs: run directories, record files, or directories that hold runs.
        out: the HTML file; its directory is made.
        title: by default the names of the data sets.

    Example:
        >>> write_page(["/nowhere"], "page.html")
        Traceback (most recent call last):
        ...
        slimbayes_lab.report.record.RecordError: none of the 1 records can be used:
        /nowhere/record.json cannot be read: ...
    """
    loaded = load(runs)
    text = _html(
        loaded, title or f"Results on {', '.join(map(printable, loaded.data))}"
    )
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def _html(runs: LoadedRuns, title: str) -> str:
    chapters = [_chapter(data, runs.on(data), len(runs.data)) for data in runs.data]
    parts = [
        part
        for chapter in chapters
        for section in chapter.sections.values()
        for part in section
    ]
    charts = [_script_data(part) for part in parts if isinstance(part, Figure)]
    style = _file("page.css") + "".join(
        f"\n.k{i} {{ --series: {colour} }}" for i, colour in enumerate(PALETTE)
    )
    scripts = [_bundle(), _file("page.js")]
    page = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined
    )
    page.trim_blocks = page.lstrip_blocks = True
    page.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    page.filters["hash"] = _hash
    page.filters["of"] = lambda count, noun: (
        f"{count} {noun}" if count == 1 else f"{count} {noun}s"
    )
    page.filters["indented"] = lambda config: json.dumps(
        config, indent=2, ensure_ascii=False, default=str
    )
    return page.get_template("page.html").render(
        title=title,
        runs=runs,
        chapters=chapters,
        notes=[*runs.notes, *reasons(runs.groups), *_notes(chapters)],
        machines=_machines(runs.groups),
        colours=len(PALETTE),
        style=style,
        scripts=scripts,
        figures={f"figure-{i}": chart for i, chart in enumerate(charts, 1)},
    )


def _chapter(data: str, groups: tuple[RunGroup, ...], sets: int) -> Chapter:
    """What there is to tell about one of several data sets; sections without data are left out."""
    plan: dict[str, Sequence[PagePart | None]] = {
        "Summary": [tables.summary(groups), tables.every_score(groups)],
        "Calibration": [figures.reliability(groups)],
        "Corruption": [figures.by_severity(groups), figures.corruption_boxes(groups)],
        "Other sets": [tables.other_sets(groups)],
        "Unfamiliar inputs": [figures.unfamiliar(groups), tables.unfamiliar(groups)],
        "Selective prediction": [figures.risk_coverage(groups)],
        "Members": [
            figures.diversity(groups),
            figures.checkpoints(groups),
            figures.member_scores(groups),
        ],
        "Draws": [figures.draws(groups)],
        "Examples": _galleries(groups, PICTURES // sets),
        "Cost": [figures.cost(groups), tables.cost(groups)],
        "Training": [figures.training(groups)],
    }
    sections: dict[str, list[PagePart]] = {}
    for title, parts in plan.items():
        for part in (part for part in parts if part):
            short = (
                replace(part, variants=part.variants[: _most_choices(sets)])
                if isinstance(part, Figure)
                else part
            )
            sections.setdefault(title, []).append(short)
    rows = next(
        (evaluation.rows for evaluation in main_set(groups).every(groups)), None
    )
    return Chapter(data, groups, rows, sections)


def _most_choices(sets: int) -> int:
    """How many choices a figure may offer: every one is a chart, and a page with many data sets must stay small."""
    return 8 if sets <= 2 else 4 if sets <= 5 else 2 if sets <= 10 else 1


def _galleries(groups: Sequence[RunGroup], room: int) -> list[Gallery]:
    """Rows each model is most and least sure of, from its first run that has examples. `room` is shared equally."""
    found = [
        (group, next((record for record in group.records if record.examples), None))
        for group in groups
    ]
    kept = [(group, record) for group, record in found if record]
    return [_gallery(group, record, room // len(kept)) for group, record in kept]


def _gallery(group: RunGroup, record: Record, room: int) -> Gallery:
    sides: dict[str, list[Example]] = {"most": [], "least": []}
    most, least = (
        [e for e in record.examples if e.sure == sure][:SHOWN] for sure in sides
    )
    # In turns, so that both kinds get pictures when room is short.
    for example in filter(None, itertools.chain(*itertools.zip_longest(most, least))):
        # A page shows nothing but PNG data: any other address could load something or be taken for markup.
        image = (
            example.image
            if example.image and _PICTURE.fullmatch(example.image)
            else None
        )
        room -= len(image or "")
        if room >= 0:
            sides[example.sure].append(example.model_copy(update={"image": image}))
    left_out = len(record.examples) - len(sides["most"]) - len(sides["least"])
    return Gallery(group, record.seed, sides["most"], sides["least"], left_out)


def _notes(chapters: Sequence[Chapter]) -> Iterator[str]:
    if (sets := len(chapters)) > 2:
        first = f"the first of its choices only ({_most_choices(sets)} at most)"
        yield f"With {sets} data sets on one page each figure shows {first}."
    for chapter in chapters:
        shared, places = (
            CORRUPTED.shared_places(chapter.groups),
            CORRUPTED.all_places(chapter.groups),
        )
        if shared != places:
            yield (
                f"On {chapter.data!r} the runs share {len(shared)} of {len(places)} corrupted sets: "
                "the summary uses only those, the charts use all that each run has."
            )
        every = [
            record.environment for group in chapter.groups for record in group.records
        ]
        hardware = {facts.get("gpu") or facts.get("cpu", "") for facts in every}
        if len(hardware - {""}) > 1:
            yield (
                f"The runs on {chapter.data!r} were made on different hardware "
                f"({'; '.join(sorted(hardware - {''}))}): their times and memory do not compare."
            )


def _machines(
    groups: Sequence[RunGroup],
) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """The environments, as sorted facts, with the runs made there."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for record in (
        record for group in groups for record in group.records if record.environment
    ):
        facts = tuple(sorted(record.environment.items()))
        found.setdefault(facts, []).append(
            f"{record.data} / {record.name} / seed {record.seed}"
        )
    return found


def _script_data(figure: Figure) -> dict[str, Any]:
    """What the page's script needs of a figure."""
    variants = [
        (label, [{"spec": c.spec, "fields": c.fields} for c in charts])
        for label, charts in figure.variants
    ]
    return {
        "variants": [{"label": label, "charts": charts} for label, charts in variants]
    }


def _hash(text: str) -> str:
    return (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )


def _file(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # It is trusted, but it must not end its own script element.
    assert "</script" not in text.lower() and "<!--" not in text
    return text
