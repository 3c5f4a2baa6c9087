"""The peer to measure against: mlx-lm's own generation loop and caches over the very same loaded weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from polytoken.bench.sample import Sample


def run_mlx_lm(network: Any, prompt_ids: Sequence[int], *, new_tokens: int, prefill_chunk: int) -> Sample:
    """Generate greedily with mlx-lm, to the same count of tokens as ours and with the same prefill chunk."""
    prompt = mx.array(list(prompt_ids))
    ids: list[int] = []
    start = time.perf_counter()
    first = last = start
    with library_layers(network):
        for token, _ in generate_step(prompt, network, max_tokens=new_tokens, prefill_step_size=prefill_chunk):
            last = time.perf_counter()
            if not ids:
                first = last
            ids.append(int(token))
    return Sample(first - start, last - first, tuple(ids))


@contextmanager
def library_layers(network: Any) -> Iterator[None]:
    """While this is open, recurrent layers that we run in our own way run in mlx-lm's, which its caches belong to."""
    ours = [(layer.linear_attn, type(layer.linear_attn)) for layer in network.layers if hasattr(layer, "linear_attn")]
    try:
        for module, kind in ours:
            module.__class__ = next(base for base in kind.__mro__ if base.__module__.startswith("mlx_lm."))
        yield
    finally:
        for module, kind in ours:
            module.__class__ = kind
