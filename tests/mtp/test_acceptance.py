"""Exact acceptance: against enumeration, at its edges, and in the order of its draws."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from enumeration import ALMOST_ONE, Prefix, emitted, plain, ways
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import NonFiniteError
from polytoken.request import SamplingParams
from polytoken.sampling.acceptance import (
    Origin,
    accept_greedy,
    accept_probability,
    accept_window,
    residual,
)
from polytoken.sampling.choose import pick
from polytoken.sampling.draws import Draws, Purpose
from polytoken.sampling.law import Distribution, shape


def law(**probs: float) -> Distribution:
    """law(a=0.5, c=0.5) over the ids a to h."""
    ids = sorted(ord(name) - ord("a") for name in probs)
    return Distribution(np.array(ids), np.array([probs[chr(i + ord("a"))] for i in ids]), 8)


@cache
def random_law(seed: int, prefix: Prefix, V: int, params: SamplingParams | None = None) -> Distribution:
    """A law that depends on everything before it."""
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    z = rng.normal(0.0, 2.0, V).astype(np.float32)
    return shape(z, params or SamplingParams(temperature=1.0))


SAMPLERS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    SamplingParams(temperature=1.3, top_k=3, min_p=0.1),
)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("params", SAMPLERS, ids=["plain", "usual", "sparse"])
@pytest.mark.parametrize("drafting", ["close", "independent", "sharp", "copied"])
def test_every_path_together_gives_the_target_law(depth: int, params: SamplingParams, drafting: str) -> None:
    """The first four tokens, over all windows that lead to them, to 1e-12."""
    V = 4 if depth < 3 else 3
    sharp = SamplingParams(temperature=0.2)

    def p(prefix: Prefix) -> Distribution:
        return random_law(1, prefix, V, params)

    def q(prefix: Prefix) -> Distribution:
        if drafting == "close":
            return random_law(1, prefix, V, SamplingParams(temperature=1.0))
        return random_law(2, prefix, V, sharp if drafting == "sharp" else None)

    copied = drafting == "copied"
    spoken = emitted(p, None if copied else q, depth=depth, count=4, copied=(2, 0, 1) if copied else ())
    truth = plain(p, count=4)
    assert abs(math.fsum(spoken.values()) - 1.0) < 1e-12
    assert all(abs(spoken.get(tokens, 0.0) - truth.get(tokens, 0.0)) < 1e-12 for tokens in {*spoken, *truth})


def test_eight_ids_at_depth_three() -> None:
    def p(prefix: Prefix) -> Distribution:
        return random_law(5, prefix, 8, SAMPLERS[1])

    def q(prefix: Prefix) -> Distribution:
        return random_law(6, prefix, 8)

    # one window, and plain tokens behind it; the test above has several windows in a row
    spoken: dict[Prefix, float] = {}
    for weight, tokens in ways((), p, q, depth=3):
        for rest, chance in plain(p, count=4, after=tokens).items():
            spoken[rest] = spoken.get(rest, 0.0) + weight * chance
    truth = plain(p, count=4)
    assert all(abs(spoken.get(tokens, 0.0) - truth.get(tokens, 0.0)) < 1e-12 for tokens in {*spoken, *truth})


sparse_laws = st.dictionaries(st.integers(0, 7), st.floats(1e-6, 1.0), min_size=1, max_size=8).map(
    lambda weights: Distribution(
        np.array(sorted(weights)), np.array([weights[i] for i in sorted(weights)]) / math.fsum(weights.values()), 8
    )
)


@given(p=sparse_laws, q=sparse_laws)
@settings(max_examples=200, deadline=None)
def test_one_step_gives_p(p: Distribution, q: Distribution) -> None:
    """sum_x q(x) [alpha(x) delta_x + (1 - alpha(x)) r] = p, for any two supports."""
    r = residual(p, q)
    total = np.zeros(8)
    for x, share in zip(q.ids.tolist(), q.probs.tolist(), strict=True):
        alpha = accept_probability(p, q, x)
        total[x] += share * alpha
        total += share * (1.0 - alpha) * r.dense()
    assert np.abs(total - p.dense()).max() < 1e-12


@given(p=sparse_laws)
@settings(max_examples=50, deadline=None)
def test_d09_equal_laws_never_reject_and_an_empty_residual_is_p(p: Distribution) -> None:
    assert all(accept_probability(p, p, x) == 1.0 for x in p.ids.tolist())
    assert residual(p, p) is p
    twin = Distribution(p.ids.copy(), p.probs.copy(), 8)
    assert residual(p, twin) is p
    x = int(p.ids[0])
    verdict = accept_window([x], lambda j: p, q=[twin], uniform=lambda *_: ALMOST_ONE, room=1)
    assert (verdict.accepted, verdict.token) == (1, None)


def test_d09_laws_without_a_common_id() -> None:
    p, q = law(a=0.25, b=0.75), law(c=1.0)
    assert accept_probability(p, q, 2) == 0.0
    assert np.array_equal(residual(p, q).dense(), p.dense())
    # a coin of exactly 0 does not accept what p cannot give
    verdict = accept_window([2], lambda j: p, q=[q], uniform=lambda *_: 0.0, room=5)
    assert (verdict.accepted, verdict.token, verdict.origin) == (0, 0, Origin.CORRECTION)


def test_d09_a_one_hot_draft_leaves_p_without_it() -> None:
    p = law(a=0.25, b=0.5, c=0.25)
    q = Distribution.point_mass(1, vocab_size=8)
    assert accept_probability(p, q, 1) == 0.5
    assert residual(p, q).dense()[:3].tolist() == [0.5, 0.0, 0.5]
    # a draft that q says it cannot give: any p above 0 accepts it
    assert accept_probability(p, q, 0) == 1.0 and accept_probability(p, q, 7) == 0.0


def test_d09_nan_fails() -> None:
    nan = Distribution(np.array([0, 1]), np.array([np.nan, 0.5]), 8)
    fine = law(a=0.5, b=0.5)
    for p, q in ((nan, fine), (fine, nan)):
        with pytest.raises(NonFiniteError):
            accept_probability(p, q, 0)
        with pytest.raises(NonFiniteError):
            residual(p, q)
    with pytest.raises(NonFiniteError):  # a row of half-precision logits that overflowed
        accept_window(
            [0],
            lambda j: shape(np.array([np.float16("inf"), 0], np.float32), SAMPLERS[0]),
            q=None,
            uniform=lambda *_: 0.5,
            room=5,
        )


def test_d05_the_first_draft_is_examined_like_any_other() -> None:
    p = [law(a=1.0), law(b=1.0), law(c=1.0)]
    verdict = accept_window([3], lambda j: p[j], q=None, uniform=lambda *_: 0.0, room=9)
    assert (verdict.accepted, verdict.token) == (0, 0)
    assert accept_greedy([3], [0, 1], room=9).accepted == 0


def test_each_draft_meets_the_law_behind_the_drafts_before_it() -> None:
    asked: list[int] = []
    p = [law(a=1.0), law(b=1.0), law(c=1.0), law(d=1.0)]

    def ask(j: int) -> Distribution:
        asked.append(j)
        return p[j]

    verdict = accept_window([0, 1, 2], ask, q=None, uniform=lambda *_: 0.0, room=9)
    assert (verdict.accepted, verdict.token, verdict.origin) == (3, 3, Origin.BONUS)
    assert asked == [0, 1, 2, 3]
    asked.clear()
    verdict = accept_window([0, 7, 2], ask, q=None, uniform=lambda *_: 0.0, room=9)
    assert (verdict.accepted, verdict.token, verdict.origin) == (1, 1, Origin.CORRECTION)
    assert asked == [0, 1]  # nothing is shaped that nobody needs


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_d01_a_stop_id_ends_the_window_wherever_it_stands(at: int) -> None:
    drafts = [10, 11, 12, 13]
    p = [Distribution.point_mass(x, vocab_size=32) for x in [*drafts, 14]]
    stop = {drafts[at]}
    for verdict in (
        accept_window(drafts, lambda j: p[j], q=None, uniform=lambda *_: 0.0, room=9, stop_ids=stop),
        accept_greedy(drafts, [*drafts, 14], room=9, stop_ids=stop),
    ):
        assert (verdict.accepted, verdict.token, verdict.origin) == (at + 1, None, None)


def test_d02_no_bonus_beyond_the_room_and_a_stop_within_it_wins() -> None:
    drafts, choices = [10, 11, 2], [10, 11, 2, 20]
    assert accept_greedy(drafts, choices, room=3).token is None
    assert accept_greedy(drafts, choices, room=4).token == 20
    stopped = accept_greedy(drafts, choices, room=3, stop_ids={2})
    assert (stopped.accepted, stopped.token) == (3, None)


def test_without_drafts_the_token_is_plainly_drawn() -> None:
    draws, p = Draws(7, log=[]), law(a=0.25, b=0.5, d=0.25)
    verdict = accept_window([], lambda j: p, q=[], uniform=lambda u, j: draws.uniform(4 + j, u), room=3)
    assert verdict.token == pick(p, Draws(7).uniform(4, Purpose.TOKEN))
    assert verdict.origin is Origin.TOKEN and [d.purpose for d in draws.log or ()] == [Purpose.TOKEN]


def test_d12_coins_and_corrections_are_independent_and_repeatable() -> None:
    """The number that rejects says nothing about the number that draws the replacement."""
    coins, draws = [], []
    for position in range(4000):
        coin = Draws(11).uniform(position, Purpose.ACCEPT)
        if coin >= 0.5:  # a rejection
            coins.append(coin)
            draws.append(Draws(11).uniform(position, Purpose.CORRECTION))
    assert abs(np.corrcoef(coins, draws)[0, 1]) < 0.07  # three standard errors
    assert abs(np.mean(draws) - 0.5) < 0.02 and min(draws) < 0.01  # over the whole of [0, 1)


def test_draws_come_in_order_and_at_the_places_of_their_tokens() -> None:
    draws = Draws(3, log=[])
    p = [law(a=0.9, b=0.1), law(a=0.9, b=0.1), law(b=0.4, c=0.6)]
    q = [law(a=0.5, b=0.5)] * 2

    def uniform(purpose: Purpose, j: int) -> float:
        return draws.uniform(5 + j, purpose)

    verdict = accept_window([0, 0], lambda j: p[j], q=q, uniform=uniform, room=9)
    assert verdict.accepted == 2 and verdict.origin is Origin.BONUS
    seen = [(draw.position, draw.purpose) for draw in draws.log or ()]
    assert seen == [(5, Purpose.ACCEPT), (6, Purpose.ACCEPT), (7, Purpose.BONUS)]


@given(
    drafts=st.lists(st.integers(0, 3), max_size=5),
    choices=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    room=st.integers(1, 7),
    stop=st.sets(st.integers(0, 3), max_size=1),
)
@settings(max_examples=200, deadline=None)
def test_greedy_is_the_sampled_rule_with_point_masses(
    drafts: list[int], choices: list[int], room: int, stop: set[int]
) -> None:
    drafts = drafts[:room]
    one = accept_greedy(drafts, choices, room=room, stop_ids=stop)
    other = accept_window(
        drafts,
        lambda j: Distribution.point_mass(choices[j], vocab_size=4),
        q=None,
        uniform=lambda *_: 0.0,
        room=room,
        stop_ids=stop,
    )
    assert (one.accepted, one.token, one.origin) == (other.accepted, other.token, other.origin)
    assert one.probabilities == other.probabilities
