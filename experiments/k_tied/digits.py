"""The k-tied paper's three findings on small real data: an MLP on scikit-learn's 8 x 8 digits, or on MNIST where it is at hand.

    python experiments/k_tied/digits.py                                        about a minute on one core
    python experiments/k_tied/digits.py --data mnist --device cuda             the paper's own network and schedule

Each posterior is trained twice (Appendix D.4): with KL annealing, for its predictions, and without, for the noise of its
gradients. Writes results/k_tied/<data>.json and prints it as tables.

Sizes: N training rows, M test rows, S draws, P variational parameters.
"""

import argparse
import json
import math
import platform
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from readers import Data, digits, mnist
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models

METHODS: dict[str, int | None] = {"mean-field": None, "1-tied": 1, "2-tied": 2, "3-tied": 3}
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """Everything that is chosen. The last `cooldown` of the steps let the learning rate fall to zero."""

    hidden: tuple[int, ...] = (100, 100)
    prior: float = 0.3  # the paper picks 0.2 or 0.3
    batch: int = 256
    lr: float = 2e-2  # above the paper's, and cooled down, so that 600 steps suffice where it takes 14,700
    steps: int = 600
    cooldown: float = 0.5
    slope: float = 1 / 300  # of the KL staircase: full weight after 300 steps
    every: int = 15
    snr_lr: float = 1e-3
    snr_at: tuple[int, ...] = (50, 100, 200)
    window: int = 10
    draws: int = 20
    seeds: int = 3


SETTINGS = {
    "digits": Setting(),
    # The paper's: 300 epochs of 49 batches, rate and slope from its lists, SNR at the steps of its Figure 6, 100 draws.
    "mnist": Setting((400, 400), 0.2, 1024, 1e-3, 14_700, 0.0, 5e-5, 100, 3e-4, (1000, 5000, 9000), draws=100, seeds=1),
}


def build(rank: int | None, setting: Setting, data: Data, seed: int) -> Any:
    """An MLP with mean-field or k-tied kernels, mean-field biases and the reparameterization estimator."""
    torch.manual_seed(seed)
    prior = sb.Normal(0.0, setting.prior)
    config: sb.Config = sb.MeanField(prior=prior, bias="gaussian")
    if rank is not None:
        config = sb.KTied(rank=rank, prior=prior, bias="gaussian")
    net = models.mlp(data.x.shape[1], setting.hidden, 10)
    return sb.bayesianize(net, config).to(data.x.device)


def loss(net: nn.Module, setting: Setting, data: Data, kl_weight: float) -> Tensor:
    """One draw of the weights on one batch, as in the paper."""
    x, y = data.batch(setting.batch)
    return sb.elbo(sb.categorical(sb.sample(net, x), y), net, num_data=len(data.x), kl_weight=kl_weight).loss


def train(net: nn.Module, setting: Setting, data: Data) -> None:
    """The run for predictions: KL staircase, Adam."""
    optimizer, weight = (
        torch.optim.Adam(net.parameters(), fused=True),
        sb.schedules.staircase(setting.slope, setting.every),
    )
    for step in range(setting.steps):
        left = 1 - step / setting.steps
        optimizer.param_groups[0]["lr"] = setting.lr * min(1.0, left / setting.cooldown if setting.cooldown else 1.0)
        optimizer.zero_grad()
        loss(net, setting, data, weight(step)).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(net: nn.Module, setting: Setting, data: Data) -> tuple[dict[str, float], np.ndarray]:
    """-ELBO per datum at full KL weight, NLL and accuracy of the ensemble of S draws; and the NLL of each test row (M,)."""
    logp = torch.cat([sb.sample(net, data.test_x).log_softmax(-1) for _ in range(setting.draws)])
    picked = logp.gather(-1, data.test_y.expand(len(logp), -1).unsqueeze(-1)).squeeze(-1)
    rows = math.log(len(logp)) - picked.logsumexp(0)
    right = logp.exp().mean(0).argmax(-1) == data.test_y
    bound = (sb.kl(net) / len(data.x) - picked.mean()).item()
    return {
        "-elbo": bound,
        "nll": rows.mean().item(),
        "accuracy": right.float().mean().item(),
    }, rows.double().cpu().numpy()


