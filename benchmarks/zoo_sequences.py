"""Architectures of libraries for sequences (x-transformers, perceiver, performer, linformer, recurrent memory, xlstm,
S5, mamba), series (gluonts), speech (speechbrain), tables (tabnet, rtdl, tabm, fastai), recommendations (deepctr,
recbole), survival (pycox), labels (torchcrf), agents (stable-baselines3, tianshou, torchrl, tensordict) and adapters
(peft), beside those of zoo_models.py.

`MAKERS` has the name under which a library is imported and what it offers: (name, build, inputs).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zoo_models
from torch import Tensor, nn
from zoo_fields import Whole
from zoo_models import WORDS, Architecture, B, C

L, WIDTH = 8, 32
Inputs = dict[str, Any]
Entry = tuple[str, Callable[[], nn.Module], Callable[[], Inputs]]


def _made(module: str, name: str, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **options)


def _words(rows: int = B, length: int = L, **more: Callable[[], Tensor]) -> Inputs:
    return {
        "": torch.randint(4, WORDS, (rows, length)),
        **{key: make() for key, make in more.items()},
    }


def _numbers(*shape: int) -> Inputs:
    return {"": torch.randn(shape)}


def _categories(rows: int, *sizes: int) -> Tensor:
    return torch.stack([torch.randint(1, size, (rows,)) for size in sizes], 1)


def _lengths() -> Tensor:
    return torch.tensor([L, 5, 3])


# --- sequences


def _decoder(
    kind: str = "Decoder", options: Inputs | None = None, **more: Any
) -> nn.Module:
    layers = _made(
        "x_transformers",
        kind,
        dim=WIDTH,
        depth=2,
        heads=4,
        attn_dim_head=8,
        **(options or {}),
    )
    return _made(
        "x_transformers",
        "TransformerWrapper",
        num_tokens=WORDS,
        max_seq_len=16,
        attn_layers=layers,
        **more,
    )


def _with_memories(parts: Any, x: Tensor) -> Tensor:
    memories, out = None, []
    for part in x.split(L // 2, 1):
        y, memories = parts["net"](part, mems=memories, return_mems=True)
        out.append(y)
    return torch.cat(out, 1)


_ROTARY = {"rotary_pos_emb": True}
_GATED = {
    "rel_pos_bias": True,
    "macaron": True,
    "gate_residual": True,
    "shift_tokens": 1,
}
_BOTH = {
    "num_tokens": WORDS,
    "depth": 1,
    "heads": 4,
    "max_seq_len": 16,
    "attn_dim_head": 8,
}
_X_TRANSFORMERS: list[Entry] = [
    (
        "rotary",
        partial(_decoder, options={**_ROTARY, "ff_glu": True, "use_rmsnorm": True}),
        _words,
    ),
    (
        "alibi",
        partial(
            _decoder,
            options={
                "alibi_pos_bias": True,
                "attn_qk_norm": True,
                "sandwich_norm": True,
            },
        ),
        _words,
    ),
    (
        "gated",
        partial(_decoder, options=_GATED, num_memory_tokens=3, tie_embedding=True),
        _words,
    ),
    (
        "dynamic-positions",
        partial(_decoder, options={"dynamic_pos_bias": True, "attn_num_mem_kv": 2}),
        _words,
    ),
    (
        "memories",
        lambda: Whole(_with_memories, net=_decoder(options=_ROTARY, max_mem_len=L)),
        _words,
    ),
    (
        "loss",
        lambda: _made(
            "x_transformers", "AutoregressiveWrapper", _decoder(options=_ROTARY)
        ),
        _words,
    ),
    (
        "translator",
        lambda: _made(
            "x_transformers",
            "XTransformer",
            dim=WIDTH,
            tie_token_emb=True,
            **{
                f"{side}_{key}": value
                for side in ("enc", "dec")
                for key, value in _BOTH.items()
            },
        ),
        lambda: {"src": _words()[""], "tgt": _words()[""]},
    ),
]
_PERCEIVER: list[Entry] = [
    (
        "io",
        partial(
            _made, "perceiver_pytorch", "PerceiverIO", dim=WIDTH, queries_dim=16, logits_dim=C, depth=1, num_latents=6,
            latent_dim=WIDTH, cross_dim_head=8, latent_dim_head=8, latent_heads=2,
        ),
        lambda: {"data": torch.randn(B, 7, WIDTH), "queries": torch.randn(4, 16)},
    )
]  # fmt: skip
_PERFORMER: list[Entry] = [
    (
        "lm",
        partial(_made, "performer_pytorch", "PerformerLM", num_tokens=WORDS, max_seq_len=16, dim=WIDTH, depth=1,
                heads=4, dim_head=8),
        _words,
    )
]  # fmt: skip
_LINFORMER: list[Entry] = [
    (
        "lm",
        partial(_made, "linformer", "LinformerLM", WORDS, WIDTH, L, 2, heads=4, k=4),
        _words,
    )
]
_RECURRENT_MEMORY: list[Entry] = [
    (
        "segments",
        lambda: _made(
            "recurrent_memory_transformer_pytorch",
            "RecurrentMemoryTransformerWrapper",
            _made("recurrent_memory_transformer_pytorch", "RecurrentMemoryTransformer", num_tokens=WORDS,
                  num_memory_tokens=4, dim=WIDTH, depth=1, seq_len=L, causal=True, dim_head=8, heads=2),
        ),
        partial(_words, B, 2 * L + 1),
    )
]  # fmt: skip


def _xlstm() -> nn.Module:
    new = partial(_made, "xlstm")
    mlstm = new(
        "mLSTMLayerConfig", conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4
    )
    slstm = new(
        "sLSTMLayerConfig", backend="vanilla", num_heads=4, conv1d_kernel_size=4
    )
    blocks = {
        "mlstm_block": new("mLSTMBlockConfig", mlstm=mlstm),
        "slstm_block": new(
            "sLSTMBlockConfig",
            slstm=slstm,
            feedforward=new("FeedForwardConfig", proj_factor=1.3),
        ),
    }
    sizes = {
        "vocab_size": WORDS,
        "context_length": L,
        "num_blocks": 2,
        "embedding_dim": WIDTH,
        "slstm_at": [1],
    }
    return new("xLSTMLMModel", new("xLSTMLMModelConfig", **blocks, **sizes))


_XLSTM: list[Entry] = [("lm", _xlstm, _words)]
_S5: list[Entry] = [
    (
        "block",
        lambda: nn.Sequential(
            nn.Linear(4, 16), _made("s5", "S5Block", 16, 16, False), nn.Linear(16, C)
        ),
        partial(_numbers, B, L, 4),
    )
]
_JAMBA = {
    "d_model": 16, "n_layers": 4, "mlp_size": 32, "vocab_size": WORDS, "d_state": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 1,
    "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
}  # fmt: skip


def _mamba() -> nn.Module:
    config = _made("mambapy.mamba", "MambaConfig", d_model=16, n_layers=2)
    return nn.Sequential(
        nn.Embedding(WORDS, 16),
        _made("mambapy.mamba", "Mamba", config),
        nn.Linear(16, WORDS),
    )


_MAMBA: list[Entry] = [
    ("mamba", _mamba, _words),
    (
        "jamba",
        lambda: _made(
            "mambapy.jamba",
            "JambaLM",
            _made("mambapy.jamba", "JambaLMConfig", **_JAMBA),
        ),
        _words,
    ),
]


def _tag(parts: Any, x: Tensor, tags: Tensor) -> Tensor:
    states = parts["rnn"](parts["embedding"](x))[0]
    return -parts["crf"](parts["out"](states), tags, reduction="none")


_CRF: list[Entry] = [
    (
        "tagger",
        lambda: Whole(
            _tag,
            embedding=nn.Embedding(WORDS, 16),
            rnn=nn.LSTM(16, 8, bidirectional=True, batch_first=True),
            out=nn.Linear(16, C),
            crf=_made("torchcrf", "CRF", C, batch_first=True),
        ),
        lambda: {**_words(), "tags": torch.randint(C, (B, L))},
    )
]


# --- adapters of a small language model


def _adapted(kind: str, **options: Any) -> nn.Module:
    sizes = {
        "vocab_size": WORDS,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "use_cache": False,
    }
    config = _made(
        "transformers", "GPT2Config", **sizes, bos_token_id=1, eos_token_id=2
    )
    adapter = _made("peft", f"{kind}Config", **options)
    return _made(
        "peft",
        "get_peft_model",
        _made("transformers", "GPT2LMHeadModel", config),
        adapter,
    )


def _prompted() -> Inputs:
    return {
        "input_ids": _words()[""],
        "attention_mask": torch.ones(B, L, dtype=torch.long),
    }


_ATTENTION: Inputs = {"target_modules": ["c_attn"]}
_PEFT: list[Entry] = [
    (
        "lora",
        partial(_adapted, "Lora", r=2, init_lora_weights=False, **_ATTENTION),
        _prompted,
    ),
    (
        "dora",
        partial(
            _adapted, "Lora", r=2, use_dora=True, init_lora_weights=False, **_ATTENTION
        ),
        _prompted,
    ),
    (
        "vera",
        partial(_adapted, "Vera", r=2, init_weights=False, **_ATTENTION),
        _prompted,
    ),
    (
        "prefix",
        partial(_adapted, "PrefixTuning", num_virtual_tokens=4, task_type="CAUSAL_LM"),
        _prompted,
    ),
]


# --- series and speech

_PAST = {"prediction_length": 3, "context_length": 6}
_BLOCK = {
    "d_model": 16,
    "nhead": 2,
    "dim_feedforward": 32,
    "dropout": 0.1,
    "activation": "relu",
    "norm_first": False,
}


def _past(*shape: int) -> Inputs:
    return {
        "past_target": torch.rand(shape) + 0.5,
        "past_observed_values": torch.ones(shape),
    }


_GLUON, _HIDDEN = "gluonts.torch.model", {"hidden_dimensions": [16]}
_GLUONTS: list[Entry] = [
    (
        "feedforward",
        partial(_made, f"{_GLUON}.simple_feedforward.module", "SimpleFeedForwardModel", **_PAST, **_HIDDEN),
        lambda: {"": torch.rand(B, 6) + 0.5},
    ),
    (
        "patch-tst",
        partial(_made, f"{_GLUON}.patch_tst.module", "PatchTSTModel", patch_len=4, stride=2, padding_patch="end",
                num_feat_dynamic_real=0, num_encoder_layers=1, scaling="mean", **_PAST, **_BLOCK),
        partial(_past, B, 6),
    ),
    (
        "i-transformer",
        partial(_made, f"{_GLUON}.i_transformer.module", "ITransformerModel", num_encoder_layers=1, scaling="mean",
                **_PAST, **_BLOCK),
        partial(_past, B, 6, 4),
    ),
]  # fmt: skip


def _speech() -> Inputs:
    return {"x": torch.randn(B, 20, 8)}


_LOBES = "speechbrain.lobes.models"
_SPEECHBRAIN: list[Entry] = [
    (
        "ecapa-tdnn",
        partial(_made, f"{_LOBES}.ECAPA_TDNN", "ECAPA_TDNN", 8, lin_neurons=8, channels=[16, 16, 16, 16, 32],
                attention_channels=8, res2net_scale=4, se_channels=8),
        lambda: {**_speech(), "lengths": _lengths() / L},
    ),
    (
        "x-vector",
        partial(_made, f"{_LOBES}.Xvector", "Xvector", in_channels=8, tdnn_blocks=2, tdnn_channels=[16, 16],
                tdnn_kernel_sizes=[3, 1], tdnn_dilations=[1, 1], lin_neurons=8),
        lambda: {**_speech(), "lens": _lengths() / L},
    ),
]  # fmt: skip


# --- tables


def _columns(continuous: str) -> Inputs:
    return {continuous: torch.randn(6, 4), "x_cat": _categories(6, 3, 5)}


def _mixed() -> Inputs:
    x = torch.randn(6, 9)
    x[:, [0, 3]] = _categories(6, 5, 6).float()
    return {"": x}


_FT = {
    "attention_n_heads": 2,
    "attention_dropout": 0.1,
    "ffn_d_hidden": None,
    "ffn_d_hidden_multiplier": 4 / 3,
}
_FT |= {"ffn_dropout": 0.1, "residual_dropout": 0.0}
_TABM = {
    "n_num_features": 4,
    "cat_cardinalities": [3, 5],
    "d_out": 2,
    "k": 4,
    "n_blocks": 2,
    "d_block": 16,
}
_TABNET: list[Entry] = [
    (
        "ghost-batches",
        lambda: _made("pytorch_tabnet.tab_network", "TabNet", 9, C, n_d=4, n_a=4, cat_idxs=[0, 3], cat_dims=[5, 6],
                      cat_emb_dim=[2, 2], virtual_batch_size=2, group_attention_matrix=torch.eye(9)),
        _mixed,
    )
]  # fmt: skip
_RTDL: list[Entry] = [
    (
        "ft-transformer",
        partial(_made, "rtdl_revisiting_models", "FTTransformer", n_cont_features=4, cat_cardinalities=[3, 5], d_out=2,
                n_blocks=2, d_block=16, **_FT),
        partial(_columns, "x_cont"),
    )
]  # fmt: skip
_TAB_M: list[Entry] = [
    (kind, partial(lambda kind: importlib.import_module("tabm").TabM.make(arch_type=kind, **_TABM), kind),
     partial(_columns, "x_num"))
    for kind in ("tabm", "tabm-mini")
]  # fmt: skip


def _awd_lstm() -> nn.Module:
    config = {
        "emb_sz": 16,
        "n_hid": 20,
        "n_layers": 2,
        "pad_token": 0,
        "bidir": False,
        "tie_weights": True,
    }
    config |= {
        f"{part}_p": 0.1 for part in ("output", "hidden", "input", "embed", "weight")
    } | {"out_bias": True}
    models = importlib.import_module("fastai.text.models.core")
    net = models.get_language_model(
        importlib.import_module("fastai.text.models.awdlstm").AWD_LSTM, WORDS, config
    )
    with torch.no_grad():
        net(
            _words()[""]
        )  # before its first call it holds a tensor with a history, which cannot be copied
    return net


def _read(parts: Any, x: Tensor) -> Tensor:
    parts["net"].reset()  # it goes on where the last call ended
    return parts["net"](x)[0]


_FASTAI: list[Entry] = [
    ("awd-lstm", lambda: Whole(_read, net=_awd_lstm()), _words),
    (
        "tabular",
        lambda: _made(
            "fastai.tabular.model",
            "TabularModel",
            [(5, 3), (6, 3)],
            4,
            2,
            [16, 8],
            ps=0.1,
            embed_p=0.1,
        ),
        lambda: {"x_cat": _categories(6, 5, 6), "x_cont": torch.randn(6, 4)},
    ),
]


def _cox(parts: Any, x: Tensor, durations: Tensor, events: Tensor) -> Tensor:
    return _made("pycox.models.loss", "cox_ph_loss", parts["net"](x), durations, events)


_PYCOX: list[Entry] = [
    (
        "cox-time",
        partial(
            _made, "pycox.models.cox_time", "MLPVanillaCoxTime", 4, [16, 16], True, 0.1
        ),
        lambda: {"input": torch.randn(6, 4), "time": torch.rand(6, 1)},
    ),
    (
        "loss-of-all-rows",
        lambda: Whole(
            _cox,
            net=_made("torchtuples.practical", "MLPVanilla", 4, [16], 1, True, 0.1),
        ),
        lambda: {
            "": torch.randn(6, 4),
            "durations": torch.rand(6),
            "events": torch.tensor([1.0, 0, 1, 1, 0, 1]),
        },
    ),
]


# --- recommendations


def _click_model(name: str) -> nn.Module:
    inputs = importlib.import_module("deepctr_torch.inputs")
    columns = [
        inputs.SparseFeat("a", 5, 4),
        inputs.SparseFeat("b", 6, 4),
        inputs.DenseFeat("d", 2),
    ]
    if name in ("MMOE", "PLE"):
        tasks = {
            "task_types": ["binary", "regression"],
            "task_names": ["x", "y"],
            "tower_dnn_hidden_units": (8,),
        }
        return _made(
            "deepctr_torch.models", name, columns, expert_dnn_hidden_units=(8,), **tasks
        )
    return _made("deepctr_torch.models", name, columns, columns)


def _clicks() -> Inputs:
    return {"": torch.cat([_categories(6, 5, 6).float(), torch.randn(6, 2)], 1)}


_DEEPCTR: list[Entry] = [
    (name, partial(_click_model, name), _clicks)
    for name in ("DeepFM", "DCNMix", "AFN", "MMOE")
]


class _Settings(dict[str, Any]):
    """What is not set is None, as in recbole's own."""

    def __missing__(self, key: str) -> None:
        return None


