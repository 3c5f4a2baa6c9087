"""What the figures were measured on and with."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

PACKAGES = ("polytoken", "mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "transformers", "numpy")


@dataclass(frozen=True)
class Machine:
    """Facts beside a measurement.

    Attributes:
        date: UTC, ISO 8601.
        system, processor, cores: of this host.
        device: MLX's default device, with the GPU's own name where it has one.
        versions: installed packages that matter.
        load_average: over one minute, before the run; well above 0 means the figures are too low.
    """

    date: str
    system: str
    processor: str
    cores: int
    device: str
    versions: dict[str, str]
    load_average: float | None


def describe_machine() -> Machine:
    """The machine as it is now."""
    return Machine(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        device=_device(),
        versions={name: found for name in PACKAGES if (found := _version(name)) is not None},
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _device() -> str:
    if mx.default_device() != mx.gpu:
        return "cpu"
    name = mx.device_info().get("device_name")
    return f"gpu ({name})" if name else "gpu"
