"""The page as a file: its sections, specs, sizes, escapes and what it tells about bad records."""

import base64
import hashlib
import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import vl_convert
from altair.vegalite.schema import load_schema
from report_records import METHODS, hostile, record, regression, save
from slimbayes_lab.report import kept, write_page
from slimbayes_lab.report.charts import PALETTE, Axis, bars
from slimbayes_lab.report.figures import (
    by_corruption,
    by_severity,
    checkpoints,
    corruption_boxes,
    draws,
    reliability,
    risk_coverage,
)
from slimbayes_lab.report.groups import load
from slimbayes_lab.report.metric import MISSING
from slimbayes_lab.report.record import Evaluation, RecordError, read
from slimbayes_lab.report.tables import _seconds, summary

HOSTILE = [
    "<script>alert(1)</script>",
    "</script>",
    "<!--<script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "' or datum.n",
    "\u2028</ScRiPt\t>",
]
VALIDATOR = jsonschema.validators.validator_for(load_schema())(load_schema())


class Reader(HTMLParser):
    """What a browser would make of the page: elements, ids, headings, script bodies."""

    def __init__(self, text):
        super().__init__()
        (
            self.tags,
            self.ids,
            self.headings,
            self.scripts,
            self.styles,
            self.policy,
            self.text,
            self.open,
        ) = (
            [],
            [],
            [],
            [],
            [],
            "",
            [],
            [],
        )
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.open.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append([attrs, ""])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append([int(tag[1]), ""])

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            (self.scripts if self.open[-1] == "script" else self.styles)[-1][1] += data
            return
        self.text.append(data)
        if any(re.fullmatch("h[1-6]", tag) for tag in self.open):
            self.headings[-1][1] += data

    @property
    def figures(self):
        return json.loads(
            next(
                body
                for attrs, body in self.scripts
                if attrs.get("type") == "application/json"
            )
        )

    @property
    def specs(self):
        return [
            chart["spec"]
            for figure in self.figures.values()
            for variant in figure["variants"]
            for chart in variant["charts"]
        ]


def page(tmp_path, *records, title=None):
    return write_page(
        save(tmp_path / "runs", *records), tmp_path / "out" / "page.html", title
    ).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    runs = [record(name, seed, corruptions=4) for name in METHODS for seed in (0, 1)]
    return Reader(page(tmp_path_factory.mktemp("full"), *runs, title="A title"))


def errors(spec):
    """What breaks the Vega-Lite schema; two rows of data are enough to see it."""
    return list(
        VALIDATOR.iter_errors({**spec, "data": {"values": spec["data"]["values"][:2]}})
    )


def titles(reader, level):
    return [text.strip() for depth, text in reader.headings if depth == level]


@pytest.mark.slow
def test_all_sections_are_there_in_order(full):
    assert titles(full, 1) == ["A title"] and titles(full, 2) == [
        "synthetic-10",
        "How it was made",
    ]
    assert titles(full, 3) == [
        "Summary",
        "Calibration",
        "Corruption",
        "Other sets",
        "Unfamiliar inputs",
        "Selective prediction",
        "Members",
        "Draws",
        "Examples",
        "Cost",
        "Training",
        "Commands",
        "Environment",
    ]
    levels = [level for level, _ in full.headings]
    assert all(b <= a + 2 for a, b in itertools.pairwise(levels)) and len(
        full.ids
    ) == len(set(full.ids))
    linked = [attrs["href"][1:] for tag, attrs in full.tags if tag == "a"]
    assert set(linked) <= set(full.ids)


@pytest.mark.slow
def test_figures_and_their_menus(full):
    menus = {
        key: [variant["label"] for variant in figure["variants"]]
        for key, figure in full.figures.items()
    }
    assert list(menus.values()) == [
        ["Test", "Severity 1", "Severity 2", "Severity 3", "Severity 4", "Severity 5"],
        ["Accuracy", "NLL", "ECE", "Brier", "Top-5 accuracy", "AURC"],
        ["Accuracy", "NLL", "ECE", "Brier", "Top-5 accuracy", "AURC"],
        ["AUROC", "AUCPR", "FPR95"],
        [""],
        ["Disagreement / error", "Disagreement", "KL", "Cosine similarity"],
        ["Accuracy", "NLL", "ECE", "Brier", "Top-5 accuracy", "AURC"],
        ["Accuracy", "NLL", "ECE", "Brier", "Top-5 accuracy", "AURC"],
        ["Parameters", "Training", "Memory"],
        ["Loss", "NLL", "KL", "KL weight", "Learning rate"],
    ]


