"""Fused decoder blocks: right against float64, and a row's bits depend on nothing but what the row sees."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.kernels import blocks, products

HIDDEN, INNER, EPS, HEAD_EPS = 75, 147, 1e-5, 1e-6
RNG = np.random.default_rng(3)
Arrays = dict[str, np.ndarray]

pytestmark = pytest.mark.usefixtures("fused")


def floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


class Case:
    """One block of odd sizes, and what stands before and in front of it."""

    def __init__(self, fused: ModuleType, *, heads: int, kv_heads: int, width: int, extras: bool = True) -> None:
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        qkv = (heads + 2 * kv_heads) * width
        self.weights: Arrays = {
            "first_norm": 1 + floats(HIDDEN, scale=0.1),
            "second_norm": 1 + floats(HIDDEN, scale=0.1),
            "qkv": floats(qkv, HIDDEN, scale=0.2),
            "out": floats(HIDDEN, heads * width, scale=0.2),
            "gate_up": floats(2 * INNER, HIDDEN, scale=0.2),
            "down": floats(HIDDEN, INNER, scale=0.2),
        }
        if extras:
            self.weights |= {"q_norm": 1 + floats(width, scale=0.1), "k_norm": 1 + floats(width, scale=0.1)}
            self.weights |= {"qkv_bias": floats(qkv), "out_bias": floats(HIDDEN)}
            self.weights |= {"gate_up_bias": floats(2 * INNER), "down_bias": floats(HIDDEN)}
        arrays = {name: mx.array(value) for name, value in self.weights.items()}
        mx.eval(arrays)
        self.scale = width**-0.5
        self.block = fused.Block(
            heads=heads, kv_heads=kv_heads, width=width, eps=EPS, head_eps=HEAD_EPS, scale=self.scale, **arrays
        )

    def tables(self, rows: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        angles = np.arange(start, start + rows)[:, None] / 50 ** (np.arange(self.width // 2) / self.width)
        c, s = np.cos(angles), np.sin(angles)
        return np.hstack([c, c]).astype(np.float32), np.hstack([-s, s]).astype(np.float32)

    def enter(self, x: np.ndarray, start: int = 0) -> list[np.ndarray]:
        made = self.block.enter(mx.array(x), *map(mx.array, self.tables(len(x), start)))
        return [np.array(a) for a in made]

    def leave(self, x: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **sees: Any) -> np.ndarray:
        if "mask" in sees:
            sees["mask"] = mx.array(sees["mask"])
        return np.array(self.block.leave(*(mx.array(np.ascontiguousarray(a)) for a in (x, q, k, v)), **sees))

    def step(self, x: np.ndarray, at: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Row `at` of x alone, over the keys and values up to it."""
        q, _, _ = self.enter(x[at : at + 1], at)
        return self.leave(x[at : at + 1], q, k[:, :, : at + 1], v[:, :, : at + 1])[0]

    def reference(self, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """The whole block in float64; `seen` [S, S] says which keys a row sees."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        x = x.astype(np.float64)
        rows, heads, width = len(x), self.heads, self.width

        def norm(a: np.ndarray, name: str, eps: float) -> np.ndarray:
            return a if name not in w else a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * w[name]

        def linear(a: np.ndarray, name: str) -> np.ndarray:
            return a @ w[name].T + w.get(f"{name}_bias", 0)

        qkv = linear(norm(x, "first_norm", EPS), "qkv").reshape(rows, heads + 2 * self.kv_heads, width)
        q, k, v = np.split(qkv, [heads, heads + self.kv_heads], axis=1)
        c, s = (table.astype(np.float64)[:, None] for table in self.tables(rows))

        def turn(a: np.ndarray) -> np.ndarray:
            return a * c + np.roll(a, width // 2, axis=-1) * s

        q, k = turn(norm(q, "q_norm", HEAD_EPS)), turn(norm(k, "k_norm", HEAD_EPS))
        k, v = (np.repeat(a, heads // self.kv_heads, axis=1) for a in (k, v))
        scores = np.where(seen, np.einsum("ihd,jhd->hij", q, k) * self.scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(rows, -1)
        x = x + linear(mixed, "out")
        gate, up = np.split(linear(norm(x, "second_norm", EPS), "gate_up"), 2, axis=-1)
        return x + linear(gate / (1 + np.exp(-gate)) * up, "down")


SHAPES = [(9, 3, 64), (4, 4, 20), (6, 1, 34), (2, 1, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extras", [False, True])
def test_against_float64(fused: ModuleType, form: str, shape: tuple[int, int, int], extras: bool) -> None:
    case = Case(fused, heads=shape[0], kv_heads=shape[1], width=shape[2], extras=extras)
    x = floats(50, HIDDEN, scale=3)
    q, k, v = case.enter(x)
    assert k.shape == v.shape == (1, shape[1], 50, shape[2])
    seen = np.tril(np.ones((50, 50), bool))
    near = seen & ~np.tril(np.ones((50, 50), bool), -7)
    for sees, given_as in ((seen, {"causal": True}), (near, {"mask": near}), (np.ones_like(seen), {})):
        expected = case.reference(x, sees)
        error = np.abs(case.leave(x, q, k, v, **given_as) - expected).max() / np.abs(expected).max()
        assert error < 3e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_come_out_alike_alone_and_together(fused: ModuleType, form: str, shape: tuple[int, int, int]) -> None:
    """Prefill, verified windows and single steps: the core promise."""
    case = Case(fused, heads=shape[0], kv_heads=shape[1], width=shape[2])
    x = floats(150, HIDDEN)
    q, k, v = case.enter(x)
    whole = case.leave(x, q, k, v, causal=True)
    for chunk in (1, 2, 3, 5, 8, 9, 16, 31, 33, 64, 149):
        for start in range(0, 150 - chunk, max(chunk, 13)):
            rows = slice(start, start + chunk)
            part, *new = case.enter(x[rows], start)
            for mine, all_rows in zip(new, (k, v), strict=True):
                assert mine.tobytes() == np.ascontiguousarray(all_rows[:, :, rows]).tobytes()
            past = k[:, :, : start + chunk], v[:, :, : start + chunk]
            assert case.leave(x[rows], part, *past, causal=True).tobytes() == whole[rows].tobytes(), (chunk, start)


def test_keys_that_a_row_does_not_see_change_no_bit(fused: ModuleType, form: str) -> None:
    """Behind, before and between those it sees; NaN and infinity excepted nowhere but in what is seen."""
    case = Case(fused, heads=9, kv_heads=3, width=64)
    x = floats(90, HIDDEN)
    _, k, v = case.enter(x)
    for first, last in ((0, 0), (0, 40), (17, 60), (33, 34), (1, 89)):
        q, _, _ = case.enter(x[last : last + 1], last)
        seen = slice(first, last + 1)
        alone = case.leave(x[last : last + 1], q, k[:, :, seen], v[:, :, seen])
        mask = np.zeros((1, 90), bool)
        mask[:, seen] = True
        assert case.leave(x[last : last + 1], q, k, v, mask=mask).tobytes() == alone.tobytes()
        other = k.copy()
        other[:, :, ~mask[0]] = np.nan
        assert case.leave(x[last : last + 1], q, other, v, mask=mask).tobytes() == alone.tobytes()
        holes = mask.copy()
        holes[:, first:last:3] = False
        kept = np.flatnonzero(holes[0])
        closed = case.leave(x[last : last + 1], q, k[:, :, kept], v[:, :, kept])
        assert case.leave(x[last : last + 1], q, k, v, mask=holes).tobytes() == closed.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(0, 200), st.integers(1, 80), st.integers(0, 2**31))
def test_sliding_windows_over_any_split(rows: int, past: int, window: int, seed: int) -> None:
    """A row over the window's keys alone, and among others whose windows begin elsewhere."""
    case = Case(blocks.extension(), heads=6, kv_heads=2, width=16)
    x = np.random.default_rng(seed).standard_normal((past + rows, HIDDEN)).astype(np.float32)
    _, k, v = case.enter(x)
    query, key = np.arange(past, past + rows)[:, None], np.arange(past + rows)[None]
    mask = (query >= key) & (query < key + window)
    q, _, _ = case.enter(x[past:], past)
    together = case.leave(x[past:], q, k, v, mask=mask)
    for i in {0, rows // 2, rows - 1}:
        at = past + i
        span = slice(max(0, at - window + 1), at + 1)
        q, _, _ = case.enter(x[at : at + 1], at)
        assert case.leave(x[at : at + 1], q, k[:, :, span], v[:, :, span]).tobytes() == together[i : i + 1].tobytes()


def test_a_cache_with_room_reads_like_one_without(fused: ModuleType) -> None:
    """Views of a growable buffer: heads lie further apart than their rows."""
    case = Case(fused, heads=9, kv_heads=3, width=64)
    x = floats(20, HIDDEN)
    q, k, v = case.enter(x)
    roomy = [mx.concatenate([mx.array(a), mx.full((1, 3, 100, 64), np.nan)], axis=2)[:, :, 0:20] for a in (k, v)]
    inside = [mx.concatenate([mx.full((1, 3, 7, 64), np.nan), mx.array(a)], axis=2)[:, :, 7:27] for a in (k, v)]
    plain = case.leave(x, q, k, v, causal=True)
    for pair in (roomy, inside):
        assert np.array(case.block.leave(mx.array(x), mx.array(q), *pair, causal=True)).tobytes() == plain.tobytes()
    turned = [mx.array(a).swapaxes(2, 3) for a in (k, v)]
    with pytest.raises((RuntimeError, ValueError), match="keys"):
        mx.eval(case.block.leave(mx.array(x), mx.array(q), *turned, causal=True))


def test_extreme_scores_and_numbers(fused: ModuleType, form: str) -> None:
    """Scores so far apart that all weights but one vanish stay finite; NaN is never swallowed."""
    case = Case(fused, heads=2, kv_heads=1, width=8, extras=False)
    x = floats(30, HIDDEN)
    q, k, v = case.enter(x)
    far = case.leave(x, q * 1e4, k, v, causal=True)
    assert np.isfinite(far).all()
    bad = k.copy()
    bad[0, 0, 12, 3] = np.nan
    out = case.leave(x, q, bad, v, causal=True)
    assert np.isfinite(out[:12]).all() and np.isnan(out[12:]).all()
    poisoned = x.copy()
    poisoned[4, 7] = np.nan
    entered = case.enter(poisoned)
    assert np.isnan(entered[0][:, 4]).all() and np.isfinite(entered[0][:, 5:]).all()


def test_norm(fused: ModuleType, form: str) -> None:
    for n in (1, 2, 7, 16, 33, 576, 4099):
        x, weight = floats(5, n, scale=7), floats(n)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
        whole = np.array(fused.norm(mx.array(x), mx.array(weight), EPS))
        np.testing.assert_allclose(whole, expected, rtol=2e-6, atol=1e-30)
        for i in range(5):
            assert np.array(fused.norm(mx.array(x[i : i + 1]), mx.array(weight), EPS)).tobytes() == whole[i].tobytes()


def test_what_does_not_fit_is_refused(fused: ModuleType) -> None:
    case = Case(fused, heads=2, kv_heads=1, width=8)
    x = mx.zeros((3, HIDDEN))
    tables = [mx.array(t) for t in case.tables(3)]
    q, k, v = case.block.enter(x, *tables)
    for wrong in (
        lambda: case.block.enter(x[:, 1:], *tables),
        lambda: case.block.enter(x.astype(mx.float16), *tables),
        lambda: case.block.enter(x, tables[0][1:], tables[1]),
        lambda: case.block.leave(x, q, k, v[:, :, 1:]),
        lambda: case.block.leave(x, q, k, v, mask=mx.zeros((3, 2), dtype=mx.bool_)),
        lambda: case.block.leave(x, q, k[:, :, 1:], v[:, :, 1:], causal=True),
        lambda: fused.norm(x, mx.zeros((3,)), EPS),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_other_products_leave_blocks_to_mlx(fused: ModuleType) -> None:
    products.enable("stock")
    try:
        assert blocks.extension() is None
        assert blocks.report().reason == "exact products are not in use"
    finally:
        products.enable("exact")
    assert blocks.extension() is fused


@pytest.mark.parametrize(
    ("built_for", "running", "probe", "reason"),
    [
        ("0.1.0", "0.32.4", None, "built for MLX 0.1.0, and 0.32.4 is installed"),
        ("0.32.4", "0.33.0", None, "built for MLX 0.32.4, and 0.33.0 is installed"),
        ("0.32.4", "0.32.4", TypeError("incompatible function arguments"), "probe failed"),
    ],
)
def test_an_extension_of_another_mlx_is_refused(
    monkeypatch: pytest.MonkeyPatch, built_for: str, running: str, probe: Exception | None, reason: str
) -> None:
    class Other(ModuleType):
        def norm(self, *_: Any) -> mx.array:
            assert probe is not None
            raise probe

    other = Other("_fused")
    other.built_for, other.running = built_for, running
    monkeypatch.setattr(blocks, "import_module", lambda _: other)
    monkeypatch.setattr(blocks, "installed_version", lambda package: running)
    found, report = blocks._find.__wrapped__()
    assert found is None and report.built_for == built_for and reason in str(report.reason)


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> ModuleType:
        raise ImportError("no module named _fused")

    monkeypatch.setattr(blocks, "import_module", missing)
    found, report = blocks._find.__wrapped__()
    assert found is None and not report.usable and "no module named _fused" in str(report.reason)
