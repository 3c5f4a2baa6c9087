"""One request of the MTP lane, the record of each of its windows, and the counts that are kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polytoken.cache.state import DecodingState
from polytoken.lanes.mtp.depth import DepthPolicy
from polytoken.lanes.mtp.draft import Drafter
from polytoken.lanes.mtp.following import FollowedModel
from polytoken.lanes.mtp.way_back import Way
from polytoken.lanes.prefill import Prefill
from polytoken.request import Request
from polytoken.sampling.sampler import TokenSampler


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One window, for receipts: together the cycles of a request reproduce its tokens.

    Attributes:
        step: 0 for the first window.
        primary: x_0, emitted before this window.
        source: who drafted.
        requested_depth: how many drafts the policy asked for.
        drafts: x_1 .. x_d.
        accepted: a.
        accept_probabilities: alpha of each draft that was examined.
        token: what was emitted behind the accepted drafts, None for nothing.
        origin: `token`, `correction` or `bonus`; None without a token.
        stop_reason: why the request ended with this window, None while it goes on.
        stop_origin: which of its tokens ended it: `accepted_draft`, `correction`, `bonus` or `token`.
        verify_width: rows of the verify forward, d + 1.
        commit_route: `all_rows`, `prefix` (the first a + 1 rows were kept), or `forwarded_again`.
        draft_seconds, verify_seconds: how long the host waited for the device. Drafts of a greedy row are not waited
            for: they arrive together with the verified window.
        accept_seconds: host time of shaping laws and accepting.
    """

    step: int
    primary: int
    source: str
    requested_depth: int
    drafts: tuple[int, ...]
    accepted: int
    accept_probabilities: tuple[float, ...]
    token: int | None
    origin: str | None
    stop_reason: str | None
    stop_origin: str | None
    verify_width: int
    commit_route: str
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float

    @property
    def emitted(self) -> tuple[int, ...]:
        """The tokens of this window, in order."""
        return self.drafts[: self.accepted] + (() if self.token is None else (self.token,))


def replay(first: int, cycles: Sequence[Cycle]) -> tuple[int, ...]:
    """The tokens of a request from its first token and its windows."""
    return (first, *(token for cycle in cycles for token in cycle.emitted))


@dataclass
class Tally:
    """Counts over windows, of one request or of the lane. Per depth, entry j - 1 counts the drafts x_j.

    Attributes:
        copied_tokens, accepted_copies: drafts copied from the text; they are not counted per depth.
        examined: drafts for which a coin was tossed.
        probability_sum: sum of their accept probabilities.
    """

    cycles: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    copied_tokens: int = 0
    accepted_copies: int = 0
    correction_tokens: int = 0
    bonus_tokens: int = 0
    forwards_again: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    examined: list[int] = field(default_factory=list)
    probability_sum: list[float] = field(default_factory=list)

    def add(self, cycle: Cycle) -> None:
        d, a = len(cycle.drafts), cycle.accepted
        self.cycles += 1
        self.drafted_tokens += d
        self.accepted_drafts += a
        self.rejected_drafts += cycle.origin == "correction"
        self.correction_tokens += cycle.origin == "correction"
        self.bonus_tokens += cycle.origin == "bonus"
        self.forwards_again += cycle.commit_route == "forwarded_again"
        if cycle.source == "lookup":
            self.copied_tokens += d
            self.accepted_copies += a
            return
        lists: tuple[list[Any], ...] = (self.drafted, self.accepted, self.examined, self.probability_sum)
        for counts in lists:
            counts.extend([0] * (d - len(counts)))
        for j in range(d):
            self.drafted[j] += 1
            self.accepted[j] += j < a
        for j, alpha in enumerate(cycle.accept_probabilities):
            self.examined[j] += 1
            self.probability_sum[j] += alpha

    def by_depth(self) -> dict[str, Any]:
        """The counts per depth, and the mean accept probability of the drafts that were examined."""
        pairs = zip(self.probability_sum, self.examined, strict=True)
        return {
            "drafted_by_depth": list(self.drafted),
            "accepted_by_depth": list(self.accepted),
            "mean_accept_probability_by_depth": [total / max(n, 1) for total, n in pairs],
        }


@dataclass(frozen=True, eq=False)
class LastWindow:
    """What is needed to take back the end of the latest window, should a stop string end among its drafts.

    Attributes:
        before: the trunk's state before it.
        kept: x_0 .. x_a, which its state holds now.
    """

    before: Way
    kept: tuple[int, ...]


@dataclass(eq=False, kw_only=True)
class MtpRow:
    """One request of the lane.

    Between steps the trunk's state holds prompt and tokens, less `pending`.

    Attributes:
        followed: the trunk with this row's drafter.
        pending: the last token emitted while it has not been forwarded; None before the first, and after a stop that
            was an accepted draft.
        tokens: everything emitted, a stop id included.
        cycles: every window, when the lane records them.
        latest: the way back into the latest window, of a row that may need it.
        handed_over: whether the states are the bank's now, for the session's next turn.
    """

    request: Request
    prefill: Prefill
    followed: FollowedModel
    sampler: TokenSampler
    drafter: Drafter
    policy: DepthPolicy
    stop_ids: frozenset[int]
    pending: int | None = None
    tokens: list[int] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    cycles: list[Cycle] | None = None
    latest: LastWindow | None = None
    handed_over: bool = False

    @property
    def may_be_cut(self) -> bool:
        """Whether its end may lie before what is forwarded, and be wanted for a next turn."""
        return self.request.session is not None and bool(self.request.stop)

    @property
    def state(self) -> DecodingState:
        """The trunk's state."""
        return self.followed.state

    @property
    def forwarded(self) -> int:
        """Tokens emitted that the trunk's state holds."""
        return self.state.offset - len(self.prefill.ids)

    @property
    def owing(self) -> int:
        """Tokens emitted that it does not hold: 0 or 1."""
        return int(self.pending is not None)

    @property
    def room(self) -> int:
        """Tokens the request still wants."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prefill.ids)

    @property
    def cached_tokens(self) -> int:
        return self.prefill.cached_tokens

    @property
    def cache_miss(self) -> str | None:
        return self.prefill.miss

    @property
    def prefill_remaining(self) -> int:
        return self.prefill.remaining
