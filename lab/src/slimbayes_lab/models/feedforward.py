"""Networks without shortcuts: the k-tied paper's MLP and LeNet, the EMP paper's regression net and 100-layer MLP; and
parameters counted as Keras and the k-tied paper do.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

he_normal = partial(
    nn.init.kaiming_normal_, nonlinearity="relu"
)  # Normal(0, sqrt(2 / fan-in))


def start_kernels(
    model: nn.Sequential,
    kernel: Callable[[Tensor], Any] = he_normal,
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d),
) -> nn.Sequential:
    """The model with every kernel of some kinds of layer started by `kernel`, and their biases at zero, in place.

    So the k-tied paper starts its networks; kernels become the posteriors' means (its Appendix D.2).
    """
    for layer in model.modules():
        if isinstance(layer, kinds):
            for name, parameter in layer.named_parameters(recurse=False):
                start = kernel if name == "weight" else nn.init.zeros_
                start(parameter)
    return model


def mlp(
    inputs: int = 784, hidden: Sequence[int] = (400, 400), classes: int = 10
) -> nn.Sequential:
    """784-400-400-10 with ReLU, the k-tied paper's MNIST network; layers `dense1`, `dense2`, ...

    Shape: (B, ...) with `inputs` numbers in each row -> (B, classes) logits.

    Example:
        >>> import torch
        >>> mlp()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    sizes = [inputs, *hidden, classes]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), dense1=nn.Linear(sizes[0], sizes[1])
    )
    for i in range(1, len(sizes) - 1):
        layers |= {
            f"relu{i}": nn.ReLU(),
            f"dense{i + 1}": nn.Linear(sizes[i], sizes[i + 1]),
        }
    return start_kernels(nn.Sequential(layers))


def lenet(
    classes: int = 100, channels: int = 3, size: int = 32, kernel: int = 5
) -> nn.Sequential:
    """Convolutions of 32 and 64 filters, each with ReLU and pooling, then dense layers of 512 and `classes` units.

    Layers `conv1`, `conv2`, `dense1`, `dense2`. The k-tied paper's text says 3 x 3 kernels; its parameter counts need
    5 x 5 ones, "same" padding and two 2 x 2 poolings, which is the default here.

    Args:
        size: height and width of the images, a multiple of 4.

    Shape: (B, channels, size, size) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> lenet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    if size % 4 or size < 4:
        raise ValueError(
            f"lenet halves images twice, so size must be a multiple of 4, got {size!r}."
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, kernel, padding="same"),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, kernel, padding="same"),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dense1=nn.Linear(64 * (size // 4) ** 2, 512),
        relu3=nn.ReLU(),
        dense2=nn.Linear(512, classes),
    )
    return start_kernels(nn.Sequential(layers))


def small_cnn(classes: int = 10, channels: int = 1, width: int = 32) -> nn.Sequential:
    """Three convolutions with batch norm, two of them of stride 2, and a dense layer: for small images, quick tries.

    Layers `conv1`, `norm1` to `conv3`, `norm3`, and `dense`; `width`, 2 `width` and 2 `width` filters.

    Shape: (B, channels, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> small_cnn()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    sizes = (channels, width, 2 * width, 2 * width)
    for i in range(1, 4):
        layers[f"conv{i}"] = nn.Conv2d(
            sizes[i - 1], sizes[i], 3, stride=1 if i == 1 else 2, padding=1, bias=False
        )
        layers |= {f"norm{i}": nn.BatchNorm2d(sizes[i]), f"relu{i}": nn.ReLU()}
    layers |= {
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "dense": nn.Linear(sizes[-1], classes),
    }
    return start_kernels(nn.Sequential(layers))


def regression_net(
    inputs: int, outputs: int = 1, hidden: int = 50, norm: bool = True
) -> nn.Sequential:
    """The EMP paper's net for its ten regression data sets (Appendix D.7): batch norm on the input and hidden layer.

    Layers `norm1`, `dense1`, `relu`, `norm2`, `dense2`. Scales of batch norm start at 0.2, as the paper says; the dense
    layers start as torch starts them.

    Args:
        hidden: the paper has 100 units for Year and Protein, 50 for the others.
        norm: False leaves both batch norms out, as in the paper's explicit ensemble.

    Shape: (B, inputs) -> (B, outputs).

    Example:
        >>> import torch
        >>> regression_net(13)(torch.randn(4, 13)).shape
        torch.Size([4, 1])
    """
    norm1, norm2 = nn.BatchNorm1d(inputs), nn.BatchNorm1d(hidden)
    for scale in (norm1.weight, norm2.weight):
        nn.init.constant_(scale, 0.2)
    layers: OrderedDict[str, nn.Module] = (
        OrderedDict(norm1=norm1) if norm else OrderedDict()
    )
    layers |= {"dense1": nn.Linear(inputs, hidden), "relu": nn.ReLU()}
    layers |= {"norm2": norm2} if norm else {}
    return nn.Sequential(layers | {"dense2": nn.Linear(hidden, outputs)})


def deep_mlp(inputs: int = 1, width: int = 100, depth: int = 100) -> nn.Sequential:
    """The MLP of the EMP paper's Table 3, where it only counts parameters: dense layers of `width` units, no biases.

    Layers `dense1`, `norm1`, `relu1`, `dense2`, ...: batch norm and ReLU follow every dense layer but the last. All
    start as torch starts them. That the last has `width` outputs and no layer a bias is what the paper's counts need;
    its text says L = 100, H = 100.

    Shape: (B, inputs) -> (B, width).

    Example:
        >>> sum(p.numel() for p in deep_mlp().parameters())
        1009900
    """
    if depth < 1:
        raise ValueError(
            f"deep_mlp: depth must be at least 1 dense layer, got {depth!r}."
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        dense1=nn.Linear(inputs, width, bias=False)
    )
    for i in range(1, depth):
        layers |= {f"norm{i}": nn.BatchNorm1d(width), f"relu{i}": nn.ReLU()}
        layers[f"dense{i + 1}"] = nn.Linear(width, width, bias=False)
    return nn.Sequential(layers)


_SPLIT_BIAS = (
    nn.LSTM,
    nn.LSTMCell,
    nn.RNN,
    nn.RNNCell,
)  # not GRU: there Keras too has two biases


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
            total += sum(
                b.numel()
                for b in (layer.running_mean, layer.running_var)
                if b is not None
            )
        elif isinstance(layer, _SPLIT_BIAS):
            total -= sum(
                p.numel()
                for name, p in layer.named_parameters(recurse=False)
                if name.startswith("bias_hh")
            )
    return total
