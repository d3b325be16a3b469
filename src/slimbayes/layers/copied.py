"""A module of any type with K - 1 further members of itself: what `Ensemble` makes of it.

The class of the module is swapped for one made on the spot, whose `plain` is what it was. Each member runs on the rows that belong to
it, once per call; the module itself, member 0, does so in its plain class and without the others among its children, since nothing is
known about what it calls its own methods and children. Sizes: K members, n blocks of rows in a pass, R rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from slimbayes import passes
from slimbayes.layers.base import Converted

_CLASSES: dict[type[nn.Module], type[Converted]] = {}


class Copied(Converted):
    """Mixin of modules that were copied as a whole; `posterior["members"]` holds the copies."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        members: Any = self.posterior["members"]
        if passes.is_open([members]):
            return _run(self, members, args, kwargs)
        own = passes.begin_bare([members], passes.infer_rows((args, kwargs), members.batch_dim) or 1)
        try:
            return _run(self, members, args, kwargs)
        finally:
            own.open = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists only here: it is made again from the plain one.
        return _empty, (self.plain,), self.__getstate__()


class _Hidden:
    """Keeps the posterior, the last child, out of what a container lists as its own."""

    _modules: dict[str, Any]

    def __iter__(self) -> Any:
        return iter([module for name, module in self._modules.items() if name != "posterior"])

    def __len__(self) -> int:
        return len(self._modules) - ("posterior" in self._modules)


def copied_class(plain: type[nn.Module]) -> type[Converted]:
    """The class of copied modules of one type."""
    if plain not in _CLASSES:
        bases = (Copied, _Hidden, plain) if issubclass(plain, (nn.Sequential, nn.ModuleList)) else (Copied, plain)
        _CLASSES[plain] = type(f"Copied{plain.__name__}", bases, {"plain": plain, "__module__": __name__})
    return _CLASSES[plain]


def _empty(plain: type[nn.Module]) -> nn.Module:
    cls = copied_class(plain)
    return cls.__new__(cls)  # type: ignore[return-value]


def _run(module: Any, members: Any, args: Any, kwargs: Any) -> Any:
    """The module's forward with every row run by its member."""
    current = members.current
    if any(isinstance(arg, PackedSequence) for arg in (*args, *kwargs.values())):
        raise ValueError(f"{members.name or 'the model'}: members cannot share out a packed sequence; copy the module that packs it.")
    if members.members == 1:
        return _call(module, members, 0, args, kwargs)
    blocks = current.blocks(members)
    if blocks == 1:
        return _call(module, members, int(current.first) % members.members, args, kwargs)
    rows = _rows((args, kwargs), current.rows or 1, members.batch_dim)
    if rows is None:
        return _for_all(module, members, args, kwargs)
    lines, back = _deal(rows, blocks, current.first, members.members, members.device)
    states = issubclass(module.plain, nn.RNNBase)
    inputs = {k: _take((args, kwargs), line, rows, members.batch_dim, states) for k, line in enumerate(lines) if len(line)}
    even = len({len(line) for line in lines}) == 1
    if members.batched and even and not _needs_loop(module, members):
        outputs = _batched(module, members, list(inputs.values()))
    else:
        outputs = [_call(module, members, k, *one) for k, one in inputs.items()]
    sizes = [len(line) for line in lines if len(line)]
    if states:
        y, state = ([output[i] for output in outputs] for i in (0, 1))
        return _join(y, back, sizes, members.batch_dim), _join(state, back, sizes, 1)
    return _join(outputs, back, sizes, members.batch_dim)


def _call(module: Any, members: Any, index: int, args: Any, kwargs: Any) -> Any:
    if index:
        return members.others[index - 1](*args, **kwargs)
    if torch.compiler.is_compiling():  # which cannot follow a change of class
        return module.plain.forward(module, *args, **kwargs)
    with _as_it_was(module):
        return module.forward(*args, **kwargs)


@contextmanager
def _as_it_was(module: Any) -> Iterator[None]:
    """The module in its plain class, without the posterior among its children."""
    converted, posterior = type(module), module._modules.pop("posterior")
    module.__class__ = converted.plain
    try:
        yield
    finally:
        module.__class__ = converted
        module._modules["posterior"] = posterior


def _for_all(module: Any, members: Any, args: Any, kwargs: Any) -> Any:
    """Inputs that have no rows (positions, a learned token) go to every member; what comes out gets the rows of the pass."""
    current = members.current
    outputs = [_call(module, members, k, args, kwargs) for k in range(members.members)]
    block = passes.block_of_row(current.rows or 1, current.blocks(members), members.device)
    member = (block + current.first) % members.members

    def spread(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor) or leaves[0].dim() == 0:
            return leaves[0]
        dim = members.batch_dim
        one = leaves[0].dim() > dim and leaves[0].shape[dim] == 1
        return (torch.cat(leaves, dim) if one else torch.stack(leaves, dim)).index_select(dim, member)

    return pytree.tree_map(spread, *outputs)


