"""What the reference asks of the library, in terms of the core that stands.

The only file that knows the core. It builds the network of a case, gives it parameters and
noise by the papers' names, and returns what comes out under the same names as
`paper.compute`. A new core changes this file and no other.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from reference.cases import BATCH, Case
from reference.paper import NUM_DATA, TARGET_SCALE, at, group
from reference.places import Tensors
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine import bare, calls, noise, passes
from slimbayes.engine.locate import layout_of
from slimbayes.engine.passes import Noise, Pass
from slimbayes.layers.base import Converted
from slimbayes.posteriors import flow_patch, gaussian, mc_dropout
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.posteriors.factors import Drawn
from slimbayes.posteriors.flow_patch import FlowPosterior
from slimbayes.posteriors.joint_normal import JointFactors
from slimbayes.posteriors.mc_dropout import DropoutPosterior
from slimbayes.posteriors.member_norm import MemberNormPosterior
from slimbayes.posteriors.mixture import MixturePosterior
from slimbayes.posteriors.rank1 import Rank1Posterior

SCALE_FLOOR = 1e-7  # that a factor's scale has on top of its softplus
ONE_BY_ONE = "outputs one by one"  # of draws that run one after another
ATTENTION_ROWS = {"q": 0, "k": 1, "v": 2}


def compute(case: Case, record: Tensors) -> Tensors:
    """Outputs, draws, KL, loss, gradients and buffers of a case, from the library."""
    torch.manual_seed(0)  # nothing random is left: what is must not come from here
    model = case.network.build().double().train(case.training)
    model = sb.bayesianize(model, config_of(case), include=include_of(case))
    places = places_of(model)
    leaves = {
        name: value.clone().requires_grad_()
        for name, value in group(record, "parameters").items()
    }
    own = own_parameters(case, model, places, leaves | group(record, "constants"))
    load(model, own, case, group(record, "buffers"), places)
    x = record["inputs"].clone()
    if x.is_floating_point():
        x.requires_grad_()
    given = group(record, "noise")
    found: Tensors = {}
    layout = layout_of(
        model, (x,), {}, passes.posteriors_of(model)
    )  # runs the model, too
    with forced_noise(places, given):
        outputs, drawn = run(case, model, layout, places, given, x)
        if may_run_one_by_one(case, places):
            found[ONE_BY_ONE] = run_one_by_one(case, model, layout, places, given, x)
        total = sb.kl(model)
        for name, posterior in places.items():
            if getattr(posterior, "mixture_kl", "") != "exact" and name:
                found[f"kl/{name}"] = posterior.kl()
    found |= drawn | {"outputs": outputs, "kl": total}
    if case.likelihood is None:
        loss = (record["coefficients"] * outputs).sum() + total / NUM_DATA
    else:
        loss = likelihood_loss(case, model, outputs, record["targets"])
    found["loss"] = loss
    loss.backward()
    found |= gradients(model, own, leaves)
    if x.grad is not None:
        found["gradients/inputs"] = x.grad
    if case.training:
        found |= buffers_after(model, places)
    return {name: in_double(value.detach()) for name, value in found.items()}


def in_double(value: Tensor) -> Tensor:
    """A KL without parameters of its own comes in float32."""
    return value.double() if value.is_floating_point() else value


def config_of(case: Case) -> Any:
    if "" in case.methods:
        return case.method
    return {re.escape(name): config for name, config in case.methods.items()}


def include_of(case: Case) -> Any:
    if "" in case.methods:
        return None
    return lambda name, module: name in case.methods


def places_of(model: nn.Module) -> dict[str, Any]:
    """The posteriors of a model by the parameter that they serve."""
    found: dict[str, Any] = {}
    for layer, module in model.named_modules():
        if not isinstance(module, Converted) or ".posterior." in f".{layer}.":
            continue
        for site, posterior in module.posterior.items():
            if isinstance(posterior, EnsemblePosterior):
                name = ""
            elif isinstance(module, nn.MultiheadAttention):
                size = module.embed_dim
                at_row = ATTENTION_ROWS.get(site, 0) * size
                rows = f"in_proj_weight[{at_row}:{at_row + size}]"
                name = f"{layer}.{'out_proj.weight' if site == 'out' else rows}"
            elif site == "units":
                name = layer
            else:
                name = f"{layer}.{site}"
            found[name] = posterior
    return found


def own_parameters(
    case: Case, model: nn.Module, places: dict[str, Any], leaves: Tensors
) -> Tensors:
    """The library's parameters by its own names, as functions of the papers'."""
    if "" in places:
        own = {}
        for name, every in leaves.items():
            own[name] = every[0]
            for k in range(1, len(every)):
                own[f"posterior.members.others.{k - 1}.{name}"] = every[k]
        return own
    own = {name: leaf for name, leaf in leaves.items() if ":" not in name}
    prefixes = {id(p): name for name, p in model.named_modules()}
    for place, posterior in places.items():
        p, start = at(leaves, place), prefixes[id(posterior)]
        bias = place.replace("weight", "bias")
        if "bias" in p:  # members add offsets to the layer's own bias
            own[bias] = p["bias"][0]
            own[f"{start}.bias"] = p["bias"][1:] - p["bias"][0]
        for name, other, values in (
            (place, "weight", p.get("components", p.get("members"))),
            (bias, "bias", p.get("bias.components", p.get("bias.members"))),
        ):
            if values is not None:
                own[name], own[f"{start}.{other}"] = values[0], values[1:]
        for name, value in translated(posterior, p).items():
            own[f"{start}.{name}"] = value
    return own


def translated(posterior: Any, p: Tensors) -> Tensors:
    """A posterior's own parameters, but for biases and components."""
    found: Tensors = {}
    for factor in ("r", "s"):
        if f"{factor}.loc" in p:
            found[f"{factor}.loc"] = p[f"{factor}.loc"]
        if f"{factor}.scale" in p:
            excess = p[f"{factor}.scale"] - SCALE_FLOOR
            found[f"{factor}.rho"] = excess.expm1().log()
    if "L" in p:
        joint = not hasattr(posterior, "factor")
        names = (
            ("log_scale", "lower") if joint else ("factor.log_scale", "factor.below")
        )
        root = p["L"].unsqueeze(0) if joint and p["L"].dim() == 2 else p["L"]
        found |= dict(zip(names, unit_triangle(root), strict=True))
    for factor, name in (("A", "rows"), ("B", "columns")):
        if factor in p:
            names = f"{name}.log_scale", f"{name}.below"
            found |= dict(zip(names, unit_triangle(p[factor]), strict=True))
            if p[factor].shape[-1] == 1:
                del found[f"{name}.below"]
    if "scale" in p and isinstance(posterior, FlowPosterior):
        found |= {name: p[name] for name in "uwc"}
        found["log_scale"] = p["scale"].log()
    elif "scale" in p:
        known = "weight_log_scale" if hasattr(posterior, "weight_log_scale") else ""
        own = posterior.get_parameter(known or "log_scale")
        found[known or "log_scale"] = p["scale"].log().view(own.shape)
    for name in ("directions", "logits"):
        if name in p:
            found[name] = p[name]
    for factor, name in (("U", "log_u"), ("V", "log_v")):
        if factor in p:
            found[name] = p[factor].log()
    if "bias.scale" in p:
        found["bias_log_scale"] = p["bias.scale"].log()
    for basis, name in (("basis of outputs", "left"), ("basis of inputs", "right")):
        if basis in p:
            found[name] = p[basis]
    return found


