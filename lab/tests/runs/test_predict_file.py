"""Rows of one's own, in files of all sorts, to predictions or to words that say what is wrong."""

import csv
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lab_configs import BASE, CPU, ONCE, call, experiment, mine, regression
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.configs.files import validate
from slimbayes_lab.data import archives, table_files
from slimbayes_lab.finished.predict_file import (
    as_columns,
    check_and_fit,
    predict_file,
    row_blocks,
)
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.tasks.task import open_task

import slimbayes as sb

pytestmark = pytest.mark.usefixtures("unchecked_fits")


def read_rows(file: Path, columns: tuple[str, ...] = ()) -> torch.Tensor:
    return torch.cat(list(row_blocks(file, columns)))


NAMES = ("length", "beam", "draught")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with column names."""
    root = tmp_path_factory.mktemp("table")
    x = np.random.default_rng(0).normal(size=(80, 3))
    (root / "uci").mkdir()
    with open(root / "uci" / "yacht.csv", "w", newline="") as handle:
        csv.writer(handle).writerows(
            [[*NAMES, "drag"], *np.column_stack([x, 100 + 30 * x[:, 0]]).tolist()]
        )
    (root / "r.yaml").write_text(yaml.safe_dump(regression()))
    done = call(
        "fit",
        root / "r.yaml",
        "--out",
        root / "run",
        "--data-dir",
        root,
        "--accelerator",
        "cpu",
    )
    assert done.exit_code == 0, done.output
    return root / "run"


def predicted(run: Path, folder: Path, text: str) -> Any:
    """Means for the rows of a csv, or the words of a refusal."""
    (folder / "x.csv").write_text(text)
    words = ("-o", folder / "p.csv", "--force", "--accelerator", "cpu")
    done = call("predict", run, folder / "x.csv", *words)
    if done.exit_code:
        return " ".join(done.output.split())
    return [
        float(row["mean"])
        for row in csv.DictReader((folder / "p.csv").read_text().splitlines())
    ]


@pytest.mark.slow
def test_columns_are_known_by_name(run: Path, tmp_path: Path) -> None:
    right = predicted(run, tmp_path, "length,beam,draught\n1,2,3\n-1,0,2\n")
    assert len(right) == 2
    assert predicted(run, tmp_path, "draught,length,beam\n3,1,2\n2,-1,0\n") == right
    assert (
        predicted(run, tmp_path, "\ufeffbeam, draught,length\n2,3,1\n0,2,-1\n") == right
    ), "a byte-order mark and blanks are no names"


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
def test_columns_that_do_not_fit_are_refused_in_words(
    text: str, told: str, run: Path, tmp_path: Path
) -> None:
    assert told in predicted(run, tmp_path, text)


def test_names_that_are_numbers_are_names_if_the_run_knows_them(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,0\n5,6\n")
    assert read_rows(tmp_path / "x.csv", ("0", "1")).tolist() == [[6.0, 5.0]]
    assert read_rows(tmp_path / "x.csv").tolist() == [[1.0, 0.0], [5.0, 6.0]]


def test_a_line_that_is_neither_row_nor_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,,3\n5,6,7\n")
    with pytest.raises(ValueError, match="neither a row nor"):
        read_rows(tmp_path / "x.csv")


def test_a_blank_line_is_no_row(tmp_path: Path) -> None:
    for text in ("a,b\n1,2\n\n", "\n\na,b\n1,2\n", "\n1,2"):
        (tmp_path / "x.csv").write_text(text)
        assert read_rows(tmp_path / "x.csv").tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("name", ["x.csv", "x.npy", "x.npz", "x.png"])
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((OSError, ValueError), match="a pipe"):
        read_rows(tmp_path / name)


def test_pictures_that_cannot_be_decoded_are_refused_not_passed_over(
    tmp_path: Path,
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    with pytest.raises(
        ValueError, match=r"holds no image that ends in \.jpeg, \.jpg, \.png\."
    ):
        read_rows(tmp_path)
    for name in ("a.png", "b.gif", "c.png"):
        image.new("RGB", (4, 4)).save(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"b\.gif cannot be decoded as a JPEG or PNG image"
    ):
        read_rows(tmp_path)


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
        call(
            "predict",
            images_run,
            tmp_path / "x.npy",
            "-o",
            tmp_path / "p.csv",
            "--accelerator",
            "cpu",
        ).exit_code
        == 0
    )
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["large", "negative", "complex", "empty", "none", "text", "damaged"]
)
def test_rows_that_cannot_be_judged_are_refused(
    kind: str, images_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / ("x.npz" if kind == "damaged" else "x.npy")
    if kind == "damaged":
        np.savez(file, x=IMAGES["last"])
        data = bytearray(file.read_bytes())
        data[250] ^= 1  # among the array's numbers
        file.write_bytes(data)
    else:
        np.save(file, IMAGES[kind])
    assert (
        call(
            "predict",
            images_run,
            file,
            "-o",
            tmp_path / "p.csv",
            "--accelerator",
            "cpu",
        ).exit_code
        == 1
    )


@pytest.mark.parametrize("word", ["3.5", "99", "-1"])
def test_words_that_are_none_are_refused(word: str) -> None:
    task = open_task(
        Data(name="mine"),
        None,
        mine(torch.randint(0, 30, (60, 2)), torch.arange(60) % 2, "no", "yes"),
    )
    assert not check_and_fit(
        torch.tensor([[1.0, 2.0]]), task, "x.csv"
    ).is_floating_point()
    with pytest.raises(ValueError, match="row 0"):
        check_and_fit(torch.tensor([[1.0, float(word)]]), task, "x.csv")


# --- in pieces, and whole or not at all ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "json", "npz"])
def test_pieces_give_what_the_whole_gives(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of three cells and of many give the same file; a .npy the same as a csv."""
    rows = np.random.default_rng(0).normal(size=(1203, 3)).astype("float32")
    np.savetxt(tmp_path / "x.csv", rows, delimiter=",", fmt="%.9g")
    np.save(tmp_path / "x.npy", np.asfortranarray(rows))
    np.savez_compressed(tmp_path / "x.npz", x=rows)
    made = []
    for index, (source, cells) in enumerate(
        [("x.csv", 3), ("x.csv", 1 << 16), ("x.npy", 0), ("x.npz", 0)]
    ):
        monkeypatch.setattr(table_files, "_CELLS", cells)
        monkeypatch.setattr(archives, "_BLOCK", 100)
        out = tmp_path / f"p{index}.{kind}"
        assert predict_file(run, tmp_path / source, out, 2, "cpu") == 1203
        made.append(out)
    if kind == "npz":
        arrays = [dict(np.load(file)) for file in made]
        assert all(len(values) == 1203 for values in arrays[0].values())
        for one in arrays[1:]:
            assert list(one) == list(arrays[0])
            for name, values in one.items():
                np.testing.assert_array_equal(values, arrays[0][name])
    else:
        assert len({file.read_bytes() for file in made}) == 1
    if kind == "json":
        assert len(json.loads(made[0].read_text())) == 1203


