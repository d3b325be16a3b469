"""Networks, batches and methods whose steps are timed, each in sizes for a large GPU, for a CPU, and tiny for tests.

A training step is draw, forward, KL or penalty, backward and Adam; a prediction is draw and forward, in eval mode
without gradients. All variants of a case see the same number of rows: where K members see every row, a K-th of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import gpu_rivals as rivals
import torch
import torch.nn.functional as F
from slimbayes_lab import models
from torch import Tensor, nn
from torch._inductor import config as inductor

import slimbayes as sb
from slimbayes.distributions.sums import squared_norms
from slimbayes.train.recorded import record

os.environ.setdefault("HF_HUB_OFFLINE", "1")
K = 4
# torch 2.11 fails an assertion of its own where this fuses batch norm's sums over rows with a rival's factors. Given
# with each call: of the compiler's config each thread has its own, and a backward pass may be compiled in another.
_OPTIONS = (
    {"triton.mix_order_reduction": False}
    if hasattr(inductor.triton, "mix_order_reduction")
    else {}
)
Call = Callable[..., Any]


# --- networks that models/ does not have


def mlp(*widths: int) -> nn.Sequential:
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class LSTMClassifier(nn.Module):
    def __init__(self, inputs: int, units: int, classes: int = 10) -> None:
        super().__init__()
        self.lstm, self.head = (
            nn.LSTM(inputs, units, batch_first=True),
            nn.Linear(units, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, **ends, **sizes
        )
    )


def vit(**sizes: int) -> nn.Module:
    from timm.models.vision_transformer import (
        VisionTransformer,
    )  # its defaults are ViT-B/16 at 224

    return VisionTransformer(**sizes)


def token_logits(call: Call, ids: Tensor) -> Tensor:
    return call(input_ids=ids).logits


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())


# --- what a case is made of


@dataclass(frozen=True)
class Work:
    """A network, and how many rows of which shape it gets; whole numbers below `words`, if that is given."""

    sizes: str
    network: Callable[[], nn.Module]
    rows: int
    shape: tuple[int, ...]
    classes: int = 10
    words: int = 0
    logits: Callable[[Call, Tensor], Tensor] = lambda call, x: call(x)

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        if self.words:
            ids = torch.randint(self.words, (rows, *self.shape))
            return ids, ids
        return torch.randn(rows, *self.shape), torch.randint(self.classes, (rows,))


@dataclass(frozen=True)
class Variant:
    """A way to change a network, what it adds to the loss, and how it is called.

    sampled: `sb.sample` shows every row to every member; otherwise the network is called on all rows.
    whole: the compiled mode compiles the loss with its draws and its KL, not the network alone.
    ours: it is one of this library's, and worth a profile.
    """

    convert: Callable[[nn.Module], nn.Module] = lambda net: net
    penalty: Callable[[nn.Module], Tensor] | None = None
    sampled: bool = False
    whole: bool = False
    ours: bool = False


@dataclass(frozen=True)
class Case:
    works: Mapping[str, Work]  # by sizes: "gpu", "cpu", "tiny"
    variants: Mapping[str, Variant]
    kinds: tuple[str, ...] = ("train",)
    modes: tuple[str, ...] = ("compiled", "eager")
    device: str | None = None  # the machine's best


class Trial:
    """One network under one method: `train` and `predict` are what is timed. bfloat16 autocast on a GPU."""

    def __init__(
        self, work: Work, variant: Variant, device: torch.device, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        images = len(work.shape) == 3
        layout = (
            torch.channels_last
            if device.type == "cuda" and images
            else torch.preserve_format
        )
        self.model = variant.convert(work.network()).to(
            device=device, memory_format=layout
        )
        x, self.y = work.batch(
            work.rows // (sb.members(self.model) if variant.sampled else 1)
        )
        self.x, self.y = x.to(device).to(memory_format=layout), self.y.to(device)
        self.work, self.variant = work, variant
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=device.type == "cuda"
        )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        recorded = compiled and device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            trained, lr=1e-4, fused=True, capturable=recorded
        )
        # Sizes change between variants only: dynamic=False keeps later ones' sizes from being symbolic.
        how = partial(
            sb.compiled if variant.ours else torch.compile,
            dynamic=False,
            options=_OPTIONS,
        )
        compiler: Call = how if compiled else lambda f: f
        self.call = self.model
        if compiled:  # rows are located on real inputs: not while the compiler traces
            with torch.no_grad(), self.autocast:
                for training in (False, True):
                    self.model.train(training)
                    self.outputs()
        self.call = self.model if variant.whole else compiler(self.model)
        self.nll = compiler(sb.categorical if variant.sampled else cross_entropy)
        self.objective = compiler(self.loss) if variant.whole else self.loss
        self.forward = compiler(self.outputs) if variant.whole else self.outputs

    def mode(self, kind: str) -> None:
        self.model.train(kind == "train")

    def loss(self) -> Tensor:
        with self.autocast:
            out = self.outputs()
        loss = self.nll(out, self.y)
        return (
            loss
            if self.variant.penalty is None
            else loss + self.variant.penalty(self.model)
        )

    def outputs(self) -> Tensor:
        return (
            sb.sample(self.call, self.x)
            if self.variant.sampled
            else self.work.logits(self.call, self.x)
        )

    def train(self) -> None:
        self.objective().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def predict(self) -> Tensor:
        with self.autocast:
            return self.forward()

    def recorded(self, kind: str) -> Callable[[], Any]:
        """`train` or `predict` as one CUDA graph, as the lab trains: Python has no part in what is timed."""
        optimizer = self.optimizer if kind == "train" else None
        return record(
            getattr(self, kind),
            [*self.model.parameters(), *self.model.buffers()],
            optimizer,
        )[0].replay


def settle() -> None:
    """What the compiler needs for many variants of one code, in the thread that calls it."""
    # All variants share the code that is compiled, and each adds two versions; past the default 8 they run eagerly.
    torch._dynamo.config.recompile_limit = 64


# --- the variants


def kl(model: nn.Module) -> Tensor:
    return sb.kl(model) / rivals.NUM_DATA


def ours(config: sb.Config, sampled: bool = True, frozen: bool = False) -> Variant:
    def convert(net: nn.Module) -> nn.Module:
        return sb.bayesianize(net.requires_grad_(not frozen), config)

    return Variant(convert, kl, sampled, ours=True)


def l2(model: nn.Module) -> Tensor:
    return sb.l2(model, 4e-6, 4e-6, 4e-6, 4e-6)


def plain_l2(model: nn.Module) -> Tensor:
    return 4e-6 * squared_norms(list(model.parameters()))


def patched(cross: bool) -> Variant:
    """EMP's own loss: a draw for each batch, and an L2 penalty instead of a KL."""
    config = sb.ModelPatch(components=5, patch="norm+output", cross=cross, tau=None)
    return Variant(lambda net: sb.bayesianize(net, config), l2, ours=True)


