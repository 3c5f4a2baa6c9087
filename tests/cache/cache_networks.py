"""Tiny random networks of mlx-lm, to run over both our cache layers and mlx-lm's own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, llama

from polytoken.cache.layers import CacheLayer, KVLayer, SlidingKVLayer
from polytoken.cache.state import DecodingState

VOCAB = 61


def _randomise(model: nn.Module, seed: int) -> nn.Module:
    keys = iter(mx.random.split(mx.random.key(seed), 200))
    model.update(tree_map(lambda x: 0.3 * mx.random.normal(x.shape, key=next(keys)), model.parameters()))
    mx.eval(model.parameters())
    return model


def build_llama(window: int | None = None, seed: int = 0) -> nn.Module:
    """Two full layers, or with a window: sliding, full, sliding."""
    types = ["full_attention"] * 2 if window is None else ["sliding_attention", "full_attention", "sliding_attention"]
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=16,
        num_hidden_layers=len(types),
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        head_dim=8,
        layer_types=types,
        sliding_window=window,
    )
    return _randomise(llama.Model(args), seed)


def build_gemma3(window: int, seed: int = 0) -> nn.Module:
    """Sliding, full, sliding."""
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=16,
        num_hidden_layers=3,
        intermediate_size=24,
        num_attention_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        num_key_value_heads=1,
        query_pre_attn_scalar=8,
        sliding_window=window,
        sliding_window_pattern=2,
    )
    return _randomise(gemma3_text.Model(args), seed)


def make_state(model: nn.Module) -> DecodingState:
    """An empty decoding state of our layers that matches what the network makes for itself."""
    layers: list[CacheLayer] = [
        SlidingKVLayer(cache.max_size) if hasattr(cache, "max_size") else KVLayer() for cache in model.make_cache()
    ]
    return DecodingState(layers)


def run_chunks(model: nn.Module, cache: list[object], ids: list[int], chunks: list[int]) -> mx.array:
    """Logits [n, V] of all ids, encoded in chunks of the given sizes (the last one takes what is left)."""
    rows, at = [], 0
    for size in [*chunks, len(ids)]:
        piece = ids[at : at + size]
        if piece:
            rows.append(model(mx.array([piece]), cache=cache)[0])
            mx.eval(rows[-1])
            at += len(piece)
    return mx.concatenate(rows, axis=0)
