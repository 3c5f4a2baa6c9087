"""The ring head: with head h, logical position j of a canvas of C lies in physical slot (h + j) mod C."""

from __future__ import annotations

import mlx.core as mx


def physical_slots(head: mx.array, canvas: int) -> mx.array:
    """int32 [B, C]: the physical slot of every logical position, for heads int32 [B]."""
    return (head[:, None] + mx.arange(canvas, dtype=mx.int32)[None]) % canvas


def logical_positions(head: mx.array, canvas: int) -> mx.array:
    """int32 [B, C]: the logical position of every physical slot, for heads int32 [B]."""
    # MLX's remainder takes the divisor's sign, so a slot before the head gives no negative position.
    return (mx.arange(canvas, dtype=mx.int32)[None] - head[:, None]) % canvas


def to_logical(array: mx.array, head: mx.array) -> mx.array:
    """An array [B, C] or [B, C, ...] from physical to logical order."""
    return _take(array, physical_slots(head, array.shape[1]))


def to_physical(array: mx.array, head: mx.array) -> mx.array:
    """An array [B, C] or [B, C, ...] from logical to physical order."""
    return _take(array, logical_positions(head, array.shape[1]))


def _take(array: mx.array, index: mx.array) -> mx.array:
    index = index.reshape(*index.shape, *[1] * (array.ndim - 2))
    return mx.take_along_axis(array, mx.broadcast_to(index, array.shape), axis=1)
