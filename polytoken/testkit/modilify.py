"""Complete tiny exports of modilify_mk2: diffusion_gemma's transformer with latent deliberation, and a manifest.

    export = write_modilify(directory, seed=3, weights="echo")

As in `tiny`, nothing is downloaded or stored, and the same call writes the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polytoken.testkit.container import FloatType, StoredTensor, write_json, write_model
from polytoken.testkit.diffusion import SHAPES as DIFFUSION
from polytoken.testkit.diffusion import diffusion_table
from polytoken.testkit.layouts import arrange_experts
from polytoken.testkit.packing import pack, store_plain
from polytoken.testkit.tokenizer import STYLES, write_tokenizer
from polytoken.testkit.weights import Floats, TensorSpec, draw_all

Config = dict[str, Any]
Tensors = dict[str, TensorSpec]
Deliberation = Literal[
    "random",  # every tensor of it drawn
    "silent",  # drawn, but its output projection and the gates of its buses are zero
    "absent",  # none of its tensors is in the files
]

SCHEMA = 25
STEP = 1234
_PREFIX = "latent_deliberation."
_STYLE: Literal["gemma4"] = "gemma4"

# Echo: branches nearly silent, so that a canvas slot's own id wins by a margin that the final norm's gain sets.
_ECHO_BRANCH = np.float32(0.05)
_ECHO_GAIN = np.float32(3.0)
# Slow forgetting and reluctant writing, as a trained writer would start out with.
_WRITER_STARTS = {"decay.bias": np.float32(-3.0), "write.bias": np.float32(-1.0)}

_BASE = DIFFUSION["diffusion_gemma"]["a"]
_LATENT: Config = {
    "latent_dim": 32,
    "latent_memory_slots": 4,
    "latent_num_heads": 4,
    "latent_num_layers": 2,
}
SHAPES: Mapping[str, Config] = {
    # A window smaller than the canvas; local attention that doesn't reach across it.
    "a": {"canvas_length": 12, "sliding_window": 8, "latent_local_attention_window": 5, **_LATENT},
    # A window larger than the canvas, and only the first full layer reads memory.
    "b": {
        "canvas_length": 8,
        "sliding_window": 16,
        "latent_local_attention_window": 128,
        "latent_bus_readers": 1,
        **_LATENT,
    },
}


@dataclass(frozen=True)
class TinyExport:
    """An export that `write_modilify` wrote: its directory and the content of its config.json."""

    path: Path
    config: Mapping[str, Any]


def modilify_config(shape: str = "a", changes: Mapping[str, Any] | None = None) -> Config:
    """config.json of a shape, with some model-level keys replaced."""
    sizes = dict(SHAPES[shape])
    style = STYLES[_STYLE]
    text = {
        **_BASE["text_config"],
        "model_type": "modilify_mk2_text",
        "num_experts": 4,
        "sliding_window": sizes.pop("sliding_window"),
        "vocab_size": 512,
    }
    return {
        "architectures": ["ModilifyMk2ForCausalLM"],
        "model_type": "modilify_mk2",
        "text_config": text,
        "bos_token_id": style.bos_id,
        "eos_token_id": style.eos_ids,
        "image_token_id": _BASE["image_token_id"],
        "pad_token_id": style.pad_id,
        "turn_end_token_id": 106,
        "commit_confidence_power": 2.0,
        "commit_entropy_weight": 1.0,
        "commit_failure_budget": 0.2,
        "state_schema_version": SCHEMA,
        "tie_word_embeddings": True,
        **sizes,
        **(changes or {}),
    }


def modilify_table(config: Config) -> Tensors:
    """Names and shapes of all tensors of an export, attention inputs packed as in a training checkpoint."""
    base = diffusion_table({**config, "vision_config": _BASE["vision_config"]})
    table = {name: spec for name, spec in base.items() if "vision" not in name}
    return table | {f"{_PREFIX}{name}": spec for name, spec in _deliberation(config).items()}


def write_modilify(
    directory: str | Path,
    *,
    seed: int = 0,
    shape: str = "a",
    dtype: FloatType = "float32",
    weights: Literal["random", "echo"] = "random",
    deliberation: Deliberation = "random",
    shards: int = 1,
    bits: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> TinyExport:
    """Write an export into `directory` (made if missing) and say what it is.

    Args:
        directory: where the files go.
        seed: of the weights.
        shape: one of SHAPES.
        dtype: how floats are stored.
        weights: "echo" for a denoiser that proposes what the canvas holds already, with high confidence.
        deliberation: see `Deliberation`.
        shards: number of weight files.
        bits: to quantise the transformer as MLX conversions do; deliberation stays plain.
        config: model-level keys of config.json to replace; the weights follow.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    record = modilify_config(shape, config)
    drawn = draw_all(modilify_table(record), seed=seed)
    drawn = _shape_weights(drawn, echo=weights == "echo", deliberation=deliberation)
    tensors = _store(drawn, record, bits=bits, dtype=dtype)
    write_model(path, tensors, shards=shards, origin="pt" if bits is None else "mlx")
    write_json(path / "config.json", record)
    write_json(path / "generation_config.json", _generation(record))
    write_tokenizer(path, _STYLE, vocab_size=record["text_config"]["vocab_size"])
    write_json(path / "export_manifest.json", _manifest(path, tensor_count=len(tensors), dtype=dtype))
    return TinyExport(path, record)


