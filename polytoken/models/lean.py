"""A llama-type decoder stack with as few array operations as its mathematics allows, for the CPU in float32.

On the CPU every operation of a graph costs microseconds whatever its size, and decoding one row runs thousands of them.
This stack reads the very weights of mlx-lm's network (which stays usable: its projections become views of ours) and
computes the same: query, key and value in one product, gate and up in one, all heads rotated together, the scale of
attention folded into the rotation of the queries, and rows kept as [S, H] throughout. Where the compiled extension can
be used (`kernels/blocks.py`), a block is two operations and its cache's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polytoken.cache.layers import CacheLayer
from polytoken.kernels import blocks
from polytoken.kernels.attention import Mask
from polytoken.kernels.pages import prefer_large_pages
from polytoken.kernels.rope import SharedRope

_ARENA_BYTES = 256 << 20


@dataclass(frozen=True)
class _Norm:
    """Root mean square norm x / sqrt(mean(x^2) + eps) * w, written as x * rsqrt(sum(x^2) + n eps) * (w sqrt(n))."""

    weight: mx.array
    bias: mx.array

    @classmethod
    def of(cls, weight: mx.array, eps: float, *, repeat: Sequence[tuple[mx.array, int]] = ()) -> _Norm:
        """Of a norm's weight [n]; `repeat` instead gives weights for heads side by side, [heads, n]."""
        size = weight.shape[-1]
        if repeat:
            weight = mx.concatenate([mx.broadcast_to(w, (count, size)) for w, count in repeat])
        return cls(weight * sqrt(size), mx.array(eps * size))

    def __call__(self, x: mx.array) -> mx.array:
        scale = mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + self.bias)
        normed: mx.array = x * scale * self.weight
        return normed


class _Linear:
    """x @ W.T + b for a weight W [n, k] held in one arena with its neighbours."""

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        self.weight = weight
        self._turned = weight.T
        self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self._turned
        return y if self.bias is None else y + self.bias

    def arrays(self) -> list[mx.array]:
        return [self.weight, self._turned] if self.bias is None else [self.weight, self._turned, self.bias]


