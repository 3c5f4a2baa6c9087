"""Company and seeds: an answer depends on its own request, not on its neighbours nor on when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.oracle.compare.rows import Tolerance, Top, examine_tie
from polytoken.oracle.gate.greedy import LISTED
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome, equal
from polytoken.oracle.gate.running import GREEDY, Answer, answer, answer_all, ask, first_parting
from polytoken.oracle.subject import Subject
from polytoken.request import Request, SamplingParams

AGAIN: Final = "alone = alone again"
CHECK: Final = "alone = in company"
SEEDS: Final = "seed gives one answer"
_SEEDS: Final = 4
_TRIES: Final = 4  # for the law at a place, where not every run comes to it by the same ids
Run = Callable[[SamplingParams], Answer]


def check_company(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """Each request gives alone what it gives alone again, and greedy and sampled requests side by side the same.

    Where a run does not repeat alone, a difference in company is no neighbour's: every case says which it is.
    """
    requests = _requests(subject, matrix)
    tolerance = None if exact else Tolerance.of(str(subject.about["dtype"]))
    for name, lane in _lanes(subject, matrix):
        together = answer_all(lane, requests)
        for index, request in enumerate(requests):
            alone, again = (answer(lane, request).tokens for _ in range(2))
            repeats = first_parting(alone, again) is None
            case: dict[str, Any] = {"lane": name, "request": request.request_id}

            def run(sampling: SamplingParams, lane: Lane[Any] = lane, request: Request = request) -> Answer:
                return answer(lane, replace(request, sampling=sampling))

            def beside(sampling: SamplingParams, lane: Lane[Any] = lane, index: int = index) -> Answer:
                asked = [replace(r, sampling=sampling) if i == index else r for i, r in enumerate(requests)]
                return answer_all(lane, asked)[index]

            rest: dict[str, Any] = {"sampling": request.sampling, "tolerance": tolerance, "repeats_alone": repeats}
            yield _hold(AGAIN, case, (alone, again), (run, run), **rest)
            case = {**case, "neighbours": len(requests) - 1}
            yield _hold(CHECK, case, (alone, together[index].tokens), (run, beside), **rest)


def check_seeds(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """The same seed gives the same answer; how many different answers several seeds give is told."""
    prompt, ids = matrix.prompt_ids(subject)[0]
    law, tolerance = matrix.sampling, None if exact else Tolerance.of(str(subject.about["dtype"]))
    for name, lane in _lanes(subject, matrix):

        def run(sampling: SamplingParams, seed: int = 0, lane: Lane[Any] = lane) -> Answer:
            return answer(lane, ask("seed", ids, matrix.new_tokens, sampling=sampling, seed=seed))

        first, second = ([run(law, seed).tokens for seed in range(_SEEDS)] for _ in range(2))
        parting = next((seed for seed in range(_SEEDS) if first[seed] != second[seed]), None)
        seed = parting or 0
        again: Run = partial(run, seed=seed)
        told = {"seed": parting, "answers": len({tuple(tokens) for tokens in first})}
        case = {"lane": name, "prompt": prompt}
        yield _hold(SEEDS, case, (first[seed], second[seed]), (again, again), sampling=law, tolerance=tolerance, **told)


def _hold(
    check: str,
    case: dict[str, Any],
    pair: tuple[list[int], list[int]],
    runs: tuple[Run, Run],
    *,
    sampling: SamplingParams,
    tolerance: Tolerance | None,
    **told: Any,
) -> Outcome:
    """Two answers to one request; where they part and bits are not promised, by the laws at that place."""
    place = first_parting(*pair)
    if place is None or tolerance is None:
        return equal(check, case, place is None, position=place, **told)
    left, right = (_law_at(place, tokens, run, sampling) for tokens, run in zip(pair, runs, strict=True))
    chosen, drawn = (pair[0][place], pair[1][place]), sampling.temperature > 0
    tie = examine_tie("tokens", place, chosen, (left, right), tolerance=tolerance, drawn=drawn)
    return Outcome(check=check, case=case, verdict="near tie" if tie.near else "different", detail=vars(tie) | told)


def _law_at(place: int, tokens: list[int], run: Run, sampling: SamplingParams) -> Top | None:
    """The likeliest ids at a place: the run again, at best to the same id. None where no run comes there."""
    found = None
    for _ in range(_TRIES):
        again = run(replace(sampling, logprobs=LISTED))
        if again.tokens[:place] == tokens[:place]:
            found = again.top(place)
            if again.tokens[place : place + 1] == tokens[place : place + 1]:
                break
    return found


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
