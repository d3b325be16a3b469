"""A context in which a model does nothing at random and batch norm mixes no rows: what is left is its structure.

Random functions give constants, dropout gives its input, and batch norm uses its running statistics, or none, even
while it trains. It also sees which layers' weights are used past the layer's own forward.
"""

import inspect
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimbayes.engine.layout import arrays_of, padded

_DROPOUT = {"dropout1d", "dropout2d", "dropout3d", "native_dropout"}
_DROPOUT |= {
    f"{kind}dropout{end}"
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for end in ("", "_")
}
_RANDOM: dict[str, float | None] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_"), 0.5),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "cauchy_"), 0.25),
    **dict.fromkeys(
        (
            "bernoulli",
            "bernoulli_",
            "exponential_",
            "poisson",
            "log_normal_",
            "geometric_",
        ),
        1.0,
    ),
    **dict.fromkeys(("_standard_gamma", "_sample_dirichlet", "binomial"), 1.0),
    **dict.fromkeys(("randint", "randint_like", "random_", "randperm"), None),
}
_NORM = inspect.signature(F.batch_norm)
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# By place of the index among the arguments.
_BY_INDEX = {"index_select": 2, "gather": 2, "take_along_dim": 1}
_BY_INDEX |= {
    f"scatter{kind}{end}": 2 for kind in ("", "_add", "_reduce") for end in ("", "_")
}
_BY_INDEX |= {
    f"index_{kind}{end}": 2 for kind in ("add", "copy", "fill") for end in ("", "_")
}
_INDEXED = {
    "embedding",
    "embedding_bag",
    "__getitem__",
    "__setitem__",
    "one_hot",
    "cross_entropy",
    "nll_loss",
}
_INDEXED |= set(_BY_INDEX)
_COMPARES = {
    f"{dunder}{name}{dunder}"
    for name in ("gt", "lt", "ge", "le", "eq", "ne")
    for dunder in ("", "__")
}
# What carries on what was compared, when it gives numbers; whatever gives flags or whole numbers does, too.
_CARRIES = {"float", "double", "to", "type", "mean", "sum"}
_READ = {
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "is_nonzero",
    "equal",
    "allclose",
}
_READ |= _COMPARES | {"any", "all", "isclose", "numpy", "__array__"}
_FACTS = {"__get__", "size", "dim", "ndimension", "numel", "stride", "type"}
_FACTS |= {"is_floating_point", "is_complex", "is_contiguous", "element_size"}
_WRITES = {
    "__set__",
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow")),
}
_OTHERS = {
    "multinomial",
    "gumbel_softmax",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "batch_norm",
}
_LOOKED_AT = _INDEXED | _READ | _DROPOUT | {*_RANDOM} | _RECURRENT | _WRITES | _OTHERS


