"""What is drawn follows the renormalised truncation, on both paths."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from canvas_reference import truncated_law

from polytoken.lanes.canvas.keys import KeyedNoise
from polytoken.sampling.vocabulary import VocabularyRule, vocabulary_statistics

DRAWS = 20000


@pytest.mark.parametrize(
    "rule",
    [
        VocabularyRule(top_k=6, min_p=0.1, chunk=5),
        VocabularyRule(top_k=4, min_p=None, chunk=12),
        VocabularyRule(top_k=40, min_p=None, temperature=2.0, chunk=7),
        VocabularyRule(top_k=None, chunk=5),
        VocabularyRule(top_k=None, min_p=0.9, temperature=0.7, chunk=12),  # without top-k, min-p is not looked at
    ],
)
def test_empirical_law(rule: VocabularyRule) -> None:
    """Chi-square over the positions of one very long canvas whose positions are all alike."""
    logits = np.array([0.3, 2.0, -1.0, 1.1, 1.1, 0.0, -4.0, 1.9, 0.5, -0.2, 1.0, -2.0], np.float32)
    V = logits.size
    table = mx.broadcast_to(mx.array(logits)[None], (DRAWS, V))
    got = vocabulary_statistics(
        mx.ones((1, DRAWS, 1)),
        lambda flat, start, stop: table[:, start:stop],
        rule,
        vocab_size=V,
        noise=KeyedNoise(123, DRAWS, V).step(4),
    )
    counts = np.bincount(np.array(got.sampled)[0], minlength=V)
    expected = truncated_law(logits / np.float32(rule.temperature), rule) * DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    df = int(possible.sum()) - 1
    assert chi2 < df + 4 * np.sqrt(2 * df)
