"""What a run writes down while it trains: the losses of each step, and curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from slimbayes.lab.runs import write_text


def append_steps(file: Path, first: int, losses: Tensor) -> None:
    new = not file.exists()
    with open(file, "a", encoding="utf8") as handle:
        if new:
            handle.write("step,loss,nll,kl\n")
        for offset, (loss, nll, kl) in enumerate(losses.tolist()):
            handle.write(f"{first + offset},{loss!r},{nll!r},{kl!r}\n")


def forget_steps(file: Path, first: int) -> None:
    """Drop the lines of step `first` and later ones, which will be run again."""
    if file.exists():
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",", 1)[0]) < first]
        write_text(file, "".join([lines[0], *kept]))


def tensorboard(folder: Path, row: dict[str, float]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for name, value in row.items():
            if name not in ("epoch", "step"):
                writer.add_scalar(name, value, int(row["step"]))
