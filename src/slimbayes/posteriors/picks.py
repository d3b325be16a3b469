"""Components that methods pick from: how they start, picks of them, and the picked weights, for one layer or for many.

Sizes: K components, n draws of a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.distributions.joining import side_by_side
from slimbayes.distributions.scales import widen
from slimbayes.engine.blocks import is_exporting, keep_in_memory
from slimbayes.engine.modules import places_of, plan_once
from slimbayes.engine.passes import Pass
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import Support
from slimbayes.posteriors.configs.mixture import ComponentConfig


@torch.no_grad()
def start_components(
    config: ComponentConfig,
    site: Site,
    layer: Any,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Set the further components (K - 1, ...) of a layer's weight and bias as the config says."""
    linear = layer.linear_map(site.name)
    if config.init == "copies":
        for others, own in ((weight, linear.weight), (bias, linear.bias)):
            if others is not None and own is not None:
                own = own.to(others.dtype)
                others.copy_(
                    own
                    + config.jitter
                    * own.square().mean().sqrt()
                    * torch.randn_like(others)
                )
    elif site.kind == "norm" and config.init != "fresh":
        for scales, biases in ((linear.weight, linear.bias), (weight, bias)):
            _fill(scales, config.init)
            _fill(biases, 0.0)
    elif weight is not None:  # a matrix has no ones to start at
        for k in range(len(weight)):
            fresh = copy.deepcopy(layer)
            for reset in resets(fresh):
                reset()
            start = fresh.linear_map(site.name)
            weight[k] = start.weight
            if bias is not None:
                bias[k] = start.bias


def resets(layer: nn.Module) -> list[Callable[[], None]]:
    """What starts a layer's parameters, children first: attention starts its output projection in its own way."""
    parts = [
        m for name, m in layer.named_modules() if name.split(".")[0] != "posterior"
    ]
    found = [
        getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
        for m in reversed(parts)
    ]
    return [reset for reset in found if reset is not None]


def _fill(tensor: Tensor | None, init: str | float) -> None:
    if tensor is None:
        return
    if init == "uniform":
        tensor.uniform_(0.0, 1.0)
    else:
        tensor.fill_(1.0 if init == "ones" else float(init))


class Assigned(NamedTuple):
    """Picks of one pass for weights and biases: integers, or one-hot numbers with a gradient; and the noise of Eq. 1.

    Integers are (n,), (n, *shape) or (n, in); one-hot numbers have an axis K after n. `mixed` are weights (n, ...) and
    biases, where they were formed along with the picks, which then lie flat; without the axis n where that is one.
    """

    weight: Tensor
    bias: Tensor
    noise: Tensor | None
    mixed: tuple[Tensor, Tensor | None] | None = None


def select(components: Tensor, picked: Tensor) -> Tensor:
    """Components (K, *shape) by picks, integers (n,) or (n, *shape), or one-hot with an axis K: (n, *shape)."""
    shape = components.shape[1:]
    if picked.is_floating_point():
        picked = picked.to(components.dtype)
        spread = (
            picked.view(*picked.shape, *[1] * len(shape))
            if picked.dim() == 2
            else picked
        )
        return (spread * components).sum(1)
    if picked.dim() == 1:
        return components.index_select(
            0, picked
        )  # its backward adds; that of indexing sorts first
    return (
        components.expand(picked.shape[0], *components.shape)
        .gather(1, picked.unsqueeze(1))
        .squeeze(1)
    )


