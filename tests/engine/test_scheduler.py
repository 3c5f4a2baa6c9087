"""The scheduler's turn, its endings and its measurements, on a scripted lane."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from engine_fakes import (
    Bench,
    FakeClock,
    Script,
    is_last,
    make_request,
    names,
    started,
    too_long,
)

from polytoken.engine import SchedulerLimits
from polytoken.errors import NonFiniteError, UsageError
from polytoken.events import RequestRejected, TokenLogprob
from polytoken.lanes.base import Commit
from polytoken.request import SamplingParams


def test_trace_of_the_spec() -> None:
    bench = Bench(
        {"A": Script(prompt=600), "B": Script(prompt=10), "C": Script(prompt=300)}, max_rows=4, rows_per_step=2
    )
    bench.offer(make_request("A", tokens=3), make_request("B", tokens=4), make_request("C", tokens=2))
    bench.drain()
    assert [str(turn) for turn in bench.turns] == [
        "A256 | -",
        "B10 | B",
        "C256 | B",
        "A256 | B",
        "C44 A88 | B C",
        "- | A C",
        "- | A",
        "- | A",
    ]


def test_a_full_hit_costs_nothing_and_starts_at_once() -> None:
    bench = Bench({"hit": Script(prompt=500, cached=500)})
    bench.offer(make_request("hit"))
    turn = bench.turn()
    assert (turn.prefill, turn.stepped) == ([("hit", 0)], ["hit"])
    bench.drain()
    assert bench.last("hit").prefix_cache_tokens == 500


def test_events_in_order_and_their_numbers() -> None:
    clock = FakeClock()
    bench = Bench({"a": Script(prompt=10)}, clock=clock)
    steps = iter([2.0, 3.0, 5.0])

    def pass_time(_: list[str]) -> None:
        clock.now += next(steps)

    bench.lane.before_step = pass_time
    clock.now = 104.0
    bench.offer(make_request("a", tokens=3, seed=9))
    bench.drain()
    assert names(bench.of("a")) == ["request_started", "token", "token", "token", "generation_result"]
    result = bench.last("a").to_dict()
    assert result["status"] == "finished" and result["seed"] == 9 and result["thinking"] == "on"
    assert (result["checkpoint"], result["step"], result["lane"]) == ("fake", 5, "ar")
    assert result["queue_seconds"] == 4.0 and result["prefill_seconds"] == 0.0
    assert result["ttft_seconds"] == 6.0 and result["elapsed_seconds"] == 14.0
    assert result["decode_tokens_per_second"] == 2 / 8
    assert (result["generated_tokens"], result["forwards"], result["tokens_per_forward"]) == (3, 3, 1.0)
    assert (result["prefix_cache_hits"], result["mlx_peak_memory_bytes"]) == (3, 7)
    summary = bench.scheduler.summary()
    assert (summary.elapsed_seconds, summary.decode_scheduler_seconds) == (14.0, 10.0)
    assert (summary.finished_requests, summary.generated_tokens, summary.prompt_tokens) == (1, 3, 10)
    assert summary.generated_tokens_per_second == 3 / 14 and summary.peak_active_requests == 1
    assert summary.prefix_cache_hits == 0, "a run counts its own hits, not those of the lane's life"
    assert summary.extra == {"open_rows": 0} and bench.lane.settled == 1
    summary.to_json()


def test_prefill_seconds_add_up_over_the_steps() -> None:
    bench = Bench({"a": Script(prompt=700)}, clock=FakeClock(tick=1.0))
    bench.offer(make_request("a"))
    bench.drain()
    assert bench.of("a")[0].prefill_seconds == 3.0  # type: ignore[attr-defined]


def test_rates_that_cannot_be_known_are_absent() -> None:
    bench = Bench({"one": Script(commits=[Commit(token_ids=(1, 2, 3), stop_reason="eos")])})
    bench.offer(make_request("one", tokens=9))
    bench.drain()
    assert "decode_tokens_per_second" not in bench.last("one").to_dict()
    none = Bench({"none": Script(commits=[Commit(token_ids=(), stop_reason="max_denoising_steps")])})
    none.offer(make_request("none"))
    none.drain()
    assert none.last("none").to_dict()["ttft_seconds"] is None
    assert names(none.of("none")) == ["request_started", "generation_result"]


def test_lane_details_add_up_and_the_canvas_lane_reports_its_denoises() -> None:
    commits: list[Commit | Exception] = [
        Commit(token_ids=(), detail={"jumps": 0, "mode": "think"}),
        Commit(token_ids=(1, 2), detail={"jumps": 1, "mode": "write"}),
        Commit(token_ids=(3,), stop_reason="eos", detail={"jumps": True}),
    ]
    bench = Bench({"a": Script(commits=commits)}, name="canvas", clock=FakeClock(tick=0.5))
    bench.offer(make_request("a", tokens=8))
    bench.drain()
    assert names(bench.of("a")) == ["request_started", "first_denoise", "token", "token", "generation_result"]
    tokens = [event.to_dict() for event in bench.of("a") if event.event == "token"]
    assert [(token["token_ids"], token["denoise_steps"]) for token in tokens] == [([1, 2], 2), ([3], 3)]
    result = bench.last("a").to_dict()
    assert (result["jumps"], result["mode"], result["denoise_steps"], result["forwards"]) == (2, "write", 3, 3)
    assert result["ttfd_seconds"] > 0 and result["denoise_steps_per_second"] > 0


# D02: a stop inside the budget beats the length cap, and never more than the cap comes out.
@pytest.mark.parametrize(
    ("commit", "stop", "cap", "ids", "reason"),
    [
        (Commit(token_ids=(10, 11, 0), stop_reason="eos"), (), 5, (10, 11, 0), "eos"),
        (Commit(token_ids=(10, 11, 0), stop_reason="eos"), (), 3, (10, 11, 0), "eos"),
        (Commit(token_ids=(10, 11, 0), stop_reason="eos"), (), 2, (10, 11), "max_new_tokens"),
        (Commit(token_ids=(10, 11, 12, 20, 21, 22)), (), 5, (10, 11, 12, 20, 21), "max_new_tokens"),
        (Commit(token_ids=(10, 11, 12, 20, 21, 22)), ("l",), 5, (10, 11, 12), "stop_string"),
        (Commit(token_ids=(10, 11, 12, 20, 21, 22)), ("l",), 3, (10, 11, 12), "stop_string"),
        (Commit(token_ids=(10, 11, 12, 20, 21, 22)), ("l",), 2, (10, 11), "max_new_tokens"),
        (Commit(token_ids=(10, 11, 12, 0), stop_reason="eos"), ("kl",), 9, (10, 11, 12), "stop_string"),
        (Commit(token_ids=(10, 11), stop_reason="max_new_tokens"), ("k",), 2, (10, 11), "stop_string"),
    ],
)
def test_d02_first_stop_wins(
    commit: Commit, stop: tuple[str, ...], cap: int, ids: tuple[int, ...], reason: str
) -> None:
    bench = Bench({"a": Script(commits=[commit])})
    bench.offer(make_request("a", tokens=cap, stop=stop))
    bench.drain()
    result = bench.last("a")
    assert (result.token_ids, result.stop_reason) == (ids, reason)
    assert len(result.token_ids) <= cap
    assert result.stop_string == (stop[0] if reason == "stop_string" else None)
    token = bench.of("a")[1].to_dict()
    assert token["token_ids"] == list(ids) and token["delta"] == result.text
    assert not stop or reason != "stop_string" or stop[0] not in result.text


def test_held_back_text_comes_with_the_last_token() -> None:
    bench = Bench({"a": Script(commits=[Commit(token_ids=(1, 2)), Commit(token_ids=(3, 0), stop_reason="eos")])})
    bench.offer(make_request("a", tokens=9))
    bench.drain()
    deltas = [event.to_dict()["delta"] for event in bench.of("a") if event.event == "token"]
    assert deltas == ["a", "bc"]
    assert bench.of("a")[2].to_dict()["text"] == "abc<s>" and bench.last("a").text == "abc"


def test_held_back_text_comes_out_also_after_an_empty_last_commit() -> None:
    bench = Bench({"a": Script(commits=[Commit(token_ids=(1, 2)), Commit(token_ids=(), stop_reason="watchdog")])})
    bench.offer(make_request("a", tokens=9))
    bench.drain()
    last = bench.of("a")[-2].to_dict()
    assert (last["event"], last["token_ids"], last["delta"]) == ("token", [], "b")


def test_logprobs_are_cut_with_the_ids() -> None:
    logprobs = tuple(TokenLogprob(token_id=token_id, logprob=-1.0) for token_id in (1, 2, 3))
    bench = Bench({"a": Script(commits=[Commit(token_ids=(1, 2, 3), logprobs=logprobs)])})
    bench.offer(make_request("a", tokens=2, sampling=SamplingParams(logprobs=0)))
    bench.drain()
    assert [item.token_id for item in bench.last("a").logprobs] == [1, 2]


def test_token_events_may_be_left_out_per_scheduler_and_per_request() -> None:
    bench = Bench(token_events=False)
    bench.offer(make_request("quiet"))
    assert bench.scheduler.offer(make_request("loud"), token_events=True)
    bench.drain()
    assert names(bench.of("quiet")) == ["request_started", "generation_result"]
    assert len(bench.of("loud")) == 5
    assert bench.last("quiet").text


def test_pending_is_bounded_and_full_means_nothing_done() -> None:
    bench = Bench(max_pending=2, max_rows=1)
    assert [bench.scheduler.offer(make_request(name)) for name in "abc"] == [True, True, False]
    assert not bench.events
    bench.turn()
    assert bench.scheduler.offer(make_request("c"))
    bench.drain()
    assert started(bench.events) == ["a", "b", "c"]


def test_a_taken_id_is_refused_for_the_life_of_the_scheduler() -> None:
    bench = Bench({"bad": Script(open_error=too_long())})
    own: list[Any] = []
    bench.offer(make_request("a"), make_request("bad"))
    assert bench.scheduler.offer(make_request("a"), sink=own.append)
    bench.drain()
    for name in ("a", "bad"):
        assert bench.scheduler.offer(make_request(name), sink=own.append)
    assert [(event.code, event.request_id) for event in own] == [
        ("duplicate_id", "a"),
        ("duplicate_id", "a"),
        ("duplicate_id", "bad"),
    ]
    assert bench.last("a").status == "finished" and bench.scheduler.idle
    assert bench.scheduler.totals.rejected == 4


def test_a_server_may_bound_the_ids_it_remembers() -> None:
    bench = Bench(remembered_ids=2)
    for name in "abc":
        bench.offer(make_request(name))
        bench.drain()
    for name in "bca":
        bench.offer(make_request(name))
    bench.drain()
    assert [event.to_dict()["request_id"] for event in bench.events if isinstance(event, RequestRejected)] == ["b", "c"]
    assert len(bench.scheduler._taken) <= 3 and len(bench.scheduler._ended) <= 2


def test_rejected_lines_are_passed_on_and_counted_but_take_no_id() -> None:
    bench = Bench()
    bench.scheduler.reject(RequestRejected(line=3, request_id="a", code="bad_json", error="no"))
    bench.offer(make_request("a"))
    bench.drain()
    assert bench.last("a").status == "finished" and bench.scheduler.totals.rejected == 1


@pytest.mark.parametrize(
    ("script", "code", "field_name"),
    [
        (Script(encode_error=too_long()), "too_long", "max_new_tokens"),
        (Script(open_error=too_long()), "too_long", "max_new_tokens"),
        (Script(open_error=KeyError("odd\nlines")), "internal", None),
        (Script(prompt=600, prefill_error=NonFiniteError("NaN"), prefill_error_at=300), "non_finite", None),
        (Script(prefill_error=ZeroDivisionError()), "internal", None),
    ],
)
def test_what_fails_before_the_row_is_active_is_a_request_error(
    script: Script, code: str, field_name: str | None
) -> None:
    bench = Bench({"bad": script})
    bench.offer(make_request("a"), make_request("bad"), make_request("b"))
    bench.drain()
    (event,) = bench.of("bad")
    assert isinstance(event, RequestRejected)
    assert (event.code, event.field_name) == (code, field_name) and "\n" not in event.error
    assert bool(bench.logged) == (code == "internal")
    assert [bench.last(name).status for name in "ab"] == ["finished", "finished"]


def test_a_row_that_fails_in_its_step_fails_alone_and_is_closed() -> None:
    bench = Bench({"bad": Script(commits=[Commit(token_ids=(1, 2)), NonFiniteError("NaN in logits")])})
    bench.offer(make_request("a"), make_request("bad", tokens=9), make_request("b"))
    bench.drain()
    failed = bench.last("bad").to_dict()
    assert failed["status"] == "failed" and failed["code"] == "non_finite" and failed["error"] == "NaN in logits"
    assert failed["generated_tokens"] == 2 and failed["text"] == "a"
    assert [row.kept for row in bench.lane.rows] == [True, False, True]
    assert [bench.last(name).status for name in "ab"] == ["finished", "finished"]


def test_an_error_of_the_whole_step_fails_its_cohort_only() -> None:
    bench = Bench(rows_per_step=2)
    bench.lane.step_error = lambda ids: ValueError("shared") if "b" in ids else None
    bench.offer(*(make_request(name) for name in "abcd"))
    bench.drain()
    status = {name: bench.last(name).status for name in "abcd"}
    assert status["b"] == "failed" and sorted(status.values()) == ["failed", "failed", "finished", "finished"]
    assert bench.last("b").error == "ValueError: shared" and "Traceback" in bench.logged[0]


@pytest.mark.parametrize("results", [[], [None], [Commit(token_ids=(1,)), Commit(token_ids=(1,))]])
def test_a_lane_that_breaks_its_contract_fails_the_request(results: Any) -> None:
    bench = Bench()
    bench.lane.step = lambda rows: results  # type: ignore[method-assign]
    bench.offer(make_request("a"))
    bench.drain()
    assert bench.last("a").code == "internal"


def test_a_prefill_that_makes_no_progress_fails_rather_than_spin() -> None:
    bench = Bench({"a": Script(prompt=5, cached=5)})
    bench.lane.prefill_step = lambda row: False  # type: ignore[method-assign]
    bench.offer(make_request("a"))
    bench.drain(limit=3)
    assert bench.last("a").code == "internal"


def test_a_close_that_fails_does_not_spoil_the_result() -> None:
    bench = Bench({"a": Script(close_error=OSError("disk"))})
    bench.offer(make_request("a"))
    bench.drain()
    assert bench.last("a").status == "finished" and "disk" in bench.logged[0]


@pytest.mark.parametrize("prompt", [255, 256, 257, 2560])
def test_a25_no_prompt_waits_for_ever(prompt: int) -> None:
    bench = Bench({"a": Script(prompt=prompt)}, prefill_budget=256)
    bench.offer(make_request("a"))
    bench.drain(limit=20)
    assert bench.last("a").status == "finished"


def test_a25_a_chunk_above_the_budget_is_refused_with_the_limit() -> None:
    bench = Bench({"big": Script(prompt=300)}, chunk=512, prefill_budget=256)
    bench.offer(make_request("big"), make_request("small"))
    bench.drain(limit=10)
    assert bench.last("big").code == "prefill_budget" and "256" in bench.last("big").error
    assert bench.last("small").status == "finished"


def test_the_memory_of_a_failed_row_goes_before_the_next_turn() -> None:
    bench = Bench({"bad": Script(commits=[Commit(token_ids=(1,))])})
    bench.offer(make_request("bad", tokens=9), make_request("a", tokens=9))

    class Array:
        pass

    kept: list[weakref.ref[Array]] = []

    def fail(ids: list[str]) -> None:
        array = Array()
        kept.append(weakref.ref(array))
        raise ValueError("the frame that failed holds an array")

    gc.disable()
    try:
        bench.lane.before_step = fail
        bench.turn()
        bench.lane.rows.clear()
        assert bench.last("bad").status == "failed" and kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("turns", range(6))
def test_cancel_at_every_point(turns: int) -> None:
    # 0: pending, 1 and 2: prefilling, then active, and at last done.
    bench = Bench({"a": Script(prompt=600)})
    bench.offer(make_request("a", tokens=2), make_request("b", tokens=1))
    for _ in range(turns):
        bench.turn()
    done = any(is_last(event) for event in bench.of("a"))
    assert bench.scheduler.cancel("a") is not done
    assert bench.lane.open_rows == sum(row.request.request_id == "b" and not row.closed for row in bench.lane.rows)
    if not done:
        assert (bench.last("a").status, bench.last("a").code) == ("failed", "cancelled")
    assert not bench.scheduler.cancel("a") and not bench.scheduler.cancel("unknown")
    bench.drain()
    assert sum(map(is_last, bench.of("a"))) == 1 and bench.last("b").status == "finished"


def test_cancel_from_a_sink_takes_effect_within_the_turn() -> None:
    bench = Bench()
    seen: list[Any] = []

    def sink(event: Any) -> None:
        seen.append(event)
        if event.event == "token":
            assert bench.scheduler.cancel("a") and bench.scheduler.cancel("b")

    bench.scheduler.offer(make_request("a", tokens=9), sink=sink)
    bench.offer(make_request("b", tokens=9))
    bench.drain(limit=1)
    assert names(seen) == ["request_started", "token", "generation_result"] and seen[-1].code == "cancelled"
    assert bench.last("b").code == "cancelled"


def test_interrupt_fails_what_is_open_and_what_still_comes() -> None:
    bench = Bench({"long": Script(prompt=900)}, max_rows=2, max_pending=9)
    bench.offer(make_request("a", tokens=9))
    bench.turn()
    bench.offer(make_request("long"), make_request("waits"))
    bench.turn()
    bench.scheduler.interrupt()
    bench.offer(make_request("late"))
    assert bench.scheduler.idle and bench.lane.open_rows == 0
    assert {bench.last(name).code for name in ("a", "long", "waits", "late")} == {"interrupted"}
    summary = bench.scheduler.summary()
    assert summary.interrupted and summary.failed_requests == 4 and summary.generated_tokens == 2
    bench.scheduler.begin_run()
    bench.offer(make_request("next"))
    bench.drain()
    assert bench.last("next").status == "finished" and not bench.scheduler.summary().interrupted


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("max_rows", "--batch-size"),
        ("rows_per_step", "--max-batch-tokens"),
        ("max_pending", "--max-queue-size"),
        ("prefill_budget", "--prefill-chunk-size"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
def test_limits_name_their_flag(name: str, flag: str, value: Any) -> None:
    with pytest.raises(UsageError, match=flag) as caught:
        SchedulerLimits(**{name: value})
    assert caught.value.field == flag
