"""The products through MLX: right, exact, and enough to make one forward pass equal to single steps."""

from __future__ import annotations

import random
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from polytoken.kernels import products
from polytoken.kernels.products import ProductsReport
from polytoken.kernels.selftest import NO_TRANS, TRANS

pytestmark = pytest.mark.usefixtures("on_cpu")

RNG = np.random.default_rng(7)


def floats(*shape: int) -> mx.array:
    return mx.array(RNG.standard_normal(shape).astype(np.float32))


def same(a: mx.array, b: mx.array) -> bool:
    return np.array(a).tobytes() == np.array(b).tobytes()


def error(got: mx.array, want: np.ndarray) -> float:
    """Largest difference, relative where the wanted number is larger than one."""
    return float(np.max(np.abs(np.array(got, np.float64) - want) / np.maximum(1, np.abs(want)), initial=0))


def test_all_three_symbols_are_redirected(on_cpu: ProductsReport, extension: ModuleType) -> None:
    assert on_cpu.kind == "exact"
    assert on_cpu.form == extension.form()
    assert set(on_cpu.symbols) == {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"}
    assert on_cpu.reason is None


def test_three_thousand_products_against_float64() -> None:
    draw, worst = random.Random(5), 0.0
    for _ in range(3000):
        m, n, k = draw.randint(1, 33), draw.randint(1, 130), draw.randint(1, 129)
        batch = draw.choice([(), (), (2,), (3, 2)])
        a, b = floats(*batch, m, k), floats(*batch, k, n)
        if draw.random() < 0.4:
            a = mx.contiguous(a.swapaxes(-1, -2)).swapaxes(-1, -2)
        if draw.random() < 0.5:
            b = mx.contiguous(b.swapaxes(-1, -2)).swapaxes(-1, -2)
        want = np.array(a, np.float64) @ np.array(b, np.float64)
        if draw.random() < 0.4:
            c, alpha, beta = floats(*batch, m, n), draw.choice([1.0, 0.5, -2.0]), draw.choice([1.0, 0.0, 0.25])
            got = mx.addmm(c, a, b, alpha=alpha, beta=beta)
            want = alpha * want + beta * np.array(c, np.float64)
        else:
            got = a @ b
        worst = max(worst, error(got, want))
    print(f"worst difference {worst:.2e}")
    assert worst < 1e-4


def test_attention_against_float64() -> None:
    for heads, groups, depth in ((4, 4, 32), (9, 3, 64), (8, 2, 80)):
        for rows, keys in ((1, 37), (5, 5), (17, 65)):
            q, k, v = floats(1, heads, rows, depth), floats(1, groups, keys, depth), floats(1, groups, keys, depth)
            got = mx.fast.scaled_dot_product_attention(q, k, v, scale=depth**-0.5)
            kk, vv = (np.repeat(np.array(x, np.float64), heads // groups, axis=1) for x in (k, v))
            s = np.array(q, np.float64) @ kk.swapaxes(-1, -2) * depth**-0.5
            p = np.exp(s - s.max(-1, keepdims=True))
            assert error(got, p / p.sum(-1, keepdims=True) @ vv) < 1e-5


def test_mlx_gives_the_references_bits(extension: ModuleType) -> None:
    for m, n, k in ((1, 50, 64), (8, 33, 129), (40, 70, 333)):
        x, w = RNG.standard_normal((m, k), np.float32), RNG.standard_normal((n, k), np.float32)
        want = np.empty((m, n), np.float32)
        fused = int(extension.fused())
        extension.sgemm(NO_TRANS, TRANS, m, n, k, 1.0, x, k, w, k, 0.0, want, n, fused=fused)
        assert np.array_equal(np.array(mx.array(x) @ mx.array(w).T), want)
        assert np.array_equal(np.array(mx.array(x) @ mx.array(np.ascontiguousarray(w.T))), want)


def test_float64_and_complex_products() -> None:
    a, b = RNG.standard_normal((20, 30)), RNG.standard_normal((30, 25))
    got = mx.array(a, dtype=mx.float64) @ mx.array(b, dtype=mx.float64)
    assert np.abs(np.array(got) - a @ b).max() < 1e-12
    z, w = (a + 1j * a[::-1]).astype(np.complex64), (b - 2j * b[:, ::-1]).astype(np.complex64)
    assert np.abs(np.array(mx.array(z) @ mx.array(w)) - z @ w).max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 16, 100])
def test_rows_of_a_linear_layer_do_not_depend_on_the_chunk(chunk: int) -> None:
    x, w, bias = floats(1, 200, 576), floats(300, 576), floats(300)
    whole, biased = x @ w.T, mx.addmm(bias, x, w.T)
    for start in range(0, 200, chunk):
        part = x[:, start : start + chunk]
        assert same(part @ w.T, whole[:, start : start + chunk])
        assert same(mx.addmm(bias, part, w.T), biased[:, start : start + chunk])


def test_batch_neighbours_change_no_bit() -> None:
    x, w = floats(5, 7, 64), floats(90, 64)
    assert all(same((x @ w.T)[i], x[i] @ w.T) for i in range(5))


@pytest.mark.parametrize("shape", [(4, 4, 64), (9, 3, 64), (8, 2, 32), (6, 1, 80), (4, 2, 128)])
def test_one_query_equals_its_row_inside_a_causal_chunk(shape: tuple[int, int, int]) -> None:
    """What makes a verify forward equal to single steps, bit for bit."""
    heads, groups, depth = shape
    attend = mx.fast.scaled_dot_product_attention
    for offset in (0, 1, 5, 13, 64, 129):
        for rows in (1, 2, 3, 4, 5, 8, 9, 17, 33, 65):
            keys = offset + rows
            q, k, v = floats(1, heads, rows, depth), floats(1, groups, keys, depth), floats(1, groups, keys, depth)
            whole = attend(q, k, v, scale=depth**-0.5, mask="causal")
            boolean = mx.arange(keys)[None] <= mx.arange(offset, keys)[:, None]
            assert same(whole, attend(q, k, v, scale=depth**-0.5, mask=boolean))
            for i in range(0, rows, 1 if rows < 10 else 7):
                seen = offset + i + 1
                alone = attend(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen], scale=depth**-0.5)
                assert same(whole[:, :, i : i + 1], alone), (offset, rows, i)


