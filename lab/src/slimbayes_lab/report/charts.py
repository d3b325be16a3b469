"""The kinds of chart, as Vega-Lite specs: plain JSON with the data inside, which the tests check against its schema.

Fields have fixed short names, and text from records is only ever data, a domain or a title. Vega-Lite quotes some of it
into expressions of its own (the order of bars); the page interprets expressions and never evaluates them as JavaScript.
A name's colour, dash and shape follow from its number on the page, so they are the same in every chart. The colours are
safe for colour-blind readers and stand out on light and dark paper. The page sets `focus` to bring one name forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

PALETTE = (
    "#4854cc",
    "#cc8400",
    "#b43018",
    "#249ce4",
    "#9c489c",
    "#849c60",
    "#f0609c",
    "#6c6054",
)
_DASHES = (
    [1, 0],
    [6, 3],
    [2, 2],
    [8, 3, 2, 3],
)  # another one each time the colours have been used up
_SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
HEIGHT = 260

Names = Mapping[str, int]  # the number of each name's colour, in the order of the page
Point = dict[str, float | int | str]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A spec, and what its fields mean, for the table of numbers below it."""

    spec: Spec
    fields: dict[str, str]

    @property
    def rows(self) -> list[Point]:
        """The data inside the spec."""
        rows: list[Point] = self.spec["data"]["values"]
        return rows


@dataclass(frozen=True)
class Axis:
    """A titled axis. `percent` writes shares as percent, `log` spaces by ratio, `zero` starts at 0."""

    title: str
    percent: bool = False
    log: bool = False
    zero: bool = False
    domain: tuple[float, float] | None = None
    values: Sequence[float] = ()

    def channel(self, field: str) -> Spec:
        """The encoding of a field along this axis."""
        scale: Spec = {"type": "log", "base": 2} if self.log else {"zero": self.zero}
        scale |= {"domain": self.domain} if self.domain else {}
        axis: Spec = (
            {"format": ".3~p"} if self.percent else {"format": "~g"} if self.log else {}
        )
        axis |= {"values": self.values} if self.values else {}
        return {
            "field": field,
            "type": "quantitative",
            "title": self.title,
            "scale": scale,
            "axis": axis,
        }


Fields = dict[str, Axis | str]  # of the rows: an axis for a number, a title for a text


def _by_name(
    names: Names, choices: Sequence[Any], chosen: Callable[[int], int]
) -> Spec:
    """The encoding of a name as one of some colours, dashes or shapes."""
    looks = [choices[chosen(number) % len(choices)] for number in names.values()]
    return {
        "field": "n",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(names), "range": looks},
    }


def _shape(names: Names) -> Spec:
    # Names that share a colour differ in shape: the second round of colours starts one shape later.
    return _by_name(names, _SHAPES, lambda number: number + number // len(PALETTE))


def _layer(
    mark: str, opacity: float, encoding: Spec | None = None, **look: Any
) -> Spec:
    """Marks that fade while another name has the focus. What `encoding` leaves out is as in the whole chart."""
    shown = {"test": "focus === '' || focus === datum.n", "value": opacity}
    faded = {"condition": shown, "value": opacity / 8}
    return {
        "mark": {"type": mark, "clip": True, **look},
        "encoding": {"opacity": faded, **(encoding or {})},
    }


def _chart(
    rows: Iterable[Point],
    names: Names,
    fields: Fields,
    encoding: Spec,
    layers: Sequence[Spec],
    description: str,
    height: int = HEIGHT,
) -> Chart:
    """Only rows whose numbers can be drawn; pointing at a mark tells `fields`: numbers with an axis, and texts."""
    tips: list[Spec] = []
    for field, told in fields.items():
        if isinstance(told, Axis):
            style = ".2%" if told.percent else ".4~g"
            tips.append(
                {
                    "field": field,
                    "type": "quantitative",
                    "title": told.title,
                    "format": style,
                }
            )
        else:
            tips.append({"field": field, "type": "nominal", "title": told})
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": finite(rows)},
        "params": [{"name": "focus", "value": ""}],
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "encoding": {
            "color": _by_name(names, PALETTE, int),
            "tooltip": tips,
            **encoding,
        },
        "layer": layers,
    }
    return Chart(spec, {tip["field"]: tip["title"] for tip in tips})


def finite(rows: Iterable[Point]) -> list[Point]:
    """Rows without NaN and infinity. Four digits are more than a screen shows, and keep pages small.

    Example:
        >>> finite([{"n": "a", "x": 2, "y": 0.123456}, {"n": "b", "x": 3, "y": math.nan}])
        [{'n': 'a', 'x': 2, 'y': 0.1235}]
    """

    def tidy(value: float | str) -> float | str:
        return (
            value
            if isinstance(value, str) or float(value).is_integer()
            else float(f"{value:.4g}")
        )

    kept = [
        row
        for row in rows
        if all(isinstance(value, str) or math.isfinite(value) for value in row.values())
    ]
    return [{key: tidy(value) for key, value in row.items()} for row in kept]


