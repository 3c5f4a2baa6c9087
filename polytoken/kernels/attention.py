"""Attention of rows over a cache: one compiled operation on the CPU in float32, MLX's own elsewhere."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from polytoken.kernels import blocks

Mask = mx.array | Literal["causal"] | None
"""What rows see of the keys: all; all but the later ones of the last rows; or what a boolean [S, P] says."""


def attend(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask) -> mx.array:
    """softmax(scale Q K^T) V, float [1, S, H D] of queries [1, H, S, D] over keys and values [1, h, P, D].

    The rows are the last of the P positions if `mask` is "causal"; else it is None or boolean [S, P]. Keys and values
    are a cache's: within a head one row follows another in memory. On the CPU MLX computes an exponential in several
    times what the products around it cost, so there `_fused` does all of it (see `blocks.ROW_CONTRACT`).
    """
    extension = None
    if queries.dtype == keys.dtype == values.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu):
        extension = blocks.extension()
    if extension is None:
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        return mixed.transpose(0, 2, 1, 3).reshape(1, queries.shape[2], -1)
    if isinstance(mask, mx.array):
        return extension.attend(queries, keys, values, scale, mask=mask)  # type: ignore[no-any-return]
    return extension.attend(queries, keys, values, scale, causal=mask == "causal")  # type: ignore[no-any-return]
