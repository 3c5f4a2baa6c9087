"""A growable buffer of key and value rows in temporal order.

Arrays are only ever rebound, never written where somebody else could see it: a write makes a new array expression, and
MLX reuses the old memory exactly when nobody else holds it. So an append costs its own rows, and yet no view handed
out earlier can change.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from polytoken.errors import CacheError

Rows = tuple[mx.array, mx.array]
"""Keys [1, h, n, dk] and values [1, h, n, dv] of the same n tokens."""

STEP = 256
"""Buffer capacities are multiples of this many rows."""


def write_rows(buffer: mx.array, rows: mx.array, at: int) -> mx.array:
    """`buffer` [1, h, C, d] with `rows` [1, h, S, d] at row `at`, as a new array; `buffer` itself keeps its values."""
    fresh = buffer[...]  # a new object, so that the item assignment below rebinds it and nothing else
    fresh[:, :, at : at + rows.shape[2]] = rows
    return fresh


def copy_array(array: mx.array) -> mx.array:
    """The same values, at least 1-d and not empty, in memory of their own and exactly as large as they are (lazy).

    Neither a full-range item assignment nor `mx.contiguous` will do: the first returns its right-hand side, and the
    second shares the source's memory when that is only a little larger. Both would let a small record keep a large
    buffer alive, and a shared buffer cannot be appended to in place. A write at a computed index always copies.
    """
    return mx.slice_update(mx.zeros_like(array), array, mx.array([0]), axes=[0])


def room_for(rows: int) -> int:
    """Capacity to allocate, more than `rows`: an eighth more, so that growing copies O(1) rows per row appended."""
    return (rows + rows // 8) // STEP * STEP + STEP


class RowBuffer:
    """Keys [1, h, C, dk] and values [1, h, C, dv] of which the rows [start, stop) count.

    Attributes:
        rows: number of rows that count.
        capacity: C, 0 before the first append.
        row_bytes: bytes of one row of keys and values together, 0 before the first append.
    """

    def __init__(self) -> None:
        self._pair: Rows | None = None
        self._start = 0
        self._stop = 0

    @property
    def rows(self) -> int:
        return self._stop - self._start

    @property
    def capacity(self) -> int:
        return 0 if self._pair is None else int(self._pair[0].shape[2])

    @property
    def row_bytes(self) -> int:
        return sum(array.nbytes // array.shape[2] for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """The live arrays, for evaluation."""
        return [] if self._pair is None else list(self._pair)

    def append(self, keys: mx.array, values: mx.array, *, keep: int | None = None) -> None:
        """Put S rows behind the last `keep` rows (None: behind all rows); older rows are forgotten.

        Raises CacheError for more than one sequence, unequal row counts, or a dtype or shape unlike the rows held.
        """
        added = check_rows(keys, values, like=self._pair)
        kept = self.rows if keep is None else min(self.rows, keep)
        wanted = room_for(kept + added)
        # At row 0 there is nothing to keep, and a write over the whole buffer would install the caller's own array.
        fits = self._stop > 0 and self._stop + added <= self.capacity <= wanted + STEP
        if self._pair is not None and fits:
            old_keys, old_values = self._pair
            self._pair = write_rows(old_keys, keys, self._stop), write_rows(old_values, values, self._stop)
            self._start = self._stop - kept
            self._stop += added
        else:
            old = [] if kept == 0 else [self.view(self.rows - kept, self.rows)]
            self._lay_out([*old, (keys, values)], capacity=wanted)

    def install(self, parts: Sequence[Rows]) -> None:
        """Replace everything by a private copy of the given consecutive (keys, values) rows."""
        filled = [part for part in parts if part[0].shape[2] > 0]
        rows = sum(check_rows(*part, like=filled[0]) for part in filled)
        if rows:
            self._lay_out(filled, capacity=room_for(rows))
        else:
            self.clear()

    def clear(self) -> None:
        """Forget all rows and give back their memory."""
        self._pair = None
        self._start = self._stop = 0

    def view(self, start: int, stop: int) -> Rows:
        """Rows [start, stop) of those that count, as fresh array objects that share the memory."""
        keys, values = self._filled()
        lo, hi = self._start + start, self._start + stop
        return keys[:, :, lo:hi], values[:, :, lo:hi]

    def copy(self, start: int, stop: int) -> Rows:
        """Rows [start, stop) of those that count, in memory of their own (still lazy)."""
        keys, values = self._filled()
        lo, hi = self._start + start, self._start + stop
        return copy_array(keys[:, :, lo:hi]), copy_array(values[:, :, lo:hi])

    def cut(self, rows: int) -> None:
        """Forget the last `rows` rows; the next append overwrites them."""
        self._stop -= rows

    def shrink(self, keep: int) -> None:
        """Forget all but the last `keep` rows and give back memory that is much larger than they need."""
        self._start = max(self._start, self._stop - keep)
        if self.rows == 0:
            self.clear()
        elif self.capacity > room_for(self.rows) + STEP:
            self._lay_out([self.view(0, self.rows)], capacity=room_for(self.rows))

    def _filled(self) -> Rows:
        if self._pair is None:
            raise CacheError("the cache holds no rows yet")
        return self._pair

    def _lay_out(self, parts: Sequence[Rows], *, capacity: int) -> None:
        rows = sum(int(keys.shape[2]) for keys, _ in parts)

        def join(arrays: Sequence[mx.array]) -> mx.array:
            _, heads, _, width = arrays[0].shape
            return mx.concatenate([*arrays, mx.zeros((1, heads, capacity - rows, width), arrays[0].dtype)], axis=2)

        self._pair = join([keys for keys, _ in parts]), join([values for _, values in parts])
        self._start, self._stop = 0, rows


def check_rows(keys: mx.array, values: mx.array, *, like: Rows | None) -> int:
    """The number of rows, if both arrays are [1, h, rows, d] and of the dtype, heads and width of `like`."""
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != 1 or keys.shape[:3] != values.shape[:3]:
        raise CacheError(
            f"keys and values must be [1, heads, rows, width] of one sequence, not {keys.shape} and {values.shape}"
        )
    for new, old in zip((keys, values), like or (), strict=False):
        if new.dtype != old.dtype or new.shape[1] != old.shape[1] or new.shape[3] != old.shape[3]:
            raise CacheError(f"rows of {new.dtype} {new.shape} do not fit a cache of {old.dtype} {old.shape}")
    return int(keys.shape[2])
