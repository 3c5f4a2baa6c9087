"""The settings that the hybrid families share, in one spelling, and refusals of what the networks do not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polytoken.errors import CheckpointError
from polytoken.models.draft import SETTINGS_KEY
from polytoken.models.family import Config, require, require_keys, require_rope

LINEAR, FULL = "linear_attention", "full_attention"
HEAD_FILE: Final = "head_file"
"""Key that loading adds to a config: the header metadata of mtp.safetensors, None where there is no such file."""

DECLARED_KEYS: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers")
_ROPE_TYPES: Final = ("default", "linear", "yarn", "llama3", "dynamic")
_FROM_OUTSIDE: Final = ("tie_word_embeddings", SETTINGS_KEY, HEAD_FILE, *DECLARED_KEYS)


def text_settings(config: Config) -> Config:
    """The text network's settings: the nested record if there is one, with what is said beside it."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(config)
    outside = {key: config[key] for key in _FROM_OUTSIDE if config.get(key) is not None}
    return {**nested, **outside, "model_type": config["model_type"]}


def normalise_hybrid(config: Config) -> Config:
    """The checks and spellings that qwen3_5, qwen3_5_moe and qwen3_next have in common.

    Raises:
        CheckpointError: `unsupported_config`, `bad_config`.
    """
    text = text_settings(config)
    text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings", False))
    require_keys(
        text, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "vocab_size", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )  # fmt: skip
    require(text, "hidden_act", "silu", default="silu")
    require(text, "attn_output_gate", True, default=True)
    require(text, "output_gate_type", None, "swish", "silu")
    require(text, "mamba_ssm_dtype", "float32", default="float32")
    if text["linear_num_value_heads"] % text["linear_num_key_heads"]:
        raise CheckpointError(
            "config.json: linear_num_value_heads must be a multiple of linear_num_key_heads",
            code="unsupported_config",
            field="linear_num_value_heads",
        )
    if text.get("head_dim") is None:
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text["full_attention_interval"] = _interval(text)
    _spell_rope(text)
    return text


def _interval(text: Config) -> int:
    """n such that exactly every n-th layer is full; refuses layer types that have no such n."""
    layers, kinds = text["num_hidden_layers"], text.get("layer_types")
    if kinds is None:
        return int(text.get("full_attention_interval") or 4)
    interval: int = kinds.index(FULL) + 1 if FULL in kinds else layers + 1
    if list(kinds) != [LINEAR if (index + 1) % interval else FULL for index in range(layers)]:
        raise CheckpointError(
            f"config.json: layer_types must name {LINEAR} or {FULL} for all {layers} layers, every n-th one full",
            code="unsupported_config",
            field="layer_types",
        )
    return interval


def _spell_rope(text: Config) -> None:
    """Rotary settings flat and nested alike: the two networks read different ones.

    The image axes of mrope are equal for text, which leaves plain partial rotation.
    """
    nested = text.get("rope_parameters")
    scaling = text.get("rope_scaling")
    rope = dict(nested if isinstance(nested, Mapping) else scaling if isinstance(scaling, Mapping) else {})
    kind = rope.pop("type", None) or rope.pop("rope_type", None) or "default"
    rope.pop("rope_type", None)
    for name, default in (("rope_theta", None), ("partial_rotary_factor", 0.25)):
        rope[name] = rope.get(name, text.get(name, default))
        text[name] = rope[name]
    require_keys(text, "rope_theta")
    rope["type"] = "default" if kind == "mrope" else kind
    require_rope({"rope_scaling": rope}, *_ROPE_TYPES)
    text["rope_parameters"] = rope
    text["rope_scaling"] = None if rope["type"] == "default" else dict(rope)


def declared_layers(text: Config) -> int:
    """Layers of the draft head that the config declares; 0 when it says nothing."""
    for key in DECLARED_KEYS:
        value = text.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return 0
