"""The block sampler: against the reference with the same noise, and what the lane relies on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from block_script import CASES, DRAWS, FIXTURE, Script
from canvas_reference import TableNoise
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import UsageError
from polytoken.lanes.canvas.block import (
    BlockPolicy,
    BlockState,
    BlockStep,
    accepted_slots,
    advance_block,
    answer_length,
    is_settled,
    start_block,
)
from polytoken.lanes.canvas.keys import KeyedNoise, NoiseSource
from polytoken.sampling.vocabulary import VocabularyRule, vocabulary_statistics

quick = settings(max_examples=40, deadline=None)
BASE = VocabularyRule(chunk=10)


def table_noise(script: Script) -> TableNoise:
    uniforms = np.stack([script.uniforms(draw) for draw in range(DRAWS)])
    # The reference draws the ids of a step before the step's canvas of noise, after `draw` canvases.
    return TableNoise(script.canvases, uniforms)


def denoise(
    script: Script, policy: BlockPolicy, state: BlockState, noise: NoiseSource, *, block: int, **limits: Any
) -> BlockStep:
    """One step of the scripted denoiser."""
    logits = mx.array(script.logits(np.array(state.canvas)[0], block=block, step=state.step))
    statistics = vocabulary_statistics(
        mx.ones((1, script.C, 1)),
        lambda flat, start, stop: logits[:, start:stop],
        policy.rule(BASE, state.step),
        vocab_size=script.V,
        noise=noise.step(state.draw),
    )
    return advance_block(policy, state, statistics, noise, **limits)


def answer(
    script: Script, policy: BlockPolicy, *, max_new_tokens: int, stop_ids: tuple[int, ...] = ()
) -> tuple[list[int], int]:
    """The loop as a lane runs it: ids of the answer, and denoises it took."""
    noise, ids, steps, draw = table_noise(script), list[int](), 0, 0
    for block in range(script.blocks):
        state = start_block(policy, noise, draw=draw)
        while True:
            limits = {"remaining": max_new_tokens - len(ids), "stop_ids": stop_ids}
            step = denoise(script, policy, state, noise, block=block, **limits)
            state, steps = step.state, steps + 1
            if step.settled.item():
                break
        draw = state.draw
        ids += step.argmax.tolist()[0][: step.length.item()]
        if ids[-1] in stop_ids or len(ids) >= max_new_tokens:
            break
    return ids, steps


@pytest.mark.parametrize("script", CASES, ids=lambda script: script.name)
def test_equals_the_reference_step_by_step(script: Script) -> None:
    """Argmax canvases, next canvases and step counts of transformers' own loop over the same denoiser and noise."""
    kept = np.load(Path(__file__).with_name(FIXTURE))
    want = {key: kept[f"{script.name}_{key}"] for key in ("argmax", "canvas", "steps")}
    policy, noise = replace(script.policy, settle_on="canvas"), table_noise(script)
    at, draw = 0, 0
    for block in range(script.blocks):
        state, settled = start_block(policy, noise, draw=draw), False
        for _ in range(want["steps"][block]):
            assert not settled
            step = denoise(script, policy, state, noise, block=block, remaining=10**6, stop_ids=())
            assert step.argmax.tolist()[0] == want["argmax"][at].tolist()
            assert step.state.canvas.tolist()[0] == want["canvas"][at].tolist()
            assert step.length.tolist() == [script.C]
            state, at, settled = step.state, at + 1, step.settled.item()
        assert settled
        draw = state.draw
    assert at == len(want["argmax"])


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 20])
def test_the_answer_is_exactly_as_long_as_asked(limit: int) -> None:
    script = CASES[3]
    ids, _ = answer(script, script.policy, max_new_tokens=limit)
    assert len(ids) == limit


def test_nothing_behind_a_stop_leaks_and_no_work_is_spent_on_it() -> None:
    script = CASES[0]
    stop = int(script.answers[0][2])
    whole, steps_whole = answer(script, replace(script.policy, settle_on="canvas"), max_new_tokens=20, stop_ids=(stop,))
    ids, steps = answer(script, script.policy, max_new_tokens=20, stop_ids=(stop,))
    for found in (ids, whole):
        assert found.count(stop) == 1 and found[-1] == stop and len(found) <= 3
    assert steps < steps_whole


@quick
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 20), st.sampled_from([(), (2,), (0, 3)]))
def test_answer_length_is_counted_by_hand(seed: int, C: int, remaining: int, stops: tuple[int, ...]) -> None:
    ids = np.random.default_rng(seed).integers(0, 8, (2, C)).astype(np.int32)
    got = answer_length(mx.array(ids), remaining=remaining, stop_ids=stops).tolist()
    for row, n in zip(ids.tolist(), got, strict=True):
        expected = min(remaining, C)
        for j, token_id in enumerate(row[:expected]):
            if token_id in stops:
                expected = j + 1
                break
        assert n == expected