def lines(
    rows: Iterable[Point],
    names: Names,
    x: Axis,
    y: Axis,
    band: str = "",
    diagonal: bool = False,
    dots: bool = True,
) -> Chart:
    """A line for each name, from fields n, x, y; `band` names a band from lo to hi, `diagonal` adds the line y = x."""
    fields: Fields = {"n": "Name", "x": x, "y": y}
    layers: list[Spec] = []
    if diagonal:
        ends, grey = (
            [{"x": 0, "y": 0}, {"x": 1, "y": 1}],
            {"color": {"value": "#8a8f98"}, "tooltip": None},
        )
        rule = {"type": "line", "strokeDash": [3, 3], "strokeWidth": 1, "opacity": 1}
        layers.append({"data": {"values": ends}, "mark": rule, "encoding": grey})
    if band:
        fields |= {
            "lo": replace(y, title=f"{band}, low"),
            "hi": replace(y, title=f"{band}, high"),
        }
        layers.append(
            _layer(
                "area",
                0.1,
                {"y": {"field": "lo"}, "y2": {"field": "hi"}, "tooltip": None},
            )
        )
    dash = _by_name(names, _DASHES, lambda number: number // len(PALETTE))
    layers.append(_layer("line", 1.0, {"strokeDash": dash, "tooltip": None}))
    # Long curves get points too small to see but large enough to point at.
    layers.append(
        _layer("point", 1.0 if dots else 0.0, filled=True, size=34 if dots else 60)
    )
    encoding = {"x": x.channel("x"), "y": y.channel("y")}
    return _chart(
        rows,
        names,
        fields,
        encoding,
        layers,
        f"{y.title} by {x.title}, a line for each name",
    )


def boxes(rows: Iterable[Point], names: Names, x: str, y: Axis) -> Chart:
    """Boxes side by side at each x, from fields n, x, low, q1, mid, q3, high."""
    parts = {
        "high": "largest",
        "q3": "upper quartile",
        "mid": "median",
        "q1": "lower quartile",
        "low": "smallest",
    }
    offset = {"domain": list(names), "paddingInner": 0.3, "paddingOuter": 0.3}
    encoding = {
        "x": {"field": "x", "type": "ordinal", "title": x, "axis": {"labelAngle": 0}},
        "xOffset": {
            "field": "n",
            "type": "nominal",
            "scale": offset,
            "bandPosition": 0.5,
        },
        "y": y.channel("mid"),
    }
    layers = [
        _layer("rule", 0.8, {"y": {"field": "low"}, "y2": {"field": "high"}}),
        _layer("bar", 0.45, {"y": {"field": "q1"}, "y2": {"field": "q3"}}),
        _layer("tick", 1.0, thickness=2),
    ]
    fields: Fields = {"n": "Name", "x": x} | {
        key: replace(y, title=part) for key, part in parts.items()
    }
    return _chart(
        rows,
        names,
        fields,
        encoding,
        layers,
        f"{y.title}: boxes over corruption types by {x}",
        HEIGHT + 20,
    )


def points(rows: Iterable[Point], names: Names, x: Axis, y: Axis) -> Chart:
    """A point for each run, from fields n, seed, x, y."""
    fields: Fields = {"n": "Name", "seed": "Seed", "x": x, "y": y}
    encoding = {"x": x.channel("x"), "y": y.channel("y"), "shape": _shape(names)}
    layers = [_layer("point", 0.85, filled=True, size=70)]
    return _chart(
        rows,
        names,
        fields,
        encoding,
        layers,
        f"{y.title} by {x.title}, a point for each run",
    )


def bars(rows: Iterable[Point], names: Names, x: Axis) -> Chart:
    """A bar from zero for each name, from fields n, x."""
    layers = [
        _layer("bar", 0.9, size=13)
    ]  # with round corners, too, clipping leaves nothing of a bar
    return _rows_of_names(
        rows, names, x, {"n": "Name", "x": x}, layers, f"{x.title} by name"
    )


def members(rows: Iterable[Point], names: Names, x: Axis) -> Chart:
    """Ticks for members and a dot for their average, from fields n, kind, x."""
    ticks = {
        "transform": [{"filter": "datum.kind !== 'average'"}],
        **_layer("tick", 0.6, thickness=2, size=15),
    }
    dots = {
        "transform": [{"filter": "datum.kind === 'average'"}],
        **_layer("point", 1.0, filled=True, size=90),
    }
    fields: Fields = {"n": "Name", "kind": "Of", "x": x}
    return _rows_of_names(
        rows,
        names,
        x,
        fields,
        [ticks, dots],
        f"{x.title} of each member and of their average",
    )


def _rows_of_names(
    rows: Iterable[Point],
    names: Names,
    x: Axis,
    fields: Fields,
    layers: list[Spec],
    description: str,
) -> Chart:
    """A row of marks for each name that has any."""
    kept = finite(rows)
    present = [name for name in names if any(row["n"] == name for row in kept)]
    look = {"labelLimit": 130, "ticks": False, "domain": False}
    side = {
        "field": "n",
        "type": "nominal",
        "title": None,
        "scale": {"domain": present},
        "axis": look,
    }
    height = max(60, 20 + 24 * len(present))
    return _chart(
        kept,
        names,
        fields,
        {"x": x.channel("x"), "y": side},
        layers,
        description,
        height,
    )


def intervals(rows: Iterable[Point], names: Names, x: Axis, of: str) -> Chart:
    """A dot with its error for each set and name, from fields g (the set), n, x, lo, hi."""
    kept = finite(rows)
    ends = {
        "lo": replace(x, title="Mean - error"),
        "hi": replace(x, title="Mean + error"),
    }
    encoding = {
        "x": x.channel("x"),
        "y": {"field": "g", "type": "nominal", "title": None, "sort": None},
        "yOffset": {"field": "n", "type": "nominal", "scale": {"domain": list(names)}},
    }
    layers = [
        _layer(
            "rule", 0.7, {"x": {"field": "lo"}, "x2": {"field": "hi"}}, strokeWidth=2
        ),
        _layer("point", 1.0, {"shape": _shape(names)}, filled=True, size=60),
    ]
    fields: Fields = {"g": of, "n": "Name", "x": x, **ends}
    return _chart(
        kept,
        names,
        fields,
        encoding,
        layers,
        f"{x.title} on each set",
        max(60, 20 + 16 * len(kept)),
    )