# (a) low rank ----------------------------------------------------------------------------------------------------------


def explained(matrix: np.ndarray) -> np.ndarray:
    """Share of each singular value's square in the sum of squares, nothing subtracted before."""
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    return squares / squares.sum()


def spectrum(net: Any, seed: int) -> dict[str, dict[str, float]]:
    """First two shares for the means and standard deviations of every layer, and for the latter with their places shuffled."""
    out = {}
    for name, layer in net.named_children():
        if hasattr(layer, "posterior"):
            scale = layer.posterior["weight"].log_scale().exp().detach().double().cpu().numpy()
            shuffled = np.random.default_rng(seed).permutation(scale.reshape(-1)).reshape(scale.shape)
            parts = {"mean": layer.weight.detach().double().cpu().numpy(), "scale": scale, "shuffled": shuffled}
            out[name] = {f"{part} {k}": float(explained(m)[:k].sum()) for part, m in parts.items() for k in (1, 2)}
    return out


# (b) gradient noise ----------------------------------------------------------------------------------------------------


def signal_to_noise(gradients: Tensor) -> Tensor:
    """E[g^2] / Var[g] over a window of batches, at least 1, and infinite where nothing varies: (window, P) -> (P,)."""
    g = gradients.double()
    return g.square().mean(0) / g.var(0, unbiased=False)


def pooled(gradients: Tensor) -> float:
    """The same for the whole vector, sum E[g^2] / sum Var[g], which no single quiet parameter can dominate."""
    g = gradients.double()
    return (g.square().mean(0).sum() / g.var(0, unbiased=False).sum()).item()


def watch(net: Any, setting: Setting, data: Data, scale_rate: float = 1.0) -> list[dict[str, float]]:
    """The run without annealing: SNR of the log scale parameters of `dense2`, and the test -ELBO, at the steps asked for.

    Args:
        scale_rate: learning rate of the scales relative to that of the means.
    """
    parameters = [p for name, p in net.dense2.posterior["weight"].named_parameters() if name != "bias_log_scale"]
    groups = sb.param_groups(net, lr=setting.snr_lr, posterior_lr_multiplier=scale_rate)
    optimizer, seen = torch.optim.Adam(groups, fused=True), []
    window: deque[Tensor] = deque(maxlen=setting.window)
    for step in range(1, max(setting.snr_at) + 1):
        optimizer.zero_grad()
        loss(net, setting, data, 1.0).backward()
        window.append(torch.cat([p.grad.flatten() for p in parameters]))
        optimizer.step()
        if step in setting.snr_at:
            gradients = torch.stack(list(window))
            ratio = signal_to_noise(gradients)
            snr = {
                "median": ratio.median().item(),
                "pooled": pooled(gradients),
                "mean": ratio[ratio.isfinite()].mean().item(),
            }
            seen.append({"step": step} | snr | {"-elbo": evaluate(net, replace(setting, draws=4), data)[0]["-elbo"]})
    return seen


# (c) predictions -------------------------------------------------------------------------------------------------------


