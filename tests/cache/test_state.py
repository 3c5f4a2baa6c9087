"""A row's decoding state: all layers or none."""

from __future__ import annotations

import hashlib
import struct

import mlx.core as mx
import pytest
from cache_rows import cold_state, feed, feed_state, make_layers, state_bits

from polytoken.cache.layers import KVLayer
from polytoken.cache.state import DecodingState
from polytoken.errors import CacheError

IDS = list(range(1, 60))


def test_trim_takes_back_in_every_layer_or_in_none() -> None:
    state = cold_state(IDS[:20], (None, 6), grid=20)
    feed_state(state, IDS, 23)
    before = state_bits(state)
    with pytest.raises(CacheError, match=r"layers 1 \(sliding_kv\) refuse"):
        state.trim(4)
    assert state.offset == 23 and state_bits(state) == before
    assert state.trim(3) == 3
    assert state_bits(state) == state_bits(cold_state(IDS[:20], (None, 6), grid=20))
    for n in (-1, 21):
        with pytest.raises(CacheError):
            state.trim(n)


def test_layers_that_disagree_are_noticed() -> None:
    state = make_layers((None, None))
    feed(state.layers[0], IDS, 3)
    with pytest.raises(CacheError, match="disagree"):
        _ = state.offset
    with pytest.raises(CacheError):
        state.snapshot()


def test_restore_refuses_what_does_not_fit_and_changes_nothing() -> None:
    state = cold_state(IDS[:9], (None, 6), grid=4)
    before = state_bits(state)
    for windows in ((None,), (None, None), (None, 7), (6, None)):
        with pytest.raises(CacheError):
            state.restore(cold_state(IDS[:5], windows, grid=4).snapshot())
        assert state_bits(state) == before and state.offset == 9


def test_a_snapshot_is_the_state_and_stays_it() -> None:
    """Invariant 7: whatever the source and the borrowers do, the digest stays."""
    state = cold_state(IDS[:15], (None, 6, 1), grid=4)
    snapshot = state.snapshot()
    digest = snapshot.digest()
    assert snapshot.offset == 15 and snapshot.nbytes == state.nbytes <= state.held_bytes
    borrower = make_layers((None, 6, 1))
    borrower.restore(snapshot)
    assert borrower.offset == 15 and state_bits(borrower) == state_bits(state)
    for each in (state, borrower):
        each.trim(0)
        feed_state(each, [*IDS[:15], *[70] * 30], 40)
    state.trim(25)
    assert snapshot.digest() == digest
    assert state_bits(borrower) == state_bits(cold_state([*IDS[:15], *[70] * 25], (None, 6, 1), grid=3))


def test_the_digest_is_of_values_types_and_shapes_alone() -> None:
    """Equal however the state was chunked, different for another dtype, layer order or value."""
    one = cold_state(IDS[:12], (None, 6), grid=12).snapshot().digest()
    assert one == cold_state(IDS[:12], (None, 6), grid=5).snapshot().digest()
    assert one != cold_state([*IDS[:11], 0], (None, 6), grid=12).snapshot().digest()
    halves = []
    for dtype in (mx.float32, mx.bfloat16):
        layer = KVLayer()
        layer.update_and_fetch(mx.ones((1, 1, 2, 3), dtype), mx.ones((1, 1, 2, 3), dtype))
        halves.append(DecodingState([layer]).snapshot().digest())
    assert halves[0] != halves[1]
    # "[", then dtype tag, shape and little-endian float32 of keys and of values, then "]"
    piece = b"F32[1,1,2,3]" + struct.pack("<6f", *[1.0] * 6)
    assert halves[0] == hashlib.sha256(b"[" + piece + piece + b"]").hexdigest()


def test_an_empty_state() -> None:
    state = make_layers((None, 6))
    assert (state.offset, state.nbytes, state.held_bytes, state.arrays(), state.trim(0)) == (0, 0, 0, [], 0)
    snapshot = state.snapshot()
    other = cold_state(IDS[:9], (None, 6), grid=4)
    other.restore(snapshot)
    assert other.offset == 0 and other.arrays() == []
