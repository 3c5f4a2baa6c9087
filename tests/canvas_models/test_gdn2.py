"""The delta rule of memory against its own definition, its limits, and what it must never do."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.models.latent.gdn2 import (
    SLOT_CAP,
    Gdn2Gates,
    Gdn2Writer,
    cap_slots,
    from_heads,
    gdn2_scan,
    gdn2_step,
    to_heads,
)

A, M, D = 2, 5, 6  # heads, slots, width over all heads
Array = np.ndarray


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw_gates(seed: int, *lead: int, **fixed: float) -> Gdn2Gates:
    """Random gates with leading axes `lead`; a gate named in `fixed` has that value everywhere."""
    generator = np.random.default_rng(seed)
    parts = {
        "key": unit(generator.normal(size=(*lead, A, M))),
        "value": generator.normal(size=(*lead, A, D // A)),
        "decay": generator.uniform(0.5, 1, (*lead, A, M)),
        "erase": generator.uniform(0, 1, (*lead, A, M)),
        "write": generator.uniform(0, 1, (*lead, A, D // A)),
    }
    parts |= {name: np.full_like(parts[name], value) for name, value in fixed.items()}
    return Gdn2Gates(**{name: mx.array(value.astype(np.float32)) for name, value in parts.items()})


def draw_state(seed: int, rows: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(rows, A, M, D // A)).astype(np.float32))


def read(state: mx.array, key: mx.array) -> Array:
    return np.array(mx.sum(key[..., None] * state, axis=-2))


def dense_step(state: Array, gates: Gdn2Gates) -> Array:
    """The rule as matrices, for one row and one head at a time, in float64."""
    out = np.zeros_like(state, dtype=np.float64)
    for row, head in np.ndindex(*state.shape[:2]):
        k, v, a, b, w = (
            np.array(part[row, head], np.float64)
            for part in (gates.key, gates.value, gates.decay, gates.erase, gates.write)
        )
        out[row, head] = (np.eye(M) - np.outer(k, b * k)) @ np.diag(a) @ state[row, head] + np.outer(k, w * v)
    return out


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 3))
def test_step_is_the_matrix_rule(seed: int, rows: int) -> None:
    state, gates = draw_state(seed, rows), draw_gates(seed + 1, rows)
    wanted = dense_step(np.array(state, np.float64), gates)
    assert np.abs(np.array(gdn2_step(state, gates)) - wanted).max() < 1e-5


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_limits_replace_delete_ignore(seed: int) -> None:
    state = draw_state(seed)
    replace = draw_gates(seed, 1, decay=1, erase=1, write=1)
    assert np.abs(read(gdn2_step(state, replace), replace.key) - np.array(replace.value)).max() < 1e-5
    delete = draw_gates(seed, 1, decay=1, erase=1, write=0)
    assert np.abs(read(gdn2_step(state, delete), delete.key)).max() < 1e-5
    ignore = draw_gates(seed, 1, decay=1, erase=0, write=0)
    assert mx.array_equal(gdn2_step(state, ignore), state)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_equal_gates_are_the_delta_rule(seed: int, beta: float) -> None:
    state, gates = draw_state(seed), draw_gates(seed, 1, erase=beta, write=beta)
    decayed = np.array(gates.decay)[..., None] * np.array(state)
    k, v = np.array(gates.key), np.array(gates.value)
    error = v - np.einsum("bam,bamd->bad", k, decayed)
    wanted = decayed + beta * np.einsum("bam,bad->bamd", k, error)
    assert np.abs(np.array(gdn2_step(state, gates)) - wanted).max() < 1e-5


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 7), data=st.data())
def test_scan_in_two_halves_and_padded_steps(seed: int, steps: int, data: st.DataObject) -> None:
    rows = 2
    state, gates = draw_state(seed, rows), draw_gates(seed, rows, steps)
    lengths = mx.array(data.draw(st.lists(st.integers(0, steps), min_size=rows, max_size=rows)), mx.int32)
    whole = gdn2_scan(state, gates, lengths)
    cut = data.draw(st.integers(0, steps))
    parts = (gates.key, gates.value, gates.decay, gates.erase, gates.write)
    first, second = (Gdn2Gates(*(part[:, piece] for part in parts)) for piece in (slice(cut), slice(cut, None)))
    halves = gdn2_scan(gdn2_scan(state, first, mx.minimum(lengths, cut)), second, mx.maximum(lengths - cut, 0))
    assert mx.array_equal(whole, halves)
    for row in range(rows):  # a row is what it would be alone, without its padding
        count = int(lengths[row].item())
        alone = state[row : row + 1]
        for step in range(count):
            alone = gdn2_step(alone, Gdn2Gates(*(part[row : row + 1, step] for part in parts)))
        assert mx.array_equal(whole[row : row + 1], alone)


def test_memory_layout_is_head_after_head() -> None:
    memory = mx.arange(2 * M * D, dtype=mx.float32).reshape(2, M, D)
    state = to_heads(memory, A)
    assert state.shape == (2, A, M, D // A)
    assert mx.array_equal(state[:, 1, 3], memory[:, 3, D // A :])
    assert mx.array_equal(from_heads(state), memory)


@settings(deadline=None, max_examples=1)
@given(st.integers(0, 10_000))
def test_ten_thousand_capped_steps_stay_bounded(seed: int) -> None:
    """With the most violent gates there are: no forgetting, values far too large."""
    state = to_heads(mx.zeros((1, M, D)), A)
    parts = draw_gates(seed, 1, 10_000, decay=1)
    gates = Gdn2Gates(parts.key, parts.value * 50, parts.decay, parts.erase, parts.write)
    largest = 0.0
    for step in range(10_000):
        state = to_heads(cap_slots(from_heads(gdn2_step(state, gates.at(step)))), A)
        if step % 200 == 199:
            memory = np.array(from_heads(state))
            assert np.isfinite(memory).all()
            largest = max(largest, float(np.sqrt((memory**2).mean(-1)).max()))
    assert 1.0 < largest <= SLOT_CAP * (1 + 1e-5)


def test_cap_leaves_small_slots_and_empty_ones() -> None:
    memory = mx.concatenate([mx.zeros((1, 1, D)), mx.full((1, 1, D), 3.5), mx.full((1, 1, D), 40.0)], axis=1)
    capped = cap_slots(memory)
    assert mx.array_equal(capped[:, :2], memory[:, :2])
    assert np.allclose(np.array(capped[:, 2]), SLOT_CAP)


def test_writer_starts_out_slow_to_forget_and_reluctant_to_write() -> None:
    writer = Gdn2Writer(D, M, A)
    gates = writer(mx.zeros((1, D)))
    assert gates.key.shape == gates.decay.shape == gates.erase.shape == (1, A, M)
    assert gates.value.shape == gates.write.shape == (1, A, D // A)
    assert np.allclose(np.array(gates.decay), 0.99)
    assert np.allclose(np.array(gates.erase), 0.5)
    assert np.allclose(np.array(gates.write), 1 / (1 + np.exp(2)))
    assert not mx.any(gates.key).item()  # a silent key is no direction at all, not a random one


@pytest.mark.parametrize("lead", [(1,), (2, 3)])
def test_writer_keys_have_length_one(lead: tuple[int, ...]) -> None:
    writer = Gdn2Writer(D, M, A)
    x = mx.random.normal((*lead, D), key=mx.random.key(1))
    length = mx.sqrt(mx.sum(mx.square(writer(x).key), axis=-1))
    assert np.allclose(np.array(length), 1, atol=1e-5)
