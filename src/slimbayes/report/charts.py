"""The kinds of chart, as Vega-Lite specs made with altair: plain JSON with the data inside.

Fields have fixed short names, and text from records is only ever data, a domain or a title. Vega-Lite quotes some of it into
expressions of its own (the order of bars); the page interprets expressions and never evaluates them as JavaScript.
A name's colour, dash and shape follow from its place on the page, so they are the same in every chart. The colours are safe for
colour-blind readers and stand out on light and on dark paper. `focus` is a parameter the page sets to bring one name forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

PALETTE = ("#4854cc", "#cc8400", "#b43018", "#249ce4", "#9c489c", "#849c60", "#f0609c", "#6c6054")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])  # another one each time the colours have been used up
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
HEIGHT = 260

Names = Mapping[str, int]  # name to place, in the order of the page

Value = float | int | str
Point = dict[str, Value]


@dataclass(frozen=True)
class Chart:
    """A spec, and what its fields mean, for the table of numbers below it."""

    spec: dict[str, Any]
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
    values: Sequence[float] = field(default=())

    def channel(self, kind: Any, name: str, **more: Any) -> Any:
        """An altair channel of this axis."""
        scale: dict[str, Any] = {"type": "log", "base": 2} if self.log else {"zero": self.zero}
        if self.domain:
            scale["domain"] = list(self.domain)
        look: dict[str, Any] = {"format": ".3~p"} if self.percent else {"format": "~g"} if self.log else {}
        if self.values:
            look["values"] = list(self.values)
        return kind(f"{name}:Q", scale=alt.Scale(**scale), axis=alt.Axis(**look), title=self.title, **more)

    def tooltip(self, name: str, title: str | None = None) -> alt.Tooltip:
        """The same number when pointed at."""
        return alt.Tooltip(f"{name}:Q", title=title or self.title, format=".2%" if self.percent else ".4~g")


def tidy(value: float) -> float | int:
    """Four digits are more than a screen shows, and keep pages small; whole numbers stay whole."""
    return value if isinstance(value, int) or value.is_integer() else float(f"{value:.4g}")


def finite(rows: Iterable[Mapping[str, Value]]) -> list[Point]:
    """Rows whose numbers can be drawn, shortened."""
    return [
        {key: value if isinstance(value, str) else tidy(value) for key, value in row.items()}
        for row in rows
        if all(isinstance(value, str) or math.isfinite(value) for value in row.values())
    ]


def _colour(names: Names) -> alt.Color:
    colours = [PALETTE[place % len(PALETTE)] for place in names.values()]
    return alt.Color("n:N", scale=alt.Scale(domain=list(names), range=colours), title=None)


def _dash(names: Names) -> alt.StrokeDash:
    dashes = [_DASHES[place // len(PALETTE) % len(_DASHES)] for place in names.values()]
    return alt.StrokeDash("n:N", scale=alt.Scale(domain=list(names), range=dashes), title=None)


def _shape(names: Names) -> alt.Shape:
    # Names that share a colour differ in shape: the second round of colours starts one shape later.
    shapes = [_SHAPES[(place + place // len(PALETTE)) % len(_SHAPES)] for place in names.values()]
    return alt.Shape("n:N", scale=alt.Scale(domain=list(names), range=shapes), title=None)


def _shade(strong: float) -> alt.OpacityValue:
    return alt.OpacityValue(
        strong / 8,
        condition=alt.ConditionalPredicateValueDefnumberExprRef(test="focus === '' || focus === datum.n", value=strong),
    )


def _finish(
    rows: list[Point], layers: Sequence[alt.Chart], description: str, fields: dict[str, str], height: int = HEIGHT
) -> Chart:
    # The data joins at the end: altair would copy and check it many times over. The tests check specs against the schema.
    spec = alt.layer(*layers, data=alt.NamedData("rows")).to_dict(validate=False)
    spec |= {
        "data": {"values": rows}, "params": [{"name": "focus", "value": ""}], "description": description,
        "width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"},
    }  # fmt: skip
    del spec["config"]  # altair's default sizes; the page brings its own
    _share(spec)
    return Chart(spec, fields)


def _share(spec: dict[str, Any]) -> None:
    """Say once, for all layers, what the last layer says on channels that every layer has: half of a spec is repetition."""
    encodings = [layer["encoding"] for layer in spec["layer"]]
    spec["encoding"] = {
        channel: told for channel, told in encodings[-1].items() if all(channel in encoding for encoding in encodings)
    }
    for encoding in encodings:
        for channel, told in spec["encoding"].items():
            if encoding[channel] == told:
                del encoding[channel]


def lines(
    rows: Iterable[Mapping[str, Value]],
    names: Names,
    x: Axis,
    y: Axis,
    *,
    band: str = "",
    diagonal: bool = False,
    dots: bool = True,
) -> Chart:
    """A line for each name, from fields n, x, y; with `band` a band from lo to hi, with `diagonal` the line y = x."""
    kept = finite(rows)
    base = alt.Chart().encode(x=x.channel(alt.X, "x"), color=_colour(names))
    tips = [alt.Tooltip("n:N", title="Name"), x.tooltip("x"), y.tooltip("y")]
    layers = []
    if band:
        layers.append(
            base.mark_area(clip=True).encode(y=y.channel(alt.Y, "lo"), y2=alt.Y2("hi:Q"), opacity=_shade(0.1))
        )
        tips += [y.tooltip("lo", f"{band}, low"), y.tooltip("hi", f"{band}, high")]
    if diagonal:
        ends = alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}]))
        layers.insert(
            0,
            ends.mark_line(strokeDash=[3, 3], strokeWidth=1, opacity=1).encode(
                color=alt.ColorValue("#8a8f98"), x=x.channel(alt.X, "x"), y=y.channel(alt.Y, "y")
            ),
        )
    layers.append(
        base.mark_line(clip=True).encode(y=y.channel(alt.Y, "y"), strokeDash=_dash(names), opacity=_shade(1.0))
    )
    # Long curves get points too small to see but large enough to point at.
    points = base.mark_point(filled=True, size=34 if dots else 60, clip=True)
    layers.append(
        points.encode(y=y.channel(alt.Y, "y"), opacity=_shade(1.0) if dots else alt.OpacityValue(0), tooltip=tips)
    )
    fields = {"n": "Name", "x": x.title, "y": y.title} | ({"lo": f"{band}, low", "hi": f"{band}, high"} if band else {})
    return _finish(kept, layers, f"{y.title} by {x.title}, a line for each name", fields)


def boxes(rows: Iterable[Mapping[str, Value]], names: Names, x: str, y: Axis) -> Chart:
    """Boxes side by side at each x, from fields n, x, low, q1, mid, q3, high."""
    kept = finite(rows)
    base = alt.Chart().encode(
        x=alt.X("x:O", title=x, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset(
            "n:N", scale=alt.Scale(domain=list(names), paddingInner=0.3, paddingOuter=0.3), bandPosition=0.5
        ),
        color=_colour(names),
    )
    parts = {"high": "largest", "q3": "upper quartile", "mid": "median", "q1": "lower quartile", "low": "smallest"}
    tips = [
        alt.Tooltip("n:N", title="Name"),
        alt.Tooltip("x:O", title=x),
        *(y.tooltip(key, text) for key, text in parts.items()),
    ]
    layers = [
        base.mark_rule(clip=True).encode(y=y.channel(alt.Y, "low"), y2=alt.Y2("high:Q"), opacity=_shade(0.8)),
        base.mark_bar(clip=True).encode(
            y=y.channel(alt.Y, "q1"), y2=alt.Y2("q3:Q"), opacity=_shade(0.45), tooltip=tips
        ),
        base.mark_tick(clip=True, thickness=2).encode(y=y.channel(alt.Y, "mid"), opacity=_shade(1.0)),
    ]
    return _finish(
        kept, layers, f"{y.title}: boxes over corruption types by {x}", {"n": "Name", "x": x, **parts}, HEIGHT + 20
    )


def points(rows: Iterable[Mapping[str, Value]], names: Names, x: Axis, y: Axis) -> Chart:
    """A point for each run, from fields n, seed, x, y."""
    tips = [alt.Tooltip("n:N", title="Name"), alt.Tooltip("seed:N", title="Seed"), x.tooltip("x"), y.tooltip("y")]
    kept = finite(rows)
    marks = alt.Chart().mark_point(filled=True, size=70).encode(
        x=x.channel(alt.X, "x"), y=y.channel(alt.Y, "y"), color=_colour(names), shape=_shape(names),
        opacity=_shade(0.85), tooltip=tips,
    )  # fmt: skip
    return _finish(
        kept,
        [marks],
        f"{y.title} by {x.title}, a point for each run",
        {"n": "Name", "seed": "Seed", "x": x.title, "y": y.title},
    )


def bars(rows: Iterable[Mapping[str, Value]], names: Names, x: Axis) -> Chart:
    """A bar from zero for each name, from fields n, x."""
    kept = finite(rows)
    tips = [alt.Tooltip("n:N", title="Name"), x.tooltip("x")]
    marks = alt.Chart().mark_bar(size=13, cornerRadiusEnd=1).encode(
        x=x.channel(alt.X, "x"), y=_rows_axis(names, kept), color=_colour(names), opacity=_shade(0.9), tooltip=tips
    )  # fmt: skip
    return _finish(
        kept, [marks], f"{x.title} by name", {"n": "Name", "x": x.title}, _tall(len({row["n"] for row in kept}))
    )


def members(rows: Iterable[Mapping[str, Value]], names: Names, x: Axis) -> Chart:
    """Ticks for members and a dot for their average, from fields n, kind, x."""
    kept = finite(rows)
    base = alt.Chart().encode(
        x=x.channel(alt.X, "x"),
        y=_rows_axis(names, kept),
        color=_colour(names),
        tooltip=[alt.Tooltip("n:N", title="Name"), alt.Tooltip("kind:N", title="Of"), x.tooltip("x")],
    )
    layers = [
        base.transform_filter("datum.kind !== 'average'").mark_tick(thickness=2, size=15).encode(opacity=_shade(0.6)),
        base.transform_filter("datum.kind === 'average'").mark_point(filled=True, size=90).encode(opacity=_shade(1.0)),
    ]
    fields = {"n": "Name", "kind": "Of", "x": x.title}
    return _finish(
        kept, layers, f"{x.title} of each member and of their average", fields, _tall(len({row["n"] for row in kept}))
    )


def intervals(rows: Iterable[Mapping[str, Value]], names: Names, x: Axis, of: str) -> Chart:
    """A dot with its error for each set and name, from fields g (the set), n, x, lo, hi."""
    kept = finite(rows)
    base = alt.Chart().encode(
        y=alt.Y("g:N", title=None, sort=None),
        yOffset=alt.YOffset("n:N", scale=alt.Scale(domain=list(names))),
        color=_colour(names),
    )
    tips = [
        alt.Tooltip("g:N", title=of),
        alt.Tooltip("n:N", title="Name"),
        x.tooltip("x"),
        x.tooltip("lo", "mean - error"),
        x.tooltip("hi", "mean + error"),
    ]
    layers = [
        base.mark_rule(strokeWidth=2).encode(x=x.channel(alt.X, "lo"), x2=alt.X2("hi:Q"), opacity=_shade(0.7)),
        base.mark_point(filled=True, size=60).encode(
            x=x.channel(alt.X, "x"), shape=_shape(names), opacity=_shade(1.0), tooltip=tips
        ),
    ]
    fields = {"g": of, "n": "Name", "x": x.title, "lo": "Mean - error", "hi": "Mean + error"}
    return _finish(
        kept, layers, f"{x.title} on each set", fields, _tall(len({(row["g"], row["n"]) for row in kept}), 16)
    )


def _rows_axis(names: Names, rows: list[Point]) -> alt.Y:
    present = {row["n"] for row in rows}
    return alt.Y(
        "n:N",
        title=None,
        scale=alt.Scale(domain=[name for name in names if name in present]),
        axis=alt.Axis(labelLimit=130, ticks=False, domain=False),
    )


def _tall(rows: int, step: int = 24) -> int:
    return max(60, 20 + step * rows)
