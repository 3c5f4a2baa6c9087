"""A trunk's state with its head's history, gone on from by hand: the law that restores and lanes are held against."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from polytoken.cache.state import DecodingState, Snapshot
from polytoken.models.base import CausalModel
from polytoken.models.draft import DraftHead


@dataclass(eq=False)
class LiveState:
    """The state after some tokens.

    Attributes:
        state: the trunk's.
        history: the head's: one row per pair, one fewer than tokens; None without a head.
        last: the head's view [1, 1, W] of the last token's hidden row; None without a head or before any token.
    """

    model: CausalModel
    head: DraftHead | None
    state: DecodingState
    history: DecodingState | None = None
    last: mx.array | None = None

    @classmethod
    def empty(cls, model: CausalModel, head: DraftHead | None) -> LiveState:
        """Before the first token."""
        return cls(model, head, model.make_cache(), None if head is None else head.make_cache())

    def extend(self, ids: tuple[int, ...], *, chunk: int) -> list[int]:
        """Encode more tokens on the absolute grid, the last one alone; the sizes of the chunks."""
        sizes = []
        position, end = self.state.offset, self.state.offset + len(ids)
        done = 0
        while position < end:
            stop = min(position + chunk - position % chunk, end)
            if stop == end and stop - position > 1:
                stop -= 1  # as the lanes do: what later tokens are encoded like
            self._encode(ids[done : done + stop - position])
            sizes.append(stop - position)
            done, position = done + stop - position, stop
        return sizes

    def logits(self) -> mx.array:
        """[1, V] after the last token encoded."""
        return self._logits

    def snapshots(self) -> tuple[Snapshot, Snapshot | None]:
        """Of the trunk's state and of the history."""
        return self.state.snapshot(), None if self.history is None else self.history.snapshot()

    def _encode(self, ids: tuple[int, ...]) -> None:
        array = mx.array([ids], dtype=mx.int32)
        hidden = self.model.forward(array, self.state)
        self._logits = self.model.project(hidden.post[:, -1])
        if self.head is not None:
            rows = self.head.take(hidden)
            assert self.history is not None
            if self.last is not None:
                self.head.append(mx.concatenate([self.last, rows[:, :-1]], axis=1), array, self.history)
            elif len(ids) > 1:
                self.head.append(rows[:, :-1], array[:, 1:], self.history)
            self.last = mx.contiguous(rows[:, -1:])
            mx.eval(self.history.arrays(), self.last)
        mx.eval(self._logits, self.state.arrays())
