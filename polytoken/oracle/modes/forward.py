"""Forward and decode: the network alone, one unchunked forward of the prompt and then greedy single steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.models.base import CausalModel, Hidden
from polytoken.oracle.digests import Values
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.plain import forward_fields, write_greedy_steps
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Ids, Subject


@dataclass(frozen=True, eq=False)
class Encoded:
    """A prompt after one forward.

    Attributes:
        state: holds all of it.
        hidden: rows of all of it.
        logits: float32 [S, V] on the host.
    """

    state: DecodingState
    hidden: Hidden
    logits: Values


def forward_reference(subject: Subject, ids: Ids, receipts: Receipts, *, mtp: bool, prompt: str) -> Encoded:
    """One forward of all ids on a fresh state, with a receipt for every row of logits."""
    model: CausalModel = subject.model
    receipts.enter("prefill")
    start = time.perf_counter()
    state = model.make_cache()
    hidden = model.forward(mx.array([ids], dtype=mx.int32), state)
    logits = fetch({"logits": model.project(hidden.post[0])})["logits"]
    assert logits is not None
    receipts.write(
        "forward_reference",
        **forward_fields(ids, logits),
        load_seconds=subject.loaded.loaded.load_seconds,
        forward_seconds=time.perf_counter() - start,
        mtp=mtp,
        prompt=prompt,
        power_percent=100,
    )
    return Encoded(state, hidden, logits)


def run_forward(subject: Subject, ids: Ids, receipts: Receipts, *, prompt: str) -> None:
    """The mode `forward`."""
    forward_reference(subject, ids, receipts, mtp=False, prompt=prompt)


def run_decode(subject: Subject, ids: Ids, receipts: Receipts, *, prompt: str, limit: int | None) -> None:
    """The mode `decode`: after the forward, greedy steps to an end id, the limit, or the end of the context."""
    encoded = forward_reference(subject, ids, receipts, mtp=False, prompt=prompt)
    model: CausalModel = subject.model
    receipts.enter("decode")
    room = subject.max_positions - len(ids)

    def forward(token: int) -> Values:
        hidden = model.forward(mx.array([[token]], dtype=mx.int32), encoded.state)
        row = fetch({"logits": model.project(hidden.post[0])})["logits"]
        assert row is not None
        return row

    write_greedy_steps(
        receipts,
        forward,
        int(encoded.logits[-1].argmax()),
        eos_ids=subject.eos_ids,
        room=room if limit is None else min(room, limit),
        text=subject.text,
    )


def argmax_of(rows: Values) -> list[int]:
    """The likeliest id of each row, the lowest on ties."""
    return [int(row.argmax()) for row in rows]