def _rows(inputs: Any, rows: int, batch_dim: int) -> int | None:
    """Rows of the first input that has those of the pass, perhaps several for each; None where none has."""
    for leaf in pytree.tree_leaves(inputs):
        seen = leaf.shape[batch_dim] if isinstance(leaf, Tensor) and leaf.dim() > batch_dim else 0
        if seen == rows or (seen and rows > 1 and seen % rows == 0):  # of a single row anything would be a multiple
            return seen
    return None


def _needs_loop(module: Any, members: Any) -> bool:
    """Batch norm updates its statistics in place while it trains, which vmap cannot follow; and it runs past autocast."""
    autocast = torch.is_autocast_enabled(members.device.type)
    return autocast or any(isinstance(m, nn.modules.batchnorm._NormBase) and m.training for m in module.modules())


def _batched(module: Any, members: Any, inputs: list[Any]) -> list[Any]:
    """All members at once, each with its own inputs of equal size."""
    others = members.others
    own = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if not n.startswith("posterior.")}
    states = [own, *({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in others)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in own}
    leaves = [pytree.tree_flatten(one) for one in inputs]
    tensors = [i for i, leaf in enumerate(leaves[0][0]) if isinstance(leaf, Tensor)]
    together = [torch.stack([flat[i] for flat, _ in leaves]) for i in tensors]

    def run(state: Any, *parts: Tensor) -> Any:
        flat = list(leaves[0][0])
        for i, part in zip(tensors, parts, strict=True):
            flat[i] = part
        args, kwargs = pytree.tree_unflatten(flat, leaves[0][1])
        return functional_call(others[0], state, args, kwargs)

    outputs = torch.vmap(run, randomness="different")(stacked, *together)
    return [pytree.tree_map(lambda leaf, k=k: leaf[k], outputs) for k in range(len(states))]


class NotJoined:
    """Stands for what members return one by one and nobody can join, such as transformers' caches."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"{len(self.parts)} separate {type(self.parts[0]).__name__}s"


def _deal(rows: int, blocks: int, first: int | Tensor, members: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Row numbers of each member, and where among the outputs of all members each row's lies, (R,)."""
    member = (passes.block_of_row(rows, blocks, device) + first) % members
    order = torch.argsort(member, stable=True)
    back = torch.empty_like(order).scatter(0, order, torch.arange(rows, device=device))
    if rows % blocks == 0:
        return list(order.split(rows // members)), back
    if not torch.compiler.is_compiling():
        return list(order.split(member.bincount(minlength=members).tolist())), back
    # Sizes that depend on data cannot be compiled: shorter blocks are filled up with a neighbour's row, whose output is not used.
    most = -(-rows // blocks) * (blocks // members)
    count = torch.zeros(members, dtype=torch.long, device=device).index_add(0, member, torch.ones_like(member))
    start = count.cumsum(0) - count
    index = order[(start.unsqueeze(1) + torch.arange(most, device=device)).clamp_max(rows - 1)]
    return list(index.unbind(0)), member * most + (back - start[member])


def _take(inputs: Any, line: Tensor, rows: int, batch_dim: int, states: bool) -> Any:
    """The rows of one member, out of every tensor that has as many rows as the batch; recurrent states hold theirs along dimension 1."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, NotJoined) or hasattr(leaf, "get_seq_length"):
            raise ValueError(f"A cache of keys and values ({leaf!r}) cannot be shared out among members: call the model with use_cache=False.")
        for dim in (batch_dim, 1) if states else (batch_dim,):
            if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == rows:
                return leaf.index_select(dim, line)
        return leaf

    return pytree.tree_map(take, inputs)


def _join(outputs: list[Any], back: Tensor, sizes: list[int], batch_dim: int) -> Any:
    """Outputs of all members, row by row; what has no rows is averaged if it is a number (a loss), else taken from the first."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return NotJoined(leaves) if hasattr(leaves[0], "get_seq_length") else leaves[0]
        fits = [d for d in range(leaves[0].dim()) if [leaf.shape[d] for leaf in leaves] == sizes]
        if not fits:
            return torch.stack(leaves).mean(0) if leaves[0].is_floating_point() else leaves[0]
        dim = batch_dim if batch_dim in fits else fits[0]
        return torch.cat(leaves, dim).index_select(dim, back)

    return pytree.tree_map(join, *outputs)
