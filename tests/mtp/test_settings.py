"""What the lane refuses, and how it says so."""

from __future__ import annotations

import pytest
from mtp_models import NoWayBack, TableHead, TableModel, small, tuned
from mtp_runs import ask, mtp_lane
from test_sampled import GOOD, TABLE

from polytoken.errors import RequestError, UsageError
from polytoken.lanes.mtp.settings import LookupSettings, MtpSettings


@pytest.mark.parametrize(
    "flag, settings",
    [
        ("--depth", {"depth": 0}),
        ("--depth", {"depth": 17}),
        ("--depth", {"depth": True}),
        ("--depth", {"depth": 2.0}),
        ("--depth-policy", {"policy": "adaptive"}),
        ("--drafter", {"drafter": "heads"}),
        ("--drafter", {"drafter": ""}),
        ("--history-window", {"history_window": 0}),
    ],
)
def test_settings_out_of_range_name_their_flag(flag: str, settings: dict) -> None:
    with pytest.raises(UsageError, match=flag) as caught:
        MtpSettings(**settings)
    assert caught.value.field == flag and caught.value.exit_status == 2


def test_lookup_settings_too() -> None:
    for flag, settings in (("--lookup-gram", {"gram": 0}), ("--lookup-longest", {"longest": 65})):
        with pytest.raises(UsageError) as caught:
            LookupSettings(**settings)
        assert caught.value.field == flag


def test_a_checkpoint_without_a_head_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError) as caught:
        mtp_lane(small("llama"), depth=1)
    assert caught.value.code == "no_draft_head" and caught.value.field == "--lane"
    assert "--drafter lookup" in str(caught.value) and "--lane ar" in str(caught.value)
    headless = TableModel(TABLE)
    headless.draft_head_note = "a conversion dropped the mtp.* tensors"
    for drafter in ("head", "lookup+head"):
        with pytest.raises(UsageError, match="a conversion dropped"):
            mtp_lane(headless, depth=1, drafter=drafter)
    mtp_lane(headless, depth=1, drafter="lookup")


def test_a_draft_model_must_be_there_and_share_the_vocabulary_and_have_a_way_back() -> None:
    model = tuned("qwen3_5")
    with pytest.raises(UsageError, match="--draft-model"):
        mtp_lane(model, depth=1, drafter="model")
    with pytest.raises(UsageError, match="share a tokenizer"):
        mtp_lane(model, depth=1, drafter="model", draft_model=TableModel(TABLE))
    gemma = small("gemma3_text")
    with pytest.raises(UsageError, match="sliding_kv"):
        mtp_lane(gemma, depth=1, drafter="model", draft_model=gemma)


def test_d08_a_state_that_cannot_be_taken_back_is_refused_at_start() -> None:
    with pytest.raises(UsageError) as caught:
        mtp_lane(NoWayBack(), depth=1, drafter="lookup")
    assert caught.value.code == "no_way_back" and "stuck" in str(caught.value)


def test_requests_that_do_not_fit_are_refused_and_default_limits_shrink() -> None:
    lane = mtp_lane(TableModel(TABLE, TableHead(GOOD)), depth=3)
    with pytest.raises(RequestError) as caught:
        lane.open(ask("a", (1,) * 500, count=13), (1,) * 500)
    assert caught.value.code == "too_long"
    with pytest.raises(RequestError):
        lane.open(ask("a", (1,) * 512, count=1), (1,) * 512)
    assert lane.open(ask("a", (1,) * 500, count=12), (1,) * 500).room == 12
