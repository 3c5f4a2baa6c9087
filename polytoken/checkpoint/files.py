"""Which weight files belong to a checkpoint, and what their headers say. No tensor is read here.

Everything that can be wrong with a set of files is found before the first weight is: a missing or cut-off shard, a
stray file, an index that contradicts its files.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import mlx.core as mx

from polytoken.errors import CheckpointError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
HEAD_FILE: Final = "mtp.safetensors"
"""A draft head in a file of its own, beside whatever weight files there are; no index names it."""
_MAX_HEADER: Final = 100_000_000
_SHARD: Final = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# dtype name in the header -> (name in reports, bits per element)
_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64), "F8_E4M3": ("float8_e4m3", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0", 8), "F4": ("float4", 4),
}  # fmt: skip


def dtype_name(dtype: mx.Dtype) -> str:
    """ "float32" for mx.float32."""
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as its file's header describes it; `dtype` in MLX's spelling where MLX has it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


@dataclass(frozen=True)
class TensorTable:
    """All tensors of a checkpoint by name, and the files they lie in (each used file once, in name order)."""

    tensors: Mapping[str, TensorRecord]
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def head_file(self) -> Path | None:
        """The draft head's own file, if there is one."""
        return next((path for path in self.files if path.name == HEAD_FILE), None)

    def without_head_file(self) -> TensorTable:
        """The table for a family that knows nothing of such a file."""
        tensors = {name: record for name, record in self.tensors.items() if record.file.name != HEAD_FILE}
        return TensorTable(MappingProxyType(tensors), tuple(path for path in self.files if path.name != HEAD_FILE))

    @property
    def dtypes(self) -> dict[str, int]:
        """dtype -> bytes stored in it, largest first."""
        totals: Counter[str] = Counter()
        for tensor in self.tensors.values():
            totals[tensor.dtype] += tensor.nbytes
        return dict(totals.most_common())


