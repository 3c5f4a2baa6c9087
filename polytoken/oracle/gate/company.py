"""Company and seeds: an answer depends on its own request, not on its neighbours nor on when it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.oracle.compare.rows import Tolerance, Top, examine_tie
from polytoken.oracle.gate.greedy import LISTED
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome, equal
from polytoken.oracle.gate.running import GREEDY, answer, answer_all, ask, first_parting
from polytoken.oracle.subject import Subject
from polytoken.request import Request

CHECK: Final = "alone = in company"


def check_company(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """Greedy and sampled requests side by side give what each gives alone."""
    requests = _requests(subject, matrix)
    tolerance = Tolerance.of(str(subject.about["dtype"]))
    for name, lane in _lanes(subject, matrix):
        together = answer_all(lane, requests)
        for index, request in enumerate(requests):
            alone, beside = answer(lane, request).tokens, together[index].tokens
            place = first_parting(alone, beside)
            case = {"lane": name, "request": request.request_id, "neighbours": len(requests) - 1}
            if place is None or exact:
                yield equal(CHECK, case, place is None, position=place)
                continue
            drawn = request.sampling.temperature > 0
            laws = _laws_at(place, lane, requests, index)
            tie = examine_tie("tokens", place, (alone[place], beside[place]), laws, tolerance=tolerance, drawn=drawn)
            yield Outcome(check=CHECK, case=case, verdict="near tie" if tie.near else "different", detail=vars(tie))


def _laws_at(place: int, lane: Lane[Any], requests: list[Request], index: int) -> tuple[Top | None, Top | None]:
    """The likeliest ids at a place of one request, alone and in company: both runs again."""
    listed = [replace(each, sampling=replace(each.sampling, logprobs=LISTED)) for each in requests]
    return answer(lane, listed[index]).top(place), answer_all(lane, listed)[index].top(place)


def check_seeds(subject: Subject, matrix: Matrix) -> Iterator[Outcome]:
    """The same seed gives the same answer; of several seeds not all give one."""
    prompt, ids = matrix.prompt_ids(subject)[0]
    for name, lane in _lanes(subject, matrix):
        first, second = (
            [
                answer(lane, ask("seed", ids, matrix.new_tokens, sampling=matrix.sampling, seed=s)).tokens
                for s in range(4)
            ]
            for _ in range(2)
        )
        place = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), None)
        differ = len({tuple(tokens) for tokens in first})
        yield equal(
            "seed gives one answer", {"lane": name, "prompt": prompt}, place is None, seed=place, answers=differ
        )


def _requests(subject: Subject, matrix: Matrix) -> list[Request]:
    prompts = matrix.prompt_ids(subject)
    made = []
    for index in range(4):
        prompt, ids = prompts[index % len(prompts)]
        sampling = GREEDY if index % 2 == 0 else matrix.sampling
        count = matrix.new_tokens - index  # they leave one after the other
        made.append(ask(f"{index}: {prompt}", ids, max(count, 2), sampling=sampling, seed=index))
    return made


def _lanes(subject: Subject, matrix: Matrix) -> list[tuple[str, Lane[Any]]]:
    lanes: list[tuple[str, Lane[Any]]] = [("ar", subject.ar_lane())]
    if matrix.depths:
        lanes.append(("mtp", subject.mtp_lane(MtpSettings(depth=max(matrix.depths)))))
    return lanes