@pytest.mark.slow
def test_specs_are_valid_and_hold_their_data(full):
    assert len(full.specs) > 50
    assert errors({**full.specs[0], "layer": [{"mark": "nothing"}]})
    for spec in full.specs:
        assert errors(spec) == []
        assert (
            spec["width"] == "container"
            and spec["description"]
            and spec["data"]["values"]
        )
        assert "url" not in json.dumps(spec["data"]) and spec["params"] == [
            {"name": "focus", "value": ""}
        ]


@pytest.mark.slow
def test_every_committed_record_still_opens():
    """Records of all earlier versions: the format may grow, but what was written must stay readable."""
    results = Path(__file__).parents[3] / "lab" / "results"
    records = [
        file for paper in results.glob("*.jsonl") for file in kept.records(paper)
    ]
    assert len(records) >= 400 and all(len(read(file).digest) == 64 for file in records)


def test_the_policy_names_every_script_and_style_and_nothing_else(full):
    def sha(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = dict(rule.strip().split(" ", 1) for rule in full.policy.split(";"))
    run = [body for attrs, body in full.scripts if "type" not in attrs]
    assert rules["default-src"] == "'none'" and rules["script-src"].split() == [
        sha(body) for body in run
    ]
    assert (
        rules["style-src"].split() == [sha(body) for _, body in full.styles]
        and rules["img-src"] == "data:"
    )
    assert "unsafe" not in full.policy and not any(
        {"src", "style", *(k for k in attrs if k.startswith("on"))} & set(attrs)
        for tag, attrs in full.tags
        if tag != "img"
    )
    assert all(
        attrs["src"].startswith("data:image/png;base64,")
        for tag, attrs in full.tags
        if tag == "img"
    )


@pytest.mark.slow
def test_hostile_text_stays_text(tmp_path):
    bad = HOSTILE[0]
    runs = [hostile(text, data=HOSTILE[i % 2]) for i, text in enumerate(HOSTILE)]
    text = page(tmp_path, *runs, title=bad)
    reader = Reader(text)
    assert (
        len(reader.scripts) == 3
        and [tag for tag, _ in reader.tags if tag in ("img", "b1", "iframe")] == []
    )
    assert not [
        attrs for _, attrs in reader.tags if any(key.startswith("on") for key in attrs)
    ]
    assert titles(reader, 1) == [bad] and "{{ 7 * 7 }}" in "".join(reader.text)
    data = next(body for attrs, body in reader.scripts if "type" in attrs)
    assert not re.search("[<>&\u2028]", data) and "\\u003cscript\\u003ealert(1)" in data
    for spec in reader.specs:
        assert errors(spec) == []
        assert not re.search(
            r"alert|or datum\.n'",
            json.dumps([layer.get("transform") for layer in spec["layer"]]),
        )


def test_real_targets_have_only_the_sections_with_data(tmp_path):
    reader = Reader(
        page(
            tmp_path,
            *(
                regression(name, seed)
                for name in ("mean-field", "k-tied")
                for seed in (0, 1)
            ),
        )
    )
    assert titles(reader, 3) == [
        "Summary",
        "Draws",
        "Cost",
        "Training",
        "Commands",
        "Environment",
    ]
    assert [variant["label"] for variant in reader.figures["figure-1"]["variants"]] == [
        "RMSE",
        "LPD",
        "CRPS",
        "Coverage of 95 %",
    ]


def test_data_sets_have_a_chapter_each_and_names_keep_their_colour(tmp_path):
    runs = [
        record("rank1-cauchy", 0, corruptions=1),
        record("deterministic", 0, data="other", corruptions=1),
        record("rank1-cauchy", 0, data="other", corruptions=1),
    ]
    reader = Reader(page(tmp_path, *runs))
    assert titles(reader, 2) == ["synthetic-10", "other", "How it was made"]
    for spec in reader.specs:
        for layer in [spec, *spec["layer"]]:
            scale = layer["encoding"].get("color", {}).get("scale")
            if scale:
                colours = dict(zip(scale["domain"], scale["range"]))
                assert {
                    "rank1-cauchy": PALETTE[0],
                    "deterministic": PALETTE[1],
                }.items() >= colours.items()


def test_a_bare_record_makes_a_page(tmp_path):
    reader = Reader(
        page(
            tmp_path,
            record(
                evaluations=[],
                examples=[],
                curve=[],
                environment={},
                commands=[],
                config={},
            ),
        )
    )
    assert titles(reader, 3) == ["Summary", "Cost", "Commands"]


@pytest.mark.slow
def test_times_of_other_machines_are_said_not_to_compare(tmp_path):
    """The environment is as the lab writes it: a GPU's name, or else the CPU's."""
    runs = [
        record("a", 0, environment={"cpu": "x", "gpu": "g"}),
        record("b", 0, environment={"cpu": "y"}),
    ]
    assert "made on different hardware (g; y): their times" in page(
        tmp_path / "other", *runs
    )
    same = [record(name, 0, environment={"cpu": "x", "gpu": "g"}) for name in "ab"]
    assert "different hardware" not in page(tmp_path / "same", *same)


def test_values_that_are_not_finite_are_shown_and_not_drawn(tmp_path):
    sets = [
        Evaluation(
            data="t", role="test", draws=1, rows=1, metrics={"nll": value, "ece": 0.1}
        )
        for value in (math.nan,)
    ]
    text = page(
        tmp_path,
        record(
            "diverged",
            0,
            evaluations=sets,
            curve=[{"epoch": 0.0, "loss": math.inf}, {"epoch": 1.0, "loss": 2.0}],
        ),
        record("deterministic", 0, corruptions=0),
    )
    reader = Reader(text)
    assert "nan" in reader.text and all(
        "NaN" not in json.dumps(spec) for spec in reader.specs
    )


def test_bad_records_are_left_out_and_told(tmp_path):
    good, cut, newer, odd = save(
        tmp_path,
        *(record("rank1-cauchy", seed, corruptions=0, pictures=0) for seed in range(4)),
    )
    (cut / "record.json").write_text((cut / "record.json").read_text()[:400])
    (newer / "record.json").write_text('{"format": 7}')
    (odd / "record.json").write_text(json.dumps({"format": 1, "name": HOSTILE[0]}))
    reader = Reader(
        write_page(
            [good, cut, newer, odd, tmp_path / "absent"], tmp_path / "p.html"
        ).read_text()
    )
    text = "".join(reader.text)
    assert "4 records were left out" in text and "notes" in reader.ids
    assert all(
        reason in text
        for reason in (
            "it is not JSON",
            "made by a newer slimbayes",
            "is damaged: method",
            "cannot be read",
        )
    )
    with pytest.raises(
        RecordError, match=r"(?s)none of the 2 records can be used:.*newer slimbayes"
    ):
        write_page([cut, newer], tmp_path / "q.html")
    assert not (tmp_path / "q.html").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_page_stays_small_and_repeats(tmp_path):
    """Twenty names x 95 corrupted sets x 3 numbers of draws, with pictures and long curves."""
    runs = save(tmp_path, *(record(f"method {i}", 0, epochs=300) for i in range(20)))
    path = write_page(runs, tmp_path / "page.html")
    assert path.stat().st_size < 2_000_000
    first, again = (
        write_page(runs[:2], tmp_path / name).read_bytes()
        for name in ("few.html", "again.html")
    )
    assert again == first


@pytest.mark.slow
def test_many_data_sets_on_one_page_stay_small(tmp_path):
    """Ten regression tasks, and six classification tasks with corruptions: menus shrink, and the page says so."""
    tasks = [
        regression(name, seed, data=f"task {i}")
        for i in range(10)
        for name in ("a", "b", "c", "d")
        for seed in (0, 1)
    ]
    images = [
        record(name, 0, data=f"task {i}", corruptions=5)
        for i in range(10, 16)
        for name in list(METHODS)[:4]
    ]
    reader = Reader(text := page(tmp_path, *tasks, *images))
    assert len(text.encode()) < 2_000_000 and len(titles(reader, 2)) == 17
    assert max(
        len(figure["variants"]) for figure in reader.figures.values()
    ) == 1 and any("1 at most" in part for part in reader.text)


@pytest.mark.slow
def test_twenty_seeds_cost_no_more_than_a_few(tmp_path):
    few = page(
        tmp_path / "few",
        *(record("rank1-cauchy", seed, corruptions=3) for seed in range(2)),
    )
    many = page(
        tmp_path / "many",
        *(record("rank1-cauchy", seed, corruptions=3) for seed in range(20)),
    )
    assert len(many) - len(few) < 40_000


@pytest.mark.slow
def test_pictures_share_the_room(tmp_path):
    reader = Reader(
        page(
            tmp_path, *(record(f"m{i}", 0, corruptions=0, pictures=8) for i in range(9))
        )
    )
    shown = [attrs["src"] for tag, attrs in reader.tags if tag == "img"]
    assert (
        60 <= len(shown) < 144
        and sum(map(len, shown)) <= 200_000
        and any("more in the record" in text for text in reader.text)
    )


# What the charts show, against slow loops.


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    return load(
        save(
            tmp_path_factory.mktemp("g"),
            *(
                record("rank1-cauchy", seed, corruptions=3, draws=(1, 4))
                for seed in (0, 1)
            ),
        )
    ).groups[0]


def test_boxes_are_quartiles_over_corruption_types_of_seed_means(group):
    label, (chart,) = corruption_boxes([group]).variants[1]
    assert label == "NLL"
    for row in chart.rows:
        kinds = {}
        for run in group.records:
            for e in run.evaluations:
                if e.role == "corruption" and e.draws == 4 and e.severity == row["x"]:
                    kinds.setdefault(e.corruption, []).append(e.metrics["nll"])
        values = sorted(np.mean(v) for v in kinds.values())
        assert (
            len(values) == 3
            and row["mid"] == pytest.approx(values[1], rel=1e-3)
            and row["low"] == pytest.approx(values[0], rel=1e-3)
        )
        assert row["q1"] == pytest.approx((values[0] + values[1]) / 2, rel=1e-3)
    assert sorted(by_corruption(group, "nll")) == [1, 2, 3, 4, 5]


def test_bands_of_shares_end_at_none_and_all(tmp_path):
    """Digits that some corruptions leave alone and others wreck: their mean and a deviation are beyond 100 %."""
    one = record("rank1-cauchy", 0, corruptions=3)
    share = iter(itertools.cycle((1.0, 1.0, 0.1)))
    bent = [
        e.model_copy(update={"metrics": e.metrics | {"accuracy": next(share)}})
        if e.role == "corruption"
        else e
        for e in one.evaluations
    ]
    label, (chart,) = by_severity(
        load(save(tmp_path, one.model_copy(update={"evaluations": bent}))).groups
    ).variants[0]
    assert label == "Accuracy" and max(row["hi"] for row in chart.rows) == 1.0


def marks(node, kinds):
    """The drawn marks of some kinds, each as a list of centres."""
    if node.get("role") == "mark" and node.get("marktype") in kinds:
        yield [round(item["x"] + item.get("width", 0) / 2, 3) for item in node["items"]]
    for inner in node.get("items", []):
        yield from marks(inner, kinds)


@pytest.mark.slow
def test_whiskers_boxes_and_medians_stand_in_one_line(group):
    _, (chart,) = corruption_boxes([group]).variants[0]
    spec = chart.spec | {"width": 600}
    whiskers, bodies, medians = marks(
        vl_convert.vegalite_to_scenegraph(spec)["scenegraph"], ("rule", "rect")
    )
    assert whiskers == bodies == medians and len(set(whiskers)) == 5


def test_reliability_pools_rows(group):
    _, (diagram, shares) = reliability([group]).variants[0]
    assert sum(row["y"] for row in shares.rows) == pytest.approx(1, abs=1e-3)
    curve = next(
        e for e in group.records[0].evaluations if e.role == "test" and e.draws == 4
    ).reliability
    assert [row["x"] for row in diagram.rows] == pytest.approx(
        curve.confidence, abs=1e-4
    ) and len(diagram.rows) == len(curve.count)


def test_snapshots_are_points_on_the_way(group):
    assert checkpoints([group]) is None
    curve = [
        {
            "epoch": float(e),
            "test_accuracy": e / 10,
            "test_nll": 1 - e / 10,
            "test_disagreement": 0.1 * e,
        }
        for e in (8, 9)
    ]
    curve.insert(0, {"epoch": 7.0, "loss": 1.0})
    records = [
        record.model_copy(update={"curve": curve}) for record in group.records[:1]
    ]
    found = checkpoints([replace(group, records=records)])
    ((label, (good, bad)),) = found.variants
    assert label == "Disagreement" and [(row["x"], row["y"]) for row in good.rows] == [
        (0.8, 0.8),
        (0.9, 0.9),
    ]
    assert [row["x"] for row in bad.rows] == pytest.approx([0.2, 0.1])


def test_numbers_of_draws_are_spaced_by_ratio(group):
    _, (chart,) = draws([group]).variants[0]
    assert [row["x"] for row in chart.rows] == [1, 4]
    x = chart.spec["encoding"]["x"]
    assert x["scale"]["type"] == "log" and x["axis"]["values"] == [1, 4]


def test_the_summary_counts_seeds_and_marks_nobody_as_best_of_one(group, tmp_path):
    bare = Evaluation(
        data="synthetic/test", role="test", draws=4, rows=9, metrics={"accuracy": 0.1}
    )
    other = load(save(tmp_path, record("other", 0, evaluations=[bare]))).groups[0]
    columns = {(c.over, c.title): c.cells for c in summary([group, other]).columns}
    assert [cell.text for cell in columns["Runs", "Seeds"]] == ["2", "1"]
    assert [cell.text for cell in columns["Runs", "Draws"]] == ["4", "4"]
    assert [cell.best for cell in columns["Test", "Accuracy, %"]] == [True, False]
    assert [cell.best for cell in columns["Test", "NLL"]] == [False, False]


def test_times_are_told_in_units_that_fit():
    times = [
        _seconds([value])
        for value in (3.0, 89.0, 90.0, 5399.0, 5400.0, math.nan, math.inf)
    ]
    assert [cell.text for cell in times] == [
        "3 s",
        "89 s",
        "1.5 min",
        "90.0 min",
        "1.5 h",
        MISSING,
        MISSING,
    ]
    assert [cell.sort for cell in times[:2]] == [3.0, 89.0] and times[-1].sort is None


def test_risk_falls_on_the_recorded_curve(group):
    rows = risk_coverage([group]).variants[0][1][0].rows
    last = [
        e.risk_coverage.risk[-1]
        for run in group.records
        for e in run.evaluations
        if e.risk_coverage and e.draws == 4
    ]
    assert rows[-1]["x"] == 1 and rows[-1]["y"] == pytest.approx(
        np.mean(last), rel=1e-3
    )


def test_colours_stand_out_on_both_papers_and_for_colour_blind_readers():
    """Contrast 3:1 (WCAG 1.4.11) on white and dark paper; distances under colour blindness (Machado et al. 2009)."""
    srgb = np.array(
        [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in PALETTE]
    )
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    bright = linear @ [0.2126, 0.7152, 0.0722]
    assert (1.05 / (bright + 0.05)).min() > 3 and (
        (bright + 0.05) / (0.0085 + 0.05)
    ).min() > 2.8
    sights = [
        np.eye(3),
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.01182, 0.04294, 0.968881],
        ],
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.3039],
        ],
    ]
    for sight in sights:
        xyz = (
            np.clip(linear @ np.array(sight).T, 0, 1)
            @ np.array(
                [
                    [0.4124, 0.3576, 0.1805],
                    [0.2126, 0.7152, 0.0722],
                    [0.0193, 0.1192, 0.9505],
                ]
            ).T
            / [0.9505, 1, 1.089]
        )
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack(
            [116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])],
            1,
        )
        gaps = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[
            np.triu_indices(len(lab), 1)
        ]
        assert gaps.min() > 20


