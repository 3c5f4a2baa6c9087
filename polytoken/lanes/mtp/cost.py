"""Depth by measurement: the most tokens per second, by what windows of each depth cost and how often drafts are right.

    score(d) = (1 + sum_{j=1..d} prod_{i<=j} beta_i) / t(d)

beta_i is the running share of drafts x_i accepted once x_1 .. x_{i-1} were; t(d) the running time of a window with d
drafts; d = 0 is plain decoding. Where score(0) wins, speculation is off, and says so. Acceptance changes along a text,
so no choice is for ever: rivals are tried again now and then.

Times belong to the machine and are shared by the rows of a lane; acceptance belongs to a text and is each row's own,
starting from what the lane has seen.
"""

from __future__ import annotations

import math
from typing import Final

from polytoken.lanes.mtp.depth import DepthPolicy

_ACCEPTANCE_STEP: Final = 0.08  # weight of one outcome in a running share
_PRIOR: Final = 0.7  # share assumed before anything was seen
_HORIZON: Final = 0.4  # seconds that a running time looks back
_SPIKE: Final = 2.0  # a window slower than this many times the running time counts a quarter
_PAUSE: Final = 5.0  # seconds: slower windows are the machine's business (sleep, swapping), not the depth's
_MARGIN: Final = 1.03  # how much better a rival has to be
_PROBE: Final = 4  # windows of a trial
_DUTY: Final = 0.15  # most share of windows spent on trials


class CostTable:
    """What a lane has learnt about windows of each depth from 0 to `most`.

    Attributes:
        seconds: running time by depth, None before it was tried twice.
        shares: running share of acceptance by place.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.seconds: list[float | None] = [None] * (most + 1)
        self.shares = [_PRIOR] * most
        self._warm = [False] * (most + 1)

    def time(self, depth: int, seconds: float) -> None:
        """Add one window's time."""
        if not 0.0 < seconds <= _PAUSE:
            return
        if not self._warm[depth]:  # the first window of a shape pays for compiling it
            self._warm[depth] = True
            return
        known = self.seconds[depth]
        if known is None:
            self.seconds[depth] = seconds
            return
        weight = 1.0 - math.exp(-seconds / _HORIZON)
        if seconds > _SPIKE * known:
            weight /= 4.0
        self.seconds[depth] = known + weight * (seconds - known)


class CostDepth(DepthPolicy):
    """The choice for one row."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.shares = list(table.shares)
        self._best = table.most
        self._windows = self._trials = 0
        self._probe: tuple[int, int] | None = None  # depth on trial, windows left
        self._tried: list[int] = [0] * (table.most + 1)  # the window at which each depth was last seen
        self._choose()

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        self._windows += 1
        for shares in (self.shares, self.table.shares):
            for j in range(min(accepted + 1, drafted)):
                shares[j] += _ACCEPTANCE_STEP * ((j < accepted) - shares[j])
        if drafted == self.depth:  # not cut by the request's end
            self.table.time(drafted, seconds)
            self._tried[drafted] = self._windows
        if self._probe is not None:
            depth, left = self._probe
            self._trials += 1
            self._probe = (depth, left - 1) if left > 1 else None
        self._choose()

    def score(self, depth: int) -> float | None:
        """Expected tokens per second at a depth, None before it was tried."""
        seconds = self.table.seconds[depth]
        if seconds is None:
            return None
        tokens, reach = 1.0, 1.0
        for j in range(depth):
            reach *= self.shares[j]
            tokens += reach
        return tokens / seconds

    def _choose(self) -> None:
        """Settle the next window's depth: warm-up, a trial, or the best known."""
        untried = [d for d in range(self.table.most, -1, -1) if self.table.seconds[d] is None]
        if untried:
            self._set(untried[0])
            return
        scores = [score for d in range(self.table.most + 1) if (score := self.score(d)) is not None]
        leader = max(range(len(scores)), key=scores.__getitem__)
        if scores[leader] > _MARGIN * scores[self._best]:
            self._best = leader
        if self._probe is None and self._trials + _PROBE <= _DUTY * self._windows:
            self._probe = self._rival(scores), _PROBE
        self._set(self._best if self._probe is None else self._probe[0])

    def _rival(self, scores: list[float]) -> int:
        """Who is tried next: the best of the others, or every other time the one not seen for longest."""
        others = [d for d in range(len(scores)) if d != self._best]
        if (self._trials // _PROBE) % 2:
            return min(others, key=self._tried.__getitem__)
        return max(others, key=scores.__getitem__)

    def _set(self, depth: int) -> None:
        self.depth = depth
        self.reason = ""
        plain = self.score(0)
        if depth == 0 and self._best == 0 and plain is not None:
            best = max((self.score(d) or 0.0, d) for d in range(1, self.table.most + 1))
            self.reason = f"depth {best[1]}, the best, gives {best[0] / plain:.2f} times the speed of plain decoding"
