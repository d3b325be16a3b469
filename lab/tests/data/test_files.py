"""Files that are whole or not there, and drafts of killed writers that the next one sweeps."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest

from slimbayes import files


def write_forever(file: Path) -> None:
    while True:
        files.write_bytes(file, os.urandom(200_000))


def save_forever(folder: Path) -> None:
    while True:
        files.write_folder(folder, {"a": os.urandom(200_000), "b": b"b"})


def hidden(folder: Path) -> list[str]:
    """Names of hidden files at any depth."""
    return [name for _, _, names in os.walk(folder) for name in names if name[0] == "."]


@pytest.mark.slow
@pytest.mark.parametrize("run", [write_forever, save_forever])
def test_what_killed_writers_left_is_swept_by_the_next(
    run: Callable[[Path], None], tmp_path: Path
) -> None:
    left = 0
    for moment in range(1, 13):
        child = forks.start(forks.killed_at, moment, tmp_path, run, tmp_path / "p")
        assert forks.exit_codes([child], seconds=100) == [-signal.SIGKILL]
        left += len(hidden(tmp_path))
    assert left, "no writer was killed while it had a draft"
    if run is write_forever:
        files.write_text(tmp_path / "p", "new")
    else:
        files.write_folder(tmp_path / "p", {"a": b"new"})
    assert hidden(tmp_path) == []


def draft(name: str, process: int = 2**22 + 1, machine: str = "") -> str:
    """The name of a draft; by default of a process of this machine that is gone."""
    return f".{name}.slimbayes-{machine or files._machine()}-{process}-00000000"


def test_drafts_of_the_living_and_files_of_others_stay(tmp_path: Path) -> None:
    old = time.time() - 13 * 3600
    stays = [
        draft("p", os.getpid()), draft("p", 1, "00000000"), ".p.slimbayes-mine", ".p.12345", draft("p")[1:],
        ".p.draft-00000000-1-00000000",
    ]  # fmt: skip
    goes = [draft("q"), draft("q", 1, "11111111")]
    for name in stays + goes:
        (tmp_path / name).touch()
    for name in (".p.12345", ".p.draft-00000000-1-00000000", *goes):
        os.utime(tmp_path / name, (old, old))
    (tmp_path / draft("folder")).mkdir()
    files.remove_drafts(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*stays, draft("folder")}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (tmp_path / draft("p")).symlink_to("kept")
    files.remove_drafts(tmp_path)
    assert (tmp_path / "kept").exists() and (tmp_path / draft("p")).is_symlink()


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with (
            pytest.raises(OSError, match=r"File too large: .*/p\.csv'$"),
            files.replacing(file) as draft,
        ):
            draft.write_bytes(b"x" * 20_000)
        with pytest.raises(OSError, match=r"File too large: .*/folder'$"):
            files.write_folder(tmp_path / "folder", {"a": b"x" * 20_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == [
        "p.csv"
    ]


def write_half(file: Path, missing: Path | None) -> None:
    with files.replacing(file) as draft:
        draft.write_text("half")
        if missing is None:
            raise KeyboardInterrupt
        missing.read_text()


def test_errors_about_other_files_keep_their_names_and_interrupts_leave_nothing(
    tmp_path: Path,
) -> None:
    with pytest.raises(FileNotFoundError, match="other"):
        write_half(tmp_path / "p.csv", tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "p.csv", None)
    assert list(tmp_path.iterdir()) == []


def test_new_files_are_readable_as_any_other(tmp_path: Path) -> None:
    """A draft must not pass on the private mode of temporary files."""
    code = "import os, sys; from pathlib import Path; from slimbayes.files import write_text; os.umask(0o022)"
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}; write_text(Path(sys.argv[1]), 'x')",
            tmp_path / "p",
        ],
        check=True,
    )
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o644


def test_a_draft_that_cannot_be_removed_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / draft(name)).touch()
    remove, tried = os.unlink, []

    def refuse_the_first(path: Any) -> None:
        tried.append(path)
        if len(tried) == 1:
            raise PermissionError
        remove(path)

    monkeypatch.setattr(os, "unlink", refuse_the_first)
    files.remove_drafts(tmp_path)
    assert len(hidden(tmp_path)) == 1


def test_a_folder_is_removed_only_if_nothing_else_is_in_it(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path / "p", {"a": b"a"})
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(files.CheckpointError, match=r"it holds notes\.txt"):
        files.remove_folder(folder)
    assert files.read_folder(folder, {"a"}) == {"a": b"a"}
    (folder / "notes.txt").unlink()
    files.remove_folder(folder)
    assert not folder.exists()
