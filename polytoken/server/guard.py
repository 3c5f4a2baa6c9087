"""What stands in front of every endpoint: host and origin, API key, rate limit, access log, last-resort errors."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polytoken.server.asking import new_id
from polytoken.server.errors import ApiError, shown
from polytoken.server.settings import LOOPBACK, ServerSettings
from polytoken.server.state import ServerState
from polytoken.server.stream import JsonResponse

ACCESS: Final = logging.getLogger("polytoken.access")
_LOG: Final = logging.getLogger(__name__)
OPEN_PATHS: Final = frozenset({"/health", "/", "/docs", "/openapi.json"})  # nothing secret, and probes carry no key
CLIENTS: Final = 10_000  # clients whose rate is remembered


def error_response(error: ApiError, path: str) -> JsonResponse:
    """The error in the shape that the path's clients know, with an id to find it by in the log."""
    name = new_id("req_")
    headers = {**error.headers, "x-request-id": name}
    if not path.startswith("/v1/messages"):
        return JsonResponse(error.openai(), status_code=error.status, headers=headers)
    return JsonResponse(error.anthropic(name), status_code=error.status, headers={**headers, "request-id": name})


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state
        self._rates = RateLimiter(state.settings.rate_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, settings = Headers(scope=scope), self.state.settings
        watched = _Watched(send, _cors(headers, settings), keep_open=not self.state.draining)
        before = time.monotonic()
        try:
            check_door(headers, settings)
            if scope["method"] == "OPTIONS" and headers.get("access-control-request-method"):
                await JsonResponse({}, headers=_preflight(headers))(scope, receive, watched)
                return
            if scope["path"] not in OPEN_PATHS and not scope["path"].startswith("/static/"):
                client = check_key(headers, settings.keys_for(scope["path"])) or str((scope.get("client") or ("",))[0])
                self._rates.check(client)
            await self.app(scope, receive, watched)
        except ApiError as error:
            if not watched.status:
                await error_response(error, scope["path"])(scope, receive, watched)
        except Exception:
            _LOG.error("%s %s\n%s", scope["method"], scope["path"], traceback.format_exc())
            if not watched.status:
                fault = ApiError(500, "an internal error; the server's log has it", code="internal_error")
                await error_response(fault, scope["path"])(scope, receive, watched)
        finally:
            self._log(scope, watched, time.monotonic() - before)

    def _log(self, scope: Scope, watched: _Watched, seconds: float) -> None:
        status = watched.status or 499
        route = scope.get("route")
        self.state.metrics.responses.labels(getattr(route, "path", "other"), str(status)).inc()
        if self.state.settings.access_log:
            client = (scope.get("client") or ("-",))[0]
            path = scope["path"].encode("unicode_escape").decode()
            ACCESS.info("%s %s %s %d %.3fs %s", client, scope["method"], path, status, seconds, watched.name)


class _Watched:
    """Passes messages on, notes the status and the id, and adds headers."""

    def __init__(self, send: Send, headers: Mapping[str, str], *, keep_open: bool) -> None:
        self._send, self._headers, self._keep_open = send, headers, keep_open
        self.status, self.name = 0, "-"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers[name] = value
            self.name = headers.get("x-request-id", "-")
            headers.setdefault("X-Content-Type-Options", "nosniff")
            if not self._keep_open:
                headers["Connection"] = "close"
        await self._send(message)


def check_door(headers: Headers, settings: ServerSettings) -> None:
    """Refuse calls that come by a foreign web page: another site's origin, or a name that was made to point here.

    Raises:
        ApiError: 403.
    """
    host = _host_of("//" + headers.get("host", ""))
    if settings.loopback and host not in LOOPBACK and host not in settings.allowed_hosts and not _is_loopback(host):
        raise ApiError(
            403, f"the host {shown(host)} is not served here; --allowed-host lets it in", code="host_not_allowed"
        )
    origin = headers.get("origin")
    if origin is None or origin in settings.cors_origins or "*" in settings.cors_origins:
        return
    if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise ApiError(
            403, f"calls from {shown(origin)} are not allowed; --cors-origin lets them in", code="origin_not_allowed"
        )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_key(headers: Headers, keys: tuple[str, ...]) -> str | None:
    """The key that the client showed, None when none is needed.

    Raises:
        ApiError: 401.
    """
    if not keys:
        return None
    scheme, _, token = headers.get("authorization", "").partition(" ")
    shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not shown:
        raise ApiError(401, "an API key is needed: Authorization: Bearer <key>", code="missing_api_key")
    matches = [hmac.compare_digest(shown.encode(), key.encode()) for key in keys]
    if not any(matches):
        raise ApiError(401, "the API key is not valid here", code="invalid_api_key")
    return shown


class RateLimiter:
    """A bucket of tokens per client that fills evenly: bursts up to the limit, the limit over time."""

    def __init__(self, per_minute: int) -> None:
        self._limit = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> tokens, at that time

    def check(self, client: str, now: float | None = None) -> None:
        """Count one call.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        if not self._limit:
            return
        now = time.monotonic() if now is None else now
        tokens, then = self._buckets.pop(client, (float(self._limit), now))
        tokens = min(float(self._limit), tokens + (now - then) * self._limit / 60)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = str(int((1 - tokens) * 60 / self._limit) + 1)
            text = f"more than {self._limit} requests a minute; wait {wait} s"
            raise ApiError(429, text, code="rate_limit_exceeded", headers={"Retry-After": wait})


def _cors(headers: Headers, settings: ServerSettings) -> dict[str, str]:
    origin = headers.get("origin")
    if origin is None or not (origin in settings.cors_origins or "*" in settings.cors_origins):
        return {}
    exposed = "x-request-id, request-id, x-polytoken-ignored, retry-after"
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": exposed}


def _preflight(headers: Headers) -> dict[str, Any]:
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
