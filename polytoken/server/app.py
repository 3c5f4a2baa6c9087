"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from polytoken.server import admin, admin_sessions, info, pages
from polytoken.server.chat import chat_completions
from polytoken.server.completions import completions
from polytoken.server.errors import ApiError, shown
from polytoken.server.guard import Guard, error_response
from polytoken.server.messages import count_tokens, messages
from polytoken.server.pool import ModelPool
from polytoken.server.responses import responses
from polytoken.server.settings import ServerSettings
from polytoken.server.state import ServerState

ROUTES = (
    Route("/", pages.page, methods=["GET"]),
    Route("/static/{name}", pages.static, methods=["GET"]),
    Route("/docs", pages.docs, methods=["GET"]),
    Route("/openapi.json", pages.openapi, methods=["GET"]),
    Route("/health", info.health, methods=["GET"]),
    Route("/metrics", info.metrics, methods=["GET"]),
    Route("/v1/models", info.models, methods=["GET"]),
    Route("/v1/models/{name:path}", info.model, methods=["GET"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/embeddings", info.embeddings, methods=["POST"]),
    Route("/admin/requests", admin.requests, methods=["GET"]),
    Route("/admin/requests/{id}/cancel", admin.cancel, methods=["POST"]),
    Route("/admin/statistics", admin.statistics, methods=["GET"]),
    Route("/admin/models", admin.models, methods=["GET"]),
    Route("/admin/models/{name:path}/load", admin.load, methods=["POST"]),
    Route("/admin/models/{name:path}/unload", admin.unload, methods=["POST"]),
    Route("/admin/models/{name:path}/reload", admin.reload, methods=["POST"]),
    Route("/admin/sessions", admin_sessions.sessions, methods=["GET"]),
    Route("/admin/sessions", admin_sessions.clear_all, methods=["DELETE"]),
    Route("/admin/sessions/{name:path}/fork", admin_sessions.fork, methods=["POST"]),
    Route("/admin/sessions/{name:path}/snapshot", admin_sessions.snapshot, methods=["POST"]),
    Route("/admin/sessions/{name:path}/restore", admin_sessions.restore, methods=["POST"]),
    Route("/admin/sessions/{name:path}", admin_sessions.session, methods=["GET"]),
    Route("/admin/sessions/{name:path}", admin_sessions.clear, methods=["DELETE"]),
    Route("/admin/snapshots", admin_sessions.snapshots, methods=["GET"]),
    Route("/admin/snapshots/{name:path}", admin_sessions.drop_snapshot, methods=["DELETE"]),
)


def make_app(pool: ModelPool, settings: ServerSettings) -> Starlette:
    """The application over these models. Must be made where its event loop will run."""
    state = ServerState(pool, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await pool.close()

    app = Starlette(
        routes=list(ROUTES),
        middleware=[Middleware(Guard, state=state)],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
        lifespan=lifespan,
    )
    app.state.server = state
    return app


async def _on_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


def _methods(request: HttpRequest) -> set[str]:
    """What the path answers, over all routes that have it."""
    found: set[str] = set()
    for route in ROUTES:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        fault = ApiError(404, f"there is nothing at {shown(path)}", code="not_found")
    elif error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        text = f"{shown(path)} does not answer {request.method}; allowed: {allowed}"
        fault = ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed})
    else:
        fault = ApiError(error.status_code, str(error.detail), code="http_error")
    return error_response(fault, path)
