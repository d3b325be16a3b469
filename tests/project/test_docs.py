"""The site builds without a warning and without a broken link; what it makes by itself is whole and up to date."""

import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import forks
import pytest

import slimbayes as sb

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    name = f"docs_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load("measured.py")


def _build_site(folder: Path) -> None:
    from sphinx.cmd.build import main

    warnings.simplefilter("default")  # those of Sphinx's own code fail nobody's site
    words = [
        "-W",
        "-q",
        "--keep-going",
        "-d",
        folder / "trees",
        ROOT / "docs",
        folder / "site",
    ]
    sys.exit(main([str(word) for word in words]))


@pytest.mark.slow
@pytest.mark.timeout(900)  # twenty seconds of work, on a machine that others use, too
def test_the_site_builds_without_warnings_and_broken_links(tmp_path: Path) -> None:
    for needed in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(
            needed, reason=f'the site needs {needed}: pip install "slimbayes[docs]"'
        )
    building = forks.start(_build_site, tmp_path, log=tmp_path / "said")
    assert forks.exit_codes([building], seconds=800) == [0], (
        tmp_path / "said"
    ).read_text()
    assert load("links.py").broken(tmp_path / "site") == []
    found = {
        file.stem: file.read_text() for file in (tmp_path / "site").rglob("*.html")
    }
    assert all(
        f'id="slimbayes.{name}"' in found["posteriors"]
        for name in ("Rank1", "KTied", "ModelPatch")
    )
    assert "Small real tasks" in found["rank1"] and "<math" in found["rank1"]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here">x</a><a href="#there">y</a><img src="b.png"></p>'
    )
    (tmp_path / "c.html").write_text(
        '<a href="a.html#here">x</a><a href="a.html#no">y</a><a href="https://x.y">z</a>'
    )
    found = load("links.py").broken(tmp_path)
    assert sorted(found) == [
        "a.html -> #there",
        "a.html -> b.png",
        "c.html -> a.html#no",
    ]


@pytest.mark.slow
def test_every_public_name_is_in_the_api_pages() -> None:
    pages = load("site_pages.py")
    grouped = {name for names in pages.grouped_names().values() for name in names}
    assert grouped | {name.split(".")[1] for name in pages.MODULES} >= set(sb.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "methods").glob("*.md")), ids=lambda page: page.stem
)
def test_what_methods_pages_ask_for_was_measured(
    page: Path, tables: ModuleType
) -> None:
    for block in re.findall(r"```{measured}\n(.*?)```", page.read_text(), re.S):
        text = tables.measured(dict(line.split(":", 1) for line in block.splitlines()))
        assert text.count("\n|---") >= len(block.splitlines())  # a table for each line


def test_a_table_that_nobody_measured_is_refused(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="nothing about tasks: astrology"):
        tables.measured({"tasks": "astrology"})


@pytest.mark.slow
def test_numbers_of_the_readme_and_of_costs_are_those_of_the_records(
    tables: ModuleType,
) -> None:
    for name, texts in tables.pages().items():
        page = (ROOT / name).read_text()
        assert tables.with_marks(page, texts) == page, (
            f"python docs/measured.py writes {name} anew"
        )
    cost = (ROOT / "docs" / "cost.md").read_text()
    assert (
        "+1.6%" in cost and "+28.6%" in cost
    )  # about one percent on a wide network, far more on a small one


def test_a_page_without_marks_is_refused(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="no marks <!-- demo -->"):
        tables.with_marks("<!-- demo -->\nnever closed", {"demo": "text"})


def test_scores_of_the_demo_are_those_of_its_records(
    tables: ModuleType, tmp_path: Path
) -> None:
    def judged(role: str, draws: int, **metrics: float) -> dict[str, Any]:
        return {"role": role, "draws": draws, "metrics": metrics}

    record = {
        "name": "rank-1",
        "seed": 2,
        "config_hash": "abc",
        "parameters": {"plain": 100, "total": 110},
        "cost": {"train_seconds": 3.0},
        "evaluations": [
            judged("test", 1, accuracy=0.1, nll=9.0),
            judged("test", 4, accuracy=0.9, nll=0.2),
            judged("corruption", 4, accuracy=0.8, nll=0.4),
            judged("corruption", 4, accuracy=0.6, nll=0.8),
            judged("ood", 4, auroc=0.7),
        ],
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    (found,) = tables.demo_scores(tmp_path)
    assert found["passes"] == 4 and found["accuracy"] == 0.9
    assert found["corrupted_accuracy"] == pytest.approx(0.7)
    assert found["corrupted_nll"] == pytest.approx(0.6)


def test_a_folder_without_the_demo_s_runs_is_refused(
    tables: ModuleType, tmp_path: Path
) -> None:
    before = tables.DEMO.read_bytes()
    with pytest.raises(ValueError, match="has no runs of `make demo`"):
        tables.take_demo(tmp_path)
    assert tables.DEMO.read_bytes() == before


SHORT: dict[str, dict[str, Any]] = {
    "bands": {"steps": 5}, "demo": {}, "digits": {"epochs": 1}, "table": {"epochs": 2}, "trained": {"steps": 5, "side": 10},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_the_gallery_s_scripts_draw_their_pictures(name: str, tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert (ROOT / "docs" / "gallery" / f"{name}.png").exists()
    assert load(f"gallery/{name}.py").main(out=tmp_path / "picture.png", **SHORT[name])
    assert imread(tmp_path / "picture.png")[..., :3].std() > 0.05  # not a blank page


@pytest.mark.slow
def test_the_concepts_are_drawn(tmp_path: Path) -> None:
    load("pictures/draw.py").main(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "rank1.png",
        "tied.png",
        "patches.png",
    }


def test_one_version_everywhere() -> None:
    numbers = {
        "pyproject.toml": r'^version = "(.+)"', "CITATION.cff": r"^version: (.+)", "CHANGELOG.md": r"^## (\S+)",
    }  # fmt: skip
    found = {
        name: re.search(pattern, (ROOT / name).read_text(), re.M)
        for name, pattern in numbers.items()
    }
    assert {name: match and match[1] for name, match in found.items()} == dict.fromkeys(
        numbers, sb.__version__
    )
