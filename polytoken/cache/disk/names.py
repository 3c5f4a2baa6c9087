"""Named sessions on the disk: which stream of tokens a name stands for, and which runs hold its states."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from polytoken.cache.disk.index import NAMES as FOLDER
from polytoken.cache.disk.index import FileName
from polytoken.cache.disk.record import Record, Space

if TYPE_CHECKING:
    from polytoken.cache.tier import SessionRecord

NAMES: Final = Space(FOLDER, {"store": "sessions"})
SESSION: Final = "session"
SNAPSHOT: Final = "snapshot"


@dataclass(frozen=True)
class SavedSession:
    """A named session or snapshot as it was last saved.

    Attributes:
        name: the user's.
        label: the model's name.
        space: where the records of its states are.
        identity: what its states depend on.
        ids: its committed stream.
        runs: keys (hex) of the runs that were there for it, from the first on.
        pinned: whether it is a snapshot.
    """

    name: str
    label: str
    space: str
    identity: Mapping[str, Any]
    ids: tuple[int, ...]
    runs: tuple[str, ...]
    pinned: bool = False


def name_key(name: str, space: str, *, pinned: bool) -> bytes:
    """The key of a name's record: sessions' names and snapshots' each stand for one stream under each identity."""
    return hashlib.sha256(f"{SNAPSHOT + ' ' if pinned else ''}{space} {name}".encode()).digest()


def name_record(record: SessionRecord, *, space: Space, label: str, runs: Sequence[FileName]) -> Record:
    """The record that remembers a session or a snapshot."""
    meta = {
        "name": record.name,
        "label": label,
        "space": space.path,
        "identity": space.identity,
        "ids": list(record.ids),
        "runs": [run.key for run in runs],
        "pinned": record.pinned,
    }
    kind = SNAPSHOT if record.pinned else SESSION
    return Record(name_key(record.name, space.path, pinned=record.pinned), None, kind, meta, hint=kind)


def read_name(meta: Mapping[str, Any]) -> SavedSession | None:
    """A session from its record's meta; None if it is none."""
    try:
        return SavedSession(
            name=str(meta["name"]),
            label=str(meta["label"]),
            space=str(meta["space"]),
            identity=dict(meta["identity"]),
            ids=tuple(meta["ids"]),
            runs=tuple(meta["runs"]),
            pinned=bool(meta["pinned"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
