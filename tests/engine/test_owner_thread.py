"""The engine: one owner thread, many callers; nobody hangs, whatever ends."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from engine_fakes import FakeLane, Script, is_last, loaded, make_request, names, too_long
from engine_running import PATIENCE, Gate, aside, finish, running

from polytoken.engine import Engine, SchedulerLimits
from polytoken.errors import CheckpointError, EngineError, NonFiniteError, PolytokenError, RequestError, UsageError
from polytoken.events import Event, GenerationResult

# -- life -------------------------------------------------------------------------------------------------------------


def test_loads_runs_and_frees_on_one_thread() -> None:
    lane = FakeLane()
    threads: dict[str, threading.Thread] = {}

    def note(name: str) -> None:
        threads[name] = threading.current_thread()

    def load() -> Any:
        note("load")
        return loaded(lane, release=lambda: note("release"))

    lane.before_step = lambda ids: note("step")
    with Engine(load) as engine:
        assert engine.start() is engine.loaded and engine.loaded.checkpoint == "fake"
        assert engine.sampling.temperature == 0.5
        engine.generate(make_request("a"))
        assert engine.call(lambda it: (note("call"), it.lane.name)[1]) == "ar"
    owner = threads.pop("load")
    assert owner is not threading.current_thread() and not owner.is_alive()
    assert set(threads) == {"step", "call", "release"} and set(threads.values()) == {owner}


def test_load_errors_reach_the_caller_unchanged() -> None:
    error = CheckpointError("no such thing", code="missing_file")

    def load() -> Any:
        raise error

    engine = Engine(load)
    with pytest.raises(CheckpointError) as caught:
        engine.start()
    assert caught.value is error
    with pytest.raises(EngineError):
        engine.generate(make_request("a"))
    engine.close()


def test_close_is_idempotent_and_frees_the_lane() -> None:
    lane = FakeLane()
    kept = weakref.ref(lane)
    engine = Engine(lambda lane=lane: loaded(lane))  # type: ignore[misc]
    engine.start()
    engine.generate(make_request("a"))
    del lane
    engine.close()
    gc.collect()
    assert kept() is None
    engine.close()
    for act in (lambda: engine.generate(make_request("b")), lambda: engine.cancel("a")):
        with pytest.raises(EngineError, match="closed"):
            act()


def test_an_engine_that_was_not_started_says_so() -> None:
    engine = Engine(lambda: loaded(FakeLane()))
    for act in (
        lambda: engine.loaded,
        lambda: engine.sampling,
        lambda: engine.generate(make_request("a")),
        lambda: engine.cancel("a"),
        lambda: list(engine.run([])),
    ):
        with pytest.raises(EngineError, match="not started"):
            act()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.start()


def test_close_fails_what_is_open() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane, max_rows=1, max_pending=1) as engine:
        sinks: dict[str, list[Any]] = {name: [] for name in "abc"}
        for name, events in sinks.items():
            engine.submit(make_request(name, tokens=9), events.append)
            if name == "a":
                gate.wait()
        with aside(engine.close) as closed:
            gate.open.set()
            closed()
        assert {events[-1].code for events in sinks.values()} == {"engine_closed"}
        assert all(sum(map(is_last, events)) == 1 for events in sinks.values())


def test_close_may_drain() -> None:
    lane = FakeLane()
    with running(lane, max_rows=1, max_pending=1) as engine:
        events: list[Any] = []
        for name in "abc":
            engine.submit(make_request(name, tokens=9), events.append)
        engine.close(drain=True)
        assert [event.status for event in events if is_last(event)] == ["finished"] * 3


def test_two_engines_in_one_process() -> None:
    first, second = FakeLane({"a": Script(prompt=3)}), FakeLane({"a": Script(prompt=4)})
    with running(first) as one, running(second) as two:
        results = [engine.generate(make_request("a")) for engine in (one, two, one, two)[:2]]
        assert results[0].token_ids != results[1].token_ids
        one.close()
        assert two.generate(make_request("b")).stop_reason == "max_new_tokens"


# -- one request ------------------------------------------------------------------------------------------------------


def test_generate_and_stream_agree() -> None:
    with running(FakeLane()) as engine:
        result = engine.generate(make_request("a", tokens=5, seed=3))
        events = finish(engine.stream(make_request("b", tokens=5, seed=3)))
    assert names(events) == ["request_started", *["token"] * 5, "generation_result"]
    streamed = events[-1]
    assert isinstance(streamed, GenerationResult)
    assert (streamed.token_ids, streamed.text) == (result.token_ids, result.text)
    assert "".join(event.to_dict().get("delta", "") for event in events) == result.text


@pytest.mark.parametrize(
    ("script", "kind", "code"),
    [
        (Script(open_error=too_long()), RequestError, "too_long"),
        (Script(commits=[NonFiniteError("NaN")]), NonFiniteError, "non_finite"),
        (Script(commits=[KeyError("x")]), PolytokenError, "internal"),
    ],
)
def test_generate_raises_what_went_wrong(script: Script, kind: type[PolytokenError], code: str) -> None:
    with running(FakeLane({"a": script})) as engine:
        with pytest.raises(kind) as caught:
            engine.generate(make_request("a"))
        assert caught.value.code == code
        assert engine.generate(make_request("b")).status == "finished"


def test_a21_leaving_a_stream_early_cancels_within_one_step() -> None:
    lane = FakeLane()
    with running(lane) as engine:
        for event in engine.stream(make_request("long", tokens=4000)):
            if event.event == "token":
                break
        gc.collect()
        steps = len(lane.cohorts)
        engine.call(lambda _: None)  # a full round of the owner thread, with at most one step before it
        assert len(lane.cohorts) <= steps + 1 and lane.open_rows == 0
        assert engine.generate(make_request("short")).status == "finished"
        assert lane.rows[0].kept is False


def test_a21_closing_a_stream_whose_request_still_waits_takes_it_out() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane, max_rows=1, max_pending=1) as engine:
        events: list[Any] = []
        engine.submit(make_request("runs"), events.append)
        gate.wait()
        queued = [engine.submit(make_request(name), events.append) for name in ("queued", "queued too")]
        queued[0].cancel()
        gate.open.set()
        engine.call(lambda _: None)
        assert queued[0].done
        engine.close(drain=True)
        ends = {event.request_id: event.to_dict() for event in events if is_last(event)}
        assert ends["queued"]["code"] == "cancelled" and ends["queued too"]["status"] == "finished"
        assert [row.request.request_id for row in lane.rows] == ["runs", "queued too"]


def test_cancel_by_id_says_whether_there_was_something() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane, max_rows=1, max_pending=1) as engine:
        events: list[Any] = []
        for name in "abc":
            engine.submit(make_request(name, tokens=1_000_000), events.append)
            gate.wait()
        gate.open.set()
        assert [engine.cancel(name) for name in ("a", "c", "b", "a", "never")] == [True, True, True, False, False]
    assert sorted(event.request_id for event in events if is_last(event)) == ["a", "b", "c"]


def test_a_refused_duplicate_leaves_the_first_alone() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane) as engine:
        with aside(lambda: engine.generate(make_request("a", tokens=5))) as result:
            gate.wait()
            second: list[Any] = []
            handle = engine.submit(make_request("a"), second.append)
            handle.cancel()
            gate.open.set()
            assert len(result().token_ids) == 5
        assert len(second) == 1 and handle.done


def test_a_full_queue_refuses_or_blocks() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    with running(lane, max_rows=1, max_pending=1) as engine:
        events: list[Any] = []
        for number in range(2):
            engine.submit(make_request(f"{number}"), events.append)
            gate.wait()
        engine.submit(make_request("2"), events.append, wait=False)  # the queue holds two: max(2, max_pending)
        with pytest.raises(EngineError) as caught:
            engine.submit(make_request("4"), events.append, wait=False)
        assert (caught.value.code, caught.value.http_status) == ("queue_full", 503)
        with aside(lambda: engine.submit(make_request("5"), events.append)) as handle:
            gate.open.set()
            handle()
        engine.close(drain=True)
        assert sum(map(is_last, events)) == 4


def test_a_sink_that_fails_cancels_its_own_request_only() -> None:
    lane = FakeLane()

    def sink(event: Event) -> None:
        raise BrokenPipeError

    with running(lane) as engine:
        engine.submit(make_request("bad", tokens=4000), sink)
        assert engine.generate(make_request("good", tokens=9)).status == "finished"
        engine.close(drain=True)
        assert len(lane.cohorts) < 100


def test_waiting_for_the_owner_on_the_owner_is_refused() -> None:
    with running(FakeLane()) as engine, pytest.raises(UsageError):
        engine.call(lambda _: engine.cancel("a"))


def test_call_raises_what_the_function_raises() -> None:
    def act(_: Any) -> None:
        raise TimeoutError("mine")

    with running(FakeLane()) as engine, pytest.raises(TimeoutError, match="mine"):
        engine.call(act)


# -- the owner thread dies or hangs -----------------------------------------------------------------------------------


class Crash(BaseException):
    """Not an Exception: nothing in the scheduler may swallow it."""


@pytest.mark.parametrize("where", ["step", "close"])
def test_everyone_gets_an_answer_when_the_owner_thread_dies(where: str) -> None:
    lane = FakeLane()
    gate = Gate(lane)
    crash = Crash("bang")
    if where == "step":
        lane.step_error = lambda ids: crash
    else:
        lane.scripts["0"] = Script(close_error=crash)  # type: ignore[arg-type]
    engine = Engine(lambda: loaded(lane), SchedulerLimits(max_rows=2, max_pending=1), stall_seconds=PATIENCE)
    engine.start()
    ends: list[list[Event]] = [[] for _ in range(3)]
    for number, events in enumerate(ends):
        engine.submit(make_request(f"{number}", tokens=1 if number == 0 else 9), events.append)
        gate.wait()
    with (
        aside(lambda: engine.submit(make_request("late"), ends[0].append)) as late,
        aside(lambda: engine.call(lambda _: None)) as call,
    ):
        gate.open.set()
        for waiter in (late, call):
            with pytest.raises(EngineError, match="bang"):
                waiter()
    for events in ends:
        assert sum(map(is_last, events)) == 1 and events[-1].to_dict()["code"] == "engine_stopped"
    with pytest.raises(EngineError, match="bang"):
        engine.generate(make_request("after"))
    engine.close()


def test_a_stuck_owner_is_reported() -> None:
    lane = FakeLane()
    gate = Gate(lane)
    engine = Engine(lambda: loaded(lane), stall_seconds=0.01)
    engine.start()
    with pytest.raises(EngineError) as caught:
        engine.generate(make_request("a"))
    assert caught.value.code == "engine_stalled"
    gate.open.set()
    engine._stall_seconds = PATIENCE
    engine.close()