PLAIN = {"plain": Variant()}
WHOLE_PLAIN = {
    "plain": Variant(whole=True)
}  # its loss is compiled as ours, beside losses that are compiled whole
RANK1 = {
    "rank-1 per example": ours(sb.Rank1(members=K)),
    "rank-1 per member": ours(sb.Rank1(members=K, draws="member")),
}
BATCH = {
    "BatchEnsemble": ours(sb.BatchEnsemble(members=K)),
    "torch-uncertainty BatchEnsemble": Variant(
        partial(rivals.tu_batch_ensemble, members=K)
    ),
}
BAYESIAN_TORCH = {
    "bayesian-torch reparam": Variant(
        partial(rivals.bt, kind="Reparameterization"), rivals.bt_kl
    ),
    "bayesian-torch flipout": Variant(partial(rivals.bt, kind="Flipout"), rivals.bt_kl),
}
PRIOR = sb.Normal(0.0, 0.2)


def gaussians(*estimators: Any) -> dict[str, Variant]:
    tied = {
        f"2-tied {e}": ours(sb.KTied(rank=2, prior=PRIOR, estimator=e))
        for e in estimators
    }
    return tied | {
        f"mean-field {e}": ours(sb.MeanField(prior=PRIOR, estimator=e))
        for e in estimators
    }


DENSE = gaussians("reparam", "flipout", "local")
DENSE_TIED = {
    name: variant for name, variant in DENSE.items() if name.startswith("2-tied")
}
TU_BAYES = {"torch-uncertainty BayesLinear": Variant(rivals.tu_bayes, rivals.tu_kl)}


def whole(variants: Mapping[str, Variant]) -> dict[str, Variant]:
    return {
        f"{name}, loss compiled": replace(variant, whole=True)
        for name, variant in variants.items()
    }


EMP, ECMP, L2_PLAIN = (
    {"EMP": patched(False)},
    {"ECMP": patched(True)},
    {"plain": Variant(penalty=plain_l2)},
)
ADAPTED = {
    "rank-1, frozen base": ours(sb.Rank1(members=K), sampled=False, frozen=True),
    "rank-1, all trained": ours(sb.Rank1(members=K), sampled=False),
}


# --- the cases, those that compile longest first


def image_works(
    network: Callable[..., nn.Module], name: str, rows: int, tiny: Work
) -> dict[str, Work]:
    return {
        "gpu": Work(f"{name}, {rows} rows of 32x32", network, rows, (3, 32, 32)),
        "tiny": tiny,
    }


