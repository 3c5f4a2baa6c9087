"""Every error a user can meet: a stable code, the field it concerns, one line of text, and how it leaves the program.

An error is raised once, where the fault is seen, and travels unchanged: the command line prints its line and exits
with `exit_status`, a JSON-lines run turns it into an event with `code`, a server answers with `http_status`.
"""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1  # at least one request failed
EXIT_USAGE: Final = 2  # the command line or the checkpoint named on it is unusable
EXIT_MISMATCH: Final = 3  # two runs that must agree do not
EXIT_NON_FINITE: Final = 4  # NaN or infinity where a number was needed
EXIT_INTERRUPTED: Final = 130  # the user pressed Ctrl-C
EXIT_TERMINATED: Final = 143  # SIGTERM: another program asked for the end


class PolytokenError(Exception):
    """Base of every expected failure.

    Attributes:
        code: stable machine name in snake case; tests and clients may rely on it.
        field: name of the offending field, flag or file, or None when no single one is to blame.
        exit_status: process status when this error ends a command.
        http_status: status when this error answers an HTTP request.
    """

    code: str = "internal"
    exit_status: int = EXIT_FAILURE
    http_status: int = 500

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class RequestError(PolytokenError, ValueError):
    """A request that cannot be served as written (bad field, too long, duplicate id)."""

    code = "bad_request"
    http_status = 400


class CheckpointError(PolytokenError):
    """A checkpoint that is missing, damaged, unknown or unsafe."""

    code = "bad_checkpoint"
    exit_status = EXIT_USAGE
    http_status = 404


class UsageError(PolytokenError):
    """A command line or engine setting that cannot be honoured."""

    code = "bad_usage"
    exit_status = EXIT_USAGE
    http_status = 400


class BackendError(PolytokenError):
    """MLX, its backend or the compiled extension is missing or unusable."""

    code = "missing_backend"
    exit_status = EXIT_USAGE


class NonFiniteError(PolytokenError):
    """Logits or probabilities held NaN or infinity; the request fails rather than emit a made-up token."""

    code = "non_finite"
    exit_status = EXIT_NON_FINITE


class CacheError(PolytokenError):
    """A decoding state was asked for something it cannot do exactly (a trim, a restore of the wrong identity)."""

    code = "bad_cache"


class CancelledError(PolytokenError):
    """The request was cancelled by its owner or by an interrupt."""

    code = "cancelled"
    http_status = 499


class EngineError(PolytokenError):
    """The engine cannot take or finish work: closed, full, stopped by a defect, or stuck."""

    code = "engine_closed"
    http_status = 503
