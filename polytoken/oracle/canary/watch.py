"""The two threads of the canary: one probes, the other ends the process when a probe does not come back."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from polytoken.oracle.canary.probe import Probe
from polytoken.oracle.failures import EXIT_CANARY
from polytoken.oracle.receipt import Receipts

PERIOD_SECONDS: Final = 0.1  # from one probe's start to the next one's
WATCH_SECONDS: Final = 0.01
DEADLINE_SECONDS: Final = 2.0
JOIN_SECONDS: Final = 2.0


def leave(status: int) -> None:
    """End the process at once. Receipts are flushed line by line as they are written, so only progress is left."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)


class Canary:
    """Probes the device from entering to leaving the context, and says at the end what was seen.

    Args:
        probe: None for no canary: then only the summary is written.
        receipts: whose phase is noted with every probe, and whose progress stream is told.
        exit: ends the process; it must not come back.
    """

    def __init__(self, probe: Probe | None, receipts: Receipts, *, exit: Callable[[int], None] = leave) -> None:
        self._probe, self._receipts, self._exit = probe, receipts, exit
        self._pending: float | None = None  # when the probe that is out was sent
        self._stop = threading.Event()
        self._samples: list[dict[str, Any]] = []
        self._threads: list[threading.Thread] = []
        self._prober: threading.Thread | None = None

    def __enter__(self) -> Canary:
        if self._probe is not None:
            self._prober = threading.Thread(target=self._probe_on, name="polytoken-canary", daemon=True)
            watcher = threading.Thread(target=self._watch, name="polytoken-canary-watch", daemon=True)
            self._threads = [self._prober, watcher]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        stuck = self._prober is not None and self._prober.is_alive()
        self._summarise(incomplete=stuck)
        if stuck:
            self._exit(EXIT_CANARY)
        if self._probe is not None:
            self._probe.close()

    def _probe_on(self) -> None:
        assert self._probe is not None
        while not self._stop.is_set():
            sent, phase = time.monotonic(), self._receipts.phase
            self._pending = sent
            sample = self._probe()
            self._pending = None
            if self._stop.is_set() and not sample.ok:
                return  # closed under it
            record = {
                "phase": phase,
                "scheduled_ms": sample.scheduled_seconds * 1000,
                "completed_ms": sample.completed_seconds * 1000,
            }
            self._samples.append(record)
            if not sample.ok or sample.completed_seconds >= DEADLINE_SECONDS:
                self._abort(sample=record, ok=sample.ok)
                return
            self._stop.wait(max(0.0, PERIOD_SECONDS - (time.monotonic() - sent)))

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            sent = self._pending
            if sent is not None and time.monotonic() - sent >= DEADLINE_SECONDS:
                self._abort(phase=self._receipts.phase, reason=f"a probe is out for {DEADLINE_SECONDS:g} s")
                return

    def _abort(self, **fields: Any) -> None:
        self._receipts.note("test_canary_abort", **fields)
        self._summarise(incomplete=True)
        self._exit(EXIT_CANARY)

    def _summarise(self, *, incomplete: bool) -> None:
        self._receipts.note(
            "reference_canary_summary",
            enabled=self._probe is not None,
            probe=None if self._probe is None else self._probe.name,
            samples=list(self._samples),
            incomplete=incomplete,
        )
