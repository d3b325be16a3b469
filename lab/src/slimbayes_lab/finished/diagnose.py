"""`slimbayes diagnose RUN`: all that diagnostics say of a finished run, as plain data and as lines of 80 characters.

What a posterior cannot be asked (a spectrum of picks, a k-hat without a density) is said in a line of its own.
Tables of papers ask for the same diagnostics one by one, and for others (papers/diagnostics.py).
"""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.diagnostics import (
    GradientSNR,
    plot_spectrum,
    truncate,
    truncation_errors,
)
from slimbayes.diagnostics import spectrum as spectrum_of
from slimbayes.diagnostics.check import lines as check_lines
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.diagnostics.spectra import Of
from slimbayes.metrics.functional import labelled
from slimbayes.seeds import seed_everything
from slimbayes.train.likelihoods import LIKELIHOODS
from slimbayes_lab.data import Split
from slimbayes_lab.execution import Execution
from slimbayes_lab.models import keras_count
from slimbayes_lab.report.record import Evaluation, Record, read
from slimbayes_lab.runs.fit import check_fit
from slimbayes_lab.runs.predictor import Predictor, total_draws
from slimbayes_lab.runs.trained import load_run

Numbers = dict[str, float]
Found = tuple[Numbers, Any]  # for a table, and details for a JSON file
WIDTH = 80
_NAME = 26  # characters of a layer's name
_VALUES = 10  # singular values of a layer
_SCORES = (
    "neg_elbo",
    "draw_nll",
    "kl",
    "nll",
    "accuracy",
    "ece",
    "mce",
    "rmse",
    "lpd",
    "crps",
)
_SHOWN = (
    "neg_elbo",
    "nll",
    "accuracy",
    "ece",
    "rmse",
    "lpd",
)  # scores of truncated posteriors
_LABELS = {"neg_elbo": "-ELBO", "draw_nll": "NLL of a draw", "kl": "KL"}


@dataclass(frozen=True)
class Case:
    """What a diagnostic looks at: a finished run, or none, and how; `picture` is where a plot may be written."""

    folder: Path | None
    draws: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    execution: Execution = Execution()  # noqa: RUF009 (frozen)
    picture: Path | None = None

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
            raise ValueError(
                f"{task.name} has no such rows in memory: set data.validation, or leave `rows` out."
            )
        rows = (
            task.in_own_units(rows) if held_out else rows
        )  # test rows are in their own units already
        assert isinstance(rows, Split)
        return rows

    def draw(self, make: Callable[[], Any]) -> None:
        """Write a plot, where one is asked for and matplotlib is installed."""
        if self.picture is not None:
            with suppress(ImportError):
                make().savefig(self.picture, dpi=100)


# --- diagnostics ---


def scores(case: Case, network: nn.Module) -> Numbers:
    """Scores of the run's network, or of a changed one, its ELBO per row at full KL weight, and parameters that count.

    With a number comes its standard error: `_sem` over rows, which is what the k-tied paper prints (0.15 % for an
    accuracy of 97.6 % of 10,000 rows), and `_sem_draws` over draws, which is what its captions say.
    """
    predictor = case.loaded._replace(network=network)
    (made,) = predictor.score(
        case.rows, [case.draws], predictor.task.name, "validation"
    )
    with torch.no_grad():
        kl = float(sb.kl(network)) / len(predictor.task.train)
        by_draw, by_row = _log_likelihoods(predictor, case.rows, case.draws)
    alone = -float(by_draw.mean())
    numbers = {**made.metrics, "neg_elbo": alone + kl, "draw_nll": alone, "kl": kl}
    errors = {"neg_elbo": by_draw.mean(0), **by_row}
    numbers |= {
        f"{name}_sem": _standard_error(values)
        for name, values in errors.items()
        if name in numbers
    }
    if len(by_draw) > 1:
        numbers["neg_elbo_sem_draws"] = _standard_error(by_draw.mean(1))
    if "brier" in numbers:  # TensorFlow Probability's Brier score
        numbers |= {
            "brier_shifted": numbers["brier"] - 1,
            "brier_shifted_sem": numbers["brier_sem"],
        }
    return numbers | {
        "parameters": float(keras_count(network) - case.options.get("uncounted", 0))
    }


