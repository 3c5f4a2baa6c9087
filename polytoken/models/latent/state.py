"""The recurrent state that latent deliberation carries from denoise to denoise and from commit to commit.

Every field is an array with a leading row axis, or a record of such arrays, so that rows can be cut out, joined and
counted by one recursion over fields. B rows, C canvas slots, M memory slots, D latent width. Per-slot fields lie in
physical order: they don't move when the canvas advances.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Gdn2State:
    """Fast-weight memories; row m of a memory holds, head after head, row m of every head's matrix.

    Attributes:
        persistent: float32 [B, M, D], written at commits; the same array as `LatentState.memory_slots` after one.
        working: float32 [B, M, D], written at every denoise.
    """

    persistent: mx.array
    working: mx.array

    @staticmethod
    def empty(rows: int, slots: int, dim: int) -> Gdn2State:
        """A memory in which nothing was ever written."""
        return Gdn2State(mx.zeros((rows, slots, dim), mx.float32), mx.zeros((rows, slots, dim), mx.float32))


@dataclass(frozen=True, eq=False)
class LatentState:
    """What is known about every canvas slot, and what the answer has left in memory.

    Attributes:
        token_latents: float32 [B, C, D].
        memory_slots: float32 [B, M, D].
        confidence: float32 [B, C], probability of the last proposal.
        entropy: float32 [B, C], nats, of the last distribution.
        age: int32 [B, C], denoises since the slot was filled with noise.
        token_changed: float32 [B, C], 1 where the last proposal differed from the canvas.
        confidence_delta, entropy_delta: float32 [B, C], change in the last denoise.
        ponder_steps: int32 [B], denoises since the last commit.
        stagnation_steps: int32 [B], denoises since the last progress.
        gdn2: see `Gdn2State`.
    """

    token_latents: mx.array
    memory_slots: mx.array
    confidence: mx.array
    entropy: mx.array
    age: mx.array
    token_changed: mx.array
    confidence_delta: mx.array
    entropy_delta: mx.array
    ponder_steps: mx.array
    stagnation_steps: mx.array
    gdn2: Gdn2State

    @staticmethod
    def empty(
        rows: int, canvas: int, slots: int, dim: int, *, enable_gdn2: bool = True, entropy: float = 0.0
    ) -> LatentState:
        """The state before the first denoise.

        Args:
            rows, canvas, slots, dim: B, C, M, D.
            enable_gdn2: accepted for completeness; the memories are always there, and stay zero when unused.
            entropy: start value of `entropy`; a lane gives log V, since noise is uniform over the vocabulary.
        """
        del enable_gdn2

        def slotwise(value: float = 0.0) -> mx.array:
            return mx.full((rows, canvas), value, mx.float32)

        gdn2 = Gdn2State.empty(rows, slots, dim)
        return LatentState(
            token_latents=mx.zeros((rows, canvas, dim), mx.float32),
            memory_slots=gdn2.persistent,
            confidence=slotwise(),
            entropy=slotwise(entropy),
            age=mx.zeros((rows, canvas), mx.int32),
            token_changed=slotwise(),
            confidence_delta=slotwise(),
            entropy_delta=slotwise(),
            ponder_steps=mx.zeros((rows,), mx.int32),
            stagnation_steps=mx.zeros((rows,), mx.int32),
            gdn2=gdn2,
        )
