"""Qwen3.5, 3.6 and 3.8 text networks, dense and with experts: gated delta nets, every n-th layer gated attention."""

# mypy: allow-subclassing-any
from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from polytoken.models.family import Config, require, require_keys
from polytoken.models.hybrid.attention import adopt_attention
from polytoken.models.hybrid.config import normalise_hybrid
from polytoken.models.hybrid.delta import SplitDeltaNet, adopt_delta_nets
from polytoken.models.hybrid.family import HeadSlot, HybridFamily, rename_hybrid, wrap_hybrid
from polytoken.models.hybrid.head import HeadNetwork
from polytoken.models.hybrid.model import HybridModel


def normalise(config: Config) -> Config:
    """A dense network's settings."""
    text = normalise_hybrid(config)
    require_keys(text, "intermediate_size")
    require(text, "num_experts", 0, None)
    return text


def normalise_moe(config: Config) -> Config:
    """The settings of a network whose every layer has experts."""
    text = normalise_hybrid(config)
    require_keys(text, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    require(text, "mlp_only_layers", [], None)
    require(text, "decoder_sparse_step", 1, default=1)
    text.setdefault("norm_topk_prob", True)  # the library that wrote the config leaves out its default
    return text


class Network(HeadSlot, qwen3_5.Model):
    """The library's network with our delta nets and attention, and room for a head."""

    def __init__(self, config: Config) -> None:
        # The library's arguments move keys about within the record they are given.
        text = {**config, "rope_parameters": dict(config["rope_parameters"])}
        super().__init__(qwen3_5.ModelArgs(model_type=config["model_type"], text_config=text))
        adopt_delta_nets(self.language_model.model.layers, SplitDeltaNet)
        adopt_attention(self.language_model.model.layers)

    def make_head(self) -> nn.Module:
        args = self.language_model.args
        layer = qwen3_5.DecoderLayer(args, layer_idx=args.full_attention_interval - 1)
        adopt_attention([layer])
        return HeadNetwork(args.hidden_size, eps=args.rms_norm_eps, layer=layer)


def make_head(config: Config) -> nn.Module:
    return Network({**config, "num_hidden_layers": 0}).make_head()


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    return rename_hybrid(weights, config, prefix="language_model.")


def wrap(network: nn.Module, config: Config) -> HybridModel:
    return wrap_hybrid(network, network.language_model, config)


DENSE = HybridFamily("qwen3_5", ("qwen3_5", "qwen3_5_text"), normalise, Network, rename, wrap, make_head)
MOE = HybridFamily("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), normalise_moe, Network, rename, wrap, make_head)