class _Items:
    def num(self, field: str) -> int:
        return WORDS


_SIZES = {
    "n_layers": 1,
    "n_heads": 2,
    "hidden_size": 16,
    "inner_size": 16,
    "embedding_size": 16,
    "num_layers": 1,
}
_SIZES |= {"MAX_ITEM_LIST_LENGTH": L, "step": 1, "k_interests": 2}
_RATES = {
    "hidden_dropout_prob": 0.1,
    "attn_dropout_prob": 0.1,
    "dropout_prob": 0.1,
    "dropout_probs": [0.1, 0.1],
}
_FIELDS = {
    "USER_ID_FIELD": "user",
    "ITEM_ID_FIELD": "item",
    "LIST_SUFFIX": "_list",
    "NEG_PREFIX": "neg_",
}
_OTHER = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.1,
    "loss_type": "CE",
    "device": "cpu",
}


def _recommender(name: str) -> nn.Module:
    settings = _Settings(
        **_SIZES, **_RATES, **_FIELDS, **_OTHER, ITEM_LIST_LENGTH_FIELD="length"
    )
    return _made("recbole.model.sequential_recommender", name, settings, _Items())


def _visits() -> Inputs:
    lengths = _lengths()
    items = torch.where(torch.arange(L) < lengths[:, None], _words()[""], 0)
    return {"item_seq": items, "item_seq_len": lengths}


