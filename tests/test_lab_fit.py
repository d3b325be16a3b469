"""Runs of the lab: what they leave, that they are functions of their config, and that they resume bit for bit."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_configs import CPU, METHODS, experiment, weights

import slimbayes as sb
from slimbayes.data import Dataset, Split
from slimbayes.files import CheckpointError
from slimbayes.lab.checkpoints import latest_checkpoint
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import Diverged, Stopped, Training, fit, load_run
from slimbayes.lab.run_folder import RunError, default_folder, open_run, stored_experiment
from slimbayes.lab.seeds import key
from slimbayes.lab.step import TrainingStep
from slimbayes.lab.task import Scaling, digits, limited, open_task
from slimbayes.report import record

KEY = 4238720567276977853
EVERY_STEP = Execution(accelerator="cpu", workers=0, checkpoint_every=1)


class Crash(BaseException):
    """As sudden as a kill, inside one process."""


def crash_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    real = TrainingStep.__call__

    def call(self: TrainingStep, batch: Any, step: int, *rest: Any) -> None:
        if step == steps:
            raise Crash
        real(self, batch, step, *rest)

    monkeypatch.setattr(TrainingStep, "__call__", call)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_anywhere_and_resumed_ends_in_the_same_weights(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment(method=METHODS[method], augment={"kind": "pad_crop_flip", "pad": 1})
    whole = fit(chosen, tmp_path / "whole", CPU)
    place = random.Random(method).randrange(1, 8)
    with monkeypatch.context() as patch:
        crash_after(patch, place)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", EVERY_STEP)
    cut = fit(chosen, tmp_path / "cut", EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)
    assert (cut / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert (cut / "steps.csv").read_bytes() == (whole / "steps.csv").read_bytes()
    assert record.read(cut).digest == record.read(whole).digest


def test_resuming_from_an_older_checkpoint_runs_the_lost_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, every3 = experiment(), Execution(accelerator="cpu", workers=0, checkpoint_every=3)
    whole = fit(chosen, tmp_path / "whole", CPU)
    with monkeypatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", every3)
    found = latest_checkpoint(tmp_path / "cut" / "checkpoints")
    assert found is not None and found[1]["step"] == 3
    assert weights(fit(chosen, tmp_path / "cut", every3, resume=True)) == weights(whole)


@pytest.mark.parametrize(
    "train",
    [
        {"ema": 0.9},
        {"clip": 0.1},
        {"accumulate": 2},
        {"optimizer": {"kind": "SGD", "lr": 0.05}, "schedule": {"kind": "OneCycle"}},
        {"early_stop": {"patience": 1}, "epochs": 4},
        {"weight_decay": {"kernels": 0.1, "norms": 0.01}, "schedule": {"kind": "Cosine", "warmup": 1}},
    ],
    ids=lambda train: "-".join(train),
)
def test_options_resume_bit_for_bit_too(train: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = experiment(train=train, data={"validation": 0.25})
    whole = fit(chosen, tmp_path / "whole", CPU)
    with monkeypatch.context() as patch:
        crash_after(patch, 4)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", EVERY_STEP)
    cut = fit(chosen, tmp_path / "cut", EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)
    assert record.read(cut).digest == record.read(whole).digest


def test_equal_configs_give_equal_records_and_other_seeds_others(tmp_path: Path) -> None:
    runs = [fit(experiment(seed=seed), tmp_path / str(i), CPU) for i, seed in enumerate((0, 0, 1))]
    digests = [record.read(run).digest for run in runs]
    assert digests[0] == digests[1] != digests[2]
    assert weights(runs[0]) == weights(runs[1]) != weights(runs[2])


def test_a_run_directory_says_everything(tmp_path: Path) -> None:
    chosen = experiment(
        evaluate={"draws": [1, 3], "corruptions": ["gaussian_noise"], "severities": [1, 5], "ood": ["inverted"]}
    )
    run = fit(chosen, tmp_path / "run", CPU)
    files = {p.name for p in run.iterdir()}
    assert {"config.yaml", "environment.json", "metrics.csv", "steps.csv", "posterior", "model", "record.json"} <= files
    assert stored_experiment(run).hash == chosen.hash
    found = record.read(run)
    assert (found.config_hash, found.seed, found.data, found.status) == (chosen.hash, 0, "digits", "finished")
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
    assert found.examples[0].entropy <= found.examples[-1].entropy and (found.examples[0].image or "").startswith(
        "data:image/png;base64,"
    )


def test_scores_are_those_of_predict(tmp_path: Path) -> None:
    """The record's test scores against predictions made by hand from the saved model."""
    run = fit(experiment(method=METHODS["plain"]), tmp_path / "run", CPU)
    _, network, task, likelihood = load_run(run, CPU)
    assert isinstance(task.test, Split)
    probs = sb.predict(network, task.scaling(task.test.x)).probs
    row = record.read(run).evaluations[0]
    assert likelihood == "categorical"
    assert row.metrics["accuracy"] == pytest.approx(float((probs.argmax(1) == task.test.y).double().mean()))
    assert row.metrics["nll"] == pytest.approx(float(-probs.gather(1, task.test.y[:, None]).log().mean()), abs=1e-6)
    assert row.reliability is not None and sum(row.reliability.count) == 100
    assert row.risk_coverage is not None and row.risk_coverage.risk[-1] == pytest.approx(1 - row.metrics["accuracy"])


