"""What a model is, from its config and file headers alone: instant, and without a network being built."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from polytoken.checkpoint.config import read_config, read_generation, read_json_object
from polytoken.checkpoint.files import TensorTable, read_table
from polytoken.checkpoint.head_file import read_metadata
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.quantisation import Quantisation, describe_quantisation
from polytoken.checkpoint.resolve import resolve
from polytoken.checkpoint.runtime import claiming_family, max_positions
from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.checkpoint.tokenizer import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, ids_of
from polytoken.errors import CheckpointError

if TYPE_CHECKING:
    from polytoken.models.family import Family
    from polytoken.models.hybrid.family import HeadReport

_HEAD_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")
_MTP: Final = re.compile(r"(^|\.)mtp\.")


@dataclass(frozen=True)
class Inspection:
    """A report on one checkpoint; None stands for "the checkpoint does not say".

    Attributes:
        name, directory, kind, revision: how it was found.
        family: model family, or the bare `model_type` when none claims it.
        supported: whether it can be loaded; `reason` says why not, else "".
        layers, hidden_size, heads, kv_heads, head_dim, vocab_size, positions: shape of the network.
        parameters: weights, packed ones counted unpacked, tied ones once (bookkeeping tensors of packing left out).
        bytes: of all tensors in the files.
        dtypes: stored dtype -> bytes.
        quantisation: how weights are packed, None when plain.
        tied: whether the output head is the embedding.
        chat_template: whether there is one.
        tokenizer: model of the tokenizer ("BPE", "Unigram", ...).
        special_ids: name -> id or ids.
        mtp: "absent", "present", "present, not declared" or "declared but absent".
        draft_head: one sentence on the head that `mtp` tells of, "" where nothing is known about its family's heads.
        draft_head_usable: whether drafting with it will work; None where nothing is known.
        draft_head_reads: which hidden rows of the trunk it wants ("post", "pre"), None without a usable head.
        kv_bytes_per_token: bytes one more token of context takes in all full-attention layers, at fp32 and at fp16
            ("float32", "float16"); sliding layers stop growing at their window.
    """

    name: str
    directory: str
    kind: str
    revision: str | None
    family: str
    supported: bool
    reason: str
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    positions: int | None
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    quantisation: str | None
    tied: bool
    chat_template: bool
    tokenizer: str | None
    special_ids: dict[str, Any]
    mtp: str
    draft_head: str
    draft_head_usable: bool | None
    draft_head_reads: str | None
    kv_bytes_per_token: dict[str, int] | None

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def inspect(
    model: str | Path,
    *,
    store: CheckpointStore | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> Inspection:
    """Report on a model from its config and headers.

    Raises:
        CheckpointError: when the model cannot be found or its files are damaged. A checkpoint that is whole but cannot
            be loaded (unknown family, foreign packing, code of its own) is reported with `supported` False instead.
    """
    store = store or CheckpointStore(default_cache_root())
    found = resolve(model, store=store, revision=revision, offline=offline, progress=progress)
    directory = found.directory
    reasons: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = read_config(directory)
    except CheckpointError as fault:
        if fault.code != "wants_remote_code":
            raise
        reasons.append(str(fault))
        config = read_json_object(directory / "config.json")
    table = read_table(directory)
    nested = config.get("text_config")
    text: Mapping[str, Any] = {**config, **nested} if isinstance(nested, Mapping) else config
    family = str(config.get("model_type"))
    quantisation = head = None
    try:
        quantisation = Quantisation.from_config(config)
        chosen = claiming_family(config)
        family = chosen.name
        text = {**text, **chosen.text_config(config)}
        head = _describe_head(chosen, config, table)
    except CheckpointError as fault:
        reasons.append(str(fault))
    heads, hidden, layers = (_integer(text, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = _integer(text, "num_key_value_heads") or heads
    head_dim = _integer(text, "head_dim") or (hidden // heads if hidden and heads else None)
    try:
        positions: int | None = max_positions(config, directory)
    except CheckpointError as fault:
        positions = None
        reasons.append(str(fault))
    return Inspection(
        name=found.name,
        directory=str(directory),
        kind=found.kind,
        revision=found.revision,
        family=family,
        supported=not reasons,
        reason=reasons[0] if reasons else "",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(text, "vocab_size"),
        positions=positions,
        parameters=_count_parameters(table, quantisation),
        bytes=table.nbytes,
        dtypes=table.dtypes,
        quantisation=describe_quantisation(quantisation),
        tied=bool(text.get("tie_word_embeddings", False)),
        chat_template=_has_template(directory),
        tokenizer=_tokenizer_kind(directory),
        special_ids=_special_ids(directory, config),
        mtp=_mtp(text, table),
        draft_head="" if head is None else head.note,
        draft_head_usable=None if head is None else head.usable,
        draft_head_reads=None if head is None or head.settings is None else head.settings.base_hidden_variant,
        kv_bytes_per_token=_kv_bytes(text, layers, kv_heads, head_dim),
    )


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _count_parameters(table: TensorTable, quantisation: Quantisation | None) -> int:
    """Weights in the files, packed ones unpacked."""
    total = 0
    for name, tensor in table.tensors.items():
        path, _, leaf = name.rpartition(".")
        packed = f"{path}.scales" in table.tensors
        if packed and leaf in ("scales", "biases"):
            continue
        size = math.prod(tensor.shape)
        if packed and leaf == "weight" and tensor.dtype == "uint32":
            packing = quantisation.of(path) if quantisation is not None else None
            size = size * 32 // packing.bits if packing is not None else size
        total += size
    return total


def _mtp(config: Mapping[str, Any], table: TensorTable) -> str:
    declared = any(_integer(config, key) for key in _HEAD_KEYS)
    if any(_MTP.search(name) for name in table.tensors) or table.head_file is not None:
        return "present" if declared else "present, not declared"
    return "declared but absent" if declared else "absent"


def _describe_head(family: Family, config: dict[str, Any], table: TensorTable) -> HeadReport | None:
    """What a family that drives draft heads says of this one."""
    from polytoken.models.hybrid.family import HybridFamily  # noqa: PLC0415  (pulls in the networks)

    if not isinstance(family, HybridFamily):
        return None
    shapes = {name: record.shape for name, record in table.tensors.items()}
    return family.describe_head(config, shapes, read_metadata(table))


def _kv_bytes(
    config: Mapping[str, Any], layers: int | None, kv_heads: int | None, head_dim: int | None
) -> dict[str, int] | None:
    if layers is None or kv_heads is None or head_dim is None:
        return None
    kinds = config.get("layer_types")
    full = layers
    if isinstance(kinds, list):
        full = sum(kind == "full_attention" for kind in kinds)
    elif pattern := _integer(config, "sliding_window_pattern") or _integer(config, "full_attention_interval"):
        full = layers // pattern
    rows = 2 * full * kv_heads * head_dim
    return {"float32": rows * 4, "float16": rows * 2}


def _has_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in (TEMPLATE, "chat_template.json")):
        return True
    path = directory / TOKENIZER_CONFIG
    return path.is_file() and bool(read_json_object(path).get("chat_template"))


def _tokenizer_kind(directory: Path) -> str | None:
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    model = read_json_object(path).get("model")
    return str(model.get("type", "unknown")) if isinstance(model, dict) else "unknown"


def _special_ids(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids as generation_config.json says, else config.json."""
    generation = read_generation(directory)
    result: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        key = f"{kind}_token_id"
        ids = ids_of(generation.get(key, config.get(key)), key)
        if ids:
            result[kind] = list(ids) if len(ids) > 1 else ids[0]
    return result
