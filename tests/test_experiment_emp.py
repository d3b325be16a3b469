"""The EMP paper's regressions at reduced size: which method leads, what is reported, and the readers (F36, F38)."""

import hashlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import slimbayes as sb

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "emp"
NAMES = ("readers", "tables", "regression")
REDUCED = ["--epochs", "100", "--draws", "400"]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The experiment's files as modules, loaded under their own names as when they are run, and removed afterwards."""
    before = {name: sys.modules.pop(name, None) for name in NAMES}  # other experiments have files of the same names
    sys.path.insert(0, str(FOLDER))
    loaded = {}
    for name in NAMES:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        loaded[name] = sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(loaded[name])  # type: ignore[union-attr]
    yield loaded
    sys.path.remove(str(FOLDER))
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def regression(modules: dict[str, Any]) -> Any:
    return modules["regression"]


@pytest.fixture(scope="module")
def readers(modules: dict[str, Any]) -> Any:
    return modules["readers"]


@pytest.fixture(scope="module")
def tables(modules: dict[str, Any]) -> Any:
    return modules["tables"]


@pytest.fixture(autouse=True)
def _only_shipped_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)


# The experiment --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(regression: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The record of all four methods on three splits, as it was written, and what was printed."""
    out = tmp_path_factory.mktemp("results") / "yacht.json"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.delenv("SLIMBAYES_DATA", raising=False)
        patch.setattr("builtins.print", lambda *values, **_: printed.append(" ".join(map(str, values))))
        regression.main([*REDUCED, "--out", str(out)])
    return json.loads(out.read_text()), "\n".join(printed)


def test_patching_beats_dropout_and_the_ensemble(tables: Any, outcome: tuple[dict[str, Any], str]) -> None:
    """Five seeds gave RMSEs of 1.5 to 2.2 against 5.6 to 6.0 after 100 epochs; after 4,000 it is 1.0 against 1.5 and more."""
    record, _ = outcome
    rmse = {m: tables.mean_and_error(tables.scores(record, "yacht", m, "rmse"))[0] for m in tables.METHODS}
    lpd = {m: tables.mean_and_error(tables.scores(record, "yacht", m, "lpd"))[0] for m in tables.METHODS}
    for patched in ("ECMP", "EMP"):
        for other in ("Dropout", "Ensemble"):
            assert rmse[patched] < 0.6 * rmse[other]
            assert lpd[patched] > lpd[other] + 0.5
    assert max(lpd.values()) < 0.5 * math.log(0.1 / (2 * math.pi)) + 1e-6  # the density of a perfect prediction (F38)


def test_printed_tables_hold_the_numbers_written(tables: Any, outcome: tuple[dict[str, Any], str]) -> None:
    record, printed = outcome
    assert [(r["split"], r["method"]) for r in record["runs"]] == [(s, m) for s in range(3) for m in tables.METHODS]
    blocks = re.split(r"Table 1[23]", printed)
    for block, score in zip(blocks[1:], ("rmse", "lpd"), strict=True):
        header, ours, theirs = (
            next(line for line in block.splitlines() if key in line) for key in ("| dataset", "| Yacht", "*paper*")
        )
        columns = [cell.strip() for cell in header.split("|")]
        for method in tables.METHODS:
            values = [r[score] for r in record["runs"] if r["method"] == method]
            shown = [cell.strip() for cell in ours.split("|")][columns.index(method)]
            assert shown == f"{np.mean(values):.2f} ± {np.std(values, ddof=1) / math.sqrt(3):.2f}"
        assert [cell.strip() for cell in theirs.split("|")][-5:-1] == [
            tables.cell(*v) for v in getattr(tables.PAPER["yacht"], score)
        ]


def test_same_seed_same_numbers_with_any_number_of_workers(regression: Any, tmp_path: Path) -> None:
    """Two processes give what one gives, in the same order; another seed does not."""
    short = [
        "--epochs",
        "3",
        "--draws",
        "20",
        "--splits",
        "2",
        "1",
        "--methods",
        "EMP",
        "Dropout",
        "--out",
        str(tmp_path / "a.json"),
    ]
    here = regression.main(short)["runs"]
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning",
        str(FOLDER / "regression.py"),
        *short,
        "--workers",
        "2",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    there = json.loads((tmp_path / "a.json").read_text())["runs"]
    other = regression.main([*short, "--seed", "1"])["runs"]
    for one, two, different in zip(here, there, other, strict=True):
        assert [one[k] for k in ("split", "method", "rmse", "lpd")] == [
            two[k] for k in ("split", "method", "rmse", "lpd")
        ]
        assert one["rmse"] != different["rmse"]


