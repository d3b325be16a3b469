"""Picks of components, and the picked weights: for one layer, or for many at once.

Sizes: K components, n draws of a pass.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.distributions.families import wide
from slimbayes.layers.site import Site


class Assigned(NamedTuple):
    """Picks of one pass for weights and biases: integers, or one-hot numbers with a gradient; and the noise of Eq. 1.

    Integers are (n,), (n, *shape) or (n, in); one-hot numbers have an axis K after n. `mixed` are weights (n, ...) and
    biases, where they were formed along with the picks.
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
        spread = picked.view(*picked.shape, *[1] * len(shape)) if picked.dim() == 2 else picked
        return (spread * components).sum(1)
    if picked.dim() == 1:
        return components.index_select(0, picked)  # its backward adds; that of indexing sorts first
    return components.expand(picked.shape[0], *components.shape).gather(1, picked.unsqueeze(1)).squeeze(1)


def stacked(own: Tensor, others: Tensor | None, mask: Tensor | None, kept: Tensor | None) -> Tensor:
    """All components (K, ...) of a weight or bias: the layer's own first, and last zero where `kept` is given."""
    parts = [own.unsqueeze(0)] if others is None else [own.unsqueeze(0), others.to(own.dtype)]
    if mask is not None and others is not None:
        parts[1] = own + (parts[1] - own) * mask.to(own.dtype)
    if kept is not None:
        parts = [*(part / kept for part in parts), torch.zeros_like(parts[0] / kept)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def bias_shape(site: Site) -> tuple[int, ...]:
    return site.shape if site.kind == "norm" else (site.n_out,)


def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Whole numbers as a tensor, sent to a GPU once: a recorded CUDA graph may not wait for the host."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(numbers, device=device)
    return _sent(numbers, device)


@lru_cache(maxsize=64)
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def uniform(lines: Tensor) -> Tensor:
    """Uniform numbers strictly inside (0, 1) from standard normals: at the ends lie components never picked."""
    tiny = torch.finfo(lines.dtype).eps
    return torch.special.ndtr(lines).clamp(tiny, 1 - tiny)


def by_edges(lines: Tensor, probs: Tensor) -> Tensor:
    """Picks (n, picks) by given probabilities (K,), from standard normals (n, picks)."""
    return torch.bucketize(uniform(lines), probs.cumsum(0)[:-1].to(lines.dtype), right=True)


def straight_through(lines: Tensor, logits: Tensor) -> Tensor:
    """One-hot picks (n, K, picks) that carry the gradient of a softmax (Gumbel), from standard normals (n, K picks)."""
    numbers = uniform(lines.unflatten(1, (logits.shape[0], -1)))
    scores = torch.log_softmax(wide(logits), 0).unsqueeze(-1) - (-numbers.log()).log()
    soft = torch.softmax(scores, 1)
    hard = torch.zeros_like(soft).scatter_(1, scores.argmax(1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())  # exactly one-hot


def realise_alike(posteriors: Sequence[Any]) -> None:
    """Draw the picks of layers in a handful of operations for all that are alike, and mix the scales of norms."""
    alike: dict[Any, list[Any]] = {}
    for p in posteriors:
        norm, assignment = p.site.kind == "norm", p.config.assignment
        plain = p.picks > 0 and p.logits is None and not (p.config.sigma or p.config.zero)
        if not plain or not (assignment == "layer" or (assignment == "element" and norm)):
            continue
        own = p.layer.own_value(p.site.parameter).dtype if norm else None
        alike.setdefault((norm, assignment, p.components, p.per_row, p.device, p.dtype, own), []).append(p)
    for (norm, assignment, *_), same in alike.items():
        picked = _pick_together(same)
        if norm:
            _mix_together(same, picked, assignment == "layer")
            continue
        for p, z in zip(same, picked.unbind(1), strict=True):
            p.keep(Assigned(z, z, None))


def _pick_together(same: Sequence[Any]) -> Tensor:
    """Picks of posteriors with equally many components side by side: (n, total number of picks)."""
    lines = torch.cat([p.lines for p in same], 1)
    edges = torch.stack([p.probs for p in same]).cumsum(1)[:, :-1]
    if lines.shape[1] > len(same):
        counts = _on_device(tuple(p.picks for p in same), edges.device)
        edges = edges.repeat_interleave(counts, 0, output_size=lines.shape[1])
    return (uniform(lines).unsqueeze(-1) >= edges).sum(-1)


def _mix_together(same: Sequence[Any], picked: Tensor, by_layer: bool) -> None:
    """Scales and biases of many norm layers in few large operations."""
    maps = [p.layer.linear_map(p.site.name) for p in same]
    pairs = [(m.weight, m.bias if p.bias is not None else None) for m, p in zip(maps, same, strict=True)]
    own = [t.flatten() for pair in pairs for t in pair if t is not None]
    others = [t.flatten(1) for p in same for t in (p.weight, p.bias) if t is not None]
    components = torch.cat([torch.cat(own).unsqueeze(0), torch.cat(others, 1).to(own[0].dtype)])
    sizes = [t.numel() for t in own]
    index = picked
    if by_layer:
        counts = _on_device(tuple(p.site.n_out * (1 if p.bias is None else 2) for p in same), picked.device)
        index = picked.repeat_interleave(counts, 1, output_size=sum(sizes))
    parts = iter(components.gather(0, index).split(sizes, 1))
    picks = iter(picked.unbind(1) if by_layer else picked.split(sizes, 1))
    for p, m in zip(same, maps, strict=True):
        shape, z = p.site.shape, next(picks)
        weight = next(parts).unflatten(1, shape) if len(shape) > 1 else next(parts)
        if p.bias is not None:
            bias = next(parts).view(-1, *m.bias.shape)
        else:
            bias = None if m.bias is None else m.bias.expand(len(weight), *m.bias.shape)
        z_bias = z if by_layer or p.bias is None else next(picks)
        if not by_layer:
            z, z_bias = z.unflatten(1, shape), z_bias.view(len(z), *bias_shape(p.site))
        p.keep(Assigned(z, z_bias, None, (weight, bias)))


def expected_squares(same: Sequence[tuple[Any, Any]]) -> Tensor:
    """sum_k p_k (tau/2 |M_k|^2 + rho/2 |m_k|^2) of posteriors with equally many components and their linear maps."""
    own: list[Tensor] = []
    others: list[Tensor] = []
    factors: list[Tensor] = []
    for p, linear in same:
        pairs = [(linear.weight, p.weight, p.config.tau)]
        if p.site.bias:
            pairs.append((linear.bias, p.bias, p.rho))
        for first, rest, precision in pairs:
            own.append(wide(first).flatten())
            others += [] if rest is None else [wide(rest).flatten(1)]
            factors.append(precision / 2 * p.probabilities())
    rows = [torch.cat(own).unsqueeze(0)] + ([torch.cat(others, 1)] if others else [])
    sizes = _on_device(tuple(tensor.numel() for tensor in own), rows[0].device)
    spread = torch.stack(factors, 1).repeat_interleave(sizes, 1, output_size=rows[0].shape[1])  # (K, elements)
    return (spread * torch.cat(rows).square()).sum()


def expected_square(p: Tensor, own: Tensor, others: Tensor | None) -> Tensor:
    """sum_k p_k |M_k|^2, apart for the layer's own and the others: what FSDP2 shards cannot be joined."""
    total = p[0] * squares(own, 0)
    return total if others is None else total + (p[1 : 1 + len(others)] * squares(others, 1)).sum()


def squares(tensor: Tensor, first: int) -> Tensor:
    """Sum of squares over the dimensions from `first` on, whole on every process."""
    total = wide(tensor).square().sum(list(range(first, tensor.dim())))
    return total.full_tensor() if hasattr(total, "full_tensor") else total
