"""What asks the device for a trifle: a native library, MLX in a process of its own, or nobody."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polytoken.errors import UsageError

ENTRY_POINT: Final = "ds4_gpu_canary_probe"
_START_SECONDS: Final = 60.0  # a process that imports MLX and compiles a kernel


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
    """

    name: str

    @abstractmethod
    def __call__(self) -> Sample: ...

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Let go of what it holds."""


class _Seconds(ctypes.Structure):
    _fields_ = (("scheduled_seconds", ctypes.c_double), ("completed_seconds", ctypes.c_double))


class NativeProbe(Probe):
    """A shared library with the C entry point `int ds4_gpu_canary_probe(double seconds[2])`; it returns 1 for success.

    The call releases the interpreter, so a probe that hangs holds up nobody but its own thread.

    Raises:
        UsageError: the library cannot be loaded, or lacks the entry point.
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

    def __call__(self) -> Sample:
        seconds = _Seconds()
        ok = bool(self._function(ctypes.byref(seconds)))
        return Sample(ok, seconds.scheduled_seconds, seconds.completed_seconds)


class MlxProbe(Probe):
    """A trifling MLX product on the GPU in a process of its own, so that no queue is shared with the engine.

    Args:
        device: `gpu`, or `cpu` to try the machinery.
    """

    name = "mlx"

    def __init__(self, device: str = "gpu") -> None:
        command = [sys.executable, "-m", "polytoken.oracle.canary.mlx_process", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if self._ask("ready") is None:
            raise UsageError("--canary mlx: the probe's process cannot use the device", field="--canary")

    def __call__(self) -> Sample:
        answer = self._ask("probe")
        if answer is None:
            return Sample(False, 0.0, 0.0)
        return Sample(True, float(answer["scheduled_seconds"]), float(answer["completed_seconds"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # a word that a dead process did not read
                    stream.close()

    def _ask(self, word: str) -> dict[str, float] | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # it died, or was closed while a probe was out
            return None
        found: dict[str, float] | None = json.loads(line) if line.startswith("{") else None
        return found


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
