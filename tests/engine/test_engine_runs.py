"""Runs of many requests: one last event for each, one summary, whatever ends the run or its source."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_fakes import FakeLane, Script, is_last, make_request, names, too_long
from engine_running import PATIENCE, Gate, aside, finish, running

from polytoken.engine import SchedulerLimits
from polytoken.engine.handle import Submission
from polytoken.errors import CancelledError, EngineError, PolytokenError, UsageError
from polytoken.events import Event, GenerationResult, InferenceSummary, RequestRejected, RequestStarted
from polytoken.lanes.base import Commit
from polytoken.request import Request


def test_run_ends_with_its_own_summary_and_can_be_repeated() -> None:
    with running(FakeLane()) as engine:
        for turn in range(2):
            requests: list[Request | RequestRejected] = [make_request(f"{turn}{name}") for name in "abc"]
            requests.insert(1, RequestRejected(line=2, code="bad_json", error="no"))
            events = finish(engine.run(requests))
            summary = events[-1]
            assert isinstance(summary, InferenceSummary) and not summary.interrupted
            assert (summary.finished_requests, summary.rejected_requests, summary.generated_tokens) == (3, 1, 9)
            assert sum(map(is_last, events)) == 4 and sum(isinstance(e, InferenceSummary) for e in events) == 1


def test_a_summary_counts_the_requests_of_its_run_and_no_others() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane) as engine:
        others: list[Any] = []
        engine.submit(make_request("before", tokens=40), others.append)
        gate.wait()
        events = engine.run([make_request("mine", tokens=5), make_request("mine")])
        gate.open.set()
        seen = [next(events)]
        engine.submit(make_request("meanwhile", tokens=2), others.append)
        with aside(lambda: engine.generate(make_request("beside", tokens=7))) as beside:
            beside()
        seen += list(events)
        summary = seen[-1]
        assert isinstance(summary, InferenceSummary)
        assert (summary.finished_requests, summary.failed_requests, summary.rejected_requests) == (1, 0, 1)
        assert (summary.generated_tokens, summary.forwards, summary.peak_active_requests) == (5, 5, 1)
        prompts = [event.prompt_tokens for event in seen if isinstance(event, RequestStarted)]
        assert summary.prompt_tokens == sum(prompts)
        engine.close(drain=True)
    assert sum(map(is_last, others)) == 2


def test_an_empty_run_is_a_summary() -> None:
    with running(FakeLane()) as engine:
        assert names(finish(engine.run([]))) == ["inference_summary"]


def test_one_run_at_a_time() -> None:
    with running(FakeLane()) as engine:
        first = engine.run([make_request("a")])
        next(first)
        with pytest.raises(UsageError):
            next(engine.run([]))
        finish(first)
        assert len(finish(engine.run([make_request("b")]))) == 6


def test_back_pressure_blocks_a_fast_reader() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    taken: list[int] = []

    def source() -> Iterator[Request]:
        for number in range(100):
            taken.append(number)
            yield make_request(f"{number}", tokens=1)

    with running(lane, max_rows=1, max_pending=3) as engine:
        events = engine.run(source())
        with aside(lambda: finish(events)) as result:
            gate.wait()
            full = threading.Event()
            while len(engine._inbox.items()) < 3:  # the reader is filling it
                full.wait(0.001)
            # 1 active, 3 pending or 2 with the one on its way, 3 in the queue, 1 in the reader's hand, at most
            assert len(taken) <= 8
            gate.open.set()
            assert sum(map(is_last, result())) == 100
    assert len(taken) == 100


def test_a_consumer_that_lags_holds_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytoken.engine.intake.UNREAD_EVENTS", 60)
    taken: list[int] = []

    def source() -> Iterator[Request]:
        for number in range(200):
            taken.append(number)
            yield make_request(f"{number}", tokens=1)  # three events each

    with running(FakeLane(), max_rows=1, max_pending=2) as engine:
        events = engine.run(source())
        next(events)
        while not engine.call(lambda _: not engine._open and len(taken) > 20):
            pass
        assert len(taken) < 40
        assert sum(map(is_last, events)) == 200


def test_stop_at_the_first_error_when_asked() -> None:
    requests: list[Request | RequestRejected] = [make_request("a", tokens=50)]
    requests += [RequestRejected(line=2, code="bad_json", error="no")]
    requests += [make_request(f"later {number}", tokens=50) for number in range(50)]
    with running(FakeLane()) as engine:
        events = finish(engine.run(requests, continue_on_error=False))
        summary = events[-1]
        assert isinstance(summary, InferenceSummary) and not summary.interrupted
        codes = [event.to_dict()["code"] for event in events if "code" in event.to_dict()]
        assert codes[0] == "bad_json" and set(codes[1:]) == {"stopped_on_error"}
        assert engine.generate(make_request("next")).status == "finished"


def test_interrupt_drains_also_with_a_reader_that_is_stuck() -> None:
    stuck = threading.Event()
    reading = threading.Event()

    def source() -> Iterator[Request]:
        yield make_request("a", tokens=100_000)
        yield make_request("b", tokens=100_000)
        reading.set()
        stuck.wait(PATIENCE)

    with running(FakeLane()) as engine:
        events = engine.run(source())
        seen = [next(events)]
        assert reading.wait(PATIENCE)
        engine.interrupt()
        seen += events
        ends = [event.to_dict() for event in seen if is_last(event)]
        assert {end["request_id"]: end["code"] for end in ends} == {"a": "interrupted", "b": "interrupted"}
        summary = seen[-1]
        assert isinstance(summary, InferenceSummary) and summary.interrupted and summary.failed_requests == 2
        stuck.set()
        assert engine.generate(make_request("c")).status == "finished"


def test_ctrl_c_while_waiting_is_an_interrupt_and_goes_on_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = FakeLane()
    with running(lane) as engine:
        real, calls = engine._next, iter(range(1000))

        def pressed(outbox: Any) -> Any:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return real(outbox)

        monkeypatch.setattr(engine, "_next", pressed)
        seen: list[Event] = []
        with pytest.raises(KeyboardInterrupt):
            for event in engine.run([make_request(name, tokens=100_000) for name in "abcdef"]):
                seen.append(event)
        assert sum(map(is_last, seen)) == 6 and isinstance(seen[-1], InferenceSummary) and seen[-1].interrupted


def test_the_owner_thread_may_interrupt_a_run() -> None:
    lane = FakeLane()
    with running(lane) as engine:
        lane.before_step = lambda ids: engine.interrupt() if len(lane.cohorts) == 5 else None
        seen = finish(engine.run([make_request(name, tokens=100_000) for name in "abcdef"]))
        assert {event.to_dict()["code"] for event in seen if is_last(event)} == {"interrupted"}
        assert isinstance(seen[-1], InferenceSummary) and seen[-1].failed_requests == 6


def test_what_was_read_for_a_run_that_was_left_is_dropped() -> None:
    """A reader may post its last item just after the run was left; no later run may see it."""
    lane = FakeLane()
    with running(lane) as engine:
        run = engine.run([make_request("a")])
        next(run)
        intake = engine._intake
        run.close()  # type: ignore[attr-defined]
        for item in (make_request("ghost"), RequestRejected(line=1, code="bad_json", error="ghost")):
            handle = engine._handle("ghost", print)
            engine._inbox.put(Submission(item, handle, None, intake), wait=True)
        summary = finish(engine.run([make_request("b")]))[-1]
        assert isinstance(summary, InferenceSummary) and summary.rejected_requests == 0
        assert [row.request.request_id for row in lane.rows] == ["a", "b"]


def test_leaving_a_run_early_ends_its_requests() -> None:
    lane = FakeLane()
    with running(lane, max_pending=2) as engine:
        run = engine.run(make_request(f"{number}", tokens=100_000) for number in range(1000))
        next(run)
        run.close()  # type: ignore[attr-defined]
        engine.call(lambda _: None)
        assert lane.open_rows == 0
        events = finish(engine.run([make_request("next")]))
        assert names(events)[-2:] == ["generation_result", "inference_summary"]
        assert {event.to_dict().get("request_id") for event in events} == {"next", None}


def test_closing_the_engine_under_a_run_ends_it() -> None:
    lane = FakeLane()
    with running(lane) as engine:
        events = engine.run([make_request(name, tokens=100_000) for name in "abcdef"])
        seen = [next(events)]
        engine.close()
        with pytest.raises(EngineError):
            for event in events:
                seen.append(event)
        assert sum(map(is_last, seen)) == 6


def test_a_source_that_breaks_is_one_error_and_the_rest_is_served() -> None:
    def source() -> Iterator[Request]:
        yield make_request("a")
        raise RuntimeError("gone")

    with running(FakeLane()) as engine:
        events = finish(engine.run(source()))
        assert [event.to_dict().get("code") for event in events if is_last(event)].count("unreadable_input") == 1
        assert isinstance(events[-1], InferenceSummary) and events[-1].finished_requests == 1


@pytest.mark.parametrize("item", ["x", None, 3, {"request_id": "x"}])
def test_an_item_that_is_no_request_is_one_error_and_the_run_goes_on(item: Any) -> None:
    with running(FakeLane()) as engine:
        events = finish(engine.run([make_request("a"), item, make_request("b")]))
        errors = [event.code for event in events if isinstance(event, RequestRejected)]
        assert errors == ["bad_record"]
        summary = events[-1]
        assert isinstance(summary, InferenceSummary)
        assert (summary.finished_requests, summary.rejected_requests) == (2, 1)


@pytest.mark.parametrize("fault", [RuntimeError("gone"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_a_source_is_one_error_and_a_summary(fault: BaseException) -> None:
    def source() -> Iterator[Request]:
        yield make_request("a")
        raise fault

    with running(FakeLane()) as engine:
        events = finish(engine.run(source()))
        assert [event.code for event in events if isinstance(event, RequestRejected)] == ["unreadable_input"]
        summary = events[-1]
        assert isinstance(summary, InferenceSummary)
        assert (summary.finished_requests, summary.rejected_requests) == (1, 1)


def test_a_source_that_is_no_iterable_is_one_error() -> None:
    with running(FakeLane()) as engine:
        events = finish(engine.run(3))  # type: ignore[arg-type]
        assert names(events) == ["request_error", "inference_summary"]


@pytest.mark.parametrize("end", ["leave", "interrupt", "stop_on_error"])
def test_ending_a_run_early_leaves_the_requests_of_others_alone(end: str) -> None:
    lane = FakeLane()
    gate = Gate(lane)
    others: list[list[Any]] = [[] for _ in range(3)]
    with running(lane, max_rows=2, max_pending=2) as engine:
        engine.submit(make_request("0", tokens=9), others[0].append)
        gate.wait()
        lines: list[Request | RequestRejected] = [make_request(f"run {n}", tokens=100_000) for n in range(9)]
        if end == "stop_on_error":
            lines.insert(0, RequestRejected(line=1, code="bad_json", error="no"))
        gate.open.set()
        run = engine.run(lines, continue_on_error=end != "stop_on_error")
        seen = [next(run)]
        for number in (1, 2):  # queued behind the run's
            threading.Thread(
                target=engine.submit, args=(make_request(f"{number}", tokens=9), others[number].append)
            ).start()
        if end == "leave":
            run.close()  # type: ignore[attr-defined]
        else:
            if end == "interrupt":
                engine.interrupt()
            seen += run
            assert isinstance(seen[-1], InferenceSummary) and seen[-1].interrupted == (end == "interrupt")
        waited = threading.Event()
        for _ in range(1000):
            if all(events and is_last(events[-1]) for events in others):
                break
            waited.wait(PATIENCE / 1000)
        assert [events[-1].status for events in others] == ["finished"] * 3
        assert engine.generate(make_request("next")).status == "finished"


def test_ids_are_remembered_for_a_run_and_otherwise_within_bounds() -> None:
    assert SchedulerLimits().remembered_ids == 100_000
    ids = "abcda"
    with running(FakeLane(), remembered_ids=1, max_rows=1) as engine:
        events = finish(engine.run([make_request(name) for name in ids]))
        assert [event.code for event in events if isinstance(event, RequestRejected)] == ["duplicate_id"]
        for name in "abab":
            engine.generate(make_request(name))


@pytest.mark.parametrize("name", ["generate", "stream", "run"])
def test_waiting_calls_from_a_sink_are_refused(name: str) -> None:
    codes: list[str] = []

    with running(FakeLane()) as engine:

        def sink(event: Event) -> None:
            with pytest.raises(UsageError) as caught:
                if name == "generate":
                    engine.generate(make_request("inner"))
                elif name == "stream":
                    next(engine.stream(make_request("inner")))
                else:
                    next(engine.run([make_request("inner")]))
            codes.append(caught.value.code)

        engine.submit(make_request("outer"), sink)
        engine.close(drain=True)
    assert codes and set(codes) == {"wrong_thread"}


def test_interrupt_without_a_run_fails_what_is_open_and_goes_on() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane) as engine:
        with aside(lambda: engine.generate(make_request("a", tokens=1000))) as result:
            gate.wait()
            engine.interrupt()
            gate.open.set()
            with pytest.raises(CancelledError) as caught:
                result()
            assert caught.value.code == "interrupted"
        assert engine.generate(make_request("b")).status == "finished"


def test_200_mixed_requests_with_10_bad_ones() -> None:
    """Show of issue 2: 190 results as if alone, 10 errors with line or id and code, nothing left behind."""
    scripts: dict[str, Script] = {}
    items: list[Request | RequestRejected] = []
    for number in range(200):
        name = f"r{number}"
        scripts[name] = Script(prompt=1 + number * 37 % 700)
        request = make_request(name, tokens=1 + number % 13, seed=number, stop=("q",) if number % 3 else ())
        items.append(request)
        if number % 20 == 7:
            if number % 40 == 7:
                items[-1] = RequestRejected(line=number + 1, code="bad_json", error="no")
            else:
                scripts[name] = Script(open_error=too_long())
    lane = FakeLane(scripts)
    with running(lane, rows_per_step=3, max_pending=8) as engine:
        events = finish(engine.run(items))
    results = {event.request_id: event for event in events if isinstance(event, GenerationResult)}
    errors = [event for event in events if isinstance(event, RequestRejected)]
    assert len(results) == 190 and len(errors) == 10
    assert all(error.code and (error.line or error.request_id) for error in errors)
    solo = FakeLane(scripts)
    with running(solo) as engine:
        for item in items:
            if isinstance(item, Request) and item.request_id in results:
                alone = engine.generate(item)
                together = results[item.request_id]
                assert (alone.token_ids, alone.text, alone.stop_reason) == (
                    together.token_ids,
                    together.text,
                    together.stop_reason,
                )
    assert not engine._open


def test_a23_neighbours_that_join_leave_and_fail_change_nothing() -> None:
    lane = FakeLane({"bad": Script(commits=[Commit(token_ids=(1,)), ValueError("processor is None")])})
    with running(lane) as engine, ThreadPoolExecutor(8) as pool:
        kinds = [("greedy", {}), ("seeded", {"seed": 7}), ("stop", {"stop": ("q",)})]

        def one(number: int) -> Any:
            kind, options = kinds[number % 3]
            if number % 10 == 9:
                events = engine.stream(make_request(f"left {number}", tokens=50))
                next(events)
                events.close()  # type: ignore[attr-defined]
                return None
            return kind, engine.generate(make_request(f"{number}", tokens=6, **options)).token_ids

        with pytest.raises(PolytokenError):
            engine.generate(make_request("bad"))
        results = [result for result in pool.map(one, range(50)) if result]
    assert len(set(results)) == 3
