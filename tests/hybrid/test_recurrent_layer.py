"""The recurrent layer alone, over a recurrence made up of integers, so that every state can be told."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.cache.blocks import join_blocks
from polytoken.cache.layers import KVLayer, SlidingKVLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.state import DecodingState
from polytoken.errors import CacheError


def fold(value: int, ids: list[int]) -> int:
    for token in ids:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def slots_of(value: int) -> tuple[mx.array, ...]:
    return mx.full((1, 3, 4), value, mx.int32), mx.full((1, 2, 5, 5), value, mx.int32)


def value_of(layer: RecurrentLayer) -> int:
    if layer.slots is None:
        return 0
    first, second = layer.slots
    assert first.shape == (1, 3, 4) and second.shape == (1, 2, 5, 5)
    assert mx.all(first == first[0, 0, 0]).item() and mx.all(second == first[0, 0, 0]).item()
    return int(first[0, 0, 0].item())


@dataclass(frozen=True)
class Rows:
    ids: list[int]
    nbytes: int = 64

    def __call__(self, before, keep: int):
        assert 0 < keep < len(self.ids)
        return slots_of(fold(0 if before is None else int(before[0][0, 0, 0].item()), self.ids[:keep]))


def feed(state: DecodingState, ids: list[int], *, replay: bool = True) -> None:
    rows = mx.broadcast_to(mx.array(ids, mx.float32)[None, None, :, None], (1, 1, len(ids), 2)) + 0
    for layer in state.layers:
        if isinstance(layer, RecurrentLayer):
            layer.advance(len(ids), slots_of(fold(value_of(layer), ids)), Rows(ids) if replay else None)
        else:
            layer.update_and_fetch(rows, rows)


def fresh() -> DecodingState:
    return DecodingState([RecurrentLayer(), KVLayer(), RecurrentLayer(), SlidingKVLayer(6)])


def look(state: DecodingState) -> list[object]:
    """Everything that counts, in a form that compares."""
    seen: list[object] = []
    for layer in state.layers:
        if isinstance(layer, RecurrentLayer):
            seen.append((layer.offset, value_of(layer), layer.captured))
        else:
            seen.append((layer.offset, [array.tolist() for array in layer.snapshot().arrays()]))
    return seen


ids_of = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(prompt=st.lists(st.integers(0, 9), max_size=12), cycles=st.lists(st.tuples(ids_of, st.data()), max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_accepted_prefix_equals_single_steps(prompt, cycles) -> None:
    state, plain = fresh(), fresh()
    if prompt:
        feed(state, prompt)
        for token in prompt:
            feed(plain, [token])
    for window, data in cycles:
        keep = data.draw(st.integers(0, len(window)))
        with state.capturing():
            feed(state, window)
        assert state.can_commit(keep, len(window))
        state.commit(keep, len(window))
        for token in window[:keep]:
            feed(plain, [token])
        assert state.offset == plain.offset
        assert [layer.captured for layer in state.layers if isinstance(layer, RecurrentLayer)] == [0, 0]
        for layer, twin in zip(state.layers, plain.layers, strict=True):
            if isinstance(layer, RecurrentLayer):
                assert value_of(layer) == value_of(twin)
            else:
                assert [a.tolist() for a in layer.valid() or ()] == [a.tolist() for a in twin.valid() or ()]


def test_nothing_is_kept_unarmed_and_taking_back_is_refused() -> None:
    """D08: taking back is never a silent no-op."""
    state = fresh()
    feed(state, [1, 2, 3])
    before = look(state)
    assert state.layers[0].captured == 0 and state.held_bytes == sum(layer.held_bytes for layer in state.layers)
    assert state.can_commit(3, 3) and not state.can_commit(2, 3)
    for act in (lambda: state.commit(2, 3), lambda: state.trim(1), lambda: state.layers[0].trim(1)):
        with pytest.raises(CacheError, match="exactly"):
            act()
        assert look(state) == before
    state.commit(3, 3)
    assert look(state) == before


@pytest.mark.parametrize("keep, of", [(-1, 2), (3, 2), (1, 9), (2, 3), (0, 1)])
def test_a_refusal_leaves_every_entry_untouched(keep: int, of: int) -> None:
    state = fresh()
    feed(state, [1, 2, 3, 4])
    with state.capturing():
        feed(state, [5, 6])
    before = look(state)
    assert not state.can_commit(keep, of)
    with pytest.raises(CacheError):
        state.commit(keep, of)
    assert look(state) == before
    state.commit(1, 2)  # and the window is still there to be used
    assert state.offset == 5


def test_one_layer_that_refuses_saves_the_others() -> None:
    state = fresh()
    feed(state, [1])
    with state.capturing():
        feed(state, [2, 3])
    state.layers[2].settle()
    before = look(state)
    with pytest.raises(CacheError, match=r"layers 2 \(recurrent\)"):
        state.commit(1, 2)
    assert look(state) == before


@pytest.mark.parametrize("end", ["commit", "trim", "settle", "unarmed", "restore"])
def test_kept_rows_are_used_once(end: str) -> None:
    state = fresh()
    feed(state, [7, 8])
    stored = state.snapshot()
    with state.capturing():
        feed(state, [1, 2, 3])
    layer = state.layers[0]
    assert layer.captured == 3 and layer.held_bytes > layer.nbytes
    match end:
        case "commit":
            state.commit(3, 3)  # full acceptance uses them up too
        case "trim":
            state.trim(2)
        case "settle":
            state.settle()
        case "unarmed":
            feed(state, [4])
        case "restore":
            state.restore(stored)
    assert layer.captured == 0 and layer.held_bytes == layer.nbytes and not layer.can_trim(1)


def test_without_a_replay_the_whole_window_can_go_back() -> None:
    state = fresh()
    feed(state, [1])
    with state.capturing():
        feed(state, [2, 3], replay=False)
    assert state.can_commit(0, 2) and state.can_commit(2, 2) and not state.can_commit(1, 2)
    state.commit(0, 2)
    assert state.offset == 1 and value_of(state.layers[0]) == fold(0, [1])


def test_capture_belongs_to_one_state_and_ends_with_its_scope() -> None:
    state, other = fresh(), fresh()
    with pytest.raises(RuntimeError), state.capturing():
        feed(state, [1, 2])
        feed(other, [1, 2])
        raise RuntimeError("a forward failed")
    assert state.layers[0].captured == 2 and other.layers[0].captured == 0
    assert not state.layers[0].armed
    with state.capturing(), state.capturing():
        pass
    assert not state.layers[0].armed


def test_blocks_hold_the_state_where_it_is_and_nothing_before() -> None:
    layer = RecurrentLayer()
    empty = layer.snapshot()
    layer.restore(empty)
    assert layer.slots is None and layer.offset == 0 and empty.parts == ()
    state = DecodingState([layer])
    feed(state, [1, 2, 3, 4])
    early, late = layer.block(0, 2), layer.block(2, 4)
    assert (early.start, early.stop, early.arrays) == (2, 2, ()) and (late.start, late.stop) == (0, 4)
    assert join_blocks([early]) is None  # no state at 2 any more
    snapshot = join_blocks([early, late])
    assert snapshot is not None and snapshot.offset == 4
    twin = RecurrentLayer()
    twin.restore(snapshot)
    assert value_of(twin) == value_of(layer) and twin.offset == 4
    with pytest.raises(CacheError):
        layer.block(0, 5)
    with pytest.raises(CacheError):
        KVLayer().restore(snapshot)


def test_a_borrower_leaves_the_snapshot_alone() -> None:
    state = fresh()
    feed(state, [1, 2, 3])
    stored = state.snapshot()
    digest = stored.digest()
    for token in (4, 5):
        borrower = fresh()
        borrower.restore(stored)
        feed(borrower, [token])
        with borrower.capturing():
            feed(borrower, [6, 7])
        borrower.commit(1, 2)
        assert value_of(borrower.layers[0]) == fold(0, [1, 2, 3, token, 6])
    assert stored.digest() == digest
