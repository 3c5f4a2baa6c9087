"""The ring: where the logical canvas lies in physical slots, and what an advance refills.

The canvas never moves in memory. Row by row a head h says where it begins: logical position j lies in physical slot
(h + j) mod C, and slot p holds logical position (p - h) mod C. Committing n positions moves the head by n; the n slots
that fall behind it become the tail of the new canvas.
"""

from __future__ import annotations

import mlx.core as mx


def physical_slots(head: mx.array, C: int) -> mx.array:
    """int32 [B, C]: the slot of each logical position, for head int32 [B]."""
    return (head[:, None] + mx.arange(C, dtype=mx.int32)[None, :]) % C


def logical_positions(head: mx.array, C: int) -> mx.array:
    """int32 [B, C]: the logical position that each slot holds, for head int32 [B]."""
    return (mx.arange(C, dtype=mx.int32)[None, :] - head[:, None]) % C  # MLX's % takes the sign of C: never negative


def to_logical(x: mx.array, head: mx.array) -> mx.array:
    """x [B, C, ...] from physical to logical order."""
    return _gather(x, physical_slots(head, x.shape[1]))


def to_physical(x: mx.array, head: mx.array) -> mx.array:
    """x [B, C, ...] from logical to physical order; the inverse of `to_logical`."""
    return _gather(x, logical_positions(head, x.shape[1]))


def valid_slots(head: mx.array, remaining: mx.array, C: int) -> mx.array:
    """bool [B, C], physical: slots whose logical position still lies within the remaining output, int32 [B]."""
    return logical_positions(head, C) < remaining[:, None]


def refilled_slots(head: mx.array, lengths: mx.array, C: int) -> mx.array:
    """bool [B, C], physical: slots that an advance by lengths int32 [B] refills, given the head before it."""
    return logical_positions(head, C) < lengths[:, None]


def advance_head(head: mx.array, lengths: mx.array, C: int) -> mx.array:
    """int32 [B]: the head after an advance."""
    return ((head + lengths) % C).astype(mx.int32)


def initial_canvas(noise: mx.array, *, max_new_tokens: int, pad_id: int) -> mx.array:
    """int32 [B, C] at head 0: noise where output may come to lie, pads beyond it."""
    slots = mx.arange(noise.shape[1], dtype=mx.int32)[None, :]
    return mx.where(slots < max_new_tokens, noise, pad_id).astype(mx.int32)


def pad_exposed(canvas: mx.array, head: mx.array, *, lengths: mx.array, remaining: mx.array, pad_id: int) -> mx.array:
    """Put pads where an advance exposed positions that no output will reach.

    Pads do not stick: the next proposal overwrites them like any other slot. Commits never reach them, because those
    positions are not valid.

    Args:
        canvas: int32 [B, C], physical, after the advance.
        head: int32 [B], after the advance.
        lengths: int32 [B], by how much was advanced.
        remaining: int32 [B], output still to come after the advance.
        pad_id: the pad.
    """
    C = canvas.shape[1]
    position = logical_positions(head, C)
    exposed = position >= C - lengths[:, None]
    return mx.where(exposed & (position >= remaining[:, None]), pad_id, canvas).astype(mx.int32)


def _gather(x: mx.array, index: mx.array) -> mx.array:
    """x [B, C, ...] with its axis 1 reordered by index [B, C]."""
    index = index.reshape(*index.shape, *(1 for _ in x.shape[2:]))
    return mx.take_along_axis(x, mx.broadcast_to(index, x.shape), axis=1)
