"""A call's reply: the whole answer, or the stream of it; what it asked the engine for ends in every case."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.events import Event
from polytoken.server.stream import EventStream, JsonResponse, unless_gone
from polytoken.server.turn import Member, Turn

First = tuple[Member, Event] | None
"""The event that was awaited before a stream was begun, None for a silence."""


async def reply(
    request: HttpRequest,
    turn: Turn,
    *,
    stream: bool | None,
    whole: Callable[[], Awaitable[dict[str, Any]]],
    frames: Callable[[First], AsyncIterator[bytes]],
    headers: Mapping[str, str],
) -> Response:
    """The response to a call whose turn is queued.

    Args:
        whole: gives the record of the whole answer.
        frames: the frames of a stream, from the turn's first event on; they end by themselves also when it fails.
        headers: of a good answer.

    Raises:
        ApiError: the turn failed before anything was sent, or the client has left (499).
    """
    try:
        if not stream:
            return JsonResponse(await unless_gone(request, whole(), turn.close), headers=headers)
        first = await unless_gone(request, turn.next(), turn.close)  # a refusal still has its status
    except BaseException:
        turn.close()
        raise
    return EventStream(frames(first), turn.close, headers)
