"""Reproducing tables: a tiny paper on digits from end to end, interrupted, resumed, and with a row that fails."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from slimbayes_lab.configs.files import ConfigError
from slimbayes_lab.execution import Execution
from slimbayes_lab.finished.diagnose import Case
from slimbayes_lab.papers import reproduce as module
from slimbayes_lab.papers.reproduce import Incomplete, parse_seeds, reproduce
from slimbayes_lab.papers.rows import find, list_all, listings, roots
from slimbayes_lab.papers.status import overview, row_statuses, status
from slimbayes_lab.report.record import ParameterCounts, Record, RunCost, read, write
from slimbayes_lab.runs.fit import evaluate_run
from slimbayes_lab.runs.training import Stopped

from slimbayes.metrics.corruption import corruption_errors

CPU = Execution(accelerator="cpu")
BASE = """
data: {name: digits, train_limit: 300, test_limit: 200, validation: 0.2}
model: {kind: mlp, hidden: [16]}
train: {epochs: 6, batch: 60, optimizer: {kind: Adam, lr: 0.02}}
evaluate: {draws: [1, 3], examples: 0}
small: {train: {epochs: 2}}
paper: {units: {accuracy: "%"}}
rows:
  mean-field:
    name: digits-mean-field
    method: {kind: MeanField, prior: {kind: Normal, loc: 0.0, scale: 0.3}}
"""
HEAD = "extends: base.yaml\npaper: {table: Table 1, columns: [nll, accuracy]}\nrows:\n"
MEAN_FIELD = "  mean-field: {paper: {row: Mean-field, numbers: [0.5, 90.0], errors: [0.01], draws: 3}}\n"
TIED = """  tied:
    name: digits-tied
    method: {kind: KTied, rank: 2}
    paper:
      row: 2-tied
      numbers: {nll: 0.4}
      diagnostic: [elbo, spectrum, convergence, snr]
      options: {layer: dense1}
"""
TRUNCATED = """  truncated:
    extends: "#mean-field"
    paper: {row: 1-tied, diagnostic: truncation, options: {rank: 1}}
"""
BROKEN = """  broken:
    extends: "#mean-field"
    name: broken
    data: {name: cifar10}
    paper: {row: Broken}
