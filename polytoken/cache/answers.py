"""What the state bank answers: what was found, why not more, what a put did, and the totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polytoken.cache.live import LiveState
from polytoken.cache.state import Snapshot
from polytoken.cache.tail import Tail


class MissReason(StrEnum):
    """Why not the whole prompt was restored."""

    BANK_OFF = "bank_off"  # the byte limit is 0
    COLD = "cold"  # nothing is stored under this identity
    IDENTITY_MISMATCH = "identity_mismatch"  # the tokens are stored, but under another identity
    NEW_PROMPT = "new_prompt"  # already the first token is unlike everything stored
    PREFIX_DIVERGENCE = "prefix_divergence"  # the prompt parts from everything stored at `position`
    NEW_SUFFIX = "new_suffix"  # what is stored ends at `position`, all of it was reused, the rest is new
    OFF_GRID = "off_grid"  # stored tokens agree up to `position`, but the grid point before it is the last usable one
    EVICTED = "evicted"  # the next run of tokens was stored and had to make room
    CLEARED = "cleared"  # the next run of tokens was stored and was cleared with its session
    OVERSIZE = "oversize"  # the next run of tokens was refused: with its prefix it exceeds a whole limit
    NO_TAIL = "no_tail"  # the whole prompt is stored, as a prefix of others, without the last row's outputs
    NO_COVERAGE = "no_coverage"  # the tokens are stored, but a layer's rows for a state there are not


@dataclass(frozen=True)
class Miss:
    """A reason, the number of tokens on which the prompt and the store agree, and what else is to say."""

    reason: MissReason
    position: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} at token {self.position}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, eq=False)
class Found:
    """The longest reusable prefix of a prompt.

    Attributes:
        length: tokens restored, 0 for none.
        snapshot: for `DecodingState.restore`, None if length is 0 or the state is live. It outlives eviction; let go of
            it after restoring.
        tail: the last row's outputs if the whole prompt was found and they are stored, else None.
        miss: why the rest was not found; None when length is the whole prompt.
        live: the session's own state at `length`, which belongs to the caller from now on.
    """

    length: int
    snapshot: Snapshot | None = None
    tail: Tail | None = None
    miss: Miss | None = None
    live: LiveState | None = None


class PutOutcome(StrEnum):
    """What `StateBank.put` did."""

    STORED = "stored"
    PRESENT = "present"
    OVERSIZE = "oversize"
    BANK_OFF = "bank_off"


@dataclass(frozen=True)
class Entry:
    """One stored run of tokens, for inspection.

    Attributes:
        ids: all tokens from the first to the end of the run.
        nbytes: bytes that this run alone holds.
        restorable: whether a state at its end can be restored.
        whole_prompt: whether it is sealed: it ends a whole prompt, and serves that prompt alone.
        marks: restore points within it that hold states or outputs of their own.
    """

    ids: tuple[int, ...]
    nbytes: int
    restorable: bool
    whole_prompt: bool
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SessionReport:
    """What is held for one session or named snapshot.

    Attributes:
        name: the caller's.
        tokens: length of the committed stream.
        turns: turns that have ended.
        nbytes: bytes of its states, those shared with others included.
        restorable: tokens of the committed stream that could be restored now.
        live: whether its latest state is kept ready.
        idle_seconds: since its latest use; 0 for a snapshot.
    """

    name: str
    tokens: int
    turns: int
    nbytes: int
    restorable: int
    live: bool
    idle_seconds: float


@dataclass(frozen=True, kw_only=True)
class BankStatistics:
    """Totals since the start, and what is held now.

    Attributes:
        hits: lookups that restored something; `full_hits` of them restored the whole prompt.
        near_hits: hits inside a stored run, which goes on differently or longer than the prompt.
        live_hits: hits that took over a session's state as it was, without copying it.
        misses: lookups that restored nothing, by reason.
        partial: hits that restored less than the prompt, by reason.
        reused_tokens: tokens restored.
        puts: puts that stored something; `refusals`: puts larger than a whole limit.
        evictions: runs of tokens dropped to make room.
        superseded: runs that a longer one took the place of.
        thinned: restore points dropped to keep a sequence's within their budget.
        entries, nbytes, limit_bytes: runs held, the exact bytes of everything held, the limit on them.
        marks, mark_bytes: restore points held, and their bytes.
        live_states, live_bytes: states kept ready, and their bytes.
        sessions, snapshots: how many there are.
        disk: counters of the store below, empty without one.
    """

    hits: int
    full_hits: int
    near_hits: int = 0
    live_hits: int = 0
    misses: Mapping[str, int]
    partial: Mapping[str, int]
    reused_tokens: int
    puts: int
    refusals: int
    evictions: int
    superseded: int = 0
    thinned: int = 0
    entries: int
    nbytes: int
    limit_bytes: int
    marks: int = 0
    mark_bytes: int = 0
    live_states: int = 0
    live_bytes: int = 0
    sessions: int = 0
    snapshots: int = 0
    disk: Mapping[str, Any] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """The counters by the names under which lanes report them."""
        return {
            "prefix_cache_hits": self.hits,
            "prefix_cache_misses": sum(self.misses.values()),
            "prefix_cache_reused_tokens": self.reused_tokens,
            "prefix_cache_miss_reasons": dict(self.misses),
            "prefix_cache_partial_reasons": dict(self.partial),
            "prefix_cache_full_hits": self.full_hits,
            "prefix_cache_near_hits": self.near_hits,
            "prefix_cache_live_hits": self.live_hits,
            "prefix_cache_evictions": self.evictions,
            "prefix_cache_refusals": self.refusals,
            "prefix_cache_superseded": self.superseded,
            "prefix_cache_boundaries": self.marks,
            "prefix_cache_boundary_bytes": self.mark_bytes,
            "prefix_cache_boundaries_dropped": self.thinned,
            "prefix_cache_entries": self.entries,
            "prefix_cache_bytes": self.nbytes,
            "prefix_cache_limit_bytes": self.limit_bytes,
            "prefix_cache_live_states": self.live_states,
            "prefix_cache_live_bytes": self.live_bytes,
            "sessions": self.sessions,
            "session_snapshots": self.snapshots,
            **{f"disk_{name}": value for name, value in self.disk.items()},
        }
