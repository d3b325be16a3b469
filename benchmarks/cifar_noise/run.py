"""First screen on CIFAR-10: noise in rank-1 factors, averaged weights, and their rivals; WRN-16-4.

    run.py put PIECE ...                          copy this folder and pieces of the data to /tmp/ev, checking digests
    run.py prepare                                join and decode them, check, make corrupted images: /tmp/ev/sets.pt
    run.py train --workers 3 --seconds 540        workers share a queue of specs; rows go to $OUT/results.jsonl
    run.py show FILE                              the rows as a table

A spec is a line "name key=value ..."; its keys are in DEFAULTS. All `tails` of a spec share the first 60 % of training:
"cos" goes on with the cosine to zero, "swa.05" at a rate of .05 with the average of the weights after each epoch. Each
tail is a whole training of `epochs` epochs, and a row of its own. 45,000 images train, 5,000 validate, test is reported.
"""

import argparse
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "src"))
PLACE = Path(os.environ.get("EV_PLACE", "/tmp/ev"))
DATA = PLACE / "data"
OUT = Path(os.environ.get("OUT", PLACE / "out"))
DEFAULTS = dict(
    kind="plain",  # plain, rank1, gauss (Gaussian dropout), mcd (MC dropout), norms (members' own batch norms only)
    p=0.05,  # dropout rate whose variance p / (1 - p) the noise has
    prior=0.3,  # standard deviation of the prior of factors
    spread=0.2,  # of the factors' means at the start
    norms=0.0,  # spread of members' own batch norms at the start; 0 for shared norms
    both=0,  # Gaussian dropout on outputs of layers, too, as rank-1 factors are
    klw=1.0,  # the KL's weight at the end
    rise=0.5,  # share of training in which it rises
    jitter=-1.0,  # of scales at the start; below zero the library's default
    K=4,
    call="plain",  # plain: net(x); split: sb.sample(net, x, rows="split")
    epochs=40,
    lr=0.1,
    wd=5e-4,
    fork=0.6,
    tails="cos",
    batch=128,
    depth=16,
    width=4,
    seed=0,
    compile=1,
)
TEST_CORRUPTED, VAL_CORRUPTED = 1000, 500
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


# --- data ---


def put(pieces):
    sums = json.loads((HERE / "digests.json").read_text())["pieces"]
    DATA.mkdir(parents=True, exist_ok=True)
    if HERE != PLACE / "code":  # later commands need not carry it again
        shutil.rmtree(PLACE / "code", ignore_errors=True)
        shutil.copytree(HERE, PLACE / "code")
    for piece in map(Path, pieces):
        data = piece.read_bytes()
        if hashlib.sha256(data).hexdigest() != sums[piece.name]:
            sys.exit(f"DIGEST of {piece} is wrong; {len(data)} bytes")
        (DATA / piece.name).write_bytes(data)
    print("there:", sorted(p.name for p in DATA.iterdir()), "of", len(sums), flush=True)


def decode():
    """uint8 arrays (N, 3, 32, 32) and labels, checked against the digest of the whole."""
    import numpy as np
    from PIL import Image

    sums = json.loads((HERE / "digests.json").read_text())
    raw = b"".join((DATA / name).read_bytes() for name in sorted(sums["pieces"]))
    if hashlib.sha256(raw).hexdigest() != sums["tar"]:
        sys.exit("DIGEST of the whole is wrong")
    tar = tarfile.open(fileobj=io.BytesIO(raw))  # noqa: SIM115
    files = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    (DATA / "frost").mkdir(exist_ok=True)
    for name, data in files.items():
        if name.startswith("frost/"):
            (DATA / name).write_bytes(data)

    def sheets(prefix):
        found = []
        for name in sorted(n for n in files if n.startswith(prefix + "/")):
            sheet = np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB"))
            sheet = sheet.reshape(10, 32, 10, 32, 3).transpose(0, 2, 4, 1, 3)
            found.append(sheet.reshape(100, 3, 32, 32))
        return np.ascontiguousarray(np.concatenate(found))

    found = {name: sheets(name) for name in ("train", "test", "ood")}
    labels = np.load(io.BytesIO(files["labels.npz"]))
    found |= {
        "train_y": labels["train"].astype(np.int64),
        "test_y": labels["test"].astype(np.int64),
    }
    digest = {
        name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in found.items()
    }
    if digest != sums.get("arrays", digest):
        sys.exit(f"DIGEST of arrays is wrong: {digest}")
    return found, digest


