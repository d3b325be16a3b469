"""The methods as the papers write them: slow, in plain torch, and without the library.

It makes the numbers of a case and says what must come out: outputs, KL and gradients. What
the library computes in one large batch is computed here for one example after the other,
each by a plain layer with the weights of its draw.

Parameters have the papers' names, in the network's own: "0.weight:r.loc" is the location
of the factor r of the parameter "0.weight". Posteriors of a part of a parameter name its
rows: "attention.in_proj_weight[0:4]".

    loc, scale       of a family; mean and standard deviation of a Normal
    U, V             of inputs and of outputs: the standard deviations are U V^T
    L, A, B          lower triangular factors of a covariance, of rows and of columns
    components       all K of a weight or bias; the first is the network's own
    bias             of each member (K, out)

Noise is standard normal but for "pick" (which component), "uniform", "keep" (dropout) and
"sign" (flipout). That of a Cauchy is taken to its quantile.

Sizes: K members or components, S draws, n examples of a draw, L lines: draws, or examples
of draws where each has its own.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from reference.cases import BATCH, Case
from reference.places import Numbers, Place, Tensors, places_of
from reference.posteriors import (
    KINDS,
    Components,
    Dropout,
    Gaussian,
    JointFactors,
    JointWeights,
    MemberNorm,
    Posterior,
    RankOne,
)
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call

import slimbayes as sb

NUM_DATA = 7  # that the KL of a loss is divided by
TARGET_SCALE = 1.5  # of real targets


def posterior_of(config: Any, place: Place, case: Case) -> Posterior:
    """The posterior that a method has at a place, as a case calls it."""
    if isinstance(config, sb.JointNormal):
        kind: type[Posterior] = JointFactors
        if config.over == "weights":
            kind = JointWeights
    elif isinstance(config, sb.MCDropout):
        kind = Components if config.unit == "channel" else Dropout
    else:
        kind = KINDS[type(config)]
    if case.call == "fixed":  # all examples share a draw, and weights are drawn
        config = copy.copy(config)
        for field, value in (("draws", "member"), ("estimator", "reparam")):
            if hasattr(config, field):
                object.__setattr__(config, field, value)
    return kind(config, place, case.draws, examples_of_draw(case))


def examples_of_draw(case: Case) -> int:
    return BATCH // case.draws if case.call == "plain" else BATCH


def posteriors_of(case: Case) -> list[Posterior]:
    """All posteriors of a case, in the order of its layers."""
    network = case.network.build().double().eval()
    shapes = shapes_of(network, example_inputs(case, Numbers(case.name)))
    found = []
    for layer, config in case.methods.items():
        if layer == "":
            continue
        for place in places_of(network, layer):
            known = shapes.get(layer, ((), ()))
            place = Place(**vars(place) | {"inputs": known[0], "outputs": known[1]})
            found.append(posterior_of(config, place, case))
    return found


def shapes_of(network: nn.Module, x: Tensor) -> dict[str, Any]:
    """What one example gives each layer, and gets from it."""
    shapes: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if args and isinstance(output, Tensor):
                shapes[name] = tuple(args[0].shape[1:]), tuple(output.shape[1:])

        return hook

    for name, module in network.named_modules():
        module.register_forward_hook(note(name))
    network(x)
    return shapes


def example_inputs(case: Case, numbers: Numbers) -> Tensor:
    network = case.network
    if network.vocabulary:
        return numbers.integers("inputs", network.vocabulary, BATCH, *network.example)
    return numbers.normal("inputs", BATCH, *network.example)


def base_state(case: Case, numbers: Numbers) -> Tensors:
    """Fixed parameters and statistics of the plain network."""
    network, found = case.network.build().double(), {}
    norms = [f"{name}." for name in case.network.norms]
    for name, own in network.state_dict().items():
        scales = name.endswith("weight") and any(name.startswith(n) for n in norms)
        if name.endswith("num_batches_tracked"):
            found[name] = torch.tensor(3)
        elif name.endswith("running_var"):
            found[name] = numbers.positive(name, *own.shape)
        else:
            value = 0.6 * numbers.normal(name, *own.shape)
            found[name] = 1 + 0.5 * value if scales else value
    return found


def make(case: Case) -> Tensors:
    """All fixed numbers of a case, by group and name."""
    numbers, found = Numbers(case.name), {}
    state = base_state(case, numbers)
    members = isinstance(case.method, sb.Ensemble)
    x = example_inputs(case, numbers)
    trained = dict(case.network.build().named_parameters())
    found["inputs"] = x
    for name, value in state.items():
        group = "parameters" if name in trained else "buffers"
        if members:
            spread = numbers.normal(
                f"members {name}", case.method.members, *value.shape
            )
            each = value.expand_as(spread)
            value = each + 0.3 * spread if value.is_floating_point() else each.clone()
            value = value.abs() if name.endswith("running_var") else value
        found[f"{group}/{name}"] = value
    for posterior in posteriors_of(case):
        place = posterior.place.name
        own = Numbers(f"{case.name}/{place}")
        for name in posterior.replaces():
            del found[f"parameters/{name}"]
        for name, value in posterior.parameters(own).items():
            kind = "constants" if name in posterior.constant else "parameters"
            found[f"{kind}/{place}:{name}"] = value
        for name, value in posterior.noise(own).items():
            found[f"noise/{place}:{name}"] = value
        if isinstance(posterior, MemberNorm):
            layer = posterior.place.layer
            for name, value in posterior.buffers(own).items():
                found[f"buffers/{layer}.{name}"] = value
            count = torch.full((posterior.members,), 3)
            found[f"buffers/{layer}.num_batches_tracked"] = count
    shape = case.network.build().double().eval()(x).shape
    if case.likelihood is None:
        lead = () if case.call == "plain" else (case.draws,)
        found["coefficients"] = numbers.normal("coefficients", *lead, *shape)
    elif case.likelihood[0] == "categorical":
        found["targets"] = numbers.integers("targets", shape[-1], shape[0])
    elif case.likelihood[0] == "bernoulli":
        found["targets"] = numbers.integers("targets", 2, *shape).double()
    elif case.likelihood[0] == "gaussian":
        found["targets"] = numbers.normal("targets", *shape)
    else:
        found["targets"] = numbers.normal("targets", shape[0])
    return {name: value.contiguous() for name, value in found.items()}


def group(record: Tensors, name: str) -> Tensors:
    """The tensors of one group of a record, by the rest of their names."""
    start = f"{name}/"
    found = record.items()
    return {key[len(start) :]: t for key, t in found if key.startswith(start)}


def at(tensors: Tensors, place: str) -> Tensors:
    """Those of one place, by the name that the paper gives them."""
    start = f"{place}:"
    found = tensors.items()
    return {key[len(start) :]: t for key, t in found if key.startswith(start)}


def compute(case: Case, record: Tensors) -> Tensors:
    """What must come out: outputs, draws, KL, loss, gradients and buffers afterwards."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _compute(case, record)
    finally:
        torch.set_default_dtype(default)