class Quiet(TorchFunctionMode):
    """Open it around a forward; `random` tells afterwards whether anything random was asked for. With `trials`, which
    put back what a forward wrote to, it tells them of writes.
    """

    def __init__(self, evaluates: bool = False, trials: Any = None) -> None:
        super().__init__()
        self.trials = trials
        self.evaluates = evaluates  # in eval mode only a norm without running statistics looks at other rows
        self.random = False
        # Numbers that decide something: what is compared, asked for or counted outside of tensors.
        self.reads: list[float] = []
        # Flags and counts that come of comparing many numbers, by identity, and the sum of these: whether all rows are
        # sure depends on each, also where it does not change.
        self.compared: dict[int, tuple[Tensor, float]] = {}
        # Weights handed out past a layer's forward, and the layer's name.
        self.watched: dict[int, tuple[Tensor, str]] = {}
        self.used: Counter[str] = (
            Counter()
        )  # names of layers whose weights were then used, and how often

    def watch(self, weight: Tensor, name: str) -> Tensor:
        """A weight that somebody reads: a use of it, other than for its shape or type, is noted."""
        seen = weight.view_as(weight)
        self.watched[id(seen)] = (seen, name)
        return seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        writes = name in _WRITES or (name[-1:] == "_" and name[-2:] != "__")
        if not (
            name in _LOOKED_AT
            or writes
            or self.watched
            or self.compared
            or "out" in kwargs
        ):
            return func(*args, **kwargs)
        if self.trials is not None and writes:
            self.trials.note_write(args[0] if args else kwargs.get("input"))
        if self.trials is not None and "out" in kwargs:
            self.trials.note_write(kwargs["out"])
        if self.watched and name not in _FACTS:
            self._note_uses([*args, *kwargs.values()])
        if (
            self.watched and name == "__get__"
        ):  # a shape or a type is no use of a weight, but weight.T is
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                self._note_uses(list(args))
            return out
        if name in _INDEXED:
            check_bounds(name, args, kwargs)
        if name in _READ:
            self._note_read(name, args)
        if name in _DROPOUT:
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get(
                "training", kwargs.get("train", args[2] if len(args) > 2 else True)
            )
            self.random = self.random or (bool(training) and rate != 0)
            same = args[0] if args else kwargs["input"]
            # Dropped weights go to a module's attribute, where a parameter would become the module's own.
            return same.view_as(same) if isinstance(same, nn.Parameter) else same
        if name in _RANDOM:
            self.random = True
            return _constant(name, func(*args, **kwargs), args, kwargs)
        if name == "multinomial":
            self.random = True
            return (
                args[0]
                .topk(kwargs.get("num_samples", args[1] if len(args) > 1 else 1), -1)
                .indices
            )
        if name == "gumbel_softmax":
            self.random = True
            return F.softmax(args[0], kwargs.get("dim", -1))
        if name == "scaled_dot_product_attention":
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = args[:4]
        if name == "multi_head_attention_forward":
            kwargs = {**kwargs, "training": False}
        if name in _RECURRENT:
            _check_states(args)
            args = tuple(0.0 if isinstance(a, float) else a for a in args)
        if name == "batch_norm":
            return _norm(self.evaluates, func, args, kwargs)
        out = func(*args, **kwargs)
        if name in _COMPARES or self.compared:
            self._note_compared(name, args, out)
        return out

    def _note_compared(self, name: str, args: Any, out: Any) -> None:
        if (
            not isinstance(out, Tensor)
            or inside_func()
            or (out.is_floating_point() and name not in _CARRIES)
        ):
            return
        known = [self.compared[id(a)][1] for a in args if id(a) in self.compared]
        many = [
            a
            for a in args
            if isinstance(a, Tensor) and a.is_floating_point() and a.dim()
        ]
        if name in _COMPARES and not known:
            known = [float(a.detach().double().nan_to_num().sum()) for a in many]
        if known:
            self.compared[id(out)] = (out, sum(known))

    def _note_read(self, name: str, args: Any) -> None:
        """A number that leaves the tensors, or is compared to make one: no draw of some rows may change it."""
        numbers = [a for a in args if isinstance(a, Tensor)]
        single = all(a.dim() == 0 for a in numbers) or name in (
            "any",
            "all",
            "tolist",
            "numpy",
            "__array__",
        )
        if numbers and single and not inside_func() and not numbers[0].is_complex():
            self.reads += [
                float(a.detach().double().nan_to_num().sum()) for a in numbers
            ]
            self.reads += [
                self.compared[id(a)][1] for a in numbers if id(a) in self.compared
            ]

    def _note_uses(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, (tuple, list)):
                self._note_uses(list(value))
            elif isinstance(value, Tensor) and id(value) in self.watched:
                self.used[self.watched[id(value)][1]] += 1


