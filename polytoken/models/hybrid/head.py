"""The draft head of the hybrid families: `mtp.*`.

For the hidden row h_i and the next token t_{i+1}, with rms zero-centred norms of their own:

    x   = fc([rms_e(embed(t_{i+1})) | rms_h(h_i)])
    x   = block(x)                  one full-attention layer of the family, over the head's own keys and values
    m_i = rms(x);  logits of t_{i+2} = lm_head(m_i)

Embedding and lm_head are the trunk's. A chained draft reads m_i in the place of h_i (or x, where the checkpoint says
that the head was trained so).
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polytoken.cache.layers import KVLayer
from polytoken.cache.state import DecodingState
from polytoken.models.base import Hidden
from polytoken.models.draft import DraftHead, DraftSettings
from polytoken.models.hybrid.model import HybridModel, layer_weight_bytes


class HeadNetwork(nn.Module):
    """The head's parameters, named as in a checkpoint behind `mtp.`."""

    def __init__(self, hidden_size: int, *, eps: float, layer: nn.Module) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)


class HybridHead(DraftHead):
    """A loaded head over its trunk; W = H."""

    def __init__(self, network: nn.Module, trunk: HybridModel, settings: DraftSettings) -> None:
        self.settings = settings
        self._network: Any = network
        self._trunk = trunk
        self.weight_bytes_per_draft = layer_weight_bytes(network) + trunk.head_bytes

    def make_cache(self) -> DecodingState:
        return DecodingState([KVLayer() for _ in self._network.layers])

    def take(self, hidden: Hidden) -> mx.array:
        if self.settings.base_hidden_variant == "post":
            return hidden.post
        assert hidden.pre is not None  # the hybrid trunk gives both
        return hidden.pre

    def draft(
        self, hidden: mx.array, next_ids: mx.array, cache: DecodingState, *, keep: int | None = None
    ) -> tuple[mx.array, mx.array]:
        x = self._run(hidden, next_ids, cache)
        if keep is not None and keep < x.shape[1]:
            x = x[:, x.shape[1] - keep :]
        m = self._network.norm(x)
        return self._trunk.project(m), m if self.settings.hidden_variant == "post" else x

    def append(self, hidden: mx.array, next_ids: mx.array, cache: DecodingState) -> None:
        # The block's output is built but never evaluated: only its keys and values are wanted.
        self._run(hidden, next_ids, cache)

    def _run(self, hidden: mx.array, next_ids: mx.array, cache: DecodingState) -> mx.array:
        """The block's output [1, R, H] for R pairs."""
        network = self._network
        e = network.pre_fc_norm_embedding(self._trunk.embed(next_ids))
        g = network.pre_fc_norm_hidden(hidden)
        pair = [e, g] if self.settings.concat_order == "embedding_hidden" else [g, e]
        x: mx.array = network.fc(mx.concatenate(pair, axis=-1))
        for layer, state in zip(network.layers, cache.layers, strict=True):
            assert isinstance(state, KVLayer)
            x = layer(x, mask=state.make_mask(x.shape[1]), cache=state)
        return x