_RECBOLE: list[Entry] = [
    (name, partial(_recommender, name), _visits)
    for name in ("SASRec", "GRU4Rec", "STAMP", "LightSANs")
]


# --- agents


def _policy() -> nn.Module:
    spaces = importlib.import_module("gymnasium.spaces")
    policies = importlib.import_module("stable_baselines3.common.policies")
    return policies.ActorCriticPolicy(
        spaces.Box(-1, 1, (5,)), spaces.Discrete(3), lambda _: 1e-3, net_arch=[16]
    )


def _judge(parts: Any, x: Tensor, actions: Tensor) -> Any:
    return parts["policy"].evaluate_actions(x, actions)


_STABLE_BASELINES: list[Entry] = [
    (
        "evaluate-actions",
        lambda: Whole(_judge, policy=_policy()),
        lambda: {**_numbers(B, 5), "actions": torch.randint(3, (B,))},
    )
]
_DUELING = {"dueling_param": ({"hidden_sizes": [8]}, {"hidden_sizes": [8]})}
_TIANSHOU: list[Entry] = [
    (
        "dueling",
        lambda: Whole(
            lambda parts, obs: parts["net"](obs)[0],
            net=_made("tianshou.utils.net.common", "Net", state_shape=5, action_shape=3, hidden_sizes=[16], **_DUELING),
        ),
        partial(_numbers, B, 5),
    ),
    (
        "recurrent",
        lambda: Whole(
            lambda parts, obs: parts["net"](obs)[0],
            net=_made("tianshou.utils.net.common", "Recurrent", layer_num=1, state_shape=5, action_shape=3,
                      hidden_layer_size=16),
        ),
        partial(_numbers, B, 4, 5),
    ),
]  # fmt: skip
_TORCHRL: list[Entry] = [
    (
        "noisy",
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), _made("torchrl.modules", "NoisyLinear", 8, 3)),
        partial(_numbers, B, 4),
    ),
    (
        "mlp",
        partial(_made, "torchrl.modules", "MLP", in_features=4, out_features=3, num_cells=[16], norm_class=nn.LayerNorm,
                norm_kwargs=[{"normalized_shape": 16}]),
        partial(_numbers, B, 4),
    ),
]  # fmt: skip


