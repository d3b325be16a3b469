"""A context in which a model does nothing at random and batch norm mixes no rows: what is left is its structure.

Random functions give constants, dropout gives its input, and batch norm uses its running statistics, or none, even while it trains.
It also sees which layers' weights are used past the layer's own forward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUT = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout",
}  # fmt: skip
_RANDOM = {"rand": 0.5, "rand_like": 0.5, "uniform_": 0.5, "randn": 0.25, "randn_like": 0.25, "normal": 0.25, "normal_": 0.25}
_RANDOM |= {"bernoulli": 1.0, "bernoulli_": 1.0, "exponential_": 1.0, "poisson": 1.0, "cauchy_": 0.25, "log_normal_": 1.0}
_RANDOM |= {"geometric_": 1.0, "randint": None, "randint_like": None, "random_": None, "randperm": None}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_FACTS = {"__get__", "size", "dim", "ndimension", "is_floating_point", "is_complex", "element_size", "numel", "stride", "is_contiguous", "type"}


class Quiet(TorchFunctionMode):
    """Open it around a forward; `random` tells afterwards whether anything random was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False
        self.watched: dict[int, tuple[Tensor, str]] = {}  # weights handed out past a layer's forward, and the layer's name
        self.used: dict[str, None] = {}  # names of layers whose weights were then used

    def watch(self, weight: Tensor, name: str) -> Tensor:
        """A weight that somebody reads: a use of it, other than for its shape or type, is noted."""
        seen = weight.view_as(weight)
        self.watched[id(seen)] = (seen, name)
        return seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.watched and name not in _FACTS:
            self._note_uses([*args, *kwargs.values()])
        if name in _DROPOUT:
            self.random = self.random or _drops(args, kwargs)
            return args[0] if args else kwargs["input"]
        if name in _RANDOM:
            self.random = True
            return _constant(name, func(*args, **kwargs), args, kwargs)
        if name == "multinomial":
            self.random = True
            return args[0].topk(kwargs.get("num_samples", args[1] if len(args) > 1 else 1), -1).indices
        if name == "gumbel_softmax":
            self.random = True
            return F.softmax(args[0], kwargs.get("dim", -1))
        if name == "scaled_dot_product_attention":
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = args[:4]
        if name == "multi_head_attention_forward":
            kwargs = {**kwargs, "training": False}
        if name in _RECURRENT:
            args = tuple(0.0 if isinstance(a, float) else a for a in args)
        if name == "batch_norm":
            return _norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _note_uses(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, (tuple, list)):
                self._note_uses(list(value))
            elif isinstance(value, Tensor) and id(value) in self.watched:
                self.used[self.watched[id(value)][1]] = None


def _constant(name: str, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    """What stands for a random tensor: in each place the same, so that a row's does not depend on how many there are."""
    with torch.no_grad():
        if name == "randperm":
            return out.copy_(torch.arange(len(out)))
        if _RANDOM[name] is not None:
            return out.fill_(_RANDOM[name])
        numbers = [a for a in args if isinstance(a, int)]
        return out.fill_(kwargs.get("low", kwargs.get("from", numbers[0] if len(numbers) > 1 else 0)))


def _drops(args: Any, kwargs: Any) -> bool:
    """Whether a call of dropout would have dropped anything."""
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and rate != 0


def _norm(x: Tensor, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None, *rest: Any, **options: Any) -> Tensor:
    """Batch norm that looks at no other row."""
    mean, var = options.pop("running_mean", mean), options.pop("running_var", var)
    weight, bias = options.pop("weight", weight), options.pop("bias", bias)
    channels = x.shape[1]
    mean = x.new_zeros(channels) if mean is None else mean
    var = x.new_ones(channels) if var is None else var
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, options.get("eps", 1e-5))
