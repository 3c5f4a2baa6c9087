"""Fill a network with a checkpoint's weights, strictly: every expected tensor once, with the right shape.

Order of work: headers (files.py) -> network of the family -> rename -> packing -> comparison -> reading. Up to the last
step nothing but names and shapes is touched, so a wrong checkpoint is refused before its gigabytes are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from polytoken.checkpoint.config import read_config
from polytoken.checkpoint.files import TensorTable, dtype_name, read_table
from polytoken.checkpoint.head_file import head_packings, read_metadata
from polytoken.checkpoint.memory import available_bytes
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.quantisation import Packing, Quantisation
from polytoken.errors import CheckpointError, UsageError

DTYPES: Final[Mapping[str, mx.Dtype]] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
DTYPE_OPTIONS: Final = ("auto", "stored", *DTYPES)
_BATCH_BYTES: Final = 64 << 20  # read this much between two progress calls
_MEMORY_SHARE: Final = 0.8  # of what is available may be filled with weights
_LISTED: Final = 10


class NetworkFamily(Protocol):
    """What loading needs of a model family (see `polytoken.models`)."""

    @property
    def name(self) -> str: ...

    def build(self, config: dict[str, Any]) -> nn.Module: ...

    def sanitize(self, weights: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]: ...


@dataclass(frozen=True)
class LoadedNetwork:
    """A network with its weights in memory.

    Attributes:
        network: the family's raw network, in evaluation mode.
        dtype: what the plain weights (or the scales of packed ones) are in memory.
        packed: whether packed weights stayed packed.
        tensor_count: tensors read from the files and placed.
        nbytes: bytes of all parameters in memory.
        parameters: number of weights, packed ones counted unpacked, tied ones once.
    """

    network: nn.Module
    dtype: str
    packed: bool
    tensor_count: int
    nbytes: int
    parameters: int


def _listing(names: Iterable[str]) -> str:
    """At most ten names, then how many more."""
    ordered = sorted(names)
    text = ", ".join(ordered[:_LISTED])
    return text if len(ordered) <= _LISTED else f"{text} and {len(ordered) - _LISTED} more"


def _read_lazily(table: TensorTable) -> dict[str, mx.array]:
    """All tensors of the table as arrays that are read when evaluated."""
    strange = {n: t for n, t in table.tensors.items() if t.dtype.startswith(("float8", "float4", "complex"))}
    if strange:
        name, record = next(iter(strange.items()))
        raise CheckpointError(
            f"{record.file.name} stores {name} and {len(strange) - 1} more tensors as {record.dtype}, which is not "
            "supported; convert the checkpoint to bfloat16 or to MLX's own packing",
            code="unsupported_quantization",
            field=name,
        )
    weights: dict[str, mx.array] = {}
    for path in table.files:
        try:
            arrays: Any = mx.load(str(path))
        except RuntimeError as fault:
            raise CheckpointError(f"{path} cannot be read: {fault}", code="damaged_file", field=path.name) from None
        weights.update(arrays)
    return weights


def _drop_tied_head(weights: dict[str, mx.array], expected: Mapping[str, Any]) -> None:
    """Remove an explicit output head that repeats the embedding a tied network uses for it.

    Raises:
        CheckpointError: `tied_head_differs`, since dropping a head that says something else would change the model.
    """
    heads = [name for name in weights if name.startswith("lm_head.") or ".lm_head." in name]
    if not heads or any(name.startswith("lm_head.") or ".lm_head." in name for name in expected):
        return
    embedding = next((n[: -len("weight")] for n in weights if n.endswith("embed_tokens.weight")), None)
    for name in heads:
        leaf = name.rpartition("lm_head.")[2]
        twin = weights.get(f"{embedding}{leaf}")
        head = weights[name]
        if twin is None or twin.shape != head.shape or not mx.array_equal(twin, head).item():
            raise CheckpointError(
                f"{name} differs from the embedding although the config ties them; set tie_word_embeddings to false if "
                "the head is the right one, or remove the tensor",
                code="tied_head_differs",
                field=name,
            )
    for name in heads:
        del weights[name]


def _packed_modules(
    weights: Mapping[str, mx.array], quantisation: Quantisation | None, *, known: Mapping[str, Packing]
) -> dict[str, Packing]:
    """Module path -> packing for every module that has scales, `known` or checked against the shapes."""
    packed: dict[str, Packing] = dict(known)
    for name in weights:
        path, _, leaf = name.rpartition(".")
        if leaf != "scales" or path in known or weights.get(f"{path}.weight") is None:
            continue
        if quantisation is None:
            raise CheckpointError(
                f"{path} is packed (it has scales), but config.json has no quantization block; restore that block",
                code="unsupported_quantization",
                field="quantization",
            )
        packing = quantisation.of(path)
        if packing is None:
            continue  # said to be plain: its scales will be named as left over
        weight, scales = weights[f"{path}.weight"], weights[name]
        if weight.dtype != mx.uint32 or weight.shape[-1] * 32 != scales.shape[-1] * packing.group_size * packing.bits:
            raise CheckpointError(
                f"{path}: weight {weight.shape} and scales {scales.shape} do not fit {packing.bits} bits in groups of "
                f"{packing.group_size}; the quantization block of config.json belongs to other weights",
                code="quantization_mismatch",
                field=f"quantization.{path}",
            )
        if packing.mode == "affine" and f"{path}.biases" not in weights:
            raise CheckpointError(
                f"{path}.biases is missing beside its scales; fetch the checkpoint again",
                code="missing_tensors",
                field=f"{path}.biases",
            )
        packed[path] = packing
    return packed


def single_groups(weights: Mapping[str, mx.array], packed: Mapping[str, Packing]) -> dict[str, Packing]:
    """The packed modules whose rows are one group of 64 columns or more: small routers and gates.

    MLX's packed product on CUDA is wrong for those, and for no other size tried, from two rows up (0.32.4, an H200; in
    every dtype, at 4 and 8 bits): unrelated numbers or NaN, without an error.
    """
    return {
        path: packing
        for path, packing in packed.items()
        if packing.group_size >= 64 and weights[f"{path}.scales"].shape[-1] == 1
    }


def _unpack(weights: dict[str, mx.array], packed: Mapping[str, Packing]) -> None:
    """Replace packed modules by plain fp32 weights, lazily; scales are widened first, so no bit is lost."""
    for path, packing in packed.items():
        weight, scales = weights.pop(f"{path}.weight"), weights.pop(f"{path}.scales")
        biases = weights.pop(f"{path}.biases", None)
        if packing.mode == "affine" and biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            plain = mx.dequantize(weight, scales, biases, **packing.as_kwargs())
        else:
            plain = mx.dequantize(weight, scales, None, **packing.as_kwargs(), dtype=mx.float32)
        weights[f"{path}.weight"] = plain


def _pack_network(network: nn.Module, packed: Mapping[str, Packing]) -> None:
    """Turn the named modules of the network into their packed forms."""

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        packing = packed.get(path)
        return packing.as_kwargs() if packing is not None and hasattr(module, "to_quantized") else False

    default = next(iter(packed.values()))
    nn.quantize(network, class_predicate=choose, **default.as_kwargs())


def _compare(expected: Mapping[str, mx.array], weights: Mapping[str, mx.array]) -> None:
    """Raise unless `weights` is exactly what the network needs."""
    missing, left = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    head = next((name for name in sorted(missing) if name.endswith("lm_head.weight")), None)
    if head is not None:
        raise CheckpointError(
            f"{head} is missing and the config does not tie it to the embedding; set tie_word_embeddings to true if it "
            "is tied, or fetch the complete checkpoint",
            code="missing_head",
            field=head,
        )
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(expected)} tensors are missing: {_listing(missing)}"
            + (f"; {len(left)} others have no place: {_listing(left)}" if left else ""),
            code="missing_tensors",
            field=min(missing),
        )
    if left:
        raise CheckpointError(
            f"{len(left)} tensors have no place in this network: {_listing(left)}",
            code="leftover_tensors",
            field=min(left),
        )
    wrong = {
        name: f"{name} is {weights[name].shape}, not {array.shape}"
        for name, array in expected.items()
        if weights[name].shape != array.shape
    }
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors have the wrong shape: {_listing(wrong.values())}",
            code="shape_mismatch",
            field=min(wrong),
        )
    for name, array in expected.items():
        given = weights[name].dtype
        if mx.issubdtype(array.dtype, mx.floating) and not mx.issubdtype(given, mx.floating):
            raise CheckpointError(
                f"{name} is stored as {dtype_name(given)} where floating-point numbers are expected",
                code="unsupported_quantization",
                field=name,
            )


def _target_dtype(option: str, weights: Mapping[str, mx.array]) -> mx.Dtype | None:
    """The dtype all floats are cast to, or None to leave each as stored."""
    if option not in DTYPE_OPTIONS:
        raise UsageError(f"dtype {option!r} is unknown; choose {', '.join(DTYPE_OPTIONS)}", field="dtype")
    if option == "stored":
        return None
    if option != "auto":
        return DTYPES[option]
    if mx.default_device() == mx.Device(mx.cpu):
        return mx.float32
    # One dtype throughout: a few fp32 norms among fp16 weights would silently make every activation fp32.
    totals: dict[mx.Dtype, int] = {}
    for array in weights.values():
        if mx.issubdtype(array.dtype, mx.floating):
            totals[array.dtype] = totals.get(array.dtype, 0) + array.nbytes
    common = max(totals, key=lambda dtype: totals[dtype], default=mx.float32)
    return common if common in DTYPES.values() else mx.float32


def _on_cuda() -> bool:
    return mx.default_device() == mx.Device(mx.gpu) and not mx.metal.is_available()


def _wants_unpacking(option: bool | None, packed: Mapping[str, Packing], *, needed: int) -> bool:
    """Whether packed weights are widened: by default on CPU when they fit, and where the GPU lacks their kernels.

    `needed` is what all weights would take, in bytes.
    """
    if not packed or option is False:
        return False
    # CUDA has packed products for the affine mode only at all sizes that decoding meets.
    required = option is True or (_on_cuda() and any(packing.mode != "affine" for packing in packed.values()))
    if not required and mx.default_device() != mx.Device(mx.cpu):
        return False
    room = int(available_bytes() * _MEMORY_SHARE)
    if needed <= room or _on_cuda():
        return True
    if required:
        raise CheckpointError(
            f"unpacking the weights takes {needed >> 20} MiB and {room >> 20} MiB are free; load them packed or in a "
            "smaller dtype",
            code="not_enough_memory",
            field="dequantise",
        )
    return False


def load_weights(
    directory: Path,
    *,
    family: NetworkFamily,
    config: dict[str, Any] | None = None,
    table: TensorTable | None = None,
    dtype: str = "auto",
    dequantise: bool | None = None,
    progress: Progress = silent,
) -> LoadedNetwork:
    """Build the family's network and fill it from the checkpoint in `directory`.

    Args:
        directory: a complete checkpoint folder.
        family: builds the network and renames tensors.
        config, table: what was read already, to spare reading it again.
        dtype: "auto" (fp32 on CPU, else the dtype most weights are stored in), "stored" (each as it is), or one of
            "float32", "float16", "bfloat16".
        dequantise: widen packed weights at load; None decides by device and free memory.
        progress: stage "load", bytes in memory.

    Raises:
        CheckpointError: everything `read_config` and `read_table` raise; `unsupported_quantization`,
            `quantization_mismatch`, `missing_tensors`, `missing_head`, `tied_head_differs`, `leftover_tensors`,
            `shape_mismatch`, `not_enough_memory`, `damaged_file`.
        UsageError: for an unknown `dtype`.
    """
    config = read_config(directory) if config is None else config
    table = read_table(directory) if table is None else table
    if (directory / "hf_quant_config.json").exists():
        raise CheckpointError(
            "hf_quant_config.json names a packing of another library; convert the checkpoint to MLX's own packing",
            code="unsupported_quantization",
            field="hf_quant_config.json",
        )
    quantisation = Quantisation.from_config(config)
    network = family.build(config)
    # A network with room for a draft head says so by this method; to any other, the head's own file is a stray.
    attach_head = getattr(network, "attach_head", None)
    if attach_head is None:
        table = table.without_head_file()
    metadata = read_metadata(table)
    weights = family.sanitize(_read_lazily(table), {**config, "head_file": metadata})
    if attach_head is not None:
        attach_head(list(weights), metadata)
    plain = dict(tree_flatten(network.parameters()))
    parameters = sum(array.size for array in plain.values())
    target = _target_dtype(dtype, weights)
    _drop_tied_head(weights, plain)
    packed = _packed_modules(weights, quantisation, known=head_packings(weights, plain))
    size = target.size if target is not None else mx.float32.size
    unpack = _wants_unpacking(dequantise, packed, needed=parameters * size)
    tensor_count = len(weights)
    if unpack:
        _unpack(weights, packed)
    elif packed and _on_cuda():
        alone = single_groups(weights, packed)
        _unpack(weights, alone)
        packed = {path: packing for path, packing in packed.items() if path not in alone}
    if packed and not unpack:
        _pack_network(network, packed)
    expected = dict(tree_flatten(network.parameters()))
    _compare(expected, weights)
    _place(network, weights, target=target, progress=progress)
    arrays = [array for _, array in tree_flatten(network.parameters())]
    floats = {array.dtype: 0 for array in arrays if mx.issubdtype(array.dtype, mx.floating)}
    for array in arrays:
        if array.dtype in floats:
            floats[array.dtype] += array.nbytes
    return LoadedNetwork(
        network=network,
        dtype=dtype_name(max(floats, key=lambda kind: floats[kind], default=mx.float32)),
        packed=bool(packed) and not unpack,
        tensor_count=tensor_count,
        nbytes=sum(array.nbytes for array in arrays),
        parameters=parameters,
    )


def _place(network: nn.Module, weights: dict[str, mx.array], *, target: mx.Dtype | None, progress: Progress) -> None:
    """Cast, read and hand over the weights, batch by batch; `weights` is emptied so that nothing is held twice."""
    castable = getattr(network, "cast_predicate", None) or (lambda name: True)
    total = sum(
        array.size * (target.size if target is not None and mx.issubdtype(array.dtype, mx.floating) else array.itemsize)
        for array in weights.values()
    )
    done, batch, batch_bytes = 0, [], 0
    progress("load", 0, total, "bytes")
    for name in list(weights):
        array = weights.pop(name)
        if target is not None and mx.issubdtype(array.dtype, mx.floating) and castable(name):
            array = array.astype(target)
        batch.append((name, array))
        batch_bytes += array.nbytes
        if batch_bytes >= _BATCH_BYTES or not weights:
            mx.eval([item for _, item in batch])
            network.load_weights(batch, strict=False)  # names and shapes were compared above
            done += batch_bytes
            progress("load", min(done, total), total, "bytes")
            batch, batch_bytes = [], 0
    progress("load", total, total, "bytes")
    network.eval()
