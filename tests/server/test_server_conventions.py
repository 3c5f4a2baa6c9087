"""Conventions of OpenAI and Anthropic beside the answers: null usage, ids of errors, listings, members not taken."""

from __future__ import annotations

import threading
import time
from typing import Any

import anthropic
import pytest
from scripted import Script
from server_running import Running

from polytoken.server import remembered
from polytoken.server.errors import ApiError

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
    RESPONSES: {"input": "hello"},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_with_usage_asked_for_every_chunk_before_it_says_null(scripted: Running, path: str) -> None:
    """Of two choices, with chunks of log-probabilities and of watching among them."""
    more = {"polytoken": {"watch": True}} if path == CHAT else {}
    chunks = scripted.stream(path, {**BODIES[path], **more, "n": 2, "stream_options": {"include_usage": True}})
    assert len(chunks) > 4
    assert [chunk["usage"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES, "/nowhere"])
def test_errors_have_an_id_of_their_own(scripted: Running, path: str) -> None:
    """In the headers that the clients read it from; with Anthropic in the body, too."""
    seen = set()
    for _ in range(2):
        status, record, headers = scripted.request("POST", path, {})
        assert status in (400, 404)
        seen.add(headers["x-request-id"])
        if path == MESSAGES:
            assert headers["request-id"] == headers["x-request-id"] == record["request_id"]
    assert len(seen) == 2


def test_the_log_tells_the_id_of_an_error(scripted: Running, caplog: pytest.LogCaptureFixture) -> None:
    scripted.state.settings = scripted.state.settings.__class__(port=0)  # with a log
    with caplog.at_level("INFO", logger="polytoken.access"):
        _, _, headers = scripted.request("POST", CHAT, {})
        deadline = time.monotonic() + 60
        while headers["x-request-id"] not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("name", "value"), [("n", 2), ("logprobs", True), ("top_logprobs", 2), ("polytoken", {"watch": True})]
)
def test_what_only_chat_completions_can_show_is_refused(scripted: Running, path: str, name: str, value: Any) -> None:
    """Two choices came mixed into one answer, and were both counted."""
    status, record = scripted.post(path, {**BODIES[path], name: value})
    assert status == 400
    assert name in record["error"]["message"]
    for harmless in (None, False if name == "logprobs" else None, 1 if name == "n" else None):
        assert scripted.post(path, {**BODIES[path], name: harmless})[0] == 200


def test_a_response_is_to_its_input_alone(scripted: Running, script: Script) -> None:
    """Not to `messages`, and not without a conversation or prompt that OpenAI keeps."""
    for name, value in (("messages", HELLO), ("conversation", "conv_1"), ("prompt", {"id": "pmpt_1"})):
        status, record = scripted.post(RESPONSES, {"input": "another thing", name: value})
        assert (status, record["error"]["param"]) == (400, name)
    assert not script.steps


def test_tools_that_anthropic_runs_itself_are_refused(scripted: Running) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}, "type": "custom"}]
    assert scripted.post(MESSAGES, {**BODIES[MESSAGES], "tools": tools})[0] == 200
    tools.append({"type": "web_search_20250305", "name": "web_search"})
    status, record = scripted.post(MESSAGES, {**BODIES[MESSAGES], "tools": tools})
    assert status == 400
    assert "tools[1]" in record["error"]["message"]


def test_anthropics_client_lists_models(scripted: Running) -> None:
    with anthropic.Anthropic(base_url=scripted.url, api_key="any", max_retries=0) as client:
        page = client.models.list()
        assert (page.first_id, page.last_id, page.has_more) == ("scripted", "scripted", False)
        for model in (*page, client.models.retrieve("scripted")):
            assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
            assert abs(model.created_at.timestamp() - time.time()) < 3600


def test_items_of_a_response_that_was_cut_short_are_incomplete(scripted: Running, script: Script) -> None:
    script.says = lambda prompt: "one two three"
    cut = scripted.post(RESPONSES, {"input": "hello", "max_output_tokens": 2})[1]
    assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
    events = scripted.stream(RESPONSES, {"input": "hello", "max_output_tokens": 2})
    assert events[-2]["item"]["status"] == events[-1]["response"]["output"][-1]["status"] == "incomplete"
    whole = scripted.post(RESPONSES, {"input": "hello"})[1]
    assert (whole["status"], whole["output"][-1]["status"]) == ("completed", "completed")


