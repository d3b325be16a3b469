"""Dropout layers, whose draw is which units they drop, in eval mode too; and dropout that a module calls as a function
inside its forward, which no conversion can reach, but which can be found.
"""

import ast
import inspect
import re
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine.rows import LinearMap
from slimbayes.layers.base import BayesLayer, bayes_form, registered_class
from slimbayes.layers.site import Site, Unit


class BayesDropLayer(BayesLayer):
    """What dropout layers share: `unit` is what they drop, `selu` whether they keep SELU's moments."""

    bayes_kind = "dropout"
    bayes_channel_dim = 1
    read_names = ()
    unit: Unit = "element"
    selu = False

    def sites(self) -> list[Site]:
        return [Site("units", 0, 0, False, "", (0,), positions="many", kind="dropout")]

    def bayes_op(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return x

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        return LinearMap(
            torch.empty(0),
            None,
            self.bayes_op,
            torch.mul,
            batch_dim,
            self.bayes_channel_dim,
        )

    def bayes_forward(self, input: Tensor) -> Tensor:
        return self.project_draw("units", input)


BayesDropout = bayes_form(
    BayesDropLayer, nn.Dropout
)  # any shape; every element is dropped on its own
# Whole channels of (R, C, ...) are dropped.
BayesDropout1d = bayes_form(
    BayesDropLayer, nn.Dropout1d, unit="channel", bayes_unbatched=2
)
BayesDropout2d = bayes_form(BayesDropLayer, nn.Dropout2d, unit="channel")
BayesDropout3d = bayes_form(
    BayesDropLayer, nn.Dropout3d, unit="channel", bayes_unbatched=4
)
# What is dropped gets SELU's negative limit, and mean and variance are kept.
BayesAlphaDropout = bayes_form(BayesDropLayer, nn.AlphaDropout, selu=True)
BayesFeatureAlphaDropout = bayes_form(
    BayesDropLayer, nn.FeatureAlphaDropout, selu=True, unit="channel"
)


def functional_dropout(model: nn.Module) -> dict[str, str]:
    """Modules that drop units inside their own forward, which no conversion can reach: name -> what was found.

    Attention and recurrent layers say so by their `dropout` attribute; other modules are found by the calls in the
    source of their forward, whatever the rate given there.
    """
    found = {}
    for name, module in model.named_modules():
        known = registered_class(module)
        rate: Any = getattr(module, "dropout", 0.0)
        if known is not None and known.inner_dropout:
            if rate > 0:
                found[name] = f"dropout={rate} {known.inner_dropout}"
        elif not type(module).__module__.startswith("torch.nn."):
            calls = _dropout_calls(type(module))
            if calls:
                found[name] = f"calls {', '.join(calls)} in its forward"
    return found


def _dropout_calls(cls: type[nn.Module]) -> list[str]:
    """Names of the functions of torch that a class's forward calls for dropout, in order."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (AttributeError, OSError, TypeError, SyntaxError, IndentationError):
        return []  # no source: defined in a console, compiled or scripted
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rsplit(".", 1)[-1]
        own = name.startswith("self.")  # a submodule: a dropout layer is found as such
        plain = re.fullmatch(r"dropout([123]d|_)?|(feature_)?alpha_dropout", last)
        attends = (
            last == "scaled_dot_product_attention" and len(node.args) > 4
        )  # the fifth is dropout_p
        if not own and (
            plain
            or attends
            or any(k.arg in ("dropout_p", "dropout") for k in node.keywords)
        ):
            calls.append(name)
    return list(dict.fromkeys(calls))
