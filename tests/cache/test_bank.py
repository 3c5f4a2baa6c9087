"""The bank's promises one by one, and the public faults it must be immune to."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_rows import bits, cold_state, feed_state, make_layers, state_bits

from polytoken.cache.bank import Found, MissReason, PutOutcome, StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState
from polytoken.errors import CacheError

GRID = 4
WINDOWS = (None, 6, None)
ROW_BYTES = 2 * (3 + 5) * 4  # one layer's keys and values of one token
IDENTITY = StateIdentity(checkpoint="c0", lane="ar", grid=GRID)
LARGE = 1 << 30


def make_bank(limit: int = LARGE, grid: int = GRID) -> StateBank:
    return StateBank(limit, identity=StateIdentity(checkpoint="c0", lane="ar", grid=grid))


def tail_of(ids) -> Tail:
    return Tail(logits=mx.array([[float(sum(ids)), float(len(ids))]]), hidden=mx.full((1, 1, 3), float(len(ids))))


def serve(bank: StateBank, ids, *, need_tail: bool = True, windows=WINDOWS, store: bool = True) -> Found:
    """What a lane does with a prompt: find, restore, encode the rest on the grid, offer what was encoded.

    The state must equal a cold one bit for bit.
    """
    grid = bank.identity.grid
    found = bank.find(ids, need_tail=need_tail)
    state = make_layers(windows)
    if found.snapshot is not None:
        state.restore(found.snapshot)
    assert state.offset == found.length
    while state.offset < len(ids):
        feed_state(state, ids, min(len(ids), state.offset // grid * grid + grid))
        if store and state.offset < len(ids):
            bank.put(ids[: state.offset], state)
    if store:
        bank.put(ids, state, tail=tail_of(ids) if need_tail else None)
    assert state_bits(state) == state_bits(cold_state(ids, windows, grid=grid))
    assert (found.miss is None) == (found.length == len(ids))
    if need_tail:
        assert (found.tail is not None) == (found.length == len(ids))
        if found.tail is not None:
            assert bits(found.tail.logits) == bits(tail_of(ids).logits)
            assert bits(found.tail.hidden) == bits(tail_of(ids).hidden)
    return found


def reason(found: Found) -> tuple[int, str | None, int | None]:
    miss = found.miss
    return found.length, miss and str(miss.reason), miss and miss.position


def test_every_miss_has_its_reason() -> None:
    bank = make_bank()
    first = list(range(1, 14))  # 13 tokens: grid points 4, 8, 12
    assert reason(serve(bank, first)) == (0, "cold", 0)
    assert reason(serve(bank, first)) == (13, None, None)
    assert reason(serve(bank, [99, *first])) == (0, "new_prompt", 0)
    assert reason(serve(bank, [*first[:6], 77, 78, 79], store=False)) == (4, "prefix_divergence", 6)
    assert reason(serve(bank, [*first[:8], 77], store=False)) == (8, "prefix_divergence", 8)
    assert reason(serve(bank, [*first, 50, 51], store=False)) == (12, "off_grid", 13)
    assert reason(serve(bank, first[:6], store=False)) == (4, "off_grid", 6)
    assert reason(serve(bank, first[:3], store=False)) == (0, "off_grid", 3)
    assert reason(serve(bank, first[:8], store=False)) == (4, "no_tail", 8)
    assert reason(serve(bank, first[:8], need_tail=False, store=False)) == (8, None, None)
    eight = [21, 22, 23, 24, 25, 26, 27, 28]
    serve(bank, eight, need_tail=False)
    assert reason(serve(bank, [*eight, 1, 2], store=False)) == (8, "new_suffix", 8)
    assert str(bank.find([*first[:6], 77]).miss) == "prefix_divergence at token 6"
    assert reason(bank.find([])) == (0, None, None)


def test_a_bank_of_zero_bytes_is_off() -> None:
    bank = make_bank(0)
    ids = [1, 2, 3, 4, 5]
    assert reason(serve(bank, ids)) == (0, "bank_off", 0)
    assert bank.put(ids, cold_state(ids, WINDOWS, grid=GRID)) is PutOutcome.BANK_OFF
    assert len(bank) == bank.nbytes == 0 and bank.statistics().misses == {"bank_off": 1}


def test_evicted_and_refused_runs_are_named() -> None:
    prompt = 4 * (3 * ROW_BYTES) + tail_of([1]).nbytes  # one prompt of four tokens
    bank = make_bank(prompt + 4 * 3 * ROW_BYTES)
    one, two = [1, 2, 3, 4], [5, 6, 7, 8]
    serve(bank, one)
    serve(bank, two)
    assert bank.nbytes == prompt and bank.statistics().evictions == 1
    assert reason(serve(bank, one, store=False)) == (0, "evicted", 0)
    assert reason(serve(bank, two, store=False)) == (4, None, None)
    long = [*two, *range(100, 112)]
    serve(bank, long)
    assert bank.statistics().refusals >= 1
    found = bank.find(long)
    assert found.miss is not None and found.miss.reason is MissReason.OVERSIZE
    bank.clear()
    assert reason(bank.find(one)) == (0, "cold", 0)


def test_counters_tell_the_story() -> None:
    bank = make_bank()
    ids = list(range(10))
    serve(bank, ids)
    serve(bank, ids)
    serve(bank, [*ids[:8], 50])
    got = bank.statistics()
    assert (got.hits, got.full_hits, got.reused_tokens) == (2, 1, 18)
    assert got.misses == {"cold": 1} and got.partial == {"prefix_divergence": 1}
    assert got.puts == 4 and got.entries == len(bank) == 4  # 4, 8, whole, the other whole
    assert got.nbytes == sum(entry.nbytes for entry in bank.entries()) == bank.nbytes


def test_a_common_beginning_is_stored_once() -> None:
    bank = make_bank()
    system = list(range(100, 140))
    tails = 0
    for user in range(5):
        serve(bank, [*system, user, user])
        tails += tail_of([1]).nbytes
    distinct = len(system) + 5 * 2
    assert bank.nbytes <= distinct * 3 * ROW_BYTES + tails


def test_what_is_present_stays_as_old_as_it_is() -> None:
    bank = make_bank()
    one, two = [1, 2, 3], [4, 5, 6]
    serve(bank, one)
    serve(bank, two)
    assert bank.put(one, cold_state(one, WINDOWS, grid=GRID), tail=tail_of(one)) is PutOutcome.PRESENT
    assert [entry.ids for entry in bank.entries()] == [(1, 2, 3), (4, 5, 6)]
    bank.find(one)
    assert [entry.ids for entry in bank.entries()] == [(4, 5, 6), (1, 2, 3)]


def test_a_whole_prompt_on_a_grid_point_serves_itself_alone() -> None:
    """Its last token may have been encoded alone; a longer prompt must not build on that."""
    bank = make_bank()
    ids = list(range(1, 9))
    serve(bank, ids)
    assert reason(serve(bank, ids, store=False)) == (8, None, None)
    assert reason(serve(bank, [*ids, 9], store=False)) == (4, "off_grid", 8)


def test_a_put_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(CacheError):
        make_bank().put([1, 2, 3], cold_state([1, 2], WINDOWS, grid=GRID))
    with pytest.raises(CacheError):
        make_bank().put([], DecodingState([]))
    bank = make_bank()
    serve(bank, [1, 2, 3, 4, 5])
    with pytest.raises(CacheError, match="layers differ"):
        bank.put([1, 2, 3, 4, 9], cold_state([1, 2, 3, 4, 9], (None, None, None), grid=GRID))


def test_a_state_offered_only_at_its_end_is_restorable_there() -> None:
    """Sliding rows of the middle are gone by then: no restore in the middle, an exact one at the end."""
    bank = make_bank()
    ids = list(range(1, 31))
    state = cold_state(ids, WINDOWS, grid=30)
    state.settle()
    assert bank.put(ids, state, tail=tail_of(ids)) is PutOutcome.STORED
    found = bank.find(ids)
    twin = make_layers(WINDOWS)
    twin.restore(found.snapshot)
    assert found.length == 30 and state_bits(twin) == state_bits(state)
    middle = bank.find([*ids[:10], 99])
    assert reason(middle) == (0, "no_coverage", 10)
    # The middle is offered later by somebody who has it, and restorable from then on.
    serve(bank, [*ids[:10], 99])
    assert reason(serve(bank, [*ids[:10], 98], store=False)) == (8, "prefix_divergence", 10)


def test_making_room_never_drops_what_the_new_run_hangs_on() -> None:
    bank = make_bank(12 * 3 * ROW_BYTES)
    ids = list(range(1, 9))
    state = cold_state(ids[:4], WINDOWS, grid=GRID)
    bank.put(ids[:4], state)
    others = [50, 51, 52, 53, 54, 55, 56]
    bank.put(others, cold_state(others, WINDOWS, grid=GRID))  # now the first block is the oldest leaf
    feed_state(state, ids, 8)
    bank.put(ids, state)
    assert [entry.ids for entry in bank.entries()] == [tuple(others[:4]), tuple(ids), tuple(ids[:4])]
    assert bank.find([*ids, 1]).length == 8


def test_pruning_stops_at_what_the_new_run_hangs_on() -> None:
    """The common blocks are no restore points of their own, and all that made them worth keeping is evicted."""
    bank = make_bank(32 * 3 * ROW_BYTES)
    one = list(range(1, 31))
    two = [*one[:8], *range(101, 123)]
    for ids in (one, two):
        state = cold_state(ids, WINDOWS, grid=30)
        state.settle()
        assert bank.put(ids, state) is PutOutcome.STORED
    assert bank.find(two, need_tail=False).length == 30
    assert bank.find(one, need_tail=False).length == 0
    assert bank.nbytes == sum(entry.nbytes for entry in bank.entries())
    assert {entry.ids[:9] for entry in bank.entries() if len(entry.ids) > 8} == {tuple(two[:9])}


def test_rows_nobody_can_reach_are_dropped() -> None:
    """E06: what served only an evicted entry goes with it."""
    ids = list(range(1, 31))
    state = cold_state(ids, WINDOWS, grid=30)
    state.settle()
    bank = make_bank(40 * 3 * ROW_BYTES)
    bank.put(ids, state, tail=tail_of(ids))
    assert len(bank) == 8 and sum(entry.restorable for entry in bank.entries()) <= 2
    serve(bank, list(range(200, 235)))
    assert all(entry.restorable for entry in bank.entries())
    assert all(entry.ids[0] == 200 for entry in bank.entries())


def test_e01_snapshots_keep_their_bits_while_owner_and_forks_go_on() -> None:
    bank = make_bank()
    ids = list(range(1, 23))
    owner = cold_state(ids, WINDOWS, grid=GRID)
    bank.put(ids, owner, tail=tail_of(ids))
    found = bank.find(ids)
    digest, tail_bits = found.snapshot.digest(), bits(found.tail.logits)
    forks = [make_layers(WINDOWS), make_layers(WINDOWS)]
    for fork in forks:
        fork.restore(found.snapshot)
    streams = [[*ids, *range(100, 200)], [*ids, *range(300, 400)], [*ids, *range(500, 600)]]
    for step in range(100):
        for state, stream in zip([owner, *forks], streams, strict=True):
            feed_state(state, stream, len(ids) + 1 + step)
    found.tail.logits[0, 0] = 1e9  # a careless borrower
    again = bank.find(ids)
    assert again.snapshot.digest() == found.snapshot.digest() == digest
    assert bits(again.tail.logits) == tail_bits
    for state, stream in zip([owner, *forks], streams, strict=True):
        assert state_bits(state) == state_bits(cold_state(stream, WINDOWS, grid=GRID))


def test_e02_a_partial_match_never_shows_the_former_owner() -> None:
    bank = make_bank()
    shared = list(range(50))
    for client in range(8):
        serve(bank, [*shared, *([1000 + client] * 7)])
    for client in range(8):
        found = serve(bank, [*shared, *([1000 + client] * 3), 5], store=False)
        assert found.length == 52


@pytest.mark.parametrize("windows", [(None, None), (6, 6), (None, 6)], ids=["full", "sliding", "mixed"])
def test_e04_an_exact_hit_runs_nothing_twice(windows) -> None:
    bank = make_bank()
    for length in (3, 4, 11, 12):
        ids = list(range(1, length + 1))
        for turn in range(3):
            found = serve(bank, ids, windows=windows)
            assert turn == 0 or (found.length == length and found.tail is not None and found.snapshot.offset == length)


def test_e06_turns_of_a_chat_hit_and_stay_bounded() -> None:
    limit = 120 * 3 * ROW_BYTES
    bank = make_bank(limit)
    history: list[int] = []
    for turn in range(20):
        history += [turn] * 5
        found = serve(bank, history)
        assert found.length >= len(history) - 5 - GRID or turn == 0
        assert bank.nbytes <= limit
        assert all(bank.find(entry.ids, need_tail=entry.whole_prompt).length for entry in bank.entries())


def test_e18_forks_share_storage() -> None:
    bank = make_bank()
    session = [i % 40 for i in range(160)]
    serve(bank, session)
    alone = bank.nbytes
    for fork in range(20):
        serve(bank, [*session, 500 + fork])
    per_fork = tail_of([1]).nbytes + 3 * ROW_BYTES
    last_block_for_others = GRID * 3 * ROW_BYTES  # the session's own end serves the session alone
    assert bank.nbytes == alone + last_block_for_others + 20 * per_fork


def test_e19_states_of_different_identities_never_meet() -> None:
    """Also E08: whatever a state's bits depend on is part of the identity."""
    bank = make_bank()
    ids = list(range(1, 11))
    serve(bank, ids)
    for other in (
        StateIdentity(checkpoint="c0+adapter", lane="ar", grid=GRID),
        StateIdentity(checkpoint="c0", lane="mtp", grid=GRID),
        StateIdentity(checkpoint="c0", lane="ar", grid=GRID, numerics="bf16"),
        StateIdentity(checkpoint="c0", lane="ar", grid=GRID, template_hash="t"),
        StateIdentity(checkpoint="c0", lane="ar", grid=2),
    ):
        found = bank.find(ids, identity=other)
        assert reason(found) == (0, "identity_mismatch", 0)
        assert found.miss.detail in {"checkpoint", "lane", "numerics", "template_hash", "grid"}
        bank.put(ids, cold_state(ids, WINDOWS, grid=GRID), tail=tail_of(ids), identity=other)
        assert bank.find(ids, identity=other).length == 10
        assert all(entry.ids == tuple(ids[: len(entry.ids)]) for entry in bank.entries(other))
    assert bank.find(ids).length == 10 and bank.clear() > 0
    assert len(bank) == bank.nbytes == 0


def test_e19_an_oversize_entry_evicts_nobody() -> None:
    bank = make_bank(12 * 3 * ROW_BYTES)
    small = [1, 2, 3]
    serve(bank, small)
    big = list(range(100, 120))
    assert bank.put(big, cold_state(big, WINDOWS, grid=GRID)) is PutOutcome.OVERSIZE
    assert reason(serve(bank, small, store=False)) == (3, None, None)
    assert bank.statistics().evictions == 0 and bank.statistics().refusals == 1


def test_equal_hashes_do_not_make_equal_prompts() -> None:
    """Ids are compared in full: -1 and -2 have one hash in Python, and 64-bit ids keep every bit."""
    assert hash(-1) == hash(-2)
    bank = make_bank()
    serve(bank, [-1] * 9)
    assert bank.find([-2] * 9).length == 0
    serve(bank, [2**40 + 1] * 9)
    assert bank.find([1] * 9).length == 0