def test_classes_go_into_archives_by_name(images_run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 1, 8, 8), "uint8"))
    predict_file(images_run, tmp_path / "x.npy", tmp_path / "p.npz", 2, "cpu")
    predict_file(images_run, tmp_path / "x.npy", tmp_path / "p.csv", 2, "cpu")
    with open(tmp_path / "p.csv") as handle:
        lines = list(csv.DictReader(handle))
    found = np.load(tmp_path / "p.npz", allow_pickle=False)
    assert found["label"].tolist() == [line["label"] for line in lines]
    assert found["p(3)"].tolist() == [float(line["p(3)"]) for line in lines]


@pytest.mark.parametrize("kind", ["csv", "json", "npz"])
def test_a_full_disk_names_the_file_and_leaves_what_was_there(
    kind: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("1,2,3\n" * 3000)
    out = tmp_path / f"p.{kind}"
    out.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        words = ("-o", out, "--force", "--accelerator", "cpu")
        done = call("predict", run, tmp_path / "x.csv", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        done.exit_code == 1
        and str(out) in done.output.replace("\n", "")
        and "File too large" in done.output
    )
    assert out.read_text() == "before" and sorted(
        p.name for p in tmp_path.iterdir()
    ) == [f"p.{kind}", "x.csv"]


def test_a_wrong_last_row_leaves_what_was_there(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    out.write_text("before")
    told = predicted(run, tmp_path, "1,2,3\n" * 2000 + "1,x,3\n")
    assert (
        "line 2001, column '2': 'x' is not a number" in told
        and out.read_text() == "before"
    )


@pytest.mark.parametrize(("text", "told"), [
    (b"length,beam,draught\n1,2,1e39\n", "line 2, column 'draught': '1e39' is infinite, or too large for float32"),
    (b"1,2,3\n1,nan,3\n", "line 2, column '2': 'nan' is not a finite number"),
    (b"1,2,3\n1,2,-inf\n", "line 2, column '3': '-inf' is infinite"),
    (b"1,2,3\n1,\xff2,3\n", "line 2, column '2': '\\udcff2' is not a number"),
    (b"1,2,3\n1,1_0,3\n", "line 2, column '2': '1_0' is not a number"),
    (b"1,2,3\n1,2,3,4\n", "line 2: 4 cells, but there are 3"),
    (b"1,2,3\n4,5," + b"6" * 200_000 + b"\n", "line 2: field larger than field limit"),
    (b"1,2,3\n4,5,\"6\n", "line 2"),
    (b"", "has no rows"),
])  # fmt: skip
def test_cells_that_are_no_numbers_are_told_by_line(
    text: bytes, told: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    done = call(
        "predict",
        run,
        tmp_path / "x.csv",
        "-o",
        tmp_path / "p.csv",
        "--accelerator",
        "cpu",
    )
    assert done.exit_code == 1 and told in " ".join(done.output.split()), done.output
    assert not (tmp_path / "p.csv").exists()


def test_rows_of_arrays_are_counted_from_the_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "_BLOCK", 120)
    rows = np.zeros((1000, 3), "float32")
    rows[777, 1] = np.nan
    np.save(tmp_path / "x{1}.npy", rows)  # a name may hold anything
    with pytest.raises(ValueError, match=r"x\{1\}.npy: row 777 holds NaN"):
        predict_file(run, tmp_path / "x{1}.npy", tmp_path / "p.csv", 2, "cpu")


@pytest.mark.parametrize("cut", [10, 130, 600])
def test_arrays_that_are_cut_short_are_refused(
    cut: int, run: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 3), "float32"))
    data = (tmp_path / "x.npy").read_bytes()
    for bad in (data[:cut], data + b"more"):
        (tmp_path / "x.npy").write_bytes(bad)
        with pytest.raises(ValueError, match="x.npy cannot be read"):
            predict_file(run, tmp_path / "x.npy", tmp_path / "p.csv", 2, "cpu")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(run: Path, tmp_path: Path) -> None:
    """Eight times the rows in at most 40 MiB more, where all at once would take hundreds."""
    code = (
        "import re, sys; from pathlib import Path; from slimbayes_lab.finished.predict_file import predict_file\n"
        "for rows in (5_000, 40_000):\n"
        "    file = Path(sys.argv[2]); file.write_text('0.125,0.25,0.5\\n' * rows)\n"
        "    predict_file(Path(sys.argv[1]), file, Path(sys.argv[3]), 1, 'cpu')\n"
        "    print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    words = [sys.executable, "-c", code, run, tmp_path / "x.csv", tmp_path / "p.npz"]
    few, many = map(
        int,
        subprocess.run(
            words, check=True, capture_output=True, text=True
        ).stdout.split(),
    )
    assert (many - few) / 1024 < 40, (few, many)


@pytest.mark.slow
def test_categories_that_training_did_not_see_are_told(tmp_path: Path) -> None:
    lines = [
        f"{40 + i % 50},{('north', 'mid')[i % 2]},{i % 50 + i % 7}" for i in range(80)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["size,town,price", *lines]))
    data = {"csv": str(tmp_path / "a.csv"), "target": "price", "missing": "impute"}
    tree = {**BASE, "data": data, "model": {"kind": "table_net", "hidden": [4]}}
    run = fit(validate(tree), tmp_path / "run", CPU, judge=False)
    told = "Categories that training did not see count as missing: in column 'town' (1 of 2 rows)."
    (tmp_path / "b.csv").write_text("size,town\n60,mid\n45,east\n")
    (tmp_path / "c.csv").write_text("size,town\n60,mid\n45,\n")
    with pytest.warns(sb.SlimbayesWarning, match=re.escape(f"b.csv: {told}")):
        call("predict", run, tmp_path / "b.csv", "-o", tmp_path / "unseen.csv")
    call("predict", run, tmp_path / "c.csv", "-o", tmp_path / "missing.csv")
    unseen, missing = (
        (tmp_path / name).read_text() for name in ("unseen.csv", "missing.csv")
    )
    assert unseen == missing


def test_intervals_hold_the_probability_they_promise() -> None:
    outputs, scale = torch.randn(7, 3, 2, dtype=torch.float64), 0.7
    found = sb.Prediction.from_outputs(outputs, "gaussian", likelihood_std=scale)
    columns = as_columns(found, (), 0.8)
    low, high = (
        torch.tensor(np.stack([columns[f"{end}_{t}"] for t in (0, 1)], 1))
        for end in ("low", "high")
    )
    inside = torch.special.ndtr((high - outputs) / scale) - torch.special.ndtr(
        (low - outputs) / scale
    )
    torch.testing.assert_close(
        inside.mean(0), torch.full((3, 2), 0.8, dtype=torch.float64)
    )
