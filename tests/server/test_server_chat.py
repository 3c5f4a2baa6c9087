"""Chat and completions to the letter, over a model that says what it is told, and over a random one."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import pytest
from scripted import Script
from server_running import Running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def joined(chunks: list[Any], name: str = "content") -> str:
    return "".join(c["choices"][0]["delta"].get(name) or "" for c in chunks[:-1] if c["choices"])


def test_a_chat_answer_has_every_part(scripted: Running, script: Script) -> None:
    script.says = lambda prompt: "Hello there."
    status, record = scripted.post(CHAT, HELLO)
    assert status == 200
    assert record["object"] == "chat.completion"
    assert record["id"].startswith("chatcmpl-")
    assert record["model"] == "scripted"
    (choice,) = record["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = record["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_begins_with_the_role_and_ends_with_one_finish_reason_and_done(
    scripted: Running, script: Script
) -> None:
    """A08."""
    script.says = lambda prompt: "one two three"
    chunks = scripted.stream(CHAT, HELLO)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1] == "[DONE]"
    finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert joined(chunks) == "one two three"
    assert len({c["id"] for c in chunks[:-1]}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_usage_in_a_stream_unless_asked_for(scripted: Running, options: Any, path: str) -> None:
    """A02."""
    body = HELLO if path == CHAT else {"prompt": "hello"}
    chunks = scripted.stream(path, {**body, "stream_options": options})
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_usage_chunk_comes_last_with_no_choices_and_counts_as_the_whole_answer(tiny: Running, path: str) -> None:
    """A01."""
    body = {**(HELLO if path == CHAT else {"prompt": "hello"}), "max_tokens": 9}
    chunks = tiny.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert [bool(chunk.get("usage")) for chunk in chunks[:-1]] == [False] * (len(chunks) - 2) + [True]
    assert chunks[-2]["choices"] == []
    _, whole = tiny.post(path, body)
    theirs, ours = chunks[-2]["usage"], whole["usage"]
    for usage in (theirs, ours):
        usage.pop("prompt_tokens_details")  # the second one found the prompt in the cache
    assert theirs == ours


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_a_stop_string_across_tokens_leaks_nothing(scripted: Running, script: Script, path: str, group: int) -> None:
    """A03."""
    script.says, script.group = lambda prompt: "the quick brown fox jumps", group
    body = {**(HELLO if path == CHAT else {"prompt": "hello"}), "stop": ["wn f"], "max_tokens": 99}
    chunks = scripted.stream(path, body)
    texts = [c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or "" for c in chunks[:-1]]
    assert "".join(texts) == "the quick bro"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    _, whole = scripted.post(path, body)
    choice = whole["choices"][0]
    assert choice.get("text", choice.get("message", {}).get("content")) == "the quick bro"


@pytest.mark.parametrize("group", [1, 2, 5])
def test_characters_are_never_cut(scripted: Running, script: Script, group: int) -> None:
    """A05."""
    text = "Příliš žluťoučký 🧑🏽‍🚀👨‍👩‍👧 नमस्ते 漢字 ok"
    script.says, script.group = lambda prompt: text, group
    chunks = scripted.stream(CHAT, {**HELLO, "max_tokens": 500})
    assert joined(chunks) == text
    assert all("\ufffd" not in str(chunk) for chunk in chunks)


def test_content_is_always_there(scripted: Running, script: Script) -> None:
    """A09: also when there is reasoning alone, or nothing."""
    script.says = lambda prompt: ""
    assert scripted.post(CHAT, HELLO)[1]["choices"][0]["message"]["content"] == ""
    script.says = lambda prompt: "<think>\nhm"
    message = scripted.post(CHAT, HELLO)[1]["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "\nhm")


@pytest.mark.parametrize("length", [1, 2, 5, 10, 11])
def test_short_prompts_are_served(tiny: Running, length: int) -> None:
    """A10."""
    body = {"prompt": list(range(60, 60 + length)), "max_tokens": 3, "seed": 1}
    status, record = tiny.post(TEXT, body)
    assert (status, record["usage"]["prompt_tokens"]) == (200, length)
    for think in (True, False):
        chat = {"messages": [{"role": "user", "content": "x" * length}], "max_tokens": 3, "enable_thinking": think}
        assert tiny.post(CHAT, chat)[0] == 200


NULLABLE = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "response_format",
    "user",
    "metadata",
    "parallel_tool_calls",
    "reasoning_effort",
]


def test_null_means_the_default(scripted: Running) -> None:
    """A11: for every optional field in turn, and all at once."""
    for name in NULLABLE:
        status, record = scripted.post(CHAT, {**HELLO, name: None})
        assert (status, record["choices"][0]["message"]["content"]) == (200, "ok"), name
    assert scripted.post(CHAT, {**HELLO, **dict.fromkeys(NULLABLE)})[0] == 200
    assert scripted.post(TEXT, {"prompt": "x", **dict.fromkeys(["echo", "best_of", "suffix", "logprobs"])})[0] == 200


def test_choices_are_made_or_refused(tiny: Running) -> None:
    """A13: n gives n distinct choices, usage is summed; echo, suffix and best_of are refused by name."""
    body = {**HELLO, "max_tokens": 5, "temperature": 1.0, "seed": 3}
    _, record = tiny.post(CHAT, {**body, "n": 3})
    assert [choice["index"] for choice in record["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in record["choices"]]
    assert len(set(texts)) == 3
    assert record["usage"]["completion_tokens"] <= 15
    _, single = tiny.post(CHAT, body)
    assert single["choices"][0]["message"]["content"] == texts[0]  # n does not change what the seed gives
    chunks = tiny.stream(CHAT, {**body, "n": 3})
    for index, text in enumerate(texts):
        parts = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == text
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    _, texts_record = tiny.post(TEXT, {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "temperature": 1.0})
    assert [choice["index"] for choice in texts_record["choices"]] == [0, 1, 2, 3]
    for name, value in (("echo", True), ("suffix", "x"), ("best_of", 2)):
        status, error = tiny.post(TEXT, {"prompt": "x", name: value})
        assert (status, error["error"]["param"], error["error"]["code"]) == (400, name, "unsupported")
    assert tiny.post(CHAT, {**HELLO, "n": 17})[1]["error"]["param"] == "n"


@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_logprobs_are_all_there(tiny: Running, top: int | None) -> None:
    """A15."""
    body = {**HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": top, "logit_bias": {"70": -100}}
    _, record = tiny.post(CHAT, body)
    entries = record["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == (top or 0)
        assert -10000 < entry["logprob"] <= 0
        assert all(-10000 < other["logprob"] <= 0 for other in entry["top_logprobs"])
        assert all(0 <= byte < 256 for byte in entry["bytes"])
    chunks = tiny.stream(CHAT, body)
    streamed = [e for c in chunks[:-1] for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == entries
    assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="ignore")[:1] is not None


def test_logprobs_beyond_the_bounds_are_refused(tiny: Running) -> None:
    """A15."""
    for body, name in (({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"top_logprobs": 2}, "top_logprobs")):
        status, error = tiny.post(CHAT, {**HELLO, **body})
        assert (status, error["error"]["param"]) == (400, name)
    _, record = tiny.post(TEXT, {"prompt": "x", "logprobs": 5, "max_tokens": 3})
    logprobs = record["choices"][0]["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3] * 4


def test_reasoning_and_content_hold_every_character_once(scripted: Running, script: Script) -> None:
    """A18."""
    cases = {
        "plain <think> in an answer": ("", "plain <think> in an answer"),
        "<think>a</think>b <think>c</think>": ("a", "b <think>c</think>"),
        "<think>never closed": ("never closed", ""),
        "closed</think> without a start": ("", "closed</think> without a start"),
    }
    for text, (reasoning, content) in cases.items():
        script.says = lambda prompt, text=text: text  # type: ignore[misc]
        message = scripted.post(CHAT, HELLO)[1]["choices"][0]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
        chunks = scripted.stream(CHAT, HELLO)
        assert (joined(chunks, "reasoning_content"), joined(chunks)) == (reasoning, content)


def test_seeds_repeat_and_their_absence_does_not(tiny: Running) -> None:
    body = {**HELLO, "max_tokens": 8, "temperature": 1.5}

    def text(**words: Any) -> str:
        return str(tiny.post(CHAT, {**body, **words})[1]["choices"][0]["message"]["content"])

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert len({text() for _ in range(4)}) > 1


def test_a_limit_beyond_the_context_goes_as_far_as_it_goes(tiny: Running) -> None:
    _, record = tiny.post(CHAT, {**HELLO, "max_tokens": 100_000, "temperature": 0})
    usage = record["usage"]
    assert usage["total_tokens"] <= 512
    assert record["choices"][0]["finish_reason"] in ("length", "stop")


def test_keep_alive_comments_fill_silence(tmp_path: Any) -> None:
    from scripted import scripted_engine  # noqa: PLC0415

    script = Script(says=lambda prompt: "abc")
    gate = script.held(1)
    with Running({"slow": scripted_engine(tmp_path, script)}, keep_alive=0.05) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", CHAT, json.dumps({**HELLO, "stream": True}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = b""
        while b": keep-alive\n\n" not in text:  # nothing else comes as long as the model is held
            text += answer.read1()
        gate.set()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_a_long_request_is_ended(tmp_path: Any) -> None:
    from scripted import scripted_engine  # noqa: PLC0415

    engine = scripted_engine(tmp_path, Script(says=lambda prompt: "a" * 500, pace=0.05))
    with Running({"slow": engine}, request_timeout=0.4) as server:
        before = time.monotonic()
        status, error = server.post(CHAT, HELLO)
        assert (status, error["error"]["code"]) == (504, "request_timeout")
        assert time.monotonic() - before < 15  # it would take 25 s
        chunks = server.stream(CHAT, HELLO)
        assert chunks[-2]["error"]["code"] == "request_timeout"
        assert chunks[-1] == "[DONE]"


def test_counted_tokens_are_those_that_are_read_with_words_for_the_template_too(scripted: Running) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
    counts = []
    for words in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        status, counted = scripted.post("/v1/messages/count_tokens", {**prompt, **words})
        assert status == 200, counted
        status, answer = scripted.post("/v1/messages", {**prompt, **words, "max_tokens": 4})
        assert status == 200, answer
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]
        counts.append(counted["input_tokens"])
    assert counts[0] > counts[1]  # a thought that is closed at once takes tokens


@pytest.mark.parametrize("session", [None, "s"])
def test_tools_told_in_words_are_called_in_a_session_too(
    scripted: Running, script: Script, session: str | None
) -> None:
    script.says = lambda prompt: '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    headers = {} if session is None else {"x-session-id": session}
    status, record, _ = scripted.request("POST", CHAT, {**HELLO, "tools": [tool]}, headers=headers)
    assert status == 200, record
    assert record["choices"][0]["finish_reason"] == "tool_calls"
    assert record["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
