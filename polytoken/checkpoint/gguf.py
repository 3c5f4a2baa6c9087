"""Read the header of a GGUF file in plain Python: metadata, tensor names, types and extents.

The header is checked against the file's size before anybody maps the data, because a truncated file would otherwise
end the process inside the native reader instead of with a sentence.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polytoken.errors import CheckpointError

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32

# id -> (name, elements per block, bytes per block) of the types that `gguf_blocks` reads.
READABLE_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Names of the others, so that a refusal can say what it met.
OTHER_TYPES: Final[Mapping[int, str]] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip

_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` in row-major order (outer first), `offset` its first byte in the file.

    Its elements lie in blocks of `per_block` elements and `block_bytes` bytes.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    per_block: int
    block_bytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.size // self.per_block * self.block_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says about itself before any weight is read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The model architecture's name ("llama", "qwen2", ...), or "" when the file gives none."""
        return str(self.metadata.get("general.architecture", ""))


class _Reader:
    """A cursor over the mapped file that never leaves it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def fault(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name} is truncated: its header ends before it is complete; download the file again",
            code="truncated_gguf",
            field=self.path.name,
        )

    def scalar(self, layout: str) -> Any:
        try:
            (value,) = struct.unpack_from(layout, self.data, self.at)
        except struct.error:
            raise self.fault() from None
        self.at += struct.calcsize(layout)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        if length > len(self.data) - self.at:
            raise self.fault()
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if count > len(self.data) - self.at:  # every item takes a byte at least
                raise self.fault()
            if item in _SCALARS:
                layout = f"<{count}{_SCALARS[item][1]}"
                try:
                    values = list(struct.unpack_from(layout, self.data, self.at))
                except struct.error:
                    raise self.fault() from None
                self.at += struct.calcsize(layout)
                return values
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self.path.name} holds a metadata value of unknown type {kind}; the file is damaged",
                code="bad_gguf",
                field=self.path.name,
            )
        return self.scalar(_SCALARS[kind])


def _read_tensors(reader: _Reader, count: int, alignment: int, file_bytes: int) -> dict[str, GGUFTensor]:
    """Parse `count` tensor records and hold each extent against the file's size."""
    name_of_file = reader.path.name
    records: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name, rank = reader.text(), reader.scalar("<I")
        if rank > 8:
            raise reader.fault()
        dims = tuple(reader.scalar("<Q") for _ in range(rank))
        records.append((name, dims[::-1], reader.scalar("<I"), reader.scalar("<Q")))
    refused = sorted({kind for _, _, kind, _ in records if kind not in READABLE_TYPES})
    if refused:
        names = ", ".join(OTHER_TYPES.get(kind, f"type {kind}") for kind in refused)
        readable = ", ".join(name for name, _, _ in READABLE_TYPES.values())
        raise CheckpointError(
            f"{name_of_file} holds {names} tensors, which cannot be read; use a file with {readable} only",
            code="unsupported_gguf",
            field=name_of_file,
        )
    start = (reader.at + alignment - 1) // alignment * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in records:
        type_name, per_block, block_bytes = READABLE_TYPES[kind]
        size = math.prod(shape)
        if name in tensors or size % per_block or (shape and shape[-1] % per_block):
            raise CheckpointError(
                f"{name_of_file}: tensor {name} is listed twice or has an impossible shape {shape}",
                code="bad_gguf",
                field=name,
            )
        tensor = GGUFTensor(
            name=name,
            type_name=type_name,
            shape=shape,
            offset=start + offset,
            per_block=per_block,
            block_bytes=block_bytes,
        )
        if tensor.offset + tensor.nbytes > file_bytes:
            raise CheckpointError(
                f"{name_of_file} is truncated: tensor {name} ends at byte {tensor.offset + tensor.nbytes}, the file at "
                f"{file_bytes}; download the file again",
                code="truncated_gguf",
                field=name_of_file,
            )
        tensors[name] = tensor
    return tensors


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of `path` (versions 2 and 3, little-endian); no weight is touched.

    Raises:
        CheckpointError: `missing_file`, `bad_gguf`, `truncated_gguf`, or `unsupported_gguf` for tensor types that
            cannot be read (named).
    """
    if not path.is_file():
        raise CheckpointError(f"no such file: {path}", code="missing_file", field=str(path))
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != MAGIC or size < 24:
            raise CheckpointError(
                f"{path.name} is not a GGUF file (it does not start with {MAGIC.decode()})",
                code="bad_gguf",
                field=path.name,
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, path)
            reader.at = 4
            version = reader.scalar("<I")
            if version not in (2, 3):
                raise CheckpointError(
                    f"{path.name} has GGUF version {version}; versions 2 and 3 (little-endian) are supported",
                    code="unsupported_gguf",
                    field=path.name,
                )
            tensor_count, value_count = reader.scalar("<Q"), reader.scalar("<Q")
            if tensor_count > size or value_count > size:
                raise reader.fault()
            metadata: dict[str, Any] = {}
            for _ in range(value_count):
                key = reader.text()
                metadata[key] = reader.value(reader.scalar("<I"))
            alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1:
                alignment = DEFAULT_ALIGNMENT
            tensors = _read_tensors(reader, tensor_count, alignment, size)
    return GGUFHeader(path=path, metadata=metadata, tensors=tensors)
