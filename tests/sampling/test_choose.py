"""Picking by cumulative probability, and log-probabilities."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import RequestError
from polytoken.request import SamplingParams
from polytoken.sampling.choose import LOGPROB_FLOOR, pick, top_logprobs
from polytoken.sampling.draws import Draws, Purpose
from polytoken.sampling.law import Distribution, shape

LAST = 1.0 - 2.0**-53  # the largest uniform there is


def law(*probs: float, ids: list[int] | None = None) -> Distribution:
    chosen = list(range(len(probs))) if ids is None else ids
    return Distribution(np.array(chosen, np.int64), np.array(probs), max(chosen) + 1)


@pytest.mark.parametrize(
    ("u", "expected"), [(0.0, 3), (0.2499, 3), (0.25, 5), (0.4999, 5), (0.5, 9), (0.75, 9), (LAST, 9)]
)
def test_pick_searches_to_the_right(u: float, expected: int) -> None:
    assert pick(law(0.25, 0.25, 0.5, ids=[3, 5, 9]), u) == expected


def test_pick_skips_ids_without_probability_at_either_end() -> None:
    assert pick(law(0.0, 1.0, 0.0), 0.0) == 1
    assert pick(law(0.0, 0.5, 0.5, 0.0), LAST) == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-12, 1), min_size=1, max_size=200), st.sampled_from([0.0, 0.3, 0.9999, LAST]))
def test_pick_stays_inside_whatever_the_sum_rounds_to(weights: list[float], u: float) -> None:
    probs = np.array(weights) / np.sum(weights)
    for factor in (1.0, 1.0 - 1e-15, 1.0 + 1e-15):
        token_id = pick(Distribution(np.arange(probs.size) * 2, probs * factor, probs.size * 2), u)
        before = float(probs[: token_id // 2].sum())
        assert before - 1e-12 <= u <= before + probs[token_id // 2] + 1e-12


@pytest.fixture(scope="module")
def uniforms() -> list[float]:
    draws = Draws(11)
    return [draws.uniform(position, Purpose.TOKEN) for position in range(20_000)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.1),
    ],
    ids=["plain", "top-k and top-p", "top-p", "min-p"],
)
def test_picks_follow_the_law_over_20000_positions(params: SamplingParams, uniforms: list[float]) -> None:
    distribution = shape(np.random.default_rng(5).standard_normal(40).astype(np.float32) * 2, params)
    n = len(uniforms)
    counts = np.bincount([pick(distribution, u) for u in uniforms], minlength=40)
    expected = distribution.dense() * n
    assert (counts[expected == 0] == 0).all()
    busy = expected >= 5
    statistic = float(((counts - expected)[busy] ** 2 / expected[busy]).sum())
    degrees = int(busy.sum()) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_logprobs_are_the_log_softmax_of_the_row_at_temperature_1() -> None:
    row = np.array([1.0, 3.0, -2.0, 3.0], np.float32)
    total = math.log(sum(math.exp(float(z)) for z in row))
    got = top_logprobs(row, 0, 3)
    assert got.token_id == 0 and got.logprob == pytest.approx(1 - total, abs=1e-12)
    assert [token_id for token_id, _ in got.top] == [1, 3, 0]  # value descending, then id ascending
    assert [value for _, value in got.top] == pytest.approx([3 - total, 3 - total, 1 - total], abs=1e-12)


def test_a15_lists_are_as_long_as_asked_and_finite_in_json() -> None:
    row = np.array([0.0, -math.inf, -3e38, -math.inf], np.float32)
    for n, ids in [(0, []), (1, [0]), (3, [0, 2, 1]), (4, [0, 2, 1, 3]), (20, [0, 2, 1, 3])]:
        got = top_logprobs(row, 1, n)
        assert [token_id for token_id, _ in got.top] == ids
        values = [value for _, value in got.top]
        assert values == sorted(values, reverse=True) and all(map(math.isfinite, values))
        assert got.logprob == LOGPROB_FLOOR
        json.dumps(got.to_dict(), allow_nan=False)
    SamplingParams(logprobs=20)
    with pytest.raises(RequestError, match="logprobs"):
        SamplingParams(logprobs=21)


def test_logprobs_do_not_overflow() -> None:
    got = top_logprobs(np.array([3e38, 3e38], np.float32), 1, 1)
    assert got.logprob == pytest.approx(-math.log(2)) and got.top[0][0] == 0
