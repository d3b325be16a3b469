"""What a run writes down while it trains: the losses of each step, and curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from slimbayes.files import write_text

HEADER = "step,loss,nll,kl\n"


def append_steps(file: Path, first: int, losses: Tensor) -> None:
    new = not file.exists()
    with open(file, "a", encoding="utf8") as handle:
        if new:
            handle.write(HEADER)
        for offset, (loss, nll, kl) in enumerate(losses.tolist()):
            handle.write(f"{first + offset},{loss!r},{nll!r},{kl!r}\n")


def forget_steps(file: Path, first: int) -> None:
    """Drop the lines of step `first` and later ones, which will be run again."""
    if file.exists():
        # A power loss may have left any part of it, or nothing.
        lines = [line for line in file.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if line.split(",", 1)[0].isdecimal() and int(line.split(",", 1)[0]) < first]
        write_text(file, "".join([HEADER, *kept]))


def tensorboard(folder: Path, row: dict[str, float]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for name, value in row.items():
            if name not in ("epoch", "step"):
                writer.add_scalar(name, value, int(row["step"]))
