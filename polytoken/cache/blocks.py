"""Records that outlive a decoding state: a layer's block of rows, and a layer's snapshot joined from blocks.

Nothing here changes after it is made. The arrays of a record are read by many borrowers and written by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class LayerBlock:
    """What one layer keeps of the tokens up to `stop`: with the blocks before it, a state at `stop` can be rebuilt.

    Attributes:
        kind: the layer class's `kind`.
        window: W of a sliding layer, else None.
        start: first row held. A layer whose state at `stop` stands alone (recurrent) says 0 and holds that state.
        stop: number of tokens encoded at the end of the block.
        needs: first row that a state at `stop` must have: 0, or stop - (W - 1) for a sliding layer.
        arrays: the rows [start, stop), (keys [1, h, stop - start, dk], values [1, h, stop - start, dv]); () if none.
        alone: whether the arrays are a state that stands alone at `stop`: it needs nothing before it and cannot be cut.
    """

    kind: str
    window: int | None
    start: int
    stop: int
    needs: int
    arrays: tuple[mx.array, ...]
    alone: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arrays; known before they are evaluated."""
        return sum(int(array.nbytes) for array in self.arrays)


@dataclass(frozen=True, eq=False)
class LayerSnapshot:
    """One layer's state at `offset`, as consecutive parts that are read and never written.

    Attributes:
        kind, window: as in `LayerBlock`.
        offset: tokens encoded.
        parts: consecutive runs of rows, each (keys, values); they may be shared with a store and with other snapshots.
    """

    kind: str
    window: int | None
    offset: int
    parts: tuple[tuple[mx.array, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the valid state."""
        return sum(int(array.nbytes) for part in self.parts for array in part)

    def arrays(self) -> list[mx.array]:
        """The state as whole arrays (keys [1, h, n, dk], values [1, h, n, dv]); parts are joined lazily."""
        if len(self.parts) <= 1:
            return [array for part in self.parts for array in part]
        return [mx.concatenate(list(rows), axis=2) for rows in zip(*self.parts, strict=True)]


def first_needed(block: LayerBlock, stop: int) -> int:
    """First row that a state at `stop` must have, for a position at or before the block's own end."""
    if stop == block.stop or block.window is None:
        return block.needs
    return max(0, stop - (block.window - 1))


def join_blocks(blocks: Sequence[LayerBlock], stop: int | None = None) -> LayerSnapshot | None:
    """The snapshot at the end of a chain of blocks (oldest first), or None if rows that it needs are missing.

    With `stop`, the snapshot after that many tokens, which must lie within the last block.
    Shares the blocks' arrays; only the oldest and the newest part may be views of the rows that still count.
    """
    last = blocks[-1]
    end = last.stop if stop is None else stop
    needs = first_needed(last, end)
    parts: list[tuple[mx.array, ...]] = []
    reached = end
    for block in reversed(blocks):
        if reached <= needs:
            break
        if min(block.stop, end) != reached or block.start >= reached:
            return None
        low, high = max(0, needs - block.start), reached - block.start
        whole = low == 0 and reached == block.stop
        parts.append(block.arrays if whole else tuple(array[:, :, low:high] for array in block.arrays))
        reached = block.start
    if reached > needs:
        return None
    return LayerSnapshot(last.kind, last.window, end, tuple(reversed(parts)))


def stitch_blocks(older: LayerBlock, newer: LayerBlock) -> LayerBlock:
    """`newer`, with rows in front of it that only `older` still has (lazy, in memory of its own)."""
    missing = newer.start - older.start
    have_rows = bool(older.arrays and newer.arrays)
    if newer.alone or missing <= 0 or newer.start > older.stop or not have_rows:
        return newer
    rows = zip(older.arrays, newer.arrays, strict=True)
    arrays = tuple(mx.concatenate([old[:, :, :missing], new], axis=2) for old, new in rows)
    return replace(newer, start=older.start, arrays=arrays)
