"""What other threads leave in the engine's inbox: requests with their handles, and orders with their outcomes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from polytoken.engine.intake import Intake
from polytoken.engine.job import Sink
from polytoken.engine.metrics import Totals
from polytoken.engine.outcomes import failed, is_last
from polytoken.engine.scheduler import Scheduler
from polytoken.errors import PolytokenError
from polytoken.events import Event, GenerationFailed, RequestRejected
from polytoken.request import Request

_LOG = logging.getLogger(__name__)


class Handle:
    """One submitted request. Also the sink through which its events pass to the one given by the caller.

    Args:
        sink: the caller's.
        cancel: has the engine end this very request, without waiting.
        on_end: told once, before the last event is delivered.
        intake: of the run that the request belongs to.

    Attributes:
        line: of the run's input.
        done: whether the last event was delivered.
    """

    def __init__(
        self,
        request_id: str,
        sink: Sink,
        *,
        cancel: Callable[[Handle], None],
        on_end: Callable[[Handle], None],
        intake: Intake | None = None,
    ) -> None:
        self.request_id = request_id
        self.intake = intake
        self.line: int | None = None
        self.done = False
        self._sink = sink
        self._cancel = cancel
        self._on_end = on_end

    def cancel(self) -> None:
        """End the request within one step, without waiting for that. No effect once it is done."""
        # By handle, not by id: a refused duplicate must not cancel the request it duplicates.
        if not self.done:
            self._cancel(self)

    def failed(self, error: PolytokenError) -> GenerationFailed:
        """Its last event, for this reason."""
        return failed(self.request_id, self.line, error)

    def __call__(self, event: Event) -> None:
        if self.done:
            return
        self.done = is_last(event)
        if self.done:
            self._on_end(self)
        try:
            self._sink(event)
        except Exception:
            # The caller's fault must not become the other requests' fault.
            _LOG.error("sink of request %r failed, cancelling it\n%s", self.request_id, traceback.format_exc())
            self._sink = drop
            self.cancel()


@dataclass(frozen=True)
class Submission:
    """A request on its way to the scheduler, or a line that is none.

    Attributes:
        token_events: whether it gets `token` events, None for the engine's default.
        intake: of the run that it belongs to.
    """

    payload: Request | RequestRejected
    handle: Handle
    token_events: bool | None
    intake: Intake | None = None

    @property
    def totals(self) -> Totals | None:
        """Those of its run."""
        return None if self.intake is None else self.intake.totals


@dataclass(frozen=True)
class Order:
    """Something to do with the scheduler on the owner thread, and where its outcome goes."""

    act: Callable[[Scheduler], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self, scheduler: Scheduler) -> None:
        """Do it, on the owner thread."""
        self.future.set_running_or_notify_cancel()
        try:
            self.future.set_result(self.act(scheduler))
        except BaseException as error:  # the one who waits gets it, whatever it is
            self.future.set_exception(error)


def drop(event: Event) -> None:
    """Nobody listens."""
