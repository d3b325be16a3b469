"""Architectures of libraries for one field each: images (vit-pytorch, monai, segmentation-models-pytorch, open_clip,
compressai), diffusion (diffusers, denoising-diffusion-pytorch), flows (nflows, normflows, zuko), codebooks
(vector-quantize-pytorch), differential equations and operators (torchdiffeq, torchcde, neuralop), molecules and graphs
(e3nn, torch_geometric), coordinates (siren-pytorch, kan).

`MAKERS` has the name under which a library is imported and a function that lists its architectures as (name, build,
inputs), the shortest first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

B, C = 3, 5
Inputs = dict[str, Any]
Entry = tuple[str, Callable[[], nn.Module], Callable[[], Inputs]]


def _made(module: str, name: str, *args: Any, **options: Any) -> nn.Module:
    return getattr(importlib.import_module(module), name)(*args, **options)


def _numbers(*shape: int) -> Inputs:
    return {"": torch.randn(B, *shape)}


def _image(side: int, channels: int = 3) -> Inputs:
    return {"": torch.rand(B, channels, side, side)}


def _steps(top: int = 20) -> torch.Tensor:
    return torch.randint(top, (B,))


class Whole(nn.Module):
    """A module of a library and what is asked of it: run(module, inputs)."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleDict(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.parts, *args, **kwargs)


# --- images

_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": C,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 24,
}
_NEST = {
    "image_size": 32,
    "patch_size": 4,
    "dim": 8,
    "heads": 1,
    "num_hierarchies": 2,
    "block_repeats": (1, 1),
}
_CROSS = {
    **{
        f"sm_{key}": value
        for key, value in {
            "dim": 16,
            "patch_size": 8,
            "enc_depth": 1,
            "enc_heads": 2,
        }.items()
    },
    **{
        f"lg_{key}": value
        for key, value in {
            "dim": 24,
            "patch_size": 16,
            "enc_depth": 1,
            "enc_heads": 2,
        }.items()
    },
    **{
        "sm_enc_mlp_dim": 24,
        "lg_enc_mlp_dim": 24,
        "cross_attn_depth": 1,
        "cross_attn_heads": 2,
        "depth": 1,
    },
}
_VITS: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_vit": ("SimpleViT", _VIT),
    "deepvit": ("DeepViT", _VIT),
    "vit_for_small_dataset": ("ViT", _VIT),
    "xcit": ("XCiT", {**_VIT, "cls_depth": 1}),
    "learnable_memory_vit": ("ViT", _VIT),
    "parallel_vit": ("ViT", _VIT),
    "nest": ("NesT", {**_NEST, "num_classes": C}),
    "cross_vit": ("CrossViT", {**_CROSS, "image_size": 32, "num_classes": C}),
    "rvt": ("RvT", _VIT),
}


def _vit_pytorch() -> list[Entry]:
    return [
        (n, partial(_made, f"vit_pytorch.{n}", name, **o), partial(_image, 32))
        for n, (name, o) in _VITS.items()
    ]


def _monai() -> list[Entry]:
    net, flat = (
        partial(_made, "monai.networks.nets"),
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    )
    dyn = {
        "kernel_size": [3] * 3,
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
    }
    deep = {**flat, **dyn, "deep_supervision": False}
    unet = {**flat, "channels": (4, 8), "strides": (2,), "num_res_units": 1}
    return [
        ("unet", partial(net, "UNet", **unet), partial(_image, 16, 1)),
        ("dynunet", partial(net, "DynUNet", **deep), partial(_image, 16, 1)),
        (
            "unet-3d",
            partial(net, "UNet", **{**unet, "spatial_dims": 3}),
            partial(_numbers, 1, 8, 8, 8),
        ),
    ]


def _segmentation() -> list[Entry]:
    options = {
        "encoder_name": "tu-lcnet_050",
        "encoder_weights": None,
        "encoder_depth": 3,
        "classes": 2,
    }
    net = partial(
        _made, "segmentation_models_pytorch", **options, decoder_channels=(16, 8, 8)
    )
    return [
        ("unet", partial(net, "Unet"), partial(_image, 32)),
        ("manet", partial(net, "MAnet"), partial(_image, 32)),
    ]


def _open_clip() -> list[Entry]:
    seeing = {
        "image_size": 32,
        "layers": 1,
        "width": 16,
        "patch_size": 8,
        "head_width": 8,
    }
    reading = {
        "context_length": 8,
        "vocab_size": 49,
        "width": 16,
        "heads": 2,
        "layers": 1,
    }
    build = partial(
        _made,
        "open_clip.model",
        "CLIP",
        embed_dim=16,
        vision_cfg=seeing,
        text_cfg=reading,
    )
    return [
        (
            "clip",
            build,
            lambda: {"image": _image(32)[""], "text": torch.randint(1, 40, (B, 8))},
        )
    ]


