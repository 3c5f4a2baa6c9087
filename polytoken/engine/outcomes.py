"""How a request can end: its last event, and the error that such an event stands for."""

from __future__ import annotations

from polytoken.errors import CancelledError, EngineError, NonFiniteError, PolytokenError, RequestError
from polytoken.events import Event, GenerationFailed, GenerationResult, RequestRejected
from polytoken.request import Request


def is_last(event: Event) -> bool:
    """Whether nothing comes after it for its request."""
    return isinstance(event, (GenerationResult, GenerationFailed, RequestRejected))


def failed(request_id: str, line: int | None, error: Exception) -> GenerationFailed:
    """The last event of a request that generated nothing; the code is the error's, or `internal`."""
    code = error.code if isinstance(error, PolytokenError) else "internal"
    return GenerationFailed(request_id=request_id, line=line, code=code, error=str(error))


def duplicate(request: Request) -> RequestRejected:
    """The last event of a request whose id another one has."""
    return RequestRejected(
        line=request.line,
        request_id=request.request_id,
        code="duplicate_id",
        field_name="request_id",
        error="request_id is taken already",
    )


def stopped_on_error() -> PolytokenError:
    """Why the rest of a run fails that ends at its first failure."""
    return PolytokenError("an earlier request failed", code="stopped_on_error")


def interrupted() -> CancelledError:
    """Why the rest of a run fails that somebody ended."""
    return CancelledError("the run was interrupted", code="interrupted")


def error_of(event: GenerationFailed | RequestRejected) -> PolytokenError:
    """The exception whose last words the event holds, in the class that its code belongs to."""
    if isinstance(event, RequestRejected):
        return RequestError(event.error, code=event.code, field=event.field_name)
    if event.code in ("cancelled", "interrupted"):
        return CancelledError(event.error, code=event.code)
    if event.code == NonFiniteError.code:
        return NonFiniteError(event.error)
    if event.code.startswith("engine_"):
        return EngineError(event.error, code=event.code)
    return PolytokenError(event.error, code=event.code)
