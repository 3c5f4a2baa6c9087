"""Real attention over our layers equals attention over mlx-lm's own caches."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_networks import VOCAB, build_gemma3, build_llama, make_state, run_chunks
from cache_rows import bits, state_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity

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
@settings(max_examples=6, deadline=None)
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


def encode(model, state, ids: list[int], start: int, stop: int) -> mx.array:
    """Logits [1, V] of the last row of ids[start:stop], with everything evaluated."""
    logits = model(mx.array([ids[start:stop]]), cache=state.layers)[:, -1]
    mx.eval(logits, state.arrays())
    return logits


@pytest.mark.parametrize("name", NETWORKS)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=4),
    limit=st.sampled_from([0, 3_000, 20_000, 10**7]),
)
@settings(max_examples=6, deadline=None)
def test_a_warm_prompt_gives_the_bits_of_a_cold_one(name: str, prompts: list[list[int]], limit: int) -> None:
    """Invariant 2: bank on, off, any limit, any earlier traffic; logits and states bit for bit."""
    model, grid = NETWORKS[name], 7
    bank = StateBank(limit, identity=StateIdentity(checkpoint=name, lane="ar", grid=grid))
    for ids in [*prompts, *prompts]:
        found = bank.find(ids)
        state, cold = make_state(model), make_state(model)
        logits = None if found.tail is None else found.tail.logits
        if found.snapshot is not None:
            state.restore(found.snapshot)
        for start in range(0, len(ids), grid):
            stop = min(len(ids), start + grid)
            reference = encode(model, cold, ids, start, stop)
            if stop <= found.length:
                continue
            logits = encode(model, state, ids, start, stop)
            bank.put(ids[:stop], state, tail=Tail(logits) if stop == len(ids) else None)
        assert logits is not None and bits(logits) == bits(reference)
        assert state_bits(state) == state_bits(cold)
        assert bank.nbytes <= limit
        for step in range(3):  # and they go on alike, the stored state untouched
            row, twin = encode(model, state, [step], 0, 1), encode(model, cold, [step], 0, 1)
            assert bits(row) == bits(twin)
