"""The canary itself: who probes, who ends the process when a probe does not come back, and what is said about it.

Both threads are compiled where that is built (`native/watchdog.c`), so that nothing that holds the interpreter delays
an exit or makes a probe that is back look late. In Python they do the same as well as they can.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, Final

from polytoken.oracle.canary.probe import Probe, Sample
from polytoken.oracle.failures import EXIT_CANARY
from polytoken.oracle.receipt import Receipts

PERIOD_SECONDS: Final = 0.1  # from one probe's start to the next one's
WATCH_SECONDS: Final = 0.01
DEADLINE_SECONDS: Final = 2.0
JOIN_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 0.1  # for the last words, which somebody may not read


def leave(status: int) -> None:
    """End the process at once. Receipts are flushed line by line as they are written, so only progress is left."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status)


class Canary:
    """Probes the device from entering to leaving the context, and says at the end what was seen.

    Args:
        probe: None for no canary: then only the summary is written. Whoever made it closes it.
        receipts: whose phase is noted with every probe, and whose progress stream is told.
        exit: ends the process; it must not come back.
        compiled: whether the compiled threads may be used, where they are there.
    """

    def __init__(
        self,
        probe: Probe | None,
        receipts: Receipts,
        *,
        exit: Callable[[int], None] = leave,
        compiled: bool = True,
    ) -> None:
        self._probe, self._receipts, self._exit = probe, receipts, exit
        self._threads: CompiledThreads | PythonThreads | None = None
        if probe is not None:
            module = _compiled() if compiled and exit is leave and receipts.descriptor is not None else None
            if module is not None and (probe.address or probe.descriptors):
                self._threads = CompiledThreads(module, probe, receipts)
            else:
                self._threads = PythonThreads(probe, receipts, self._abort)

    @property
    def kind(self) -> str | None:
        """`compiled`, `python`, or None for no canary."""
        return None if self._threads is None else self._threads.kind

    def __enter__(self) -> Canary:
        if self._threads is not None:
            self._threads.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is None:
            self._summarise([], incomplete=False)
            return
        samples, stuck = self._threads.stop(JOIN_SECONDS)
        if stuck:
            self._guard()
        self._summarise(samples, incomplete=stuck)
        if stuck:
            self._exit(EXIT_CANARY)

    def _abort(self, samples: list[dict[str, Any]], **fields: Any) -> None:
        self._guard()
        self._receipts.tell("test_canary_abort", **fields)
        self._summarise(samples, incomplete=True)
        self._exit(EXIT_CANARY)

    def _guard(self) -> None:
        """Leave even if nobody reads the last words."""
        timer = threading.Timer(GRACE_SECONDS, self._exit, (EXIT_CANARY,))
        timer.daemon = True
        timer.start()

    def _summarise(self, samples: list[dict[str, Any]], *, incomplete: bool) -> None:
        self._receipts.tell(
            "reference_canary_summary",
            enabled=self._probe is not None,
            probe=None if self._probe is None else self._probe.name,
            threads=self.kind,
            samples=samples,
            incomplete=incomplete,
        )


class CompiledThreads:
    """The threads of `native/watchdog.c`, which end the process by themselves."""

    kind = "compiled"

    def __init__(self, module: ModuleType, probe: Probe, receipts: Receipts) -> None:
        self._module, self._probe, self._receipts = module, probe, receipts

    def start(self) -> None:
        ask, answer = self._probe.descriptors or (-1, -1)
        self._module.start(
            self._probe.address, ask, answer, self._receipts.descriptor, EXIT_CANARY, PERIOD_SECONDS, WATCH_SECONDS,
            DEADLINE_SECONDS, GRACE_SECONDS, self._probe.name, self._receipts.phase,
        )  # fmt: skip
        self._receipts.on_phase = self._module.enter

    def stop(self, seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """The samples, and whether a probe is still out after that time."""
        self._receipts.on_phase = None
        taken, stuck = self._module.stop(seconds)
        return [describe(phase, Sample(True, a / 1e9, b / 1e9)) for phase, a, b in taken], stuck


class PythonThreads:
    """The same with Python's threads.

    Args:
        abort: takes the samples and what is said, and ends the process.
    """

    kind = "python"

    def __init__(self, probe: Probe, receipts: Receipts, abort: Callable[..., None]) -> None:
        self._probe, self._receipts, self._abort = probe, receipts, abort
        self._pending: tuple[float, str] | None = None  # when the probe that is out was sent, and in which phase
        self._stop = threading.Event()
        self._samples: list[dict[str, Any]] = []
        self._prober = threading.Thread(target=self._probe_on, name="polytoken-canary", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="polytoken-canary-watch", daemon=True)

    def start(self) -> None:
        self._prober.start()
        self._watcher.start()

    def stop(self, seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """The samples, and whether a probe is still out after that time."""
        self._stop.set()
        self._watcher.join(seconds)
        self._prober.join(seconds)
        return list(self._samples), self._prober.is_alive()

    def _probe_on(self) -> None:
        while not self._stop.is_set():
            sent, phase = time.monotonic(), self._receipts.phase
            self._pending = sent, phase
            sample = self._probe()
            self._pending = None
            if self._stop.is_set() and not sample.ok:
                return  # closed under it
            record = describe(phase, sample)
            self._samples.append(record)
            if not sample.ok or sample.completed_seconds >= DEADLINE_SECONDS:
                self._abort(list(self._samples), ok=sample.ok, sample=record)
                return
            self._stop.wait(max(0.0, PERIOD_SECONDS - (time.monotonic() - sent)))

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            pending = self._pending
            seconds = 0.0 if pending is None else time.monotonic() - pending[0]
            if pending is not None and seconds >= DEADLINE_SECONDS:
                self._abort(
                    list(self._samples),
                    phase=self._receipts.phase,
                    sent_in=pending[1],
                    pending_seconds=seconds,
                    reason=f"a probe is out for {DEADLINE_SECONDS:.1f} s",
                )
                return


def describe(phase: str, sample: Sample) -> dict[str, Any]:
    """A sample as the summary has it."""
    return {
        "phase": phase,
        "scheduled_ms": sample.scheduled_seconds * 1000,
        "completed_ms": sample.completed_seconds * 1000,
    }


def _compiled() -> ModuleType | None:
    try:
        from polytoken.oracle.canary import _watchdog  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        return None
    module: ModuleType = _watchdog
    return module
