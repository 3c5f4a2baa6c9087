"""Gated DeltaNet-2 over memory slots: a fast-weight matrix per head, with separate gates to decay, erase and write.

A heads; M memory slots, the key axis; d = D / A values per head. A memory [B, M, D] is seen as S [B, A, M, d]: row m of
every head's matrix, head after head, is slot m.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.latent.arithmetic import apply, rms, split_heads, unit

SLOT_CAP = 4.0
_START_DECAY = 0.99
_START_WRITE_BIAS = -2.0


@dataclass(frozen=True, eq=False)
class Gdn2Gates:
    """One step's inputs per row and head; or those of L steps, with an axis [L] after the first.

    Attributes:
        key: float32 [B, A, M], of length one.
        value: float32 [B, A, d].
        decay: float32 [B, A, M] in (0, 1].
        erase: float32 [B, A, M] in [0, 1].
        write: float32 [B, A, d] in [0, 1].
    """

    key: mx.array
    value: mx.array
    decay: mx.array
    erase: mx.array
    write: mx.array

    def at(self, step: int) -> Gdn2Gates:
        """Step `step` of several."""
        parts = (self.key, self.value, self.decay, self.erase, self.write)
        return Gdn2Gates(*(part[:, step] for part in parts))


def to_heads(memory: mx.array, heads: int) -> mx.array:
    """[B, M, D] -> [B, A, M, d]."""
    return split_heads(memory, heads).transpose(0, 2, 1, 3)


def from_heads(state: mx.array) -> mx.array:
    """[B, A, M, d] -> [B, M, D]."""
    rows, heads, slots, width = state.shape
    return state.transpose(0, 2, 1, 3).reshape(rows, slots, heads * width)


def gdn2_step(state: mx.array, gates: Gdn2Gates) -> mx.array:
    """S <- (I - k (b*k)^T) Diag(decay) S + k (w*v)^T, on S float32 [B, A, M, d]."""
    decayed = gates.decay[..., None] * state
    erased = mx.sum((gates.erase * gates.key)[..., None] * decayed, axis=-2)
    return decayed + gates.key[..., None] * (gates.write * gates.value - erased)[..., None, :]


def gdn2_scan(state: mx.array, gates: Gdn2Gates, lengths: mx.array) -> mx.array:
    """The first `lengths` int32 [B] of L steps in order; a row's later steps leave its state bit for bit."""
    for step in range(gates.key.shape[1]):
        going = (step < lengths)[:, None, None, None]
        state = mx.where(going, gdn2_step(state, gates.at(step)), state)
    return state


def cap_slots(memory: mx.array) -> mx.array:
    """Memory [B, M, D] with every slot's rms at most `SLOT_CAP`."""
    return memory * mx.minimum(1.0, SLOT_CAP / rms(memory))


class Gdn2Writer(nn.Module):
    """From feature rows [..., D] to the gates of a step."""

    def __init__(self, dim: int, slots: int, heads: int) -> None:
        super().__init__()
        self.key = nn.Linear(dim, heads * slots, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.erase = nn.Linear(dim, heads * slots)
        self.write = nn.Linear(dim, dim)
        self.decay = nn.Linear(dim, heads * slots)
        self.a_log = mx.zeros((heads,))
        self.erase.bias = mx.zeros((heads * slots,))
        self.write.bias = mx.full((dim,), _START_WRITE_BIAS)
        start = math.log(math.expm1(-math.log(_START_DECAY)))  # softplus of it is -log(0.99)
        self.decay.bias = mx.full((heads * slots,), start)
        self._heads = heads

    def __call__(self, x: mx.array) -> Gdn2Gates:
        """Gates of rows x float32 [..., D]."""

        def heads(layer: nn.Module) -> mx.array:
            return split_heads(apply(layer, x), self._heads)

        rate = mx.exp(self.a_log.astype(mx.float32))[:, None]
        return Gdn2Gates(
            key=unit(nn.silu(heads(self.key))),
            value=heads(self.value),
            decay=mx.exp(-rate * nn.softplus(heads(self.decay))),
            erase=mx.sigmoid(heads(self.erase)),
            write=mx.sigmoid(heads(self.write)),
        )
