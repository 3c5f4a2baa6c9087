"""Sampling with drafts is sampling: the same law of the text, whatever drafts, and the same numbers beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import sqrt

import mlx.core as mx
import numpy as np
import pytest
from enumeration import Prefix, plain
from mtp_models import TableHead, TableModel, tuned, with_wrong_head
from mtp_runs import GREEDY, USUAL, ar_lane, ask, mtp_lane, prompts, run_all, start, step, tokens_of

from polytoken.errors import NonFiniteError
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.lanes.mtp.settings import LookupSettings
from polytoken.request import SamplingParams
from polytoken.sampling.draws import Purpose
from polytoken.sampling.law import Distribution, shape

V = 6
RNG = np.random.default_rng(17)
TABLE = RNG.normal(0.0, 1.5, (V, V, V))
GOOD = TABLE.mean(axis=0) + RNG.normal(0.0, 0.3, (V, V))
WRONG = -3.0 * GOOD
DRAWS = int(os.environ.get("POLYTOKEN_DRAWS", "600"))  # requests per test; 20,000 for the record
PLAIN = SamplingParams(temperature=1.0)


def law_of(params: SamplingParams) -> Mapping[Prefix, float]:
    """The law of the first four tokens behind the prompt (1, 2), by enumeration."""

    def p(prefix: Prefix) -> Distribution:
        before, last = (1, 2, *prefix)[-2:]
        return shape(TABLE[before, last].astype(np.float32), params)

    return plain(p, count=4)


def check_chi_square(counts: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's statistic against 4.5 standard deviations of its law (far beyond any luck of a fixed seed)."""
    assert not counts[expected < 1e-12].any()
    rare = expected < 5.0  # too few for the statistic's law: one cell together
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    cells = expected > 0.0
    statistic = float(((counts[cells] - expected[cells]) ** 2 / np.maximum(expected[cells], 1.0)).sum())
    freedom = int(cells.sum()) - 1
    assert statistic < freedom + 4.5 * sqrt(2.0 * freedom) + 2.0, (statistic, freedom)


def sample(lane: MtpLane, prompt: Sequence[int], params: SamplingParams) -> np.ndarray:
    """int [DRAWS, 4]: the first four tokens for as many seeds, in cohorts."""
    requests = [ask(str(n), prompt, count=4, seed=n, sampling=params) for n in range(DRAWS)]
    return np.array([tokens for at in range(0, DRAWS, 250) for tokens in tokens_of(lane, requests[at : at + 250])])


@pytest.mark.parametrize(
    "params, head",
    [(PLAIN, GOOD), (USUAL, GOOD), (PLAIN, WRONG)],
    ids=["T1-good", "usual-good", "T1-wrong"],
)
def test_the_first_four_tokens_have_the_target_law(params: SamplingParams, head: np.ndarray) -> None:
    """The real loop with many seeds, depth 3: each marginal, and pairs of neighbours, by chi-square."""
    lane = mtp_lane(TableModel(TABLE, TableHead(head)), depth=3, limit=1 << 20)
    draws = sample(lane, (1, 2), params)
    law = law_of(params)
    for place in range(4):
        expected = np.zeros(V)
        for tokens, chance in law.items():
            expected[tokens[place]] += chance * DRAWS
        check_chi_square(np.bincount(draws[:, place], minlength=V), expected)
    for place in range(3):
        pairs, expected = np.zeros(V * V), np.zeros(V * V)
        np.add.at(pairs, draws[:, place] * V + draws[:, place + 1], 1)
        for tokens, chance in law.items():
            expected[tokens[place] * V + tokens[place + 1]] += chance * DRAWS
        check_chi_square(pairs, expected)
    rate = lane.tally.accepted_drafts / lane.tally.drafted_tokens
    print(f"accepted {rate:.3f}, tokens per forward {4 * DRAWS / (DRAWS + lane.tally.cycles):.3f}")
    assert rate > 0.4 if head is GOOD else rate < 0.2


