"""The `slimbayes` command, end to end on small data: exit codes, files, messages."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lab_configs import BASE, CPU, METHODS, experiment
from slimbayes_lab.command import app
from slimbayes_lab.configs.files import merged
from slimbayes_lab.report import record
from slimbayes_lab.runs.fit import fit
from typer.testing import CliRunner

run = CliRunner()


def call(*words: object) -> Any:
    return run.invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "try.yaml"
    file.write_text(yaml.safe_dump(BASE))
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = []
    for method in ("plain", "rank1"):
        for seed in (0, 1):
            chosen = experiment(
                name=method,
                method=METHODS[method],
                seed=seed,
                evaluate={"corruptions": ["gaussian_noise"], "ood": ["inverted"]},
            )
            made.append(fit(chosen, folder / f"{method}-{seed}", CPU))
    return made


def test_help_is_quick_and_needs_no_torch() -> None:
    """Half a second of CPU, with room for a busy machine: the promise is kept by not importing torch."""
    code = """
import sys, time
sys.argv = ["slimbayes", "--help"]
from slimbayes_lab.command import main
try:
    main()
except SystemExit:
    pass
print(time.process_time(), *(name in sys.modules for name in ("torch", "pydantic", "altair")))
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    seconds, *loaded = out.splitlines()[-1].split()
    assert loaded == ["False"] * 3 and float(seconds) < 2
    assert all(
        word in out
        for word in (
            "fit",
            "evaluate",
            "predict",
            "compare",
            "sweep",
            "reproduce",
            "report",
            "data",
            "config",
        )
    )


