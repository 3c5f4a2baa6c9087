"""Loading is strict and exact: every tensor once, tied heads, packed weights, dtypes, memory (cases H03, H09, H10)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoint_writers import edit_json, read_arrays, write_arrays
from mlx.utils import tree_flatten

from polytoken.checkpoint import load as load_module
from polytoken.checkpoint.config import read_config
from polytoken.checkpoint.load import LoadedNetwork, load_weights, single_groups
from polytoken.checkpoint.memory import available_bytes
from polytoken.checkpoint.quantisation import Packing, Quantisation, describe_quantisation
from polytoken.errors import CheckpointError, UsageError
from polytoken.models import family_for
from polytoken.testkit.container import StoredTensor, write_safetensors
from polytoken.testkit.tiny import write_checkpoint

IDS = mx.array([[5, 17, 80, 3, 200, 9]])


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def load(directory: Path, **options: Any) -> LoadedNetwork:
    return load_weights(directory, family=family_for(read_config(directory)), **options)


def logits(directory: Path, **options: Any) -> np.ndarray:
    network: Any = load(directory, **options).network
    return np.array(network(IDS).astype(mx.float32))


def refusal(directory: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(directory, **options)
    assert "\n" not in str(caught.value) and caught.value.code != "bad_checkpoint"
    return caught.value


def change(directory: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = directory / "model.safetensors"
    arrays = read_arrays(path)
    edit(arrays)
    write_arrays(path, arrays)


@pytest.fixture(scope="module")
def untied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"tie_word_embeddings": False}
    return write_checkpoint(tmp_path_factory.mktemp("untied"), "llama", seed=1, config=config).path


@pytest.fixture(scope="module")
def tied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "llama", seed=1).path


@pytest.fixture
def untied(untied_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untied_source, tmp_path / "untied"))


@pytest.fixture
def tied(tied_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied_source, tmp_path / "tied"))


# Every tensor once


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_every_family_loads_whole(tmp_path: Path, family: Any) -> None:
    write_checkpoint(tmp_path, family, dtype="bfloat16", shards=3)
    calls: list[tuple[str, int, int, str]] = []
    loaded = load(tmp_path, progress=lambda *call: calls.append(call))
    arrays = dict(tree_flatten(loaded.network.parameters()))
    assert loaded.dtype == "float32" and not loaded.packed
    assert loaded.tensor_count == len(arrays)
    assert loaded.nbytes == sum(array.nbytes for array in arrays.values()) == 4 * loaded.parameters
    assert {call[0] for call in calls} == {"load"} and {call[3] for call in calls} == {"bytes"}
    done = [call[1] for call in calls]
    assert done == sorted(done) and calls[-1][1] == calls[-1][2] == loaded.nbytes


def test_weights_arrive_unchanged(untied: Path) -> None:
    stored = read_arrays(untied / "model.safetensors")
    for name, array in tree_flatten(load(untied).network.parameters()):
        assert np.array_equal(np.array(array), stored[name]), name


def test_shards_make_no_difference(tied: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "sharded", "llama", seed=1, shards=4).path
    assert np.array_equal(logits(tied), logits(other))


def test_missing_tensors_are_named_ten_at_most(untied: Path) -> None:
    change(untied, lambda arrays: [arrays.pop(name) for name in list(arrays) if "mlp" in name or "norm" in name])
    fault = refusal(untied)
    assert fault.code == "missing_tensors"
    assert str(fault).count("model.") == 10 and "and 6 more" in str(fault)


def test_leftovers_are_named(untied: Path) -> None:
    change(untied, lambda arrays: arrays.update(stray=np.ones(3, np.float32)))
    fault = refusal(untied)
    assert fault.code == "leftover_tensors" and fault.field == "stray"


def test_wrong_shape_shows_both_shapes(untied: Path) -> None:
    change(untied, lambda arrays: arrays.update({"model.norm.weight": np.ones(63, np.float32)}))
    fault = refusal(untied)
    assert fault.code == "shape_mismatch" and "(63,)" in str(fault) and "(64,)" in str(fault)


def test_integers_where_floats_belong_are_refused(untied: Path) -> None:
    path = untied / "model.safetensors"
    arrays = read_arrays(path)
    arrays["model.norm.weight"] = np.ones(64, np.uint8)
    write_arrays(path, arrays)
    assert refusal(untied).code == "unsupported_quantization"


def test_float8_files_are_refused_by_name(untied: Path) -> None:
    write_safetensors(untied / "model.safetensors", {"w": StoredTensor("F8_E4M3", (4,), b"\1" * 4)})
    fault = refusal(untied)
    assert fault.code == "unsupported_quantization" and "float8_e4m3" in str(fault)


# H03: tied embeddings with an explicit head


def test_h03_tied_with_an_identical_head(tied: Path) -> None:
    expected = logits(tied)
    change(tied, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"]}))
    assert np.array_equal(logits(tied), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_h03_tied_with_a_different_head(tmp_path: Path, family: Any) -> None:
    write_checkpoint(tmp_path, family, config={"tie_word_embeddings": True})
    change(tmp_path, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"] + 1}))
    fault = refusal(tmp_path)
    assert fault.code == "tied_head_differs" and "tie_word_embeddings" in str(fault)


def test_h03_untied_without_a_head(untied: Path) -> None:
    change(untied, lambda arrays: arrays.pop("lm_head.weight"))
    fault = refusal(untied)
    assert fault.code == "missing_head" and fault.field == "lm_head.weight"


def test_h03_untied_with_its_head_uses_it(untied: Path) -> None:
    network: Any = load(untied).network
    hidden = network.model(IDS)
    head = read_arrays(untied / "model.safetensors")["lm_head.weight"]
    assert np.allclose(np.array(network(IDS)), np.array(hidden) @ head.T, atol=1e-5)


@pytest.mark.parametrize("same", [True, False])
def test_h03_flag_in_a_nested_text_config(tmp_path: Path, same: bool) -> None:
    write_checkpoint(tmp_path, "gemma3_text")
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {**config, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": nested}))
    expected = logits(tmp_path)
    change(tmp_path, lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"] + (0 if same else 1)}))
    if same:
        assert np.array_equal(logits(tmp_path), expected)
    else:
        assert refusal(tmp_path).code == "tied_head_differs"


def test_h03_tied_packed_embedding_with_an_identical_packed_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", bits=4)
    expected = logits(tmp_path)
    path = tmp_path / "model.safetensors"
    arrays = {name: np.array(array) for name, array in mx.load(str(path)).items()}
    for leaf in ("weight", "scales", "biases"):
        arrays[f"lm_head.{leaf}"] = arrays[f"model.embed_tokens.{leaf}"]
    write_arrays(path, arrays)
    assert np.array_equal(logits(tmp_path), expected)
    arrays["lm_head.scales"] = arrays["lm_head.scales"] * 2
    write_arrays(path, arrays)
    assert refusal(tmp_path).code == "tied_head_differs"


# Packed weights


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_packed_weights_widen_exactly(tmp_path: Path, bits: int) -> None:
    write_checkpoint(tmp_path, "llama", bits=bits, dtype="float16")
    stored = mx.load(str(tmp_path / "model.safetensors"))
    wide, kept = load(tmp_path), load(tmp_path, dequantise=False)
    assert not wide.packed and kept.packed and wide.parameters == kept.parameters
    assert wide.tensor_count == kept.tensor_count == len(stored)
    assert kept.nbytes < wide.nbytes == 4 * wide.parameters
    arrays = dict(tree_flatten(wide.network.parameters()))
    for name in (n.removesuffix(".scales") for n in stored if n.endswith(".scales")):
        scales, biases = (stored[f"{name}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
        expected = mx.dequantize(stored[f"{name}.weight"], scales, biases, group_size=32, bits=bits)
        assert mx.array_equal(arrays[f"{name}.weight"], expected).item()
    assert np.allclose(np.array(wide.network(IDS)), np.array(kept.network(IDS)), atol=1e-4)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_float_packings_load_packed_or_widened(untied: Path, mode: str, bits: int, group: int) -> None:
    path, packed = untied / "model.safetensors", {}
    for name, array in mx.load(str(path)).items():
        if array.ndim < 2:
            packed[name] = array
            continue
        weight, scales = mx.quantize(array, group_size=group, bits=bits, mode=mode)
        packed[name], packed[name.replace("weight", "scales")] = weight, scales
    mx.eval(packed)
    mx.save_safetensors(str(path), packed)
    edit_json(untied / "config.json", quantization={"group_size": group, "bits": bits, "mode": mode})
    kept, wide = load(untied, dequantise=False), load(untied)
    assert kept.packed and not wide.packed
    assert np.allclose(np.array(kept.network(IDS)), np.array(wide.network(IDS)), atol=1e-4)


def test_overrides_by_path(tmp_path: Path) -> None:
    """One module at 8 bits and one plain, spelled as converters of multimodal models spell them too."""
    write_checkpoint(tmp_path, "llama", bits=4, config={"tie_word_embeddings": False})
    plain = read_arrays(
        write_checkpoint(tmp_path / "p", "llama", config={"tie_word_embeddings": False}).path / "model.safetensors"
    )
    path = tmp_path / "model.safetensors"
    arrays = dict(mx.load(str(path)))
    head, up = mx.array(plain["lm_head.weight"]), "model.layers.1.mlp.up_proj"
    arrays["lm_head.weight"], arrays["lm_head.scales"], arrays["lm_head.biases"] = mx.quantize(
        head, group_size=64, bits=8
    )
    arrays[f"{up}.weight"] = mx.array(plain[f"{up}.weight"])
    del arrays[f"{up}.scales"], arrays[f"{up}.biases"]
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays)
    for prefix in ("", "language_model."):
        block = {"group_size": 32, "bits": 4, f"{prefix}lm_head": {"group_size": 64, "bits": 8}, f"{prefix}{up}": False}
        edit_json(tmp_path / "config.json", quantization=block, quantization_config=None)
        kept, wide = load(tmp_path, dequantise=False), load(tmp_path)
        assert np.allclose(np.array(kept.network(IDS)), np.array(wide.network(IDS)), atol=1e-4)
        assert np.array_equal(np.array(wide.network.model.layers[1].mlp.up_proj.weight), plain[f"{up}.weight"])
    described = describe_quantisation(Quantisation.from_config({"quantization": block}))
    assert described == "4-bit affine, group 32; 1 module at 8-bit; 1 plain"


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"group_size": 32, "bits": 4, "mode": "nf4"},
        {"group_size": 32, "bits": 7},
        {"group_size": 48, "bits": 4},
        {"bits": 4},
        {"group_size": 32, "bits": 4, "lm_head": {"bits": 1}},
        "int4",
    ],
)
def test_other_methods_are_refused_by_name(untied: Path, block: Any) -> None:
    edit_json(untied / "config.json", quantization_config=block)
    fault = refusal(untied)
    assert fault.code == "unsupported_quantization"
    if isinstance(block, dict) and "quant_method" in block:
        assert block["quant_method"] in str(fault)


def test_block_of_other_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", bits=4)
    edit_json(tmp_path / "config.json", quantization={"group_size": 32, "bits": 8})
    for dequantise in (True, False):
        assert refusal(tmp_path, dequantise=dequantise).code == "quantization_mismatch"


def test_packed_weights_without_a_block_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", bits=4)
    edit_json(tmp_path / "config.json", quantization=None, quantization_config=None)
    fault = refusal(tmp_path)
    assert fault.code == "unsupported_quantization" and "quantization block" in str(fault)


def test_packed_weights_without_biases_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", bits=4)
    path = tmp_path / "model.safetensors"
    arrays = {k: v for k, v in mx.load(str(path)).items() if k != "model.layers.0.mlp.up_proj.biases"}
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays)
    assert refusal(tmp_path).code == "missing_tensors"


def test_other_library_packing_file_is_refused(untied: Path) -> None:
    (untied / "hf_quant_config.json").write_text("{}")
    assert refusal(untied).code == "unsupported_quantization"


@pytest.mark.parametrize("columns", [32, 64, 96, 100])
@pytest.mark.parametrize("transpose", [True, False])
def test_h09_packed_product_leaves_no_column_out(columns: int, transpose: bool) -> None:
    inner = 1024 if transpose else 128
    shape = (columns, inner) if transpose else (inner, -(-columns // 32) * 32)
    mx.random.seed(0)
    w, x = mx.random.normal(shape), mx.random.normal((3, inner))
    packed, scales, biases = mx.quantize(w, group_size=32, bits=4)
    plain = mx.dequantize(packed, scales, biases, group_size=32, bits=4)
    got = mx.quantized_matmul(x, packed, scales, biases, transpose=transpose, group_size=32, bits=4)
    assert mx.allclose(got, x @ (plain.T if transpose else plain), atol=1e-3).item()


def test_h10_float_packing_is_widened_where_the_gpu_lacks_kernels(
    untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_on_cuda", lambda: True)
    affine = {"a": load_module.Packing(group_size=32, bits=4, mode="affine")}
    other = {"a": load_module.Packing(group_size=32, bits=4, mode="mxfp4")}
    monkeypatch.setattr(load_module.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert load_module._wants_unpacking(None, other, needed=1) is True
    assert load_module._wants_unpacking(None, affine, needed=1) is False


# Dtypes and memory


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_option(tied: Path, dtype: str) -> None:
    loaded = load(tied, dtype=dtype)
    assert loaded.dtype == dtype
    assert {str(a.dtype).rpartition(".")[2] for _, a in tree_flatten(loaded.network.parameters())} == {dtype}


def test_stored_dtype_is_kept_on_request(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", dtype="bfloat16")
    assert load(tmp_path, dtype="stored").dtype == "bfloat16"
    assert load(tmp_path).dtype == "float32"


def test_auto_takes_one_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module.mx, "default_device", lambda: mx.Device(mx.gpu))
    weights = {"w": mx.zeros((8, 8), mx.float16), "norm": mx.zeros(8, mx.float32), "q": mx.zeros(99, mx.uint32)}
    assert load_module._target_dtype("auto", weights) == mx.float16


def test_unknown_dtype(tied: Path) -> None:
    with pytest.raises(UsageError, match="float8"):
        load(tied, dtype="float8")


def test_packed_stays_packed_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "llama", bits=4)
    monkeypatch.setattr(load_module, "available_bytes", lambda: 1000)
    assert load(tmp_path).packed
    assert refusal(tmp_path, dequantise=True).code == "not_enough_memory"


def test_available_bytes_reads_the_system_and_its_limit(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 2048 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5\n")
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 2048 * 1024
    (cgroup / "memory.max").write_text("1005\n")
    assert available_bytes(meminfo=meminfo, cgroup=cgroup) == 1000
    assert available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") > 1 << 20
    assert available_bytes() > 0


def test_matrices_of_one_group_are_what_cuda_gets_unpacked() -> None:
    """MLX's packed product is wrong there for rows of one group of 64 columns; a router of a small network has such."""
    modules = {"router": (64, 1), "narrow": (32, 1), "wide": (64, 2), "experts": (64, 1)}
    weights = {f"{name}.scales": mx.zeros((4, 8, groups)) for name, (_, groups) in modules.items()}
    packed = {name: Packing(bits=8, group_size=size, mode="affine") for name, (size, _) in modules.items()}
    assert single_groups(weights, packed).keys() == {"router", "experts"}