def _tensordict() -> nn.Module:
    wrap = partial(_made, "tensordict.nn", "TensorDictModule")
    steps = [wrap(nn.Linear(4, 8), ["x"], ["h"]), wrap(nn.Linear(8, C), ["h"], ["y"])]
    net = _made("tensordict.nn", "TensorDictSequential", *steps)
    return Whole(
        lambda p, x: p["net"](
            _made("tensordict", "TensorDict", {"x": x}, batch_size=x.shape[:1])
        )["y"],
        net=net,
    )


_LLAMA: Inputs = {
    "block_size": 16,
    "vocab_size": WORDS,
    "padded_vocab_size": WORDS,
    "n_layer": 2,
    "n_head": 4,
}
_LLAMA |= {
    "n_embd": 16,
    "parallel_residual": False,
    "norm_class_name": "RMSNorm",
    "intermediate_size": 32,
}


def _litgpt(kind: str, **options: Any) -> nn.Module:
    config = _made(
        "litgpt",
        "Config",
        **_LLAMA,
        mlp_class_name=kind,
        rotary_percentage=1.0,
        bias=False,
        **options,
    )
    return _made("litgpt", "GPT", config)


_LITGPT: list[Entry] = [
    ("llama", partial(_litgpt, "LLaMAMLP", n_query_groups=2), _words),
    ("mixture", partial(_litgpt, "LLaMAMoE", n_expert=4, n_expert_per_token=2), _words),
]
_NCPS: list[Entry] = [
    (
        "cfc",
        partial(_made, "ncps.torch", "CfC", 4, 12, proj_size=2),
        partial(_numbers, B, L, 4),
    )
]