def _unreadable(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; fetch the file again", code="damaged_file", field=path.name)


def read_header(path: Path) -> dict[str, TensorRecord]:
    """The tensors of one safetensors file, from its header, held against the file's size.

    Raises:
        CheckpointError: `missing_file`; `truncated_file` when the file ends early; `damaged_file` when it is too long
            or its header makes no sense.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) == 8 and length > _MAX_HEADER:
                raise _unreadable(path, "is not a safetensors file (its header length is absurd)")
            raw = file.read(min(length, size))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", code="missing_file", field=path.name) from None
    if len(prefix) < 8 or len(raw) < length:
        raise CheckpointError(
            f"{path} is truncated: its header is cut off at byte {size}; fetch the file again",
            code="truncated_file",
            field=path.name,
        )
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise _unreadable(path, "is not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise _unreadable(path, "has a header that is not an object")
    tensors: dict[str, TensorRecord] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        record, begin, end = _parse_entry(path, name, entry)
        tensors[name] = record
        extents.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(extents):
        if begin != at:
            raise _unreadable(path, f"has a gap or an overlap in front of tensor {name}")
        at = end
    expected = 8 + length + at
    if size < expected:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes where its header promises {expected}; fetch the file again",
            code="truncated_file",
            field=path.name,
        )
    if size > expected:
        raise _unreadable(path, f"has {size - expected} bytes more than its header describes")
    return tensors


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorRecord, int, int]:
    """One header entry: the record, and where its data begin and end behind the header."""
    try:
        dtype, bits = _DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        whole = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or end - begin != (math.prod(shape) * bits + 7) // 8:
        raise _unreadable(path, f"describes tensor {name} in a way that cannot be (dtype, shape or extent)")
    return TensorRecord(dtype=dtype, shape=shape, nbytes=end - begin, file=path), begin, end


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object hook that refuses one key with two values."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise ValueError(f"{key} is listed twice, with different values")
        result[key] = value
    return result


def _read_index(path: Path) -> dict[str, str]:
    """tensor name -> file name, as the index says."""

    def fault(what: str) -> CheckpointError:
        return CheckpointError(f"{path} {what}", code="bad_index", field=path.name)

    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_doubles)
    except (OSError, ValueError, RecursionError) as reason:
        raise fault(f"cannot be read ({reason})") from None
    mapping = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise fault("names no tensors (weight_map is missing or empty); fetch it again")
    for name, file in mapping.items():
        # A plain file name only: an index must not be able to point out of its folder.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file) or file.startswith("."):
            raise fault(f"gives {file!r} as the file of {name}; only names of files beside it are allowed")
    return mapping


def _unindexed_files(directory: Path) -> list[Path]:
    """The weight files of a folder without an index, by the naming rules alone."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    every = sorted(path for path in directory.glob("*.safetensors") if path.is_file() and path.name != HEAD_FILE)
    files = [path for path in every if path.name.startswith("model")] or every
    if not files:
        raise CheckpointError(
            f"{directory} holds no *.safetensors file; give a complete checkpoint folder",
            code="missing_file",
            field=SINGLE,
        )
    numbered = [match for path in files if (match := _SHARD.fullmatch(path.name))]
    if len(numbered) == len(files):
        sets = {(match[1], match[3]) for match in numbered}
        if len(sets) == 1:
            stem, count = sets.pop()
            width, present = len(numbered[0][2]), {int(match[2]) for match in numbered}
            for number in range(1, int(count) + 1):
                if number not in present:
                    missing = f"{stem}-{number:0{width}d}-of-{count}.safetensors"
                    raise CheckpointError(
                        f"{directory / missing} is missing; fetch the file again", code="missing_file", field=missing
                    )
            return files
        raise _ambiguous(directory, files)
    if len(files) > 1 and not files[0].name.startswith("model"):
        raise _ambiguous(directory, files)
    return files


def _ambiguous(directory: Path, files: list[Path]) -> CheckpointError:
    names = ", ".join(path.name for path in files[:4])
    return CheckpointError(
        f"{directory} holds several weight files and no {INDEX} ({names}); add the index or remove the strays",
        code="ambiguous_weights",
        field=INDEX,
    )


def read_table(directory: Path) -> TensorTable:
    """The tensors of the checkpoint in `directory`, from headers alone.

    With an index only the files that it names count, whatever else lies beside them. Without one: `model.safetensors`,
    else `model*.safetensors`, else the single `*.safetensors`. `mtp.safetensors` comes with them in any case.

    Raises:
        CheckpointError: `missing_file`, `truncated_file`, `damaged_file`, `bad_index`, `index_mismatch` (index and
            file contradict each other), `duplicate_tensor`, `ambiguous_weights`; the file at fault in `field`.
    """
    index = directory / INDEX
    mapping = _read_index(index) if index.exists() else None
    if mapping is None:
        files = _unindexed_files(directory)
    else:
        files = [directory / name for name in sorted(set(mapping.values()))]
        for path in files:
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing although {INDEX} names it; fetch the file again",
                    code="missing_file",
                    field=path.name,
                )
    head = directory / HEAD_FILE
    indexed = files
    if head.is_file() and head not in files:
        files = [*files, head]
    tensors: dict[str, TensorRecord] = {}
    for path in files:
        for name, record in read_header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name} lies in both {tensors[name].file.name} and {path.name} of {directory}; keep one",
                    code="duplicate_tensor",
                    field=name,
                )
            tensors[name] = record
    if mapping is not None:
        _compare_with_index(mapping, {name: record for name, record in tensors.items() if record.file in indexed})
    if not tensors:
        raise CheckpointError(f"{files[0]} holds no tensors", code="damaged_file", field=files[0].name)
    return TensorTable(tensors=MappingProxyType(tensors), files=tuple(files))


def _compare_with_index(mapping: Mapping[str, str], tensors: Mapping[str, TensorRecord]) -> None:
    for name, file in mapping.items():
        found = tensors[name].file.name if name in tensors else "no file"
        if found != file:
            raise CheckpointError(
                f"{INDEX} places tensor {name} in {file}, but {found} has it; index and files are of different exports",
                code="index_mismatch",
                field=name,
            )
    unlisted = sorted(tensors.keys() - mapping.keys())
    if unlisted:
        raise CheckpointError(
            f"{tensors[unlisted[0]].file.name} holds tensor {unlisted[0]}, which {INDEX} does not list; index and "
            "files are of different exports",
            code="index_mismatch",
            field=unlisted[0],
        )
