"""The state bank: prompts that share a beginning pay for it once.

Keys are token prefixes, compared in full. Under a free identity a state is gone on from wherever it ends; otherwise at
multiples of the chunk grid, and at whole prompts for an equal prompt alone. Either way a warm prompt gets the bits that
a cold one gets: a hit changes the speed and nothing of the output. Whatever is not restored has a stated reason.

Only the thread that owns MLX may call a bank.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from polytoken.cache.answers import BankStatistics, Entry, Found, Miss, MissReason, PutOutcome
from polytoken.cache.below import Below
from polytoken.cache.identity import StateIdentity
from polytoken.cache.live import LiveState, LiveStates
from polytoken.cache.lookup import Spot, best_spot, explain, join_spot
from polytoken.cache.marks import Mark
from polytoken.cache.room import Room
from polytoken.cache.runs import cut_runs, make_chain, make_mark
from polytoken.cache.sessions import Committed, Session, SessionBook
from polytoken.cache.state import DecodingState
from polytoken.cache.tail import Tail
from polytoken.cache.tier import SecondTier
from polytoken.cache.tree import ID_BYTES, WHOLE, Node, PrefixTree, encode_ids, name_run
from polytoken.errors import CacheError

__all__ = [
    "BankStatistics",
    "Entry",
    "Found",
    "Miss",
    "MissReason",
    "PutOutcome",
    "StateBank",
    "Tail",
]

REMEMBERED_LOSSES = 4096
"""How many evicted or refused runs are remembered by digest, so that a later miss can say so."""

MOST_HEADS = 3
"""How many branches of its own a session keeps, the newest ones."""


class StateBank:
    """A store of decoding states by token prefix, within a limit of bytes.

    Args:
        limit_bytes: bound on the exact sum of bytes of all arrays held, at every instant; 0 turns the bank off.
        identity: what lookups and puts are made under unless they name another: states of different identities never
            meet.
        session_limit_bytes: bound on what one session may hold, None for the whole limit.
        mark_bytes: bound on the restore points of one sequence, None for half the limit.
        sessions: who is who; None for a fresh book.
        tier: a second store below this one.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        identity: StateIdentity,
        session_limit_bytes: int | None = None,
        mark_bytes: int | None = None,
        sessions: SessionBook | None = None,
        tier: SecondTier | None = None,
    ) -> None:
        self.identity = identity
        self.sessions = SessionBook() if sessions is None else sessions
        self._tree = PrefixTree()
        self._live = LiveStates()
        self._below = Below(self._tree, tier)
        self._room = Room(
            self._tree,
            self._live,
            self.sessions,
            limit_bytes=limit_bytes,
            session_limit_bytes=limit_bytes if session_limit_bytes is None else session_limit_bytes,
            mark_bytes=limit_bytes // 2 if mark_bytes is None else mark_bytes,
            on_eviction=self._tell_eviction,
        )
        self._lost: OrderedDict[bytes, MissReason] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._partial: Counter[str] = Counter()
        for record in self._below.sessions():
            known = self.sessions.add_snapshot(record.name) if record.pinned else self.sessions.use(record.name)
            known.committed = Committed(record.identity, record.ids)  # where it stands is found when it is wanted

    def __len__(self) -> int:
        return len(self._tree)

    def __bool__(self) -> bool:
        return True  # an empty bank is still a bank

    @property
    def nbytes(self) -> int:
        """Exact bytes of all arrays held."""
        return self._room.nbytes

    @property
    def limit_bytes(self) -> int:
        """Bound on `nbytes`."""
        return self._room.limit_bytes

    # -- looking up ------------------------------------------------------------------------------------------------

    def find(
        self,
        ids: Sequence[int],
        *,
        need_tail: bool = True,
        identity: StateIdentity | None = None,
        session: str | None = None,
    ) -> Found:
        """The longest stored prefix of `ids` to go on from, which becomes the most recently used.

        With `need_tail` (a lane that samples from the last row) a whole prompt counts only if its tail is stored;
        otherwise a state before its end is found, from which its last row is computed again. Naming a session may give
        the state that this session left, which then belongs to the caller.
        """
        if not ids:
            return Found(0)
        identity = identity or self.identity
        key = encode_ids(ids)
        node = self._descend(identity, key)
        spot = best_spot(identity, node, key, need_tail=need_tail)
        live = self._take_live(session, identity, key, spot=spot, last=len(ids) - need_tail)
        self._tree.touch(spot.node)
        length = spot.position if live is None else live.length
        miss = None
        if length < len(ids):
            miss = self._explain(identity, key, node=node, usable=length)
        if live is not None:
            return self._count(Found(length, None, None, miss, live))
        if length == 0:
            return self._count(Found(0, None, None, miss))
        mark = spot.node.marks.get(length)
        tail = mark.tail if mark is not None and length == len(ids) else None
        self._counts["near_hits"] += length < spot.node.stop
        return self._count(Found(length, join_spot(spot), tail and tail.view(), miss))

    def locate(self, ids: Sequence[int], *, identity: StateIdentity | None = None) -> Spot:
        """The deepest place of `ids` that could be restored; nothing counts as used."""
        identity, key = identity or self.identity, encode_ids(ids)
        return best_spot(identity, self._tree.walk(identity, key), key, need_tail=False)

    # -- storing ---------------------------------------------------------------------------------------------------

    def put(
        self,
        ids: Sequence[int],
        state: DecodingState,
        *,
        tail: Tail | None = None,
        identity: StateIdentity | None = None,
        session: str | None = None,
    ) -> PutOutcome:
        """Store the state after exactly `ids`.

        Where states are gone on from at the grid alone, it is sealed as a whole prompt if `tail` is given or the ids
        end between grid points. Copies are compact and evaluated here, so nothing done later to `state` reaches them.
        What is present stays as it is and as old as it is. A state that would not fit a limit beside nothing else is
        refused, and nobody is evicted for it; otherwise room is made, and only then is it copied.
        Raises CacheError when `state` is not at `len(ids)` or its layers are not those stored before it.
        """
        if self.limit_bytes <= 0:
            return PutOutcome.BANK_OFF
        if not ids or state.offset != len(ids):
            raise CacheError(f"a state of {state.offset} tokens was offered for a key of {len(ids)}")
        identity = identity or self.identity
        key = encode_ids(ids)
        node = self._tree.walk(identity, key)
        if node.blocks and [(b.kind, b.window) for b in node.blocks] != [(x.kind, x.window) for x in state.layers]:
            raise CacheError("a state was offered whose layers differ from those stored under the same identity")
        outcome, stored = (self._put_free if identity.free else self._put_on_grid)(
            identity, node, key, state, tail=tail, session=session
        )
        if stored is not None:
            if session is None:
                for each in stored.path():
                    each.shared = True
            else:
                self._stand_on(session, Spot(stored, len(ids)))
            self._counts["thinned"] += self._room.thin(stored, newest=len(ids))
        return outcome

    def commit(self, session: str, ids: Sequence[int]) -> None:
        """A turn of the session has ended, and its prompt and answer are these; states may be stored for them or not.

        Followed by `save` when they are.
        """
        self.sessions.commit(session, Committed(self.identity, tuple(ids)))

    def save(self, name: str, *, pinned: bool = False) -> None:
        """Let the store below know what the session (or snapshot) has committed."""
        self._below.save(self.sessions.snapshots.get(name) if pinned else self.sessions.get(name))

    def keep_live(self, session: str, ids: Sequence[int], state: DecodingState, *, owner: Any = None) -> bool:
        """Keep a session's own state ready for its next turn, if it fits; the caller lets go of it.

        It goes before anything else when room is needed, and room for it is made only among other live states and what
        no session has used lately.
        """
        live = LiveState(self.identity, encode_ids(ids), state, owner)
        self._live.take(session)
        at = self.locate(ids).node
        fits = live.nbytes + sum(node.nbytes for node in at.path()) <= self._room.session_limit_bytes
        if not fits or not self._room.make(at, live.nbytes, gently=True):
            return False
        self._live.put(session, live)
        return True

    def clear(self, session: str | None = None) -> int:
        """Forget everything stored, or what a session stored and nobody else did; the number of runs dropped."""
        if session is not None:
            self._live.take(session)
            known = self.sessions.remove(session)
            return 0 if known is None else self.forget(known)
        dropped = len(self._tree)
        self._below.forget([node.digest for node in self._tree])
        for each in (*self.sessions, *self.sessions.snapshots.values()):
            self._below.forget_session(each)
        self._tree.clear()
        self._live.clear()
        self._lost.clear()
        self.sessions.clear()
        return dropped

    def forget(self, session: Session) -> int:
        """Drop what a session or snapshot, which is out of the book, alone had kept; the number of runs dropped."""
        self._below.forget_session(session)
        return self.release(session.heads)

    def release(self, heads: Sequence[Node], *, reason: MissReason = MissReason.CLEARED) -> int:
        """Drop what lies on the ways to these nodes and nobody wants any more; the number of runs dropped."""
        dropped = []
        for node in sorted({node for head in heads for node in head.path()}, key=lambda node: -node.stop):
            if node in self._tree and not (node.children or node.holders or node.shared):
                self._tree.remove(node)
                self._remember(node.digest, reason)
                dropped.append(node.digest)
        self._below.forget(dropped)
        return len(dropped)

    def entries(self, identity: StateIdentity | None = None) -> list[Entry]:
        """The runs stored under one identity, least recently used first."""
        root = self._tree.root(identity or self.identity)
        return [
            Entry(
                node.ids(),
                node.nbytes,
                restorable=node.complete,
                whole_prompt=node.is_sealed,
                marks=tuple(node.marks),
            )
            for node in self._tree
            if node.root() is root
        ]

    def has_live(self, session: str) -> bool:
        """Whether a state is kept ready for this session."""
        return self._live.get(session) is not None

    def statistics(self) -> BankStatistics:
        """The counters now."""
        count = self._counts
        marks = [mark for node in self._tree for mark in node.marks.values()]
        return BankStatistics(
            hits=count["hits"],
            full_hits=count["full_hits"],
            near_hits=count["near_hits"],
            live_hits=count["live_hits"],
            misses=dict(self._misses),
            partial=dict(self._partial),
            reused_tokens=count["reused_tokens"],
            puts=count["puts"],
            refusals=count["refusals"],
            evictions=count["evictions"],
            superseded=count["superseded"],
            thinned=count["thinned"],
            entries=len(self._tree),
            nbytes=self.nbytes,
            limit_bytes=self.limit_bytes,
            marks=len(marks),
            mark_bytes=sum(mark.nbytes for mark in marks),
            live_states=len(self._live),
            live_bytes=self._live.nbytes,
            sessions=len(self.sessions),
            snapshots=len(self.sessions.snapshots),
            disk=self._below.statistics(),
        )

    # -- finding a place ---------------------------------------------------------------------------------------------

    def _descend(self, identity: StateIdentity, key: bytes) -> Node:
        """The deepest block on the way, after the store below has been asked for what is missing."""
        node = self._tree.walk(identity, key)
        while self.limit_bytes > 0 and node.stop * ID_BYTES < len(key):
            rest = key[node.stop * ID_BYTES :]
            if node.common_ids(rest)[0] * ID_BYTES == len(rest) or not self._fetch(identity, node, rest):
                break
            deeper = self._tree.walk(identity, key, start=node)
            if deeper is node:
                break
            node = deeper
        return node

    def _fetch(self, identity: StateIdentity, node: Node, rest: bytes) -> bool:
        """Bring one run from the store below to where it belongs; False when there is none, or no room for it."""
        offer = self._below.find(identity, node, rest)
        if offer is None or not self._room.make(node, offer.nbytes):
            return False
        run = offer.load()
        if run is None or run.parent != node.digest or run.nbytes > offer.nbytes:
            return False
        key = encode_ids(run.ids) + (WHOLE if run.sealed else b"")
        longer = any(other.startswith(key) for other in node.children)  # also the run itself
        if longer or name_run(node, key) != run.digest:
            return False
        self._insert(identity, Node(node, key, blocks=run.blocks, marks=run.marks))
        return True

    def _take_live(
        self, session: str | None, identity: StateIdentity, key: bytes, *, spot: Spot, last: int
    ) -> LiveState | None:
        """The session's own state, cut to what serves the prompt, if it serves it as far as the stored states do."""
        live = None if session is None else self._live.get(session)
        if live is None or session is None:
            return None
        length = live.usable(identity, key, last=last)
        if length == 0 or length < spot.position:
            return None
        self._live.take(session)
        live.state.trim(live.length - length)
        self._counts["live_hits"] += 1
        return LiveState(identity, key[: length * ID_BYTES], live.state, live.owner)

    def _explain(self, identity: StateIdentity, key: bytes, *, node: Node, usable: int) -> Miss:
        if self.limit_bytes <= 0:
            return Miss(MissReason.BANK_OFF, 0)
        return explain(self._tree, self._lost, identity, key, node=node, usable=usable)

    def _count(self, found: Found) -> Found:
        self._counts["hits"] += found.length > 0
        self._counts["full_hits"] += found.miss is None
        self._counts["reused_tokens"] += found.length
        if found.miss is not None:
            (self._partial if found.length else self._misses)[found.miss.reason.value] += 1
        return found

    # -- putting ---------------------------------------------------------------------------------------------------

    def _put_on_grid(
        self,
        identity: StateIdentity,
        node: Node,
        key: bytes,
        state: DecodingState,
        *,
        tail: Tail | None,
        session: str | None,
    ) -> tuple[PutOutcome, Node | None]:
        is_whole = tail is not None or len(key) // ID_BYTES % identity.grid > 0
        parent, ending = node.ending(key)
        if is_whole:
            present, anchor = parent.children.get(ending), parent
        else:
            present, anchor = node if node.stop * ID_BYTES == len(key) else None, node
        if present is not None:
            return self._complete(present, state, tail, session=session)
        runs = cut_runs(key, anchor, identity.grid)
        if is_whole:
            runs[-1] += WHOLE
        return self._extend(anchor, runs, state, tail=tail, identity=identity, session=session)

    def _put_free(
        self,
        identity: StateIdentity,
        node: Node,
        key: bytes,
        state: DecodingState,
        *,
        tail: Tail | None,
        session: str | None,
    ) -> tuple[PutOutcome, Node | None]:
        runs = cut_runs(key, node, identity.grid)
        if not runs:
            return self._complete(node, state, tail, session=session)
        for run, child in node.children.items():
            if len(runs) == 1 and run.startswith(runs[0]):
                return self._complete(child, state, tail, session=session)
        return self._extend(node, runs, state, tail=tail, identity=identity, session=session)

    def _complete(
        self, node: Node, state: DecodingState, tail: Tail | None, *, session: str | None
    ) -> tuple[PutOutcome, Node | None]:
        """Give a stored run what it lacks of the state: rows that were gone when it was stored, a mark, outputs."""
        position = state.offset
        gaps = node.gaps(position)
        if gaps and position < node.stop:
            return PutOutcome.PRESENT, node  # its rows cannot be made up for in the middle
        known = node.marks.get(position)
        lacks_states = node.has_states and not (known is not None and known.states)
        lacks_tail = tail is not None and (known is None or known.tail is None)
        if not (gaps or lacks_states or lacks_tail):
            return PutOutcome.PRESENT, node
        blocks = tuple(
            layer.block(0, node.stop) if i in gaps else block
            for i, (layer, block) in enumerate(zip(state.layers, node.blocks, strict=True))
        )
        offered = make_mark(position, state.blocks(position, position), tail if lacks_tail else None)
        if known is not None:
            offered = Mark(position, known.states or offered.states, known.tail or offered.tail)
        marks = [mark for mark in node.marks.values() if mark is not known]
        marks += [offered] if offered.states or offered.tail is not None else []
        # What is replaced is there until the copies are, and so is not taken off.
        fresh = sum(blocks[i].nbytes for i in gaps) + offered.nbytes - (0 if known is None else known.nbytes)
        if not self._room.make(node, fresh, session=session):
            return self._refuse(node.digest), None
        mx.eval([array for block in blocks for array in block.arrays], offered.arrays())
        self._tree.replace(node, blocks, marks)
        self._counts["puts"] += 1
        self._below.stored(node)
        return PutOutcome.STORED, node

    def _extend(
        self,
        anchor: Node,
        runs: list[bytes],
        state: DecodingState,
        *,
        tail: Tail | None,
        identity: StateIdentity,
        session: str | None,
    ) -> tuple[PutOutcome, Node | None]:
        """Hang runs that are not stored yet behind `anchor`, the last one with the tail."""
        shorter = [c for run, c in anchor.children.items() if identity.free and runs[0].startswith(run)]
        chain = make_chain(anchor, runs, state, tail=tail, shorter=shorter)
        if not self._room.make(anchor, sum(node.nbytes for node in chain), session=session):
            return self._refuse(chain[0].digest), None
        mx.eval([array for node in chain for array in node.arrays()])
        replaced = [old.digest for old in shorter if self._supersede(old, chain[0])]
        for node in chain:
            self._insert(identity, node)
        self._below.forget(replaced)  # last: a process that ends in between leaves one of the two there
        if replaced:
            self.sessions.find_standing(identity, chain[0])
            for each in self.sessions.standing_on(chain[0]):
                if each.pinned or each.name != session:  # other runs are its states now
                    self.save(each.name, pinned=each.pinned)
        self._counts["puts"] += 1
        return PutOutcome.STORED, chain[-1]

    def _insert(self, identity: StateIdentity, node: Node) -> None:
        self._tree.insert(identity, node)
        self._lost.pop(node.digest, None)
        self._below.stored(node)

    def _supersede(self, old: Node, new: Node) -> bool:
        """A run that `new` begins with gives way; its marks are with `new` already. False if it had made room."""
        if old not in self._tree:
            return False
        new.shared = new.shared or old.shared
        self.sessions.replace_node(old, new)
        self._tree.remove(old)
        self._counts["superseded"] += 1
        return True

    def _stand_on(self, name: str, spot: Spot) -> None:
        """The session's states now end here; what lies on branches that it keeps no longer goes."""
        session = self.sessions.use(name)
        session.stand_on(spot.node, spot.position)
        while len(session.heads) > 1 and (
            len(session.heads) > MOST_HEADS or self.bytes_of(session) > self._room.session_limit_bytes
        ):
            oldest = session.heads[0]
            session.leave(oldest)
            self.release([oldest], reason=MissReason.EVICTED)

    def bytes_of(self, session: Session) -> int:
        """Bytes of a session's states, those shared with others included."""
        live = None if session.pinned else self._live.get(session.name)
        return sum(node.nbytes for node in session.nodes()) + (0 if live is None else live.nbytes)

    # -- losses ----------------------------------------------------------------------------------------------------

    def _tell_eviction(self, node: Node) -> None:
        self._counts["evictions"] += 1
        self._remember(node.digest, MissReason.EVICTED)
        self._below.dropped(node)

    def _refuse(self, digest: bytes) -> PutOutcome:
        self._counts["refusals"] += 1
        self._remember(digest, MissReason.OVERSIZE)
        return PutOutcome.OVERSIZE

    def _remember(self, digest: bytes, reason: MissReason) -> None:
        self._lost[digest] = reason
        if len(self._lost) > REMEMBERED_LOSSES:
            self._lost.popitem(last=False)
