"""Diagnostics of finished runs that tables and figures ask for: numbers for the table, and details for a JSON file.

name             what it needs                        numbers
elbo             a trained posterior                  neg_elbo at full KL weight, and all scores, in targets' units
truncation       the same, of rank `rank`             as elbo, with scales cut to that rank, and k-tied parameter counts
spectrum         a Gaussian posterior                 how much of means and scales the first singular values explain
scales           a Gaussian posterior                 mean posterior scale; of `layer`, what ranks 1 and 2 explain
snr              a Gaussian posterior                 signal-to-noise ratio of the gradients of `layer`'s scales
tracked          a record with train.track            SNR, scales and explained variance on the way, parameters moving
corruption       images                               errors on corrupted rows, for `relative_to`
density          real targets                         log density of test targets, noise of `precision`, in their units
reliability      a record                             calibration errors without bins of at most five rows
draws            a record                             calibration error by number of draws
convergence      a record with validation rows        -ELBO of validation rows on the way
induced_priors   nothing                              densities of weights under priors of rank-1 factors
prior_functions  nothing                              steps of functions from the priors of dropout and EMP
step_times       nothing                              milliseconds of a training step of `posterior`
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.diagnostics import GradientSNR, plot_scales, plot_spectrum, truncate, truncation_errors
from slimbayes.diagnostics import spectrum as spectrum_of
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.diagnostics.spectra import Of
from slimbayes.errors import did_you_mean
from slimbayes.lab.execution import Execution, key, seed_everything
from slimbayes.lab.finished.step_times import step_times
from slimbayes.lab.runs.evaluate import check_sets, corrupted_rows, scores_with_errors
from slimbayes.lab.runs.fit import load_run
from slimbayes.lab.runs.predictor import Predictor
from slimbayes.lab.runs.scores import calibration_errors
from slimbayes.lab.runs.watchers import Watcher
from slimbayes.lab.tasks.task import batches
from slimbayes.models import keras_count
from slimbayes.report.record import Evaluation, Record, read
from slimbayes.train.likelihoods import LIKELIHOODS

Numbers = dict[str, float]
Found = tuple[Numbers, Any]
_SHOWN = 10  # singular values of a layer


@dataclass(frozen=True)
class Case:
    """A finished run (or none), how to reach it, and what to do with it; `picture` is where a plot may be written."""

    folder: Path | None
    picture: Path | None
    draws: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    execution: Execution = Execution()  # noqa: RUF009 (frozen)

    @cached_property
    def loaded(self) -> Predictor:
        assert self.folder is not None
        return load_run(self.folder, self.execution)

    @cached_property
    def record(self) -> Record:
        assert self.folder is not None
        return read(self.folder)

    @property
    def tests(self) -> list[Evaluation]:
        return [e for e in self.record.evaluations if e.role == "test"]

    @property
    def rows(self) -> Split:
        """Rows that scores are of, in their own units: the test rows, or with `rows: validation` those held out."""
        task, held_out = self.loaded.task, self.options.get("rows") == "validation"
        rows = task.validation if held_out else task.test
        if not isinstance(rows, Split):
            raise ValueError(f"{task.name} has no such rows in memory: set data.validation, or leave `rows` out.")
        rows = task.in_own_units(rows) if held_out else rows  # test rows are in their own units already
        assert isinstance(rows, Split)
        return rows

    def draw(self, make: Callable[[], Any]) -> None:
        """Write a plot, where one is asked for and matplotlib is installed."""
        if self.picture is not None:
            with suppress(ImportError):
                make().savefig(self.picture, dpi=100)


def diagnose(name: str, case: Case) -> Found:
    """Run a diagnostic by its name."""
    if name not in DIAGNOSTICS:
        raise ValueError(f"Unknown diagnostic {name!r}{did_you_mean(name, DIAGNOSTICS)}")
    return DIAGNOSTICS[name](case)


def scores(case: Case, network: nn.Module) -> Numbers:
    """Scores of the run's network, or of a changed one, with standard errors, and the parameters that count."""
    numbers = scores_with_errors(case.loaded._replace(network=network), case.rows, case.draws)
    return numbers | {"parameters": float(keras_count(network) - case.options.get("uncounted", 0))}


def elbo(case: Case) -> Found:
    """The run as it is."""
    numbers = scores(case, case.loaded.network)
    return numbers, numbers


