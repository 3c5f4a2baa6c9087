"""Canvas: an answer denoise by denoise, with the canvas, its statistics, the policy's decision and the state."""

from __future__ import annotations

import hashlib
import time
from dataclasses import fields, is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.errors import UsageError
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.watch import CanvasFrame
from polytoken.oracle.digests import digest
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.modes.serving import finish_reason, make_oracle_request
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Ids, Subject


def run_canvas(
    subject: Subject,
    ids: Ids,
    receipts: Receipts,
    *,
    seed: int,
    limit: int | None,
) -> None:
    """The mode `canvas`. Denoising draws by the policy's own law: no sampling flags apply."""
    lane = subject.lane
    if not isinstance(lane, CanvasLane):
        raise UsageError(f"--canvas: {subject.about.get('model')} is no block-diffusion model", field="--canvas")
    frames: list[CanvasFrame] = []
    lane.observer = frames.append
    request = make_oracle_request(
        ids, sampling=subject.recommended, seed=seed, limit=limit, room=subject.max_positions - len(ids)
    )
    start = time.perf_counter()
    receipts.enter("prefill")
    row: Any = lane.open(request, ids)
    while not lane.prefill_step(row):
        pass
    receipts.write(
        "canvas_prefill_reference",
        token_ids=list(ids),
        chunk_size=subject.chunk,
        cache=row.cache.snapshot().digest(),
        offset=row.cache.offset,
        policy=dict(lane.report()),
        seed=seed,
        seconds=time.perf_counter() - start,
    )
    receipts.enter("decode")
    tokens: list[int] = []
    reason = None
    while reason is None:
        (commit,) = lane.step([row])
        if isinstance(commit, Exception):
            raise commit
        tokens += commit.token_ids
        reason = commit.stop_reason
        _write_step(receipts, frames, row, commit)
    receipts.write(
        "canvas_reference_end",
        tokens=tokens,
        text=subject.text(tokens),
        finish_reason=finish_reason(reason),
        stop_reason=reason,
        denoise_steps=row.steps,
        elapsed_seconds=time.perf_counter() - start,
    )
    lane.observer = None
    lane.close(row, keep=False)


def _write_step(receipts: Receipts, frames: list[CanvasFrame], row: Any, commit: Any) -> None:
    frame = frames.pop()
    values = {"confidence": np.array(frame.confidence, "<f4"), "entropy": np.array(frame.entropy, "<f4")}
    receipts.write(
        "canvas_reference",
        step=frame.denoise_steps,
        generated_tokens=frame.generated_tokens,
        token_ids=list(frame.token_ids),
        committed=list(commit.token_ids),
        remaining=frame.remaining,
        statistics={
            name: {"sha256": digest(array), "mean": float(array.mean()), "least": float(array.min())}
            for name, array in values.items()
        },
        policy={"likely": sum(frame.likely), "age": max(frame.age), "stop_reason": commit.stop_reason}
        | dict(commit.detail),
        state=_state_digest(row),
        cache_offset=row.cache.offset,
    )
    receipts.note("canvas_progress", step=frame.denoise_steps, tokens=frame.generated_tokens + len(commit.token_ids))


def _state_digest(row: Any) -> str:
    """SHA-256 over every array the row carries to its next denoise, with their names, in the order of the fields."""
    named = dict(_arrays("", row))
    sha = hashlib.sha256()
    for name, values in fetch(named).items():
        assert values is not None
        sha.update(f"{name}{list(values.shape)}".encode())
        sha.update(values.tobytes())
    return sha.hexdigest()


def _arrays(name: str, value: Any) -> list[tuple[str, mx.array]]:
    """All arrays below a row's own fields; what belongs to the request or the prompt is not looked at."""
    if isinstance(value, mx.array):
        return [(name, value)]
    if not is_dataclass(value):
        return []
    skipped = ("request", "prefill", "noise", "seen", "output")
    return [
        item
        for part in fields(value)
        if part.name not in skipped
        for item in _arrays(f"{name}.{part.name}", getattr(value, part.name))
    ]
