"""Ctrl-C and SIGTERM: the first one ends things in order, the second one does not wait.

Outside of a run both unwind like Ctrl-C does. Within `draining` they fail the open requests of the run, whose records
and summary still come. A signal that was ignored when the program started (`nohup`, a shell's background) stays so.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from polytoken.cli.output import say
from polytoken.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

if TYPE_CHECKING:
    from polytoken.engine import Engine

T = TypeVar("T")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwinds as Ctrl-C does, and ends with a status of its own."""


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit status of a command that this ended."""
    return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED


def word_of(status: int) -> str:
    """What is said about it."""
    return "terminated" if status == EXIT_TERMINATED else "interrupted"


@contextmanager
def ending() -> Iterator[None]:
    """While this is open, SIGTERM raises `Terminated`; a second one ends the process at once."""
    seen = False

    def terminate(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            leave_at_once(number)
        seen = True
        raise Terminated

    with _handled({signal.SIGTERM: terminate}):
        yield


class Interrupt:
    """Whether a run was asked to end.

    Attributes:
        status: the exit status that follows from it; 0 while nobody asked.
    """

    def __init__(self, engine: Engine) -> None:
        self.status = 0
        self._engine = engine

    def press(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.status:
            leave_at_once(number)
        self.status = 128 + number
        self._engine.interrupt()

    def guard(self, source: Iterable[T]) -> Iterator[T]:
        """The source of a run, ending at once if a signal came after the handler was set and before the run began."""
        if self.status:
            self._engine.interrupt()
            return
        yield from source


@contextmanager
def draining(engine: Engine) -> Iterator[Interrupt]:
    """While this is open, the first signal fails the run's open requests, whose records and summary still come."""
    state = Interrupt(engine)
    with _handled(dict.fromkeys(SIGNALS, state.press)):
        yield state


def leave_at_once(number: int) -> NoReturn:
    """End the process: nothing is waited for or flushed."""
    say("note", f"{word_of(128 + number)} again: left without waiting")
    os._exit(128 + number)


@contextmanager
def _handled(handlers: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    wanted = {number: handler for number, handler in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