_TINY_WRN = Work("WRN-10-1", partial(models.wrn, 10, 1), 8, (3, 8, 8))
_TINY_RESNET = Work("ResNet-20", models.small_resnet, 4, (3, 8, 8))
_TINY_PYRAMID = Work(
    "PyramidNet-20", partial(models.pyramidnet, 20, 9, classes=10), 4, (3, 8, 8)
)
_WRN = image_works(partial(models.wrn, 28, 10), "WRN-28-10", 512, _TINY_WRN)
_PYRAMID = image_works(
    partial(models.pyramidnet, classes=10),
    "PyramidNet-110, alpha 270",
    256,
    _TINY_PYRAMID,
)
_GPT2 = {
    "gpu": Work("GPT-2 small, 16 x 512 tokens", gpt2, 16, (512,), words=50257, logits=token_logits),
    "tiny": Work(
        "GPT-2", partial(gpt2, n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=31),
        4, (8,), words=31, logits=token_logits,
    ),
}  # fmt: skip
_TINY_VIT = partial(
    vit, img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=10
)
_VIT = {
    "gpu": Work("ViT-B/16, 64 rows of 224x224", vit, 64, (3, 224, 224)),
    "tiny": Work("ViT", _TINY_VIT, 4, (3, 16, 16)),
}
_LSTM = {
    "gpu": Work(
        "LSTM of 512 units, 64 steps, 512 rows",
        partial(LSTMClassifier, 128, 512),
        512,
        (64, 128),
    ),
    "cpu": Work(
        "LSTM of 128 units, 16 steps, 128 rows",
        partial(LSTMClassifier, 32, 128),
        128,
        (16, 32),
    ),
    "tiny": Work("LSTM", partial(LSTMClassifier, 3, 4), 8, (3, 3)),
}
_MLP = {
    "gpu": Work("MLP 4 x 4096, 4096 rows", partial(mlp, *[4096] * 5), 4096, (4096,)),
    "cpu": Work("MLP 4 x 512, 256 rows", partial(mlp, *[512] * 5), 256, (512,)),
    "tiny": Work("MLP", partial(mlp, *[12] * 5), 8, (12,)),
}
_DENSE = {
    "gpu": Work(
        "MLP 2 x 4096, 4096 rows", partial(mlp, 4096, 4096, 4096), 4096, (4096,)
    ),
    "cpu": Work(
        "MLP 784-128-10, 32 rows (Table 4 of the k-tied paper)",
        partial(mlp, 784, 128, 10),
        32,
        (784,),
    ),
    "tiny": Work("MLP", partial(mlp, 12, 12, 12), 8, (12,)),
}
_SMALL = Work(
    "MLP 64-256-256-10, 128 rows, CPU", partial(mlp, 64, 256, 256, 10), 128, (64,)
)
_CPU_WRN = Work(
    "WRN-10-1, 32 rows of 16x16", partial(models.wrn, 10, 1), 32, (3, 16, 16)
)

CASES = {
    "pyramid-emp": Case(_PYRAMID, L2_PLAIN | EMP),
    "pyramid-ecmp": Case(_PYRAMID, L2_PLAIN | ECMP),
    "wrn-rank1": Case(_WRN | {"cpu": _CPU_WRN}, PLAIN | RANK1, ("train", "predict")),
    "wrn-batch": Case(_WRN | {"cpu": _CPU_WRN}, PLAIN | BATCH, ("train", "predict")),
    "wrn-gaussian": Case(_WRN, PLAIN | gaussians("flipout") | BAYESIAN_TORCH),
    "gpt2": Case(
        _GPT2,
        PLAIN | ADAPTED | {
            "LoRA": Variant(rivals.lora),
            "LoRA (all layers)": Variant(partial(rivals.lora, targets=["c_attn", "c_proj", "c_fc"])),
        },
    ),
    "vit": Case(_VIT, PLAIN | ADAPTED | {"LoRA": Variant(partial(rivals.lora, targets=["qkv"]))}),
    "lstm": Case(_LSTM, PLAIN | RANK1, ("train", "predict")),
    "resnet18": Case(
        image_works(partial(models.resnet18, classes=10, small_images=True), "ResNet-18", 256, _TINY_RESNET),
        L2_PLAIN | EMP | ECMP,
    ),
    # Rivals get their losses compiled too: what is compared with the fastest of ours must have the same chances.
    "dense": Case(
        _DENSE,
        WHOLE_PLAIN | DENSE | BAYESIAN_TORCH | TU_BAYES | whole(DENSE_TIED | BAYESIAN_TORCH | TU_BAYES),
    ),
    "mlp": Case(
        _MLP,
        WHOLE_PLAIN | RANK1 | BATCH | BAYESIAN_TORCH | whole(RANK1 | BATCH | BAYESIAN_TORCH),
        ("train", "predict"),
    ),
    "small": Case(
        {"gpu": _SMALL, "cpu": _SMALL, "tiny": _SMALL},
        WHOLE_PLAIN | RANK1 | whole(RANK1),
        device="cpu",
    ),
}  # fmt: skip
