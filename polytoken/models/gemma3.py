"""Gemma 3 text networks: sliding layers with every p-th layer full, four norms per block, scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text

from polytoken.cache.state import DecodingState
from polytoken.errors import CheckpointError
from polytoken.models.dense import DenseModel
from polytoken.models.family import Config, Family, drop_rotary_tables, require, require_keys, require_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def normalise(config: Config) -> Config:
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        defaults = {"num_attention_heads": 8, "num_key_value_heads": 4}  # left out by early multimodal exports
        vocabulary = {"vocab_size": config["vocab_size"]} if "vocab_size" in config else {}
        config = {**defaults, **vocabulary, **nested, "model_type": "gemma3_text"}
    config = _flatten_rope(dict(config))
    config.setdefault("tie_word_embeddings", True)
    require(config, "hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    require(config, "attention_bias", False, default=False)
    require(config, "final_logit_softcapping", None)
    require(config, "attn_logit_softcapping", None)
    require(config, "use_bidirectional_attention", None, False)
    require_rope(config, "default", "linear")
    require_keys(config, "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    config["sliding_window_pattern"] = _pattern(config)
    return config


def _flatten_rope(config: Config) -> Config:
    """Newer configs hold one rotary record per layer type; the network wants two bases and one scaling."""
    nested = config.pop("rope_parameters", None)
    if not isinstance(nested, Mapping):
        return config
    full, sliding = nested.get(_FULL), nested.get(_SLIDING)
    if not isinstance(full, Mapping) or not isinstance(sliding, Mapping):
        raise CheckpointError(
            "config.json: rope_parameters must hold a record for full_attention and one for sliding_attention",
            code="unsupported_config",
            field="rope_parameters",
        )
    if sliding.get("rope_type", "default") != "default":
        raise CheckpointError(
            "config.json: scaled rotary positions on sliding layers are not supported",
            code="unsupported_config",
            field="rope_parameters",
        )
    config["rope_theta"] = full["rope_theta"]
    config["rope_local_base_freq"] = sliding["rope_theta"]
    if full.get("rope_type", "default") != "default":
        config["rope_scaling"] = dict(full)
    return config


def _pattern(config: Config) -> int:
    """Period p of the layer types, every p-th layer being full; refuses a list that has no such period."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return int(config.get("sliding_window_pattern", 6))
    layers = config["num_hidden_layers"]
    period = layer_types.index(_FULL) + 1 if _FULL in layer_types else layers + 1
    expected = [_FULL if (index + 1) % period == 0 else _SLIDING for index in range(layers)]
    if list(layer_types) != expected or period > layers:
        raise CheckpointError(
            "config.json: layer_types must repeat sliding layers with every p-th layer full",
            code="unsupported_config",
            field="layer_types",
        )
    return int(period)


def make(config: Config) -> nn.Module:
    network = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"]:
        network.tie_word_embeddings = True
        network.pop("lm_head")
    return network


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    """Text tensors of a plain or a multimodal export, under the names of the text network."""
    text: dict[str, mx.array] = {}
    for name, array in drop_rotary_tables(weights).items():
        if name.startswith(_VISION):
            continue
        for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
            if name.startswith(prefix):
                name = replacement + name[len(prefix) :]  # noqa: PLW2901
                break
        text[name] = array
    return text


class Gemma3Model(DenseModel):
    """Gemma 3 with the embedding scale that fits the dtype it runs in."""

    def _run(self, ids: mx.array, cache: DecodingState) -> mx.array:
        inner = self.network.model
        embeddings = inner.embed_tokens(ids)
        if embeddings.dtype == mx.float32:
            # The network rounds sqrt(H) to bfloat16, as training did; the fp32 reference uses it exactly.
            exact = math.sqrt(self.hidden_size)
            rounded = mx.array(exact, mx.bfloat16).astype(mx.float32).item()
            embeddings = embeddings * (exact / rounded)
        hidden: mx.array = inner(ids, cache=cache.layers, input_embeddings=embeddings)
        return hidden


def wrap(network: nn.Module, config: Config) -> DenseModel:
    args = network.args
    period = args.sliding_window_pattern
    windows = [None if (index + 1) % period == 0 else args.sliding_window for index in range(args.num_hidden_layers)]
    return Gemma3Model(network, windows=windows, tied=network.tie_word_embeddings)


FAMILY = Family("gemma3", ("gemma3_text", "gemma3"), normalise, make, rename, wrap)
