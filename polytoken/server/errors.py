"""Errors on the wire: one shape for OpenAI's endpoints, one for Anthropic's, and what the engine's errors become."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from polytoken.errors import CancelledError, EngineError, PolytokenError, RequestError

RETRY_SECONDS: Final = 1  # what Retry-After says when nothing better is known

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES: Final = {
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_CODES: Final = {
    "too_long": "context_length_exceeded",
    "non_finite": "non_finite_logits",
    "no_candidates": "non_finite_logits",
    "not_enough_memory": "insufficient_memory",
    "internal": "internal_error",
}
_STATUS: Final = {
    "not_enough_memory": 507,
    "queue_full": 429,
    "unknown_session": 404,
    "unknown_snapshot": 404,
    "session_exists": 409,
}
# The engine's own words for what clients call otherwise.
_PARAMS: Final = {"max_new_tokens": "max_tokens", "token_ids": "prompt", "raw_prompt": "prompt"}


SHOWN: Final = 80  # characters of what a client sent that a message repeats


def shown(value: object) -> str:
    """What a client sent, as a message repeats it: on one line, and cut."""
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN + 2 else f"{text[:SHOWN]}..."


class ApiError(Exception):
    """An answer that is no success.

    Attributes:
        status: HTTP status.
        message: one line for people.
        code: stable name for programs.
        param: the field at fault, or None.
        headers: to be sent beside it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        if status in (429, 503) and "Retry-After" not in self.headers:
            self.headers["Retry-After"] = str(RETRY_SECONDS)
        if status == 401:
            self.headers.setdefault("WWW-Authenticate", "Bearer")

    def rename(self, param: str) -> None:
        """Name the field at fault otherwise, also in the message."""
        if self.param is not None and param != self.param:
            place = rf"(?<![\w.\]]){re.escape(self.param)}(?!\w)"
            self.message = re.sub(place, lambda _: param, self.message)
            self.param = param

    @property
    def type(self) -> str:
        """OpenAI's class of errors for the status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def openai(self) -> dict[str, Any]:
        """The body of an OpenAI endpoint."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """The body of an Anthropic endpoint."""
        kind = _ANTHROPIC_TYPES.get(self.status, self.type if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


def bad_request(message: str, *, param: str | None, code: str = "invalid_value") -> ApiError:
    """A request that says something impossible."""
    return ApiError(400, message, code=code, param=param)


def unsupported(message: str, *, param: str) -> ApiError:
    """A request for something that is not offered: refused, never passed over."""
    return ApiError(400, message, code="unsupported", param=param)


def from_engine(error: PolytokenError) -> ApiError:
    """What an error of the engine is on the wire. Unexpected ones keep their words to the log."""
    code = _CODES.get(error.code, error.code)
    if error.code == "internal":
        return ApiError(500, "an internal error ended this request; the server's log has it", code=code)
    status = _STATUS.get(error.code, error.http_status)
    if isinstance(error, CancelledError):
        status = 409
    if isinstance(error, EngineError) and error.code not in _STATUS:
        status = 503
    if not isinstance(error, RequestError) or error.field is None:
        return ApiError(status, str(error), code=code)
    fault = ApiError(status, str(error), code=code, param=error.field.removeprefix("sampling."))
    name, bracket, index = str(fault.param).partition("[")
    fault.rename(_PARAMS.get(name, name) + bracket + index)
    return fault
