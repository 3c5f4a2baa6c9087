"""Bytes really in use while a hybrid decodes, as MLX counts them."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hybrid_models import run, some_ids, tiny

from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.rows import STEP

PAGE = 16384  # MLX rounds a larger allocation up to this, and lets a small copy share a buffer that is this much larger


@pytest.fixture
def in_use():
    """Bytes in use beyond what was in use at the start."""
    gc.collect()
    base = mx.get_active_memory()

    def read() -> int:
        gc.collect()
        return mx.get_active_memory() - base

    return read


def test_j01_the_state_of_a_long_prefill_pins_none_of_it(in_use, device: str) -> None:
    if device != "cpu":
        pytest.skip("bytes are compared exactly, and a GPU's libraries keep workspace of their own")
    model = tiny("qwen3_5")
    run(model, model.make_cache(), some_ids(3))
    gc.collect()
    start = in_use()
    state = model.make_cache()
    run(model, state, some_ids(1024), keep=0)
    rows_of_a_window = 1024 * 256 * 4  # what one conv tail would pin
    recurrent = [layer for layer in state.layers if isinstance(layer, RecurrentLayer)]
    arrays = len(state.arrays())
    assert in_use() - start <= state.held_bytes + arrays * PAGE < state.held_bytes + rows_of_a_window
    snapshot = state.snapshot()
    del state, recurrent
    assert in_use() - start <= snapshot.nbytes + arrays * 1024
    with (other := model.make_cache()).capturing():
        other.restore(snapshot)
        run(model, other, some_ids(512), keep=0)
    other.commit(500, 512)
    mx.eval(other.arrays())
    del snapshot
    assert in_use() - start <= other.held_bytes + arrays * PAGE


@pytest.mark.parametrize("count", [480, pytest.param(2000, marks=pytest.mark.slow)])
def test_j02_memory_is_flat_over_many_steps(in_use, count: int) -> None:
    """Many tokens, by single steps and by windows that are taken back in part; only keys and values may grow."""
    model = tiny("qwen3_5")
    head = model.draft_head
    assert head is not None
    state, history = model.make_cache(), head.make_cache()
    run(model, state, some_ids(5))
    gc.collect()
    sampled = []
    token = mx.array([[1]])
    while state.offset < count:
        hidden = model.forward(token, state)
        head.append(head.take(hidden), token, history)
        with state.capturing():
            window = mx.broadcast_to(token, (1, 4))
            hidden = model.forward(window, state)
        state.commit(1 + state.offset % 4, 4)
        token = model.project(hidden.post[:, -1:]).argmax(axis=-1)
        mx.eval(token, history.arrays())  # the trunk's state stays lazy until the next step wants it
        if state.offset >= count // 8 * (len(sampled) + 1):
            mx.eval(state.arrays())
            sampled.append(in_use() - state.held_bytes - history.held_bytes)
    growing = [layer for layer in state.layers if not isinstance(layer, RecurrentLayer)]
    assert growing[0].held_bytes <= (state.offset * 9 // 8 + STEP) * 2 * 2 * 32 * 4
    assert len(sampled) == 8 and max(sampled[1:]) - min(sampled[1:]) <= 2 * PAGE
    recurrent = [layer for layer in state.layers if isinstance(layer, RecurrentLayer)]
    assert len({layer.held_bytes for layer in recurrent}) == 1 and not any(layer.captured for layer in recurrent)


def test_what_is_kept_for_a_window_is_counted_and_given_back(in_use) -> None:
    model = tiny("qwen3_5")
    state = model.make_cache()
    run(model, state, some_ids(300))
    plain, used = state.held_bytes, in_use()
    with state.capturing():
        run(model, state, some_ids(8))
    kept = state.held_bytes - plain
    assert kept > 0 and in_use() - used <= kept + 12 * PAGE
    state.commit(8, 8)
    assert state.held_bytes == plain and in_use() - used <= 4 * PAGE