def test_resuming_keeps_earlier_runs(regression: Any, tmp_path: Path) -> None:
    """Only what is missing is run, and the whole equals a run in one go; another setting is refused."""
    short = ["--epochs", "2", "--draws", "5", "--out", str(tmp_path / "a.json")]
    whole = regression.main([*short, "--methods", "EMP", "Dropout", "--splits", "0", "1"])
    first = regression.main([*short, "--methods", "Dropout", "--splits", "1"])
    second = regression.main([*short, "--methods", "EMP", "Dropout", "--splits", "0", "1", "--resume"])
    assert first["runs"][0] in second["runs"]  # with its times: it was not run again
    assert second["methods"] == ["EMP", "Dropout"]
    kept = [[(r["split"], r["method"], r["rmse"], r["lpd"]) for r in record["runs"]] for record in (whole, second)]
    assert kept[0] == kept[1]
    with pytest.raises(ValueError, match="--resume needs the same seed as before: the file has 0, this run 1"):
        regression.main([*short, "--seed", "1", "--resume"])


def test_the_kept_results_are_those_of_the_present_setting(regression: Any, tables: Any) -> None:
    for name in ("yacht.json", "regression.json"):
        file = tables.RESULTS / name
        if name == "yacht.json" or file.exists():
            kept = json.loads(file.read_text())
            assert kept["setting"] == asdict(regression.Setting()), (
                f"run experiments/emp/regression.py again for {name}"
            )
    readme = (FOLDER / "README.md").read_text()
    assert tables.page(readme) == readme, "run experiments/emp/tables.py"


# Its parts -------------------------------------------------------------------------------------------------------------


def test_densities_against_a_loop(regression: Any) -> None:
    """Mixture of S Gaussians of precision tau around rescaled means, one density for each of two targets."""
    s, m, tau = 7, 4, 0.1
    outputs, y = torch.randn(s, m, 2), 5 * torch.randn(m, 2) + 3
    mean, std = torch.tensor([3.0, -1.0]), torch.tensor([5.0, 0.5])
    raw = sb.Prediction.from_outputs(outputs, "gaussian", scale=tau**-0.5 / std)
    squares, densities = regression.errors_and_densities(raw.rescaled(mean, std), y)
    for i in range(m):
        for t in range(2):
            values = [mean[t].item() + std[t].item() * outputs[k, i, t].item() for k in range(s)]
            each = [math.sqrt(tau / (2 * math.pi)) * math.exp(-tau / 2 * (y[i, t].item() - v) ** 2) for v in values]
            assert densities[i, t].item() == pytest.approx(math.log(sum(each) / s), abs=1e-4)
            assert squares[i, t].item() == pytest.approx((y[i, t].item() - sum(values) / s) ** 2, rel=1e-3, abs=1e-5)
            # F38: not below the mean of the logs
            assert densities[i, t].item() >= sum(math.log(e) for e in each) / s - 1e-5


def test_evaluation_is_in_original_units(regression: Any, readers: Any) -> None:
    """A net without noise, and a slow evaluation of it; more test rows than are predicted at once."""
    rng = np.random.default_rng(0)
    table = readers.Table("made", rng.normal(size=(4000, 3)), 100 + 20 * rng.normal(size=(4000, 1)))
    data, setting = readers.split(table, 0), regression.Setting(draws=3)
    net = regression.build("Dropout", 3, 1, 5, regression.Setting(rate=0.0))
    got = regression.evaluate(net, data, setting)
    predicted = (net(data.test_x) * data.y_std + data.y_mean).detach().double()
    squares = (predicted - data.test_y).square()
    assert len(squares) > regression.ROWS
    assert got["rmse"] == pytest.approx(squares.mean().sqrt().item(), rel=1e-4)
    assert got["lpd"] == pytest.approx(0.5 * math.log(0.1 / (2 * math.pi)) - 0.05 * squares.mean().item(), rel=1e-4)


def test_nets_are_the_papers(regression: Any) -> None:
    """13 inputs, 50 units: 751 shared parameters; K = 5 pairs of scales and shifts on 13 + 50 channels; five whole nets."""
    setting, shared = regression.Setting(), 13 * 50 + 50 + 50 + 1
    counts = {
        m: sum(p.numel() for p in regression.build(m, 13, 1, 50, setting).parameters())
        for m in ("ECMP", "EMP", "Dropout", "Ensemble")
    }
    assert counts == {
        "ECMP": shared + 5 * 2 * 63,
        "EMP": shared + 5 * 2 * 63,
        "Dropout": shared,
        "Ensemble": 5 * shared,
    }
    net = regression.build("EMP", 13, 1, 50, setting)
    scales = [p for name, p in net.named_parameters() if name.startswith("norm") and name.endswith("weight")]
    assert sum(p.numel() for p in scales) == 5 * 63 and all(bool((p == 0.2).all()) for p in scales)
    dropped = [m.p for m in regression.build("Dropout", 13, 1, 50, setting) if isinstance(m, nn.Dropout)]
    assert dropped == [0.005, 0.005]


