"""A layer of a type we do not know: it runs its own forward, once for each draw, with drawn weights in place of its
own.

Every parameter matrix is a site, its first two dimensions count as outputs and inputs, and one draw serves a whole
block of rows. Norms are known by what they do: inputs may be scaled without a change, and outputs are linear in one
weight per channel.
"""

import copy
import math
import re
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slimbayes.engine import passes
from slimbayes.engine.layout import Unproven, arrays_of, map_arrays, tree_map
from slimbayes.engine.rows import LinearMap, sizes_of_blocks
from slimbayes.engine.state import State
from slimbayes.layers.base import BayesLayer, made_once, mixed_class
from slimbayes.layers.site import Kind, Site, has, own_value

NOT_WORTH_IT = re.compile(
    r"posit|pos_?(emb|enc|bias|table)|wpe|(^|_)rel_|relative|_token$|bias_table|logit_scale",
    re.IGNORECASE,
)
POSITIONS = re.compile(
    r"pos(ition)?(al)?_?(emb|enc|bias|table)", re.IGNORECASE
)  # of the module around it


def matrices_of(layer: Any) -> list[str]:
    """Names of a module's own parameters that are matrices, those that torch.nn.utils computes included."""
    names = [
        n
        for n, p in layer.named_parameters(recurse=False)
        if p.dim() > 1 and p.is_floating_point()
    ]
    names = [
        n.removesuffix("_orig") if n.removesuffix("_orig") in layer.__dict__ else n
        for n in names
    ]
    if "weight" in layer.__dict__ and isinstance(
        layer.__dict__["weight"], Tensor
    ):  # old-style weight norm
        names = [
            "weight",
            *(n for n in names if n not in ("weight_g", "weight_v", "weight")),
        ]
    if parametrize.is_parametrized(layer):
        names += [n for n in layer.parametrizations if getattr(layer, n).dim() > 1]
    return names


def scales_of(layer: nn.Module) -> list[str]:
    """The name of a norm's scale, if the module is one."""
    own = dict(layer.named_parameters(recurse=False))
    vectors = (
        all(p.dim() == 1 for p in own.values())
        and len({p.numel() for p in own.values()}) == 1
    )
    plain = vectors and not any(
        p.numel() for child in layer.children() for p in child.parameters()
    )
    runs = plain and type(layer).forward is not nn.Module.forward
    return [name for name in own if runs and _normalises(layer, name)][:1]


@torch.no_grad()
def _normalises(layer: nn.Module, name: str) -> bool:
    """Whether outputs keep still when inputs are scaled, but follow a weight, each row by another amount."""
    trial: Any = copy.deepcopy(layer).train()
    weight: Tensor = trial._parameters[name]
    channels, close = len(weight), partial(torch.allclose, rtol=0.05, atol=0.05)
    trial._parameters[name] = torch.linspace(0.5, 1.5, channels).to(weight)
    for shape in (
        (5, 3, channels),
        (5, channels, 3, 3),
        (5, channels),
        (5, channels, 3),
        (5, channels, 3, 3, 3),
    ):
        # Neighbours differ: groups of a few channels must have a variance that dwarfs the norm's epsilon.
        x = (
            torch.arange(math.prod(shape), dtype=torch.float64)
            .mul(0.6180339887)
            .frac()
            .sub(0.4)
            .view(shape)
            .to(weight)
        )
        try:
            with torch.random.fork_rng([]):
                y, scaled = trial(x), trial(x * 50)
                trial._parameters[name] = trial._parameters[name] * 3
                change = trial(x) - y
        except Exception:
            continue
        if isinstance(y, Tensor) and y.shape == x.shape:
            return close(y, scaled) and not close(change, change.flip(0))
    return False


