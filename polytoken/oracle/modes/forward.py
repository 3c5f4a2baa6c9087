"""Forward and decode: the network alone, one unchunked forward of the prompt and then greedy single steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.models.base import CausalModel, Hidden
from polytoken.oracle.digests import Values, describe_rows, digest, row_digests
from polytoken.oracle.fingerprint import fetch
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
        token_ids=list(ids),
        shape=[1, *logits.shape],
        row_sha256=row_digests(logits),
        **describe_rows(logits),
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
    room = room if limit is None else min(room, limit)
    token = int(encoded.logits[-1].argmax())
    made: list[int] = []
    while token not in subject.eos_ids and len(made) < room:
        made.append(token)
        start = time.perf_counter()
        token = _step(model, encoded.state, token, receipts, step=len(made), start=start)
    natural = token in subject.eos_ids
    receipts.write(
        "decode_reference_end",
        eos_token=token if natural else None,
        eos_token_ids=sorted(subject.eos_ids),
        token_ids=made,
        text=subject.text(made),
        finish_reason="eos" if natural else "length",
    )


def _step(model: CausalModel, state: DecodingState, token: int, receipts: Receipts, *, step: int, start: float) -> int:
    """Forward one token, write its receipt, and return the next."""
    hidden = model.forward(mx.array([[token]], dtype=mx.int32), state)
    row = fetch({"logits": model.project(hidden.post[0])})["logits"]
    assert row is not None
    about = describe_rows(row)
    following = int(about["argmax"][0])
    receipts.write(
        "decode_reference",
        step=step,
        token_id=token,
        shape=[1, *row.shape],
        row_sha256=digest(row[0]),
        argmax=following,
        top=about["top"][0],
        logsumexp=about["logsumexp"][0],
        forward_seconds=time.perf_counter() - start,
    )
    return following


def argmax_of(rows: Values) -> list[int]:
    """The likeliest id of each row, the lowest on ties."""
    return [int(row.argmax()) for row in rows]
