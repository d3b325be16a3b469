"""Diagnostics that tables and figures of papers ask for by name: numbers for the table, and details for a JSON file.

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

import math
import time
from collections.abc import Callable
from statistics import fmean, median, stdev

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.diagnostics import plot_scales
from slimbayes.diagnostics import spectrum as spectrum_of
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.errors import did_you_mean
from slimbayes.seeds import key
from slimbayes_lab.finished.diagnose import Case, Found, elbo, snr, spectrum, truncation
from slimbayes_lab.report.record import Evaluation
from slimbayes_lab.runs.evaluate import check_sets, corruption_scores
from slimbayes_lab.runs.predictor import total_draws
from slimbayes_lab.runs.watchers import Watcher
from slimbayes_lab.tasks.task import batches

_FEW = 5  # rows: bins of no more are outliers in calibration errors of papers (Chang et al. 2019, D.2)


def diagnose(name: str, case: Case) -> Found:
    """Run a diagnostic by its name."""
    if name not in DIAGNOSTICS:
        raise ValueError(
            f"Unknown diagnostic {name!r}{did_you_mean(name, DIAGNOSTICS)}"
        )
    return DIAGNOSTICS[name](case)


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
        n: {"mean": float(v.mean()), "least": float(v.min()), "largest": float(v.max())}
        for n, v in values.items()
    }


@torch.no_grad()
def density(case: Case) -> Found:
    """RMSE and log predictive density in the targets' own units, under noise of a given precision."""
    experiment, network, task, _ = case.loaded
    assert task.y_mean is not None and task.y_std is not None
    noise = float(case.options["precision"]) ** -0.5
    squares, densities, seed = [], [], key(experiment.seed, "density")
    for x, y in batches(case.rows, experiment.evaluate.batch, task.y_mean.device):
        options = {"chunk": 2**16, "likelihood_std": noise / task.y_std, "seed": seed}
        draws = total_draws(network, case.draws)
        p = sb.predict(
            network, task.scaling(x), draws=draws, likelihood="gaussian", **options
        )
        p = p.rescaled(task.y_mean, task.y_std)
        squares.append((p.mean - y).square().double())
        densities.append(p.log_prob(y).double())
    numbers = {
        "rmse": float(torch.cat(squares).mean().sqrt()),
        "lpd": float(torch.cat(densities).mean()),
    }
    return numbers, numbers | {
        "precision": case.options["precision"],
        "draws": case.draws,
    }


def corruption(case: Case) -> Found:
    """Evaluations on corrupted rows that the run itself was not asked for; the table reads them as if it had been."""
    experiment = case.loaded.experiment
    chosen = experiment.evaluate.model_copy(
        update={"corruptions": "standard", **case.options}
    )
    asked = case.loaded._replace(
        experiment=experiment.model_copy(update={"evaluate": chosen})
    )
    check_sets(chosen, asked.task, case.execution)
    made = corruption_scores(asked, [case.draws], case.execution, Watcher())
    return {}, [one.model_dump(mode="json") for one in made]


def calibration_errors(evaluation: Evaluation) -> dict[str, float]:
    """Calibration errors of an evaluation without its bins of few rows; shares are of all rows."""
    curve = evaluation.reliability
    if curve is None:
        raise ValueError(
            f"The evaluation on {evaluation.data} has no reliability curve to take calibration errors from."
        )
    gaps = [
        (n, abs(a - c))
        for n, a, c in zip(curve.count, curve.accuracy, curve.confidence, strict=True)
        if n > _FEW
    ]
    return {
        "ece": sum(n * gap for n, gap in gaps) / evaluation.rows,
        "mce": max((gap for _, gap in gaps), default=math.nan),
    }


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
    curve = [
        (row["step"], row["validation_nll"] + row["kl"])
        for row in case.record.curve
        if "validation_nll" in row
    ]
    if not curve:
        raise ValueError(
            f"{case.record.name} has no validation rows to follow: set data.validation."
        )
    ends = {
        "quarter": math.ceil(len(curve) / 4),
        "half": math.ceil(len(curve) / 2),
        "end": len(curve),
    }
    numbers = {f"neg_elbo_{name}": curve[index - 1][1] for name, index in ends.items()}
    numbers |= {
        name: value
        for name, value in case.record.curve[-1].items()
        if name.startswith("validation_")
    }
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
        raise ValueError(
            f"{case.record.name} has noted nothing of {of}: set train.track, or name another layer."
        )
    numbers = {"step": row["step"]} | {
        what: fmean(values) for what, values in noted.items()
    }
    if "validation_nll" in row:
        numbers["neg_elbo"] = row["validation_nll"] + row["kl"]
    every = [
        {n: v for n, v in one.items() if n.partition(".")[2]} | {"step": one["step"]}
        for one in curve
    ]
    return numbers, every


