"""What others offer for the same: layers of torch-uncertainty and bayesian-torch, and LoRA from peft.

Each is optional. Packages are opened without running their `__init__`, which would import trainers, plots and
quantisation: their layers need nothing but torch (torch-uncertainty's also einops), so wheels on PYTHONPATH will do.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

NUM_DATA = 50_000  # rows of a training set, by which every KL is divided
# bayesian-torch's prior and start, as in its own examples.
PRIOR = {
    "prior_mu": 0.0,
    "prior_sigma": 1.0,
    "posterior_mu_init": 0.0,
    "posterior_rho_init": -3.0,
    "moped_enable": False,
    "moped_delta": 0.5,
}


def package(name: str) -> None:
    """Make the modules of a package importable without importing what its `__init__` does."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    bare = types.ModuleType(name)
    bare.__path__, bare.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[name] = bare


def replaced(
    model: nn.Module, swaps: dict[type[nn.Module], Callable[[nn.Module], nn.Module]]
) -> nn.Module:
    """The model with its layers of these very types swapped."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in swaps:
                setattr(parent, name, swaps[type(child)](child))
    return model


def tu_batch_ensemble(model: nn.Module, members: int) -> nn.Module:
    package("torch_uncertainty")
    package("torch_uncertainty.layers")
    layers = importlib.import_module("torch_uncertainty.layers.batch_ensemble")
    linear = partial(layers.BatchLinear.from_linear, num_estimators=members)
    conv = partial(layers.BatchConv2d.from_conv2d, num_estimators=members)
    return replaced(model, {nn.Linear: linear, nn.Conv2d: conv})


def tu_bayes(model: nn.Module) -> nn.Module:
    package("torch_uncertainty")
    package("torch_uncertainty.layers")
    layers = importlib.import_module("torch_uncertainty.layers.bayesian.bayes_linear")
    return replaced(
        model,
        {
            nn.Linear: lambda layer: layers.BayesLinear(
                layer.in_features, layer.out_features
            )
        },
    )


def tu_kl(model: nn.Module) -> Tensor:
    """log q - log p of the draw, as its ELBO takes it."""
    layers = [m for m in model.modules() if hasattr(m, "log_variational_posterior")]
    return (
        sum(
            (m.log_variational_posterior - m.log_prior for m in layers), torch.zeros(())
        )
        / NUM_DATA
    )


def bt(model: nn.Module, kind: str) -> nn.Module:
    """bayesian-torch's own conversion; kind: "Flipout" or "Reparameterization"."""
    package("bayesian_torch")
    module = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    module.dnn_to_bnn(model, PRIOR | {"type": kind})
    return model


def bt_kl(model: nn.Module) -> Tensor:
    module = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    return module.get_kl_loss(model) / NUM_DATA


def lora(model: nn.Module, targets: str | list[str] | None = None) -> nn.Module:
    """LoRA of rank 8 on peft's layers of choice for the model, or on those named."""
    peft = importlib.import_module("peft")
    fan = {"fan_in_fan_out": True} if type(model).__name__.startswith("GPT2") else {}
    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=targets, **fan)
    )
