"""Files for the checkpoint tests, written byte by byte: safetensors and GGUF, whole or damaged on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.testkit.container import store, write_safetensors

GGUF_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], *, dtype: str | None = None) -> None:
    """A safetensors file of numpy arrays."""
    write_safetensors(path, {name: store(array, dtype) for name, array in arrays.items()})


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file, as float32."""
    return {name: np.array(array.astype(mx.float32)) for name, array in mx.load(str(path)).items()}


def write_index(directory: Path, mapping: Mapping[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(mapping)}))


def edit_json(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON file; None removes."""
    value = json.loads(path.read_text())
    for key, new in changes.items():
        if new is None:
            value.pop(key, None)
        else:
            value[key] = new
    path.write_text(json.dumps(value))


# GGUF


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """A GGUF file: tensors are name -> (type, row-major shape, data)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    body = b""
    for name, (kind, shape, data) in tensors.items():
        dims = list(shape)[::-1]
        head += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, GGUF_TYPES[kind], len(body))
        body += data + b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def pack(kind: str, array: np.ndarray) -> bytes:
    """The data of an array as the given GGUF type; the block types round in the simplest way there is."""
    if kind == "F32":
        return array.astype("<f4").tobytes()
    if kind == "F16":
        return array.astype("<f2").tobytes()
    if kind == "BF16":
        return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = array.astype(np.float32).reshape(-1, 32)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127 + 1e-8).astype("<f2")
        codes = np.clip(np.rint(blocks / scale), -127, 127).astype("i1")
        return b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True))
    low = blocks.min(1, keepdims=True) if kind == "Q4_1" else None
    if low is not None:
        scale, low = ((blocks.max(1, keepdims=True) - low) / 15 + 1e-8).astype("<f2"), low.astype("<f2")
        codes = np.clip(np.rint((blocks - low) / scale), 0, 15).astype("u1")
    else:
        assert kind == "Q4_0"
        scale = (np.abs(blocks).max(1, keepdims=True) / 8 + 1e-8).astype("<f2")
        codes = np.clip(np.rint(blocks / scale) + 8, 0, 15).astype("u1")
    nibbles = codes[:, :16] | (codes[:, 16:] << 4)
    result = b""
    for index in range(len(blocks)):
        result += scale[index].tobytes()
        result += b"" if low is None else low[index].tobytes()
        result += nibbles[index].tobytes()
    return result


def unpack(kind: str, data: bytes, shape: Sequence[int]) -> np.ndarray:
    """What GGUF data mean, as float32: the formulas of the format, one block after another."""
    size = int(np.prod(shape))
    if kind in ("F32", "F16"):
        return np.frombuffer(data, "<f4" if kind == "F32" else "<f2").astype(np.float32).reshape(shape)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    step = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144, "Q6_K": 210}[kind]
    parts = [_UNPACK[kind](data[at : at + step]) for at in range(0, len(data), step)]
    return np.concatenate(parts).astype(np.float32)[:size].reshape(shape)


def _half(data: bytes) -> np.float32:
    return np.frombuffer(data[:2], "<f2")[0].astype(np.float32)


def _nibbles(data: bytes) -> np.ndarray:
    codes = np.frombuffer(data, "u1")
    return np.concatenate([codes & 15, codes >> 4]).astype(np.float32)


def _q4_k(block: bytes) -> np.ndarray:
    """256 weights: eight runs of 32, each with a 6-bit scale and a 6-bit minimum of the block's two halves."""
    d, dmin, s = _half(block), _half(block[2:]), block[4:16]
    values = []
    for run in range(8):
        if run < 4:
            scale, low = s[run] & 63, s[run + 4] & 63
        else:
            scale = (s[run + 4] & 15) | ((s[run - 4] >> 6) << 4)
            low = (s[run + 4] >> 4) | ((s[run] >> 6) << 4)
        codes = np.frombuffer(block[16 + run // 2 * 32 :][:32], "u1")
        codes = codes >> 4 if run % 2 else codes & 15
        values.append(d * scale * codes.astype(np.float32) - dmin * low)
    return np.concatenate(values)


def _q6_k(block: bytes) -> np.ndarray:
    """256 weights: low four bits, high two bits, sixteen signed scales, one half-precision factor."""
    low, high = np.frombuffer(block[:128], "u1"), np.frombuffer(block[128:192], "u1")
    scales, d = np.frombuffer(block[192:208], "i1").astype(np.float32), _half(block[208:])
    values = np.zeros(256, np.float32)
    for at in range(256):
        half, within = divmod(at, 128)
        quarter, lane = divmod(within, 32)
        nibble = low[half * 64 + lane + (quarter % 2) * 32] >> (4 * (quarter // 2)) & 15
        top = high[half * 32 + lane] >> (2 * quarter) & 3
        values[at] = d * scales[at // 16] * (int(nibble | (top << 4)) - 32)
    return values


_UNPACK = {
    "Q8_0": lambda b: _half(b) * np.frombuffer(b[2:], "i1").astype(np.float32),
    "Q4_0": lambda b: _half(b) * (_nibbles(b[2:]) - 8),
    "Q4_1": lambda b: _half(b) * _nibbles(b[4:]) + _half(b[2:]),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def byte_tokens() -> list[str]:
    """The 256 byte symbols of byte-level BPE, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tokenizer_metadata(*, pre: str = "smollm", control: Sequence[str] = ("<|a|>", "<|b|>", "<|c|>")) -> dict[str, Any]:
    """A tiny byte-level vocabulary: control tokens first, 256 bytes, two merges, fillers up to 320."""
    tokens = [*control, *byte_tokens(), "th", "the"]
    tokens += [f"<filler{i}>" for i in range(320 - len(tokens))]
    types = [3] * len(control) + [1] * (len(tokens) - len(control))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|b|>{{ m['content'] }}<|c|>{% endfor %}",
    }


def pair_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows in the pairwise order in which GGUF stores them."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


_BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_model(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """A whole model as GGUF: matrices of type `kind` (or by name from `kinds`), vectors as F32.

    `metadata` adds or replaces entries; None removes one.
    """
    name = config["model_type"]
    values: dict[str, Any] = {
        "general.architecture": name,
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.rope.freq_base": float(config["rope_theta"]),
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        **tokenizer_metadata(),
    }
    if "head_dim" in config:
        values[f"{name}.attention.key_length"] = values[f"{name}.attention.value_length"] = config["head_dim"]
    for key, value in (metadata or {}).items():
        values.pop(key, None)
        if value is not None:
            values[key] = value
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = {}
    for path, array in weights.items():
        stem, _, leaf = path.rpartition(".")
        rows = array
        if name == "llama" and stem.endswith(("q_proj", "k_proj")):
            rows = pair_rows(array, config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"])
        if stem in _TOP:
            new = _TOP[stem]
        else:
            _, _, layer, module = stem.split(".", 3)
            new = f"blk.{layer}.{_BLOCK[module]}"
        chosen = (kinds or {}).get(path, kind if array.ndim == 2 else "F32")
        tensors[f"{new}.{leaf}"] = (chosen, rows.shape, pack(chosen, rows))
    return gguf_bytes(values, tensors)