def _compute(case: Case, record: Tensors) -> Tensors:
    parameters = {
        name: value.clone().requires_grad_()
        for name, value in group(record, "parameters").items()
    }
    noise = group(record, "noise")
    buffers = {n: b.clone() for n, b in group(record, "buffers").items()}
    x = record["inputs"].clone()
    leaves = dict(parameters)
    parameters |= group(record, "constants")
    if x.is_floating_point():
        leaves["inputs"] = x.requires_grad_()
    posteriors = posteriors_of(case)
    found: Tensors = {}
    if isinstance(case.method, sb.Ensemble):
        outputs = run_members(case, parameters, buffers, x)
    else:
        outputs = run_rows(case, posteriors, parameters, buffers, noise, x)
    terms = {}
    for posterior in posteriors:
        name = posterior.place.name
        own = at(parameters, name), parameters, at(noise, name)
        terms[name] = posterior.kl(*own)
        with torch.no_grad():
            drawn = posterior.values(*own)
        if getattr(posterior.config, "estimator", "") == "flipout":
            drawn = {}  # what an example meets is in the outputs
        for what, value in drawn.items():
            shaped = value.reshape(*posterior.lead, *value.shape[1:])
            found[f"draws/{name}:{what}"] = shaped
    total = sum(terms.values(), torch.zeros(()))
    exact = [p for p in posteriors if getattr(p.config, "mixture_kl", "") == "exact"]
    if exact:
        total = total - information(exact, parameters, noise)
    else:
        found |= {f"kl/{name}": term for name, term in terms.items()}
    found |= {"outputs": outputs, "kl": total}
    if case.likelihood is None:
        value = (record["coefficients"] * outputs).sum()
    else:
        value = negative_log_likelihood(*case.likelihood, outputs, record["targets"])
    found["loss"] = value + total / NUM_DATA
    gradients = torch.autograd.grad(
        found["loss"], list(leaves.values()), allow_unused=True
    )
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        zero = torch.zeros_like(leaf)
        found[f"gradients/{name}"] = zero if gradient is None else gradient
    if case.training:
        found |= {f"buffers after/{name}": value for name, value in buffers.items()}
    return {name: value.detach().contiguous() for name, value in found.items()}


