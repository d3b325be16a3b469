"""slimbayes diagnose: what it prints of runs of several kinds, in 80 columns, against the diagnostics it is made of."""

import json
import math
from pathlib import Path

import pytest
from lab_configs import CPU, call, experiment
from slimbayes_lab.finished.diagnose import Case, diagnose_run, diagnosis_lines, scores
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.trained import load_run

from slimbayes.diagnostics import spectrum

DENSE = {"model": {"kind": "mlp", "hidden": [8]}, "train": {"epochs": 1}}


@pytest.mark.slow
def test_a_gaussian_posterior_is_asked_everything(tmp_path: Path) -> None:
    run = fit(
        experiment(method={"kind": "KTied", "rank": 2}, **DENSE), tmp_path / "run", CPU
    )
    found = json.loads(
        call("diagnose", run, "--draws", 4, "--json", "--accelerator", "cpu").stdout
    )
    assert {
        "scores",
        "check",
        "spectrum",
        "rank 1",
        "rank 2",
        "snr",
    } <= found.keys() and not found["notes"]
    network = load_run(run, CPU).network
    for site in spectrum(network).sites:
        assert sum(found["spectrum"][site.name]["scales"][:2]) == pytest.approx(
            site.first(2)
        )
        assert site.first(2) == pytest.approx(1.0)
    # a 2-tied posterior is of rank two already
    assert found["rank 2"]["neg_elbo"] == pytest.approx(
        found["scores"]["neg_elbo"], rel=1e-4
    )
    assert found["rank 1"]["kl"] != found["scores"]["kl"]

    told = diagnosis_lines(found)
    assert max(map(len, told)) <= 80
    text = "\n".join(told)
    for part in (
        "-ELBO",
        "ece",
        "k-hat",
        "Scales cut to a rank",
        "Signal-to-noise",
        "dense1.weight",
        "64x8",
    ):
        assert part in text


@pytest.mark.slow
def test_picks_have_no_spectrum_and_it_says_so(tmp_path: Path) -> None:
    run = fit(
        experiment(method={"kind": "ModelPatch", "components": 2}, train={"epochs": 1}),
        tmp_path / "run",
        CPU,
    )
    found = diagnose_run(run, CPU, draws=2)
    assert "spectrum" not in found and "rank 1" not in found
    assert any("No layer of this" in note for note in found["notes"])
    printed = call(
        "diagnose", run, "--draws", 2, "--accelerator", "cpu"
    ).stdout.splitlines()
    assert printed == diagnosis_lines(found) and max(map(len, printed)) <= 80
    accuracy, rows = found["scores"]["accuracy"], 100
    assert found["scores"]["accuracy_sem"] == pytest.approx(
        math.sqrt(accuracy * (1 - accuracy) / (rows - 1))
    )


@pytest.mark.slow
def test_standard_errors_over_rows_and_over_draws(tmp_path: Path) -> None:
    run = fit(experiment(method={"kind": "MeanField"}, **DENSE), tmp_path / "run", CPU)
    case = Case(run, 8, execution=CPU)
    few, many = (
        scores(Case(run, draws, execution=CPU), case.loaded.network)
        for draws in (8, 64)
    )
    assert few["neg_elbo"] == pytest.approx(few["draw_nll"] + few["kl"])
    assert few["neg_elbo_sem"] == pytest.approx(
        many["neg_elbo_sem"], rel=0.5
    )  # rows are as many
    assert (
        many["neg_elbo_sem_draws"] < 0.7 * few["neg_elbo_sem_draws"]
    )  # draws are eight times as many
    assert {"nll_sem", "accuracy_sem", "brier_sem", "brier_shifted_sem"} <= few.keys()


def test_lines_are_folded_between_words_alone() -> None:
    whole = "mean-field-of-a-late-layer"
    told = diagnosis_lines(
        {"run": "r" * 70, "method": whole, "data": "digits", "notes": []}
    )
    assert len(told) == 2 and told[1] == f"    {whole}, digits"
