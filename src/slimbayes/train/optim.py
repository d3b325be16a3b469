"""Priors that are not in the KL: weight decay through optimizer groups, and the L2 penalty of Ensemble Model Patching."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import wide
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.posteriors.member_norm import MemberNormPosterior
from slimbayes.posteriors.mixture import MixturePosterior

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(
    model: nn.Module,
    weight_decay: float | Mapping[str, float] = 0.0,
    lr: float | None = None,
    posterior_lr_multiplier: float = 1.0,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: decay on the network's own parameters and on copies of them, none on other posteriors.

    Copies are the members of an `Ensemble`, and components of the patching family whose prior is left to weight decay (tau=None).

    The prior on W is a weight decay on kernels, biases and norm parameters. An L2 penalty lambda * ||w||^2, as the papers write
    it, is weight_decay = 2 * lambda here.

    Args:
        weight_decay: for all of them, or {"kernels": ..., "biases": ..., "norms": ...} apart, none where one is not named.
        lr: base learning rate; needed when posterior_lr_multiplier is not 1.
        posterior_lr_multiplier: learning rate of the posterior parameters relative to the rest (the papers' fast_weight_lr_multiplier);
            components and members are weights like any, and train at the base rate.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1())
        >>> opt = torch.optim.SGD(param_groups(net, weight_decay=2e-4, lr=0.1, posterior_lr_multiplier=0.5), lr=0.1)
        >>> [(g["weight_decay"], g["lr"]) for g in opt.param_groups]
        [(0.0002, 0.1), (0.0, 0.05)]
    """
    if posterior_lr_multiplier != 1.0 and lr is None:
        raise ValueError("param_groups needs lr= to apply a posterior_lr_multiplier.")
    own = {id(p) for posterior in posteriors_of(model) for p in posterior.parameters()}
    means = {id(p) for p in _means_with_a_prior(model)}
    decayed = {id(p) for posterior in posteriors_of(model) for p in posterior.decayed()}
    alike = {id(p) for posterior in posteriors_of(model) for p in posterior.weights_of_components()}
    rates = _rates(model, weight_decay)
    members = (
        lambda p: id(p) not in own and id(p) not in means,
        lambda p: id(p) not in own and id(p) in means,
        lambda p: id(p) in own and id(p) in decayed,
        lambda p: id(p) in own and id(p) in alike - decayed,
        lambda p: id(p) in own and id(p) not in alike | decayed,
    )
    groups: list[dict[str, Any]] = []
    for index, member in enumerate(members):
        found: dict[float, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad and member(p):
                found.setdefault(rates(name) if index in (0, 2) else 0.0, []).append(p)
        factor = posterior_lr_multiplier if index == 4 else 1.0
        rate = {} if lr is None else {"lr": lr * factor}
        groups += [{"params": params, "weight_decay": decay, **rate} for decay, params in found.items()]
    return groups


def _rates(model: nn.Module, weight_decay: float | Mapping[str, float]) -> Callable[[str], float]:
    """Weight decay by a parameter's name."""
    if not isinstance(weight_decay, Mapping):
        return lambda name: weight_decay
    if unknown := set(weight_decay) - {"kernels", "biases", "norms"}:
        raise ValueError(f"weight_decay knows kernels, biases and norms, got {sorted(unknown)}.")
    norms = {f"{n}." if n else "" for n, m in model.named_modules() if isinstance(m, _NORMS)}

    def kind(name: str) -> str:
        # A posterior sits under its layer: components of a norm are norms too.
        if any(name.startswith(norm) for norm in norms):
            return "norms"
        return "biases" if name.rsplit(".", 1)[-1].startswith("bias") or name.endswith("_bias") else "kernels"

    return lambda name: weight_decay.get(kind(name), 0.0)


def l2(
    model: nn.Module,
    patched_weights: float = 0.0,
    patched_biases: float = 0.0,
    shared_weights: float = 0.0,
    shared_biases: float = 0.0,
) -> Tensor:
    """The L2 penalty with four factors that Ensemble Model Patching trains with (its Appendix C.1).

        patched_weights sum_ik |M_ik|^2 + patched_biases sum_jk |m_jk|^2 + shared_weights sum_i |M_i|^2 + shared_biases sum_j |m_j|^2

    "Patched" are the layers with components (all K of them, the layer's own included), "shared" all others; the fourth sum runs over
    the shared layers, not over the patched ones as printed. Weights are parameters named "weight" or of two and more dimensions. The paper
    takes 0.001 / batch size for all four. Together with `kl`, whose terms for patched layers carry tau, rho and the probabilities,
    l2(model, shared_weights=tau / 2, shared_biases=rho / 2) is Eq. 6.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), sb.ModelPatch(components=3, init="ones"))
        >>> l2(net, patched_weights=1.0)  # three scales of one for each of two channels
        tensor(6., grad_fn=<AddBackward0>)
    """
    patched = _patched(model)
    plain = (
        MixturePosterior,
        EnsemblePosterior,
        MemberNormPosterior,
    )  # what they hold are weights; an ensemble's members count as shared layers
    others = {
        id(p) for posterior in posteriors_of(model) if not isinstance(posterior, plain) for p in posterior.parameters()
    }
    others |= {id(p.logits) for p in posteriors_of(model) if isinstance(p, MixturePosterior)}
    groups: dict[float, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in others:
            continue
        weight = patched.get(id(parameter), name.endswith("weight") or parameter.dim() > 1)
        factors = (patched_weights, patched_biases) if id(parameter) in patched else (shared_weights, shared_biases)
        groups.setdefault(factors[0] if weight else factors[1], []).append(parameter.flatten())
    # One sum for each factor: a network has hundreds of small parameters.
    terms = [factor * wide(torch.cat(same)).square().sum() for factor, same in groups.items() if factor]
    return sum(terms, torch.zeros((), device=next(model.parameters()).device))


def _patched(model: nn.Module) -> dict[int, bool]:
    """Parameters (by identity) that are components of patched layers, the layers' own included: whether they are weights."""
    out: dict[int, bool] = {}
    for layer in (m for m in model.modules() if isinstance(m, BayesLayer)):
        for site in layer.sites():
            posterior = layer.posterior[site.name]
            if isinstance(posterior, MixturePosterior):
                out |= {id(p): n == "weight" for n, p in posterior.named_parameters() if n != "logits"}
                out |= {id(p): True for p in parameters_behind(layer, site.parameter)}
                if site.bias:
                    out |= {id(p): False for p in parameters_behind(layer, site.bias_parameter)}
    return out


def _means_with_a_prior(model: nn.Module) -> list[nn.Parameter]:
    """Weights that the KL regularises as posterior means: a decay on top would be a second prior."""
    out = []
    for layer in model.modules():
        if isinstance(layer, BayesLayer):
            for site in layer.sites():
                posterior: Any = layer.posterior[site.name]
                if posterior.regularises_mean:
                    out += parameters_behind(layer, site.parameter)
                if posterior.regularises_bias:
                    out += parameters_behind(layer, site.bias_parameter)
    return out


def parameters_behind(layer: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameter of this name; none where torch.nn.utils computes it from others, which keep their own decay."""
    owner, _, last = name.rpartition(".")
    found = layer.get_submodule(owner)._parameters.get(last)
    return [] if found is None else [found]
