"""The pieces of a Gemma 4 layer, used by the encoder (which writes the cache) and by the decoder (which reads it).

S rows of hidden size H; D head width, h key-value heads, E experts of which k are chosen. Norms multiply by the weight
itself and are computed in float32 whatever the dtype around them.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from functools import partial
from math import pi, sqrt

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from polytoken.cache.layers import KVLayer, SlidingKVLayer
from polytoken.kernels.attention import Mask
from polytoken.models.gemma4.config import SLIDING, CanvasConfig, Rope
from polytoken.models.gemma4.rotation import FullRotation

AttentionCache = KVLayer | SlidingKVLayer
_SORT_FROM = 64  # chosen experts from which sorting rows by expert saves more than it costs


def plain_norm(x: mx.array, eps: float) -> mx.array:
    """RMS norm without a weight."""
    return mx.fast.rms_norm(x, None, eps)


@partial(mx.compile, shapeless=True)
def gated(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up, gelu in its tanh form. The cube is a product: MLX's power costs as much as all the rest."""
    inner = sqrt(2 / pi) * (gate + 0.044715 * (gate * gate * gate))
    return 0.5 * gate * (1 + mx.tanh(inner)) * up


def rotary_periods(rope: Rope, width: int) -> mx.array:
    """float32 [width / 2] wavelengths over 2 pi; a pair that does not rotate has an infinite one.

    Exponents run over the whole head width even if only a share of the pairs rotates.
    """
    pairs = width // 2
    rotating = int(rope.share * width) // 2
    periods = rope.theta ** (mx.arange(0, 2 * rotating, 2, dtype=mx.float32) / width)
    return mx.concatenate([periods, mx.full((pairs - rotating,), mx.inf, mx.float32)])


class Attention(nn.Module):
    """Grouped-query attention with normed queries, keys and values and scores that are not scaled."""

    def __init__(self, config: CanvasConfig, index: int) -> None:
        super().__init__()
        shape = config.layers[index]
        kind = config.layer_types[index]
        hidden, width = config.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, config.heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * width, bias=False)
        if kind == SLIDING:  # full layers take the raw keys for values
            self.v_proj = nn.Linear(hidden, shape.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.heads * width, hidden, bias=False)
        self.q_norm = nn.RMSNorm(width, eps=config.eps)
        self.k_norm = nn.RMSNorm(width, eps=config.eps)
        self.width = width
        self.rotation = FullRotation(rotary_periods(config.rope[kind], width))
        self._eps = config.eps

    def keys_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """Keys (rotated to positions offset, offset + 1, ...) and values [1, h, S, D] of rows x [1, S, H]."""
        keys = self._heads(self.k_proj(x))
        values = self._heads(self.v_proj(x)) if "v_proj" in self else keys
        return self.rotation(self.k_norm(keys), offset), plain_norm(values, self._eps)

    def attend(self, x: mx.array, keys: mx.array, values: mx.array, *, offset: int, mask: Mask) -> mx.array:
        """[1, S, H] from queries of x [1, S, H] at positions offset, offset + 1, ..."""
        queries = self.rotation(self.q_norm(self._heads(self.q_proj(x))), offset)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)
        _, rows, _ = x.shape
        projected: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, rows, -1))
        return projected

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(1, x.shape[1], -1, self.width).transpose(0, 2, 1, 3)


class GatedMLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return out


