"""Faults in what is handed in: numbers that are none, and more rows than fit."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault_suite import TOLD, Count, ask, fault, small_net
from lab_configs import CPU, MINE, X, dense, experiment, mine
from slimbayes_lab.data import Dataset
from slimbayes_lab.finished.predict_file import predict_file
from slimbayes_lab.runs.fit import fit

import slimbayes as sb

NUMBERS = (float("nan"), float("inf"), float("-inf"))
WORDS = ("nan", "inf")  # one of them is in every such refusal
CONFIGS: dict[str, Any] = {
    "plain": sb.Deterministic(),
    "rank1": sb.Rank1(members=2),
    "batchensemble": sb.BatchEnsemble(members=2),
    "mean-field": sb.MeanField(),
    "2-tied": sb.KTied(rank=2),
    "matrix-normal": sb.MatrixNormal(),
    "emp": sb.ModelPatch(components=3, patch="output"),
    "drop-connect": sb.DropConnect(),
    "ensemble": sb.Ensemble(members=2),
    "mixture": sb.Mixture(components=2),
}
MIB = 2**20


def refused(
    count: Count, what: str, run: Callable[[], Any], words: tuple[str, ...] = WORDS
) -> None:
    """Count a call that must be refused in words."""
    try:
        run()
        count.add(False, f"{what}: accepted in silence")
    except TOLD as error:
        count.add(
            any(word in str(error).lower() for word in words),
            f"{what}: {type(error).__name__}: {error}",
        )
    except Exception as error:
        count.add(False, f"{what}: {type(error).__name__}: {error}")


def spoilt(tensor: torch.Tensor, number: float, dice: random.Random) -> torch.Tensor:
    """A copy with one number replaced."""
    out = tensor.detach().clone()
    out.view(-1)[dice.randrange(out.numel())] = number
    return out


@fault(
    "NaN or infinity in the inputs of `predict`, 11 methods",
    "refused in words; never a label",
    "scikit-learn refuses NaN in every estimator; GPyTorch names NaN in its factorisations; "
    "libraries of Bayesian nets do not look",
)
def odd_inputs(place: Path, dice: random.Random) -> Count:
    count = Count()
    for name, config in CONFIGS.items():
        net = sb.bayesianize(dense(3), config)
        sb.predict(net, X)
        for number in NUMBERS:
            refused(
                count,
                f"{name}, {number}",
                lambda n=number, net=net: sb.predict(net, spoilt(X, n, dice)),
            )
    return count


@fault(
    "NaN or infinity in a weight, base or posterior, 11 methods",
    "`predict` and `save` refuse in words that name the parameter",
    "not looked for by the libraries compared",
)
def odd_weights(place: Path, dice: random.Random) -> Count:
    count = Count()
    for name, config in CONFIGS.items():
        net = sb.bayesianize(dense(3), config)
        sb.predict(net, X)
        for parameter, value in list(net.named_parameters()):
            number, bad = dice.choice(NUMBERS), copy.deepcopy(net)
            with torch.no_grad():
                bad.get_parameter(parameter).copy_(spoilt(value, number, dice))
            refused(
                count,
                f"{name}, {parameter} {number}: predict",
                lambda bad=bad: sb.predict(bad, X),
            )
            refused(
                count,
                f"{name}, {parameter}: save",
                lambda bad=bad: sb.save(bad, place / "net", base=True),
            )
    return count


@fault(
    "NaN, infinity and labels out of range in the data of `fit`",
    "refused in words before training",
    "scikit-learn refuses NaN in inputs and targets; Lightning trains on them unless asked to look",
)
def odd_data(place: Path, dice: random.Random) -> Count:
    count, real, label = Count(), X[:, :1].clone(), torch.arange(60) % 3
    for number in NUMBERS:
        for rows in (slice(0, 40), slice(40, 60)):
            x, y = X.clone(), real.clone()
            x[rows], y[rows] = (
                spoilt(x[rows], number, dice),
                spoilt(y[rows], number, dice),
            )
            where = "training" if rows.start == 0 else "test"
            _train(
                count,
                f"{number} in {where} inputs",
                mine(x, label, "a", "b", "c"),
                3,
                place,
            )
            _train(count, f"{number} in {where} targets", mine(X, y), 1, place)
    for odd in (-1, 3, 255, -100):
        y = label.clone()
        y[dice.randrange(40)] = odd
        words = ("label", "class", "target")
        _train(count, f"label {odd}", mine(X, y, "a", "b", "c"), 3, place, words)
    return count


def _train(
    count: Count,
    what: str,
    data: Dataset,
    outputs: int,
    place: Path,
    words: tuple[str, ...] = WORDS,
) -> None:
    chosen = experiment(**MINE, train={"epochs": 1, "batch": 20})
    folder = place / str(count.injected)

    def run() -> None:
        try:
            fit(chosen, folder, CPU, network=dense(outputs), dataset=data)
        finally:
            assert not list(folder.glob("checkpoints/step-*")), "it had trained by then"

    refused(count, what, run, words)


# --- more rows than fit ---


@fault(
    "a million rows through `predict`, 200,000 through `predict -o`",
    "no more than 300 MiB above the model and the result",
    "not promised by any library compared",
)
def memory_predict(place: Path, dice: random.Random) -> Count:
    count, net, x = Count(), small_net(), torch.randn(1_000_000, 4)
    rows = lambda: sb.predict(net, x, draws=2, keep_samples=False)  # noqa: E731
    answer = ask(lambda: growth(rows), seconds=240, memory=8 * 2**30)
    kept = answer.kind == "value" and answer.value[0] - answer.value[1] < 300 * MIB
    count.figures["library, MiB above the result"] = (
        answer.kind == "value" and (answer.value[0] - answer.value[1]) // MIB
    )
    count.add(kept, f"library: {answer} {answer.value}")
    data = mine(X, torch.arange(60) % 3, "a", "b", "c")
    chosen = experiment(
        **MINE | {"model": {"kind": "mlp", "hidden": [8]}},
        train={"epochs": 1, "batch": 20},
    )
    run = fit(chosen, place / "run", CPU, dataset=data)
    np.savetxt(
        place / "x.csv",
        np.random.default_rng(0).random((200_000, 4)),
        "%.5f",
        ",",
        header="a,b,c,d",
        comments="",
    )
    call = lambda: predict_file(run, place / "x.csv", place / "out.csv", 2, "cpu")  # noqa: E731
    answer = ask(lambda: growth(call), seconds=240, memory=8 * 2**30)
    count.figures["command line, MiB"] = (
        answer.kind == "value" and answer.value[0] // MIB
    )
    count.add(
        answer.kind == "value" and answer.value[0] < 300 * MIB,
        f"command line: {answer} {answer.value}",
    )
    return count


def growth(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of memory that a call took at its peak, and those of the tensors it returned."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    result = run()
    tensors = (
        [t for t in vars(result).values() if isinstance(t, torch.Tensor)]
        if hasattr(result, "__dict__")
        else []
    )
    return _status("VmHWM") - before, sum(t.numel() * t.element_size() for t in tensors)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
