"""The state of a recurrent layer: a few arrays that stand for all tokens so far, and the way back from a verify window.

A recurrent state cannot be cut at the end. So while it is `armed` a layer keeps, of the last forward, the state before
it and a `Replay`: what the recurrence consumed, row by row. Taking back the last n of w rows then means running the
recurrence again over the first w - n of them, which gives the bits that single steps would have given. Unarmed, nothing
is kept, and taking back is refused.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock, LayerSnapshot
from polytoken.cache.layers import CacheLayer
from polytoken.cache.rows import copy_array
from polytoken.errors import CacheError

Slots = tuple[mx.array, ...]
"""The state: for a gated delta net the conv tail [1, K - 1, C] and the matrix float32 [1, Hv, Dv, Dk]."""


class Replay(Protocol):
    """What one forward of w rows put into the recurrence."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows kept."""

    def __call__(self, before: Slots | None, keep: int) -> Slots:
        """The state after the first `keep` rows (1 <= keep < w), from the state `before` them; lazy."""


class _Window:
    """The last forward of an armed layer: its width, the state before it, and how to run it again in part."""

    __slots__ = ("before", "replay", "rows")

    def __init__(self, rows: int, before: Slots | None, replay: Replay | None) -> None:
        self.rows = rows
        self.before = before
        self.replay = replay


class RecurrentLayer(CacheLayer):
    """State of one recurrent layer for one sequence.

    A network reads `slots`, computes S rows and calls `advance(S, slots, replay)`. Arrays are only ever rebound, so a
    reference to `slots` is a snapshot of them that costs nothing.

    Attributes:
        slots: the state now, None before the first token (a network then starts from zeros).
        armed: whether the next forwards are kept for a roll-back; set by `DecodingState.capturing`.
    """

    kind = "recurrent"

    def __init__(self) -> None:
        self.slots: Slots | None = None
        self.armed = False
        self._window: _Window | None = None

    @property
    def captured(self) -> int:
        """Rows of the forward that can be taken back: 0 when none was kept, or it was used up."""
        return 0 if self._window is None else self._window.rows

    @property
    def nbytes(self) -> int:
        return _bytes(self.slots)

    @property
    def held_bytes(self) -> int:
        window = self._window
        if window is None:
            return self.nbytes
        kept = 0 if window.replay is None else window.replay.nbytes
        return self.nbytes + _bytes(window.before) + kept

    def arrays(self) -> list[mx.array]:
        return list(self.slots or ())

    def advance(self, rows: int, slots: Slots, replay: Replay | None = None) -> None:
        """Become the state after `rows` more tokens.

        Whatever an earlier forward left for a roll-back is dropped: it was accepted by going on. A `replay` is kept
        only while armed; a network that has none can still be taken back by the whole window.
        """
        self._window = _Window(rows, self.slots, replay) if self.armed else None
        self.slots = slots
        self.offset += rows

    def can_trim(self, n: int) -> bool:
        """True for n = 0, and for the rows of the last forward if that was kept."""
        window = self._window
        if n == 0 or window is None:
            return n == 0
        return n == window.rows or (0 < n < window.rows and window.replay is not None)

    def settle(self) -> None:
        self._window = None

    def block(self, start: int, stop: int) -> LayerBlock:
        """The whole state if `stop` is the offset; nothing for an earlier `stop`, since that state is gone."""
        self._check_span(start, stop)
        if stop != self.offset or self.slots is None:
            return LayerBlock(self.kind, None, stop, stop, 0, (), alone=True)
        return LayerBlock(self.kind, None, 0, stop, 0, tuple(copy_array(array) for array in self.slots), alone=True)

    def restore(self, snapshot: LayerSnapshot) -> None:
        self.check_snapshot(snapshot)
        # New objects over the stored memory will do: slots are never assigned into, and MLX reuses no shared buffer.
        self.slots = tuple(array[...] for array in snapshot.parts[-1]) if snapshot.parts else None
        self.offset = snapshot.offset
        self._window = None

    def check_snapshot(self, snapshot: LayerSnapshot) -> None:
        super().check_snapshot(snapshot)
        if snapshot.offset > 0 and len(snapshot.parts) != 1:
            raise CacheError(f"a recurrent snapshot of {snapshot.offset} tokens must hold one state")

    def _trim(self, n: int) -> None:
        window, self._window = self._window, None  # used once
        if n == 0:
            return
        assert window is not None  # can_trim says so
        if n == window.rows:
            self.slots = window.before
        else:
            assert window.replay is not None
            self.slots = window.replay(window.before, window.rows - n)
        self.offset -= n


def _bytes(slots: Slots | None) -> int:
    return sum(int(array.nbytes) for array in slots or ())