def _standard_error(values: Tensor) -> float:
    return float(values.double().std() / math.sqrt(len(values)))


def _log_likelihoods(
    predictor: Predictor, rows: Split, draws: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-likelihoods of rows in their own units under each draw, (S, N), and scores of each row, (N,), by name."""
    by_draw: list[Tensor] = []
    by_row: dict[str, list[Tensor]] = {}
    for found, y in predictor.predictions(rows, "elbo", [draws]):
        p = found[draws]
        logs = p.draw_log_prob(y)
        by_draw.append(logs.flatten(2).sum(-1) if logs.dim() > 2 else logs)
        if not predictor.task.real and y.dim() == 1:
            probs, label = labelled(p, y)
            off = probs - torch.nn.functional.one_hot(label, probs.shape[-1])
            by_row.setdefault("brier", []).append(off.square().sum(-1))
            by_row.setdefault("nll", []).append(-p.log_prob(y))
            by_row.setdefault("accuracy", []).append((p.label == y).double())
    return torch.cat(by_draw, 1), {
        name: torch.cat(parts) for name, parts in by_row.items()
    }


def elbo(case: Case) -> Found:
    """The run as it is."""
    numbers = scores(case, case.loaded.network)
    return numbers, numbers


def truncation(case: Case) -> Found:
    """The run with the standard deviations of its posterior cut to a rank (k-tied Normal, section 2.4)."""
    return truncated(case, int(case.options["rank"]))


def truncated(case: Case, rank: int) -> Found:
    """The same, of a rank that the case need not name."""
    network, layers = case.loaded.network, case.options.get("layers")
    errors = truncation_errors(network, rank, include=layers)
    sizes = [p.site.matrix for p in gaussian_sites(network, layers).values()]
    numbers = scores(case, truncate(copy.deepcopy(network), rank, include=layers))
    numbers["parameters"] += sum(
        rank * (m + n) - m * n for m, n in sizes
    )  # what k-tied factors would take
    return numbers, {"scores": numbers, "relative_errors": errors}


def spectrum(case: Case) -> Found:
    """Singular values of means and standard deviations; numbers are means over layers."""
    network, layers = case.loaded.network, case.options.get("layers")
    sites = spectrum_of(network, layers).sites
    case.draw(lambda: plot_spectrum(network, include=layers))
    of: tuple[Of, ...] = ("scales", "means")
    numbers = {
        f"{one}_{k}": fmean(site.first(k, one) for site in sites)
        for one in of
        for k in (1, 2, 3)
    }
    details = {
        s.name: {one: list(s.explained(one)[:_VALUES]) for one in of}
        | {"shape": list(s.shape)}
        for s in sites
    }
    return numbers, details


def snr(case: Case) -> Found:
    """Ratios of gradients over ten batches at the trained parameters, which stand still meanwhile."""
    experiment, network, task, likelihood = case.loaded
    assert isinstance(task.train, Split)
    noise = case.loaded.training_noise
    tracker, layer = GradientSNR(network, window=10), case.options.get("layer")
    network.train()
    for index in range(10):
        seed_everything(experiment.seed, "snr", index)
        picked = torch.randperm(len(task.train))[: experiment.train.batch].to(
            task.train.x.device
        )
        network.zero_grad()
        draws = total_draws(network, experiment.train.draws)
        outputs = sb.sample(network, task.scaling(task.train.x[picked]), draws=draws)
        nll = LIKELIHOODS[likelihood].nll(
            outputs, task.train.y[picked], experiment.train.form, noise
        )
        (nll + sb.kl(network) / len(task.train)).backward()
        tracker.update()
    network.zero_grad()
    found = {average: tracker.result(average) for average in ("mean", "median")}
    numbers = (
        {}
        if layer is None
        else {"snr": found["mean"][layer], "snr_median": found["median"][layer]}
    )
    return numbers, found


# --- all of them, of one run ---


def diagnose_run(run: Path, execution: Execution, draws: int = 16) -> dict[str, Any]:
    """Look at a finished run: ELBO, scores and calibration of its test rows, the check of its fit with k-hat, spectrum,
    scales cut to ranks 1 to 3 where its matrices have them, and the noise of gradients. `draws` are of each member.
    """
    case = Case(run, draws, execution=execution)
    experiment, network, task, _ = case.loaded
    found: dict[str, Any] = {
        "run": experiment.name,
        "method": experiment.method_text,
        "data": task.name,
    }
    found |= {"draws": draws, "notes": []}

    def add(name: str, ask: Callable[[], Any]) -> None:
        try:
            found[name] = ask()
        except (ValueError, TypeError, NotImplementedError, ArithmeticError) as error:
            found["notes"].append(f"{name}: {error}")

    add("scores", lambda: elbo(case)[0])
    add("check", lambda: dict(check_fit(case.loaded, run)))
    try:
        narrowest = min(min(p.site.matrix) for p in gaussian_sites(network).values())
    except ValueError as error:
        found["notes"].append(f"spectrum, truncation and SNR: {error}")
        return found
    add("spectrum", lambda: spectrum(case)[1])
    for rank in (rank for rank in (1, 2, 3) if rank <= narrowest):
        add(f"rank {rank}", lambda: truncated(case, rank)[0])  # noqa: B023 (called at once)
    add("snr", lambda: snr(case)[1])
    return found


def diagnosis_lines(found: Mapping[str, Any]) -> list[str]:
    """What was found in lines of at most 80 characters."""
    fold = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return [line for whole in _lines(found) for line in fold.wrap(whole) or [whole]]


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['run']}: {found['method']}, {found['data']}"
    if scores := found.get("scores"):
        yield ""
        yield f"Test rows, {found['draws']} draws of each member (± standard error over rows)"
        for name in (name for name in _SCORES if name in scores):
            error = f" ± {scores[f'{name}_sem']:.4f}" if f"{name}_sem" in scores else ""
            yield f"  {_LABELS.get(name, name):<16}{scores[name]:>12.4f}{error}"
    if check := found.get("check"):
        yield ""
        yield "Fit, on some training rows (128 at most)"
        yield from (
            f"  {line}"
            for line in check_lines(check, "rmse" in found.get("scores", {}))
        )
        yield from (f"  ! {warning}" for warning in check["warnings"])
    yield from _gaussian(found)
    if found["notes"]:
        yield ""
        yield from (f"Not asked: {note}" for note in found["notes"])


def _gaussian(found: Mapping[str, Any]) -> Iterator[str]:
    """What only posteriors with means and scales have."""
    if spectra := found.get("spectrum"):
        yield ""
        yield "Share of the variance that the first singular values explain"
        yield f"  {'weight':<{_NAME}} {'matrix':>11}  scales: 1      2      3  means: 1"
        for name, one in spectra.items():
            sums = [sum(one["scales"][:k]) for k in (1, 2, 3)]
            shape = "x".join(map(str, one["shape"]))
            shown = " ".join(f"{share:6.4f}" for share in sums)
            yield f"  {layer_column(name, _NAME)} {shape:>11}   {shown}    {one['means'][0]:6.4f}"
    cut = {name: scores for name, scores in found.items() if name.startswith("rank ")}
    if cut:
        names = [
            name for name in _SHOWN if any(name in scores for scores in cut.values())
        ]
        yield ""
        yield "Scales cut to a rank"
        yield (
            "  "
            + f"{'':<10}"
            + "".join(f"{_LABELS.get(name, name):>12}" for name in names)
        )
        for label, scores in {"as trained": found.get("scores", {}), **cut}.items():
            cells = "".join(
                f"{scores[name]:>12.4f}" if name in scores else f"{'-':>12}"
                for name in names
            )
            yield f"  {label:<10}{cells}"
    if ratios := found.get("snr"):
        yield ""
        yield "Signal-to-noise ratio of the gradients of scales, ten batches, as trained"
        yield f"  {'layer':<{_NAME}} {'mean':>12} {'median':>12}"
        for name, mean in ratios["mean"].items():
            yield f"  {layer_column(name, _NAME)} {mean:>12.4g} {ratios['median'][name]:>12.4g}"


def layer_column(name: str, width: int) -> str:
    """A layer's name in a column: its end, where it is long."""
    return f"{name if len(name) <= width else '…' + name[1 - width :]:<{width}}"
