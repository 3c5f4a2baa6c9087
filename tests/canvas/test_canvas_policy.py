"""The commit policy against the rules enumerated row by row, and the properties that hold for any input."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from canvas_reference import Choice, failure, select
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polytoken.errors import UsageError
from polytoken.lanes.canvas.policy import (
    CommitPolicy,
    CommitReason,
    clip_at_stop,
    commit_reasons,
    failure_rate,
    prefix_lengths,
    select_commit,
)
from polytoken.models.canvas import CommitSettings

quick = settings(max_examples=60, deadline=None)
STOPS = (1, 9)

policies = st.builds(
    CommitPolicy,
    failure_budget=st.sampled_from([0.05, 0.2, 0.7, 1.0]),
    stagnation_threshold=st.sampled_from([1, 2, 3, 64]),
    max_ponder_steps=st.sampled_from([1, 3, 5, 64]),
    min_progress=st.sampled_from([-0.1, 0.005, 0.3]),
    entropy_weight=st.sampled_from([0.0, 1.0, 3.0]),
    confidence_power=st.sampled_from([0.5, 2.0, 4.0]),
    top_k=st.sampled_from([None, 1, 5, 40]),
    min_p=st.sampled_from([None, 0.05, 0.5]),
    target_confidence=st.sampled_from([None, 0.5, 0.9]),
)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `select_commit` as numpy arrays, B rows of C positions; failures span settled and hopeless."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    B, C = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    scale = draw(st.sampled_from([0.02, 0.1, 1.0]))

    def rates() -> np.ndarray:
        return (rng.random((B, C)) * scale).astype(np.float32)

    return {
        "sampled": rng.integers(0, 14, (B, C)).astype(np.int32),
        "f_new": rates(),
        "f_old": rates(),
        "greedy": rng.integers(0, 14, (B, C)).astype(np.int32),
        "f_greedy": rates(),
        "ponder_steps": rng.integers(0, 6, B).astype(np.int32),
        "stagnation_steps": rng.integers(0, 4, B).astype(np.int32),
        "active": rng.random(B) < 0.85,
        "remaining": rng.integers(0, C + 4, B).astype(np.int32),
    }


def choose(policy: CommitPolicy, batch: dict[str, Any], stops: tuple[int, ...] = STOPS) -> list[Choice]:
    arrays = {name: mx.array(value) for name, value in batch.items()}
    got = select_commit(policy, stop_ids=stops, **arrays)
    for name in ("normal_lengths", "lengths", "ids", "ponder_steps", "stagnation_steps"):
        assert getattr(got, name).dtype == mx.int32
    lengths = got.lengths.tolist()
    return [
        Choice(
            normal=got.normal_lengths.tolist()[row],
            length=n,
            ids=got.ids.tolist()[row][:n],
            jumped=got.jumped.tolist()[row],
            ponder=got.ponder_steps.tolist()[row],
            stagnation=got.stagnation_steps.tolist()[row],
        )
        for row, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("p", "H", "expected"),
    [(0.99, 0.0, 0.0199), (0.95, 0.0, 0.0975), (0.9, 0.5, 0.2201), (0.5, 2.0, 0.9546), (0.25, 0.0, 0.9375)],
)
def test_examples_of_the_failure_rate(p: float, H: float, expected: float) -> None:
    assert failure_rate(mx.array(p), mx.array(H), CommitPolicy()).item() == pytest.approx(expected, abs=5e-5)


@quick
@given(st.floats(0, 1), st.floats(-1e-4, 13), policies)
def test_failure_rate_is_the_formula(p: float, H: float, policy: CommitPolicy) -> None:
    q = 1 - failure(p, H, replace(policy, target_confidence=None))
    assume(policy.target_confidence is None or abs(q - policy.target_confidence) > 1e-4)  # a step lies there
    got = failure_rate(mx.array([[p]]), mx.array([[H]]), policy).item()
    # 1e-6 is a few steps of float32 beside 1, hence the loose end.
    assert got == pytest.approx(failure(p, H, policy), abs=2e-4)
    assert 0.0 < got < 1.0 or (policy.target_confidence and got == policy.failure_budget)


def test_defaults_are_the_core_formula() -> None:
    """With the knobs at their defaults: 1 - sigmoid(logit p - excess)^2."""
    p, H = np.meshgrid(np.linspace(0.01, 0.99, 25), np.linspace(0.0, 12.0, 25))
    h2 = -p * np.log(p) - (1 - p) * np.log(1 - p)
    core = 1 - (1 / (1 + np.exp(np.maximum(H - h2, 0) - np.log(p / (1 - p))))) ** 2
    got = failure_rate(mx.array(p.astype(np.float32)), mx.array(H.astype(np.float32)), CommitPolicy())
    np.testing.assert_allclose(np.array(got), np.clip(core, 1e-6, 1 - 1e-6), atol=2e-6)


@quick
@given(policies)
def test_failure_rate_falls_with_confidence_and_rises_with_entropy(policy: CommitPolicy) -> None:
    p, H = mx.linspace(0, 1, 60), mx.linspace(0, 12, 50)
    f = np.array(failure_rate(mx.broadcast_to(p[:, None], (60, 50)), mx.broadcast_to(H[None], (60, 50)), policy))
    assert (np.diff(f, axis=0) <= 1e-6).all()
    assert (np.diff(f, axis=1) >= -1e-6).all()


@pytest.mark.parametrize(
    ("rates", "budget", "expected"),
    [([0.05, 0.04, 0.10, 0.01], 0.1, 2), ([0.25, 0.0], 0.25, 0), ([0.0, 0.0, 0.0], 0.1, 3), ([1.5, 1.5], 2.5, 2)],
)
def test_examples_of_the_prefix_rule(rates: list[float], budget: float, expected: int) -> None:
    f = mx.array([rates])
    assert prefix_lengths(f, mx.ones(f.shape, mx.bool_), budget=budget).tolist() == [expected]


def test_a_prefix_ends_at_the_first_invalid_position() -> None:
    valid = mx.array([[True, False, True]])
    assert prefix_lengths(mx.array([[0.01, math.nan, 0.01]]), valid, budget=0.5).tolist() == [1]


def test_stop_clipping() -> None:
    ids = mx.array([[4, 9, 1, 9], [4, 4, 4, 1], [1, 4, 4, 4]], mx.int32)
    lengths = mx.array([4, 3, 0], mx.int32)
    assert clip_at_stop(ids, lengths, STOPS).tolist() == [2, 3, 0]
    assert clip_at_stop(ids, lengths, ()).tolist() == [4, 3, 0]


@quick
@given(policies, batches(), st.sampled_from([STOPS, (), (3,)]))
def test_selection_is_the_rule_enumerated(policy: CommitPolicy, batch: dict[str, Any], stops: tuple[int, ...]) -> None:
    for row, got in enumerate(choose(policy, batch, stops)):
        want = select(
            policy,
            **{name: batch[name][row] for name in ("sampled", "f_new", "f_old", "greedy", "f_greedy")},
            ponder=int(batch["ponder_steps"][row]),
            stagnation=int(batch["stagnation_steps"][row]),
            active=bool(batch["active"][row]),
            remaining=int(batch["remaining"][row]),
            stops=stops,
        )
        assert got == want


@quick
@given(policies, batches())
def test_what_holds_for_every_selection(policy: CommitPolicy, batch: dict[str, Any]) -> None:
    for row, got in enumerate(choose(policy, batch)):
        C = batch["sampled"].shape[1]
        remaining, f = int(batch["remaining"][row]), batch["f_new"][row].astype(np.float64)
        assert 0 <= got.length <= min(remaining, C)
        assert all(token_id not in STOPS for token_id in got.ids[:-1])
        if got.jumped:
            assert got.length >= 1 and got.normal == 0
        else:
            assert got.length == got.normal
            if got.normal:
                assert f[: got.normal].sum() < policy.failure_budget + 1e-6
            full = got.normal == min(remaining, C) or (got.ids and got.ids[-1] in STOPS)
            if batch["active"][row] and not full:
                assert f[: got.normal + 1].sum() >= policy.failure_budget - 1e-6
        if got.length:
            assert got.ponder == got.stagnation == 0
        if not batch["active"][row]:
            assert got.length == 0
            assert got.ponder == batch["ponder_steps"][row] and got.stagnation == batch["stagnation_steps"][row]


@quick
@given(policies, batches())
def test_a_jump_that_is_due_always_commits(policy: CommitPolicy, batch: dict[str, Any]) -> None:
    due = replace(policy, max_ponder_steps=1)
    for row, got in enumerate(choose(due, batch)):
        if batch["active"][row] and batch["remaining"][row] > 0:
            assert got.length >= 1


@quick
@given(policies, batches())
def test_invalid_positions_have_no_say(policy: CommitPolicy, batch: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    outside = np.arange(batch["sampled"].shape[1])[None, :] >= batch["remaining"][:, None]
    changed = dict(batch)
    for name in ("sampled", "greedy"):
        changed[name] = np.where(outside, rng.integers(0, 14, outside.shape), batch[name]).astype(np.int32)
    for name in ("f_new", "f_old", "f_greedy"):
        changed[name] = np.where(outside, rng.normal(0, 5, outside.shape), batch[name]).astype(np.float32)
    assert choose(policy, changed) == choose(policy, batch)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), policies)
def test_normal_lengths_are_monotone_in_the_knobs(seed: int, policy: CommitPolicy) -> None:
    rng = np.random.default_rng(seed)
    p = mx.array(1 - rng.random((4, 12)) ** 3 * 0.3)
    H = mx.array(rng.random((4, 12)) * 0.4)
    ids = mx.array(rng.integers(0, 14, (4, 12)).astype(np.int32))
    zeros = mx.zeros((4,), mx.int32)

    def lengths(**knobs: Any) -> np.ndarray:
        knobbed = replace(policy, **knobs)
        f = failure_rate(p, H, knobbed)
        got = select_commit(
            knobbed,
            sampled=ids,
            f_new=f,
            f_old=f,
            greedy=ids,
            f_greedy=f,
            ponder_steps=zeros,
            stagnation_steps=zeros,
            active=mx.ones((4,), mx.bool_),
            remaining=zeros + 10,
            stop_ids=STOPS,
        )
        return np.array(got.normal_lengths)

    def never_falls(field: str, values: list[Any]) -> None:
        found = [lengths(**{field: value}) for value in values]
        assert all((late >= early).all() for early, late in pairwise(found))

    never_falls("failure_budget", [0.05, 0.2, 0.5, 1.0])
    never_falls("target_confidence", [0.95, 0.7, 0.2, None])
    never_falls("entropy_weight", [4.0, 1.0, 0.3, 0.0])
    never_falls("confidence_power", [4.0, 2.0, 0.5])


def one_row(policy: CommitPolicy, f_old: list[float], f_new: list[float], *, ponder: int, stagnation: int) -> Choice:
    C = len(f_new)
    ids = np.full((1, C), 7, np.int32)
    batch = {
        "sampled": ids,
        "f_new": np.array([f_new], np.float32),
        "f_old": np.array([f_old], np.float32),
        "greedy": ids + 1,
        "f_greedy": np.full((1, C), 0.75, np.float32),
        "ponder_steps": np.array([ponder], np.int32),
        "stagnation_steps": np.array([stagnation], np.int32),
        "active": np.array([True]),
        "remaining": np.array([C], np.int32),
    }
    return choose(policy, batch)[0]


JUMP = Choice(0, 2, [8, 8], True, 0, 0)  # two failures of 0.75 stay below 2, three do not


@pytest.mark.parametrize(
    ("ponder", "stagnation", "expected"),
    [
        (0, 1, Choice(0, 0, [], False, 1, 2)),
        (0, 2, JUMP),  # the third step without progress
        (62, 0, Choice(0, 0, [], False, 63, 1)),
        (63, 0, JUMP),  # the sixty-fourth step without a commit
    ],
)
def test_jumps_are_due_by_the_advanced_clocks(ponder: int, stagnation: int, expected: Choice) -> None:
    policy = CommitPolicy(stagnation_threshold=3)
    assert one_row(policy, [0.5] * 4, [0.5] * 4, ponder=ponder, stagnation=stagnation) == expected


@pytest.mark.parametrize(
    ("f_old", "f_new", "progress"),
    [
        ([0.75, 0.0, 0.0], [0.5, 1.0, 1.0], True),  # only the first position counts
        ([0.74, 0.9, 0.9], [0.5, 0.0, 0.0], False),
        ([0.1, 0.9, 0.0], [0.3, 0.2, 1.0], True),  # the old prefix of 1 brings the second position in: mean 0.25
        ([0.1, 0.9, 0.9], [0.3, 0.25, 0.0], False),  # and no third
    ],
)
def test_progress_is_measured_up_to_the_frontier(f_old: list[float], f_new: list[float], progress: bool) -> None:
    got = one_row(CommitPolicy(min_progress=0.2499), f_old, f_new, ponder=0, stagnation=4)
    assert (got.ponder, got.stagnation) == (1, 0 if progress else 5)


def test_the_least_progress_is_progress() -> None:
    assert one_row(CommitPolicy(min_progress=0.25), [0.75], [0.5], ponder=0, stagnation=4).stagnation == 0


def test_commit_reasons() -> None:
    ids = mx.array([[7, 8], [7, 8], [7, 9], [9, 7], [1, 2], [9, 7]], mx.int32)
    lengths = mx.array([0, 2, 2, 1, 2, 2], mx.int32)
    jumped = mx.array([False, True, True, False, False, False])
    got = commit_reasons(lengths, jumped, ids, STOPS)
    R = CommitReason
    assert got.dtype == mx.int32
    assert got.tolist() == [R.NOTHING, R.JUMP, R.TERMINAL, R.TERMINAL, R.NORMAL, R.NORMAL]
    assert [int(reason) for reason in R] == [0, 1, 2, 3]


def test_defaults() -> None:
    policy = CommitPolicy()
    assert (policy.failure_budget, policy.jump_budget, policy.stagnation_threshold) == (0.2, 2.0, 12)
    assert (policy.max_ponder_steps, policy.min_progress) == (64, 0.005)
    assert (policy.entropy_weight, policy.confidence_power) == (1.0, 2.0)
    assert policy.top_k is policy.min_p is policy.target_confidence is None


def test_policy_of_a_checkpoint() -> None:
    commit = CommitSettings(
        failure_budget=0.3,
        entropy_weight=2.0,
        confidence_power=1.5,
        sample_top_k=40,
        sample_min_p=0.05,
        failure_top_k=None,
        failure_min_p=0.1,
        target_confidence=None,
        denoise_temperature=1.0,
    )
    got = CommitPolicy.from_settings(commit, {"max_ponder_steps": 5, "min_trajectory_progress": None})
    assert got == CommitPolicy(
        failure_budget=0.3, entropy_weight=2.0, confidence_power=1.5, min_p=0.1, max_ponder_steps=5
    )


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"failure_budget": 0.0}, "commit_failure_budget"),
        ({"failure_budget": math.inf}, "commit_failure_budget"),
        ({"failure_budget": math.nan}, "commit_failure_budget"),
        ({"failure_budget": "0.2"}, "commit_failure_budget"),
        ({"failure_budget": 1.5, "target_confidence": 0.5}, "commit_failure_budget"),
        ({"jump_budget": 1.0}, "jump_budget"),
        ({"stagnation_threshold": 0}, "jump_on_no_progress_after"),
        ({"max_ponder_steps": 1.5}, "max_ponder_steps"),
        ({"min_progress": math.nan}, "min_trajectory_progress"),
        ({"entropy_weight": -0.1}, "commit_entropy_weight"),
        ({"confidence_power": 0}, "commit_confidence_power"),
        ({"top_k": 0}, "commit_top_k"),
        ({"top_k": True}, "commit_top_k"),
        ({"min_p": 0.0}, "commit_min_p"),
        ({"min_p": 1.0}, "commit_min_p"),
        ({"target_confidence": 1.0}, "commit_target_confidence"),
    ],
)
def test_a_bad_setting_is_named(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        CommitPolicy(**setting)
    assert caught.value.field == name


def test_a_budget_above_1_is_fine_without_a_target() -> None:
    assert CommitPolicy(failure_budget=3).failure_budget == 3
