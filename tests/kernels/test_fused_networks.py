"""Whole networks over fused blocks: near the same network over MLX's operations, and to the bit near themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from polytoken.checkpoint import load_runtime
from polytoken.kernels import blocks, products
from polytoken.testkit.tiny import write_checkpoint

SLIDING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
NETWORKS = {"llama": {}, "llama sliding": SLIDING, "qwen2": {}, "qwen3": {}}
IDS = [int(i) for i in np.random.default_rng(5).integers(5, 60, 40)]


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    if not sys.platform.startswith("linux"):
        pytest.skip("fused blocks are for Linux")
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    assert products.enable("exact").kind == "exact"
    yield
    products.enable("stock")
    mx.set_default_device(before)


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family = request.param.split()[0]
    folder = tmp_path_factory.mktemp("fused") / family
    write_checkpoint(folder, family, config=NETWORKS[request.param])
    return load_runtime(folder).model


def hidden(model: Any, chunks: list[int], ids: list[int] = IDS) -> np.ndarray:
    """Post-norm rows of all ids, encoded in chunks of these sizes."""
    cache, at, rows = model.make_cache(), 0, []
    for size in chunks:
        rows.append(np.array(model.forward(mx.array([ids[at : at + size]]), cache).post[0]))
        at += size
    assert at == len(ids)
    return np.concatenate(rows)


def count_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the fused path from now on."""
    calls: list[int] = []
    run = type(model._lean)._run_fused

    def counted(self: Any, extension: Any, x: mx.array, *rest: Any) -> mx.array:
        calls.append(x.shape[0])
        return run(self, extension, x, *rest)

    monkeypatch.setattr(type(model._lean), "_run_fused", counted)
    return calls


def test_fused_and_plain_operations_agree(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_blocks(model, monkeypatch)
    fused = hidden(model, [23, *[1] * 17])
    assert calls == [23, *[1] * 17]
    monkeypatch.setattr(blocks, "extension", lambda: None)
    plain = hidden(model, [23, *[1] * 17])
    assert len(calls) == 18
    np.testing.assert_allclose(fused, plain, atol=2e-5 * np.abs(plain).max())


def test_how_a_text_is_cut_changes_no_bit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_blocks(model, monkeypatch)
    whole = hidden(model, [40])
    for chunks in ([1] * 40, [39, 1], [7, 8, 9, 16], [20, *[4] * 5], [2] * 20, [5, 1, 1, 5, 28]):
        assert hidden(model, chunks).tobytes() == whole.tobytes(), chunks
    assert len(calls) == 1 + 40 + 2 + 4 + 6 + 20 + 5


def test_rejected_rows_leave_nothing(model: Any) -> None:
    """As a verified window does: encode four rows too many, take them back, go on."""
    whole = hidden(model, [40])
    cache = model.make_cache()
    model.forward(mx.array([IDS[:20]]), cache)
    mx.eval(cache.arrays())
    for start in range(20, 40):
        window = [IDS[start], 7, 8, 9, 10]
        rows = np.array(model.forward(mx.array([window]), cache).post[0])
        assert rows[0].tobytes() == whole[start].tobytes()
        cache.trim(4)


def test_other_products_are_what_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_blocks(model, monkeypatch)
    products.enable("stock")
    try:
        stock = hidden(model, [40])
    finally:
        products.enable("exact")
    assert calls == []
    np.testing.assert_allclose(stock, hidden(model, [40]), atol=1e-4)
