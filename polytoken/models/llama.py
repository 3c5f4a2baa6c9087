"""Llama-type networks (Llama, SmolLM2): pre-norm, grouped-query attention, SwiGLU, rotary positions."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from polytoken.errors import CheckpointError
from polytoken.models.dense import ROPE_TYPES, DenseModel
from polytoken.models.family import (
    Config,
    Family,
    drop_rotary_tables,
    flatten_rope,
    require,
    require_keys,
    require_rope,
)


def normalise(config: Config) -> Config:
    config = dict(flatten_rope(config))
    config.setdefault("tie_word_embeddings", False)  # the library that wrote the config leaves out its default
    require(config, "hidden_act", "silu", default="silu")
    require_rope(config, *ROPE_TYPES)
    require_keys(
        config, "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "rms_norm_eps",
        "vocab_size",
    )  # fmt: skip
    layer_types = config.get("layer_types")
    if layer_types is not None:
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown or len(layer_types) != config["num_hidden_layers"] or "full_attention" not in layer_types:
            raise CheckpointError(
                "config.json: layer_types must name full_attention or sliding_attention for every layer, at least one "
                "of them full",
                code="unsupported_config",
                field="layer_types",
            )
        if "sliding_attention" in layer_types:
            require_keys(config, "sliding_window")
    elif config.get("sliding_window") is not None:
        require(config, "use_sliding_window", False, default=False)
    return config


def make(config: Config) -> nn.Module:
    return llama.Model(llama.ModelArgs.from_dict(config))


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    return drop_rotary_tables(weights)


def wrap(network: nn.Module, config: Config) -> DenseModel:
    args = network.args
    windows = [args.sliding_window if kind == "sliding_attention" else None for kind in args.layer_types]
    return DenseModel(network, windows=windows, tied=args.tie_word_embeddings, plain=True)


FAMILY = Family("llama", ("llama",), normalise, make, rename, wrap)
