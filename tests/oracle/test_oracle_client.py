"""`eval chat` against servers that break off, refuse, or talk nonsense in the middle: one line, and status 1."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from polytoken.cli import main
from polytoken.errors import UsageError
from polytoken.oracle.client import EvalPlan


def reply(body: bytes, *, status: str = "200 OK", length: int | None = None) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def answer(**changed: object) -> bytes:
    choice = {"finish_reason": "stop", "message": {"content": "Ships."}}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}} | changed).encode()


@contextmanager
def scripted(replies: Sequence[bytes]) -> Iterator[str]:
    """A server that answers a request after another with these bytes, and then no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            for each in replies:
                link, _ = listener.accept()
                with link:
                    heard = b""
                    while b"\r\n\r\n" not in heard:
                        heard += link.recv(1 << 16)
                    head, _, body = heard.partition(b"\r\n\r\n")
                    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
                    wanted = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
                    while len(body) < wanted:
                        body += link.recv(1 << 16)
                    link.sendall(each)
            listener.close()

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


NO_HEALTH = reply(b"{}", status="404 Not Found")
GOOD = reply(answer())
FAULTS = {
    "closes without a word": (b"", "no whole answer of HTTP: RemoteDisconnected"),
    "breaks off": (reply(answer()[:20], length=500), "no whole answer of HTTP: IncompleteRead"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "no whole answer of HTTP: BadStatusLine"),
    "no text": (reply(b"\xff\xfe\x00"), "no JSON"),
    "no JSON": (reply(b"<html>"), "no JSON"),
    "no object": (reply(b"[]"), "the answer is no object"),
    "too deep": (reply(b"[" * 100_000), "no JSON"),
    "refuses": (reply(b"busy\n try later", status="503 Service Unavailable"), "status 503: busy try later"),
    "refuses and breaks off": (reply(b"busy", status="500 x", length=99), "status 500: its reason broke off"),
    "no usage": (reply(answer(usage=None)), "a field of the wrong type"),
    "no counts": (reply(answer(usage={"prompt_tokens": 3})), "lacks 'completion_tokens'"),
    "counts in words": (reply(answer(usage={"prompt_tokens": "3", "completion_tokens": 2})), "of the wrong type"),
    "two choices": (reply(answer(choices=[{}, {}])), "of the wrong type"),
    "a message that is a text": (reply(answer(choices=[{"message": "a", "finish_reason": "stop"}])), "wrong type"),
    "parts for a text": (
        reply(answer(choices=[{"message": {"content": [{"text": "a"}]}, "finish_reason": "stop"}])),
        "wrong type",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["warm-up", "second turn"])
def test_a_fault_in_the_middle_is_one_line_and_what_came_before_is_kept(
    fault: str, place: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, said = FAULTS[fault]
    before = [NO_HEALTH] if place == "warm-up" else [NO_HEALTH, GOOD, GOOD]
    file = tmp_path / "source.jsonl"
    with scripted([*before, broken]) as url:
        words = ["--url", url, "--model", "m", "--readme", str(text_file), "--output", str(file)]
        assert main(["eval", "chat", *words]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("polytoken: error: ") and said in err
    events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert events == ["start", "warmup_result", "result"][: len(before)]
    oracle = ["oracle", "run", "--model", "m", "--ar", "--chat", "--readme", str(text_file), "--server-defaults"]
    assert main([*oracle, "--source-run", str(file)]) == 2  # no source: found before anything is loaded


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "http://127.0.0.1:0"])
def test_a_port_that_is_none_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="must be of the form"):
        EvalPlan(url=url, model="m", first="a")
