"""One self-contained HTML page from records: charts, tables, examples, commands. It opens from disk without a network.

Safety: the template escapes all text; data for scripts is JSON in which no tag can close; the page's security policy runs
only the two scripts whose hashes it names, forbids `eval`, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined

from slimbayes.report import figures, run_figures, tables
from slimbayes.report.charts import PALETTE
from slimbayes.report.figures import Figure
from slimbayes.report.provenance import PICTURES, Gallery, galleries, machines, origins
from slimbayes.report.runs import Group, Runs, load
from slimbayes.report.scores import Where, all_places, find, main_set, shared_places
from slimbayes.report.tables import Table

Part = Table | Figure | tuple[Gallery, ...]
Builder = Callable[[Sequence[Group]], Table | Figure | None]

# Heading, and what stands below it where there is data for it.
_PLAN: tuple[tuple[str, tuple[Builder, ...]], ...] = (
    ("Summary", (tables.summary, tables.every_score)),
    ("Calibration", (figures.reliability,)),
    ("Corruption", (figures.by_severity, figures.corruption_boxes)),
    ("Other sets", (tables.other_sets,)),
    ("Unfamiliar inputs", (figures.unfamiliar, tables.unfamiliar)),
    ("Selective prediction", (figures.risk_coverage,)),
    ("Members", (figures.diversity, run_figures.member_scores)),
    ("Draws", (run_figures.draws,)),
    ("Cost", (run_figures.cost, tables.cost)),
    ("Training", (run_figures.training,)),
)


@dataclass(frozen=True)
class Section:
    """A heading with its tables and figures."""

    id: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Chapter:
    """All that is told about one data set."""

    id: str
    data: str
    groups: tuple[Group, ...]
    rows: int | None
    sections: tuple[Section, ...]


def write_page(runs: Sequence[Path | str], out: Path | str, title: str | None = None) -> Path:
    """Write a page about runs, and say where it is.

    Records that are damaged or of a newer format are left out, and the page says so; if none is left, a RecordError says why.
    The same records give the same bytes.

    Args:
        runs: run directories, record files, or directories that hold runs.
        out: the HTML file; its directory is made.
        title: by default the names of the data sets.

    Example:
        >>> write_page(["/nowhere"], "page.html")
        Traceback (most recent call last):
        ...
        slimbayes.report.record.RecordError: none of the 1 records can be used:
        /nowhere/record.json cannot be read: ...
    """
    loaded = load(runs)
    text = render(loaded, title or f"Results on {', '.join(loaded.data)}")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader never sees half a page: it appears under its name when it is whole.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path


def render(runs: Runs, title: str) -> str:
    """The page as text."""
    chapters = [_chapter(runs, data, f"data-{i}") for i, data in enumerate(runs.data, 1)]
    crowded = (
        [
            f"With {len(runs.data)} data sets on one page each figure shows the first of its choices only ({_menu(len(runs.data))} at most)."
        ]
        if len(runs.data) > 2
        else []
    )
    notes = [*runs.notes, *crowded, *(note for chapter in chapters for note in _notes(chapter.groups))]
    shown = [part for chapter in chapters for section in chapter.sections for part in section.parts]
    charts = [part for part in shown if isinstance(part, Figure)]
    style = _file("page.css") + "".join(f"\n.k{i} {{ --series: {colour} }}" for i, colour in enumerate(PALETTE))
    scripts = [_bundle(), _file("page.js")]
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    places = _numbers(shown)
    return environment.get_template("page.html").render(
        title=title, counts=_counts(runs), chapters=chapters, runs=runs, notes=notes, origins=origins(runs.groups), machines=machines(runs.groups),
        number=lambda part: places[id(part)], is_table=lambda part: isinstance(part, Table), is_figure=lambda part: isinstance(part, Figure),
        colours=len(PALETTE), style=style, scripts=scripts, policy=_policy(style, scripts),
        figures=_json({f"figure-{places[id(figure)]}": _plain(figure) for figure in charts}),
    )  # fmt: skip


def _numbers(parts: Sequence[Part]) -> dict[int, int]:
    """Numbers of figures and of tables, each counted from one, by the identity of the part."""
    kinds = [[part for part in parts if isinstance(part, kind)] for kind in (Figure, Table)]
    return {id(part): i for kind in kinds for i, part in enumerate(kind, 1)}


def _counts(runs: Runs) -> str:
    """What the page is about, in a sentence."""
    total = sum(len(group.records) for group in runs.groups)
    names = len({group.name for group in runs.groups})
    seeds = sorted({len(group.records) for group in runs.groups})
    each = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"{_of(total, 'run')} under {_of(names, 'name')} on {_of(len(runs.data), 'data set')}, with {each} {'seed' if seeds == [1] else 'seeds'} each."


def _of(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _chapter(runs: Runs, data: str, id: str) -> Chapter:
    groups = runs.on(data)
    sections: list[tuple[str, tuple[Part, ...]]] = [
        (title, tuple(_made(builders, groups, _menu(len(runs.data))))) for title, builders in _PLAN
    ]
    shown = galleries(groups, PICTURES // len(runs.data))
    sections.insert(-2, ("Examples", (tuple(shown),) if shown else ()))
    numbered = [Section(f"{id}-{title.lower().replace(' ', '-')}", title, parts) for title, parts in sections if parts]
    main = main_set(groups)
    rows = next((e.rows for group in groups for record in group.records for e in find(record, main)), None)
    return Chapter(id, data, groups, rows, tuple(numbered))


def _made(builders: Iterable[Builder], groups: Sequence[Group], menu: int) -> Iterable[Part]:
    for builder in builders:
        part = builder(groups)
        if part is not None:
            yield replace(part, variants=part.variants[:menu]) if isinstance(part, Figure) else part


def _menu(sets: int) -> int:
    """How many choices a figure may offer: every one is a chart, and a page with many data sets must stay small."""
    return 8 if sets <= 2 else 4 if sets <= 5 else 2 if sets <= 10 else 1


def _notes(groups: Sequence[Group]) -> Iterable[str]:
    where = Where("corruption")
    shared, every = shared_places(groups, where), all_places(groups, where)
    if shared != every:
        yield f"On {groups[0].data!r} the runs share {len(shared)} of {len(every)} corrupted sets: the summary uses only those, the charts use all that each run has."
    hardware = {record.environment.get("hardware", "") for group in groups for record in group.records} - {""}
    if len(hardware) > 1:
        yield f"The runs on {groups[0].data!r} were made on different hardware ({'; '.join(sorted(hardware))}): their times and memory do not compare."


def _plain(figure: Figure) -> dict[str, Any]:
    """What the page's script needs of a figure."""
    return {
        "variants": [
            {"label": v.label, "charts": [{"spec": c.spec, "fields": c.fields} for c in v.charts]}
            for v in figure.variants
        ]
    }


def _json(data: Any) -> str:
    """JSON that can stand inside a script element: no sign in it can close the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """A Content-Security-Policy that names what may run by its hash and allows nothing else but inline pictures."""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    text: str = vl_convert.javascript_bundle()
    # It is trusted, but it must not end its own script element.
    assert "</script" not in text.lower() and "<!--" not in text
    return text
