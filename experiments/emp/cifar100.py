"""The EMP paper's CIFAR-100 experiment (Tables 6 and 9 to 11) on a smaller network, for a GPU.

    python experiments/emp/cifar100.py train --method ecmp --data DIR --out results/emp/cifar100-ecmp.json
    python experiments/emp/cifar100.py table results/emp/cifar100-*.json          into README.md

The paper trains PyramidNet-110 for 400 epochs; here it is WRN-16-4 for 25. The rest is the paper's: Adam at its defaults, batches of 256, crops
of images padded by 4 and flips, K = 5 on batch norm and output layer, dropout 0.005 before every batch norm, the L2 penalty of Appendix
C.1 with 0.001 / 256 for all four groups, and 200 draws. DIR holds cifar100 in any format that `slimbayes.data.load` reads.

Sizes: S draws, N images, C classes.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models
from slimbayes.data import pad_crop_flip
from slimbayes.metrics import calibration

CONFIGS: dict[str, sb.Config] = {
    "vanilla": sb.Deterministic(),
    "dropout": sb.MCDropout(before="norm", rate=0.005),
    "emp": sb.ModelPatch(components=5, patch="norm+output", init="uniform", tau=None),
    "ecmp": sb.ModelPatch(components=5, cross=True, patch="norm+output", init="uniform", tau=None),
    "emp-norm": sb.ModelPatch(components=5, patch="norm", init="uniform", tau=None),
    "ecmp-norm": sb.ModelPatch(components=5, cross=True, patch="norm", init="uniform", tau=None),
}
# Top-5, top-1, ECE and MCE in percent by number of draws: Tables 6 and 9 to 11, PyramidNet-110 after 400 epochs.
PAPER = {
    "vanilla": {1: (90.9, 72.6, 21.6, 54.6)},
    "dropout": {
        1: (91.0, 72.0, 21.8, 54.2),
        20: (91.4, 72.3, 21.0, 50.7),
        100: (91.1, 72.2, 21.0, 51.9),
        200: (91.4, 72.0, 21.1, 52.3),
    },
    "emp": {
        1: (90.9, 72.2, 21.2, 50.1),
        20: (91.6, 73.2, 14.2, 30.0),
        100: (91.7, 74.2, 13.6, 30.3),
        200: (92.0, 74.0, 13.6, 28.9),
    },
    "ecmp": {
        1: (89.3, 69.3, 23.9, 53.0),
        20: (91.6, 72.9, 9.35, 21.4),
        100: (91.8, 72.7, 8.81, 18.2),
        200: (91.9, 73.5, 8.73, 18.1),
    },
}
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (MEAN, STD))
    return ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, dtype: torch.dtype) -> list[float]:
    """Adam at its defaults, one draw a step; returns the mean loss of each epoch."""
    optimizer = torch.optim.Adam(net.parameters(), fused=x.is_cuda)
    penalty, losses = 0.001 / batch, []
    net.train()
    for _ in range(epochs):
        total = torch.zeros((), device=x.device)
        for index in torch.randperm(len(x), device=x.device).split(batch)[: len(x) // batch]:
            optimizer.zero_grad()
            with torch.autocast(x.device.type, dtype):
                logits = net(pad_crop_flip(normalise(x[index])))
            nll = F.cross_entropy(logits.float(), y[index])
            (nll + sb.l2(net, penalty, penalty, penalty, penalty)).backward()
            optimizer.step()
            total += nll.detach()
        losses.append(float(total) / (len(x) // batch))
    return losses


def evaluate(net: nn.Module, x: Tensor, y: Tensor, draws: int, dtype: torch.dtype) -> dict[str, Any]:
    """Scores by number of draws, each prefix of the same draws."""
    with torch.autocast(x.device.type, dtype):
        batches = (normalise(part) for part in x.split(1000))
        samples = torch.cat([sb.predict(net, part, draws=draws).samples for part in batches], 1)
    scores = {}
    for count in sorted({n for n in (1, 20, 100, 200) if n <= draws} | {draws}):
        probs = samples[:count].mean(0)
        bins = calibration(probs, y, bins=20, drop=5)
        top5 = (probs.topk(5).indices == y[:, None]).any(1).float().mean()
        scores[str(count)] = {
            "top5": 100 * float(top5),
            "top1": 100 * float((probs.argmax(1) == y).float().mean()),
            "ece": 100 * float(bins.ece),
            "mce": 100 * float(bins.mce),
            "nll": float(-probs.gather(1, y[:, None]).log().mean()),
        }
    return scores


def run(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    dtype = torch.bfloat16
    data = sb.data.load("cifar100", args.data).to(device)
    (x, y), (x_test, y_test) = (data.train.x, data.train.y), (data.test.x, data.test.y)
    plain = models.wrn(args.depth, args.width, classes=100).to(device, memory_format=torch.channels_last)
    net = sb.bayesianize(plain, CONFIGS[args.method])
    start = time.perf_counter()
    losses = train(net, x[: args.limit], y[: args.limit], args.epochs, args.batch, dtype)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    scores = evaluate(
        net, x_test[: args.limit], y_test[: args.limit], 1 if args.method == "vanilla" else args.draws, dtype
    )
    record = {
        "experiment": "emp/cifar100", "method": args.method, "config": CONFIGS[args.method].to_dict(), "seed": args.seed,
        "network": f"WRN-{args.depth}-{args.width}", "epochs": args.epochs, "batch": args.batch, "losses": losses, "scores": scores,
        "parameters": sb.summary(net).after, "overhead": sb.summary(net).after / sb.summary(net).before - 1,
        "train_seconds": seconds, "test_seconds": time.perf_counter() - start,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(), "torch": torch.__version__,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(args.method, json.dumps(scores))


def table(records: list[dict[str, Any]]) -> str:
    """Scores of all records beside the paper's, as Markdown."""
    lines = [
        "| method | overhead | draws | top-5 | top-1 | ECE | MCE | NLL | paper: top-5 | top-1 | ECE | MCE |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in sorted(records, key=lambda r: list(CONFIGS).index(r["method"])):
        for draws, s in record["scores"].items():
            paper = PAPER.get(record["method"], {}).get(int(draws), ("",) * 4)
            cells = [f"{s[k]:.1f}" for k in ("top5", "top1", "ece", "mce")] + [f"{s['nll']:.3f}", *map(str, paper)]
            lines.append(f"| {record['method']} | {record['overhead']:.2%} | {draws} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    fit = commands.add_parser("train")
    fit.add_argument("--method", choices=CONFIGS, required=True)
    fit.add_argument("--data", type=Path, help="folder that holds cifar100; $SLIMBAYES_DATA by default")
    fit.add_argument("--out", type=Path, required=True)
    fit.add_argument("--device", default="cuda")
    for name, value in (
        ("depth", 16),
        ("width", 4),
        ("epochs", 25),
        ("batch", 256),
        ("draws", 200),
        ("seed", 0),
        ("limit", 50_000),
    ):
        fit.add_argument(f"--{name}", type=int, default=value)
    commands.add_parser("table").add_argument("records", type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "train":
        run(args)
    else:
        text = table([json.loads(path.read_text()) for path in args.records])
        page = Path(__file__).with_name("README.md")
        before, after = (
            page.read_text().split("<!-- cifar100 -->")[0],
            page.read_text().split("<!-- end cifar100 -->")[1],
        )
        page.write_text(f"{before}<!-- cifar100 -->\n{text}\n<!-- end cifar100 -->{after}")
        print(text)


if __name__ == "__main__":
    main()
