"""A shutdown comes to its end whatever clients do."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

from scripted import Script, scripted_engine
from server_running import Running


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """G04: its stream cannot even be told that it failed, and the server goes down all the same."""
    script = Script(says=lambda prompt: "b " * 1900, group=50)
    with Running({"m": scripted_engine(tmp_path, script, max_rows=16)}, drain_seconds=0.2) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "stream": True, "n": 16}
        data = json.dumps(body).encode()
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", server.port))
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            deadline = time.monotonic() + 20
            while script.closed < 16:  # all is said, and waits to be read
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert server.state.turns  # the buffers between the two are full
            before = time.monotonic()
            asyncio.run_coroutine_threadsafe(server.state.drain(), server.loop).result(20)
            assert time.monotonic() - before < 10
            assert not server.state.turns
