"""Data and networks of one's own on the command line: tables, arrays, pictures, code, and what is refused."""

import csv
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from covering import each
from lab_configs import CPU
from slimbayes_lab.command import app
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.configs.files import ConfigError, merged, validate
from slimbayes_lab.data.table_files import frames, look
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.trained import load_run
from slimbayes_lab.tasks.intake import data_digest, open_data
from slimbayes_lab.tasks.task import open_task
from typer.testing import CliRunner

import slimbayes as sb
from slimbayes.sklearn.columns import Preparation
from slimbayes.sklearn.network import default_method

BASE: dict[str, Any] = {
    "name": "mine",
    "model": {"kind": "table_net", "hidden": [16]},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 2, "batch": 32, "optimizer": {"kind": "AdamW", "lr": 0.01}},
    "evaluate": {"examples": 2},
}
TOWNS = {"north": 3.0, "south": 2.0, "mid": 4.0}


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def write(
    file: Path, header: list[str], rows: list[list[Any]], delimiter: str = ","
) -> Path:
    with open(file, "w", newline="") as out:
        csv.writer(out, delimiter=delimiter).writerows(
            [header, *rows] if header else rows
        )
    return file


def houses(count: int = 60) -> list[list[Any]]:
    draw = np.random.default_rng(0)
    towns = draw.choice(list(TOWNS), count)
    size = draw.uniform(40, 200, count).round(1)
    return [
        [s, t, round(s * TOWNS[t] + e, 1)]
        for s, t, e in zip(size, towns, draw.normal(0, 20, count))
    ]


