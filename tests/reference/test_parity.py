"""Logits of the networks against `transformers`, from kept arrays: all at once, one by one, in uneven chunks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from reference_cases import CAUSAL_CASES, PROMPTS, Case

from polytoken.checkpoint import load_runtime
from polytoken.models.base import CausalModel

# fp32 against fp32, logits of about five: rounding alone.
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=CAUSAL_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    checkpoint = case.write(tmp_path_factory.mktemp(case.name))
    return load_runtime(checkpoint.path).model


def logits_in_chunks(model: CausalModel, ids: np.ndarray, *, chunk: int) -> np.ndarray:
    """[S, V] from forwards of at most `chunk` rows on one cache."""
    cache = model.make_cache()
    rows = []
    for start in range(0, ids.shape[1], chunk):
        hidden = model.forward(mx.array(ids[:, start : start + chunk]), cache)
        rows.append(np.array(model.project(hidden.post))[0])
    return np.concatenate(rows)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("chunk", [1000, 1, 3, 7])
def test_logits_equal_transformers(case: Case, model: CausalModel, prompt: str, chunk: int) -> None:
    arrays = case.arrays()
    logits = logits_in_chunks(model, arrays[f"{prompt}_ids"], chunk=chunk)
    assert logits.dtype == np.float32
    assert np.abs(logits - arrays[f"{prompt}_logits"]).max() < TOLERANCE


@pytest.mark.parametrize("keep", [1, 4])
def test_keep_returns_the_last_rows_only(case: Case, model: CausalModel, keep: int) -> None:
    arrays = case.arrays()
    hidden = model.forward(mx.array(arrays["long_ids"]), model.make_cache(), keep=keep)
    assert hidden.post.shape == (1, keep, model.hidden_size)
    logits = np.array(model.project(hidden.post))[0]
    assert logits.shape == (keep, model.vocab_size)
    assert np.abs(logits - arrays["long_logits"][-keep:]).max() < TOLERANCE
