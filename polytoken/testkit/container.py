"""Writing safetensors files, one or several with an index, byte for byte the same everywhere.

Written out here rather than through the library so that bfloat16 needs no array package that has it, and so that the
order of tensors in the file, hence its hash, is fixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatType = Literal["float32", "float16", "bfloat16"]

_CODES = {"float32": "F32", "float16": "F16", "uint32": "U32", "int64": "I64", "uint8": "U8"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file.

    Attributes:
        code: the dtype in safetensors' spelling ("F32", "BF16", "U32", ...).
        shape: its dimensions.
        data: little-endian bytes, row-major.
    """

    code: str
    shape: tuple[int, ...]
    data: bytes


def store(array: npt.NDArray[np.generic], dtype: FloatType | None = None) -> StoredTensor:
    """The stored form of an array; floats are rounded to `dtype` (nearest, ties to even), None keeps what they are."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return StoredTensor("BF16", array.shape, rounded.astype("<u2").tobytes())
    kept = array if dtype is None else array.astype(dtype)
    little = np.ascontiguousarray(kept).astype(kept.dtype.newbyteorder("<"))
    return StoredTensor(_CODES[kept.dtype.name], array.shape, little.tobytes())


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor], *, origin: str = "pt") -> None:
    """One file holding `tensors` in the order of their names; `origin` is the "format" entry of the metadata."""
    header: dict[str, object] = {"__metadata__": {"format": origin}}
    start = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        stop = start + len(tensor.data)
        header[name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data that follow have to start at a multiple of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(tensors[name].data)


def write_model(directory: Path, tensors: Mapping[str, StoredTensor], *, shards: int, origin: str = "pt") -> None:
    """`model.safetensors`, or for shards > 1 `model-0000i-of-0000n.safetensors` with `model.safetensors.index.json`."""
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, origin=origin)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        # Every n-th name: tensors of one layer end up in different files, as the border layers of real shards do.
        members = {name: tensors[name] for name in names[shard::shards]}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(directory / file, members, origin=origin)
        weight_map.update(dict.fromkeys(members, file))
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: weight_map[name] for name in names}}
    write_json(directory / "model.safetensors.index.json", index)


def write_json(path: Path, value: object) -> None:
    """`value` as JSON with two-space indentation and a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
