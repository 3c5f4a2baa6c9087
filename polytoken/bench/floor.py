"""The least that decoding one request has to read and to compute, lane by lane; time over it is the share of a floor.

A forward of one row, or of the few rows of a verified window, reads every weight once; so does a denoise of a canvas,
and so does encoding what a canvas committed. Experts that only further rows of a window touch are not counted.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from polytoken.events import GenerationResult
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.models.base import CausalModel
from polytoken.models.canvas import Cost


def decode_seconds(result: GenerationResult) -> float | None:
    """How long decoding took: from the first token to the last, or all denoises of a canvas.

    None for an answer of one step.
    """
    steps, rate = result.extra.get("denoise_steps"), result.decode_tokens_per_second
    if steps:
        return float(steps / result.extra["denoise_steps_per_second"])
    return None if rate is None else (result.generated_tokens - 1) / rate


def least_bytes(lane: Lane[Any], result: GenerationResult, *, cache_bytes: int = 0) -> float:
    """Bytes that decoding this answer reads at least; `cache_bytes` per forward, where they are known."""
    if isinstance(lane, CanvasLane):
        return float(sum(n * (cost.weight_bytes + cost.state_bytes) for n, cost in _canvas_work(lane, result)))
    if not isinstance(lane, ArLane | MtpLane):
        raise TypeError(f"nothing is known of what {type(lane).__name__} reads")
    total = float((result.forwards - 1) * (lane.model.weight_bytes_per_forward + cache_bytes))  # the first is prefill's
    if isinstance(lane, MtpLane):
        drafted = result.extra.get("drafted_tokens", 0) - result.extra.get("copied_tokens", 0)
        total += drafted * lane.draft_bytes
    return total


def least_flops(lane: CanvasLane, result: GenerationResult) -> float:
    """Floating-point operations of an answer's denoises and of encoding what they committed."""
    return float(sum(n * cost.flops for n, cost in _canvas_work(lane, result)))


def _canvas_work(lane: CanvasLane, result: GenerationResult) -> list[tuple[int, Cost]]:
    """The denoises, over a prefix of mean length, and the encoding of all commits but the last, which nobody reads.

    As pairs of how many forwards, and the cost of one.
    """
    prefix = result.prompt_tokens + result.generated_tokens // 2
    work = [(int(result.extra["denoise_steps"]), lane.model.denoise_cost(prefix))]
    encoded = int(result.extra["state_shift_count"]) - 1
    if encoded > 0:
        tokens = max(round(result.generated_tokens / (encoded + 1)), 1)
        work.append((encoded, lane.model.encode_cost(tokens, prefix)))
    return work


def cache_bytes_read(model: CausalModel, tokens: int) -> int:
    """Bytes of decoding state that one forward behind so many tokens reads. Builds a graph, computes nothing."""
    cache = model.make_cache()
    model.forward(mx.zeros((1, tokens), dtype=mx.int32), cache, keep=0)
    return cache.nbytes
