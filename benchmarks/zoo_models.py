"""Architectures nobody here wrote, of timm, torchvision and transformers, and of zoo_fields.py: small, with random
weights, no downloads.

Each is a name such as "transformers/bert", a function that builds it and one that makes an input of three rows.
Sizes: B rows, L tokens, C classes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo_fields import MAKERS

os.environ.setdefault("HF_HUB_OFFLINE", "1")

B, L, C, WORDS, WIDTH = 3, 7, 5, 31, 32
PACKAGES = ("transformers", "timm", "torchvision", *MAKERS)


@dataclass(frozen=True)
class Architecture:
    """A model and an input for it, made when asked for: keyword arguments, or a positional one under the key ""."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]


def architectures() -> list[Architecture]:
    """Those whose package is installed."""
    makers = {"transformers": _transformers, "timm": _timm, "torchvision": _torchvision}
    for package, entries in MAKERS.items():
        makers[package] = partial(_named, package, entries)
    return [
        one
        for package in PACKAGES
        if importlib.util.find_spec(package)
        for one in makers[package]()
    ]


def _named(package: str, entries: Callable[[], Any]) -> list[Architecture]:
    return [
        Architecture(f"{package}/{name}", build, inputs)
        for name, build, inputs in entries()
    ]


def image(side: int, key: str = "", channels: int = 3) -> dict[str, Any]:
    return {key: torch.randn(B, channels, side, side)}


def words(**more: Any) -> dict[str, Any]:
    """Token ids above those that mean padding, beginning or end."""
    return {
        "input_ids": torch.randint(4, WORDS, (B, L)),
        **{key: make() for key, make in more.items()},
    }


def _mask() -> torch.Tensor:
    mask = torch.ones(B, L, dtype=torch.long)
    mask[0, 5:] = 0  # one row is padded
    return mask


# --- transformers: (model class, its config's arguments), by what the model reads. Sizes have many names.

_NAMES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "num_labels": C,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_GROUPED = {"num_key_value_heads": 2}
_PYRAMID = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1] * 4,
    "num_attention_heads": [1, 1, 2, 2],
}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 16, "n_inner": 48}
_SEQ2SEQ = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "num_experts": 2}