def test_keys_before_a_sliding_window_change_no_bit() -> None:
    attend, window = mx.fast.scaled_dot_product_attention, 24
    q, k, v = floats(1, 6, 40, 64), floats(1, 2, 40, 64), floats(1, 2, 40, 64)
    distance = mx.arange(40)[:, None] - mx.arange(40)[None]
    whole = attend(q, k, v, scale=0.125, mask=(distance >= 0) & (distance < window))
    for i in range(40):
        first = max(0, i - window + 1)
        alone = attend(q[:, :, i : i + 1], k[:, :, first : i + 1], v[:, :, first : i + 1], scale=0.125)
        assert same(whole[:, :, i : i + 1], alone)


def test_other_operations_of_a_layer_are_row_independent() -> None:
    """Not ours, but exact decoding rests on them: a change in MLX must be noticed here."""
    for width in (7, 64, 577):
        x, weight = floats(33, width), floats(width)
        operations = {
            "rms_norm": lambda r, w=weight: mx.fast.rms_norm(r, w, 1e-5),
            "layer_norm": lambda r, w=weight: mx.fast.layer_norm(r, w, w, 1e-5),
            "softmax": lambda r: mx.softmax(r, axis=-1),
            "logsumexp": lambda r: mx.logsumexp(r, axis=-1),
            "silu": lambda r: r * mx.sigmoid(r),
            "cumsum": lambda r: mx.cumsum(r, axis=-1),
        }
        for name, operation in operations.items():
            whole = operation(x)
            for start, stop in ((0, 1), (5, 6), (4, 7), (30, 33), (1, 33)):
                assert same(operation(x[start:stop]), whole[start:stop]), name
        masked = mx.concatenate([x, mx.full((33, 11), -mx.inf)], axis=-1)
        assert same(mx.softmax(masked, axis=-1)[:, :width], mx.softmax(x, axis=-1))
        before = mx.concatenate([mx.full((33, 5), -mx.inf), x], axis=-1)
        assert same(mx.softmax(before, axis=-1)[:, 5:], mx.softmax(x, axis=-1))


def test_rotary_positions_are_row_independent() -> None:
    x = floats(1, 3, 20, 64)
    for offset in (0, 3, 1000):
        whole = mx.fast.rope(x, 64, traditional=False, base=10000.0, scale=1.0, offset=offset)
        for i in range(20):
            row = mx.contiguous(x[:, :, i : i + 1])
            alone = mx.fast.rope(row, 64, traditional=False, base=10000.0, scale=1.0, offset=offset + i)
            assert same(whole[:, :, i : i + 1], alone)


def test_empty_products() -> None:
    assert (mx.zeros((0, 5)) @ mx.zeros((5, 3))).shape == (0, 3)
    assert not np.array(mx.zeros((4, 0)) @ mx.zeros((0, 3))).any()


def test_stock_and_back() -> None:
    x, w = floats(9, 700), floats(40, 700)
    exact = x @ w.T
    mx.eval(exact)
    assert products.enable("stock").kind == "stock"
    stock = x @ w.T
    mx.eval(stock)
    assert not same(stock, exact)
    assert np.abs(np.array(stock) - np.array(exact)).max() < 1e-3
    assert products.enable("stock").symbols == ()
    for _ in range(3):
        assert products.enable("exact").kind == "exact"
        assert same(x @ w.T, exact)