def prior_functions(case: Case) -> Found:
    """Functions from the implicit priors of dropout and EMP (Chang et al. 2019, Figure 3)."""
    from slimbayes.diagnostics import prior_plots

    torch.manual_seed(case.seed)
    x = torch.linspace(-5, 5, 4001)
    drawn: dict[str, Tensor] = {
        m: prior_plots.prior_functions(m, x, **case.options)
        for m in prior_plots.METHODS
    }
    case.draw(lambda: prior_plots.plot_prior_functions(x, drawn))
    numbers = {
        f"steps_{method}": prior_plots.mean_steps(values)
        for method, values in drawn.items()
    }
    return numbers, numbers


def induced_priors(case: Case) -> Found:
    """Priors over weights that those over factors induce: their densities near zero and in the tail."""
    from slimbayes.diagnostics import prior_plots

    points = torch.linspace(-4, 4, 800)
    case.draw(lambda: prior_plots.plot_induced_priors(points))
    at = torch.tensor([0.1, 4.0])
    found = {
        name: prior_plots.induced_prior(at, prior).tolist()
        for name, prior in prior_plots.FIGURE.items()
    }
    names = dict(zip(found, ("fixed", "normal", "cauchy", "student"), strict=True))
    numbers = {
        f"{names[n]}_{place}": v
        for n, both in found.items()
        for place, v in zip(("zero", "tail"), both)
    }
    return numbers, found


# --- how long a training step takes, beside that of a point estimate (k-tied Normal, Table 4) ---

_ROWS, _TRAINING_ROWS, _WARM = 32, 60_000, 5
_PRIOR = sb.Normal(0.0, 0.3)
POSTERIORS: dict[str, sb.Config] = {
    "point": sb.Deterministic(),
    "mean-field": sb.MeanField(prior=_PRIOR),
    "2-tied": sb.KTied(rank=2, prior=_PRIOR),
}


def step_times(case: Case) -> Found:
    """Milliseconds of a step of `posterior` over `steps` steps, taken in turn with those of a point estimate: a machine
    that slows down slows both. Steps are eager, with Adam and a GPU waited for; `step_ratio` is of medians."""
    device = case.execution.device
    torch.manual_seed(case.seed)
    own, point = (
        _step(POSTERIORS[case.options["posterior"]], device),
        _step(POSTERIORS["point"], device),
    )
    taken: list[tuple[float, float]] = []
    for _ in range(int(case.options.get("steps", 300)) + _WARM):
        taken.append((_timed(own, device), _timed(point, device)))
    mine, theirs = zip(*taken[_WARM:], strict=True)
    numbers = {
        "step_ms": fmean(mine),
        "step_ms_sem": stdev(mine) / math.sqrt(len(mine)),
        "step_ratio": median(mine) / median(theirs),
    }
    return numbers, numbers | {
        "median_ms": median(mine),
        "device": device.type,
        "torch": torch.__version__,
    }


def _step(config: sb.Config, device: torch.device) -> Callable[[], None]:
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model = sb.bayesianize(net, config).to(device)
    x, y = (
        torch.randn(_ROWS, 784, device=device),
        torch.randint(10, (_ROWS,), device=device),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        sb.elbo(
            sb.categorical(sb.sample(model, x), y), model, _TRAINING_ROWS
        ).loss.backward()
        optimizer.step()

    return step


def _timed(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


_ALL = (
    elbo, truncation, spectrum, scales, snr, tracked, corruption, density, reliability, draws, convergence,
    induced_priors, prior_functions, step_times,
)  # fmt: skip
DIAGNOSTICS: dict[str, Callable[[Case], Found]] = {one.__name__: one for one in _ALL}
