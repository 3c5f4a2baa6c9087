"""Server-sent events and plain answers whose work stops when the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polytoken.server.errors import ApiError

T = TypeVar("T")
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"


def to_json(value: Any) -> str:
    """Strict compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def frame(value: Any, *, event: str | None = None) -> bytes:
    """One event of a stream."""
    head = f"event: {event}\n" if event is not None else ""
    return f"{head}data: {to_json(value)}\n\n".encode()


class JsonResponse(Response):
    """Strict JSON with an explicit length."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


class EventStream(Response):
    """Sends frames until there are no more or the client has gone; `close` is called in every case, and once.

    Args:
        frames: must end by itself on errors of the request, with frames that say so.
        close: frees what stands behind the frames.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        self.frames, self.close = frames, close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _race(self._pump(send), gone(receive))
        finally:
            self.close()

    async def _pump(self, send: Send) -> None:
        async for part in self.frames:
            if not part:
                continue  # an event that clients are told nothing of
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T], close: Callable[[], None]) -> T:
    """What the work gives; when the client leaves first, `close` ends the work and 499 is raised."""
    done, value = await _race(_boxed(work), gone(request.receive))
    if done:
        assert value is not None
        return value[0]
    close()
    raise ApiError(499, "the client has left", code="client_closed")


async def _boxed(work: Awaitable[T]) -> tuple[T]:
    return (await work,)


async def _race(work: Awaitable[T], end: Awaitable[None]) -> tuple[bool, T | None]:
    """Run both until one is done; whether it was the work, and what it gave. The other one is cancelled."""
    first, second = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return True, first.result()
        return False, None
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
