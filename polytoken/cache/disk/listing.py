"""What a session folder holds, for people: read from its files as they are, whoever is using it. Needs no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polytoken.cache.disk.folder import Folder, read_file
from polytoken.cache.disk.index import MARK, FileName, Index, Item, scan
from polytoken.cache.disk.names import NAMES, SESSION, SNAPSHOT, SavedSession, read_name
from polytoken.cache.disk.record import Fault, Header, RecordFault, decode, read_header


@dataclass(frozen=True, kw_only=True)
class SessionReport:
    """One named session or snapshot.

    Attributes:
        name: the user's.
        kind: `session` or `snapshot`.
        model: the model's name.
        tokens: length of its committed stream.
        stored_tokens: of them, how many the records on the disk go on from the beginning; the rest is computed again.
        bytes: on the disk for its states; `shared_bytes` of them serve other sessions, too.
        used: when it was last used, seconds since the epoch.
        identity: what its states depend on; another model, another program or another machine has others.
    """

    name: str
    kind: str
    model: str
    tokens: int
    stored_tokens: int
    bytes: int
    shared_bytes: int
    used: float
    identity: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """A session folder.

    Attributes:
        sessions: named ones, the most recently used first.
        bytes: of all files, in whole blocks.
        records: files of states.
        unnamed_bytes: of records that belong to no named session: prompts of others, and of sessions since cleared.
        damaged: names' files that could not be read.
        of_other_versions: names' files that a program with another format wrote.
    """

    sessions: tuple[SessionReport, ...]
    bytes: int
    records: int
    unnamed_bytes: int
    damaged: int
    of_other_versions: int

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "sessions": [session.as_json() for session in self.sessions]}


@dataclass(frozen=True)
class _Named:
    """A session's own file, what it says, and the records of its states that are there."""

    file: FileName
    item: Item
    saved: SavedSession
    runs: tuple[FileName, ...]
    records: frozenset[FileName]


def read_folder(root: Path) -> FolderReport:
    """What is in a session folder now. Raises OSError if it cannot be read."""
    index = scan(root)
    named, unread = _read_names(root, index)
    sizes = {name: item.charged for name, item in index.items()}
    holders: dict[FileName, int] = {}
    for each in named:
        for record in each.records:
            holders[record] = holders.get(record, 0) + 1
    reports = [
        SessionReport(
            name=each.saved.name,
            kind=SNAPSHOT if each.saved.pinned else SESSION,
            model=each.saved.label,
            tokens=len(each.saved.ids),
            stored_tokens=min(len(each.saved.ids), _reach(root, each.runs)),
            bytes=sum(sizes[record] for record in each.records),
            shared_bytes=sum(sizes[record] for record in each.records if holders[record] > 1),
            used=each.item.used / 1e9,
            identity=each.saved.identity,
        )
        for each in named
    ]
    states = [name for name in sizes if name.space != NAMES.path]
    return FolderReport(
        sessions=tuple(sorted(reports, key=lambda report: -report.used)),
        bytes=index.charged,
        records=len(states),
        unnamed_bytes=sum(sizes[name] for name in states if name not in holders),
        damaged=len(unread) - unread.count(Fault.OTHER_VERSION),
        of_other_versions=unread.count(Fault.OTHER_VERSION),
    )


def clear_sessions(root: Path, names: set[str] | None) -> tuple[int, int]:
    """Delete named sessions and snapshots (None: everything, states without a name among them) for good.

    What other sessions stand on stays. Returns the sessions and the bytes that went. A process that is using the folder
    goes on, and may store anew what it still holds. Raises OSError.
    """
    folder = Folder(root)
    with folder.locked():
        before = folder.index.charged
        named, _ = _read_names(root, folder.index)
        if names is None:
            cleared = len(named)
            for name, _ in folder.index.items():
                folder.remove(name)
        else:
            gone = [each for each in named if each.saved.name in names]
            kept = {record for each in named if each.saved.name not in names for record in each.records}
            cleared = len(gone)
            for each in gone:
                folder.remove(each.file)
                for record in each.records - kept:
                    folder.remove_tree(record)
        return cleared, before - folder.index.charged


def _read_names(root: Path, index: Index) -> tuple[list[_Named], list[Fault]]:
    """The named sessions, and what is wrong with the files of others."""
    found: list[_Named] = []
    unread: list[Fault] = []
    runs_of = {(name.space, name.key): name for name, _ in index.items()}
    for name, item in index.items():
        if name.space != NAMES.path:
            continue
        try:
            saved = _read_name(root, name)
        except RecordFault as refused:
            unread.append(refused.fault)
            continue
        runs = []
        for key in saved.runs:
            run = runs_of.get((saved.space, key))
            if run is None:
                break
            runs.append(run)
        marks = [child for run in runs for child in index.continuing(run) if child.hint == MARK]
        found.append(_Named(name, item, saved, tuple(runs), frozenset([*runs, *marks])))
    return found, unread


def _read_name(root: Path, name: FileName) -> SavedSession:
    """A named session's own file. Raises RecordFault."""
    try:
        data = read_file(root / name.path)
    except OSError:
        data = None
    if data is None:
        raise RecordFault(Fault.UNREADABLE)
    saved = read_name(decode(data, NAMES).meta)
    if saved is None:
        raise RecordFault(Fault.FOREIGN)
    return saved


def _reach(root: Path, runs: tuple[FileName, ...]) -> int:
    """Tokens up to the end of the last run."""
    header = _header(root, runs[-1]) if runs else None
    return 0 if header is None else int(header.meta["start"]) + len(header.meta["ids"])


def _header(root: Path, name: FileName) -> Header | None:
    try:
        return read_header(root / name.path)
    except (OSError, RecordFault):
        return None