def stack_components(
    own: Tensor, others: Tensor | None, mask: Tensor | None, kept: Tensor | None
) -> Tensor:
    """All components (K, ...) of a weight or bias: the layer's own first, and last zero where `kept` is given."""
    parts = (
        [own.unsqueeze(0)]
        if others is None
        else [own.unsqueeze(0), others.to(own.dtype)]
    )
    if mask is not None and others is not None:
        parts[1] = own + (parts[1] - own) * mask.to(own.dtype)
    if kept is not None:
        parts = [*(part / kept for part in parts), torch.zeros_like(parts[0] / kept)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def bias_shape(site: Site) -> tuple[int, ...]:
    return site.shape if site.kind == "norm" else (site.n_out,)


def owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Whose each of many elements is that lie side by side, so many of each owner: counts (2, 3) give 0 0 1 1 1.

    Sent to a GPU once: a recorded CUDA graph may not wait for the host.
    """
    if is_exporting():  # ONNX has no repeat_interleave of a known size
        return torch.tensor(
            [owner for owner, count in enumerate(counts) for _ in range(count)],
            device=device,
        )
    if torch.compiler.is_compiling():
        repeats = torch.tensor(counts, device=device)
        return torch.arange(len(counts), device=device).repeat_interleave(
            repeats, output_size=sum(counts)
        )
    return _sent_owners(counts, device)


@lru_cache(maxsize=64)
def _sent_owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return (
        torch.arange(len(counts), device="cpu")
        .repeat_interleave(torch.tensor(counts, device="cpu"))
        .to(device)
    )


def uniform(lines: Tensor) -> Tensor:
    """Uniform numbers strictly inside (0, 1) from standard normals: at the ends lie components never picked."""
    tiny = torch.finfo(lines.dtype).eps
    return torch.special.ndtr(lines).clamp(tiny, 1 - tiny)


def by_edges(lines: Tensor, probs: Tensor) -> Tensor:
    """Picks (n, picks) by given probabilities (K,), from standard normals (n, picks)."""
    return torch.bucketize(
        uniform(lines), probs.cumsum(0)[:-1].to(lines.dtype), right=True
    )


def straight_through(lines: Tensor, logits: Tensor) -> Tensor:
    """One-hot picks (n, K, picks) that carry the gradient of a softmax (Gumbel), from standard normals (n, K picks)."""
    numbers = uniform(lines.unflatten(1, (logits.shape[0], -1)))
    scores = torch.log_softmax(widen(logits), 0).unsqueeze(-1) - (-numbers.log()).log()
    soft = torch.softmax(scores, 1)
    hard = torch.zeros_like(soft).scatter_(1, scores.argmax(1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())  # exactly one-hot


def support(count: int, probs: Tensor, learned: bool) -> Support:
    """Standard normals from which `by_edges`, or where probabilities are learned `straight_through`, pick each
    component of a probability that is not zero.
    """
    there = (probs > 0).nonzero().squeeze(1)
    if learned:  # far enough out for any logits that differ by less than 17
        lines = torch.full((len(probs), len(probs)), -5.0).fill_diagonal_(5.0)[
            there.cpu()
        ]
    else:
        upper = probs.double().cumsum(0)
        lines = torch.special.ndtri(upper - probs / 2)[there].unsqueeze(1)
    return Support(count, lines, probs[there])


class Norm(NamedTuple):
    """A norm layer whose scale and bias are mixed: its own, the further components (K - 1, ...), picks of all elements.

    Picks are (n,), or (n, elements) with those of the scale first. Without `biases` the bias is not mixed.
    """

    posterior: Any
    weight: Tensor
    bias: Tensor | None
    weights: Tensor
    biases: Tensor | None
    picked: Tensor


def draw_alike(posteriors: Sequence[Any], current: Pass) -> None:
    """Draw the picks of layers in a handful of operations for all that are alike, and mix the scales of norms."""
    for assignment, by_row, same in _alike(posteriors, current):
        noise = [current.noise[p.key] for p in same]
        picked = _pick_together(same, [n.row if by_row else n.block for n in noise])
        parts = (
            picked.unbind(1)
            if assignment == "layer"
            else picked.split([p.n_picks for p in same], 1)
        )
        norms: dict[torch.dtype, list[Norm]] = {}
        for p, z in zip(same, parts, strict=True):
            if p.site.kind == "norm":
                own = p.linear_map() if p.site.whole else None
                weight, bias = (
                    p.layer.own_affine() if own is None else (own.weight, own.bias)
                )
                weights, biases = p.others()
                norms.setdefault(weight.dtype, []).append(
                    Norm(p, weight, bias, weights, biases, z)
                )
            else:
                current.values[p.key] = Assigned(z, z, None)
        for some in norms.values():
            _mix_together(some, current)


def _alike(
    posteriors: Sequence[Any], current: Pass
) -> list[tuple[str, bool, list[Any]]]:
    """Posteriors whose picks are drawn together: how they are assigned, and whether rows have picks of their own."""
    by_row = tuple([current.noise[p.key].row.shape[1] > 0 for p in posteriors])
    places = places_of(posteriors)

    def make() -> list[tuple[str, bool, list[Any]]]:
        alike: dict[Any, list[Any]] = {}
        for p, rows, place in zip(posteriors, by_row, places, strict=True):
            if p.joins:
                alike.setdefault(
                    (p.config.assignment, rows, p.components, place), []
                ).append(p)
        return [
            (assignment, rows, same) for (assignment, rows, *_), same in alike.items()
        ]

    return plan_once(posteriors, ("picks", by_row, places), make)


def _pick_together(same: Sequence[Any], lines: list[Tensor]) -> Tensor:
    """Picks of posteriors with equally many components side by side: (n, total number of picks)."""
    counts = tuple([p.n_picks for p in same])
    edges = torch.stack([p._buffers["probs"] for p in same]).cumsum(1)[:, :-1]
    if sum(counts) > len(same):
        edges = edges.index_select(0, owners(counts, edges.device))
    return (uniform(torch.cat(lines, 1)).unsqueeze(-1) >= edges).sum(-1)


def _mix_together(norms: Sequence[Norm], current: Pass) -> None:
    """Scales and biases of many norm layers, by the picks of each, in few large operations."""
    own: list[Any] = []
    others: list[Any] = []
    counts: list[int] = []
    for _, weight, bias, weights, biases, _ in norms:
        own += [weight] if biases is None else [weight, bias]
        others += [weights] if biases is None else [weights, biases]
        counts.append(weight.numel() if biases is None else 2 * weight.numel())
    own, others = [_flat(t, 0) for t in own], [_flat(t, 1) for t in others]
    first, further = (
        side_by_side(own, 0, current.joined),
        side_by_side(others, 1, current.joined),
    )
    components = torch.cat([first.unsqueeze(0), further.to(first.dtype)])
    picked = [norm.picked for norm in norms]
    if picked[0].dim() == 1:  # one pick for each layer
        index = torch.stack(picked, 1).index_select(
            1, owners(tuple(counts), picked[0].device)
        )
    else:
        index = torch.cat(picked, 1)
    mixed = keep_in_memory(components.gather(0, index))
    one = index.shape[0] == 1  # what serves all rows needs no axis of draws
    parts = iter(
        (mixed.squeeze(0) if one else mixed).split([t.shape[0] for t in own], -1)
    )
    for p, own_weight, bias, _, biases, z in norms:
        weight = next(parts)
        if biases is not None:
            bias = next(parts)
        elif bias is not None and not one:
            bias = bias.expand(len(weight), *bias.shape)
        if own_weight.dim() > 1:
            shape = weight.shape[:-1] + own_weight.shape
            weight, bias = (
                weight.view(shape),
                bias if biases is None or bias is None else bias.view(shape),
            )
        current.values[p.key] = Assigned(z, z, None, (weight, bias))


def _flat(tensor: Tensor, first: int) -> Tensor:
    """A tensor whose dimensions from `first` on are one."""
    return tensor if tensor.dim() == first + 1 else tensor.flatten(first)


def expected_squares(same: Sequence[Any]) -> Tensor:
    """sum_k p_k (tau/2 |M_k|^2 + rho/2 |m_k|^2) of posteriors with equally many components."""
    terms: dict[float, list[tuple[Tensor, Tensor | None, Tensor]]] = {}
    for p in same:
        linear, probs = p.linear_map(), p.probabilities()
        terms.setdefault(p.config.tau, []).append((linear.weight, p.weight, probs))
        if p.site.bias and linear.bias is not None:
            terms.setdefault(p.rho, []).append((linear.bias, p.bias, probs))
    sums = [
        precision / 2 * _expected_squares(alike) for precision, alike in terms.items()
    ]
    return sum(sums[1:], sums[0])


def _expected_squares(alike: Sequence[tuple[Tensor, Tensor | None, Tensor]]) -> Tensor:
    """sum_k p_k |M_k|^2 over tensors M_1, further components and probabilities."""
    own = [_flat(widen(first), 0) for first, _, _ in alike]
    others = [_flat(widen(rest), 1) for _, rest, _ in alike if rest is not None]
    rows = [torch.cat(own).unsqueeze(0)] + ([torch.cat(others, 1)] if others else [])
    index = owners(tuple([tensor.numel() for tensor in own]), rows[0].device)
    spread = torch.stack([probs for _, _, probs in alike], 1).index_select(
        1, index
    )  # (K, elements)
    return (spread * torch.cat(rows).square()).sum()


def expected_square(p: Tensor, own: Tensor, others: Tensor | None) -> Tensor:
    """sum_k p_k |M_k|^2, apart for the layer's own and the others: what FSDP2 shards cannot be joined."""
    total = p[0] * squares(own, 0)
    return (
        total
        if others is None
        else total + (p[1 : 1 + len(others)] * squares(others, 1)).sum()
    )


def squares(tensor: Tensor, first: int) -> Tensor:
    """Sum of squares over the dimensions from `first` on, whole on every process."""
    total = widen(tensor).square().sum(list(range(first, tensor.dim())))
    return total.full_tensor() if hasattr(total, "full_tensor") else total
