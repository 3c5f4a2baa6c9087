"""GET endpoints about the server itself, and the endpoints that are refused with a reason."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken import __version__
from polytoken.server.errors import ApiError, shown, unsupported
from polytoken.server.state import ServerState, state_of
from polytoken.server.stream import JsonResponse


async def health(request: HttpRequest) -> Response:
    """Whether it serves, and with what."""
    state = state_of(request)
    settings = state.settings
    record = {
        "status": "draining" if state.draining else "ok",
        "version": __version__,
        "mlx": version("mlx"),
        "models": {name: _model(state, name) for name in state.pool.names},
        "open_turns": len(state.turns),
        "settings": {
            "host": settings.host,
            "api_key": bool(settings.api_keys),
            "admin_key": bool(settings.admin_keys),
            "cors_origins": list(settings.cors_origins),
            "max_body_mib": settings.max_body_mib,
            "max_body_items": settings.max_body_items,
            "max_body_values": settings.max_body_values,
            "max_context": settings.max_context,
            "max_new_tokens": settings.max_new_tokens,
            "max_choices": settings.max_choices,
            "rate_limit": settings.rate_limit,
            "request_timeout": settings.request_timeout,
            "keep_alive": settings.keep_alive,
            "drain_seconds": settings.drain_seconds,
            "max_loaded": settings.max_loaded,
        },
    }
    return JsonResponse(record, status_code=503 if state.draining else 200)


def _model(state: ServerState, name: str) -> dict[str, object]:
    model = state.pool.loaded.get(name)
    if model is None:
        return {"loaded": False}
    loaded = model.engine.loaded
    limits = model.engine.limits
    return {
        "loaded": True,
        "lane": loaded.lane,
        "context": model.max_positions,
        "depth": loaded.extra.get("depth"),
        "dtype": loaded.extra.get("dtype"),
        "device": loaded.extra.get("device"),
        "batch_size": limits.max_rows,
        "max_queue_size": limits.max_pending,
        "in_progress": model.users,
    }


async def models(request: HttpRequest) -> Response:
    """GET /v1/models, for OpenAI's clients and Anthropic's alike: their members have different names."""
    state = state_of(request)
    names = state.pool.names
    data = [_listed(state, name) for name in names]
    return JsonResponse({"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def model(request: HttpRequest) -> Response:
    """GET /v1/models/{name}."""
    state = state_of(request)
    name = request.path_params["name"]
    if name not in state.pool.names:
        raise ApiError(404, f"the model {shown(name)} does not exist", code="model_not_found", param="model")
    return JsonResponse(_listed(state, name))


def _listed(state: ServerState, name: str) -> dict[str, object]:
    created = int(state.started)
    record = {
        "id": name, "object": "model", "created": created, "owned_by": "polytoken",
        "type": "model", "display_name": name, "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
    }  # fmt: skip
    loaded = state.pool.loaded.get(name)
    return record if loaded is None else {**record, "max_model_len": loaded.max_positions}


async def metrics(request: HttpRequest) -> Response:
    """Prometheus' text form."""
    state = state_of(request)
    state.metrics.loaded.set(len(state.pool.loaded))
    text = state.metrics.text(await state.statistics())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def embeddings(request: HttpRequest) -> Response:
    """No model here offers any."""
    del request
    raise unsupported("embeddings are not offered: these models generate text", param="model")
