"""The bank's second tier: what it is told goes to the disk store, and what it asks for comes from there.

All on the thread that owns MLX; arrays are copied to host memory here, and the store's own thread does the writing. A
run that could not be taken, because too much was waiting, is offered again later as long as the bank still holds it.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple

from polytoken.cache.blocks import LayerBlock
from polytoken.cache.disk.answers import DiskPut
from polytoken.cache.disk.index import MARK, FileName
from polytoken.cache.disk.names import NAMES, SavedSession, name_record, read_name
from polytoken.cache.disk.pack import (
    RUN,
    mark_key,
    mark_record,
    merge_marks,
    parent_of,
    read_blocks,
    read_mark,
    row_starts,
    run_hint,
    run_record,
)
from polytoken.cache.disk.record import Header, Space
from polytoken.cache.disk.store import DiskStore
from polytoken.cache.identity import StateIdentity
from polytoken.cache.marks import Mark
from polytoken.cache.tier import Offer, SecondTier, SessionRecord, StoredRun
from polytoken.cache.tree import ID_BYTES, WHOLE, common_bytes, encode_ids

ANCHOR_TOKENS: Final = 2048
"""Of the restore points at the ends of chunks one in so many tokens is written; states are large, and chunks short."""
_REMEMBERED_HEADERS: Final = 1 << 13
_REMEMBERED_DEBTS: Final = 4096


class Known(NamedTuple):
    """What is remembered of a record's header.

    Attributes:
        key, kind, nbytes: as in the header.
        ids, sealed, starts: of a run: its ids, encoded, and where the rows of each layer begin.
    """

    key: bytes
    kind: str
    nbytes: int
    ids: bytes
    sealed: bool
    starts: tuple[int, ...]

    @classmethod
    def of(cls, header: Header) -> Known | None:
        """None for a header that makes no sense: it was not verified."""
        try:
            return cls._of(header)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    @classmethod
    def _of(cls, header: Header) -> Known:
        if header.kind != RUN:
            return cls(header.key, header.kind, header.nbytes, b"", False, ())
        meta = header.meta
        starts = tuple(row_starts(meta["blocks"]))
        return cls(header.key, RUN, header.nbytes, encode_ids(meta["ids"]), bool(meta["sealed"]), starts)


@dataclass(frozen=True, eq=False)
class _Debt:
    """A run that the bank was last known to hold, and may have dropped: nothing is kept alive by it."""

    run: StoredRun  # without blocks and marks
    blocks: tuple[weakref.ref[LayerBlock], ...]
    marks: tuple[weakref.ref[Mark], ...]

    @classmethod
    def of(cls, run: StoredRun) -> _Debt:
        return cls(
            replace(run, blocks=(), marks=()),
            tuple(map(weakref.ref, run.blocks)),
            tuple(map(weakref.ref, run.marks)),
        )

    def settle(self) -> StoredRun | None:
        """The run again, with the marks that are left; None if its rows are gone."""
        blocks = [block() for block in self.blocks]
        marks = [mark() for mark in self.marks]
        if any(block is None for block in blocks):
            return None
        return replace(
            self.run,
            blocks=tuple(block for block in blocks if block is not None),
            marks=tuple(mark for mark in marks if mark is not None),
        )


@dataclass(frozen=True, eq=False)
class DiskOffer:
    """A run that is on the disk, and its marks.

    Attributes:
        agreed: how many of the ids asked for it agrees with.
    """

    tier: DiskTier
    space: Space
    identity: StateIdentity
    parent: bytes
    name: FileName
    run: Known
    marks: tuple[tuple[FileName, Known], ...]
    agreed: int

    @property
    def digest(self) -> bytes:
        """The run's."""
        return self.run.key

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that `load` gives."""
        return self.run.nbytes + sum(mark.nbytes for _, mark in self.marks)

    def load(self) -> StoredRun | None:
        """The run, every byte of it verified; None if that fails. Marks that fail are left out."""
        return self.tier.load(self)


class DiskTier(SecondTier):
    """A disk store as the bank's second tier.

    Args:
        store: where records go.
        environment: what states depend on beside what their identity says (code, machine); plain JSON.
        label: the model's name, for people.
        checkpoint: hash of the weights; sessions of others are not this bank's.
    """

    def __init__(self, store: DiskStore, *, environment: Mapping[str, Any], label: str, checkpoint: str) -> None:
        self.store = store
        self._environment = dict(environment)
        self._label = label
        self._checkpoint = checkpoint
        self._spaces: dict[StateIdentity, Space] = {}
        self._at_work: set[str] = set()  # paths of the spaces that the bank's lookups and puts are made under
        self._known: OrderedDict[FileName, Known] = OrderedDict()
        self._debts: OrderedDict[bytes, _Debt] = OrderedDict()  # not written, or not all of it
        self._held: dict[bytes, _Debt] = {}  # what the bank holds
        self._dropped: Counter[str] = Counter()
        self._unwritten: dict[bytes, dict[int, weakref.ref[Mark]]] = {}  # restore points between anchors, by run

    def space(self, identity: StateIdentity) -> Space:
        """Where an identity's records are."""
        space = self._spaces.get(identity)
        if space is None:
            space = self._spaces[identity] = Space.of({**asdict(identity), **self._environment})
        return space

    # -- what the bank tells ------------------------------------------------------------------------------------------

    def stored(self, run: StoredRun) -> None:
        self._pay_debts()
        self._held[run.digest] = _Debt.of(run)
        self._offer(run)

    def dropped(self, run: StoredRun) -> None:
        self._pay_debts()
        self._held.pop(run.digest, None)
        self._unwritten.pop(run.digest, None)

    def forget(self, digests: Iterable[bytes]) -> None:
        names = []
        for digest in digests:
            self._debts.pop(digest, None)
            self._held.pop(digest, None)
            self._unwritten.pop(digest, None)
            for space in self._spaces.values():
                name = self.store.find(space, digest)
                if name is not None:
                    names.append(name)
                    self._known.pop(name, None)
        if names:
            self.store.remove(names)

    def remember_session(self, record: SessionRecord) -> None:
        self._pay_debts()
        self._offer_again(record.identity, record.ids)
        space, path = self.space(record.identity), self.path(record.identity, record.ids)
        for name in reversed(path):
            if self._write_last_mark(space, name):
                break
        self.store.put(NAMES, name_record(record, space=space, label=self._label, runs=path), replace=True)
        self.store.touch(list(reversed(path)))

    def forget_session(self, name: str, *, pinned: bool = False, states: bool = False) -> None:
        names = self._saved_names()
        gone = [each for each in names if (each[1].name, each[1].pinned) == (name, pinned)]
        own = {(each.space, key) for _, each in gone for key in each.runs}
        others = {(each.space, key) for file, each in names if (file, each) not in gone for key in each.runs}
        self.store.remove([file for file, _ in gone])
        if states:
            self.forget([bytes.fromhex(key) for _, key in own - others])

    # -- what the bank asks -------------------------------------------------------------------------------------------

    def find(self, identity: StateIdentity, parent: bytes, rest: bytes) -> Offer | None:
        self._pay_debts()
        space = self.space(identity)
        self._at_work.add(space.path)
        behind = None if parent == _root_digest(identity) else parent
        found: tuple[int, FileName, Known] | None = None
        for name in self._candidates(space, identity, parent, behind, rest):
            run = self._recall(space, name)
            if run is None or run.kind != RUN or run.ids[:ID_BYTES] != rest[:ID_BYTES]:
                continue
            if run.sealed and run.ids != rest:
                continue
            agreed = common_bytes(run.ids, rest)
            if found is None or agreed > found[0]:
                found = agreed, name, run
                if agreed in (len(rest), identity.grid * ID_BYTES):
                    break
        if found is None:
            return None
        agreed, name, run = found
        marks = tuple(self._marks(space, run.key))
        return DiskOffer(self, space, identity, parent, name, run, marks, agreed // ID_BYTES)

    def sessions(self) -> list[SessionRecord]:
        return self._saved_sessions()

    def statistics(self) -> Mapping[str, Any]:
        """The store's counters, what it was never offered among the dropped, the runs still to be offered, and the
        records in the folder that another model, program or machine made and that are of no use here.
        """
        counts = asdict(self.store.statistics())
        dropped = Counter(counts["dropped"]) + self._dropped
        others = self.store.count_outside({NAMES.path, *self._at_work})
        return {**counts, "dropped": dict(dropped), "behind": len(self._debts), "records_of_others": others}

    # -- for its own parts and the command line -----------------------------------------------------------------------

    def load(self, offer: DiskOffer) -> StoredRun | None:
        """What an offer promised."""
        record = self.store.get(offer.space, offer.name)
        if record is None or encode_ids(record.meta["ids"]) != offer.run.ids:
            self._known.pop(offer.name, None)
            return None
        blocks, start = read_blocks(record), int(record.meta["start"])
        marks = []
        for name, _ in offer.marks:
            read = self.store.get(offer.space, name)
            if read is not None:
                marks.append(read_mark(read))
        self.store.touch([*(name for name, _ in offer.marks), offer.name])
        ids = tuple(record.meta["ids"])
        return StoredRun(
            identity=offer.identity,
            parent=offer.parent,
            digest=record.key,
            start=start,
            stop=start + len(ids),
            ids=ids,
            sealed=record.meta["sealed"],
            blocks=blocks,
            marks=merge_marks(marks),
        )

    def path(self, identity: StateIdentity, ids: Sequence[int]) -> list[FileName]:
        """The runs on the disk that these ids begin with, from the first on, and the one that they end in."""
        space, key, width = self.space(identity), encode_ids(ids), identity.grid * ID_BYTES
        parent, behind, path, at = _root_digest(identity), None, [], 0
        while at < len(key):
            rest = key[at : at + width]  # no run is longer; slices of all that is left would cost its square
            name, length = self._next(space, identity, parent, behind, rest, ends=at + width >= len(key))
            if name is None:
                if at + width >= len(key):
                    path.extend(self._around(space, identity, parent, behind, rest))
                break
            path.append(name)
            parent = behind = bytes.fromhex(name.key)
            at += length
        return path

    def close(self, seconds: float = 5.0) -> int:
        """Offer what was left behind, write what waits, at most so long; how many records were given up."""
        deadline = time.monotonic() + seconds
        while self._debts and time.monotonic() < deadline and not self.store.statistics().read_only:
            before = len(self._debts)
            self._pay_debts()
            if len(self._debts) == before:
                self.store.flush(min(0.05, max(0.0, deadline - time.monotonic())))
        return self.store.close(max(0.0, deadline - time.monotonic()))

    def _next(
        self, space: Space, identity: StateIdentity, parent: bytes, behind: bytes | None, key: bytes, *, ends: bool
    ) -> tuple[FileName | None, int]:
        """The longest run that is here and that `key` begins with, and its bytes of `key`.

        `ends` says whether nothing comes behind `key`: a sealed run serves that alone.
        """
        best: FileName | None = None
        length = 0
        for name in self._candidates(space, identity, parent, behind, key):
            run = self._recall(space, name) if name in self.store else None
            if run is None or run.kind != RUN or len(run.ids) <= length:
                continue
            if key.startswith(run.ids) and (not run.sealed or (ends and run.ids == key)):
                best, length = name, len(run.ids)
                if length == identity.grid * ID_BYTES:
                    break
        return best, length

    def _around(
        self, space: Space, identity: StateIdentity, parent: bytes, behind: bytes | None, key: bytes
    ) -> list[FileName]:
        """A run that is here and begins with all of `key`, if there is one."""
        for name in self._candidates(space, identity, parent, behind, key):
            run = self._recall(space, name) if name in self.store else None
            if run is not None and run.kind == RUN and not run.sealed and run.ids.startswith(key):
                return [name]
        return []

    def _candidates(
        self, space: Space, identity: StateIdentity, parent: bytes, behind: bytes | None, rest: bytes
    ) -> Iterable[FileName]:
        """Names of runs that may continue `rest`: those whose digest can be told first, then all known children."""
        run, hint = rest[: identity.grid * ID_BYTES], run_hint(rest)  # no run is longer
        for key in (run, run + WHOLE):
            yield FileName.of(space.path, hashlib.sha256(parent + key).digest(), behind, hint)
        yield from self.store.children(space, behind, hint)

    def _recall(self, space: Space, name: FileName) -> Known | None:
        known = self._known.get(name)
        if known is None:
            header = self.store.describe(space, name)
            known = None if header is None else Known.of(header)
            if known is not None:
                self._known[name] = known
                if len(self._known) > _REMEMBERED_HEADERS:
                    self._known.popitem(last=False)
        return known

    def _marks(self, space: Space, digest: bytes) -> Iterable[tuple[FileName, Known]]:
        for name in self.store.children(space, digest, MARK):
            known = self._recall(space, name)
            if known is not None and known.kind == MARK:
                yield name, known

    def _offer(self, run: StoredRun) -> bool:
        """Give the store what it lacks of a run; whether it took all of it."""
        space = self.space(run.identity)
        self._at_work.add(space.path)
        outcome = self._offer_rows(space, run)
        if outcome is DiskPut.NO_PARENT and self._offer_above(space, run):
            outcome = self._offer_rows(space, run)
        for mark in run.marks:
            if outcome not in (DiskPut.QUEUED, DiskPut.PRESENT):
                break
            if _is_wanted(run, mark):
                outcome = self._offer_mark(space, run.digest, mark)
            else:
                self._unwritten.setdefault(run.digest, {})[mark.position] = weakref.ref(mark)
        if outcome is DiskPut.BUSY or (outcome is DiskPut.NO_PARENT and run.parent in self._debts):
            self._debts.setdefault(run.digest, _Debt.of(run))
            if len(self._debts) > _REMEMBERED_DEBTS:
                self._debts.popitem(last=False)
                self._dropped[DiskPut.BUSY] += 1
            return False
        if outcome not in (DiskPut.QUEUED, DiskPut.PRESENT):
            self._dropped[outcome] += 1
        return True

    def _offer_above(self, space: Space, run: StoredRun) -> bool:
        """Give the store what this run continues, where the bank still holds it; whether it took that."""
        chain: list[StoredRun] = []
        digest, start = run.parent, run.start
        while start > 0 and self.store.find(space, digest) is None:
            held = self._held.get(digest)
            above = None if held is None else held.settle()
            if above is None:
                return False
            chain.append(above)
            digest, start = above.parent, above.start
        return all(self._offer(above) for above in reversed(chain)) and self.store.find(space, run.parent) is not None

    def _offer_again(self, identity: StateIdentity, ids: Sequence[int]) -> None:
        """Give the store what it has lost, or never wrote, of the runs on this way that the bank holds."""
        space, parent = self.space(identity), _root_digest(identity)
        key, width = encode_ids(ids), identity.grid * ID_BYTES
        for at in range(0, len(key), width):
            parent = hashlib.sha256(parent + key[at : at + width]).digest()
            held = self._held.get(parent)
            if held is None:
                return
            if self.store.find(space, parent) is None:
                run = held.settle()
                if run is None or not self._offer(run):
                    return

    def _offer_rows(self, space: Space, run: StoredRun) -> DiskPut:
        name = FileName.of(space.path, run.digest, parent_of(run), run_hint(encode_ids(run.ids[:1])))
        nbytes = sum(block.nbytes for block in run.blocks)
        outcome = self.store.admits(name, nbytes)
        fuller = False
        if outcome is DiskPut.PRESENT:
            known = self._recall(space, name)
            fuller = known is not None and any(
                block.start < start for block, start in zip(run.blocks, known.starts, strict=False)
            )
        if outcome is DiskPut.QUEUED or fuller:
            self._known.pop(name, None)
            outcome = self.store.put(space, run_record(run), replace=fuller)
        return outcome

    def _offer_mark(self, space: Space, digest: bytes, mark: Mark) -> DiskPut:
        name = FileName.of(space.path, mark_key(digest, mark), digest, MARK)
        outcome = self.store.admits(name, mark.nbytes)
        return self.store.put(space, mark_record(digest, mark)) if outcome is DiskPut.QUEUED else outcome

    def _write_last_mark(self, space: Space, name: FileName) -> bool:
        """Write the last restore point of a run, if it has any; whether it has."""
        digest = bytes.fromhex(name.key)
        waiting = self._unwritten.pop(digest, {})
        for position in sorted(waiting, reverse=True):
            mark = waiting[position]()
            if mark is not None:
                self._offer_mark(space, digest, mark)
                return True
        return any(True for _ in self._marks(space, digest))

    def _pay_debts(self) -> None:
        """Offer again what was not taken, in the order in which it came, until that fails."""
        while self._debts:
            digest, debt = next(iter(self._debts.items()))
            run = debt.settle()
            if run is None:
                self._dropped[DiskPut.BUSY] += 1
            elif not self._offer(run):
                return
            self._debts.pop(digest, None)

    def _saved_names(self) -> list[tuple[FileName, SavedSession]]:
        """Everything in the folder that has a name, least recently written first."""
        records = [(name, self.store.get(NAMES, name)) for name in self.store.names(NAMES.path)]
        read = [(name, None if record is None else read_name(record.meta)) for name, record in records]
        return [(name, saved) for name, saved in read if saved is not None]

    def _saved_sessions(self) -> list[SessionRecord]:
        """The sessions and snapshots of this checkpoint in this environment, least recently written first."""
        found = []
        for _, saved in self._saved_names():
            if set(saved.identity) != _identity_members(self._environment):
                continue
            identity = StateIdentity(**{f.name: saved.identity[f.name] for f in fields(StateIdentity)})
            if saved.space == self.space(identity).path and identity.checkpoint == self._checkpoint:
                found.append(SessionRecord(name=saved.name, identity=identity, ids=saved.ids, pinned=saved.pinned))
        return found


def _is_wanted(run: StoredRun, mark: Mark) -> bool:
    """Whether a restore point is written at once: the ends of prompts and turns, and of chunks one in a while."""
    grid = run.identity.grid
    if mark.tail is not None or mark.position % grid:
        return True
    return mark.position // ANCHOR_TOKENS > (mark.position - grid) // ANCHOR_TOKENS


def _identity_members(environment: Mapping[str, Any]) -> set[str]:
    return {f.name for f in fields(StateIdentity)} | set(environment)


def _root_digest(identity: StateIdentity) -> bytes:
    return hashlib.sha256(repr(identity).encode()).digest()
