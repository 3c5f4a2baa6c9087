"""One record as a file: it comes back bit for bit, and a file that was touched in any way is refused."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from disk_records import SPACE, is_intact, make_record
from safetensors import safe_open

from polytoken.cache.disk.arrays import to_device, to_host
from polytoken.cache.disk.record import (
    Fault,
    HostArray,
    Record,
    RecordFault,
    Space,
    array_bytes,
    decode,
    encode,
    read_header,
)

DTYPES = (
    mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64,
    mx.float16, mx.bfloat16, mx.float32, mx.complex64,
)  # fmt: skip


def file_of(record: Record, space: Space = SPACE) -> bytes:
    return b"".join(bytes(piece) for piece in encode(record, space))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 4, 5, 3)], ids=str)
def test_e17_type_shape_and_bits_come_back(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    """E17: also of an empty array, one with a zero in its shape, and one of no dimension."""
    raw = np.random.default_rng(1).integers(0, 256, array_bytes(to_host(mx.zeros(shape, dtype)).dtype, shape))
    data = (raw % 2 if dtype == mx.bool_ else raw).astype(np.uint8).tobytes()
    array = to_device(HostArray(to_host(mx.zeros(shape, dtype)).dtype, shape, data))
    mx.eval(array)
    record = decode(file_of(Record(bytes(32), None, "run", {}, {"a": to_host(array)})), SPACE)
    again = to_device(record.arrays["a"])
    mx.eval(again)
    assert (again.dtype, again.shape) == (dtype, shape)
    assert bytes(to_host(again).data) == bytes(to_host(array).data) == data


def test_a_view_of_an_array_is_stored_as_what_it_shows() -> None:
    whole = mx.random.normal((1, 2, 9, 5)).astype(mx.bfloat16)
    part = whole[:, :, 2:7].transpose(0, 1, 3, 2)
    mx.eval(part)
    assert np.array_equal(
        np.array(to_device(to_host(part)).astype(mx.float32)), np.array(part.astype(mx.float32))
    )  # fmt: skip


def test_a_record_comes_back_and_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    made = make_record(7, parent=6)
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(made))
    read = decode(path.read_bytes(), SPACE)
    assert is_intact(read, 7)
    assert (read.parent, read.kind, dict(read.meta)) == (made.parent, made.kind, dict(made.meta))
    with safe_open(path, framework="numpy") as tensors:
        assert tensors.get_tensor("rows").tobytes() == bytes(made.arrays["rows"].data)
    header = read_header(path)
    assert header is not None
    assert (header.key, header.nbytes, header.meta) == (made.key, made.nbytes, made.meta)


def test_no_bit_can_change_unnoticed() -> None:
    """E07: what cannot be verified is not used."""
    data = file_of(make_record(1, size=300))
    for at in range(len(data)):
        for bit in (0, 3, 7):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(RecordFault):
                decode(bytes(changed), SPACE)


def test_a_file_cut_off_anywhere_is_truncated() -> None:
    data = file_of(make_record(1, size=300))
    for length in range(len(data)):
        with pytest.raises(RecordFault) as refused:
            decode(data[:length], SPACE)
        assert refused.value.fault is Fault.TRUNCATED, length


def test_bytes_behind_the_end_are_refused() -> None:
    with pytest.raises(RecordFault) as refused:
        decode(file_of(make_record(1)) + b"\0", SPACE)
    assert refused.value.fault is Fault.CORRUPT


def test_other_files_have_their_reason() -> None:
    """E08: a record of another format or another model is told from a damaged one, and used no more than that."""
    data = file_of(make_record(1))
    other = data.replace(b'"version":"1"', b'"version":"2"')
    for bad, fault in (
        (other, Fault.OTHER_VERSION),
        (b"\x40\0\0\0\0\0\0\0" + b'{"weight":{"dtype":"F32"}}'.ljust(64), Fault.FOREIGN),
        (random.Random(1).randbytes(5000), Fault.FOREIGN),
        (b"", Fault.TRUNCATED),
        (file_of(make_record(1), Space.of({"checkpoint": "another", "grid": 64})), Fault.MISPLACED),
    ):
        with pytest.raises(RecordFault) as refused:
            decode(bad, SPACE)
        assert refused.value.fault is fault


def test_a_header_is_read_without_the_arrays_and_held_against_the_length(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert read_header(path) is None
    data = file_of(make_record(1, size=100_000))
    path.write_bytes(data[:-1])
    with pytest.raises(RecordFault):
        read_header(path)
    long = Record(bytes(32), None, "run", {"ids": list(range(100_000))}, make_record(1).arrays)
    path.write_bytes(file_of(long))
    header = read_header(path)
    assert header is not None
    assert header.meta["ids"][-1] == 99_999
    path.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])  # an absurd length is not believed
    with pytest.raises(RecordFault):
        read_header(path)


def test_an_array_of_the_wrong_length_is_a_defect() -> None:
    with pytest.raises(ValueError, match="do not make an array"):
        HostArray("F32", (2, 2), b"x" * 15)