def information(
    posteriors: list[RankOne], parameters: Tensors, noise: Tensors
) -> Tensor:
    """What a draw tells about its member, from one draw of each."""
    total: Any = 0.0
    for posterior in posteriors:
        name = posterior.place.name
        total = total + posterior.log_densities(at(parameters, name), at(noise, name))
    members = len(total)
    return (total.diagonal() - total.logsumexp(0)).mean() + math.log(members)


def run_members(case: Case, parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
    """Each member's network on its examples."""
    network = case.network.build().double().train(case.training)
    outputs = []
    members = case.method.members  # type: ignore[union-attr]
    for draw in range(case.draws):
        state = parameters | buffers
        own = {name: value[draw % members] for name, value in state.items()}
        part = x.chunk(case.draws)[draw] if case.call == "plain" else x
        outputs.append(functional_call(network, own, (part,)))
    return torch.cat(outputs) if case.call == "plain" else torch.stack(outputs)


def run_rows(
    case: Case,
    posteriors: list[Posterior],
    parameters: Tensors,
    buffers: Tensors,
    noise: Tensors,
    x: Tensor,
) -> Tensor:
    """All draws' examples at once, and each by itself in every layer that is drawn."""
    network = case.network.build().double().train(case.training)
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])
    for layer, own in by_layer(posteriors):
        module: Any = network.get_submodule(layer)
        module.forward = drawn_forward(module, own, parameters, buffers, noise)
    rows = x if case.call == "plain" else x.repeat(case.draws, *[1] * (x.dim() - 1))
    own = {n: parameters[n] for n, _ in network.named_parameters() if n in parameters}
    outputs = functional_call(network, own, (rows,))
    for name, buffer in network.named_buffers():
        if buffers[name].shape == buffer.shape:
            buffers[name] = buffer.clone()
    if case.call == "plain":
        return outputs
    return outputs.unflatten(0, (case.draws, BATCH))


def by_layer(posteriors: list[Posterior]) -> Iterator[tuple[str, list[Posterior]]]:
    for layer in dict.fromkeys(p.place.layer for p in posteriors):
        yield layer, [p for p in posteriors if p.place.layer == layer]