def test_copies_keep_the_law() -> None:
    lane = mtp_lane(TableModel(TABLE), depth=3, drafter="lookup", lookup=LookupSettings(gram=1), limit=1 << 20)
    prompt = (*range(V), 4, 1, 2)  # whatever comes has been seen
    draws = sample(lane, prompt, PLAIN)
    law = law_of(PLAIN)
    for place in range(4):
        expected = np.zeros(V)
        for tokens, chance in law.items():
            expected[tokens[place]] += chance * DRAWS
        check_chi_square(np.bincount(draws[:, place], minlength=V), expected)
    assert 0 < lane.tally.accepted_copies < lane.tally.copied_tokens


def test_draws_come_in_the_stated_order() -> None:
    """5.2: drafts, then a coin per examined draft, then a correction or bonus; each at its token's own place."""
    lane = mtp_lane(TableModel(TABLE, TableHead(GOOD)), depth=2)
    seen = set()
    for seed in range(12):
        run = start(lane, ask("a", (1, 2), count=9, seed=seed, sampling=PLAIN))
        object.__setattr__(run.row.sampler.draws, "log", [])
        log = run.row.sampler.draws.log
        step(lane, [run])
        assert [(draw.position, draw.purpose) for draw in log] == [(0, Purpose.TOKEN)]
        while not run.over:
            log.clear()
            at = len(run.tokens)
            step(lane, [run])
            cycle = run.row.cycles[-1]
            d, a = len(cycle.drafts), cycle.accepted
            expected = [(at + j, Purpose.DRAFT) for j in range(d)]
            expected += [(at + j, Purpose.ACCEPT) for j in range(min(a + 1, d))]
            if cycle.token is not None:
                expected.append((at + a, Purpose.CORRECTION if a < d else Purpose.BONUS))
            assert [(draw.position, draw.purpose) for draw in log] == expected
            seen.add(cycle.origin)
    assert seen >= {"correction", "bonus", None}


def test_greedy_draws_nothing_and_depth_zero_draws_like_plain_decoding() -> None:
    model = TableModel(TABLE, TableHead(GOOD))
    lane = mtp_lane(model, depth=2)
    run = start(lane, ask("a", (1, 2), count=9))
    object.__setattr__(run.row.sampler.draws, "log", [])
    while not run.over:
        step(lane, [run])
    assert run.row.sampler.draws.log == []
    nobody = mtp_lane(model, depth=2, drafter="lookup", lookup=LookupSettings(gram=32))
    requests = [ask("a", (1, 2), count=12, seed=7, sampling=PLAIN)]
    assert tokens_of(nobody, requests) == tokens_of(ar_lane(model), requests)


PENALTIES = SamplingParams(
    repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9, logprobs=3, logit_bias=((3, -100.0),)
)


@pytest.mark.parametrize("drafter", ["head", "lookup+head"])
@pytest.mark.parametrize("params", [PENALTIES, SamplingParams(logprobs=2)], ids=["penalties", "logprobs"])
def test_c09_greedy_penalties_and_logprobs_are_those_of_plain_decoding(params: SamplingParams, drafter: str) -> None:
    """Row j counts the tokens before it and the drafts accepted so far; rejected drafts leave no trace."""
    model = tuned("qwen3_5", "a", "free")
    requests = [ask(str(n), prompt, count=14, sampling=params) for n, prompt in enumerate(prompts(5, seed=2))]
    lane = mtp_lane(model, depth=3, drafter=drafter, lookup=LookupSettings(gram=1))
    for mine, plainly in zip(run_all(lane, requests), run_all(ar_lane(model), requests), strict=True):
        assert mine.tokens == plainly.tokens
        assert mine.logprobs == plainly.logprobs and len(mine.logprobs) == 14
        mine_counts, their_counts = mine.row.sampler.counts, plainly.row.sampler.counts
        if mine_counts is not None:
            assert mine_counts.seen.tolist() == their_counts.seen.tolist()
            assert mine_counts.counts.tolist() == their_counts.counts.tolist()
    assert 0 < lane.tally.accepted_drafts < lane.tally.drafted_tokens


