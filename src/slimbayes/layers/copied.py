"""A module of any type with K - 1 further members of itself: what `Ensemble` makes of it.

The class of the module is swapped for one made on the spot, whose `plain` is what it was. Each member runs on the rows
that belong to it, once per call; the module itself, member 0, does so in its plain class and without the others among
its children, since nothing is known about what it calls its own methods and children.

Sizes: K members, n blocks of rows in a pass, R rows.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.engine import noise, passes
from slimbayes.engine.blocks import block_of_row, sizes_equal
from slimbayes.engine.layout import Unproven, arrays_of, map_arrays, padded, tree_map
from slimbayes.engine.objects import NotJoined, all_same, attributes_of, is_cache
from slimbayes.errors import SlimbayesWarning
from slimbayes.layers.base import Converted, made_once, mixed_class, reading
from slimbayes.layers.opening import runs_later, wrap_methods

OF_MEMBER_0 = "_slimbayes_member"  # on the parts of member 0: what replaces one of them later is in no other member


class Copied(Converted):
    """Mixin of modules that were copied as a whole; `posterior["members"]` holds the copies."""

    bayes_copied = True

    def bayes_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with every row run by its member."""
        members: Any = self.posterior["members"]
        current = members.current
        if members.members == 1:
            return _call(self, members, 0, args, kwargs)
        if not torch.compiler.is_compiling():
            _warn_of_replaced(self)
        blocks = current.blocks(members)
        if blocks == 1:
            return _call(
                self, members, int(current.first) % members.members, args, kwargs
            )
        arrays = arrays_of((args, kwargs))
        if any(padded(leaf) is not leaf for leaf in arrays):
            raise Unproven("members cannot share out a packed sequence")
        ins, outs = self.located(current, arrays)
        lines, back = _deal(
            current.rows, blocks, current.first, members.members, members.device
        )
        traced = torch.compiler.is_compiling()
        used = [k for k, line in enumerate(lines) if traced or line.numel()]
        inputs = {k: _take((args, kwargs), lines[k], current.rows, ins) for k in used}
        outputs = [_call(self, members, k, *one) for k, one in inputs.items()]
        return _join(outputs, back, sum(line.shape[0] for line in lines), outs)

    def plain_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _call(self, self.posterior["members"], 0, args, kwargs)

    def drawn_value(self, name: str) -> Any:
        """A parameter that others read past the module's forward: that of the member under way."""
        members: Any = self.posterior["members"]
        found: Any = passes.pass_of(members.key)
        if found.blocks(members) > 1:
            return self._parameters[name]
        found.met[members.key] = None
        index = int(found.first) % members.members
        return (
            members.others[index - 1].get_parameter(name)
            if index
            else self._parameters[name]
        )


class _Hidden:
    """Keeps the posterior, the last child, out of what a container lists as its own."""

    _modules: dict[str, Any]

    def __iter__(self) -> Any:
        return iter(
            [module for name, module in self._modules.items() if name != "posterior"]
        )

    def __len__(self) -> int:
        return len(self._modules) - ("posterior" in self._modules)


@made_once
def copied_class(plain: type[nn.Module], names: tuple[str, ...]) -> type[Converted]:
    """The class of copied modules of one type, with parameters of these names."""
    bases = (
        (Copied, _Hidden, plain)
        if issubclass(plain, (nn.Sequential, nn.ModuleList))
        else (Copied, plain)
    )
    attributes = {"plain": plain, "__module__": __name__} | wrap_methods(plain, _method)
    return mixed_class(
        f"Copied{plain.__name__}",
        bases,
        attributes | {name: reading(name) for name in names},
    )


