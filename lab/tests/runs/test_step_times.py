"""Step times of the k-tied paper's Table 4, against a clock that only steps move."""

import math
from typing import Any

import pytest
import torch
from lab_configs import CPU
from slimbayes_lab.finished.diagnose import Case
from slimbayes_lab.papers import diagnostics as module
from slimbayes_lab.papers.diagnostics import diagnose

import slimbayes as sb


def test_step_times_are_of_both_posteriors_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock that only steps move, times are those of the steps, the first five left out."""
    clock = [0.0]
    costs = {
        "mean-field": iter([1.0] * 5 + [0.006, 0.007, 0.008]),
        "point": iter([1.0] * 5 + [0.002] * 3),
    }

    def step(config: sb.Config, _: torch.device) -> Any:
        name = next(name for name, one in module.POSTERIORS.items() if one is config)
        return lambda: clock.__setitem__(0, clock[0] + next(costs[name]))

    monkeypatch.setattr(module, "_step", step)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    numbers, _ = diagnose(
        "step_times", Case(None, options={"posterior": "mean-field", "steps": 3})
    )
    assert numbers["step_ms"] == pytest.approx(7.0) and numbers[
        "step_ratio"
    ] == pytest.approx(3.5)
    assert numbers["step_ms_sem"] == pytest.approx(1 / math.sqrt(3))


@pytest.mark.parametrize("posterior", ["point", "mean-field", "2-tied"])
def test_every_posterior_of_the_step_times_trains(posterior: str) -> None:
    numbers, _ = diagnose(
        "step_times",
        Case(None, execution=CPU, options={"posterior": posterior, "steps": 2}),
    )
    assert numbers["step_ms"] > 0
