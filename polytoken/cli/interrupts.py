"""Ctrl-C while the engine works: the first press drains cleanly, the second one does not wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from polytoken.engine import Engine


T = TypeVar("T")


class Interrupt:
    """Whether Ctrl-C was pressed.

    Attributes:
        pressed: it was.
    """

    def __init__(self, engine: Engine) -> None:
        self.pressed = False
        self._engine = engine

    def press(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._engine.interrupt()

    def guard(self, source: Iterable[T]) -> Iterator[T]:
        """The source of a run, ending at once if Ctrl-C came after the handler was set and before the run began."""
        if self.pressed:
            self._engine.interrupt()
            return
        yield from source


@contextmanager
def draining(engine: Engine) -> Iterator[Interrupt]:
    """While this is open, Ctrl-C fails the open requests, whose events and summary still come; a second one raises."""
    state = Interrupt(engine)
    if threading.current_thread() is not threading.main_thread():
        yield state  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, state.press)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, before)
