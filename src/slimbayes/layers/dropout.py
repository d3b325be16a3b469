"""Dropout layers: they have no weights, but which units they drop is a draw, in eval mode too.

Dropout that a module calls as a function inside its forward cannot be converted; `functional_dropout` finds it.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, LinearMap
from slimbayes.posteriors.base import Site, Unit


@dataclass
class DropMap(LinearMap):
    """The identity, and how the layer drops: its rate, its unit, and whether it keeps the moments of SELU activations."""

    rate: float = 0.0
    unit: Unit = "element"
    selu: bool = False


def _identity(x: Tensor, weight: Any, bias: Any) -> Tensor:
    return x


class _BayesDropout(BayesLayer):
    bayes_kind = "dropout"
    read_names = ()
    unit: Unit = "element"
    selu = False
    unbatched: int | None = None  # dimensions of an input without a row axis, where torch allows one

    def sites(self) -> list[Site]:
        return [Site("units", 0, 0, False, "", (0,), positions="many", kind="dropout")]

    def linear_map(self, site: str, batch_dim: int = 0) -> DropMap:
        name, empty = self.posterior[site].name, torch.empty(0)
        return DropMap(
            empty, None, _identity, _identity, batch_dim, 1, name, rate=self.p, unit=self.unit, selu=self.selu
        )  # type: ignore[arg-type]

    def bayes_forward(self, input: Tensor) -> Tensor:
        if input.dim() == self.unbatched:
            return self.project_draw("units", input.unsqueeze(0), 0).squeeze(0)
        return self.project_draw("units", input)


class BayesDropout(_BayesDropout, nn.Dropout):
    """Shape: any; every element is dropped on its own."""

    plain = nn.Dropout


class BayesDropout1d(_BayesDropout, nn.Dropout1d):
    """Shape: (R, C, L); whole channels are dropped."""

    plain, unit, unbatched = nn.Dropout1d, "channel", 2


class BayesDropout2d(_BayesDropout, nn.Dropout2d):
    """Shape: (R, C, H, W); whole channels are dropped."""

    plain, unit = nn.Dropout2d, "channel"


class BayesDropout3d(_BayesDropout, nn.Dropout3d):
    """Shape: (R, C, D, H, W); whole channels are dropped."""

    plain, unit, unbatched = nn.Dropout3d, "channel", 4


class BayesAlphaDropout(_BayesDropout, nn.AlphaDropout):
    """Shape: any; dropped elements get SELU's negative limit, and mean and variance are kept."""

    plain, selu = nn.AlphaDropout, True


class BayesFeatureAlphaDropout(_BayesDropout, nn.FeatureAlphaDropout):
    """Shape: (R, C, ...); whole channels are dropped as in AlphaDropout."""

    plain, selu, unit = nn.FeatureAlphaDropout, True, "channel"


DROPOUTS = (BayesDropout, BayesDropout1d, BayesDropout2d, BayesDropout3d, BayesAlphaDropout, BayesFeatureAlphaDropout)


def functional_dropout(model: nn.Module) -> dict[str, str]:
    """Modules that drop units inside their own forward, which no conversion can reach: name -> what was found.

    Attention and recurrent layers say so by their `dropout` attribute; other modules are found by the calls in the source of
    their forward, whatever the rate given there.

    Example:
        >>> functional_dropout(nn.Sequential(nn.LSTM(2, 2, num_layers=2, dropout=0.1)))
        {'0': 'dropout=0.1 between its layers'}
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            where = "between its layers" if isinstance(module, nn.RNNBase) else "on its attention weights"
            if module.dropout > 0:
                found[name] = f"dropout={module.dropout} {where}"
        elif not type(module).__module__.startswith("torch.nn."):
            calls = _dropout_calls(type(module))
            if calls:
                found[name] = f"calls {', '.join(calls)} in its forward"
    return found


def _dropout_calls(cls: type[nn.Module]) -> list[str]:
    """Names of the functions of torch that a class's forward calls for dropout, in order."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return []  # no source: defined in a console or compiled
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rsplit(".", 1)[-1]
        own = name.startswith("self.")  # a submodule: a dropout layer is found as such
        plain = last in (
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
            "dropout_",
        )
        attends = last == "scaled_dot_product_attention" and len(node.args) > 4  # the fifth is dropout_p
        if not own and (plain or attends or any(k.arg in ("dropout_p", "dropout") for k in node.keywords)):
            calls.append(name)
    return list(dict.fromkeys(calls))
