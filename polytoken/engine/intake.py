"""The thread that reads the requests of one run, as fast as the engine takes them and no faster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from polytoken.engine.mailbox import Outbox
from polytoken.engine.metrics import Totals
from polytoken.engine.outcomes import failed
from polytoken.errors import PolytokenError
from polytoken.events import Event, RequestRejected
from polytoken.request import Request

UNREAD_EVENTS = 1024  # a consumer that is this far behind gets no further requests read


class Counted(NamedTuple):
    """Reading is over: so many items were read, and each of them has or will have its one last event."""

    items: int


class Intake:
    """Reads `source` on a thread of its own. It touches nothing of MLX.

    Args:
        submit: hands one item to the engine, blocking while it has no room.
        outbox: where the run's events and the final `Counted` go.
    """

    def __init__(
        self,
        source: Iterable[Request | RequestRejected],
        submit: Callable[[Request | RequestRejected, Intake], None],
        *,
        outbox: Outbox[Event | Counted],
    ) -> None:
        self.outbox = outbox
        self._source, self._submit = source, submit
        self._lock = threading.RLock()
        self._items = 0
        self._closed = False
        # Touched by the owner thread only:
        self.refusal: PolytokenError | None = None  # why its requests fail, once it was ended early
        self.taken: set[str] = set()  # ids of this run, which stay taken while it lasts
        self.left = False  # nobody listens any more
        self.totals: Totals | None = None  # of its requests

    def start(self) -> None:
        threading.Thread(target=self._read, name="polytoken-reader", daemon=True).start()

    def stop(self) -> None:
        """Read no further, and say how much was read. A thread that is stuck in the source is left behind."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.outbox.put(Counted(self._items))

    def _admit(self) -> bool:
        """Count one more item, unless reading is over."""
        with self._lock:
            self._items += not self._closed
            return not self._closed

    def _read(self) -> None:
        try:
            items: Iterable[object] = self._source  # of callers whom no type checker has seen
            for item in items:
                self.outbox.wait_below(UNREAD_EVENTS, unless=lambda: self._closed)
                if not self._hand_over(item if isinstance(item, (Request, RequestRejected)) else _foreign(item)):
                    return
        except BaseException as error:  # also an exit or an interrupt: whatever ends the source must be told
            code = error.code if isinstance(error, PolytokenError) else "unreadable_input"
            self._hand_over(RequestRejected(code=code, error=f"reading requests failed: {error!s}"))
        finally:
            self.stop()

    def _hand_over(self, item: Request | RequestRejected) -> bool:
        """Count and submit one item; False when reading is over. What is counted gets its last event, come what may."""
        if not self._admit():
            return False
        try:
            self._submit(item, self)
        except Exception as error:
            self.outbox.put(_turned_away(item, error))
        return True


def _foreign(item: object) -> RequestRejected:
    kind = type(item).__name__
    return RequestRejected(code="bad_record", error=f"a run takes Request and RequestRejected, not {kind}")


def _turned_away(item: Request | RequestRejected, error: Exception) -> Event:
    if isinstance(item, RequestRejected):
        return item
    return failed(item.request_id, item.line, error)
