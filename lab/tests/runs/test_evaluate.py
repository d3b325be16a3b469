"""What a trained network is judged on, against scores made by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lab_configs import (
    BASE,
    CPU,
    METHODS,
    MINE,
    ONCE,
    X,
    dense,
    experiment,
    mine,
    regression,
)
from slimbayes_lab.configs.files import merged, validate
from slimbayes_lab.data import Split
from slimbayes_lab.execution import Execution
from slimbayes_lab.finished import diagnose as cases
from slimbayes_lab.finished.diagnose import Case
from slimbayes_lab.papers.diagnostics import diagnose
from slimbayes_lab.papers.table import error_rates
from slimbayes_lab.report import record
from slimbayes_lab.runs import evaluate as other_sets
from slimbayes_lab.runs.fit import evaluate_run, fit
from slimbayes_lab.runs.predictor import Predictor, total_draws
from slimbayes_lab.runs.trained import load_run
from slimbayes_lab.tasks.task import Scaling, Task
from torch import nn

import slimbayes as sb
from slimbayes.prediction.predict import predict_prefixes

pytestmark = pytest.mark.usefixtures("unchecked_fits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(experiment(train=ONCE), tmp_path_factory.mktemp("run") / "run", CPU)


def test_scores_are_those_of_predict(tmp_path: Path) -> None:
    """The record's test scores against predictions made by hand from the saved model."""
    run = fit(experiment(method=METHODS["plain"]), tmp_path / "run", CPU)
    _, network, task, likelihood = load_run(run, CPU)
    assert isinstance(task.test, Split)
    probs = sb.predict(network, task.scaling(task.test.x)).probs
    row = record.read(run).evaluations[0]
    assert likelihood == "categorical"
    assert row.metrics["accuracy"] == pytest.approx(
        float((probs.argmax(1) == task.test.y).double().mean())
    )
    assert row.metrics["nll"] == pytest.approx(
        float(-probs.gather(1, task.test.y[:, None]).log().mean()), abs=1e-6
    )
    assert row.reliability is not None and sum(row.reliability.count) == 100
    assert row.risk_coverage is not None and row.risk_coverage.risk[
        -1
    ] == pytest.approx(1 - row.metrics["accuracy"])
    assert (
        row.risk_coverage.coverage[0] == pytest.approx(1 / 100)
        and row.risk_coverage.coverage[-1] == 1
    )


@pytest.mark.slow
def test_curves_score_likelihood_and_errors_alone_by_the_draws_of_all_scores(
    run: Path,
) -> None:
    predictor = Predictor(*load_run(run, CPU))
    (full,) = predictor.score(predictor.task.test, [1], "rows", "validation")
    (brief,) = predictor.score(
        predictor.task.test, [1], "rows", "validation", brief=True
    )
    assert brief.metrics == {name: full.metrics[name] for name in ("accuracy", "nll")}


