"""Complete tiny checkpoints in the layout of a release: configuration, weights, tokenizer, chat template.

    checkpoint = write_checkpoint(directory, "qwen3", shape="b", seed=3, dtype="bfloat16", shards=2)

Nothing is downloaded and nothing random is stored: the same call writes the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polytoken.testkit.container import FloatType, StoredTensor, store, write_json, write_model
from polytoken.testkit.dense import SHAPES as DENSE_SHAPES
from polytoken.testkit.dense import dense_table
from polytoken.testkit.tokenizer import STYLES, StyleName, write_tokenizer
from polytoken.testkit.weights import Floats, TensorSpec, draw_all

Family = Literal["llama", "qwen2", "qwen3", "gemma3_text"]


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint that `write_checkpoint` wrote.

    Attributes:
        path: its directory.
        family: as asked for.
        config: the content of config.json.
        seed: the seed of its weights.
    """

    path: Path
    family: Family
    config: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class _Family:
    """How one family is written: named shapes, the table of a configuration, the tokenizer's style."""

    shapes: Mapping[str, Mapping[str, Any]]
    table: Callable[[dict[str, Any]], dict[str, TensorSpec]]
    style: StyleName


_FAMILIES: dict[Family, _Family] = {
    "llama": _Family(DENSE_SHAPES["llama"], dense_table, "llama"),
    "qwen2": _Family(DENSE_SHAPES["qwen2"], dense_table, "qwen"),
    "qwen3": _Family(DENSE_SHAPES["qwen3"], dense_table, "qwen"),
    "gemma3_text": _Family(DENSE_SHAPES["gemma3_text"], dense_table, "gemma3"),
}

FAMILIES: tuple[Family, ...] = tuple(_FAMILIES)


def shapes(family: Family) -> tuple[str, ...]:
    """The names of a family's shapes."""
    return tuple(_FAMILIES[family].shapes)


def write_checkpoint(
    directory: str | Path,
    family: Family,
    *,
    seed: int = 0,
    shape: str = "a",
    dtype: FloatType = "float32",
    shards: int = 1,
    bits: int | None = None,
    group_size: int = 32,
    config: Mapping[str, Any] | None = None,
) -> TinyCheckpoint:
    """Write a checkpoint of `family` into `directory` (made if missing) and say what it is.

    Args:
        directory: where the files go.
        family: one of FAMILIES.
        seed: of the weights.
        shape: one of `shapes(family)`; "a" has the sizes that quantise (multiples of 32), "b" has others.
        dtype: how floats are stored.
        shards: number of weight files; more than one come with an index.
        bits: 2, 3, 4, 6 or 8 to quantise every matrix in groups of `group_size` as MLX conversions do; None not to.
        group_size: columns that share a scale and a bias.
        config: keys of config.json to replace, such as num_key_value_heads or tie_word_embeddings; the weights follow.
    """
    kind = _FAMILIES[family]
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    record = {**kind.shapes[shape], **_token_ids(kind.style), "torch_dtype": dtype, **(config or {})}
    weights = draw_all(kind.table(record), seed=seed)
    if bits is None:
        tensors = {name: store(array, dtype) for name, array in weights.items()}
    else:
        tensors = _quantise(weights, bits=bits, group_size=group_size, dtype=dtype)
        # MLX conversions write the block twice: theirs, and under the name that transformers reads.
        record["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine"}
        record["quantization_config"] = record["quantization"]
    write_model(path, tensors, shards=shards, origin="pt" if bits is None else "mlx")
    write_json(path / "config.json", record)
    write_json(path / "generation_config.json", {**_token_ids(kind.style), "do_sample": False})
    write_tokenizer(path, kind.style, vocab_size=record["vocab_size"])
    return TinyCheckpoint(path, family, record, seed)


def _token_ids(style: StyleName) -> dict[str, int | None]:
    kind = STYLES[style]
    return {"bos_token_id": kind.bos_id, "eos_token_id": kind.eos_id, "pad_token_id": kind.pad_id}


def _quantise(
    weights: Mapping[str, Floats], *, bits: int, group_size: int, dtype: FloatType
) -> dict[str, StoredTensor]:
    """Matrices as MLX's packed weight, scales and biases; everything else as it is."""
    import mlx.core as mx  # noqa: PLC0415  (making references needs no MLX)

    tensors: dict[str, StoredTensor] = {}
    for name, array in weights.items():
        if array.ndim < 2 or array.shape[-1] % group_size:
            tensors[name] = store(array, dtype)
            continue
        packed, scales, biases = mx.quantize(mx.array(array), group_size=group_size, bits=bits)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.weight"] = store(_to_numpy(packed))
        tensors[f"{stem}.scales"] = store(_to_numpy(scales), dtype)
        tensors[f"{stem}.biases"] = store(_to_numpy(biases), dtype)
    return tensors


def _to_numpy(array: Any) -> npt.NDArray[np.generic]:
    return np.array(array)