"""
pytestmark = pytest.mark.usefixtures("unchecked_fits")


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


def write_table(root: Path, *rows: str) -> None:
    (root / "toy" / "table1.yaml").write_text(HEAD + "".join(rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "experiments"
    (root / "toy").mkdir(parents=True)
    (root / "toy" / "base.yaml").write_text(BASE)
    write_table(root, MEAN_FIELD, TIED)
    return root


def test_records_of_another_config_say_what_differs(
    folder: Path, tmp_path: Path
) -> None:
    write_table(folder, MEAN_FIELD)
    experiment = find("toy/table1", [folder])[0].experiment("small")
    tree = experiment.resolved
    size, cost = (
        ParameterCounts(plain=1, total=1),
        RunCost(train_seconds=1, seconds_per_epoch=1),
    )
    record = Record(
        name=experiment.name, method="m", data="digits", seed=0, config=tree | {"train": tree["train"] | {"batch": 50}},
        config_hash="", commands=[], parameters=size, cost=cost,
    )  # fmt: skip
    (tmp_path / "odd").mkdir()
    write(tmp_path / "odd" / "record.json", record)
    (kept,) = row_statuses(find("toy/table1", [folder]), [tmp_path / "odd"])
    assert kept.seeds == {} and kept.remarks == [
        "odd is another config: it differs in train.batch 50 -> 60"
    ]
    train = record.config["train"] | {"gone": 1}  # an option that is no more
    odd = record.model_copy(update={"config": tree | {"train": train}})
    write(tmp_path / "odd" / "record.json", odd)
    (kept,) = row_statuses(find("toy/table1", [folder]), [tmp_path / "odd"])
    assert "train.gone 1 -> None" in kept.remarks[0]


@pytest.mark.slow
def test_status_of_kept_results() -> None:
    lines = status("rank1/table2", Path("/nowhere"))
    assert lines[1].split() == ["deterministic", "none", "seed", "0"]
    assert status("emp/figure3", Path("/nowhere"))[1].split() == [
        "prior-functions",
        "none",
        "seed",
        "0",
    ]


@pytest.mark.parametrize("text", ["a", "", "1,", "-1", "1-", "0..9"])
def test_seeds_that_are_none_are_told(text: str) -> None:
    assert parse_seeds("3,0-2") == [3, 0, 1, 2]
    with pytest.raises(ValueError, match="--seeds takes whole numbers"):
        parse_seeds(text)


@pytest.mark.slow
def test_an_overview_counts_rows_with_records() -> None:
    found = {
        line.split()[0]: line.split()[1:]
        for line in overview(
            [Path(__file__).parents[3] / "lab" / "results" / "rank1.jsonl"]
        )
    }
    assert found["rank1/table2"] == ["8", "0", "8"] and found["rank1/table3"][2] == "0"


@pytest.mark.slow
def test_figures_have_a_page_of_their_runs(folder: Path, tmp_path: Path) -> None:
    text = (HEAD + MEAN_FIELD).replace("table: Table 1", "figure: Figure 1")
    (folder / "toy" / "figure1.yaml").write_text(text)
    out = reproduce(
        "toy/figure1", tmp_path / "out", CPU, "small", [0], folders=[folder]
    )
    page = (out / "page.html").read_text()
    assert "toy/figure1: Figure 1" in page and "digits-mean-field" in page


@pytest.mark.slow
def test_a_table_from_end_to_end(folder: Path, tmp_path: Path) -> None:
    out, listener = tmp_path / "out", Listener()
    assert (
        reproduce("toy/table1", out, CPU, "full", [0, 1], listener, folders=[folder])
        == out
    )
    file = out / "table.md"
    assert listener.begun == 4  # two rows, two seeds
    found = json.loads((out / "table.json").read_text())
    plain, tied = found["rows"]
    assert (plain["label"], tied["label"]) == ("Mean-field", "2-tied")
    assert (
        plain["paper"] == {"nll": 0.5, "accuracy": 90.0}
        and plain["seeds"] == [0, 1]
        and plain["draws"] == 3
    )
    runs = [read(out / name) for name in plain["runs"]]
    assert {run.seed for run in runs} == {0, 1}
    scores = [
        next(e for e in run.evaluations if e.draws == 3).metrics["accuracy"]
        for run in runs
    ]
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


@pytest.mark.slow
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
    assert ours["scales_2"] == pytest.approx(
        1.0
    )  # two factors explain a 2-tied posterior
    assert ours["means_2"] < 0.99 and ours["snr"] >= 1 and ours["snr_median"] >= 1
    assert ours["neg_elbo_end"] == pytest.approx(
        record.curve[-1]["validation_nll"] + record.curve[-1]["kl"]
    )
    names = {Path(name).suffix for name in row["files"]}
    assert names == {".json", ".png"} and all(
        (out / name).is_file() for name in row["files"]
    )
    assert (
        "small: digits; up to 300 rows, mlp (hidden 16), 2 epochs - not the paper's setting"
        in (out / "table.md").read_text()
    )

    def never(name: str, case: Case) -> Any:
        raise AssertionError("what was found before is looked for again")

    monkeypatch.setattr(module, "diagnose", never)
    reproduce("toy/table1/tied", out, CPU, "small", [0], folders=[folder])


@pytest.mark.slow
def test_truncation_uses_the_run_of_another_row(folder: Path, tmp_path: Path) -> None:
    write_table(folder, MEAN_FIELD, TRUNCATED)
    out, listener = tmp_path / "out", Listener()
    reproduce("toy/table1", out, CPU, "full", [0], listener, folders=[folder])
    assert listener.begun == 1
    plain, cut = json.loads((out / "table.json").read_text())["rows"]
    assert plain["runs"] == cut["runs"]
    # 64 x 16 and 16 x 10 scales become 64 + 16 and 16 + 10 numbers.
    assert plain["parameters"] - cut["ours"]["parameters"][
        "mean"
    ] == 64 * 16 + 16 * 10 - (64 + 16 + 16 + 10)
    assert cut["ours"]["nll"]["mean"] != plain["ours"]["nll"]["mean"]


@pytest.mark.slow
def test_a_failing_row_does_not_stop_the_others(folder: Path, tmp_path: Path) -> None:
    write_table(folder, MEAN_FIELD, BROKEN, TIED)
    out, listener = tmp_path / "out", Listener()
    with pytest.raises(
        Incomplete,
        match=r"1 of 3 runs failed: broken, seed 0: FileNotFoundError: No cifar10",
    ):
        reproduce(
            "toy/table1",
            out,
            Execution(accelerator="cpu", data_dir=tmp_path),
            "small",
            [0],
            listener,
            folders=[folder],
        )
    found = json.loads((out / "table.json").read_text())
    assert [len(row["seeds"]) for row in found["rows"]] == [1, 0, 1]
    text = (out / "table.md").read_text()
    assert (
        "**broken, seed 0 failed:** FileNotFoundError" in text
        and "| Broken | - | - |" in text
    )
    assert any("failed" in line for line in listener.said)


@pytest.mark.slow
def test_an_interrupted_table_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped, match="step 3"):
        reproduce(
            "toy/table1",
            out,
            CPU,
            "small",
            [0],
            Listener(stop_at=(2, 3)),
            folders=[folder],
        )
    assert [
        len(row["seeds"])
        for row in json.loads((out / "table.json").read_text())["rows"]
    ] == [1, 0]
    listener = Listener()
    reproduce("toy/table1", out, CPU, "small", [0], listener, folders=[folder])
    assert listener.begun == 1 and "Resuming after step 3." in listener.said
    straight = tmp_path / "straight"
    reproduce("toy/table1/tied", straight, CPU, "small", [0], folders=[folder])
    (run,) = out.glob("digits-tied-*")
    assert read(run).digest == read(straight / run.name).digest, (
        "an interrupted run ends elsewhere"
    )


@pytest.mark.slow
def test_names(folder: Path) -> None:
    assert listings([folder]) == {"toy/table1": ("Table 1", 2)}
    assert [row.stem for row in find("toy/table1/t*", [folder])] == ["tied"]
    with pytest.raises(
        ConfigError,
        match="There is no table or figure 'toy/table2'; did you mean 'toy/table1'",
    ):
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
        ("paper: {row: x, numbers: [1.0]}", "there are 2 columns, but 1 numbers"),
        ("seed: 1", "paper.row: Field required"),
    ],
)
def test_a_wrong_paper_section_is_named(
    folder: Path, section: str, message: str
) -> None:
    write_table(folder, f"  odd: {{{section}}}\n")
    with pytest.raises(ConfigError, match=message):
        find("toy/table1/odd", [folder])


def test_a_row_without_a_paper_is_no_row_of_a_table(folder: Path) -> None:
    (folder / "toy" / "other.yaml").write_text("rows: {a: {seed: 1}}\n")
    with pytest.raises(ConfigError, match="needs a section `paper`"):
        find("toy/other", [folder])
    assert "toy/other" not in listings([folder])


CORRUPTED = """extends: base.yaml
paper: {table: Table 1, diagnostic: corruption, relative_to: plain, shows: [corruption_error, relative_error_contrast]}
rows:
  plain: {name: plain, method: {kind: Deterministic}, paper: {row: Plain, options: &two
    {corruptions: [defocus_blur, contrast], severities: [4, 5]}}}
  mean-field: {paper: {row: Mean-field, options: *two, draws: 3}}
