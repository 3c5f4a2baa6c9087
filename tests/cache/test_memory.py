"""Bytes that are really in use, as MLX counts them."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.cache.layers import CacheLayer, KVLayer, SlidingKVLayer
from polytoken.cache.rows import STEP, copy_array
from polytoken.cache.state import DecodingState

PAGE = 16384  # MLX rounds a larger allocation up to this
HEADS, WIDTH = 1, 32  # one head: a slice of rows is contiguous, the case where a lazy copy would share the buffer


def rows(n: int) -> mx.array:
    return mx.random.normal((1, HEADS, n, WIDTH))


def append(layers: list[CacheLayer], n: int) -> None:
    """As a network does: the rows are shown, used, and let go."""
    fresh = rows(n)
    shown = [layer.update_and_fetch(fresh, fresh) for layer in layers]
    mx.eval([keys[:, :, -1] + values[:, :, 0] for keys, values in shown])


@pytest.fixture
def in_use():
    """Bytes in use beyond what was in use at the start; no cached buffers, which may be larger than what they serve."""
    limit = mx.set_cache_limit(0)
    gc.collect()
    base = mx.get_active_memory()

    def read() -> int:
        gc.collect()
        return mx.get_active_memory() - base

    yield read
    mx.set_cache_limit(limit)


def address(array: mx.array) -> int:
    return np.array(array, copy=False).__array_interface__["data"][0]


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="looks at host addresses")
@pytest.mark.parametrize("make", [KVLayer, lambda: SlidingKVLayer(64)])
def test_an_append_reuses_the_buffer(make) -> None:
    """No O(P) copy per token: MLX donates the buffer to the write, so that it stays where it is."""
    layer = make()
    append([layer], 140)
    before = [address(array) for array in layer.arrays()]
    for _ in range(50):
        append([layer], 1)
    layer.trim(1)
    append([layer], 5)
    block = layer.block(10, layer.offset)
    mx.eval(block.arrays)  # a stored copy shares nothing with the buffer, however close their sizes are
    append([layer], 1)
    assert [address(array) for array in layer.arrays()] == before


@pytest.mark.parametrize("make", [KVLayer, lambda: SlidingKVLayer(100)])
def test_a_buffer_somebody_holds_is_left_alone(make) -> None:
    layer = make()
    append([layer], 40)
    held = layer.valid()
    mx.eval(held)
    before = np.array(held[0])
    append([layer], 1)
    assert (np.array(held[0]) == before).all()


def test_j01_a_small_state_does_not_keep_a_large_prefill(in_use) -> None:
    window = 64
    bank = StateBank(1 << 30, identity=StateIdentity(checkpoint="c", lane="ar", grid=8192))
    state = DecodingState([SlidingKVLayer(window)])
    append(state.layers, 8192)
    large = in_use()
    assert large >= 8192 * 2 * WIDTH * 4
    snapshot = state.snapshot()
    bank.put(list(range(8192)), state)
    state.settle()
    mx.eval(state.arrays())
    accounted = snapshot.nbytes + bank.nbytes + state.held_bytes
    assert in_use() <= accounted + 6 * PAGE
    assert state.held_bytes <= (window + 2 * STEP) * 2 * WIDTH * 4 and bank.nbytes == (window - 1) * 2 * WIDTH * 4
    del state
    assert in_use() <= snapshot.nbytes + bank.nbytes + 4 * PAGE
    restored = DecodingState([SlidingKVLayer(window)])
    restored.restore(snapshot)
    del snapshot
    bank.clear()
    assert in_use() <= restored.held_bytes + 2 * PAGE


def test_j01_decoding_gives_the_prefill_buffer_back(in_use) -> None:
    layer = SlidingKVLayer(64)
    append([layer], 4096)
    append([layer], 1)
    assert in_use() <= layer.held_bytes + 2 * PAGE
    assert layer.held_bytes <= (64 + 2 * STEP) * 2 * WIDTH * 4


def test_j01_a_refilled_layer_does_not_adopt_the_callers_array(in_use) -> None:
    layer = KVLayer()
    append([layer], 5)
    layer.trim(5)
    wide = rows(8192)
    keys, values = layer.update_and_fetch(wide[:, :, :STEP], wide[:, :, :STEP])
    mx.eval(keys, values)
    del wide, keys, values
    assert in_use() <= layer.held_bytes + 2 * PAGE


def test_j01_blocks_of_the_bank_are_compact(in_use) -> None:
    bank = StateBank(1 << 30, identity=StateIdentity(checkpoint="c", lane="ar", grid=8))
    state = DecodingState([KVLayer(), SlidingKVLayer(6)])
    append(state.layers, 2000)
    bank.put(list(range(2000)), state, tail=Tail(mx.zeros((4000, 50))[:1]))
    del state
    small_arrays = 4 * len(bank) * 256  # an allocation is rounded up a little
    assert bank.nbytes <= in_use() <= bank.nbytes + small_arrays


def test_j02_memory_is_flat_over_many_single_tokens(in_use) -> None:
    full, sliding = KVLayer(), SlidingKVLayer(32)
    sampled = []
    for step in range(2000):
        append([full, sliding], 1)
        if step % 250 == 249:
            sampled.append(in_use() - full.held_bytes - sliding.held_bytes)
            assert sliding.held_bytes <= 2 * STEP * 2 * WIDTH * 4
            assert full.held_bytes <= (full.offset * 9 // 8 + STEP) * 2 * WIDTH * 4
    assert max(sampled) <= 4 * PAGE


def test_j02_a_lookup_pins_no_graph(in_use) -> None:
    bank = StateBank(1 << 30, identity=StateIdentity(checkpoint="c", lane="ar", grid=16))
    ids = list(range(100))
    state = DecodingState([KVLayer(), SlidingKVLayer(20)])
    append(state.layers, 100)
    bank.put(ids, state)
    del state
    for _ in range(50):
        borrower = DecodingState([KVLayer(), SlidingKVLayer(20)])
        borrower.restore(bank.find(ids, need_tail=False).snapshot)
        append(borrower.layers, 3)
    assert in_use() <= bank.nbytes + borrower.held_bytes + 4 * len(bank) * 256 + 4 * PAGE


def test_j04_a_long_run_stays_within_the_limit() -> None:
    limit = 200_000
    bank = StateBank(limit, identity=StateIdentity(checkpoint="c", lane="ar", grid=32))
    for prompt in range(6):
        state = DecodingState([KVLayer(), SlidingKVLayer(40)])
        ids = [prompt] * 800
        while state.offset < len(ids):
            append(state.layers, 32)
            bank.put(ids[: state.offset], state)
            assert sum(array.nbytes for node in bank._tree for array in node.arrays()) == bank.nbytes <= limit
    assert bank.statistics().evictions and bank.statistics().refusals


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32])
@pytest.mark.parametrize("shape", [(16, 64), (2, 3)])
def test_a_copy_has_memory_of_its_own(dtype, shape, in_use) -> None:
    source = mx.arange(100_000).astype(dtype)
    part = source[: shape[0] * shape[1]].reshape(shape)
    copy = copy_array(part)
    mx.eval(copy)
    assert mx.array_equal(copy, part).item()
    del source, part
    assert in_use() <= copy.nbytes + 256
