"""Small pieces that the modules of latent deliberation share. State is float32, whatever the weights are."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

CAP_RATIO = 0.5
NORM_EPS = 1e-6
LAYER_NORM_EPS = 1e-5
_TINY = 1e-12


def rms(x: mx.array) -> mx.array:
    """Root mean square over the last axis, float32 [..., 1]."""
    return mx.sqrt(mx.mean(mx.square(x.astype(mx.float32)), axis=-1, keepdims=True))


def capped(term: mx.array, reference: mx.array) -> mx.array:
    """`term` [..., H] scaled down smoothly, in float32, so that its rms stays below half that of `reference`.

    Small terms pass nearly as they are, large ones keep their direction only; a zero term stays exactly zero.
    """
    cap = CAP_RATIO * rms(reference)
    size = rms(term)
    return term.astype(mx.float32) * (cap / mx.sqrt(mx.square(size) + mx.square(cap) + _TINY))


def unit(x: mx.array, floor: float = 1e-6) -> mx.array:
    """`x` over its length along the last axis; lengths below `floor` count as `floor`."""
    return x / mx.maximum(mx.sqrt(mx.sum(mx.square(x), axis=-1, keepdims=True)), floor)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """[..., A d] -> [..., A, d]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def apply(layer: nn.Module, x: mx.array) -> mx.array:
    """A linear layer at the precision of its own weights, to and from float32."""
    dtype = (layer.scales if "scales" in layer else layer.weight).dtype
    out: mx.array = layer(x.astype(dtype))
    return out.astype(mx.float32)


def signed_log1p(x: mx.array) -> mx.array:
    """sign(x) log(1 + |x|)."""
    return mx.sign(x) * mx.log1p(mx.abs(x))


def log_age(age: mx.array) -> mx.array:
    """log(1 + age) of int32 ages, which may grow without bound."""
    return mx.log1p(mx.minimum(age, 32767).astype(mx.float32))


def layer_norm(width: int) -> nn.LayerNorm:
    """Layer norm with weight and bias."""
    return nn.LayerNorm(width, eps=LAYER_NORM_EPS)


def gate_update(update: nn.Module, old: mx.array, normed: mx.array, seen: mx.array) -> mx.array:
    """sigmoid(g) old + (1 - sigmoid(g)) silu(c), with (g, c) the halves of update([normed; seen]); all [..., D]."""
    gate, candidate = mx.split(apply(update, mx.concatenate([normed, seen], axis=-1)), 2, axis=-1)
    keep = mx.sigmoid(gate)
    fresh: mx.array = nn.silu(candidate)
    return keep * old + (1.0 - keep) * fresh
