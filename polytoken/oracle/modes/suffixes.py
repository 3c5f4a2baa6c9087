"""Restored suffixes: three user turns extend the live final state of a generation, or a restored snapshot of it."""

from __future__ import annotations

import time
from typing import Any, Final

from polytoken.cache.state import Snapshot
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.oracle.digests import fingerprint
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.live import LiveState
from polytoken.oracle.modes.mtp import head_drafter, last_row
from polytoken.oracle.modes.serving import Served
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Ids, Subject
from polytoken.oracle.turns import Turns

FULL_COPY_STEP: Final = 1  # its snapshot is copied whole; the others share what they can


def run_suffixes(
    subject: Subject,
    ids: Ids,
    lane: MtpLane,
    served: Served,
    receipts: Receipts,
    *,
    prompts: tuple[str, ...],
    snapshot_restore: bool,
) -> None:
    """One receipt for each suffix.

    Raises:
        MismatchError: `snapshot_poisoned` when a snapshot changed while its borrower went on.
    """
    turns = Turns(subject)
    live = LiveState(
        subject.model, subject.head, served.row.state, head_drafter(served.row).history, last_row(served.row)
    )
    history = [*ids, *served.tokens]
    for step, prompt in enumerate(prompts):
        suffix = turns.suffix(prompt, behind=history[-1])
        cached = len(history)
        receipts.enter("prefill")
        saved = _Saved.take(live, step, receipts) if snapshot_restore else None
        start = time.perf_counter()
        sizes = live.extend(suffix, chunk=subject.chunk)
        seconds = time.perf_counter() - start
        snapshot = None if saved is None else saved.check(step)
        found = fetch({"logits": live.logits(), "hidden": live.last})
        history += suffix
        assert live.history is not None
        receipts.write(
            "restored_suffix_reference",
            step=step,
            token_ids=list(suffix),
            cached_tokens=cached,
            fused_max=None,  # no other way for short suffixes
            chunk_size=subject.chunk,
            final_only=True,
            **{name: fingerprint(values) for name, values in found.items()},
            history_offset=live.history.offset,
            chunks=_chunks(sizes, cached, len(history), receipts),
            snapshot=snapshot,
            runtime_counts={"forwards": len(sizes), "tokens": len(suffix)},
            matches_cold=_matches_cold(subject, tuple(history), live),
            target_seconds=seconds,
            history_seconds=None,
        )
    receipts.write("restored_suffix_reference_end", cases=len(prompts))


class _Saved:
    """Snapshots that a continuation borrows from, and their digests before it."""

    def __init__(self, trunk: Snapshot, head: Snapshot | None, fields: dict[str, Any]) -> None:
        self._trunk, self._head, self._fields = trunk, head, fields

    @classmethod
    def take(cls, live: LiveState, step: int, receipts: Receipts) -> _Saved:
        """Snapshot both states, and put fresh ones restored from them in their place."""
        trunk, head = live.snapshots()
        fields = {"lazy_kv": step != FULL_COPY_STEP, "trunk": trunk.digest(), "mtp": head and head.digest()}
        live.state = live.model.make_cache()
        live.state.restore(trunk)
        if head is not None and live.head is not None:
            live.history = live.head.make_cache()
            live.history.restore(head)
        receipts.note("snapshot_restored", step=step, **fields)
        return cls(trunk, head, fields)

    def check(self, step: int) -> dict[str, Any]:
        """The fields of the receipt. Raises MismatchError when a snapshot is not what it was."""
        after = {"trunk_after": self._trunk.digest(), "mtp_after": self._head and self._head.digest()}
        fields = {**self._fields, **after}
        for name in ("trunk", "mtp"):
            if fields[name] != fields[f"{name}_after"]:
                raise MismatchError(
                    f"restored suffix {step}: the continuation changed the {name} snapshot that it was restored from",
                    code="snapshot_poisoned",
                    field=name,
                )
        return fields


def _chunks(sizes: list[int], cached: int, total: int, receipts: Receipts) -> list[dict[str, int]]:
    chunks, done = [], cached
    for size in sizes:
        done += size
        chunk = {
            "tokens_done": done,
            "tokens_total": total,
            "cached_tokens": cached,
            "new_prefill_tokens": done - cached,
            "chunk_size": size,
        }
        chunks.append(chunk)
        receipts.note("restored_suffix_progress", **chunk)
    return chunks


def _matches_cold(subject: Subject, total: Ids, live: LiveState) -> dict[str, bool]:
    """Whether state, history and logits are those of the same tokens encoded from nothing. Bits on the CPU."""
    cold = LiveState.empty(subject.model, subject.head)
    cold.extend(total, chunk=subject.chunk)
    mine, theirs = live.snapshots(), cold.snapshots()
    found = fetch({"live": live.logits(), "cold": cold.logits()})
    assert mine[1] is not None and theirs[1] is not None
    return {
        "trunk": mine[0].digest() == theirs[0].digest(),
        "mtp": mine[1].digest() == theirs[1].digest(),
        "logits": fingerprint(found["live"]) == fingerprint(found["cold"]),
    }
