"""Quantised weights in the form MLX conversions have: packed weight, scales, biases, and the block in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polytoken.testkit.container import FloatType, StoredTensor, store
from polytoken.testkit.weights import Floats

# mlx-lm keeps what chooses experts at eight bits whatever the rest has, and says so path by path.
_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate", "router.proj")
_ROUTER_BITS = 8
_ROUTER_GROUP = 64


@dataclass(frozen=True)
class Packed:
    """Quantised tensors, and what config.json has to say about them."""

    tensors: dict[str, StoredTensor]
    record: dict[str, Any]


def pack(weights: Mapping[str, Floats], *, bits: int, group_size: int, dtype: FloatType) -> Packed:
    """Every matrix whose columns divide into groups, packed; everything else as it is."""
    import mlx.core as mx  # noqa: PLC0415  (plain checkpoints are written without MLX)

    tensors: dict[str, StoredTensor] = {}
    record: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        routes = stem.endswith(_ROUTERS)
        group, width = (_ROUTER_GROUP, _ROUTER_BITS) if routes else (group_size, bits)
        if not _packs(name, array, group_size=group):
            tensors[name] = store_plain(name, array, dtype)
            continue
        packed, scales, biases = mx.quantize(mx.array(array), group_size=group, bits=width)
        tensors[f"{stem}.weight"] = store(np.array(packed))
        tensors[f"{stem}.scales"] = store(np.array(scales), dtype)
        tensors[f"{stem}.biases"] = store(np.array(biases), dtype)
        if routes:
            record[stem] = {"group_size": group, "bits": width}
    return Packed(tensors, record)


def store_plain(name: str, array: Floats, dtype: FloatType) -> StoredTensor:
    """A tensor that is not packed. Decay rates stay float32 whatever the rest is, as releases have them."""
    return store(array, "float32" if name.endswith("A_log") else dtype)


def _packs(name: str, array: Floats, *, group_size: int) -> bool:
    """Converters leave image towers alone, and what is no module's weight (position tables)."""
    matrix = array.ndim >= 2 and array.shape[-1] % group_size == 0
    return matrix and name.endswith(".weight") and "vision" not in name