def test_validation_rows_and_noise_in_the_targets_own_units(tmp_path: Path) -> None:
    """Gaussian targets: the record's densities and errors against a plain network's predictions by hand."""
    import math

    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", X=x, y=500 + 40 * x[:, 0])
    chosen = experiment(
        data={"name": "uci/yacht", "train_limit": None, "test_limit": None, "validation": 0.2}, model={"kind": "mlp", "hidden": [4]}, method=METHODS["plain"],
        train={"batch": 10}, evaluate={"noise": 7.0},
    )  # fmt: skip
    chosen = chosen.model_copy(update={"model": experiment(model={"kind": "regression_net", "hidden": 4}).model})
    where = Execution(accelerator="cpu", workers=0, data_dir=tmp_path)
    run = fit(chosen, tmp_path / "run", where)
    _, network, task, _ = load_run(run, where)
    assert isinstance(task.validation, Split) and task.y_mean is not None and task.y_std is not None
    test, validation = record.read(run).evaluations
    assert (test.role, validation.role, validation.rows) == ("test", "validation", 11)
    network.eval()
    with torch.no_grad():
        mean = task.y_mean + task.y_std * network(task.scaling(task.validation.x))
    error = (mean - (task.y_mean + task.y_std * task.validation.y)).double()
    assert validation.metrics["rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    density = -0.5 * (error / 7.0) ** 2 - math.log(7.0) - 0.5 * math.log(2 * math.pi)
    assert validation.metrics["lpd"] == pytest.approx(float(density.mean()), rel=1e-5)


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    run = fit(experiment(), tmp_path / "run", CPU)
    before = (run / "record.json").stat().st_mtime_ns
    assert fit(experiment(), run, CPU) == run and (run / "record.json").stat().st_mtime_ns == before


def test_training_lowers_the_loss_for_every_part_of_the_recipe(tmp_path: Path) -> None:
    run = fit(
        experiment(
            train={"epochs": 6, "rows": "split", "form": "mixture", "kl": {"kind": "Linear"}, "posterior_lr": 0.5}
        ),
        tmp_path / "r",
        CPU,
    )
    nll = [row["nll"] for row in record.read(run).curve]
    assert nll[-1] < 0.7 * nll[0]


def test_averaged_weights_are_what_is_saved(tmp_path: Path) -> None:
    """One epoch of four steps by hand: the average of the weights after each step, with decay a."""
    chosen = experiment(train={"ema": 0.5, "epochs": 1}, method=METHODS["plain"])
    seen: list[torch.Tensor] = []
    real = TrainingStep._average

    def spy(self: TrainingStep) -> None:
        if not seen:
            seen.append(self.averages["dense.weight"].clone())
        real(self)
        seen.append(dict(self.network.named_parameters())["dense.weight"].detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "_average", spy)
        run = fit(chosen, tmp_path / "run", CPU)
    expected = seen[0]
    for value in seen[1:]:
        expected = 0.5 * expected + 0.5 * value
    torch.testing.assert_close(load_run(run, CPU)[1].get_parameter("dense.weight").detach(), expected)


def test_pieces_of_a_batch_add_up_to_the_whole(tmp_path: Path) -> None:
    """Without batch norm, a batch in two pieces gives the gradient of the whole one."""
    options = {
        "model": {"kind": "mlp", "hidden": [8]},
        "method": METHODS["plain"],
        "data": {"name": "digits", "train_limit": 200, "test_limit": 100},
    }
    runs = [fit(experiment(**options, train={"accumulate": pieces}), tmp_path / str(pieces), CPU) for pieces in (1, 2)]
    ours = [load_run(run, CPU)[1].state_dict() for run in runs]
    for name in ours[0]:
        torch.testing.assert_close(ours[0][name], ours[1][name], atol=1e-5, rtol=1e-4)


def test_early_stopping_keeps_the_best_epoch(tmp_path: Path) -> None:
    # A rate this high ruins the network soon: later epochs are worse than some earlier one.
    train = {"epochs": 12, "early_stop": {"patience": 2}, "optimizer": {"kind": "SGD", "lr": 0.8}}
    run = fit(experiment(train=train, data={"validation": 0.3}, method=METHODS["plain"]), tmp_path / "run", CPU)
    found = record.read(run)
    scores = [row["validation_nll"] for row in found.curve]
    assert found.status == "stopped early" and len(scores) < 12
    assert len(scores) - (scores.index(min(scores)) + 1) == 2


# --- faults ---


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment()
    whole = fit(chosen, tmp_path / "whole", CPU)
    with monkeypatch.context() as patch:
        crash_after(patch, 6)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", EVERY_STEP)
    kept = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert [p.name for p in kept] == ["step-00000005", "step-00000006"]
    file = kept[-1] / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="Skipping a damaged checkpoint.*step-00000006"):
        cut = fit(chosen, tmp_path / "cut", EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(Crash):
            fit(experiment(model={"width": 1}), tmp_path / "run", EVERY_STEP)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    draw = random.Random(0)
    for file in (folder / "tensors.safetensors", folder / "state.json"):
        good = file.read_bytes()
        for trial in range(120):
            bad = bytearray(good)
            if trial < 100:
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            else:
                bad = bad[: draw.randrange(len(bad))]
            file.write_bytes(bad)
            with pytest.warns(UserWarning, match="damaged"):
                assert latest_checkpoint(folder.parent) is None
        file.write_bytes(good)
    assert latest_checkpoint(folder.parent) is not None


def test_checkpoints_of_another_config_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        crash_after(patch, 2)
        with pytest.raises(Crash):
            fit(experiment(), tmp_path / "run", EVERY_STEP)
    with pytest.raises(RunError, match="another config"):
        fit(experiment(seed=5), tmp_path / "run", EVERY_STEP, resume=True)
    with pytest.raises(RunError, match="--resume"):
        fit(experiment(), tmp_path / "run", EVERY_STEP)
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="another config"):
        fit(experiment(seed=5), tmp_path / "run", EVERY_STEP, resume=True)


