"""Parameters of the k-tied paper's four networks, counted on the constructed models, beside the numbers the paper prints.

python experiments/k_tied/counts.py        writes experiments/k_tied/counts.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import slimbayes as sb
from slimbayes import models

RANKS = (None, 1, 2, 3)  # None: mean-field


def posterior(rank: int | None, bias: str) -> sb.Config:
    """Mean-field, or k-tied for a rank."""
    return sb.MeanField(bias=bias) if rank is None else sb.KTied(rank=rank, bias=bias)  # type: ignore[arg-type]


def count_mlp(rank: int | None) -> int:
    """All kernels and biases; biases are never tied."""
    return models.keras_count(sb.bayesianize(models.mlp(), posterior(rank, "gaussian")))


def count_lenet(rank: int | None, kernel: int = 5) -> int:
    """All kernels and biases; of the kernels, those of the dense layers are tied."""
    configs = {"conv.*": posterior(None, "gaussian"), "dense.*": posterior(rank, "gaussian")}
    return models.keras_count(sb.bayesianize(models.lenet(kernel=kernel), configs))


def count_lstm(rank: int | None, dense: bool = False) -> int:
    """The two LSTM kernels; all else is a point estimate."""
    net = sb.bayesianize(models.imdb_lstm(), posterior(rank, "point"), include="lstm")
    return models.keras_count(net) - (0 if dense else models.keras_count(net.dense))


def count_resnet(rank: int | None) -> int:
    """All 14 kernels; biases and batch norm are point estimates."""
    return models.keras_count(sb.bayesianize(models.small_resnet(), posterior(rank, "point")))


@dataclass(frozen=True)
class Row:
    """A network, what is variational in it, how to count it, and the paper's four numbers in units of `unit` parameters."""

    name: str
    variational: str
    count: Callable[[int | None], int]
    printed: tuple[int, ...]
    unit: int


ROWS = (
    Row("MLP, MNIST", "all kernels and biases; kernels tied", count_mlp, (957, 482, 484, 486), 1000),
    Row("CNN, CIFAR-100", "all kernels and biases; dense kernels tied", count_lenet, (4405, 2262, 2268, 2273), 1000),
    Row("LSTM, IMDB", "the two LSTM kernels, tied", count_lstm, (2823, 2693, 2694, 2695), 1000),
    Row("ResNet, CIFAR-10", "all 14 kernels, tied", count_resnet, (9814026, 4929711, 4946964, 4964217), 1),
)


def table() -> list[str]:
    """A line for each network and posterior: counted, printed, and whether they agree to the digits printed."""
    lines = ["| network | variational | posterior | counted here | printed | agrees |", "|---|---|---|---:|---:|---|"]
    for row in ROWS:
        for rank, printed in zip(RANKS, row.printed, strict=True):
            counted, name = row.count(rank), "mean-field" if rank is None else f"{rank}-tied"
            agrees = "yes" if round(counted / row.unit) == printed else f"no: {round(counted / row.unit):,}"
            shown = f"{printed:,}" + ("k" if row.unit == 1000 else "")
            lines.append(f"| {row.name} | {row.variational} | {name} | {counted:,} | {shown} | {agrees} |")
    return lines


def gap(row: Row) -> tuple[int, int]:
    """Fewest and most further parameters that would make all four counts of a network round to the printed ones."""
    counts = [(row.count(rank), printed) for rank, printed in zip(RANKS, row.printed, strict=True)]
    half = row.unit // 2
    return max(p * row.unit - half - c for c, p in counts), min(p * row.unit + half - 1 - c for c, p in counts)


def notes() -> list[str]:
    """What the table leaves open: the printed numbers that no model gives, and the conventions behind the others."""
    low, high = gap(ROWS[1])
    with_dense = [f"{count_lstm(rank, dense=True):,}" for rank in RANKS]
    trainable = sum(p.numel() for p in models.small_resnet().parameters())
    keras = models.keras_count(models.small_resnet())
    return [
        f"- **CNN, 2-tied: 2,268k is not reproduced.** The network has {count_lenet(2):,} parameters. Between {low} and {high}",
        "  more in each of the four rows would agree with everything printed; no convention we know of adds such a number.",
        f"- **CNN, kernels.** The text says 3 x 3, which gives {count_lenet(None, kernel=3):,} mean-field parameters; the",
        '  printed 4,405k needs 5 x 5 kernels, "same" padding and two 2 x 2 poolings.',
        f"- **LSTM, final dense layer.** The paper leaves its 129 parameters out. With them: {', '.join(with_dense)},",
        "  and 3-tied would print as 2,696k where the paper has 2,695k.",
        "- **LSTM, biases.** torch keeps two bias vectors of 512 for an LSTM, Keras one. Only their sum acts: one is counted,",
        "  the other is held at zero.",
        "- **ResNet, moving statistics.** Keras counts the moving means and variances of batch norm: the plain network's",
        f"  {trainable:,} trainable parameters become {keras:,}, and only so do the four numbers agree.",
    ]


def page() -> str:
    """The whole of counts.md."""
    title, origin = (
        "# Parameters of the k-tied paper's networks",
        "Written by `experiments/k_tied/counts.py` from the models.",
    )
    return "\n".join([title, "", origin, "", *table(), "", *notes()]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("counts.md").write_text(page())
    print(page())
