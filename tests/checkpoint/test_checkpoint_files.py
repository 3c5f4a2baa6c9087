"""Which weight files count, and that every damage is named before a weight is read (cases H01, H02)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writers import write_arrays, write_index
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.checkpoint.files import read_header, read_table
from polytoken.errors import CheckpointError

A = {"a": np.ones((2, 3), np.float32)}
B = {"b": np.zeros(4, np.float32)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_table(directory)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_arrays(tmp_path / SHARDS[0], A)
    write_arrays(tmp_path / SHARDS[1], B)
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    return tmp_path


def test_table_gives_dtype_shape_bytes_and_file(sharded: Path) -> None:
    table = read_table(sharded)
    assert set(table.tensors) == {"a", "b"}
    record = table.tensors["a"]
    assert (record.dtype, record.shape, record.nbytes, record.file.name) == ("float32", (2, 3), 24, SHARDS[0])
    assert table.nbytes == 40 and table.dtypes == {"float32": 40}
    assert [path.name for path in table.files] == list(SHARDS)


@pytest.mark.parametrize("stray", ["model.safetensors", "extra.safetensors", "model-00003-of-00002.safetensors"])
def test_h01_stray_file_beside_an_index_is_never_read(sharded: Path, stray: str) -> None:
    (sharded / stray).write_bytes(b"not even a safetensors file")
    assert [path.name for path in read_table(sharded).files] == list(SHARDS)


def test_h01_stray_file_beside_the_single_file_is_never_read(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model.safetensors", A)
    write_arrays(tmp_path / "model-extra.safetensors", {"a": np.zeros((2, 3), np.float32)})
    assert [path.name for path in read_table(tmp_path).files] == ["model.safetensors"]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_h02_missing_shard_is_named(sharded: Path, which: int, index: bool) -> None:
    (sharded / SHARDS[which]).unlink()
    if not index:
        (sharded / "model.safetensors.index.json").unlink()
    fault = refusal(sharded)
    assert fault.code == "missing_file" and fault.field == SHARDS[which] and SHARDS[which] in str(fault)


def test_h02_renamed_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).rename(sharded / "other.safetensors")
    assert refusal(sharded).field == SHARDS[1]


def test_h02_truncated_shard_is_named_whatever_is_cut(sharded: Path) -> None:
    path = sharded / SHARDS[1]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        fault = refusal(sharded)
        assert fault.code == "truncated_file" and fault.field == SHARDS[1]


def test_bytes_behind_the_data_are_refused(sharded: Path) -> None:
    path = sharded / SHARDS[0]
    path.write_bytes(path.read_bytes() + b"x")
    assert refusal(sharded).code == "damaged_file"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_h02_empty_or_broken_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert refusal(sharded).code == "bad_index"


def test_h02_without_an_index_the_shards_are_found(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert set(read_table(sharded).tensors) == {"a", "b"}


def test_h02_two_model_files_without_index_or_numbers(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model_a.safetensors", A)
    write_arrays(tmp_path / "model_b.safetensors", B)
    assert set(read_table(tmp_path).tensors) == {"a", "b"}


def test_a_single_file_of_any_name_counts_and_two_do_not(tmp_path: Path) -> None:
    write_arrays(tmp_path / "weights.safetensors", A)
    assert set(read_table(tmp_path).tensors) == {"a"}
    write_arrays(tmp_path / "zebra.safetensors", B)
    assert refusal(tmp_path).code == "ambiguous_weights"


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert refusal(tmp_path).code == "missing_file"


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model_a.safetensors", A)
    write_arrays(tmp_path / "model_b.safetensors", A)
    fault = refusal(tmp_path)
    assert fault.code == "duplicate_tensor" and fault.field == "a"


@pytest.mark.parametrize(
    "mapping",
    [
        {"a": SHARDS[1], "b": SHARDS[1]},  # a lies elsewhere, and its file is not even named
        {"a": SHARDS[1], "b": SHARDS[0]},
        {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]},
        {"b": SHARDS[1], "x": SHARDS[0]},
    ],
)
def test_index_and_files_that_contradict_each_other(sharded: Path, mapping: dict[str, str]) -> None:
    write_index(sharded, mapping)
    assert refusal(sharded).code == "index_mismatch"


def test_a_tensor_the_index_does_not_list(sharded: Path) -> None:
    write_arrays(sharded / SHARDS[1], {**B, "c": np.ones(1, np.float32)})
    fault = refusal(sharded)
    assert fault.code == "index_mismatch" and fault.field == "c"


def test_one_tensor_listed_twice_with_different_files(sharded: Path) -> None:
    text = f'{{"weight_map": {{"a": "{SHARDS[0]}", "a": "{SHARDS[1]}", "b": "{SHARDS[1]}"}}}}'
    (sharded / "model.safetensors.index.json").write_text(text)
    fault = refusal(sharded)
    assert fault.code == "bad_index" and "twice" in str(fault)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "C:x.safetensors", "x.bin", ""],
)
def test_index_cannot_point_out_of_its_folder(sharded: Path, name: str) -> None:
    write_index(sharded, {"a": name})
    assert refusal(sharded).code == "bad_index"


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_refusal_or_a_table(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw)
    try:
        assert read_header(path) == {} or raw
    except CheckpointError as fault:
        assert fault.field == path.name


_ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "X9", 3]),
        "shape": st.one_of(st.lists(st.integers(-2, 4), max_size=3), st.just("x"), st.none()),
        "data_offsets": st.one_of(st.lists(st.integers(-4, 64), max_size=3), st.none()),
    }
)


@given(st.dictionaries(st.text(max_size=4), st.one_of(_ENTRY, st.integers(), st.none()), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_header_gives_a_refusal_or_extents_that_fit(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    try:
        tensors = read_header(path)
    except CheckpointError as fault:
        assert fault.field == path.name
    else:
        assert sum(record.nbytes for record in tensors.values()) == 64
