"""Tables and configurations of the hybrid families: qwen3_5, qwen3_5_moe, qwen3_next, each with its `mtp.*` head.

Tables give experts in the fused form, [E, 2I, H] and [E, H, I]; `layouts` rearranges them, so that all layouts hold the
same network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polytoken.testkit.weights import Kind, TensorSpec

Config = dict[str, Any]
Tensors = dict[str, TensorSpec]

_NORM: Kind = "norm_zero_centred"

_TEXT: Config = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6,
}
_SMALL: Config = {
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_size": 64,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
# Key and value heads of different sizes, neither of which the fused kernels take; three value heads to a key head.
_OTHER: Config = {
    "full_attention_interval": 3,
    "head_dim": 24,
    "hidden_size": 96,
    "linear_key_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
    "num_attention_heads": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 3,
    "vocab_size": 288,
}
_EXPERTS: Config = {
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
}
_OTHER_EXPERTS: Config = {
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}
_VISION: Config = {
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 16,
    "in_channels": 3,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 4,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _rope(*, mrope_section: list[int]) -> Config:
    return {
        "mrope_interleaved": True,
        "mrope_section": mrope_section,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    }


def _layer_types(text: Config) -> list[str]:
    interval = text["full_attention_interval"]
    return [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(text["num_hidden_layers"])
    ]


def _wrapped(model_type: str, text: Config, *, tied: bool) -> Config:
    """The configuration of a release with a vision tower, whose text part lies one level down."""
    name = "Qwen3_5Moe" if model_type.endswith("moe") else "Qwen3_5"
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": model_type,
        "image_token_id": 279,
        "video_token_id": 280,
        "vision_start_token_id": 281,
        "vision_end_token_id": 282,
        "tie_word_embeddings": tied,
        "text_config": {
            **text,
            "model_type": f"{model_type}_text",
            "layer_types": _layer_types(text),
            "tie_word_embeddings": tied,
        },
        "vision_config": {**_VISION, "model_type": model_type, "out_hidden_size": text["hidden_size"]},
    }


_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

SHAPES: Mapping[str, Mapping[str, Config]] = {
    "qwen3_5": {
        "a": _wrapped(
            "qwen3_5",
            {**_TEXT, **_SMALL, "intermediate_size": 96, "rope_parameters": _rope(mrope_section=[2, 1, 1])},
            tied=False,
        ),
        "b": _wrapped(
            "qwen3_5",
            {**_TEXT, **_OTHER, "intermediate_size": 160, "rope_parameters": _rope(mrope_section=[1, 1, 1])},
            tied=True,
        ),
    },
    "qwen3_5_moe": {
        "a": _wrapped(
            "qwen3_5_moe",
            {**_TEXT, **_SMALL, **_EXPERTS, "rope_parameters": _rope(mrope_section=[2, 1, 1])},
            tied=False,
        ),
        "b": _wrapped(
            "qwen3_5_moe",
            {**_TEXT, **_OTHER, **_OTHER_EXPERTS, "rope_parameters": _rope(mrope_section=[1, 1, 1])},
            tied=False,
        ),
    },
    # The release spells its rotary settings at the top; transformers 5 writes rope_parameters. One shape each.
    "qwen3_next": {
        "a": {
            **_NEXT,
            **_SMALL,
            **_EXPERTS,
            "intermediate_size": 96,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000.0,
        },
        "b": {
            **_NEXT,
            **_OTHER,
            **_OTHER_EXPERTS,
            "intermediate_size": 160,
            "mlp_only_layers": [1],
            "num_nextn_predict_layers": 1,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
        },
    },
}


def hybrid_table(config: Config) -> Tensors:
    """Tensor names and shapes of a release: trunk, head, and for the two wrapped families the vision tower."""
    text = config.get("text_config", config)
    prefix = "model." if text is config else "model.language_model."
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    tied = config["tie_word_embeddings"]

    embedding: Kind = "embedding" if tied else "embedding_unit"
    table: Tensors = {f"{prefix}embed_tokens.weight": TensorSpec((vocab, hidden), embedding)}
    for layer in range(text["num_hidden_layers"]):
        full = (layer + 1) % text["full_attention_interval"] == 0
        table |= _layer(f"{prefix}layers.{layer}.", text, full=full, dense=_is_dense(text, layer))
    table[f"{prefix}norm.weight"] = TensorSpec((hidden,), _NORM)
    if not tied:
        table["lm_head.weight"] = TensorSpec((vocab, hidden))
    table |= _head(text)
    if tied:
        table = {name: _beside_small_embeddings(name, spec) for name, spec in table.items()}
    if "vision_config" in config:
        table |= _vision(config["vision_config"])
    return table


def _beside_small_embeddings(name: str, spec: TensorSpec) -> TensorSpec:
    """Residual branches in proportion to a tied table, whose rows are short.

    These networks magnify rounding when the branches outweigh the embeddings: two exact implementations would then
    differ by more than a mistake does.
    """
    residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj"))
    return replace(spec, kind="matrix_small") if residual else spec


def _is_dense(text: Config, layer: int) -> bool:
    sparse = "num_experts" in text and (layer + 1) % text.get("decoder_sparse_step", 1) == 0
    return not sparse or layer in text.get("mlp_only_layers", ())


def _head(text: Config) -> Tensors:
    """The multi-token-prediction head: two norms, the fusion, one full-attention layer, a final norm."""
    hidden = text["hidden_size"]
    return {
        "mtp.pre_fc_norm_embedding.weight": TensorSpec((hidden,), _NORM),
        "mtp.pre_fc_norm_hidden.weight": TensorSpec((hidden,), _NORM),
        "mtp.fc.weight": TensorSpec((hidden, 2 * hidden)),
        **_layer("mtp.layers.0.", text, full=True, dense="num_experts" not in text),
        "mtp.norm.weight": TensorSpec((hidden,), _NORM),
    }


def _layer(prefix: str, text: Config, *, full: bool, dense: bool) -> Tensors:
    hidden = text["hidden_size"]
    table = {
        f"{prefix}input_layernorm.weight": TensorSpec((hidden,), _NORM),
        f"{prefix}post_attention_layernorm.weight": TensorSpec((hidden,), _NORM),
    }
    table |= _attention(f"{prefix}self_attn.", text) if full else _delta_net(f"{prefix}linear_attn.", text)
    if dense:
        return table | _mlp(f"{prefix}mlp.", hidden, text["intermediate_size"])
    return table | _experts(f"{prefix}mlp.", text)


def _attention(prefix: str, text: Config) -> Tensors:
    hidden, head = text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    return {
        f"{prefix}q_proj.weight": TensorSpec((2 * heads * head, hidden)),  # per head: query, then gate
        f"{prefix}k_proj.weight": TensorSpec((kv_heads * head, hidden)),
        f"{prefix}v_proj.weight": TensorSpec((kv_heads * head, hidden)),
        f"{prefix}o_proj.weight": TensorSpec((hidden, heads * head)),
        f"{prefix}q_norm.weight": TensorSpec((head,), _NORM),
        f"{prefix}k_norm.weight": TensorSpec((head,), _NORM),
    }


def _delta_net(prefix: str, text: Config) -> Tensors:
    hidden, value_heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = value_heads * text["linear_value_head_dim"]
    if text["model_type"] == "qwen3_next":  # groups its projections per key head
        projections = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * value_heads}
    else:
        projections = {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
            "in_proj_b": value_heads,
            "in_proj_a": value_heads,
        }
    return {
        **{f"{prefix}{name}.weight": TensorSpec((rows, hidden)) for name, rows in projections.items()},
        f"{prefix}conv1d.weight": TensorSpec((2 * keys + values, 1, text["linear_conv_kernel_dim"])),
        f"{prefix}A_log": TensorSpec((value_heads,), "a_log"),
        f"{prefix}dt_bias": TensorSpec((value_heads,), "dt_bias"),
        f"{prefix}norm.weight": TensorSpec((text["linear_value_head_dim"],), "norm"),
        f"{prefix}out_proj.weight": TensorSpec((hidden, values)),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": TensorSpec((inner, hidden)),
        f"{prefix}up_proj.weight": TensorSpec((inner, hidden)),
        f"{prefix}down_proj.weight": TensorSpec((hidden, inner)),
    }


def _experts(prefix: str, text: Config) -> Tensors:
    hidden, count, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    return {
        f"{prefix}gate.weight": TensorSpec((count, hidden)),
        f"{prefix}experts.gate_up_proj": TensorSpec((count, 2 * inner, hidden)),
        f"{prefix}experts.down_proj": TensorSpec((count, hidden, inner)),
        **_mlp(f"{prefix}shared_expert.", hidden, text["shared_expert_intermediate_size"]),
        f"{prefix}shared_expert_gate.weight": TensorSpec((1, hidden)),
    }


def _vision(vision: Config) -> Tensors:
    """The image tower, which a text engine leaves alone; here so that a release's left-over tensors are met."""
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    matrices = {
        "blocks.0.attn.qkv": (3 * hidden, hidden),
        "blocks.0.attn.proj": (hidden, hidden),
        "blocks.0.mlp.linear_fc1": (inner, hidden),
        "blocks.0.mlp.linear_fc2": (hidden, inner),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision["out_hidden_size"], merged),
        "patch_embed.proj": (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch),
    }
    prefix = "model.visual."
    table: Tensors = {f"{prefix}pos_embed.weight": TensorSpec((vision["num_position_embeddings"], hidden), "embedding")}
    for name, shape in matrices.items():
        table[f"{prefix}{name}.weight"] = TensorSpec(shape)
        table[f"{prefix}{name}.bias"] = TensorSpec(shape[:1], "bias")
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        table[f"{prefix}{name}.weight"] = TensorSpec((hidden,), "norm")
        table[f"{prefix}{name}.bias"] = TensorSpec((hidden,), "bias")
    return table
