"""What a spectator of the canvas sees after a denoise: for a live view and for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, kw_only=True)
class CanvasFrame:
    """One row's canvas after one denoise, in logical order (the first position comes next in the text).

    Attributes:
        request_id: whose canvas.
        denoise_steps: denoises of the request so far, this one included.
        generated_tokens: ids committed before this denoise; the canvas begins behind them.
        committed: how many of the canvas's first positions this denoise made permanent.
        remaining: output that was still to come before it; positions from there on are never text.
        token_ids: what stands at every position now.
        confidence: probability of each, in [0, 1].
        entropy: nats of the distribution each was drawn from.
        age: denoises that each position has seen since it was last filled with noise.
        likely: whether each would have been committed, had only its own risk counted.
    """

    request_id: str
    denoise_steps: int
    generated_tokens: int
    committed: int
    remaining: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    entropy: tuple[float, ...]
    age: tuple[int, ...]
    likely: tuple[bool, ...]


Observer = Callable[[CanvasFrame], None]
"""Called on the thread that owns the device, after the host has read the denoise. It must be quick."""


@dataclass(frozen=True, eq=False)
class FrameArrays:
    """The arrays of a frame before the host has read them, each [1, C] in logical order."""

    token_ids: mx.array
    confidence: mx.array
    entropy: mx.array
    age: mx.array
    likely: mx.array

    def arrays(self) -> list[mx.array]:
        return [self.token_ids, self.confidence, self.entropy, self.age, self.likely]

    def frame(
        self, *, request_id: str, denoise_steps: int, generated_tokens: int, committed: int, remaining: int
    ) -> CanvasFrame:
        ids, confidence, entropy, age, likely = (np.array(array)[0].tolist() for array in self.arrays())
        return CanvasFrame(
            request_id=request_id,
            denoise_steps=denoise_steps,
            generated_tokens=generated_tokens,
            committed=committed,
            remaining=remaining,
            token_ids=tuple(ids),
            confidence=tuple(confidence),
            entropy=tuple(entropy),
            age=tuple(age),
            likely=tuple(likely),
        )
