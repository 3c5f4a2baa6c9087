"""A bank's runs and marks as records, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from polytoken.cache.blocks import LayerBlock
from polytoken.cache.disk.arrays import to_device, to_host
from polytoken.cache.disk.index import MARK
from polytoken.cache.disk.record import HostArray, Record
from polytoken.cache.marks import Mark
from polytoken.cache.tail import Tail
from polytoken.cache.tier import StoredRun
from polytoken.cache.tree import ID_BYTES, encode_ids

RUN: Final = "run"


def run_record(run: StoredRun) -> Record:
    """A run without its marks: its ids, and the rows of its layers. Copies the arrays."""
    meta = {
        "start": run.start,
        "ids": list(run.ids),
        "sealed": run.sealed,
        "blocks": [_describe_block(block) for block in run.blocks],
    }
    return Record(
        run.digest, parent_of(run), RUN, meta, _host_arrays("block", run.blocks), run_hint(encode_ids(run.ids[:1]))
    )


def parent_of(run: StoredRun) -> bytes | None:
    """The key of the record that the run's continues: a root is no record."""
    return None if run.start == 0 else run.parent


def run_hint(key: bytes) -> str:
    """The hint of a run's record: its first id, of its ids as `encode_ids` gives them."""
    return key[:ID_BYTES].hex()


def row_starts(blocks: Iterable[Mapping[str, Any]]) -> list[int]:
    """Where the rows of each layer begin, from a run's meta."""
    return [int(block["start"]) for block in blocks]


def mark_key(digest: bytes, mark: Mark) -> bytes:
    """The key of a mark in the run called `digest`: a mark that has more is another record."""
    what = f"mark {mark.position} {bool(mark.states)} {mark.tail is not None}"
    return hashlib.sha256(digest + what.encode()).digest()


def mark_record(digest: bytes, mark: Mark) -> Record:
    """A mark of the run called `digest`. Copies the arrays."""
    arrays = _host_arrays("state", mark.states)
    if mark.tail is not None:
        arrays["logits"] = to_host(mark.tail.logits)
        if mark.tail.hidden is not None:
            arrays["hidden"] = to_host(mark.tail.hidden)
    meta = {"position": mark.position, "states": [_describe_block(block) for block in mark.states]}
    return Record(mark_key(digest, mark), digest, MARK, meta, arrays, MARK)


def read_blocks(record: Record) -> tuple[LayerBlock, ...]:
    """The blocks of a run's record, on the device; lazy."""
    return tuple(_make_blocks(record, "block", record.meta["blocks"]))


def read_mark(record: Record) -> Mark:
    """The mark of a record, on the device; lazy."""
    logits, hidden = record.arrays.get("logits"), record.arrays.get("hidden")
    tail = None if logits is None else Tail(to_device(logits), None if hidden is None else to_device(hidden))
    states = tuple(_make_blocks(record, "state", record.meta["states"]))
    return Mark(int(record.meta["position"]), states, tail)


def merge_marks(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """One mark for each position, with all that is known of it, ascending."""
    merged: dict[int, Mark] = {}
    for mark in marks:
        known = merged.get(mark.position)
        if known is not None:
            merged[mark.position] = Mark(mark.position, known.states or mark.states, known.tail or mark.tail)
        else:
            merged[mark.position] = mark
    return tuple(merged[position] for position in sorted(merged))


def _describe_block(block: LayerBlock) -> dict[str, Any]:
    return {
        "kind": block.kind,
        "window": block.window,
        "start": block.start,
        "stop": block.stop,
        "needs": block.needs,
        "alone": block.alone,
        "arrays": len(block.arrays),
    }


def _host_arrays(name: str, blocks: Sequence[LayerBlock]) -> dict[str, HostArray]:
    return {f"{name}.{i}.{j}": to_host(array) for i, block in enumerate(blocks) for j, array in enumerate(block.arrays)}


def _make_blocks(record: Record, name: str, described: Sequence[Mapping[str, Any]]) -> Iterable[LayerBlock]:
    for i, about in enumerate(described):
        yield LayerBlock(
            kind=about["kind"],
            window=about["window"],
            start=about["start"],
            stop=about["stop"],
            needs=about["needs"],
            arrays=tuple(to_device(record.arrays[f"{name}.{i}.{j}"]) for j in range(about["arrays"])),
            alone=about["alone"],
        )