NAMES = ["size", "town", "price"]


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on a table with numbers and categories, and its file."""
    folder = tmp_path_factory.mktemp("own")
    write(folder / "houses.csv", NAMES, houses())
    data = {"csv": str(folder / "houses.csv"), "target": "price"}
    fit(validate(merged(BASE, {"data": data})), folder / "run", CPU)
    return folder


def columns(file: Path) -> dict[str, list[str]]:
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {name: [row[name] for row in rows] for name in rows[0]}


# --- looking at files ---


def test_what_columns_hold(tmp_path: Path) -> None:
    rows = [
        ["1", "red", "2024-01-03", "", "1,5"],
        ["2", "", "2024-1-04 10:00", "?", "x"],
    ]
    found = look(write(tmp_path / "a.csv", ["n", "w", "d", "gone", "mix"], rows, ";"))
    assert [(c.name, c.kind, c.missing) for c in found.columns.values()] == [
        ("n", "number", 0), ("w", "word", 1), ("d", "date", 0), ("gone", "number", 2), ("mix", "word", 0),
    ]  # fmt: skip
    assert found.rows == 2 and found.header and found.columns["n"].whole
    (block,) = frames(found.file, {"w": "word", "n": "number"})
    assert block["w"].tolist() == ["red", None] and block["n"].tolist() == [1.0, 2.0]


def test_a_first_line_of_numbers_is_a_row(tmp_path: Path) -> None:
    found = look(write(tmp_path / "a.csv", [], [[1, 2], [3, 4]]))
    assert list(found.columns) == ["1", "2"] and found.rows == 2 and not found.header
    mixed = write(tmp_path / "b.csv", [], [[1, "red"], [3, "blue"]])
    with pytest.raises(ValueError, match="header: true"):
        look(mixed)
    assert look(mixed, header=False).rows == 2 and look(mixed, header=True).rows == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"a,b\n", "has no rows below"),
        (b"a,a\n1,2\n", "two columns are called 'a'"),
        (b"2,\n1,2\n", "holds numbers"),
        (b"a,b\n1,2\n1\n", "line 3: 1 cells, but there are 2"),
        (b"a,b\n1,\xff\n", "not UTF-8"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        look(file)


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = houses(30)
    table = arrow.table(
        {name: [row[i] for row in rows] for i, name in enumerate(NAMES)}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "a.csv", NAMES, rows)
    tasks = [
        open_task(
            validate(
                merged(
                    BASE,
                    {"data": {kind: str(tmp_path / f"a.{kind}"), "target": "price"}},
                )
            ).data
        )
        for kind in ("csv", "parquet")
    ]
    for split in ("train", "test"):
        one, other = (getattr(task, split) for task in tasks)
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
    assert tasks[0].sha256 == tasks[1].sha256
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match="no parquet file"):
        look(tmp_path / "b.parquet")


# --- scales ---


@pytest.mark.parametrize(
    ("scaling", "missing"), each(["quantile", "standard", "none"], ["refuse", "impute"])
)
def test_what_was_learnt_about_a_table_survives_json(
    scaling: Any, missing: Any
) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 3))
    if missing == "impute":
        x[::7, 1] = x[:, 2] = np.nan
    words = np.array(
        ["a", "b", None] if missing == "impute" else ["a", "b", "c"], dtype=object
    )[draw.integers(0, 3, 90)]
    frame = {"p": x[:, 0], "q": x[:, 1], "w": words, "r": x[:, 2]}
    table = Preparation(missing, scaling)
    table.fit(frame, ["w"])
    table.learn_scales(table.read(frame))
    again = Preparation.from_dict(json.loads(json.dumps(table.to_dict())))
    assert np.array_equal(
        again.prepare(again.read(frame)), table.prepare(table.read(frame))
    )
    if (scaling, missing) == ("standard", "refuse"):
        wanted = np.column_stack(
            [(x - x.mean(0)) / x.std(0), [" abc".index(w) for w in words]]
        )
        assert np.allclose(table.prepare(table.read(frame)), wanted, atol=1e-6)


def test_scales_are_those_of_the_training_rows(place: Path) -> None:
    chosen = validate(
        merged(
            BASE,
            {
                "data": {
                    "csv": str(place / "houses.csv"),
                    "target": "price",
                    "validation": 0.25,
                }
            },
        )
    )
    chosen = validate(merged(chosen.resolved, {"data": {"scaling": "standard"}}))
    task = open_task(chosen.data)
    assert [len(rows) for rows in (task.train, task.validation, task.test)] == [
        36,
        12,
        12,
    ]
    assert float(task.train.x[:, 0].mean()) == pytest.approx(0, abs=1e-6)
    assert float(task.train.y.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert (
        abs(float(task.test.x[:, 0].mean())) > 1e-3 and float(task.test.y.mean()) > 100
    )  # in their own units
    last = open_task(chosen.data.model_copy(update={"held_out": "last"}))
    assert last.test.y.flatten().tolist() == pytest.approx(
        [row[2] for row in houses()[-12:]]
    )


# --- from a file to predictions ---


@pytest.mark.slow
def test_predictions_of_a_table_are_those_of_its_network(place: Path) -> None:
    """Rows of the file, whichever way their columns lie, against the network that evaluation loads."""
    out = place / "out.csv"
    rows = houses()
    shuffled = write(
        place / "shuffled.csv", ["town", "size"], [[t, s] for s, t, _ in rows]
    )
    assert (
        call(
            "predict", place / "run", place / "houses.csv", "-o", out, "--draws", 4
        ).exit_code
        == 0
    )
    first = columns(out)
    assert list(first) == ["mean", "std", "epistemic_std", "low", "high"]
    assert (
        call(
            "predict",
            place / "run",
            shuffled,
            "-o",
            out,
            "--draws",
            4,
            "--level",
            0.5,
            "--force",
        ).exit_code
        == 0
    )
    second = columns(out)
    assert second["mean"] == first["mean"] and second["std"] == first["std"]
    number = {name: np.array(values, float) for name, values in first.items()}
    narrow = {name: np.array(values, float) for name, values in second.items()}
    assert (number["low"] < narrow["low"]).all() and (
        narrow["low"] < narrow["mean"]
    ).all()
    assert (narrow["high"] < number["high"]).all() and (
        number["epistemic_std"] < number["std"]
    ).all()
    loaded = load_run(place / "run", CPU)
    assert loaded.likelihood == "heteroscedastic_gaussian"
    task, tested = loaded.task, {round(float(y), 1) for y in loaded.task.test.y}
    picked = [i for i, row in enumerate(rows) if row[2] in tested]
    ((found, _),) = loaded.predictions(task.test, "predict", [4])
    assert torch.allclose(
        found[4].mean[:, 0].double(), torch.tensor(number["mean"][picked]), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (
            ["size", "village"],
            [50, "mid"],
            "columns missing: 'town'; not known to the run: 'village'",
        ),
        (["size"], [50], "columns missing: 'town'"),
        (
            ["size", "town"],
            [50, "east"],
            "Column 'town' holds 'east', a category that training did not see",
        ),
        (
            ["size", "town"],
            ["big", "mid"],
            "line 2, column 'size': 'big' is not a number",
        ),
        (["size", "town"], ["", "mid"], "values are missing in column 'size'"),
        (["size", "town"], ["inf", "mid"], "'inf' is infinite"),
        (["size", "town"], [1e39, "mid"], "too large for float32"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    place: Path, tmp_path: Path, header: list[str], row: list[Any], message: str
) -> None:
    done = call(
        "predict",
        place / "run",
        write(tmp_path / "a.csv", header, [row]),
        "-o",
        tmp_path / "out.csv",
    )
    assert (
        done.exit_code == 1
        and message in done.output
        and not (tmp_path / "out.csv").exists()
    )


def test_a_run_on_a_table_takes_tables(place: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2), np.float32))
    done = call(
        "predict", place / "run", tmp_path / "a.npy", "-o", tmp_path / "out.csv"
    )
    assert done.exit_code == 1 and ".csv, .tsv, .parquet" in done.output
    assert (
        call(
            "predict", place / "run", tmp_path / "b.csv", "-o", tmp_path / "out.csv"
        ).exit_code
        == 3
    )


@pytest.mark.slow
def test_classes_gaps_and_new_categories(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        [s, t, "dear" if s > 100 else "cheap"] for s, t, _ in houses()
    ]
    rows[3][0], rows[4][1] = "", "NA"
    file = write(tmp_path / "a.csv", ["size", "town", "kind"], rows)
    config = tmp_path / "a.yaml"
    tree = merged(
        BASE, {"data": {"csv": str(file), "target": "kind", "missing": "impute"}}
    )
    config.write_text(yaml.safe_dump(tree))
    done = call("fit", config, "--out", tmp_path / "run", "--accelerator", "cpu")
    assert done.exit_code == 0, done.output
    new = write(tmp_path / "b.csv", ["size", "town"], [["", "east"], [50, "mid"]])
    with pytest.warns(sb.SlimbayesWarning, match=r"'town' \(1 of 2 rows\)"):
        assert (
            call(
                "predict",
                tmp_path / "run",
                new,
                "-o",
                tmp_path / "out.csv",
                "--draws",
                2,
            ).exit_code
            == 0
        )
    found = columns(tmp_path / "out.csv")
    assert (
        set(found["label"]) <= {"cheap", "dear"}
        and {"p(cheap)", "p(dear)", "entropy", "epistemic"} <= found.keys()
    )
    assert call("evaluate", tmp_path / "run", "--accelerator", "cpu").exit_code == 0
    rows[0][2] = "dear" if rows[0][2] == "cheap" else "cheap"  # other data: refused
    write(file, ["size", "town", "kind"], rows)
    done = call("evaluate", tmp_path / "run", "--accelerator", "cpu")
    assert done.exit_code == 1 and "other data" in done.output


def test_categories_have_names_in_the_digest(tmp_path: Path) -> None:
    digests = set()
    for towns in (["a", "b"], ["a", "c"]):
        file = write(
            tmp_path / "a.csv",
            ["x", "town", "y"],
            [[i, towns[i % 2], i / 3] for i in range(20)],
        )
        data = open_data(Data(name="a", csv=str(file), target="y"))
        digests.add(data_digest(*data))
    assert len(digests) == 2


@pytest.mark.slow
def test_a_table_without_names(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", [], [[s, TOWNS[t], y] for s, t, y in houses()])
    chosen = validate(merged(BASE, {"data": {"csv": str(file), "target": 3}}))
    run = fit(chosen, tmp_path / "run", CPU, judge=False)
    write(tmp_path / "b.csv", [], [[s, TOWNS[t]] for s, t, _ in houses()])
    made = []
    for inputs in (file, tmp_path / "b.csv"):
        assert (
            call(
                "predict",
                run,
                inputs,
                "-o",
                tmp_path / "out.csv",
                "--draws",
                1,
                "--force",
            ).exit_code
            == 0
        )
        made.append(columns(tmp_path / "out.csv")["mean"])
    assert made[0] == made[1] and len(made[0]) == 60


@pytest.mark.parametrize(
    ("data", "cells", "message"),
    [
        ({"target": "prise"}, {}, "no column 'prise'; did you mean 'price'?"),
        ({"drop": ["towns"]}, {}, "data.drop: .* no column 'towns'"),
        (
            {},
            {"town": lambda i: f"2024-01-{i % 28 + 1:02}"},
            "holds dates .*data.dates: encode.*days since a date",
        ),
        (
            {"dates": "encode"},
            {"town": lambda i: f"2024-02-{i % 31 + 1:02}"},
            "line 31, column 'town': '2024-02-30' is no",
        ),
        (
            {"dates": "encode"},
            {"town": lambda i: f"{i % 28 + 1}/5/2024"},
            "'1/5/2024' may be the day or the month first",
        ),
        (
            {},
            {"town": lambda i: f"{i % 3},5"},
            "holds '0,5', .* set data.decimal to comma .*thousands",
        ),
        (
            {},
            {"price": lambda i: f"{i},5" if i % 2 else i},
            "the target, holds '1,5', a number but for its decimal mark",
        ),
        (
            {"decimal": "comma"},
            {},
            r"column 'size' holds '\d+.\d+', a number but for its decimal mark",
        ),
        (
            {},
            {"town": lambda i: "oops" if i == 7 else i},
            "holds numbers, but not in line 9: 'oops'",
        ),
        ({}, {"town": lambda i: f"name {i}"}, "60 different texts in 60 rows"),
        (
            {},
            {"size": lambda i: f"{i:05}"},
            "column 'size' holds '00000' in line 2, .* zeros .* data.categories",
        ),
        (
            {},
            {"size": lambda i: 2**60 + i},
            r"'1152921504606846976' in line 2, .* beyond 2\^53.*data.drop",
        ),
        (
            {},
            {"size": lambda i: "" if i == 5 else i},
            r"missing in column 'size' \(1 of 60\).*data.missing: impute",
        ),
        (
            {},
            {"size": lambda i: "1e39" if i == 5 else i},
            "line 7, column 'size': '1e39' .* too large",
        ),
        ({}, {"price": lambda i: "" if i == 5 else i}, "is missing in 1 rows"),
        ({}, {"price": lambda i: i % 5}, "classes or counts: say data.task"),
        (
            {"task": "regression"},
            {"price": lambda i: "abc"[i % 3]},
            "must hold numbers .* got 'a' in line 2",
        ),
        ({"task": "classes"}, {"price": lambda i: 1}, "is '1' in all rows"),
        ({"task": "regression"}, {"price": lambda i: 1}, "is '1' in all rows"),
        ({"drop": ["size", "town"]}, {}, "has no column beside"),
    ],
)
def test_tables_that_cannot_be_trained_on(
    tmp_path: Path, data: dict, cells: dict, message: str
) -> None:
    rows = [
        [cells[n](i) if n in cells else v for n, v in zip(NAMES, row)]
        for i, row in enumerate(houses())
    ]
    file = write(tmp_path / "a.csv", NAMES, rows)
    chosen = validate(
        merged(BASE, {"data": {"csv": str(file), "target": "price"} | data})
    )
    with pytest.raises(ValueError, match=message):
        open_task(chosen.data)


def test_categories_need_a_network_that_knows_them(place: Path, tmp_path: Path) -> None:
    changes = {
        "data": {"csv": str(place / "houses.csv"), "target": "price"},
        "model": {"kind": "regression_net"},
    }
    with pytest.raises(ValueError, match="regression_net needs inputs"):
        fit(validate({**BASE, **changes}), tmp_path / "run", CPU)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "name is missing, or a file"),
        ({"csv": "a.csv"}, "csv needs target"),
        ({"csv": "a.csv", "npz": "b.npz", "target": "y"}, "csv and npz are both given"),
        ({"csv": "a\nb.csv", "target": "y"}, "data.csv: is no path"),
        ({"name": "digits", "target": "y"}, "target is for tables"),
        ({"name": "digits", "test": 0.3}, "test is for data of your own"),
        ({"name": "digits", "scaling": "quantile"}, "quantile is for tables"),
        ({"csv": "a.csv", "target": "y", "test": 0}, "data.test"),
        ({"csv": "a.csv", "target": "y", "colums": []}, "data.colums: no such field"),
    ],
)
def test_configs_that_cannot_be(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({**BASE, "data": data})


def test_paths_lead_to_files_here_or_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    write(tmp_path / "houses.csv", NAMES, houses())
    monkeypatch.chdir(tmp_path / "here")
    chosen = validate({**BASE, "data": {"csv": "houses.csv", "target": "price"}}).data
    assert chosen.name == "houses" and len(open_task(chosen, tmp_path).train) == 48
    with pytest.raises(FileNotFoundError, match="'houses.csv' is not there, seen from"):
        open_task(chosen)
    os.mkfifo("houses.csv")
    with pytest.raises(OSError, match="it is a pipe"):
        open_task(chosen)


@pytest.mark.slow
def test_decimal_commas_and_dates_are_read_as_at_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table as spreadsheets write it in much of Europe, and the same with points."""
    monkeypatch.chdir(tmp_path)
    days = [f"{i % 28 + 1}.{i % 12 + 1}.2024" for i in range(60)]
    rows = [
        [f"{s}".replace(".", ","), day, f"{y}".replace(".", ",")]
        for (s, _, y), day in zip(houses(), days)
    ]
    file = write(tmp_path / "a.csv", ["size", "sold", "price"], rows, ";")
    assert call("init", file, "-o", "a.yaml").exit_code == 0
    chosen = validate(yaml.safe_load(Path("a.yaml").read_text())).data
    assert (
        chosen.decimal == "comma"
        and chosen.drop == ("sold",)
        and "dates: encode" in Path("a.yaml").read_text()
    )
    chosen = validate(
        {
            **BASE,
            "data": {
                "csv": str(file),
                "target": "price",
                "decimal": "comma",
                "dates": "encode",
            },
        }
    )
    run = fit(chosen, tmp_path / "run", CPU, judge=False)
    names = json.loads((run / "inputs.json").read_text())["columns"]
    assert names == [
        "size",
        "sold: days",
        *(f"sold: {c} {f}" for c in ("year", "week") for f in ("sin", "cos")),
    ]
    assert call("predict", run, file, "-o", "out.csv", "--draws", 1).exit_code == 0
    iso = [f"2024-{i % 12 + 1:02}-{i % 28 + 1:02}T00:00:00" for i in range(60)]
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        arrow.table({"sold": iso, "size": [s for s, _, _ in houses()]}),
        tmp_path / "b.parquet",
    )
    assert (
        call("predict", run, "b.parquet", "-o", "again.csv", "--draws", 1).exit_code
        == 0
    )
    assert columns(tmp_path / "out.csv") == columns(tmp_path / "again.csv")
    bad = write(
        tmp_path / "c.csv",
        ["size", "sold"],
        [["1,5", "2024-01-01"], ["2,5", "soon"]],
        ";",
    )
    done = call("predict", run, bad, "-o", "none.csv")
    assert (
        done.exit_code == 1
        and "line 3, column 'sold': 'soon' is no date" in done.output
    )
    assert not Path("none.csv").exists()


