"""The receipts of a forward and of greedy steps behind it, for whoever computes the rows. Needs numpy only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from polytoken.oracle.digests import Values, describe_rows, digest, row_digests
from polytoken.oracle.receipt import Receipts


def forward_fields(ids: Sequence[int], rows: Values) -> dict[str, Any]:
    """What `forward_reference` says of ids and their rows of logits [S, V]."""
    return {
        "token_ids": list(ids),
        "shape": [1, *rows.shape],
        "row_sha256": row_digests(rows),
        **describe_rows(rows),
    }


def write_greedy_steps(
    receipts: Receipts,
    forward: Callable[[int], Values],
    first: int,
    *,
    eos_ids: frozenset[int],
    room: int,
    text: Callable[[list[int]], str],
) -> None:
    """From the id `first` on, a receipt for every step, to an end id or for `room` steps, and one for the end.

    Args:
        forward: the row of logits [1, V] behind an id that is appended.
        text: ids as text.
    """
    token = first
    made: list[int] = []
    while token not in eos_ids and len(made) < room:
        made.append(token)
        start = time.perf_counter()
        row = forward(token)
        about = describe_rows(row)
        receipts.write(
            "decode_reference",
            step=len(made),
            token_id=token,
            shape=[1, *row.shape],
            row_sha256=digest(row[0]),
            argmax=about["argmax"][0],
            top=about["top"][0],
            logsumexp=about["logsumexp"][0],
            forward_seconds=time.perf_counter() - start,
        )
        token = int(about["argmax"][0])
    natural = token in eos_ids
    receipts.write(
        "decode_reference_end",
        eos_token=token if natural else None,
        eos_token_ids=sorted(eos_ids),
        token_ids=made,
        text=text(made),
        finish_reason="eos" if natural else "length",
    )