def _method(module: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A method other than forward: every member does it for its rows, which are those of the first tensor. In the
    forward of a model around it a method has the rows of one draw, which runs by itself.
    """
    members = module.posterior["members"]
    arrays, found = arrays_of((args, kwargs)), passes.pass_of(members.key)
    if found is not None and not (
        found.held or found.probing or torch.compiler.is_compiling()
    ):
        found.drawn_yet, found.met[members.key] = True, None
        if found.blocks(members) > 1:
            raise Unproven(
                f"{module.bayes_name}.{name} is called, beside its forward or instead of it"
            )
        return _call(
            module,
            members,
            int(found.first) % members.members,
            args,
            kwargs,
            method=name,
        )
    if (found is not None and not found.held) or not arrays or members.members == 1:
        return _call(module, members, 0, args, kwargs, method=name)
    rows = arrays[0].shape[0]
    first = noise.random_member(members.device) if found is None else found.first
    if runs_later(module.plain, name):  # there is nothing to join yet
        return _call(
            module, members, int(first) % members.members, args, kwargs, method=name
        )
    blocks = members.members if found is None or found.draws is None else found.draws
    lines, back = _deal(rows, blocks, first, members.members, members.device)
    dims = tuple(
        0 if isinstance(a, Tensor) and a.dim() and a.shape[0] == rows else None
        for a in arrays
    )
    taken = {
        k: _take((args, kwargs), line, rows, dims)
        for k, line in enumerate(lines)
        if line.numel()
    }
    outputs = _even(
        [_call(module, members, k, a, b, name) for k, (a, b) in taken.items()],
        _padding(module),
    )
    return _join(outputs, back, rows, tuple(0 for _ in arrays_of(outputs[0])))


def _padding(module: Any) -> int:
    """What fills up sequences of members that ended earlier."""
    config = getattr(module, "generation_config", None) or getattr(
        module, "config", None
    )
    found = getattr(config, "pad_token_id", None)
    found = getattr(config, "eos_token_id", None) if found is None else found
    return int(found[0] if isinstance(found, (list, tuple)) else found or 0)


def _even(outputs: list[Any], padding: int) -> list[Any]:
    """Outputs of members with equal lengths along dimension 1."""
    if not all(isinstance(out, Tensor) and out.dim() == 2 for out in outputs):
        return outputs
    longest = max(out.shape[1] for out in outputs)
    return [
        nn.functional.pad(out, (0, longest - out.shape[1]), value=padding)
        for out in outputs
    ]


def _call(
    module: Any,
    members: Any,
    index: int,
    args: Any,
    kwargs: Any,
    method: str | None = None,
) -> Any:
    if index:
        other = members.others[index - 1]
        if method is None and _hooked(module) & _hooked(other):
            # The module's own call runs the hooks: only those that compute weights are the copy's.
            for hook in other._forward_pre_hooks.values():
                if type(hook).__module__.startswith("torch.nn.utils."):
                    hook(other, args)
            return other.forward(*args, **kwargs)
        return (other if method is None else getattr(other, method))(*args, **kwargs)
    if torch.compiler.is_compiling():  # which cannot follow a change of class
        return module.plain.forward(module, *args, **kwargs)
    with _as_it_was(module) as plain:
        return getattr(plain, method or "forward")(*args, **kwargs)


def _hooked(module: Any) -> set[int]:
    """Numbers of the hooks on a module itself."""
    return {
        *module._forward_hooks,
        *module._forward_pre_hooks,
        *module._backward_hooks,
        *module._backward_pre_hooks,
    }


@contextmanager
def _as_it_was(module: Any) -> Iterator[Any]:
    """The module in its plain class, without the posterior among its children: one that shares all it holds with the
    module, which other threads call meanwhile. What the call sets on it, or takes away, is on the module, too.
    """
    own, children = (
        module.__dict__,
        {n: child for n, child in module._modules.items() if n != "posterior"},
    )
    before, born = own | {"_modules": children}, dict(children)
    plain = object.__new__(module.plain)
    plain.__dict__.update(before)
    try:
        yield plain
    finally:
        own.update(
            {
                n: value
                for n, value in plain.__dict__.items()
                if n not in before or before[n] is not value
            }
        )
        for name in before.keys() - plain.__dict__.keys():
            own.pop(name, None)
        for name in {n for n in born | children if born.get(n) is not children.get(n)}:
            module._modules.pop(name, None)
            module._modules.update({name: children[name]} if name in children else {})


def _deal(
    rows: int, blocks: int, first: Any, members: int, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Row numbers of each member, and where among the outputs of all members each row's lies, (R,)."""
    member = (block_of_row(rows, blocks, device) + first) % members
    order = torch.argsort(
        member * rows + torch.arange(rows, device=device)
    )  # stable, which ONNX has no word for
    back = torch.empty_like(order).scatter(0, order, torch.arange(rows, device=device))
    if not torch.compiler.is_compiling():
        if rows % blocks == 0 and blocks % members == 0:
            return list(order.split(rows // members)), back
        return list(order.split(member.bincount(minlength=members).tolist())), back
    # Sizes that depend on data cannot be compiled: shorter blocks are filled up with a neighbour's row, and not used.
    most = -(-rows // blocks) * -(-blocks // members)
    count = torch.zeros(members, dtype=torch.long, device=device).index_add(
        0, member, torch.ones_like(member)
    )
    start = count.cumsum(0) - count
    index = order[
        (start.unsqueeze(1) + torch.arange(most, device=device)).clamp_max(rows - 1)
    ]
    return list(index.unbind(0)), member * most + (back - start[member])


def _take(inputs: Any, line: Tensor, rows: int, dims: Any) -> Any:
    """The rows of one member, out of every tensor that holds rows."""

    def take(i: int, leaf: Any) -> Any:
        dim = dims[i]
        if dim is None or leaf.shape[dim] == 1 != rows:
            return leaf
        return _select(leaf, dim, rows, line)

    for leaf in pytree.tree_leaves(inputs):
        if is_cache(leaf):
            raise ValueError(
                f"A cache of keys and values ({leaf!r}) cannot be shared out among members: "
                f"call the model with use_cache=False."
            )
    return map_arrays(take, inputs)


def _select(x: Tensor, dim: int, rows: int, line: Tensor) -> Tensor:
    """Rows of x by number, where each may own several entries along `dim`."""
    if sizes_equal(x.shape[dim], rows):
        return x.index_select(dim, line)
    each = x.shape[dim] // rows
    if x.shape[dim] != rows * each:
        raise Unproven(
            f"{rows} rows have {x.shape[dim]} entries among them, which cannot be dealt out to members"
        )
    return x.unflatten(dim, (rows, each)).index_select(dim, line).flatten(dim, dim + 1)


def _join(outputs: list[Any], back: Tensor, total: int, dims: Any) -> Any:
    """Outputs of all members, `total` rows, put back in order; what has no rows is that of the first."""
    count = iter(range(10**9))

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            if is_cache(leaves[0]):
                return NotJoined(leaves)
            if not all_same(leaves) and (
                attributes_of(leaves[0]) or isinstance(leaves[0], (int, float, str))
            ):
                raise ValueError(
                    f"Each member returns a {type(leaves[0]).__name__} for its rows, which nobody can join: return "
                    f"tensors, or ask one member, keep_members(model, [k])."
                )
            return leaves[0]
        i = next(count)
        dim = dims[i] if i < len(dims) else None
        if dim is None:
            return leaves[0]
        sizes = {(*leaf.shape[:dim], *leaf.shape[dim + 1 :]) for leaf in leaves}
        if (
            len(sizes) > 1 and not torch.compiler.is_compiling()
        ):  # padded to the longest of a member's rows
            raise Unproven(
                f"members give outputs of other sizes for their rows than for all, {sorted(sizes)[:3]}"
            )
        return _select(torch.cat(leaves, dim), dim, total, back)

    return tree_map(join, *outputs)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """A copied module and what it holds, without the other members."""
    yield module
    for name, child in module._modules.items():
        if child is not None and name != "posterior":
            yield from parts_of(child)


def _warn_of_replaced(module: Any) -> None:
    """Say that a part of member 0 alone was replaced."""
    new = next(
        (
            m
            for m in parts_of(module)
            if OF_MEMBER_0 not in m.__dict__ and next(m.parameters(), None) is not None
        ),
        None,
    )
    if new is not None:
        warnings.warn(
            f"{next(n for n, m in module.named_modules() if m is new)} of {module.bayes_name} came after the "
            f"conversion, and into member 0 alone: other members keep what they had. Replace it before bayesianize, "
            f"or in each of posterior['members'].others, too.",
            SlimbayesWarning,
            stacklevel=2,
        )