@pytest.mark.slow
def test_configs_are_checked_without_torch() -> None:
    """A row of every third file of lab/experiments/, the list of tables, the help of every command, in one process."""
    code = """
import sys, time
from pathlib import Path
from typer.testing import CliRunner
from slimbayes_lab.command import app
from slimbayes_lab.configs.files import read_tree
from slimbayes_lab.configs.files import row_names

run, told = CliRunner().invoke, []
first = run(app, ["config", "check", "lab/experiments/demo/digits.yaml#2-rank1-cauchy"])
seconds = time.process_time()
for file in sorted(Path("lab/experiments").glob("*/*.yaml"))[::3]:
    rows = row_names(read_tree(file))
    told.append(run(app, ["config", "check", f"{file}#{rows[0]}" if rows else str(file)]).output)
commands = ["fit", "evaluate", "predict", "compare", "sweep", "reproduce", "report", "data", "config"]
inner = [["data", name] for name in ("list", "check", "prepare")]
inner += [["config", name] for name in ("check", "show", "schema")]
helped = [run(app, [*words, "--help"]).exit_code for words in [[name] for name in commands] + inner]
helped.append(0 if "rank1/table2" in run(app, ["reproduce", "--list"]).output else 1)
wrong = run(app, ["config", "check", "lab/experiments/demo/digits.yaml#2-rank1-cauchy", "--set", "method.prior.scale=-1"])
print(seconds, "torch" in sys.modules, first.exit_code, sum("is valid" in text for text in told), len(told), *helped)
print(wrong.exit_code, "needs a positive, finite scale" in wrong.output)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    (seconds, torch, first, valid, files, *helped), wrong = (
        line.split() for line in done.stdout.splitlines()[-2:]
    )
    assert torch == "False" and first == "0" and float(seconds) < 2
    assert int(files) >= 15 and int(valid) >= 11 and set(helped) == {"0"}
    assert wrong == ["2", "True"]  # it is the whole check: the method's own, too


@pytest.mark.parametrize(
    "command",
    [
        "fit",
        "evaluate",
        "predict",
        "compare",
        "sweep",
        "reproduce",
        "report",
        "data",
        "config",
    ],
)
def test_every_command_has_help(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.slow
def test_fit_trains_and_a_second_call_does_nothing(
    config: Path, tmp_path: Path
) -> None:
    changes = ["--set", "train.epochs=1", "--set", "evaluate.draws=[1,2]"]
    words = ["fit", config, "--out", tmp_path / "run", "--accelerator", "cpu", *changes]
    result = call(*words)
    assert result.exit_code == 0, result.output
    found = record.read(tmp_path / "run")
    assert (
        [e.draws for e in found.evaluations] == [1, 2]
        and len(found.curve) == 1
        and "accuracy" in result.output
    )
    before = (tmp_path / "run" / "record.json").read_bytes()
    assert call(*words).exit_code == 0
    assert (tmp_path / "run" / "record.json").read_bytes() == before


def test_fit_refuses_what_is_wrong_before_anything_runs(
    config: Path, tmp_path: Path
) -> None:
    result = call("fit", config, "--out", tmp_path / "run", "--set", "train.epoch=1")
    assert (
        result.exit_code == 2
        and "did you mean 'epochs'" in result.output
        and not (tmp_path / "run").exists()
    )
    assert call("fit", tmp_path / "none.yaml").exit_code == 2
    missing = call(
        "fit",
        config,
        "--out",
        tmp_path / "run",
        "--set",
        "data.name=svhn",
        "--data-dir",
        tmp_path,
    )
    assert (
        missing.exit_code == 3
        and "svhn" in missing.output
        and "Traceback" not in missing.output
    )
    assert call("fit").exit_code == 2


def test_fit_says_when_data_and_network_do_not_fit(
    config: Path, tmp_path: Path
) -> None:
    result = call(
        "fit",
        config,
        "--out",
        tmp_path / "run",
        "--accelerator",
        "cpu",
        "--set",
        "model={kind: regression_net}",
    )
    assert result.exit_code == 1 and "no network for this data" in result.output


@pytest.mark.slow
def test_evaluate_again_with_more_draws(runs: list[Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(runs[2], copy)
    before = record.read(copy)
    result = call(
        "evaluate",
        copy,
        "--draws",
        "1,3",
        "--accelerator",
        "cpu",
        "--set",
        "evaluate.corruptions=[fog]",
    )
    assert result.exit_code == 0, result.output
    after = record.read(copy)
    assert {e.draws for e in after.evaluations} == {1, 3} and {
        e.corruption for e in after.evaluations
    } == {None, "fog"}
    assert (
        after.config_hash == before.config_hash
        and after.curve == before.curve
        and after.cost.train_seconds == before.cost.train_seconds
    )
    assert after.evaluations[0].metrics == before.evaluations[0].metrics, (
        "the first draw is the same draw"
    )
    refused = call("evaluate", copy, "--set", "train.epochs=3")
    assert refused.exit_code == 1 and "Only evaluate.* can be changed" in refused.output
    assert call("evaluate", tmp_path).exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["csv", "json", "npz"])
def test_predict_rows_of_ones_own(end: str, runs: list[Path], tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((5, 1, 8, 8)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    result = call(
        "predict",
        runs[2],
        tmp_path / "x.npy",
        "-o",
        tmp_path / f"p.{end}",
        "--draws",
        4,
        "--accelerator",
        "cpu",
    )
    assert result.exit_code == 0 and "5 predictions" in result.output
    if end == "npz":
        found = dict(np.load(tmp_path / "p.npz", allow_pickle=False))
        probs = np.stack([found[f"p({c})"] for c in range(10)], 1)
    else:
        text = (tmp_path / f"p.{end}").read_text()
        rows = (
            json.loads(text)
            if end == "json"
            else list(csv.DictReader(text.splitlines()))
        )
        probs = np.array([[float(row[f"p({c})"]) for c in range(10)] for row in rows])
        assert [str(row["label"]) for row in rows] == [str(c) for c in probs.argmax(1)]
    assert probs.shape == (5, 10) and np.allclose(probs.sum(1), 1, atol=1e-5)


@pytest.mark.slow
def test_predict_reads_images_and_refuses_what_it_cannot_judge(
    runs: list[Path], tmp_path: Path
) -> None:
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    for i in range(2):
        Image.fromarray(np.full((8, 8), 100 * i, np.uint8)).save(
            tmp_path / "pictures" / f"{i}.png"
        )
    assert (
        call(
            "predict",
            runs[0],
            tmp_path / "pictures",
            "-o",
            tmp_path / "p.csv",
            "--accelerator",
            "cpu",
        ).exit_code
        == 0
    )
    x = np.zeros((4, 1, 8, 8), "float32")
    x[2, 0, 0, 0] = np.nan
    cases = {
        "nan": (x, "row 2 holds NaN"),
        "range": (x[:1] + 7, "in [0, 1], got 7"),
        "shape": (x[:, :, :4], "must have shape (1, 8, 8)"),
    }
    for name, (array, told) in cases.items():
        np.save(tmp_path / f"{name}.npy", array)
        result = call(
            "predict",
            runs[0],
            tmp_path / f"{name}.npy",
            "-o",
            tmp_path / "q.csv",
            "--accelerator",
            "cpu",
        )
        assert result.exit_code == 1 and told in result.output.replace("\n", " "), (
            result.output
        )
    np.save(tmp_path / "evil.npy", np.array([object()]), allow_pickle=True)
    assert (
        call(
            "predict",
            runs[0],
            tmp_path / "evil.npy",
            "-o",
            tmp_path / "q.csv",
            "--accelerator",
            "cpu",
        ).exit_code
        == 1
    )
    assert (
        call(
            "predict",
            runs[0],
            tmp_path / "x.npy",
            "-o",
            tmp_path / "q.txt",
            "--accelerator",
            "cpu",
        ).exit_code
        == 1
    )
    assert (
        call(
            "predict",
            runs[0],
            tmp_path / "none.npy",
            "-o",
            tmp_path / "q.csv",
            "--accelerator",
            "cpu",
        ).exit_code
        == 3
    )


@pytest.mark.slow
def test_compare_and_report(runs: list[Path], tmp_path: Path) -> None:
    table = call("compare", *runs, "--baseline", "plain", "--json")
    assert table.exit_code == 0, table.output
    assert {row["name"] for row in json.loads(table.output)["rows"]} == {
        "plain",
        "rank1",
    }
    assert "rank1" in call("compare", runs[0].parent).output
    severe = json.loads(
        call(
            "compare",
            *runs,
            "--on",
            "corrupted",
            "--severity",
            5,
            "--metric",
            "nll",
            "--draws",
            1,
            "--json",
        ).output
    )
    assert len(severe["rows"]) == 2
    assert call("compare", *runs, "--on", "nowhere").exit_code == 1
    page = call(
        "report", runs[0].parent, "-o", tmp_path / "page.html", "--title", "Mine"
    )
    assert page.exit_code == 0 and "Mine" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert (
        call("report", tmp_path / "nothing", "-o", tmp_path / "x.html").exit_code == 3
    )


@pytest.mark.slow
def test_a_damaged_record_is_left_out_of_the_report_and_told(
    runs: list[Path], tmp_path: Path
) -> None:
    import shutil

    for source in runs[:2]:
        shutil.copytree(source, tmp_path / source.name)
    (tmp_path / runs[1].name / "record.json").write_text('{"format": 1, "name": ')
    assert call("report", tmp_path, "-o", tmp_path / "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert "damaged" in text


@pytest.mark.slow
def test_config_commands(config: Path, tmp_path: Path) -> None:
    assert "is valid" in call("config", "check", config).output
    shown = call("config", "show", config, "--set", "seed=7")
    assert yaml.safe_load(shown.output)["seed"] == 7
    (tmp_path / "again.yaml").write_text(shown.output)
    assert yaml.safe_load(
        call("config", "show", tmp_path / "again.yaml").output
    ) == yaml.safe_load(shown.output)
    assert call("config", "schema", "-o", tmp_path / "schema.json").exit_code == 0
    assert json.loads((tmp_path / "schema.json").read_text())["title"] == "Experiment"
    assert call("config", "check", config, "--set", "foo=1").exit_code == 2


@pytest.mark.slow
def test_regression_runs_through_the_lab(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    (tmp_path / "uci").mkdir()
    np.savez(
        tmp_path / "uci" / "yacht.npz", X=x, y=100 + 30 * x[:, 0] + rng.normal(size=80)
    )
    tree = merged(BASE, {
        "data": {"name": "uci/yacht", "train_limit": None, "test_limit": None},
        "model": {"kind": "regression_net", "hidden": 20}, "method": {"kind": "ModelPatch", "components": 3},
        "train": {"epochs": 60, "batch": 24, "noise": 0.1}, "evaluate": {"draws": [1, 50]},
    })  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    result = call(
        "fit",
        tmp_path / "r.yaml",
        "--out",
        tmp_path / "run",
        "--data-dir",
        tmp_path,
        "--accelerator",
        "cpu",
    )
    assert result.exit_code == 0, result.output
    row = record.read(tmp_path / "run").evaluations[-1]
    assert row.metrics["rmse"] < 15 and set(row.metrics) == {
        "rmse",
        "lpd",
        "crps",
        "coverage95",
    }
    (tmp_path / "new.csv").write_text("a,b,c\n0,0,0\n2,0,0\n")
    (tmp_path / "uci" / "yacht.npz").unlink()  # the training data are not needed
    done = call(
        "predict",
        tmp_path / "run",
        tmp_path / "new.csv",
        "-o",
        tmp_path / "p.csv",
        "--accelerator",
        "cpu",
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    low, high = (float(row["mean"]) for row in rows)
    assert 80 < low < 120 and 120 < high < 200, (
        "predictions are in the target's own units"
    )
    assert float(rows[0]["std"]) > 0


@pytest.mark.slow
def test_image_folders_stream_through_worker_processes(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("dark", "light")):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                shape = (int(rng.integers(30, 60)), int(rng.integers(30, 60)), 3)
                Image.fromarray(
                    rng.integers(
                        0 + 128 * label, 128 + 128 * label, shape, dtype=np.uint8
                    )
                ).save(folder / f"{i}.JPEG")
    tree = merged(BASE, {
        "data": {"name": "imagenet", "image_size": 28, "train_limit": None, "test_limit": None},
        "model": {"kind": "small_cnn", "width": 4}, "augment": {"kind": "resized_crop", "size": 28},
        "train": {"epochs": 2, "batch": 4}, "evaluate": {"batch": 4},
    })  # fmt: skip
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(tree))
    words = (
        "fit",
        tmp_path / "f.yaml",
        "--data-dir",
        tmp_path,
        "--accelerator",
        "cpu",
        "--workers",
    )
    for workers in (0, 2):
        result = call(*words, workers, "--out", tmp_path / f"run{workers}")
        assert result.exit_code == 0, result.output
    alone, helped = (record.read(tmp_path / f"run{n}") for n in (0, 2))
    assert alone.digest == helped.digest, "who decodes the images changes nothing"
    assert alone.evaluations[0].rows == 4 and len(alone.curve) == 2
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 28, 28), np.uint8))
    refused = call(
        "predict",
        tmp_path / "run0",
        tmp_path / "x.npy",
        "-o",
        tmp_path / "p.csv",
        "--accelerator",
        "cpu",
    )
    assert refused.exit_code == 1 and "image folders" in refused.output
