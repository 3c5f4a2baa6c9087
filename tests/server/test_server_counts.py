"""Bodies of very many small values: refused before anything is made of them, and others do not wait meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, scripted_engine
from server_running import Running

from polytoken.server.body import check_counts, parse_json
from polytoken.server.errors import ApiError

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ITEMS, VALUES = 300, 1000
ASKED = '"messages": [{"role": "user", "content": "x"}]'
EMPTY = '{"role": "user", "content": ""}'
MANY: dict[str, tuple[str, str]] = {
    "messages": (CHAT, f'{{"messages": [{",".join([EMPTY] * ITEMS)}]}}'),
    "messages of Anthropic": (MESSAGES, f'{{"max_tokens": 1, "messages": [{",".join([EMPTY] * ITEMS)}]}}'),
    "input": (RESPONSES, f'{{"input": [{",".join([EMPTY] * ITEMS)}]}}'),
    "parts": (CHAT, f'{{"messages": [{{"role": "user", "content": [{",".join(["{}"] * ITEMS)}]}}]}}'),
    "tools": (CHAT, f'{{{ASKED}, "tools": [{",".join(["{}"] * ITEMS)}]}}'),
    "stop": (CHAT, f'{{{ASKED}, "stop": {json.dumps(["a"] * ITEMS)}}}'),
    "logit_bias": (CHAT, f'{{{ASKED}, "logit_bias": {json.dumps({str(i): 1 for i in range(ITEMS)})}}}'),
    "unknown": (CHAT, f'{{{ASKED}, "new": {json.dumps([[]] * ITEMS)}}}'),
    "ids": (TEXT, f'{{"prompt": {json.dumps([1] * (VALUES + 2))}}}'),
    "prompts": (TEXT, f'{{"prompt": {json.dumps(["a"] * ITEMS)}}}'),
    "no JSON": (CHAT, "[" * (ITEMS + 1)),
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that takes few values."""
    engine = scripted_engine(tmp_path_factory.mktemp("narrow"), Script())
    with Running({"m": engine}, max_body_items=ITEMS, max_body_values=VALUES) as server:
        yield server


@pytest.mark.parametrize("name", MANY)
def test_too_many_values_are_refused(narrow: Running, name: str) -> None:
    path, body = MANY[name]
    status, record, _ = narrow.request("POST", path, body.encode())
    assert status == 413
    most = f"{VALUES} values" if name == "ids" else f"{ITEMS} texts, lists and objects"
    assert most in record["error"]["message"]
    assert "\n" not in record["error"]["message"]
    if path != MESSAGES:
        assert record["error"]["code"] == "too_many_items"


def test_what_is_inside_a_text_does_not_count(narrow: Running) -> None:
    text = json.dumps('a\\"[{,\\\\' * 3000)
    body = f'{{"messages": [{{"role": "user", "content": {text}}}], "max_tokens": 1}}'
    status, record, _ = narrow.request("POST", CHAT, body.encode())
    assert record["error"]["code"] == "context_length_exceeded"
    assert status == 400
    assert narrow.request("GET", "/health")[1]["settings"]["max_body_items"] == ITEMS


@pytest.mark.parametrize(
    ("body", "items", "values"),
    [
        (b"[1, 2, 3]", 1, 2),
        (b'{"a": [], "b,[{": {}}', 5, 1),
        (b'["\\"", "\\\\", "\\\\\\"["]', 4, 2),
        (b'"never closed [[[,,,', 1, 0),
        (b'\\"\\"\\"', 1, 0),
        (b"", 0, 0),
    ],
)
def test_counts_are_exact(body: bytes, items: int, values: int) -> None:
    check_counts(body, items=items, values=values)
    for less in ({"items": items - 1, "values": values}, {"items": items, "values": values - 1}):
        if min(less.values()) >= 0:
            with pytest.raises(ApiError):
                check_counts(body, **less)


def test_a_key_that_comes_again_is_found_in_one_pass() -> None:
    """It was looked for once for each key before it: 100,000 of them took minutes."""
    keys = ", ".join(f'"{number}": 1' for number in range(99_000))
    before = time.process_time()
    with pytest.raises(ApiError, match="the key '98999' is there twice"):
        parse_json(f'{{{keys}, "98999": 1}}'.encode())
    assert time.process_time() - before < 10


def test_one_wrong_message_of_many_is_told_alone(scripted: Running) -> None:
    """Telling of each took half a minute in which nobody else was served."""
    wrong = b'{"messages": [' + b"{}," * 90_000 + b"{}]}"
    status, record, _ = scripted.request("POST", CHAT, wrong)
    assert (status, record["error"]["param"]) == (400, "messages[0].role")
    bias = {"x" * 5 + str(number): "no number" for number in range(30_000)}
    status, record = scripted.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "logit_bias": bias})
    assert (status, record["error"]["param"]) == (400, "logit_bias")
    assert record["error"]["message"] == "logit_bias: at most 20000 entries are taken, not 30000"


ARGUMENTS = {"wide": "[" + "[]," * 20_000 + "[]]", "deep": "[" * 9_000, "deep and whole": "[" * 9_000 + "]" * 9_000}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_of_an_earlier_call_are_text_in_the_body_and_counted_too(
    scripted: Running, kind: str, path: str
) -> None:
    """A31: deep ones ended in a 500."""
    function = {"name": "f", "arguments": ARGUMENTS[kind]}
    body: dict[str, Any] = {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]}
    if path == RESPONSES:
        body = {"input": [{"type": "function_call", "call_id": "1", **function}]}
    status, record = scripted.post(path, body)
    place = "input[0].arguments" if path == RESPONSES else "messages[0].tool_calls[0].function.arguments"
    if kind == "wide":
        assert (status, record["error"]["code"], record["error"]["param"]) == (413, "too_many_items", place)
    else:
        assert status in (200, 400), record


def test_the_largest_bodies_hold_no_stream_up(tmp_path: Path) -> None:
    """What is refused, and what is just not: a stream beside them goes on all the time."""
    script = Script(says=lambda prompt: "word " * 2000, pace=0.002)
    few = 19_000
    bodies = {
        "lists": (b'{"messages": [' + b"[]," * 2_000_000 + b"[]]}", 413),
        "messages": (f'{{"messages": [{",".join([EMPTY] * 250_000)}]}}'.encode(), 413),
        "just not too many": (f'{{"messages": [{",".join([EMPTY] * few)}]}}'.encode(), 400),
        "ids": (b'{"prompt": [' + b"1," * 900_000 + b"1]}", 400),
    }
    with Running({"m": scripted_engine(tmp_path, script)}) as server:
        seen: list[float] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                server.request("GET", "/v1/models")
                seen.append(time.monotonic())

        watching = threading.Thread(target=watch)
        watching.start()
        statuses, spans = [], []
        for name, (body, _) in bodies.items():
            before = time.monotonic()
            statuses.append(server.request("POST", TEXT if name == "ids" else CHAT, body)[0])
            spans.append((before, time.monotonic()))
        done.set()
        watching.join()
        assert statuses == [status for _, status in bodies.values()]
        assert all(any(start < each < end for each in seen) for start, end in spans)  # answered meanwhile