@pytest.mark.parametrize("method", ["EMP", "Ensemble"])
def test_training_step_is_adam_on_squared_error(regression: Any, readers: Any, method: str) -> None:
    """One step of the ensemble or of one component, against Adam's formula written out: g = d loss / d w + 0.01 w, w - 0.001 sign(g)."""
    table = readers.read("yacht")
    data, setting = (
        readers.split(table, 0),
        regression.Setting(epochs=1, batch=500, components=1 if method == "EMP" else 5),
    )
    net = regression.build(method, 6, 1, 50, setting)
    before = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    if method == "EMP":
        outputs = [torch.func.functional_call(net, before, (data.x,))]
    else:
        plain = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 1))
        stacks = [list(before.values())[4 * k : 4 * k + 4] for k in range(5)]
        outputs = [
            torch.func.functional_call(plain, dict(zip(dict(plain.named_parameters()), s, strict=True)), (data.x,))
            for s in stacks
        ]
    torch.stack([(out - data.y).square().mean() for out in outputs]).mean().backward()
    regression.train(net, data, setting)
    for name, after in net.named_parameters():
        gradient = before[name].grad + 0.01 * before[name].detach()
        clear = gradient.abs() > 1e-5
        moved = (after - before[name]).detach()
        torch.testing.assert_close(moved[clear], -1e-3 * gradient[clear].sign(), rtol=2e-2, atol=1e-6)


# Data ------------------------------------------------------------------------------------------------------------------


def test_shipped_set(readers: Any) -> None:
    """Shape, and the mean and standard deviation of the target as published for the benchmark's copy."""
    table = readers.read("yacht")
    assert table.x.shape == (308, 6) and table.y.shape == (308, 1)
    assert table.y.mean() == pytest.approx(10.495357142857143) and table.y.std() == pytest.approx(15.135858907655322)


def test_splits_are_the_standard_ones(readers: Any) -> None:
    """Digests of the published index files of yacht: the test rows of all 20 splits, 31 each."""
    rows = np.stack([readers.split_rows(308, index)[1] for index in range(20)]).astype(np.uint16)
    assert (
        hashlib.sha256(rows.tobytes()).hexdigest() == "5d78897d2218ab238ec0f870589d7d84bdb82e78804baf9502f04998d0ccc9c9"
    )
    train, test = readers.split_rows(308, 7)
    assert len(train) == 277 and sorted([*train, *test]) == list(range(308))


def test_standardised_on_the_training_rows_alone(readers: Any) -> None:
    x = np.random.default_rng(0).normal(5, 3, (100, 3))
    x[:, 1] = 0.1  # constant, and its mean is not exactly 0.1
    data = readers.split(readers.Table("made", x, 7 * x[:, :1] + 1), 2)
    torch.testing.assert_close(data.x.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.x.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))
    assert abs(data.test_x.mean().item()) > 1e-3
    rows = readers.split_rows(100, 2)[1]
    np.testing.assert_allclose(data.test_y.numpy(), 7 * x[rows, :1] + 1, rtol=1e-6)
    torch.testing.assert_close(data.x[:, :1] * data.y_std + data.y_mean, data.y * data.y_std + data.y_mean)


def test_other_sets_are_read_from_a_folder(readers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uci").mkdir()
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10.0)
    np.savez(tmp_path / "uci" / "made.npz", X=x, y=y)
    np.savez(tmp_path / "flat.npz", X=x, y=np.stack([y, y], 1))
    assert readers.read("made", tmp_path).y.shape == (10, 1) and readers.read("flat", tmp_path).y.shape == (10, 2)
    monkeypatch.setenv("SLIMBAYES_DATA", str(tmp_path))
    np.testing.assert_array_equal(readers.read("made").x, x)
    assert readers.read("yacht").x.shape == (308, 6)  # what the folder lacks may still be shipped


def test_a_missing_set_is_named_with_its_place(readers: Any, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"No data for 'concrete'.*SLIMBAYES_DATA, where DIR/uci/concrete\.npz.*Shipped.*: yacht\.",
    ):
        readers.read("concrete")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "uci" / "concrete.npz"))):
        readers.read("concrete", tmp_path)


def test_wrong_files_are_refused(readers: Any, tmp_path: Path) -> None:
    x, y = np.zeros((10, 2)), np.zeros(10)
    np.savez(tmp_path / "a.npz", X=x)
    np.savez(tmp_path / "b.npz", X=x, y=np.zeros(9))
    np.savez(tmp_path / "c.npz", X=x, y=y, test_idx=np.array([[0]]))
    for name, message in {
        "a": "must hold the arrays X and y, got X",
        "b": r"got \(10, 2\) and \(9, 1\)",
        "c": "split 0 is not the standard one",
    }.items():
        with pytest.raises(ValueError, match=message):
            readers.read(name, tmp_path)
