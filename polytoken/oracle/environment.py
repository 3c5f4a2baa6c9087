"""What a receipt says about where it was made: enough for a second person to make it again."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

from polytoken.host import (
    MLX_PACKAGES,
    command_line,
    installed_versions,
    now_utc,
    processor_name,
    source_commit,
)

_PACKAGES: Final = ("polytoken", *MLX_PACKAGES, "transformers", "torch", "tokenizers", "numpy", "mtplx")


def describe_environment() -> dict[str, Any]:
    """Date, command, system, processor, power and thermal notes as the system gives them, versions, commit."""
    return {
        "date": now_utc(),
        "command": command_line(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "versions": installed_versions(_PACKAGES),
        "commit": source_commit(),
        "power": _read("/sys/class/power_supply/AC/online", {"0": "battery", "1": "mains"}),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "millidegrees": _read("/sys/class/thermal/thermal_zone0/temp"),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _read(path: str, names: dict[str, str] | None = None) -> str | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return text if names is None else names.get(text)
