"""What this host calls its processor, and which packages are installed: facts that reports state, read without MLX."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

# The distributions that MLX comes as, and the one whose layers the networks are made of: numbers depend on each.
MLX_PACKAGES: Final = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm")


def installed_version(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by distribution, in the order given, of those that are installed."""
    return {package: found for package in packages if (found := installed_version(package)) is not None}


def resident_bytes() -> int | None:
    """Bytes of memory that this process has now, pages of files included; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def first_processor() -> dict[str, str]:
    """Values by name (`model name`, `flags`, ...) of the first processor in /proc/cpuinfo; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor_name() -> str:
    """The processor's own name where Linux tells it, else what Python knows of it."""
    return first_processor().get("model name") or platform.processor() or platform.machine()
