"""Clients that read nothing hold up neither a shutdown nor the requests of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripted import Script, scripted_engine
from server_running import Running

CHOICES = 16
NAME = "m" * 60_000  # every frame names the model: so little is said that fills every buffer


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def idle_reader(server: Running) -> Iterator[None]:
    """A client that asks for more than all buffers hold, and reads none of it."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "stream": True, "n": CHOICES}
    data = json.dumps(body).encode()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """G04: its stream cannot even be told that it failed, and the server goes down all the same."""
    script = Script(says=lambda prompt: "b " * 380, group=50)
    engine = scripted_engine(tmp_path, script, max_rows=CHOICES)
    with Running({NAME: engine}, drain_seconds=0.2) as server, idle_reader(server):
        wait_for(lambda: script.closed == CHOICES)  # all is said
        assert server.state.turns  # and waits to be read
        before = time.monotonic()
        asyncio.run_coroutine_threadsafe(server.state.drain(), server.loop).result(60)
        assert time.monotonic() - before < 30
        assert not server.state.turns


def test_a_client_that_reads_nothing_is_not_waited_for(tmp_path: Path) -> None:
    """A21: its place in the queue and its model are free again once its time is over."""
    script = Script(says=lambda prompt: "b " * 380, group=50)
    engine = scripted_engine(tmp_path, script, max_rows=CHOICES)
    with Running({NAME: engine}, request_timeout=2) as server, idle_reader(server):
        wait_for(lambda: script.opened > 0)
        wait_for(lambda: not server.state.turns)
        assert server.state.pool.loaded[NAME].users == 0
        told = server.request("GET", "/metrics")[1]
        assert 'polytoken_turns_total{end="cancelled"' in told and 'end="finished"' not in told  # it was never read
        body = {"prompt": "x", "n": CHOICES, "max_tokens": 2}
        wait_for(lambda: server.post("/v1/completions", body)[0] == 200)  # a busy machine may need more than its 2 s
