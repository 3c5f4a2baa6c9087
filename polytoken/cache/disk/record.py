"""One stored record as a file: a safetensors file whose header carries the record's description and a checksum of all.

The checksum covers every byte of the file, header and arrays, so a file is either exactly what was written or refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

FORMAT: Final = "polytoken-state"
VERSION: Final = 1
KEY_BYTES: Final = 32
_OPENING: Final = b'{"__metadata__":{"format":"' + FORMAT.encode() + b'"'
_FIRST_READ: Final = 1 << 14  # holds most headers
_UNSIGNED: Final = "0" * 64  # stands in the checksum's place while it is taken
_ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class Fault(StrEnum):
    """Why a file is not used."""

    UNREADABLE = "unreadable"  # the system would not read it
    TRUNCATED = "truncated"  # it ends early
    FOREIGN = "foreign"  # it is no record of ours
    OTHER_VERSION = "other_version"  # a record in another version of the format
    CORRUPT = "corrupt"  # its bytes are not those that were written
    MISPLACED = "misplaced"  # an intact record, but not the one that its name promises


@dataclass(frozen=True)
class Space:
    """The records of one identity, which never meet those of another.

    Attributes:
        path: their folder, relative to the root.
        identity: plain JSON.
    """

    path: str
    identity: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Space:
        """The space of an identity."""
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return cls(f"v{VERSION}/{hashlib.sha256(text.encode()).hexdigest()[:32]}", json.loads(text))


class RecordFault(Exception):  # noqa: N818  (a verdict on a file, which no user meets)
    """A file was refused."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True)
class HostArray:
    """An array as it lies in memory and in the file.

    Attributes:
        dtype: in safetensors' spelling ("F32", "BF16", ...).
        shape: its dimensions; () and zeros are allowed.
        data: little-endian bytes, row-major, exactly as many as dtype and shape say.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __post_init__(self) -> None:
        if len(self.data) != array_bytes(self.dtype, self.shape):
            raise ValueError(f"{len(self.data)} bytes do not make an array of {self.dtype} {self.shape}")


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array. Raises KeyError for a dtype that is not stored."""
    return math.prod(shape) * _ITEM_BYTES[dtype]


@dataclass(frozen=True, eq=False)
class Record:
    """What is stored under one key. Immutable: another content has another key.

    Attributes:
        key: 32 bytes that name the content (identity, tokens, kind), of a cryptographic hash.
        parent: key of the record that this one continues, None for a first one.
        kind: what sort of record it is.
        meta: a JSON object: what a reader compares in full before it believes the key.
        arrays: by name.
        hint: for its file's name, see `FileName`; not part of what is stored.
    """

    key: bytes
    parent: bytes | None
    kind: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, HostArray] = field(default_factory=dict)
    hint: str = "record"

    def __post_init__(self) -> None:
        for key in (self.key, self.parent):
            if key is not None and len(key) != KEY_BYTES:
                raise ValueError(f"a record's key has {KEY_BYTES} bytes, not {len(key)}")

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(len(array.data) for array in self.arrays.values())


@dataclass(frozen=True, eq=False)
class Header:
    """What a file says about itself.

    Attributes:
        key, parent, kind, meta: as in `Record`.
        identity: of its space.
        nbytes: bytes of the arrays.
    """

    key: bytes
    parent: bytes | None
    kind: str
    identity: Mapping[str, Any]
    meta: Mapping[str, Any]
    nbytes: int


