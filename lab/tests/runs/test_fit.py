"""Runs of the lab: what they leave, that recipes do what they say, and that numbers that are not finite are found."""

import copy
import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lab_configs import (
    BASE,
    CPU,
    EVERY_STEP,
    METHODS,
    MINE,
    ONCE,
    X,
    call,
    dense,
    experiment,
    mine,
    weights,
)
from scipy import stats
from slimbayes_lab.configs.files import merged, validate
from slimbayes_lab.configs.train import Train
from slimbayes_lab.execution import Execution
from slimbayes_lab.report import record
from slimbayes_lab.runs.checkpoints import latest_checkpoint
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.folder import (
    RunError,
    default_folder,
    open_run,
    read_config,
    read_curve,
)
from slimbayes_lab.runs.predictor import build_network
from slimbayes_lab.runs.step import TrainingStep
from slimbayes_lab.runs.training import Diverged, Training
from slimbayes_lab.runs.watchers import Bars, Watcher
from slimbayes_lab.tasks.task import open_task
from torch import nn

import slimbayes as sb
from slimbayes.seeds import key

pytestmark = pytest.mark.usefixtures("unchecked_fits")
KEY = 4238720567276977853


@pytest.mark.slow
def test_equal_configs_give_equal_records_and_other_seeds_others(
    tmp_path: Path,
) -> None:
    runs = [
        fit(experiment(seed=seed), tmp_path / str(i), CPU)
        for i, seed in enumerate((0, 0, 1))
    ]
    digests = [record.read(run).digest for run in runs]
    assert digests[0] == digests[1] != digests[2]
    assert weights(runs[0]) == weights(runs[1]) != weights(runs[2])


@pytest.mark.slow
def test_a_run_directory_says_everything(tmp_path: Path) -> None:
    chosen = experiment(
        evaluate={
            "draws": [1, 3],
            "corruptions": ["gaussian_noise"],
            "severities": [1, 5],
            "ood": ["inverted"],
        }
    )
    run = fit(chosen, tmp_path / "run", CPU)
    files = {p.name for p in run.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "steps.csv",
        "posterior",
        "model",
        "record.json",
    } <= files
    assert read_config(run).hash == chosen.hash
    found = record.read(run)
    assert (found.config_hash, found.seed, found.data, found.status) == (
        chosen.hash,
        0,
        "digits",
        "finished",
    )
    assert {"torch", "python", "cpu"} <= set(found.environment)
    with open(run / "metrics.csv") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    steps = (run / "steps.csv").read_text().splitlines()
    assert len(steps) == 1 + 2 * 4
    first = [float(line.split(",")[1]) for line in steps[1:5]]
    assert float(rows[0]["loss"]) == pytest.approx(sum(first) / 4)
    asked = [(e.role, e.draws, e.severity) for e in found.evaluations]
    assert asked == [
        ("test", 1, 0),
        ("test", 3, 0),
        ("corruption", 1, 1),
        ("corruption", 3, 1),
        ("corruption", 1, 5),
        ("corruption", 3, 5),
        ("ood", 1, 0),
        ("ood", 3, 0),
    ]
    assert [e.sure for e in found.examples] == ["most"] * 2 + ["least"] * 2
    assert found.examples[0].entropy <= found.examples[-1].entropy and (
        found.examples[0].image or ""
    ).startswith("data:image/png;base64,")


@pytest.mark.slow
def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    run = fit(experiment(), tmp_path / "run", CPU)
    before = (run / "record.json").stat().st_mtime_ns
    assert (
        fit(experiment(), run, CPU) == run
        and (run / "record.json").stat().st_mtime_ns == before
    )


@pytest.mark.slow
def test_training_lowers_the_loss_for_every_part_of_the_recipe(tmp_path: Path) -> None:
    run = fit(
        experiment(
            train={
                "epochs": 6,
                "rows": "split",
                "form": "mixture",
                "kl": {"kind": "Linear"},
                "posterior_lr": 0.5,
            }
        ),
        tmp_path / "r",
        CPU,
    )
    nll = [row["nll"] for row in record.read(run).curve]
    assert nll[-1] < 0.7 * nll[0]


def test_early_stopping_keeps_the_best_epoch(tmp_path: Path) -> None:
    # A rate this high ruins the network soon: later epochs are worse than some earlier one.
    train = {
        "epochs": 12,
        "early_stop": {"patience": 2},
        "optimizer": {"kind": "SGD", "lr": 0.8},
    }
    run = fit(
        experiment(train=train, data={"validation": 0.3}, method=METHODS["plain"]),
        tmp_path / "run",
        CPU,
    )
    found = record.read(run)
    scores = [row["validation_nll"] for row in found.curve]
    assert found.status == "stopped early" and len(scores) < 12
    assert len(scores) - (scores.index(min(scores)) + 1) == 2


