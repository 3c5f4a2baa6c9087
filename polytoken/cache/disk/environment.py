"""What the bits of a state depend on besides its identity, and what a process shares with nobody but its like.

In memory all states are made by one program on one machine. On the disk they may be another's: after an upgrade, on a
folder that machines share. Equal or not: what was made in another environment is a miss.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path
from typing import Final

import mlx.core as mx

from polytoken.host import MLX_PACKAGES, installed_versions

PACKAGES: Final = (*MLX_PACKAGES, "numpy")
_PACKAGE: Final = Path(__file__).parents[2]
_COMPUTING: Final = ("cache", "checkpoint", "kernels", "lanes", "models", "sampling", "backend.py")


def environment() -> dict[str, str]:
    """Digests of the code that computes, of the packages under it, and of the processors, by name."""
    return {"code": _code(_PACKAGE), "packages": _packages(), "machine": _machine()}


@functools.cache
def _code(package: Path) -> str:
    """SHA-256 over the sources and the compiled parts, as they were when first asked for: later ones are not loaded."""
    digest = hashlib.sha256()
    for top in _COMPUTING:
        root = package / top
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix in (".py", ".so"):
                digest.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _packages() -> str:
    return ", ".join(f"{package} {found}" for package, found in installed_versions(PACKAGES).items())


def _machine() -> str:
    """SHA-256 over what libraries choose their instructions by, and the GPU's name."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        first = info.read_text(errors="replace").split("\n\n")[0]
        lines = [
            line
            for line in first.splitlines()
            if line.partition("\t")[0].strip() in ("model name", "flags", "Features")
        ]
        facts.extend(lines)
    facts.append(str(mx.device_info().get("device_name", "")))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()
