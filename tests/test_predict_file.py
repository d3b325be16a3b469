"""Rows of one's own, in files of all sorts, to predictions or to words that say what is wrong."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lab_configs import BASE, CPU, ONCE, call, experiment, mine

from slimbayes.lab.config import Data
from slimbayes.lab.config_files import merged
from slimbayes.lab.fit import fit
from slimbayes.lab.predict_file import fitted
from slimbayes.lab.predict_input import row_blocks
from slimbayes.lab.task import open_task


def read_rows(file: Path, columns: tuple[str, ...] = ()) -> torch.Tensor:
    return torch.cat(list(row_blocks(file, columns)))


NAMES = ("length", "beam", "draught")


def regression(**changes: Any) -> dict[str, Any]:
    tree = merged(BASE, {
        "data": {"name": "uci/yacht", "train_limit": None, "test_limit": None},
        "model": {"kind": "regression_net", "hidden": 8}, "method": {"kind": "BatchEnsemble", "members": 2},
        "train": {"epochs": 2, "batch": 24, "noise": 0.1}, "evaluate": {"draws": [1]},
    })  # fmt: skip
    return merged(tree, changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with column names."""
    root = tmp_path_factory.mktemp("table")
    x = np.random.default_rng(0).normal(size=(80, 3))
    (root / "uci").mkdir()
    with open(root / "uci" / "yacht.csv", "w", newline="") as handle:
        csv.writer(handle).writerows([[*NAMES, "drag"], *np.column_stack([x, 100 + 30 * x[:, 0]]).tolist()])
    (root / "r.yaml").write_text(yaml.safe_dump(regression()))
    done = call("fit", root / "r.yaml", "--out", root / "run", "--data-dir", root, "--accelerator", "cpu")
    assert done.exit_code == 0, done.output
    return root / "run"


def predicted(run: Path, folder: Path, text: str) -> Any:
    """Means for the rows of a csv, or the words of a refusal."""
    (folder / "x.csv").write_text(text)
    done = call("predict", run, folder / "x.csv", "-o", folder / "p.csv", "--accelerator", "cpu")
    if done.exit_code:
        return " ".join(done.output.split())
    return [float(row["mean"]) for row in csv.DictReader((folder / "p.csv").read_text().splitlines())]


@pytest.mark.slow
def test_columns_are_known_by_name(run: Path, tmp_path: Path) -> None:
    right = predicted(run, tmp_path, "length,beam,draught\n1,2,3\n-1,0,2\n")
    assert len(right) == 2
    assert predicted(run, tmp_path, "draught,length,beam\n3,1,2\n2,-1,0\n") == right
    assert predicted(run, tmp_path, "\ufeffbeam, draught,length\n2,3,1\n0,2,-1\n") == right, (
        "a byte-order mark and blanks are no names"
    )


def test_without_names_the_first_row_is_a_row(run: Path, tmp_path: Path) -> None:
    named = predicted(run, tmp_path, "length,beam,draught\n1,2,3\n-1,0,2\n")
    assert predicted(run, tmp_path, "1,2,3\n-1,0,2\n") == named


@pytest.mark.parametrize(("text", "told"), [
    ("length,beam\n1,2\n", "missing: 'draught'"),
    ("length,beam,draft\n1,2,3\n", "missing: 'draught'; not known to the run: 'draft'"),
    ("length,beam,draught,drag\n1,2,3,4\n", "not known to the run: 'drag'"),
    ("length,beam,draught,beam\n1,2,3,4\n", "there twice: 'beam'"),
    ("length,beam,3\n1,2,3\n", "not known to the run: '3'"),
    ("1,,3\n1,2,3\n", "line 1"),
    ("1,2,3\n1,2\n", "line 2: 2 cells, but there are 3 in the first row"),
    ("length,beam,draught\n", "no rows below"),
])  # fmt: skip
def test_columns_that_do_not_fit_are_refused_in_words(text: str, told: str, run: Path, tmp_path: Path) -> None:
    assert told in predicted(run, tmp_path, text)


def test_names_that_are_numbers_are_names_if_the_run_knows_them(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,0\n5,6\n")
    assert read_rows(tmp_path / "x.csv", ("0", "1")).tolist() == [[6.0, 5.0]]
    assert read_rows(tmp_path / "x.csv").tolist() == [[1.0, 0.0], [5.0, 6.0]]


def test_a_line_that_is_neither_row_nor_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,,3\n5,6,7\n")
    with pytest.raises(ValueError, match="neither a row nor"):
        read_rows(tmp_path / "x.csv")


def test_a_blank_last_line_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n\n")
    assert read_rows(tmp_path / "x.csv").tolist() == [[1.0, 2.0]]


@pytest.fixture(scope="module")
def images_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(experiment(train=ONCE), tmp_path_factory.mktemp("run") / "run", CPU)


IMAGES = {
    "last": np.zeros((2, 8, 8, 1), "uint8"), "flat": np.zeros((2, 8, 8), "uint8"),
    "half": np.ones((2, 1, 8, 8), "float16"), "int": np.full((2, 1, 8, 8), 255),
    "large": np.full((2, 1, 8, 8), 300), "negative": np.full((2, 1, 8, 8), -1),
    "complex": np.zeros((2, 1, 8, 8), "complex64"),
    "empty": np.zeros((0, 1, 8, 8), "uint8"), "none": np.zeros((0, 1, 8, 8), "float32"), "text": np.array(["a"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "flat", "half", "int"])
def test_images_come_in_many_ways(kind: str, images_run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES[kind])
    assert (
        call("predict", images_run, tmp_path / "x.npy", "-o", tmp_path / "p.csv", "--accelerator", "cpu").exit_code == 0
    )
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("kind", ["large", "negative", "complex", "empty", "none", "text", "damaged"])
def test_rows_that_cannot_be_judged_are_refused(kind: str, images_run: Path, tmp_path: Path) -> None:
    file = tmp_path / ("x.npz" if kind == "damaged" else "x.npy")
    if kind == "damaged":
        np.savez(file, x=IMAGES["last"])
        data = bytearray(file.read_bytes())
        data[250] ^= 1  # among the array's numbers
        file.write_bytes(data)
    else:
        np.save(file, IMAGES[kind])
    assert call("predict", images_run, file, "-o", tmp_path / "p.csv", "--accelerator", "cpu").exit_code == 1


@pytest.mark.parametrize("word", ["3.5", "99", "-1"])
def test_words_that_are_none_are_refused(word: str) -> None:
    task = open_task(Data(name="mine"), None, mine(torch.randint(0, 30, (60, 2)), torch.arange(60) % 2, "no", "yes"))
    assert not fitted(torch.tensor([[1.0, 2.0]]), task, "x.csv").is_floating_point()
    with pytest.raises(ValueError, match="row 0"):
        fitted(torch.tensor([[1.0, float(word)]]), task, "x.csv")
