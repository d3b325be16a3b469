"""A run knows its data, its files and its checkpoints, and says so when one of them is another's or has changed."""

import csv
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_records
import torch
import yaml
from lab_configs import (
    CPU,
    EVERY_STEP,
    MINE,
    Crash,
    X,
    call,
    crash_after,
    dense,
    experiment,
    mine,
    weights,
)
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.report import record
from slimbayes_lab.report.record import RecordError
from slimbayes_lab.runs import folder as run_folder
from slimbayes_lab.runs.checkpoints import latest_checkpoint
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.folder import RunError
from slimbayes_lab.runs.trained import load_run
from slimbayes_lab.tasks.intake import data_digest
from test_predict_file import regression

pytestmark = pytest.mark.usefixtures("unchecked_fits")


def table(root: Path, slope: float) -> Path:
    """A folder of data with a table in it."""
    x = np.random.default_rng(0).normal(size=(80, 3))
    (root / "uci").mkdir(parents=True)
    with open(root / "uci" / "yacht.csv", "w", newline="") as handle:
        csv.writer(handle).writerows(
            [["a", "b", "c", "y"], *np.column_stack([x, slope * x[:, 0]]).tolist()]
        )
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its config, its data and others."""
    root = tmp_path_factory.mktemp("finished")
    table(root / "data", 1.0), table(root / "other", -5.0)
    (root / "c.yaml").write_text(yaml.safe_dump(regression()))
    done = fit_in(root, root / "run", "data")
    assert done.exit_code == 0, done.output
    return root


def fit_in(root: Path, run: Path, data: str, *words: str) -> Any:
    return call(
        "fit",
        root / "c.yaml",
        "--out",
        run,
        "--data-dir",
        root / data,
        "--accelerator",
        "cpu",
        *words,
    )


def told(done: Any) -> str:
    return " ".join(done.output.split())


# --- data ---


def test_a_finished_run_is_not_shown_for_other_data(finished: Path) -> None:
    digests = [json.loads((finished / "run" / "data.json").read_text())["sha256"]]
    digests.append(record.read(finished / "run").data_sha256)
    assert digests[0] == digests[1]
    refused = fit_in(finished, finished / "run", "other")
    assert (
        refused.exit_code == 1
        and "other data" in told(refused)
        and digests[0][:16] in told(refused)
    )
    assert fit_in(finished, finished / "run", "data").exit_code == 0


def test_a_finished_run_stands_where_its_data_are_not(finished: Path) -> None:
    done = fit_in(finished, finished / "run", "nowhere")
    assert done.exit_code == 0 and "not compared" in told(done)


def test_evaluating_on_other_data_is_refused(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    before = (run / "record.json").read_bytes()
    words = ("evaluate", run, "--accelerator", "cpu", "--data-dir")
    refused = call(*words, finished / "other")
    assert refused.exit_code == 1 and "other data" in told(refused)
    assert (run / "record.json").read_bytes() == before
    assert call(*words, finished / "data").exit_code == 0
    assert record.read(run).digest == record.read(finished / "run").digest


def test_resuming_on_other_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, y = experiment(**MINE, train={"batch": 20}), torch.arange(60) % 3
    data = mine(X, y, "a", "b", "c")
    with monkeypatch.context() as patch:
        crash_after(patch, 2)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "run", EVERY_STEP, network=dense(3), dataset=data)
    changed = X.clone()
    changed[50, 2] += 1e-6
    other = mine(changed, y, "a", "b", "c")
    with pytest.raises(
        RunError,
        match=r"other data: its rows have the sha256 \w{16}\.\.\., those of mine here \w{16}",
    ):
        fit(
            chosen,
            tmp_path / "run",
            EVERY_STEP,
            resume=True,
            network=dense(3),
            dataset=other,
        )
    fit(
        chosen,
        tmp_path / "run",
        EVERY_STEP,
        resume=True,
        network=dense(3),
        dataset=data,
    )
    with pytest.raises(RunError, match="other data"):
        load_run(tmp_path / "run", CPU, dense(3), other)


@pytest.mark.parametrize(
    "change", ["input", "target", "shape", "type", "split", "class"]
)
def test_every_change_of_the_data_changes_their_digest(change: str) -> None:
    x, y, classes = X.clone(), torch.arange(60) % 3, ("a", "b", "c")
    before = data_digest(mine(x, y, *classes), ("train", "test"))
    assert before == data_digest(
        mine(x.t().contiguous().t(), y.clone(), *classes), ("train", "test")
    ), "by value only"
    x[59, 3] = 7.0 if change == "input" else x[59, 3]
    y[59] = 0 if change == "target" else y[59]
    x = x.view(60, 2, 2) if change == "shape" else x.double() if change == "type" else x
    data = mine(x, y, *("a", "b", "d") if change == "class" else classes)
    if change == "split":
        data = Dataset("mine", {"train": data.test, "test": data.train}, classes)
    assert data_digest(data, ("train", "test")) != before


def test_the_digest_of_a_large_set_reads_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slimbayes_lab.tasks import intake

    monkeypatch.setattr(intake, "_WHOLE", 1 << 20)
    monkeypatch.setattr(intake, "_BLOCKS", 4)
    x = torch.zeros(1 << 20, 1)
    read = b"".join(intake._parts(x))
    assert 4 * intake._BLOCK <= len(read) < 5 * intake._BLOCK
    before = data_digest(Dataset("large", {"train": Split(x, x)}), ["train"])
    x[-1] = 1
    assert data_digest(Dataset("large", {"train": Split(x, x)}), ["train"]) != before


def test_a_run_of_before_digests_opens_with_a_note(
    finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    for name in ("data.json", "SHA256SUMS"):
        (run / name).unlink()
    done = fit_in(finished, run, "other")
    assert done.exit_code == 0 and "does not say which data" in told(done)
    assert (
        call(
            "evaluate", run, "--accelerator", "cpu", "--data-dir", finished / "data"
        ).exit_code
        == 0
    )


# --- files ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inputs.json", "config.yaml", "model/manifest.json"])
def test_every_changed_byte_is_noticed(
    name: str, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    file, good = run / name, (run / name).read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        file.write_bytes(bad)
        with pytest.raises(RunError, match="damaged"):
            run_folder.check_seal(run, [name])
    file.unlink()
    with pytest.raises(RunError, match="damaged"):
        run_folder.check_seal(run, [name])


@pytest.mark.slow
def test_predictions_and_evaluations_look_at_what_they_read(
    finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("1,2,3\n")
    commands = {
        "inputs.json": ("predict", tmp_path / "x.csv", "-o", tmp_path / "p.csv"),
        "config.yaml": ("predict", tmp_path / "x.csv", "-o", tmp_path / "p.csv"),
        "metrics.csv": ("evaluate", "--data-dir", finished / "data"),
        "cost.json": ("evaluate", "--data-dir", finished / "data"),
    }
    for name, (command, *words) in commands.items():
        run = shutil.copytree(finished / "run", tmp_path / name)
        text = (run / name).read_text()
        (run / name).write_text(text.replace("1", "2", 1))
        done = call(command, run, *words, "--accelerator", "cpu")
        assert done.exit_code == 1 and f"{name} is damaged" in told(done), name


def test_sums_are_those_of_sha256sum(finished: Path) -> None:
    import subprocess

    subprocess.run(
        ["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=finished / "run", check=True
    )
    names = [
        line.split("  ")[1]
        for line in (finished / "run" / "SHA256SUMS").read_text().splitlines()
    ]
    assert set(names) == set(run_folder._SEALED)


@pytest.mark.slow
def test_every_changed_byte_of_a_record_is_noticed(tmp_path: Path) -> None:
    whole = report_records.record("rank1-cauchy", 1)
    small = whole.model_copy(
        update={
            "config": {},
            "evaluations": [],
            "examples": [],
            "curve": whole.curve[:1],
        }
    )
    file = tmp_path / "record.json"
    record.write(file, small)
    good = file.read_bytes()
    assert record.read(file) == small and len(good) < 4000
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        file.write_bytes(bad)
        with pytest.raises(RecordError, match="damaged|newer"):
            record.read(file)
    for end in range(0, len(good), 17):
        file.write_bytes(good[:end])
        with pytest.raises(RecordError, match="damaged"):
            record.read(file)


def test_an_edited_record_is_named_damaged_and_an_old_one_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, file = report_records.record("rank1-cauchy", 1), tmp_path / "record.json"
    record.write(file, one)
    file.write_text(file.read_text().replace('"accuracy":0.', '"accuracy":1.', 1))
    with pytest.raises(RecordError, match="edited"):
        record.read(file)
    record.note_unsealed.cache_clear()
    file.write_text(one.model_dump_json())
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("slimbayes"), "warning", said.append)
    assert record.read(file) == record.read(file) == one
    assert said == [
        "Records without a sha256, of an older slimbayes, are read unchecked."
    ]


# --- checkpoints ---


def cut(
    folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Path:
    with monkeypatch.context() as patch:
        crash_after(patch, steps)
        with pytest.raises(Crash):
            fit(experiment(**changes), folder, EVERY_STEP)
    return folder / "checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"seed": 5}, {"model": {"width": 2}}, {"data": {"train_limit": 150}}]
)
def test_a_checkpoint_of_another_run_is_passed_over(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (
        cut(tmp_path / n, 3, monkeypatch, **c)
        for n, c in (("mine", {}), ("other", changes))
    )
    shutil.copytree(other / "step-00000003", mine / "step-00000009")
    with pytest.warns(
        UserWarning, match="checkpoint of another run: .*step-00000009 has the hash"
    ):
        run = fit(experiment(), tmp_path / "mine", EVERY_STEP, resume=True)
    assert weights(run) == weights(fit(experiment(), tmp_path / "whole", CPU))


def test_checkpoints_are_known_by_network_and_data_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cut(
        tmp_path / "run",
        1,
        monkeypatch,
        model={"kind": "mlp", "hidden": [4]},
        method={"kind": "Deterministic"},
    )
    found = latest_checkpoint(place)
    assert found is not None and len(found[1]["data"]) == 64
    assert (
        latest_checkpoint(
            place, {"hash": found[1]["hash"], "data": found[1]["data"], "newer": "x"}
        )
        is not None
    )
    with pytest.warns(UserWarning, match="has the data"):
        assert latest_checkpoint(place, {"data": "0" * 64}) is None
    with pytest.warns(UserWarning, match="is of another network"):
        assert latest_checkpoint(place, {}, dense(3)) is None


def test_resuming_with_nothing_but_damaged_checkpoints_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cut(tmp_path / "run", 1, monkeypatch, method={"kind": "Deterministic"})
    (place / "step-00000001" / "state.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(ValueError, match="None of the checkpoints.*Remove"),
    ):
        fit(
            experiment(method={"kind": "Deterministic"}),
            tmp_path / "run",
            EVERY_STEP,
            resume=True,
        )
