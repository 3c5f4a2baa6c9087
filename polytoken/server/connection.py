"""A client's connection: uvicorn's, which bears a client that never comes to the end of its request's head."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS: Final = 30.0  # for a request's line and headers, and between two requests
HEAD_BYTES: Final = 64 * 1024


class PatientConnection(H11Protocol):
    """Closed when a head was not complete within `HEAD_SECONDS` of its first byte, or none came on a new connection."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait()
        else:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._end is None and not self.transport.is_closing():
            self._end = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


def uvicorn_config(app: Any) -> uvicorn.Config:
    """How uvicorn runs the application: with this connection whatever else is installed, and without its own logs."""
    return uvicorn.Config(
        app, http=PatientConnection, ws="none", log_config=None, access_log=False, lifespan="on", server_header=False,
        timeout_keep_alive=int(HEAD_SECONDS), timeout_graceful_shutdown=5, h11_max_incomplete_event_size=HEAD_BYTES,
    )  # fmt: skip
