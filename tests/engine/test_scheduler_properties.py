"""Invariants 25 to 29 of the lane specification, over random traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from engine_fakes import Bench, FakeClock, Script, is_last, letters, make_request, names, started, too_long
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import NonFiniteError
from polytoken.events import GenerationResult, Token
from polytoken.lanes.base import Commit
from polytoken.request import Request

CHUNK = 64


@dataclass
class Traffic:
    """Requests in order of arrival, what happens to each, and what is done before each turn."""

    requests: list[Request]
    scripts: dict[str, Script]
    arrivals: list[int]  # how many more are offered before a turn
    cancels: list[int | None]  # which request is cancelled before a turn
    step_errors: set[int]  # steps of the lane that raise as a whole
    limits: dict[str, Any] = field(default_factory=dict)


@st.composite
def scripts(draw: st.DrawFn, *, faults: bool) -> Script:
    script = Script(prompt=draw(st.integers(1, 5 * CHUNK)))
    script.cached = draw(st.sampled_from([0, 0, script.prompt, script.prompt // 2]))
    if draw(st.booleans()):  # blocks, as MTP and canvas commit them; empty ones too
        sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
        ids = iter(draw(st.lists(st.integers(1, 25), min_size=sum(sizes), max_size=sum(sizes))))
        script.commits = [Commit(token_ids=tuple(next(ids) for _ in range(size))) for size in sizes]
        script.commits.append(Commit(token_ids=(0,), stop_reason="eos"))
    fault = draw(st.sampled_from(["none", "none", "open", "encode", "prefill", "step", "close"])) if faults else "none"
    if fault == "open":
        script.open_error = draw(st.sampled_from([too_long(), OSError("open")]))
    elif fault == "encode":
        script.encode_error = too_long()
    elif fault == "prefill":
        script.prefill_error = NonFiniteError("prefill")
        script.prefill_error_at = draw(st.integers(0, script.prompt))
    elif fault == "step":
        script.commits = [*(script.commits or [])[:-1], NonFiniteError("step")]
    elif fault == "close":
        script.close_error = OSError("close")
    return script


@st.composite
def traffic(draw: st.DrawFn, *, faults: bool = True) -> Traffic:
    count = draw(st.integers(1, 9))
    requests = [
        make_request(
            f"r{number}",
            tokens=draw(st.integers(1, 7)),
            seed=draw(st.integers(-3, 99)),
            stop=draw(st.sampled_from([(), (), ("a",), ("bc", "x")])),
        )
        for number in range(count)
    ]
    return Traffic(
        requests=requests,
        scripts={request.request_id: draw(scripts(faults=faults)) for request in requests},
        arrivals=draw(st.lists(st.integers(0, 4), max_size=12)),
        cancels=draw(st.lists(st.none() | st.integers(0, count - 1), max_size=25)) if faults else [],
        step_errors=draw(st.sets(st.integers(1, 20), max_size=2)) if faults else set(),
        limits={
            "max_rows": draw(st.integers(1, 5)),
            "rows_per_step": draw(st.none() | st.integers(1, 4)),
            "max_pending": draw(st.integers(1, 4)),
            "prefill_budget": CHUNK * draw(st.integers(1, 3)),
        },
    )


def play(traffic: Traffic) -> Bench:
    """Run the traffic and check what has to hold at every turn (26, 27)."""
    bench = Bench(traffic.scripts, chunk=CHUNK, clock=FakeClock(tick=0.01), **traffic.limits)
    scheduler, limits = bench.scheduler, bench.limits
    steps = 0

    def fail_whole_steps(_: list[str]) -> BaseException | None:
        nonlocal steps
        steps += 1
        return ValueError("whole step") if steps in traffic.step_errors else None

    bench.lane.step_error = fail_whole_steps
    waiting = list(traffic.requests)
    arrivals, cancels = iter(traffic.arrivals), iter(traffic.cancels)
    idle_turns: dict[str, int] = {}  # since a row was last stepped
    idle_prefills: dict[str, int] = {}  # since a prefilling row last advanced
    while waiting or not scheduler.idle:
        for _ in range(next(arrivals, 4)):
            if waiting and scheduler.offer(waiting[0]):
                waiting.pop(0)
        assert len(scheduler._pending) <= limits.max_pending
        victim = next(cancels, None)
        if victim is not None:
            scheduler.cancel(f"r{victim}")
        turn = bench.turn()
        assert len(scheduler._active) + len(scheduler._prefilling) == bench.lane.open_rows <= limits.max_rows
        for seen, queue, moved, bound in (
            (idle_turns, scheduler._active, turn.stepped, math.ceil(limits.max_rows / limits.capacity)),
            (idle_prefills, scheduler._prefilling, [name for name, _ in turn.prefill], 2 * limits.max_rows),
        ):
            for job in queue:
                name = job.request.request_id
                seen[name] = 0 if name in moved else seen.get(name, 0) + 1
                assert seen[name] <= bound, "starved"
        assert len(bench.turns) < 3000
    bench.drain()
    return bench


def check_events(bench: Bench, request: Request) -> None:
    """25 and 28: one end, in order, and the tokens are the result."""
    events = bench.of(request.request_id)
    assert [is_last(event) for event in events] == [False] * (len(events) - 1) + [True]
    kinds = names(events)
    if kinds in (["request_error"], ["generation_result"]):
        return
    assert kinds == ["request_started", *["token"] * (len(kinds) - 2), "generation_result"]
    tokens = [event for event in events if isinstance(event, Token)]
    ids: list[int] = []
    text = ""
    for token in tokens:
        assert token.token_ids or token.delta
        ids += token.token_ids
        text += token.delta
        assert token.generated_tokens == len(ids)
        assert token.text.replace("<s>", "") == letters(ids)
        assert letters(ids).startswith(text)
    last = events[-1]
    assert len(ids) <= request.max_new_tokens
    if isinstance(last, GenerationResult):
        assert list(last.token_ids) == ids and last.text == text
        assert all(stop not in last.text for stop in request.stop)
        assert (last.stop_string is not None) == (last.stop_reason == "stop_string")
    else:
        assert last.generated_tokens == len(ids) and (last.text or "") == text  # type: ignore[attr-defined]
    last.to_json()


@settings(max_examples=200, deadline=None)
@given(traffic())
def test_random_traffic_keeps_the_invariants(traffic: Traffic) -> None:
    bench = play(traffic)
    for request in traffic.requests:
        check_events(bench, request)
    summary = bench.scheduler.summary()
    assert summary.finished_requests + summary.failed_requests + summary.rejected_requests == len(traffic.requests)
    generated = [event.to_dict().get("generated_tokens", 0) for event in bench.events if is_last(event)]
    assert summary.generated_tokens == sum(generated)
    assert summary.peak_active_requests <= bench.limits.max_rows
    assert summary.prompt_tokens == sum(len(range(traffic.scripts[name].prompt)) for name in started(bench.events))
    summary.to_json()


@settings(max_examples=100, deadline=None)
@given(traffic())
def test_company_changes_nothing(traffic: Traffic) -> None:
    """1 and 29: who finishes does so with the same ids as alone, whatever befalls the others."""
    bench = play(traffic)
    for request in traffic.requests:
        together = bench.last(request.request_id)
        if isinstance(together, GenerationResult):
            alone = Bench({request.request_id: traffic.scripts[request.request_id]}, chunk=CHUNK)
            alone.offer(request)
            alone.drain()
            result = alone.last(request.request_id)
            assert (result.token_ids, result.text, result.stop_reason, result.stop_string) == (
                together.token_ids,
                together.text,
                together.stop_reason,
                together.stop_string,
            )


@settings(max_examples=60, deadline=None)
@given(traffic(faults=False))
def test_without_faults_everything_finishes_first_come_first_admitted(traffic: Traffic) -> None:
    bench = play(traffic)
    opened = [row.request.request_id for row in bench.lane.rows]
    assert opened == [request.request_id for request in traffic.requests]
    assert all(isinstance(bench.last(name), GenerationResult) for name in opened)
    assert not bench.logged


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.lists(st.integers(1, CHUNK), min_size=1, max_size=3))
def test_a_stream_of_newcomers_cannot_starve_a_long_prompt(rows: int, tokens: int, sizes: list[int]) -> None:
    """27 at its worst: a newcomer that takes the whole budget and leaves, every turn."""
    scripts = {"long": Script(prompt=4 * CHUNK)}
    bench = Bench(scripts, chunk=CHUNK, max_rows=rows, max_pending=1)
    bench.offer(make_request("long"))
    for turn in range(40 * rows):
        scripts[f"n{turn}"] = bench.lane.scripts[f"n{turn}"] = Script(prompt=[CHUNK, *sizes][turn % (len(sizes) + 1)])
        bench.scheduler.offer(make_request(f"n{turn}", tokens=tokens))
        bench.turn()
    assert "long" in started(bench.events)
    bench.drain()
