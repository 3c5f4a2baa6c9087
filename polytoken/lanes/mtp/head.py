"""Drafts from the network's own head, over the history of true pairs.

State after P tokens are forwarded: the history holds the pairs (h_i, t_{i+1}) up to token P - 1, less those still owed,
and the hidden rows owed end with h_{P-1}, whose pair is made by the next primary.

A window's first draft is made from a true row and stays. The later ones are made from the head's own rows: they are
taken back, and the pairs of the accepted tokens are made again from the trunk's rows of the verify forward. These are
owed until the next window, where one forward of the head appends them and makes the first draft.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from polytoken.cache.layers import CacheLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.rows import copy_array
from polytoken.lanes.mtp.draft import Cue, Draft, Drafter, Kept, draw_chain
from polytoken.lanes.mtp.history import HistoryLayer
from polytoken.lanes.mtp.steps import Steps
from polytoken.models.base import Hidden
from polytoken.models.draft import DraftHead

MOST_OWED: Final = 64  # pairs that may wait for the next draft, when windows go by without one


class HeadDrafter(Drafter):
    """A `DraftHead` with one row's history.

    Args:
        head: the network's head.
        first: index of the first token that gets a history row, at least 1; above 1 for a windowed history.
        banked: whether the history is to be banked with the prompt (a windowed one is rebuilt instead).

    Attributes:
        history: the head's cache.
        owed: pairs that are committed and not yet in the history.
    """

    name = "head"

    def __init__(self, head: DraftHead, *, first: int = 1, banked: bool = True) -> None:
        self._head = head
        self._first = first
        self._banked = banked
        self.reset()

    def reset(self) -> list[CacheLayer]:
        self.history = self._head.make_cache()
        self._tail = RecurrentLayer()  # its one slot is the hidden row [1, 1, W] of the last token
        self._layers = [HistoryLayer(layer) for layer in self.history.layers] if self._banked else []
        self._rows: mx.array | None = None  # [1, k, W] of the last k forwarded tokens,
        self._ids: list[int] = []  # and the k - 1 ids that follow all but the last of them
        self._chained: int | None = None  # rows that this window's recursion left, None before it has drafted
        return [*self._layers, self._tail]

    @property
    def owed(self) -> int:
        return len(self._ids)

    def rows_wanted(self, rows: int) -> int | None:
        return None if self._tail.offset + rows > self._first else 1

    def follow(self, ids: mx.array, hidden: Hidden) -> None:
        rows = self._head.take(hidden)
        start, S = self._tail.offset, int(ids.shape[1])
        lo = max(start, self._first)  # first token of these to get a row
        if lo < start + S:
            if self._tail.slots is not None:
                rows = mx.concatenate([self._tail.slots[0], rows], axis=1)
            before = int(rows.shape[1]) - S  # 1 when the row before `start` is there, else 0
            h = rows[:, lo - start - 1 + before : S - 1 + before]
            if h.shape[1]:
                self._head.append(h, ids[:, lo - start :], self.history)
        self._tail.advance(S, (copy_array(rows[:, -1:]),))  # a slice would keep the chunk's rows alive
        for layer in self._layers:
            layer.advance(S)

    def begin(self, prompt: tuple[int, ...]) -> None:
        assert self._tail.slots is not None and self._tail.offset == len(prompt)
        self._rows, self._ids, self._chained = self._tail.slots[0], [], None

    def propose(self, cue: Cue) -> Steps[Draft]:
        if cue.depth == 0:
            return Draft(self.name)
        assert self._rows is not None
        # Owed pairs and the primary's own in one forward; the last row drafts.
        ids = mx.array([[*self._ids, cue.primary]], dtype=mx.int32)
        logits, h = self._head.draft(self._rows, ids, self.history, keep=1)
        self._chained = 0

        def advance(next_ids: mx.array) -> mx.array:
            nonlocal h
            assert self._chained is not None
            row, h = self._head.draft(h, next_ids, self.history)
            self._chained += 1
            return row[:, -1]

        return (yield from draw_chain(cue, logits[:, -1], advance, source=self.name))

    def commit(self, kept: Kept) -> None:
        rows = self._head.take(kept.hidden)
        primary, *accepted = kept.window
        if self._chained is None:
            if self.owed + len(kept.window) > MOST_OWED:  # before this window's, which may be taken back
                mx.async_eval(self.settle())
            assert self._rows is not None
            self._rows = mx.concatenate([self._rows, rows], axis=1)
            self._ids += [primary, *accepted]
        else:  # the primary's pair is in: its row was true
            self.history.trim(self._chained)
            self._rows, self._ids = rows, accepted
        self._chained = None

    def take_back(self, tokens: int) -> None:
        assert self._rows is not None
        self._rows = self._rows[:, :-tokens]
        del self._ids[-tokens:]

    def settle(self) -> list[mx.array]:
        if self._ids:
            assert self._rows is not None
            self._head.append(self._rows[:, :-1], mx.array([self._ids], dtype=mx.int32), self.history)
            self._rows, self._ids = copy_array(self._rows[:, -1:]), []
        return [*self.history.arrays(), *([] if self._rows is None else [self._rows])]

    def level(self, tokens: int) -> None:
        grown = tokens - self._tail.offset
        if grown:
            assert self._rows is not None
            self._tail.advance(grown, (self._rows,))
            for layer in self._layers:
                layer.advance(grown)
