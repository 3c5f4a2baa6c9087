"""The gated delta net of the hybrid families, over our recurrent layer and with a way back.

Symbols: K convolution kernel, Hk and Hv key and value heads of Dk and Dv, C = 2 Hk Dk + Hv Dv. Per row t and head:

    c_t  = silu(sum_j w_j u_{t+j-K+1})                          depthwise, over u = [q | k | v], C wide
    q, k = q / |q| / sqrt(Dk), k / |k|                          1e-6 within the root
    beta = sigmoid(b),  g = exp(-exp(A_log) softplus(a + dt_bias))
    S   <- g S;  S <- S + beta (v - S k) k^T;  y_t = S q        S float32 [Dv, Dk]
    out  = W_o (rms(y) w_n silu(z))

The recurrence goes row by row and S is always float32, so how rows are cut into forwards changes no bit.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from polytoken.cache.recurrent import RecurrentLayer, Slots

_EPS = 1e-6  # under the root of the query's and key's lengths


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """What w rows put into the recurrence: enough to run any first part of them again.

    Attributes:
        window: [1, K - 1 + w, C], the conv tail before the rows, then the rows; neither convolved nor activated.
        q, k: [1, w, Hk, Dk], normalised. v: [1, w, Hv, Dv]. a, b: [1, w, Hv].
        A_log, dt_bias: [Hv], the layer's own.
        use_kernel: whether the fused recurrence ran, so that the same one runs again.
    """

    window: mx.array
    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array
    A_log: mx.array
    dt_bias: mx.array
    use_kernel: bool

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in (self.window, self.q, self.k, self.v, self.a, self.b))

    def run(self, matrix: mx.array | None, rows: int) -> tuple[mx.array, mx.array]:
        """Outputs [1, rows, Hv, Dv] of the first rows and the matrix [1, Hv, Dv, Dk] after them."""
        inputs = [array[:, :rows] for array in (self.q, self.k, self.v, self.a, self.b)]
        y, after = gated_delta_update(*inputs, self.A_log, self.dt_bias, matrix, None, use_kernel=self.use_kernel)
        return y, after

    def tail(self, rows: int) -> mx.array:
        """The conv tail [1, K - 1, C] after the first rows, in memory of its own but for at most 16 KiB."""
        width = self.window.shape[1] - self.q.shape[1]  # K - 1
        return mx.contiguous(self.window[:, rows : rows + width])

    def __call__(self, before: Slots | None, keep: int) -> Slots:
        _, matrix = self.run(None if before is None else before[1], keep)
        return self.tail(keep), matrix


class _DeltaNet(nn.Module):
    """The steps that both projection layouts share; the layout's class stands behind it in the bases."""

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """u [1, S, C], z [1, S, Hv, Dv], b and a [1, S, Hv] of x [1, S, H]."""
        raise NotImplementedError

    def __call__(self, x: mx.array, mask: None = None, cache: RecurrentLayer | None = None) -> mx.array:
        S = x.shape[1]
        u, z, b, a = self.project(x)
        before = None if cache is None else cache.slots
        conv = mx.zeros((1, self.conv_kernel_size - 1, self.conv_dim), u.dtype) if before is None else before[0]
        window = mx.concatenate([conv, u], axis=1)
        c = nn.silu(self.conv1d(window))
        q, k, v = mx.split(c, [self.key_dim, 2 * self.key_dim], axis=-1)
        q = q.reshape(1, S, self.num_k_heads, self.head_k_dim)
        k = k.reshape(1, S, self.num_k_heads, self.head_k_dim)
        v = v.reshape(1, S, self.num_v_heads, self.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=_EPS)
        rows = DeltaRows(window, q, k, v, a, b, self.A_log, self.dt_bias, use_kernel=not self.training)
        y, matrix = rows.run(None if before is None else before[1], S)
        if cache is not None:
            cache.advance(S, (rows.tail(S), matrix), rows)
        out: mx.array = self.out_proj(self.norm(y, z).reshape(1, S, -1))
        group = getattr(self, "sharding_group", None)
        return out if group is None else mx.distributed.all_sum(out, group=group)


class SplitDeltaNet(_DeltaNet, GatedDeltaNet):
    """qwen3_5's layout: one projection each for qkv, z, b and a."""

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        z = self.in_proj_z(x).reshape(1, x.shape[1], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)


class GroupedDeltaNet(_DeltaNet, Qwen3NextGatedDeltaNet):
    """qwen3_next's layout: rows of two projections grouped by key head."""

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        u = mx.concatenate([array.reshape(1, x.shape[1], -1) for array in (q, k, v)], axis=-1)
        return u, z, b, a


def adopt_delta_nets(layers: Iterable[Any], kind: type[_DeltaNet]) -> None:
    """Let the library's delta nets run as ours: same parameters, another way through them."""
    for layer in layers:
        if layer.is_linear:
            layer.linear_attn.__class__ = kind