FOR_CHOOSING = {
    "speckle": (
        0.15,
        0.2,
        0.35,
        0.45,
        0.6,
    ),  # standard deviation of the noise, a share of the pixel
    "pale": (0.7, 0.5, 0.3, 0.2, 0.1),  # share of the colour that is left
    "dark": (0.8, 0.65, 0.5, 0.4, 0.3),  # share of the light that is left
    "holes": (0.05, 0.1, 0.2, 0.3, 0.4),  # share of the pixels that are black
}


def corrupt_for_choosing(x, name, severity, generator):
    """Images (N, 3, H, W) in [0, 1], corrupted in a way that is none of the fifteen of the test."""
    import torch

    strength = FOR_CHOOSING[name][severity - 1]
    if name == "speckle":
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        x = x + strength * x * noise
    elif name == "pale":
        grey = x.mean(1, keepdim=True)
        x = grey + strength * (x - grey)
    elif name == "dark":
        x = strength * x
    else:
        there = torch.rand(x[:, :1].shape, generator=generator, device=x.device)
        x = x * (there >= strength)
    return x.clamp(0, 1)


def prepare(tiny):
    """Everything that runs read, as one file of uint8 tensors."""
    import torch
    from slimbayes_lab.data.corruptions import CORRUPTIONS, corrupt

    start = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, digest = decode()
    print(
        "decoded and checked",
        {n: a.shape for n, a in found.items()},
        round(time.time() - start, 1),
        flush=True,
    )
    arrays = {name: torch.from_numpy(a) for name, a in found.items()}
    order = torch.randperm(50_000, generator=torch.Generator().manual_seed(2026))
    held, rest = order[:5000], order[5000:]
    sets = {
        "train_x": arrays["train"][rest], "train_y": arrays["train_y"][rest],
        "val_x": arrays["train"][held], "val_y": arrays["train_y"][held],
        "test_x": arrays["test"], "test_y": arrays["test_y"], "ood_x": arrays["ood"],
    }  # fmt: skip
    jobs = [
        ("test", name, s, TEST_CORRUPTED) for name in CORRUPTIONS for s in range(1, 6)
    ]
    # Settings are chosen on corruptions that the test does not have.
    jobs += [
        ("val", name, s, VAL_CORRUPTED) for name in FOR_CHOOSING for s in range(1, 6)
    ]
    for which, name, severity, count in jobs[:: 19 if tiny else 1]:
        x = sets[f"{which}_x"][: 50 if tiny else count].to(device).float() / 255
        number = torch.Generator(device).manual_seed(severity)
        if which == "val":
            bad = corrupt_for_choosing(x, name, severity, number)
        else:
            bad = corrupt(x, name, severity, number, frost_folder=DATA / "frost")
        sets[f"{which}/{name}/{severity}"] = (bad * 255).round().byte().cpu()
    sets = {name: t.clone() for name, t in sets.items()}
    if tiny:
        sets |= {
            n: t[:200].clone() for n, t in sets.items() if n.endswith(("_x", "_y"))
        }
    PLACE.mkdir(exist_ok=True)
    torch.save(sets, PLACE / "sets.tmp")
    os.replace(PLACE / "sets.tmp", PLACE / "sets.pt")
    print(
        "prepared",
        len(sets),
        "sets in",
        round(time.time() - start, 1),
        "s; arrays",
        json.dumps(digest),
        flush=True,
    )


# --- taking turns on the GPU ---


@contextmanager
def locked(path, how):
    with open(path, "a") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def turn(alone=False):
    """GPU work beside others', or alone, so that it can be timed: whoever wants to be alone shuts the gate."""
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with open(PLACE / "use", "a") as use, open(PLACE / "gate", "a") as gate:
        fcntl.flock(gate, how)
        fcntl.flock(use, how)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


# --- networks ---


