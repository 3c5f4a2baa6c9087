"""What comes over a socket: slow heads and bodies, requests behind each other, and what messages repeat of them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, scripted_engine
from server_running import Running

from polytoken.server import connection

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def head_of(length: int, *, last: bool = True) -> bytes:
    end = "Connection: close\r\n" if last else ""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n{end}\r\n".encode()


def rest_of(line: socket.socket) -> bytes:
    parts = []
    while part := line.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server that does not wait long for what a client has to say."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 1.5)
    with Running({"m": scripted_engine(tmp_path, Script())}, request_timeout=60.0) as server:
        yield server


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_head_that_never_ends_is_not_waited_for(hasty: Running, begun: bytes) -> None:
    """Also when a byte of it comes now and then."""
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as line:
        line.sendall(begun)
        done = threading.Event()

        def trickle() -> None:
            while begun and not done.wait(0.05):
                try:
                    line.sendall(b"a")
                except OSError:
                    return

        trickling = threading.Thread(target=trickle)
        trickling.start()
        with contextlib.suppress(ConnectionResetError):  # closed with a byte of ours on its way
            assert rest_of(line) == b""
        done.set()
        trickling.join()
    assert hasty.post(CHAT, HELLO)[0] == 200


def test_a_body_that_never_ends_is_told_so(tmp_path: Path) -> None:
    with (
        Running({"m": scripted_engine(tmp_path, Script())}, request_timeout=0.5) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as line,
    ):
        line.sendall(head_of(1000, last=False) + b'{"messages": [')
        answer = rest_of(line)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def test_a_slow_answer_is_none_of_a_slow_head(hasty: Running) -> None:
    script = Script(says=lambda prompt: "word " * 4, pace=0.25)
    engine = hasty.state.pool.loaded["m"].engine
    engine.call(lambda loaded: setattr(loaded.lane, "script", script))
    before = time.monotonic()
    assert hasty.post(CHAT, HELLO)[1]["choices"][0]["message"]["content"] == "word " * 4
    assert time.monotonic() - before > connection.HEAD_SECONDS


def test_requests_behind_each_other_on_one_connection_are_all_answered(scripted: Running) -> None:
    body = json.dumps(HELLO).encode()
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=20) as line:
        line.sendall((head_of(len(body), last=False) + body) * 2 + head_of(len(body)) + body)
        assert rest_of(line).count(b"HTTP/1.1 200 OK") == 3


def test_a_websocket_is_not_offered_whatever_is_installed(scripted: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=20) as line:
        line.sendall(head)
        assert rest_of(line).startswith(b"HTTP/1.1 200 OK")


def test_messages_repeat_little_of_what_a_client_sent(scripted: Running) -> None:
    """A name of megabytes came back whole, in the answer and in a header."""
    long = "long" * 5000
    answers = [
        scripted.request("GET", f"/{long}"),
        scripted.request("GET", f"/v1/models/{long}"),
        scripted.request("POST", CHAT, {**HELLO, "model": long}),
        scripted.request("POST", "/v1/responses", {"input": "x", "previous_response_id": long}),
        scripted.request("POST", "/v1/responses", {"input": [{"type": long}]}),
        scripted.request("POST", CHAT, f'{{"{long}": 1, "{long}": 1}}'.encode()),
        scripted.request("POST", CHAT, {**HELLO, "tool_choice": {"function": {"name": long}}}),
        scripted.request("GET", f"/admin/sessions/{long}"),
    ]
    for status, record, _ in answers:
        assert status in (400, 404)
        assert "long" in record["error"]["message"]
        assert len(record["error"]["message"]) < 300
    status, _, headers = scripted.request("POST", CHAT, {**HELLO, long: 1})
    assert status == 200
    assert 0 < len(headers["x-polytoken-ignored"]) < 100


def test_an_integer_of_thousands_of_digits_is_refused_in_our_words(scripted: Running) -> None:
    for digits in ("1" * 1001, "-" + "9" * 5000):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "seed": {digits}}}'
        status, record, _ = scripted.request("POST", CHAT, body.encode())
        assert (status, record["error"]["code"]) == (400, "invalid_json")
        assert "more than 1000 digits" in record["error"]["message"]


def test_two_long_names_are_never_one_session(scripted: Running) -> None:
    """They were cut to 200 characters: the second conversation went on from the first one's tokens."""
    for headers, metadata, place in (
        ({"x-session-id": "s" * 201}, None, "x-session-id"),
        ({}, {"session_id": "s" * 201}, "metadata.session_id"),
        ({}, {"chat_id": {}}, "metadata.chat_id"),
        ({}, {"conversation_id": True}, "metadata.conversation_id"),
    ):
        status, record, _ = scripted.request("POST", CHAT, {**HELLO, "metadata": metadata}, headers=headers)
        assert (status, record["error"]["code"], record["error"]["param"]) == (400, "bad_session", place)
    assert scripted.request("POST", CHAT, HELLO, headers={"x-session-id": "s" * 200})[0] == 200
    assert (
        scripted.post(CHAT, {**HELLO, "metadata": {"session_id": 5, "chat_id": {}}})[0] == 200
    )  # the first one counts


def test_stop_strings_of_books_are_refused(scripted: Running) -> None:
    """Each is looked through on the engine's own thread, where everyone waits."""
    for stop, status in (("a" * 4096, 200), ("a" * 4097, 400), (["a", "b" * 5000], 400)):
        got, record = scripted.post(CHAT, {**HELLO, "stop": stop})
        assert got == status
        if status == 400:
            assert (record["error"]["code"], record["error"]["param"]) == ("bad_stop", "stop")
