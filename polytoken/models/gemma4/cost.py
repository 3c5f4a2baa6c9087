"""What forwards of the canvas network move and compute at least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from polytoken.models.canvas import Cost
from polytoken.models.gemma4.config import SLIDING, CanvasConfig


def _bytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _matrix_sizes(modules: Iterable[nn.Module]) -> int:
    """Weights of all linear layers, packed ones counted unpacked."""
    total = 0
    for module in modules:
        for _, layer in module.named_modules():
            if isinstance(layer, nn.QuantizedLinear):
                total += layer.weight.size * 32 // layer.bits
            elif isinstance(layer, nn.Linear):
                total += layer.weight.size
    return total


@dataclass(frozen=True)
class CostModel:
    """Counts that depend on the network alone.

    Attributes:
        dense_bytes: weights of all layers but their experts.
        expert_bytes: experts of all layers.
        extra_bytes: self-conditioning, and the parts of deliberation that every denoise reads.
        table_bytes: the embedding table.
        row_flops: of one row in all layers, attention scores aside.
        extra_row_flops: of one canvas row beside that.
        head_row_flops: of one row's vocabulary product.
    """

    config: CanvasConfig
    dense_bytes: int
    expert_bytes: int
    extra_bytes: int
    table_bytes: int
    row_flops: int
    extra_row_flops: int
    head_row_flops: int
    state_itemsize: int

    @staticmethod
    def of(network: Any, config: CanvasConfig, *, state_itemsize: int) -> CostModel:
        """Counted from a loaded network; `state_itemsize` is the width of a cached number in bytes."""
        decoder = network.model.decoder
        layers = list(decoder.layers)
        experts = sum(_bytes(layer.experts) for layer in layers)
        expert_weights = 3 * config.hidden_size * config.moe_intermediate_size * config.top_k_experts * len(layers)
        extra: list[nn.Module] = [decoder.self_conditioning]
        if config.latent is not None:
            latent = network.latent_deliberation
            extra += [latent[name] for name in latent if isinstance(latent[name], nn.Module) and name != "commit"]
            extra += latent.blocks
        return CostModel(
            config=config,
            dense_bytes=sum(_bytes(layer) for layer in layers) - experts,
            expert_bytes=experts,
            extra_bytes=sum(_bytes(module) for module in extra),
            table_bytes=_bytes(decoder.embed_tokens),
            row_flops=2 * (_matrix_sizes(layers) + expert_weights),
            extra_row_flops=2 * _matrix_sizes(extra),
            head_row_flops=2 * config.vocab_size * config.hidden_size,
            state_itemsize=state_itemsize,
        )

    def denoise(self, prefix: int) -> Cost:
        canvas = self.config.canvas_length
        state, scores = self._attention(canvas, prefix, future=canvas)
        return Cost(
            weight_bytes=self._layer_bytes(canvas) + self.extra_bytes + self.table_bytes,
            state_bytes=state,
            flops=canvas * (self.row_flops + self.extra_row_flops + self.head_row_flops) + scores,
        )

    def encode(self, tokens: int, prefix: int) -> Cost:
        state, scores = self._attention(tokens, prefix, future=(tokens + 1) // 2)
        row_bytes = self.table_bytes // self.config.vocab_size
        return Cost(
            weight_bytes=self._layer_bytes(tokens) + tokens * row_bytes,
            state_bytes=state,
            flops=tokens * self.row_flops + scores,
        )

    def _layer_bytes(self, rows: int) -> int:
        """Weights that `rows` rows read when routing is spread evenly: an expert is missed by all with some chance."""
        missed = (1 - self.config.top_k_experts / self.config.num_experts) ** rows
        return self.dense_bytes + int(self.expert_bytes * (1 - missed))

    def _attention(self, rows: int, prefix: int, *, future: int) -> tuple[int, int]:
        """Bytes of cached state read, and FLOPs of scores and sums over it and `future` rows of the forward itself."""
        state = scores = 0
        for kind, shape in zip(self.config.layer_types, self.config.layers, strict=True):
            seen = min(prefix, self.config.sliding_window - 1) if kind == SLIDING else prefix
            state += 2 * seen * shape.kv_heads * shape.head_dim * self.state_itemsize
            scores += 4 * rows * (seen + future) * self.config.heads * shape.head_dim
        return state, scores