@pytest.mark.slow
def test_large_targets_keep_their_digits(tmp_path: Path) -> None:
    """Times in seconds, which float32 has to the nearest two minutes."""
    draw = np.random.default_rng(0)
    x, start = draw.normal(size=80), 1_700_000_000
    y = (start + 30 * x + draw.normal(size=80)).round(2)
    file = write(
        tmp_path / "a.csv", ["x", "seconds"], [[a, f"{b:.2f}"] for a, b in zip(x, y)]
    )
    task = open_task(
        Data(name="a", csv=str(file), target="seconds", scaling="quantile")
    )
    assert task.train.y.dtype == torch.float32 and task.test.y.dtype == torch.float64
    back = task.in_own_units(task.train).y
    assert set(back.flatten().numpy().round(2)) <= set(y) and set(
        task.test.y.flatten().tolist()
    ) <= set(y)
    few = open_task(
        Data(
            name="a",
            csv=str(write(tmp_path / "b.csv", NAMES, houses())),
            target="price",
        )
    )
    assert (
        few.test.y.dtype == few.y_mean.dtype == torch.float32
    )  # as before, with its digest
    chosen = {
        "data": {"csv": str(file), "target": "seconds"},
        "train": {"epochs": 12, "batch": 16},
    }
    run = fit(validate(merged(BASE, chosen)), tmp_path / "run", CPU)
    rmse = json.loads((run / "record.json").read_text())["evaluations"][0]["metrics"][
        "rmse"
    ]
    assert (
        call("predict", run, file, "-o", tmp_path / "out.csv", "--draws", 2).exit_code
        == 0
    )
    means = np.array(columns(tmp_path / "out.csv")["mean"], dtype=float)
    assert rmse < 25 and np.corrcoef(means, y)[0, 1] > 0.8


