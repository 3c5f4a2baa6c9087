"""Qwen3-Next text networks: gated delta nets with grouped projections, every n-th layer gated attention, experts."""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next

from polytoken.models.family import Config, require_keys
from polytoken.models.hybrid.attention import adopt_attention
from polytoken.models.hybrid.config import normalise_hybrid
from polytoken.models.hybrid.delta import GroupedDeltaNet, adopt_delta_nets
from polytoken.models.hybrid.family import HeadSlot, HybridFamily, rename_hybrid, wrap_hybrid
from polytoken.models.hybrid.head import HeadNetwork
from polytoken.models.hybrid.model import HybridModel


def normalise(config: Config) -> Config:
    text = normalise_hybrid(config)
    text.setdefault("norm_topk_prob", True)  # true where it is left out; the library's own default is false
    text.setdefault("decoder_sparse_step", 1)
    text["mlp_only_layers"] = list(text.get("mlp_only_layers") or ())
    require_keys(
        text, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "max_position_embeddings",
    )  # fmt: skip
    if text["mlp_only_layers"] or text["decoder_sparse_step"] > 1:
        require_keys(text, "intermediate_size")
    text.setdefault("intermediate_size", text["moe_intermediate_size"])  # asked for, and unused without dense layers
    return text


class Network(HeadSlot, qwen3_next.Model):
    """The library's network with our delta nets and attention, and room for a head."""

    def __init__(self, config: Config) -> None:
        super().__init__(qwen3_next.ModelArgs.from_dict(config))
        adopt_delta_nets(self.model.layers, GroupedDeltaNet)
        adopt_attention(self.model.layers)

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """Decay rates keep the dtype they are stored in, whatever the rest is cast to."""
        return lambda name: not name.endswith("A_log")

    def make_head(self) -> nn.Module:
        # The head's block has experts wherever the trunk's dense layers are.
        args = replace(self.args, mlp_only_layers=[], decoder_sparse_step=1)
        layer = qwen3_next.Qwen3NextDecoderLayer(args, layer_idx=args.full_attention_interval - 1)
        adopt_attention([layer])
        return HeadNetwork(args.hidden_size, eps=args.rms_norm_eps, layer=layer)


def make_head(config: Config) -> nn.Module:
    return Network({**config, "num_hidden_layers": 0}).make_head()


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    return rename_hybrid(weights, config, prefix="")


def wrap(network: nn.Module, config: Config) -> HybridModel:
    return wrap_hybrid(network, network, config)


FAMILY = HybridFamily("qwen3_next", ("qwen3_next",), normalise, Network, rename, wrap, make_head)
