"""The name of a checkpoint's weights that every engine can compute from the files alone."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_sha256(checkpoint: Path) -> str | None:
    """SHA-256 over the sorted names and SHA-256 digests of the folder's weight files; None where there are none."""
    files = sorted((*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.gguf")))
    if not files:
        return None
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
