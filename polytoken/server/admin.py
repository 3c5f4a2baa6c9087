"""Endpoints for whoever runs the server: requests in progress, models in memory.

With `--admin-key` they want that key, else one of the API's keys; without any key they answer to this machine only.
"""

from __future__ import annotations

import ipaddress
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.checkpoint.memory import available_bytes
from polytoken.host import resident_bytes
from polytoken.server.errors import ApiError, shown
from polytoken.server.pool import Model
from polytoken.server.state import ServerState, state_of
from polytoken.server.stream import JsonResponse
from polytoken.server.turn import Turn


def admin_state(request: HttpRequest) -> ServerState:
    """The server, for one who may administer it; keys were checked before.

    Raises:
        ApiError: 403, no key is set and the call comes from elsewhere.
    """
    state = state_of(request)
    if not state.settings.keys_for(request.url.path):
        client = request.client.host if request.client is not None else ""
        try:
            near = ipaddress.ip_address(client).is_loopback
        except ValueError:
            near = False
        if not near:
            text = "without a key this answers to the server's own machine only; --admin-key lets others in"
            raise ApiError(403, text, code="admin_needs_key")
    return state


# -- requests ------------------------------------------------------------------------------------------------------


async def requests(request: HttpRequest) -> Response:
    """Every open call, with its tokens so far."""
    state = admin_state(request)
    now = time.monotonic()
    return JsonResponse({"object": "list", "data": [_open(turn, model, now) for turn, model in state.turns.items()]})


def _open(turn: Turn, model: Model, now: float) -> dict[str, Any]:
    first = turn.members[0]
    if turn.first_token is not None:
        phase = "decode"
    else:
        phase = "prefill or queue" if first.prompt_tokens == 0 else "first step"
    return {
        "id": turn.call_id,
        "model": model.name,
        "session": first.request.session,
        "choices": len(turn.members),
        "seconds": now - turn.started,
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "generated_tokens": sum(member.tokens for member in turn.members),
        "phase": phase,
    }


async def cancel(request: HttpRequest) -> Response:
    """End a call within one step; its client is told."""
    state = admin_state(request)
    wanted = request.path_params["id"]
    for turn in list(state.turns):
        if turn.call_id == wanted:
            turn.fail(ApiError(409, "the request was cancelled", code="cancelled"))
            return JsonResponse({"id": wanted, "cancelled": True})
    raise ApiError(404, f"there is no open request {shown(wanted)}", code="not_found")


async def statistics(request: HttpRequest) -> Response:
    """What the lanes of all loaded models say of themselves: cache, sessions, memory, speculation."""
    return JsonResponse(await admin_state(request).statistics())


# -- models --------------------------------------------------------------------------------------------------------


async def models(request: HttpRequest) -> Response:
    """Every model that is offered, what is in memory, and how much of it each takes."""
    state = admin_state(request)
    numbers = await state.statistics()
    return JsonResponse({
        "object": "list",
        "data": [_model(state, name, numbers.get(name, {})) for name in state.pool.names],
        "max_loaded": state.pool.max_loaded,
        "memory": {"process_bytes": resident_bytes(), "available_bytes": available_bytes()},
    })  # fmt: skip


def _model(state: ServerState, name: str, numbers: Any) -> dict[str, Any]:
    model = state.pool.loaded.get(name)
    if model is None:
        return {"id": name, "loaded": False}
    extra = model.engine.loaded.extra
    return {
        "id": name,
        "loaded": True,
        "lane": model.lane,
        "device": extra.get("device"),
        "dtype": extra.get("dtype"),
        "context": model.max_positions,
        "in_progress": model.users,
        "idle_seconds": 0.0 if model.users else time.monotonic() - model.used,
        "changed_on_disk": model.changed_on_disk,
        "weight_bytes": extra.get("weight_bytes"),
        "cache_bytes": numbers.get("prefix_cache_bytes"),
        "cache_limit_bytes": numbers.get("prefix_cache_limit_bytes"),
        "sessions": numbers.get("sessions"),
        "mlx_active_bytes": numbers.get("mlx_active_memory_bytes"),
        "mlx_peak_bytes": numbers.get("mlx_peak_memory_bytes"),
    }


async def load(request: HttpRequest) -> Response:
    """Load a model now, rather than with the first call that names it. Others may have to go."""
    return await _settled(request, lambda state, name: state.pool.ready(name))


async def unload(request: HttpRequest) -> Response:
    """Take an idle model out of memory; the next call that names it loads it again."""
    return await _settled(request, lambda state, name: state.pool.unload_idle(name))


async def reload(request: HttpRequest) -> Response:
    """Load a model anew, after its files have changed; the old one serves meanwhile, and stays if that fails."""
    return await _settled(request, lambda state, name: state.pool.reload(name))


async def _settled(request: HttpRequest, act: Any) -> Response:
    state = admin_state(request)
    name = request.path_params["name"]
    await act(state, name)
    return JsonResponse(_model(state, name, (await state.statistics()).get(name, {})))
