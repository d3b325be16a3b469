"""What the ensemble-based family costs: training steps, prediction with many draws, and members at once or in turn.

    python benchmarks/ensembles.py [--device cuda] [--parts step,predict,members] [--rounds 10] [--out FILE]
    python benchmarks/ensembles.py --tables FILE        write its numbers into docs/ensembles.md

step     a training step (draw, forward, L2, backward, Adam) of ResNet-18 and PyramidNet-110 over the plain network's
predict  S draws for a batch with `share` on and off: what draws have in common runs once
members  an Ensemble of dense networks with execution="batched" and "loop": where `auto` should switch

timing.py says how it is timed.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import machine, race
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


def stepper(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), fused=x.is_cuda)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = net(x)
        (F.cross_entropy(logits.float(), y) + sb.l2(net, 4e-6, 4e-6, 4e-6, 4e-6)).backward()
        optimizer.step()

    return step


small_resnet18 = partial(models.resnet18, classes=100, small_images=True)


def steps(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    nets = {"ResNet-18, 32 x 32": small_resnet18}
    if not small:
        nets["PyramidNet-110, alpha 270"] = partial(models.pyramidnet)
    x = torch.randn(8 if small else 256, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(100, (len(x),), device=device)
    out = {}
    for name, build in nets.items():
        family = {m: c for m, c in FAMILY.items() if m != "DropConnect" or "Pyramid" not in name}
        plain = {method: build().to(device, memory_format=torch.channels_last) for method in family}
        runs = {method: stepper(sb.bayesianize(plain[method], config), x, y) for method, config in family.items()}
        out[name] = race(runs, "plain", device, rounds)
    return out


def predictions(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    draws, rows = (20, 4) if small else (200, 100)
    last_stage = sb.ModelPatch(patch=r"layer4.*bn.*|fc")
    networks: dict[str, sb.Config | Mapping[str, sb.Config]] = {
        "all norms EMP": sb.ModelPatch(patch="norm+output"),
        "all norms ECMP": sb.ModelPatch(patch="norm+output", cross=True),
        "last stage and output EMP": last_stage,
        "output rank-1": {"fc": sb.Rank1(members=1)},
    }
    image, table = torch.randn(rows, 3, 32, 32, device=device), torch.randn(31, 6, device=device)
    cases: dict[str, tuple[nn.Module, Any, Tensor, int]] = {
        f"ResNet-18, {name}, S={draws}": (small_resnet18(), config, image, draws) for name, config in networks.items()
    }
    for name, cross in (("EMP", False), ("ECMP", True)):
        net = models.regression_net(6)
        cases[f"regression net {name}, S=10,000"] = (net, sb.ModelPatch(cross=cross), table, 10_000)
    out = {}
    for name, (plain, config, x, count) in cases.items():
        net = sb.bayesianize(plain.to(device), config)
        runs = {f"share {word}": partial(predict, net, x, count, word == "on") for word in ("off", "on")}
        out[name] = race(runs, "share off", device, max(3, rounds // 3))
    return out


def predict(net: nn.Module, x: Tensor, draws: int, share: bool) -> None:
    likelihood = "categorical" if x.dim() > 2 else "gaussian"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        sb.predict(net, x, draws=draws, share=share, keep_samples=False, likelihood=likelihood)


def members(device: torch.device, rounds: int, small: bool) -> dict[str, Any]:
    out = {}
    for width in (50, 100, 200) if small else (50, 100, 200, 400, 800, 1600):
        for count in (5, 20):
            for rows in (100, 1000):
                x = torch.randn(rows, width, device=device)
                times = {
                    kind: race(
                        {e: member_pass(width, count, e, kind, x) for e in ("loop", "batched")}, "loop", device, rounds
                    )
                    for kind in ("train", "predict")
                }
                size = sum(p.numel() for p in dense(width).parameters())
                out[f"width {width} ({size:,} parameters), {count} members, {rows} rows"] = {
                    kind: {"loop ms": found["loop"]["ms"], "batched / loop": found["batched"]["ratio"]}
                    for kind, found in times.items()
                }
    return out


def dense(width: int) -> nn.Sequential:
    hidden = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def member_pass(width: int, count: int, execution: str, kind: str, x: Tensor) -> Callable[[], None]:
    """A training pass or a prediction of all members."""
    model = sb.bayesianize(dense(width).to(x.device), sb.Ensemble(members=count, execution=execution))

    def run() -> None:
        with torch.set_grad_enabled(kind == "train"):
            loss = sb.sample(model, x).square().mean()
        if kind == "train":
            loss.backward()

    return run


def write_tables(record: Path, page: Path) -> None:
    """Put the step and prediction times of a record between the page's marks."""
    data = json.loads(record.read_text())
    steps = data["step"]
    head = (
        f"{data['device']}, torch {data['torch']}, eager, bfloat16 autocast, 256 images of 32 x 32; "
        "milliseconds for a training step, and over the plain network's."
    )
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
    results: dict[str, Any] = machine(device) | {"rounds": args.rounds}
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
