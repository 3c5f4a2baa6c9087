"""Tiny canvas models for tests, and pieces that several tests need."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.cache.state import DecodingState
from polytoken.checkpoint import load_runtime
from polytoken.models.canvas import CanvasModel, CanvasOutput
from polytoken.models.latent.state import LatentState
from polytoken.testkit.modilify import write_modilify


def load(directory: Path, **options: Any) -> CanvasModel:
    """A model of a tiny export; options as `write_modilify` takes them."""
    return load_runtime(write_modilify(directory, **options).path).model


def encoded(model: CanvasModel, length: int, *, seed: int = 0) -> DecodingState:
    """A cache with `length` random tokens in it."""
    cache = model.make_cache()
    if length:
        ids = np.random.default_rng(seed).integers(0, model.vocab_size, (1, length))
        model.encode(mx.array(ids.astype(np.int32)), cache)
    return cache


def random_canvas(model: CanvasModel, *, seed: int = 0) -> mx.array:
    return mx.random.randint(0, model.vocab_size, (1, model.canvas_length), key=mx.random.key(seed))


def random_latent(model: CanvasModel, *, seed: int = 0) -> LatentState:
    """A state such as many steps would leave: every field set, some slots never denoised."""
    generator = np.random.default_rng(seed)
    empty = model.make_latent()
    slots = empty.confidence.shape
    memory = mx.array(generator.normal(size=empty.memory_slots.shape).astype(np.float32))
    working = mx.array(generator.normal(size=empty.memory_slots.shape).astype(np.float32))

    def floats(low: float, high: float) -> mx.array:
        return mx.array(generator.uniform(low, high, slots).astype(np.float32))

    return replace(
        empty,
        token_latents=mx.array(generator.normal(size=empty.token_latents.shape).astype(np.float32)),
        memory_slots=memory,
        confidence=floats(0, 1),
        entropy=floats(0, 6),
        age=mx.array(generator.integers(0, 4, slots).astype(np.int32)),
        token_changed=mx.array(generator.integers(0, 2, slots).astype(np.float32)),
        confidence_delta=floats(-1, 1),
        entropy_delta=floats(-3, 3),
        ponder_steps=mx.array([int(generator.integers(0, 9))], mx.int32),
        stagnation_steps=mx.array([int(generator.integers(0, 9))], mx.int32),
        gdn2=replace(empty.gdn2, persistent=memory, working=working),
    )


def rotated(state: LatentState, by: int) -> LatentState:
    """The state with every per-slot field moved `by` slots on."""
    canvas = state.confidence.shape[1]
    changes = {
        field.name: mx.roll(value, by, axis=1)
        for field in fields(state)
        if isinstance(value := getattr(state, field.name), mx.array) and value.shape[1:2] == (canvas,)
        if field.name != "memory_slots"
    }
    return replace(state, **changes)


def head_of(position: int) -> mx.array:
    return mx.array([position], mx.int32)


def bits(array: mx.array) -> bytes:
    return np.array(array.astype(mx.float32)).tobytes()


def same(one: mx.array, other: mx.array) -> bool:
    """Equal value for value."""
    return bool(mx.array_equal(one, other).item())


def largest(one: mx.array, other: mx.array) -> float:
    """Largest difference."""
    return float(mx.max(mx.abs(one - other)).item())


def logits_of(model: CanvasModel, output: CanvasOutput) -> mx.array:
    return model.project(output.heavy_hidden[0], 0, model.vocab_size)