def encode(record: Record, space: Space) -> Iterator[memoryview | bytes]:
    """The bytes of a record's file, in pieces; the arrays are not copied."""
    extents: dict[str, Any] = {}
    at = 0
    for name, array in record.arrays.items():
        end = at + len(array.data)
        extents[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    about = {
        "key": record.key.hex(),
        "parent": None if record.parent is None else record.parent.hex(),
        "kind": record.kind,
        "identity": space.identity,
        "meta": record.meta,
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "sha256": _UNSIGNED,
        "record": json.dumps(about, sort_keys=True, allow_nan=False),
    }
    text = json.dumps({"__metadata__": metadata, **extents}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(header)
    for array in record.arrays.values():
        digest.update(array.data)
    yield header.replace(_UNSIGNED.encode(), digest.hexdigest().encode(), 1)
    for array in record.arrays.values():
        yield array.data


def decode(data: bytes, space: Space | None = None) -> Record:
    """The record in the bytes of a file; its arrays are views of `data`.

    Raises RecordFault: the bytes are not exactly a record that was written, or not one of `space`.
    """
    text, entries, metadata = _split(data)
    start = 8 + len(text)
    view = memoryview(data)
    try:
        end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end > len(data):
            raise RecordFault(Fault.TRUNCATED)
        _check_digest(view, start, metadata)
        # The checksum holds: all of it is what was written.
        header = _describe(entries, metadata)
        arrays = {
            name: HostArray(
                entry["dtype"], tuple(entry["shape"]), view[slice(*(start + n for n in entry["data_offsets"]))]
            )
            for name, entry in entries.items()
        }
    except (KeyError, TypeError, ValueError):
        raise RecordFault(Fault.CORRUPT) from None
    if space is not None and header.identity != space.identity:
        raise RecordFault(Fault.MISPLACED)
    return Record(header.key, header.parent, header.kind, header.meta, arrays)


def read_header(path: Path) -> Header | None:
    """What a file says about itself; None if there is none. Raises RecordFault, and OSError as the system does.

    Nothing but the file's length is verified: believe a record only after `decode`.
    """
    try:
        with open_file(path) as file:
            prefix = file.read(_FIRST_READ)
            missing = 8 + int.from_bytes(prefix[:8], "little") - len(prefix)
            size = os.fstat(file.fileno()).st_size
            if 0 < missing <= size:
                prefix += file.read(missing)
    except (FileNotFoundError, NotADirectoryError):
        return None
    text, entries, metadata = _split(prefix)
    try:
        header = _describe(entries, metadata)
    except (KeyError, TypeError, ValueError):
        raise RecordFault(Fault.CORRUPT) from None
    if size < 8 + len(text) + header.nbytes:
        raise RecordFault(Fault.TRUNCATED)
    return header


def open_file(path: Path) -> BinaryIO:
    """A file to read from. Raises OSError, also for what is no plain file: links, pipes and folders are not ours."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "no plain file", str(path))


def _describe(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> Header:
    """Raises KeyError, TypeError or ValueError for what is none."""
    about = json.loads(metadata["record"])
    return Header(
        key=bytes.fromhex(about["key"]),
        parent=None if about["parent"] is None else bytes.fromhex(about["parent"]),
        kind=about["kind"],
        identity=about["identity"],
        meta=about["meta"],
        nbytes=sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()),
    )


def _split(data: bytes) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """The header's bytes, its arrays and its metadata; whether it is a record of this version, and nothing else."""
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    if not text.startswith(_OPENING):
        raise RecordFault(Fault.TRUNCATED if len(text) < len(_OPENING) else Fault.FOREIGN)
    if len(text) < length:
        raise RecordFault(Fault.TRUNCATED)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        version = metadata["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RecordFault(Fault.CORRUPT) from None
    if version != str(VERSION):
        raise RecordFault(Fault.OTHER_VERSION)
    return text, entries, metadata


def _check_digest(view: memoryview, start: int, metadata: Mapping[str, str]) -> None:
    told, header = metadata["sha256"].encode(), bytes(view[:start])
    if len(told) != len(_UNSIGNED) or told not in header:
        raise RecordFault(Fault.CORRUPT)
    digest = hashlib.sha256(header.replace(told, _UNSIGNED.encode(), 1))
    digest.update(view[start:])
    if digest.hexdigest().encode() != told:
        raise RecordFault(Fault.CORRUPT)
