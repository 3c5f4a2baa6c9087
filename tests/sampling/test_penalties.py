"""Penalties, bias and mask against their definitions; counts that leave no trace."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import RequestError
from polytoken.request import SamplingParams
from polytoken.sampling.penalties import Bias, TokenCounts, adjust

V = 12
ids = st.integers(0, V - 1)


def reference(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    count = Counter(output)
    bias = dict(params.logit_bias)
    result = []
    for i in range(len(logits)):
        z = float(logits[i])
        if i in prompt or i in output:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        z -= params.frequency_penalty * count[i] + params.presence_penalty * (count[i] > 0)
        if i in bias:
            z = -math.inf if bias[i] == -100 else z + bias[i]
        result.append(z)
    return result


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt_ids=prompt, vocab_size=V)
    for token_id in output:
        counts.observe(token_id)
    return counts


def same(a: TokenCounts, b: TokenCounts) -> bool:
    return (
        a.seen.tolist() == b.seen.tolist()
        and a.counts.tolist() == b.counts.tolist()
        and a.mark() == b.mark()
        and a._slots == b._slots
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V),
    st.lists(ids, max_size=8),
    st.lists(ids, max_size=8),
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 1.1, 0.5, 2.0]),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -99.0, 5.0, 100.0]), max_size=3).map(
            lambda bias: tuple(sorted(bias.items()))
        ),
    ),
)
def test_adjusted_rows_equal_the_definition(
    values: list[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
) -> None:
    logits = np.array(values, np.float32)
    before = logits.copy()
    got = adjust(logits, params, counts=counts_of(prompt, output), bias=Bias(params.logit_bias, vocab_size=V))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference(logits, params, prompt, output), rtol=1e-5, atol=1e-5)
    assert (logits == before).all()


def test_c09_repetition_sees_prompt_and_output_the_others_only_output() -> None:
    A, B = 2, 5
    logits = np.full(V, 4.0, np.float32)
    logits[7] = -4.0
    params = SamplingParams(repetition_penalty=2.0)
    counts = counts_of([A, A, 7], [])
    step_1 = adjust(logits, params, counts=counts, bias=None)
    assert step_1[[A, B, 7]].tolist() == [2.0, 4.0, -8.0]  # once, however often it occurs
    counts.observe(B)
    counts.observe(B)
    assert adjust(logits, params, counts=counts, bias=None)[[A, B, 7]].tolist() == [2.0, 2.0, -8.0]

    params = SamplingParams(presence_penalty=0.5, frequency_penalty=1.0)
    counts = counts_of([A], [])
    assert (adjust(logits, params, counts=counts, bias=None) == logits).all()
    counts.observe(B)
    assert adjust(logits, params, counts=counts, bias=None)[[A, B]].tolist() == [4.0, 2.5]
    counts.observe(B)
    assert adjust(logits, params, counts=counts, bias=None)[[A, B]].tolist() == [4.0, 1.5]


@settings(max_examples=200, deadline=None)
@given(st.lists(ids, max_size=6), st.lists(ids, max_size=10), st.lists(st.lists(ids, max_size=6), max_size=4))
def test_c09_rejected_drafts_leave_no_trace(prompt: list[int], output: list[int], drafts: list[list[int]]) -> None:
    counts = counts_of(prompt, output)
    for draft in drafts:
        mark = counts.mark()
        for token_id in draft:
            counts.observe(token_id)
        counts.rollback(mark)
        assert same(counts, counts_of(prompt, output))
        kept = draft[: len(draft) // 2]  # and what is accepted counts as if it had come one by one
        for token_id in kept:
            counts.observe(token_id)
        output = output + kept
    assert same(counts, counts_of(prompt, output))
    assert all(counts.count(i) == output.count(i) for i in range(V))


def test_counts_grow_past_their_first_capacity_and_back() -> None:
    counts = TokenCounts(prompt_ids=[3], vocab_size=1000)
    for token_id in range(1000):
        counts.observe(token_id)
    assert counts.seen.size == 1000 and counts.counts.sum() == 1000
    counts.rollback(0)
    assert counts.seen.tolist() == [3] and counts.counts.tolist() == [0]


def test_fork_is_independent() -> None:
    counts = counts_of([1], [2, 3])
    other = counts.fork()
    other.observe(2)
    other.observe(9)
    assert same(counts, counts_of([1], [2, 3])) and same(other, counts_of([1], [2, 3, 2, 9]))


def test_rollback_beyond_the_output_and_unknown_ids_are_refused() -> None:
    counts = counts_of([1], [2])
    for mark in (-1, 2):
        with pytest.raises(ValueError, match="roll back"):
            counts.rollback(mark)
    for token_id in (-1, V):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            counts.observe(token_id)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            TokenCounts(prompt_ids=[0, token_id], vocab_size=V)


def test_finite_logits_stay_finite_and_bans_stay_bans() -> None:
    logits = np.array([3e38, -3e38, 1.0, -math.inf], np.float32)
    for rho in (1e-300, 1e300):
        got = adjust(logits, SamplingParams(repetition_penalty=rho), counts=_seen(4), bias=None)
        assert np.isfinite(got[:3]).all() and got[3] == -math.inf
    bias = Bias([(0, 100.0), (1, -50.0), (3, 100.0)], vocab_size=4)
    got = adjust(logits, SamplingParams(), counts=None, bias=bias)
    assert np.isfinite(got[:3]).all() and got[3] == -math.inf


def _seen(n: int) -> TokenCounts:
    return TokenCounts(prompt_ids=range(n), vocab_size=n)


def test_bias_pairs_for_one_id_add_up_and_a_ban_wins() -> None:
    bias = Bias([(4, 1.0), (1, 2.0), (4, 3.0), (1, -100.0)], vocab_size=V)
    assert bias.ids.tolist() == [1, 4] and bias.values.tolist() == [-math.inf, 4.0]


def test_mask_bans_last() -> None:
    allowed = np.zeros(V, np.bool_)
    allowed[3] = True
    got = adjust(
        np.zeros(V, np.float32), SamplingParams(), counts=None, bias=Bias([(5, 100.0)], vocab_size=V), allowed=allowed
    )
    assert np.flatnonzero(got > -math.inf).tolist() == [3]


def test_nothing_to_do_returns_the_row_itself() -> None:
    logits = np.zeros(V, np.float32)
    assert adjust(logits, SamplingParams(), counts=None, bias=None) is logits
