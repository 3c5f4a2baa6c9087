"""A conversation's next turn finds its state again, by name or by its beginning, and says how much of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_running import Running

import polytoken

CHAT = "/v1/chat/completions"
WORDS = "The river rose in spring and the town moved its market. "


@pytest.fixture
def server(tiny_path: Path) -> Iterator[Running]:
    with Running({"m": polytoken.load(tiny_path, prefill_chunk_size=32)}) as running:
        yield running


def turn(server: Running, messages: list[Any], **words: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "enable_thinking": False}
    status, record, _ = server.request("POST", CHAT, body, **words)
    assert status == 200, record
    return record["choices"][0]["message"]["content"], record["usage"]


@pytest.mark.parametrize("named", [True, False])
def test_the_next_turn_is_warm(server: Running, named: bool) -> None:
    words: Any = {"headers": {"x-session-id": "s1"}} if named else {}
    history: list[Any] = [{"role": "user", "content": WORDS * 2}]
    text, cold = turn(server, history, **words)
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    _, warm = turn(server, history, **words)
    cached = warm["prompt_tokens_details"]["cached_tokens"]
    assert cached >= cold["prompt_tokens"] - 32
    assert cached < warm["prompt_tokens"]


def test_a_warm_turn_says_what_a_cold_one_says(server: Running) -> None:
    history: list[Any] = [{"role": "user", "content": WORDS * 2}]
    first, _ = turn(server, history)
    again, usage = turn(server, history)
    assert again == first
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
