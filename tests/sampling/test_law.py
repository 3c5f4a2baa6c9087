"""The law against a brute-force reference, at its edges, and at the sizes of real vocabularies."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polytoken.errors import NonFiniteError, RequestError
from polytoken.request import SamplingParams
from polytoken.sampling.law import Distribution, finite_peak, leading, shape

INF = math.inf


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def reference(logits: np.ndarray, params: SamplingParams) -> tuple[dict[int, float], float]:
    """The definition written out: probabilities by id, and how near any id lies to a cut."""
    z = [float(value) for value in logits]
    ranking = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if params.greedy:
        return {ranking[0]: 1.0}, INF
    weight = [math.exp((value - z[ranking[0]]) / params.temperature) for value in z]
    P = [w / math.fsum(weight) for w in weight]
    support, margin = [], INF
    for rank, i in enumerate(ranking):
        before = math.fsum(P[j] for j in ranking[:rank])
        in_k = params.top_k == 0 or rank < params.top_k
        in_n = rank == 0 or params.top_p >= 1.0 or before < params.top_p
        in_m = P[i] >= params.min_p * P[ranking[0]]
        if params.top_p < 1.0 and rank:
            margin = min(margin, abs(before - params.top_p))
        if 0.0 < params.min_p < 1.0:
            margin = min(margin, abs(weight[i] - params.min_p))
        if in_k and in_n and in_m and P[i] > 0.0:
            support.append(i)
    mass = math.fsum(P[i] for i in support)
    return {i: P[i] / mass for i in support}, margin


def check_form(law: Distribution, V: int) -> None:
    assert law.vocab_size == V
    assert law.ids.dtype == np.int64 and law.probs.dtype == np.float64
    assert law.ids.size == law.probs.size >= 1
    assert (np.diff(law.ids) > 0).all() and law.ids[0] >= 0 and law.ids[-1] < V
    assert (law.probs > 0).all() and abs(law.probs.sum() - 1.0) < 1e-12


logit = st.one_of(
    st.sampled_from([-INF, -1.0, 0.0, 0.5, 1.0, 2.0, 30.0]),  # few values: ties everywhere
    st.floats(-40, 40, width=32),
)
rows = (
    st.lists(logit, min_size=1, max_size=40)
    .filter(lambda values: max(values) > -INF)
    .map(lambda values: np.array(values, np.float32))
)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 0.6, 1.0, 2.0, 100.0, 1e300]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 20, 39, 40, 41, 2**63 - 1]),
    top_p=st.one_of(st.sampled_from([0.0, 1e-9, 0.5, 0.9, 0.95, 1.0]), st.floats(0, 1)),
    min_p=st.one_of(st.sampled_from([0.0, 0.05, 1.0]), st.floats(0, 1)),
)


@settings(max_examples=250, deadline=None)
@given(rows, parameters)
def test_law_equals_the_definition_written_out(logits: np.ndarray, params: SamplingParams) -> None:
    expected, margin = reference(logits, params)
    law = shape(logits, params)
    check_form(law, logits.size)
    assume(margin > 1e-12)  # a cut within rounding of an id may fall on either side of it
    assert law.ids.tolist() == sorted(expected)
    np.testing.assert_allclose(law.probs, [expected[i] for i in sorted(expected)], rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(rows, parameters)
def test_filters_commute(logits: np.ndarray, params: SamplingParams) -> None:
    """The support under all filters is the meet of the supports under each alone, so no order of them matters."""
    assume(params.temperature > 0.0)
    off = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    alone = [replace(off, top_k=params.top_k), replace(off, top_p=params.top_p), replace(off, min_p=params.min_p)]
    supports = [set(shape(logits, one).ids.tolist()) for one in alone]
    assert set(shape(logits, params).ids.tolist()) == set.intersection(*supports)


def test_nucleus_is_measured_on_the_full_softmax_not_on_the_k_survivors() -> None:
    logits = np.log(row(0.4, 0.2, 0.2, 0.2))
    # Chained, the survivors {0, 1} would be renormalised to 2/3, 1/3 and top_p 0.5 would leave id 0 alone.
    law = shape(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    assert law.ids.tolist() == [0, 1]
    np.testing.assert_allclose(law.probs, [2 / 3, 1 / 3], rtol=1e-6)


def test_ties_are_cut_by_id() -> None:
    logits = row(1, 3, 2, 3, 2, 2)
    assert shape(logits, SamplingParams(temperature=1.0, top_k=1)).ids.tolist() == [1]
    assert shape(logits, SamplingParams(temperature=1.0, top_k=3)).ids.tolist() == [1, 2, 3]
    assert shape(logits, SamplingParams(temperature=1.0, top_k=4)).ids.tolist() == [1, 2, 3, 4]
    assert shape(logits, SamplingParams(temperature=1.0, min_p=1.0)).ids.tolist() == [1, 3]
    assert shape(logits, SamplingParams(temperature=1.0, top_p=1e-9)).ids.tolist() == [1]
    assert shape(logits, SamplingParams()).ids.tolist() == [1]
    assert shape(row(-0.0, 0.0), SamplingParams()).ids.tolist() == [0]


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_top_p_on_an_exact_edge(top_p: float, kept: int) -> None:
    assert shape(row(0, 0, 0, 0), SamplingParams(temperature=1.0, top_p=top_p)).ids.tolist() == list(range(kept))


def test_c01_top_k_at_or_above_the_vocabulary_is_off() -> None:
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    off = shape(logits, SamplingParams(temperature=0.7))
    for top_k in (0, 50, 51, 2**31, 2**63 - 1, 10**30):
        law = shape(logits, SamplingParams(temperature=0.7, top_k=top_k))
        assert law.ids.tolist() == off.ids.tolist() and (law.probs == off.probs).all()
    assert shape(logits, SamplingParams(temperature=0.7, top_k=49)).ids.size == 49
    assert shape(logits, SamplingParams(temperature=0.7, top_k=1)).ids.tolist() == [int(logits.argmax())]
    for wrong in (-1, 1.5, True):
        with pytest.raises(RequestError, match="top_k"):
            SamplingParams(temperature=0.7, top_k=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("top_p", [0.8, 1e-9, 0.0, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_c02_one_id_always_survives_and_top_k_1_is_greedy(temperature: float, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    best = [int(logits.argmax())]
    params = SamplingParams(temperature=temperature, top_k=1, top_p=top_p, min_p=min_p)
    assert shape(logits, params).ids.tolist() == best
    assert shape(logits, replace(params, top_k=0, top_p=0.0)).ids.tolist() == best
    check_form(shape(logits, replace(params, top_k=0)), 300)


def test_c04_a_row_does_not_depend_on_its_batch() -> None:
    batch = np.random.default_rng(3).standard_normal((6, 500)).astype(np.float32)
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.95, min_p=0.01),
    ):
        for i in range(6):
            solo = shape(batch[i].copy(), params)
            for other in (shape(batch[i], params), shape(np.asfortranarray(batch)[i], params)):
                assert (other.ids == solo.ids).all() and (other.probs == solo.probs).all()


def test_extreme_temperatures() -> None:
    logits = row(1, 3, -INF, 3, 2)
    cold = shape(logits, SamplingParams(temperature=1e-300))
    assert cold.ids.tolist() == [1, 3] and cold.probs.tolist() == [0.5, 0.5]  # the limit keeps exact ties
    assert shape(logits, SamplingParams(temperature=5e-324)).ids.tolist() == [1, 3]
    hot = shape(logits, SamplingParams(temperature=1e300))
    assert hot.ids.tolist() == [0, 1, 3, 4] and (hot.probs == 0.25).all()
    # Ranks come from the logits, not from probabilities that rounding made equal.
    assert shape(logits, SamplingParams(temperature=1e300, top_k=3)).ids.tolist() == [1, 3, 4]
    wide = row(3.4e38, -3.4e38, 0)
    assert shape(wide, SamplingParams(temperature=1.0)).ids.tolist() == [0]
    assert shape(wide, SamplingParams(temperature=1e-300, top_p=0.9, min_p=0.5)).ids.tolist() == [0]


def test_banned_ids_never_enter() -> None:
    logits = row(-INF, 1, -INF, 1, -INF)
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1e300, top_p=0.9999),
        SamplingParams(temperature=1.0, min_p=0.0, top_k=5),
    ):
        assert shape(logits, params).ids.tolist() == [1, 3]
    assert shape(row(-INF, -INF, -2), SamplingParams()).ids.tolist() == [2]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=2, top_p=0.9)])
def test_bad_rows_raise_with_a_census_and_never_yield_token_0(params: SamplingParams) -> None:
    with pytest.raises(NonFiniteError, match=r"2 NaN and 1 \+inf among 5") as caught:
        shape(row(0, math.nan, INF, math.nan, -INF), params)
    assert caught.value.code == "non_finite"
    with pytest.raises(NonFiniteError, match=r"0 NaN and 1 \+inf among 2"):
        shape(row(0, INF), params)
    with pytest.raises(NonFiniteError, match=r"1 NaN and 0 \+inf among 2"):
        shape(row(math.nan, 3), params)
    with pytest.raises(NonFiniteError, match="all 3 logits are -inf") as caught:
        shape(row(-INF, -INF, -INF), params)
    assert caught.value.code == "no_candidates"


def test_nan_is_seen_at_every_index() -> None:
    for i in range(67):
        logits = np.full(67, -INF, np.float32)
        logits[(i + 1) % 67] = 1.0
        logits[i] = math.nan
        with pytest.raises(NonFiniteError):
            finite_peak(logits)


def test_a_matrix_or_nothing_is_refused() -> None:
    for wrong in (np.zeros((1, 4), np.float32), np.zeros(0, np.float32)):
        with pytest.raises(ValueError, match="one row"):
            shape(wrong, SamplingParams())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([-INF, 0.0, 1.0, 2.0]), min_size=1, max_size=30), st.integers(0, 35))
def test_leading_takes_the_first_ranks(values: list[float], count: int) -> None:
    ranking = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert leading(np.array(values, np.float32), count).tolist() == sorted(ranking[:count])


@pytest.mark.parametrize("V", [49152, 262144])
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_real_vocabularies_agree_with_a_full_sort(V: int, spread: float) -> None:
    """Rounds of partial sorting and partitioning give what sorting everything gives, also with every logit equal."""
    logits = (np.random.default_rng(V).standard_normal(V) * spread).astype(np.float16).astype(np.float32)  # many ties
    ranking = np.argsort(-logits, kind="stable")
    P = np.exp(logits[ranking].astype(np.float64) - logits.max())
    before = np.concatenate([[0.0], np.cumsum(P)[:-1]]) / P.sum()
    for top_k, top_p, min_p in [(20, 0.95, 0.0), (0, 0.95, 0.0), (0, 0.3, 0.0), (5000, 0.9, 0.01), (0, 1.0, 0.1)]:
        keep = (before < top_p) & (min_p <= P)
        if top_k:
            keep[top_k:] = False
        law = shape(logits, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
        check_form(law, V)
        # Near the cut of a flat row one rank weighs about as much as the rounding of the sum before it.
        assert abs(law.ids.size - int(keep.sum())) <= 1
        n = min(law.ids.size, int(keep.sum()))
        assert np.isin(ranking[:n], law.ids).all()


def test_distribution_reads() -> None:
    law = shape(row(0, -INF, 0, 0), SamplingParams(temperature=1.0, top_k=2))
    assert [law.probability(i) for i in range(5)] == [0.5, 0.0, 0.5, 0.0, 0.0]
    assert law.dense().tolist() == [0.5, 0.0, 0.5, 0.0]
    assert Distribution.point_mass(3, vocab_size=5).dense().tolist() == [0, 0, 0, 1, 0]