def test_nan_in_a_layer_stops_and_names_the_layer_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrainingStep.__call__

    def poison(self: TrainingStep, batch: Any, step: int, *rest: Any) -> None:
        if step == 5:
            with torch.no_grad():
                self.network.get_parameter("conv2.weight")[0, 0, 0, 0] = float("inf")
        real(self, batch, step, *rest)

    monkeypatch.setattr(TrainingStep, "__call__", poison)
    with pytest.raises(
        Diverged,
        match=r"step 5 is not finite. conv2: 1 of \d+ values of its own weight, not of a",
    ):
        fit(experiment(method=METHODS["plain"]), tmp_path / "run", EVERY_STEP)
    found = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert (
        found is not None
        and found[1]["step"] == 5
        and all(t.isfinite().all() for t in found[0].values() if t.is_floating_point())
    )


def test_an_overflowing_layer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Training.__init__

    def huge(self: Training, *args: Any) -> None:
        real(self, *args)
        with torch.no_grad():
            self.network.get_parameter("dense.weight").fill_(3e38)

    monkeypatch.setattr(Training, "__init__", huge)
    with pytest.raises(
        Diverged,
        match="step 0 is not finite. The first layer whose output is NaN or infinite is 'dense'",
    ):
        fit(experiment(method=METHODS["plain"]), tmp_path / "run", CPU)


def test_an_unwritable_run_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=r"file is a file, and .* must be a folder\. Choose another"
    ):
        fit(experiment(), tmp_path / "file" / "run", CPU)


@pytest.mark.slow
def test_two_processes_cannot_share_a_run_directory(tmp_path: Path) -> None:
    with (
        open_run(tmp_path / "run", experiment(), resume=False),
        pytest.raises(RunError, match="in use"),
    ):
        fit(experiment(), tmp_path / "run", CPU)
    fit(experiment(), tmp_path / "run", CPU)


def test_keys_are_stable_and_differ() -> None:
    assert key(0, "step", 1) == KEY, (
        "another function of the seed would change every result"
    )
    assert len({key(s, "step", i) for s in range(10) for i in range(100)}) == 1000


def test_default_folder_names_the_config() -> None:
    chosen = experiment(name="a / <b>")
    assert default_folder(chosen).name == f"a-b-{chosen.hash}"


@pytest.mark.slow
def test_curves_for_tensorboard(tmp_path: Path) -> None:
    event = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    run = fit(
        experiment(),
        tmp_path / "run",
        Execution(accelerator="cpu", workers=0, tensorboard=True),
    )
    found = event.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("loss")] == [4, 8]
    assert found.Scalars("loss")[1].value == pytest.approx(
        record.read(run).curve[1]["loss"], rel=1e-6
    )


def test_rows_that_are_handed_out_keep_their_targets() -> None:
    net = sb.bayesianize(dense(3), sb.MeanField(scale_init=1e-6))
    apart, rows = (
        sb.sample(net, 10 * X[:12], draws=4, rows="split").flatten(0, 1),
        sb.sample(net, 10 * X[:12])[0],
    )
    assert torch.cdist(apart, rows).argmin(1).tolist() == list(range(12))