@quick
@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([0.05, 0.5, 2.0, 50.0]))
def test_acceptance_is_the_sorted_sum(seed: int, C: int, bound: float) -> None:
    rng = np.random.default_rng(seed)
    e = (rng.integers(0, 9, C) / 16).astype(np.float32)  # sixteenths: sums are exact and ties are common
    order = np.argsort(e, kind="stable")
    total, want = 0.0, np.zeros(C, bool)
    for slot in order:
        want[slot] = total <= bound
        total += float(e[slot])
    got = np.array(accepted_slots(mx.array(e)[None], bound))[0]
    assert got.tolist() == want.tolist()
    assert got[order[0]]


def test_entropies_a_trifle_below_zero_count_as_zero() -> None:
    assert accepted_slots(mx.array([[-1e-6, -2e-6, 0.2]]), 1e-9).tolist() == [[True, True, True]]


def test_unaccepted_slots_take_the_noise_of_this_draw() -> None:
    script = CASES[0]
    noise = KeyedNoise(3, script.C, script.V)
    policy = replace(script.policy, entropy_bound=1e-9)
    state = start_block(policy, noise, draw=5)
    assert state.canvas.tolist() == noise.canvas(5).tolist() and state.draw == 6
    step = denoise(script, policy, state, noise, block=0, remaining=99, stop_ids=())
    fresh = np.array(noise.canvas(6))[0]
    assert (np.array(step.state.canvas)[0] == fresh).sum() >= script.C - 1
    assert step.state.draw == 7 and step.state.step == state.step - 1


def test_only_watched_slots_must_stand_still() -> None:
    policy = BlockPolicy(stability_threshold=1, confidence_threshold=0.1)
    argmax = mx.array([[1, 2, 3, 4]], mx.int32)
    history = mx.array([[[1, 2, 9, 9]]], mx.int32)
    entropy = mx.array([[0.0, 0.1, 5.0, 5.0]])

    def settled(watched: int, **changes: Any) -> bool:
        changed = replace(policy, **changes)
        return bool(is_settled(changed, argmax, entropy, history, mx.array([watched], mx.int32)).item())

    assert settled(2)
    assert not settled(3)
    assert not settled(2, confidence_threshold=0.04)
    none_yet = mx.full((1, 1, 4), -1, mx.int32)
    assert not is_settled(policy, argmax, entropy, none_yet, mx.array([1], mx.int32)).item()


def test_the_last_step_always_ends_the_canvas() -> None:
    script = CASES[0]
    policy = BlockPolicy(max_denoising_steps=1, confidence_threshold=1e-9)
    noise = KeyedNoise(0, script.C, script.V)
    step = denoise(script, policy, start_block(policy, noise, draw=0), noise, block=0, remaining=4, stop_ids=())
    assert step.settled.tolist() == [True] and step.length.tolist() == [4]


def test_temperature_falls_with_the_countdown() -> None:
    policy = BlockPolicy()
    assert policy.temperature(48) == pytest.approx(0.8)
    assert policy.temperature(24) == pytest.approx(0.6)
    assert policy.temperature(1) == pytest.approx(0.4 + 0.4 / 48)
    rule = policy.rule(VocabularyRule(top_k=40, repetition_penalty=1.2, chunk=9), 24)
    assert (rule.top_k, rule.min_p, rule.chunk, rule.repetition_penalty) == (None, None, 9, 1.2)
    assert rule.temperature == pytest.approx(0.6)


def test_settings_of_a_checkpoint() -> None:
    generation = {
        "max_denoising_steps": 12,
        "t_min": None,
        "t_max": 0.9,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25},
        "eos_token_id": [1],
    }
    expected = BlockPolicy(max_denoising_steps=12, t_max=0.9, entropy_bound=0.25)
    assert BlockPolicy.from_generation(generation) == expected
    assert BlockPolicy.from_generation({}) == BlockPolicy()
    with pytest.raises(UsageError, match="sampler_config"):
        BlockPolicy.from_generation({"sampler_config": {"_cls_name": "Other"}})


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"max_denoising_steps": 0}, "max_denoising_steps"),
        ({"entropy_bound": 0.0}, "entropy_bound"),
        ({"t_min": -0.1}, "t_min"),
        ({"t_min": 0.9}, "t_max"),
        ({"t_min": 0.0, "t_max": 0.0}, "t_max"),
        ({"stability_threshold": -1}, "stability_threshold"),
        ({"confidence_threshold": math.nan}, "confidence_threshold"),
        ({"settle_on": "nothing"}, "settle_on"),
    ],
)
def test_a_bad_setting_is_named(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        BlockPolicy(**setting)
    assert caught.value.field == name
