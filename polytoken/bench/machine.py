"""What the figures were measured on and with."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from polytoken.host import MLX_PACKAGES, command_line, installed_versions, now_utc, processor_name, source_commit

PACKAGES: Final = ("polytoken", *MLX_PACKAGES, "transformers", "numpy")


@dataclass(frozen=True)
class Machine:
    """Facts beside a measurement.

    Attributes:
        date: UTC, ISO 8601.
        command: as it was given.
        commit: of the source tree, see `source_commit`.
        system, processor, cores: of this host.
        device: MLX's default device, with the GPU's own name where it has one.
        versions: installed packages that matter.
        load_average: over one minute, before the run; well above 0 means the figures are too low.
    """

    date: str
    command: list[str]
    commit: str | None
    system: str
    processor: str
    cores: int
    device: str
    versions: dict[str, str]
    load_average: float | None


def describe_machine() -> Machine:
    """The machine as it is now."""
    return Machine(
        date=now_utc(),
        command=command_line(),
        commit=source_commit(),
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        device=_device(),
        versions=installed_versions(PACKAGES),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _device() -> str:
    if mx.default_device() != mx.gpu:
        return "cpu"
    name = mx.device_info().get("device_name")
    return f"gpu ({name})" if name else "gpu"