def _compressai() -> list[Entry]:
    net = partial(_made, "compressai.models")
    names = {"factorized": "FactorizedPrior", "hyperprior": "ScaleHyperprior"}
    return [
        (name, partial(net, cls, 8, 8), partial(_image, 64))
        for name, cls in names.items()
    ]


# --- diffusion

_BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
_UNET = {**_BLOCKS, "sample_size": 8, "attention_head_dim": 4}
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 1,
}
_VAE = {
    **_BLOCKS,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_DOWN = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


def _noisy(channels: int, **more: Callable[[], Any]) -> Inputs:
    return {
        "sample": torch.randn(B, channels, 8, 8),
        "timestep": _steps(),
        **{key: make() for key, make in more.items()},
    }


def _diffusers() -> list[Entry]:
    net = partial(_made, "diffusers")
    dit = partial(
        net,
        "DiTTransformer2DModel",
        **_DIT,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=5,
    )
    mmdit = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
    }
    mmdit |= {
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "pos_embed_max_size": 8,
    }
    mmdit |= {
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
    }
    flux = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "axes_dims_rope": [4, 2, 2],
    }
    flux |= {
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
    }

    def classes() -> Inputs:
        noisy = _noisy(4, class_labels=lambda: torch.randint(C, (B,)))
        return {"hidden_states": noisy.pop("sample"), **noisy}

    def words(**more: torch.Tensor) -> Inputs:
        text = {
            "encoder_hidden_states": torch.randn(B, 5, 16),
            "pooled_projections": torch.randn(B, 16),
        }
        return {
            "hidden_states": torch.randn(B, 4, 8, 8),
            "timestep": _steps(),
            **text,
            **more,
        }

    def places() -> Inputs:  # as many coordinates as rows
        given = words(img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(5, 3))
        return {
            **given,
            "hidden_states": torch.randn(B, 16, 4),
            "timestep": torch.rand(B),
        }

    return [
        ("dit", dit, classes),
        ("sd3", partial(net, "SD3Transformer2DModel", **mmdit), words),
        ("flux", partial(net, "FluxTransformer2DModel", **flux), places),
        (
            "unet",
            partial(
                net, "UNet2DModel", **_UNET, **_DOWN, in_channels=3, out_channels=3
            ),
            partial(_noisy, 3),
        ),
        ("vae", partial(net, "AutoencoderKL", **_VAE), partial(_image, 8)),
    ]


def _denoising() -> list[Entry]:
    net = partial(_made, "denoising_diffusion_pytorch")

    def noisy(*shape: int) -> Inputs:
        return {"x": torch.randn(B, 3, *shape), "time": _steps()}

    flat = {
        "dim": 8,
        "dim_mults": (1, 2),
        "flash_attn": False,
        "attn_dim_head": 8,
        "attn_heads": 2,
    }
    return [
        (
            "unet-1d",
            partial(net, "Unet1D", dim=8, dim_mults=(1, 2), channels=3),
            partial(noisy, 16),
        ),
        ("unet", partial(net, "Unet", **flat), partial(noisy, 8, 8)),
    ]


# --- densities


def _zuko() -> list[Entry]:
    def flow(name: str) -> nn.Module:
        made = _made(
            "zuko.flows", name, 2, context=4, transforms=2, hidden_features=(16,)
        )
        return Whole(
            lambda parts, x, context: parts["flow"](context).log_prob(x), flow=made
        )

    inputs = lambda: {"x": torch.randn(B, 2), "context": torch.randn(B, 4)}  # noqa: E731
    return [
        (name.lower(), partial(flow, name), inputs) for name in ("MAF", "NSF", "NICE")
    ]


def _nflows() -> list[Entry]:
    def build() -> nn.Module:
        kinds, normal = (
            importlib.import_module("nflows.transforms"),
            importlib.import_module("nflows.distributions"),
        )
        steps = [kinds.MaskedAffineAutoregressiveTransform(4, 16), kinds.LULinear(4)]
        flow = _made(
            "nflows.flows",
            "Flow",
            kinds.CompositeTransform(steps),
            normal.StandardNormal([4]),
        )
        return Whole(lambda parts, x: parts["flow"].log_prob(x), flow=flow)

    return [("maf", build, partial(_numbers, 4))]


def _normflows() -> list[Entry]:
    def build() -> nn.Module:
        nf = importlib.import_module("normflows")
        steps = [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 16, 4])) for _ in range(2)
        ]
        return nf.NormalizingFlow(
            nf.distributions.base.DiagGaussian(4, trainable=False), steps
        )

    return [("realnvp", build, partial(_numbers, 4))]


