"""The chat page and the description of the API: files of the package, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from polytoken.server import description
from polytoken.server.errors import ApiError, shown
from polytoken.server.stream import JsonResponse

_WEB: Final = files("polytoken.server") / "web"
_KINDS: Final = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Nothing is loaded from elsewhere, no script or style that is not ours runs, and nobody puts the page into a frame.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # another version of the server has other files
}


async def page(request: HttpRequest) -> Response:
    """The chat page."""
    del request
    return HTMLResponse((_WEB / "index.html").read_text(encoding="utf-8"), headers=_HEADERS)


async def static(request: HttpRequest) -> Response:
    """The pages' other files."""
    name = request.path_params["name"]
    kind = _KINDS.get(name.rpartition(".")[2])
    if kind is None or not (_WEB / name).is_file():
        raise ApiError(404, f"there is no file {shown(name)}", code="not_found")
    return Response((_WEB / name).read_bytes(), media_type=kind, headers=_HEADERS)


async def openapi(request: HttpRequest) -> Response:
    """The API's description for programs."""
    del request
    return JsonResponse(description.describe())


async def docs(request: HttpRequest) -> Response:
    """The same for people."""
    del request
    return HTMLResponse(description.page(), headers=_HEADERS)
