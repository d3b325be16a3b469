"""Why a method loses to the plain network: each cause from records in which it is the only one."""

from typing import Any

import pytest
from slimbayes_lab.report.groups import RunGroup
from slimbayes_lab.report.record import Evaluation, ParameterCounts, Record, RunCost
from slimbayes_lab.report.tables import reasons


def group(
    name: str,
    nll: list[float],
    train: list[float],
    kl: float = 0.0,
    few: float | None = None,
) -> RunGroup:
    """Runs with these NLLs of test rows, all with this curve; `few` is the NLL with one draw instead of four."""

    def run(seed: int, value: float) -> Record:
        scores = {4: value} | ({1: few} if few is not None else {})
        tests = [
            Evaluation(data="d", role="test", draws=n, rows=9, metrics={"nll": v})
            for n, v in scores.items()
        ]
        curve: list[Any] = [
            {"epoch": e, "nll": v, "kl": 10 * kl, "kl_weight": 0.1}
            for e, v in enumerate(train, 1)
        ]
        return Record(
            name=name, method="Deterministic" if name == "plain" else name, data="d", seed=seed, config={},
            config_hash="", commands=[], parameters=ParameterCounts(plain=1, total=1), curve=curve, evaluations=tests,
            cost=RunCost(train_seconds=1, seconds_per_epoch=1),
        )  # fmt: skip

    return RunGroup(
        "d", name, tuple(run(seed, value) for seed, value in enumerate(nll))
    )


PLAIN = group("plain", [0.1, 0.1, 0.1], [0.05] * 20)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            group("a", [0.2] * 3, [0.25] * 20, kl=0.5),
            "its KL of 0.500 a row outweighs that. A lower temperature",
        ),
        (
            group("a", [0.2] * 3, [0.25] * 20, kl=0.01),
            "the noise of its draws costs that; its KL is 0.010 a row.",
        ),
        (
            group("a", [0.2] * 3, [0.06] * 20, kl=0.5),
            "It fits nearly as well (a draw's NLL on training rows is 0.060 against",
        ),
        (
            group("a", [0.2] * 3, [1.0] * 18 + [0.5, 0.25], kl=0.5),
            "was still learning: 0.750 in the last tenth of 20",
        ),
        (
            group("a", [0.2] * 3, [0.25] * 20, few=0.3),
            "From 1 to 4 draws it gained 0.100: take more.",
        ),
        (
            group("a", [0.2] * 3, [0.25] * 20),
            "'a' on 'd' has an NLL of 0.200 against 0.100 of 'plain'. It fits",
        ),
        (
            group("a", [0.2, 0.2, 0.05], [0.25] * 20),
            "of 'plain', within what 3 seeds differ by. It fits",
        ),
        (
            group("a", [0.2], [0.25] * 20),
            "of 'plain', with one seed in common. It fits",
        ),
        (group("a", [0.2] * 3, []), "The records hold no losses of training"),
    ],
)
def test_the_cause_is_told(other: RunGroup, told: str) -> None:
    (note,) = reasons([PLAIN, other])
    assert told in note


def test_nothing_is_told_of_what_does_not_lose() -> None:
    assert not list(reasons([PLAIN, group("a", [0.05] * 3, [0.25] * 20, kl=0.5)]))
    assert not list(
        reasons([group("a", [0.2] * 3, [0.25] * 20)])
    )  # there is nothing to lose to