class AnyLayer(BayesLayer):
    """Mixin of layers of other types. `names` are the parameters that are drawn."""

    bayes_note = "runs its own forward, draw by draw"
    drawn_names: tuple[str, ...] = ()
    read_names: ClassVar[tuple[str, ...]] = ()

    def sites(self) -> list[Site]:
        found, norm = [], self.bayes_kind == "norm"
        for name in self.drawn_names:
            shape = tuple(own_value(self, name).shape)
            sizes, bias = (
                (shape[0] if norm else shape[1], shape[0]),
                bias_of(self, name),
            )
            how: dict[str, Any] = {"positions": "many", "kind": "norm"} if norm else {}
            found.append(
                Site(
                    name,
                    *sizes,
                    bool(bias),
                    name,
                    shape,
                    bias_in=bias,
                    whole=True,
                    **how,
                )
            )
        return found

    def trace_of(self, posterior: Any) -> Any:
        """Its forward may have the weight from elsewhere, such as a list of its own: that it ran is not enough."""
        return self.bayes_key, next(
            name for name, own in self.posterior.items() if own is posterior
        )

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight, bias_name = own_value(self, site), bias_of(self, site)
        bias = own_value(self, bias_name) if bias_name else None

        def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            return self._substituting(
                {site: weight} | ({} if bias is None else {bias_name: bias}), (x,), {}
            )

        def outer(r: Tensor, s: Tensor) -> Tensor:
            return torch.outer(r, s).view(*weight.shape[:2], *[1] * (weight.dim() - 2))

        mask = self._buffers.get("weight_mask") if site == "weight" else None
        return LinearMap(
            weight, bias, op, outer, batch_dim, -1, absorbs=False, mask=mask
        )

    def bayes_forward(self, *args: Any, **kwargs: Any) -> Any:
        lead = self.posteriors()[0]
        if not lead.has_weights:
            return self._through(lead, args, kwargs)
        if lead.drawn == 1:
            return self._with(0, args, kwargs)
        return self._by_blocks(lead, args, kwargs)

    def _through(self, posterior: Any, args: Any, kwargs: Any) -> Any:
        """Dropout on the first floating input."""
        found, linear, arrays = (
            posterior.current,
            self.linear_map(self.drawn_names[0]),
            arrays_of((args, kwargs)),
        )
        found.met.update(
            dict.fromkeys((self.bayes_key, name) for name in self.drawn_names)
        )
        place = next((i for i, a in enumerate(arrays) if a.is_floating_point()), None)
        if place is None:
            return self.plain_forward(args, kwargs)

        def run(x: Tensor, weight: Any, bias: Any) -> Any:
            new_args, new_kwargs = map_arrays(
                lambda i, leaf: x if i == place else leaf, (args, kwargs)
            )
            return self._substituting({}, new_args, new_kwargs)

        linear.op, linear.batch_dim = (
            run,
            0 if found.layout is None else found.dim(self.bayes_key, arrays[place]),
        )
        return posterior(arrays[place], linear)

    def _with(self, draw: int, args: Any, kwargs: Any) -> Any:
        """The layer's own forward with the weights of one draw."""
        values: dict[str, Any] = {}
        for name in self.drawn_names:
            posterior: Any = self.posterior[name]
            weight, bias = posterior.materialize(self.linear_map(name), draw)
            values[name] = weight
            if bias is not None:
                values[bias_of(self, name)] = bias
        return self._substituting(values, args, kwargs)

    def _substituting(self, values: dict[str, Any], args: Any, kwargs: Any) -> Any:
        found = passes.pass_of(self.bayes_key)
        assert found is not None
        held = (
            found.substitutes
        )  # written into: reentrant checkpoints find a copy of the pass at each look
        before, own = (
            held.copy(),
            {name: own_value(self, name) for name in self.read_names},
        )
        held.update(
            {(self.bayes_key, name): value for name, value in (own | values).items()}
        )
        state = None if found.handed is None else State(self)
        copies = (
            []
            if state is None
            else [(v, v.detach().clone()) for v in values.values() if not v.is_meta]
        )
        try:
            out = self.plain_forward(args, kwargs)
            if state is not None and found.handed is not None and state.changes():
                # What it writes in each call, such as a bound of its weight's norm, each draw has; not what it notes to
                # have done, such as a start that fits the first inputs.
                found.handed += [(self.bayes_name, value, old) for value, old in copies]
            return out
        finally:
            held.clear()
            held.update(before)

    def _by_blocks(self, lead: Any, args: Any, kwargs: Any) -> Any:
        found, arrays = lead.current, arrays_of((args, kwargs))
        ins, outs = self.located(found, arrays)
        whole = all(d is None for d in ins)  # a single row that stands for all
        rows = next(
            (a.shape[d] for a, d in zip(arrays, ins, strict=True) if d is not None),
            found.rows,
        )
        sizes = sizes_of_blocks(rows, lead.drawn, found)
        parts, start, counter = [], 0, iter(range(10**9))
        before = State(self) if found.layout.stateful else None

        def narrow(i: int, leaf: Tensor) -> Tensor:
            dim = ins[i]
            if dim is None:
                return leaf
            each, left = leaf.shape[dim] / rows, leaf.shape[dim]
            return leaf.narrow(dim, round(start * each), min(round(size * each), left))

        for j, size in enumerate(sizes):
            if size or len(sizes) == 1:
                out = self._with(j, *map_arrays(narrow, (args, kwargs)))
                if whole:
                    parts.append(map_arrays(partial(_expand_rows, size), out))
                else:
                    parts.append(out)
                if before is not None and before.changes():
                    before.restore()
                    raise Unproven(
                        f"{self.bayes_name} keeps something of a call, which is to be of all rows"
                    )
            start += size

        def join(*leaves: Any) -> Any:
            if not isinstance(leaves[0], Tensor):
                return leaves[0]
            dim = 0 if whole else outs[next(counter)]
            return leaves[0] if dim is None else torch.cat(leaves, dim)

        return tree_map(join, *parts)


def bias_of(layer: nn.Module, name: str) -> str:
    """The bias of one number for each output that goes with a weight, by its name, which of norms may be any; or ""."""
    weight, bias = own_value(layer, name), name.replace("weight", "bias")
    if weight.dim() == 1 and (bias == name or not has(layer, bias)):
        bias = next((other for other in layer._parameters if other != name), name)
    fits = (
        bias != name
        and has(layer, bias)
        and tuple(own_value(layer, bias).shape) == tuple(weight.shape[:1])
    )
    return bias if fits else ""


@made_once
def _expand_rows(size: int, i: int, y: Tensor) -> Tensor:
    return y.expand(size, *y.shape[1:])


def any_class(
    plain: type[nn.Module],
    names: tuple[str, ...],
    kind: Kind,
    read_names: tuple[str, ...],
) -> type[BayesLayer]:
    """The class of converted layers of one type, of which these parameters are drawn."""
    attributes = {
        "plain": plain,
        "drawn_names": names,
        "bayes_kind": kind,
        "read_names": read_names,
    }
    return mixed_class(
        f"Bayes{plain.__name__}",
        (AnyLayer, plain),
        attributes | {"__module__": __name__},
    )
