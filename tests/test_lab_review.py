"""The lab under odd but legal use: edges of configs, rows of one's own, resumes in a row, and faults that must be told."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from lab_configs import BASE, CPU, METHODS, experiment, weights
from test_lab_fit import EVERY_STEP, Crash, crash_after
from torch import nn
from typer.testing import CliRunner

import slimbayes as sb
from slimbayes.data import Dataset, Split
from slimbayes.lab import evaluate as evaluating
from slimbayes.lab import recipes, training
from slimbayes.lab.bars import Bars
from slimbayes.lab.checkpoints import latest_checkpoint
from slimbayes.lab.command import app
from slimbayes.lab.config import Data, Experiment
from slimbayes.lab.config_files import ConfigError, load, merged, validate
from slimbayes.lab.execution import Execution, Nobody
from slimbayes.lab.fit import Diverged, Training, fit, load_run
from slimbayes.lab.predict_file import fitted, read_rows
from slimbayes.lab.task import open_task
from slimbayes.prediction.predict import predict_prefixes
from slimbayes.report import record

ONCE: dict[str, Any] = {"epochs": 1, "batch": 50}
MINE: dict[str, Any] = {"data": {"name": "mine", "train_limit": None, "test_limit": None}, "model": {"kind": "mlp"}}
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


def mine(x: torch.Tensor, y: torch.Tensor, *classes: str) -> Dataset:
    return Dataset("mine", {"train": Split(x[:40], y[:40]), "test": Split(x[40:], y[40:])}, classes)


def dense(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def call(*words: object) -> Any:
    """The command; an error that it does not tell in words is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(experiment(train=ONCE), tmp_path_factory.mktemp("run") / "run", CPU)


def fit_without_record(chosen: Experiment, folder: Path, resume: bool = False) -> None:
    """Fit, and be killed while what was learned is judged."""
    with patch("slimbayes.lab.fit.write_record", side_effect=Crash), pytest.raises(Crash):
        fit(chosen, folder, EVERY_STEP, resume=resume)


# --- configs ---


def test_the_order_of_patterns_is_part_of_the_name() -> None:
    one, two = {"conv.*": {"kind": "Rank1", "members": 2}}, {".*": {"kind": "BatchEnsemble", "members": 2}}
    first, second = (
        validate(merged(BASE, {"method": {"kind": "ByName", "layers": layers}}))
        for layers in ({**one, **two}, {**two, **one})
    )
    assert list(first.method.build()) != list(second.method.build()) and first.hash != second.hash


def test_hashes_see_values_not_how_they_are_written() -> None:
    same = (
        {"train": {"epochs": 2.0}},
        {"seed": "0"},
        {"train": {"optimizer": {"lr": "1e-2"}}},
        {"evaluate": {"draws": (1,)}},
        {"method": {"prior": {"kind": "Normal", "loc": 1, "scale": 0.1}}},
    )
    assert {experiment(**changes).hash for changes in same} == {experiment().hash}
    other = (
        {"train": {"schedule": {"kind": "Constant", "warmup": 1}}},
        {"train": {"kl": {"kind": "Constant", "weight": 2}}},
        {"train": {"weight_decay": {}}},
        {"evaluate": {"draws": [1, 2]}},
        {"train": {"l2": {}}},
        {"include": ".*"},
    )
    assert len({experiment(**changes).hash for changes in (*other, {})}) == len(other) + 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": {"kind": "ByName", "layers": {"x": {"kind": "Rank1", "prior": {"kind": "Cauchy", "loc": 1.0, "scal": 1}}}}}, "method.layers.x.prior.scal: no such field; did you mean 'scale'?"),
        ({"augment": {"kind": "pad_crop_flip", "padd": 1}}, "augment.padd: no such field; did you mean 'pad'?"),
        pytest.param({"train": {"Epochs": 3}}, "train.Epochs: no such field; did you mean 'epochs'?"),
        pytest.param({"method": {"kind": "ByName", "layers": {"Conv": {"kind": "Rank1", "membrs": 1}}}}, "method.layers.Conv.membrs"),
        pytest.param({"train": {"l2": {"patched_weight": 1}}}, "did you mean 'patched_weights'?"),
        pytest.param({"train": {"early_stop": {"patiance": 1}}}, "did you mean 'patience'?"),
        pytest.param({"evaluate": {"draws": []}}, "evaluate.draws"),
        pytest.param({"exclude": "conv("}, "exclude"),
        pytest.param({"method": {"kind": "ByName", "layers": {}}}, "method.layers"),
        pytest.param({"train": {"optimizer": {"lr": math.inf}}}, "train.optimizer.lr"),
    ],
)  # fmt: skip
def test_faults_are_told_with_their_path(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(merged(BASE, changes))
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["extends:\n", "extends: 3\n", "extends: [1]\n", "small: 3\n"])
def test_wrong_words_beside_the_experiment_are_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(tmp_path / "c.yaml", scale="small")


