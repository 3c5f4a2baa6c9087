"""The peer to measure against: mlx-lm's own generation loop and caches over the very same loaded weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step


@dataclass(frozen=True)
class Sample:
    """One timed run.

    Attributes:
        prefill_seconds: from the start to the first token on the host, that token's forward included.
        decode_seconds: from the first token to the last.
        token_ids: what was generated.
    """

    prefill_seconds: float
    decode_seconds: float
    token_ids: tuple[int, ...]


def run_mlx_lm(network: Any, prompt_ids: Sequence[int], *, new_tokens: int, prefill_chunk: int) -> Sample:
    """Generate greedily with mlx-lm, to the same count of tokens as ours and with the same prefill chunk."""
    prompt = mx.array(list(prompt_ids))
    ids: list[int] = []
    start = time.perf_counter()
    first = last = start
    for token, _ in generate_step(prompt, network, max_tokens=new_tokens, prefill_step_size=prefill_chunk):
        last = time.perf_counter()
        if not ids:
            first = last
        ids.append(int(token))
    return Sample(first - start, last - first, tuple(ids))
