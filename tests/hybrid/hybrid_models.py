"""Tiny hybrid models, each loaded once, and what tests compare of their states."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from polytoken.cache.state import DecodingState
from polytoken.checkpoint import load_runtime
from polytoken.models.base import Hidden
from polytoken.models.draft import DraftingModel
from polytoken.testkit.tiny import Family, write_checkpoint

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def load_model(path: Path, *, dtype: str = "auto", dequantise: bool | None = None) -> DraftingModel:
    model = load_runtime(path, dtype=dtype, dequantise=dequantise).model
    assert isinstance(model, DraftingModel)
    return model


@lru_cache
def tiny(family: Family, shape: str = "a", *, dtype: str = "float32", bits: int | None = None) -> DraftingModel:
    """A seeded model in memory; quantised ones stay packed."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(directory, family, shape=shape, seed=3, bits=bits, tokenizer=False).path
        return load_model(path, dtype=dtype, dequantise=False if bits else None)


def some_ids(count: int, *, seed: int = 0, vocab: int = 280) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def run(model: DraftingModel, state: DecodingState, ids: Sequence[int], *, keep: int | None = None) -> Hidden:
    """One forward, everything evaluated."""
    hidden = model.forward(mx.array([ids]), state, keep=keep)
    mx.eval(hidden.post, hidden.pre, state.arrays())
    return hidden


def run_in(model: DraftingModel, state: DecodingState, ids: Sequence[int], sizes: Sequence[int]) -> bytes:
    """The logits' bits of all ids, in forwards of the given sizes, cycled."""
    rows, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        rows.append(bits(model.project(run(model, state, ids[at : at + size]).post)))
        at, turn = at + size, turn + 1
    return b"".join(rows)


def bits(array: mx.array) -> bytes:
    return np.array(array.astype(mx.float32)).tobytes()


def state_bits(state: DecodingState) -> list[list[bytes]]:
    """Every layer's valid rows, bit by bit."""
    return [[bits(array) for array in layer.snapshot().arrays()] for layer in state.layers]
