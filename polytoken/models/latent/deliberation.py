"""The module a lane and a network see: core, buses, observation and commit, under the names of a checkpoint."""

# mypy: allow-subclassing-any
from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from polytoken.models.latent.arithmetic import apply, layer_norm
from polytoken.models.latent.buses import PersistentMemoryBus, WorkingMemoryBus
from polytoken.models.latent.commit import CommitWriter
from polytoken.models.latent.core import SCALARS, Block, CoreRead, local_mask, position_scalars, slot_identity
from polytoken.models.latent.observe import Observer
from polytoken.models.latent.ring import to_logical, to_physical
from polytoken.models.latent.state import LatentState


class LatentSizes(Protocol):
    """D, M, A, N, the local window and the readers of each bus."""

    @property
    def dim(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def readers(self) -> int: ...


class LatentDeliberation(nn.Module):
    """B rows, C slots, H hidden size, D latent width, M memory slots; per-slot arrays in physical order."""

    def __init__(self, sizes: LatentSizes, *, hidden_size: int, max_positions: int, eps: float) -> None:
        super().__init__()
        dim, slots, heads = sizes.dim, sizes.slots, sizes.heads
        self.embedding_projection = nn.Linear(hidden_size, dim, bias=False)
        self.scalar_projection = nn.Linear(SCALARS, dim, bias=False)
        self.memory_slot_identity = mx.zeros((slots, dim))
        self.core_read = CoreRead(dim, slots, heads)
        self.blocks = [Block(dim, heads) for _ in range(sizes.blocks)]
        self.output_norm = layer_norm(dim)
        self.output_projection = nn.Linear(dim, hidden_size, bias=False)
        self.observe = Observer(hidden_size, dim=dim, slots=slots, heads=heads)
        self.commit = CommitWriter(hidden_size, dim=dim, slots=slots, heads=heads, max_positions=max_positions)
        readers = sizes.readers
        self.working_memory_bus = WorkingMemoryBus(
            hidden_size, hidden_size, dim=dim, heads=heads, readers=readers, eps=eps
        )
        self.persistent_memory_bus = PersistentMemoryBus(
            hidden_size, self.slot_identity, dim=dim, heads=heads, readers=readers, eps=eps
        )
        self._window = sizes.window

    def slot_identity(self) -> mx.array:
        """float32 [M, D]."""
        return slot_identity(self.memory_slot_identity)

    def __call__(
        self,
        *,
        token_embeddings: mx.array,
        confidence: mx.array,
        entropy: mx.array,
        state: LatentState,
        canvas_head: mx.array,
    ) -> tuple[mx.array, LatentState]:
        """The context of a denoise, [B, C, H] in the embeddings' dtype, and the state with new token latents.

        Args:
            token_embeddings: [B, C, H], scaled.
            confidence, entropy: float32 [B, C], of the last denoise.
            state: before the denoise; memory is read, never written.
            canvas_head: int32 [B].
        """
        head = canvas_head
        scalars = position_scalars(state, confidence=confidence, entropy=entropy, head=head)
        tokens = to_logical(state.token_latents, head)
        seen = apply(self.embedding_projection, to_logical(token_embeddings, head))
        seen = seen + apply(self.scalar_projection, scalars) + self.core_read(tokens, state.gdn2.working)
        mask = local_mask(tokens.shape[1], self._window)
        identity = self.slot_identity()
        for block in self.blocks:
            tokens = block(tokens, seen, memory=state.memory_slots, identity=identity, mask=mask)
            seen = tokens
        working = apply(self.output_projection, self.output_norm(tokens)).astype(token_embeddings.dtype)
        return to_physical(working, head), replace(state, token_latents=to_physical(tokens, head))

    def logical_seen(self, state: LatentState, head: mx.array) -> mx.array:
        """bool [B, C] in logical order: positions denoised at least once since they were filled with noise."""
        return to_logical(state.age, head) > 0

    def observe_state(
        self, state: LatentState, heavy: mx.array, working: mx.array, valid: mx.array, head: mx.array
    ) -> LatentState:
        """The state after a denoise: new token latents at valid positions, new working memory, all else as it was.

        Args:
            state: with the statistics, ages and deltas of this denoise.
            heavy, working: [B, C, H], final hidden states and context of the denoise.
            valid: bool [B, C].
            head: int32 [B], without influence.
        """
        del head
        return self.observe(state, heavy, working, valid)

    def commit_write(
        self,
        *,
        memory: mx.array,
        working_state: mx.array,
        heavy_hidden: mx.array,
        committed_token_embeddings: mx.array,
        commit_lengths: mx.array,
        prefix_lengths: mx.array,
        commit_reason: mx.array,
        canvas_head: mx.array,
        max_commit: int,
    ) -> tuple[mx.array, mx.array]:
        """The memory after a commit, float32 [B, M, D], and the mean write gate of its steps, float32 [B].

        Args:
            memory: float32 [B, M, D].
            working_state, heavy_hidden: [B, C, H] of the denoise.
            committed_token_embeddings: [B, L, H], scaled.
            commit_lengths: int32 [B]; a row of length 0 keeps its memory bit for bit.
            prefix_lengths: int32 [B], encoder offset before the commit.
            commit_reason: int32 [B], 0 to 3.
            canvas_head: int32 [B], before the advance.
            max_commit: L.
        """
        return self.commit(
            memory,
            working=working_state,
            heavy=heavy_hidden,
            embeddings=committed_token_embeddings[:, :max_commit],
            lengths=commit_lengths,
            prefix_lengths=prefix_lengths,
            reasons=commit_reason,
            head=canvas_head,
        )


def neutral_parameters(module: LatentDeliberation) -> dict[str, mx.array]:
    """Values by name at which the module adds exactly nothing to a denoise, for a checkpoint that has none of them.

    Matrices are zero; norms, gates and the biases of the writers keep their start values, other biases are zero.
    """

    def neutral(name: str, array: mx.array) -> mx.array:
        starts_elsewhere = ".writer." in name or not name.endswith(".bias")
        return array if array.ndim == 1 and starts_elsewhere else mx.zeros_like(array)

    return {name: neutral(name, array) for name, array in tree_flatten(module.parameters())}
