"""Reproducing tables: a tiny paper on scikit-learn's digits from end to end, interrupted, resumed, and with a row that fails."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from slimbayes.lab import reproduce as module
from slimbayes.lab.config_files import ConfigError
from slimbayes.lab.diagnose import Case, diagnose
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import Stopped
from slimbayes.lab.markdown import markdown
from slimbayes.lab.reproduce import Incomplete, find, list_all, reproduce
from slimbayes.lab.rows import listings, roots
from slimbayes.lab.tables import Result, Table, calibration_errors, draws_of, measured, relative_errors, summary
from slimbayes.report.record import Cost, Evaluation, Parameters, Record, Reliability, read

CPU = Execution(accelerator="cpu")
BASE = """
data: {name: digits, train_limit: 300, test_limit: 200, validation: 0.2}
model: {kind: mlp, hidden: [16]}
train: {epochs: 6, batch: 60, optimizer: {kind: Adam, lr: 0.02}}
evaluate: {draws: [1, 3], examples: 0}
small: {train: {epochs: 2}}
paper: {table: Table 1, units: {accuracy: "%"}}
"""
MEAN_FIELD = """
extends: ../base.yaml
name: digits-mean-field
method: {kind: MeanField, prior: {kind: Normal, loc: 0.0, scale: 0.3}}
paper: {row: Mean-field, order: 2, numbers: {nll: 0.5, accuracy: 90.0}, errors: {nll: 0.01}, draws: 3}
"""
TIED = """
extends: ../base.yaml
name: digits-tied
method: {kind: KTied, rank: 2}
paper: {row: 2-tied, order: 1, numbers: {nll: 0.4}, diagnostic: [elbo, spectrum, convergence, snr], options: {layer: dense1}}
"""
TRUNCATED = MEAN_FIELD.replace(
    "row: Mean-field, order: 2", "row: 1-tied, order: 3, diagnostic: truncation, options: {rank: 1}"
)
BROKEN = (
    MEAN_FIELD.replace("digits-mean-field", "broken")
    .replace("row: Mean-field, order: 2", "row: Broken, order: 0")
    .replace("method:", "data: {name: cifar10}\nmethod:")
)


class Listener:
    """A watcher that keeps what it is told, and may stop the so-manieth training at a step, as Ctrl-C would."""

    def __init__(self, stop_at: tuple[int, int] | None = None) -> None:
        self.said: list[str] = []
        self.begun, self.stop_at = 0, stop_at

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.begun += what == "training"

    def move(self, done: int, note: str = "") -> None:
        if (self.begun, done) == self.stop_at:
            signal.raise_signal(signal.SIGINT)

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "experiments"
    (root / "toy" / "table1").mkdir(parents=True)
    (root / "toy" / "base.yaml").write_text(BASE)
    for name, text in (("mean-field", MEAN_FIELD), ("tied", TIED)):
        (root / "toy" / "table1" / f"{name}.yaml").write_text(text)
    return root


def test_a_table_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    out, listener = tmp_path / "out", Listener()
    assert reproduce("toy/table1", out, CPU, "full", [0, 1], listener, folders=[folder]) == out
    file = out / "table.md"
    assert listener.begun == 4  # two rows, two seeds
    found = json.loads((out / "table.json").read_text())
    tied, plain = found["rows"]  # in the paper's order, not the alphabet's
    assert (tied["label"], plain["label"]) == ("2-tied", "Mean-field")
    assert plain["paper"] == {"nll": 0.5, "accuracy": 90.0} and plain["seeds"] == [0, 1] and plain["draws"] == 3
    runs = [read(out / name) for name in plain["runs"]]
    assert {run.seed for run in runs} == {0, 1}
    scores = [next(e for e in run.evaluations if e.draws == 3).metrics["accuracy"] for run in runs]
    ours = plain["ours"]["accuracy"]
    assert ours["mean"] == pytest.approx(100 * sum(scores) / 2) and ours["count"] == 2
    assert ours["error"] == pytest.approx(
        100 * abs(scores[0] - scores[1]) / 2
    )  # deviation of two, over the root of two
    text = file.read_text()
    assert (
        "| Mean-field | " in text
        and "*0.5 ± 0.01*" in text
        and "full: digits; up to 300 rows, mlp (hidden 16), 6 epochs" in text
    )
    assert f"{runs[0].parameters.total:,}" in text

    again = Listener()
    before = file.read_text()
    reproduce("toy/table1", out, CPU, "full", [0, 1], again, folders=[folder])
    assert again.begun == 0, "finished runs are trained again"
    assert file.read_text() == before


def test_diagnostics_are_written_beside_the_records(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    reproduce("toy/table1/tied", out, CPU, "small", [0], folders=[folder])
    (row,) = json.loads((out / "table.json").read_text())["rows"]
    ours = {name: one["mean"] for name, one in row["ours"].items()}
    record = read(out / row["runs"][0])
    assert ours["neg_elbo"] == pytest.approx(ours["draw_nll"] + ours["kl"])
    assert ours["draw_nll"] == pytest.approx(
        ours["nll"], abs=0.05
    )  # a narrow posterior's draws agree; these are others
    assert ours["scales_2"] == pytest.approx(1.0)  # two factors explain a 2-tied posterior
    assert ours["means_2"] < 0.99 and ours["snr"] >= 1 and ours["snr_median"] >= 1
    assert ours["neg_elbo_end"] == pytest.approx(record.curve[-1]["validation_nll"] + record.curve[-1]["kl"])
    names = {Path(name).suffix for name in row["files"]}
    assert names == {".json", ".png"} and all((out / name).is_file() for name in row["files"])
    assert (
        "small: digits; up to 300 rows, mlp (hidden 16), 2 epochs - not the paper's setting"
        in (out / "table.md").read_text()
    )

    def never(name: str, case: Case) -> Any:
        raise AssertionError("what was found before is looked for again")

    monkeypatch.setattr(module, "diagnose", never)
    reproduce("toy/table1/tied", out, CPU, "small", [0], folders=[folder])


def test_truncation_uses_the_run_of_another_row(folder: Path, tmp_path: Path) -> None:
    (folder / "toy" / "table1" / "truncated.yaml").write_text(TRUNCATED)
    (folder / "toy" / "table1" / "tied.yaml").unlink()
    out, listener = tmp_path / "out", Listener()
    reproduce("toy/table1", out, CPU, "full", [0], listener, folders=[folder])
    assert listener.begun == 1
    plain, cut = json.loads((out / "table.json").read_text())["rows"]
    assert plain["runs"] == cut["runs"]
    # 64 x 16 and 16 x 10 scales become 64 + 16 and 16 + 10 numbers.
    assert plain["parameters"] - cut["ours"]["parameters"]["mean"] == 64 * 16 + 16 * 10 - (64 + 16 + 16 + 10)
    assert cut["ours"]["nll"]["mean"] != plain["ours"]["nll"]["mean"]


def test_a_failing_row_does_not_stop_the_others(folder: Path, tmp_path: Path) -> None:
    (folder / "toy" / "table1" / "broken.yaml").write_text(BROKEN)
    out, listener = tmp_path / "out", Listener()
    with pytest.raises(Incomplete, match=r"1 of 3 runs failed: broken, seed 0: FileNotFoundError: No cifar10"):
        reproduce(
            "toy/table1", out, Execution(accelerator="cpu", data_dir=tmp_path), "small", [0], listener, folders=[folder]
        )
    found = json.loads((out / "table.json").read_text())
    assert [len(row["seeds"]) for row in found["rows"]] == [0, 1, 1]
    text = (out / "table.md").read_text()
    assert "**broken, seed 0 failed:** FileNotFoundError" in text and "| Broken | - | - |" in text
    assert any("failed" in line for line in listener.said)


def test_an_interrupted_table_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped, match="step 3"):
        reproduce("toy/table1", out, CPU, "small", [0], Listener(stop_at=(2, 3)), folders=[folder])
    assert [len(row["seeds"]) for row in json.loads((out / "table.json").read_text())["rows"]] == [1, 0]
    listener = Listener()
    reproduce("toy/table1", out, CPU, "small", [0], listener, folders=[folder])
    assert listener.begun == 1 and "Resuming after step 3." in listener.said
    straight = tmp_path / "straight"
    reproduce("toy/table1/mean-field", straight, CPU, "small", [0], folders=[folder])
    (run,) = out.glob("digits-mean-field-*")
    assert read(run).digest == read(straight / run.name).digest, "an interrupted run ends elsewhere"


def test_names(folder: Path) -> None:
    assert [listed.name for listed in listings([folder])] == ["toy/table1"]
    assert [row.stem for row in find("toy/table1/t*", [folder])] == ["tied"]
    with pytest.raises(ConfigError, match="There is no table or figure 'toy/table2'; did you mean 'toy/table1'"):
        find("toy/table2", [folder])
    with pytest.raises(ConfigError, match="rank1/table2"):
        find("rank1/tabel2")
    with pytest.raises(ConfigError, match="There is no table or figure 'rank1'"):
        find("rank1")
    assert roots()
    assert any(line.split()[0] == "rank1/table2" for line in list_all())
    with pytest.raises(ValueError, match="at least one seed"):
        reproduce("toy/table1", folder, CPU, seeds=[], folders=[folder])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("paper: {row: x, numbres: {}}", "paper.numbres: Extra inputs"),
        ("paper: {row: x, units: {a: kg}}", "paper.units.a"),
        ("seed: 1", "needs a section `paper`"),
    ],
)
def test_a_wrong_paper_section_is_named(folder: Path, section: str, message: str) -> None:
    file = folder / "toy" / "table1" / "odd.yaml"
    file.write_text(section + "\n")
    with pytest.raises(ConfigError, match=message):
        find("toy/table1/odd", [folder])


def test_seeds_can_be_standard_splits() -> None:
    (row,) = find("emp/table12/yacht-emp")
    experiment = row.experiment("full", 3)
    assert (experiment.seed, experiment.data.split) == (3, 3)


# Numbers of records ----------------------------------------------------------------------------------------------------------


def record(
    accuracy: float, corrupted: dict[tuple[str, int], float], draws: tuple[int, ...] = (1, 4), **more: Any
) -> Record:
    evaluations = [
        Evaluation(data="d", role="test", draws=n, rows=100, metrics={"accuracy": accuracy, "nll": 1.0 / n}, **more)
        for n in draws
    ]
    evaluations += [
        Evaluation(
            data="d",
            role="corruption",
            corruption=name,
            severity=s,
            draws=n,
            rows=100,
            metrics={"accuracy": a, "nll": 2.0, "ece": 0.1},
        )
        for (name, s), a in corrupted.items()
        for n in draws
    ]
    return Record(
        name="r", method="m", data="d", seed=0, config={}, config_hash="h", commands=[], parameters=Parameters(plain=100, total=150),
        evaluations=evaluations, cost=Cost(train_seconds=1.0, seconds_per_epoch=1.0),
    )  # fmt: skip


def test_measured_numbers_of_a_record() -> None:
    made = record(
        0.8, {("fog", 1): 0.6, ("fog", 3): 0.4}, members=[{"nll": 1.0}, {"nll": 3.0}], diversity={"disagreement": 0.2}
    )
    assert draws_of(made, None) == 4 and draws_of(made, 3) == 1 and draws_of(made, 1) == 1
    found = measured(made, 4)
    assert found["nll"] == 0.25 and found["corrupted_accuracy"] == pytest.approx(0.5) and found["member_nll"] == 2.0
    assert found["overhead"] == 0.5 and found["disagreement"] == 0.2


def test_corruption_errors_relative_to_another_row() -> None:
    rows = {row.stem: row for row in find("emp/table5")}
    plain = Result(rows["vanilla"], 0, {}, record(0.8, {("fog", 1): 0.6, ("fog", 3): 0.4, ("snow", 1): 0.5}))
    other = Result(rows["emp"], 0, {}, record(0.8, {("fog", 1): 0.7, ("fog", 3): 0.5, ("snow", 1): 0.75}))
    found = relative_errors(other, [plain, other])
    assert found["error_fog"] == pytest.approx(80.0) and found["error_snow"] == pytest.approx(50.0)
    assert found["corruption_error"] == pytest.approx(65.0)
    assert relative_errors(other, [other]) == {}
    table = summary(Table("emp/table5", "small", [rows["emp"], rows["vanilla"]], [plain, other]))
    assert table["rows"][1]["ours"]["corruption_error"]["mean"] == pytest.approx(100.0)
    assert "97.8" in markdown(table)


def test_calibration_errors_leave_out_small_bins() -> None:
    curve = Reliability(confidence=[0.5, 0.9, 0.7], accuracy=[0.4, 0.8, 0.0], count=[40, 50, 5])
    made = Evaluation(data="d", role="test", draws=1, rows=95, metrics={}, reliability=curve)
    found = calibration_errors(made)
    assert found["ece"] == pytest.approx((40 * 0.1 + 50 * 0.1) / 95) and found["mce"] == pytest.approx(0.1)


def test_the_density_of_perfect_predictions_is_the_papers_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5 log(0.1 / 2 pi) = -2.07, which the paper prints where errors are small (Kin8nm, Naval)."""
    from types import SimpleNamespace

    import slimbayes as sb
    from slimbayes.data import Split
    from slimbayes.lab.task import Scaling

    net = sb.bayesianize(
        torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)), sb.ModelPatch(jitter=0.0, patch="norm")
    ).eval()
    torch.nn.init.ones_(net[1].weight)
    torch.nn.init.zeros_(net[1].bias)
    x = torch.linspace(-1, 1, 20)[:, None]
    mean, std = torch.tensor([5.0]), torch.tensor([3.0])
    y = mean + std * net[1](net[0](x)).detach()
    task = SimpleNamespace(test=Split(x, y), y_mean=mean, y_std=std, scaling=Scaling(), name="toy")
    experiment = SimpleNamespace(seed=0, evaluate=SimpleNamespace(batch=7))
    monkeypatch.setattr(Case, "loaded", property(lambda self: (experiment, net, task, "gaussian")))
    numbers, _ = diagnose("density", Case(tmp_path, tmp_path, draws=5, options={"precision": 0.1}))
    assert numbers["lpd"] == pytest.approx(0.5 * math.log(0.1 / (2 * math.pi)), abs=1e-5)
    assert numbers["rmse"] == pytest.approx(0.0, abs=1e-5)


def test_unknown_diagnostics_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown diagnostic 'spectrm'; did you mean 'spectrum'"):
        diagnose("spectrm", Case(None, tmp_path))
