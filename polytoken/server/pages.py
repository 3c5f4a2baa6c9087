"""The chat page and the description of the API: files of the package, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from polytoken import __version__
from polytoken.server.errors import ApiError
from polytoken.server.messages import CountRequest, MessagesRequest
from polytoken.server.records import ChatRequest, CompletionRequest
from polytoken.server.responses import ResponsesRequest
from polytoken.server.stream import JsonResponse

_WEB: Final = files("polytoken.server") / "web"
_KINDS: Final = {"page.js": "text/javascript", "style.css": "text/css"}
# Nothing is loaded from elsewhere, and no script that is not ours runs.
_POLICY: Final = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
}
_BODIES: Final = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
}
_READABLE: Final = ("/health", "/metrics", "/v1/models", "/admin/requests", "/admin/statistics")


async def page(request: HttpRequest) -> Response:
    """The chat page."""
    del request
    return HTMLResponse((_WEB / "index.html").read_text(encoding="utf-8"), headers=_POLICY)


async def static(request: HttpRequest) -> Response:
    """The page's two other files."""
    name = request.path_params["name"]
    if name not in _KINDS:
        raise ApiError(404, f"there is no file {name!r}", code="not_found")
    return Response((_WEB / name).read_bytes(), media_type=_KINDS[name], headers=_POLICY)


async def openapi(request: HttpRequest) -> Response:
    """The API's description for programs."""
    del request
    return JsonResponse(describe())


async def docs(request: HttpRequest) -> Response:
    """The same for people: every endpoint, and the fields of its body."""
    del request
    record = describe()
    rows = []
    for path, methods in record["paths"].items():
        for method, operation in methods.items():
            rows.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{operation['summary']}</p>")
            if path in _BODIES:
                fields = record["components"]["schemas"][_BODIES[path].__name__]["properties"]
                rows.append("<p>" + ", ".join(f"<code>{name}</code>" for name in sorted(fields)) + "</p>")
    body = "".join(rows)
    text = f"<!doctype html><meta charset=utf-8><title>API</title><h1>polytoken {__version__}</h1>"
    return HTMLResponse(f'{text}<p><a href="/openapi.json">openapi.json</a></p>{body}', headers=_POLICY)


def describe() -> dict[str, Any]:
    """An OpenAPI document."""
    bodies: Any = [(body, "validation") for body in _BODIES.values()]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    answers = {
        "200": {"description": "The answer."},
        **{code: {"description": "An error object."} for code in ("400", "401", "403", "404", "413", "415", "429")},
    }
    paths: dict[str, Any] = {path: {"get": {"summary": path, "responses": answers}} for path in _READABLE}
    for path, body in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        paths[path] = {
            "post": {
                "summary": (body.__doc__ or path).strip().splitlines()[0],
                "requestBody": {"required": True, "content": content},
                "responses": answers,
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "polytoken", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
