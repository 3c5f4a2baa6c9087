"""Conversations through the whole engine: streams, counters, branches, and bad requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from session_talks import CHUNK

import polytoken
from polytoken.errors import RequestError, UsageError
from polytoken.events import RequestStarted
from polytoken.request import Request
from polytoken.testkit.tiny import write_checkpoint

SETTINGS = {"prefill_chunk_size": CHUNK, "device": "cpu"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5", tokenizer=True).path


@pytest.fixture(params=["ar", "mtp"])
def engine(request, checkpoint: Path) -> Iterator[polytoken.Engine]:
    with polytoken.load(checkpoint, lane=request.param, **SETTINGS) as engine:
        yield engine


def ask(engine, name: str, ids, *, session: str | None = "s", count: int = 6):
    request = Request(
        request_id=name, token_ids=tuple(ids), max_new_tokens=count, session=session, ignore_eos=True, seed=1
    )
    events = list(engine.stream(request))
    (started,) = [event for event in events if isinstance(event, RequestStarted)]
    return events[-1], started


def test_e12_turns_of_a_session_cost_their_new_tokens_with_and_without_speculation(engine, checkpoint: Path) -> None:
    text: tuple[int, ...] = tuple(range(30, 60))
    for turn in range(4):
        result, started = ask(engine, f"t{turn}", text)
        assert started.prefix_cache_tokens == (0 if turn == 0 else len(text) - 2)
        with polytoken.load(checkpoint, lane="ar", prefix_cache_mib=0, **SETTINGS) as cold:
            assert ask(cold, "cold", text)[0].token_ids == result.token_ids
        assert engine.committed("s") == (*text, *result.token_ids)
        text = (*text, *result.token_ids, 70 + turn, 71)
    summary = list(engine.run([]))[-1]
    assert summary.extra["sessions"] == 1 and summary.extra["prefix_cache_live_hits"] == 3
    assert summary.extra["restored_suffix_prefill_fused"] == 3 and summary.extra["ends_banked"] == 4


def test_e06_a_stop_string_leaves_nothing_to_compute_again(engine) -> None:
    """F01: wherever it ends, also among accepted drafts: the next turn computes its own token and no other."""
    whole, _ = ask(engine, "whole", range(30, 60), session=None, count=24)
    for place in range(2, len(whole.text) - 2, 3):
        session = f"s{place}"
        request = Request(
            request_id=session, token_ids=tuple(range(30, 60)), max_new_tokens=24, session=session, ignore_eos=True,
            seed=1, stop=(whole.text[place : place + 2],),
        )  # fmt: skip
        result = list(engine.stream(request))[-1]
        assert result.stop_reason == "stop_string" and whole.token_ids[: result.generated_tokens] == result.token_ids
        stream = engine.committed(session)
        assert stream == (*range(30, 60), *result.token_ids)
        _, started = ask(engine, f"next {place}", (*stream, 100 + place), session=session, count=1)
        assert started.prefix_cache_tokens == len(stream)
    assert list(engine.run([]))[-1].extra["ends_not_banked"] == 0


def test_branches_and_snapshots_through_the_engine(engine) -> None:
    first, _ = ask(engine, "one", range(30, 60))
    stream = (*range(30, 60), *first.token_ids)
    assert engine.snapshot("point", "s") == len(stream) == engine.fork("s", "other")
    ask(engine, "two", (*stream, 80), session="s")
    alone, started = ask(engine, "three", (*stream, 81), session="other")
    assert started.prefix_cache_tokens == len(stream)
    assert engine.restore("point", "s") == len(stream) and engine.committed("s") == stream
    again, started = ask(engine, "four", (*stream, 81), session="s")
    assert again.token_ids == alone.token_ids and started.prefix_cache_tokens >= len(stream)
    assert [(report.name, report.live) for report in engine.sessions()] == [("other", True), ("s", True)]
    assert [report.tokens for report in engine.snapshots()] == [len(stream)]
    assert engine.clear("other") == 0 and engine.committed("other") is None  # `s` stands on the same runs
    assert engine.drop_snapshot("point") and engine.clear() > 0 and engine.sessions() == []
    with pytest.raises(UsageError) as caught:
        engine.fork("nobody", "x")
    assert caught.value.code == "unknown_session"


def test_a_cancelled_turn_leaves_the_session_as_it_was(engine) -> None:
    first, _ = ask(engine, "one", range(30, 60))
    stream = engine.committed("s")
    request = Request(request_id="two", token_ids=(*stream, 5), max_new_tokens=200, session="s", ignore_eos=True)
    for index, _ in enumerate(engine.stream(request)):
        if index == 3:
            break
    assert engine.committed("s") == stream
    _, started = ask(engine, "three", (*stream, 6))
    assert started.prefix_cache_tokens == len(stream) and first.generated_tokens == 6


@pytest.mark.parametrize("session", ["", " ", 3, "\ud800"])
def test_a_session_has_a_name(session) -> None:
    with pytest.raises(RequestError) as caught:
        Request(request_id="r", token_ids=(1,), max_new_tokens=1, session=session)
    assert caught.value.code == "bad_session"