def test_validation_rows_and_noise_in_the_targets_own_units(tmp_path: Path) -> None:
    """Gaussian targets: the record's densities and errors against a plain network's predictions by hand."""
    import math

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", X=x, y=500 + 40 * x[:, 0])
    data = {
        "name": "uci/yacht",
        "train_limit": None,
        "test_limit": None,
        "validation": 0.2,
    }
    chosen = experiment(
        data=data, method=METHODS["plain"], train={"batch": 10, "noise": 0.25}
    )
    chosen = chosen.model_copy(
        update={
            "model": experiment(model={"kind": "regression_net", "hidden": 4}).model
        }
    )
    where = Execution(accelerator="cpu", workers=0, data_dir=tmp_path)
    run = fit(chosen, tmp_path / "run", where)
    _, network, task, _ = load_run(run, where)
    assert (
        isinstance(task.validation, Split)
        and task.y_mean is not None
        and task.y_std is not None
    )
    test, validation = record.read(run).evaluations
    assert (test.role, validation.role, validation.rows) == ("test", "validation", 11)
    network.eval()
    with torch.no_grad():
        mean = task.y_mean + task.y_std * network(task.scaling(task.validation.x))
    error = (mean - (task.y_mean + task.y_std * task.validation.y)).double()
    assert validation.metrics["rmse"] == pytest.approx(
        float(error.square().mean().sqrt()), rel=1e-5
    )
    std = 0.25 * float(task.y_std)
    density = -0.5 * (error / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    assert validation.metrics["lpd"] == pytest.approx(float(density.mean()), rel=1e-5)


def test_published_corruptions_are_used_where_they_are_and_damaged_ones_are_told(
    tmp_path: Path,
) -> None:

    from slimbayes_lab.runs.evaluate import _published

    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    images = (
        np.arange(10 * 32 * 32 * 3, dtype=np.uint32)
        .astype(np.uint8)
        .reshape(10, 32, 32, 3)
    )
    np.save(folder / "labels.npy", np.arange(10) % 10)
    np.save(folder / "fog.npy", images)
    where = Execution(accelerator="cpu", data_dir=tmp_path)
    found = _published("cifar10", "fog", 2, where, 224)
    assert (
        isinstance(found, Split)
        and torch.equal(found.x, torch.from_numpy(images[2:4]).permute(0, 3, 1, 2))
        and found.y.tolist() == [2, 3]
    )
    assert (
        _published("cifar10", "snow", 2, where, 224) is None
        and _published("digits", "fog", 2, where, 224) is None
    )
    (folder / "fog.npy").write_bytes((folder / "fog.npy").read_bytes()[:5000])
    with pytest.raises(ValueError, match="fog.npy"):
        _published("cifar10", "fog", 2, where, 224)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "method"),
    [
        ("imdb_lstm", "plain"),
        ("imdb_lstm", "rank1"),
        ("mortality_lstm", "mean-field"),
        ("mortality_lstm", "ensemble"),
    ],
)
def test_two_classes_from_words(network: str, method: str, tmp_path: Path) -> None:
    words = torch.randint(
        0,
        30,
        (60, 6) if network == "imdb_lstm" else (60, 5, 3),
        generator=torch.Generator().manual_seed(1),
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
        p, y = (
            sb.predict(net, task.test.x, likelihood="bernoulli").probs.double(),
            data.test.y,
        )  # type: ignore[union-attr]
        above = (p[y == 1][:, None] > p[y == 0]).double() + 0.5 * (
            p[y == 1][:, None] == p[y == 0]
        )
        assert found["auroc"] == pytest.approx(float(above.mean())) and found[
            "brier"
        ] == pytest.approx(float(2 * (p - y).square().mean()), rel=1e-5)
        assert found["nll"] == pytest.approx(
            float(-torch.where(y == 1, p, 1 - p).log().mean()), rel=1e-5
        )
        case = Case(folder, execution=CPU)
        case.__dict__["loaded"] = load_run(folder, CPU, dataset=data)
        errors = cases.scores(case, net)
        assert errors["brier_sem"] == pytest.approx(
            float((2 * (p - y).square()).std()) / math.sqrt(len(y)), rel=1e-5
        )


@pytest.mark.slow
def test_how_rows_are_batched_changes_no_score_of_a_plain_network(
    tmp_path: Path,
) -> None:
    asked = {
        "corruptions": ["gaussian_noise", "fog"],
        "severities": [3],
        "ood": ["inverted", "shuffled"],
    }
    runs = [
        record.read(
            fit(
                experiment(
                    method=METHODS["plain"],
                    train=ONCE,
                    evaluate={**asked, "batch": size},
                ),
                tmp_path / str(size),
                CPU,
            )
        )
        for size in (7, 500)
    ]
    for one, other in zip(runs[0].evaluations, runs[1].evaluations, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_numbers_of_draws_are_prefixes_of_one_another(run: Path) -> None:
    _, net, task, _ = load_run(run, CPU)
    found = predict_prefixes(net, task.scaling(task.test.x[:5]), [1, 3, 4])  # type: ignore[union-attr]
    assert torch.equal(
        found[4].samples[: found[1].count], found[1].samples
    ) and torch.equal(found[4].samples[: found[3].count], found[3].samples)


@pytest.mark.slow
def test_the_laboratory_counts_the_draws_of_each_member(run: Path) -> None:
    """In configs and records; the library counts all of them."""
    predictor = load_run(run, CPU)
    net, task = predictor.network, predictor.task
    assert sb.members(net) > 1 and total_draws(net, 3) == 3 * sb.members(net)
    for made, _ in predictor.predictions(task.test, "here", [1, 3]):
        assert {n: p.count for n, p in made.items()} == {
            n: n * sb.members(net) for n in (1, 3)
        }
        assert all(p.weights is None for p in made.values())


def test_validation_counts_every_target_as_the_test_does(tmp_path: Path) -> None:
    """Of real targets in their own units, with no draws to differ by, both judge the same rows alike."""
    data = mine(X, torch.stack([X[:, 0], X[:, 1] - 5], 1))
    chosen = experiment(
        **merged(MINE, {"data": {"validation": 0.25}}),
        train=ONCE,
        method=METHODS["plain"],
    )
    found = record.read(
        fit(chosen, tmp_path / "run", CPU, network=dense(2), dataset=data)
    )
    judged = next(e for e in found.evaluations if e.role == "validation")
    assert found.curve[-1]["validation_rmse"] == pytest.approx(
        judged.metrics["rmse"], rel=1e-5
    )


@pytest.mark.parametrize("asked", ["ood", "shift"])
def test_sets_that_do_not_fit_are_told(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        other_sets,
        "load",
        lambda *_: SimpleNamespace(
            splits={
                "test": Split(
                    torch.zeros(4, 3, 16, 16, dtype=torch.uint8),
                    torch.zeros(4, dtype=torch.int64),
                )
            }
        ),
    )
    real = {"network": dense(2), "dataset": mine(X, X[:, :2])} if asked == "ood" else {}
    with pytest.raises(ValueError, match="inverted"):
        fit(
            experiment(
                **MINE if real else {}, train=ONCE, evaluate={asked: ["inverted"]}
            ),
            tmp_path / "run",
            CPU,
            **real,
        )


@pytest.mark.slow
def test_examples_show_the_predictions_that_were_judged(tmp_path: Path) -> None:
    chosen = experiment(train=ONCE, evaluate={"draws": [1, 4]})
    folder = fit(chosen, tmp_path / "run", CPU)
    loaded = load_run(folder, CPU)
    found = torch.cat(
        [
            p[4].entropy
            for p, _ in loaded.predictions(loaded.task.test, "digits test {}", [1, 4])
        ]
    )
    assert [float(found[e.index]) for e in record.read(folder).examples] == [
        e.entropy for e in record.read(folder).examples
    ]


def test_classes_need_no_names(tmp_path: Path) -> None:
    folder = fit(
        experiment(**MINE, train=ONCE),
        tmp_path / "run",
        CPU,
        network=dense(3),
        dataset=mine(X, torch.arange(60) % 3),
    )
    assert {e.label for e in record.read(folder).examples} <= {"0", "1", "2"}


@pytest.mark.slow
def test_a_corruption_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    watcher = SimpleNamespace(
        begin=lambda *_: None, move=lambda *_: None, say=told.append
    )
    fit(
        experiment(train=ONCE, evaluate={"corruptions": ["frost"], "severities": [5]}),
        tmp_path / "run",
        CPU,
        watcher=watcher,
    )
    assert any("frost is left out" in message for message in told)


def test_records_keep_numbers_that_json_does_not_have(
    run: Path, tmp_path: Path
) -> None:
    found = record.read(run)
    odd = found.evaluations[0].model_copy(
        update={"metrics": {"nll": math.inf, "mce": math.nan, "lpd": -math.inf}}
    )
    changed = found.model_copy(update={"evaluations": [odd]})
    (tmp_path / "record.json").write_text(changed.model_dump_json())
    json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    again = record.read(tmp_path)
    assert (
        again.digest == changed.digest
        and math.isnan(again.evaluations[0].metrics["mce"])
        and again.evaluations[0].metrics["nll"] == math.inf
    )


class Exact(nn.Module):
    """Predicts the standardised target of a row exactly: it is the row's only number."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1, 1)
        nn.init.ones_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


@pytest.mark.parametrize("rows", ["test", "validation"])
def test_a_perfect_regression_has_the_likelihood_of_its_noise(
    rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mean, std, noise = torch.tensor([500.0]), torch.tensor([20.0]), 0.1
    z = torch.randn(30, 1)
    standard, own = Split(z, z), Split(z, z * std + mean)
    task = Task("mine", standard, own, standard, Scaling(), y_mean=mean, y_std=std)
    network = sb.bayesianize(
        Exact(), sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0))
    )
    loaded = Predictor(
        validate(regression(train={"noise": noise})), network, task, "gaussian"
    )
    monkeypatch.setattr(cases, "load_run", lambda *_: loaded)
    numbers, _ = diagnose("elbo", Case(tmp_path, draws=2, options={"rows": rows}))
    log_density = -float(
        torch.distributions.Normal(mean, noise * std).log_prob(mean)
    )  # in the targets' own units
    assert numbers["draw_nll"] == pytest.approx(log_density, abs=1e-4)
    assert numbers["rmse"] < 1e-3 and -numbers["lpd"] == pytest.approx(
        log_density, abs=1e-4
    )
    assert numbers["neg_elbo"] == pytest.approx(numbers["draw_nll"] + numbers["kl"])


def test_early_stopping_judges_the_best_epoch_with_its_norms(tmp_path: Path) -> None:
    """With no draws to differ by, the final score of the validation rows is the lowest of the curve."""
    train = {
        "epochs": 9,
        "early_stop": {"patience": 2},
        "optimizer": {"kind": "SGD", "lr": 0.8},
    }
    found = record.read(
        fit(
            experiment(train=train, data={"validation": 0.3}, method=METHODS["plain"]),
            tmp_path / "run",
            CPU,
        )
    )
    judged = next(e for e in found.evaluations if e.role == "validation")
    assert judged.metrics["nll"] == pytest.approx(
        min(row["validation_nll"] for row in found.curve), rel=1e-6
    )


# --- ImageNet-C ---


def write_trees(root: Path, kinds: tuple[str, ...] = ("fog", "snow")) -> None:
    """Dark and light pictures, and corrupted ones: fog makes the dark ones light, snow changes nothing."""
    from PIL import Image

    def write(folder: Path, count: int, value: int) -> None:
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (40 + i, 40), (value, value, value)).save(
                folder / f"{i}.png"
            )

    for label, name in enumerate(("dark", "light")):
        write(root / "imagenet" / "train" / name, 4, 220 * label)
        write(root / "imagenet" / "val" / name, 2, 220 * label)
        for kind in kinds:
            for severity in (1, 2):
                value = 220 if kind == "fog" else 220 * label
                write(
                    root / "ImageNet-C" / "weather" / kind / str(severity) / name,
                    2,
                    value,
                )


def folders(**changes: Any) -> dict[str, Any]:
    return merged(BASE, merged({
        "data": {"name": "imagenet", "image_size": 28, "train_limit": None, "test_limit": None},
        "method": {"kind": "Deterministic"}, "augment": {"kind": "resized_crop", "size": 28},
        "train": {"epochs": 12, "batch": 8, "optimizer": {"kind": "AdamW", "lr": 0.05}},
        "evaluate": {"batch": 4, "corruptions": ["fog", "snow"], "severities": [1, 2], "examples": 0},
    }, changes))  # fmt: skip


@pytest.mark.slow
def test_imagenet_c_is_scored_from_its_folders(tmp_path: Path) -> None:
    write_trees(tmp_path)
    here = replace(CPU, data_dir=tmp_path, workers=0)
    run = fit(validate(folders()), tmp_path / "run", here)
    found = {(e.corruption, e.severity): e for e in record.read(run).evaluations}
    assert set(found) == {(None, 0), ("fog", 1), ("fog", 2), ("snow", 1), ("snow", 2)}
    assert (
        found[None, 0].metrics["accuracy"] == 1
        and found["snow", 2].metrics["accuracy"] == 1
    )
    assert found["fog", 1].metrics["accuracy"] == 0.5, (
        "every picture is light in the fog"
    )
    assert found["fog", 1].data == "imagenet-c" and found["fog", 1].rows == 4
    rates = error_rates(record.read(run), 1)
    assert rates == {"clean": 0.0, "fog": [0.5, 0.5], "snow": [0.0, 0.0]}
    again = evaluate_run(
        run, ["evaluate.corruptions=[fog]", "evaluate.severities=[2]"], here
    )
    assert [(e.corruption, e.severity) for e in again.evaluations] == [
        (None, 0),
        ("fog", 2),
    ]
    assert again.evaluations[1].metrics["nll"] == found["fog", 2].metrics["nll"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda root: (root / "ImageNet-C").rename(root / "elsewhere"),
            "No imagenet-c: looked in",
        ),
        (
            lambda root: (root / "ImageNet-C/weather/snow").rename(root / "snow"),
            "asks for snow/1 and 1 more that image",
        ),
        (
            lambda root: (root / "imagenet/val/light").rename(
                root / "imagenet/val/pale"
            ),
            "class folders and 2 were exp",
        ),
    ],
)
def test_corruptions_that_are_not_there_are_refused_before_training(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    write_trees(tmp_path)
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        fit(validate(folders()), tmp_path / "run", replace(CPU, data_dir=tmp_path))
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_corrupted_pictures_of_other_classes_are_refused(tmp_path: Path) -> None:
    write_trees(tmp_path)
    for folder in (tmp_path / "ImageNet-C/weather").glob("*/*/light"):
        folder.rename(folder.with_name("pale"))
    with pytest.raises(
        ValueError, match="2 classes and imagenet 2, which differ in light, pale"
    ):
        fit(validate(folders()), tmp_path / "run", replace(CPU, data_dir=tmp_path))


@pytest.mark.slow
def test_every_network_can_be_run_once_instead_of_draws(tmp_path: Path) -> None:
    """evaluate.draws: exact, against the networks of `predict(draws="exact")`; the record has their number."""
    method = {"kind": "ModelPatch", "components": 3, "patch": "output"}
    run = fit(
        experiment(method=method, train=ONCE, evaluate={"draws": "exact"}),
        tmp_path / "run",
        CPU,
    )
    _, network, task, _ = load_run(run, CPU)
    assert isinstance(task.test, Split)
    probs = sb.predict(network, task.scaling(task.test.x), draws="exact").probs
    row = record.read(run).evaluations[0]
    assert row.draws == 3
    assert row.metrics["nll"] == pytest.approx(
        float(-probs.gather(1, task.test.y[:, None]).log().mean()), abs=1e-6
    )
    with pytest.raises(ValueError, match="no picks from given components"):
        fit(
            experiment(train=ONCE, evaluate={"draws": "exact"}), tmp_path / "other", CPU
        )
    assert not (
        tmp_path / "other" / "model"
    ).exists()  # told before anything is trained