def unit_triangle(root: Tensor) -> tuple[Tensor, Tensor]:
    """log of the diagonal, and what lies below it relative to its row's diagonal."""
    diagonal, size = root.diagonal(dim1=-2, dim2=-1), root.shape[-1]
    row, column = torch.tril_indices(size, size, -1)
    return diagonal.log(), (root / diagonal.unsqueeze(-1))[..., row, column]


@torch.no_grad()
def load(
    model: nn.Module,
    own: Tensors,
    case: Case,
    buffers: Tensors,
    places: dict[str, Any],
) -> None:
    """Put all parameters and statistics into the model; none may be left as it started."""
    state = dict(own)
    for name, value in buffers.items():
        members = value.dim() and len(value) == sb.members(model)
        layer, _, last = name.rpartition(".")
        norm = places.get(f"{layer}.weight")
        if "" in places:
            state[name] = value[0]
            for k in range(1, len(value)):
                state[f"posterior.members.others.{k - 1}.{name}"] = value[k]
        elif isinstance(norm, MemberNormPosterior) and members:
            state[name] = value[0]
            state[f"{layer}.posterior.weight.{last}"] = value[1:]
        else:
            state[name] = value
    wanted = set(model.state_dict())
    for name in sorted(wanted - set(state)):
        if name.rpartition(".")[2] not in ("probs", "weights"):  # of the config
            raise AssertionError(f"{case.name}: {name} has no number in the reference.")
    for name in sorted(set(state) - wanted):
        raise AssertionError(f"{case.name}: the model has no {name}.")
    model.load_state_dict(state, strict=False)


