"""Methods: their Configs, a file for each family of them, and recipes. METHODS is the closed list that configs are read
back from; RECIPES has for each method the config and the temperature that scored best on small tasks (docs/recipes.md).
"""

import pkgutil
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

from slimbayes.distributions.families import Cauchy, Distribution, Normal
from slimbayes.distributions.priors import HeNormal
from slimbayes.errors import brief, did_you_mean
from slimbayes.posteriors.configs.base import Config
from slimbayes.posteriors.configs.mixture import ModelPatch
from slimbayes.posteriors.configs.rank1 import BatchEnsemble, Rank1
from slimbayes.posteriors.configs.weights import KTied, MeanField

_FOUND = [
    vars(import_module(f"{__name__}.{module.name}"))
    for module in pkgutil.iter_modules(__path__)
]
# Every config in a file of this package that no other one extends is a method: the file is all that one needs.
METHODS: dict[str, type[Config]] = {
    name: value
    for names in _FOUND
    for name, value in names.items()
    if isinstance(value, type)
    and issubclass(value, Config)
    and not value.__subclasses__()
}


def config_from_dict(data: dict[str, Any]) -> Config:
    """Build the config of any method from its JSON form.

    >>> config_from_dict({"kind": "BatchEnsemble", "members": 8}).members
    8
    """
    method = data.get("kind")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"Unknown method {brief(method)}{did_you_mean(str(method)[:80], METHODS)}"
        )
    return METHODS[method].from_dict(data)


Start = Literal["scratch", "trained"]
_STARTS: tuple[Start, ...] = get_args(Start)


class Recipe(NamedTuple):
    """What to give `bayesianize`, and the temperature to give `elbo`."""

    config: Config
    temperature: float = 1.0


def _rank1(
    prior: Distribution, temperature: float, scale_init: float | None = None
) -> Recipe:
    return Recipe(
        Rank1(prior=prior, mean_init=Normal(1.0, 0.2), scale_init=scale_init),
        temperature,
    )


def _patch(components: int, cross: bool = False) -> Recipe:
    return Recipe(
        ModelPatch(patch="norm", cross=cross, components=components, draws="example")
    )


# By method and start; a test holds them to what the records behind docs/recipes.md choose.
RECIPES: dict[str, dict[str, Recipe]] = {
    "rank-1 Normal": dict.fromkeys(_STARTS, _rank1(Normal(1.0, 0.1), 0.1)),
    # Tails are heavy: started at a scale of 1e-3, one row in six has a factor that is off by a half.
    "rank-1 Cauchy": {
        "scratch": _rank1(Cauchy(1.0, 0.1), 0.3, scale_init=1e-4),
        "trained": _rank1(Cauchy(1.0, 0.1), 0.1, scale_init=1e-4),
    },
    "BatchEnsemble": dict.fromkeys(
        _STARTS, Recipe(BatchEnsemble(mean_init=Normal(1.0, 0.3)))
    ),
    "2-tied": dict.fromkeys(
        _STARTS, Recipe(KTied(prior=HeNormal(), estimator="flipout"), 0.01)
    ),
    "mean-field": {
        "scratch": Recipe(MeanField(prior=HeNormal(), estimator="flipout"), 0.01),
        "trained": Recipe(
            MeanField(
                prior=HeNormal(),
                estimator="flipout",
                scale_init=3e-3,
                scale_jitter=3e-4,
            ),
            0.01,
        ),
    },
    "EMP": {"scratch": _patch(2), "trained": _patch(3)},
    "ECMP": dict.fromkeys(_STARTS, _patch(2, cross=True)),
}


def recipe(method: str, start: Start) -> Recipe:
    """The config and temperature that scored best on small tasks, by method and by where training starts.

    Args:
        method: "rank-1 Normal", "rank-1 Cauchy", "BatchEnsemble", "2-tied", "mean-field", "EMP" or "ECMP". The last two
            go to norms; on a network without norms use `replace(config, patch="output")`.
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
        raise ValueError(
            f"Unknown method {method!r}{did_you_mean(str(method)[:80], RECIPES)}"
        )
    if start not in _STARTS:
        raise ValueError(f"start must be 'scratch' or 'trained', got {start!r}.")
    return RECIPES[method][start]
