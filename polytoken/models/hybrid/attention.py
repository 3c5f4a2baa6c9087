"""The gated attention of the hybrid families, over our cache layers.

Per row and head, with norms of their own for queries and keys and a rotation of a share of each head:

    q, z = split(W_q x)                                         head by head
    out  = W_o (attention(rope(rms(q)), rope(rms(k)), v) sigmoid(z))
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from polytoken.cache.layers import KVLayer
from polytoken.kernels.attention import Mask, attend


class GatedAttention(Qwen3NextAttention):
    """The library's parameters, read in one operation where there is one."""

    def __call__(self, x: mx.array, mask: Mask = None, cache: KVLayer | None = None) -> mx.array:
        """x [1, S, H] to [1, S, H]; the cache layer grows by S rows."""
        assert cache is not None
        S, width = x.shape[1], self.head_dim
        both = self.q_proj(x).reshape(1, S, self.num_attention_heads, 2 * width)
        gate = both[..., width:].reshape(1, S, -1)
        queries = self.q_norm(both[..., :width]).swapaxes(1, 2)
        keys = self.k_norm(self.k_proj(x).reshape(1, S, self.num_key_value_heads, width)).swapaxes(1, 2)
        values = self.v_proj(x).reshape(1, S, self.num_key_value_heads, width).swapaxes(1, 2)
        offset = cache.offset
        keys, values = cache.update_and_fetch(self.rope(keys, offset=offset), values)
        mixed = attend(self.rope(queries, offset=offset), keys, values, scale=self.scale, mask=mask)
        out: mx.array = self.o_proj(mixed * mx.sigmoid(gate))
        return out


def adopt_attention(layers: Iterable[Any]) -> None:
    """Let the library's full attention run as ours: same parameters, another way through them."""
    for layer in layers:
        if not layer.is_linear:
            layer.self_attn.__class__ = GatedAttention
