"""Turn a GGUF file into a normal checkpoint directory, once, keeping packed weights packed.

Names, the order of the q and k rows, config and tokenizer change; no weight value does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from polytoken.checkpoint.files import dtype_name, read_header
from polytoken.checkpoint.gguf import GGUFHeader, read_gguf_header
from polytoken.checkpoint.gguf_blocks import GROUP_SIZE, read_tensor
from polytoken.checkpoint.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from polytoken.checkpoint.manifest import MANIFEST, Manifest, describe_files
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.quantisation import Quantisation, describe_quantisation
from polytoken.errors import CheckpointError


@dataclass(frozen=True)
class _Architecture:
    """How one GGUF architecture maps onto a family: `swaps_rows` when its q and k rows are stored pairwise."""

    model_type: str
    class_name: str
    swaps_rows: bool
    extra: Mapping[str, Any]


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", True, {}),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", False, {}),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", False, {"attention_bias": False}),
}
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BLOCK_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)")


def _refuse(header: GGUFHeader, what: str, *, field: str) -> CheckpointError:
    return CheckpointError(f"{header.path.name}: {what}", code="unsupported_gguf", field=field)


def _number(header: GGUFHeader, key: str, default: float | None = None) -> float:
    """A positive number from the metadata; floats come back as their shortest float32 spelling (1e-05)."""
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(
            f"{header.path.name}: metadata {key} is {value!r} where a positive number is needed",
            code="unsupported_gguf",
            field=key,
        )
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _module_name(header: GGUFHeader, stem: str) -> str:
    """Module path of a GGUF tensor stem: "blk.3.attn_q" -> "model.layers.3.self_attn.q_proj"."""
    if stem in _TOP:
        return _TOP[stem]
    match = _BLOCK_NAME.fullmatch(stem)
    if match is None or match[2] not in _BLOCK:
        raise _refuse(header, f"tensor {stem} has no place in a {header.architecture} network", field=stem)
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}"


def gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """config.json of the converted checkpoint, without its quantisation block and token ids.

    Raises:
        CheckpointError: `unsupported_gguf` for an architecture or a feature that is not converted, by name.
    """
    name = header.architecture
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise _refuse(
            header,
            f"architecture {name!r} is not converted; known are {known}",
            field="general.architecture",
        )
    architecture = _ARCHITECTURES[name]

    def integer(key: str, default: int | None = None) -> int:
        return int(_number(header, f"{name}.{key}", default))

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden // heads)
    others = {integer(key, head_dim) for key in ("rope.dimension_count", "attention.value_length")}
    if others != {head_dim}:
        raise _refuse(
            header, "partial rotary or unequal head sizes are not converted", field=f"{name}.rope.dimension_count"
        )
    if header.metadata.get(f"{name}.expert_count"):
        raise _refuse(header, "mixtures of experts are not converted", field=f"{name}.expert_count")
    if "rope_freqs.weight" in header.tensors:
        raise _refuse(header, "per-frequency rope factors are not converted", field="rope_freqs.weight")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_size": hidden,
        "num_hidden_layers": integer("block_count"),
        "intermediate_size": integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(header, f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer("context_length"),
        "rope_theta": _number(header, f"{name}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **architecture.extra,
    }
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    scaling = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": _number(header, f"{name}.rope.scaling.factor")}
    elif scaling != "none":
        raise _refuse(header, f"rope scaling {scaling!r} is not converted", field=f"{name}.rope.scaling.type")
    return config


def swap_rows(rows: mx.array, heads: int) -> mx.array:
    """Undo the pairwise order of q or k rows: `[heads * D, ...]` with rows (0, 1) of a pair adjacent -> half-split.

    Works on packed rows too, since only whole rows move.
    """
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _convert_tensors(
    header: GGUFHeader, config: Mapping[str, Any], progress: Progress
) -> tuple[dict[str, mx.array], dict[str, int]]:
    """Read, rename and re-order; also the bits of every packed module."""
    swaps = _ARCHITECTURES[header.architecture].swaps_rows
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    result: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for done, (name, tensor) in enumerate(header.tensors.items()):
        progress("convert", done, len(header.tensors), "tensors")
        stem, _, leaf = name.rpartition(".")
        module = _module_name(header, stem)
        leaves = read_tensor(header, tensor)
        if leaf == "bias" and len(leaves) == 1:
            leaves = {"bias": leaves["weight"]}
        elif leaf != "weight":
            raise _refuse(header, f"tensor {name} of type {tensor.type_name} has no place", field=name)
        kind = stem.rpartition(".")[2]
        for part, array in leaves.items():
            rows = swap_rows(array, heads[kind]) if swaps and kind in heads else array
            result[f"{module}.{part}"] = mx.contiguous(rows)
        if "scales" in leaves:
            bits[module] = leaves["weight"].shape[-1] * 32 // (leaves["scales"].shape[-1] * GROUP_SIZE)
    progress("convert", len(header.tensors), len(header.tensors), "tensors")
    return result, bits


def _quantisation_block(bits: Mapping[str, int]) -> dict[str, Any] | None:
    """The config block: the commonest width as default, the others as overrides by path."""
    if not bits:
        return None
    common, _ = Counter(bits.values()).most_common(1)[0]
    block: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, width in sorted(bits.items()):
        if width != common:
            block[module] = {"group_size": GROUP_SIZE, "bits": width, "mode": "affine"}
    return block


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(path: Path, tensors: dict[str, mx.array]) -> None:
    """Write and hold the file against its own header, since a full disk may cut it off without an error."""
    try:
        mx.save_safetensors(str(path), tensors, metadata={"format": "mlx"})
        read_header(path)
    except (RuntimeError, CheckpointError) as fault:
        raise CheckpointError(
            f"{path.name} could not be written whole ({fault}); free some disk space", code="disk_full", field=path.name
        ) from None


def _write_texts(out: Path, config: dict[str, Any], tokenizer: GGUFTokenizer) -> None:
    """config.json, generation_config.json and the tokenizer's two files."""
    ids: dict[str, Any] = {}
    if tokenizer.bos_id is not None:
        ids["bos_token_id"] = tokenizer.bos_id
    if tokenizer.eos_ids:
        ids["eos_token_id"] = tokenizer.eos_ids[0] if len(tokenizer.eos_ids) == 1 else list(tokenizer.eos_ids)
    if tokenizer.pad_id is not None:
        ids["pad_token_id"] = tokenizer.pad_id
    _write_json(out / "config.json", {**config, "vocab_size": tokenizer.vocab_size, **ids})
    _write_json(out / "generation_config.json", ids)
    (out / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _write_json(out / "tokenizer_config.json", tokenizer.tokenizer_config)


def convert_gguf(
    gguf: Path, out: Path, *, source: Mapping[str, Any] | None = None, progress: Progress = silent
) -> Manifest:
    """Convert `gguf` into the existing, empty directory `out` and return the manifest written last.

    Args:
        gguf: the file; checked against its own header before it is mapped.
        out: where config, weights, tokenizer and `polytoken.json` go. The caller publishes it by renaming.
        source: what the manifest records as origin.
        progress: stages "convert" (tensors) and "hash" (bytes).

    Raises:
        CheckpointError: `unsupported_gguf`, `bad_gguf`, `truncated_gguf` or `missing_file`.
    """
    header = read_gguf_header(gguf)
    config = gguf_config(header)
    tokenizer = build_tokenizer(header.metadata, max_positions=config["max_position_embeddings"])
    for name in header.tensors:
        _module_name(header, name.rpartition(".")[0])  # refuse before gigabytes are read
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[0] != tokenizer.vocab_size:
        raise CheckpointError(
            f"{gguf.name}: token_embd.weight is missing or its rows are not the tokenizer's {tokenizer.vocab_size}",
            code="bad_gguf",
            field="token_embd.weight",
        )
    tensors, bits = _convert_tensors(header, config, progress)
    block = _quantisation_block(bits)
    matrices = Counter(dtype_name(a.dtype) for a in tensors.values() if a.ndim == 2 and a.dtype != mx.uint32)
    dtype = matrices.most_common(1)[0][0]
    config["torch_dtype"] = dtype
    if block is not None:
        config["quantization"] = config["quantization_config"] = block
    _write_weights(out / "model.safetensors", tensors)
    _write_texts(out, config, tokenizer)
    manifest = Manifest(
        kind="polytoken",
        source=dict(source or {"kind": "gguf", "file": gguf.name}),
        files=describe_files(out, progress=progress),
        tensor_count=len(tensors),
        dtype=dtype,
        quantisation=describe_quantisation(Quantisation.from_config(config)),
        parameters=sum(tensor.size for tensor in header.tensors.values()),
        step=0,
    )
    _write_json(out / MANIFEST, manifest.as_json())
    return manifest
