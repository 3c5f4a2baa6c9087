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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from polytoken.cache.recurrent import RecurrentLayer, Slots

_EPS = 1e-6  # under the root of the query's and key's lengths
_MOST_KEPT = 16  # rows of a window whose matrices may all be kept; longer ones are run again in part


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """What w rows put into the recurrence: enough to run any first part of them again.

    Attributes:
        window: [1, K - 1 + w, C], the conv tail before the rows, then the rows; neither convolved nor activated.
        q, k: [1, w, Hk, Dk], normalised. v: [1, w, Hv, Dv]. a, b: [1, w, Hv].
        A_log, dt_bias: [Hv], the layer's own.
        use_kernel: whether the fused recurrence may run.
        matrices: the matrices after the first rows, as far as they were kept.
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
    matrices: Sequence[mx.array] = ()

    @property
    def nbytes(self) -> int:
        rows = (self.window, self.q, self.k, self.v, self.a, self.b)
        return sum(int(array.nbytes) for array in (*rows, *self.matrices[:-1]))

    def run(self, matrix: mx.array | None, rows: int) -> tuple[mx.array, list[mx.array]]:
        """Outputs [1, rows, Hv, Dv] of the first rows and the matrices [1, Hv, Dv, Dk] after each of them.

        Where one kernel does all rows only the last matrix is given.
        """
        inputs = [array[:, :rows] for array in (self.q, self.k, self.v, self.a, self.b)]
        if not (self.use_kernel and mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)):
            q, k, v, a, b = inputs
            return recur(q, k, v, beta=mx.sigmoid(b), g=compute_g(self.A_log, a, self.dt_bias), matrix=matrix)
        y, after = gated_delta_update(*inputs, self.A_log, self.dt_bias, matrix, None)
        return y, [after]

    def tail(self, rows: int) -> mx.array:
        """The conv tail [1, K - 1, C] after the first rows, in memory of its own but for at most 16 KiB."""
        width = self.window.shape[1] - self.q.shape[1]  # K - 1
        return mx.contiguous(self.window[:, rows : rows + width])

    def __call__(self, before: Slots | None, keep: int) -> Slots:
        if len(self.matrices) > keep:
            return self.tail(keep), self.matrices[keep - 1]
        return self.tail(keep), self.run(None if before is None else before[1], keep)[1][-1]


def recur(
    q: mx.array, k: mx.array, v: mx.array, *, beta: mx.array, g: mx.array, matrix: mx.array | None
) -> tuple[mx.array, list[mx.array]]:
    """The recurrence row by row, operation by operation as in the library: y [1, S, Hv, Dv] and the matrix after each.

    All rows are brought into shape at once and cut apart in one operation, since on the CPU every operation costs
    microseconds whatever its size, and there are as many steps as rows.
    """
    S, Hk, Dk = q.shape[1:]
    Hv, Dv = v.shape[2:]
    if matrix is None:
        matrix = mx.zeros((1, Hv, Dv, Dk), mx.float32)
    if Hv > Hk:
        q, k = (mx.repeat(array, Hv // Hk, axis=2) for array in (q, k))
    rows = [
        q.reshape(S, Hv, 1, Dk),
        k.reshape(S, Hv, 1, Dk),
        v.reshape(S, Hv, Dv, 1),
        beta.reshape(S, Hv, 1, 1),
        g.reshape(S, Hv, 1, 1),
    ]
    ys, matrices = [], []
    for row in zip(*(mx.split(array, S) for array in rows), strict=True) if S > 1 else [rows]:
        y, matrix = _step(matrix, *row)
        ys.append(y)
        matrices.append(matrix)
    y = mx.concatenate(ys) if S > 1 else ys[0]
    return y.astype(q.dtype).reshape(1, S, Hv, Dv), matrices


@mx.compile
def _step(  # noqa: PLR0917  (compiled functions take arrays by place)
    matrix: mx.array, q: mx.array, k: mx.array, v: mx.array, beta: mx.array, g: mx.array
) -> tuple[mx.array, mx.array]:
    """One row: y float32 [1, Hv, Dv, 1] and the matrix after it."""
    decayed = matrix * g
    change = (v - (decayed * k).sum(axis=-1, keepdims=True)) * beta
    after = decayed + k * change
    return (after * q).sum(axis=-1, keepdims=True), after


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
        y, matrices = rows.run(None if before is None else before[1], S)
        if cache is not None:
            if 1 < len(matrices) <= _MOST_KEPT:
                rows = replace(rows, matrices=matrices)
            cache.advance(S, (rows.tail(S), matrices[-1]), rows)
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
