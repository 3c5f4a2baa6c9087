"""Pieces of a Gemma 4 layer that are written with fewer operations than the formula, against the formula."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from polytoken.models.gemma4.blocks import gated, plain_norm, rotary_periods
from polytoken.models.gemma4.config import Rope
from polytoken.models.gemma4.rotation import FullRotation, KeptRope


def test_the_gate_is_gelu_in_its_tanh_form() -> None:
    gate = np.linspace(-9, 9, 301)
    up = np.cos(gate)
    wanted = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    np.testing.assert_allclose(np.array(gated(mx.array(gate, mx.float32), mx.array(up, mx.float32))), wanted, atol=2e-6)


def test_one_norm_with_three_weights_is_three_norms(device: str) -> None:
    """Dense MLP, router and experts share it."""
    x = mx.random.normal((5, 48), key=mx.random.key(0))
    weight = mx.random.normal((48,), key=mx.random.key(1))
    shared, own = np.array(plain_norm(x, 1e-6) * weight), np.array(mx.fast.rms_norm(x, weight, 1e-6))
    assert np.array_equal(shared, own) if device == "cpu" else np.allclose(shared, own, atol=1e-5)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_kept_tables_turn_like_the_library_bit_for_bit(share: float, device: str) -> None:
    """Rows at more positions than are kept come and go, as they do when requests denoise side by side."""
    rotation = FullRotation(rotary_periods(Rope(theta=1e4, share=share), 32))
    kept = KeptRope(rotation, 32)
    for _ in range(2):
        for offset in range(0, 300, 17):
            for heads in (4, 2):
                x = mx.random.normal((1, heads, 6, 32), key=mx.random.key(offset + heads))
                turned, wanted = np.array(kept(x, offset)), np.array(rotation(x, offset))
                assert np.array_equal(turned, wanted) if device == "cpu" else np.allclose(turned, wanted, atol=1e-5)
    assert len(kept._kept) == 8
    half = mx.ones((1, 1, 3, 32), mx.bfloat16)
    assert mx.array_equal(kept(half, 5), rotation(half, 5)).item()
