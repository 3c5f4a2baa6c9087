"""A command in a process of its own whose every wait ends: in what was waited for, or in a failure that shows all."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

COMMAND = [sys.executable, "-X", "faulthandler", "-m", "polytoken"]
PATIENCE = 120.0  # seconds for any one wait: a busy machine needs many to start Python alone


class Child:
    """A running command; standard input stays open until `hang_up`, standard output is read on demand only.

    Attributes:
        out, err: the bytes read so far.
    """

    def __init__(self, *arguments: str, **words: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen([*COMMAND, *arguments], bufsize=0, **{**pipes, **words})
        self.out, self.err = bytearray(), bytearray()

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def press(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        """Read both streams until this is so. Fails at the end of the output, or when patience runs out."""
        end = time.monotonic() + PATIENCE
        while not reached():
            if not self._read(end - time.monotonic()):
                self._fail(f"no {what}")

    def until_event(self, name: str) -> None:
        self.until(f"event {name}", lambda: any(event["event"] == name for event in self.events))

    def end(self) -> int:
        """Read the rest of both streams; the exit status."""
        end = time.monotonic() + PATIENCE
        while self._read(end - time.monotonic()):
            pass
        return self.wait(max(1.0, end - time.monotonic()))

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status, with nothing read."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"no end in {seconds:.0f} s")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Every whole line read so far."""
        return [json.loads(line) for line in self.out.splitlines(keepends=True) if line.endswith(b"\n")]

    @property
    def told(self) -> str:
        return self.err.decode()

    def _read(self, seconds: float) -> bool:
        """One more piece of either stream; False at the end of both, or when no time is left."""
        streams = {s: box for s, box in ((self.process.stdout, self.out), (self.process.stderr, self.err)) if s}
        live = [stream for stream in streams if not stream.closed]
        ready = select.select(live, [], [], max(0.0, seconds))[0] if live else []
        for stream in ready:
            piece = os.read(stream.fileno(), 1 << 16)
            streams[stream] += piece
            if not piece:
                stream.close()
        return bool(ready)

    def _fail(self, what: str) -> NoReturn:
        """Fail with what was seen, and with where every thread of the command stands."""
        alive = self.process.poll() is None
        if alive:
            self.process.send_signal(signal.SIGABRT)  # faulthandler tells, and the process ends
            end = time.monotonic() + 20
            while self._read(end - time.monotonic()):
                pass
        state = "it hung" if alive else f"status {self.process.returncode}"
        raise AssertionError(f"{what}; {state}\n--- output\n{self.out.decode()[-4000:]}\n--- errors\n{self.told}")


@contextmanager
def started(*arguments: str, **words: Any) -> Iterator[Child]:
    """A command that does not outlive its test."""
    child = Child(*arguments, **words)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.wait(60)
        for stream in (child.process.stdin, child.process.stdout, child.process.stderr):
            if stream is not None:
                stream.close()
