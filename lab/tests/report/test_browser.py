"""The page in a real browser: nothing is loaded, nothing hostile runs, tables sort, charts answer, phones work."""

import re
import shutil
import warnings
from pathlib import Path

import pytest
from report_records import hostile, record, regression, save
from slimbayes_lab.report import write_page
from test_page import HOSTILE

playwright = pytest.importorskip(
    "playwright.sync_api",
    reason="the browser tests need playwright: pip install playwright",
)
# Names that every object of JavaScript has, and such as are empty, long, invisible, written backwards or paths.
NAMES = [
    "__proto__", "constructor", "toString", "hasOwnProperty", "", "x" * 10_000, "a\u200bb", "a b", "\u202eb", "../x",
    "'\"",
]  # fmt: skip
METHODS = ["deterministic", "batch-ensemble", "rank1-gaussian", "rank1-cauchy"]
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
MISSING = (
    "NO BROWSER: the report is NOT tested in one (Debian: apt-get install chromium)"
)
if CHROMIUM is None:
    with warnings.catch_warnings():  # a skip alone is easily overlooked; this stands in the summary without being an error
        warnings.simplefilter("always")
        warnings.warn(MISSING, RuntimeWarning, stacklevel=1)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as engine:
        started = engine.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The standard page and a hostile one."""
    folder = tmp_path_factory.mktemp("pages")
    good = save(
        folder / "good",
        *(record(name, seed, corruptions=2) for name in METHODS for seed in (0, 1)),
        *(regression("k-tied", seed) for seed in (0, 1)),
    )
    (damaged := folder / "damaged").mkdir()
    (damaged / "record.json").write_text("{")
    bad = save(folder / "bad", *(hostile(text) for text in [*HOSTILE, *NAMES]))
    return {
        "good": write_page([*good, damaged], folder / "good.html"),
        "bad": write_page(bad, folder / "bad.html", HOSTILE[0]),
    }


class Visit:
    """A page in its own context, with everything it said and asked for."""

    def __init__(self, browser, path: Path, width=1280, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        self.requests, self.console, self.dialogs = [], [], []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.route(re.compile("^(?!file:)"), lambda route: route.abort())
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on(
            "dialog",
            lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()),
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()
        if error[0] is None:
            assert self.console == [] and self.dialogs == []
            assert all(
                url.startswith(
                    ("file:", "data:image/png;base64,", "data:image/svg+xml")
                )
                for url in self.requests
            ), self.requests
            assert len([url for url in self.requests if url.startswith("file:")]) == 1


@pytest.fixture(scope="module")
def shared(browser, pages):
    """One visit for the tests that leave the page as they found it: a load takes two seconds."""
    with Visit(browser, pages["good"]) as visit:
        yield visit.page


def column(page, number):
    return page.eval_on_selector_all(
        f"#table-1 tbody tr > :nth-child({number})",
        "cells => cells.map(cell => cell.dataset.sort)",
    )


@pytest.mark.slow
def test_every_chart_is_drawn_without_a_word_or_a_request(shared):
    charts = shared.locator(".chart")
    assert (
        charts.count() >= 14 and shared.locator(".chart svg").count() == charts.count()
    )
    assert shared.evaluate(
        "[...document.querySelectorAll('.chart svg')].every(svg => svg.querySelectorAll('path').length > 3)"
    )


def test_the_policy_stops_scripts_and_eval(browser, pages):
    visit = Visit(browser, pages["good"])
    visit.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.broken = 1'}))"
    )
    visit.page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x: onerror=\"window.broken = 1\">')"
    )
    visit.page.wait_for_timeout(200)
    assert visit.page.evaluate("window.broken") is None and any(
        "Content Security Policy" in text for text in visit.console
    )
    visit.context.close()


def test_tables_sort_by_mouse(shared):
    head = shared.locator("#table-1 thead tr:last-child th").nth(2)  # NLL
    head.locator("button").click()
    up = [float(value) for value in column(shared, 3)]
    assert up == sorted(up) and head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert [float(value) for value in column(shared, 3)] == up[
        ::-1
    ] and head.get_attribute("aria-sort") == "descending"
    assert (
        shared.locator(
            "#table-1 th[aria-sort=ascending], #table-1 th[aria-sort=descending]"
        ).count()
        == 1
    )


def test_tables_sort_by_keyboard(shared):
    shared.locator("#table-1 thead button").first.focus()
    shared.keyboard.press("Enter")
    assert column(shared, 1) == sorted(METHODS)
    shared.keyboard.press("Space")
    assert column(shared, 1) == sorted(METHODS, reverse=True)
    shared.keyboard.press("Tab")
    shared.keyboard.press("Enter")
    assert [float(value) for value in column(shared, 2)] == sorted(
        float(value) for value in column(shared, 2)
    )


def test_the_skip_link_comes_first_and_focus_is_seen(browser, pages):
    with Visit(browser, pages["good"]) as visit:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        assert (
            visit.page.evaluate("document.activeElement.getBoundingClientRect().left")
            >= 0
        )
        visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "content"
        visit.page.keyboard.press("Tab")
        assert (
            visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            != "none"
        )


def test_tooltips_appear_on_hover(shared):
    mark = shared.locator("#figure-2 .mark-symbol path").nth(2)
    mark.scroll_into_view_if_needed()
    shared.wait_for_timeout(300)  # a scroll hides the tip
    box = mark.bounding_box()
    shared.mouse.move(
        box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4
    )
    tip = shared.locator("#tip")
    tip.wait_for(state="visible", timeout=5000)
    assert (
        "Name" in tip.inner_text()
        and "Severity" in tip.inner_text()
        and any(name in tip.inner_text() for name in METHODS)
    )
    shared.mouse.move(2, 2)
    tip.wait_for(state="hidden")


def test_the_menu_changes_the_metric_by_mouse_and_keyboard(browser, pages):
    with Visit(browser, pages["good"]) as visit:
        figure = visit.page.locator("#figure-2")
        assert "Accuracy" in figure.locator(".role-axis-title").all_text_contents()[-1]
        figure.get_by_label("NLL", exact=True).check(force=True)
        visit.page.wait_for_selector("#figure-2[data-drawn='1']")
        assert "NLL" in "".join(figure.locator(".role-axis-title").all_text_contents())
        visit.page.keyboard.press("ArrowRight")
        visit.page.wait_for_selector("#figure-2[data-drawn='2']")
        assert "ECE" in "".join(figure.locator(".role-axis-title").all_text_contents())


def test_a_name_can_be_brought_forward_everywhere(shared):
    faint = "document.querySelectorAll('#figure-1 .mark-symbol path[opacity=\"0.125\"]').length"
    assert shared.evaluate(faint) == 0
    shared.locator("#figure-2 .key button", has_text="rank1-cauchy").click()
    shared.wait_for_function(faint + " > 0")
    assert (
        shared.locator(
            ".key button[aria-pressed=true]", has_text="rank1-cauchy"
        ).count()
        > 3
    )
    shared.locator("#figure-2 .key button", has_text="rank1-cauchy").click()
    shared.wait_for_function(faint + " === 0")


def test_numbers_can_be_read_as_a_table(shared):
    shared.locator("#figure-2 .numbers summary").click()
    table = shared.locator("#figure-2 .numbers table")
    table.wait_for()
    assert (
        table.locator("th").all_inner_texts()[:3] == ["Name", "Severity", "Accuracy ↑"]
        and table.locator("tbody tr").count() == len(METHODS) * 6
    )


def test_a_chart_can_be_saved(shared, tmp_path):
    with shared.expect_download() as caught:
        shared.locator("#figure-2 .save").click()
    caught.value.save_as(tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert (
        caught.value.suggested_filename == "figure-2.svg"
        and text.startswith("<svg")
        and "rank1-cauchy" in text
        and "Severity" in text
    )


def colours(page):
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = (
        "getComputedStyle(document.querySelector('.chart .role-axis-title text')).fill"
    )
    return page.evaluate(f"[{paper}, {ink}]")


def test_dark_and_light_follow_the_system_and_the_button(browser, pages):
    with Visit(browser, pages["good"]) as visit:
        light, button = colours(visit.page), visit.page.locator("#theme")
        assert button.get_attribute("aria-pressed") == "false"
        visit.page.emulate_media(color_scheme="dark")
        dark = colours(visit.page)
        assert (
            light != dark
            and light[0] == "rgb(255, 254, 251)"
            and dark[0] == "rgb(21, 23, 28)"
            and light[1] != dark[1]
        )
        button.click()
        assert colours(visit.page) == light
        visit.page.emulate_media(color_scheme="light")
        button.click()
        assert (
            colours(visit.page) == dark
            and button.get_attribute("aria-pressed") == "true"
        )
        visit.page.emulate_media(media="print")
        assert colours(visit.page)[1] == light[1]  # paper is white


@pytest.mark.parametrize("name", ["good", "bad"])
def test_narrow_screens_do_not_scroll_sideways(browser, pages, name):
    with Visit(browser, pages[name], width=320) as visit:
        for details in visit.page.locator("main details").all():
            details.evaluate("element => { element.open = true }")
        for width in (320, 380, 768):  # of a phone, turned to a tablet's
            visit.page.set_viewport_size({"width": width, "height": 900})
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            wide = visit.page.evaluate(
                "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1).length"
            )
            assert wide > 0 or width > 400  # tables scroll in their own box


def test_charts_follow_the_window(browser, pages):
    with Visit(browser, pages["good"]) as visit:
        width = "document.querySelector('#figure-2 svg').getBoundingClientRect().width"
        before = visit.page.evaluate(width)
        visit.page.set_viewport_size({"width": 420, "height": 900})
        visit.page.wait_for_function(f"{width} < {before} - 200")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 420


def test_hostile_text_does_nothing(browser, pages):
    with Visit(browser, pages["bad"]) as visit:
        page = visit.page
        assert (
            page.evaluate("document.scripts.length") == 3
            and page.locator("img, iframe, object, embed").count() == 0
        )
        assert page.locator("h1").inner_text() == HOSTILE[0]
        charts = page.locator(".chart")
        assert (
            charts.count() >= 8 and page.locator(".chart svg").count() == charts.count()
        )
        assert page.get_by_text("could not be drawn").count() == 0
        assert page.locator("#table-1 tbody tr").count() == len(HOSTILE) + len(NAMES)
        bars = page.locator("#figure-3 .mark-rect path, #figure-3 .mark-symbol path")
        assert bars.count() >= len(HOSTILE) + len(NAMES)  # nobody is lost
        for details in page.locator("details").all():
            details.evaluate("element => { element.open = true }")
        for figure in page.locator("figure.charted").all():
            for part in (".menu input", ".key button"):
                figure.locator(part).evaluate_all(
                    "parts => parts.forEach(part => part.click())"
                )
            mark = figure.locator(".mark-symbol path, .mark-rect path").last
            mark.scroll_into_view_if_needed()
            mark.hover(force=True)
        page.wait_for_timeout(300)
        assert (
            page.evaluate("document.scripts.length") == 3
            and page.locator("main img, main script").count() == 0
        )
        assert HOSTILE[0] in page.locator("#table-1").inner_text()


def test_bad_records_are_told_at_the_top_and_in_the_notes(shared):
    assert "1 record was left out" in shared.locator(".warning").first.inner_text()
    assert "is damaged" in shared.locator("#notes .skipped").inner_text()


def test_controls_have_names_and_headings_do_not_skip(shared):
    nameless = shared.evaluate(
        "[...document.querySelectorAll('button, a, summary')].filter(el => !el.textContent.trim()).length"
    )
    assert nameless == 0
    named = "svg => svg.getAttribute('aria-label') || svg.querySelector('[aria-label]')"
    assert shared.evaluate(
        f"[...document.querySelectorAll('.chart svg')].every({named})"
    )
    assert shared.evaluate(
        "[...document.querySelectorAll('table')].every(table => table.querySelector('th[scope=col]'))"
    )
