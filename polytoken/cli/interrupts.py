"""Ctrl-C and SIGTERM: the first one ends things in order, the second one does not wait.

Outside of a run both unwind like Ctrl-C does. Within `draining` they fail the open requests of the run, whose records
and summary still come. A signal that was ignored when the program started (`nohup`, a shell's background) stays so.

A handler runs in the middle of whatever its thread does, perhaps with a lock held or half-way through a wait. So it
takes no lock: it leaves word in a queue made for that, or ends the process.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from polytoken.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

if TYPE_CHECKING:
    from polytoken.engine import Engine

T = TypeVar("T")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_LATER: Final = 0.02  # seconds


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwinds as Ctrl-C does, and ends with a status of its own."""

    exit_status = EXIT_TERMINATED


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit status of a command that this ended."""
    return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED


def word_of(status: int) -> str:
    """What is said about it."""
    return "terminated" if status == EXIT_TERMINATED else "interrupted"


class Ending:
    """Whether SIGTERM came. Some libraries make their own of the `Terminated` that it raises."""

    def __init__(self) -> None:
        self.terminated = False

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.terminated:
            leave_at_once(number)
        if _starts_an_extension(frame):
            _thread.start_new_thread(_press_later, (number,))  # takes no lock
            return
        self.terminated = True
        raise Terminated


@contextmanager
def ending() -> Iterator[Ending]:
    """While this is open, SIGTERM raises `Terminated`; a second one ends the process at once."""
    state = Ending()
    with _handled({signal.SIGTERM: state.terminate}):
        yield state


class Interrupt:
    """Whether a run was asked to end.

    Attributes:
        status: the exit status that follows from it; 0 while nobody asked.
    """

    def __init__(self, engine: Engine) -> None:
        self.status = 0
        self._engine = engine
        self._word: SimpleQueue[bool] = SimpleQueue()  # whose `put` may interrupt any call of its own
        threading.Thread(target=self._watch, name="polytoken-interrupt", daemon=True).start()

    def press(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.status:
            leave_at_once(number)
        self.status = 128 + number
        self._word.put(True)

    def end(self) -> None:
        """Nobody will press any more."""
        self._word.put(False)

    def guard(self, source: Iterable[T]) -> Iterator[T]:
        """The source of a run, ending at once if a signal came after the handler was set and before the run began."""
        if self.status:
            self._engine.interrupt()
            return
        yield from source

    def _watch(self) -> None:
        if self._word.get():
            self._engine.interrupt()


@contextmanager
def draining(engine: Engine) -> Iterator[Interrupt]:
    """While this is open, the first signal fails the run's open requests, whose records and summary still come.

    Raises Terminated if SIGTERM came before and was lost on its way up: a library that is being imported may drop it.
    """
    before = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(before, Ending) and before.terminated:
        raise Terminated
    state = Interrupt(engine)
    try:
        with _handled(dict.fromkeys(SIGNALS, state.press)):
            yield state
    finally:
        state.end()


def leave_at_once(number: int) -> NoReturn:
    """End the process: nothing is waited for or flushed, and no stream that may be in use is touched."""
    note = f"polytoken: note: {word_of(128 + number)} again: left without waiting\n"
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # where nobody reads our errors either, the note is what has to go
            os.write(2, note.encode())
    os._exit(128 + number)


def _starts_an_extension(frame: FrameType | None) -> bool:
    """Whether a compiled module is being initialised: an exception in the middle of it may abort the process."""
    while frame is not None:
        if frame.f_code.co_qualname.startswith("ExtensionFileLoader."):
            return True
        frame = frame.f_back
    return False


def _press_later(number: int) -> None:
    time.sleep(_LATER)
    os.kill(os.getpid(), number)


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
