"""A plain and a Bayesian net on scikit-learn's 8x8 digits: how sure is each of what it says, and should it be?

    python examples/digits.py

Both are trained the same way on upright, clean digits, and judged on those, on rotated and noisy ones, and on images
that are no digits at all. Prints a table and draws demo/digits.png.

Sizes: N test digits, C = 10 classes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.files import claim_folder

matplotlib.use("Agg")  # draws into a file, needs no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

METHODS: dict[str, sb.Config] = {
    "plain": sb.Deterministic(),
    # Means start at Normal(1, 0.5), as in the paper, whose nets are trained from scratch too.
    "rank-1": sb.Rank1(
        members=4, prior=sb.Cauchy(1.0, 0.1), mean_init=sb.Normal(1.0, 0.5)
    ),
}
# Best NLL of both nets on a held-out 30 % of the training digits, of rates 3e-3, 1e-2, 2e-2 x decays 0.1, 1, 3.
LEARNING_RATE, WEIGHT_DECAY = (
    1e-2,
    1.0,
)  # AdamW multiplies them: a step shrinks weights by 1 %
BATCH = 64
DRAWS = 16  # for predictions, four from each member
BINS = 15  # of the calibration error, as in the papers
COLORS = {"plain": "#8a8f98", "rank-1": "#2a6fdb"}
ALARM, GAP = "#e07b39", "#f5d3bd"
TICKS = [0, 0.5, 1]
HEADING: dict[str, Any] = {"weight": "bold", "fontsize": 12}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (N, 1, 8, 8) in [0, 1] and labels (N,), then those of the test."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    train, test = train_test_split(
        range(len(images)), test_size=0.4, stratify=data.target, random_state=0
    )
    labels = torch.tensor(data.target)
    return images[train], labels[train], images[test], labels[test]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def train(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, tick: Callable[[], None]
) -> None:
    """The same loop for every method: a plain model has one draw and no KL."""
    steps = epochs * (len(x) // BATCH)
    optimizer = torch.optim.AdamW(
        sb.param_groups(model, weight_decay=WEIGHT_DECAY), lr=LEARNING_RATE
    )
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    anneal = sb.schedules.linear(
        max(1, 2 * steps // 3)
    )  # the rank-1 paper's two thirds of training
    model.train()
    for step in range(steps):
        if step % (len(x) // BATCH) == 0:
            order = torch.randperm(len(x))
            tick()
        rows, order = order[:BATCH], order[BATCH:]
        terms = sb.elbo(
            sb.categorical(sb.sample(model, x[rows]), y[rows]),
            model,
            num_data=len(x),
            kl_weight=anneal(step),
        )
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        decay.step()


def rotated(x: Tensor, degrees: float) -> Tensor:
    turned = ndimage.rotate(x.numpy(), degrees, axes=(2, 3), reshape=False, order=1)
    return torch.tensor(turned, dtype=torch.float32).clamp(0, 1)


def noisy(x: Tensor, scale: float) -> Tensor:
    return (
        x + scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1)


def dropped(x: Tensor, rate: float) -> Tensor:
    """Each pixel turns black with this probability."""
    return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) >= rate)


def shuffled(x: Tensor) -> Tensor:
    """Each image's own pixels in random order: the ink of a digit without its shape."""
    order = torch.rand(len(x), 64, generator=torch.Generator().manual_seed(0)).argsort(
        1
    )
    return x.flatten(1).gather(1, order).view_as(x)


def test_sets(x: Tensor) -> dict[str, Tensor]:
    """Digits as in training, and the same digits shifted. All keep their labels."""
    sets = {"clean": x} | {f"rotated {d}°": rotated(x, d) for d in (15, 30, 45, 60)}
    sets |= {f"noise {s}": noisy(x, s) for s in (0.2, 0.4, 0.6)}
    return sets | {f"pixels lost {r:.0%}": dropped(x, r) for r in (0.2, 0.4, 0.6)}