def _shape_weights(drawn: dict[str, Floats], *, echo: bool, deliberation: Deliberation) -> dict[str, Floats]:
    shaped: dict[str, Floats] = {}
    for name, array in drawn.items():
        values = array
        if name.startswith(_PREFIX):
            if deliberation == "absent":
                continue
            if deliberation == "silent" and name.endswith(("output_projection.weight", ".gate")):
                values = np.zeros_like(array)
            if ".writer." in name:
                values = array + _WRITER_STARTS.get(name.partition(".writer.")[2], np.float32(0))
        elif echo and name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            values = array * _ECHO_BRANCH
        elif echo and name == "model.decoder.norm.weight":
            values = array * _ECHO_GAIN
        shaped[name] = values.astype(np.float32)
    return shaped


def _store(drawn: dict[str, Floats], record: Config, *, bits: int | None, dtype: FloatType) -> dict[str, StoredTensor]:
    """The tensors as stored; with `bits`, the packing is noted in `record`."""
    if bits is None:
        return {name: _plain(name, array, dtype) for name, array in drawn.items()}
    base = {name: array for name, array in drawn.items() if not name.startswith(_PREFIX)}
    packed = pack(arrange_experts(base, "fused_weight"), bits=bits, group_size=32, dtype=dtype)
    record["quantization"] = packed.record
    rest = {name: _plain(name, array, dtype) for name, array in drawn.items() if name.startswith(_PREFIX)}
    return packed.tensors | rest


def _plain(name: str, array: Floats, dtype: FloatType) -> StoredTensor:
    return store_plain(name, array, "float32" if name.endswith("a_log") else dtype)


def _generation(record: Config) -> Config:
    return {
        **{key: record[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "turn_end_token_id")},
        "jump_on_no_progress_after": 12,
        "max_denoising_steps": None,
        "max_ponder_steps": 64,
        "min_trajectory_progress": 0.005,
        "repetition_penalty": 1.0,
        "repetition_penalty_exclude_token_ids": None,
    }


def _manifest(path: Path, *, tensor_count: int, dtype: FloatType) -> Config:
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in sorted(path.iterdir())
        if file.name != "export_manifest.json"
    }
    return {
        "schema": SCHEMA,
        "model_type": "modilify_mk2",
        "step": STEP,
        "tensor_count": tensor_count,
        "dtype": dtype,
        "files": files,
    }


def _deliberation(config: Config) -> Tensors:
    hidden = config["text_config"]["hidden_size"]
    dim, slots, heads = config["latent_dim"], config["latent_memory_slots"], config["latent_num_heads"]
    full = config["text_config"]["layer_types"].count("full_attention")
    readers = config.get("latent_bus_readers", full)
    table: Tensors = {
        "embedding_projection.weight": TensorSpec((dim, hidden)),
        "scalar_projection.weight": TensorSpec((dim, 11)),
        "memory_slot_identity": TensorSpec((slots, dim), "embedding_unit"),
        "output_projection.weight": TensorSpec((hidden, dim)),
        "core_read.query.weight": TensorSpec((heads * slots, dim)),
        "core_read.out.weight": TensorSpec((dim, dim)),
        **_norm("output_norm", dim),
        **_observation(hidden, dim),
        **_commit(hidden, dim),
        **_writer("observe.writer", dim, heads * slots, heads),
        **_writer("commit.writer", dim, heads * slots, heads),
        **_bus("working_memory_bus", hidden, hidden, dim=dim, readers=readers),
        **_bus("persistent_memory_bus", dim, hidden, dim=dim, readers=readers),
    }
    for block in range(config["latent_num_layers"]):
        table |= _block(f"blocks.{block}", dim)
    return table


