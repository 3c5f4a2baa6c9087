"""What is done to conversations: on the owner thread, where alone the bank and MLX may be touched.

The imports are made in the calls, so that an engine can be imported where there is no MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytoken.cache.answers import SessionReport
    from polytoken.lanes.base import Lane


def committed(lane: Lane[Any], session: str) -> tuple[int, ...] | None:
    """See `Engine.committed`."""
    ids: tuple[int, ...] | None = lane.bank.sessions.committed(session)
    return ids


def snapshot(lane: Lane[Any], name: str, session: str) -> int:
    """See `Engine.snapshot`."""
    from polytoken.cache.branches import take_snapshot  # noqa: PLC0415

    return take_snapshot(lane.bank, name, session)


def drop_snapshot(lane: Lane[Any], name: str) -> bool:
    """See `Engine.drop_snapshot`."""
    from polytoken.cache.branches import drop_snapshot as drop  # noqa: PLC0415

    return drop(lane.bank, name)


def fork(lane: Lane[Any], source: str, session: str) -> int:
    """See `Engine.fork`."""
    from polytoken.cache.branches import fork_session  # noqa: PLC0415

    return fork_session(lane.bank, source, session)


def restore(lane: Lane[Any], name: str, session: str) -> int:
    """See `Engine.restore`."""
    from polytoken.cache.branches import restore_session  # noqa: PLC0415

    return restore_session(lane.bank, name, session)


def clear(lane: Lane[Any], session: str | None) -> int:
    """See `Engine.clear`."""
    dropped: int = lane.bank.clear(session)
    return dropped


def sessions(lane: Lane[Any]) -> list[SessionReport]:
    """See `Engine.sessions`."""
    from polytoken.cache.branches import report_sessions  # noqa: PLC0415

    return report_sessions(lane.bank)


def snapshots(lane: Lane[Any]) -> list[SessionReport]:
    """See `Engine.snapshots`."""
    from polytoken.cache.branches import report_snapshots  # noqa: PLC0415

    return report_snapshots(lane.bank)
