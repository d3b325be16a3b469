"""Counting parameters as Keras and the k-tied paper do, and choosing a width by them as the rank-1 paper does."""

from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch
from torch import nn

_SPLIT_BIAS = (nn.LSTM, nn.LSTMCell, nn.RNN, nn.RNNCell)  # not GRU: there Keras too has two biases


def keras_count(model: nn.Module) -> int:
    """Number of parameters of a plain or converted model as Keras's `count_params` gives it.

    That is every parameter and every moving mean and variance of batch norm, which Keras counts as weights that do not
    train, but only one of the two bias vectors that torch keeps for each LSTM (or simple recurrent) layer, since only
    their sum acts. Parameters that are used twice count once.

    Example:
        >>> keras_count(nn.BatchNorm2d(8)), keras_count(nn.LSTM(4, 2))
        (32, 56)
    """
    total = sum(p.numel() for p in model.parameters())
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            total += sum(b.numel() for b in (layer.running_mean, layer.running_var) if b is not None)
        elif isinstance(layer, _SPLIT_BIAS):
            total -= sum(p.numel() for name, p in layer.named_parameters(recurse=False) if name.startswith("bias_hh"))
    return total


def matching_width(
    build: Callable[[int], nn.Module], budget: int, members: int = 1, widths: Iterable[int] = range(1, 65)
) -> int:
    """The largest width at which `members` networks together have at most `budget` parameters.

    So an ensemble of small networks can be compared with one large network. Networks are built on torch's meta device,
    which allocates nothing.

    Args:
        build: makes the network of a width; wider ones must not have fewer parameters.
        budget: number of parameters, without the moving statistics of batch norm.
        widths: the widths to choose from; a ValueError tells where none fits.

    Example:
        Four WRN-28-5 fit beside one rank-1 WRN-28-10 of four members, and are 0.14 % more than a plain WRN-28-10:

        >>> from functools import partial
        >>> from slimbayes.models import wrn
        >>> matching_width(partial(wrn, 28), budget=36_635_872, members=4)
        5
        >>> matching_width(partial(wrn, 28), budget=36_479_194, members=4)
        4
    """
    choices = sorted(widths)
    if not choices:
        raise ValueError("matching_width: widths must name at least one width, got none.")
    if members < 1:
        raise ValueError(f"matching_width: members must be at least 1, got {members!r}.")

    def count(width: int) -> int:
        with torch.device("meta"):
            return members * sum(p.numel() for p in build(width).parameters())

    fitting = bisect_right(choices, budget, key=count)
    if fitting == 0:
        raise ValueError(
            f"matching_width: budget is {budget:,} parameters, but {members} x the smallest width, {choices[0]}, "
            f"needs {count(choices[0]):,}. Allow more parameters, fewer members or a smaller width."
        )
    return choices[fitting - 1]
