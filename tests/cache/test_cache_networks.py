"""Real attention over our layers equals attention over mlx-lm's own caches."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_networks import VOCAB, build_gemma3, build_llama, make_state, run_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

NETWORKS = {
    "llama": build_llama(),
    "llama_sliding": build_llama(5),
    "gemma3_small_window": build_gemma3(4),
    "gemma3_wide_window": build_gemma3(40),
}


@pytest.mark.parametrize("name", NETWORKS)
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=48), chunks=st.lists(st.integers(1, 13), max_size=12)
)
@settings(max_examples=12, deadline=None)
def test_attention_equals_the_networks_own_caches(name: str, ids: list[int], chunks: list[int]) -> None:
    model = NETWORKS[name]
    state = make_state(model)
    ours = run_chunks(model, state.layers, ids, chunks)
    theirs = run_chunks(model, model.make_cache(), ids, chunks)
    whole = model(mx.array([ids]))[0]
    assert state.offset == len(ids)
    assert float(mx.abs(ours - theirs).max()) <= 1e-5
    assert float(mx.abs(ours - whole).max()) <= 1e-5


@pytest.mark.parametrize("name", NETWORKS)
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=12, max_size=40), data=st.data())
@settings(max_examples=10, deadline=None)
def test_a_verify_window_taken_back_leaves_no_trace(name: str, ids: list[int], data) -> None:
    """Encode a prompt, then windows of guesses of which only a prefix is kept; equal to never having guessed."""
    model = NETWORKS[name]
    state, plain = make_state(model), make_state(model)
    at = data.draw(st.integers(1, 10))
    run_chunks(model, state.layers, ids[:at], [])
    run_chunks(model, plain.layers, ids[:at], [])
    while at < len(ids):
        width = data.draw(st.integers(1, 5))
        good = data.draw(st.integers(1, width))
        window = (ids[at : at + good] + [0] * width)[:width]
        verified = run_chunks(model, state.layers, window, [])
        kept = min(good, len(ids) - at)
        state.trim(width - kept)
        single = run_chunks(model, plain.layers, ids[at : at + kept], [])
        assert float(mx.abs(verified[:kept] - single).max()) <= 1e-5
        at += kept
        assert state.offset == plain.offset == at
