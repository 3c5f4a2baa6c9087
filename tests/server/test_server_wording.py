"""Errors name what the caller wrote, whatever the server has made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_running import Running

import polytoken
from polytoken.testkit.tiny import write_checkpoint

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SURROGATE = "\ud800"
HELLO = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "x"}

WRONG_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"input": SURROGATE}, "input"),
    ({"input": "x", "instructions": SURROGATE}, "instructions"),
    ({"input": [HELLO, {"role": "robot", "content": "x"}]}, "input[1].role"),
    ({"input": [HELLO, {"role": "robot", "content": "x"}], "instructions": "x"}, "input[1].role"),
    ({"input": [HELLO, {"type": "reasoning"}, {"role": "user", "content": SURROGATE}]}, "input[2].content"),
    ({"input": [HELLO, CALL, CALL, {**RESULT, "output": SURROGATE}]}, "input[3].output"),
    ({"input": [HELLO, CALL, {**CALL, "name": 3}]}, "input[2].name"),
    ({"input": [HELLO, {**CALL, "arguments": 3}]}, "input[1].arguments"),
    ({"input": [HELLO, {**RESULT, "call_id": 3}]}, "input[1].call_id"),
    ({"input": []}, "input"),
    ({"input": "ab " * 9000}, "input"),
    ({"input": "x", "tools": [{"type": "function", "name": "no name"}]}, "tools[0].name"),
    ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "poem"}}}, "text.format.type"),
]


@pytest.mark.parametrize(("body", "place"), WRONG_INPUTS)
def test_responses_name_the_items_of_their_input(scripted: Running, body: dict[str, Any], place: str) -> None:
    """They named `messages[1]`, which nobody had written."""
    status, record = scripted.post(RESPONSES, body)
    assert (status, record["error"]["param"]) == (400, place)
    assert "messages" not in record["error"]["message"]


def test_an_item_behind_remembered_ones_has_its_own_place(scripted: Running) -> None:
    first = scripted.post(RESPONSES, {"input": [HELLO, HELLO], "instructions": "x"})[1]["id"]
    body = {"input": [HELLO, {"role": "user", "content": SURROGATE}], "previous_response_id": first}
    assert scripted.post(RESPONSES, body)[1]["error"]["param"] == "input[1].content"


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"system": SURROGATE}, "system"),
    ({"system": [{"type": "text", "text": SURROGATE}]}, "system"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"system": "x", "messages": [HELLO, {"role": "user", "content": SURROGATE}]}, "messages[1].content"),
    ({"system": "x", "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {
            "system": "x",
            "messages": [
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "x"},
                        {"type": "tool_result", "tool_use_id": "2", "content": SURROGATE},
                    ],
                },
            ],
        },
        "messages[1].content[1].content",
    ),
    ({"tools": [{"name": "no name", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"top_p": 2}, "top_p"),
]


@pytest.mark.parametrize(("body", "place"), WRONG_MESSAGES)
def test_messages_name_their_own_fields(scripted: Running, body: dict[str, Any], place: str) -> None:
    status, record = scripted.post(MESSAGES, {"messages": [HELLO], "max_tokens": 1, **body})
    assert status == 400
    assert record["error"]["message"].startswith(place + " ") or record["error"]["message"].startswith(place + ":")


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([1, 99999999], "prompt[1]"),
        ([[1], [2, 99999999]], "prompt[1][1]"),
        (["x", ""], "prompt[1]"),
        (SURROGATE, "prompt"),
        (["x", SURROGATE], "prompt[1]"),
        (["x", "ab " * 9000], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([], "prompt"),
    ],
)
def test_completions_name_the_prompt(scripted: Running, prompt: Any, place: str) -> None:
    status, record = scripted.post(TEXT, {"prompt": prompt})
    assert (status, record["error"]["param"]) == (400, place), record
    assert "token_ids" not in record["error"]["message"]
    assert "raw_prompt" not in record["error"]["message"]


ROWLESS = "<|rowless|>"


@pytest.fixture(scope="module")
def rowless(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint whose tokenizer knows a token that its network has no row for."""
    path = write_checkpoint(tmp_path_factory.mktemp("rowless"), "qwen3", seed=1).path
    rows = json.loads((path / "config.json").read_text())["vocab_size"]
    record = json.loads((path / "tokenizer.json").read_text())
    token = {**record["added_tokens"][0], "id": rows + 7, "content": ROWLESS, "special": True}
    record["added_tokens"].append(token)
    (path / "tokenizer.json").write_text(json.dumps(record))
    with Running({"rowless": polytoken.load(path)}) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_a_token_without_a_row_is_refused_before_a_stream_begins(
    rowless: Running, path: str, session: bool, stream: bool
) -> None:
    bodies: dict[str, tuple[dict[str, Any], str]] = {
        CHAT: ({"messages": [{"role": "user", "content": ROWLESS}], "n": 1 if session else 2}, "messages"),
        TEXT: ({"prompt": ["hello", "a" + ROWLESS]}, "prompt[1]"),
        MESSAGES: ({"messages": [{"role": "user", "content": ROWLESS}], "max_tokens": 1}, "messages"),
        RESPONSES: ({"input": ROWLESS}, "input"),
    }
    body, param = bodies[path]
    headers = {"x-session-id": "rowless"} if session else {}
    status, record, _ = rowless.request("POST", path, {**body, "stream": stream}, headers=headers)
    assert status == 400, record
    assert "outside the network's vocabulary" in record["error"]["message"]
    if path != MESSAGES:
        assert (record["error"]["code"], record["error"]["param"]) == ("bad_prompt", param)
    assert not rowless.state.turns
    assert rowless.post(CHAT, {"messages": [HELLO], "max_tokens": 1})[0] == 200
