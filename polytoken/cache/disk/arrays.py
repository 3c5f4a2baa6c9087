"""Device arrays to host memory and back, every bit of every type as it is."""

from __future__ import annotations

from typing import Final

import mlx.core as mx
import numpy as np

from polytoken.cache.disk.record import HostArray

_TAGS: Final = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32",
    mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64", mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32",
    mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip
_DTYPES: Final = {tag: dtype for dtype, tag in _TAGS.items()}
_NUMPY: Final = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


def to_host(array: mx.array) -> HostArray:
    """A copy of an evaluated array in host memory of its own."""
    tag = _TAGS[array.dtype]
    bits = array.view(mx.uint16) if tag == "BF16" else array  # numpy has no bfloat16
    copy = np.array(bits, order="C").astype(_NUMPY[tag], copy=False)
    return HostArray(tag, tuple(array.shape), copy.reshape(-1).view(np.uint8).data)


def to_device(host: HostArray) -> mx.array:
    """The same array on the device, in memory of its own."""
    flat = np.frombuffer(host.data, dtype=_NUMPY[host.dtype])
    if host.dtype == "BF16":
        return mx.array(flat).view(mx.bfloat16).reshape(host.shape)
    return mx.array(flat, dtype=_DTYPES[host.dtype]).reshape(host.shape)
