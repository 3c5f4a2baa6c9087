"""Endpoints for whoever runs the server: what is in progress, and ending it."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.server.errors import ApiError
from polytoken.server.state import state_of
from polytoken.server.stream import JsonResponse


async def requests(request: HttpRequest) -> Response:
    """GET /admin/requests: every open call, with its tokens so far."""
    state = state_of(request)
    now = time.monotonic()
    return JsonResponse({
        "object": "list",
        "data": [
            {
                "id": turn.members[0].request.request_id.rpartition("-")[0],
                "model": model.name,
                "choices": len(turn.members),
                "seconds": now - turn.started,
                "prompt_tokens": turn.members[0].prompt_tokens,
                "cached_tokens": turn.members[0].cached_tokens,
                "generated_tokens": sum(member.tokens for member in turn.members),
                "phase": "decode" if turn.first_token is not None else "prefill or queue",
            }
            for turn, model in state.turns.items()
        ],
    })  # fmt: skip


async def cancel(request: HttpRequest) -> Response:
    """POST /admin/requests/{id}/cancel: end a call; its client is told."""
    state = state_of(request)
    wanted = request.path_params["id"]
    for turn in list(state.turns):
        if turn.members[0].request.request_id.rpartition("-")[0] == wanted:
            turn.fail(ApiError(409, "the request was cancelled", code="cancelled"))
            return JsonResponse({"id": wanted, "cancelled": True})
    raise ApiError(404, f"there is no open request {wanted!r}", code="not_found")


async def statistics(request: HttpRequest) -> Response:
    """GET /admin/statistics: what the lanes say of themselves: cache, sessions, memory, speculation."""
    return JsonResponse(await state_of(request).statistics())
