"""Keys are a function of seed, salt and step; the numbers themselves are part of the seed contract."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.lanes.canvas import keys
from polytoken.lanes.canvas.keys import KeyedNoise, draw_key

quick = settings(max_examples=25, deadline=None)


def test_golden_canvas_of_seed_42() -> None:
    assert KeyedNoise(42, 6, 100).canvas(0).tolist() == [[42, 27, 93, 28, 71, 64]]


def test_draws_are_keyed_by_salt_step_and_part() -> None:
    noise = KeyedNoise(7, 5, 5000)
    key = mx.random.key(7 + 0x51A7 + 3 * 1000003)
    assert mx.array_equal(noise.canvas(3), mx.random.randint(0, 5000, (1, 5), key=key))
    key = mx.random.key(7 + 0xC09A + 3 * 1000003)
    assert mx.array_equal(noise.step(3).candidates(4), mx.random.uniform(shape=(5, 4), key=key))
    key = mx.random.key(7 + 0xC09A + 3 * 1000003 + 1)
    assert mx.array_equal(noise.step(3).span(4096, 5000), mx.random.uniform(shape=(5, 904), key=key))


@quick
@given(st.integers(-(2**70), 2**70), st.integers(-3, 3), st.integers(0, 10**6))
def test_seeds_equal_modulo_2_32_draw_the_same(seed: int, wraps: int, step: int) -> None:
    one, other = KeyedNoise(seed, 4, 300), KeyedNoise(seed + wraps * 2**32, 4, 300)
    assert mx.array_equal(one.canvas(step), other.canvas(step))
    assert mx.array_equal(one.step(step).candidates(3), other.step(step).candidates(3))
    assert mx.array_equal(one.step(step).span(0, 300), other.step(step).span(0, 300))


@pytest.mark.parametrize("seed", [-1, -(2**40), 2**33 + 5, 2**64])
def test_any_seed_makes_a_key(seed: int) -> None:
    ids = np.array(KeyedNoise(seed, 64, 10).canvas(2))
    assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < 10
    assert not mx.array_equal(draw_key(seed, 0), draw_key(seed, 1))


@quick
@given(st.data())
def test_a_span_does_not_depend_on_how_the_vocabulary_is_cut(data: st.DataObject) -> None:
    V = data.draw(st.integers(1, 2 * keys.NOISE_TILE + 50))
    cuts = sorted({0, V, *data.draw(st.lists(st.integers(1, V), max_size=4))})
    step = KeyedNoise(1, 2, V).step(0)
    whole = step.span(0, V)
    parts = [step.span(a, b) for a, b in pairwise(cuts)]
    assert whole.shape == (2, V)
    assert mx.array_equal(whole, mx.concatenate(parts, axis=1))


def test_no_global_random_state_is_used_or_moved() -> None:
    mx.random.seed(3)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    noise = KeyedNoise(9, 4, 50)
    first = noise.canvas(1).tolist()
    assert mx.random.uniform(shape=(4,)).tolist() == expected
    assert noise.canvas(1).tolist() == first
