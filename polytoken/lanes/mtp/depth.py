"""How many drafts a window asks for: fixed, or learnt from what became of earlier windows.

A policy looks at past outcomes only, never at the target's present rows, so that acceptance stays exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final


class DepthPolicy(ABC):
    """The depth of one row's windows.

    Attributes:
        depth: drafts to ask for; 0 for none.
        reason: why none are asked for, "" otherwise.
    """

    depth: int
    reason: str = ""

    @abstractmethod
    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """Learn from one window: how many drafts it had, how many stayed, and what it cost in time."""


class FixedDepth(DepthPolicy):
    """Always the same."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        pass


class StreakDepth(DepthPolicy):
    """One more after four full acceptances in a row, one less after a rejection in the first half; from 1 to `most`."""

    STREAK: Final = 4

    def __init__(self, most: int) -> None:
        self.most = most
        self.depth = 1
        self._full = 0

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        if drafted < self.depth:
            return  # cut by the request's end, which says nothing
        if accepted == drafted:
            self._full += 1
            if self._full == self.STREAK:
                self.depth, self._full = min(self.depth + 1, self.most), 0
            return
        self._full = 0
        if accepted + 1 <= max(drafted // 2, 1):  # place of the rejected draft
            self.depth = max(self.depth - 1, 1)