def _codebooks() -> list[Entry]:
    def autoencoder(name: str, **options: Any) -> nn.Module:
        def run(parts: Any, x: torch.Tensor) -> Any:
            return parts["decoder"](parts["codes"](parts["encoder"](x))[0])

        codes = _made("vector_quantize_pytorch", name, dim=8, **options)
        return Whole(run, encoder=nn.Linear(4, 8), codes=codes, decoder=nn.Linear(8, 4))

    return [
        (
            "vq",
            partial(autoencoder, "VectorQuantize", codebook_size=16),
            partial(_numbers, 6, 4),
        ),
        ("fsq", partial(autoencoder, "FSQ", levels=[4, 4, 3]), partial(_numbers, 6, 4)),
    ]


# --- equations, molecules, coordinates


def _torchdiffeq() -> list[Entry]:
    def build(method: str) -> nn.Module:
        solve = importlib.import_module("torchdiffeq").odeint

        def run(parts: Any, x: torch.Tensor) -> torch.Tensor:
            field = parts["field"]
            return parts["head"](
                solve(
                    lambda t, y: field(y),
                    x,
                    torch.tensor([0.0, 1.0], device=x.device),
                    method=method,
                )[-1]
            )

        return Whole(
            run,
            field=nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)),
            head=nn.Linear(4, 2),
        )

    return [
        (method, partial(build, method), partial(_numbers, 4))
        for method in ("rk4", "dopri5")
    ]


def _neuralop() -> list[Entry]:
    options = {
        "n_modes": (4, 4),
        "in_channels": 2,
        "out_channels": 1,
        "hidden_channels": 8,
        "n_layers": 2,
    }
    net = partial(_made, "neuralop.models", **options)
    return [
        (name.lower(), partial(net, name), partial(_numbers, 2, 16, 16))
        for name in ("FNO", "TFNO")
    ]


def _e3nn() -> list[Entry]:
    def build() -> nn.Module:
        o3 = importlib.import_module("e3nn.o3")
        product = o3.FullyConnectedTensorProduct(
            "4x0e+4x1o", "0e+1o", "4x0e", shared_weights=False
        )
        weights = _made(
            "e3nn.nn", "FullyConnectedNet", [5, 16, product.weight_numel], torch.tanh
        )

        def run(
            parts: Any, x: torch.Tensor, vector: torch.Tensor, length: torch.Tensor
        ) -> torch.Tensor:
            return parts["product"](
                x,
                o3.spherical_harmonics([0, 1], vector, True),
                parts["weights"](length),
            )

        return Whole(run, product=product, weights=weights)

    return [
        (
            "edge",
            build,
            lambda: {
                "x": torch.randn(B, 16),
                "vector": torch.randn(B, 3),
                "length": torch.randn(B, 5),
            },
        )
    ]


def _graphs() -> list[Entry]:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]])
    sizes = {"in_channels": 4, "hidden_channels": 8, "num_layers": 2, "out_channels": 3}
    names = ("GCN", "GAT", "EdgeCNN")
    net = partial(_made, "torch_geometric.nn", **sizes)
    return [
        (
            name.lower(),
            partial(net, name),
            lambda: {"x": torch.randn(6, 4), "edge_index": edges},
        )
        for name in names
    ]


def _siren() -> list[Entry]:
    sizes = {"dim_in": 2, "dim_hidden": 16, "dim_out": 3, "num_layers": 3}
    return [
        (
            "siren",
            partial(_made, "siren_pytorch", "SirenNet", **sizes),
            partial(_numbers, 2),
        )
    ]


def _kan() -> list[Entry]:
    return [
        (
            "kan",
            partial(_made, "kan", "KAN", width=[2, 4, 1], grid=3, auto_save=False),
            partial(_numbers, 2),
        )
    ]


MAKERS: dict[str, Callable[[], Sequence[Entry]]] = {
    "siren_pytorch": _siren,
    "nflows": _nflows,
    "normflows": _normflows,
    "zuko": _zuko,
    "vector_quantize_pytorch": _codebooks,
    "torchdiffeq": _torchdiffeq,
    "neuralop": _neuralop,
    "e3nn": _e3nn,
    "torch_geometric": _graphs,
    "kan": _kan,
    "vit_pytorch": _vit_pytorch,
    "diffusers": _diffusers,
    "denoising_diffusion_pytorch": _denoising,
    "open_clip": _open_clip,
    "compressai": _compressai,
    "monai": _monai,
    "segmentation_models_pytorch": _segmentation,
}
