"""Priors that are not in the KL: weight decay through optimizer groups, and the L2 penalty of Ensemble Model Patching.

Both follow from what a parameter is (`Role`), which its posterior says.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.distributions.sums import squared_norms
from slimbayes.engine.modules import modules_of, plan_once, posteriors_of
from slimbayes.layers import kind_of
from slimbayes.layers.base import BayesLayer
from slimbayes.layers.copied import Copied
from slimbayes.posteriors.base import Posterior, Role


class Described(NamedTuple):
    """A parameter of a model: of a posterior or the network's own, what it is, and whether the KL has a prior on it."""

    name: str
    parameter: nn.Parameter
    of_posterior: bool
    role: Role
    in_kl: bool
    is_weight: bool  # or else a bias


def described(model: nn.Module) -> list[Described]:
    """What every parameter of a model is, in the model's order: worked out when parameters are others than before."""
    modules = modules_of(model)
    if torch.compiler.is_compiling():
        return _described(model, modules)
    names = list(chain.from_iterable([m._parameters for m in modules]))
    parameters = list(chain.from_iterable([m._parameters.values() for m in modules]))
    found: list[Any] = plan_once(
        posteriors_of(model), "described", list
    )  # penalties ask in every step
    if (
        found
        and found[0] == names
        and len(found[1]) == len(parameters)
        and all(map(is_, found[1], parameters))
    ):
        return found[2]
    found[:] = names, parameters, _described(model, modules)
    return found[2]


def _described(model: nn.Module, modules: list[nn.Module]) -> list[Described]:
    known: dict[int, Described] = {}
    for posterior in (m for m in modules if isinstance(m, Posterior)):
        for name, p in posterior.named_parameters():
            role, in_kl = posterior.role(name), posterior.regularises_mean
            weight = name == "weight" if role == "component" else _is_weight(name, p)
            known[id(p)] = Described(name, p, True, role, in_kl, weight)
    for layer in (m for m in modules if isinstance(m, BayesLayer)):
        for site in layer.sites():
            q: Any = layer.posterior[site.name]
            own = [(site.parameter, q.regularises_mean, True)]
            own += (
                [(site.bias_parameter, q.regularises_bias, False)] if site.bias else []
            )
            for name, in_kl, weight in own:
                owner, _, last = name.rpartition(".")
                found = layer.get_submodule(owner)._parameters.get(last)
                if found is None:
                    continue  # torch.nn.utils computes it from others, which keep their own decay
                weight = (
                    weight if q.own_role == "component" else _is_weight(name, found)
                )
                at = id(found)
                in_kl = in_kl or (
                    at in known and known[at].in_kl
                )  # projections of attention share a bias
                known[at] = Described(name, found, False, q.own_role, in_kl, weight)
    every: list[Described] = []
    for name, p in model.named_parameters():
        one = known.get(id(p)) or Described(
            name, p, False, "weight", False, _is_weight(name, p)
        )
        every.append(one if one.name == name else one._replace(name=name))
    return every


def _is_weight(name: str, parameter: Tensor) -> bool:
    return name.endswith("weight") or parameter.dim() > 1


def param_groups(
    model: nn.Module,
    weight_decay: float | Mapping[str, float] = 0.0,
    lr: float | None = None,
    posterior_lr_multiplier: float = 1.0,
    apart: bool = False,
    scale_lr_multiplier: float = 1.0,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: decay on the network's own parameters and copies of them, on no other
    posterior.

    Copies are the members of an `Ensemble`, and components of the patching family whose prior is left to weight decay.

    The prior on W is a weight decay on kernels, biases and norm parameters. An L2 penalty lambda * ||w||^2, as the
    papers write it, is weight_decay = 2 * lambda here.

    Args:
        weight_decay: for all of them, or {"kernels": ..., "biases": ..., "norms": ...} apart, none where one is not
            named.
        lr: base learning rate; needed when a multiplier is not 1.
        posterior_lr_multiplier: learning rate of the posterior parameters relative to the rest (the papers'
            fast_weight_lr_multiplier); components and members are weights like any, and train at the base rate.
        apart: never put shared parameters and those of patches (components, the first of which is the layer's own, and
            variational ones) into one group; each then says which it has, group["part"], for coordinate descent.
        scale_lr_multiplier: learning rate of posteriors' widths relative to that of their means. Widths are logarithms
            that have orders of magnitude to go, and Adam moves them by about its rate in a step: a short fine-tuning
            leaves them where they start unless theirs is larger (docs/fine_tuning.md).

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1())
        >>> opt = torch.optim.SGD(param_groups(net, weight_decay=2e-4, lr=0.1, posterior_lr_multiplier=0.5), lr=0.1)
        >>> [(g["weight_decay"], g["lr"]) for g in opt.param_groups]
        [(0.0002, 0.1), (0.0, 0.05)]
    """
    for factor in (posterior_lr_multiplier, scale_lr_multiplier):
        if (
            not 0 <= factor < math.inf
        ):  # optimizers do not look at the rates of their groups
            raise ValueError(
                f"A multiplier of learning rates must be a number from 0 on, got {factor!r}."
            )
    if lr is None and not posterior_lr_multiplier == scale_lr_multiplier == 1.0:
        raise ValueError(
            "param_groups needs lr= to apply a posterior_lr_multiplier or a scale_lr_multiplier."
        )
    decay_of = _decays(model, weight_decay)
    groups: dict[_Group, list[nn.Parameter]] = {}
    for p in described(model):
        variational = p.role not in ("weight", "component")
        undecayed = (
            variational or p.in_kl
        )  # a decay on top of the KL's would be a second prior
        decay = 0.0 if undecayed else decay_of(p.name)
        part = ("shared" if p.role == "weight" else "patch") if apart else ""
        width = p.of_posterior and p.role == "scale" and scale_lr_multiplier != 1.0
        if p.parameter.requires_grad:
            group = _Group(p.of_posterior, variational, undecayed, decay, part, width)
            groups.setdefault(group, []).append(p.parameter)
    out = []
    for group in sorted(
        groups, key=lambda g: g[:3]
    ):  # in a fixed order: a checkpoint of an optimizer counts on it
        one: dict[str, Any] = {"params": groups[group], "weight_decay": group.decay}
        if lr is not None:
            faster = posterior_lr_multiplier if group.variational else 1.0
            one["lr"] = lr * (faster * (scale_lr_multiplier if group.width else 1.0))
        if apart:
            one["part"] = group.part
        out.append(one)
    return out


class _Group(NamedTuple):
    """What the parameters of one group of an optimizer have in common."""

    of_posterior: bool
    variational: bool
    undecayed: bool
    decay: float
    part: str  # "shared" or "patch", where they are kept apart
    width: bool  # whether they are widths of posteriors, with a rate of their own


def networks_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters of each network in a model: of the members of a deep ensemble, which share none, else all in one.

    A loss that is summed over networks trains each as it would train alone: `len(networks_of(model)) * nll`, where the
    likelihoods here give their average.
    """
    if not isinstance(model, Copied):
        return [list(model.parameters())]
    others: Any = model.posterior["members"].others
    theirs = [list(other.parameters()) for other in others]
    known = {id(p) for parameters in theirs for p in parameters}
    return [[p for p in model.parameters() if id(p) not in known], *theirs]


