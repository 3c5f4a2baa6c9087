"""Conversations and named snapshots: which tokens each has committed, and where in the store its states stand."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from polytoken.cache.identity import StateIdentity
from polytoken.cache.tree import Node


@dataclass(frozen=True)
class Committed:
    """A stream of tokens that a state was made of.

    Attributes:
        identity: what its states are stored under.
        ids: prompt and answers of all turns so far.
    """

    identity: StateIdentity
    ids: tuple[int, ...]


@dataclass(eq=False)
class Session:
    """One conversation, or one named snapshot of one.

    Attributes:
        name: the caller's.
        pinned: whether it is a snapshot, whose states are never evicted while it has its name.
        committed: its stream, None before its first turn has ended.
        heads: nodes it stands on, the newest last; with their ancestors they are its states.
        used: clock reading of its latest use.
        turns: how many have ended.
    """

    name: str
    pinned: bool = False
    committed: Committed | None = None
    heads: list[Node] = field(default_factory=list)
    used: float = 0.0
    turns: int = 0

    @property
    def holder(self) -> str:
        """What it is called in `Node.holders`, where sessions and snapshots have names of their own."""
        return ("snapshot " if self.pinned else "session ") + self.name

    @property
    def length(self) -> int:
        """Tokens of its stream."""
        return 0 if self.committed is None else len(self.committed.ids)

    def stand_on(self, node: Node, position: int) -> None:
        """Make the node its newest head; older heads on the way to it are no longer needed."""
        way = set(node.path())
        for head in [head for head in self.heads if head in way]:
            self.leave(head)
        if any(node in head.path() for head in self.heads):
            return  # a newer head needs it anyway
        self.heads.append(node)
        node.holders[self.holder] = position

    def leave(self, head: Node) -> None:
        """No longer stand there."""
        self.heads.remove(head)
        head.holders.pop(self.holder, None)

    def nodes(self) -> set[Node]:
        """All nodes of its states."""
        return {node for head in self.heads for node in head.path()}


class SessionBook:
    """Sessions and snapshots by name, in the order of their use.

    Args:
        most: sessions remembered; the one unused for longest is forgotten (its states then age like others').
        most_ids: ids of all their streams.
        protect_seconds: how long after its latest use a session's states are evicted only after all others'.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        most: int = 1024,
        most_ids: int = 1 << 22,
        protect_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_ids = most_ids
        self._protect_seconds = protect_seconds
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.snapshots: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Sessions, least recently used first."""
        return iter(list(self._sessions.values()))

    def get(self, name: str) -> Session | None:
        """The session of this name, if there is one; it does not count as used."""
        return self._sessions.get(name)

    def use(self, name: str) -> Session:
        """The session of this name, made if there is none, which becomes the most recently used."""
        session = self._sessions.pop(name, None) or Session(name)
        self._sessions[name] = session
        session.used = self._clock()
        self._forget_oldest()
        return session

    def _forget_oldest(self) -> None:
        """Keep to the limits, but for the session used last."""
        held = sum(session.length for session in self._sessions.values())
        while len(self._sessions) > 1 and (len(self._sessions) > self._most or held > self._most_ids):
            oldest = next(iter(self._sessions.values()))
            held -= oldest.length
            self.remove(oldest.name)

    def remove(self, name: str) -> Session | None:
        """Forget the session, not its states."""
        return _released(self._sessions.pop(name, None))

    def add_snapshot(self, name: str) -> Session:
        """A fresh named snapshot."""
        self.snapshots[name] = Session(name, pinned=True)
        return self.snapshots[name]

    def remove_snapshot(self, name: str) -> Session | None:
        """Forget the named snapshot, not its states."""
        return _released(self.snapshots.pop(name, None))

    def commit(self, name: str, committed: Committed) -> None:
        """A turn of this session has ended with this stream."""
        session = self.use(name)
        session.committed = committed
        session.turns += 1
        self._forget_oldest()

    def committed(self, name: str) -> tuple[int, ...] | None:
        """The session's committed stream; None for an unknown session, or before its first turn has ended."""
        session = self._sessions.get(name)
        return None if session is None or session.committed is None else session.committed.ids

    def is_pinned(self, node: Node) -> bool:
        """Whether a named snapshot stands on this node."""
        return bool(self.pinned_at(node))

    def pinned_at(self, node: Node) -> set[int]:
        """The positions in this node at which named snapshots stand."""
        return {position for holder, position in node.holders.items() if holder.startswith("snapshot ")}

    def find_standing(self, identity: StateIdentity, node: Node) -> None:
        """Sessions and snapshots that an earlier process left, not used since, stand where in this node they end."""
        ids: tuple[int, ...] = ()
        for each in (*self._sessions.values(), *self.snapshots.values()):
            committed = each.committed
            if each.heads or committed is None or committed.identity != identity:
                continue
            if node.start < each.length <= node.stop:
                ids = ids or node.ids()
                if ids[: each.length] == committed.ids:
                    each.stand_on(node, each.length)

    def is_active(self, node: Node) -> bool:
        """Whether a session used lately stands on this node."""
        now = self._clock()
        return any(not each.pinned and now - each.used < self._protect_seconds for each in self.standing_on(node))

    def replace_node(self, old: Node, new: Node) -> None:
        """Whoever stood on the old node stands on the new one."""
        for session in self.standing_on(old):
            session.heads[session.heads.index(old)] = new
            new.holders[session.holder] = old.holders.pop(session.holder)

    def leave_node(self, node: Node) -> None:
        """The node is gone: whoever stood on it stands on what is before it."""
        for session in self.standing_on(node):
            session.leave(node)
            if node.parent is not None and node.parent.parent is not None:
                session.stand_on(node.parent, node.parent.stop)

    def idle_seconds(self, session: Session) -> float:
        """Since its latest use."""
        return self._clock() - session.used

    def standing_on(self, node: Node) -> list[Session]:
        """The sessions and snapshots that stand on this node."""
        found = []
        for holder in node.holders:
            kind, _, name = holder.partition(" ")
            session = (self.snapshots if kind == "snapshot" else self._sessions).get(name)
            if session is not None:
                found.append(session)
        return found

    def clear(self) -> None:
        """Forget all."""
        self._sessions.clear()
        self.snapshots.clear()


def _released(session: Session | None) -> Session | None:
    """The same, with its nodes no longer held; it still says which these are."""
    if session is not None:
        for head in session.heads:
            head.holders.pop(session.holder, None)
    return session
