"""The tiny checkpoints: same bytes for the same call, files that other readers accept, options that hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from polytoken.testkit.dense import dense_table
from polytoken.testkit.diffusion import diffusion_table
from polytoken.testkit.hybrid import hybrid_table
from polytoken.testkit.tiny import CAUSAL_FAMILIES, FAMILIES, HEAD_FAMILIES, shapes, write_checkpoint
from polytoken.testkit.tokenizer import tokenizer_record
from polytoken.testkit.weights import draw

TABLES = {
    **dict.fromkeys(CAUSAL_FAMILIES, dense_table),
    **dict.fromkeys(HEAD_FAMILIES, hybrid_table),
    "diffusion_gemma": diffusion_table,
}
EVERY = [(family, shape) for family in FAMILIES for shape in shapes(family)]


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_call_writes_the_same_bytes(family: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, family, seed=4, shards=2)
    write_checkpoint(tmp_path / "three", family, seed=5, shards=2)
    one, two, three = (digests(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert {name for name in one if one[name] != three[name]} == {name for name in one if name.endswith("safetensors")}


def test_bytes_are_the_same_everywhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", seed=0, dtype="bfloat16")
    assert digests(tmp_path)["model.safetensors"][:16] == "e22a36a89aa05f74"


@pytest.mark.parametrize(("family", "shape"), EVERY)
def test_files_hold_the_table(family: str, shape: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, family, seed=2, shape=shape)
    assert json.loads((tmp_path / "config.json").read_text()) == checkpoint.config
    assert checkpoint.config["model_type"] == family
    table = TABLES[family](dict(checkpoint.config))
    stored = load_file(tmp_path / "model.safetensors")
    if family == "qwen3_next":  # whose release has one tensor per expert
        table = {name: spec for name, spec in table.items() if ".experts." not in name}
        stored = {name: array for name, array in stored.items() if ".experts." not in name}
    assert stored.keys() == table.keys()
    for name, spec in table.items():
        assert np.array_equal(stored[name], draw(name, spec, seed=2)), name


def test_shards_and_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", "qwen3")
    write_checkpoint(tmp_path / "parts", "qwen3", shards=3)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "parts" / file)[name], whole[name])


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", "llama")
    write_checkpoint(tmp_path / "narrow", "llama", dtype="bfloat16")
    wide, narrow = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("wide", "narrow"))
    for name, array in wide.items():
        assert narrow[name].dtype == mx.bfloat16
        assert mx.array_equal(narrow[name], array.astype(mx.bfloat16))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_matrices_are_near_the_plain_ones(bits: int, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "llama")
    packed = write_checkpoint(tmp_path / "packed", "llama", bits=bits, group_size=32)
    assert packed.config["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    assert "quantization" not in plain.config
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    stored = {name: mx.array(array) for name, array in load_file(tmp_path / "packed" / "model.safetensors").items()}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        if array.ndim == 1:
            assert np.array_equal(stored[name], array)
            continue
        parts = (stored[f"{stem}.{part}"] for part in ("weight", "scales", "biases"))
        back = np.array(mx.dequantize(*parts, group_size=32, bits=bits))
        assert np.abs(back - array).max() < 2 * np.ptp(array) / 2**bits


def test_config_overrides_shape_the_weights(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(
        tmp_path, "llama", config={"num_key_value_heads": 1, "tie_word_embeddings": False, "vocab_size": 300}
    )
    stored = load_file(checkpoint.path / "model.safetensors")
    assert stored["model.layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert stored["lm_head.weight"].shape == (300, 64)


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 274 ids, got 256"):
        tokenizer_record("llama", vocab_size=256)


@pytest.mark.parametrize(("family", "shape"), EVERY)
def test_tokenizer_round_trip(family: str, shape: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, family, shape=shape)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == checkpoint.text_config["vocab_size"]
    eos = checkpoint.text_config["eos_token_id"]
    assert tokenizer.eos_token_id == (eos[0] if isinstance(eos, list) else eos)
    for text in ("The thing and\nthen\tsome", "é ö 😀 中文 \x00\x7f", "<think>not</think>", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    # Every id is a token of its own, so a random network never samples one that cannot be shown.
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))) == len(tokenizer)
    assert len(tokenizer.encode("😀", add_special_tokens=False)) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_template_marks_turns_with_special_ids(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    kwargs = {"add_generation_prompt": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(messages, **kwargs)
    opening = {"gemma3_text": "<start_of_turn>", "diffusion_gemma": "<|turn>"}.get(family, "<|im_start|>")
    assert ids.count(tokenizer.convert_tokens_to_ids(opening)) == 2
    loud, quiet = (tokenizer.apply_chat_template(messages, enable_thinking=flag, **kwargs) for flag in (True, False))
    thinks = family.startswith("qwen") or family == "diffusion_gemma"
    assert (loud != quiet) == thinks
    assert ids == (quiet if family == "diffusion_gemma" else loud)