MAKERS: dict[str, list[Entry]] = {
    "x_transformers": _X_TRANSFORMERS,
    "perceiver_pytorch": _PERCEIVER,
    "performer_pytorch": _PERFORMER,
    "linformer": _LINFORMER,
    "recurrent_memory_transformer_pytorch": _RECURRENT_MEMORY,
    "xlstm": _XLSTM,
    "s5": _S5,
    "mambapy": _MAMBA,
    "litgpt": _LITGPT,
    "ncps": _NCPS,
    "torchcrf": _CRF,
    "peft": _PEFT,
    "gluonts": _GLUONTS,
    "speechbrain": _SPEECHBRAIN,
    "pytorch_tabnet": _TABNET,
    "rtdl_revisiting_models": _RTDL,
    "tabm": _TAB_M,
    "fastai": _FASTAI,
    "pycox": _PYCOX,
    "deepctr_torch": _DEEPCTR,
    "recbole": _RECBOLE,
    "stable_baselines3": _STABLE_BASELINES,
    "tianshou": _TIANSHOU,
    "torchrl": _TORCHRL,
    "tensordict": [("sequential", _tensordict, partial(_numbers, B, 4))],
}
PACKAGES = (*zoo_models.PACKAGES, *MAKERS)


def architectures() -> list[Architecture]:
    """All whose package is installed, those of zoo_models.py first."""
    found = [
        (package, entry) for package, entries in MAKERS.items() for entry in entries
    ]
    own = [
        Architecture(f"{package}/{name}", build, inputs)
        for package, (name, build, inputs) in found
        if importlib.util.find_spec(package)
    ]
    return [*zoo_models.architectures(), *own]
