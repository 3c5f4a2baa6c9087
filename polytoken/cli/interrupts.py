"""Ctrl-C while the engine works: the first press drains cleanly, the second one does not wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytoken.engine import Engine


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def draining(engine: Engine) -> Iterator[Interrupt]:
    """While this is open, Ctrl-C fails the open requests, whose events and summary still come; a second one raises."""
    state = Interrupt()

    def press(_number: int, _frame: FrameType | None) -> None:
        if state.pressed:
            raise KeyboardInterrupt
        state.pressed = True
        engine.interrupt()

    if threading.current_thread() is not threading.main_thread():
        yield state  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, before)