def nan_data(where: str) -> Dataset:
    found = digits()
    train = limited(found.train, 200)
    x, y = train.x.float() / 255, train.y
    if where == "inputs":
        x[17, 0, 3, 3] = float("nan")
    return Dataset("digits", {"train": Split(x, y), "test": found.test}, found.classes)


def test_nan_in_the_data_stops_at_its_step_and_names_it(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"loss of step [0-3] is not finite. The inputs of row \d+ of the batch hold NaN"
    ):
        fit(experiment(method=METHODS["plain"]), tmp_path / "run", CPU, dataset=nan_data("inputs"))


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
    with pytest.raises(Diverged, match=r"step 5 is not finite. The parameter conv2.weight holds NaN or infinity"):
        fit(experiment(method=METHODS["plain"]), tmp_path / "run", EVERY_STEP)
    found = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert (
        found is not None
        and found[1]["step"] == 5
        and all(t.isfinite().all() for t in found[0].values() if t.is_floating_point())
    )


def test_an_overflowing_layer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Training.__init__

    def huge(self: Training, *args: Any) -> None:
        real(self, *args)
        with torch.no_grad():
            self.network.get_parameter("dense.weight").fill_(3e38)

    monkeypatch.setattr(Training, "__init__", huge)
    with pytest.raises(
        Diverged, match="step 0 is not finite. The first layer whose output is NaN or infinite is 'dense'"
    ):
        fit(experiment(method=METHODS["plain"]), tmp_path / "run", CPU)


def test_an_unwritable_run_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written to.*--out"):
        fit(experiment(), tmp_path / "file" / "run", CPU)