# --- arrays and pictures ---


@pytest.mark.slow
def test_arrays_of_ones_own(tmp_path: Path) -> None:
    x, y = (
        np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32),
        np.arange(40) % 3,
    )
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(
        tmp_path / "b.npz", x_train=x, y_train=x[:, :2], x_test=x[:5], y_test=x[:5, :2]
    )
    classes = open_task(Data(name="a", npz=str(tmp_path / "a.npz")))
    assert (
        classes.fills() == {"inputs": 3, "vocabulary": 0, "classes": 3}
        and len(classes.test) == 8
    )
    real = open_task(Data(name="b", npz=str(tmp_path / "b.npz")))
    assert (
        real.fills()["outputs"] == 2 and len(real.test) == 5 and real.y_std is not None
    )
    changes = {
        "data": {"npz": str(tmp_path / "b.npz")},
        "model": {"kind": "regression_net", "hidden": 8, "norm": False},
    }
    run = fit(validate({**BASE, **changes}), tmp_path / "run", CPU, judge=False)
    assert (
        call("predict", run, tmp_path / "b.npz", "-o", tmp_path / "out.csv").exit_code
        == 1
    )  # no array x
    np.save(tmp_path / "c.npy", x)
    assert (
        call(
            "predict", run, tmp_path / "c.npy", "-o", tmp_path / "out.csv", "--draws", 1
        ).exit_code
        == 0
    )
    assert {"mean_0", "high_1"} <= columns(tmp_path / "out.csv").keys()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 2))}, "needs the arrays x and y"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, "inputs must be numbers"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, "a target each"),
        ({"x": np.array([{}, {}], dtype=object), "y": np.zeros(2)}, "holds pickled"),
        ({"x": np.full((4, 2), np.nan), "y": np.arange(4) % 2}, "the input is nan"),
        (
            {"x": np.zeros((4, 2)), "y": np.zeros((4, 2), int)},
            "classes must be whole numbers",
        ),
    ],
)
def test_arrays_that_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        open_task(
            Data(name="{a}", npz=str(tmp_path / "a.npz"))
        )  # a name may hold anything


