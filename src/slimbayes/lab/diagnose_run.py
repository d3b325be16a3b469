"""`slimbayes diagnose RUN`: everything the diagnostics say of one run, as plain data and as lines of 80 characters.

What a posterior cannot be asked (a spectrum of picks, a k-hat without a density) is said in a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slimbayes.diagnostics.check import lines as check_lines
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.lab.case import Case
from slimbayes.lab.diagnose import elbo, snr, spectrum, truncation
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import diagnose_fit
from slimbayes.lab.paper_table import Numbers
from slimbayes.lab.run_folder import read_curve

WIDTH = 80
_NAME = 26  # characters of a layer's name
_SCORES = ("neg_elbo", "draw_nll", "kl", "nll", "accuracy", "ece", "mce", "rmse", "lpd", "crps")
_SHOWN = ("neg_elbo", "nll", "accuracy", "ece", "rmse", "lpd")  # scores of truncated posteriors
_LABELS = {"neg_elbo": "-ELBO", "draw_nll": "NLL of a draw", "kl": "KL"}


def diagnose_run(run: Path, execution: Execution, draws: int = 16) -> dict[str, Any]:
    """Look at a finished run: ELBO, scores and calibration of its test rows, the check of its fit with k-hat, spectrum,
    scales cut to ranks 1 to 3 where its matrices have them, and the noise of gradients.

    Args:
        draws: of each member, for scores.

    Example:
        >>> diagnose_run(Path("runs/two-tied-0123456789ab"), Execution())["scores"]["neg_elbo"]  # doctest: +SKIP
        0.52
    """
    case = Case(run, run, draws, execution=execution)
    experiment, network, task, _ = case.loaded
    found: dict[str, Any] = {"run": experiment.name, "method": experiment.method_text, "data": task.name}
    found |= {"draws": draws, "notes": []}

    def add(name: str, ask: Callable[[], Any]) -> None:
        try:
            found[name] = ask()
        except (ValueError, TypeError, NotImplementedError, ArithmeticError) as error:
            found["notes"].append(f"{name}: {error}")

    add("scores", lambda: elbo(case)[0])
    add("check", lambda: dict(diagnose_fit(case.loaded, run, read_curve(run))))
    try:
        narrowest = min(min(site.posterior.site.matrix) for site in gaussian_sites(network))
    except ValueError as error:
        found["notes"].append(f"spectrum, truncation and SNR: {error}")
        return found
    add("spectrum", lambda: spectrum(replace(case, picture=None))[1])
    for rank in (rank for rank in (1, 2, 3) if rank <= narrowest):
        add(f"rank {rank}", partial(_cut, case, rank))
    add("snr", lambda: snr(case)[1])
    return found


def _cut(case: Case, rank: int) -> Numbers:
    return truncation(replace(case, options={"rank": rank}))[0]


def lines(found: Mapping[str, Any]) -> list[str]:
    """What was found in lines of at most 80 characters.

    Example:
        >>> print("\\n".join(lines({"run": "a", "method": "KTied(rank=2)", "data": "digits", "draws": 4, "notes": []})))
        a: KTied(rank=2), digits
    """
    return [line for whole in _lines(found) for line in _folded(whole)]


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
        yield from (f"  {line}" for line in check_lines(check))
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
            yield f"  {_short(name)} {shape:>11}   {shown}    {one['means'][0]:6.4f}"
    cut = {name: scores for name, scores in found.items() if name.startswith("rank ")}
    if cut:
        names = [name for name in _SHOWN if any(name in scores for scores in cut.values())]
        yield ""
        yield "Scales cut to a rank"
        yield "  " + f"{'':<10}" + "".join(f"{_LABELS.get(name, name):>12}" for name in names)
        for label, scores in {"as trained": found.get("scores", {}), **cut}.items():
            cells = "".join(f"{scores[name]:>12.4f}" if name in scores else f"{'-':>12}" for name in names)
            yield f"  {label:<10}{cells}"
    if ratios := found.get("snr"):
        yield ""
        yield "Signal-to-noise ratio of the gradients of scales, ten batches, as trained"
        yield f"  {'layer':<{_NAME}} {'mean':>12} {'median':>12}"
        for name, mean in ratios["mean"].items():
            yield f"  {_short(name)} {mean:>12.4g} {ratios['median'][name]:>12.4g}"


def _short(name: str) -> str:
    """A layer's name in a column: its end, where it is long."""
    return f"{name if len(name) <= _NAME else '…' + name[1 - _NAME :]:<{_NAME}}"


def _folded(line: str) -> Iterator[str]:
    """A line, or pieces of it that fit, cut between words where they have any."""
    while len(line) > WIDTH:
        at = line.rfind(" ", len(line) - len(line.lstrip()) + 1, WIDTH + 1)
        at = at if at > 0 else WIDTH
        yield line[:at].rstrip()
        line = f"    {line[at:].lstrip()}"
    yield line
