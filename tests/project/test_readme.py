"""Every Python block of the README and the docs runs, in order, as a reader would type it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "lab" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>.+) -->\n)?```(?P<language>\S*)\n(?P<code>.*?)^```",
    re.S | re.M,
)


def blocks(page: Path) -> Iterator[tuple[str, str, str | None]]:
    """Language, code, and why it is not run, of every fenced block."""
    for found in _FENCE.finditer(page.read_text()):
        yield found["language"], found["code"], found["why"]


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=shown
)
def test_python_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("readme")
    monkeypatch.setitem(
        sys.modules, "readme", module
    )  # where dataclasses look their annotations up
    for language, code, why in blocks(page):
        if language == "python":
            compiled = compile(code, str(page), "exec")
            if why is None:
                exec(compiled, vars(module))


def test_the_readme_shows_code() -> None:
    assert any(
        language == "python" and why is None
        for language, _, why in blocks(ROOT / "README.md")
    )


@pytest.mark.slow
def test_the_readme_s_first_example_prints_what_is_shown_below_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (_, code, _), (language, shown_output, _) = list(blocks(ROOT / "README.md"))[1:3]
    assert language == "text"
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    number = r"-?\d+\.\d+"
    assert re.sub(number, "", printed) == re.sub(number, "", shown_output)
    # Rounding and machines differ by a little.
    accuracy, right, wrong = map(float, re.findall(number, printed))
    expected = list(map(float, re.findall(number, shown_output)))
    assert accuracy == pytest.approx(expected[0], abs=0.03)
    assert right == pytest.approx(expected[1], abs=0.1)
    assert wrong == pytest.approx(expected[2], abs=0.2)
    assert wrong > 2 * right


def test_the_readme_fits_on_a_screen_and_says_early_how_to_install_it() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text) <= 6_500
    assert "pip install" in text[:1_500]
    outside = _FENCE.sub("", text).splitlines()
    prose = [line for line in outside if not line.startswith(("|", "!["))]
    assert max(map(len, prose)) <= 120


def test_blocks_that_do_not_run_hold_no_python_or_say_why() -> None:
    python = re.compile(r"^(import|from) \w+|\bsb\.\w+\(|^\w+ = \w+\(", re.M)
    for page in PAGES:
        for language, code, _ in blocks(page):
            if language in ("", "text", "none"):
                assert not python.search(code), (
                    f"{shown(page)}: a block without a language looks like Python:\n{code}"
                )


def test_links_between_pages_lead_somewhere() -> None:
    made = ("api/index.rst",)  # by the site, from the docstrings
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert target in made or (page.parent / target).exists(), (
                f"{shown(page)} -> {target}"
            )


def test_the_table_of_methods_has_them_all() -> None:
    from slimbayes.posteriors import METHODS

    table = (
        (ROOT / "docs" / "methods" / "index.md")
        .read_text()
        .partition("<!-- methods -->")[2]
        .partition("<!-- /methods -->")[0]
    )
    named = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    assert named - {"config"} == set(METHODS)
