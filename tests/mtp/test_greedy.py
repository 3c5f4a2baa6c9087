"""Greedy decoding with drafts is greedy decoding: the same ids, and exactly the accepted drafts there should be."""

from __future__ import annotations

from functools import lru_cache

import pytest
from mtp_models import FAMILIES, case_of, small, tuned, with_wrong_head
from mtp_runs import ar_lane, ask, mtp_lane, prompts, run_all, tokens_of

from polytoken.cache.bank import StateBank
from polytoken.lanes.mtp.row import replay
from polytoken.lanes.mtp.settings import DrafterName, LookupSettings
from polytoken.request import Request

COUNT = 7


@lru_cache
def truth(family: str, name: str) -> list[list[int]]:
    model = tuned(family, "a", "free") if name == "tuned" else small(family)
    return tokens_of(ar_lane(model), requests())


@lru_cache
def prompts_of(family: str) -> StateBank:
    """The encoded prompts, so that they are encoded once and restored for every depth."""
    return mtp_lane(tuned(family, "a", "free"), limit=1 << 24).bank


def requests(count: int = 20) -> list[Request]:
    return [ask(str(index), prompt, count=COUNT) for index, prompt in enumerate(prompts(count))]


WINDOWS = [
    *((depth, "head") for depth in (1, 2, 3, 4, 5)),
    *((depth, "lookup+head") for depth in (2, 5)),
    *(pytest.param(depth, "lookup+head", marks=pytest.mark.slow) for depth in (1, 3, 4)),
]


@pytest.mark.parametrize(("depth", "drafter"), WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_d04_ids_equal_plain_decoding_at_every_depth(family, depth: int, drafter: DrafterName) -> None:
    """Twenty prompts at once, with a head that is right about half of the time, and with copies that often are not."""
    model = tuned(family, "a", "free")
    lane = mtp_lane(model, depth=depth, drafter=drafter, lookup=LookupSettings(gram=1), store=prompts_of(family))
    assert tokens_of(lane, requests()) == truth(family, "tuned")
    tally = lane.tally
    assert 0 < tally.accepted_drafts < tally.drafted_tokens
    assert 0 < tally.copied_tokens < tally.drafted_tokens if lane.settings.copies else tally.copied_tokens == 0


def test_d04_a_longer_text_does_not_drift_apart() -> None:
    """What a wrong state does shows late. `benchmarks/mtp_identity.py` runs 50 prompts of 256 tokens at every depth."""
    model = tuned("qwen3_5", "a", "history")
    some = [ask("a", prompts(2, seed=5)[1], count=128)]
    lane = mtp_lane(model, depth=4)
    assert tokens_of(lane, some) == tokens_of(ar_lane(model), some)
    assert 0 < lane.tally.accepted_drafts < lane.tally.drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_d05_a_hostile_head_changes_speed_only(family) -> None:
    """It proposes what it thinks least likely: nothing is accepted, at depth one as well."""
    for depth in (1, 4):
        lane = mtp_lane(with_wrong_head(tuned(family, "a", "free")), depth=depth, store=prompts_of(family))
        runs = run_all(lane, requests(6))
        assert [run.tokens for run in runs] == truth(family, "tuned")[:6]
        assert lane.tally.accepted_drafts == 0 and lane.tally.drafted_tokens > 0
        assert all(run.forwards == len(run.tokens) for run in runs)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_heads_and_perfect_drafters_change_speed_only(family) -> None:
    """A model that drafts for itself: every window is accepted whole, and gives one token more than was drafted."""
    model, some = small(family), requests(8)
    expected = tokens_of(ar_lane(model), some)
    assert tokens_of(mtp_lane(model, depth=2), some) == expected
    lane = mtp_lane(model, depth=2, drafter="model", draft_model=model)
    runs = run_all(lane, some)
    assert [run.tokens for run in runs] == expected
    assert lane.tally.accepted_drafts == lane.tally.drafted_tokens > 0
    assert all(run.forwards == 1 + (COUNT - 1) // 3 for run in runs)  # the prompt's token, then threes


@pytest.mark.parametrize("drafter", ["lookup", "model", "lookup+model"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_networks_without_a_head_can_copy_or_have_a_second_model(family: str, drafter: str) -> None:
    """Sliding layers too: a window is one append, which they can take back."""
    model, other = small(family), small("llama", seed=4)
    if "model" in drafter and other.vocab_size != model.vocab_size:
        pytest.skip("another vocabulary")
    lane = mtp_lane(model, depth=2, drafter=drafter, lookup=LookupSettings(gram=1), draft_model=other)
    assert tokens_of(lane, requests(9)) == tokens_of(ar_lane(model), requests(9))
    assert lane.tally.drafted_tokens > 0


@pytest.mark.parametrize("family, shape, tuning, depths", [
    ("qwen3_5", "a", "history", (1, 3, 5)),
    ("qwen3_5_moe", "a", "history", (2,)),
    ("qwen3_next", "a", "history", (4,)),
    *((family, "b", "history", (2,)) for family in FAMILIES),
])  # fmt: skip
def test_counts_equal_the_teacher_forced_ones(family, shape: str, tuning: str, depths: tuple[int, ...]) -> None:
    """Round by round, with a head that looks at its history: so the history rule is the reference's too."""
    model, arrays = tuned(family, shape, tuning), case_of(family, shape).arrays()
    prompt, tokens = arrays[f"{tuning}_prompt"].tolist(), arrays[f"{tuning}_tokens"].tolist()
    for depth in depths:
        (run,) = run_all(mtp_lane(model, depth=depth), [ask("a", prompt, count=len(tokens))])
        assert run.tokens == tokens
        rounds = [[len(cycle.drafts), cycle.accepted] for cycle in run.row.cycles]
        assert rounds == arrays[f"{tuning}_depth_{depth}"].tolist()
        assert replay(run.tokens[0], run.row.cycles) == tuple(tokens)
        assert run.detail["drafted_by_depth"][0] == len(rounds)
