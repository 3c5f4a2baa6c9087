"""What the disk tier answers: what a put did, and the totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class DiskPut(StrEnum):
    """What `DiskStore.put` did; all but the first two dropped the record."""

    QUEUED = "queued"
    PRESENT = "present"
    BUSY = "busy"  # the disk is behind by more than may wait
    OVERSIZE = "oversize"  # with what it continues it exceeds the whole limit, or alone what may wait
    NO_PARENT = "no_parent"  # what it continues is not here, so nobody could reach it
    READ_ONLY = "read_only"  # the folder cannot be written
    CLOSED = "closed"  # the store was closed before its turn came


@dataclass(frozen=True, kw_only=True)
class DiskStatistics:
    """Totals since the start, and what is held now.

    Attributes:
        reads: records read and verified; `read_bytes` of arrays.
        refused: files not used, by `Fault`.
        gone: records that were expected and had been deleted.
        writes: records written; `written_bytes` of arrays.
        dropped: records not written, by `DiskPut`.
        evictions: records deleted by this process to make room.
        records: records in the folder, as far as known here.
        pending_bytes: bytes that wait for the disk.
        nbytes, limit_bytes: bytes charged in the folder as of the last change made here, and the limit on them.
        read_only: why nothing is written any more, or "".
    """

    reads: int
    read_bytes: int
    refused: Mapping[str, int]
    gone: int
    writes: int
    written_bytes: int
    dropped: Mapping[str, int]
    evictions: int
    records: int
    pending_bytes: int
    nbytes: int
    limit_bytes: int
    read_only: str