@pytest.mark.parametrize("milestone", [0.0, 0.5, 0.75, 1.0, pytest.param(0.55)])
def test_rates_fall_at_the_very_step(milestone: float) -> None:
    chosen = recipes.Train(epochs=10, optimizer={"kind": "SGD"}, schedule={"kind": "Step", "milestones": [milestone]})  # type: ignore[arg-type]
    assert sum(chosen.rate(step, 10) == 1 for step in range(100)) == round(100 * milestone)


# --- training ---


def test_rows_that_are_handed_out_keep_their_targets() -> None:
    net = sb.bayesianize(dense(3), sb.MeanField(scale_init=1e-6))
    apart, rows = sb.sample(net, 10 * X[:12], draws=4, rows="split").flatten(0, 1), sb.sample(net, 10 * X[:12])[0]
    assert torch.cdist(apart, rows).argmin(1).tolist() == list(range(12))


def test_the_kl_counts_once_however_a_batch_is_cut(tmp_path: Path) -> None:
    """A large weight leaves the KL alone to decide; N is the number of rows that are trained on."""
    moves = []
    for pieces in (1, 4):
        train = {"epochs": 1, "batch": 40, "accumulate": pieces, "optimizer": {"kind": "SGD", "lr": 1e-6}}
        made = Training(
            experiment(train=train, data={"validation": 0.2}, model={"kind": "mlp", "hidden": [8]}),
            tmp_path,
            CPU,
            CPU.fabric("32"),
            Nobody(),
            None,
            None,
        )
        before, kl = (
            {n: p.detach().clone() for n, p in made.network.named_parameters() if "rho" in n},
            float(sb.kl(made.network).detach()),
        )
        made.stepper(next(made._batches(0, 0)), 0, 1e6, 1.0)
        assert before and float(made.stepper.history[0, 2]) == pytest.approx(kl / 160, rel=1e-5)
        moves.append({n: p.detach() - before[n] for n, p in made.network.named_parameters() if n in before})
    for name, moved in moves[0].items():
        torch.testing.assert_close(moved, moves[1][name], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "epoch"),
    [({"train": {"ema": 0.5}}, 4), ({"train": {"early_stop": {"patience": 3}}, "data": {"validation": 0.25}}, 3)],
)
def test_many_resumes_in_a_row(changes: dict[str, Any], epoch: int, tmp_path: Path) -> None:
    """Killed in an epoch, at an epoch's end, and while it was judged; with other checkpoints each time, and moved in between."""
    chosen = experiment(**merged({"train": {"epochs": 3}}, changes))
    whole, folder = fit(chosen, tmp_path / "whole", CPU), tmp_path / "cut"
    for place, every in ((2, 1), (2 * epoch, 2), (2 * epoch + 1, 4)):
        with pytest.MonkeyPatch.context() as patched:
            crash_after(patched, place)
            with pytest.raises(Crash):
                fit(chosen, folder, Execution(accelerator="cpu", workers=0, checkpoint_every=every), resume=True)
        folder = folder.rename(tmp_path / f"moved{place}")
    fit_without_record(chosen, folder, resume=True)
    assert (folder / "model").is_dir() and not (folder / "record.json").exists()
    fit(chosen, folder, CPU, resume=True)
    assert weights(folder) == weights(whole) and record.read(folder).digest == record.read(whole).digest
    for name in ("steps.csv", "metrics.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("execution", [CPU, EVERY_STEP], ids=["no checkpoint", "empty file"])
def test_steps_are_written_down_once(execution: Execution, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        crash_after(patched, 6 if execution is CPU else 2)
        with pytest.raises(Crash):
            fit(experiment(), tmp_path / "run", execution)
    if execution is EVERY_STEP:
        (tmp_path / "run" / "steps.csv").write_text("")
    fit(experiment(), tmp_path / "run", execution, resume=True)
    assert [line.split(",")[0] for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()] == [
        "step",
        *map(str, range(8)),
    ]


@pytest.mark.parametrize("judged", [True, False])
def test_the_cost_is_that_of_all_of_a_run(judged: bool, tmp_path: Path) -> None:
    if judged:
        fit_without_record(experiment(), tmp_path / "run")
        fit(experiment(), tmp_path / "run", EVERY_STEP, resume=True)
    else:
        fit(experiment(), tmp_path / "run", CPU, judge=False)
        assert call("evaluate", tmp_path / "run", "--accelerator", "cpu").exit_code == 0
    cost = record.read(tmp_path / "run").cost
    assert cost.train_seconds > 0 and cost.seconds_per_epoch > 0


@pytest.mark.parametrize("batch", [40, 10])
def test_weights_that_turn_nan_are_told_and_never_saved(batch: int, tmp_path: Path) -> None:
    data, net = mine(X, torch.arange(60) % 3, "a", "b", "c"), dense(3)
    net.register_forward_hook(
        lambda module, inputs, outputs: outputs + torch.sqrt(outputs * 0)
    )  # finite, with a gradient that is not
    with pytest.raises(Diverged):
        fit(
            experiment(**MINE, train={"epochs": 1, "batch": batch}),
            tmp_path / "run",
            EVERY_STEP,
            network=net,
            dataset=data,
        )
    found = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert found is None or all(bool(t.isfinite().all()) for n, t in found[0].items() if n.startswith("network/"))


def test_a_network_that_gives_no_numbers_any_more_has_diverged(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    words = ("--set", "train.optimizer={kind: SGD, lr: 1e30}", "--set", "train.batch=200", "--set", "train.epochs=1")
    assert call("fit", tmp_path / "c.yaml", "--out", tmp_path / "run", "--accelerator", "cpu", *words).exit_code == 4


def test_processes_agree_when_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    late = SimpleNamespace(
        execution=Execution(strategy="fsdp"), step=20, saved_at=0.0, folder=Path("run"), _stop_asked=lambda: False, _save=lambda: saved.append(1),
        fabric=SimpleNamespace(world_size=2, global_rank=1, broadcast=lambda value: False),
    )  # fmt: skip
    monkeypatch.setattr(training.time, "monotonic", lambda: 1e6)
    Training._between_steps(late, epoch_ends=True)  # type: ignore[arg-type]
    assert not saved, "the first process says that it is not time yet"


@pytest.mark.parametrize("ema", [None, 0.6])
def test_early_stopping_judges_the_best_epoch_with_its_norms(ema: float | None, tmp_path: Path) -> None:
    """With no draws to differ by, the final score of the validation rows is the lowest of the curve."""
    train = {"epochs": 9, "early_stop": {"patience": 2}, "optimizer": {"kind": "SGD", "lr": 0.8}, "ema": ema}
    found = record.read(
        fit(experiment(train=train, data={"validation": 0.3}, method=METHODS["plain"]), tmp_path / "run", CPU)
    )
    judged = next(e for e in found.evaluations if e.role == "validation")
    assert judged.metrics["nll"] == pytest.approx(min(row["validation_nll"] for row in found.curve), rel=1e-6)


def test_early_stopping_without_rows_to_watch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.validation"):
        fit(experiment(train=ONCE | {"early_stop": {}}, data={"validation": 0.001}), tmp_path / "run", CPU)


# --- judging ---


@pytest.mark.parametrize(
    ("network", "method"),
    [("imdb_lstm", "plain"), ("imdb_lstm", "rank1"), ("mortality_lstm", "mean-field"), ("mortality_lstm", "ensemble")],
)
def test_two_classes_from_words(network: str, method: str, tmp_path: Path) -> None:
    words = torch.randint(
        0, 30, (60, 6) if network == "imdb_lstm" else (60, 5, 3), generator=torch.Generator().manual_seed(1)
    )
    data = mine(words, (words.flatten(1)[:, 0] > 15).long(), "no", "yes")
    chosen = experiment(
        **MINE | {"model": {"kind": network, "embedding": 4, "units": 4}},
        method=METHODS[method],
        train=ONCE,
        evaluate={"draws": [1, 3]},
    )
    folder = fit(chosen, tmp_path / "run", CPU, dataset=data)
    _, net, task, likelihood = load_run(folder, CPU, dataset=data)
    found = record.read(folder).evaluations[0].metrics
    assert likelihood == "bernoulli" and {"auroc", "aucpr"} <= set(found)
    if method == "plain":
        p, y = sb.predict(net, task.test.x, likelihood="bernoulli").probs.double(), data.test.y  # type: ignore[union-attr]
        above = (p[y == 1][:, None] > p[y == 0]).double() + 0.5 * (p[y == 1][:, None] == p[y == 0])
        assert found["auroc"] == pytest.approx(float(above.mean())) and found["brier"] == pytest.approx(
            float(2 * (p - y).square().mean()), rel=1e-5
        )
        assert found["nll"] == pytest.approx(float(-torch.where(y == 1, p, 1 - p).log().mean()), rel=1e-5)


def test_how_rows_are_batched_changes_no_score_of_a_plain_network(tmp_path: Path) -> None:
    asked = {"corruptions": ["gaussian_noise", "fog"], "severities": [3], "ood": ["inverted", "shuffled"]}
    runs = [
        record.read(
            fit(
                experiment(method=METHODS["plain"], train=ONCE, evaluate={**asked, "batch": size}),
                tmp_path / str(size),
                CPU,
            )
        )
        for size in (7, 500)
    ]
    for one, other in zip(runs[0].evaluations, runs[1].evaluations, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-6)


def test_numbers_of_draws_are_prefixes_of_one_another(run: Path) -> None:
    _, net, task, _ = load_run(run, CPU)
    found = predict_prefixes(net, task.scaling(task.test.x[:5]), [1, 3, 4])  # type: ignore[union-attr]
    assert torch.equal(found[4].samples[: found[1].count], found[1].samples) and torch.equal(
        found[4].samples[: found[3].count], found[3].samples
    )


def test_validation_counts_every_target_as_the_test_does(tmp_path: Path) -> None:
    """Of real targets in their own units, with no draws to differ by, both judge the same rows alike."""
    data = mine(X, torch.stack([X[:, 0], X[:, 1] - 5], 1))
    chosen = experiment(**merged(MINE, {"data": {"validation": 0.25}}), train=ONCE, method=METHODS["plain"])
    found = record.read(fit(chosen, tmp_path / "run", CPU, network=dense(2), dataset=data))
    judged = next(e for e in found.evaluations if e.role == "validation")
    assert found.curve[-1]["validation_rmse"] == pytest.approx(judged.metrics["rmse"], rel=1e-5)


@pytest.mark.parametrize("asked", ["ood", "shift"])
def test_sets_that_do_not_fit_are_told(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        evaluating,
        "load",
        lambda *_: SimpleNamespace(
            splits={"test": Split(torch.zeros(4, 3, 16, 16, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))}
        ),
    )
    real = {"network": dense(2), "dataset": mine(X, X[:, :2])} if asked == "ood" else {}
    with pytest.raises(ValueError, match="inverted"):
        fit(
            experiment(**MINE if real else {}, train=ONCE, evaluate={asked: ["inverted"]}),
            tmp_path / "run",
            CPU,
            **real,
        )


def test_examples_show_the_predictions_that_were_judged(tmp_path: Path) -> None:
    chosen = experiment(train=ONCE, evaluate={"draws": [1, 4]})
    folder = fit(chosen, tmp_path / "run", CPU)
    loaded = load_run(folder, CPU)
    found = torch.cat([p[4].entropy for p, _ in loaded.predictions(loaded.task.test, "digits test {}", [1, 4])])
    assert [float(found[e.index]) for e in record.read(folder).examples] == [
        e.entropy for e in record.read(folder).examples
    ]


def test_classes_need_no_names(tmp_path: Path) -> None:
    folder = fit(
        experiment(**MINE, train=ONCE), tmp_path / "run", CPU, network=dense(3), dataset=mine(X, torch.arange(60) % 3)
    )
    assert {e.label for e in record.read(folder).examples} <= {"0", "1", "2"}


def test_a_corruption_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    watcher = SimpleNamespace(begin=lambda *_: None, move=lambda *_: None, say=told.append)
    fit(
        experiment(train=ONCE, evaluate={"corruptions": ["frost"], "severities": [5]}),
        tmp_path / "run",
        CPU,
        watcher=watcher,
    )
    assert any("frost is left out" in message for message in told)


def test_records_keep_numbers_that_json_does_not_have(run: Path, tmp_path: Path) -> None:
    found = record.read(run)
    odd = found.evaluations[0].model_copy(update={"metrics": {"nll": math.inf, "mce": math.nan, "lpd": -math.inf}})
    changed = found.model_copy(update={"evaluations": [odd]})
    (tmp_path / "record.json").write_text(changed.model_dump_json())
    json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    again = record.read(tmp_path)
    assert (
        again.digest == changed.digest
        and math.isnan(again.evaluations[0].metrics["mce"])
        and again.evaluations[0].metrics["nll"] == math.inf
    )


# --- the command ---


@pytest.mark.parametrize("name", ["try [/b]", "try [k=4]"])
def test_names_are_no_markup(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Bars(name) as bars:
        bars.begin("training", 1)
        bars.say(f"{name} is slow")
    assert capsys.readouterr().err.count(name) == 2


IMAGES = {
    "last": np.zeros((2, 8, 8, 1), "uint8"), "flat": np.zeros((2, 8, 8), "uint8"), "half": np.ones((2, 1, 8, 8), "float16"), "int": np.full((2, 1, 8, 8), 255),
    "large": np.full((2, 1, 8, 8), 300), "negative": np.full((2, 1, 8, 8), -1), "complex": np.zeros((2, 1, 8, 8), "complex64"),
    "empty": np.zeros((0, 1, 8, 8), "uint8"), "none": np.zeros((0, 1, 8, 8), "float32"), "text": np.array(["a"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["last", "flat", "half", "int"])
def test_images_come_in_many_ways(kind: str, run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES[kind])
    assert call("predict", run, tmp_path / "x.npy", "-o", tmp_path / "p.csv", "--accelerator", "cpu").exit_code == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("kind", ["large", "negative", "complex", "empty", "none", "text", "damaged"])
def test_rows_that_cannot_be_judged_are_refused(kind: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / ("x.npz" if kind == "damaged" else "x.npy")
    if kind == "damaged":
        np.savez(file, x=IMAGES["last"])
        data = bytearray(file.read_bytes())
        data[250] ^= 1  # among the array's numbers
        file.write_bytes(data)
    else:
        np.save(file, IMAGES[kind])
    assert call("predict", run, file, "-o", tmp_path / "p.csv", "--accelerator", "cpu").exit_code == 1


@pytest.mark.parametrize("word", ["3.5", "99", "-1"])
def test_words_that_are_none_are_refused(word: str) -> None:
    task = open_task(Data(name="mine"), None, mine(torch.randint(0, 30, (60, 2)), torch.arange(60) % 2, "no", "yes"))
    assert not fitted(torch.tensor([[1.0, 2.0]]), task, "x.csv").is_floating_point()
    with pytest.raises(ValueError, match="row 0"):
        fitted(torch.tensor([[1.0, float(word)]]), task, "x.csv")


def test_a_blank_last_line_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n\n")
    assert read_rows(tmp_path / "x.csv").tolist() == [[1.0, 2.0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    assert call("fit", tmp_path / "c.yaml", "--out", tmp_path / "run", "--accelerator", "cuda").exit_code in (1, 2)
