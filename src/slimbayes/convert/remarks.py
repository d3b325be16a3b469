"""What bayesianize says about a model that is converted, and probably not as it was meant, or cannot be; and save of
what it cannot hold.
"""

import warnings

import torch
from torch import nn

from slimbayes.convert.plan import FIXED_CODE, Decision
from slimbayes.distributions.families import Signs
from slimbayes.engine import passes
from slimbayes.errors import SlimbayesWarning
from slimbayes.layers.dropout import functional_dropout
from slimbayes.posteriors.configs.whole_modules import MCDropout
from slimbayes.posteriors.ensemble import EnsemblePosterior


def refuse_fixed_code(model: nn.Module) -> None:
    """Raise for a model whose forward cannot be changed, or whose copies would have their old one."""
    if isinstance(model, FIXED_CODE):
        raise ValueError(
            "The model is TorchScript or a module of torch.fx, whose code is fixed and whose copies forget what became "
            "of them: convert the module that it was made of."
        )
    own = "forward" in vars(model)  # as of a compiled one
    if (
        not own
        and type(model).forward is nn.Module.forward
        and type(model).__call__ is not nn.Module.__call__
    ):
        raise ValueError(
            f"{type(model).__name__} has a __call__ of its own and no forward: nobody knows which of its layers "
            f"belong to one call. Rename it to forward."
        )


def report_functional_dropout(model: nn.Module, decisions: list[Decision]) -> None:
    """Where the model's own dropout layers are turned on, dropout inside a forward stays off in eval mode: say so."""
    if not any(
        isinstance(d.config, MCDropout) and "Dropout" in d.kind for d in decisions
    ):
        return
    for name, what in functional_dropout(model).items():
        warnings.warn(
            f"{name or 'the model itself'} {what}: MCDropout turns on dropout layers, but this stays off in eval "
            f"mode. Make it an nn.Dropout layer if it is meant to be part of the posterior.",
            stacklevel=3,
        )
        known = next(
            (d for d in decisions if d.name == name and d.config is None), None
        )
        if known is None:
            decisions.append(
                Decision(
                    name,
                    type(model.get_submodule(name)).__name__,
                    None,
                    f"functional dropout: {what}",
                )
            )
        else:
            known.reason += f"; functional dropout: {what}"


def report_signs(model: nn.Module, decisions: list[Decision]) -> None:
    """Random signs undo what a network has learned; that it has is known where batch norm has counted batches."""
    signed = next(
        (
            d
            for d in decisions
            if isinstance(getattr(d.config, "mean_init", None), Signs)
        ),
        None,
    )
    counters = (
        b
        for name, b in model.named_buffers()
        if name.endswith("num_batches_tracked") and not b.is_meta
    )
    if signed is not None and any(int(counter) for counter in counters):
        warnings.warn(
            f"{signed.name}: factors that start at random signs ({signed.config!r}) undo what this network has been "
            f"trained for. Use mean_init=Normal(1.0, 0.05) to keep it, or signs before training.",
            SlimbayesWarning,
            stacklevel=3,
        )


def report_members(model: nn.Module) -> None:
    """Say where members of an ensemble do not start as the network did."""
    ensembles = [
        p for p in passes.posteriors_of(model) if isinstance(p, EnsemblePosterior)
    ]
    if ensembles and all(p.alike for p in ensembles):
        what = "nothing in them could start anew, as where weights are buffers or stored as integers. Give factory="
        warnings.warn(
            f"The members of this Ensemble are all alike: {what}.",
            SlimbayesWarning,
            stacklevel=3,
        )
    for posterior in ensembles:
        if posterior.note:
            whose = posterior.name or "the model"
            told = f"Ensemble of {whose}: {posterior.note}. Give factory= to start them alike."
            warnings.warn(told, SlimbayesWarning, stacklevel=3)


def report_unsaved(model: nn.Module, base: bool) -> None:
    """Warn of what makes a model what it is and is no tensor of its state: `load` cannot bring it back."""
    state = {
        name: value
        for name, value in model.state_dict().items()
        if not isinstance(value, torch.Tensor)
    }
    left = [name for name in state if base or ".posterior." in f".{name}"]
    ensembles = [
        p for p in passes.posteriors_of(model) if isinstance(p, EnsemblePosterior)
    ]
    differ = [
        ".".join(filter(None, (p.name, p.unlike()))) for p in ensembles if p.unlike()
    ]
    for names, what in (
        (left, "is no tensor"),
        (differ, "differs between members and is not in their state"),
    ):
        if names:
            warnings.warn(
                f"save writes the tensors of a model's state alone, and {', '.join(names[:5])} {what}: once loaded, it "
                f"is as in the model that is loaded into.",
                SlimbayesWarning,
                stacklevel=3,
            )