def test_two_processes_cannot_share_a_run_directory(tmp_path: Path) -> None:
    lock = open_run(tmp_path / "run", experiment(), resume=False)
    with pytest.raises(RunError, match="in use"):
        fit(experiment(), tmp_path / "run", CPU)
    lock.close()
    fit(experiment(), tmp_path / "run", CPU)


@pytest.mark.parametrize("limit_kb", [30, 60])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    limit_kb: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail with ENOSPC from the fourth checkpoint on."""
    import errno

    from slimbayes import files as atomic

    real, count = atomic._write_synced, 0

    def write(file: Path, data: bytes) -> None:
        nonlocal count
        count += "checkpoints" in file.parts
        if count > 3 * 3:
            file.write_bytes(data[: limit_kb * 10])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    monkeypatch.setattr(atomic, "_write_synced", write)
    with pytest.raises(RunError, match="No space left on device"):
        fit(experiment(), tmp_path / "run", EVERY_STEP)
    monkeypatch.undo()
    folders = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["step-00000002", "step-00000003"]
    assert weights(fit(experiment(), tmp_path / "run", EVERY_STEP, resume=True)) == weights(
        fit(experiment(), tmp_path / "whole", CPU)
    )


def test_a_request_to_stop_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrainingStep.__call__

    def call(self: TrainingStep, batch: Any, step: int, *rest: Any) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, batch, step, *rest)

    monkeypatch.setattr(TrainingStep, "__call__", call)
    with pytest.raises(Stopped, match="after step 3.*--resume"):
        fit(experiment(), tmp_path / "run", CPU)
    monkeypatch.undo()
    assert weights(fit(experiment(), tmp_path / "run", CPU, resume=True)) == weights(
        fit(experiment(), tmp_path / "whole", CPU)
    )


# --- real kills, in processes of their own ---

CHILD = """
import sys, json
from pathlib import Path
from slimbayes.lab.config_files import validate
from slimbayes.lab.fit import fit
from slimbayes.lab.execution import Execution
fit(validate(json.loads(sys.argv[1])), Path(sys.argv[2]), Execution(accelerator="cpu", workers=0, checkpoint_every=2), resume=True)
"""


def test_kill_nine_at_random_times(tmp_path: Path) -> None:
    """SIGKILL from outside, again and again; then the run is let through."""
    draw, kills = random.Random(1), 0
    for method in ("rank1-cauchy", "emp"):
        chosen = experiment(method=METHODS[method], train={"epochs": 12}, model={"width": 2})
        whole = fit(chosen, tmp_path / f"{method}-whole", CPU)
        cut = tmp_path / method
        for _ in range(3):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps(chosen.resolved), str(cut)], stderr=subprocess.DEVNULL
            )
            seen = latest_step(cut)
            deadline = time.monotonic() + 60
            while child.poll() is None and latest_step(cut) <= seen + 8 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(draw.random() * 0.05)
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
                kills += 1
            child.wait()
        fit(chosen, cut, EVERY_STEP, resume=True)
        assert weights(cut) == weights(whole), method
        assert record.read(cut).digest == record.read(whole).digest
    assert kills >= 4, "most children must have died on the way"


def latest_step(run: Path) -> int:
    names = sorted(p.name for p in (run / "checkpoints").glob("step-*")) if (run / "checkpoints").is_dir() else []
    return int(names[-1].split("-")[1]) if names else 0


# --- parts ---


def test_keys_are_stable_and_differ() -> None:
    assert key(0, "step", 1) == KEY, "another function of the seed would change every result"
    assert len({key(s, "step", i) for s in range(10) for i in range(100)}) == 1000


def test_default_folder_names_the_config() -> None:
    chosen = experiment(name="a / <b>")
    assert default_folder(chosen).name == f"a-b-{chosen.hash}"


def test_scaling_and_limits() -> None:
    task = open_task(experiment(data={"train_limit": None, "validation": 0.2}).data)
    assert (len(task.train), len(task.validation or ()), len(task.test)) == (800, 200, 100)
    assert isinstance(task.train, Split)
    scaled = task.scaling(task.train.x)
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-5) and float(scaled.std(correction=0)) == pytest.approx(
        1, abs=1e-5
    )
    assert Scaling()(task.train.x).max() <= 1


def test_members_may_keep_norm_statistics_of_their_own(tmp_path: Path) -> None:
    run = fit(experiment(train={"norm_statistics": "member"}), tmp_path / "run", CPU)
    network = load_run(run, CPU)[1]
    assert type(network.get_submodule("norm1").posterior["weight"]).__name__ == "MemberNormPosterior"  # type: ignore[index]
    with pytest.raises(ValueError, match="converted already"):
        fit(experiment(train={"norm_statistics": "member"}, method=METHODS["ecmp"]), tmp_path / "other", CPU)


def hostile(folder: Path, tensors: bytes, state: bytes, **manifest: Any) -> None:
    import hashlib

    folder.mkdir(parents=True)
    files = {"tensors.safetensors": tensors, "state.json": state}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "sha256": hashes} | manifest))


GOOD_STATE = json.dumps({"step": 1, "curve": [], "hash": "x"}).encode()


@pytest.mark.parametrize(
    ("tensors", "state", "manifest"),
    [
        ((2**60).to_bytes(8, "little") + b"{}", GOOD_STATE, {}),
        (
            (50).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'.ljust(50),
            GOOD_STATE,
            {},
        ),
        (b"\x80\x04cposix\nsystem\n(S'touch canary'\ntR.", GOOD_STATE, {}),
        (b"PK\x03\x04" + b"x" * 50, GOOD_STATE, {}),
        (b"", GOOD_STATE, {}),
        (b"\x02\0\0\0\0\0\0\0{}", b"[]", {}),
        (b"\x02\0\0\0\0\0\0\0{}", b"{", {}),
        (b"\x02\0\0\0\0\0\0\0{}", b"{}", {}),
        (b"\x02\0\0\0\0\0\0\0{}", GOOD_STATE, {"format": 99}),
        (b"\x02\0\0\0\0\0\0\0{}", GOOD_STATE, {"sha256": {"../../etc/passwd": "0"}}),
        (b"\x02\0\0\0\0\0\0\0{}", GOOD_STATE, {"sha256": []}),
    ],
    ids=[
        "huge header",
        "lying shape",
        "pickle",
        "zip",
        "empty",
        "state a list",
        "state cut",
        "state empty",
        "newer format",
        "path outside",
        "hashes a list",
    ],
)
def test_hostile_checkpoints_are_refused_and_nothing_runs(
    tensors: bytes, state: bytes, manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a manifest that fits: whoever can write files can write that too."""
    monkeypatch.chdir(tmp_path)
    hostile(tmp_path / "checkpoints" / "step-00000001", tensors, state, **manifest)
    with pytest.warns(UserWarning, match="damaged"):
        assert latest_checkpoint(tmp_path / "checkpoints") is None
    assert not (tmp_path / "canary").exists()


