"""Drafts copied from the row's own text: where its last tokens stood before, what followed them then may follow again.

Every run of `gram` ids of prompt and output is indexed by where it ends. Of the newest earlier places that end like the
text does now, the one that agrees furthest back is taken (the newest of equals), and what stood behind it is the draft.
The longer the agreement, the longer the draft. Where copying does not pay it pauses, for longer each time.

The index belongs to one request: nothing of one text is ever proposed for another.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from polytoken.cache.layers import CacheLayer
from polytoken.lanes.mtp.draft import Cue, Draft, Drafter, Kept
from polytoken.lanes.mtp.settings import LookupSettings
from polytoken.lanes.mtp.steps import Steps
from polytoken.models.base import Hidden

_CANDIDATES: Final = 32  # newest earlier places that are looked at
_LENGTHS: Final = (8, 12, 16, 24, 32)  # of a draft, by how many ids agree beyond the gram
_PROBATION: Final = 8  # longest draft before copying has proved itself
_SHORTEST_PAUSE: Final = 64  # tokens
_LONGEST_PAUSE: Final = 4096


class TextIndex:
    """One text, and where every run of `gram` ids in it ends."""

    def __init__(self, gram: int) -> None:
        self.gram = gram
        self.ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def add(self, token_id: int) -> None:
        self.ids.append(token_id)
        if len(self.ids) >= self.gram:
            self._ends.setdefault(tuple(self.ids[-self.gram :]), []).append(len(self.ids))

    def find(self) -> tuple[int, int] | None:
        """Where the best earlier place ends, and how many ids agree beyond the gram; None when there is none."""
        places = self._ends.get(tuple(self.ids[-self.gram :]), [])
        best: tuple[int, int] | None = None
        for end in reversed(places[-_CANDIDATES - 1 : -1]):  # the last one is the text's own end
            agreed = self._agreement(end)
            if best is None or agreed > best[1]:
                best = end, agreed
        return best

    def _agreement(self, end: int) -> int:
        """How many ids before the gram agree too, counted as far as it makes a difference."""
        n, count = len(self.ids), 0
        while (
            count < len(_LENGTHS) - 1
            and (before := end - self.gram - count - 1) >= 0
            and self.ids[before] == self.ids[n - self.gram - count - 1]
        ):
            count += 1
        return count


class LookupDrafter(Drafter):
    """Copies where it can, and leaves the rest to another drafter.

    Args:
        settings: how it looks up.
        other: who drafts when there is nothing to copy; None for nobody.

    Attributes:
        hit_rate: running share of copied drafts that were accepted.
    """

    name = "lookup"

    def __init__(self, settings: LookupSettings, other: Drafter | None = None) -> None:
        self._settings = settings
        self.other = other
        self.reset()

    def reset(self) -> list[CacheLayer]:
        self._forget()
        return [] if self.other is None else self.other.reset()

    def _forget(self) -> None:
        self._text = TextIndex(self._settings.gram)
        self.hit_rate = 0.5
        self._rounds = 0
        self._pause = _SHORTEST_PAUSE
        self._paused_until = 0

    def rows_wanted(self, rows: int) -> int | None:
        return 1 if self.other is None else self.other.rows_wanted(rows)

    def follow(self, ids: mx.array, hidden: Hidden) -> None:
        if self.other is not None:
            self.other.follow(ids, hidden)

    def begin(self, prompt: tuple[int, ...]) -> None:
        self._forget()  # a state that was taken over from an earlier turn brings nothing of it along
        for token_id in prompt:
            self._text.add(token_id)
        if self.other is not None:
            self.other.begin(prompt)

    def propose(self, cue: Cue) -> Steps[Draft]:
        self._text.add(cue.primary)
        block = self._copy(cue.room)
        if block:
            return Draft(self.name, mx.array([block], dtype=mx.int32))
        if self.other is None:
            return Draft(self.name)
        return (yield from self.other.propose(cue))

    def commit(self, kept: Kept) -> None:
        _, *accepted = kept.window
        for token_id in accepted:
            self._text.add(token_id)
        if kept.draft.source == self.name and kept.draft.count:
            self._judge(len(accepted) / kept.draft.count)
        if self.other is not None:
            self.other.commit(kept)

    def take_back(self, tokens: int) -> None:  # the text is read anew at the next beginning
        if self.other is not None:
            self.other.take_back(tokens)

    def settle(self) -> list[mx.array]:
        return [] if self.other is None else self.other.settle()

    def level(self, tokens: int) -> None:
        if self.other is not None:
            self.other.level(tokens)

    def _copy(self, room: int) -> list[int]:
        """What stood behind the best earlier place, in a length it deserves."""
        if len(self._text.ids) < self._paused_until:
            return []
        found = self._text.find()
        if found is None:
            return []
        end, agreed = found
        trusted = self._rounds >= 2 and self.hit_rate >= 0.5
        longest = min(self._settings.longest, room) if trusted else min(self._settings.longest, room, _PROBATION)
        return self._text.ids[end : end + min(_LENGTHS[agreed], longest)]

    def _judge(self, share: float) -> None:
        """Learn from a copy of which this share was accepted."""
        self._rounds += 1
        self.hit_rate = 0.7 * self.hit_rate + 0.3 * share
        if share >= 0.5:
            self._pause = _SHORTEST_PAUSE
        elif self._rounds >= 3 and self.hit_rate < 0.35:
            self._paused_until = len(self._text.ids) + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