def gradients(model: nn.Module, own: Tensors, leaves: Tensors) -> Tensors:
    """Gradients of the library's parameters as those of the papers'."""
    parameters = dict(model.named_parameters())
    values, weights = [], []
    for name, value in own.items():
        if value.requires_grad:
            gradient = parameters[name].grad
            values.append(value)
            weights.append(torch.zeros_like(value) if gradient is None else gradient)
    every = torch.autograd.grad(
        values, list(leaves.values()), weights, allow_unused=True
    )
    found = {}
    for (name, leaf), gradient in zip(leaves.items(), every, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        found[f"gradients/{name}"] = gradient
    return found


def buffers_after(model: nn.Module, places: dict[str, Any]) -> Tensors:
    """Statistics after the pass; those of members side by side."""
    found = {}
    for name, value in model.named_buffers():
        if ".posterior." in name:
            continue
        layer, _, last = name.rpartition(".")
        norm = places.get(f"{layer}.weight")
        if isinstance(norm, MemberNormPosterior):
            value = torch.cat([value[None], getattr(norm, last)])
        found[f"buffers after/{name}"] = value.clone()
    return found


def likelihood_loss(
    case: Case, model: nn.Module, outputs: Tensor, targets: Tensor
) -> Tensor:
    assert case.likelihood is not None
    name, form = case.likelihood
    options = {"likelihood_std": TARGET_SCALE} if "gaussian" in name else {}
    nll = getattr(sb, name)(outputs, targets, form=form, **options)
    return sb.elbo(nll, model, NUM_DATA).loss


def run(
    case: Case,
    model: nn.Module,
    layout: Any,
    places: dict[str, Any],
    given: Tensors,
    x: Tensor,
) -> tuple[Tensor, Tensors]:
    """Outputs under the given noise, and the draws."""
    posteriors = passes.posteriors_of(model)
    new = new_pass(case, model, layout, places, given)
    if case.call == "plain":
        outputs = calls.run_pass(new, posteriors, model, (x,), {})
    else:
        assert layout.folds, f"{case.name}: {layout.why}"
        outputs = calls.run_draws(model, posteriors, (x,), {}, new, layout, folds=True)
    drawn = {}
    for name, posterior in places.items():
        values = passes.run(new, draws_of, posterior) if name else {}
        for what, value in values.items():
            lines = value
            if new.noise[posterior.key].row.shape[1]:
                lead = case.draws, len(value) // case.draws
                lines = value.unflatten(0, lead)
            drawn[f"draws/{name}:{what}"] = lines
    return outputs, drawn


def new_pass(
    case: Case, model: nn.Module, layout: Any, places: dict[str, Any], given: Tensors
) -> Pass:
    """A pass with the given noise."""
    posteriors = passes.posteriors_of(model)
    if case.call == "plain":
        new = bare.bare_pass(posteriors, BATCH, layout, first=0)
    else:
        total, held = case.draws * BATCH, case.call == "fixed"
        new = Pass(case.draws, total, rowwise=layout.rowwise, held=held)
        noise.draw(posteriors, new)
    for name, posterior in places.items():
        if name:
            new.put(posterior.key, normals(posterior, at(given, name), new))
    return new


def may_run_one_by_one(case: Case, places: dict[str, Any]) -> bool:
    """Not where draws share batch statistics, nor where layers draw while they run."""
    late = any(getattr(posterior, "late", False) for posterior in places.values())
    return case.call != "plain" and not case.training and not late


@torch.no_grad()
def run_one_by_one(
    case: Case,
    model: nn.Module,
    layout: Any,
    places: dict[str, Any],
    given: Tensors,
    x: Tensor,
) -> Tensor:
    """Outputs of the same draws, one after another."""
    new, posteriors = (
        new_pass(case, model, layout, places, given),
        passes.posteriors_of(model),
    )
    return calls.run_draws(model, posteriors, (x,), {}, new, layout, folds=False)


def draws_of(posterior: Any) -> Tensors:
    """A posterior's draws of the pass under way, in the papers' words."""
    if isinstance(posterior, Rank1Posterior):
        drawn: Drawn = posterior.values()
        found = {"r": drawn.r, "s": drawn.s}
        if posterior.r.rank == 1:
            found = {name: value.unsqueeze(1) for name, value in found.items()}
        if isinstance(posterior, JointFactors) and posterior.parts[2]:
            own = posterior.linear_map().bias
            assert own is not None and drawn.bias is not None
            found["bias"] = own + drawn.bias
        return found
    late = getattr(posterior, "late", False) and not posterior.noise.block.shape[1]
    flips = getattr(posterior, "estimator", "") == "flipout"
    weightless = isinstance(posterior, MemberNormPosterior | DropoutPosterior)
    if late or weightless or (flips and posterior.per_row):
        return {}
    if isinstance(posterior, MixturePosterior):
        values = posterior.values()
        if values.mixed is not None:
            weight = values.mixed[0]
            return {"weight": weight if weight.dim() > 1 else weight[None]}
    return {"weight": posterior.weights(posterior.linear_map())[0]}


def normals(posterior: Any, e: Tensors, new: Pass) -> Noise:
    """The standard normals from which the core makes a posterior's draws."""
    own: Noise = new.noise[posterior.key]
    by_row = own.row.shape[1] > 0
    if isinstance(posterior, MixturePosterior):
        parts = []
        if "pick" in e:
            parts.append(
                normals_of_picks(e["pick"], posterior.probabilities().detach())
            )
        if "uniform" in e:
            parts.append(torch.special.ndtri(e["uniform"]).flatten(-2))
        parts += [e["e"]] if "e" in e else []
    elif "sign in" in e:
        weights = [e[name].flatten(1) for name in ("weight", "bias") if name in e]
        signs = torch.cat([e["sign in"], e["sign out"]], -1).flatten(0, 1)
        return Noise(torch.cat(weights, 1), normals_of_signs(signs))
    elif "direction" in e:
        parts = [e["direction"].flatten(1), e["length"].unsqueeze(1)]
    else:
        wanted = [n for n in ("r", "s", "weight", "bias", "e") if n in e]
        axes = 2 if by_row else 1
        parts = [e[name].flatten(axes) for name in wanted]
    if not parts:
        return own
    lines = torch.cat(parts, -1)
    if not by_row:
        assert lines.shape == own.block.shape
        return Noise(lines, own.row)
    lines = lines.flatten(0, 1)
    assert lines.shape == own.row.shape
    return Noise(own.block, lines)


def normals_of_picks(picks: Tensor, probabilities: Tensor) -> Tensor:
    """Normals whose quantile lies in the middle of a component's share."""
    upper = probabilities.double().cumsum(0)
    return torch.special.ndtri(upper - probabilities / 2)[picks]


def normals_of_signs(signs: Tensor) -> Tensor:
    """Normals of which each stands for eight signs, by the digits of its quantile."""
    wide = 8 * math.ceil(signs.shape[1] / 8)
    digits = nn.functional.pad(signs, (0, wide - signs.shape[1]), value=1.0) < 0
    values = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
    byte = (digits.unflatten(1, (-1, 8)) * values).sum(2)
    return torch.special.ndtri((byte + 0.5) / 256)


@contextmanager
def forced_noise(places: dict[str, Any], given: Tensors) -> Iterator[None]:
    """Give what is drawn while layers run, and in the KL, the reference's numbers."""
    names = {id(posterior): name for name, posterior in places.items()}

    def output_noise(posterior: Any, make: Any, shape: Any, dim: Any) -> Tensor:
        name = names[id(posterior)]
        return given[f"{name}:output"].reshape(tuple(shape))

    def kept(posterior: Any, x: Tensor, *args: Any) -> Tensor:
        keep = given[f"{names[id(posterior)]}:keep"]
        return keep.flatten(0, 1).reshape(x.shape) > 0

    with (
        patch.object(gaussian, "drawn_late", output_noise),
        patch.object(mc_dropout.DropoutPosterior, "_kept", kept),
        patch.object(flow_patch, "standard_normal", queue(kl_noise(places, given))),
        patch.object(torch, "randn_like", mixture_noise(places, given)),
    ):
        yield


def kl_noise(places: dict[str, Any], given: Tensors) -> list[Tensor]:
    """Noise of flows' KLs, in order: of the model's, then of each by itself."""
    flows = [n for n, p in places.items() if isinstance(p, FlowPosterior)]
    return [given[f"{name}:kl"] for name in flows] * 2


def queue(tensors: list[Tensor]) -> Callable[..., Tensor]:
    left = iter(tensors)
    return lambda *args, **options: next(left)


def mixture_noise(places: dict[str, Any], given: Tensors) -> Callable[..., Tensor]:
    """Noise of the KL of a mixture of members, of all factors side by side."""
    parts = [
        given[f"{name}:kl {factor}"]
        for name in places
        for factor in ("r", "s")
        if f"{name}:kl {factor}" in given
    ]
    return lambda like: torch.cat(parts, 2).reshape(like.shape)
