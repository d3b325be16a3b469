"""Recipes: for each method the config and the temperature that scored best on small tasks (docs/recipes.md)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from slimbayes.distributions.families import Cauchy, Distribution, Normal
from slimbayes.distributions.priors import HeNormal
from slimbayes.errors import did_you_mean
from slimbayes.posteriors.configs.base import Config
from slimbayes.posteriors.configs.gaussian import KTied, MeanField
from slimbayes.posteriors.configs.model_patch import ModelPatch
from slimbayes.posteriors.configs.rank1 import BatchEnsemble, Rank1

Start = Literal["scratch", "trained"]
_STARTS: tuple[Start, ...] = ("scratch", "trained")


class Recipe(NamedTuple):
    """What to give `bayesianize`, and the temperature to give `elbo`."""

    config: Config
    temperature: float = 1.0


def _rank1(spread: float, prior: Distribution, temperature: float = 1.0) -> Recipe:
    return Recipe(Rank1(prior=prior, mean_init=Normal(1.0, spread)), temperature)


def _patch(cross: bool = False) -> Recipe:
    return Recipe(ModelPatch(patch="norm+output", cross=cross, components=3, draws="example", jitter=0.2))


# By method and start; a test holds them to what the records behind docs/recipes.md choose.
RECIPES: dict[str, dict[str, Recipe]] = {
    "rank-1 Normal": dict.fromkeys(_STARTS, _rank1(0.2, Normal(1.0, 0.1))),
    "rank-1 Cauchy": dict.fromkeys(_STARTS, _rank1(0.2, Cauchy(1.0, 0.1), 0.1)),
    "BatchEnsemble": {
        "scratch": Recipe(BatchEnsemble(mean_init=Normal(1.0, 0.5))),
        "trained": Recipe(BatchEnsemble(mean_init=Normal(1.0, 0.2))),
    },
    "2-tied": dict.fromkeys(_STARTS, Recipe(KTied(prior=HeNormal(), estimator="flipout"), 0.03)),
    "mean-field": {
        "scratch": Recipe(MeanField(prior=HeNormal(), estimator="flipout"), 0.01),
        "trained": Recipe(MeanField(prior=HeNormal(), estimator="flipout"), 0.1),
    },
    "EMP": dict.fromkeys(_STARTS, _patch()),
    "ECMP": dict.fromkeys(_STARTS, _patch(cross=True)),
}


def recipe(method: str, start: Start) -> Recipe:
    """The config and temperature that scored best on small tasks, by method and by where training starts.

    Args:
        method: "rank-1 Normal", "rank-1 Cauchy", "BatchEnsemble", "2-tied", "mean-field", "EMP" or "ECMP". The last two
            go to norms and the output; on a network without norms use `replace(config, patch="output")`.
        start: "scratch" for a network that has not been trained, "trained" for one that has and is trained on, half as
            long in the record. Where it must do what it did before any further training, use
            mean_init=Normal(1.0, 0.05), or Point(1.0).

    Example:
        >>> import slimbayes as sb, torch
        >>> config, temperature = recipe("2-tied", start="trained")
        >>> net = sb.bayesianize(torch.nn.Linear(4, 3), config)
        >>> nll = sb.categorical(sb.sample(net, torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
        >>> loss = sb.elbo(nll, net, num_data=1000, temperature=temperature).loss
    """
    if method not in RECIPES:
        raise ValueError(f"Unknown method {method!r}{did_you_mean(str(method)[:80], RECIPES)}")
    if start not in _STARTS:
        raise ValueError(f"start must be 'scratch' or 'trained', got {start!r}.")
    return RECIPES[method][start]
