"""One greedy MTP round by hand: what the lane does in a window, step by step, with the numbers of each.

An oracle of numbers, not of protocol: the pair of the last verified row and the continuation is never appended, so the
last draft's history is one row short of what the lane has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.errors import CacheError, UsageError
from polytoken.models.base import CausalModel
from polytoken.models.draft import DraftHead
from polytoken.oracle.digests import Values, describe_rows, fingerprint
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.modes.forward import argmax_of, forward_reference
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Ids, Subject

DRAFTS: Final = 3


@dataclass(eq=False)
class _Round:
    """The parts of a round, and its receipts."""

    model: CausalModel
    head: DraftHead
    receipts: Receipts
    state: DecodingState
    history: DecodingState

    def write(
        self, op: str, logits: mx.array | None = None, hidden: mx.array | None = None, **fields: Any
    ) -> Values | None:
        """A receipt of logits [S, V] and hidden rows; the logits on the host."""
        found = fetch({"logits": logits, "hidden": hidden})
        rows = found["logits"]
        self.receipts.write(
            "mtp_reference",
            op=op,
            logits=fingerprint(None if rows is None else rows[None]),
            hidden=fingerprint(found["hidden"]),
            **fields,
            **({} if rows is None else describe_rows(rows)),
        )
        return rows

    def trunk(self, ids: list[int]) -> tuple[mx.array, mx.array]:
        """Logits [S, V] and the rows that the head reads [1, S, W]."""
        hidden = self.model.forward(mx.array([ids], dtype=mx.int32), self.state)
        return self.model.project(hidden.post[0]), self.head.take(hidden)

    def draft(self, hidden: mx.array, ids: list[int]) -> tuple[mx.array, mx.array]:
        """Logits [R, V] and rows [1, R, W] of the head for pairs that its history keeps."""
        logits, rows = self.head.draft(hidden, mx.array([ids], dtype=mx.int32), self.history)
        return logits[0], rows


def run_round(subject: Subject, ids: Ids, receipts: Receipts, *, prompt: str) -> None:
    """The mode `mtp`."""
    if len(ids) < 2:
        raise UsageError("--mtp needs a prompt of at least two tokens", field="--mtp")
    head = subject.head
    body = forward_reference(subject, ids[:-1], receipts, mtp=True, prompt=prompt)
    work = _Round(subject.model, head, receipts, body.state, head.make_cache())
    out, tail = work.trunk([ids[-1]])
    rows = work.write("trunk", out, tail, token_ids=[ids[-1]])
    assert rows is not None
    receipts.enter("decode")
    _, history = work.draft(head.take(body.hidden), list(ids[1:]))
    work.write("history", hidden=history, token_ids=list(ids[1:]), offset=work.history.offset)
    base = work.history.offset

    token, hidden = int(rows[-1].argmax()), tail
    window = [token]
    for depth in range(DRAFTS):
        out, hidden = work.draft(hidden, [token])
        drafted = work.write("draft", out, hidden, token_ids=[token], depth=depth, offset=work.history.offset)
        assert drafted is not None
        token = int(drafted[-1].argmax())
        window.append(token)
    keep, choices, verified = _verify(work, window, base)
    rest = window[1:keep]
    accepted = work.draft(verified[:, : keep - 1], rest)[1] if rest else None
    work.write("history_commit", hidden=accepted, token_ids=rest, offset=work.history.offset)
    token = choices[keep - 1]
    out, hidden = work.trunk([token])
    following = work.write("continuation", out, hidden, token_ids=[token])
    assert following is not None
    token = int(following[-1].argmax())
    out, hidden = work.draft(hidden, [token])
    work.write("draft_continuation", out, hidden, token_ids=[token], offset=work.history.offset)
    receipts.write("mtp_reference_end", keep=keep, verified=len(window))


def _verify(work: _Round, window: list[int], base: int) -> tuple[int, list[int], mx.array]:
    """Verify and commit the window: rows kept, the target's choice at every row, the verified rows."""
    with work.state.capturing():
        out, verified = work.trunk(window)
    rows = work.write("verify", out, verified, token_ids=window)
    assert rows is not None
    choices = argmax_of(rows)
    keep = 1
    while keep < len(window) and window[keep] == choices[keep - 1]:
        keep += 1
    try:
        work.state.commit(keep, len(window))
    except CacheError as error:
        raise MismatchError(
            f"the state cannot keep {keep} of {len(window)} rows: {error}", code="commit_refused"
        ) from error
    # The first draft was made from a true row and stays; the recursive ones are replaced.
    work.history.trim(work.history.offset - (base + 1))
    work.write("commit", keep=keep, verified=len(window), offset=work.history.offset)
    return keep, choices, verified
