"""What a request leaves behind is what encoding its text anew gives, bit for bit, however it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_models import FAMILIES, small, tuned, with_wrong_head
from mtp_runs import (
    GREEDY,
    USUAL,
    Run,
    ar_lane,
    ask,
    bits,
    mtp_lane,
    prompts,
    run_all,
    start,
    state_bits,
    step,
    tokens_of,
)

from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.state import DecodingState
from polytoken.lanes.mtp.draft_model import ModelDrafter
from polytoken.lanes.mtp.head import HeadDrafter
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.lanes.mtp.row import Cycle, replay
from polytoken.lanes.mtp.settings import LookupSettings
from polytoken.request import SamplingParams

PROMPT = prompts(12, seed=4)[10]


def fresh(lane: MtpLane, ids: Sequence[int]) -> Run:
    """A row whose prompt is `ids`, prefilled and not stepped."""
    return start(lane, ask("fresh", ids, count=1))


def check_state(lane: MtpLane, run: Run, *, prompt: Sequence[int], forwarded: int) -> None:
    """The row's trunk is at prompt + the first `forwarded` tokens, and its head's history is what belongs there."""
    text = [*prompt, *run.tokens[:forwarded]]
    anew = fresh(lane, text)
    assert state_bits(run.row.state) == state_bits(anew.row.state)
    drafter = run.row.drafter
    if isinstance(drafter, HeadDrafter):
        assert drafter.history.offset + drafter.owed == len(text) - 1
        drafter.settle()
        anew.row.drafter.settle()
        assert state_bits(drafter.history) == state_bits(anew.row.drafter.history)
        assert bits(drafter._rows) == bits(anew.row.drafter._rows)  # the row that the next pair is made of
    if isinstance(drafter, ModelDrafter):
        assert drafter.state.offset + len(drafter._owed) == len(text)
        drafter.settle()
        assert state_bits(drafter.state) == state_bits(anew.row.drafter.state)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, USUAL], ids=["greedy", "sampled"])
def test_every_window_leaves_state_and_history_as_if_encoded_anew(family, sampling: SamplingParams) -> None:
    """Invariants 5 and 7: with some drafts accepted and some not."""
    lane = mtp_lane(tuned(family, "a", "free"), depth=3)
    run = start(lane, ask("a", PROMPT, count=14, sampling=sampling))
    while not run.over:
        step(lane, [run])
        assert run.error is None
        pending = run.row.pending is not None
        check_state(lane, run, prompt=PROMPT, forwarded=len(run.tokens) - pending)
    assert 0 < lane.tally.accepted_drafts < lane.tally.drafted_tokens


def test_d06_after_a_hundred_rejections_the_history_is_as_long_and_the_same() -> None:
    lane = mtp_lane(with_wrong_head(tuned("qwen3_5", "a", "free")), depth=2)
    run = start(lane, ask("a", PROMPT, count=101))
    while not run.over:
        step(lane, [run])
        drafter = run.row.drafter
        assert drafter.history.offset + drafter.owed == run.row.state.offset - 1
        assert run.row.state.offset == len(PROMPT) + len(run.tokens) - (run.row.pending is not None)
    assert lane.tally.rejected_drafts >= 99 and lane.tally.accepted_drafts == 0
    lane.finish(run.row)
    check_state(lane, run, prompt=PROMPT, forwarded=len(run.tokens))


def timeless(cycle: Cycle) -> Cycle:
    return replace(cycle, draft_seconds=0.0, verify_seconds=0.0, accept_seconds=0.0)


def stop_places(tokens: list[int], cycles: list[Any]) -> dict[str, tuple[int, ...]]:
    """For every origin that a token of this run has: the place and id of one that is not in the run before it."""
    places: dict[str, tuple[int, ...]] = {}
    kinds = [("primary", tokens[0])]
    for cycle in cycles:
        names = ["draft"] * cycle.accepted
        if cycle.accepted > 1:
            names[-1] = "last draft" if cycle.accepted == len(cycle.drafts) else "draft"
        kinds += list(zip(names, cycle.drafts, strict=False))
        if cycle.token is not None:
            kinds.append((str(cycle.origin), cycle.token))
    for index, (kind, token) in enumerate(kinds):
        if token not in tokens[:index]:
            places.setdefault(kind, (index, token))
    return places


@pytest.mark.parametrize("sampling", [GREEDY, USUAL], ids=["greedy", "sampled"])
def test_d01_the_final_state_is_exact_for_every_origin_of_a_stop(sampling: SamplingParams) -> None:
    """Invariant 9. A token of every origin is declared an end of text: the run ends there, and its state with it."""
    model = tuned("qwen3_next", "a", "free")
    prompt = prompts(12, seed=9)[7]
    (whole,) = run_all(mtp_lane(model, depth=3), [ask("a", prompt, count=24, sampling=sampling, seed=5)])
    places = stop_places(whole.tokens, whole.row.cycles)
    assert set(places) >= {"primary", "draft", "correction", "bonus"}
    for kind, (index, token) in places.items():
        lane = mtp_lane(model, depth=3, eos=[token])
        (run,) = run_all(lane, [ask("a", prompt, count=24, sampling=sampling, seed=5)])
        assert run.tokens == whole.tokens[: index + 1] and run.reason == "eos"
        expected = {"draft": "accepted_draft", "last draft": "accepted_draft"}.get(kind, kind)
        assert run.detail["stop_origin"] == expected
        lane.finish(run.row)
        check_state(lane, run, prompt=prompt, forwarded=len(run.tokens))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_d02_the_cap_is_exact_and_so_is_the_state(count: int) -> None:
    lane = mtp_lane(tuned("qwen3_5", "a", "free"), depth=4)
    (run,) = run_all(lane, [ask("a", PROMPT, count=count)])
    assert len(run.tokens) == count and run.reason == "max_new_tokens"
    lane.finish(run.row)
    check_state(lane, run, prompt=PROMPT, forwarded=count)


def test_d02_a_stop_within_the_cap_wins_and_one_behind_it_is_never_seen() -> None:
    model = small("qwen3_5")

    def lane(*eos: int) -> MtpLane:
        return mtp_lane(model, depth=4, eos=eos, drafter="model", draft_model=model)

    (whole,) = run_all(lane(), [ask("a", PROMPT, count=9)])
    index = next(i for i in range(2, 9) if whole.tokens[i] not in whole.tokens[:i])
    for cap in range(1, 9):
        (run,) = run_all(lane(whole.tokens[index]), [ask("a", PROMPT, count=cap)])
        assert run.tokens == whole.tokens[: min(cap, index + 1)]
        assert run.reason == ("eos" if cap > index else "max_new_tokens")


@pytest.mark.parametrize("drafter", ["lookup", "lookup+head", "model", "lookup+model"])
def test_other_drafters_leave_exact_states_too(drafter: str) -> None:
    """A copied window makes no pair: it is owed, and the history is whole again."""
    model = tuned("qwen3_5", "a", "free")
    lane = mtp_lane(
        model, depth=2, drafter=drafter, draft_model=small("qwen3_5", seed=5), lookup=LookupSettings(gram=1)
    )
    said = tokens_of(ar_lane(model), [ask("a", PROMPT, count=12)])[0]
    prompt = [*PROMPT, *said[:8], *PROMPT]  # it will say the same again
    run = start(lane, ask("a", prompt, count=16))
    while not run.over:
        step(lane, [run])
        assert run.error is None
    lane.finish(run.row)
    row = run.row
    if "+" in drafter:
        assert {cycle.source for cycle in row.cycles} == {"lookup", drafter.partition("+")[2]}
        row.drafter = row.drafter.other
        assert row.drafter.name == drafter.partition("+")[2]
    text = [*prompt, *run.tokens]
    anew = fresh(lane, text).row
    assert state_bits(row.state) == state_bits(anew.state)
    mine, theirs = row.drafter, getattr(anew.drafter, "other", None) or anew.drafter
    for one, other in ((getattr(mine, name, None), getattr(theirs, name, None)) for name in ("history", "state")):
        if isinstance(one, DecodingState):
            assert state_bits(one) == state_bits(other)


@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_invariant_16_the_windows_reproduce_the_tokens(data: st.DataObject) -> None:
    sampling = data.draw(st.sampled_from([GREEDY, USUAL, SamplingParams(temperature=1.2)]))
    lane = mtp_lane(
        tuned("qwen3_5", "a", "free"),
        depth=data.draw(st.integers(1, 5)),
        drafter=data.draw(st.sampled_from(["head", "lookup+head"])),
        lookup=LookupSettings(gram=1),
    )
    request = ask("a", data.draw(st.sampled_from(prompts(5))), count=data.draw(st.integers(1, 9)), sampling=sampling)
    (run,) = run_all(lane, [request])
    cycles, tally = run.row.cycles, run.row.tally
    assert replay(run.tokens[0], cycles) == tuple(run.tokens) == tuple(run.row.tokens)
    assert tally.drafted_tokens == sum(len(cycle.drafts) for cycle in cycles)
    untested = sum(len(c.drafts) - c.accepted - (c.origin == "correction") for c in cycles)
    assert tally.accepted_drafts + tally.rejected_drafts + untested == tally.drafted_tokens
    assert [cycle.primary for cycle in cycles[1:]] == [cycle.token for cycle in cycles[:-1]]
    (again,) = run_all(lane, [request])
    assert [timeless(cycle) for cycle in again.row.cycles] == [timeless(cycle) for cycle in cycles]


@pytest.mark.parametrize("sampling", [GREEDY, USUAL], ids=["greedy", "sampled"])
def test_invariant_6_running_the_kept_rows_again_gives_the_same(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that keep no rows for a replay: every partial acceptance is rolled back whole and run again, counted."""
    request = ask("a", PROMPT, count=14, sampling=sampling)
    usual = mtp_lane(tuned("qwen3_5", "a", "free"), depth=3)
    (expected,) = run_all(usual, [request])
    advance = RecurrentLayer.advance
    monkeypatch.setattr(RecurrentLayer, "advance", lambda self, rows, slots, replay=None: advance(self, rows, slots))
    lane = mtp_lane(tuned("qwen3_5", "a", "free"), depth=3)
    (run,) = run_all(lane, [request])
    assert run.tokens == expected.tokens
    assert lane.tally.forwards_again == sum(c.commit_route == "prefix" for c in expected.row.cycles) > 0
    assert run.forwards == expected.forwards + lane.tally.forwards_again
    lane.finish(run.row)
    usual.finish(expected.row)
    assert state_bits(run.row.state) == state_bits(expected.row.state)
    assert state_bits(run.row.drafter.history) == state_bits(expected.row.drafter.history)


def test_bfloat16_states_are_exact_too() -> None:
    lane = mtp_lane(small("qwen3_5", dtype="bfloat16", acceptance=True), depth=3)
    (run,) = run_all(lane, [ask("a", PROMPT, count=12)])
    lane.finish(run.row)
    check_state(lane, run, prompt=PROMPT, forwarded=len(run.tokens))
    assert lane.tally.accepted_drafts > 0
