"""What asks the device for a trifle: a native library, MLX in a process of its own, or nobody."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polytoken.errors import UsageError

ENTRY_POINT: Final = "ds4_gpu_canary_probe"
START_SECONDS: Final = 60.0  # for a first probe: a driver starts, or a process imports MLX and compiles a kernel


@dataclass(frozen=True)
class Sample:
    """One answer: seconds until the work was scheduled, and until it was done."""

    ok: bool
    scheduled_seconds: float
    completed_seconds: float


class Probe(ABC):
    """Asks the device for a trifle and waits for it. Called on a thread of its own.

    Attributes:
        name: what receipts call it.
        address: of a C function that does the same as a call, without the interpreter; 0 for none.
        descriptors: of a process that does: one that takes an empty line, one that gives two counts of nanoseconds.
    """

    name: str
    address: int = 0
    descriptors: tuple[int, int] | None = None

    @abstractmethod
    def __call__(self) -> Sample: ...

    def start(self, *, flag: str, seconds: float = START_SECONDS) -> None:
        """A first probe, which may take longer than those that are watched.

        Raises:
            UsageError: it failed, or is not back in time.
        """
        answers: list[Sample] = []
        thread = threading.Thread(target=lambda: answers.append(self()), name="polytoken-canary-start", daemon=True)
        thread.start()
        thread.join(seconds)
        if not answers:
            raise UsageError(f"{flag}: the first probe is not back after {seconds:g} s", field=flag)
        if not answers[0].ok:
            raise UsageError(f"{flag}: the first probe failed: it cannot use the device", field=flag)

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Let go of what it holds."""


class _Seconds(ctypes.Structure):
    _fields_ = (("scheduled_seconds", ctypes.c_double), ("completed_seconds", ctypes.c_double))


class NativeProbe(Probe):
    """A shared library with the C entry point `int ds4_gpu_canary_probe(double seconds[2])`; it returns 1 for success.

    The call releases the interpreter, so a probe that hangs holds up nobody but its own thread.

    Raises:
        UsageError: the library cannot be loaded, lacks the entry point, or its first probe fails.
    """

    name = "native"

    def __init__(self, library: Path) -> None:
        try:
            function = getattr(ctypes.CDLL(str(library.resolve())), ENTRY_POINT)
        except OSError as error:
            raise UsageError(
                f"--canary-library: cannot load {str(library)!r}: {error}", field="--canary-library"
            ) from None
        except AttributeError:
            raise UsageError(
                f"--canary-library: {str(library)!r} has no function {ENTRY_POINT}", field="--canary-library"
            ) from None
        function.argtypes = [ctypes.POINTER(_Seconds)]
        function.restype = ctypes.c_int
        self._function = function
        self.address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.start(flag="--canary-library")

    def __call__(self) -> Sample:
        seconds = _Seconds()
        ok = self._function(ctypes.byref(seconds)) == 1
        times = seconds.scheduled_seconds, seconds.completed_seconds
        if not all(0.0 <= time < math.inf for time in times):  # NaN, too, fails both
            return Sample(False, 0.0, 0.0)
        return Sample(ok, *times)


class MlxProbe(Probe):
    """A trifling MLX product on the GPU in a process of its own, so that no queue is shared with the engine.

    Args:
        device: `gpu`, or `cpu` to try the machinery.
    """

    name = "mlx"

    def __init__(self, device: str = "gpu") -> None:
        command = [sys.executable, "-m", "polytoken.oracle.canary.mlx_process", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ask, self._answer = self._process.stdin, self._process.stdout
        self.descriptors = (self._ask.fileno(), self._answer.fileno())
        try:
            self.start(flag="--canary mlx")
        except UsageError:
            self.close()
            raise

    def __call__(self) -> Sample:
        try:
            self._ask.write(b"\n")
            scheduled, completed = self._answer.readline().split()
        except (OSError, ValueError):  # it died, or was closed while a probe was out
            return Sample(False, 0.0, 0.0)
        return Sample(True, int(scheduled) / 1e9, int(completed) / 1e9)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._ask, self._answer):
            with suppress(OSError):  # a word that a dead process did not read
                stream.close()


def choose_probe(name: str, library: Path | None, *, device: str) -> Probe | None:
    """The probe for a plan on this device; None for no canary.

    `auto` means the library where one is named, else MLX on a GPU, else none: on a CPU there is no device that others
    could be kept from.
    """
    if library is not None:
        return NativeProbe(library)
    if name == "mlx" or (name == "auto" and device == "gpu"):
        return MlxProbe(device)
    return None
