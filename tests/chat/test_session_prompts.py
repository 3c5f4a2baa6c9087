"""Turns of a session through the engine: everything committed comes from the cache, whatever the template strips."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_chat_sessions import TEMPLATE  # type: ignore[import-not-found]

import polytoken
from polytoken.api import make_request
from polytoken.engine import Engine
from polytoken.events import GenerationResult, RequestStarted
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.tiny import write_checkpoint


@pytest.fixture(params=["ar", "mtp"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    path = write_checkpoint(tmp_path, "qwen3_5", acceptance=HISTORY_MATTERS).path
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with polytoken.load(path, lane=request.param, prefill_chunk_size=16) as running:
        yield running


def turn(engine: Engine, messages: list[dict[str, Any]], count: int) -> tuple[RequestStarted, GenerationResult]:
    request = make_request(engine, messages=messages, max_new_tokens=count, ignore_eos=True, session="s")
    started, *_, result = engine.stream(request, token_events=False)
    assert isinstance(started, RequestStarted)
    assert isinstance(result, GenerationResult)
    return started, result


def test_e15_a_second_turn_reuses_everything_committed(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    committed = 0
    for count in (20, 21, 5, 33):
        started, result = turn(engine, messages, count)
        assert (started.history_miss, result.prefix_cache_tokens) == (None, committed)
        committed = result.prompt_tokens + result.generated_tokens
        assert result.reasoning  # the prompt opened a block, and a client that drops it is told the content alone
        messages += [{"role": "assistant", "content": result.content}, {"role": "user", "content": f"{count}?"}]


def test_e14_a_miss_names_the_message_and_the_token(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    stops = []
    for count in (9, 10):
        _, result = turn(engine, messages, count)
        stops.append(result.prompt_tokens + result.generated_tokens)
        messages += [{"role": "assistant", "content": result.content}, {"role": "user", "content": "more"}]
    messages[2]["content"] = "edited"
    started, result = turn(engine, messages, 4)
    assert started.history_miss == f"message_differs at message 2, token {stops[0]}"
    assert result.prefix_cache_tokens <= stops[0]
