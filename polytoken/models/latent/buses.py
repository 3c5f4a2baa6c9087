"""Memory buses: gated reads of memory into the hidden states of the denoiser, after its full-attention layers.

Keys and values are prepared once per denoise and shared by all readers; reader r belongs to the r-th full layer.
B rows, C positions in logical order, H hidden size, D latent width, A heads.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.latent.arithmetic import apply, capped, split_heads

BusKV = tuple[mx.array, mx.array, mx.array]
"""Keys and values [B, A, K, d], and which positions have been seen, bool [B, C]."""


class Reader(nn.Module):
    """One full layer's access; a gate of zero makes it exactly silent."""

    def __init__(self, hidden_size: int, dim: int, eps: float) -> None:
        super().__init__()
        self.query_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.query = nn.Linear(hidden_size, dim, bias=False)
        self.out = nn.Linear(dim, hidden_size, bias=False)
        self.gate = mx.zeros((1,))


class MemoryBus(nn.Module):
    """What both buses share; `num_readers` is 0 for a bus that never speaks."""

    def __init__(self, source: int, hidden_size: int, *, dim: int, heads: int, readers: int, eps: float) -> None:
        super().__init__()
        self.source_norm = nn.RMSNorm(source, eps=eps)
        self.key = nn.Linear(source, dim, bias=False)
        self.value = nn.Linear(source, dim, bias=False)
        self.readers = [Reader(hidden_size, dim, eps) for _ in range(readers)]
        self._heads = heads

    @property
    def num_readers(self) -> int:
        return len(self.readers)

    def read(self, hidden: mx.array, reader: int, keys: mx.array, values: mx.array, seen: mx.array) -> mx.array:
        """Hidden states [B, C, H] with what `reader` finds for each of them."""
        part = self.readers[reader]
        query = self._split(apply(part.query, part.query_norm(hidden)))
        found = self._attend(query, keys, values, seen).transpose(0, 2, 1, 3)
        term = capped(apply(part.out, found.reshape(*hidden.shape[:2], -1)), hidden)
        return hidden + (mx.tanh(part.gate.astype(mx.float32)) * term).astype(hidden.dtype)

    def _split(self, x: mx.array) -> mx.array:
        return split_heads(x, self._heads).transpose(0, 2, 1, 3)

    def _attend(self, query: mx.array, keys: mx.array, values: mx.array, seen: mx.array) -> mx.array:
        """[B, A, C, d]."""
        raise NotImplementedError


class WorkingMemoryBus(MemoryBus):
    """Reads the context of the positions that have been denoised before."""

    def prepare_kv(self, source: tuple[mx.array, mx.array]) -> BusKV | None:
        """From the working state [B, C, H] and which positions have been seen, bool [B, C]; both logical."""
        if not self.readers:
            return None
        working, seen = source
        normed = self.source_norm(working)
        return self._split(apply(self.key, normed)), self._split(apply(self.value, normed)), seen

    def _attend(self, query: mx.array, keys: mx.array, values: mx.array, seen: mx.array) -> mx.array:
        some = mx.any(seen, axis=-1)[:, None, None, None]
        mask = seen[:, None, None, :]
        found = mx.fast.scaled_dot_product_attention(query, keys, values, scale=query.shape[-1] ** -0.5, mask=mask)
        # Attention over no key at all is a mean of all values, or not a number; nothing was found.
        return mx.where(some, found, 0.0)


class PersistentMemoryBus(MemoryBus):
    """Reads the memory slots, for the positions that have been denoised before; empty slots read as exactly zero.

    `identity` gives the slots' identities, float32 [M, D].
    """

    def __init__(
        self,
        hidden_size: int,
        identity: Callable[[], mx.array],
        *,
        dim: int,
        heads: int,
        readers: int,
        eps: float,
    ) -> None:
        super().__init__(dim, hidden_size, dim=dim, heads=heads, readers=readers, eps=eps)
        self._identity = identity

    def prepare_kv(self, memory: mx.array, seen: mx.array) -> BusKV | None:
        """From memory slots float32 [B, M, D] and which positions have been seen, bool [B, C] logical."""
        if not self.readers:
            return None
        normed = self.source_norm(memory)
        keys = apply(self.key, normed + self._identity())
        return self._split(keys), self._split(apply(self.value, normed)), seen

    def _attend(self, query: mx.array, keys: mx.array, values: mx.array, seen: mx.array) -> mx.array:
        found = mx.fast.scaled_dot_product_attention(query, keys, values, scale=query.shape[-1] ** -0.5)
        return mx.where(seen[:, None, :, None], found, 0.0)
