"""Finding where numbers went wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.train.elbo import check_finite


def explain(network: nn.Module, stepper: Any, batch: tuple[Tensor, ...]) -> str:
    """A sentence on where a step's numbers stop being finite: inputs, targets, parameters, or the first layer whose output is not."""
    x, y = stepper.rows(batch)
    for what, tensor in (("inputs", x), ("targets", y)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            row = (
                int((~tensor.flatten(1).isfinite().all(1)).nonzero()[0])
                if tensor.dim() > 1
                else int((~tensor.isfinite()).nonzero()[0])
            )
            return f"The {what} of row {row} of the batch hold NaN or infinity."
    try:
        check_finite(network)
    except FloatingPointError as error:
        return str(error)
    for name, parameter in network.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"The parameter {name} holds NaN or infinity."
    return _first_layer(network, stepper, x)


@torch.no_grad()
def _first_layer(network: nn.Module, stepper: Any, x: Tensor) -> str:
    from slimbayes.prediction.sample import sample

    found: list[str] = []
    handles = []
    for name, module in network.named_modules():
        if not any(module.children()):

            def look(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor) and output.is_floating_point() and not bool(output.isfinite().all()):
                    found.append(name)

            handles.append(module.register_forward_hook(look))
    try:
        sample(network, x, draws=stepper.experiment.train.draws, rows=stepper.experiment.train.rows)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"The first layer whose output is NaN or infinite is {found[0]!r}."
    return "All layers' outputs are finite, so it is the likelihood, the KL or the penalty that is not."
