"""A running engine over the scripted lane, and gates that hold its owner thread so that tests need no sleeping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from engine_fakes import FakeLane, loaded

from polytoken.engine import Engine, SchedulerLimits
from polytoken.events import Event

PATIENCE = 60.0  # seconds after which a test says that something hangs; the machine may be busy


class Gate:
    """Stops the owner thread inside a step until it is let through, so that tests need no sleeping."""

    def __init__(self, lane: FakeLane, *, at: int = 1) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.at, self.steps = at, 0
        lane.before_step = self.pass_through

    def pass_through(self, ids: list[str]) -> None:
        self.steps += 1
        if self.steps == self.at:
            self.entered.set()
            assert self.open.wait(PATIENCE)

    def wait(self) -> None:
        assert self.entered.wait(PATIENCE)


@contextmanager
def running(lane: FakeLane, **options: Any) -> Iterator[Engine]:
    limits = {name: options.pop(name) for name in tuple(options) if name in SchedulerLimits.__dataclass_fields__}
    options.setdefault("stall_seconds", PATIENCE)
    engine = Engine(lambda: loaded(lane), SchedulerLimits(**limits), **options)
    with engine:
        yield engine
    assert lane.open_rows == 0 and all(row.closed == 1 for row in lane.rows)


@contextmanager
def aside(act: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run something on another thread; yields the call that waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        yield lambda: future.result(PATIENCE)


def finish(events: Iterator[Event]) -> list[Event]:
    return list(events)