_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"dim": WIDTH, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "albert": ("AlbertForSequenceClassification", {"embedding_size": 16}),
    "electra": ("ElectraForSequenceClassification", {"embedding_size": 16}),
    "deberta": (
        "DebertaForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {}),
    "mpnet": ("MPNetForSequenceClassification", {}),
    "convbert": (
        "ConvBertForSequenceClassification",
        {"embedding_size": WIDTH, "conv_kernel_size": 3},
    ),
    "squeezebert": ("SqueezeBertForSequenceClassification", {"embedding_size": WIDTH}),
    "mobilebert": (
        "MobileBertForSequenceClassification",
        {"embedding_size": 16, "intra_bottleneck_size": 16},
    ),
    "modernbert": (
        "ModernBertForSequenceClassification",
        {"classifier_pooling": "mean"},
    ),
    "xlnet": (
        "XLNetForSequenceClassification",
        {"d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    "fnet": ("FNetForSequenceClassification", {"tpu_short_seq_length": L}),
}
_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": WIDTH}),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, **_EXPERTS}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "falcon": ("FalconForCausalLM", {}),
    "stablelm": ("StableLmForCausalLM", _GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "mamba": ("MambaForCausalLM", {"state_size": 4, "time_step_rank": 2}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
}
_TRANSLATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", _SEQ2SEQ),
}
_STAGES = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "image_size": 32,
    "patch_size": 4,
}
_CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
_PATCHES = {"image_size": 16, "patch_size": 4}
_SEEING: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("ViTForImageClassification", _PATCHES, 16),
    "deit": ("DeiTForImageClassification", _PATCHES, 16),
    "beit": (
        "BeitForImageClassification",
        {**_PATCHES, "use_relative_position_bias": True},
        16,
    ),
    "dinov2": ("Dinov2ForImageClassification", _PATCHES, 16),
    "siglip": (
        "SiglipForImageClassification",
        {"vision_config": {**_NAMES, **_PATCHES}},
        16,
    ),
    "swin": ("SwinForImageClassification", _STAGES, 32),
    "swinv2": ("Swinv2ForImageClassification", _STAGES, 32),
    "convnext": ("ConvNextForImageClassification", _CONVNEXT, 32),
    "convnextv2": ("ConvNextV2ForImageClassification", _CONVNEXT, 32),
    "resnet": (
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        },
        32,
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 16],
            "image_size": 64,
            "last_hidden_size": 16,
        },
        64,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {**_PYRAMID, "decoder_hidden_size": 16},
        64,
    ),
    "pvt": ("PvtForImageClassification", {**_PYRAMID, "image_size": 64}, 64),
    "poolformer": (
        "PoolFormerForImageClassification",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4},
        64,
    ),
    "focalnet": (
        "FocalNetForImageClassification",
        {
            "embed_dim": 8,
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "image_size": 32,
        },
        32,
    ),
}
_HEARING = {
    "conv_dim": [16, 16],
    "conv_kernel": [5, 3],
    "conv_stride": [3, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
    "num_feat_extract_layers": 2,
}
_WHISPER = {
    **_SEQ2SEQ,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "apply_spec_augment": False,
}
_CLIP = {
    "text_config": {**_NAMES},
    "vision_config": {**_NAMES, **_PATCHES},
    "projection_dim": 16,
}


def _transformers() -> list[Architecture]:
    found = [
        _hf(name, model, more, partial(words, attention_mask=_mask))
        for name, (model, more) in _ENCODERS.items()
    ]
    found += [
        _hf(name, model, more, words) for name, (model, more) in _DECODERS.items()
    ]
    found += [
        _hf(name, model, more, partial(words, decoder_input_ids=_targets))
        for name, (model, more) in _TRANSLATORS.items()
    ]
    found += [
        _hf(name, model, more, partial(image, side, "pixel_values"))
        for name, (model, more, side) in _SEEING.items()
    ]
    found += [
        _hf(name, f"{model}ForSequenceClassification", _HEARING, _sound)
        for name, model in (("wav2vec2", "Wav2Vec2"), ("hubert", "Hubert"))
    ]
    found.append(_hf("whisper", "WhisperForConditionalGeneration", _WHISPER, _mel))
    found.append(
        _hf(
            "clip", "CLIPModel", _CLIP, lambda: {**words(), **image(16, "pixel_values")}
        )
    )
    return found


def _targets() -> torch.Tensor:
    return torch.randint(4, WORDS, (B, L - 1))


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(B, 240)}


def _mel() -> dict[str, Any]:
    return {"input_features": torch.randn(B, 8, 16), "decoder_input_ids": _targets()}


def _hf(
    name: str, model: str, more: dict[str, Any], inputs: Callable[[], dict[str, Any]]
) -> Architecture:
    return Architecture(
        f"transformers/{name}", partial(_from_config, model, more), inputs
    )


def _from_config(model: str, more: dict[str, Any]) -> nn.Module:
    import transformers

    cls = getattr(transformers, model)
    # A config refuses names that stand for others of its own, such as hidden_size for n_embd, so own names go first.
    taken = {
        *getattr(cls.config_class, "attribute_map", {}),
        *(["max_position_embeddings"] if "XLNet" in model else []),
    }
    own = {key: value for key, value in _NAMES.items() if key not in taken}
    return cls(cls.config_class(**{**own, **more}))


# --- timm: names and what they need beside 64 x 64 pixels. A version of timm that lacks one reports it as not built.

