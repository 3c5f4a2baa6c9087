"""One request's sampler: seeds, bans, isolation between requests, and the greedy path on the device."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from polytoken.errors import NonFiniteError, RequestError
from polytoken.request import SamplingParams, derive_seed
from polytoken.sampling.law import finite_peak
from polytoken.sampling.sampler import Choice, TokenSampler, device_greedy

V = 60
HOT = SamplingParams(temperature=1.0)


def logits_at(step: int, *, salt: int = 0) -> np.ndarray:
    return np.random.default_rng([step, salt]).standard_normal(V).astype(np.float32) * 2


def advance(sampler: TokenSampler, step: int, *, salt: int = 0) -> Choice:
    choice = sampler.choose(logits_at(step, salt=salt), position=step)
    sampler.observe(choice.token_id)
    return choice


def text(params: SamplingParams, seed: int, *, steps: int = 20, salt: int = 0) -> list[Choice]:
    sampler = TokenSampler(params, seed=seed, vocab_size=V, prompt_ids=[1, 2, 3])
    return [advance(sampler, step, salt=salt) for step in range(steps)]


def ids_of(choices: list[Choice]) -> list[int]:
    return [choice.token_id for choice in choices]


MIXED = [
    SamplingParams(),
    HOT,
    SamplingParams(temperature=0.7, top_k=2**63 - 1, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.1, logprobs=3),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logprobs=0),
    SamplingParams(temperature=1.0, frequency_penalty=1.0, logit_bias=((4, -100.0), (9, 3.0))),
]


def test_c05_unseeded_requests_differ_and_seeded_ones_repeat() -> None:
    seeds = [derive_seed(42, f"req-{i}") for i in range(10)]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda seed: tuple(ids_of(text(HOT, seed))), seeds))
    assert len(set(texts)) == 10
    first, second, third = (ids_of(text(HOT, seed)) for seed in (1, 2, 1))
    assert first == third != second


def test_c06_a_seed_means_the_same_in_any_company() -> None:
    alone = text(HOT, 42)
    assert text(HOT, 42) == alone
    samplers = [TokenSampler(HOT, seed=seed, vocab_size=V) for seed in (5, 42, 42, 6, 7)]
    together = [[] for _ in samplers]  # type: ignore[var-annotated]
    for step in range(20):
        for i in np.random.default_rng(step).permutation(len(samplers)):
            together[i].append(advance(samplers[i], step))
    assert together[1] == together[2] == alone
    assert together[0] != alone


def test_a23_c01_mixed_requests_that_join_and_leave_equal_their_solo_runs() -> None:
    for round_ in range(10):
        rng = np.random.default_rng(round_)
        starts, lengths = rng.integers(0, 5, len(MIXED)), rng.integers(1, 12, len(MIXED))
        rows = [TokenSampler(p, seed=i, vocab_size=V, prompt_ids=[1, 2, 3]) for i, p in enumerate(MIXED)]
        got: list[list[Choice]] = [[] for _ in MIXED]
        for turn in range(20):
            for i, sampler in enumerate(rows):
                step = turn - int(starts[i])
                if 0 <= step < lengths[i]:
                    got[i].append(advance(sampler, step, salt=i))
        for i, params in enumerate(MIXED):
            assert got[i] == text(params, i, steps=int(lengths[i]), salt=i)


def test_an_error_in_one_row_touches_no_other() -> None:
    good, bad = (TokenSampler(HOT, seed=3, vocab_size=V) for _ in range(2))
    with pytest.raises(NonFiniteError):
        bad.choose(np.full(V, math.nan, np.float32), position=0)
    assert advance(good, 0) == text(HOT, 3, steps=1)[0]


def test_choosing_twice_changes_nothing() -> None:
    for params in MIXED:
        sampler = TokenSampler(params, seed=1, vocab_size=V, prompt_ids=[1, 2, 3])
        assert sampler.choose(logits_at(0), position=0) == sampler.choose(logits_at(0), position=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c10_bans_and_pushes_hold_when_greedy_and_when_sampled(temperature: float) -> None:
    logits = np.zeros(V, np.float32)
    logits[7] = 50.0
    banned = SamplingParams(temperature=temperature, logit_bias=((7, -100.0),))
    pushed = SamplingParams(temperature=temperature, logit_bias=((7, -100.0), (20, 100.0)))
    for seed in range(30):
        assert TokenSampler(banned, seed=seed, vocab_size=V).choose(logits, position=0).token_id != 7
        assert TokenSampler(pushed, seed=seed, vocab_size=V).choose(logits, position=0).token_id == 20
    allowed = np.zeros(V, np.bool_)
    allowed[[30, 31]] = True
    for seed in range(30):
        masked = TokenSampler(banned, seed=seed, vocab_size=V).choose(logits, position=0, allowed=allowed)
        assert masked.token_id in (30, 31)


def test_every_id_banned_is_an_error() -> None:
    params = SamplingParams(logit_bias=tuple((i, -100.0) for i in range(V)))
    with pytest.raises(NonFiniteError, match="no id is left"):
        TokenSampler(params, seed=0, vocab_size=V).choose(logits_at(0), position=0)


def test_penalties_do_not_hide_an_infinity() -> None:
    logits = logits_at(0)
    logits[1] = math.inf  # a prompt id, which the penalty would divide and clip
    with pytest.raises(NonFiniteError, match=r"1 \+inf"):
        TokenSampler(SamplingParams(repetition_penalty=1.1), seed=0, vocab_size=V, prompt_ids=[1]).choose(
            logits, position=0
        )


def test_logprobs_come_from_the_adjusted_row() -> None:
    params = SamplingParams(logit_bias=((7, -100.0),), logprobs=2)
    logits = np.zeros(V, np.float32)
    logits[7] = 50.0
    choice = TokenSampler(params, seed=0, vocab_size=V).choose(logits, position=0)
    assert choice.token_id == 0 and choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(-math.log(V - 1))
    assert [token_id for token_id, _ in choice.logprob.top] == [0, 1]
    assert text(HOT, 0, steps=1)[0].logprob is None


def test_greedy_asks_for_no_random_number() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1, top_p=0)):
        assert ids_of(text(params, 1)) == ids_of(text(params, 2))
        assert ids_of(text(params, 1)) == [int(logits_at(step).argmax()) for step in range(20)]


def test_what_lies_outside_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=f"id {V}") as caught:
        TokenSampler(SamplingParams(logit_bias=((V, 1.0),)), seed=0, vocab_size=V)
    assert caught.value.field == "logit_bias" and caught.value.code == "bad_sampling"
    with pytest.raises(RequestError, match=f"id {V}"):
        TokenSampler(SamplingParams(repetition_penalty=1.1), seed=0, vocab_size=V, prompt_ids=[0, V])
    with pytest.raises(ValueError, match="shape"):
        TokenSampler(HOT, seed=0, vocab_size=V).choose(np.zeros(V + 1, np.float32), position=0)


def test_needs_host() -> None:
    def needs(**fields: object) -> bool:
        return TokenSampler(SamplingParams(**fields), seed=0, vocab_size=V).needs_host  # type: ignore[arg-type]

    assert not needs()
    assert not needs(temperature=1.0, top_k=1)
    assert not needs(temperature=1.0, top_p=0.0)
    assert needs(temperature=1.0)
    assert needs(logprobs=0)
    assert needs(logit_bias=((1, -100.0),))
    assert needs(repetition_penalty=1.1) and needs(presence_penalty=0.1) and needs(frequency_penalty=0.1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("width", [1, 2, 17, 1000])
def test_device_greedy_is_the_host_choice(dtype: mx.Dtype, width: int) -> None:
    rows = np.random.default_rng(width).integers(-3, 3, (9, width)).astype(np.float32)  # ties
    rows[1, : width // 2] = -math.inf
    ids, ok = device_greedy(mx.array(rows).astype(dtype))
    assert ids.dtype == mx.int32 and ids.tolist() == rows.argmax(axis=1).tolist()
    assert ok.tolist() == [True] * 9


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_device_greedy_notices_a_bad_value_at_every_index(dtype: mx.Dtype, bad: float) -> None:
    width = 37
    rows = np.zeros((width + 2, width), np.float32)
    rows[:, -1] = 5.0
    for i in range(width):
        rows[i, i] = bad
    rows[width] = -math.inf  # nothing to choose
    _, ok = device_greedy(mx.array(rows).astype(dtype))
    assert ok.tolist() == [False] * (width + 1) + [True]
    for row in rows[:-1]:
        with pytest.raises(NonFiniteError):
            finite_peak(row)
