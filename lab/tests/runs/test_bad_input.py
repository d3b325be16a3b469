"""What nobody should send: files, rows, numbers and paths that are refused in words, by the command and the
estimators alike, with nothing left behind."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lab_configs import CPU, call
from slimbayes_lab.configs.files import ConfigError, validate
from slimbayes_lab.runs.fit import fit
from torch import nn

import slimbayes as sb

ROWS = [f"{40 + i},{'ab'[i % 2]},{(40 + i) * 2.5}" for i in range(40)]
GOOD = "\n".join(["size,town,price", *ROWS, ""])
TREE: dict[str, Any] = {
    "name": "mine",
    "data": {"csv": "rows.csv", "target": "price"},
    "model": {"kind": "table_net", "hidden": [4]},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 1, "batch": 16, "optimizer": {"kind": "AdamW", "lr": 0.01}},
    "evaluate": {"examples": 0},
}
BAD: dict[str, tuple[bytes, str, str]] = {  # what a file holds; what `fit` says of it, and what `predict`
    "empty": (b"", "is empty", "is empty"),
    "blank lines": (b"\n\n", "is empty", "is empty"),
    "header only": (b"size,town,price\n", "has no rows below", "has no rows"),
    "duplicate column": (b"size,size,price\n1,2,3\n", "two columns are called 'size'", "two columns are called 'size'"),
    "wrong column": (b"sise,town\n1,a\n", "no column 'price'", "columns missing: 'size'; not known to the run: 'sise'"),
    "latin-1": (GOOD.replace("a", "\xe9").encode("latin-1"), "rows.csv, line 2: a text of column 'town'", "not UTF-8"),
    "utf-16": (GOOD.encode("utf-16"), "not UTF-8. Save the file as UTF-8", "not UTF-8. Save the file as UTF-8"),
    "a NUL": (GOOD.replace("41,", "4\0,").encode(), "not in line 3: '4\\x00'", "'4\\x00' is not a number"),
    "words for numbers": (GOOD.replace("41,", "big,").encode(), "not in line 3: 'big'", "line 3, column 'size': 'big'"),
    "infinity": (GOOD.replace("41,", "inf,").encode(), "'inf' is infinite", "'inf' is infinite"),
    "beyond float32": (GOOD.replace("41,", "1e39,").encode(), "too large for float32", "too large for float32"),
    "NaN": (GOOD.replace("41,", "nan,").encode(), "missing in column 'size' (1 of 40)", "missing in column 'size'"),
    "an open quote": (f'{GOOD}"41,a,2\n'.encode(), "line 42: unexpected end", "line 42: unexpected end"),
    "a cell too many": (f"{GOOD}1,a,3,4\n".encode(), "line 42: 4 cells", "line 42: 4 cells"),
    "a long cell": (b"size,town,price\n" + b"1" * 3_000_000, "more than 1,048,576 characters", "more than 1,048,576 characters"),
    "a new category": (b"size,town\n41,z\n", "no column 'price'", "'z', a category that training did not see"),
    "decimal commas": (b'size,town,price\n"1,5",a,1\n"2,5",b,2\n', "its decimal mark", "with a decimal point"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "good.csv").write_text(GOOD)
    tree = {**TREE, "data": {"csv": str(folder / "good.csv"), "target": "price"}}
    return fit(validate(tree), folder / "run", CPU, judge=False)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(*words: object) -> tuple[int, str]:
    """Exit code and message of a command after which all files are as before."""
    before = {
        path: path.is_file() and path.stat().st_mtime_ns for path in Path().rglob("*")
    }
    done = call(*words)
    assert {
        path: path.is_file() and path.stat().st_mtime_ns for path in Path().rglob("*")
    } == before
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_good_tables(name: str, run: Path) -> None:
    content, of_fit, of_predict = BAD[name]
    Path("rows.csv").write_bytes(content)
    Path("mine.yaml").write_text(yaml.safe_dump(TREE))
    code, message = told("fit", "mine.yaml", "--out", "new", "--accelerator", "cpu")
    assert code == 1 and of_fit in message and len(message) < 500
    code, message = told("predict", run, "rows.csv", "-o", "out.csv", "--draws", 1)
    assert code == 1 and of_predict in message and len(message) < 500


@pytest.mark.slow
def test_marks_and_line_ends_are_no_fault(run: Path) -> None:
    made = []
    for number, text in enumerate((GOOD, GOOD.replace("\n", "\r\n"), f"\ufeff{GOOD}")):
        Path("rows.csv").write_bytes(text.encode())
        assert (
            call(
                "predict", run, "rows.csv", "-o", f"{number}.csv", "--draws", 1
            ).exit_code
            == 0
        )
        made.append(Path(f"{number}.csv").read_bytes())
    assert made[0] == made[1] == made[2]


def test_a_target_of_one_class() -> None:
    Path("rows.csv").write_text("size,price\n" + "".join(f"{i},x\n" for i in range(30)))
    Path("mine.yaml").write_text(yaml.safe_dump(TREE))
    code, message = told("fit", "mine.yaml", "--out", "new", "--accelerator", "cpu")
    assert code == 1 and "is 'x' in all rows" in message


@pytest.mark.parametrize(
    "path",
    ["loop.csv", "pipe.csv", "folder.csv", "nothing.csv", "../../../nothing.csv"],
)
def test_paths_that_lead_to_no_file(path: str, run: Path) -> None:
    os.symlink("loop.csv", "loop.csv")
    os.mkfifo("pipe.csv")
    Path("folder.csv").mkdir()
    for words in (
        ("predict", run, path, "-o", "out.csv"),
        ("init", path, "-o", "new.yaml"),
    ):
        code, message = told(*words)
        assert code in (1, 2, 3) and path in message


@pytest.mark.parametrize(
    "out", ["no/out.csv", "folder.csv", "rows.csv/out.csv", "out.exe", "a\0b.csv"]
)
def test_places_that_nothing_can_be_written_to(out: str, run: Path) -> None:
    Path("folder.csv").mkdir()
    Path("rows.csv").write_text(GOOD)
    code, message = told("predict", run, "rows.csv", "-o", out, "--draws", 1)
    assert code in (1, 2, 3) and message


def test_what_a_link_points_to_is_replaced_only_with_force(run: Path) -> None:
    Path("kept.csv").write_text("mine")
    os.symlink("kept.csv", "out.csv")
    Path("rows.csv").write_text(GOOD)
    words = ("predict", run, "rows.csv", "-o", "out.csv", "--draws", 1)
    assert call(*words).exit_code == 2 and Path("kept.csv").read_text() == "mine"
    assert call(*words, "--force").exit_code == 0
    assert Path("kept.csv").read_text() != "mine" and Path("out.csv").is_symlink()


@pytest.mark.parametrize("command", ["predict", "export", "diagnose", "evaluate"])
def test_a_thousand_million_draws(command: str, run: Path) -> None:
    Path("rows.csv").write_text(GOOD)
    words = {"predict": ("rows.csv", "-o", "out.csv")}.get(command, ())
    code, message = told(command, run, *words, "--draws", 10**9)
    assert code in (1, 2) and "10000" in message.replace(",", "")
    net = sb.bayesianize(nn.Linear(2, 2), sb.Rank1())
    with pytest.raises(
        ValueError,
        match=r"at most 1,000,000 draws, got draws=",
    ):
        sb.predict(net, torch.zeros(1, 2), draws=10**9)


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a\0b", "a\nb", ".."])
def test_names_of_runs_are_no_paths(name: str) -> None:
    try:
        chosen = validate({**TREE, "name": name})
    except ConfigError:
        return
    from slimbayes_lab.runs.folder import default_folder

    assert default_folder(chosen).resolve().parent == Path("runs").resolve()


def test_the_estimators_say_what_is_wrong() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    from slimbayes.sklearn import BayesClassifier, BayesRegressor

    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({"size": draw.normal(size=30), "town": list("ab") * 15})
    labels = np.arange(30) % 2
    model = BayesClassifier((4,), epochs=1, random_state=0).fit(frame, labels)
    far = frame.assign(size=np.inf)
    asked: dict[str, Any] = {
        "feature names": frame.rename(columns={"size": "sise"}),
        "must hold numbers": frame.assign(size="large"),
        "'z', a category": frame.assign(town="z"),
        "contains NaN": frame.assign(size=np.nan),
        "infinity": far,
        "rows and columns": frame[:0],
    }
    for message, rows in asked.items():
        with pytest.raises(ValueError, match=message):
            model.predict(rows)
    fitted: dict[str, tuple[Any, Any]] = {
        "[Uu]nique column names|two columns of one name": (
            pandas.DataFrame(np.zeros((30, 2)), columns=["a", "a"]),
            labels,
        ),
        "at least two classes": (frame, np.zeros(30)),
        "infinity": (far, labels),
        "rows and columns": (frame[:0], labels[:0]),
        "inconsistent numbers": (frame, labels[:7]),
    }
    for message, (rows, y) in fitted.items():
        with pytest.raises(ValueError, match=message):
            BayesClassifier((4,), epochs=1).fit(rows, y)
    with pytest.raises(ValueError, match="infinity"):
        BayesRegressor((4,), epochs=1).fit(frame, np.full(30, np.inf))
    with pytest.raises(ValueError, match="draws=1000000000"):
        model.set_params(draws=10**9).predict(frame)