def compare(rows: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Difference of mean NLL, rows (seeds, M), with its standard error over seeds and test rows together."""
    difference = rows - reference
    by_row = difference.mean(0).std(ddof=1) / math.sqrt(difference.shape[1])
    by_seed = difference.mean(1).std(ddof=1) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return {"difference": float(difference.mean()), "error": math.hypot(by_row, by_seed)}


def run(setting: Setting, data: Data) -> dict[str, Any]:
    """All methods and seeds, the control of (b), and the spectra of mean-field."""
    methods: dict[str, Any] = {}
    rows: dict[str, np.ndarray] = {}
    spectra = []
    for name, rank in METHODS.items():
        scores, losses, watched = [], [], []
        for seed in range(setting.seeds):
            net = build(rank, setting, data, seed)
            train(net, setting, data)
            score, row = evaluate(net, setting, data)
            scores.append(score)
            losses.append(row)
            watched.append(watch(build(rank, setting, data, seed), setting, data))
            if rank is None:
                spectra.append(spectrum(net, seed))
        rows[name] = np.stack(losses)
        summary = {key: [float(np.mean(v)), float(np.std(v))] for key in scores[0] for v in [[s[key] for s in scores]]}
        methods[name] = {"parameters": sum(p.numel() for p in net.parameters())} | summary | {"snr": watched}
        methods[name] |= {"against mean-field": compare(rows[name], rows["mean-field"])}
    # Adam moves a parameter by about its rate, so log u + log v goes twice as fast as a free log sigma; so does this control.
    control = [watch(build(None, setting, data, seed), setting, data, scale_rate=2.0) for seed in range(setting.seeds)]
    layers = {name: {k: float(np.mean([s[name][k] for s in spectra])) for k in spectra[0][name]} for name in spectra[0]}
    return {"methods": methods, "mean-field, scales at twice the rate": control, "spectrum": layers}


def show(result: dict[str, Any]) -> str:
    """The record as three tables."""
    lines = ["(a) share of the sum of squares in the first and first two singular values, mean-field", ""]
    lines += [f"{'':8}{'means':>16}{'std deviations':>18}{'the same, shuffled':>22}"]
    for name, s in result["spectrum"].items():
        pairs = [f"{s[f'{part} 1']:.4f} {s[f'{part} 2']:.4f}" for part in ("mean", "scale", "shuffled")]
        lines.append(f"{name:8}{pairs[0]:>16}{pairs[1]:>18}{pairs[2]:>22}")
    lines += [
        "",
        "(b) gradient SNR of dense2's scale parameters: median, pooled, mean; and test -ELBO; no annealing",
        "",
    ]
    watched = {name: m["snr"] for name, m in result["methods"].items()}
    for name, seeds in (watched | {"mean-field x2": result["mean-field, scales at twice the rate"]}).items():
        for i, first in enumerate(seeds[0]):
            average = {k: np.mean([seed[i][k] for seed in seeds]) for k in first}
            cells = "".join(f"{average[k]:10.3g}" for k in ("median", "pooled", "mean", "-elbo"))
            lines.append(f"{name:15}step {first['step']:<6}{cells}")
    lines += ["", f"(c) {'parameters':>18}{'-ELBO':>9}{'NLL':>9}{'accuracy':>10}{'NLL against mean-field':>28}"]
    for name, m in result["methods"].items():
        against = f"{m['against mean-field']['difference']:+.4f} +- {m['against mean-field']['error']:.4f}"
        scores = f"{m['-elbo'][0]:9.3f}{m['nll'][0]:9.4f}{m['accuracy'][0]:10.4f}"
        lines.append(f"{name:12}{m['parameters']:10,}{scores}{against:>28}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="The k-tied paper's three findings on small data.")
    parser.add_argument("--data", default="digits", choices=list(SETTINGS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, help="instead of the setting's number")
    parser.add_argument("--out", type=Path, help="instead of results/k_tied/<data>.json")
    args = parser.parse_args(argv)
    setting = SETTINGS[args.data] if args.seeds is None else replace(SETTINGS[args.data], seeds=args.seeds)
    data = {"digits": digits, "mnist": mnist}[args.data](torch.device(args.device))
    start = time.perf_counter()
    result = run(setting, data)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "slimbayes": sb.__version__}
    record = {"data": args.data, "setting": asdict(setting), "device": args.device, "versions": versions}
    record |= {"seconds": round(time.perf_counter() - start, 1)} | result
    out = args.out or ROOT / "results" / "k_tied" / f"{args.data}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(show(record) + f"\n\n{record['seconds']} seconds, written to {out}")
    return record


if __name__ == "__main__":
    main()
