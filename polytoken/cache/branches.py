"""Named snapshots of conversations, and conversations that branch off from others or go back.

None of this copies a state: snapshots and branches stand on the same stored runs, and share them until they part.
"""

from __future__ import annotations

from polytoken.cache.answers import SessionReport
from polytoken.cache.bank import StateBank
from polytoken.cache.sessions import Committed, Session
from polytoken.errors import UsageError


def take_snapshot(bank: StateBank, name: str, session: str) -> int:
    """Give the session's committed stream and its states a name under which they stay; the tokens of the stream.

    An older snapshot of the name is replaced.

    Raises:
        UsageError: `unknown_session`, for one that has not ended a turn.
    """
    committed = _committed(bank, session)
    before = bank.sessions.remove_snapshot(name)
    _stand(bank, bank.sessions.add_snapshot(name), committed)
    bank.save(name, pinned=True)
    if before is not None:
        bank.release(before.heads)
    return len(committed.ids)


def drop_snapshot(bank: StateBank, name: str) -> bool:
    """Forget a named snapshot and what only it kept; False when there is none of this name."""
    snapshot = bank.sessions.remove_snapshot(name)
    if snapshot is not None:
        bank.forget(snapshot)
    return snapshot is not None


def fork_session(bank: StateBank, source: str, name: str) -> int:
    """Begin a session where another one, or a named snapshot, stands; the tokens of its committed stream.

    Raises:
        UsageError: `unknown_session`; `session_exists` when `name` has a stream of its own.
    """
    snapshot = bank.sessions.snapshots.get(source)
    committed = _committed(bank, source) if snapshot is None else snapshot.committed
    assert committed is not None
    if bank.sessions.committed(name) is not None:
        raise UsageError(f"session {name!r} exists; clear it first, or restore it", code="session_exists", field="name")
    _stand(bank, bank.sessions.use(name), committed)
    bank.save(name)
    return len(committed.ids)


def restore_session(bank: StateBank, snapshot: str, session: str) -> int:
    """Put a session, new or not, back to where a named snapshot stands; the tokens of its committed stream.

    Raises:
        UsageError: `unknown_snapshot`.
    """
    source = bank.sessions.snapshots.get(snapshot)
    if source is None or source.committed is None:
        raise UsageError(f"there is no snapshot {snapshot!r}", code="unknown_snapshot", field="snapshot")
    bank.clear(session)
    _stand(bank, bank.sessions.use(session), source.committed)
    bank.save(session)
    return len(source.committed.ids)


def report_sessions(bank: StateBank) -> list[SessionReport]:
    """What is held for each session, least recently used first."""
    return [_report(bank, session) for session in bank.sessions]


def report_snapshots(bank: StateBank) -> list[SessionReport]:
    """What is held for each named snapshot, the oldest first."""
    return [_report(bank, snapshot) for snapshot in bank.sessions.snapshots.values()]


def _committed(bank: StateBank, session: str) -> Committed:
    known = bank.sessions.get(session)
    if known is None or known.committed is None:
        raise UsageError(f"session {session!r} has not ended a turn", code="unknown_session", field="session")
    return known.committed


def _stand(bank: StateBank, session: Session, committed: Committed) -> None:
    session.committed = committed
    spot = bank.locate(committed.ids, identity=committed.identity)
    if spot.position:
        session.stand_on(spot.node, spot.position)


def _report(bank: StateBank, session: Session) -> SessionReport:
    committed = session.committed
    return SessionReport(
        name=session.name,
        tokens=0 if committed is None else len(committed.ids),
        turns=session.turns,
        nbytes=bank.bytes_of(session),
        restorable=0 if committed is None else bank.locate(committed.ids, identity=committed.identity).position,
        live=not session.pinned and bank.has_live(session.name),
        idle_seconds=0.0 if session.pinned else bank.sessions.idle_seconds(session),
    )
