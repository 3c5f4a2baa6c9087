"""What a second, larger and slower store below the bank is told and asked.

The unit is a run: some tokens behind other tokens, with everything that the bank holds of them. A run is named by its
digest, which is chained over the identity and all ids up to its end. So equal digests mean equal contents, and a run
can be written once and never again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from polytoken.cache.blocks import LayerBlock
from polytoken.cache.identity import StateIdentity
from polytoken.cache.marks import Mark


@dataclass(frozen=True, eq=False)
class StoredRun:
    """One run of tokens as the bank holds it; its arrays are evaluated and never change.

    Attributes:
        identity: what its bits depend on beside the ids.
        parent: digest of the run before it, or of the identity's root.
        digest: its own.
        start, stop: tokens before it, and up to its end.
        ids: its own stop - start ids.
        sealed: whether it serves a prompt of exactly `stop` tokens alone.
        blocks: rows, one block per layer; empty ones (without arrays) for layers whose state stands alone.
        marks: restore points in (start, stop], ascending.
    """

    identity: StateIdentity
    parent: bytes
    digest: bytes
    start: int
    stop: int
    ids: tuple[int, ...]
    sealed: bool
    blocks: tuple[LayerBlock, ...]
    marks: tuple[Mark, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(block.nbytes for block in self.blocks) + sum(mark.nbytes for mark in self.marks)


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """What names a conversation's state: with these ids and the runs under them it can be gone on from.

    Sessions and named snapshots have names of their own.

    Attributes:
        name: the caller's.
        identity: what its states are stored under.
        ids: the committed stream, prompt and answers of all turns so far.
        pinned: whether it is a named snapshot, whose runs go after all others.
    """

    name: str
    identity: StateIdentity
    ids: tuple[int, ...]
    pinned: bool = False


class Offer(Protocol):
    """A run that the second store has. Nothing is read before `load`, so that the bank can make room first."""

    @property
    def digest(self) -> bytes:
        """The run's own."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that `load` gives."""
        ...

    def load(self) -> StoredRun | None:
        """The run, checked; None if it turns out to be damaged, which the store counts and reports itself."""
        ...


class SecondTier(Protocol):
    """A store below the bank. All calls come from the thread that owns MLX, and all but `Offer.load` return at once.

    A call must not raise: what goes wrong below costs speed and nothing else.
    """

    def stored(self, run: StoredRun) -> None:
        """The bank holds this run from now on, or holds more of it than before (marks were added)."""
        ...

    def dropped(self, run: StoredRun) -> None:
        """The bank had to make room and no longer holds this run; its arrays live while somebody refers to them."""
        ...

    def find(self, identity: StateIdentity, parent: bytes, rest: bytes) -> Offer | None:
        """The best continuation behind `parent` (a digest) for a prompt that goes on with `rest`.

        `rest` is the remaining ids as 8 little-endian signed bytes each. Best is the unsealed run that agrees with the
        most ids of `rest` from its first on; a sealed one counts only if its ids are all of `rest`. None for no
        agreement at all.
        """
        ...

    def forget(self, digests: Iterable[bytes]) -> None:
        """These runs must not come back: a user cleared them, or longer ones that begin with them were `stored`."""
        ...

    def remember_session(self, record: SessionRecord) -> None:
        """The session's (or snapshot's) committed stream is this now; an older record of the name is replaced."""
        ...

    def forget_session(self, name: str, *, pinned: bool = False, states: bool = False) -> None:
        """The session was cleared, or the snapshot dropped.

        With `states` the bank holds none of its runs, so that those which no other name stands on go here.
        """
        ...

    def sessions(self) -> list[SessionRecord]:
        """Sessions and snapshots remembered, least recently used first; asked once, when a bank is given the store."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Counters since it was opened, by name; they are reported with the bank's own."""
        ...
