"""Turns of a conversation over HTTP: the next one goes on from what was committed, whatever the template and the client
make of it, and `usage` tells so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_running import Running

import polytoken
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.tiny import write_checkpoint

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "größer"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "order", "parameters": SCHEMA}}]
# Reasoning is stripped from every answer but the newest, which gets a block also where it has none; calls are spelled
# anew, with their keys sorted.
TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\\n' + (tools | tojson) + ' <tool_call></tool_call><|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny hybrid, whose states cannot be cut: only a prompt that goes on from its end finds one again."""
    path = write_checkpoint(
        tmp_path_factory.mktemp("turns"),
        "qwen3_5",
        acceptance=HISTORY_MATTERS,
        config={"max_position_embeddings": 4096},
    ).path
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with Running({"mtp": polytoken.load(path, lane="mtp"), "ar": polytoken.load(path, lane="ar")}) as running:
        yield running


def respelled(call: dict[str, Any], number: int) -> dict[str, Any]:
    """The call as another client would send it back."""
    arguments = json.loads(call["function"]["arguments"])
    text = json.dumps(
        dict(reversed(arguments.items())),
        ensure_ascii=number % 2 == 0,
        separators=((",", ":"), (" , ", " : "))[number % 2],
    )
    name = call["id"] if number % 3 else f"other_{number}"
    return {"id": name, "type": "function", "function": {"name": call["function"]["name"], "arguments": text}}


@pytest.mark.parametrize("lane", ["ar", "mtp"])
def test_six_turns_of_calls_cost_their_new_text_alone(server: Running, lane: str) -> None:
    """E14: arguments come back with other keys first, other spaces, escapes and ids; what was committed is cached."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "order"}]
    words = {
        "model": lane, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "enable_thinking": False, "max_tokens": 200, "temperature": 1, "seed": 3,
        "metadata": {"session_id": f"calls {lane}"},
    }  # fmt: skip
    committed = 0
    for number in range(6):
        status, record = server.post(CHAT, {**words, "messages": messages})
        assert status == 200, record
        usage = record["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= committed - 1, number
        assert usage["prompt_tokens"] > committed
        committed = usage["prompt_tokens"] + usage["completion_tokens"]
        message = record["choices"][0]["message"]
        calls = [respelled(call, number) for call in message["tool_calls"]]
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"done {number}"} for call in calls]


@pytest.mark.parametrize("think", [True, False])
def test_reasoning_that_is_dropped_costs_nothing(server: Running, think: bool) -> None:
    """E15: streamed and not, over three turns, though the template moves blocks and the client drops the reasoning."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    words = {"model": "mtp", "enable_thinking": think, "max_tokens": 20, "temperature": 0}
    headers = {"x-session-id": f"reasoning {think}"}
    committed = 0
    for number in range(3):
        body = {**words, "messages": messages}
        if number == 1:
            chunks = server.stream(CHAT, {**body, "stream_options": {"include_usage": True}}, headers=headers)
            usage = chunks[-2]["usage"]
            content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-2])
        else:
            _, record, _ = server.request("POST", CHAT, body, headers=headers)
            usage, content = record["usage"], record["choices"][0]["message"]["content"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= committed - 1
        committed = usage["prompt_tokens"] + usage["completion_tokens"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"{number}?"}]


def test_a_response_goes_on_from_the_tokens_of_the_one_before(server: Running) -> None:
    """E15: previous_response_id names the conversation; a second answer to the same one branches off."""
    words = {"model": "mtp", "max_output_tokens": 20, "temperature": 0}
    _, first = server.post("/v1/responses", {**words, "input": "hello"})
    committed = first["usage"]["total_tokens"]
    for question in ("more", "less"):
        _, record = server.post("/v1/responses", {**words, "input": question, "previous_response_id": first["id"]})
        assert record["usage"]["input_tokens_details"]["cached_tokens"] >= committed - 1, question
        assert record["usage"]["input_tokens"] > committed


def test_messages_count_what_was_cached_apart(server: Running) -> None:
    """E15: with Anthropic cached tokens are no part of the input tokens."""
    words: dict[str, Any] = {"model": "mtp", "max_tokens": 20, "metadata": {"session_id": "claude"}}
    words |= {"thinking": {"type": "disabled"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "good day"}]
    _, first = server.post("/v1/messages", {**words, "messages": messages})
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "more"}]
    _, second = server.post("/v1/messages", {**words, "messages": messages})
    usage = second["usage"]
    committed = sum(first["usage"].values())
    assert usage["cache_read_input_tokens"] >= committed - 1
    assert 0 < usage["input_tokens"] < 40
