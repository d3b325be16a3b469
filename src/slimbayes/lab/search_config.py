"""What a search is: the `search:` of a sweep's file.

search:
  metric: validation_nll
  trials: 30
  space:
    train.optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}
    method.members: [2, 4, 8]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, merged, validate
from slimbayes.lab.labels import at, labelled
from slimbayes.report.record import read


class Search(BaseModel):
    """What is searched for, and where.

    Attributes:
        metric: "validation_nll", "validation_accuracy" or "validation_rmse"; scores of the test rows, "test_nll", are refused unless `allow_test`.
        direction: by default the one in which the metric is better.
        trials: of the whole search, over all processes and calls.
        pruner: "median" stops a trial whose metric is worse after an epoch than the median of the others' at that epoch; it lets `startup`
            trials finish first and each trial train for `warmup` epochs.
        seed: of the sampler (TPE); a trial's values are a function of it and of the trials before.
        space: from paths of the config to {low, high, log, step}, whole numbers if both bounds are, or to a list of values or a mapping from labels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str = "validation_nll"
    direction: Literal["minimize", "maximize"] | None = None
    trials: int = Field(30, ge=1)
    pruner: Literal["median", "none"] = "median"
    startup: int = Field(5, ge=0)
    warmup: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    allow_test: bool = False
    space: dict[str, list[Any] | dict[str, Any]] = Field(min_length=1)

    @model_validator(mode="after")
    def _sound(self) -> Search:
        role, _, score = self.metric.partition("_")
        if role not in ("validation", "test") or score not in _BETTER:
            known = ", ".join(f"validation_{name}" for name in ("nll", "accuracy", "rmse"))
            raise ValueError(f"unknown metric {self.metric!r}. Known: {known}, and test_<score> with allow_test.")
        if role == "test" and not self.allow_test:
            raise ValueError(
                f"{self.metric} would choose values by the test rows, whose scores then say nothing about new data. Search by validation_{score} with "
                f"data.validation: 0.1, or say allow_test: true if these rows are not your test."
            )
        if role == "validation" and score not in ("nll", "accuracy", "rmse"):
            raise ValueError(
                f"validation rows are scored by nll, and accuracy or rmse, after each epoch; got {self.metric!r}."
            )
        if self.direction not in (None, _BETTER[score]):
            raise ValueError(f"direction is {self.direction!r}, but {score} is better the other way.")
        return self

    @property
    def aim(self) -> str:
        return _BETTER[self.metric.partition("_")[2]]


# The direction in which each score is better.
_BETTER = dict.fromkeys(
    ("nll", "brier", "ece", "mce", "adaptive_ece", "classwise_ece", "aurc", "rmse", "crps"), "minimize"
)
_BETTER |= dict.fromkeys(("accuracy", "top5", "auroc", "aucpr", "lpd"), "maximize")


def check(chosen: Search, base: Experiment) -> None:
    """Refuse a space that holds values which are not valid, and a metric that a run would not have."""
    if chosen.metric.startswith("validation_") and not base.data.validation:
        raise ConfigError(
            f"search.metric {chosen.metric} is of validation rows: set data.validation in the base, to 0.1 say."
        )
    for path, given in chosen.space.items():
        listed = {} if is_range(path, given) else labelled(path, given)
        for value in listed.values() or [_number(dict(given)[end]) for end in ("low", "high")]:
            validate(merged(base.resolved, at(path, value)), f"search.space.{path} = {value}")


def is_range(path: str, given: Any) -> bool:
    """Whether a part of a space is a range of numbers; raises ConfigError for one that cannot be."""
    if not isinstance(given, Mapping) or not {"low", "high"} & given.keys():
        return False
    if not {"low", "high"} <= given.keys() <= {"low", "high", "log", "step"}:
        raise ConfigError(
            f"search.space.{path} needs low and high, perhaps log or step, and nothing else; got {', '.join(given)}."
        )
    low, high = _number(given["low"]), _number(given["high"])
    if not low < high or (given.get("log") and low <= 0) or (given.get("log") and given.get("step")):
        raise ConfigError(
            f"search.space.{path} needs low < high, with log also 0 < low and no step; got {dict(given)}."
        )
    return True


def _number(value: Any) -> float:
    try:  # YAML takes 1e-3, without a dot, for text
        return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"The bounds of a search must be numbers, got {value!r}.") from None


def distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    """Optuna's form of a space; of values that are listed it sees the labels."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    out: dict[str, Any] = {}
    for path, given in space.items():
        if not is_range(path, given):
            out[path] = CategoricalDistribution(tuple(labelled(path, given)))
            continue
        low, high, log, step = _number(given["low"]), _number(given["high"]), bool(given.get("log")), given.get("step")
        whole = isinstance(low, int) and isinstance(high, int)
        out[path] = (
            IntDistribution(low, high, log, step or 1) if whole else FloatDistribution(low, high, log=log, step=step)
        )
    return out


def value_of(folder: Path, chosen: Search) -> float:
    """A finished run's metric: of the epoch whose weights were kept, or of the test rows with the most draws."""
    record = read(folder)
    role, _, score = chosen.metric.partition("_")
    if role == "test":
        scores = [e for e in record.evaluations if e.role == "test" and score in e.metrics]
        return max(scores, key=lambda e: e.draws).metrics[score] if scores else math.nan
    rows = [row for row in record.curve if chosen.metric in row]
    if record.config["train"].get("early_stop"):  # keeps the weights of the epoch with the lowest NLL
        rows = sorted(rows, key=lambda row: -row["validation_nll"])
    return rows[-1][chosen.metric] if rows else math.nan