def build(c, device):
    """The network, and whether the library has converted it."""
    import torch
    from slimbayes_lab.models import wrn
    from torch import nn

    import slimbayes as sb

    torch.manual_seed(c["seed"])
    net = wrn(c["depth"], c["width"], 10)
    plain = sum(p.numel() for p in net.parameters())
    std, kind, K = math.sqrt(c["p"] / (1 - c["p"])), c["kind"], c["K"]
    factors = None
    if kind == "rank1":
        how = {} if c["jitter"] < 0 else {"scale_jitter": c["jitter"]}
        factors = sb.Rank1(
            members=K,
            prior=sb.Normal(1.0, c["prior"]),
            mean_init=sb.Normal(1.0, c["spread"]),
            scale_init=std,
            **how,
        )
    if c["norms"]:
        where = {r".*norm\d?": sb.MemberNorm(members=K, affine=True)}
        net = sb.bayesianize(net, where | ({".*": factors} if factors else {}))
        with torch.no_grad():
            for name, p in net.named_parameters():
                norm = (
                    name.rsplit(".posterior", 1)[0]
                    if ".posterior" in name
                    else name.rsplit(".", 1)[0]
                )
                if isinstance(
                    net.get_submodule(norm), nn.BatchNorm2d
                ) and name.endswith("weight"):
                    p.add_(c["norms"] * torch.randn_like(p))
    elif kind == "rank1":
        net = sb.bayesianize(net, factors)
    elif kind == "mcd":
        net = sb.bayesianize(net, sb.MCDropout(rate=c["p"], before="norm"))
    elif kind == "gauss":
        add_noise(net, std, c["both"])
    bayes = kind in ("rank1", "mcd", "norms")
    net = net.to(device).to(memory_format=torch.channels_last)
    return net, bayes, sum(p.numel() for p in net.parameters()) / plain - 1


def add_noise(net, std, both):
    """Gaussian dropout: inputs of convolutions and of the dense layer (and outputs) times Normal(1, std), in eval too,
    one number for each channel of each example.
    """
    import torch
    from torch import nn

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("std", torch.tensor(std))

        def forward(self, x):
            shape = (*x.shape[:2], *[1] * (x.dim() - 2))
            return x * (1 + self.std * torch.randn(shape, device=x.device)).to(x.dtype)

    for name, layer in list(net.named_modules()):
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            parent, _, last = name.rpartition(".")
            noisy = nn.Sequential(Noise(), layer, *([Noise()] if both else []))
            setattr(net.get_submodule(parent), last, noisy)


# --- scores ---


def nll_of(p, y):
    return float(-p.gather(1, y[:, None]).clamp_min(1e-12).log().mean())


def ece_of(p, y, bins=15):
    top, label = p.max(1)
    right, bin_of = (label == y).float(), (top * bins).long().clamp(max=bins - 1)
    return sum(
        float(
            (bin_of == b).float().mean()
            * (right[bin_of == b].mean() - top[bin_of == b].mean()).abs()
        )
        for b in range(bins)
        if bool((bin_of == b).any())
    )


def warmed(p, t):
    return (p.clamp_min(1e-12).log() / t).softmax(1)


def auroc(inside, outside):
    """Probability that an outside score is above an inside one."""
    import torch

    ranks = torch.cat([inside, outside]).double().argsort().argsort().double()
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m - 1) / 2) / (n * m))


def entropy(p):
    return -(p * p.clamp_min(1e-12).log()).sum(1)