@pytest.mark.slow
def test_a_folder_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for label, level in (("dark", 40), ("light", 200)):
        (tmp_path / "all" / label).mkdir(parents=True)
        for i in range(10):
            pixels = (level + draw.integers(0, 40, (12 + i, 14, 3))).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "all" / label / f"{i}.png")
    data = {"images": str(tmp_path / "all"), "image_size": 8}
    chosen = validate(
        {**BASE, "data": data, "model": {"kind": "small_cnn", "width": 4}}
    )
    run = fit(chosen, tmp_path / "run", CPU, judge=False)
    done = call(
        "predict",
        run,
        tmp_path / "all" / "dark",
        "-o",
        tmp_path / "out.csv",
        "--draws",
        1,
    )
    assert done.exit_code == 0, done.output
    found = columns(tmp_path / "out.csv")
    assert len(found["label"]) == 10 and {"p(dark)", "p(light)"} <= found.keys()
    with pytest.raises(ValueError, match="set data.image_size to less"):
        open_task(chosen.data.model_copy(update={"image_size": 10_000}))
    with pytest.raises(ValueError, match="at least two"):
        open_task(
            chosen.data.model_copy(update={"images": str(tmp_path / "one")})
            if _one(tmp_path)
            else chosen.data
        )


def _one(folder: Path) -> bool:
    (folder / "one").mkdir()
    return bool((folder / "all" / "dark").rename(folder / "one" / "dark"))


# --- networks of one's own ---


