"""Rotary positions on the CPU: one table of cosines and sines per forward, shared by all layers.

MLX's own rotation works out the cosines and sines of every layer again, a dozen small operations each; on the CPU these
cost more than rotating. The table is read off the layer's own rotation, and the products and sums are the same, so the
result is bit-equal to it. On a GPU one fused kernel does all of it, and nothing here is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn


class SharedRope(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    """Stands in for the half-split rotation `rope` of all `dims` = D of a head, with integer offsets.

    With [c | s] = rope of a head whose first half is 1 and second half 0, the rotation of x = [a | b] is
    [a c - b s | b c + a s] (RoFormer, arXiv 2104.09864), whatever frequencies and scale `rope` uses.
    """

    def __init__(self, rope: nn.Module, dims: int) -> None:
        super().__init__()
        self._rope = rope
        self._dims = dims
        self._at: tuple[int, int] | None = None
        self._table: tuple[mx.array, mx.array] | None = None

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """Rotate x [B, h, S, D] whose first row stands at position `offset`."""
        if not isinstance(offset, int) or x.shape[-1] != self._dims or x.dtype != mx.float32:
            # A table in half precision would round once more than the library does.
            turned: mx.array = self._rope(x, offset=offset)
            return turned
        cosines, sines = self.tables(x.shape[-2], offset)
        half = self._dims // 2
        swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return x * cosines + swapped * sines

    def tables(self, rows: int, offset: int) -> tuple[mx.array, mx.array]:
        """[c | c] and [-s | s], each [1, 1, rows, D]; made anew when the position or the number of rows changes."""
        at = (rows, offset)
        if self._table is None or self._at != at:
            half = self._dims // 2
            unit = mx.concatenate([mx.ones((1, 1, rows, half)), mx.zeros((1, 1, rows, half))], axis=-1)
            turned = self._rope(unit, offset=offset)
            c, s = turned[..., :half], turned[..., half:]
            self._table = mx.concatenate([c, c], axis=-1), mx.concatenate([-s, s], axis=-1)
            self._at = at
        return self._table


def share_rope(attentions: Iterable[Any], *, dims: int) -> None:
    """Give attention blocks with equal rotations one `SharedRope`; others, and rotations of another kind, stay."""
    shared: dict[Any, SharedRope] = {}
    for attention in attentions:
        rope = attention.rope
        scaled = getattr(rope, "mscale", 1.0) != 1.0  # it scales before it rotates, which rounds apart
        if scaled or getattr(rope, "traditional", False) or getattr(rope, "dims", None) != dims:
            continue
        key = _signature(rope)
        if key not in shared:
            shared[key] = SharedRope(rope, dims)
        attention.rope = shared[key]


def _signature(rope: nn.Module) -> tuple[Any, ...]:
    """Equal for rotations that do the same: their class and everything they hold."""
    held = {**vars(rope), **dict(rope.items())}
    return type(rope), *(
        (name, np.array(value).tobytes() if isinstance(value, mx.array) else repr(value))
        for name, value in sorted(held.items())
        if name not in ("_no_grad", "_training")
    )
