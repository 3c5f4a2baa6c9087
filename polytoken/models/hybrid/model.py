"""The driver of a hybrid trunk: embed, layers over our cache, final norm, with both hidden variants handed out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from polytoken.cache.layers import CacheLayer, KVLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.state import DecodingState
from polytoken.models.base import Hidden
from polytoken.models.draft import DraftHead, DraftingModel


class HybridModel(DraftingModel):
    """A trunk of gated delta nets and full attention.

    Args:
        text: the library's text network: `model` with embed_tokens, layers and norm; `lm_head` unless tied; `args`.
        tied: whether the embedding is the output head.

    Attributes:
        network: the text network.
        head_bytes: bytes of weights that projecting one row reads.
    """

    def __init__(self, text: nn.Module, *, tied: bool) -> None:
        self.network: Any = text
        self._trunk: Any = text.model
        self._head = self._trunk.embed_tokens.as_linear if tied else text.lm_head
        full = [index for index, layer in enumerate(self._trunk.layers) if not layer.is_linear]
        self._first_full = full[0] if full else None
        self.vocab_size = int(text.args.vocab_size)
        self.hidden_size = int(text.args.hidden_size)
        self.weight_bytes_per_forward = trunk_weight_bytes(text, tied=tied)
        self.head_bytes = layer_weight_bytes(self._trunk.embed_tokens if tied else text.lm_head)

    def attach(self, head: DraftHead | None, note: str) -> None:
        """Say which draft head the checkpoint has, or why none."""
        self.draft_head, self.draft_head_note = head, note

    def make_cache(self) -> DecodingState:
        layers: list[CacheLayer] = [RecurrentLayer() if layer.is_linear else KVLayer() for layer in self._trunk.layers]
        return DecodingState(layers)

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings [1, S, H] of ids [1, S]."""
        rows: mx.array = self._trunk.embed_tokens(ids)
        return rows

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        """Hidden rows with `post` and `pre` [1, R, H]; a last layer whose rows nobody wants is never evaluated."""
        h = self.embed(ids)
        S = h.shape[1]
        mask = None
        if self._first_full is not None:
            attention = cache.layers[self._first_full]
            assert isinstance(attention, KVLayer)
            mask = attention.make_mask(S)
        for layer, state in zip(self._trunk.layers, cache.layers, strict=True):
            h = layer(h, mask=None if layer.is_linear else mask, cache=state)
        pre = h if keep is None or keep >= S else h[:, S - keep :]
        return Hidden(post=self._trunk.norm(pre), pre=pre)

    def post_norm(self, pre: mx.array) -> mx.array:
        rows: mx.array = self._trunk.norm(pre)
        return rows

    def project(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._head(hidden)
        return logits.astype(mx.float32)


def trunk_weight_bytes(text: Any, *, tied: bool) -> int:
    """Bytes of weights that one single-row forward reads; an untied embedding counts one row."""
    total = layer_weight_bytes(text.model)  # not of `text`: a head may hang beside the trunk there
    if tied:
        return total
    embedding = [array for _, array in tree_flatten(text.model.embed_tokens.parameters())]
    unread: int = sum(array.nbytes - array.nbytes // array.shape[0] for array in embedding)
    return total - unread + layer_weight_bytes(text.lm_head)


def layer_weight_bytes(part: nn.Module) -> int:
    """Bytes of weights that one row reads: of stacked experts only as many as are chosen."""
    total = sum(array.nbytes for _, array in tree_flatten(part.parameters()))
    for _, module in part.named_modules():
        experts = getattr(module, "switch_mlp", None)
        if experts is not None:
            stacked = sum(array.nbytes for _, array in tree_flatten(experts.parameters()))
            total -= stacked - stacked * module.top_k // module.num_experts
    return int(total)