class LeanLayer:
    """One block: attention, then SwiGLU, each behind a norm and added to its input."""

    def __init__(self, layer: Any, packed: Sequence[_Linear]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv, self.out, self.gate_up, self.down = packed
        self._inner = mlp.gate_proj.weight.shape[0]
        self._gate = _Linear(*_part(mlp.gate_proj))
        self._up = _Linear(*_part(mlp.up_proj))
        self._heads, self._kv_heads = int(attention.n_heads), int(attention.n_kv_heads)
        self._width = attention.k_proj.weight.shape[0] // self._kv_heads
        self._head_norm = self._make_head_norm(attention)
        self._first = _Norm.of(layer.input_layernorm.weight, layer.input_layernorm.eps)
        self._second = _Norm.of(layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps)
        mx.eval(self.arrays())
        self.fused = self._fuse(layer)

    def _fuse(self, layer: Any) -> Any:
        """The block as the compiled extension knows it, over the same weights; None where that cannot be used."""
        extension = blocks.extension()
        if extension is None:
            return None
        attention = layer.self_attn
        norms = layer.input_layernorm, layer.post_attention_layernorm
        heads = {f"{name}_norm": attention[f"{name}_norm"] for name in ("q", "k") if f"{name}_norm" in attention}
        linears = {"qkv": self.qkv, "out": self.out, "gate_up": self.gate_up, "down": self.down}
        weights = {name: linear.weight for name, linear in linears.items()}
        biases = {f"{name}_bias": linear.bias for name, linear in linears.items()}
        if norms[0].eps != norms[1].eps or len({norm.eps for norm in heads.values()}) > 1:
            return None
        return extension.Block(
            heads=self._heads,
            kv_heads=self._kv_heads,
            width=self._width,
            eps=norms[0].eps,
            head_eps=next((norm.eps for norm in heads.values()), 0.0),
            scale=float(attention.scale),
            first_norm=norms[0].weight,
            second_norm=norms[1].weight,
            **weights,
            **biases,
            **{name: norm.weight for name, norm in heads.items()},
        )

    def _make_head_norm(self, attention: Any) -> _Norm | None:
        if "q_norm" not in attention:
            return None
        query, key = attention.q_norm, attention.k_norm
        return _Norm.of(query.weight, query.eps, repeat=[(query.weight, self._heads), (key.weight, self._kv_heads)])

    def arrays(self) -> list[mx.array]:
        norms = [norm for norm in (self._first, self._second, self._head_norm) if norm is not None]
        linears = (self.qkv, self.out, self.gate_up, self.down, self._gate, self._up)
        return [a for part in linears for a in part.arrays()] + [a for n in norms for a in (n.weight, n.bias)]

    def __call__(self, x: mx.array, cache: Any, mask: Mask, table: tuple[mx.array, mx.array]) -> mx.array:
        """x [S, H] to [S, H]; the cache layer grows by S rows."""
        x = x + self.out(self._attend(self.qkv(self._first(x)), cache, mask, table))
        return x + self.down(self._activate(self._second(x)))

    def _attend(self, qkv: mx.array, cache: Any, mask: Mask, table: tuple[mx.array, mx.array]) -> mx.array:
        rows, heads, kv_heads, width = qkv.shape[0], self._heads, self._kv_heads, self._width
        turning = (heads + kv_heads) * width
        turned = self._rotate(qkv[:, :turning].reshape(rows, heads + kv_heads, width), table)
        values = qkv[:, turning:].reshape(1, rows, kv_heads, width).swapaxes(1, 2)
        keys = turned[None, :, heads:].swapaxes(1, 2)
        keys, values = cache.update_and_fetch(keys, values)
        if rows == 1 and mask is None:
            queries = turned[:, :heads].reshape(1, kv_heads, heads // kv_heads, width)
            scores = mx.softmax(queries @ keys.swapaxes(2, 3), axis=-1, precise=True)
            alone: mx.array = (scores @ values).reshape(1, heads * width)
            return alone
        queries = turned[None, :, :heads].swapaxes(1, 2)
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)
        return attended.swapaxes(1, 2).reshape(rows, heads * width)

    def _rotate(self, x: mx.array, table: tuple[mx.array, mx.array]) -> mx.array:
        """All query and key heads [S, heads, D] at their positions; queries come out scaled for attention."""
        if self._head_norm is not None:
            x = self._head_norm(x)
        half = self._width // 2
        cosines, sines = table
        return x * cosines + mx.concatenate([x[..., half:], x[..., :half]], axis=-1) * sines

    def _activate(self, x: mx.array) -> mx.array:
        if x.shape[0] == 1:
            both = self.gate_up(x)
            gate, up = both[:, : self._inner], both[:, self._inner :]
        else:  # halves of many rows are not contiguous, and walking those is slow
            gate, up = self._gate(x), self._up(x)
        return gate * mx.sigmoid(gate) * up


class LeanStack:
    """The inner model of a llama-type network: ids [1, S] to post-norm hidden rows [1, S, H]."""

    def __init__(self, network: Any, rope: SharedRope) -> None:
        inner = network.model
        self._embed: Callable[[mx.array], mx.array] = inner.embed_tokens
        self._rope = rope
        self._layers = [LeanLayer(layer, packed) for layer, packed in _pack(inner.layers)]
        self._norm = _Norm.of(inner.norm.weight, inner.norm.eps)
        self._last = inner.norm
        mx.eval(self._norm.weight, self._norm.bias)
        attention = inner.layers[0].self_attn
        self._scale = float(attention.scale)
        self._counts = int(attention.n_heads), int(attention.n_kv_heads)
        prefer_large_pages(inner.embed_tokens.weight)

    def __call__(self, ids: mx.array, cache: Sequence[CacheLayer]) -> mx.array:
        x = self._embed(ids.squeeze(0))
        rows, offset = x.shape[0], cache[0].offset
        masks: dict[int | None, Mask] = {}
        for state in cache:
            if state.window not in masks:
                masks[state.window] = state.make_mask(rows, window_size=state.window)  # type: ignore[attr-defined]
        extension = blocks.extension()
        if extension is not None and all(layer.fused is not None for layer in self._layers):
            return self._run_fused(extension, x, cache, masks)
        table = self._tables(rows, offset)
        for layer, state in zip(self._layers, cache, strict=True):
            x = layer(x, state, masks[state.window], table)
        return self._norm(x)[None]

    def _run_fused(self, extension: Any, x: mx.array, cache: Sequence[Any], masks: dict[int | None, Mask]) -> mx.array:
        """The same as two operations a block, and its cache's."""
        cosines, sines = (table.reshape(x.shape[0], -1) for table in self._rope.tables(x.shape[0], cache[0].offset))
        for layer, state in zip(self._layers, cache, strict=True):
            mask = masks[state.window]
            queries, keys, values = layer.fused.enter(x, cosines, sines)
            keys, values = state.update_and_fetch(keys, values)
            if isinstance(mask, mx.array):
                x = layer.fused.leave(x, queries, keys, values, mask=mask)
            else:
                x = layer.fused.leave(x, queries, keys, values, causal=mask == "causal")
        normed: mx.array = extension.norm(x, self._last.weight, self._last.eps)
        return normed[None]

    def _tables(self, rows: int, offset: int) -> tuple[mx.array, mx.array]:
        """Cosines and sines [S, heads + kv heads, D], those of queries times the scale of attention."""
        heads, kv_heads = self._counts
        spread = []
        for table in self._rope.tables(rows, offset):
            plain = table.reshape(rows, 1, -1)
            shape = (rows, heads, plain.shape[-1]), (rows, kv_heads, plain.shape[-1])
            spread.append(
                mx.concatenate([mx.broadcast_to(plain * self._scale, shape[0]), mx.broadcast_to(plain, shape[1])], 1)
            )
        return spread[0], spread[1]


def lean_stack(network: Any) -> LeanStack | None:
    """A lean stack over this network's weights, or None if it is not a plain float32 llama-type one.

    Expects rotations already shared (`share_rope`).
    """
    layers = network.model.layers
    ropes = {id(layer.self_attn.rope): layer.self_attn.rope for layer in layers}
    rope = next(iter(ropes.values()))
    if len(ropes) != 1 or not isinstance(rope, SharedRope):
        return None
    parts = [module for layer in layers for module in _linears(layer)]
    if not all(type(module) is nn.Linear and module.weight.dtype == mx.float32 for module in parts):
        return None
    return LeanStack(network, rope)


def _groups(layer: Any) -> list[list[Any]]:
    """The projections of a block, in the order of their use; those of one group share a product."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def _linears(layer: Any) -> list[Any]:
    return [module for group in _groups(layer) for module in group]


def _part(module: Any) -> tuple[mx.array, mx.array | None]:
    return module.weight, module.get("bias")


def _pack(layers: Sequence[Any]) -> Iterator[tuple[Any, list[_Linear]]]:
    """Every block with its products, whose weights lie in arenas in the order of their use.

    The modules' own weights become views of the arena. An arena holds several blocks, because the ends of an array lie
    on small pages; it is bounded, because while it is filled its blocks are in memory twice.
    """
    batch: list[Any] = []
    size = 0
    for layer in layers:
        added = sum(module.weight.nbytes for module in _linears(layer))
        if batch and size + added > _ARENA_BYTES:
            yield from _fill(batch)
            batch, size = [], 0
        batch.append(layer)
        size += added
    yield from _fill(batch)


def _fill(layers: Sequence[Any]) -> Iterator[tuple[Any, list[_Linear]]]:
    """Lay one arena out."""
    arena = mx.concatenate([module.weight.reshape(-1) for layer in layers for module in _linears(layer)])
    mx.eval(arena)
    prefer_large_pages(arena)
    start = 0
    for layer in layers:
        packed = []
        for group in _groups(layer):
            inner = group[0].weight.shape[1]
            first = start
            for module in group:
                shape = module.weight.shape
                module.weight = arena[start : start + shape[0] * inner].reshape(shape)
                start += shape[0] * inner
            mx.eval([module.weight for module in group])
            weight = arena[first:start].reshape(-1, inner)
            biases = [module.get("bias") for module in group]
            packed.append(_Linear(weight, None if biases[0] is None else mx.concatenate(biases)))
        yield layer, packed