"""


@pytest.mark.slow
def test_corrupted_rows_of_a_run_that_was_not_asked_for_them(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "toy" / "table1.yaml").write_text(CORRUPTED)
    out = reproduce("toy/table1", tmp_path / "out", CPU, folders=[folder])
    found = {
        row["row"]: row for row in json.loads((out / "table.json").read_text())["rows"]
    }
    plain, ours = found["plain"], found["mean-field"]
    assert plain["ours"]["corruption_error"]["mean"] == pytest.approx(100)
    rates = {}
    for row, draws in ((plain, 1), (ours, 3)):
        run = out / row["runs"][0]
        clean = next(
            e for e in read(run).evaluations if e.role == "test" and e.draws == draws
        )
        assert not [e for e in read(run).evaluations if e.role == "corruption"]
        overrides = [
            "evaluate.corruptions=[defocus_blur, contrast]",
            "evaluate.severities=[4, 5]",
        ]
        made = [
            e
            for e in evaluate_run(run, overrides, CPU).evaluations
            if e.role == "corruption" and e.draws == draws
        ]
        rates[row["row"]] = {"clean": 1 - clean.metrics["accuracy"]} | {
            name: [1 - e.metrics["accuracy"] for e in made if e.corruption == name]
            for name in ("defocus_blur", "contrast")
        }
    expected = corruption_errors(
        rates["mean-field"], {k: v for k, v in rates["plain"].items() if k != "clean"}
    )
    assert ours["ours"]["corruption_error"]["mean"] == pytest.approx(expected.mce)
    assert ours["ours"]["error_contrast"]["mean"] == pytest.approx(
        expected.by_corruption["contrast"]
    )
    relative = corruption_errors(rates["mean-field"], rates["plain"])
    assert ours["ours"]["relative_error_contrast"]["mean"] == pytest.approx(
        relative.relative_by_corruption["contrast"]
    )


def test_seeds_beyond_the_splits_of_a_set_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def note(row: Any, seed: int, *rest: Any) -> Any:
        asked.append((row.stem, seed))
        raise ValueError("enough")

    monkeypatch.setattr(module, "_run", note)
    for table in ("emp/table12/protein-emp", "emp/table12/yacht-emp"):
        with pytest.raises(Incomplete):
            reproduce(table, tmp_path / "out", seeds=[0, 4, 5, 19])
    assert asked == [
        ("protein-emp", 0),
        ("protein-emp", 4),
        *(("yacht-emp", seed) for seed in (0, 4, 5, 19)),
    ]


def test_seeds_can_be_standard_splits() -> None:
    (row,) = find("emp/table12/yacht-emp")
    experiment = row.experiment("full", 3)
    assert (experiment.seed, experiment.data.split) == (3, 3)