@pytest.mark.parametrize(
    ("noise", "outputs", "told"),
    [
        (
            "learned",
            3,
            "gives 3 outputs for a row, but 1 are needed: one for each of 1 targets",
        ),
        (
            "heteroscedastic",
            1,
            "gives 1 outputs for a row, but 2 are needed: a mean and a raw scale",
        ),
        (
            0.5,
            3,
            r"outputs of shape \(3,\) for a row, but houses has 1 targets: shape \(1,\) is needed",
        ),
    ],
)
def test_outputs_that_do_not_fit_are_told_before_training(
    place: Path, tmp_path: Path, noise: Any, outputs: int, told: str
) -> None:
    data = {"csv": str(place / "houses.csv"), "target": "price", "drop": ["town"]}
    model = {
        "python": "torch.nn:Linear",
        "args": {"in_features": 1, "out_features": outputs},
    }
    chosen = {
        **BASE,
        "data": data,
        "model": model,
        "train": {**BASE["train"], "noise": noise},
    }
    with pytest.raises(ValueError, match=told):
        fit(validate(chosen), tmp_path / "run", CPU)
    assert not (tmp_path / "run" / "steps.csv").exists()


CODE = """
from pathlib import Path
from torch import nn
Path(__file__).with_name("was_run").touch()

def build(inputs, classes, width=4):
    if width == 13:
        raise KeyError("unlucky")
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))

def number(inputs):
    return inputs
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module where the command runs, under a name that no other test has."""
    name = f"own_net_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.slow
def test_a_network_of_ones_own_is_built_only_with_consent(
    tmp_path: Path, code: str
) -> None:
    tree = {**BASE, "data": {"name": "digits", "train_limit": 64, "test_limit": 20}}
    tree["model"] = {"python": f"{code}:build", "args": {"width": 6}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    mark = tmp_path / "was_run"
    assert call("config", "check", "a.yaml").exit_code == 0 and not mark.exists()
    done = call("fit", "a.yaml", "--out", "run", "--accelerator", "cpu")
    assert done.exit_code == 0 and mark.exists(), done.output
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.uint8))
    mark.unlink()
    sys.modules.pop(code)
    for words in (
        ("predict", "run", "x.npy", "-o", "out.csv"),
        ("evaluate", "run"),
        ("diagnose", "run"),
        ("stack", "run"),
    ):
        done = call(*words, "--accelerator", "cpu")
        assert done.exit_code == 2 and "--allow-code" in done.output, words
    assert not mark.exists() and code not in sys.modules
    done = call(
        "predict", "run", "x.npy", "-o", "out.csv", "--draws", 1, "--allow-code"
    )
    assert (
        done.exit_code == 0
        and mark.exists()
        and len(columns(tmp_path / "out.csv")["label"]) == 3
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"python": "{}:bild"}, "has no function 'bild'; did you mean 'build'?"),
        ({"python": "{}x:build"}, "there is no module"),
        ({"python": "{}:build", "args": {"widht": 3}}, "cannot be called: .*widht"),
        (
            {"python": "{}:build", "args": {"width": 13}},
            "raised KeyError: .*unlucky.*line 8",
        ),
        ({"python": "{}:number"}, "must give a torch.nn.Module, got int"),
    ],
)
def test_code_that_gives_no_network(
    code: str, model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tree = {
        **BASE,
        "data": {"name": "digits"},
        "model": model | {"python": model["python"].format(code)},
    }
    with pytest.raises(RuntimeError, match=message):
        fit(validate(tree), tmp_path / "run", CPU)


@pytest.mark.parametrize(
    "name",
    ["../nets:build", "nets", "os.system:", "nets:build()", "a b:c", "nets:build:x"],
)
def test_code_is_named_by_module_and_function(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model.python: must name a function as package.module:function",
    ):
        validate({**BASE, "data": {"name": "digits"}, "model": {"python": name}})


# --- noise ---


@pytest.mark.slow
def test_noise_is_learnt(tmp_path: Path) -> None:
    """A line with noise of standard deviation 7: that is found, the same for all rows or not."""
    draw = np.random.default_rng(0)
    file = write(
        tmp_path / "a.csv",
        ["x", "y"],
        [[x, 50 + 0.7 * x + e] for x, e in draw.normal(0, [30, 7], (240, 2))],
    )
    changes = {
        "data": {"csv": str(file), "target": "y"},
        "method": {"kind": "Deterministic"},
    }
    for noise in (None, "heteroscedastic"):
        chosen = validate(
            merged(
                BASE,
                changes
                | {"train": {"epochs": 25, "optimizer": {"lr": 0.03}, "noise": noise}},
            )
        )
        run = fit(chosen, tmp_path / str(noise), CPU)
        words = ("-o", tmp_path / "out.csv", "--force")
        assert call("predict", run, file, *words).exit_code == 0
        found = np.array(columns(tmp_path / "out.csv")["std"], float)
        assert np.median(found) == pytest.approx(7.0, rel=0.25)
        assert (found.std() < 1e-3) == (noise is None)
        assert (
            json.loads((run / "inputs.json").read_text())["likelihood"]
            == "heteroscedastic_gaussian"
        )


def test_the_noise_of_targets_is_in_the_hash_as_it_is_resolved() -> None:
    tree = {
        "name": "x",
        "train": {"epochs": 1, "optimizer": {"kind": "AdamW"}},
        "method": {"kind": "Rank1"},
    }
    table = tree | {"data": {"name": "uci/yacht"}, "model": {"kind": "regression_net"}}
    digits = validate(tree | {"data": {"name": "digits"}, "model": {"kind": "mlp"}})
    assert digits.noise == 1.0 and validate(table).noise == "learned"
    noises = (1.0, 0.5, "learned")
    chosen = [validate(merged(table, {"train": {"noise": noise}})) for noise in noises]
    assert len({one.hash for one in chosen}) == 3
    assert chosen[2].hash == validate(table).hash
    again = validate(validate(table).resolved)
    assert again.noise == "learned" and again.hash == validate(table).hash


# --- init ---


@pytest.mark.slow
def test_init_writes_a_config_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        [i, f"2024-01-{i % 28 + 1:02}", f"name {i}", s, t, y]
        for i, (s, t, y) in enumerate(houses())
    ]
    rows[2][3] = ""
    write(tmp_path / "houses.csv", ["id", "day", "owner", *NAMES], rows)
    done = call("init", "houses.csv")
    assert done.exit_code == 0 and "houses.yaml" in done.output, done.output
    text = Path("houses.yaml").read_text()
    chosen = validate(yaml.safe_load(text))
    assert (
        chosen.data.drop == ("id", "day", "owner") and chosen.data.missing == "impute"
    )
    assert (
        chosen.data.task == "regression"
        and chosen.noise == "learned"
        and chosen.data.target == "price"
    )
    assert chosen.method.build() == default_method(ours=True)
    assert call("init", "houses.csv").exit_code == 2  # there already
    assert call("init", "nothing.csv").exit_code == 3
    assert (
        call("init", "houses.csv", "-o", "b.yaml", "--target", "prize").exit_code == 2
    )
    done = call(
        "fit",
        "houses.yaml",
        "--set",
        "train.epochs=1",
        "--out",
        "run",
        "--accelerator",
        "cpu",
    )
    assert done.exit_code == 0, done.output


