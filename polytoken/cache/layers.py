"""One layer's share of a decoding state, as the networks use it.

A network calls `update_and_fetch`, `make_mask` and reads `offset`; everything else is for the engine. All layers keep
their rows in temporal order, so rolling back is a cut at the end and a mask never depends on how storage is laid out.
A layer never mutates an array it has handed out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock, LayerSnapshot, join_blocks
from polytoken.cache.rows import RowBuffer
from polytoken.errors import CacheError
from polytoken.kernels.attention import Mask


def causal_mask(rows: int, past: int, window: int | None = None) -> mx.array:
    """Boolean [rows, past + rows]: may query i (at position past + i) see key j? No future, nothing before `window`."""
    query = mx.arange(past, past + rows)[:, None]
    key = mx.arange(past + rows)[None]
    seen = query >= key
    return seen if window is None else seen & (query < key + window)


def choose_mask(rows: int, past: int, *, window: int | None, return_array: bool) -> Mask:
    """The cheapest mask that says the same: None for one row that sees everything, "causal", or an array."""
    if window is not None and past + rows > window:
        return causal_mask(rows, past, window)
    if rows == 1:
        return None
    return causal_mask(rows, past) if return_array else "causal"


class CacheLayer(ABC):
    """State of one layer for one sequence.

    A layer that cannot go back row by row (a recurrent one) says so in `can_trim`; it never resets instead.

    Attributes:
        kind: stable name of the storage layout, recorded in blocks and snapshots.
        window: W of a sliding layer, else None.
        offset: tokens encoded so far, a host integer.
    """

    kind: ClassVar[str]
    window: int | None = None
    offset: int = 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the valid state: what a snapshot of it costs."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of memory in use for it, spare capacity included."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The live arrays, for `mx.eval`."""

    @abstractmethod
    def can_trim(self, n: int) -> bool:
        """Whether the last n tokens can be taken back exactly."""

    @abstractmethod
    def block(self, start: int, stop: int) -> LayerBlock:
        """What to keep of the tokens [start, stop), in memory of its own (lazy until evaluated).

        Holds as many of the rows as a state at `stop` can still want and this layer still has.
        Raises CacheError when `stop` lies beyond `offset`.
        """

    @abstractmethod
    def restore(self, snapshot: LayerSnapshot) -> None:
        """Become the snapshot's state, in fresh private arrays (lazy until evaluated).

        Raises CacheError, and changes nothing, if the snapshot is of another kind or window.
        """

    @abstractmethod
    def _trim(self, n: int) -> None: ...

    def trim(self, n: int) -> int:
        """Take back the last n tokens exactly and return n. Raises CacheError, changing nothing, if that cannot be."""
        if not self.can_trim(n):
            raise CacheError(f"cannot take back {n} of {self.offset} tokens exactly in a {self.kind} layer")
        self._trim(n)
        return n

    def settle(self) -> None:  # noqa: B027  # most layers keep nothing for a roll-back
        """Declare what was appended final: rows kept only for a roll-back may go."""

    def snapshot(self) -> LayerSnapshot:
        """The state now, in memory of its own (lazy until evaluated); nothing done later to this layer reaches it."""
        snapshot = join_blocks([self.block(0, self.offset)])
        assert snapshot is not None  # a layer always has its own state
        return snapshot

    def _check_span(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.offset:
            raise CacheError(f"rows {start} to {stop} are not within the {self.offset} tokens encoded")

    def check_snapshot(self, snapshot: LayerSnapshot) -> None:
        """Raise CacheError if the snapshot is of another kind of layer."""
        if (snapshot.kind, snapshot.window) != (self.kind, self.window):
            raise CacheError(
                f"a {snapshot.kind} snapshot (window {snapshot.window}) does not fit "
                f"a {self.kind} layer (window {self.window})"
            )


class KVLayer(CacheLayer):
    """Full attention: keys [1, h, P, dk] and values [1, h, P, dv] of all P = offset tokens."""

    kind = "kv"

    def __init__(self) -> None:
        self._buffer = RowBuffer()

    @property
    def nbytes(self) -> int:
        return self.offset * self._buffer.row_bytes

    @property
    def held_bytes(self) -> int:
        return self._buffer.capacity * self._buffer.row_bytes

    def arrays(self) -> list[mx.array]:
        return self._buffer.arrays()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append S rows [1, h, S, d] and return all P + S rows of keys and of values."""
        self._buffer.append(keys, values)
        self.offset = self._buffer.rows
        return self._buffer.view(0, self.offset)

    def valid(self) -> tuple[mx.array, mx.array] | None:
        """All rows of keys and of values; None while there are none."""
        return self._buffer.view(0, self.offset) if self.offset else None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Mask for the next N rows; a network may ask a full layer for a window."""
        return choose_mask(N, self.offset, window=window_size, return_array=return_array)

    def can_trim(self, n: int) -> bool:
        return 0 <= n <= self.offset

    def block(self, start: int, stop: int) -> LayerBlock:
        self._check_span(start, stop)
        arrays = self._buffer.copy(start, stop) if stop > start else ()
        return LayerBlock(self.kind, None, start, stop, 0, arrays)

    def restore(self, snapshot: LayerSnapshot) -> None:
        self.check_snapshot(snapshot)
        self._buffer.install([(keys, values) for keys, values in snapshot.parts])
        self.offset = snapshot.offset

    def _trim(self, n: int) -> None:
        self._buffer.cut(n)
        self.offset -= n


class SlidingKVLayer(CacheLayer):
    """Sliding-window attention: a query sees itself and the W - 1 tokens before it.

    The state is the last min(P, W - 1) rows, whatever the chunks they came in. The rows of the last append stay until
    the next append or `settle()`, so at most W - 1 + S rows (and spare capacity) are held, and exactly those appends
    can be taken back: `trim(n)` is exact for n up to the rows of the last append, and for any n while the sequence
    was no longer than W - 1 before it. Everything else is refused.
    """

    kind = "sliding_kv"

    def __init__(self, window: int) -> None:
        if window < 1:
            raise CacheError(f"a sliding window must hold at least the token itself, not {window}")
        self.window: int = window
        self._buffer = RowBuffer()
        self._floor = 0  # the smallest offset that trim can go back to

    @property
    def nbytes(self) -> int:
        return self._tail(self.offset) * self._buffer.row_bytes

    @property
    def held_bytes(self) -> int:
        return self._buffer.capacity * self._buffer.row_bytes

    def arrays(self) -> list[mx.array]:
        return self._buffer.arrays()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append S rows [1, h, S, d] and return the min(P, W - 1) rows before them and the new ones."""
        self._buffer.append(keys, values, keep=self.window - 1)
        self._floor = self._settled_floor()
        self.offset += int(keys.shape[2])
        return self._buffer.view(0, self._buffer.rows)

    def valid(self) -> tuple[mx.array, mx.array] | None:
        """The last min(P, W - 1) rows of keys and of values; None while there are none."""
        rows, tail = self._buffer.rows, self._tail(self.offset)
        return self._buffer.view(rows - tail, rows) if tail else None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Mask for the next N rows over the kept tail and themselves, for the layer's window or a smaller one."""
        window = self.window if window_size is None else window_size
        if window > self.window:
            raise CacheError(f"a window of {window} was asked of a layer that keeps a window of {self.window}")
        return choose_mask(N, self._tail(self.offset), window=window, return_array=return_array)

    def can_trim(self, n: int) -> bool:
        return 0 <= n <= self.offset - self._floor

    def settle(self) -> None:
        self._buffer.shrink(self.window - 1)
        self._floor = self._settled_floor()

    def block(self, start: int, stop: int) -> LayerBlock:
        self._check_span(start, stop)
        needs = stop - self._tail(stop)
        first = max(start, needs, self.offset - self._buffer.rows)
        if first >= stop:
            return LayerBlock(self.kind, self.window, stop, stop, needs, ())
        base = self.offset - self._buffer.rows  # position of the buffer's first row
        return LayerBlock(self.kind, self.window, first, stop, needs, self._buffer.copy(first - base, stop - base))

    def restore(self, snapshot: LayerSnapshot) -> None:
        self.check_snapshot(snapshot)
        self._buffer.install([(keys, values) for keys, values in snapshot.parts])
        self.offset = snapshot.offset
        self._floor = self._settled_floor()

    def _trim(self, n: int) -> None:
        self._buffer.cut(n)
        self.offset -= n

    def _tail(self, offset: int) -> int:
        return min(offset, self.window - 1)

    def _settled_floor(self) -> int:
        """The floor when only the tail is held: 0 if that is the whole sequence, else no way back."""
        return 0 if self.offset < self.window else self.offset
