"""Encoder and decoder of diffusion_gemma against `transformers`, from kept arrays."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from polytoken.checkpoint import load_runtime
from polytoken.models.canvas import SoftPart
from polytoken.models.gemma4.model import LogitConditioned

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
from reference_cases import DIFFUSION_CASES, PROMPTS, Case

TOLERANCE = 1e-4  # fp32 against fp32, logits of about ten


@pytest.fixture(scope="module", params=DIFFUSION_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> LogitConditioned:
    return load_runtime(case.write(tmp_path_factory.mktemp(case.name)).path).model


@pytest.fixture(scope="module")
def arrays(case: Case) -> dict[str, np.ndarray]:
    return case.arrays()


def encoded(model: LogitConditioned, ids: np.ndarray, *, chunk: int = 1000):
    cache = model.make_cache()
    for start in range(0, ids.shape[1], chunk):
        model.encode(mx.array(ids[:, start : start + chunk]), cache)
    return cache


def denoised(model: LogitConditioned, canvas: np.ndarray, cache, *, head: int = 0, signal: mx.array | None = None):
    """The output of a denoise of a logical canvas that begins in slot `head`, and its logits in logical order."""
    rolled = mx.array(np.roll(canvas, head, axis=1))
    out = model.denoise(rolled, cache, latent=model.make_latent(), head=mx.array([head], mx.int32), signal=signal)
    logits = np.array(model.project(out.heavy_hidden[0], 0, model.vocab_size))
    return out, np.roll(logits, -head, axis=0)


def soft_signal(model: LogitConditioned, scores: np.ndarray, *, chunk: int) -> mx.array:
    total = None
    for start in range(0, model.vocab_size, chunk):
        stop = min(start + chunk, model.vocab_size)
        part = mx.array(scores[:, start:stop])
        shares = mx.exp(part - part.max(axis=-1, keepdims=True))
        total = model.soft_add(total, SoftPart(start, stop, part.max(axis=-1), shares, shares.sum(axis=-1)))
    return model.soft_signal(total)


def check_keys(arrays: dict[str, np.ndarray], prefix: str, cache) -> None:
    checked = 0
    for index, layer in enumerate(cache.layers):
        if f"{prefix}keys_{index}" in arrays:
            for name, array in zip(("keys", "values"), layer.valid(), strict=True):
                wanted = arrays[f"{prefix}{name}_{index}"]
                assert array.shape[1:] == wanted.shape
                assert np.abs(np.array(array[0]) - wanted).max() < TOLERANCE
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("chunk", [1000, 1, 7])
def test_encoder_keys_and_values(model: LogitConditioned, arrays: dict[str, np.ndarray], chunk: int) -> None:
    check_keys(arrays, "long_", encoded(model, arrays["long_ids"], chunk=chunk))


@pytest.mark.parametrize("head", [0, 5])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_first_denoise(model: LogitConditioned, arrays: dict[str, np.ndarray], prompt: str, head: int) -> None:
    cache = encoded(model, arrays[f"{prompt}_ids"])
    _, logits = denoised(model, arrays[f"{prompt}_canvas"], cache, head=head)
    assert logits.dtype == np.float32
    assert np.abs(logits - arrays[f"{prompt}_logits"]).max() < TOLERANCE


@pytest.mark.parametrize("chunk", [64, 1000])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_self_conditioned_denoise(
    model: LogitConditioned, arrays: dict[str, np.ndarray], prompt: str, chunk: int
) -> None:
    cache = encoded(model, arrays[f"{prompt}_ids"])
    signal = soft_signal(model, arrays[f"{prompt}_conditioning"].astype(np.float32), chunk=chunk)
    _, logits = denoised(model, arrays[f"{prompt}_canvas"], cache, signal=signal)
    assert np.abs(logits - arrays[f"{prompt}_logits_conditioned"]).max() < TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_second_block(model: LogitConditioned, arrays: dict[str, np.ndarray], prompt: str) -> None:
    cache = encoded(model, arrays[f"{prompt}_ids"])
    canvas = arrays[f"{prompt}_canvas"]
    denoised(model, canvas, cache)  # leaves no trace
    model.encode(mx.array(canvas), cache)
    if prompt == "long":
        check_keys(arrays, "long_block2_", cache)
    _, logits = denoised(model, np.flip(canvas, axis=1), cache)
    assert np.abs(logits - arrays[f"{prompt}_block2_logits"]).max() < TOLERANCE


def test_signal_from_a_hidden_is_the_signal_of_its_scores(
    model: LogitConditioned, arrays: dict[str, np.ndarray]
) -> None:
    out, logits = denoised(model, arrays["short_canvas"], encoded(model, arrays["short_ids"]))
    given = model.soft_embedding(out.heavy_hidden, temperature=0.7, chunk=50)
    shares = np.exp(logits / 0.7 - (logits / 0.7).max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    rows = np.array(model.embed(mx.arange(model.vocab_size)))
    assert np.abs(np.array(given[0]) - shares @ rows).max() < 1e-5
