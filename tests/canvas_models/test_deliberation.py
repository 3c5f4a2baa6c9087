"""Latent deliberation inside the network: silence when fresh, bounded context, and nothing that depends on the ring."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from canvas_networks import (
    encoded,
    head_of,
    largest,
    load,
    logits_of,
    random_canvas,
    random_latent,
    rotated,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.models.canvas import CanvasModel
from polytoken.models.gemma4.model import LatentConditioned, LogitConditioned
from polytoken.models.latent.arithmetic import capped, rms
from polytoken.models.latent.ring import logical_positions, physical_slots, to_logical, to_physical
from polytoken.models.latent.state import LatentState

ROUNDING = 1e-4  # between two orders of the same sums


@pytest.fixture(scope="module", params=["a", "b"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LatentConditioned:
    loaded = load(tmp_path_factory.mktemp("export"), shape=request.param, seed=4)
    assert isinstance(loaded, LatentConditioned)
    return loaded


def undeliberated(model: LatentConditioned) -> LogitConditioned:
    """The same transformer without deliberation."""
    return LogitConditioned(model.network, model.config)


def changed_fields(before: LatentState, after: LatentState) -> set[str]:
    names = {
        field.name
        for field in fields(before)
        if isinstance(getattr(before, field.name), mx.array)
        and not same(getattr(before, field.name), getattr(after, field.name))
    }
    inner = {
        f"gdn2.{f.name}"
        for f in fields(before.gdn2)
        if not same(getattr(before.gdn2, f.name), getattr(after.gdn2, f.name))
    }
    return names | inner


def test_ring_maps_are_inverse_to_each_other() -> None:
    array = mx.random.normal((2, 7, 3), key=mx.random.key(0))
    for head in range(7):
        heads = mx.array([head, (head * 3 + 1) % 7], mx.int32)
        assert same(to_physical(to_logical(array, heads), heads), array)
        assert to_logical(array[:, :, 0], heads)[0, 0].item() == array[0, head, 0].item()
        slots, positions = physical_slots(heads, 7), logical_positions(heads, 7)
        assert same(mx.take_along_axis(positions, slots, axis=1), mx.broadcast_to(mx.arange(7), (2, 7)))


def test_fresh_state_reads_nothing_from_memory(model: LatentConditioned) -> None:
    latent = model._latent
    state, head = model.make_latent(), head_of(2)
    hidden = mx.random.normal((1, model.canvas_length, model.hidden_size), key=mx.random.key(1))
    seen = latent.logical_seen(state, head)
    assert not mx.any(seen).item()
    working = latent.working_memory_bus.prepare_kv((hidden, seen))
    persistent = latent.persistent_memory_bus.prepare_kv(state.memory_slots, mx.ones_like(seen))
    for reader in range(latent.working_memory_bus.num_readers):
        assert same(latent.working_memory_bus.read(hidden, reader, *working), hidden)
        assert same(latent.persistent_memory_bus.read(hidden, reader, *persistent), hidden)
    tokens = mx.random.normal((1, model.canvas_length, model.latent_dim), key=mx.random.key(2))
    assert not mx.any(latent.core_read(tokens, state.gdn2.working)).item()


def test_seen_positions_do_read(model: LatentConditioned) -> None:
    """The tests above would pass for buses that never say anything."""
    latent, state, head = model._latent, random_latent(model, seed=3), head_of(0)
    hidden = mx.random.normal((1, model.canvas_length, model.hidden_size), key=mx.random.key(1))
    seen = latent.logical_seen(state, head)
    assert mx.any(seen).item() and not mx.all(seen).item()
    read = latent.persistent_memory_bus.read(
        hidden, 0, *latent.persistent_memory_bus.prepare_kv(state.memory_slots, seen)
    )
    moved = mx.any(read != hidden, axis=-1)
    assert same(moved, seen)
    read = latent.working_memory_bus.read(hidden, 0, *latent.working_memory_bus.prepare_kv((hidden, seen)))
    assert largest(read, hidden) > 0.01
    assert mx.all(rms(read - hidden) < 0.5 * rms(hidden)).item()


@pytest.mark.parametrize("deliberation", ["silent", "absent"])
def test_silent_deliberation_is_the_base_model_bit_for_bit(tmp_path: Path, deliberation: str) -> None:
    model = load(tmp_path, deliberation=deliberation, seed=2)
    assert isinstance(model, LatentConditioned)
    cache, canvas, head = encoded(model, 21), random_canvas(model), head_of(3)
    latent = random_latent(model)
    ours = model.denoise(canvas, cache, latent=latent, head=head)
    base = undeliberated(model).denoise(canvas, cache, latent=latent, head=head)
    told = undeliberated(model).denoise(
        canvas, cache, latent=latent, head=head, signal=mx.zeros_like(base.token_embeddings)
    )
    assert not mx.any(ours.working_state).item()
    assert same(ours.heavy_hidden, base.heavy_hidden)
    assert same(told.heavy_hidden, base.heavy_hidden)
    assert same(logits_of(model, ours), logits_of(model, base))


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e4), width=st.integers(1, 70))
def test_capped_term_is_less_than_half_its_reference(seed: int, scale: float, width: int) -> None:
    generator = np.random.default_rng(seed)
    term, reference = (mx.array(generator.normal(size=(3, width)).astype(np.float32)) for _ in range(2))
    small = capped(term * scale, reference)
    assert mx.all(rms(small) <= 0.5 * rms(reference) * (1 + 1e-6)).item()
    cosine = mx.sum(small * term, axis=-1) / mx.sqrt(mx.sum(small * small, axis=-1) * mx.sum(term * term, axis=-1))
    assert mx.all(cosine > 1 - 1e-4).item()
    assert same(capped(mx.zeros_like(term), reference), mx.zeros_like(term))


def test_merge_bounds_the_context_and_zero_context_is_the_normed_token(model: LatentConditioned) -> None:
    tokens = model.embed(random_canvas(model))
    working = 30 * mx.random.normal(tokens.shape, key=mx.random.key(0))
    bare = model._merge_context(tokens, mx.zeros_like(tokens))
    assert largest(bare * rms(tokens), tokens) < 1e-5
    merged = model._merge_context(tokens, working)
    # Both have norm one; a term below half the token turns it by less than 30 degrees.
    cosine = mx.mean(merged * bare, axis=-1)
    assert mx.all(cosine > np.cos(np.pi / 6) - 1e-4).item()
    assert mx.any(cosine < 0.99).item()


@pytest.mark.parametrize("by", [1, 5])
def test_rotating_head_and_contents_together_changes_nothing(model: LatentConditioned, by: int) -> None:
    canvas, latent = random_canvas(model), random_latent(model, seed=7)
    cache, slots = encoded(model, 19), model.canvas_length
    turned = (3 + by) % slots
    one = model.denoise(canvas, cache, latent=latent, head=head_of(3))
    other = model.denoise(mx.roll(canvas, by, axis=1), cache, latent=rotated(latent, by), head=head_of(turned))
    assert same(mx.roll(one.heavy_hidden, by, axis=1), other.heavy_hidden)
    assert same(mx.roll(one.working_state, by, axis=1), other.working_state)
    assert not changed_fields(rotated(one.next_latent_state, by), other.next_latent_state)

    valid = logical_positions(head_of(3), slots) < slots - 2
    seen = model.observe(one.next_latent_state, one, valid=valid, head=head_of(3))
    seen_turned = model.observe(other.next_latent_state, other, valid=mx.roll(valid, by, axis=1), head=head_of(turned))
    assert largest(mx.roll(seen.token_latents, by, axis=1), seen_turned.token_latents) < ROUNDING
    assert largest(seen.gdn2.working, seen_turned.gdn2.working) < ROUNDING

    def write(output, head: int) -> mx.array:
        return write_commit(model, latent.memory_slots, output, length=3, head=head)

    assert same(write(one, 3), write(other, turned))


def write_commit(model: CanvasModel, memory: mx.array, output, *, length: int, head: int, ids=None) -> mx.array:
    ids = mx.array([[5, 6, 7, 8, 9]]) if ids is None else ids
    memory, gate = model.commit_write(
        memory,
        output,
        token_embeddings=model.embed(ids),
        lengths=mx.array([length], mx.int32),
        prefix_lengths=mx.array([19], mx.int32),
        reasons=mx.array([1 if length else 0], mx.int32),
        head=head_of(head),
    )
    assert gate.shape == (1,) and (0 < gate.item() < 1 if length else gate.item() == 0)
    return memory


def test_denoise_changes_token_latents_only(model: LatentConditioned) -> None:
    latent = random_latent(model)
    output = model.denoise(random_canvas(model), encoded(model, 9), latent=latent, head=head_of(1))
    assert changed_fields(latent, output.next_latent_state) == {"token_latents"}


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_observe_touches_valid_latents_and_working_memory_only(model: LatentConditioned, data: st.DataObject) -> None:
    slots = model.canvas_length
    latent = random_latent(model, seed=data.draw(st.integers(0, 99)))
    output = model.denoise(random_canvas(model), encoded(model, 5), latent=latent, head=head_of(0))
    valid = mx.array([data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))])
    before = output.next_latent_state
    after = model.observe(before, output, valid=valid, head=head_of(0))
    moved = mx.any(after.token_latents != before.token_latents, axis=-1)
    assert same(moved, valid)
    some = mx.any(valid).item()
    assert changed_fields(before, after) == ({"token_latents", "gdn2.working"} if some else set())


def test_working_memory_stays_finite(model: LatentConditioned) -> None:
    latent, head = model.make_latent(), head_of(0)
    output = model.denoise(random_canvas(model), encoded(model, 5), latent=latent, head=head)
    valid = mx.ones((1, model.canvas_length), mx.bool_)
    for _ in range(300):
        latent = model.observe(latent, output, valid=valid, head=head)
        mx.eval(latent.gdn2.working, latent.token_latents)
    assert np.isfinite(np.array(latent.gdn2.working)).all()
    assert float(mx.max(mx.abs(latent.gdn2.working)).item()) < 100


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_commit_of_nothing_leaves_memory(model: LatentConditioned, scale: float) -> None:
    latent = random_latent(model)
    memory = latent.memory_slots * scale
    output = model.denoise(random_canvas(model), encoded(model, 5), latent=latent, head=head_of(0))
    assert same(write_commit(model, memory, output, length=0, head=0), memory)


def test_commit_reads_no_further_than_its_length(model: LatentConditioned) -> None:
    latent = random_latent(model)
    output = model.denoise(random_canvas(model), encoded(model, 5), latent=latent, head=head_of(2))
    written = write_commit(model, latent.memory_slots, output, length=2, head=2)
    padded = write_commit(model, latent.memory_slots, output, length=2, head=2, ids=mx.array([[5, 6, 400]]))
    assert same(written, padded)
    assert not same(written, latent.memory_slots)
    assert mx.all(rms(written) <= 4 * (1 + 1e-6)).item()


def test_memory_reaches_the_next_denoise(model: LatentConditioned) -> None:
    latent = replace(random_latent(model), memory_slots=model.make_latent().memory_slots)
    canvas, cache = random_canvas(model), encoded(model, 5)
    output = model.denoise(canvas, cache, latent=latent, head=head_of(0))
    memory = write_commit(model, latent.memory_slots, output, length=4, head=0)
    later = model.denoise(canvas, cache, latent=replace(latent, memory_slots=memory), head=head_of(0))
    assert largest(later.heavy_hidden, output.heavy_hidden) > 1e-3


def test_buses_speak_after_full_layers_in_order(model: LatentConditioned) -> None:
    latent, head = random_latent(model, seed=5), head_of(3)
    canvas, cache = random_canvas(model), encoded(model, 14)
    inner = model._latent
    seen = inner.logical_seen(latent, head)
    work = model.begin(canvas, cache, latent=latent, head=head)
    hidden, reader = work.hidden, 0
    working = to_logical(model.finish(work).working_state, head)
    working_kv = inner.working_memory_bus.prepare_kv((working, seen))
    persistent_kv = inner.persistent_memory_bus.prepare_kv(latent.memory_slots, seen)
    for index, kind in enumerate(model.config.layer_types):
        model.run_layer(index, work)
        hidden = model.network.model.decoder.layers[index].decode(hidden, cache.layers[index])
        if kind == "full_attention":
            if reader < inner.working_memory_bus.num_readers:
                silent = hidden
                hidden = inner.working_memory_bus.read(hidden, reader, *working_kv)
                hidden = inner.persistent_memory_bus.read(hidden, reader, *persistent_kv)
                assert largest(silent, hidden) > 0.01
            reader += 1
        assert same(work.hidden, hidden)
    assert reader == 2
