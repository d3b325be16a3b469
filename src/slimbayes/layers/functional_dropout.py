"""Dropout that a module calls as a function inside its forward: no conversion can reach it, but it can be found."""

import ast
import inspect
import re
import textwrap
from typing import Any

from torch import nn

from slimbayes.layers.base import registered


def functional_dropout(model: nn.Module) -> dict[str, str]:
    """Modules that drop units inside their own forward, which no conversion can reach: name -> what was found.

    Attention and recurrent layers say so by their `dropout` attribute; other modules are found by the calls in the
    source of their forward, whatever the rate given there.

    Example:
        >>> functional_dropout(nn.Sequential(nn.LSTM(2, 2, num_layers=2, dropout=0.1)))
        {'0': 'dropout=0.1 between its layers'}
    """
    found = {}
    for name, module in model.named_modules():
        known = registered(module)
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
    except (OSError, TypeError, SyntaxError, IndentationError):
        return []  # no source: defined in a console or compiled
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rsplit(".", 1)[-1]
        own = name.startswith("self.")  # a submodule: a dropout layer is found as such
        plain = re.fullmatch(r"dropout([123]d|_)?|(feature_)?alpha_dropout", last)
        attends = last == "scaled_dot_product_attention" and len(node.args) > 4  # the fifth is dropout_p
        if not own and (plain or attends or any(k.arg in ("dropout_p", "dropout") for k in node.keywords)):
            calls.append(name)
    return list(dict.fromkeys(calls))
