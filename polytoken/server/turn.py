"""The requests of one call inside an engine, as the event loop sees them: events to await, and an end that is sure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from polytoken.engine import Engine, Handle, error_of
from polytoken.errors import PolytokenError
from polytoken.events import Event, GenerationFailed, GenerationResult, RequestRejected, RequestStarted, Token
from polytoken.request import Request
from polytoken.server.errors import ApiError, from_engine

_LOG = logging.getLogger(__name__)
LATE_SECONDS: Final = 1.0  # behind its deadline, a turn whose events nobody awaits is closed
EndOfTurn = Callable[["Turn"], None]


@dataclass(eq=False)
class Member:
    """One request of a turn.

    Attributes:
        index: its place, the choice's index.
        result: how it ended, once it did.
        prompt_tokens, cached_tokens: of its prompt, once it was prefilled.
        tokens: how many it has so far.
    """

    index: int
    request: Request
    result: GenerationResult | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    handle: Handle | None = field(default=None, repr=False)


class Turn:
    """What one call asked for: one request, or several when it wants several choices.

    Attributes:
        members: in the order of the choices.
        started: monotonic seconds of the submission.
        first_token: seconds from then to the first tokens, once there were some.
        failure: why it ended badly.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], *, timeout: float, patience: float, ended: EndOfTurn
    ) -> None:
        """Queue the requests: all of them or none.

        Args:
            timeout: seconds that the whole turn may take.
            patience: seconds without an event after which `next` gives None.
            ended: told once, when the turn is over.

        Raises:
            ApiError: 429 when the queue is full, 503 when the engine takes nothing.
        """
        self.members = [Member(index, request) for index, request in enumerate(requests)]
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.failure: ApiError | None = None
        self._timeout, self._patience = timeout, patience
        self._deadline = self.started + timeout
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Member | None, Event | ApiError]] = asyncio.Queue()
        self._over = False
        self._ended = ended
        # Whoever awaits the events tells of the end in time; this is for a client that reads nothing meanwhile.
        self._alarm = self._loop.call_later(timeout + LATE_SECONDS, self._expire)
        try:
            for member in self.members:
                sink = self._sink(member)
                member.handle = engine.submit(member.request, sink, wait=False, token_events=True)
        except PolytokenError as error:
            self._cancel()
            self._alarm.cancel()
            raise from_engine(error) from None

    def _sink(self, member: Member) -> Callable[[Event], None]:
        def receive(event: Event) -> None:  # on the owner thread
            self._loop.call_soon_threadsafe(self._events.put_nowait, (member, event))

        return receive

    def show(self, index: int, event: Event) -> None:
        """Put something that was seen of a member among its events. For the owner thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (self.members[index], event))

    @property
    def call_id(self) -> str:
        """What clients know the call by: `x-request-id`."""
        return self.members[0].request.request_id.rpartition("-")[0]

    @property
    def complete(self) -> bool:
        """Whether every member has its result."""
        return all(member.result is not None for member in self.members)

    @property
    def end(self) -> str:
        """How it ended: `finished`, the code of its failure, or `cancelled` when the client left."""
        if self.complete:
            return "finished"
        return "cancelled" if self.failure is None else self.failure.code

    async def next(self) -> tuple[Member, Event] | None:
        """The next event of any member; None after the patience ran out.

        Raises:
            ApiError: a member failed, was refused or took too long. The turn is over then.
        """
        if not self._events.empty() and time.monotonic() < self._deadline:
            member, event = self._events.get_nowait()
        else:
            try:
                # Not `wait_for`: before Python 3.12 it can swallow a cancellation, and the turn would run on unwatched.
                async with asyncio.timeout(max(0.0, min(self._patience, self._deadline - time.monotonic()))):
                    member, event = await self._events.get()
            except TimeoutError:
                if time.monotonic() < self._deadline:
                    return None
                raise self._fail(self._late()) from None
        if isinstance(event, ApiError):
            raise self._fail(event)
        assert member is not None
        if isinstance(event, (GenerationFailed, RequestRejected)):
            if event.code == "internal":
                _LOG.error("request %s failed: %s", member.request.request_id, event.error)
            raise self._fail(from_engine(error_of(event)))
        self._note(member, event)
        return member, event

    async def events(self, first: tuple[Member, Event] | None = None) -> AsyncIterator[tuple[Member, Event] | None]:
        """All events, and None for every silence, until every member has its result.

        Args:
            first: one that `next` has given already; it comes again, in front.
        """
        if first is not None:
            yield first
        while not self.complete:
            yield await self.next()

    def fail(self, error: ApiError) -> None:
        """End it from outside: whoever awaits its events gets this error."""
        if not self._over:
            self._events.put_nowait((None, error))

    def close(self) -> None:
        """End what is still running, within one step. May be called any number of times."""
        self._cancel()
        self._alarm.cancel()
        if not self._over:
            self._over = True
            self._ended(self)

    def _note(self, member: Member, event: Event) -> None:
        if isinstance(event, Token):
            if self.first_token is None:
                self.first_token = time.monotonic() - self.started
            member.tokens = event.generated_tokens
        elif isinstance(event, RequestStarted):
            member.prompt_tokens, member.cached_tokens = event.prompt_tokens, event.prefix_cache_tokens
        elif isinstance(event, GenerationResult):
            member.result = event
            if self.complete:
                self.close()

    def _late(self) -> ApiError:
        return ApiError(504, f"the request took longer than {self._timeout:g} seconds", code="request_timeout")

    def _expire(self) -> None:
        self.fail(self._late())
        self.close()

    def _fail(self, error: ApiError) -> ApiError:
        self.failure = error
        self.close()
        return error

    def _cancel(self) -> None:
        for member in self.members:
            if member.handle is not None:
                member.handle.cancel()