class Router(nn.Module):
    """Which experts a row goes to, and with what weights."""

    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = mx.ones((config.hidden_size,))
        self.per_expert_scale = mx.ones((config.num_experts,))
        self._root = config.hidden_size**-0.5
        self._chosen = config.top_k_experts

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Expert ids uint32 [S, k] and weights float32 [S, k] of rows x [S, H], normed without a weight.

        A softmax over all experts, cut to the chosen ones and normalised again, is a softmax over the chosen ones.
        """
        scores = self.proj(x * self.scale * self._root)
        ids = mx.argpartition(scores, kth=-self._chosen, axis=-1)[:, -self._chosen :]
        chosen = mx.take_along_axis(scores, ids, axis=-1).astype(mx.float32)
        return ids, mx.softmax(chosen, axis=-1) * self.per_expert_scale[ids]


class ExpertLinear(SwitchLinear):
    """One weight matrix per expert, without biases."""

    def __init__(self, inputs: int, outputs: int, count: int) -> None:
        super().__init__(inputs, outputs, count, bias=False)

    def __call__(self, x: mx.array, ids: mx.array, sorted_indices: bool = False) -> mx.array:
        """[N, 1, outputs] of rows x [N, 1, inputs], row n by expert ids[n]."""
        weight = self.weight
        dtype = x.dtype
        if dtype != mx.float32 and mx.default_device() == mx.Device(mx.cpu):
            x, weight = x.astype(mx.float32), weight.astype(mx.float32)  # the CPU has no other gathered product
        out = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=ids, sorted_indices=sorted_indices)
        return out.astype(dtype)


class Experts(nn.Module):
    """Gated MLPs side by side; `gate_up_proj` holds an expert's gate rows first, then its up rows."""

    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.gate_up_proj = ExpertLinear(hidden, 2 * inner, count)
        self.down_proj = ExpertLinear(inner, hidden, count)

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """[S, H] weighted sums over the chosen experts of rows x [S, H]."""
        rows, chosen = ids.shape
        flat = ids.reshape(-1)
        is_sorted = flat.size >= _SORT_FROM
        if is_sorted:  # rows of one expert together: its weights are then read once
            order = mx.argsort(flat)
            x, flat = x[order // chosen], flat[order]
        else:
            x = mx.repeat(x, chosen, axis=0)
        # Reshaped, not indexed with None: MLX's sorted product on CUDA reads the stride of the axis of one row, which
        # after x[:, None] is not the row's, and gives wrong numbers without an error (MLX 0.32.4).
        x = x.reshape(rows * chosen, 1, -1)
        gate, up = mx.split(self.gate_up_proj(x, flat, sorted_indices=is_sorted), 2, axis=-1)
        out: mx.array = self.down_proj(gated(gate, up), flat, sorted_indices=is_sorted)[:, 0]
        if is_sorted:
            out = out[mx.argsort(order)]
        summed = mx.sum(out.reshape(rows, chosen, -1) * weights[..., None], axis=1)
        return summed.astype(x.dtype)


class Layer(nn.Module):
    """Attention, then a dense MLP and experts side by side; `layer_scalar` is the decoder's."""

    def __init__(self, config: CanvasConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.eps
        self.self_attn = Attention(config, index)
        self.mlp = GatedMLP(hidden, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm_2 = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm_1 = nn.RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm_2 = nn.RMSNorm(hidden, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def store(self, x: mx.array, cache: AttentionCache) -> None:
        """Append the keys and values of rows x [1, S, H] and compute nothing else: all a last encoder layer owes."""
        cache.update_and_fetch(*self.self_attn.keys_values(self.input_layernorm(x), cache.offset))

    def encode(self, x: mx.array, cache: AttentionCache, *, mask: Mask, scalar: mx.array) -> mx.array:
        """[1, S, H] of rows x [1, S, H], whose keys and values the cache takes in; `scalar` is the encoder's."""
        offset = cache.offset
        normed = self.input_layernorm(x)
        keys, values = cache.update_and_fetch(*self.self_attn.keys_values(normed, offset))
        attended = self.self_attn.attend(normed, keys, values, offset=offset, mask=mask)
        return self._rest(x, attended) * scalar

    def decode(self, x: mx.array, cache: AttentionCache) -> mx.array:
        """[1, C, H] of a canvas x [1, C, H] that sees all that the cache shows, and itself in both directions."""
        offset = cache.offset
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, offset)
        prefix = cache.valid()
        if prefix is not None:
            keys = mx.concatenate([prefix[0], keys], axis=2)
            values = mx.concatenate([prefix[1], values], axis=2)
        attended = self.self_attn.attend(normed, keys, values, offset=offset, mask=None)
        return self._rest(x, attended) * self.layer_scalar

    def _rest(self, x: mx.array, attended: mx.array) -> mx.array:
        y = x + self.post_attention_layernorm(attended)
        # Dense MLP, router and experts read the same rows at norm one, each with a weight of its own.
        normed = plain_norm(y.reshape(-1, y.shape[-1]), self.pre_feedforward_layernorm.eps)
        dense = self.mlp(normed * self.pre_feedforward_layernorm.weight).reshape(y.shape)
        dense = self.post_feedforward_layernorm_1(dense)
        mixed = self.experts(normed * self.pre_feedforward_layernorm_2.weight, *self.router(normed)).reshape(y.shape)
        out: mx.array = y + self.post_feedforward_layernorm(dense + self.post_feedforward_layernorm_2(mixed))
        return out


class SelfConditioning(GatedMLP):
    """What a context signal adds to the token embeddings of a canvas."""

    def __init__(self, config: CanvasConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.pre_norm = nn.RMSNorm(config.hidden_size, eps=config.eps)

    def __call__(self, signal: mx.array) -> mx.array:
        """The term [1, C, H] of a signal [1, C, H]; exactly zero for a zero signal."""
        return super().__call__(self.pre_norm(signal))
