"""Everything that running a model needs, loaded and checked: the one object that the engine is given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from polytoken.checkpoint.config import read_config, read_generation
from polytoken.checkpoint.files import TensorTable, read_table
from polytoken.checkpoint.load import load_weights
from polytoken.checkpoint.manifest import check_files, hash_file, read_manifest
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.quantisation import Quantisation, describe_quantisation
from polytoken.checkpoint.resolve import resolve
from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.checkpoint.tokenizer import Tokenizer, load_tokenizer
from polytoken.errors import CheckpointError

if TYPE_CHECKING:
    from polytoken.models.base import CausalModel
    from polytoken.models.family import Family

FULL_HASH_BYTES: Final = 1 << 30  # weight files up to this much together are hashed whole
_UNSTATED_POSITIONS: Final = {"gemma3": 131_072, "gemma3_text": 131_072}  # defaults their configs leave out


@dataclass(frozen=True)
class Runtime:
    """A loaded model.

    Attributes:
        model: the network behind the lanes' contract.
        tokenizer: text to ids and back.
        config, generation: config.json and generation_config.json (empty when absent).
        checkpoint: the folder.
        name: short name for reports.
        revision: hub commit, or None.
        step: training step of an export, else 0.
        tensor_count: tensors placed.
        weight_bytes: bytes of weights in memory.
        parameters: number of weights, tied ones once.
        dtype: of plain weights in memory.
        quantisation: how weights are packed in memory, None when they are plain (also after unpacking).
        stored_quantisation: how they are packed in the files, or None.
        identity: hex SHA-256 that changes when config, weights, dtype or packing in memory do; see `identify`.
        max_positions: longest sequence, in tokens.
    """

    model: CausalModel
    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]
    checkpoint: Path
    name: str
    revision: str | None
    step: int
    tensor_count: int
    weight_bytes: int
    parameters: int
    dtype: str
    quantisation: str | None
    stored_quantisation: str | None
    identity: str
    max_positions: int


def hash_weights(table: TensorTable) -> dict[str, str] | None:
    """Hashes of the weight files by name; None where they take more than 1 GiB together."""
    if sum(path.stat().st_size for path in table.files) > FULL_HASH_BYTES:
        return None
    return {path.name: hash_file(path) for path in table.files}


def identify(
    table: TensorTable,
    config: Mapping[str, Any],
    *,
    extra: Mapping[str, Any],
    hashes: Mapping[str, str] | None = None,
) -> str:
    """Hex SHA-256 over the config, `extra`, and every weight file.

    Files that take at most 1 GiB together are hashed whole. Larger ones enter with name, size, modification time and
    the digest of their header: a replacement that keeps all four goes unnoticed, a mere copy elsewhere changes it.
    `hashes` is what `hash_weights` said, where that is known already.
    """
    digest = hashlib.sha256(json.dumps([config, extra], sort_keys=True, default=str).encode())
    hashes = hash_weights(table) if hashes is None else hashes
    for path in table.files:
        if hashes is not None:
            entry: list[Any] = [path.name, hashes[path.name]]
        else:
            with path.open("rb") as file:
                header = file.read(int.from_bytes(file.read(8), "little"))
            status = path.stat()
            entry = [path.name, status.st_size, status.st_mtime_ns, hashlib.sha256(header).hexdigest()]
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


def max_positions(config: Mapping[str, Any], directory: Path) -> int:
    """Longest sequence the checkpoint was made for, in tokens.

    Raises:
        CheckpointError: `bad_config` when nothing in the checkpoint says.
    """
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        value = part.get("max_position_embeddings")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    default = _UNSTATED_POSITIONS.get(str(config.get("model_type")))
    if default is None:
        raise CheckpointError(
            f"{directory / 'config.json'} lacks max_position_embeddings; add the longest sequence in tokens",
            code="bad_config",
            field="max_position_embeddings",
        )
    return default


def claiming_family(config: dict[str, Any]) -> Family:
    """The model family that claims this config; see `polytoken.models.family_for`."""
    from polytoken.models import family_for  # noqa: PLC0415  (pulls in the networks, which inspecting files need not)

    return family_for(config)


def load_runtime(
    model: str | Path,
    *,
    store: CheckpointStore | None = None,
    dtype: str = "auto",
    dequantise: bool | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> Runtime:
    """Find, check and load a model.

    Args:
        model: folder, GGUF file, catalogue name or hub id.
        store: where pulled models are; the user's cache folder by default.
        dtype, dequantise: see `load_weights`.
        revision, offline: see `resolve`.
        progress: stages of the conversion (GGUF files, first time) and "load" in bytes.

    Raises:
        CheckpointError, UsageError: see `resolve`, `read_table`, `load_weights`, `load_tokenizer`.
    """
    store = store or CheckpointStore(default_cache_root())
    found = resolve(model, store=store, revision=revision, offline=offline, progress=progress)
    directory = found.directory
    config = read_config(directory)
    generation = read_generation(directory)
    manifest = read_manifest(directory)
    if manifest is not None:
        check_files(directory, manifest)
    family = claiming_family(config)
    positions = max_positions(config, directory)
    table = read_table(directory)
    hashes = hash_weights(table)
    if manifest is not None and hashes is not None:
        # The identity needs these hashes anyway; bad weights would give nonsense that nothing else notices.
        small = [name for name in manifest.files if name not in hashes and not name.endswith(".safetensors")]
        check_files(directory, manifest, known={**hashes, **{name: hash_file(directory / name) for name in small}})
    tokenizer = load_tokenizer(directory)
    loaded = load_weights(
        directory,
        family=family,
        config=config,
        table=table,
        dtype=dtype,
        dequantise=dequantise,
        progress=progress,
    )
    stored = describe_quantisation(Quantisation.from_config(config))
    return Runtime(
        model=family.adapt(loaded.network, config),
        tokenizer=tokenizer,
        config=config,
        generation=generation,
        checkpoint=directory,
        name=found.name,
        revision=found.revision,
        step=0 if manifest is None else manifest.step,
        tensor_count=loaded.tensor_count,
        weight_bytes=loaded.nbytes,
        parameters=loaded.parameters,
        dtype=loaded.dtype,
        quantisation=stored if loaded.packed else None,
        stored_quantisation=stored,
        identity=identify(table, config, extra={"dtype": loaded.dtype, "packed": loaded.packed}, hashes=hashes),
        max_positions=positions,
    )