def test_no_name_in_a_file_adds_to_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = "x\nmodel: {python: os:abort}\n#"
    write(
        tmp_path / "a.csv",
        [evil, "b\x85c: 1", "y"],
        [[f"{i % 3}\nz: 1", i, i % 2] for i in range(30)],
    )
    assert call("init", "a.csv").exit_code == 0
    tree = yaml.safe_load(Path("a.yaml").read_text())
    assert tree.keys() == {
        "name",
        "seed",
        "data",
        "model",
        "method",
        "train",
        "evaluate",
    }
    assert tree["model"]["kind"] == "table_net" and tree["data"]["task"] == "classes"


def test_init_takes_the_method_of_the_estimators() -> None:
    """Which scored best on tables; written down twice, since a config has no scikit-learn."""
    pytest.importorskip("sklearn")
    from slimbayes_lab.configs.init import _FACTORS

    from slimbayes.posteriors import config_from_dict
    from slimbayes.sklearn.network import default_method

    estimators: Any = default_method(ours=True)
    assert config_from_dict(yaml.safe_load(_FACTORS)) == estimators["dense.*"]


def test_init_of_arrays_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image = pytest.importorskip("PIL.Image")
    np.savez("a.npz", x=np.zeros((6, 1, 8, 8), np.uint8), y=np.arange(6) % 2)
    np.savez("b.npz", x=np.zeros((6, 3)), y=np.zeros(6))
    for label in ("cat", "dog"):
        Path("pets", label).mkdir(parents=True)
        image.new("RGB", (20, 30)).save(f"pets/{label}/0.png")
    for file in ("a.npz", "b.npz", "pets"):
        assert call("init", file).exit_code == 0
    a, b, pets = (
        validate(yaml.safe_load(Path(f"{n}.yaml").read_text()))
        for n in ("a", "b", "pets")
    )
    assert (
        a.model.kind == pets.model.kind == "small_cnn"
        and b.model.kind == "regression_net"
    )
    assert (
        a.data.task == "classes" and b.noise == "learned" and pets.data.image_size == 20
    )
    assert sb.Rank1(members=4, prior=sb.Normal(1.0, 0.3)) == a.method.build()


