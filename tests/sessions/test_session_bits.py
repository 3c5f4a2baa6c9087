"""A conversation that is gone on from stored states gives, bit for bit, what it gives from nothing.

Turns, forks, snapshots, edits of the history, stop strings inside a window, cancelled requests and evictions, in any
order. `Talks.say` compares logits, states, head histories and tokens of every turn with a cold run on the grid, and
after everything checks bytes, budgets and the bits of all that is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_talks import CANVAS_KINDS, CHUNK, EVERY_KIND, KINDS, Talks, play

from polytoken.request import SamplingParams

USUAL = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
SAMPLINGS = (SamplingParams(), USUAL)

names = st.sampled_from(["a", "b", "c"])
tokens = st.lists(st.integers(10, 13), min_size=1, max_size=11).map(tuple)
turn = st.tuples(
    st.just("turn"), names, tokens, st.integers(1, 7), st.sampled_from(SAMPLINGS), st.sampled_from([None, None, 1, 3])
)
edit = st.tuples(st.just("edit"), names, st.floats(0, 1), tokens, st.integers(1, 5))
steps = st.lists(
    st.one_of(
        turn,
        turn,
        turn,
        edit,
        st.tuples(st.just("again"), names, st.integers(1, 5)),
        st.tuples(st.just("cancel"), names, tokens),
        st.tuples(st.just("stranger"), tokens, st.integers(1, 4)),
        st.tuples(st.just("fork"), names, names),
        st.tuples(st.just("snapshot"), names),
        st.tuples(st.just("restore"), names),
        st.tuples(st.just("clear"), names),
    ),
    min_size=3,
    max_size=9,
)


def thinned(kinds: Iterable[str], *, slow: Sequence[str]) -> list[Any]:
    """The kinds, some of them with `--slow` only."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in slow)) for kind in kinds]


@pytest.mark.parametrize("kind", thinned([*KINDS, *CANVAS_KINDS], slow=("canvas rolled",)))
@given(steps=steps, limit=st.sampled_from([0, 150_000, 400_000, 1 << 28]), marks=st.sampled_from([None, 100_000]))
@settings(max_examples=15, deadline=None)
def test_random_conversations_give_the_bits_of_cold_ones(kind: str, steps: list, limit: int, marks: int | None) -> None:
    """Also E01, E02, E04, E12: no borrower, former owner, repetition or speculation leaves a trace.

    `benchmarks/session_trials.py` plays hundreds.
    """
    talks = Talks(kind, limit, mark_bytes=marks)
    for step in steps:
        play(talks, step)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_computes_its_new_tokens_and_nothing_else(kind: str) -> None:
    """E06, E12: from the second turn on everything before the new text is restored, speculating or not."""
    talks = Talks(kind, 1 << 28)
    text: tuple[int, ...] = tuple(range(20, 61))
    for turn in range(6):
        row = talks.say("a", text, count=5 + turn)
        assert row.cached_tokens == (0 if turn == 0 else len(text) - 3)
        assert row.cache_miss is not None and (turn == 0 or f"new_suffix at token {len(text) - 3}" == row.cache_miss)
        text = (*talks.texts["a"], 100 + turn, 101, 102)
    counts = talks.lane.statistics()
    assert counts["prefix_cache_live_hits"] == 5 and counts["ends_banked"] == counts["ends_kept_live"] == 6
    assert counts["restored_suffix_prefill_fused"] == 5


@pytest.mark.parametrize("kind", thinned(EVERY_KIND, slow=("sliding", "mtp next", "mtp both")))
def test_a_stop_string_anywhere_in_an_answer_costs_the_next_turn_nothing(kind: str) -> None:
    """E06, E12, F01: also among accepted drafts, where the network is already further: only new tokens are computed."""
    talks = Talks(kind, 1 << 28)
    text: tuple[int, ...] = tuple(range(20, 41))
    taken_back, keeps = 0, (1, 2, 3, 4, 5, 6)
    for keep in keeps:
        row = talks.say("a", text, count=12, seed=keep, keep=keep)
        assert len(row.prefill.ids) - row.cached_tokens == (len(text) if keep == 1 else 1)
        taken_back += len(getattr(row, "tokens", ())) > keep + 1  # the last of a window is not forwarded
        text = (*talks.texts["a"], 100 + keep)
    counts = talks.lane.statistics()
    assert counts["ends_not_banked"] == 0 and counts["ends_kept_live"] == len(keeps)
    assert taken_back > 0 or not kind.startswith("mtp") or kind == "mtp copies"  # single ones, at most


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_live_state_the_stored_one_serves_as_well(kind: str) -> None:
    talks = Talks(kind, 1 << 28)
    talks.say("a", tuple(range(20, 61)), count=9)
    talks.fork("a", "b")
    for number, name in enumerate("ba"):
        row = talks.say(name, (*talks.texts[name], 5 + number, 6), count=9)
        assert row.cached_tokens == len(row.prefill.ids) - 2
    assert talks.lane.statistics()["prefix_cache_live_hits"] == 1


@pytest.mark.parametrize("kind", CANVAS_KINDS)
def test_a_canvas_turn_goes_on_from_the_last_whole_chunk_of_the_prompt_before(kind: str) -> None:
    """E06: a fork and a restored snapshot do, too; answers are encoded again, on the grid, with the next prompt."""
    talks = Talks(kind, 1 << 28)
    text = tuple(range(20, 41))
    talks.say("a", text, count=7)
    talks.snapshot("s", "a")
    talks.fork("a", "b")
    for name, more, known in (("a", 5, len(text)), ("b", 7, len(talks.texts["b"]))):  # a has encoded b's history
        row = talks.say(name, (*talks.texts[name], more, 6), count=7)
        assert row.cached_tokens == known // CHUNK * CHUNK
    talks.restore("s", "b")
    assert talks.texts["b"][: len(text)] == text
    row = talks.say("b", (*talks.texts["b"], 5, 6), count=7)  # as before: a whole prompt that is known
    assert (row.cached_tokens, row.cache_miss) == (len(row.prefill.ids), None)
    before = len(row.prefill.ids)
    assert talks.say("a", (*talks.texts["a"], 7), count=7).cached_tokens == before // CHUNK * CHUNK
