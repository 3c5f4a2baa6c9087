"""What a lane relies on: interleaving, a cache that a denoise never touches, vocabulary ranges, counts."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from canvas_networks import encoded, head_of, largest, load, random_canvas, random_latent, same

from polytoken.checkpoint import load_runtime
from polytoken.models.canvas import CanvasModel
from polytoken.testkit.tiny import write_checkpoint


@pytest.fixture(scope="module", params=["diffusion_gemma", "modilify_mk2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CanvasModel:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "modilify_mk2":
        return load(directory, seed=9)
    return load_runtime(write_checkpoint(directory, "diffusion_gemma", seed=9).path).model


def test_interleaved_rows_equal_rows_alone(model: CanvasModel) -> None:
    rows = [
        (random_canvas(model, seed=seed), encoded(model, 5 + 9 * seed, seed=seed), random_latent(model, seed=seed))
        for seed in range(3)
    ]
    alone = [
        model.denoise(canvas, cache, latent=latent, head=head_of(row)).heavy_hidden
        for row, (canvas, cache, latent) in enumerate(rows)
    ]
    works = [
        model.begin(canvas, cache, latent=latent, head=head_of(row)) for row, (canvas, cache, latent) in enumerate(rows)
    ]
    for index in range(model.num_layers):
        for work in works:
            model.run_layer(index, work)
        mx.async_eval([work.hidden for work in works])
    for hidden, work in zip(alone, works, strict=True):
        assert same(hidden, model.finish(work).heavy_hidden)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 30])
def test_denoise_reads_the_cache_and_leaves_it(model: CanvasModel, length: int) -> None:
    cache = encoded(model, length)
    before = cache.snapshot().digest()
    canvas, latent = random_canvas(model), model.make_latent()
    output = model.denoise(canvas, cache, latent=latent, head=head_of(0))
    assert cache.offset == length and cache.snapshot().digest() == before
    again = model.denoise(canvas, cache, latent=latent, head=head_of(0))
    assert same(output.heavy_hidden, again.heavy_hidden)
    assert np.isfinite(np.array(output.heavy_hidden)).all()


def test_encoding_after_a_denoise_is_encoding_without_one(model: CanvasModel) -> None:
    caches = [encoded(model, 11), encoded(model, 11)]
    model.denoise(random_canvas(model), caches[0], latent=model.make_latent(), head=head_of(0))
    for cache in caches:
        model.encode(random_canvas(model, seed=4), cache)
    assert caches[0].snapshot().digest() == caches[1].snapshot().digest()


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_chunks_of_the_prompt_differ_by_rounding(model: CanvasModel, chunk: int) -> None:
    ids = np.random.default_rng(1).integers(0, model.vocab_size, (1, 33)).astype(np.int32)
    whole, pieces = model.make_cache(), model.make_cache()
    model.encode(mx.array(ids), whole)
    for start in range(0, 33, chunk):
        model.encode(mx.array(ids[:, start : start + chunk]), pieces)
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        for a, b in zip(one.valid(), other.valid(), strict=True):
            assert a.shape == b.shape and largest(a, b) < 1e-4


def test_vocabulary_ranges_are_parts_of_one_product(model: CanvasModel) -> None:
    flat = 3 * mx.random.normal((5, model.hidden_size), key=mx.random.key(0))
    whole = model.project(flat, 0, model.vocab_size)
    assert whole.shape == (5, model.vocab_size) and whole.dtype == mx.float32
    assert float(mx.max(mx.abs(whole)).item()) <= 30
    for start, stop in ((0, 1), (17, 90), (model.vocab_size - 3, model.vocab_size)):
        assert largest(model.project(flat, start, stop), whole[:, start:stop]) < 1e-5


def test_soft_sum_does_not_depend_on_chunks(model: CanvasModel) -> None:
    heavy = mx.random.normal((1, 4, model.hidden_size), key=mx.random.key(0))
    whole = model.soft_embedding(heavy, temperature=0.5, chunk=model.vocab_size)
    for chunk in (7, 64, 100):
        assert largest(model.soft_embedding(heavy, temperature=0.5, chunk=chunk), whole) < 1e-5


def test_fresh_latent_state_has_the_models_sizes(model: CanvasModel) -> None:
    latent = model.make_latent()
    assert latent.confidence.shape == (1, model.canvas_length)
    assert latent.memory_slots.shape == (1, model.memory_slots, model.latent_dim)
    assert np.allclose(np.array(latent.entropy), np.log(model.vocab_size))
    assert latent.age.dtype == latent.ponder_steps.dtype == mx.int32


def test_costs_grow_with_what_is_read(model: CanvasModel) -> None:
    empty, longer = model.denoise_cost(0), model.denoise_cost(20)
    assert empty.state_bytes == 0 and empty.weight_bytes == longer.weight_bytes == model.weight_bytes_per_forward
    assert longer.state_bytes == encoded(model, 20).snapshot().nbytes
    assert longer.flops > empty.flops > 0
    one, many = model.encode_cost(1, 0), model.encode_cost(64, 0)
    assert one.weight_bytes < many.weight_bytes < empty.weight_bytes
    assert 60 * one.flops < many.flops


def test_echo_weights_propose_the_canvas(tmp_path: Path) -> None:
    model = load(tmp_path, weights="echo", seed=1)
    canvas = random_canvas(model)
    output = model.denoise(canvas, encoded(model, 12), latent=random_latent(model), head=head_of(5))
    shares = mx.softmax(model.project(output.heavy_hidden[0], 0, model.vocab_size), axis=-1)
    assert same(mx.argmax(shares, axis=-1).astype(mx.int32), canvas[0].astype(mx.int32))
    assert float(mx.min(mx.max(shares, axis=-1)).item()) > 0.9
