"""Running requests on lanes for the gate, alone and side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polytoken.events import TokenLogprob
from polytoken.lanes.base import Lane
from polytoken.oracle.compare.rows import Top
from polytoken.request import Request, SamplingParams

GREEDY = SamplingParams()


@dataclass(eq=False)
class Answer:
    """What became of a request; its row stays open."""

    row: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False

    def top(self, position: int) -> Top | None:
        """The likeliest ids at a place, with their log-probabilities."""
        return [[float(i), v] for i, v in self.logprobs[position].top] if position < len(self.logprobs) else None


def ask(name: str, ids: Sequence[int], count: int, *, sampling: SamplingParams = GREEDY, seed: int = 0) -> Request:
    """A request for exactly `count` tokens, end tokens passed over."""
    return Request(
        request_id=name, token_ids=tuple(ids), max_new_tokens=count, sampling=sampling, seed=seed, ignore_eos=True
    )


def answer(lane: Lane[Any], request: Request) -> Answer:
    """One request to its end."""
    return answer_all(lane, [request])[0]


def answer_all(lane: Lane[Any], requests: Sequence[Request]) -> list[Answer]:
    """All requests side by side, to their ends."""
    answers = []
    for request in requests:
        assert request.token_ids is not None
        row = lane.open(request, request.token_ids)
        while not lane.prefill_step(row):
            pass
        answers.append(Answer(row))
    while live := [item for item in answers if not item.ended]:
        for item, commit in zip(live, lane.step([item.row for item in live]), strict=True):
            if isinstance(commit, Exception):
                raise commit
            item.tokens += commit.token_ids
            item.logprobs += commit.logprobs or ()
            item.ended = commit.stop_reason is not None
    return answers


def first_parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where two texts have different ids; None where neither has."""
    pairs = enumerate(zip(left, right, strict=False))
    parting = next((i for i, (a, b) in pairs if a != b), None)
    return parting if parting is not None or len(left) == len(right) else min(len(left), len(right))
