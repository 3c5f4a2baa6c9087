"""What the endpoints of one server share: models, settings, open turns, counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request as HttpRequest

from polytoken.errors import PolytokenError
from polytoken.request import Request
from polytoken.server.errors import ApiError
from polytoken.server.metrics import Metrics
from polytoken.server.pool import Model, ModelPool
from polytoken.server.remembered import ResponseStore
from polytoken.server.settings import ServerSettings
from polytoken.server.turn import Turn

ACCESS: Final = logging.getLogger("polytoken.access")
FAREWELL_SECONDS: Final = 2.0  # how long failed streams have to say so
STATISTICS_SECONDS: Final = 2.0  # how long /health and /metrics wait for a busy engine


class ServerState:
    """One server.

    Attributes:
        responses: answers that may be continued.
        turns: those that are open, with their models.
        draining: whether it is going down: nothing new is taken.
    """

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self.pool, self.settings = pool, settings
        self.metrics = Metrics()
        self.turns: dict[Turn, Model] = {}
        self.draining = False
        self.responses = ResponseStore()
        self.started = time.time()
        self._idle = asyncio.Event()
        self._idle.set()
        self._statistics: dict[str, Mapping[str, Any]] = {}
        self._asking: dict[Model, asyncio.Task[Mapping[str, Any]]] = {}

    def open_turn(self, model: Model, requests: Sequence[Request]) -> Turn:
        """Queue the requests, and keep the model in memory until the turn is over.

        Raises:
            ApiError: 429 or 503.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        limits = model.engine.limits
        waiting = sum(len(turn.members) for turn, other in self.turns.items() if other is model)
        if waiting + len(requests) > limits.max_rows + limits.max_pending:
            raise ApiError(429, f"{waiting} requests are in progress or waiting; try again", code="queue_full")
        turn = Turn(
            model.engine,
            requests,
            timeout=self.settings.request_timeout,
            patience=self.settings.keep_alive,
            ended=self._close_turn,
        )
        model.hold()
        self.turns[turn] = model
        self._idle.clear()
        self.metrics.open.set(len(self.turns))
        return turn

    def _close_turn(self, turn: Turn) -> None:
        model = self.turns.pop(turn, None)
        if model is None:
            return
        model.release()
        self.metrics.open.set(len(self.turns))
        seconds = time.monotonic() - turn.started
        self.metrics.count(model.name, turn, seconds)
        if self.settings.access_log:
            ACCESS.info("%s", _told(model.name, turn, seconds))
        if not self.turns:
            self._idle.set()

    async def drain(self) -> None:
        """Take nothing new, let open turns finish for a while, and fail what is left."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            for turn in list(self.turns):
                turn.fail(ApiError(503, "the server is shutting down", code="shutting_down"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await self._idle.wait()
            for turn in list(self.turns):
                turn.close()  # of clients that read nothing: they must not hold up the end

    async def statistics(self) -> dict[str, Mapping[str, Any]]:
        """What the lanes of all loaded models say; of an engine that is busy for long, what it said last."""
        return {name: await self._statistics_of(model) for name, model in list(self.pool.loaded.items())}

    async def _statistics_of(self, model: Model) -> Mapping[str, Any]:
        # A thread waits for a busy engine: one for all who ask meanwhile, since others need threads, too.
        work = self._asking.get(model)
        if work is None:
            work = self._asking[model] = asyncio.create_task(self._ask_engine(model))
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(work), STATISTICS_SECONDS)
        return self._statistics.get(model.name, {})

    async def _ask_engine(self, model: Model) -> Mapping[str, Any]:
        try:
            said = await asyncio.to_thread(model.engine.call, lambda lane: dict(lane.lane.statistics()))
            self._statistics[model.name] = said
        except PolytokenError:
            pass  # it is being closed: what it said last
        finally:
            del self._asking[model]
        return self._statistics.get(model.name, {})


def _told(model: str, turn: Turn, seconds: float) -> str:
    """One line about a turn that is over."""
    first, tokens = turn.members[0], sum(member.tokens for member in turn.members)
    pace = "" if turn.first_token is None else f", first after {turn.first_token:.3f}s"
    return (
        f"{turn.call_id} {model} {turn.end}: prompt {first.prompt_tokens} ({first.cached_tokens} cached), "
        f"{tokens} new{pace}, {seconds:.3f}s"
    )


def state_of(request: HttpRequest) -> ServerState:
    """The server that this call came to."""
    state: ServerState = request.app.state.server
    return state
