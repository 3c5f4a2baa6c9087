"""What is kept for whom: budgets, eviction order, protection, clearing, branches, thinning, and reasons of misses."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_talks import bits, state_bits

from polytoken.cache import branches
from polytoken.cache.anchors import choose_anchors
from polytoken.cache.bank import Found, PutOutcome, StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.cache.layers import KVLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.sessions import Committed, SessionBook
from polytoken.cache.state import DecodingState
from polytoken.errors import CacheError, UsageError

GRID = 4
ROW = 64  # bytes of one token's keys and values
STATE = 400  # bytes of the recurrent state
LARGE = 1 << 30


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def identity(**changes) -> StateIdentity:
    return StateIdentity(**{"checkpoint": "c", "lane": "ar", "grid": GRID, "free": True, **changes})


def make_bank(limit: int = LARGE, *, clock: Clock | None = None, **options) -> StateBank:
    book = SessionBook(clock=clock or Clock(), protect_seconds=600)
    return StateBank(limit, identity=identity(), sessions=book, **options)


def encode(state: DecodingState, ids, stop: int) -> None:
    """Rows that are their tokens and positions, and a recurrent state that is a hash of all of them."""
    for layer in state.layers:
        start = layer.offset
        if isinstance(layer, RecurrentLayer):
            layer.advance(stop - start, (mx.full((1, 100), float(hash(tuple(ids[:stop])) % 65521)),))
        else:
            rows = mx.array([[[[float(ids[i]), float(i)] + [0.0] * 6 for i in range(start, stop)]]])
            layer.update_and_fetch(rows, rows + 0.5)
    mx.eval(state.arrays())


def fresh(hybrid: bool = True) -> DecodingState:
    return DecodingState([KVLayer(), RecurrentLayer()] if hybrid else [KVLayer()])


def tail_of(ids) -> Tail:
    return Tail(mx.array([[float(len(ids)), float(sum(ids))]]))


def serve(bank: StateBank, ids, *, session: str | None = None, hybrid: bool = True, chunks: bool = True) -> Found:
    """What a lane does: find, go on, offer every chunk and the whole. The state must be that of a cold run."""
    found = bank.find(ids, session=session)
    state = fresh(hybrid) if found.live is None else found.live.state
    if found.snapshot is not None:
        state.restore(found.snapshot)
    assert state.offset == found.length
    while state.offset < len(ids):
        encode(state, ids, min(len(ids), state.offset // GRID * GRID + GRID))
        if chunks and state.offset < len(ids):
            bank.put(ids[: state.offset], state, session=session)
    bank.put(ids, state, tail=tail_of(ids), session=session)
    cold = fresh(hybrid)
    encode(cold, ids, len(ids))
    assert state_bits(state) == state_bits(cold)
    if session is not None:
        bank.commit(session, ids)
    held = sum(array.nbytes for node in bank._tree for array in node.arrays())
    assert bank.nbytes == held + bank._live.nbytes <= bank.limit_bytes
    return found


def told(found: Found) -> tuple[int, str | None, int | None]:
    return found.length, found.miss and str(found.miss.reason), found.miss and found.miss.position


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_prompt_that_goes_on_is_restored_to_the_token() -> None:
    """E04, E06: turns end between grid points, and the next turn computes its own tokens alone."""
    bank = make_bank()
    text = run(1, 7)
    assert told(serve(bank, text)) == (0, "cold", 0)
    for turn in range(6):
        before, text = text, [*text, *run(100 * turn, 3 + turn)]
        assert told(serve(bank, text)) == (len(before), "new_suffix", len(before))
    assert told(serve(bank, text)) == (len(text), None, None)


def test_every_miss_has_a_reason_and_the_place_where_histories_part() -> None:
    bank = make_bank()
    text = run(1, 14)
    serve(bank, text)  # restore points at 4, 8, 12 and 14
    assert told(bank.find([*text[:10], 99, 98])) == (8, "prefix_divergence", 10)
    assert told(bank.find([*text, 99])) == (14, "new_suffix", 14)
    assert told(bank.find(text[:11])) == (8, "no_coverage", 11)
    assert told(bank.find(text[:8])) == (4, "no_tail", 8)
    assert told(bank.find([50, 51])) == (0, "new_prompt", 0)
    plain = StateBank(LARGE, identity=identity())
    serve(plain, text, hybrid=False)
    assert told(plain.find([*text[:10], 99, 98])) == (10, "prefix_divergence", 10)
    assert told(plain.find(text[:11])) == (10, "no_tail", 11)
    assert told(plain.find(text)) == (14, None, None)


def test_a_run_that_goes_on_takes_the_place_of_the_shorter_one() -> None:
    """No restore point is lost by it, and no row is stored twice."""
    bank = make_bank()
    serve(bank, run(1, 5), chunks=False)
    serve(bank, run(1, 6), chunks=False)
    serve(bank, run(1, 7), chunks=False)
    (entry,) = [entry for entry in bank.entries() if len(entry.ids) > 4]
    assert len(bank) == 2 and entry.marks == (5, 6, 7) and bank.statistics().superseded == 2
    assert bank.nbytes == 7 * ROW + 3 * (STATE + 8)
    for length in (5, 6, 7):
        assert bank.find(run(1, length)).length == length


def test_the_states_of_one_epoch_only() -> None:
    """Rows, recurrent states and histories that stand at different tokens are never stored together."""
    bank, state = make_bank(), fresh()
    encode(state, run(1, 5), 5)
    state.layers[1].advance(1, state.layers[1].slots)
    with pytest.raises(CacheError, match="disagree"):
        bank.put(run(1, 5), state)
    assert len(bank) == 0


def test_a_common_system_prompt_is_stored_once() -> None:
    """Sessions share what they begin with: at most the block in which they part is there twice."""
    bank = make_bank()
    system = run(500, 42)
    serve(bank, system, session="s0")
    alone = bank.nbytes
    for user in range(1, 9):
        serve(bank, [*system, 1000 + user, 1, 2], session=f"s{user}")
    own = (2 + 3) * ROW + 2 * (STATE + 8) + STATE  # rows of the last block, marks at 42 (inherited), 44 and the end
    assert bank.nbytes - alone <= 8 * (own + GRID * ROW)


def test_e18_forks_and_snapshots_cost_nothing_until_they_part() -> None:
    bank = make_bank()
    text = run(1, 801)
    serve(bank, text, session="root")
    before, active = bank.nbytes, mx.get_active_memory()
    branches.take_snapshot(bank, "point", "root")
    for fork in range(20):
        branches.fork_session(bank, "point" if fork % 2 else "root", f"fork{fork}")
    assert bank.nbytes == before and mx.get_active_memory() <= active
    for fork in range(20):
        found = serve(bank, [*text, 2000 + fork], session=f"fork{fork}")
        assert found.length == len(text)
    assert bank.nbytes - before <= 20 * (2 * ROW + STATE + 8)
    assert {report.tokens for report in branches.report_sessions(bank)} == {801, 802}


def test_restoring_goes_back_and_forgets_what_came_after() -> None:
    bank = make_bank()
    serve(bank, run(1, 9), session="a")
    branches.take_snapshot(bank, "s", "a")
    serve(bank, run(1, 30), session="a")
    grown = bank.nbytes
    assert branches.restore_session(bank, "s", "a") == 9
    assert bank.nbytes < grown and bank.sessions.committed("a") == tuple(run(1, 9))
    assert bank.find(run(1, 30)).length == 12  # the snapshot stands in a block of four tokens, which stays whole
    with pytest.raises(UsageError, match="no snapshot"):
        branches.restore_session(bank, "t", "a")
    with pytest.raises(UsageError, match="has not ended a turn"):
        branches.take_snapshot(bank, "t", "nobody")
    branches.fork_session(bank, "s", "b")
    with pytest.raises(UsageError, match="exists"):
        branches.fork_session(bank, "s", "b")


def test_clearing_a_session_leaves_what_others_use() -> None:
    bank = make_bank()
    system = run(1, 8)
    serve(bank, [*system, 20, 21], session="a")
    serve(bank, [*system, 30, 31], session="b")
    serve(bank, [*system, 20, 21, 22, 23, 24, 25, 26], session="c")
    assert bank.clear("a") == 0  # c stands on all of it
    assert bank.clear("c") > 0
    assert told(bank.find([*system, 20, 21, 22, 23, 24])) == (8, "cleared", 8)
    assert told(bank.find([*system, 30, 31, 32])) == (10, "new_suffix", 10)
    serve(bank, system)  # and somebody without a session
    assert bank.clear("b") == 1
    assert bank.find([*system, 1]).length == 8
    assert bank.clear("nobody") == 0 and bank.sessions.committed("b") is None


def test_clearing_everything_gives_back_the_memory() -> None:
    bank = make_bank()
    serve(bank, run(1, 30), session="a")
    state = fresh()
    encode(state, run(1, 30), 30)
    assert bank.keep_live("a", run(1, 30), state)
    assert bank.nbytes > 0 and bank.clear() > 0
    assert bank.nbytes == len(bank) == len(bank.sessions) == 0


def test_the_streams_of_sessions_are_remembered_within_limits() -> None:
    """The sessions unused for longest are forgotten, by number and by ids of all streams; never the one at work."""
    book = SessionBook(most=3, most_ids=30, clock=Clock())
    for name, length in (("a", 5), ("b", 5), ("c", 5), ("a", 6)):
        book.commit(name, Committed(identity(), tuple(range(length))))
    assert [each.name for each in book] == ["b", "c", "a"]
    book.commit("d", Committed(identity(), tuple(range(5))))
    assert [each.name for each in book] == ["c", "a", "d"]
    book.commit("e", Committed(identity(), tuple(range(20))))
    assert [each.name for each in book] == ["d", "e"]
    book.commit("f", Committed(identity(), tuple(range(100))))
    assert [each.name for each in book] == ["f"] and book.committed("f") == tuple(range(100))


def test_states_of_active_sessions_are_evicted_last() -> None:
    clock = Clock()
    one = 5 * ROW + 2 * STATE + 8  # a prompt of five tokens, restorable at 4 and at 5
    bank = make_bank(3 * one, clock=clock)
    serve(bank, run(10, 5), session="old")
    clock.now = 700.0
    serve(bank, run(20, 5), session="new")
    serve(bank, run(30, 5))
    serve(bank, run(40, 5))  # `old` has been idle for longest and goes
    assert bank.find(run(10, 6)).length == 0 and bank.find(run(30, 6)).length == 5
    serve(bank, run(50, 5))  # then strangers, the one unused for longest first
    serve(bank, run(60, 5))
    assert bank.find(run(20, 6)).length == 5
    serve(bank, run(70, 5), session="x")
    serve(bank, run(80, 5), session="y")
    assert bank.find(run(20, 6)).length == 5
    serve(bank, run(90, 5), session="z")  # nobody but active sessions is left
    assert len([start for start in (20, 70, 80, 90) if bank.find(run(start, 6)).length]) == 3


def test_named_snapshots_stay_and_what_cannot_fit_beside_them_is_refused() -> None:
    one = 5 * ROW + 2 * STATE + 8
    bank = make_bank(2 * one)
    serve(bank, run(10, 5), session="a")
    branches.take_snapshot(bank, "s", "a")
    for start in (20, 30, 40):
        serve(bank, run(start, 5))
        assert bank.find(run(10, 6)).length == 5
    big = run(100, 12)
    state = fresh()
    encode(state, big, 12)
    count = len(bank)
    assert bank.put(big, state) is PutOutcome.OVERSIZE and len(bank) == count
    assert branches.drop_snapshot(bank, "s") and not branches.drop_snapshot(bank, "s")


def test_the_restore_point_of_a_named_snapshot_is_never_thinned() -> None:
    """E06: however little the restore points of one sequence may take, a name stands where it was given."""
    bank = make_bank(mark_bytes=STATE + 8)
    text = run(1, 5)
    serve(bank, text, session="a")
    branches.take_snapshot(bank, "s", "a")
    for turn in range(5):
        text = [*text, *run(100 * turn, 3)]
        serve(bank, text, session="a")
    assert branches.report_snapshots(bank)[0].restorable == 5
    assert bank.find([*run(1, 5), 99]).length == 5


def test_a_session_has_a_limit_of_its_own() -> None:
    """E19: what is larger is refused with a reason, and what was there before stays."""
    limit = 12 * ROW + 4 * (STATE + 8)
    bank = make_bank(session_limit_bytes=limit)
    text = run(1, 6)
    serve(bank, text, session="a")
    longer = run(1, 40)
    serve(bank, longer, session="a")
    assert bank.statistics().refusals > 0
    assert bank.bytes_of(bank.sessions.get("a")) <= limit
    found = bank.find([*longer, 41])
    assert found.length >= 6 and found.miss is not None and str(found.miss.reason) == "oversize"
    serve(bank, longer)  # who names no session has the whole limit
    assert bank.find([*longer, 41]).length == 40


def test_a_session_keeps_its_newest_branches() -> None:
    bank = make_bank()
    system = run(1, 8)
    for branch in range(6):
        serve(bank, [*system, *run(100 * branch, 6)], session="a")
    kept = [branch for branch in range(1, 6) if bank.find([*system, *run(100 * branch, 6), 5]).length == 14]
    assert kept == [3, 4, 5]


def test_a_live_state_is_the_sessions_alone_and_goes_first() -> None:
    bank = make_bank(400 * ROW + 40 * STATE)
    text = run(1, 40)
    serve(bank, text, session="a")
    state = fresh()
    encode(state, text, 40)
    digest = bits(state.layers[1].slots[0])
    assert bank.keep_live("a", text, state, owner="me")
    assert bank.find([*text, 41], session="b").live is None
    live = bank.find([*text, 41], session="a").live
    assert live is not None and live.state is state and live.owner == "me" and bits(state.layers[1].slots[0]) == digest
    assert bank.find([*text, 41], session="a").live is None  # given away
    plain = make_bank()
    rows = fresh(hybrid=False)
    encode(rows, text, 40)
    serve(plain, text, session="a", hybrid=False)
    plain.keep_live("a", text, rows)
    found = plain.find([*text[:30], 99], session="a")
    assert found.live is not None and found.length == found.live.state.offset == 30  # taken back, not copied
    assert told(found) == (30, "prefix_divergence", 30)


def test_room_is_made_among_live_states_before_anything_is_evicted() -> None:
    text = run(1, 8)
    held = 8 * ROW + 2 * STATE + 8
    state = fresh()
    encode(state, text, 8)
    bank = make_bank(held + state.held_bytes)
    serve(bank, text, session="a")
    assert bank.keep_live("a", text, state) and bank.statistics().live_bytes == state.held_bytes
    serve(bank, run(50, 8))
    assert bank.statistics().live_states == 0 and bank.statistics().evictions == 0
    assert bank.find([*text, 1]).length == 8


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    budget=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_restore_points_stay_within_their_budget_and_at_places_that_do_not_move(lengths, budget) -> None:
    """Boundaries are anchored by absolute position: what is kept does not depend on when it was captured."""
    size = STATE + 8
    bank = make_bank(mark_bytes=budget * size)
    text: list[int] = []
    for length in lengths:
        text += run(1000 + len(text), length)
        serve(bank, text)
        marks = [mark for entry in bank.entries() for mark in entry.marks]
        stats = bank.statistics()
        assert stats.mark_bytes <= max(budget * size, size) and len(text) in marks
        at_once = choose_anchors(
            dict.fromkeys(sorted({*range(GRID, len(text) + 1, GRID), len(text)}), size),
            wanted={len(text)},
            budget=budget * size,
            grid=GRID,
        )
        stride = GRID
        while len(text) // stride > budget - 1 and stride <= len(text):
            stride *= 2
        anchors = set(range(stride, len(text) + 1, stride))
        assert anchors <= at_once and anchors <= set(marks)
        found = bank.find([*text, 5])
        assert found.length == len(text)


def test_anchors_of_a_long_sequence_lie_evenly() -> None:
    sizes = dict.fromkeys(range(256, 65537, 256), 1)
    kept = sorted(choose_anchors(sizes, wanted={65536}, budget=33, grid=256))
    assert len(kept) == 33 and max(b - a for a, b in itertools.pairwise([0, *kept])) == 2048
    assert choose_anchors({}, wanted=set(), budget=5, grid=4) == set()
    assert choose_anchors({8: 10}, wanted={8}, budget=5, grid=4) == set()


def test_e19_e08_what_a_state_depends_on_is_one_record() -> None:
    bank = make_bank()
    text = run(1, 9)
    serve(bank, text)
    for name, value in (
        ("checkpoint", "with adapter"),
        ("lane", "mtp"),
        ("numerics", "bfloat16"),
        ("template_hash", "other"),
        ("hidden_variant", "pre"),
        ("history_policy", "committed"),
        ("free", False),
        ("grid", 8),
    ):
        found = bank.find(text, identity=identity(**{name: value}))
        assert (found.length, str(found.miss.reason), found.miss.detail) == (0, "identity_mismatch", name)
