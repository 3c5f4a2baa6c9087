"""What this machine could do at best: measured read bandwidth, and the time floor of a forward that must read weights.

A one-row forward reads every weight once, so no decoder of one row at a time can be faster than
bytes / bandwidth per token: the byte floor. The share of it is what a decode rate is worth on this machine.

Bandwidth of a shared host swings by half within seconds, so a share means something only against the bandwidth beside
the very run: `sustained_bandwidth`, a mean like the run's own. The best burst, `read_bandwidth`, is the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from polytoken.kernels import products

_GPU_BYTES = 1 << 30
_CPU_BYTES = 256 << 20
_BURST_SECONDS = 0.5
_BESIDE_SECONDS = 0.2


@dataclass(frozen=True)
class Bandwidth:
    """Measured rate at which one forward's thread or device reads memory.

    Attributes:
        gb_per_second: 1e9 bytes per second.
        method: how it was measured, in a few words.
    """

    gb_per_second: float
    method: str


def read_bandwidth(*, seconds: float | None = None) -> Bandwidth:
    """Measure the read bandwidth of the default device; on the CPU with one thread, as the default engine runs."""
    seconds = _BURST_SECONDS if seconds is None else seconds
    if mx.default_device() == mx.gpu:
        return _device_bandwidth(_GPU_BYTES, seconds)
    try:
        extension = products.extension()
    except ImportError:
        return _device_bandwidth(_CPU_BYTES, seconds)
    return Bandwidth(extension.read_bandwidth(_CPU_BYTES, seconds), "streaming loads, one thread")


def sustained_bandwidth(*, seconds: float | None = None) -> Bandwidth:
    """Read bandwidth as a run beside this moment has it: a mean on the CPU, where other programs take their part."""
    seconds = _BESIDE_SECONDS if seconds is None else seconds
    if mx.default_device() == mx.gpu:
        return _device_bandwidth(_GPU_BYTES, seconds)
    try:
        extension = products.extension()
    except ImportError:
        return _device_bandwidth(_CPU_BYTES, seconds)
    rate = extension.sustained_bandwidth(_CPU_BYTES, seconds)
    return Bandwidth(rate, f"streaming loads, one thread, mean of {seconds:g} s")


def _device_bandwidth(size: int, seconds: float) -> Bandwidth:
    """Best of a few whole-array operations, counting the bytes read and written."""
    count = size // 4
    values = mx.ones((count,), dtype=mx.float32)
    row = mx.ones((1, 4096), dtype=mx.float32)
    matrix = values.reshape(-1, 4096)
    mx.eval(values, row, matrix)
    candidates: dict[str, tuple[int, Callable[[], mx.array]]] = {
        "sum of an array": (size, values.sum),
        "x + 1 of an array, read and write": (2 * size, lambda: values + 1),
        "one row times a matrix": (size, lambda: row @ matrix.T),
    }
    best, method = 0.0, ""
    for name, (moved, run) in candidates.items():
        rate = moved / best_seconds(run, seconds=seconds / len(candidates)) / 1e9
        if rate > best:
            best, method = rate, name
    return Bandwidth(best, method)


def best_seconds(run: Callable[[], mx.array], *, seconds: float) -> float:
    """Shortest wall time of `run` evaluated, over at least three tries after a warm-up."""
    mx.eval(run())
    best, tries, start = float("inf"), 0, time.perf_counter()
    while tries < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        mx.eval(run())
        best = min(best, time.perf_counter() - before)
        tries += 1
    return best


def decode_floor(weight_bytes: int, cache_bytes: int, bandwidth: Bandwidth) -> float:
    """Seconds that one single-row forward must take to read its weights and its cache once."""
    return (weight_bytes + cache_bytes) / (bandwidth.gb_per_second * 1e9)
