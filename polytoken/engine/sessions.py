"""What callers do with conversations. It is done on the owner thread, where alone the bank and MLX may be touched.

The imports are made in the calls, so that an engine can be imported where there is no MLX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from polytoken.engine.loaded import LoadedLane

if TYPE_CHECKING:
    from polytoken.cache.answers import SessionReport

T = TypeVar("T")


class Conversations(ABC):
    """The part of an engine that is about sessions and named snapshots."""

    @abstractmethod
    def call(self, act: Callable[[LoadedLane], T]) -> T:
        """Run a function on the owner thread, between two turns, and return or raise what it does."""

    def committed(self, session: str) -> tuple[int, ...] | None:
        """Ids of all turns of a session so far, prompts and answers; None before its first turn has ended."""
        result: tuple[int, ...] | None = self.call(lambda loaded: loaded.lane.bank.sessions.committed(session))
        return result

    def snapshot(self, name: str, session: str) -> int:
        """Give what a session has come to a name, under which it stays; the tokens of it.

        Raises:
            UsageError: `unknown_session`.
        """

        def act(loaded: LoadedLane) -> int:
            from polytoken.cache.branches import take_snapshot  # noqa: PLC0415

            return take_snapshot(loaded.lane.bank, name, session)

        return self.call(act)

    def drop_snapshot(self, name: str) -> bool:
        """Forget a named snapshot; False when there is none of this name."""

        def act(loaded: LoadedLane) -> bool:
            from polytoken.cache.branches import drop_snapshot  # noqa: PLC0415

            return drop_snapshot(loaded.lane.bank, name)

        return self.call(act)

    def fork(self, source: str, session: str) -> int:
        """Begin a session where another one, or a named snapshot, stands; they share memory until they part.

        Raises:
            UsageError: `unknown_session`, `session_exists`.
        """

        def act(loaded: LoadedLane) -> int:
            from polytoken.cache.branches import fork_session  # noqa: PLC0415

            return fork_session(loaded.lane.bank, source, session)

        return self.call(act)

    def restore(self, name: str, session: str) -> int:
        """Put a session, new or not, to where a named snapshot stands; the tokens of it.

        Raises:
            UsageError: `unknown_snapshot`.
        """

        def act(loaded: LoadedLane) -> int:
            from polytoken.cache.branches import restore_session  # noqa: PLC0415

            return restore_session(loaded.lane.bank, name, session)

        return self.call(act)

    def clear(self, session: str | None = None) -> int:
        """Forget a session and what only it stored, or everything; the number of stored runs dropped."""
        result: int = self.call(lambda loaded: loaded.lane.bank.clear(session))
        return result

    def sessions(self) -> list[SessionReport]:
        """What is held for each session, least recently used first."""

        def act(loaded: LoadedLane) -> list[SessionReport]:
            from polytoken.cache.branches import report_sessions  # noqa: PLC0415

            return report_sessions(loaded.lane.bank)

        return self.call(act)

    def snapshots(self) -> list[SessionReport]:
        """What is held for each named snapshot, the oldest first."""

        def act(loaded: LoadedLane) -> list[SessionReport]:
            from polytoken.cache.branches import report_snapshots  # noqa: PLC0415

            return report_snapshots(loaded.lane.bank)

        return self.call(act)
