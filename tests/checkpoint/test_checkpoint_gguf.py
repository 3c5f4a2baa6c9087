"""GGUF files: headers that are damaged, features that are refused by name, and weights that arrive as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoint_writers import (
    edit_json,
    gguf_bytes,
    gguf_model,
    pack,
    pair_rows,
    read_arrays,
    tokenizer_metadata,
    unpack,
    write_arrays,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.checkpoint.config import read_config
from polytoken.checkpoint.convert import convert_gguf, gguf_config, swap_rows
from polytoken.checkpoint.gguf import read_gguf_header
from polytoken.checkpoint.gguf_blocks import read_tensor
from polytoken.checkpoint.gguf_tokenizer import build_tokenizer
from polytoken.checkpoint.load import load_weights
from polytoken.checkpoint.manifest import check_files, read_manifest
from polytoken.checkpoint.tokenizer import load_tokenizer
from polytoken.errors import CheckpointError
from polytoken.models import family_for
from polytoken.testkit.tiny import write_checkpoint

SIZES = {"vocab_size": 320}


def tiny(tmp_path: Path, family: Any = "llama", **config: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    path = write_checkpoint(tmp_path / "tiny", family, seed=3, config={**SIZES, **config}).path
    return json.loads((path / "config.json").read_text()), read_arrays(path / "model.safetensors")


def convert(tmp_path: Path, raw: bytes) -> Path:
    (tmp_path / "model.gguf").write_bytes(raw)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "model.gguf", out)
    return out


def refusal(tmp_path: Path, raw: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path, raw)
    assert "\n" not in str(caught.value)
    return caught.value


def network(directory: Path, **options: Any) -> Any:
    return load_weights(directory, family=family_for(read_config(directory)), **options).network


# From a model to GGUF and back


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"rms_norm_eps": 0.03, "rope_theta": 1234.0}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_model_comes_back_with_the_same_logits(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    settings, weights = tiny(tmp_path, family, **config)
    extra = {}
    if settings.get("rope_scaling"):
        extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    out = convert(tmp_path, gguf_model(settings, weights, metadata=extra))
    ids = mx.array([[7, 300, 41, 99, 12]])
    expected, got = network(tmp_path / "tiny")(ids), network(out)(ids)
    assert np.array_equal(np.array(expected), np.array(got))
    written = json.loads((out / "config.json").read_text())
    assert written["rms_norm_eps"] == settings["rms_norm_eps"] and written["rope_theta"] == settings["rope_theta"]


def test_llama_with_biases_comes_back_too(tmp_path: Path) -> None:
    """The q and k biases lie in the pairwise order as well."""
    settings, weights = tiny(tmp_path)
    rng = np.random.default_rng(0)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name.replace("weight", "bias")] = rng.normal(size=len(weights[name])).astype(np.float32)
    write_arrays(tmp_path / "tiny" / "model.safetensors", weights)
    edit_json(tmp_path / "tiny" / "config.json", attention_bias=True, mlp_bias=True)
    out = convert(tmp_path, gguf_model(settings, weights))
    ids = mx.array([[7, 300, 41, 99, 12]])
    assert np.array_equal(np.array(network(tmp_path / "tiny")(ids)), np.array(network(out)(ids)))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_stored_type_arrives_exactly(tmp_path: Path, kind: str) -> None:
    settings, weights = tiny(tmp_path)
    out = convert(tmp_path, gguf_model(settings, weights, kind=kind))
    model = network(out)
    for index, layer in enumerate(model.model.layers):
        for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", None)):
            source = weights[f"model.layers.{index}.self_attn.{name}.weight"]
            rows = source if heads is None else pair_rows(source, heads)
            stored = unpack(kind, pack(kind, rows), rows.shape)
            expected = stored if heads is None else np.array(swap_rows(mx.array(stored), heads))
            assert np.array_equal(np.array(layer.self_attn[name].weight), expected)


@pytest.mark.parametrize(("kind", "step"), [("Q4_K", 144), ("Q6_K", 210)])
def test_k_types_arrive_as_a_scalar_reference_reads_them(tmp_path: Path, kind: str, step: int) -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (4, step), dtype=np.uint8)
    half = np.frombuffer(np.array([0.01, 0.02], "<f2").tobytes(), np.uint8)
    if kind == "Q4_K":
        blocks[:, :4] = half
    else:
        blocks[:, 208:] = half[:2]
    path = tmp_path / "k.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama"}, {"w": (kind, (2, 512), blocks.tobytes())}))
    header = read_gguf_header(path)
    leaves = read_tensor(header, header.tensors["w"])
    got = leaves["weight"].astype(mx.float32)
    if kind == "Q4_K":
        scales, biases = (leaves[name].astype(mx.float32) for name in ("scales", "biases"))
        got = mx.dequantize(leaves["weight"], scales, biases, group_size=32, bits=4)
    expected = unpack(kind, blocks.tobytes(), (2, 512))
    if kind == "Q4_K":  # scales are rounded to fp16: relative 2^-11, on terms of up to 15 * 0.63
        assert np.abs(np.array(got) - expected).max() < 12 * 2**-11
    else:  # the values themselves are
        assert np.array_equal(np.array(leaves["weight"]), expected.astype(np.float16))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 4), groups=st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_packed_types_equal_the_scalar_reference(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, rows: int, groups: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, 32 * groups)).astype(np.float32)
    data = pack(kind, values)
    path = tmp_path_factory.getbasetemp() / f"{kind}.gguf"
    path.write_bytes(gguf_bytes({}, {"w": (kind, values.shape, data)}))
    header = read_gguf_header(path)
    leaves = read_tensor(header, header.tensors["w"])
    scales, biases = (leaves[name].astype(mx.float32) for name in ("scales", "biases"))
    got = mx.dequantize(leaves["weight"], scales, biases, group_size=32, bits=8 if kind == "Q8_0" else 4)
    assert np.allclose(np.array(got), unpack(kind, data, values.shape), rtol=0, atol=1e-6)


def test_mixed_packing_becomes_overrides_and_stays_packed(tmp_path: Path) -> None:
    settings, weights = tiny(tmp_path)
    kinds = {"model.embed_tokens.weight": "Q8_0", "model.layers.1.mlp.up_proj.weight": "F16"}
    out = convert(tmp_path, gguf_model(settings, weights, kind="Q4_0", kinds=kinds))
    block = json.loads((out / "config.json").read_text())["quantization"]
    assert block == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
    ids = mx.array([[7, 300, 41]])
    kept, wide = network(out, dequantise=False)(ids), network(out)(ids)
    assert np.allclose(np.array(kept), np.array(wide), atol=1e-4)
    manifest = read_manifest(out)
    assert manifest is not None and manifest.quantisation == "4-bit affine, group 32; 1 module at 8-bit"
    assert manifest.parameters == sum(array.size for array in weights.values())
    assert set(manifest.files) == {p.name for p in out.iterdir()} - {"polytoken.json"}
    check_files(out, manifest, hashes=True)


@given(heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_swapping_rows_undoes_pairing(heads: int, half: int, columns: int) -> None:
    rows = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(heads * 2 * half, columns)
    assert np.array_equal(np.array(swap_rows(mx.array(pair_rows(rows, heads)), heads)), rows)


def test_ids_and_template_reach_the_written_files(tmp_path: Path) -> None:
    settings, weights = tiny(tmp_path)
    out = convert(tmp_path, gguf_model(settings, weights, metadata={"tokenizer.ggml.eot_token_id": 0}))
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
        "pad_token_id": 2,
    }
    tokenizer = load_tokenizer(out)
    assert tokenizer.eos_ids == (2, 0) and tokenizer.bos_id == 1 and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("<|b|>the é<|c|>")[0] == 1
    assert tokenizer.decode(tokenizer.encode("the 12 é\n")) == "the 12 é\n"
    assert tokenizer.render_chat_template([{"role": "user", "content": "x"}]) == "<|b|>x<|c|>"


# Refusals


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"general.architecture": None}, "architecture"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 4}, "rotary"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"llama.block_count": 0}, "block_count"),
        ({"tokenizer.ggml.model": "llama"}, "llama"),
        ({"tokenizer.ggml.pre": "viking"}, "viking"),
        ({"tokenizer.ggml.pre": None}, "None"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    settings, weights = tiny(tmp_path)
    fault = refusal(tmp_path, gguf_model(settings, weights, metadata=metadata))
    assert fault.code == "unsupported_gguf" and word in str(fault)


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.merges": ["t h x"]},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.eos_token_id": 320},
        {"tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.tokens": ["a", "a"]},
    ],
)
def test_contradictory_tokenizers_are_refused(tmp_path: Path, metadata: dict[str, Any]) -> None:
    settings, weights = tiny(tmp_path)
    assert refusal(tmp_path, gguf_model(settings, weights, metadata=metadata)).code == "bad_gguf"


def test_unknown_tensor_and_unread_type_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes({}, {"w": ("Q5_0", (32,), bytes(22))}))
    with pytest.raises(CheckpointError, match="Q5_0"):
        read_gguf_header(path)
    settings, weights = tiny(tmp_path)
    raw = gguf_model(settings, weights).replace(b"attn_norm", b"attn_nose")
    fault = refusal(tmp_path, raw)
    assert fault.code == "unsupported_gguf" and "attn_nose" in str(fault)


def test_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    settings, weights = tiny(tmp_path)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:64]
    assert refusal(tmp_path, gguf_model(settings, weights)).field == "token_embd.weight"


def test_half_a_name_of_a_float_is_not_kept(tmp_path: Path) -> None:
    """1e-5 stored as float32 must come back as 1e-05, not as its nearest float64."""
    settings, weights = tiny(tmp_path)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_model(settings, weights))
    assert gguf_config(read_gguf_header(path))["rms_norm_eps"] == 1e-05


# Damage


@pytest.fixture(scope="module")
def small() -> bytes:
    return gguf_bytes(
        {"general.architecture": "llama", "n": 3, "f": 0.5, "b": True, "s": ["a", "bc"], "i": [1, 2, 3]},
        {"w": ("F32", (2, 3), bytes(24)), "q": ("Q8_0", (1, 32), bytes(34))},
    )


def test_small_header_is_read(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "s.gguf"
    path.write_bytes(small)
    header = read_gguf_header(path)
    assert header.metadata == {
        "general.architecture": "llama",
        "n": 3,
        "f": 0.5,
        "b": True,
        "s": ["a", "bc"],
        "i": [1, 2, 3],
    }
    assert header.tensors["w"].shape == (2, 3) and header.tensors["q"].nbytes == 34


def test_cut_off_anywhere_is_a_sentence(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "s.gguf"
    needed = len(small) - 30  # the last tensor's padding may be absent
    for length in range(needed):
        path.write_bytes(small[:length])
        with pytest.raises(CheckpointError) as caught:
            read_gguf_header(path)
        assert caught.value.code in ("truncated_gguf", "bad_gguf")


@given(at=st.integers(4, 250), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_wrong_byte_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, at: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(small[:at] + bytes([value]) + small[at + 1 :])
    try:
        header = read_gguf_header(path)
    except CheckpointError:
        return
    for tensor in header.tensors.values():
        assert tensor.offset >= 0 and tensor.offset + tensor.nbytes <= len(small)


@pytest.mark.parametrize("raw", [b"", b"GG", b"PK\3\4" + bytes(100), b"GGUF" + bytes(3), b"GGUF\0\0\0\3" + bytes(40)])
def test_other_files_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(tmp_path / "x.gguf")
    assert caught.value.code in ("bad_gguf", "unsupported_gguf")


# Pre-tokenizers


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
        ("gpt-2", "ab 123", ["ab", "Ġ123"]),
        ("qwen2", "ab 123'S", ["ab", "Ġ", "1", "2", "3", "'S"]),
        ("llama-bpe", "ab 12345", ["ab", "Ġ", "123", "45"]),
    ],
)
def test_pre_tokenizers_split_as_named(pre: str, text: str, pieces: list[str]) -> None:
    import tokenizers  # noqa: PLC0415

    built = build_tokenizer(tokenizer_metadata(pre=pre), max_positions=64)
    loaded = tokenizers.Tokenizer.from_str(built.tokenizer_json)
    assert [piece for piece, _ in loaded.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("pre", "say", "adds"),
    [("smollm", None, False), ("llama-bpe", None, True), ("smollm", True, True), ("llama-bpe", False, False)],
)
def test_begin_token_is_added_when_the_file_or_its_kind_says_so(pre: str, say: bool | None, adds: bool) -> None:
    import tokenizers  # noqa: PLC0415

    metadata = tokenizer_metadata(pre=pre)
    if say is not None:
        metadata["tokenizer.ggml.add_bos_token"] = say
    loaded = tokenizers.Tokenizer.from_str(build_tokenizer(metadata, max_positions=64).tokenizer_json)
    assert (loaded.encode("the").ids[0] == 1) is adds