def test_the_kl_counts_once_whatever_the_batch(tmp_path: Path) -> None:
    """A large weight leaves the KL alone to decide; N is the number of rows that are trained on."""
    moves = []
    for batch in (40, 10):
        train = {
            "epochs": 1,
            "batch": batch,
            "optimizer": {"kind": "SGD", "lr": 1e-6},
        }
        made = Training(
            experiment(
                train=train,
                data={"validation": 0.2},
                model={"kind": "mlp", "hidden": [8]},
            ),
            tmp_path,
            CPU,
            CPU.fabric("32"),
            Watcher(),
            None,
            None,
        )
        before, kl = (
            {
                n: p.detach().clone()
                for n, p in made.network.named_parameters()
                if "rho" in n
            },
            float(sb.kl(made.network).detach()),
        )
        made.stepper(next(made._batches(0, 0)), 0, 1e6, 1.0)
        assert before and float(made.stepper.history[0, 2]) == pytest.approx(
            kl / 160, rel=1e-5
        )
        moves.append(
            {
                n: p.detach() - before[n]
                for n, p in made.network.named_parameters()
                if n in before
            }
        )
    for name, moved in moves[0].items():
        torch.testing.assert_close(moved, moves[1][name], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("batch", [40, 10])
def test_weights_that_turn_nan_are_told_and_never_saved(
    batch: int, tmp_path: Path
) -> None:
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
    assert found is None or all(
        bool(t.isfinite().all())
        for n, t in found[0].items()
        if n.startswith("network/")
    )


def test_a_network_that_gives_no_numbers_any_more_has_diverged(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    words = (
        "--set",
        "train.optimizer={kind: SGD, lr: 1e30}",
        "--set",
        "train.batch=200",
        "--set",
        "train.epochs=1",
    )
    assert (
        call(
            "fit",
            tmp_path / "c.yaml",
            "--out",
            tmp_path / "run",
            "--accelerator",
            "cpu",
            *words,
        ).exit_code
        == 4
    )


def test_early_stopping_without_rows_to_watch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.validation"):
        fit(
            experiment(train=ONCE | {"early_stop": {}}, data={"validation": 0.001}),
            tmp_path / "run",
            CPU,
        )


@pytest.mark.parametrize("name", ["try [/b]", "try [k=4]"])
def test_names_are_no_markup(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bars(name) as bars:
        bars.begin("training", 1)
        bars.say(f"{name} is slow")
    assert capsys.readouterr().err.count(name) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    done = call(
        "fit", tmp_path / "c.yaml", "--out", tmp_path / "run", "--accelerator", "cuda"
    )
    assert (
        done.exit_code == 1
        and "no GPU" in done.output
        and not (tmp_path / "run").exists()
    )
    for words in (
        ["evaluate"],
        ["diagnose"],
        ["export"],
        ["predict", tmp_path / "x.csv", "-o", tmp_path / "p.csv"],
    ):
        done = call(
            words[0], tmp_path / "run", *words[1:], "--accelerator", "cuda"
        )  # not on another device in silence
        assert done.exit_code == 1 and "no GPU" in done.output


# Deep ensembles


def members_of(network: nn.Module) -> list[nn.Module]:
    """The networks of an ensemble as plain modules of their own."""
    return [
        sb.debayesianize(copy.deepcopy(network)),
        *(copy.deepcopy(m) for m in network.posterior["members"].others),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {
            "optimizer": {"kind": "SGD", "lr": 0.1},
            "weight_decay": 0.01,
            "schedule": {"kind": "Cosine"},
        },
        {"clip": 0.05, "l2": {"shared_weights": 0.01}},
    ],
)
def test_an_ensemble_trains_as_its_networks_would_apart(
    tmp_path: Path, train: dict[str, Any]
) -> None:
    """Step for step: after each, every member's weights and batch-norm statistics are those of the network that is
    trained alone from the same start, on the same rows."""
    small = {"data": {"train_limit": 60}, "train": {"batch": 20} | train}
    chosen = experiment(method={"kind": "Ensemble", "members": 3}, **small)
    fabric = CPU.fabric("32")
    execution = {
        "folder": tmp_path,
        "execution": CPU,
        "fabric": fabric,
        "watcher": Watcher(),
        "dataset": None,
    }
    together = Training(chosen, network=None, **execution)
    starts = members_of(together.network)
    apart = [
        Training(
            experiment(method={"kind": "Deterministic"}, **small),
            network=start,
            **execution,
        )
        for start in starts
    ]
    for step in range(5):
        batch = together._batch_of(step)
        for training in (together, *apart):
            training.network.train()
            training.stepper(batch, step, 1.0, 1.0)
        for member, training in zip(members_of(together.network), apart, strict=True):
            for name, tensor in (
                sb.debayesianize(copy.deepcopy(training.network)).state_dict().items()
            ):
                torch.testing.assert_close(
                    member.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name
                )
    losses = torch.stack([training.stepper.history for training in apart])
    torch.testing.assert_close(together.stepper.history, losses.mean(0))
    assert not torch.equal(
        *(m.state_dict()["dense.weight"] for m in members_of(together.network)[:2])
    )


def test_members_of_the_labs_networks_start_by_the_networks_own_initialiser() -> None:
    """He's normal rule for kernels and zero biases, in every member: torch's own start is a uniform one."""
    chosen = experiment(method={"kind": "Ensemble", "members": 4}, model={"width": 32})
    network = build_network(chosen, open_task(chosen.data, None))
    for member in members_of(network):
        kernel = member.get_parameter("conv2.weight")
        numbers = (kernel.detach() / math.sqrt(2 / kernel[0].numel())).flatten().numpy()
        assert stats.kstest(numbers, "norm").pvalue > 1e-4
        assert not member.get_parameter("dense.bias").any()


def test_the_rule_of_an_ensembles_loss_is_in_its_hash() -> None:
    method = {"kind": "Ensemble", "members": 2}
    summed, mean = (
        experiment(method=method, train={"ensemble_loss": how})
        for how in ("sum", "mean")
    )
    assert summed.hash == experiment(method=method).hash != mean.hash


def test_every_schedule_of_the_kl_ends_at_its_weight() -> None:
    for kl in (
        {"kind": "Linear", "share": 0.5},
        {"kind": "Staircase", "slope": 0.5, "every": 1},
        {"kind": "Constant"},
    ):
        train = Train.model_validate(
            {"epochs": 4, "optimizer": {"kind": "SGD"}, "kl": kl | {"weight": 0.01}}
        )
        assert train.kl_weight(39, per_epoch=10) == pytest.approx(0.01)
        assert train.kl_weight(0, per_epoch=10) <= 0.01


def test_the_kl_is_shown_per_datum_and_told_if_it_dwarfs_the_likelihood(
    tmp_path: Path,
) -> None:
    notes: list[str] = []

    class Notes(Watcher):
        def move(self, done: int, note: str = "") -> None:
            notes.extend([note] if note else [])

    prior = {"kind": "Normal", "loc": 0.0, "scale": 1.0}
    wide = experiment(method={"kind": "MeanField", "prior": prior}, train={"epochs": 1})
    with pytest.warns(sb.SlimbayesWarning, match="nats for each datum"):
        fit(wide, tmp_path / "run", CPU, watcher=Notes(), judge=False)
    row = read_curve(tmp_path / "run")[0]
    assert f"nll {row['nll']:.4f}, kl {row['kl']:.4f} x 1 per datum" in notes


@pytest.mark.slow
def test_snapshots_are_the_test_scores_of_their_epochs_and_change_nothing(
    tmp_path: Path,
) -> None:
    """The last one is what a run with one draw of each member is judged by; weights are those without any."""
    plain = fit(experiment(train={"epochs": 3}), tmp_path / "plain", CPU)
    run = fit(
        experiment(train={"epochs": 3, "snapshots": {"every": 2}}),
        tmp_path / "run",
        CPU,
    )
    curve, judged = record.read(run).curve, record.read(run).evaluations[0]
    assert ["test_nll" in row for row in curve] == [True, False, True]
    assert {
        name: curve[-1][f"test_{name}"] for name in judged.metrics
    } == pytest.approx(judged.metrics)
    assert curve[-1]["test_disagreement"] == pytest.approx(
        judged.diversity["disagreement"]
    )
    assert curve[-1]["member1_nll"] == pytest.approx(judged.members[1]["nll"])
    assert weights(run) == weights(plain)
    assert record.read(plain).config_hash != record.read(run).config_hash


@pytest.mark.slow
def test_noise_can_be_learned(tmp_path: Path) -> None:
    """Targets whose noise grows with x: the network finds where, and says so in files of predictions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(600, 1, generator=generator)
    y = 3 + x + (0.02 + 0.5 * x) * torch.randn(600, 1, generator=generator)
    (tmp_path / "yacht.csv").write_text(
        "x,y\n"
        + "".join(f"{a:.6f},{b:.6f}\n" for (a,), (b,) in zip(x.tolist(), y.tolist()))
    )
    chosen = {
        "data": {"name": "uci/yacht", "train_limit": None, "test_limit": None, "validation": 0.1},
        "model": {"kind": "regression_net", "hidden": 16}, "method": METHODS["rank1"],
        "train": {"epochs": 40, "batch": 54, "noise": "heteroscedastic", "kl": {"kind": "Constant", "weight": 0.01}},
    }  # fmt: skip
    where = replace(CPU, data_dir=tmp_path)
    tree = merged(
        {name: value for name, value in BASE.items() if name != "model"}, chosen
    )
    run = fit(validate(tree), tmp_path / "run", where)
    made = record.read(run)
    assert {"rmse", "lpd"} <= made.evaluations[
        0
    ].metrics.keys() and "validation_rmse" in made.curve[-1]
    (tmp_path / "rows.csv").write_text("x\n0.05\n0.95\n")
    assert (
        call(
            "predict",
            run,
            tmp_path / "rows.csv",
            "-o",
            tmp_path / "p.csv",
            "--accelerator",
            "cpu",
        ).exit_code
        == 0
    )
    low, high = (
        float(row["std"])
        for row in csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    )
    assert low < 0.2 < 0.35 < high, (low, high)
    with pytest.raises(ValueError, match="noise is for real targets"):
        fit(experiment(train=ONCE | {"noise": "learned"}), tmp_path / "classes", CPU)
