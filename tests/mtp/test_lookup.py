"""Copies of the text: where they come from, how long they are, when they pause, and that they stay in their request."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_models import TableModel
from mtp_runs import ask, mtp_lane, run_all

from polytoken.lanes.mtp.draft import Cue, Draft, Kept
from polytoken.lanes.mtp.lookup import LookupDrafter, TextIndex
from polytoken.lanes.mtp.settings import LookupSettings
from polytoken.models.base import Hidden
from polytoken.request import SamplingParams
from polytoken.sampling.sampler import TokenSampler

NOTHING = Hidden(mx.zeros((1, 1, 1)))
SAMPLER = TokenSampler(SamplingParams(), seed=0, vocab_size=1000)


def index_of(ids: list[int], gram: int) -> TextIndex:
    index = TextIndex(gram)
    for token_id in ids:
        index.add(token_id)
    return index


def propose(drafter: LookupDrafter, primary: int, *, room: int = 99) -> list[int]:
    work = drafter.propose(Cue(primary, 0, 0, room, SAMPLER))
    with pytest.raises(StopIteration) as end:
        next(work)
    draft: Draft = end.value.value
    return [] if draft.ids is None else draft.ids[0].tolist()


def commit(drafter: LookupDrafter, primary: int, drafts: list[int], accepted: int) -> None:
    draft = Draft("lookup", mx.array([drafts])) if drafts else Draft("lookup")
    drafter.commit(Kept(draft, (primary, *drafts[:accepted]), NOTHING))


def test_the_longest_agreement_wins_and_the_newest_of_equals() -> None:
    assert index_of([1, 2, 3, 9, 1, 2], 2).find() == (2, 0)
    assert index_of([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 2).find() == (3, 1)  # 5 1 2 beats the newer 6 1 2
    assert index_of([1, 2, 7, 1, 2, 8, 1, 2], 2).find() == (5, 0)
    assert index_of([1, 2, 3], 2).find() is None
    assert index_of([1], 2).find() is None
    assert index_of([4, 4, 4], 2).find() == (2, 0)  # runs may overlap


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), gram=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_what_is_found_does_end_like_the_text(ids: list[int], gram: int) -> None:
    found = index_of(ids, gram).find()
    earlier = [end for end in range(gram, len(ids)) if ids[end - gram : end] == ids[-gram:]]
    if found is None:
        assert not earlier or len(ids) < gram
        return
    end, agreed = found
    assert end in earlier and ids[end - gram - agreed : end] == ids[len(ids) - gram - agreed :]


def test_a_copy_is_as_long_as_it_deserves() -> None:
    """Eight ids while on probation; then by agreement, never beyond the limit, the room or the text."""
    text = list(range(100, 160))
    drafter = LookupDrafter(LookupSettings(gram=2, longest=24))
    drafter.begin((*text, 7, *text[10:15]))
    assert propose(drafter, text[15]) == text[16:24]
    commit(drafter, text[15], text[16:24], 8)
    assert propose(drafter, text[24], room=3) == text[25:28]
    commit(drafter, text[24], text[25:28], 3)
    assert propose(drafter, text[28]) == text[29:53]  # trusted now: 32 by agreement, 24 by the limit
    commit(drafter, text[28], text[29:53], 24)
    assert propose(drafter, text[53])[:6] == text[54:]  # and on into what has been said since


def test_copies_that_do_not_pay_pause_for_longer_each_time() -> None:
    drafter = LookupDrafter(LookupSettings(gram=1))
    drafter.begin((1, 2))
    asked = []
    for place in range(400):
        drafts = propose(drafter, 1)
        asked += [place] if drafts else []
        commit(drafter, 1, drafts, 0)
    gaps = np.diff(asked)
    assert gaps[:2].tolist() == [1, 1] and 64 in gaps and 128 in gaps and drafter.hit_rate < 0.1
    drafter._paused_until = 0
    drafts = propose(drafter, 1)
    commit(drafter, 1, drafts, len(drafts))
    assert drafter._pause == 64


def test_d21_nothing_of_one_request_is_proposed_to_another() -> None:
    """Ten ids that only the first request holds never show up in the second's drafts or text."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 1, (30, 30, 30))
    table[:, :, 20:] = -50.0  # the network never says the secret by itself
    lane = mtp_lane(TableModel(table), depth=3, drafter="lookup", lookup=LookupSettings(gram=1), limit=1 << 20)
    secret = tuple(range(20, 30))
    one = ask("a", (1, 2, *secret, 3, 1, 2, *secret, 3), count=30)
    two = ask("b", (1, 2, 3, 4, 1, 2, 3), count=30)
    first, second = run_all(lane, [one, two])
    alone = run_all(lane, [two])[0]
    assert any(set(secret) & set(cycle.drafts) for cycle in first.row.cycles)
    for run in (second, alone):
        assert not any(set(secret) & set(cycle.drafts) for cycle in run.row.cycles)
        assert run.tokens == second.tokens
    assert first.row.drafter._text is not second.row.drafter._text