_TIMM_PLAIN = """
    resnet18 resnet26d seresnet18 resnetv2_50 resnetv2_50x1_bit nf_resnet26 nf_regnet_b0 dm_nfnet_f0 efficientnet_b0
    tf_efficientnet_b0 tf_efficientnetv2_b0 mobilenetv2_050 mobilenetv3_small_050 lcnet_050 mobilevit_xxs
    mobilevitv2_050 convnext_atto convnextv2_atto xcit_nano_12_p16_224 poolformer_s12 regnety_002 regnetx_002
    densenet121 vgg11_bn dla34 hrnet_w18_small edgenext_xx_small fastvit_t8 ghostnet_100 repvgg_a0 res2net50_26w_4s
    xception41 darknet53 cspresnet50 mnasnet_small mobileone_s0
"""
_SWIN = {
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 24,
    "depths": (2, 1, 1, 1),
    "num_heads": (2, 2, 2, 2),
}
# "side" is for those that take no img_size.
_THIN = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}
_TIMM: dict[str, dict[str, Any]] = {name: {} for name in _TIMM_PLAIN.split()} | {
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": {"img_size": 64},
    "beit_base_patch16_224": _THIN,
    "swin_tiny_patch4_window7_224": _SWIN,
    "swinv2_tiny_window8_256": _SWIN,
    "coatnet_pico_rw_224": {"img_size": 224},
    "halonet26t": {"side": 256},
    "botnet26t_256": {"img_size": 256},
    "cait_xxs24_224": _THIN,
    "eva02_tiny_patch14_224": {"img_size": 56},
    "pit_ti_224": {"img_size": 64},
    "mixer_s32_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "levit_128s": {"img_size": 224},
    "crossvit_tiny_240": {"img_size": 240},
    "twins_svt_small": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "maxvit_pico_rw_256": {"img_size": 256},
    "inception_v4": {"side": 96},
    "tiny_vit_5m_224": {"img_size": 64},
    "efficientformer_l1": {"side": 224},
}


def _timm() -> list[Architecture]:
    found = []
    for name, more in _TIMM.items():
        options = {key: value for key, value in more.items() if key != "side"}
        side = more.get("side") or more.get("img_size", 64)
        found.append(
            Architecture(
                f"timm/{name}", partial(_from_timm, name, options), partial(image, side)
            )
        )
    return found


def _from_timm(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=False, num_classes=C, **options)
    except (
        TypeError
    ):  # a convolutional model that takes no img_size, or one that fixes its widths
        return timm.create_model(name, pretrained=False, num_classes=C)


# --- torchvision

_SQUARE = (3, 64, 64)
_VISION_PLAIN = """
    resnet18 resnext50_32x4d mobilenet_v2 mobilenet_v3_small efficientnet_b0 convnext_tiny swin_t swin_v2_t densenet121
    shufflenet_v2_x0_5 squeezenet1_1 regnet_y_400mf mnasnet0_5 vgg11 alexnet
"""
_VISION: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    **dict.fromkeys(_VISION_PLAIN.split(), ("", {}, _SQUARE)),
    "vit_b_16": ("", {"image_size": 64}, _SQUARE),
    "maxvit_t": ("", {}, (3, 224, 224)),
    "googlenet": ("", {"init_weights": False, "aux_logits": False}, _SQUARE),
    "inception_v3": ("", {"init_weights": False}, (3, 299, 299)),
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18"), ("video", {}, (3, 4, 32, 32))),
    **dict.fromkeys(
        ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"),
        ("segmentation", {}, _SQUARE),
    ),
}


def _torchvision() -> list[Architecture]:
    found = []
    for name, (part, more, shape) in _VISION.items():
        build = partial(_from_torchvision, name, part, more)
        found.append(
            Architecture(f"torchvision/{name}", build, partial(_positional, shape))
        )
    return found


def _positional(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"": torch.randn(B, *shape)}


def _from_torchvision(name: str, part: str, more: dict[str, Any]) -> nn.Module:
    import torchvision

    models = getattr(torchvision.models, part) if part else torchvision.models
    backbone = {"weights_backbone": None} if part == "segmentation" else {}
    return getattr(models, name)(weights=None, num_classes=C, **backbone, **more)
