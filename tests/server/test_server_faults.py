"""What is wrong with a call is told by a 4xx with its reason; the server goes on whatever comes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, scripted_engine
from server_running import Running

from polytoken.server.guard import RateLimiter

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def send_raw(server: Running, data: bytes, *, leave: bool = False) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(data)
        if leave:
            line.shutdown(socket.SHUT_WR)
        parts = []
        while part := line.recv(65536):
            parts.append(part)
        return b"".join(parts)


BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n",
    "truncated": b'{"messages": [{"role": "us',
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "number": b"3",
    "nan": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "infinity": b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    "huge number": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "twice": b'{"messages": [{"role": "user", "content": "x"}], "n": 1, "n": 2}',
    "mark": b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "x"}]}',
    "not utf-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    "surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_odd_bodies_get_an_error_object(scripted: Running, name: str, path: str) -> None:
    """A26."""
    status, record, _ = scripted.request("POST", path, BODIES[name])
    assert status == 400, record
    assert set(record["error"]) == {"message", "type", "code", "param"}
    assert record["error"]["type"] == "invalid_request_error"
    assert scripted.post(CHAT, HELLO)[0] == 200


def test_odd_framing_is_answered(scripted: Running) -> None:
    """A26."""
    assert scripted.request("GET", CHAT)[0] == 405
    assert scripted.request("GET", "/nowhere")[1]["error"]["code"] == "not_found"
    assert scripted.request("POST", CHAT, HELLO, headers={"Content-Type": "text/plain"})[0] == 415
    assert scripted.request("POST", CHAT, HELLO, headers={"Content-Encoding": "gzip"})[0] == 415
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = json.dumps(HELLO)
    chunked = f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    assert b"200 OK" in send_raw(scripted, chunked.encode())
    assert b" 400 " in send_raw(scripted, f"{head}Connection: close\r\n\r\n".encode()).split(b"\r\n")[0]  # no length
    short = send_raw(scripted, f"{head}Content-Length: 5\r\nConnection: close\r\n\r\n{body}".encode())
    assert b" 400 " in short.split(b"\r\n")[0]
    send_raw(scripted, f"{head}Content-Length: 99999\r\n\r\n{body}".encode(), leave=True)  # longer than what comes
    assert b" 400 " in send_raw(scripted, b"nonsense\r\n\r\n").split(b"\r\n")[0]
    assert scripted.post(CHAT, HELLO)[0] == 200


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 400),
        ([{"role": "system", "content": "x"}], 200),
        ([{"role": "assistant", "content": "x"}], 200),
        ([{"role": "user", "content": ""}], 200),
        ([{"role": "user", "content": []}], 200),
        ([{"role": "user", "content": None}], 200),
        ([{"role": "tool", "content": "x"}], 200),
        ([{"role": "user"}], 200),
        ([{"role": "robot", "content": "x"}], 400),
        ([{"content": "x"}], 400),
        (["x"], 400),
        ("x", 400),
        ([{"role": "user", "content": 3}], 400),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 400),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], 200),
        ([{"role": "user", "content": [{"type": "text"}]}], 400),
        ([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}], 200),
    ],
)
def test_odd_conversations_are_answered_or_refused(scripted: Running, messages: Any, status: int) -> None:
    """A31."""
    got, record = scripted.post(CHAT, {"messages": messages, "prompt_logprobs": 5})
    assert got == status, record
    assert scripted.request("GET", "/health")[1]["status"] == "ok"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_lists_of_parts_are_texts(scripted: Running, role: str) -> None:
    """B03: and the same prompt as the joined text."""

    def prompt_tokens(content: Any) -> int:
        turns = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
        status, record = scripted.post(CHAT, {"messages": turns})
        assert status == 200, record
        return int(record["usage"]["prompt_tokens"])

    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    assert prompt_tokens(parts) == prompt_tokens("abcd")
    assert prompt_tokens([]) == prompt_tokens("") == prompt_tokens(None)  # B02: null is the empty text
    turns = [{"role": role, "content": [{"type": "sound"}]}]
    assert scripted.post(CHAT, {"messages": turns})[1]["error"]["code"] == "bad_messages"


def test_a_value_out_of_range_names_its_field(scripted: Running) -> None:
    bad = {
        "temperature": -1, "top_p": 2, "top_k": -1, "n": 0, "max_tokens": 0, "presence_penalty": 3, "seed": "1",
        "logit_bias": {"x": 1}, "stop": ["", "a"], "stream": "yes", "messages": [{"role": "user", "content": 1}],
    }  # fmt: skip
    for name, value in bad.items():
        status, record = scripted.post(CHAT, {**HELLO, name: value})
        assert status == 400, name
        assert (record["error"]["param"] or "").split("[")[0].split(".")[0] == name, record
    for value in (1.5, True, "3"):
        assert scripted.post(CHAT, {**HELLO, "top_k": value})[0] == 400
    assert scripted.post(CHAT, {**HELLO, "top_k": 2**63 - 1})[0] == 200


def test_unknown_fields_are_named(scripted: Running) -> None:
    _, _, headers = scripted.request("POST", CHAT, {**HELLO, "tempature": 1, "user": "x", "é\r\n": 1})
    assert headers["x-polytoken-ignored"] == "tempature,%C3%A9%0D%0A"


def test_prompts_at_the_limits_are_served_or_refused_at_once(tiny: Running) -> None:
    """A25: the context is 512 positions; one more than fits is refused with the limit in the text."""
    for length in (63, 64, 65, 255, 256, 257, 510, 511):
        status, record = tiny.post(TEXT, {"prompt": [65] * length, "max_tokens": 2})
        assert (status, record["usage"]["prompt_tokens"]) == (200, length)
    for length in (512, 513, 5120):
        before = time.process_time()  # of this process: the machine may be busy
        status, record = tiny.post(TEXT, {"prompt": [65] * length, "max_tokens": 2})
        assert (status, record["error"]["code"]) == (400, "context_length_exceeded")
        assert "511" in record["error"]["message"]
        assert time.process_time() - before < 1
    status, record = tiny.post(TEXT, {"prompt": [99999999], "max_tokens": 2})
    assert (status, record["error"]["param"]) == (400, "prompt[0]")


def test_a_body_beyond_the_limit_is_refused_at_once(scripted: Running) -> None:
    """A25: 20 MB."""
    connection = http.client.HTTPConnection("127.0.0.1", scripted.port, timeout=60)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(20 << 20))
    connection.endheaders()
    answer = connection.getresponse()  # although nothing of the body is sent, ever
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    connection.close()
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=60) as line:  # without an announced length
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        part = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        try:
            for _ in range(20):
                line.sendall(part)
        except OSError:
            pass  # the door was closed
        assert b" 413 " in line.recv(65536)
    assert scripted.post(CHAT, HELLO)[0] == 200


@pytest.mark.parametrize("streamed", [True, False])
def test_work_stops_when_the_client_has_gone(tmp_path: Path, streamed: bool) -> None:
    """A21: within a step, streaming or not, and memory of the request with it."""
    script = Script(says=lambda prompt: "a" * 4000 if "long" in prompt else "ok")
    gate = script.held(20)
    with Running({"m": scripted_engine(tmp_path, script, max_rows=1)}) as server:
        body = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 4000, "stream": streamed}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        wait_for(lambda: 20 in script.steps.values())  # in the middle of its next step
        connection.sock.close() if connection.sock else connection.close()
        connection.close()
        wait_for(lambda: not server.state.turns)
        gate.set()
        status, _ = server.post(CHAT, HELLO)  # there is one row: it must have been given back
        assert status == 200
        assert max(script.steps.values()) == 21
        assert script.closed == script.opened
        wait_for(lambda: not server.state.turns)
        text = server.request("GET", "/metrics")[1]
        assert 'polytoken_turns_total{end="cancelled",model="m"} 1.0' in text
        assert "polytoken_open_turns 0.0" in text


def test_a_full_queue_is_429_with_a_time_to_wait(tmp_path: Path) -> None:
    script = Script(gate=threading.Event())
    engine = scripted_engine(tmp_path, script, max_rows=1, max_pending=2)
    with Running({"m": engine}) as server:
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(server.request("POST", CHAT, HELLO))) for _ in range(8)
        ]
        threads[0].start()
        wait_for(lambda: script.opened == 1)  # the one row is taken
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: len(answers) == 5)
        script.gate.set()
        for thread in threads:
            thread.join()
        statuses = sorted(answer[0] for answer in answers)
        assert statuses == [200] * 3 + [429] * 5
        refused = next(answer for answer in answers if answer[0] == 429)
        assert refused[1]["error"]["code"] == "queue_full"
        assert int(refused[2]["retry-after"]) >= 1
        assert server.post(CHAT, {**HELLO, "n": 4})[0] == 429  # all choices or none
        assert server.post(CHAT, HELLO)[0] == 200


def test_keys_hosts_and_origins(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, Script())
    with Running({"m": engine}, api_keys=("sesame",), cors_origins=("https://a.example",)) as server:
        status, record, headers = server.request("POST", CHAT, HELLO)
        assert (status, record["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
        for good in ({"Authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
            assert server.request("POST", CHAT, HELLO, headers=good)[0] == 200
        assert server.request("POST", CHAT, HELLO, headers={"Authorization": "Bearer sesam"})[0] == 401
        assert server.request("GET", "/health")[0] == 200
        assert server.request("GET", "/metrics")[0] == 401
        key = {"Authorization": "Bearer sesame"}
        status, _, headers = server.request("POST", CHAT, HELLO, headers={**key, "Origin": "https://a.example"})
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert server.request("POST", CHAT, HELLO, headers={**key, "Origin": "https://b.example"})[0] == 403
        assert server.request("POST", CHAT, HELLO, headers={**key, "Host": "evil.example"})[0] == 403
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert server.request("OPTIONS", CHAT, headers=ask)[0] == 200


def test_rates_are_limited_per_client() -> None:
    from polytoken.server.errors import ApiError  # noqa: PLC0415

    limiter = RateLimiter(60)
    for _ in range(60):
        limiter.check("a", now=0.0)
    with pytest.raises(ApiError) as refused:
        limiter.check("a", now=0.0)
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "2")
    limiter.check("b", now=0.0)
    limiter.check("a", now=1.5)


def test_a_client_over_its_rate_is_told_when_to_come_back(tmp_path: Path) -> None:
    """Each key has its own rate; probes of health are free."""
    engine = scripted_engine(tmp_path, Script())
    with Running({"m": engine}, rate_limit=2, api_keys=("a", "b")) as server:
        answers = [server.request("POST", CHAT, HELLO, headers={"Authorization": "Bearer a"}) for _ in range(3)]
        assert [answer[0] for answer in answers] == [200, 200, 429]
        assert answers[-1][1]["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answers[-1][2]["retry-after"]) <= 31
        assert server.request("POST", CHAT, HELLO, headers={"Authorization": "Bearer b"})[0] == 200
        assert server.request("GET", "/health")[0] == 200


def test_a_shutdown_finishes_what_it_can_and_fails_the_rest(tmp_path: Path) -> None:
    """G04: while it drains, /health is 503 and nothing new is taken."""
    import asyncio  # noqa: PLC0415

    script = Script(says=lambda prompt: "b" * (2 if "short" in prompt else 4000), pace=0.02)
    gate = script.held()
    with Running({"m": scripted_engine(tmp_path, script)}, drain_seconds=3) as server:
        streams: dict[str, list[Any]] = {}

        def run(word: str) -> None:
            body = {"messages": [{"role": "user", "content": word}], "max_tokens": 3000}
            streams[word] = server.stream(CHAT, body)

        threads = [threading.Thread(target=run, args=(word,)) for word in ("short", "long")]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.state.turns) == 2)
        drained = asyncio.run_coroutine_threadsafe(server.state.drain(), server.loop)
        wait_for(lambda: server.state.draining)
        gate.set()
        status, record, _ = server.request("GET", "/health")
        assert (status, record["status"]) == (503, "draining")
        status, record = server.post(CHAT, HELLO)
        assert (status, record["error"]["code"]) == (503, "shutting_down")
        drained.result(60)
        for thread in threads:
            thread.join()
    assert streams["short"][-2]["choices"][0]["finish_reason"] == "stop"
    assert streams["long"][-2]["error"]["code"] == "shutting_down"
    assert all(chunks[-1] == "[DONE]" for chunks in streams.values())


def test_the_process_is_the_same_after_all_this(tiny: Running) -> None:
    """A31: one odd request must not end the process; an unknown model is 404, embeddings are refused."""
    before = os.getpid()
    assert tiny.post(CHAT, {**HELLO, "model": "gpt-none"})[1]["error"]["code"] == "model_not_found"
    assert tiny.post("/v1/embeddings", {"input": "x"})[0] == 400
    assert tiny.request("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    assert tiny.request("GET", "/v1/models/tiny")[0] == 200
    assert tiny.request("GET", "/v1/models/none")[0] == 404
    assert os.getpid() == before