def test_names_are_shown_short_apart_and_harmless(tmp_path):
    names = [
        "__proto__",
        "constructor",
        "x" * 10_000,
        "x" * 10_001,
        "a\u200bb",
        "a b",
        "a\nb",
        "",
    ]
    groups = load(
        save(tmp_path, *(record(name, 0, corruptions=1) for name in names))
    ).groups
    shown = [group.name for group in groups]
    assert shown[:2] == ["“__proto__”", "“constructor”"] and shown[4:] == [
        "a b",
        "a b (2)",
        "a b (3)",
        "unnamed",
    ]
    assert len(set(shown)) == len(names) and max(map(len, shown)) < 100
    assert [group.records[0].name for group in groups] == names


def test_bars_are_not_clipped_away() -> None:
    """Round corners and clipping together made a box of width zero around each bar."""
    chart = bars(
        [{"n": "a", "x": 1.5}, {"n": "b", "x": 1.0}],
        {"a": 0, "b": 1},
        Axis("Parameters", zero=True),
    )
    drawn = vl_convert.vegalite_to_svg({**chart.spec, "width": 300})
    widths = [
        float(width)
        for width in re.findall(r"<clipPath[^>]*><rect [^>]*width=\"([\d.]+)\"", drawn)
    ]
    assert widths and min(widths) > 100
