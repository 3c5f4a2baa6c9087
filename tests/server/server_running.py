"""A real server on a free port of this machine, on a thread of its own, over any engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn

from polytoken.assembly import EngineOptions
from polytoken.engine import Engine
from polytoken.server.app import make_app
from polytoken.server.connection import uvicorn_config
from polytoken.server.pool import ModelPool
from polytoken.server.run import open_socket
from polytoken.server.settings import ServerSettings
from polytoken.server.state import ServerState


class Running:
    """A running server; use it in a `with`.

    Args:
        engines: started engines by model name; they are closed with the server.
        open_engine: loads one that was unloaded; without it none may be loaded.
        settings: words of `ServerSettings`.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        open_engine: Callable[[EngineOptions], Engine] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = ServerSettings(port=0, access_log=False, **settings)
        self._engines = engines
        self._open_engine = open_engine or _no_load
        self._door = open_socket(self.settings)
        self.port: int = self._door.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        options = {name: EngineOptions(model=name) for name in self._engines}
        pool = ModelPool(options, self._open_engine, max_loaded=len(options))
        for name, engine in self._engines.items():
            pool.adopt(name, engine)
        app = make_app(pool, self.settings)
        self.state: ServerState = app.state.server
        self.app = app
        self.loop = asyncio.get_running_loop()
        self._server = uvicorn.Server(uvicorn_config(app))
        self._server.capture_signals = _nothing  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(self._server.serve(sockets=[self._door]))
        while not self._server.started:
            await asyncio.sleep(0.005)
        self._ready.set()
        await task

    def request(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float = 90
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body (parsed when it is JSON) and headers of one call. Bytes are sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        words = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, sent, {name: value for name, value in words.items() if value})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        kind = answer.headers.get("content-type", "")
        parsed = json.loads(text) if kind.startswith("application/json") else text.decode()
        return answer.status, parsed, dict(answer.headers)

    def post(self, path: str, body: Any, **words: Any) -> tuple[int, Any]:
        status, parsed, _ = self.request("POST", path, body, **words)
        return status, parsed

    def stream(self, path: str, body: dict[str, Any], **words: Any) -> list[Any]:
        """The data of all frames of a stream; [DONE] as that string. The status must be 200."""
        status, text, _ = self.request("POST", path, {**body, "stream": True}, **words)
        assert status == 200, text
        return [_data(part) for part in frames(text)]


def frames(text: str) -> list[str]:
    """The blocks of an event stream that are no comments."""
    return [part for part in text.split("\n\n") if part.strip() and not part.startswith(":")]


def _data(part: str) -> Any:
    line = next(line for line in part.split("\n") if line.startswith("data: "))
    text = line.removeprefix("data: ")
    return text if text == "[DONE]" else json.loads(text)


def _nothing() -> Any:
    import contextlib  # noqa: PLC0415

    return contextlib.nullcontext()


def _no_load(options: EngineOptions) -> Engine:
    raise AssertionError(f"{options.model} was to be loaded")


Opener = Callable[[], Engine]
