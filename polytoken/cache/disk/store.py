"""The disk tier's store: records in, records out, and a thread of its own that does all writing.

`put` takes host memory and returns at once; a bounded amount of it waits for the disk, and what does not fit in there
is dropped and counted, never waited for. `get` reads, checks every byte, and answers with the record or with nothing.
What goes wrong with the disk is told once, and then the store is read-only: an engine never fails over it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from polytoken.cache.disk.answers import DiskPut, DiskStatistics
from polytoken.cache.disk.folder import Folder, Stopped, explain, read_file
from polytoken.cache.disk.index import NAMES, FileName, charge
from polytoken.cache.disk.record import Fault, Header, Record, RecordFault, Space, decode, encode, read_header

PENDING_BYTES: Final = 256 << 20
"""Most bytes of records that wait for the disk, and live in memory for it."""
_HEADER_ROOM: Final = 1 << 12  # more than a header takes besides names and meta

Warn = Callable[[str], None]


class DiskStore:
    """Records in a folder that other processes share.

    Args:
        root: the folder, made if missing.
        limit_bytes: most bytes of all files in the folder, whoever wrote them.
        pending_bytes: most bytes that may wait for the disk.
        warn: told, once, in one line, why nothing is written any more; called on any thread.

    One thread calls it, and `close` at the end; `statistics` may be called by any.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int,
        pending_bytes: int = PENDING_BYTES,
        warn: Warn = lambda text: None,
    ) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.pending_limit = pending_bytes
        self._warn = warn
        self._folder = Folder(root)
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._read_only = ""
        self._change = threading.Condition()  # guards what follows
        self._stored: dict[FileName, None] = {}
        self._short: dict[tuple[str, str], FileName] = {}  # stored or pending, by the first digits of the key
        self._children: dict[tuple[str, str], set[FileName]] = {}  # of those
        self._bad: set[FileName] = set()
        self._doomed: Counter[FileName] = Counter()  # removals that wait for their turn, by what goes with them
        self._pending: dict[FileName, tuple[Record, Space]] = {}
        self._pending_bytes = 0
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = False  # the writer is at work
        self._closing = False
        self._abandon = False
        self._open()
        self._writer = threading.Thread(target=self._work, name="polytoken-disk", daemon=True)
        self._writer.start()

    # -- for the caller's thread ------------------------------------------------------------------------------------

    def __contains__(self, name: FileName) -> bool:
        """Whether a record is here, as far as is known without asking the disk."""
        return name in self._pending or name in self._stored

    def admits(self, name: FileName, nbytes: int) -> DiskPut:
        """What `put` would do with a record of `nbytes` of arrays, so that nobody copies arrays in vain."""
        with self._change:
            return self._admit(name, nbytes)

    def put(self, space: Space, record: Record, *, replace: bool = False) -> DiskPut:
        """Leave a record to be written. Its arrays must not change any more.

        QUEUED is a promise to try; the record counts as present from now on. With `replace` it takes the place of
        one of the same key.
        """
        name = FileName.of(space.path, record.key, record.parent, record.hint)
        with self._change:
            outcome = self._count(self._admit(name, record.nbytes, replace=replace))
            if outcome is DiskPut.QUEUED:
                self._forget_pending(name)
                self._pending[name] = record, space
                self._pending_bytes += record.nbytes
                self._list(name)
                self._order(lambda: self._write(name))
        return outcome

    def get(self, space: Space, name: FileName) -> Record | None:
        """The record, verified to the last byte, or None: it is not there, or its file was refused, which is counted.

        A refused file is deleted in the background, so that a good one can take its place.
        """
        with self._change:
            pending = self._pending.get(name)
            if pending is not None:
                return pending[0]
            if name in self._bad:
                return None
        try:
            data = read_file(self.root / name.path)
            if data is None:
                self._miss(name)
                return None
            record = decode(data, space)
            if FileName.of(space.path, record.key, record.parent, name.hint) != name:
                raise RecordFault(Fault.MISPLACED)
        except (OSError, RecordFault) as refused:
            self._refuse(space, name, refused.fault if isinstance(refused, RecordFault) else Fault.UNREADABLE)
            return None
        self._counts["reads"] += 1
        self._counts["read_bytes"] += record.nbytes
        return record

    def describe(self, space: Space, name: FileName) -> Header | None:
        """What a record's file says about itself, unverified, read without its arrays; None as for `get`."""
        with self._change:
            pending = self._pending.get(name)
            if pending is not None:
                record = pending[0]
                return Header(record.key, record.parent, record.kind, space.identity, record.meta, record.nbytes)
            if name in self._bad:
                return None
        try:
            header = read_header(self.root / name.path)
        except (OSError, RecordFault) as refused:
            self._refuse(space, name, refused.fault if isinstance(refused, RecordFault) else Fault.UNREADABLE)
            return None
        if header is None:
            self._miss(name)
        return header

    def find(self, space: Space, key: bytes) -> FileName | None:
        """The record of a key, if it is known to be here."""
        with self._change:
            name = self._short.get((space.path, key.hex()[:16]))
        return name if name is not None and name.key == key.hex() else None

    def children(self, space: Space, parent: bytes | None, hint: str) -> list[FileName]:
        """The records with this hint that are known to continue one, or to begin, in no order."""
        family = FileName.of(space.path, b"", parent, hint)
        with self._change:
            found = self._children.get((family.space, family.parent), ())
            return [name for name in found if name.hint == hint]

    def names(self, space: str) -> list[FileName]:
        """The records known in one folder of records, least recently written first."""
        with self._change:
            return [name for name in {**self._stored, **dict.fromkeys(self._pending)} if name.space == space]

    def count_outside(self, spaces: Collection[str]) -> int:
        """The records on the disk in other folders of records than these, as far as known here."""
        with self._change:
            return sum(name.space not in spaces for name in self._stored)

    def touch(self, names: Sequence[FileName]) -> None:
        """Make records the most recently used, in this order. Done in the background."""
        if names and not self._read_only:
            with self._change:
                self._order(lambda: self._folder.touch(names))

    def remove(self, names: Sequence[FileName]) -> None:
        """Delete records and all that continues them. They are gone at once for the caller, and soon for others."""
        with self._change:
            todo, gone = list(names), []
            while todo:
                name = todo.pop()
                gone.append(name)
                self._forget_pending(name)
                self._unlist(name)
                todo.extend(self._children.get((name.space, name.key[:16]), ()))
            self._doomed.update(gone)
            self._order(lambda: self._remove(names, gone))

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, at most so long; whether it is."""
        with self._change:
            return self._change.wait_for(lambda: not self._jobs and not self._busy, timeout=max(0.0, seconds))

    def close(self, seconds: float = 5.0) -> int:
        """Write what waits, at most so long, and end the thread; how many records were given up.

        A file in the middle of being written after that time is given up too, and leaves nothing behind. May be called
        again.
        """
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._writer.join(max(0.0, seconds))
        with self._change:
            self._abandon = True
            lost = self._give_up(DiskPut.CLOSED)
        self._writer.join(1.0)  # one piece of a file, or one call to the disk
        return lost

    def statistics(self) -> DiskStatistics:
        """The counters now."""
        with self._change:
            return DiskStatistics(
                **{
                    name: self._counts[name]
                    for name in ("reads", "read_bytes", "gone", "writes", "written_bytes", "evictions")
                },
                refused=_plain(self._refused),
                dropped=_plain(self._dropped),
                records=len(self._stored),
                pending_bytes=self._pending_bytes,
                nbytes=self._folder.index.charged,
                limit_bytes=self.limit_bytes,
                read_only=self._read_only,
            )

    # -- with the condition held ------------------------------------------------------------------------------------

    def _admit(self, name: FileName, nbytes: int, *, replace: bool = False) -> DiskPut:
        if self._closing:
            return DiskPut.CLOSED
        if name in self and not replace:
            return DiskPut.PRESENT
        if self._read_only:
            return DiskPut.READ_ONLY
        if name.parent != "root" and (name.space, name.parent) not in self._short:
            return DiskPut.NO_PARENT
        if charge(nbytes + _HEADER_ROOM) > self.limit_bytes or nbytes > self.pending_limit:
            return DiskPut.OVERSIZE
        return DiskPut.QUEUED if self._pending_bytes + nbytes <= self.pending_limit else DiskPut.BUSY

    def _count(self, outcome: DiskPut) -> DiskPut:
        if outcome not in (DiskPut.QUEUED, DiskPut.PRESENT):
            self._dropped[outcome] += 1
        return outcome

    def _order(self, job: Callable[[], None]) -> None:
        if not self._closing and not self._read_only:
            self._jobs.append(job)
            self._change.notify_all()

    def _forget_pending(self, name: FileName) -> Record | None:
        found = self._pending.pop(name, None)
        if found is None:
            return None
        self._pending_bytes -= found[0].nbytes
        if name not in self._stored:
            self._unlist(name)
        return found[0]

    def _list(self, name: FileName) -> None:
        self._short[name.space, name.key[:16]] = name
        self._children.setdefault((name.space, name.parent), set()).add(name)

    def _unlist(self, name: FileName) -> None:
        """Forget where a record is that is neither stored nor pending."""
        self._stored.pop(name, None)
        if name in self._pending:
            return
        self._short.pop((name.space, name.key[:16]), None)
        family = self._children.get((name.space, name.parent), set())
        family.discard(name)
        if not family:
            self._children.pop((name.space, name.parent), None)

    def _look(self) -> None:
        """Note which records the index holds."""
        out = self._bad | self._doomed.keys()
        self._stored = {name: None for name, _ in self._folder.index.items() if name not in out}
        self._short.clear()
        self._children.clear()
        for name in [*self._stored, *self._pending]:
            self._list(name)

    def _give_up(self, reason: DiskPut) -> int:
        """Let go of what waits; how many records."""
        lost = len(self._pending)
        if lost:
            self._dropped[reason] += lost
        for name in list(self._pending):
            self._forget_pending(name)
        self._jobs.clear()
        return lost

    # -- on either thread -------------------------------------------------------------------------------------------

    def _miss(self, name: FileName) -> None:
        with self._change:
            if name in self._stored:
                self._counts["gone"] += 1
                self._unlist(name)

    def _refuse(self, space: Space, name: FileName, fault: Fault) -> None:
        with self._change:
            self._refused[fault] += 1
            self._bad.add(name)
            self._unlist(name)
            # Records of other versions have folders of their own. Names have one: those of a newer program stay.
            if fault is not Fault.OTHER_VERSION or space.path != NAMES:
                self._order(lambda: self._discard(space, name))

    def _stop_writing(self, error: Exception) -> None:
        with self._change:
            self._read_only = explain(error)
            self._give_up(DiskPut.READ_ONLY)
        self._warn(f"{self.root}: {self._read_only}; nothing is saved there from now on, what is there is still used")

    def _open(self) -> None:
        """Find out what is there, and whether it can be written."""
        try:
            with self._folder.locked(lambda: True):
                pass
        except Stopped:  # held by another, so it can be written
            pass
        except OSError as error:
            self._stop_writing(error)
        with contextlib.suppress(OSError):
            self._folder.refresh()
        with self._change:
            self._look()
            self._order(self._shrink)

    # -- on the writer's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except Stopped:
                continue
            except Exception as error:  # of the system, or a defect: either costs the disk tier, and nothing else
                self._stop_writing(error)

    def _write(self, name: FileName) -> None:
        with self._change:
            # What was put again after a removal waits for that, lest it goes, too.
            waiting = None if name in self._doomed else self._pending.get(name)
        if waiting is None:
            return  # removed meanwhile, or written in the place of an older one
        record, space = waiting
        pieces = list(encode(record, space))
        size = sum(len(piece) for piece in pieces)
        outcome = DiskPut.READ_ONLY  # unless it ends otherwise
        try:
            with self._held():
                outcome = self._write_there(name, pieces, size)
        except Stopped:
            outcome = DiskPut.CLOSED
            raise
        finally:
            with self._change:
                self._settle(name, waiting, outcome)

    def _settle(self, name: FileName, waiting: tuple[Record, Space], outcome: DiskPut) -> None:
        """Note what became of a record that was waiting; if it was replaced or given up meanwhile, that was counted."""
        current = self._pending.get(name) is waiting
        if outcome is DiskPut.QUEUED:
            self._bad.discard(name)
            if name not in self._doomed:  # removed while it was written: the file goes when its turn comes
                self._stored[name] = None
                self._list(name)
            self._counts["writes"] += 1
            self._counts["written_bytes"] += waiting[0].nbytes
        elif current:
            self._count(outcome)
        if current:
            self._forget_pending(name)

    def _write_there(self, name: FileName, pieces: list[memoryview | bytes], size: int) -> DiskPut:
        index = self._folder.index
        if name.parent != "root" and index.parent(name) is None:
            return DiskPut.NO_PARENT  # never written, or gone meanwhile: nobody could reach what continues it
        with self._change:
            waiting = list(self._pending)
        dropped = self._folder.make_room(size, self.limit_bytes, keep=name, waiting=waiting)
        if dropped is None:
            return DiskPut.OVERSIZE
        self._note_evicted(dropped)
        self._folder.write(name, pieces, size, stop=self._is_abandoned)
        return DiskPut.QUEUED

    def _discard(self, space: Space, name: FileName) -> None:
        """Delete a file that was refused, unless a good one has taken its place. What is no file stays."""
        with self._held():
            try:
                data = read_file(self.root / name.path)
                if data is not None:
                    decode(data, space)
            except (OSError, RecordFault):
                self._folder.remove(name)
        with self._change:
            self._bad.discard(name)

    def _remove(self, names: Iterable[FileName], doomed: Iterable[FileName]) -> None:
        with self._held():
            gone = [each for name in names for each in self._folder.remove_tree(name)]
        with self._change:
            for each in gone:  # what another process had written behind them
                self._unlist(each)
            self._doomed -= Counter(doomed)

    def _shrink(self) -> None:
        """Keep to a limit that is lower than the one the folder was filled under."""
        if self._folder.index.charged > self.limit_bytes:
            with self._held():
                self._note_evicted(self._folder.make_room(0, self.limit_bytes) or [])

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        with self._folder.locked(self._is_abandoned) as stale:
            if stale:
                with self._change:
                    self._look()
            yield

    def _note_evicted(self, names: list[FileName]) -> None:
        with self._change:
            self._counts["evictions"] += len(names)
            for name in names:
                self._unlist(name)

    def _is_abandoned(self) -> bool:
        return self._abandon


def _plain(counts: Counter[str]) -> dict[str, Any]:
    return {str(reason): number for reason, number in counts.items() if number}
