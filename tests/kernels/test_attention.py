"""Attention alone as one operation: right against float64, and a row's bits depend on nothing but what the row sees."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.kernels import blocks, products
from polytoken.kernels.attention import attend

RNG = np.random.default_rng(7)
SHAPES = [(9, 3, 64), (4, 4, 20), (6, 1, 33), (8, 2, 256), (1, 1, 5)]


pytestmark = pytest.mark.usefixtures("fused")


def make(heads: int, kv_heads: int, width: int, rows: int, total: int) -> list[np.ndarray]:
    shapes = (heads, rows), (kv_heads, total), (kv_heads, total)
    return [RNG.standard_normal((1, h, n, width)).astype(np.float32) for h, n in shapes]


def run(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any = None) -> np.ndarray:
    mask = mx.array(mask) if isinstance(mask, np.ndarray) else mask
    arrays = (mx.array(np.ascontiguousarray(a)) for a in (q, k, v))
    return np.array(attend(*arrays, scale=q.shape[-1] ** -0.5, mask=mask))


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    q, k, v = (a[0].astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, len(q) // len(a), axis=0) for a in (k, v))
    scores = np.where(seen, q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return ((weights / weights.sum(-1, keepdims=True)) @ v).swapaxes(0, 1).reshape(1, q.shape[1], -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(form: str, shape: tuple[int, int, int]) -> None:
    q, k, v = make(*shape, rows=30, total=75)
    causal = np.tril(np.ones((30, 75), bool), 45)
    holes = causal & (RNG.random((30, 75)) < 0.5)
    holes[:, 0] = True
    for seen, mask in ((causal, "causal"), (holes, holes), (np.ones_like(causal), None)):
        assert np.abs(run(q, k, v, mask) - reference(q, k, v, seen)).max() < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_come_out_alike_alone_and_together(form: str, shape: tuple[int, int, int]) -> None:
    """K01: one row, a verified window and a chunk of a prompt agree in every bit."""
    q, k, v = make(*shape, rows=140, total=140)
    whole = run(q, k, v, "causal")
    for chunk in (1, 2, 3, 5, 8, 17, 64, 139):
        for start in range(0, 140 - chunk, max(chunk, 19)):
            rows, seen = slice(start, start + chunk), slice(0, start + chunk)
            mask = None if chunk == 1 else "causal"
            assert run(q[:, :, rows], k[:, :, seen], v[:, :, seen], mask).tobytes() == whole[:, rows].tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 90), st.integers(0, 2**31))
def test_keys_that_a_row_does_not_see_change_no_bit(rows: int, past: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = make(6, 2, 24, rows=rows, total=past + rows)
    mask = rng.random((rows, past + rows)) < 0.4
    mask[:, rng.integers(past + rows)] = True
    together = run(q, k, v, mask)
    for i in {0, rows // 2, rows - 1}:
        kept = np.flatnonzero(mask[i])
        alone = run(q[:, :, i : i + 1], k[:, :, kept], v[:, :, kept])
        assert alone.tobytes() == together[:, i : i + 1].tobytes()


def test_queries_of_any_layout_and_a_cache_with_room() -> None:
    q, k, v = make(4, 2, 16, rows=9, total=20)
    plain = run(q, k, v, "causal")
    turned = mx.contiguous(mx.array(q).swapaxes(1, 2)).swapaxes(1, 2)
    roomy = [mx.concatenate([mx.array(a), mx.full((1, 2, 50, 16), mx.nan)], axis=2)[:, :, :20] for a in (k, v)]
    assert np.array(attend(turned, *roomy, scale=0.25, mask="causal")).tobytes() == plain.tobytes()
    with pytest.raises((RuntimeError, ValueError), match="keys"):
        mx.eval(attend(turned, mx.contiguous(roomy[0].swapaxes(2, 3)).swapaxes(2, 3), roomy[1], scale=0.25, mask=None))


def test_other_widths_of_numbers_and_other_products_are_left_to_mlx() -> None:
    q, k, v = (mx.array(a) for a in make(4, 2, 16, rows=3, total=8))
    half = [a.astype(mx.bfloat16) for a in (q, k, v)]
    got = attend(*half, scale=0.25, mask="causal")
    assert got.dtype == mx.bfloat16 and got.shape == (1, 3, 64)
    ours = np.array(attend(q, k, v, scale=0.25, mask="causal"))
    products.enable("stock")
    try:
        assert blocks.extension() is None
        theirs = np.array(attend(q, k, v, scale=0.25, mask="causal"))
    finally:
        products.enable("exact")
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = (mx.array(a) for a in make(4, 2, 16, rows=5, total=8))
    for wrong in (
        lambda: attend(q[:, :3], k, v, scale=1.0, mask=None),
        lambda: attend(q, k, v[:, :, 1:], scale=1.0, mask=None),
        lambda: attend(q, k[:, :, :4], v[:, :, :4], scale=1.0, mask="causal"),
        lambda: attend(q, k, v, scale=1.0, mask=mx.ones((5, 7), dtype=mx.bool_)),
        lambda: attend(q, k[..., :8], v[..., :8], scale=1.0, mask=None),
    ):
        with pytest.raises(ValueError):
            wrong()
