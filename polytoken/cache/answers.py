"""What the state bank answers: what was found, why not more, what a put did, and the totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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
    OVERSIZE = "oversize"  # the next run of tokens was refused: with its prefix it exceeds the whole limit
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
        snapshot: for `DecodingState.restore`, None if length is 0. It outlives eviction; let go of it after restoring.
        tail: the last row's outputs if the whole prompt was found and they are stored, else None.
        miss: why the rest was not found; None when length is the whole prompt.
    """

    length: int
    snapshot: Snapshot | None = None
    tail: Tail | None = None
    miss: Miss | None = None


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
        whole_prompt: whether it ends a whole prompt, and serves that prompt alone.
    """

    ids: tuple[int, ...]
    nbytes: int
    restorable: bool
    whole_prompt: bool


@dataclass(frozen=True, kw_only=True)
class BankStatistics:
    """Totals since the start, and what is held now.

    Attributes:
        hits: lookups that restored something; `full_hits` of them restored the whole prompt.
        misses: lookups that restored nothing, by reason.
        partial: hits that restored less than the prompt, by reason.
        reused_tokens: tokens restored.
        puts: puts that stored something; `refusals`: puts larger than the whole limit.
        evictions: runs of tokens dropped to make room.
        entries, nbytes, limit_bytes: runs held, their exact bytes, the limit on them.
    """

    hits: int
    full_hits: int
    misses: Mapping[str, int]
    partial: Mapping[str, int]
    reused_tokens: int
    puts: int
    refusals: int
    evictions: int
    entries: int
    nbytes: int
    limit_bytes: int