def odd_file(file: Path, kind: str) -> Path:
    """A table as people have them, 40 rows of two numbers and a price."""
    draw = np.random.default_rng(0).normal(size=(40, 3)).round(3)
    rows = [[str(v) for v in row] for row in draw]
    head = ["a", "b", "price"]
    column = {
        "money": lambda v: f"${abs(float(v)) * 5000:,.2f}", "per cent": lambda v: f"{v}%", "euro": lambda v: f"{v} €",
        "thousands": lambda v: f"{1234 + int(abs(float(v)) * 5000):,}", "american": lambda v: "1/2/2024",
        "same": lambda v: "5.5", "texts": lambda v: f"house {v}",
    }  # fmt: skip
    for name, make in column.items():
        if kind.startswith(name):
            at = 2 if kind.endswith("target") else 1
            rows = [
                [make(c) if i == at else c for i, c in enumerate(row)] for row in rows
            ]
    if kind == "index":
        head, rows = ["", *head], [[str(i), *row] for i, row in enumerate(rows)]
    parts = ";" if kind in ("semicolons below an empty line", "german") else ","
    if kind == "german":
        rows = [[c.replace(".", ",") for c in row] for row in rows]
    if kind == "mixed":
        head, rows = [], [[row[0], "red", row[2]] for row in rows]
    write(file, head, rows, parts)
    if kind == "semicolons below an empty line":
        file.write_text("\n" + file.read_text())
    if kind == "latin":
        file.write_bytes(file.read_text().replace("price", "größe").encode("latin-1"))
    return file


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("index", 'drop: ["1"]\n    # "1": it numbers the rows'),
        ("euro", 'drop: ["b"]\n    # "b": numbers with signs, such as "-0.132 €"'),
        ("thousands", 'drop: ["b"]\n    # "b": numbers with signs, such as "1,894"'),
        ("american", '"b": dates, but "1/2/2024" may be the day or the month first'),
        ("semicolons below an empty line", '"a": numbers'),
        ("german", "decimal: comma"),
    ],
)
@pytest.mark.slow
def test_init_of_tables_as_people_have_them(
    tmp_path: Path, kind: str, told: str
) -> None:
    if (
        kind == "american"
    ):  # more than one day, or the column would be the same in all rows
        file = odd_file(tmp_path / "odd.csv", kind)
        file.write_text(file.read_text().replace("1/2/2024", "3/4/2024", 5))
        told = told.replace("1/2", "3/4")
    else:
        file = odd_file(tmp_path / "odd.TSV", kind)
    found = call("init", file, "-o", tmp_path / "odd.yaml")
    assert found.exit_code == 0, found.output
    text = (tmp_path / "odd.yaml").read_text()
    assert told in text and "numbers. The last column" in text
    assert call("config", "check", tmp_path / "odd.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "money target",
            r"the target, holds '\$[\d,.]+', a number but for signs of money",
        ),
        ("per cent target", "take the signs out, or say data.task: classes"),
        ("same target", "the target, is '5.5' in all rows: nothing is to be learnt"),
        ("texts target", "40 different texts in 40 rows, too many for classes"),
        ("latin", "line 1: a column's name is not UTF-8"),
        ("mixed", "--header or --no-header"),
    ],
)
def test_tables_that_init_refuses_in_words(
    tmp_path: Path, kind: str, told: str
) -> None:
    found = call(
        "init", odd_file(tmp_path / "odd.csv", kind), "-o", tmp_path / "odd.yaml"
    )
    assert found.exit_code in (1, 2) and not (tmp_path / "odd.yaml").exists()
    assert re.search(told, found.output), found.output


def test_init_says_what_it_leaves_out_and_how_to_go_on(tmp_path: Path) -> None:
    rows = [[i, "big" if i == 7 else i * 1.5, i * 0.25] for i in range(40)]
    made = (
        write(tmp_path / "my odd.csv", ["a", "b", "y"], rows),
        tmp_path / "my odd.yaml",
    )
    told = call("init", made[0], "-o", made[1]).output
    assert (
        re.search(r'left out: "b": .* \(line 9: "big"\)', told)
        and f"slimbayes fit '{made[1]}'" in told
    )
    trailing = write(
        tmp_path / "trailing.csv",
        ["a", "y", ""],
        [[i, i * 0.25, ""] for i in range(40)],
    )
    assert (
        "missing in all rows: choose another"
        in call("init", trailing, "-o", tmp_path / "t.yaml").output
    )


@pytest.mark.slow
def test_a_sealed_run_is_judged_again_without_a_word_of_older_ones(
    place: Path, monkeypatch: Any
) -> None:
    told: list[str] = []
    monkeypatch.setattr("slimbayes_lab.runs.folder.note_unsealed", told.append)
    assert call("evaluate", place / "run").exit_code == 0 and not told
    assert (
        "of scaled targets, KL" in call("diagnose", place / "run").output
    )  # test rows are in units of their own


def test_init_is_told_whether_there_are_names(tmp_path: Path) -> None:
    file = odd_file(tmp_path / "odd.csv", "mixed")
    assert call("init", file, "-o", tmp_path / "odd.yaml", "--no-header").exit_code == 0
    assert 'target: "3"' in (tmp_path / "odd.yaml").read_text()


def test_numbers_with_signs_are_no_categories_unless_it_is_said(tmp_path: Path) -> None:
    file = odd_file(tmp_path / "odd.csv", "per cent")

    def config(missing: str, **more: Any) -> Any:
        return validate(
            BASE
            | {"data": {"csv": str(file), "target": "price", "missing": missing} | more}
        )

    with pytest.raises(
        ValueError, match="column 'b' holds '-0.132%', a number but for signs"
    ):
        open_data(config("refuse").data)
    with pytest.warns(
        sb.SlimbayesWarning, match=r"'b' \(8 of 40 rows\)"
    ):  # of the rows that are tested on
        named, _ = open_data(config("impute", categories=["b"]).data)
    assert "b" in named.columns
