"""The generator of the tiny weights: same bits everywhere, no neutral tensor, no tensor that depends on another."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from polytoken.testkit.weights import TensorSpec, draw, draw_all

# Fixed when the generator was written. They may only change together with every file of tests/fixtures.
GOLDEN = {
    ("model.embed_tokens.weight", (8, 4), "embedding", 0): "062e08262f6a6b1d",
    ("model.norm.weight", (16,), "norm", 0): "1892bd12088a4b63",
    ("model.norm.weight", (16,), "norm_zero_centred", 7): "c9f434d59a8006b3",
    ("a.weight", (3, 5, 7), "matrix", 1): "73ea33098e3c9f82",
    ("A_log", (4,), "a_log", 0): "555166c47b21bf11",
    ("dt_bias", (4,), "dt_bias", 0): "d1105ac23ed10d23",
    ("layer_scalar", (1,), "layer_scalar", 0): "07493acac91bdd66",
    ("q_proj.bias", (12,), "bias", 2**40): "33cd1c9a36a86f10",
}


@pytest.mark.parametrize(("key", "digest"), GOLDEN.items(), ids=str)
def test_bits_are_the_same_everywhere(key: tuple, digest: str) -> None:
    name, shape, kind, seed = key
    array = draw(name, TensorSpec(shape, kind), seed=seed)
    assert (array.dtype, array.shape) == (np.float32, shape)
    assert hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()[:16] == digest


def test_tensors_are_independent() -> None:
    table = {"a": TensorSpec((4, 8)), "b": TensorSpec((4, 8))}
    alone = draw_all({"b": table["b"]}, seed=5)["b"]
    both = draw_all(table, seed=5)
    assert np.array_equal(both["b"], alone)
    assert not np.array_equal(both["a"], both["b"])
    assert not np.array_equal(draw("b", table["b"], seed=6), alone)


def test_a_longer_tensor_starts_with_the_shorter_one() -> None:
    short, long = (draw("x", TensorSpec((rows, 8)), seed=0) for rows in (3, 5))
    assert np.array_equal(long[:3], short)


def test_matrices_keep_the_scale_of_what_goes_through_them() -> None:
    matrix = draw("w", TensorSpec((512, 256)), seed=0)
    assert abs(float(matrix.std()) * 16 - 1) < 0.01
    assert abs(float(matrix.mean())) < 0.001


@pytest.mark.parametrize(
    ("kind", "neutral"),
    [("norm", 1.0), ("norm_zero_centred", 0.0), ("bias", 0.0), ("layer_scalar", 1.0), ("dt_bias", 0.0), ("a_log", 0.0)],
)
def test_nothing_is_neutral(kind: str, neutral: float) -> None:
    values = draw("w", TensorSpec((64,), kind), seed=0)  # type: ignore[arg-type]
    assert np.abs(values - neutral).min() > 0
    assert np.abs(values - neutral).mean() > 0.05
