"""Made-up records whose every byte follows from their number, so that a wrong one shows at once."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from polytoken.cache.disk.index import FileName, charge, our_files
from polytoken.cache.disk.record import HostArray, Record, Space

SPACE = Space.of({"checkpoint": "c0ffee", "grid": 64})


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()


def content(number: int, size: int) -> bytes:
    block = hashlib.sha512(f"content {number}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def make_record(number: int, *, parent: int | None = None, size: int = 10_000) -> Record:
    """A record of one byte array and one float array of no elements."""
    arrays = {
        "rows": HostArray("U8", (size,), content(number, size)),
        "none": HostArray("F32", (1, 0, 3), b""),
    }
    behind = None if parent is None else key_of(parent)
    return Record(key_of(number), behind, "run", {"number": number, "ids": [number, 2**40]}, arrays, "h")


def name_of(number: int, *, parent: int | None = None, space: Space = SPACE) -> FileName:
    return FileName.of(space.path, key_of(number), None if parent is None else key_of(parent), "h")


def is_intact(record: Record, number: int) -> bool:
    """Whether a record is the one that `make_record` made, whatever its size."""
    rows = record.arrays["rows"]
    return (
        record.key == key_of(number)
        and record.meta["number"] == number
        and bytes(rows.data) == content(number, rows.shape[0])
        and record.arrays["none"].shape == (1, 0, 3)
    )


def folder_bytes(root: Path) -> int:
    """Bytes of all files of a session folder as a disk counts them, at one moment.

    A listing takes a while, in which files may go and others come; only two equal ones in a row are a moment.
    """
    before = None
    while True:
        now = _list_sizes(root)
        if now == before:
            return sum(now.values())
        before = now


def _list_sizes(root: Path) -> dict[str, int]:
    sizes = {}
    for _, entry in our_files(root):
        with contextlib.suppress(FileNotFoundError):
            sizes[entry.path] = charge(entry.stat(follow_symlinks=False).st_size)
    return sizes


def all_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())
