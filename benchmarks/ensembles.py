"""What the ensemble-based family costs: training steps, prediction with many draws, and members at once or in turn.

    python benchmarks/ensembles.py [--device cuda] [--parts step,predict,members] [--rounds 10] [--out FILE]
    python benchmarks/ensembles.py --tables FILE        write its numbers into docs/ensembles.md

step     a training step (draw, forward, L2, backward, Adam) of ResNet-18 and PyramidNet-110 over the plain network's
predict  S draws for a batch with `share` on and off: what draws have in common runs once
members  an Ensemble of dense networks with execution="batched" and "loop": where `auto` should switch

Variants take turns in every round, so that whatever else the machine does slows them alike; numbers are medians, a ratio is the
median of the ratios within a round.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models

FAMILY: dict[str, sb.Config] = {
    "plain": sb.Deterministic(),
    "dropout before norms": sb.MCDropout(before="norm", rate=0.005),
    "EMP norms": sb.ModelPatch(patch="norm", tau=None),
    "EMP norms, output": sb.ModelPatch(patch="norm+output", tau=None),
    "ECMP norms": sb.ModelPatch(patch="norm", cross=True, tau=None),
    "ECMP norms, output": sb.ModelPatch(patch="norm+output", cross=True, tau=None),
    "EMP per example": sb.ModelPatch(patch="norm+output", draws="example", tau=None),
    "DropConnect": sb.DropConnect(rate=0.05),
}


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def race(
    runs: dict[str, Callable[[], Any]], reference: str, device: torch.device, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every variant runs once, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            spent = seconds(run, device)
            if i >= 2:
                times[name].append(spent)
    ratios = {name: [a / b for a, b in zip(spent, times[reference], strict=True)] for name, spent in times.items()}
    return {
        name: {"ms": 1e3 * statistics.median(spent), "ratio": statistics.median(ratios[name])}
        for name, spent in times.items()
    }


def stepper(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), fused=x.is_cuda)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = net(x)
        (F.cross_entropy(logits.float(), y) + sb.l2(net, 4e-6, 4e-6, 4e-6, 4e-6)).backward()
        optimizer.step()

    return step


def steps(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    nets: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18, 32 x 32": lambda: models.resnet18(classes=100, small_images=True)
    }
    if not small:
        nets["PyramidNet-110, alpha 270"] = models.pyramidnet
    x = torch.randn(8 if small else 256, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(100, (len(x),), device=device)
    out = {}
    for name, build in nets.items():
        runs = {
            m: stepper(sb.bayesianize(build().to(device, memory_format=torch.channels_last), c), x, y)
            for m, c in FAMILY.items()
        }
        if "Pyramid" in name:
            runs.pop("DropConnect")
        out[name] = race(runs, "plain", device, rounds)
    return out


def predictions(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    draws, rows = (20, 4) if small else (200, 100)
    image = torch.randn(rows, 3, 32, 32, device=device)
    table = torch.randn(31, 6, device=device)
    resnet = lambda: models.resnet18(classes=100, small_images=True)  # noqa: E731
    cases: dict[str, tuple[Callable[[], nn.Module], Any, Tensor, int]] = {
        f"ResNet-18, all norms EMP, S={draws}": (resnet, sb.ModelPatch(patch="norm+output"), image, draws),
        f"ResNet-18, all norms ECMP, S={draws}": (resnet, sb.ModelPatch(patch="norm+output", cross=True), image, draws),
        f"ResNet-18, last stage and output EMP, S={draws}": (
            resnet,
            sb.ModelPatch(patch=r"layer4.*bn.*|fc"),
            image,
            draws,
        ),
        f"ResNet-18, output rank-1, S={draws}": (resnet, {"fc": sb.Rank1(members=1)}, image, draws),
        "regression net EMP, S=10,000": (lambda: models.regression_net(6), sb.ModelPatch(), table, 10_000),
        "regression net ECMP, S=10,000": (lambda: models.regression_net(6), sb.ModelPatch(cross=True), table, 10_000),
    }
    out = {}
    for name, (build, config, x, count) in cases.items():
        net = sb.bayesianize(build().to(device), config)

        def run(share: bool, net: nn.Module = net, x: Tensor = x, count: int = count) -> None:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                sb.predict(
                    net,
                    x,
                    draws=count,
                    share=share,
                    keep_samples=False,
                    likelihood="categorical" if x.dim() > 2 else "gaussian",
                )

        out[name] = race(
            {"share off": lambda r=run: r(False), "share on": lambda r=run: r(True)},
            "share off",
            device,
            max(3, rounds // 3),
        )
    return out


def members(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    out = {}
    for width in (50, 100, 200) if small else (50, 100, 200, 400, 800, 1600):
        for count in (5, 20):
            for rows in (100, 1000):
                net = nn.Sequential(
                    nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
                ).to(device)
                x = torch.randn(rows, width, device=device)
                runs: dict[str, Callable[[], Any]] = {}
                for execution in ("loop", "batched"):
                    ensemble = sb.bayesianize(
                        nn.Sequential(
                            *[
                                type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else nn.ReLU()
                                for m in net
                            ]
                        ).to(device),
                        sb.Ensemble(members=count, execution=execution),
                    )

                    def train(model: nn.Module = ensemble, x: Tensor = x) -> None:
                        sb.sample(model, x).square().mean().backward()

                    def predict(model: nn.Module = ensemble, x: Tensor = x) -> None:
                        with torch.no_grad():
                            sb.sample(model, x)

                    runs |= {f"{execution} train": train, f"{execution} predict": predict}
                done = race(runs, "loop train", device, rounds)
                size = sum(p.numel() for p in net.parameters())
                out[f"width {width} ({size:,} parameters), {count} members, {rows} rows"] = {
                    kind: {
                        "loop ms": done[f"loop {kind}"]["ms"],
                        "batched / loop": done[f"batched {kind}"]["ms"] / done[f"loop {kind}"]["ms"],
                    }
                    for kind in ("train", "predict")
                }
    return out


def write_tables(record: Path, page: Path) -> None:
    """Put the step and prediction times of a record between the page's marks."""
    data = json.loads(record.read_text())
    steps = data["step"]
    head = f"{data['device']}, torch {data['torch']}, eager, bfloat16 autocast, 256 images of 32 x 32; milliseconds for a training step, and over the plain network's."
    names = list(next(iter(steps.values())))
    lines = [head, "", "| | " + " | ".join(steps) + " |", "|---|" + "---|" * len(steps)]
    for name in names:
        cells = [
            f"{case[name]['ms']:.1f} ({case[name]['ratio']:.2f})" if name in case else "" for case in steps.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    shared = [
        "| `predict` for 100 images, or 31 rows of 6 numbers | share off, ms | share on, ms | ratio |",
        "|---|---|---|---|",
    ]
    shared += [
        f"| {name} | {case['share off']['ms']:.1f} | {case['share on']['ms']:.1f} | {case['share on']['ratio']:.2f} |"
        for name, case in data["predict"].items()
    ]
    text = page.read_text()
    for mark, body in (("sharing", shared), ("steps", lines)):
        before, rest = text.split(f"<!-- {mark} -->")
        text = before + f"<!-- {mark} -->\n" + "\n".join(body) + "\n<!-- end -->" + rest.split("<!-- end -->", 1)[1]
    page.write_text(text)


PARTS = {"step": steps, "predict": predictions, "members": members}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tables", type=Path)
    args = parser.parse_args()
    if args.tables:
        write_tables(args.tables, Path(__file__).parents[1] / "docs" / "ensembles.md")
        return
    device = torch.device(args.device)
    torch.manual_seed(0)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__, "python": platform.python_version(), "rounds": args.rounds,
    }  # fmt: skip
    for part in args.parts.split(","):
        results[part] = PARTS[part](device, args.rounds, device.type == "cpu")
        for case, lines in results[part].items():
            print(case)
            for name, numbers in lines.items():
                print("   ", name.ljust(24), "  ".join(f"{key} {value:.2f}" for key, value in numbers.items()))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