def truncation(case: Case) -> Found:
    """The run with the standard deviations of its posterior cut to a rank (k-tied Normal, section 2.4)."""
    rank, layers = int(case.options["rank"]), case.options.get("layers")
    network = case.loaded.network
    errors = truncation_errors(network, rank, include=layers)
    sizes = [p.site.matrix for p in gaussian_sites(network, layers).values()]
    numbers = scores(case, truncate(copy.deepcopy(network), rank, include=layers))
    numbers["parameters"] += sum(rank * (m + n) - m * n for m, n in sizes)  # what k-tied factors would take
    return numbers, {"scores": numbers, "relative_errors": errors}


def spectrum(case: Case) -> Found:
    """Singular values of means and standard deviations; numbers are means over layers."""
    network, layers = case.loaded.network, case.options.get("layers")
    sites = spectrum_of(network, layers).sites
    case.draw(lambda: plot_spectrum(network, include=layers))
    of: tuple[Of, ...] = ("scales", "means")
    numbers = {f"{one}_{k}": fmean(site.first(k, one) for site in sites) for one in of for k in (1, 2, 3)}
    details = {s.name: {one: list(s.explained(one)[:_SHOWN]) for one in of} | {"shape": list(s.shape)} for s in sites}
    return numbers, details


def scales(case: Case) -> Found:
    """How large posterior standard deviations are, and how much of a layer's one or two factors explain."""
    network, layer = case.loaded.network, case.options.get("layer")
    values = {name: p.scales() for name, p in gaussian_sites(network).items()}
    every = torch.cat([v.flatten().double() for v in values.values()])
    numbers = {"mean_scale": float(every.mean())}
    if layer:
        found = spectrum_of(network)[layer]
        numbers |= {"scales_1": found.first(1), "scales_2": found.first(2)}
        case.draw(lambda: plot_scales(network, layer))
    return numbers, {
        n: {"mean": float(v.mean()), "least": float(v.min()), "largest": float(v.max())} for n, v in values.items()
    }


def snr(case: Case) -> Found:
    """Ratios of gradients over ten batches at the trained parameters, which stand still meanwhile."""
    experiment, network, task, likelihood = case.loaded
    assert isinstance(task.train, Split)
    noise = case.loaded.training_noise
    tracker, layer = GradientSNR(network, window=10), case.options.get("layer")
    network.train()
    for index in range(10):
        seed_everything(experiment.seed, "snr", index)
        picked = torch.randperm(len(task.train))[: experiment.train.batch].to(task.train.x.device)
        network.zero_grad()
        outputs = sb.sample(network, task.scaling(task.train.x[picked]), draws=experiment.train.draws)
        nll = LIKELIHOODS[likelihood].nll(outputs, task.train.y[picked], experiment.train.form, noise)
        (nll + sb.kl(network) / len(task.train)).backward()
        tracker.update()
    network.zero_grad()
    found = {average: tracker.result(average) for average in ("mean", "median")}
    return {} if layer is None else {"snr": found["mean"][layer], "snr_median": found["median"][layer]}, found


@torch.no_grad()
def density(case: Case) -> Found:
    """RMSE and log predictive density in the targets' own units, under noise of a given precision."""
    experiment, network, task, _ = case.loaded
    assert task.y_mean is not None and task.y_std is not None
    noise = float(case.options["precision"]) ** -0.5
    squares, densities, seed = [], [], key(experiment.seed, "density")
    for x, y in batches(case.rows, experiment.evaluate.batch, task.y_mean.device):
        options = {"chunk": 2**16, "scale": noise / task.y_std, "seed": seed}
        p = sb.predict(network, task.scaling(x), draws=case.draws, likelihood="gaussian", **options)
        p = p.rescaled(task.y_mean, task.y_std)
        squares.append((p.mean - y).square().double())
        densities.append(p.log_prob(y).double())
    numbers = {"rmse": float(torch.cat(squares).mean().sqrt()), "lpd": float(torch.cat(densities).mean())}
    return numbers, numbers | {"precision": case.options["precision"], "draws": case.draws}


def corruption(case: Case) -> Found:
    """Evaluations on corrupted rows that the run itself was not asked for; the table reads them as if it had been."""
    chosen = case.loaded.experiment.evaluate.model_copy(update={"corruptions": "standard", **case.options})
    experiment = case.loaded.experiment.model_copy(update={"evaluate": chosen})
    task, execution = case.loaded.task, case.execution
    check_sets(chosen, task, execution)
    made: list[Evaluation] = []
    for source, about, rows in corrupted_rows(experiment, task, execution, Watcher()):
        rows = rows.to(case.loaded.device)
        made += case.loaded.score(rows, [case.draws], source, "corruption", about, execution.workers)[0]
    return {}, [one.model_dump(mode="json") for one in made]


