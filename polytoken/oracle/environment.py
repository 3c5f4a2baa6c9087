"""What a receipt says about where it was made: enough for a second person to make it again."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

from polytoken.host import MLX_PACKAGES, installed_versions, processor_name

_PACKAGES: Final = ("polytoken", *MLX_PACKAGES, "transformers", "torch", "tokenizers", "numpy", "mtplx")


def describe_environment() -> dict[str, Any]:
    """System, processor, power and thermal notes as the system gives them, and the versions that matter.

    `commit` is that of the source tree the package runs from, with a mark when files differ from it; None for an
    installed package.
    """
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "versions": installed_versions(_PACKAGES),
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "power": _read("/sys/class/power_supply/AC/online", {"0": "battery", "1": "mains"}),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "millidegrees": _read("/sys/class/thermal/thermal_zone0/temp"),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _commit(root: Path) -> str | None:
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


def _read(path: str, names: dict[str, str] | None = None) -> str | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return text if names is None else names.get(text)
