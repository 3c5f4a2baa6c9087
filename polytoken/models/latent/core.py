"""The deliberation core: what is known about every canvas position, turned into latents and a context for the denoise.

B rows, C positions, H hidden size, D latent width, A heads, M memory slots. Everything here is in logical order.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.latent.arithmetic import (
    NORM_EPS,
    apply,
    gate_update,
    layer_norm,
    log_age,
    signed_log1p,
    split_heads,
    unit,
)
from polytoken.models.latent.gdn2 import to_heads
from polytoken.models.latent.ring import to_logical
from polytoken.models.latent.state import LatentState

SCALARS = 11


def position_scalars(state: LatentState, *, confidence: mx.array, entropy: mx.array, head: mx.array) -> mx.array:
    """float32 [B, C, 11] in logical order, from the physical fields of a state.

    In this order: confidence, entropy, age, position, change, change of confidence, change of entropy, denoises since
    a commit, denoises since progress, confidence discounted by entropy, improvement.
    """
    canvas = confidence.shape[1]

    def everywhere(count: mx.array) -> mx.array:
        return mx.broadcast_to(mx.log1p(count.astype(mx.float32))[:, None], confidence.shape)

    columns = [
        confidence,
        mx.log1p(entropy),
        log_age(state.age),
        state.token_changed,
        state.confidence_delta,
        signed_log1p(state.entropy_delta),
        everywhere(state.ponder_steps),
        everywhere(state.stagnation_steps),
        confidence * mx.exp(-mx.maximum(entropy, 0.0)),
        mx.maximum(state.confidence_delta, 0.0) + mx.log1p(mx.maximum(-state.entropy_delta, 0.0)),
    ]
    gathered = to_logical(mx.stack(columns, axis=-1), head)
    position = mx.broadcast_to(mx.linspace(-1.0, 1.0, canvas)[None, :, None], (*confidence.shape, 1))
    return mx.concatenate([gathered[..., :3], position, gathered[..., 3:]], axis=-1)


def slot_identity(table: mx.array) -> mx.array:
    """The slots' identities float32 [M, D]: rows of the learned table at length sqrt(D)."""
    return math.sqrt(table.shape[-1]) * unit(table.astype(mx.float32), 1e-12)


class Attention(nn.Module):
    """Multi-head attention with biases, D to D."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self._heads = heads

    def __call__(self, query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None = None) -> mx.array:
        """[B, C, D] of queries [B, C, D] on keys and values [B, K, D]; `mask` bool [C, K] says which keys count."""

        def heads(layer: nn.Module, x: mx.array) -> mx.array:
            return split_heads(apply(layer, x), self._heads).transpose(0, 2, 1, 3)

        q, k, v = heads(self.query, query), heads(self.key, key), heads(self.value, value)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
        return apply(self.out_proj, out.transpose(0, 2, 1, 3).reshape(query.shape))


class Block(nn.Module):
    """One round of deliberation on the token latents."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.state_norm = layer_norm(dim)
        self.observation_norm = layer_norm(dim)
        self.memory_address_norm = layer_norm(dim)
        self.memory_value_norm = layer_norm(dim)
        self.token_ff_norm = layer_norm(dim)
        self.stored_token_norm = layer_norm(dim)
        self.temporal_update = nn.Linear(2 * dim, 2 * dim)
        self.local_attention = Attention(dim, heads)
        self.token_memory_attention = Attention(dim, heads)
        self.token_ff = [nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)]

    def __call__(
        self, tokens: mx.array, seen: mx.array, *, memory: mx.array, identity: mx.array, mask: mx.array | None
    ) -> mx.array:
        """New latents [B, C, D] from latents [B, C, D] and an observation [B, C, D]; memory [B, M, D] is read."""
        t = gate_update(self.temporal_update, tokens, self.state_norm(tokens), self.observation_norm(seen))
        normed = self.state_norm(t)
        t = t + self.local_attention(normed, normed, normed, mask)
        t = t + self.token_memory_attention(
            self.state_norm(t), self.memory_address_norm(memory + identity), self.memory_value_norm(memory)
        )
        widen, activate, narrow = self.token_ff
        t = t + apply(narrow, activate(apply(widen, self.token_ff_norm(t))))
        stored: mx.array = self.stored_token_norm(t)
        return stored


class CoreRead(nn.Module):
    """What the working memory has to say to every latent; an empty memory says exactly zero."""

    def __init__(self, dim: int, slots: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, heads * slots, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self._heads = heads

    def __call__(self, tokens: mx.array, memory: mx.array) -> mx.array:
        """[B, C, D] for latents [B, C, D] and a memory [B, M, D]."""
        query = unit(nn.silu(split_heads(apply(self.query, tokens), self._heads))).transpose(0, 2, 1, 3)
        read = (query @ to_heads(memory, self._heads)).transpose(0, 2, 1, 3).reshape(tokens.shape)
        return apply(self.out, mx.fast.rms_norm(read, None, NORM_EPS))


def local_mask(canvas: int, window: int) -> mx.array | None:
    """bool [C, C], true where |j - j'| < window; None where that is everywhere."""
    if window >= canvas:
        return None
    position = mx.arange(canvas)
    return mx.abs(position[:, None] - position[None]) < window