def _block(stem: str, dim: int) -> Tensors:
    table = _linear(f"{stem}.temporal_update", 2 * dim, 2 * dim)
    table |= _linear(f"{stem}.token_ff.0", 4 * dim, dim) | _linear(f"{stem}.token_ff.2", dim, 4 * dim)
    for name in ("state", "observation", "memory_address", "memory_value", "token_ff", "stored_token"):
        table |= _norm(f"{stem}.{name}_norm", dim)
    for name in ("local_attention", "token_memory_attention"):
        table[f"{stem}.{name}.in_proj_weight"] = TensorSpec((3 * dim, dim))
        table[f"{stem}.{name}.in_proj_bias"] = TensorSpec((3 * dim,), "bias")
        table |= _linear(f"{stem}.{name}.out_proj", dim, dim)
    return table


def _observation(hidden: int, dim: int) -> Tensors:
    return {
        "observe.heavy_projection.weight": TensorSpec((dim, hidden)),
        "observe.working_projection.weight": TensorSpec((dim, hidden)),
        "observe.scalar_projection.weight": TensorSpec((dim, 6)),
        "observe.pool.omega": TensorSpec((1,), "norm"),
        "observe.pool.score": TensorSpec((dim,), "bias"),
        **_norm("observe.state_norm", dim),
        **_norm("observe.input_norm", dim),
        **_linear("observe.update", 2 * dim, 2 * dim),
    }


def _commit(hidden: int, dim: int) -> Tensors:
    return {
        "commit.embed_projection.weight": TensorSpec((dim, hidden)),
        "commit.heavy_projection.weight": TensorSpec((dim, hidden)),
        "commit.working_projection.weight": TensorSpec((dim, hidden)),
        "commit.position_projection.weight": TensorSpec((dim, 3)),
        "commit.reason_embedding": TensorSpec((4, dim), "embedding_unit"),
        **_norm("commit.norm", dim),
    }


def _writer(stem: str, dim: int, keys: int, heads: int) -> Tensors:
    return {
        f"{stem}.key.weight": TensorSpec((keys, dim)),
        f"{stem}.value.weight": TensorSpec((dim, dim)),
        f"{stem}.a_log": TensorSpec((heads,), "a_log"),
        **_linear(f"{stem}.erase", keys, dim),
        **_linear(f"{stem}.write", dim, dim),
        **_linear(f"{stem}.decay", keys, dim),
    }


def _bus(stem: str, source: int, hidden: int, *, dim: int, readers: int) -> Tensors:
    table = {
        f"{stem}.source_norm.weight": TensorSpec((source,), "norm"),
        f"{stem}.key.weight": TensorSpec((dim, source)),
        f"{stem}.value.weight": TensorSpec((dim, source)),
    }
    for reader in range(readers):
        table[f"{stem}.readers.{reader}.query_norm.weight"] = TensorSpec((hidden,), "norm")
        table[f"{stem}.readers.{reader}.query.weight"] = TensorSpec((dim, hidden))
        table[f"{stem}.readers.{reader}.out.weight"] = TensorSpec((hidden, dim))
        table[f"{stem}.readers.{reader}.gate"] = TensorSpec((1,), "norm")
    return table


def _norm(stem: str, dim: int) -> Tensors:
    return {f"{stem}.weight": TensorSpec((dim,), "norm"), f"{stem}.bias": TensorSpec((dim,), "bias")}


def _linear(stem: str, rows: int, columns: int) -> Tensors:
    return {f"{stem}.weight": TensorSpec((rows, columns)), f"{stem}.bias": TensorSpec((rows,), "bias")}
