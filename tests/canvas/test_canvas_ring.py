"""The ring and the rolling state: what moves, what is refilled, and what stays."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.lanes.canvas import ring
from polytoken.lanes.canvas.state import RollingState, collect_arrays, concat_rows, slice_row
from polytoken.models.latent.state import LatentState

quick = settings(max_examples=40, deadline=None)
PAD, V, M, D = -7, 50, 3, 4
POSITIONAL = ("token_latents", "confidence", "entropy", "age", "token_changed", "confidence_delta", "entropy_delta")


def ints(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


def state_of(rng: np.random.Generator, heads: list[int], C: int) -> RollingState:
    """A state in which every number differs from every fill."""
    B = len(heads)
    blank = LatentState.empty(B, C, M, D)
    filled = {
        item.name: mx.array(rng.uniform(1, 9, getattr(blank, item.name).shape)).astype(getattr(blank, item.name).dtype)
        for item in fields(blank)
        if item.name != "gdn2"
    }
    memory = mx.array(rng.uniform(1, 9, (B, M, D)).astype(np.float32))
    latent = replace(blank, **filled, gdn2=replace(blank.gdn2, persistent=memory, working=memory + 1))
    canvas = mx.array(rng.integers(1000, 2000, (B, C)).astype(np.int32))
    return RollingState(canvas, latent, ints(*heads))


def logical(state: RollingState, name: str) -> np.ndarray:
    x = state.canvas if name == "canvas" else getattr(state.latent, name)
    return np.array(ring.to_logical(x, state.head))


@quick
@given(st.integers(1, 12), st.data())
def test_maps_are_mutual_inverses_for_every_head(C: int, data: st.DataObject) -> None:
    heads = data.draw(st.lists(st.integers(0, C - 1), min_size=1, max_size=3))
    head = ints(*heads)
    x = mx.array(np.random.default_rng(0).integers(0, 99, (len(heads), C)))
    deep = mx.random.uniform(shape=(len(heads), C, 2), key=mx.random.key(0))
    for value in (x, deep):
        assert mx.array_equal(ring.to_physical(ring.to_logical(value, head), head), value)
        assert mx.array_equal(ring.to_logical(ring.to_physical(value, head), head), value)
    for row, h in enumerate(heads):
        assert np.array(ring.to_logical(x, head))[row].tolist() == [int(x[row, (h + j) % C]) for j in range(C)]
        assert np.array(ring.to_physical(x, head))[row].tolist() == [int(x[row, (p - h) % C]) for p in range(C)]
        assert np.array(ring.logical_positions(head, C))[row].tolist() == [(p - h) % C for p in range(C)]


@quick
@given(st.integers(1, 10), st.data())
def test_advance_shifts_the_logical_view_and_refills_the_tail(C: int, data: st.DataObject) -> None:
    heads = data.draw(st.lists(st.integers(0, C - 1), min_size=1, max_size=3))
    lengths = data.draw(st.lists(st.integers(0, C), min_size=len(heads), max_size=len(heads)))
    before = state_of(np.random.default_rng(1), heads, C)
    noise = mx.array(np.arange(len(heads) * C, dtype=np.int32).reshape(len(heads), C))
    after = before.advance_ring(ints(*lengths), noise, entropy_fill_value=math.log(V))

    assert after.head.tolist() == [(h + n) % C for h, n in zip(heads, lengths, strict=True)]
    fill = {"entropy": np.float32(math.log(V))}
    for name in POSITIONAL:
        old, new = logical(before, name), logical(after, name)
        assert old.dtype == new.dtype
        for row, n in enumerate(lengths):
            np.testing.assert_array_equal(new[row, : C - n], old[row, n:])
            np.testing.assert_array_equal(new[row, C - n :], np.full_like(new[row, C - n :], fill.get(name, 0)))
    canvas, drawn = logical(after, "canvas"), np.array(noise)
    for row, (h, n) in enumerate(zip(heads, lengths, strict=True)):
        assert canvas[row, : C - n].tolist() == logical(before, "canvas")[row, n:].tolist()
        # The noise of a refilled position is that of the slot it lies in.
        assert canvas[row, C - n :].tolist() == [int(drawn[row, (h + j) % C]) for j in range(n)]
    for name in ("memory_slots", "ponder_steps", "stagnation_steps", "gdn2"):
        assert getattr(after.latent, name) is getattr(before.latent, name)


@quick
@given(st.integers(1, 10), st.data())
def test_two_advances_are_one(C: int, data: st.DataObject) -> None:
    head = data.draw(st.integers(0, C - 1))
    a = data.draw(st.integers(0, C))
    b = data.draw(st.integers(0, C - a))
    start = state_of(np.random.default_rng(2), [head], C)
    noise = mx.zeros((1, C), mx.int32)

    def go(state: RollingState, n: int) -> RollingState:
        return state.advance_ring(ints(n), noise, entropy_fill_value=1.5)

    for x, y in zip(collect_arrays(go(go(start, a), b)), collect_arrays(go(start, a + b)), strict=True):
        assert mx.array_equal(x, y)


def test_advance_by_nothing_and_by_everything() -> None:
    start = state_of(np.random.default_rng(3), [2], 5)
    noise = mx.array([[1, 2, 3, 4, 5]], mx.int32)
    same = start.advance_ring(ints(0), noise, entropy_fill_value=1.0)
    assert all(mx.array_equal(x, y) for x, y in zip(collect_arrays(same), collect_arrays(start), strict=True))
    fresh = start.advance_ring(ints(5), noise, entropy_fill_value=1.0)
    assert fresh.head.tolist() == [2] and fresh.canvas.tolist() == noise.tolist()


@quick
@given(st.integers(1, 10), st.data())
def test_pads_lie_exactly_at_exposed_positions_beyond_the_answer(C: int, data: st.DataObject) -> None:
    head = data.draw(st.integers(0, C - 1))
    remaining = data.draw(st.integers(1, 2 * C))
    n = data.draw(st.integers(0, min(C, remaining)))
    start = state_of(np.random.default_rng(4), [head], C)
    moved = start.advance_ring(ints(n), mx.zeros((1, C), mx.int32), entropy_fill_value=0.0)
    padded = ring.pad_exposed(moved.canvas, moved.head, lengths=ints(n), remaining=ints(remaining - n), pad_id=PAD)
    view = np.array(ring.to_logical(padded, moved.head))[0]
    expected = [j for j in range(C) if j >= C - n and j >= remaining - n]
    assert np.flatnonzero(view == PAD).tolist() == expected


@quick
@given(st.integers(1, 10), st.integers(1, 20))
def test_initial_canvas(C: int, limit: int) -> None:
    noise = mx.arange(C, dtype=mx.int32)[None, :]
    state = RollingState.initial(noise, LatentState.empty(1, C, M, D), max_new_tokens=limit, pad_id=PAD)
    assert state.canvas.tolist() == [[p if p < limit else PAD for p in range(C)]]
    assert state.head.tolist() == [0]
    valid = np.array(ring.valid_slots(state.head, ints(limit), C))[0]
    assert valid.tolist() == [p < limit for p in range(C)]


def test_rows_are_cut_and_joined_by_recursion() -> None:
    state = state_of(np.random.default_rng(5), [0, 3, 1], 4)
    rows = [slice_row(state, row) for row in range(3)]
    assert rows[1].head.tolist() == [3] and rows[1].latent.gdn2.working.shape == (1, M, D)
    again = concat_rows(rows)
    assert all(mx.array_equal(x, y) for x, y in zip(collect_arrays(again), collect_arrays(state), strict=True))
    assert len(collect_arrays(state)) == 2 + 10 + 2
