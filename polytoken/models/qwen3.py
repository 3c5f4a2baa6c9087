"""Qwen3 dense text networks: llama-type with an RMS norm on every query and key head."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

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
    config.pop("rope_parameters", None)  # already spelled out; the network would read a default as a scaling
    config.setdefault("tie_word_embeddings", False)
    require(config, "hidden_act", "silu", default="silu")
    require(config, "use_sliding_window", False, default=False)
    require(config, "attention_bias", False, default=False)
    require_rope(config, *ROPE_TYPES)
    require_keys(
        config, "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "rms_norm_eps",
        "vocab_size", "num_key_value_heads", "max_position_embeddings", "head_dim", "rope_theta",
    )  # fmt: skip
    return config


def make(config: Config) -> nn.Module:
    return qwen3.Model(qwen3.ModelArgs.from_dict(config))


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    return drop_rotary_tables(weights)


def wrap(network: nn.Module, config: Config) -> DenseModel:
    args = network.args
    return DenseModel(network, windows=[None] * args.num_hidden_layers, tied=args.tie_word_embeddings, plain=True)


FAMILY = Family("qwen3", ("qwen3",), normalise, make, rename, wrap)