def inside_func() -> bool:
    """Whether torch.func transforms are under way, where nothing can be looked at."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_captured(inputs: Any) -> bool:
    """Whether a CUDA graph is being recorded of a call with these inputs."""
    return (
        any(a.is_cuda for a in map(padded, arrays_of(inputs)))
        and torch.cuda.is_current_stream_capturing()
    )


def check_bounds(name: str, args: Any, kwargs: Any) -> None:
    """Raise for an index out of range. On a GPU the kernel itself would end the process's use of the device."""
    if inside_func() or not any(isinstance(a, Tensor) and a.is_cuda for a in args):
        return
    x = args[0]
    if name in ("embedding", "embedding_bag"):
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        _check_index(
            x if not x.is_floating_point() else weight,
            (weight if not x.is_floating_point() else x).shape[0],
        )
    elif name in ("__getitem__", "__setitem__"):
        _check_key(x, args[1])
    elif name == "one_hot":
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        _check_index(x, classes if classes > 0 else None)
    elif name in ("cross_entropy", "nll_loss"):
        target = args[1] if len(args) > 1 else kwargs["target"]
        if not target.is_floating_point():
            _check_index(
                target.where(target != kwargs.get("ignore_index", -100), 0),
                x.shape[1 if x.dim() > 1 else 0],
            )
    else:
        place = _BY_INDEX[name]
        index = (
            args[place]
            if len(args) > place
            else kwargs.get("index", kwargs.get("indices"))
        )
        dim = kwargs.get(
            "dim", args[1] if len(args) > 1 and isinstance(args[1], int) else None
        )
        if isinstance(index, Tensor) and isinstance(dim, int):
            _check_index(index, x.shape[dim])


def _check_states(args: Any) -> None:
    """Refuse recurrent states of other rows than the input's: the kernel for packed sequences does not look."""
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
    packed = packed and isinstance(args[2], (Tensor, tuple, list))
    states = args[2] if packed else args[1]
    states = [states] if isinstance(states, Tensor) else list(states)
    rows = {h.shape[1] for h in states} | ({int(args[1][0])} if packed else set())
    if len(rows) > 1:
        raise RuntimeError(
            f"recurrent states and inputs of {sorted(rows)} rows do not go together"
        )


def _check_key(x: Tensor, key: Any) -> None:
    dim = 0
    parts = key if isinstance(key, tuple) else (key,)
    for i, part in enumerate(parts):
        flags = [
            p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else None
            for p in parts[i:]
        ]
        if part is Ellipsis:
            dim = x.dim() - sum(
                p is not None if n is None else n
                for p, n in zip(parts[i + 1 :], flags[1:], strict=True)
            )
        elif flags[0] is not None:
            dim += flags[0]
        elif part is not None:
            if isinstance(part, Tensor) and dim < x.dim():
                _check_index(part, x.shape[dim])
            dim += 1


def _check_index(index: Tensor, size: int | None) -> None:
    if index.numel() and (
        int(index.min()) < -(size or 0)
        or (size is not None and int(index.max()) >= size)
    ):
        raise IndexError(
            f"an index from {int(index.min())} to {int(index.max())} into {size} entries"
        )


def _constant(name: str, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    """What stands for a random tensor: the same everywhere, however many rows there are."""
    with torch.no_grad():
        if name == "randperm":
            return out.copy_(torch.arange(len(out)))
        if _RANDOM[name] is not None:
            return out.fill_(_RANDOM[name])  # type: ignore[arg-type]
        numbers = [a for a in args if isinstance(a, int)]
        return out.fill_(
            kwargs.get("low", kwargs.get("from", numbers[0] if len(numbers) > 1 else 0))
        )


def _norm(evaluates: bool, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Batch norm that looks at no other row, unless it does so while nothing trains."""
    if func is torch.batch_norm:  # which takes the weight and the bias first
        x, weight, bias, mean, var, _, _, eps, _ = args
    else:
        given = _NORM.bind(*args, **kwargs)
        given.apply_defaults()
        x, mean, var, weight, bias, _, _, eps = given.args
    if evaluates and mean is None:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    mean = x.new_zeros(x.shape[1]) if mean is None else mean
    var = x.new_ones(x.shape[1]) if var is None else var
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
