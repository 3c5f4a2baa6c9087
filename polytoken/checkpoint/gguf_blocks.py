"""The weight formats of GGUF as arrays that MLX computes with, block by block as the format defines them.

Read here rather than by MLX's own reader: that one decodes Q4_K with the scale of the wrong half, squeezes bfloat16
through fp16, and reads everything at once without saying how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polytoken.checkpoint.gguf import GGUFHeader, GGUFTensor

GROUP_SIZE: Final = 32  # weights that share a scale in every packed format below

_Bytes = npt.NDArray[np.uint8]
_Leaves = dict[str, mx.array]


def _words(codes: _Bytes, tensor: GGUFTensor, *, bits: int) -> mx.array:
    """Codes [n, 32] in element order as MLX's packed words: uint32 [rows, columns * bits / 32]."""
    if bits == 4:
        codes = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    words = np.ascontiguousarray(codes).view("<u4")
    return mx.array(words.reshape(*tensor.shape[:-1], -1))


def _packed(
    codes: _Bytes, scales: npt.NDArray[Any], biases: npt.NDArray[Any], tensor: GGUFTensor, *, bits: int
) -> _Leaves:
    """weight, scales and biases of an affine packing: value = scale * code + bias."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] // GROUP_SIZE)
    return {
        "weight": _words(codes, tensor, bits=bits),
        "scales": mx.array(scales.astype(np.float16).reshape(shape)),
        "biases": mx.array(biases.astype(np.float16).reshape(shape)),
    }


def _nibbles(pairs: _Bytes) -> _Bytes:
    """Codes [n, 32] from bytes [n, 16]: the low halves are elements 0 to 15, the high halves 16 to 31."""
    return np.concatenate([pairs & 15, pairs >> 4], axis=1)


def _halves(raw: _Bytes) -> npt.NDArray[np.float32]:
    """fp16 columns: bytes [n, 2 k] -> float32 [n, k]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _q4_0(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
    scale = _halves(raw[:, :2])
    return _packed(_nibbles(raw[:, 2:]), scale, -8 * scale, tensor, bits=4)


def _q4_1(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
    return _packed(_nibbles(raw[:, 4:]), _halves(raw[:, :2]), _halves(raw[:, 2:4]), tensor, bits=4)


def _q8_0(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
    scale = _halves(raw[:, :2])
    return _packed(raw[:, 2:] ^ np.uint8(128), scale, -128 * scale, tensor, bits=8)  # signed code + 128


def _q4_k(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
    """256 weights in eight runs of 32; six-bit scales and minima of the runs lie in twelve shared bytes.

    A run is exactly one group of MLX's 4-bit packing, so the codes stay; its scale is rounded to fp16.
    """
    d, low, s = _halves(raw[:, 0:2]), _halves(raw[:, 2:4]), raw[:, 4:16]
    first, second, third = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    runs = raw[:, 16:].reshape(-1, 4, 32)
    codes = np.stack([runs & 15, runs >> 4], axis=2).reshape(-1, GROUP_SIZE)
    return _packed(codes, d * scales, -low * minima, tensor, bits=4)


def _q6_k(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
    """256 weights with a scale for every sixteen, which no packing of MLX has: widened to fp16."""
    lows, highs = raw[:, :128].reshape(-1, 2, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    quarters = np.concatenate([lows & 15, lows >> 4], axis=2)  # [n, half, quarter, lane]
    top = highs >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    codes = (quarters | (top << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    values = _halves(raw[:, 208:210])[:, :, None] * scales[:, :, None] * codes
    return {"weight": mx.array(values.astype(np.float16).reshape(tensor.shape))}


def _plain(dtype: str) -> Callable[[_Bytes, GGUFTensor], _Leaves]:
    def read(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
        return {"weight": mx.array(raw.view(dtype).reshape(tensor.shape))}

    return read


def _bf16(raw: _Bytes, tensor: GGUFTensor) -> _Leaves:
    return {"weight": mx.array(raw.view("<u2").reshape(tensor.shape)).view(mx.bfloat16)}


_READERS: Final[Mapping[str, Callable[[_Bytes, GGUFTensor], _Leaves]]] = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def read_tensor(header: GGUFHeader, tensor: GGUFTensor) -> _Leaves:
    """The arrays of one tensor: "weight" alone, or "weight", "scales" and "biases" when it stays packed."""
    blocks = tensor.size // tensor.per_block
    raw = np.memmap(header.path, np.uint8, "r", offset=tensor.offset, shape=(blocks, tensor.block_bytes))
    return _READERS[tensor.type_name](np.asarray(raw), tensor)
