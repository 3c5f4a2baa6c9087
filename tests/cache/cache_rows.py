"""Made-up keys and values: a row's bits are a function of the tokens up to it, so a wrong row shows at once."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from polytoken.cache.layers import CacheLayer, KVLayer, SlidingKVLayer
from polytoken.cache.state import DecodingState

Ids = Sequence[int]


@lru_cache(maxsize=1 << 16)
def make_row(seed: int, heads: int, width: int) -> np.ndarray:
    """[heads, width] normal values."""
    return np.random.default_rng(seed).standard_normal((heads, width), dtype=np.float32)


def make_rows(ids: Ids, start: int, stop: int, *, salt: int = 0, heads: int = 2, width: int = 3) -> mx.array:
    """Rows [1, heads, stop - start, width] of the positions [start, stop)."""
    crc, rows = salt, []
    for position, token in enumerate(ids[:stop]):
        crc = zlib.crc32(token.to_bytes(8, "little", signed=True), crc)
        if position >= start:
            rows.append(make_row(crc, heads, width))
    return mx.array(np.stack(rows, axis=1)[None])


def feed(layer: CacheLayer, ids: Ids, stop: int, *, salt: int = 0) -> tuple[mx.array, mx.array]:
    """Append the rows of the tokens [offset, stop) in one go; what the layer shows to attention."""
    start = layer.offset
    keys = make_rows(ids, start, stop, salt=salt)
    values = make_rows(ids, start, stop, salt=salt + 1, width=5)
    return layer.update_and_fetch(keys, values)


def feed_state(state: DecodingState, ids: Ids, stop: int) -> None:
    """Append to every layer, each with rows of its own, and evaluate."""
    for i, layer in enumerate(state.layers):
        feed(layer, ids, stop, salt=10 * i)
    mx.eval(state.arrays())


def make_layers(windows: Sequence[int | None]) -> DecodingState:
    """A full layer for None, else a sliding one."""
    return DecodingState([KVLayer() if window is None else SlidingKVLayer(window) for window in windows])


def cold_state(ids: Ids, windows: Sequence[int | None], *, grid: int) -> DecodingState:
    """The state after `ids`, encoded on the grid from nothing."""
    state = make_layers(windows)
    while state.offset < len(ids):
        feed_state(state, ids, min(len(ids), state.offset + grid))
    return state


def bits(array: mx.array) -> bytes:
    """The bytes of an array with its shape, for comparison bit for bit."""
    return repr(array.shape).encode() + np.asarray(array.astype(mx.float32)).tobytes()


def state_bits(state: DecodingState) -> list[bytes]:
    """All that counts in a state, bit for bit."""
    pairs = [layer.valid() for layer in state.layers]
    return [b"" if pair is None else bits(pair[0]) + bits(pair[1]) for pair in pairs]
