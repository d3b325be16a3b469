"""`slimbayes data`: its three commands on small sets, their exit codes, and the time its help takes."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from slimbayes_lab.command import app
from slimbayes_lab.data import load
from slimbayes_lab.data.catalog import SOURCES, inspect
from test_prepared import mapped, write_mnist, write_yacht
from test_readers import write_binary
from typer.testing import CliRunner

REAL = Path(
    os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[4] / "shared" / "data")
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.output


def test_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_yacht(write_mnist(tmp_path))
    listed = run("list", "--data-dir", root)
    assert "train, test" in listed and "Not there: cifar10" in listed
    monkeypatch.setenv("SLIMBAYES_DATA", str(root))
    assert json.loads(run("list", "--json")) == {
        "mnist": ["train", "test"],
        "uci/yacht": ["all"],
    }
    (root / "cifar10-c").mkdir()
    for name in ("fog.npy", "labels.npy"):
        (root / "cifar10-c" / name).write_bytes(b"x")
    result = CliRunner().invoke(app, ["data", "list", "--json"])
    assert "cifar10-c" not in json.loads(result.stdout)
    assert "Warning: cifar10-c is there but cannot be read" in result.stderr


def test_check_reports_and_compares(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    text = run("check", "mnist", "--data-dir", root, code=1)
    assert (
        "train: 6 rows, 0 to" in text
        and "in each of 10 classes" in text
        and "DIFFERS mnist test: 3 rows, published are 10000." in text
    )
    facts = json.loads(run("check", "mnist", "--json", "--data-dir", root, code=1))
    data, file = load("mnist", root), root / "mnist" / "train-images-idx3-ubyte"
    assert facts["rows"] == {"train": 6, "test": 3}
    assert (
        list(facts["classes"]["train"].values())
        == data.train.y.bincount(minlength=10).tolist()
    )
    assert (
        facts["sha256"]["mnist/train-images-idx3-ubyte"]
        == hashlib.sha256(file.read_bytes()).hexdigest()
        and len(facts["sha256"]) == 4
    )


def test_check_sees_an_unbalanced_set_of_the_right_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_binary(tmp_path / "cifar10", np.random.default_rng(0), False)
    monkeypatch.setitem(
        SOURCES,
        "cifar10",
        replace(SOURCES["cifar10"], published={"train": 35, "test": 7}),
    )
    report = run("check", "cifar10", "--data-dir", tmp_path, code=1)
    assert (
        "rows in a class, published are equal numbers" in report
        and "published are 35" not in report
    )


def test_check_reads_the_files_of_a_prepared_set_too(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    run("prepare", "mnist", "--data-dir", root)
    file = root / "mnist" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x0b")
    assert "record 2: label 11 is not one of 0..9" in run(
        "check", "mnist", "--data-dir", root, code=1
    )


def test_prepare(tmp_path: Path) -> None:
    root = write_mnist(tmp_path / "data")
    plain, out = load("mnist", root), tmp_path / "out"
    assert str(out / "mnist") in run(
        "prepare", "mnist", "--data-dir", root, "--out", out
    )
    assert torch.equal(load("mnist", out).train.x, plain.train.x) and mapped(out)
    run("prepare", "mnist", "--data-dir", root)
    assert (root / "mnist" / "train.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("check", "cifar"), "Unknown data set 'cifar'; known are cifar10", 1),
        (("check", "mnist"), "No mnist: looked in", 3),
        (("prepare", "mnist"), "No mnist: looked in", 3),
        (("prepare", "nonsense"), "Unknown data set", 1),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...], message: str, code: int, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["data", *arguments, "--data-dir", str(tmp_path)])
    assert (
        result.exit_code == code
        and not result.stdout
        and result.stderr.startswith(message)
    )
    assert len(result.stderr.splitlines()) == 1


def test_no_data_dir_says_what_to_give(tmp_path: Path) -> None:
    for arguments in (["list"], ["check", "mnist"], ["prepare", "mnist"]):
        assert "Say where the data lie" in run(*arguments, code=3)
    assert "nowhere is not a folder" in run(
        "list", "--data-dir", tmp_path / "nowhere", code=3
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    root = write_mnist(tmp_path / "data")
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in run(
        "prepare", "mnist", "--data-dir", root, "--out", tmp_path / "file", code=1
    )


def test_importing_the_command_imports_no_torch() -> None:
    names = ("torch", "numpy", "duckdb", "slimbayes_lab.data")
    code = f"import sys, slimbayes_lab.run_commands; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_tables_are_looked_at_without_torch_and_scikit_learn(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(
        "size,price\n" + "".join(f"{i}.5,{i}\n" for i in range(40))
    )
    code = """
import sys
from slimbayes_lab.command import app
app(["init", "mine.csv"], standalone_mode=False)
print([name for name in ("torch", "sklearn") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "[]" and (tmp_path / "mine.yaml").exists()


@pytest.mark.slow
def test_check_of_the_real_mnist() -> None:
    if not (REAL / "mnist").is_dir():
        pytest.skip(
            f"NOT CHECKED on real data: {REAL / 'mnist'} does not exist; set SLIMBAYES_DATA to a folder that has it."
        )
    facts = inspect("mnist", REAL)
    assert facts.differences == [] and facts.rows == {"train": 60_000, "test": 10_000}
    assert "Rows and class balance are as published." in run(
        "check", "mnist", "--data-dir", REAL
    )