def test_c09_sampled_logprobs_are_those_of_a_plain_run_over_the_same_tokens() -> None:
    """Penalties at temperature 1: each row's numbers, recomputed token by token on the AR lane."""
    model = tuned("qwen3_5", "a", "free")
    params = SamplingParams(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.2, logprobs=2)
    prompt = prompts(8)[6]
    (run,) = run_all(mtp_lane(model, depth=3), [ask("a", prompt, count=12, seed=3, sampling=params)])
    lane = ar_lane(model)
    plainly = start(lane, ask("a", prompt, count=12, sampling=params))
    for token, logprob in zip(run.tokens, run.logprobs, strict=True):
        row = plainly.row
        choice = row.sampler.choose(np.array(row.logits[0]), position=row.generated)
        assert choice.logprob is not None and choice.logprob.top == logprob.top
        assert logprob.token_id == token
        row.sampler.observe(token)
        row.logits = lane._forward(row, mx.array([[token]]))


def test_c10_bans_hold_for_drafts_too() -> None:
    """The head's favourite is banned: greedy and sampled, it is never emitted."""
    model = TableModel(TABLE, TableHead(GOOD))
    banned = int(GOOD[2].argmax())
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias=((banned, -100.0),))
        runs = run_all(
            mtp_lane(model, depth=3), [ask(str(n), (1, 2), count=12, seed=n, sampling=params) for n in range(20)]
        )
        assert all(banned not in run.tokens for run in runs)
    plainly = tokens_of(ar_lane(model), [ask("a", (1, 2), count=12, sampling=params_of(banned))])
    assert tokens_of(mtp_lane(model, depth=3), [ask("a", (1, 2), count=12, sampling=params_of(banned))]) == plainly


def params_of(banned: int) -> SamplingParams:
    return SamplingParams(logit_bias=((banned, -100.0), ((banned + 1) % V, 5.0)))


@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_d09_a_row_that_is_not_finite_fails_its_request_alone(params: SamplingParams, value: float) -> None:
    table = TABLE.copy()
    table[:, 5] = value  # whoever says 5 is lost
    table[0, 1], table[1, 2] = 0.0, 0.0
    table[1, 2, 5] = 99.0
    lane = mtp_lane(TableModel(table, TableHead(GOOD)), depth=2)
    lost = start(lane, ask("lost", (1, 2), count=9, sampling=params))
    fine = start(lane, ask("fine", (0, 3), count=2, sampling=params))
    for _ in range(4):
        step(lane, [lost, fine])
    assert isinstance(lost.error, NonFiniteError) and ("NaN" in str(lost.error) or "inf" in str(lost.error))
    assert fine.error is None and fine.reason == "max_new_tokens"


@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
def test_d09_a_head_that_is_not_finite_fails_too(params: SamplingParams) -> None:
    lane = mtp_lane(TableModel(TABLE, TableHead(np.full((V, V), np.nan))), depth=2)
    run = start(lane, ask("a", (1, 2), count=9, sampling=params))
    step(lane, [run])
    step(lane, [run])
    assert isinstance(run.error, NonFiniteError)


def test_a_wrong_head_on_a_network_changes_speed_only() -> None:
    """Sampled from a hybrid with a hostile head: a whole text, and next to nothing accepted."""
    model = tuned("qwen3_5", "a", "free")
    request = ask("a", prompts(8)[5], count=10, seed=1, sampling=USUAL)
    lane = mtp_lane(with_wrong_head(model), depth=2)
    (run,) = run_all(lane, [request])
    assert len(run.tokens) == 10 and lane.tally.accepted_drafts < lane.tally.drafted_tokens / 3
