"""From a name to a runtime, and the report without one; code of the checkpoint never runs (H06)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoint_writers import edit_json, read_arrays, write_arrays

from polytoken.checkpoint import runtime as runtime_module
from polytoken.checkpoint.inspect import Inspection, inspect
from polytoken.checkpoint.runtime import Runtime, load_runtime
from polytoken.checkpoint.store import CheckpointStore
from polytoken.errors import CheckpointError
from polytoken.testkit.tiny import write_checkpoint


@pytest.fixture
def home(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "llama", seed=2).path


def load(folder: Path, **options: Any) -> Runtime:
    return load_runtime(folder, store=CheckpointStore(folder.parent / "none"), **options)


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_runtime_holds_what_running_needs(tmp_path: Path, family: Any) -> None:
    folder = write_checkpoint(tmp_path / "model", family, bits=4, dtype="bfloat16").path
    runtime = load(folder)
    assert runtime.name == "model" and runtime.checkpoint == folder and runtime.revision is None
    assert runtime.dtype == "float32" and runtime.quantisation is None
    assert runtime.stored_quantisation == "4-bit affine, group 32"
    assert runtime.weight_bytes == 4 * runtime.parameters
    assert runtime.config["model_type"] == family and runtime.generation["do_sample"] is False
    assert runtime.max_positions == runtime.config["max_position_embeddings"] and runtime.step == 0
    assert runtime.model.vocab_size == runtime.config["vocab_size"]
    ids = runtime.tokenizer.encode("the end")
    hidden = runtime.model.forward(mx.array([ids]), runtime.model.make_cache(), keep=1)
    logits = np.array(runtime.model.project(hidden.post))
    assert logits.shape == (1, 1, runtime.model.vocab_size) and np.isfinite(logits).all()


def test_packed_in_memory_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama", bits=8).path
    runtime = load(folder, dequantise=False)
    assert runtime.quantisation == "8-bit affine, group 32"


# Identity


def test_identity_is_stable_and_independent_of_the_place(folder: Path, tmp_path: Path) -> None:
    first = load(folder).identity
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert load(folder).identity == first == load(copy).identity and len(first) == 64


def test_identity_changes_with_one_weight_the_config_the_dtype_or_the_packing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama", bits=4).path
    seen = [load(folder).identity, load(folder, dtype="float16").identity, load(folder, dequantise=False).identity]
    edit_json(folder / "config.json", rms_norm_eps=1e-3)
    seen.append(load(folder).identity)
    path = folder / "model.safetensors"
    stamp, raw = path.stat(), bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    seen.append(load(folder).identity)
    assert len(set(seen)) == len(seen)


def test_identity_of_large_files_uses_header_size_and_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "FULL_HASH_BYTES", 10)
    monkeypatch.setattr(runtime_module, "hash_file", lambda *a, **k: pytest.fail("hashed whole"))
    first = load(folder).identity
    assert load(folder).identity == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert load(folder).identity != first


# Configs


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"model_type": 3}', "{}", "\xff"])
def test_configs_that_are_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert refusal(folder).code == "bad_config"


def test_deeply_nested_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    assert refusal(folder).code == "bad_config"


def test_unknown_model_type(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="mamba9")
    fault = refusal(folder)
    assert fault.code == "unknown_model_type" and "mamba9" in str(fault)


def test_no_positions(folder: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=None)
    assert refusal(folder).field == "max_position_embeddings"


def test_positions_that_a_family_leaves_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "gemma3_text").path
    edit_json(folder / "config.json", max_position_embeddings=None)
    assert load(folder).max_positions == 131_072


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("key", ["auto_map", "model_file"])
def test_h06_checkpoint_code_is_refused_and_never_run(folder: Path, key: str, nested: bool, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\n")
    value: Any = "evil.py" if key == "model_file" else {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}
    edit_json(folder / "config.json", **({"text_config": {key: value}} if nested else {key: value}))
    fault = refusal(folder)
    assert fault.code == "wants_remote_code" and fault.field == key and not marker.exists()
    report = inspect(folder, store=CheckpointStore(tmp_path / "none"))
    assert not report.supported and key in report.reason and not marker.exists()


# Manifests


def export(folder: Path, **changes: Any) -> None:
    files = [{"name": p.name, "bytes": p.stat().st_size} for p in folder.iterdir()]
    manifest = {"schema": 25, "model_type": "llama", "step": 1200, "tensor_count": 3, "dtype": "float32"}
    (folder / "export_manifest.json").write_text(json.dumps({**manifest, "files": files, **changes}))


def test_export_manifest_gives_the_step(folder: Path) -> None:
    export(folder)
    assert load(folder).step == 1200


def test_export_manifest_of_another_schema(folder: Path) -> None:
    export(folder, schema=26)
    assert refusal(folder).code == "bad_manifest"


def test_manifest_and_files_disagree(folder: Path) -> None:
    export(folder, files=[{"name": "absent.json", "bytes": 3}])
    assert refusal(folder).code == "missing_file"
    export(folder, files=[{"name": "config.json", "bytes": 3}])
    assert refusal(folder).code == "damaged_file"


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".."])
def test_manifest_cannot_point_out_of_its_folder(folder: Path, name: str) -> None:
    export(folder, files=[{"name": name, "bytes": 3}])
    assert refusal(folder).code == "bad_manifest"


# Inspect


def report(folder: Path) -> Inspection:
    result = inspect(folder, store=CheckpointStore(folder.parent / "none"))
    assert json.loads(json.dumps(result.as_json())) == result.as_json()
    return result


@pytest.mark.parametrize("bits", [None, 4, 6])
@pytest.mark.parametrize("tied", [True, False])
def test_inspect_agrees_with_loading(tmp_path: Path, bits: int | None, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama", bits=bits, config={"tie_word_embeddings": tied}).path
    said, loaded = report(folder), load(folder)
    assert said.supported and said.reason == "" and said.family == "llama"
    assert (said.parameters, said.positions, said.tied) == (loaded.parameters, loaded.max_positions, tied)
    assert said.quantisation == loaded.stored_quantisation
    assert (said.layers, said.hidden_size, said.heads, said.kv_heads, said.head_dim) == (3, 64, 4, 2, 16)
    assert said.kv_bytes_per_token == {"float32": 2 * 3 * 2 * 16 * 4, "float16": 2 * 3 * 2 * 16 * 2}
    assert said.chat_template and said.tokenizer == "BPE" and said.special_ids["eos"] == loaded.tokenizer.eos_ids[0]
    assert said.bytes == sum(said.dtypes.values()) and said.mtp == "absent"


def test_inspect_needs_no_network_object(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "load", lambda *a, **k: pytest.fail("read weights"))
    assert report(folder).supported


def test_inspect_counts_full_layers_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "gemma3_text").path
    config = json.loads((folder / "config.json").read_text())
    said = report(folder)
    full = config["num_hidden_layers"] // config.get("sliding_window_pattern", 6)
    if "layer_types" in config:
        full = config["layer_types"].count("full_attention")
    assert said.kv_bytes_per_token is not None and said.head_dim is not None and said.kv_heads is not None
    assert said.kv_bytes_per_token["float16"] == 4 * full * said.kv_heads * said.head_dim


@pytest.mark.parametrize(
    ("declared", "tensors", "text"),
    [
        (False, False, "absent"),
        (True, False, "declared but absent"),
        (True, True, "present"),
        (False, True, "present, not declared"),
    ],
)
def test_inspect_says_whether_the_drafting_head_is_there(
    folder: Path, declared: bool, tensors: bool, text: str
) -> None:
    if declared:
        edit_json(folder / "config.json", mtp_num_hidden_layers=1)
    if tensors:
        arrays = read_arrays(folder / "model.safetensors")
        write_arrays(folder / "model.safetensors", {**arrays, "mtp.fc.weight": np.ones((2, 2), np.float32)})
    assert report(folder).mtp == text


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mamba9"},
        {"quantization": {"quant_method": "gptq", "bits": 4}},
        {"max_position_embeddings": None},
    ],
)
def test_inspect_says_why_not(folder: Path, changes: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **changes)
    said = report(folder)
    assert not said.supported and said.reason and said.layers == 3


def test_inspect_of_damaged_files_is_an_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        report(folder)
