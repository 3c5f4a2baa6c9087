"""Tables and configurations of the plain dense families: llama, qwen2, qwen3, gemma3_text.

Each family has named shapes. "a" and "b" differ in every size, so that a network that fits only one of them shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytoken.testkit.weights import Kind, TensorSpec

Config = dict[str, Any]

_SMALL: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
_OTHER: Config = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 1024,
}

_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
# Stretching starts at 32 positions here, so that prompts of a few dozen tokens feel it.
_LLAMA3_ROPE: Config = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 3,
}
_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 3,
}
_GEMMA3: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
}

SHAPES: Mapping[str, Mapping[str, Config]] = {
    "llama": {
        "a": {**_LLAMA, **_SMALL, "rope_theta": 10000.0},
        "b": {
            **_LLAMA,
            **_OTHER,
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA3_ROPE,
            "tie_word_embeddings": False,
        },
        # Some layers see the last eight positions only.
        "sliding": {
            **_LLAMA,
            **_SMALL,
            "num_hidden_layers": 4,
            "rope_theta": 10000.0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "qwen2": {
        "a": {**_QWEN2, **_SMALL, "tie_word_embeddings": True},
        "b": {**_QWEN2, **_OTHER, "tie_word_embeddings": False},
    },
    # head_dim is no quotient of the hidden size in either.
    "qwen3": {
        "a": {**_QWEN3, **_SMALL, "head_dim": 32, "tie_word_embeddings": True},
        "b": {**_QWEN3, **_OTHER, "head_dim": 20, "tie_word_embeddings": False},
    },
    # Hidden sizes are squares: the family multiplies its embeddings by sqrt(hidden_size), which networks round
    # differently unless it is exact.
    "gemma3_text": {
        "a": {
            **_GEMMA3,
            **_SMALL,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window_pattern": 3,
        },
        # Ends in sliding layers, and the score scale is not that of the head size.
        "b": {
            **_GEMMA3,
            **_OTHER,
            "hidden_size": 144,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "query_pre_attn_scalar": 36,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
        },
    },
}


def dense_table(config: Config) -> dict[str, TensorSpec]:
    """Tensor names and shapes of a release of one of the four families."""
    family = config["model_type"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    gemma = family == "gemma3_text"
    norm: Kind = "norm_zero_centred" if gemma else "norm"
    # Gemma's configuration leaves out tie_word_embeddings: it is always tied.
    tied = config.get("tie_word_embeddings", True)

    table = {"model.embed_tokens.weight": TensorSpec((config["vocab_size"], hidden), "embedding")}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        projections = {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv_heads * head, hidden),
            "self_attn.v_proj": (kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in projections.items():
            table[f"{prefix}{name}.weight"] = TensorSpec(shape)
        if family == "qwen2":
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = projections[f"self_attn.{name}"][0]
                table[f"{prefix}self_attn.{name}.bias"] = TensorSpec((rows,), "bias")
        if family in ("qwen3", "gemma3_text"):
            for name in ("q_norm", "k_norm"):
                table[f"{prefix}self_attn.{name}.weight"] = TensorSpec((head,), norm)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        for name in norms:
            table[f"{prefix}{name}.weight"] = TensorSpec((hidden,), norm)
    table["model.norm.weight"] = TensorSpec((hidden,), norm)
    if not tied:
        table["lm_head.weight"] = TensorSpec((config["vocab_size"], hidden))
    return table
