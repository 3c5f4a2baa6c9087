"""One request on a real lane, from prompt to end, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polytoken.errors import UsageError
from polytoken.events import TokenLogprob
from polytoken.lanes.base import Lane
from polytoken.oracle.receipt import Receipts
from polytoken.request import Request, SamplingParams

LOGPROBS: Final = 8  # alternatives beside every token, for finding near ties
TakeIds = Callable[[tuple[int, ...]], None]


@dataclass(eq=False)
class Served:
    """What became of a request. Its row stays open, for whoever wants its state.

    Attributes:
        tokens: all of them, a stop id included.
        reason: as the lane spells it.
        chunks: progress of every prefill step.
    """

    row: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    forwards: int = 0
    reason: str = ""
    chunks: list[dict[str, int]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    elapsed_seconds: float = 0.0

    @property
    def finish_reason(self) -> str:
        """`stop` for a natural end, else `length`."""
        return finish_reason(self.reason)

    @property
    def top(self) -> list[list[list[float]]]:
        """The likeliest ids at every place with their log-probabilities."""
        return [[[token_id, value] for token_id, value in item.top] for item in self.logprobs]


def finish_reason(reason: str) -> str:
    """A lane's reason in the words of the receipts."""
    return "stop" if reason in ("eos", "turn_end", "stop_string") else "length"


def make_oracle_request(
    ids: Sequence[int],
    *,
    name: str = "oracle",
    sampling: SamplingParams,
    seed: int,
    limit: int | None,
    room: int,
    session: str | None = None,
) -> Request:
    """A request for ids as they stand; without a limit it may fill the context.

    Raises:
        UsageError: the prompt leaves no room in the context.
    """
    if room <= 0:
        raise UsageError(
            f"{name}: a prompt of {len(ids)} tokens leaves no room in the model's context", field="--model"
        )
    return Request(
        request_id=name,
        token_ids=tuple(ids),
        max_new_tokens=room if limit is None else min(limit, room),
        seed=seed,
        sampling=sampling,
        session=session,
    )


def serve(
    lane: Lane[Any],
    request: Request,
    receipts: Receipts,
    *,
    progress: str,
    take: TakeIds = lambda ids: None,
) -> Served:
    """Run a request to its end.

    Args:
        progress: event of the progress records, one per prefill step and one when it is done.
        take: gets the ids of every commit.
    """
    assert request.token_ids is not None
    ids = request.token_ids
    start = time.perf_counter()
    receipts.enter("prefill")
    served = Served(lane.open(request, ids))
    row = served.row
    served.chunks += prefill(lane, row, len(ids), receipts, progress=progress)
    served.prefill_seconds = time.perf_counter() - start
    receipts.enter("decode")
    while not served.reason:
        (commit,) = lane.step([row])
        if isinstance(commit, Exception):
            raise commit
        served.tokens += commit.token_ids
        served.logprobs += commit.logprobs or ()
        served.forwards += commit.forwards
        served.reason = commit.stop_reason or ""
        if commit.token_ids:
            take(commit.token_ids)
    served.elapsed_seconds = time.perf_counter() - start
    return served


def prefill(lane: Lane[Any], row: Any, total: int, receipts: Receipts, *, progress: str) -> list[dict[str, int]]:
    """All steps of an open row's prompt of `total` tokens, with a record of progress for each."""
    chunks: list[dict[str, int]] = []
    ready = False
    while not ready:
        cost = lane.prefill_cost(row)
        ready = lane.prefill_step(row)
        done = total - row.prefill_remaining
        chunk = {
            "tokens_done": done,
            "tokens_total": total,
            "cached_tokens": row.cached_tokens,
            "new_prefill_tokens": done - row.cached_tokens,
            "chunk_size": cost,
        }
        chunks.append(chunk)
        receipts.note(progress, phase="completed" if ready else "chunk", **chunk)
    return chunks
