"""What a commit leaves in memory: one delta-rule step per committed token, in their order."""

# mypy: allow-subclassing-any
from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.latent.arithmetic import NORM_EPS, apply, layer_norm
from polytoken.models.latent.gdn2 import Gdn2Writer, cap_slots, from_heads, gdn2_scan, to_heads
from polytoken.models.latent.ring import to_logical

REASONS = 4


class CommitWriter(nn.Module):
    """From committed tokens and the denoise that led to them to a new memory."""

    def __init__(self, hidden_size: int, *, dim: int, slots: int, heads: int, max_positions: int) -> None:
        super().__init__()
        self.embed_projection = nn.Linear(hidden_size, dim, bias=False)
        self.heavy_projection = nn.Linear(hidden_size, dim, bias=False)
        self.working_projection = nn.Linear(hidden_size, dim, bias=False)
        self.position_projection = nn.Linear(3, dim, bias=False)
        self.reason_embedding = mx.zeros((REASONS, dim))
        self.norm = layer_norm(dim)
        self.writer = Gdn2Writer(dim, slots, heads)
        self._heads = heads
        self._log_positions = math.log(max(max_positions, 2))

    def __call__(
        self,
        memory: mx.array,
        *,
        working: mx.array,
        heavy: mx.array,
        embeddings: mx.array,
        lengths: mx.array,
        prefix_lengths: mx.array,
        reasons: mx.array,
        head: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """See `LatentDeliberation.commit_write`."""
        steps, canvas = embeddings.shape[1], heavy.shape[1]

        def project(layer: nn.Module, x: mx.array) -> mx.array:
            return apply(layer, mx.fast.rms_norm(x, None, NORM_EPS))

        step = mx.arange(steps, dtype=mx.float32)[None]
        share = mx.broadcast_to((lengths.astype(mx.float32) / canvas)[:, None], (memory.shape[0], steps))
        position = mx.stack(
            [
                mx.log1p(prefix_lengths.astype(mx.float32)[:, None] + step) / self._log_positions,
                mx.broadcast_to(step / canvas, share.shape),
                share,
            ],
            axis=-1,
        )
        rows = self.norm(
            project(self.embed_projection, embeddings)
            + project(self.heavy_projection, to_logical(heavy, head)[:, :steps])
            + project(self.working_projection, to_logical(working, head)[:, :steps])
            + self.reason_embedding.astype(mx.float32)[reasons][:, None]
            + apply(self.position_projection, position)
        )
        gates = self.writer(rows)
        scanned = gdn2_scan(to_heads(memory, self._heads), gates, lengths)
        written = mx.where((lengths > 0)[:, None, None], cap_slots(from_heads(scanned)), memory)
        counts = mx.arange(steps)[None] < lengths[:, None]
        opened = mx.sum(mx.where(counts, mx.mean(gates.write, axis=(-2, -1)), 0.0), axis=-1)
        return written, opened / mx.maximum(lengths, 1)
