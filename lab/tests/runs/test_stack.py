"""slimbayes stack: weights are those of `stack`, predictions follow them, and what cannot be stacked is refused."""

from pathlib import Path

import pytest
import torch
from lab_configs import CPU, call, experiment
from slimbayes_lab.report.record import read
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.trained import load_run

import slimbayes as sb
from slimbayes.seeds import key

pytestmark = pytest.mark.usefixtures("unchecked_fits")
HELD_OUT = {"train_limit": 150, "test_limit": 50, "validation": 0.4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [{"kind": "Ensemble", "members": 2}, {"kind": "ModelPatch", "components": 2}],
)
def test_a_stacked_run_has_the_weights_of_stack(
    tmp_path: Path, method: dict[str, object]
) -> None:
    run = fit(
        experiment(data=HELD_OUT, method=method, train={"epochs": 1}),
        tmp_path / "run",
        CPU,
    )
    before = (run / "model" / "posterior.safetensors").read_bytes()
    said = call("stack", run, "--draws", 60, "--accelerator", "cpu").stdout
    assert "record:" in said and max(map(len, said.splitlines())) <= 80 + len(
        str(tmp_path)
    )
    assert (run / "model" / "posterior.safetensors").read_bytes() == before

    predictor = load_run(run, CPU)
    rows, task = predictor.task.validation, predictor.task
    x = task.scaling(rows.x)
    weights = sb.stack(
        predictor.network, x, rows.y, 60, seed=key(predictor.experiment.seed, "stack")
    )
    stacked = load_run(tmp_path / "run-stacked", CPU)
    assert stacked.experiment.name == f"{predictor.experiment.name}-stacked"
    for name, found in sb.stack(
        stacked.network, x, rows.y, 60, seed=key(predictor.experiment.seed, "stack")
    ).items():
        torch.testing.assert_close(found, weights[name])
    record = read(tmp_path / "run-stacked")
    assert (
        record.name == stacked.experiment.name
        and record.config_hash == stacked.experiment.hash
    )
    reloaded = load_run(tmp_path / "run-stacked", CPU).network
    torch.testing.assert_close(
        sb.predict(reloaded, x, draws=8, seed=1).probs,
        sb.predict(predictor.network, x, draws=8, seed=1).probs,
    )
    again = call("stack", run, "--accelerator", "cpu")
    assert again.exit_code == 1 and "is there already" in again.output


@pytest.mark.slow
def test_a_run_without_validation_rows_or_without_parts_is_refused(
    tmp_path: Path,
) -> None:
    run = fit(
        experiment(method={"kind": "Ensemble", "members": 2}, train={"epochs": 1}),
        tmp_path / "a",
        CPU,
    )
    found = call("stack", run, "--accelerator", "cpu")
    assert found.exit_code == 1 and "data.validation" in found.output
    run = fit(
        experiment(data=HELD_OUT, method={"kind": "MeanField"}, train={"epochs": 1}),
        tmp_path / "b",
        CPU,
    )
    found = call("stack", run, "--accelerator", "cpu")
    assert (
        found.exit_code == 1
        and "stack is for an Ensemble" in found.output
        and not (tmp_path / "b-stacked").exists()
    )
