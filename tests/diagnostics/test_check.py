"""The check of a fit: its numbers against ones known otherwise, its sentences where something is wrong on purpose."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_configs import CPU, MINE, X, dense, experiment, mine
from slimbayes_lab.report import record
from slimbayes_lab.report.groups import load
from slimbayes_lab.run_commands import print_scores
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.watchers import Bars
from torch import nn

import slimbayes as sb
from slimbayes.diagnostics import check

Y = torch.arange(60) % 3


def converted(config: sb.MeanField | sb.Rank1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return sb.bayesianize(dense(3), config)


def test_the_numbers_are_those_of_the_loss() -> None:
    net = converted(sb.MeanField(scale_init=1e-5, scale_jitter=0.0))
    found = check(net, X, Y, num_data=1000)
    terms = sb.elbo(sb.categorical(sb.sample(net.eval(), X), Y), net, 1000)
    assert found.nll == pytest.approx(float(terms.nll.detach()), rel=1e-3)
    assert found.kl == pytest.approx(float(terms.kl.detach()), rel=1e-6)
    assert found.elements == 4 * 8 + 8 * 3


@pytest.mark.parametrize(
    "config",
    [
        sb.MeanField(prior=sb.Normal(0.0, 0.5), scale_init=0.5, scale_jitter=0.0),
        sb.KTied(prior=sb.Normal(0.0, 0.5), rank=1, scale_init=0.5, scale_jitter=0.0),
        sb.Rank1(
            members=2,
            prior=sb.Normal(1.0, 0.1),
            mean_init=sb.Normal(1.0, 1e-6),
            scale_init=0.1,
            scale_jitter=0.0,
        ),
    ],
    ids=["mean-field", "k-tied", "rank-1"],
)
def test_a_posterior_at_its_prior_is_told(config: Any) -> None:
    net = converted(config)
    with torch.no_grad():
        for layer in (net[0], net[2]):  # type: ignore[index]
            layer.weight.zero_()
    found = check(net, X, Y)
    assert (found.at_prior, found.collapsed) == (1.0, 0.0)
    (told,) = (warning for warning in found.warnings if "still at its prior" in warning)
    assert "no worse than the plain network" in told and "learned nothing" not in told


def test_half_of_a_posterior_at_its_prior_is_half() -> None:
    net = converted(
        sb.MeanField(prior=sb.Normal(0.0, 0.5), scale_init=0.5, scale_jitter=0.0)
    )
    with torch.no_grad():
        net[0].weight.fill_(3.0)  # type: ignore[index]
        net[2].weight.zero_()  # type: ignore[index]
    assert check(net, X, Y).at_prior == pytest.approx(24 / 56)


def test_a_collapsed_posterior_is_told() -> None:
    found = check(converted(sb.MeanField(scale_init=1e-5, scale_jitter=0.0)), X, Y)
    assert found.collapsed == 1.0 and found.label_changes == 0.0
    assert any("collapsed" in warning for warning in found.warnings)


def test_draws_that_disagree_are_told() -> None:
    wild = sb.MeanField(prior=sb.Normal(0.0, 10.0), scale_init=9.0, scale_jitter=0.0)
    found = check(converted(wild), X, Y)
    assert found.label_changes > 0.9 and any(
        "Draws disagree" in warning for warning in found.warnings
    )


def test_a_prior_that_outweighs_the_data_is_told() -> None:
    net = converted(sb.MeanField())
    found = check(net, X, Y, num_data=10)
    assert found.kl > 10 and found.warnings[0].startswith(
        f"The KL is {found.kl:.3g} nats for each datum, more than"
    )
    assert not any(
        "KL is" in w for w in check(net, X, Y, num_data=10, kl_weight=0.0).warnings
    )


def test_k_hat_speaks_of_the_posterior() -> None:
    """The exact posterior of a linear model with Gaussian noise has k-hat below any threshold; a narrow one has not."""
    torch.manual_seed(0)
    x = torch.randn(50, 1)
    y = 2 * x + torch.randn(50, 1)
    precision = 1.0 + float(x.square().sum())
    found = {}
    for name, factor in (("exact", 1.0), ("narrow", 0.1)):
        net = sb.bayesianize(
            nn.Linear(1, 1, bias=False),
            sb.MeanField(prior=sb.Normal(0.0, 1.0), scale_jitter=0.0),
        )
        with torch.no_grad():
            net.weight.fill_(float((x * y).sum()) / precision)
            net.posterior["weight"].weight_log_scale.fill_(
                math.log(factor / math.sqrt(precision))
            )  # type: ignore[index]
        found[name] = check(net, x, y, "gaussian", likelihood_std=1.0)
    assert (
        found["exact"].k_hat is not None and found["exact"].k_hat.verdict == "reliable"
    )
    assert (
        found["narrow"].k_hat is not None
        and found["narrow"].k_hat.verdict != "reliable"
    )
    assert any("k-hat" in warning for warning in found["narrow"].warnings)
    assert math.isnan(found["exact"].label_changes)


@pytest.mark.parametrize(("config", "why"), [
    (sb.MCDropout(before="output", rate=0.5), "not known"),
    (sb.Ensemble(members=2), "not known"), (sb.Deterministic(), "no posterior"),
])  # fmt: skip
def test_what_a_method_has_not_is_left_out_with_a_reason(config: Any, why: str) -> None:
    found = check(
        sb.bayesianize(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), config
        ),
        X,
        Y,
    )
    assert (
        found.k_hat is None and why in found.k_hat_note and math.isnan(found.at_prior)
    )
    assert "k-hat none" in str(found)


def test_a_check_changes_nothing() -> None:
    net = converted(sb.Rank1(members=2)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    check(net, X, Y)
    assert all(
        torch.equal(before[name], value) for name, value in net.state_dict().items()
    )
    assert all(module.training for module in net.modules())


def test_a_fit_shows_and_keeps_its_diagnostics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    chosen = experiment(**MINE, method={"kind": "MeanField"}, train={"batch": 20})
    data = mine(X, Y, "a", "b", "c")
    run = fit(chosen, tmp_path / "run", CPU, network=dense(3), dataset=data)
    found = record.read(run).diagnostics
    assert (
        found is not None
        and found.elements == 56
        and found.k_hat is not None
        and found.nonfinite_steps == 0
    )
    assert found.kl == pytest.approx(record.read(run).curve[-1]["kl"], rel=0.2)
    print_scores(run)
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines() if "record:" not in line)
    assert "KL" in shown and "k-hat" in shown and "per datum" in shown


def test_a_fit_is_kept_where_diagnostics_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such operation")

    monkeypatch.setattr("slimbayes_lab.runs.fit.check_fit", fail)
    with Bars() as bars:
        run = fit(
            experiment(**MINE, train={"batch": 20}),
            tmp_path / "run",
            CPU,
            False,
            bars,
            dense(3),
            mine(X, Y),
        )
    assert (
        record.read(run).diagnostics is None
        and "no diagnostics of this fit: no such" in capsys.readouterr().err
    )
    print_scores(run)


def test_warnings_are_on_the_page(tmp_path: Path) -> None:
    import report_records

    one = report_records.record("rank1-cauchy", 1)
    bad = record.Diagnostics(nll=1.0, kl=9.0, warnings=["The KL is 9 times the NLL."])
    record.write(tmp_path / "record.json", one.model_copy(update={"diagnostics": bad}))
    assert any("9 times" in note for note in load([tmp_path]).notes)