def test_a_call_that_is_whole_is_complete_also_when_the_answer_is_not(scripted: Running, script: Script) -> None:
    script.says = lambda prompt: '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' + " on" * 999
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    record = scripted.post(RESPONSES, {"input": "hello", "tools": tools, "max_output_tokens": 300})[1]
    assert record["status"] == "incomplete"
    kinds = {item["type"]: item["status"] for item in record["output"]}
    assert kinds == {"function_call": "completed", "message": "incomplete"}


def test_anthropic_is_told_of_a_timeout_by_its_own_name() -> None:
    assert ApiError(504, "late", code="request_timeout").anthropic()["error"]["type"] == "timeout_error"


def test_a_prompt_without_room_is_told_by_its_field(scripted: Running) -> None:
    for path, name, body in ((TEXT, "prompt", {"prompt": "ab " * 9000}), (CHAT, "messages", None)):
        given = body or {"messages": [{"role": "user", "content": "ab " * 9000}]}
        status, record = scripted.post(path, given)
        assert (status, record["error"]["code"], record["error"]["param"]) == (400, "context_length_exceeded", name)


def test_a_tools_bad_schema_is_told_as_the_tools(tiny: Running) -> None:
    function = {"name": "look", "parameters": {"type": "nonsense"}}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    status, record = tiny.post(CHAT, body)
    assert (status, record["error"]["code"], record["error"]["param"]) == (400, "bad_schema", "tools")


@pytest.mark.parametrize("where", ["messages", "tools"])
def test_a_prompt_of_megabytes_holds_nobody_up(tiny: Running, where: str) -> None:
    """Its encoding took seconds in which no other thread ran."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "word and " * 120_000}], "max_tokens": 1}
    if where == "tools":
        function = {"name": "look", "description": "word and " * 120_000, "parameters": {"type": "object"}}
        body = {"messages": HELLO, "max_tokens": 1, "tools": [{"type": "function", "function": function}]}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(tiny.post(CHAT, body, timeout=120)))
    asking.start()
    gaps, before = [], time.monotonic()
    while asking.is_alive():
        time.sleep(0.005)
        tiny.request("GET", "/v1/models")
        now = time.monotonic()
        gaps.append(now - before)
        before = now
    status, record = answers[0]
    assert (status, record["error"]["code"]) == (400, "context_length_exceeded")
    assert max(gaps) < 0.5 * sum(gaps), (max(gaps), sum(gaps))


def test_what_is_remembered_is_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand conversations of megabytes stayed in memory."""
    monkeypatch.setattr(remembered, "CHARACTERS", 1000)
    store = remembered.ResponseStore()
    for number in range(5):
        store.put(str(number), remembered.Remembered(({"role": "user", "content": "x" * 400},), None))
    assert store.get("4").turns
    assert store.get("3").turns
    with pytest.raises(ApiError):
        store.get("2")
    store.put("large", remembered.Remembered(({"role": "user", "content": "x" * 5000},), None))
    assert store.get("large").turns  # the newest one always is
    with pytest.raises(ApiError):
        store.get("4")


def test_all_who_ask_a_busy_engine_for_its_numbers_wait_on_one_thread(scripted: Running) -> None:
    """Each had a thread of the few that there are, and prompts waited for those."""
    assert scripted.post(CHAT, BODIES[CHAT])[0] == 200
    engine = scripted.state.pool.loaded["scripted"].engine
    begun, end = threading.Event(), threading.Event()
    asked: list[Any] = []
    inner = engine.call

    def occupy(_: Any) -> None:
        begun.set()
        assert end.wait(60)

    def call(act: Any) -> Any:
        asked.append(act)
        return inner(act)

    busy = threading.Thread(target=inner, args=(occupy,))
    busy.start()
    assert begun.wait(20)
    engine.call = call  # type: ignore[method-assign]
    answers: list[Any] = []
    probes = [threading.Thread(target=lambda: answers.append(scripted.request("GET", "/metrics"))) for _ in range(12)]
    for probe in probes:
        probe.start()
    for probe in probes:
        probe.join()  # after their time: the engine is still busy
    assert len(asked) == 1
    long = {"messages": [{"role": "user", "content": "ab " * 9000}]}
    assert scripted.post(CHAT, long)[1]["error"]["code"] == "context_length_exceeded"  # made on a thread, meanwhile
    end.set()
    busy.join()
    assert [answer[0] for answer in answers] == [200] * 12