def strangers(x: Tensor) -> dict[str, Tensor]:
    """Images that are no digits as the training set knows them."""
    return {"inverted": 1 - x, "pixels shuffled": shuffled(x)}


def bin_confidence(
    probs: Tensor, target: Tensor, bins: int = BINS
) -> tuple[Tensor, Tensor, Tensor]:
    """Share of predictions, mean confidence and accuracy in bins [0, 1/bins), ..., the last closed; NaN where empty."""
    confidence, label = probs.double().max(-1)
    index = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(index, minlength=bins).double()
    mean = torch.bincount(index, confidence, bins) / count
    accuracy = torch.bincount(index, (label == target).double(), bins) / count
    return count / count.sum(), mean, accuracy


def ece(probs: Tensor, target: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean gap between confidence and accuracy of a bin, weighted by its predictions."""
    share, confidence, accuracy = bin_confidence(probs, target, bins)
    return float((share * (confidence - accuracy).abs()).nansum())


def metrics(probs: Tensor, target: Tensor) -> dict[str, float]:
    picked = probs.gather(1, target.unsqueeze(1)).clamp_min(
        torch.finfo(probs.dtype).tiny
    )
    return {
        "accuracy": float((probs.argmax(1) == target).double().mean()),
        "nll": float(-picked.log().mean()),
        "ece": ece(probs, target),
    }


@dataclass
class Judged:
    """What one method did: its predictions on every test set and on non-digits, and what they are worth."""

    predictions: dict[str, sb.Prediction]
    strangers: dict[str, sb.Prediction]
    scores: dict[str, dict[str, float]]
    auroc: dict[str, dict[str, float]]
    parameters: int
    seconds: float


def judge(
    config: sb.Config, data: tuple[Tensor, ...], epochs: int, tick: Callable[[], None]
) -> Judged:
    x_train, y_train, x, y = data
    torch.manual_seed(0)
    model = sb.bayesianize(network(), config)
    start = time.perf_counter()
    train(model, x_train, y_train, epochs, tick)
    seconds = time.perf_counter() - start
    look = partial(
        sb.predict, model, draws=DRAWS, chunk=1024, keep_samples=False
    )  # so few rows at once fit the cache
    seen = {name: look(images) for name, images in test_sets(x).items()}
    strange = {name: look(images) for name, images in strangers(x).items()}
    scores = {name: metrics(p.probs, y) for name, p in seen.items()}
    scores["mean of shifted"] = {
        m: float(np.mean([s[m] for n, s in scores.items() if n != "clean"]))
        for m in scores["clean"]
    }
    auroc = {
        name: {
            kind: separation(seen["clean"], p, kind) for kind in ("total", "epistemic")
        }
        for name, p in strange.items()
    }
    return Judged(
        seen,
        strange,
        scores,
        auroc,
        sum(p.numel() for p in model.parameters()),
        seconds,
    )


def separation(known: sb.Prediction, strange: sb.Prediction, kind: str) -> float:
    """AUROC: how often a stranger is more uncertain than a digit. 0.5 is chance."""
    a, b = getattr(known, kind), getattr(strange, kind)
    return float(
        roc_auc_score(np.r_[np.zeros(len(a)), np.ones(len(b))], torch.cat([a, b]))
    )


def print_results(console: Console, judged: dict[str, Judged]) -> None:
    table = Table(
        title="8x8 digits, trained on clean upright ones (better of the two in bold)"
    )
    table.add_column("test digits")
    for metric in ("accuracy", "NLL", "ECE"):
        for name in judged:
            table.add_column(f"{metric}\n{name}", justify="right")
    for shift in next(iter(judged.values())).scores:
        cells = []
        for metric, best in (("accuracy", max), ("nll", min), ("ece", min)):
            values = [round(j.scores[shift][metric], 3) for j in judged.values()]
            cells += [
                f"[bold]{v:.3f}[/bold]" if v == best(values) else f"{v:.3f}"
                for v in values
            ]
        table.add_row(
            shift, *cells, end_section=shift == "clean" or shift.endswith("60%")
        )
    console.print(table)
    table = Table(title="AUROC of uncertainty: test digits against what is no digit")
    for column in (
        "",
        *(f"{kind}\n{name}" for name in judged for kind in ("total", "epistemic")),
    ):
        table.add_column(column, justify="right" if column else "left")
    for strange in judged["plain"].auroc:
        cells = [
            j.auroc[strange][kind]
            for j in judged.values()
            for kind in ("total", "epistemic")
        ]
        table.add_row(strange, *(f"{c:.3f}" for c in cells))
    console.print(table)
    plain = judged["plain"].parameters
    for name, j in judged.items():
        more = f"{j.parameters:,} parameters ({j.parameters / plain - 1:+.1%})"
        console.print(f"{name:7} {more}, trained in {j.seconds:.1f} s", highlight=False)


def draw_reliability(ax: Axes, name: str, judged: Judged, y: Tensor) -> None:
    """Accuracy against confidence on all shifted digits; a gap below the diagonal is overconfidence."""
    shifted = [p.probs for n, p in judged.predictions.items() if n != "clean"]
    probs, target = torch.cat(shifted), y.repeat(len(shifted))
    _, confidence, accuracy = (
        t.numpy() for t in bin_confidence(probs, target, bins=10)
    )
    full = ~np.isnan(confidence)
    left = np.arange(10)[full] / 10
    ax.bar(
        left, accuracy[full], 0.1, align="edge", color=COLORS[name], edgecolor="white"
    )
    gap = confidence[full] - accuracy[full]
    ax.bar(
        left,
        gap,
        0.1,
        accuracy[full],
        align="edge",
        color=GAP,
        edgecolor="white",
        label="gap to what it claims",
    )
    ax.plot([0, 1], [0, 1], color="#333", lw=1, ls="--")
    ax.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="confidence",
        ylabel="how often right",
        xticks=TICKS,
        yticks=TICKS,
        aspect="equal",
    )
    ax.set_title(f"{name}: calibration error {ece(probs, target):.2f}")
    ax.legend(frameon=False, loc="upper left")


def draw_rotation(axes: Any, judged: dict[str, Judged]) -> None:
    sets = ["clean", "rotated 15°", "rotated 30°", "rotated 45°", "rotated 60°"]
    for ax, metric, title in zip(
        axes, ("accuracy", "nll"), ("accuracy", "negative log-likelihood")
    ):
        for name, j in judged.items():
            ax.plot(
                [0, 15, 30, 45, 60],
                [j.scores[s][metric] for s in sets],
                "o-",
                color=COLORS[name],
                lw=2,
                label=name,
            )
        ax.set(
            xlabel="rotation in degrees",
            xticks=[0, 15, 30, 45, 60],
            title=title,
            ylim=(0, None),
        )
    axes[0].legend(frameon=False)


def draw_digit(
    image_ax: Axes, bar_ax: Axes, image: Tensor, probs: Tensor, label: int
) -> None:
    """A digit, and its most probable classes under it; the true one is blue."""
    image_ax.imshow(image.squeeze(0), cmap="gray_r", vmin=0, vmax=1)
    image_ax.set_anchor("S")
    top = probs.topk(3)
    for row, (p, c) in enumerate(zip(top.values.tolist(), top.indices.tolist())):
        if p < 0.005:  # would read "0%"
            continue
        color = COLORS["rank-1"] if c == label else ALARM
        bar_ax.barh(row, p, 0.7, color=color, alpha=0.85)
        bar_ax.text(
            -0.1, row, str(c), ha="right", va="center", color=color, weight="bold"
        )
        bar_ax.text(
            p + 0.06,
            row,
            f"{p:.0%}",
            ha="left",
            va="center",
            fontsize=8.5,
            color="#555",
        )
    bar_ax.set(xlim=(-0.35, 1.6), ylim=(2.6, -0.6))
    for ax in (image_ax, bar_ax):
        ax.set_axis_off()


def draw_digits(figure: Any, judged: Judged, x: Tensor, y: Tensor) -> None:
    prediction = judged.predictions["clean"]
    order = prediction.total.argsort(descending=True)
    rows = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    for part, chosen, title in zip(
        rows, (order[:8], order.flip(0)[:8]), ("least sure of", "surest of")
    ):
        part.suptitle(
            f"The test digits the rank-1 net is {title} (blue: the true class)",
            **HEADING,
        )
        grid = part.subplots(2, 8, gridspec_kw={"height_ratios": [1.3, 1]})
        for above, below, i in zip(*grid, chosen.tolist()):
            draw_digit(above, below, x[i], prediction.probs[i], int(y[i]))


def draw_uncertainty(
    axes: Any, judged: dict[str, Judged], images: Tensor, kind: str
) -> None:
    edges = np.linspace(0, np.log(10), 30)  # no entropy of ten classes is larger
    for ax, (name, j) in zip(axes, judged.items()):
        ax.hist(
            j.predictions["clean"].total,
            edges,
            color=COLORS[name],
            alpha=0.85,
            label="test digits",
        )
        ax.hist(
            j.strangers[kind].total,
            edges,
            color=ALARM,
            alpha=0.55,
            label=f"{kind} digits",
        )
        ax.set(
            title=f"{name}: tells them apart with AUROC {j.auroc[kind]['total']:.2f}",
            ylabel="images",
            xlim=(0, edges[-1]),
        )
        ax.legend(frameon=False, loc="upper right")
    axes[1].set_xlabel("uncertainty: entropy of the prediction, in nats")
    for i in range(3):
        inset = axes[0].inset_axes((0.42 + 0.1 * i, 0.25, 0.09, 0.35))
        inset.imshow(images[i].squeeze(0), cmap="gray_r", vmin=0, vmax=1)
        inset.set(xticks=[], yticks=[])


def draw(path: Path, judged: dict[str, Judged], x: Tensor, y: Tensor) -> None:
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure: Figure = plt.figure(
        figsize=(15, 10), layout="constrained", facecolor="white"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    (left, right), (lower_left, lower_right) = figure.subfigures(
        2, 2, width_ratios=[1.25, 1], height_ratios=[1, 1.25]
    )
    left.suptitle(
        "Right as often as it claims? All rotated and noisy digits", **HEADING
    )
    for ax, (name, j) in zip(left.subplots(1, 2), judged.items()):
        draw_reliability(ax, name, j, y)
    right.suptitle("What a rotation does", **HEADING)
    draw_rotation(right.subplots(1, 2), judged)
    draw_digits(lower_left, judged["rank-1"], x, y)
    lower_right.suptitle("Does it notice what it has never seen?", **HEADING)
    draw_uncertainty(
        lower_right.subplots(2, 1, sharex=True),
        judged,
        strangers(x)["inverted"],
        "inverted",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(epochs: int = 30, out: Path = Path("demo/digits.png")) -> dict[str, Any]:
    """Train, judge, print and draw; returns {method: {scores, auroc, parameters, seconds}}."""
    torch.set_num_threads(1)  # tensors this small only lose time to a second thread
    console = Console()
    claim_folder(out.parent, [out.name])  # a picture that is there already is ours
    data = digits()
    judged = {}
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        for name, config in METHODS.items():
            task = progress.add_task(f"training the {name} net", total=epochs)
            judged[name] = judge(
                config, data, epochs, lambda task=task: progress.advance(task)
            )
    print_results(console, judged)
    draw(out, judged, data[2], data[3])
    console.print(f"Now open {out}", highlight=False)
    kept = ("scores", "auroc", "parameters", "seconds")
    return {
        name: {field: getattr(j, field) for field in kept} for name, j in judged.items()
    }


if __name__ == "__main__":
    main()
