"""Counting parameters as Keras and the k-tied paper do."""

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