def _check_factors(factors: Mapping[str, float]) -> None:
    """Refuse factors of penalties that are none: optimizers do not look at those of their groups."""
    for name, factor in factors.items():
        if not 0 <= factor < math.inf:
            raise ValueError(
                f"{name} is the factor of a penalty and must be a number from 0 on, got {factor!r}."
            )


def _decays(
    model: nn.Module, weight_decay: float | Mapping[str, float]
) -> Callable[[str], float]:
    """Weight decay by a parameter's name."""
    _check_factors(
        weight_decay
        if isinstance(weight_decay, Mapping)
        else {"weight_decay": weight_decay}
    )
    if not isinstance(weight_decay, Mapping):
        return lambda name: weight_decay
    if unknown := set(weight_decay) - {"kernels", "biases", "norms"}:
        raise ValueError(
            f"weight_decay knows kernels, biases and norms, got {sorted(unknown)}."
        )
    norms = tuple(
        f"{n}." if n else "" for n, m in model.named_modules() if kind_of(m) == "norm"
    )

    def kind(name: str) -> str:
        if name.startswith(
            norms
        ):  # a posterior sits under its layer: components of a norm are norms too
            return "norms"
        return (
            "biases"
            if name.rsplit(".", 1)[-1].startswith("bias") or name.endswith("_bias")
            else "kernels"
        )

    return lambda name: weight_decay.get(kind(name), 0.0)


def l2(
    model: nn.Module,
    patched_weights: float = 0.0,
    patched_biases: float = 0.0,
    shared_weights: float = 0.0,
    shared_biases: float = 0.0,
) -> Tensor:
    """The L2 penalty with four factors that Ensemble Model Patching trains with (its Appendix C.1).

        patched_weights sum_ik |M_ik|^2 + patched_biases sum_jk |m_jk|^2
            + shared_weights sum_i |M_i|^2 + shared_biases sum_j |m_j|^2

    "Patched" are the layers with components (all K of them, the layer's own included), "shared" all others, members of
    an ensemble among them; the fourth sum runs over the shared layers, not over the patched ones as printed. Weights
    are parameters named "weight" or of two and more dimensions. The paper takes 0.001 / batch size for all four.
    Together with `kl`, whose terms for patched layers carry tau, rho and the probabilities, l2(model,
    shared_weights=tau / 2, shared_biases=rho / 2) is Eq. 6.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> net = sb.bayesianize(net, sb.ModelPatch(components=3, init="ones"))
        >>> round(l2(net, patched_weights=1.0).item(), 4)  # three scales of one for each of two channels
        6.0
    """
    factors = {
        ("component", True): patched_weights,
        ("component", False): patched_biases,
        ("weight", True): shared_weights,
        ("weight", False): shared_biases,
    }
    for factor in factors.values():
        _check_factors({"A factor of l2": factor})
    groups: dict[float, list[Tensor]] = {}
    for p in described(model):
        factor = factors.get((p.role, p.is_weight), 0.0)
        groups.setdefault(factor, []).append(p.parameter)
    # One sum for each factor: a network has hundreds of small parameters.
    terms = [factor * squared_norms(same) for factor, same in groups.items() if factor]
    return (
        sum(terms[1:], terms[0])
        if terms
        else torch.zeros((), device=next(model.parameters()).device)
    )
