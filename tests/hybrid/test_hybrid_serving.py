"""Hybrids through what exists: the state bank, the AR lane, and the whole engine."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from hybrid_models import FAMILIES, bits, load_model, run, some_ids, state_bits, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import polytoken
from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.lanes.prefill import Prefill
from polytoken.testkit.tiny import write_checkpoint

GRID = 7


def bank_of(limit: int) -> StateBank:
    return StateBank(limit, identity=StateIdentity(checkpoint="tiny", lane="ar", grid=GRID))


def prefill(model, bank: StateBank, ids: tuple[int, ...]) -> Prefill:
    filling = Prefill(model, bank, ids, chunk=GRID)
    while not filling.step():
        pass
    return filling


@pytest.mark.parametrize("family", FAMILIES)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=4),
    limit=st.sampled_from([0, 60_000, 200_000, 10**8]),
)
@settings(max_examples=5, deadline=None)
def test_a_warm_prompt_gives_the_bits_of_a_cold_one(family, prompts: list[list[int]], limit: int) -> None:
    model, bank = tiny(family), bank_of(limit)
    for ids in [*prompts, *prompts]:
        warm, cold = prefill(model, bank, tuple(ids)), prefill(model, bank_of(0), tuple(ids))
        assert cold.cached_tokens == 0 and bits(warm.logits) == bits(cold.logits)
        assert state_bits(warm.cache) == state_bits(cold.cache)
        assert bank.nbytes <= limit
        for token in (3, 4):  # and they go on alike, taken back in part, the stored state untouched
            with warm.cache.capturing():
                run(model, warm.cache, [token, 5, 6])
            warm.cache.commit(1, 3)
            run(model, cold.cache, [token])
            assert state_bits(warm.cache) == state_bits(cold.cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_found_where_a_whole_state_was_left(family) -> None:
    model, bank = tiny(family), bank_of(10**8)
    ids = tuple(some_ids(3 * GRID + 4))
    prefill(model, bank, ids)
    assert prefill(model, bank, ids).cached_tokens == len(ids)
    for common in (GRID, 2 * GRID + 3, 3 * GRID):
        other = (*ids[:common], 279, 278, 277)
        assert prefill(model, bank, other).cached_tokens == common // GRID * GRID
    # A state offered only at its end has no way back to the grid points before it.
    late, state = bank_of(10**8), model.make_cache()
    hidden = run(model, state, ids)
    late.put(ids, state, tail=Tail(model.project(hidden.post[:, -1])))
    assert late.find(ids).length == len(ids) and late.find((*ids[:GRID], 1, 2)).length == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_serves_hybrids(family, tmp_path: Path) -> None:
    """Greedy ids of the engine, cold and from the bank, are those of a plain loop over the model."""
    path = write_checkpoint(tmp_path, family, seed=5).path
    prompt = some_ids(20, seed=2)
    with polytoken.load(path, device="cpu", prefill_chunk_size=GRID) as engine:
        results = [
            polytoken.generate(engine, token_ids=prompt, max_new_tokens=12, ignore_eos=True, request_id=name)
            for name in ("cold", "warm")
        ]
    model = load_model(path)
    state = model.make_cache()
    logits, expected = model.project(run(model, state, prompt).post[:, -1]), []
    for _ in range(12):
        expected.append(int(logits.argmax().item()))
        logits = model.project(run(model, state, expected[-1:]).post[:, -1])
    assert [list(result.token_ids) for result in results] == [expected, expected]
    mx.synchronize()