def reliability(case: Case) -> Found:
    """Calibration errors and curve with the case's number of draws."""
    found = next((e for e in case.tests if e.draws == case.draws), case.tests[-1])
    assert found.reliability is not None
    return calibration_errors(found), found.reliability.model_dump()


def draws(case: Case) -> Found:
    """Scores by number of draws."""
    by = {e.draws: e.metrics | calibration_errors(e) for e in case.tests}
    return {f"ece_{count}": scores["ece"] for count, scores in by.items()}, by


def convergence(case: Case) -> Found:
    """-ELBO of validation rows after each epoch: their NLL under one draw, and the KL per training row."""
    curve = [(row["step"], row["validation_nll"] + row["kl"]) for row in case.record.curve if "validation_nll" in row]
    if not curve:
        raise ValueError(f"{case.record.name} has no validation rows to follow: set data.validation.")
    ends = {"quarter": math.ceil(len(curve) / 4), "half": math.ceil(len(curve) / 2), "end": len(curve)}
    numbers = {f"neg_elbo_{name}": curve[index - 1][1] for name, index in ends.items()}
    numbers |= {name: value for name, value in case.record.curve[-1].items() if name.startswith("validation_")}
    return numbers, {"step": [s for s, _ in curve], "neg_elbo": [v for _, v in curve]}


def tracked(case: Case) -> Found:
    """What a run with `train.track` noted when a share `at` of its steps was done, of `layer` or as means over layers;
    and -ELBO of validation rows.
    """
    curve, layer = case.record.curve, case.options.get("layer")
    wanted = float(case.options.get("at", 1.0)) * curve[-1]["step"]
    row = min(curve, key=lambda row: abs(row["step"] - wanted))
    noted: dict[str, list[float]] = {}
    for name, value in row.items():
        what, _, of = name.partition(".")
        if of and (layer is None or of in (layer, f"{layer}.weight")):
            noted.setdefault(what, []).append(value)
    if not noted:
        of = "its posterior" if layer is None else repr(layer)
        raise ValueError(f"{case.record.name} has noted nothing of {of}: set train.track, or name another layer.")
    numbers = {"step": row["step"]} | {what: fmean(values) for what, values in noted.items()}
    if "validation_nll" in row:
        numbers["neg_elbo"] = row["validation_nll"] + row["kl"]
    every = [{n: v for n, v in one.items() if n.partition(".")[2]} | {"step": one["step"]} for one in curve]
    return numbers, every


def prior_functions(case: Case) -> Found:
    """Functions from the implicit priors of dropout and EMP (Chang et al. 2019, Figure 3)."""
    from slimbayes.diagnostics import prior_plots

    torch.manual_seed(case.seed)
    x = torch.linspace(-5, 5, 4001)
    drawn: dict[str, Tensor] = {m: prior_plots.prior_functions(m, x, **case.options) for m in prior_plots.METHODS}
    case.draw(lambda: prior_plots.plot_prior_functions(x, drawn))
    numbers = {f"steps_{method}": prior_plots.mean_steps(values) for method, values in drawn.items()}
    return numbers, numbers


def induced_priors(case: Case) -> Found:
    """Priors over weights that those over factors induce: their densities near zero and in the tail."""
    from slimbayes.diagnostics import prior_plots

    points = torch.linspace(-4, 4, 800)
    case.draw(lambda: prior_plots.plot_induced_priors(points))
    at = torch.tensor([0.1, 4.0])
    found = {name: prior_plots.induced_prior(at, prior).tolist() for name, prior in prior_plots.FIGURE.items()}
    names = dict(zip(found, ("fixed", "normal", "cauchy", "student"), strict=True))
    numbers = {f"{names[n]}_{place}": v for n, both in found.items() for place, v in zip(("zero", "tail"), both)}
    return numbers, found


_ALL = (
    elbo, truncation, spectrum, scales, snr, tracked, corruption, density, reliability, draws, convergence,
    induced_priors, prior_functions, step_times,
)  # fmt: skip
DIAGNOSTICS: dict[str, Callable[[Case], Found]] = {one.__name__: one for one in _ALL}
