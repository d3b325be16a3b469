"""Time to make CIFAR-10-C: 15 corruptions x 5 severities x 10,000 images of 32 x 32.

    python benchmarks/corruptions.py [--device cuda] [--images 10000] [--batch 10000] [--frost FOLDER] [--out FILE]

Images are noise, whose content does not matter to the time, and stay on the device. Fewer --images are scaled up to
10,000. Seconds of one corruption are the sum over its severities, after one run to warm up; frost needs its photos
(--frost or $SLIMBAYES_DATA/frost) and is left out, loudly, without them.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from slimbayes_lab.data import CORRUPTIONS, corrupt
from timing import machine
from torch import Tensor

FULL = 10_000


def seconds(
    images: Tensor, name: str, severity: int, batch: int, frost: Path | None
) -> float:
    """Wall time of one corruption at one severity."""
    generator = torch.Generator(images.device).manual_seed(severity)
    _wait(images)
    start = time.perf_counter()
    for part in images.split(batch):
        corrupt(part, name, severity, generator, frost_folder=frost)
    _wait(images)
    return time.perf_counter() - start


def _wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


def measure(images: Tensor, batch: int, frost: Path | None) -> dict[str, list[float]]:
    """{corruption: seconds for 10,000 images at severity 1 .. 5}."""
    times: dict[str, list[float]] = {}
    for name in CORRUPTIONS:
        try:
            seconds(images[: min(batch, 100)], name, 1, batch, frost)
        except FileNotFoundError as error:
            print(f"LEFT OUT of the total: {error}")
            continue
        times[name] = [
            seconds(images, name, severity, batch, frost) * FULL / len(images)
            for severity in range(1, 6)
        ]
        print(
            f"{name:20}{sum(times[name]):9.3f} s   "
            + " ".join(f"{t:8.3f}" for t in times[name]),
            flush=True,
        )
    return times


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Seconds to make CIFAR-10-C.")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--images", type=int, default=FULL)
    parser.add_argument(
        "--batch", type=int, default=FULL, help="images corrupted at a time"
    )
    parser.add_argument("--frost", type=Path, help="folder of the frost photos")
    parser.add_argument(
        "--out", type=Path, help="write the results as JSON to this file"
    )
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    record: dict[str, Any] = {
        "machine": machine(device),
        "images": args.images,
        "batch": args.batch,
    }
    print(" ".join(f"{k}={v}" for k, v in record["machine"].items()))
    images = torch.rand(
        args.images,
        3,
        32,
        32,
        device=device,
        generator=torch.Generator(device).manual_seed(0),
    )
    record["seconds"] = measure(images, args.batch, args.frost)
    record["total_seconds"] = sum(sum(row) for row in record["seconds"].values())
    print(
        f"{len(record['seconds'])} x 5 x {FULL:,} images: {record['total_seconds']:.1f} s"
    )
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