class Worker:
    def __init__(self, args):
        import torch

        self.args, self.torch = args, torch
        self.deadline = args.deadline
        self.device = device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        self.sets = {n: t.to(device) for n, t in torch.load(PLACE / "sets.pt").items()}
        self.padded = (
            torch.nn.functional.pad(self.sets["train_x"], (4, 4, 4, 4))
            .permute(0, 2, 3, 1)
            .contiguous()
        )
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1)
        self.range = torch.arange(32, device=device)

    def scaled(self, x):
        x = (x.float() / 255 - self.mean) / self.std
        return x.contiguous(memory_format=self.torch.channels_last)

    def augmented(self, index):
        torch, rows = self.torch, len(index)
        down, right = torch.randint(0, 9, (2, rows), device=self.device)
        y, x = down[:, None] + self.range, right[:, None] + self.range
        mirrored = torch.where(
            torch.rand(rows, 1, device=self.device) < 0.5, x.flip(1), x
        )
        return self.scaled(
            self.padded[
                index[:, None, None], y[:, :, None], mirrored[:, None, :]
            ].permute(0, 3, 1, 2)
        )

    def autocast(self):
        return self.torch.autocast(
            self.device, dtype=self.torch.bfloat16, enabled=self.device == "cuda"
        )

    # --- a run ---

    def run(self, name, c, text):
        import slimbayes as sb

        torch, F = self.torch, self.torch.nn.functional
        begin = time.time()
        net, bayes, extra = build(c, self.device)
        self.bayes, self.draws = bayes, c["K"] if c["kind"] in ("rank1", "norms") else 4
        if c["kind"] == "plain":
            self.draws = 1
        images, labels, rows = self.sets["train_x"], self.sets["train_y"], c["batch"]
        count = len(images)
        net.train()
        with self.autocast(), torch.no_grad():
            net(
                self.augmented(torch.arange(rows, device=self.device))
            )  # finds where rows lie
        optimizer = torch.optim.SGD(
            sb.param_groups(net, weight_decay=c["wd"]), lr=c["lr"], momentum=0.9, nesterov=True,
            fused=self.device == "cuda",
        )  # fmt: skip

        def step_of(called):
            def step(index, weight):
                optimizer.zero_grad()
                x, y = self.augmented(index), labels[index]
                with self.autocast():
                    if c["call"] == "split":
                        out = sb.sample(called, x, rows="split").flatten(0, 1)
                    else:
                        out = called(x)
                nll = F.cross_entropy(out.float(), y)
                divergence = (
                    sb.kl(net) / count if bayes else torch.zeros((), device=self.device)
                )
                (nll + weight * divergence).backward()
                optimizer.step()
                return torch.stack([nll.detach(), divergence.detach()])

            return sb.recorded(step, net, optimizer) if self.device == "cuda" else step

        first = torch.randperm(count, device=self.device)[:rows]
        before = self.state(net, optimizer)
        mode, step = "eager", None
        for mode in (
            ["compiled", "graph"] if c["compile"] and self.args.compile else ["graph"]
        ):
            try:
                step = step_of(sb.compiled(net) if mode == "compiled" else net)
                step(first, 0.0)
            except Exception as error:
                print(
                    f"{name}: {mode} failed: {type(error).__name__}: {str(error)[:300]}",
                    flush=True,
                )
                continue
            if self.device == "cpu" or None not in step.recordings.values():
                break
            print(f"{name}: {mode} could not be recorded", flush=True)
        else:
            mode = "eager"  # what is left: sb.recorded runs the step operation by operation
        self.restore(net, optimizer, before)
        if self.device == "cuda":
            torch.cuda.synchronize()
        ready = time.time() - begin
        alone = self.timed(step, first, net, optimizer, before, count // rows)
        del before
        print(
            f"{name}: {mode}, ready in {ready:.0f} s, {alone:.2f} s an epoch alone, {extra:+.2%}",
            flush=True,
        )

        steps = count // rows
        total = steps * c["epochs"]
        forked = round(c["fork"] * c["epochs"]) * steps
        log = torch.zeros(2, device=self.device)

        def rate(n, tail):
            warm = min(1.0, (n + 1) / steps)
            if n >= forked and tail.startswith("swa"):
                return float(tail[3:])
            return warm * c["lr"] * 0.5 * (1 + math.cos(math.pi * n / total))

        def train(start, end, tail, average=None):
            nonlocal log
            averaged, seconds = 0, time.time()
            for epoch in range(start // steps, end // steps):
                order = torch.randperm(count, device=self.device)
                sums = torch.zeros(2, device=self.device)
                for chunk in range(0, steps, 50):
                    with turn():
                        for b in range(chunk, min(steps, chunk + 50)):
                            n = epoch * steps + b
                            for group in optimizer.param_groups:
                                self.set_rate(group, rate(n, tail))
                            weight = c["klw"] * min(
                                1.0, (n + 1) / max(1.0, c["rise"] * total)
                            )
                            sums += step(order[b * rows : (b + 1) * rows], weight)
                        if self.device == "cuda":
                            torch.cuda.synchronize()
                    if time.time() > self.deadline:
                        raise TimeoutError
                if average is not None:
                    averaged += 1
                    torch._foreach_lerp_(
                        average, [p.detach() for p in net.parameters()], 1 / averaged
                    )
                log = sums / steps
                with (
                    locked(PLACE / "epochs.lock", fcntl.LOCK_EX),
                    open(PLACE / "epochs.log", "a") as file,
                ):
                    file.write(f"{time.time():.2f} {os.getpid()}\n")
                if not math.isfinite(float(log.sum())):
                    raise FloatingPointError(
                        f"{name}: the loss of epoch {epoch} is not finite"
                    )
            return (time.time() - seconds) / max(1, (end - start) // steps)

        shared = train(0, forked, "cos")
        trunk = self.state(net, optimizer)
        for tail in c["tails"].split(","):
            self.restore(net, optimizer, trunk)
            average = (
                [p.detach().clone() for p in net.parameters()]
                if tail != "cos"
                else None
            )
            seconds = train(forked, total, tail, average)
            since = time.time()
            fitted = net
            if average is not None:
                with torch.no_grad():
                    torch._foreach_copy_(list(net.parameters()), average)
                fitted = self.refreshed(net)
            row = self.scores(fitted)
            scales = [
                F.softplus(p.detach()).mean()
                for n, p in net.named_parameters()
                if n.endswith("rho")
            ]
            row = {
                "name": name, "tail": tail, "epochs": c["epochs"], **row, "extra": round(extra, 5), "mode": mode,
                "s_epoch_alone": round(alone, 3), "s_epoch": round(seconds, 3), "s_epoch_trunk": round(shared, 3),
                "ready": round(ready), "scoring": round(time.time() - since, 1), "total": round(time.time() - begin),
                "train_nll": round(float(log[0]), 4), "train_kl": round(float(log[1]), 4),
                "noise": round(float(torch.stack(scales).mean()), 4) if scales else None, "spec": text,
                "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if self.device == "cuda" else 0,
                "torch": torch.__version__, "commit": (HERE / "COMMIT").read_text().strip(),
            }  # fmt: skip
            with locked(PLACE / "results.lock", fcntl.LOCK_EX):
                for folder in (OUT, PLACE):  # OUT is emptied before each command
                    with open(folder / "results.jsonl", "a") as file:
                        file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    def set_rate(self, group, value):
        if isinstance(group["lr"], self.torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value

    def state(self, net, optimizer):
        tensors = [*net.parameters(), *net.buffers()]
        moments = [
            s["momentum_buffer"]
            for s in optimizer.state.values()
            if s.get("momentum_buffer") is not None
        ]
        return [(t, t.detach().clone()) for t in [*tensors, *moments]]

    def restore(self, net, optimizer, saved):
        known = {id(t) for t, _ in saved}
        with self.torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
            for state in optimizer.state.values():  # momentum that began since
                buffer = state.get("momentum_buffer")
                if buffer is not None and id(buffer) not in known:
                    buffer.zero_()

    def timed(self, step, index, net, optimizer, before, steps):
        """Seconds of an epoch while nobody else uses the GPU."""
        many = 60 if self.device == "cuda" else 1
        with turn(alone=True):
            for group in optimizer.param_groups:
                self.set_rate(group, 0.0)
            start = time.time()
            for _ in range(many):
                step(index, 0.0)
            if self.device == "cuda":
                self.torch.cuda.synchronize()
            seconds = (time.time() - start) / many * steps
        self.restore(net, optimizer, before)
        return seconds

    def refreshed(self, net):
        """Batch-norm statistics of averaged weights, by training images as they are."""
        import slimbayes as sb

        torch = self.torch
        x = self.sets["train_x"][: 25_000 if self.device == "cuda" else 200]
        batches = [(self.scaled(x[i : i + 250]),) for i in range(0, len(x), 250)]
        with turn(), self.autocast(), torch.no_grad():
            if self.bayes:
                return sb.refresh_norms(net, batches)
            torch.optim.swa_utils.update_bn(batches, net)
        return net

    def scores(self, net):
        import slimbayes as sb

        torch, sets, net_was = self.torch, self.sets, net.training
        net.eval()

        @torch.no_grad()
        def probabilities(x):
            """Mean over passes (B, C), and of each pass (S, B, C)."""
            found = []
            for part in x.split(1000):
                with turn(), self.autocast():
                    part = self.scaled(part)
                    if self.bayes:
                        out = sb.sample(net, part, draws=self.draws)
                    else:
                        out = torch.stack([net(part) for _ in range(self.draws)])
                    found.append(out.float().softmax(-1))
                    if self.device == "cuda":
                        torch.cuda.synchronize()
            every = torch.cat(found, 1)
            return every.mean(0), every

        def line(p, y):
            return (
                nll_of(p, y),
                float((p.argmax(1) == y).float().mean() * 100),
                ece_of(p, y),
            )

        val, _ = probabilities(sets["val_x"])
        test, each = probabilities(sets["test_x"])
        ood, _ = probabilities(sets["ood_x"])
        y, vy = sets["test_y"], sets["val_y"]
        t = min(
            (nll_of(warmed(val, t), vy), t) for t in [0.6 + 0.04 * i for i in range(41)]
        )[1]
        lines, warm = defaultdict(list), []
        for name, x in sets.items():
            if "/" in name:
                which = name.split("/")[0]
                p, _ = probabilities(x)
                own = sets[f"{which}_y"][: len(x)]
                lines[which].append(line(p, own))
                warm += [nll_of(warmed(p, t), own)] if which == "test" else []
        mean = {w: [sum(v) / len(v) for v in zip(*found)] for w, found in lines.items()}
        net.train(net_was)
        return {
            **{f"val_{k}": round(v, 4) for k, v in zip(("nll", "acc", "ece"), line(val, vy))},
            **{f"valc_{k}": round(v, 4) for k, v in zip(("nll", "acc"), mean["val"])},
            **{f"test_{k}": round(v, 4) for k, v in zip(("nll", "acc", "ece"), line(test, y))},
            **{f"corr_{k}": round(v, 4) for k, v in zip(("nll", "acc", "ece"), mean["test"])},
            "ood": round(auroc(entropy(test), entropy(ood)), 4), "t": round(t, 2),
            "test_nll_t": round(nll_of(warmed(test, t), y), 4), "corr_nll_t": round(sum(warm) / len(warm), 4),
            "pass_nll": round(sum(nll_of(p, y) for p in each) / len(each), 4), "passes": len(each),
        }  # fmt: skip


# --- queue ---


def parse(text):
    name, *pairs = text.split()
    c = dict(DEFAULTS)
    for pair in pairs:
        key, value = pair.split("=")
        if key not in c:
            raise ValueError(f"{text}: unknown key {key}")
        c[key] = type(c[key])(value)
    if c["kind"] == "norms" and not c["norms"]:
        raise ValueError(f"{text}: norms=SPREAD is needed")
    return name, c


def expected(c, args):
    """Seconds that a run takes, from what runs of its kind took, or from a guess."""
    tails = c["tails"].split(",")
    epochs = c["epochs"] * (c["fork"] + (1 - c["fork"]) * len(tails))
    guess = {"plain": 0.75, "rank1": 1.05, "gauss": 0.85, "mcd": 1.0, "norms": 0.9}[
        c["kind"]
    ]
    try:
        rows = [json.loads(line) for line in open(PLACE / "results.jsonl")]  # noqa: SIM115
    except OSError:
        rows = []
    alike = [r for r in rows if parse(r["spec"])[1]["kind"] == c["kind"]]
    each = max((r["s_epoch"] for r in alike), default=guess * args.workers * 0.9)
    scoring = max((r["scoring"] for r in rows), default=12)
    return epochs * each + 40 + scoring * len(tails)


def take(args):
    """The first spec that can still be finished; the others stay."""
    queue = PLACE / "queue"
    with locked(PLACE / "queue.lock", fcntl.LOCK_EX):
        lines = [
            line
            for line in queue.read_text().splitlines()
            if line.strip() and not line.startswith("#")
        ]
        for i, line in enumerate(lines):
            if time.time() + expected(parse(line)[1], args) < args.deadline:
                queue.write_text("\n".join(lines[:i] + lines[i + 1 :]) + "\n")
                return line
    return None


def give_back(line):
    queue = PLACE / "queue"
    with locked(PLACE / "queue.lock", fcntl.LOCK_EX):
        queue.write_text(line + "\n" + queue.read_text())


def work(args):
    worker = Worker(args)
    while (line := take(args)) is not None:
        name, c = parse(line)
        print(f"{name} begins, {args.deadline - time.time():.0f} s left", flush=True)
        try:
            worker.run(name, c, line)
        except TimeoutError:
            print(
                f"{name} did not end in time; its finished tails are recorded",
                flush=True,
            )
            give_back(line)
            return
        except Exception:
            print(f"FAILED {name}\n{traceback.format_exc()[-1500:]}", flush=True)
        worker.torch._dynamo.reset()
        if worker.device == "cuda":
            worker.torch.cuda.empty_cache()


def start_mps():
    """Whether processes can share the GPU at once; tried on a small program first."""
    place = {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps",
        "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps",
    }
    Path("/tmp/mps").mkdir(exist_ok=True)
    env = os.environ | place
    try:
        subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], env=env, timeout=20, check=False
        )
        code = "import torch; x = torch.ones(8, device='cuda'); torch.cuda.synchronize(); print('MPS works', float(x.sum()))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            timeout=40,
            capture_output=True,
            text=True,
        )
        if "MPS works" in done.stdout:
            return place
        print("MPS:", done.stderr[-200:], flush=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        print("MPS:", error, flush=True)
    try:  # noqa: SIM105
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            input="quit\n",
            text=True,
            env=env,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        pass
    return {}


def launch(args):
    OUT.mkdir(parents=True, exist_ok=True)
    queue = PLACE / "queue"
    if args.specs:
        queue.write_text(Path(args.specs).read_text())
    for line in queue.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            parse(line)
    args.deadline = time.time() + args.seconds
    (PLACE / "epochs.log").write_text("")
    sharing = start_mps() if args.mps else {}
    print("processes", "share by MPS" if sharing else "take slices", flush=True)
    threads = str(max(1, (os.cpu_count() or 2) // args.workers))
    env = os.environ | sharing | {
        "TORCHINDUCTOR_CACHE_DIR": str(PLACE / "inductor"), "TRITON_CACHE_DIR": str(PLACE / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "OMP_NUM_THREADS": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": threads, "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    own = [
        sys.executable,
        str(Path(__file__).resolve()),
        "work",
        "--deadline",
        str(args.deadline),
    ]
    own += ["--workers", str(args.workers), "--compile", str(args.compile)]
    workers = [subprocess.Popen(own, env=env) for _ in range(args.workers)]
    for worker in workers:
        try:
            worker.wait(max(1, args.deadline + 15 - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()
            print("a worker was stopped", flush=True)
    (OUT / "queue_left.txt").write_text(queue.read_text())
    throughput()
    if (PLACE / "results.jsonl").exists():
        show(PLACE / "results.jsonl")
    print(
        "left:",
        len([s for s in queue.read_text().splitlines() if s.strip()]),
        "specs",
        flush=True,
    )


def throughput():
    """Epochs a second of all workers together, by how many were training in that stretch of ten seconds."""
    lines = [line.split() for line in (PLACE / "epochs.log").read_text().splitlines()]
    bins = defaultdict(list)
    for at, pid in lines:
        bins[int(float(at) // 10)].append(pid)
    by_workers = defaultdict(list)
    for pids in bins.values():
        by_workers[len(set(pids))].append(len(pids) / 10)
    for workers, rates in sorted(by_workers.items()):
        print(
            f"{workers} at work: {sum(rates) / len(rates):.2f} epochs a second ({len(rates)} stretches)",
            flush=True,
        )


def show(path):
    rows = [json.loads(line) for line in open(path)]  # noqa: SIM115
    names = [
        "val_nll",
        "valc_nll",
        "test_nll",
        "test_acc",
        "test_ece",
        "test_nll_t",
        "corr_nll",
        "corr_acc",
        "ood",
        "noise",
        "s_epoch_alone",
    ]
    print(f"{'':30}" + "".join(f"{n[:10]:>11}" for n in names))
    for r in sorted(rows, key=lambda r: r["val_nll"] + r["valc_nll"]):
        cells = ("-" if r[n] is None else f"{r[n]:.4g}" for n in names)
        print(
            f"{r['name'] + ' ' + r['tail'] + ' ' + str(r['epochs']):30}"
            + "".join(f"{c:>11}" for c in cells)
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["put", "prepare", "train", "work", "show"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument(
        "--specs"
    )  # replaces the queue; without it the queue of the command before goes on
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--mps", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--deadline", type=float, default=0)
    args = parser.parse_args()
    if args.verb == "put":
        put(args.files)
    elif args.verb == "prepare":
        prepare(args.tiny)
    elif args.verb == "train":
        launch(args)
    elif args.verb == "work":
        work(args)
    else:
        show(args.files[0])


if __name__ == "__main__":
    main()