def drawn_forward(
    module: Any,
    posteriors: list[Posterior],
    parameters: Tensors,
    buffers: Tensors,
    noise: Tensors,
) -> Callable[..., Any]:
    """The forward of a layer under the draws of its posteriors."""
    first, layer = posteriors[0], posteriors[0].place.layer
    name, start = first.place.name, f"{layer}."
    own = at(parameters, name), parameters, at(noise, name)
    plain = copy.deepcopy(module)
    state = {n[len(start) :]: v for n, v in parameters.items() if n.startswith(start)}
    state = {n: v for n, v in state.items() if ":" not in n}
    if isinstance(first, Dropout):
        return lambda x: functional_call(plain, state, (first.dropped(x, own[2]),))
    if isinstance(first, MemberNorm):
        statistics = {
            n: buffers[f"{layer}.{n}"] for n in ("running_mean", "running_var")
        }
        if module.training:
            buffers[f"{layer}.num_batches_tracked"] += 1
        return lambda x: first.normalised(module, x, *own[:2], statistics)
    if getattr(first.config, "estimator", "") == "local":
        assert isinstance(first, Gaussian)
        return lambda x: first.local_output(plain, x, *own)
    drawn = [
        (
            p,
            *p.weights(
                at(parameters, p.place.name), parameters, at(noise, p.place.name)
            ),
        )
        for p in posteriors
    ]
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.training:
        return lambda x: joint_norm(module, x, *drawn[0])

    def forward(*args: Tensor, **options: Any) -> Any:
        outputs = []
        for row in range(len(args[0])):
            mine = dict(state)
            for posterior, weights, biases in drawn:
                line = posterior.line(row)
                put(mine, posterior.place, posterior.place.weight, weights[line])
                if biases is not None and posterior.place.bias is not None:
                    put(mine, posterior.place, posterior.place.bias, biases[line])
            inputs = tuple(a[row : row + 1] for a in args)
            out = functional_call(plain, mine, inputs, options)
            outputs.append(out[0] if isinstance(out, tuple) else out)
        joined = torch.cat(outputs)
        return (joined, None) if isinstance(out, tuple) else joined

    return forward


def put(state: Tensors, place: Place, name: str, value: Tensor) -> None:
    """Write the drawn value of a place among a layer's parameters."""
    if place.rows is not None:
        whole = state[name].clone()
        whole[place.rows] = value
        value = whole
    state[name] = value


def joint_norm(
    module: Any, x: Tensor, posterior: Posterior, weights: Tensor, biases: Any
) -> Tensor:
    """Batch norm in training: statistics of all examples of all draws together."""
    y = F.batch_norm(
        x, module.running_mean, module.running_var, None, None, True, 0.1, module.eps
    )
    module.num_batches_tracked += 1
    lines = [posterior.line(row) for row in range(len(x))]
    shape = -1, weights.shape[1], *[1] * (x.dim() - 2)
    return y * weights[lines].view(shape) + biases[lines].view(shape)


def negative_log_likelihood(
    name: str, form: str, outputs: Tensor, targets: Tensor
) -> Tensor:
    """The mean over examples; forms are those of the rank-1 paper's Appendix D."""
    if name == "categorical":
        every = targets.expand(outputs.shape[:2])
        log_p = torch.distributions.Categorical(logits=outputs).log_prob(every)
    elif name == "bernoulli":
        log_p = torch.distributions.Bernoulli(logits=outputs).log_prob(
            targets.expand_as(outputs)
        )
    elif name == "gaussian":
        log_p = Normal(outputs, TARGET_SCALE).log_prob(targets).sum(-1)
    else:
        # softplus in units of 0.3 of the spread, held between 0.03 and 3 of it
        wide = 3.0 * torch.tanh(0.3 * F.softplus(outputs[..., 1]) / 3.0)
        noise = TARGET_SCALE * (0.03**2 + wide.square()).sqrt()
        mean = outputs[..., 0]
        if form == "probs":
            noise = noise.square().mean(0, keepdim=True).sqrt()
            mean = mean.mean(0, keepdim=True)
        log_p = Normal(mean, noise).log_prob(targets)
    if form == "mixture":
        return -(log_p.logsumexp(0) - math.log(len(log_p))).mean()
    return -log_p.mean()
