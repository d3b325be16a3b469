"""What is the user's stays as it was, whatever a command is told to write there."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_configs import BASE, experiment
from slimbayes_lab.command import app
from slimbayes_lab.data import prepare
from slimbayes_lab.papers import reproduce as papers
from slimbayes_lab.runs import process
from slimbayes_lab.runs.folder import RunError, default_folder, open_run
from typer.testing import CliRunner
from users_folders import REFUSED, TAKEN, contents, names_of_a_run, thesis, write

from slimbayes.files import MARKER, check_output, claim_folder, write_text

# --- folders ---


class Refused(Exception):
    """Stands for data or a network that training refuses."""


def begin_run(path: Path) -> None:
    with suppress(RunError, Refused), open_run(path, experiment(), resume=True):
        raise Refused


def write_run(path: Path) -> None:
    with suppress(RunError), open_run(path, experiment(), resume=True):
        for name in ("metrics.csv", "record.json", "data.json"):
            write_text(path / name, "ours")


def write_table(path: Path) -> None:
    name = "rank1/table2/mfvi"
    with suppress(papers.Incomplete, FileExistsError):
        papers.reproduce(name, path, scale="small")


@pytest.fixture
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Any:
        raise Refused

    def start(*args: object) -> Any:
        raise OSError("no process is started here")

    monkeypatch.setattr(papers, "_run", refuse)
    monkeypatch.setattr(process, "_process", start)


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize("writer", [begin_run, write_run, write_table])
@pytest.mark.parametrize("layout", [*REFUSED, *TAKEN])
def test_no_folder_of_a_run_or_table_takes_the_place_of_a_user_s_files(
    layout: Callable[[Path], None], writer: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "work" / "p"
    path.parent.mkdir()
    layout(path)
    before = contents(tmp_path)
    with suppress(OSError):  # a pipe in place of a folder, or a ring of links
        writer(path)
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize("layout", [names_of_a_run, thesis])
def test_a_sweep_writes_into_no_folder_with_names_of_a_run(
    layout: Callable[[Path], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = default_folder(experiment(), tmp_path)
    layout(folder)
    before = contents(tmp_path)
    state, reason = process.train(process.Run("one", experiment(), tmp_path))
    after = contents(tmp_path)
    assert state == "failed" and {name: after.get(name) for name in before} == before
    assert ("did not write there" in reason) == (layout is names_of_a_run)


def test_a_config_of_the_user_s_is_not_rewritten_where_a_run_would_be(
    tmp_path: Path,
) -> None:
    text = "# my comment\n" + yaml.safe_dump(BASE)
    (tmp_path / "config.yaml").write_text(text)
    words = ["fit", str(tmp_path / "config.yaml"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "holds config.yaml, which" in done.output
    assert contents(tmp_path) == {"config.yaml": text.encode()}


def refuse_with_notes(folder: Path) -> None:
    with open_run(folder, experiment(), resume=False):
        (folder / "notes.txt").write_text("mine")
        raise Refused


def test_a_refused_run_removes_only_what_it_wrote(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        refuse_with_notes(tmp_path / "run")
    assert contents(tmp_path) == {"run": "folder", "run/notes.txt": b"mine"}


def test_a_claimed_folder_says_what_may_be_replaced(tmp_path: Path) -> None:
    claim_folder(tmp_path / "a", ["one.txt"])
    (tmp_path / "a" / "one.txt").write_text("ours")
    (tmp_path / "a" / "two.txt").write_text("mine")
    claim_folder(tmp_path / "a", ["one.txt"])
    with pytest.raises(FileExistsError, match=r"a holds two\.txt, which .* with --out"):
        claim_folder(tmp_path / "a", ["one.txt", "two.txt"])
    assert (tmp_path / "a" / MARKER).read_text().splitlines()[1:] == ["one.txt"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / MARKER).write_text("mine")
    with pytest.raises(FileExistsError, match="slimbayes did not write it"):
        claim_folder(tmp_path / "b", ["one.txt"])
    assert (tmp_path / "b" / MARKER).read_text() == "mine"


def test_prepared_arrays_replace_no_file_of_the_user_s(tmp_path: Path) -> None:
    write(tmp_path, yacht_csv="length,drag\n1.0,2.0\n3.0,4.0\n")
    write(tmp_path, out__uci__yacht__all_safetensors="mine")
    with pytest.raises(FileExistsError, match=r"holds all\.safetensors, which"):
        prepare("uci/yacht", tmp_path, tmp_path / "out")
    assert (tmp_path / "out/uci/yacht/all.safetensors").read_text() == "mine"
    for rows in ("1.0,2.0", "1.0,3.0"):
        write(tmp_path, yacht_csv=f"length,drag\n{rows}\n3.0,4.0\n")
        prepare("uci/yacht", tmp_path, tmp_path / "new")


# --- single files ---

COMMANDS: dict[str, tuple[str, ...]] = {
    "init": ("init", "rows.csv", "-o", "out.yaml"),
    "predict": ("predict", "run", "rows.csv", "-o", "out.csv"),
    "export": ("export", "run", "--to", "onnx", "-o", "out.onnx"),
    "report": ("report", "run", "-o", "out.html"),
    "schema": ("config", "schema", "-o", "out.json"),
}


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe", "link to a pipe"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_there_is_refused_and_devices_are_with_force_too(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command]
    write(tmp_path, rows_csv="a,b\n1,2\n", mine_txt="mine", folder__a_txt="mine")
    os.mkfifo("pipe")
    out = Path(words[-1])
    if kind == "file":
        out.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(out)
    else:
        place = {"link": "mine.txt", "folder": "folder", "link to a pipe": "pipe"}[kind]
        out.symlink_to(place)
    before = contents(tmp_path)
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2 and f"{out} is " in done.output, done.output
    if kind not in ("file", "link"):
        done = CliRunner().invoke(app, [*words, "--force"])
        assert done.exit_code == 2 and "not a regular file" in done.output, done.output
    else:
        assert "replace it with --force" in done.output.replace("\n", " ")
    assert contents(tmp_path) == before


def test_force_replaces_a_file_and_leaves_a_link_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real.json").write_text("old")
    Path("out.json").symlink_to("real.json")
    for _ in range(2):
        done = CliRunner().invoke(app, [*COMMANDS["schema"], "--force"])
        assert done.exit_code == 0, done.output
    assert Path("out.json").is_symlink() and "{" in Path("real.json").read_text()
    assert sorted(os.listdir()) == ["out.json", "real.json"]


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new")
    check_output(tmp_path / "link")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "new").read_text() == "text"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_regular_file_is_never_replaced(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    os.mkfifo(place) if kind == "pipe" else place.mkdir()
    with pytest.raises(OSError, match=f"it is a {kind}, not a regular file"):
        write_text(place, "text")
    assert contents(tmp_path) == {"place": kind}
