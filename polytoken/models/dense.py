"""Dense decoder-only networks of mlx-lm behind the `CausalModel` contract: one KV layer per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from polytoken.cache.layers import CacheLayer, KVLayer, SlidingKVLayer
from polytoken.cache.state import DecodingState
from polytoken.kernels.rope import share_rope
from polytoken.models.base import CausalModel, Hidden
from polytoken.models.lean import lean_stack

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


class DenseModel(CausalModel):
    """A network whose inner `model(ids, cache)` returns the post-norm hidden rows.

    `windows` gives, layer by layer, the sliding window in tokens or None for full attention. `plain` says that every
    block is llama-type, so that the CPU may run it with fewer operations (`models/lean.py`).
    """

    def __init__(self, network: nn.Module, *, windows: Sequence[int | None], tied: bool, plain: bool = False) -> None:
        self.network: Any = network
        self._windows = tuple(windows)
        self._head = network.model.embed_tokens.as_linear if tied else network.lm_head
        self.vocab_size = int(network.args.vocab_size)
        self.hidden_size = int(network.args.hidden_size)
        self.weight_bytes_per_forward = weight_bytes(network, tied=tied)
        if mx.default_device() == mx.cpu:
            share_rope([layer.self_attn for layer in network.model.layers], dims=_head_width(network.args))
        self._lean = lean_stack(network) if plain and mx.default_device() == mx.cpu else None

    def make_cache(self) -> DecodingState:
        layers: list[CacheLayer] = [KVLayer() if window is None else SlidingKVLayer(window) for window in self._windows]
        return DecodingState(layers)

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        post = self._run(ids, cache)
        if keep is not None and keep < post.shape[1]:
            post = post[:, post.shape[1] - keep :]
        return Hidden(post)

    def project(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._head(hidden)
        return logits.astype(mx.float32)

    def _run(self, ids: mx.array, cache: DecodingState) -> mx.array:
        """Post-norm hidden [1, S, H] of ids [1, S]."""
        if self._lean is not None:
            return self._lean(ids, cache.layers)
        hidden: mx.array = self.network.model(ids, cache=cache.layers)
        return hidden


def _head_width(args: Any) -> int:
    """Width of one attention head; configs leave it out when it is hidden size over heads."""
    return int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)


def weight_bytes(network: nn.Module, *, tied: bool) -> int:
    """Bytes of weights read by one single-row forward; an untied embedding is only indexed, so it counts one row."""
    total = 0
    for name, array in tree_flatten(network.parameters()):
        indexed_only = name.startswith("model.embed_tokens.") and not tied
        total += array.nbytes // array.shape[0] if indexed_only else array.nbytes
    return total
