"""Table and configurations of diffusion_gemma: one transformer as encoder and decoder, with experts on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytoken.testkit.weights import TensorSpec

Config = dict[str, Any]
Tensors = dict[str, TensorSpec]

_TEXT: Config = {
    "model_type": "diffusion_gemma_text",
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
}
_VISION: Config = {
    "model_type": "gemma4_vision",
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "patch_size": 4,
    "position_embedding_size": 16,
}


def _wrapped(text: Config, *, canvas_length: int) -> Config:
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "boi_token_id": 280,
        "eoi_token_id": 281,
        "image_token_id": 282,
        "canvas_length": canvas_length,
        "tie_word_embeddings": True,
        "text_config": {**_TEXT, **text},
        "vision_config": _VISION,
    }


SHAPES: Mapping[str, Mapping[str, Config]] = {
    "diffusion_gemma": {
        "a": _wrapped(
            {
                "global_head_dim": 32,
                "head_dim": 16,
                "hidden_size": 64,
                "intermediate_size": 96,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "moe_intermediate_size": 32,
                "num_attention_heads": 4,
                "num_experts": 8,
                "num_global_key_value_heads": 1,
                "num_hidden_layers": 6,
                "num_key_value_heads": 2,
                "sliding_window": 8,
                "top_k_experts": 2,
                "vocab_size": 320,
            },
            canvas_length=12,
        ),
        # A window smaller than the canvas; a square hidden size again, since its root scales the embeddings.
        "b": _wrapped(
            {
                "global_head_dim": 40,
                "head_dim": 24,
                "hidden_size": 144,
                "intermediate_size": 80,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "moe_intermediate_size": 24,
                "num_attention_heads": 6,
                "num_experts": 6,
                "num_global_key_value_heads": 2,
                "num_hidden_layers": 4,
                "num_key_value_heads": 3,
                "sliding_window": 5,
                "top_k_experts": 3,
                "vocab_size": 288,
            },
            canvas_length=16,
        ),
    }
}

# Of generation_config.json: the block sampler's own settings.
SAMPLER: Config = {
    "max_denoising_steps": 48,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}


def spell_per_layer(config: Config) -> Config:
    """The same configuration with the full layers' sizes in `per_layer_config`, as newer files have them."""
    text = dict(config["text_config"])
    sizes = {
        "head_dim": text.pop("global_head_dim"),
        "num_key_value_heads": text.pop("num_global_key_value_heads"),
    }
    text["per_layer_config"] = {
        str(layer): sizes for layer, kind in enumerate(text["layer_types"]) if kind == "full_attention"
    }
    return {**config, "text_config": text}


def diffusion_table(config: Config) -> Tensors:
    """Tensor names and shapes of a release, from a configuration with the "global" spelling."""
    text = config["text_config"]
    hidden = text["hidden_size"]
    decoder = "model.decoder."
    table: Tensors = {
        f"{decoder}embed_tokens.weight": TensorSpec((text["vocab_size"], hidden), "embedding_sharp"),
        f"{decoder}norm.weight": TensorSpec((hidden,), "norm"),
        f"{decoder}self_conditioning.pre_norm.weight": TensorSpec((hidden,), "norm"),
        **_mlp(f"{decoder}self_conditioning.", hidden, text["intermediate_size"]),
    }
    for layer, kind in enumerate(text["layer_types"]):
        table |= _layer(f"{decoder}layers.{layer}.", text, full=kind == "full_attention")
        # The one thing of the encoder that is not the decoder's.
        table[f"model.encoder.language_model.layers.{layer}.layer_scalar"] = TensorSpec((1,), "layer_scalar")
    return table | _vision(config["vision_config"], hidden)


def _layer(prefix: str, text: Config, *, full: bool) -> Tensors:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head = text["global_head_dim"] if full else text["head_dim"]
    kv_heads = text["num_global_key_value_heads"] if full else text["num_key_value_heads"]
    count, inner = text["num_experts"], text["moe_intermediate_size"]
    table = {
        f"{prefix}self_attn.q_proj.weight": TensorSpec((heads * head, hidden)),
        f"{prefix}self_attn.k_proj.weight": TensorSpec((kv_heads * head, hidden)),
        f"{prefix}self_attn.o_proj.weight": TensorSpec((hidden, heads * head)),
        f"{prefix}self_attn.q_norm.weight": TensorSpec((head,), "norm"),
        f"{prefix}self_attn.k_norm.weight": TensorSpec((head,), "norm"),
        **_mlp(f"{prefix}mlp.", hidden, text["intermediate_size"]),
        f"{prefix}router.proj.weight": TensorSpec((count, hidden)),
        f"{prefix}router.scale": TensorSpec((hidden,), "norm"),
        f"{prefix}router.per_expert_scale": TensorSpec((count,), "norm"),
        f"{prefix}experts.gate_up_proj": TensorSpec((count, 2 * inner, hidden)),
        f"{prefix}experts.down_proj": TensorSpec((count, hidden, inner)),
        f"{prefix}layer_scalar": TensorSpec((1,), "layer_scalar"),
    }
    if not full:  # full layers use their keys as values
        table[f"{prefix}self_attn.v_proj.weight"] = TensorSpec((kv_heads * head, hidden))
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    ):
        # As trained ones are, the norms that end a branch are small: the denoising loop feeds its output back, and with
        # branches as strong as the embeddings a rounding error becomes another token within five steps.
        ends_branch = name in ("post_attention_layernorm", "post_feedforward_layernorm")
        table[f"{prefix}{name}.weight"] = TensorSpec((hidden,), "norm_small" if ends_branch else "norm")
    return table


def _mlp(prefix: str, hidden: int, inner: int) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": TensorSpec((inner, hidden)),
        f"{prefix}up_proj.weight": TensorSpec((inner, hidden)),
        f"{prefix}down_proj.weight": TensorSpec((hidden, inner)),
    }


def _vision(vision: Config, text_hidden: int) -> Tensors:
    """The image tower, which a text engine leaves alone; here so that a release's left-over tensors are met."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    tower = "model.encoder.vision_tower."
    layer = f"{tower}encoder.layers.0."
    table: Tensors = {
        "model.encoder.embed_vision.embedding_projection.weight": TensorSpec((text_hidden, hidden)),
        f"{tower}patch_embedder.input_proj.weight": TensorSpec((hidden, 3 * vision["patch_size"] ** 2)),
        f"{tower}patch_embedder.position_embedding_table": TensorSpec(
            (2, vision["position_embedding_size"], hidden), "embedding"
        ),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        table[f"{layer}self_attn.{name}.linear.weight"] = TensorSpec((hidden, hidden))
    for name in ("q_norm", "k_norm"):
        table[f"{layer}self_attn.{name}.weight"] = TensorSpec((vision["head_dim"],), "norm")
    for name in ("gate_proj", "up_proj"):
        table[f"{layer}mlp.{name}.linear.weight"] = TensorSpec((inner, hidden))
    table[f"{layer}mlp.down_proj.linear.weight"] = TensorSpec((hidden, inner))
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ):
        table[f"{layer}{name}.weight"] = TensorSpec((hidden,), "norm")
    return table
