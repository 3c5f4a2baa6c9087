"""Rotary positions of Gemma 4's layers, whose tables of cosines and sines are kept from one denoise to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from polytoken.kernels.rope import SharedRope

_KEPT: Final = 8  # tables; rows that run side by side stand at positions of their own


class FullRotation(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    """MLX's rotation of whole heads by given periods."""

    def __init__(self, periods: mx.array) -> None:
        super().__init__()
        self._periods = periods

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """Rotate x [1, h, S, D] whose first row stands at position `offset`."""
        width = x.shape[-1]
        return mx.fast.rope(x, width, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


class KeptRope(SharedRope):
    """A `SharedRope` that keeps the tables of several positions.

    A canvas stays where it is for many denoises, and all layers of a kind turn alike.
    """

    def __init__(self, rope: nn.Module, dims: int) -> None:
        super().__init__(rope, dims)
        self._kept: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def tables(self, rows: int, offset: int) -> tuple[mx.array, mx.array]:
        at = (rows, offset)
        found = self._kept.pop(at, None) or self._make_tables(rows, offset)
        self._kept[at] = found  # the latest stands last
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return found

    def _make_tables(self, rows: int, offset: int) -> tuple[mx.array, mx.array]:
        self._table = None
        return super().tables(rows, offset)


def share_rotations(attentions: Iterable[Any], kinds: Iterable[str]) -> None:
    """Let all layers of a kind use one rotation with kept tables, where a rotation is many operations: on the CPU."""
    if mx.default_device() != mx.Device(mx.cpu):
        return
    shared: dict[str, KeptRope] = {}
    for attention, kind in zip(attentions, kinds, strict=True):
        if kind not in shared:
            shared[kind] = KeptRope(attention.rotation, attention.width)
        attention.rotation = shared[kind]
