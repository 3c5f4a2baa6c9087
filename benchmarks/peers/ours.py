"""Our lanes driven without text: rows stepped by hand, and the scheduler as an engine drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polytoken.engine.scheduler import Label, Scheduler, SchedulerLimits
from polytoken.events import Event, GenerationResult
from polytoken.lanes.base import Commit, Lane
from polytoken.request import Request
from polytoken.text.stream import TextStep


class NoText:
    """A text port for ids that stand for nothing."""

    text = full_text = ""

    def push(self, ids: Sequence[int]) -> TextStep:
        return TextStep(len(ids), "")

    def finish(self) -> str:
        return ""

    def drain(self) -> None:
        return None


def open_row(lane: Lane[Any], request: Request, prompt: Sequence[int]) -> Any:
    """A row of the lane whose prompt is encoded."""
    row = lane.open(request, prompt)
    while not lane.prefill_step(row):
        pass
    return row


def commits(lane: Lane[Any], row: Any) -> Iterator[Commit]:
    """Step the row to its end.

    Raises:
        Exception: with which the lane failed the row.
    """
    reason = None
    while reason is None:
        (commit,) = lane.step([row])
        if isinstance(commit, Exception):
            raise commit
        yield commit
        reason = commit.stop_reason


def schedule(
    lane: Lane[Any],
    request: Request,
    *,
    prefill_budget: int,
    token_events: bool,
    after_turn: Callable[[], object] = lambda: None,
) -> GenerationResult:
    """Run one request of ids with the scheduler and its events around the lane.

    Args:
        prefill_budget: prompt tokens per turn.
        token_events: whether every commit makes an event.
        after_turn: called behind each turn; the first one prefills, if the budget allows, and commits a token.
    """
    events: list[Event] = []
    scheduler = Scheduler(
        lane,
        SchedulerLimits(prefill_budget=prefill_budget),
        encode=lambda request: request.token_ids or (),
        open_text=lambda request, ids: NoText(),
        emit=events.append,
        label=Label("random"),
        token_events=token_events,
    )
    scheduler.offer(request)
    while not scheduler.idle:
        scheduler.turn()
        after_turn()
    result = events[-1]
    assert isinstance(result, GenerationResult), result
    return result
