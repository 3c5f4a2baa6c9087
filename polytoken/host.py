"""What this host is, what runs on it and since when: facts that reports and receipts state, read without MLX."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
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


def now_utc() -> str:
    """Date and minute, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")


def command_line() -> list[str]:
    """How this process was called, so that somebody else can call it so: the program's name, then its arguments."""
    program = Path(sys.argv[0] or "python")
    return ["polytoken" if program.name == "__main__.py" else program.name, *sys.argv[1:]]


def source_commit() -> str | None:
    """The commit of the source tree the package runs from, marked when its files differ; None for an installed one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return f"{head} (changed)" if _git(root, "status", "--porcelain", "--", "polytoken") else head
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
