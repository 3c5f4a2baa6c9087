"""How much memory a load may take, from what the system itself says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(*, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without swapping; within a container's limit where there is one.

    Falls back to half the physical memory where the system does not say (macOS), since the rest is in use by others.
    """
    free = _from_meminfo(meminfo)
    if free is None:
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (ValueError, OSError, AttributeError):
            return sys.maxsize  # nothing is known, so nothing is refused
    room = _from_cgroup(cgroup)
    return free if room is None else min(free, room)


def _from_meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _from_cgroup(path: Path) -> int | None:
    try:
        limit = (path / "memory.max").read_text().strip()
        used = int((path / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
