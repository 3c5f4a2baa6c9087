"""What a denoise leaves in the latents of its positions and in working memory."""

# mypy: allow-subclassing-any
from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.latent.arithmetic import NORM_EPS, apply, gate_update, layer_norm, log_age, signed_log1p
from polytoken.models.latent.gdn2 import Gdn2Writer, from_heads, gdn2_step, to_heads
from polytoken.models.latent.state import LatentState

_SCALARS = 6


class Pool(nn.Module):
    """Scores by which positions are pooled: `omega` times the confidence plus a product with `score`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.omega = mx.zeros((1,))
        self.score = mx.zeros((dim,))

    def __call__(self, rows: mx.array, confidence: mx.array, valid: mx.array) -> mx.array:
        """[B, D], the weighted mean of rows [B, C, D] over the valid positions, bool [B, C]; NaN if there are none."""
        scores = self.omega.astype(mx.float32) * confidence + rows @ self.score.astype(mx.float32)
        shares = mx.softmax(mx.where(valid, scores, -mx.inf), axis=-1)
        return mx.sum(shares[..., None] * rows, axis=1)


class Observer(nn.Module):
    """All of it is position by position or a sum over positions, so the ring head plays no part."""

    def __init__(self, hidden_size: int, *, dim: int, slots: int, heads: int) -> None:
        super().__init__()
        self.heavy_projection = nn.Linear(hidden_size, dim, bias=False)
        self.working_projection = nn.Linear(hidden_size, dim, bias=False)
        self.scalar_projection = nn.Linear(_SCALARS, dim, bias=False)
        self.state_norm = layer_norm(dim)
        self.input_norm = layer_norm(dim)
        self["update"] = nn.Linear(2 * dim, 2 * dim)  # as an attribute the name belongs to every module's own method
        self.pool = Pool(dim)
        self.writer = Gdn2Writer(dim, slots, heads)
        self._heads = heads

    def __call__(self, state: LatentState, heavy: mx.array, working: mx.array, valid: mx.array) -> LatentState:
        """See `LatentDeliberation.observe_state`."""
        scalars = mx.stack(
            [
                state.confidence,
                mx.log1p(mx.maximum(state.entropy, 0.0)),
                state.token_changed,
                state.confidence_delta,
                signed_log1p(state.entropy_delta),
                log_age(state.age),
            ],
            axis=-1,
        )
        seen = self.input_norm(
            apply(self.heavy_projection, mx.fast.rms_norm(heavy, None, NORM_EPS))
            + apply(self.working_projection, mx.fast.rms_norm(working, None, NORM_EPS))
            + apply(self.scalar_projection, scalars)
        )
        old = state.token_latents
        latents = mx.where(valid[..., None], gate_update(self["update"], old, self.state_norm(old), seen), old)
        some = mx.any(valid, axis=-1)
        pooled = self.pool(seen, state.confidence, valid)
        memory = to_heads(state.gdn2.working, self._heads)
        written = mx.where(some[:, None, None, None], gdn2_step(memory, self.writer(pooled)), memory)
        return replace(state, token_latents=latents, gdn2=replace(state.gdn2, working=from_heads(written)))
