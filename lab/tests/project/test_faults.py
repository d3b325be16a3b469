"""The fault suite can fail: bad outcomes that are planted here are counted as lost."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import fault_files
import fault_suite
import faults
import pytest
from fault_inputs import refused
from fault_suite import FAULTS, Count, Fault, ask, injected
from slimbayes_lab.report import record

from slimbayes.convert import checkpoint


@pytest.mark.slow
def test_a_loader_that_ignores_checksums_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(folder: Path, needed: set[str]) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    honest = fault_files.damaged_posteriors(tmp_path / "honest", random.Random(0), 30)
    monkeypatch.setattr(checkpoint, "read_folder", careless)
    planted = fault_files.damaged_posteriors(tmp_path / "planted", random.Random(0), 30)
    assert honest.injected == honest.survived == 30, honest.notes
    assert planted.survived < 30 and "in silence" in "".join(planted.notes)


def test_damage_is_undone_and_another_record_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "note.json"
    file.write_text('{"a": 123456789}')
    count = fault_files.damage(
        [file],
        random.Random(1),
        40,
        lambda: json.loads(file.read_text()) == {"a": 123456789},
    )
    assert json.loads(file.read_text()) == {"a": 123456789}
    assert count.injected == 40 and 0 < count.survived < 40


def crash(place: Path, dice: random.Random) -> Count:
    raise KeyError("nobody expects it")


def half(place: Path, dice: random.Random) -> Count:
    count = Count(figures={"seconds": [1, 2]})
    count.add(True, times=3)
    count.add(False, "silence | with `wrong` numbers")
    return count


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAULTS, "crash", Fault("a crash", "none", "-", crash))
    monkeypatch.setitem(FAULTS, "half", Fault("half a fault", "half", "-", half))


def test_a_check_that_breaks_is_a_fault_lost(tmp_path: Path, planted: None) -> None:
    count = injected("crash", tmp_path)
    assert (count.injected, count.survived) == (
        1,
        0,
    ) and "nobody expects it" in count.notes[0]


def test_the_page_says_what_was_lost(
    tmp_path: Path, planted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, docs = tmp_path / "faults.json", tmp_path / "page.md"
    assert faults.main(["--only", "half", "crash", "--out", str(out)]) == 1
    assert "half: 4 injected, 1 lost" in capsys.readouterr().out
    assert faults.main(["--page", str(out), "--docs", str(docs)]) == 0
    page = docs.read_text()
    assert (
        "**5 faults injected, 3 survived, 2 lost**" in page
        and "| half a fault | 4 | 3 | 1 | half | - |" in page
    )
    assert (
        "- `half`: `silence | with 'wrong' numbers`" in page and "seconds: 1, 2" in page
    )


@pytest.mark.parametrize(
    ("run", "kind", "told"),
    [
        (lambda: 5, "value", False),
        (lambda: int("x"), "refusal", True),
        (lambda: {}["x"], "error", False),
        (lambda: bytearray(4 * 2**30), "error", False),
        (signal.pause, "late", False),
        (lambda: record.read("/nowhere"), "refusal", False),
    ],
)
def test_a_process_is_asked(run: Any, kind: str, told: bool) -> None:
    answer = ask(run, seconds=1.0 if kind == "late" else 20.0)
    assert answer.kind == kind and answer.refused("literal") == told, str(answer)


def test_writes_fail_on_a_full_disk(tmp_path: Path) -> None:
    answer = ask(lambda: (tmp_path / "file").write_bytes(bytes(1000)), file_size=100)
    assert answer.kind == "refusal" and (tmp_path / "file").stat().st_size == 100


def test_a_refusal_must_say_why_and_be_short() -> None:
    count = Count()
    refused(count, "told", lambda: float("a nan?"))
    refused(count, "silent", lambda: None)
    refused(count, "raw", lambda: [][0])
    assert (count.injected, count.survived) == (3, 1)
    assert not fault_suite.Answer("refusal", message="config " * 1000).refused("config")


@pytest.mark.skipif(
    not faults.RESULT.exists(), reason="no run of the suite is kept here"
)
def test_the_page_is_the_one_of_the_kept_run() -> None:
    assert faults.PAGE.read_text() == faults.page(json.loads(faults.RESULT.read_text()))
