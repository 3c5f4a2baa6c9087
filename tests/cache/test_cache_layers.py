"""Layers against a reference that keeps every row and cuts out what counts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cache_rows import bits, feed, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.cache.blocks import join_blocks
from polytoken.cache.layers import KVLayer, SlidingKVLayer
from polytoken.errors import CacheError

IDS = [(7 * i * i + 3) % 50 for i in range(700)]


def expected(start: int, stop: int, ids: list[int] = IDS) -> bytes:
    return bits(make_rows(ids, start, stop)) + bits(make_rows(ids, start, stop, salt=1, width=5))


def shown(pair: tuple[mx.array, mx.array] | None) -> bytes:
    assert pair is not None
    return bits(pair[0]) + bits(pair[1])


chunks = st.lists(st.one_of(st.just(1), st.integers(1, 12)), min_size=1, max_size=25)


@given(chunks=chunks, trims=st.lists(st.integers(0, 8), max_size=25))
@settings(max_examples=40, deadline=None)
def test_a_full_layer_shows_every_row_and_trims_exactly(chunks: list[int], trims: list[int]) -> None:
    layer, ids = KVLayer(), list(IDS)
    for turn, size in enumerate(chunks):
        stop = layer.offset + size
        assert shown(feed(layer, ids, stop)) == expected(0, stop, ids)
        if turn < len(trims) and trims[turn] <= layer.offset:
            layer.trim(trims[turn])
            ids[layer.offset] += 1000 + turn  # another token follows: rows of the old one must not come back
        if layer.offset:
            assert shown(layer.valid()) == expected(0, layer.offset, ids)
        assert layer.nbytes == layer.offset * 2 * (3 + 5) * 4 <= layer.held_bytes


@given(window=st.integers(1, 20), chunks=chunks, trims=st.lists(st.integers(0, 14), max_size=25), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_sliding_layer_keeps_the_tail_whatever_the_chunks(window, chunks, trims, data) -> None:
    """Invariant 3: the kept state is the last W - 1 rows, however the tokens came."""
    layer, ids = SlidingKVLayer(window), list(IDS)
    for turn, size in enumerate(chunks):
        before, stop = layer.offset, layer.offset + size
        assert shown(feed(layer, ids, stop)) == expected(max(0, before - (window - 1)), stop, ids)
        held = min(before, window - 1) + size
        if turn < len(trims):
            n = trims[turn]
            exact = n <= stop and (n <= size or before <= window - 1)
            assert layer.can_trim(n) == exact
            if exact:
                layer.trim(n)
                ids[layer.offset] += 1000 + turn
            else:
                with pytest.raises(CacheError):
                    layer.trim(n)
        if data.draw(st.booleans()):
            layer.settle()
            assert not layer.can_trim(1) or layer.offset < window
        assert layer.offset <= stop and held <= window - 1 + size
        tail = min(layer.offset, window - 1)
        assert layer.nbytes == tail * 2 * (3 + 5) * 4 or layer.held_bytes == 0
        if tail:
            assert shown(layer.valid()) == expected(layer.offset - tail, layer.offset, ids)
        else:
            assert layer.valid() is None


@pytest.mark.parametrize(
    "layer", [KVLayer(), SlidingKVLayer(6), SlidingKVLayer(40)], ids=["kv", "sliding6", "sliding40"]
)
@pytest.mark.parametrize("past", [0, 1, 5, 6, 30])
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("window", [None, 1, 4, 6])
def test_masks_equal_brute_force(layer, past: int, rows: int, window: int | None) -> None:
    fresh = KVLayer() if isinstance(layer, KVLayer) else SlidingKVLayer(layer.window)
    if past:
        feed(fresh, IDS, past)
    limit = window or fresh.window or 10**9
    for return_array in (False, True):
        mask = fresh.make_mask(rows, return_array=return_array, window_size=window)
        width = feed(copy_of(fresh), IDS, past + rows)[0].shape[2]
        first = past + rows - width
        brute = np.array(
            [[j <= i and j > i - limit for j in range(first, past + rows)] for i in range(past, past + rows)]
        )
        if mask is None:
            assert rows == 1
            seen = np.ones((1, width), bool)
        elif isinstance(mask, str):
            assert mask == "causal" and not return_array
            seen = np.tri(rows, width, width - rows, dtype=bool)
        else:
            seen = np.array(mask)
        assert (seen == brute).all()


def copy_of(layer):
    twin = KVLayer() if isinstance(layer, KVLayer) else SlidingKVLayer(layer.window)
    if layer.offset:
        twin.restore(layer.snapshot())
    return twin


def test_a_wider_window_than_kept_is_refused() -> None:
    with pytest.raises(CacheError, match="window of 9"):
        SlidingKVLayer(8).make_mask(3, window_size=9)


@given(window=st.integers(1, 12), grid=st.integers(1, 6), length=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_blocks_join_to_the_snapshot(window: int, grid: int, length: int) -> None:
    full, sliding = KVLayer(), SlidingKVLayer(window)
    kept: dict[str, list] = {"kv": [], "sliding_kv": []}
    for start in range(0, length, grid):
        stop = min(length, start + grid)
        for layer in (full, sliding):
            feed(layer, IDS, stop)
            kept[layer.kind].append(layer.block(start, stop))
    for layer in (full, sliding):
        joined = join_blocks(kept[layer.kind])
        assert joined is not None and joined.offset == length
        twin = KVLayer() if layer is full else SlidingKVLayer(window)
        twin.restore(joined)
        assert twin.offset == length
        assert (twin.valid() is None) == (layer.valid() is None)
        if layer.valid() is not None:
            assert shown(twin.valid()) == shown(layer.valid())
        assert sum(block.nbytes for block in kept[layer.kind]) <= length * 2 * 8 * 4
        # and both go on alike
        assert shown(feed(twin, IDS, length + 3)) == shown(feed(layer, IDS, length + 3))


def test_a_chain_with_a_hole_does_not_join() -> None:
    layer = SlidingKVLayer(4)
    feed(layer, IDS, 20)
    layer.settle()
    early, late = layer.block(0, 10), layer.block(10, 18)
    assert early.arrays == () and late.start == 17
    assert join_blocks([early, late]) is None
    assert join_blocks([early]) is None


@pytest.mark.parametrize("make", [KVLayer, lambda: SlidingKVLayer(8)])
def test_what_was_handed_out_never_changes(make) -> None:
    """E01 and E02 at the root: views and snapshots keep their bits while the layer goes on, back and on again."""
    layer = make()
    views = [feed(layer, IDS, 6), feed(layer, IDS, 9)]
    snapshot = layer.snapshot()
    before = [bits(array) for view in views for array in view], [bits(array) for array in snapshot.arrays()]
    layer.trim(2)
    feed(layer, [9] * 40, 30)
    for view in views:
        for array in view:
            array[..., :1, :] = 99  # a careless reader: its own object changes, nobody else's
    twin = make()
    twin.restore(snapshot)
    for array in twin.arrays():
        array[..., :1, :] = 77
    feed(twin, [5] * 40, 30)
    assert [bits(array) for array in snapshot.arrays()] == before[1]
    assert shown(layer.valid())[:20] and layer.offset == 30


@pytest.mark.parametrize("make", [KVLayer, lambda: SlidingKVLayer(8)])
def test_misfits_are_refused(make) -> None:
    layer = make()
    feed(layer, IDS, 3)
    row = mx.zeros((1, 2, 1, 3))
    for keys, values in [
        (mx.zeros((2, 2, 1, 3)), mx.zeros((2, 2, 1, 5))),
        (row, mx.zeros((1, 2, 2, 5))),
        (row.astype(mx.bfloat16), mx.zeros((1, 2, 1, 5))),
        (row, mx.zeros((1, 2, 1, 6))),
    ]:
        with pytest.raises(CacheError):
            layer.update_and_fetch(keys, values)
    with pytest.raises(CacheError):
        layer.block(0, 4)
    with pytest.raises(CacheError):
        layer.trim(4)
    with pytest.raises(CacheError):
        layer.trim(-1)
    with pytest.raises(CacheError):
        SlidingKVLayer(9).restore(layer.snapshot())
    assert layer.offset == 3 and shown(layer.valid()) == expected(0, 3)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_e17_dtype_and_bits_survive_a_snapshot(dtype) -> None:
    rows = mx.random.normal((1, 2, 9, 4), key=mx.random.key(1)).astype(dtype)
    layer, twin = KVLayer(), KVLayer()
    layer.update_and_fetch(rows, -rows)
    twin.restore(layer.snapshot())
    keys, values = twin.valid()
    assert keys.dtype == values.dtype == dtype
    assert mx.array_equal(keys, rows).item() and mx.array_equal(values, -rows).item()