def test_curves_for_tensorboard(tmp_path: Path) -> None:
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = fit(experiment(), tmp_path / "run", Execution(accelerator="cpu", workers=0, tensorboard=True))
    found = event.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("loss")] == [4, 8]
    assert found.Scalars("loss")[1].value == pytest.approx(record.read(run).curve[1]["loss"], rel=1e-6)


def test_tables_of_ones_own_are_standardised() -> None:
    x = torch.randn(40, 3) * torch.tensor([1.0, 50.0, 0.0]) + torch.tensor([0.0, 300.0, 7.0])
    data = Dataset(
        "mine", {"train": Split(x, torch.arange(40) % 2), "test": Split(x[:5], torch.zeros(5, dtype=torch.int64))}
    )
    task = open_task(experiment(data={"name": "mine", "train_limit": None, "test_limit": None}).data, None, data)
    scaled = task.scaling(x)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))


def test_published_corruptions_are_used_where_they_are_and_damaged_ones_are_told(tmp_path: Path) -> None:
    import numpy as np

    from slimbayes.lab.evaluate import _published

    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    images = np.arange(10 * 32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(10, 32, 32, 3)
    np.save(folder / "labels.npy", np.arange(10) % 10)
    np.save(folder / "fog.npy", images)
    where = Execution(accelerator="cpu", data_dir=tmp_path)
    found = _published("cifar10", "fog", 2, where)
    assert (
        found is not None
        and torch.equal(found.x, torch.from_numpy(images[2:4]).permute(0, 3, 1, 2))
        and found.y.tolist() == [2, 3]
    )
    assert _published("cifar10", "snow", 2, where) is None and _published("digits", "fog", 2, where) is None
    (folder / "fog.npy").write_bytes((folder / "fog.npy").read_bytes()[:5000])
    with pytest.raises(ValueError, match="fog.npy"):
        _published("cifar10", "fog", 2, where)
