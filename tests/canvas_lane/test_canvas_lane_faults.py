"""Faults that other block-diffusion engines were reported for (`F..`), and rows that fail beside rows that must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from canvas_serving import SETTINGS, Served, check_events, open_lane, serve
from scripted_canvas import EOS, PROMPT, TURN_END, ScriptedCanvas, ask, encoded_ids, scripted_lane

from polytoken.checkpoint.runtime import Runtime
from polytoken.errors import RequestError
from polytoken.events import RequestRejected, Token
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.request import SamplingParams

POLICIES = ("rolling", "block")
SAY = [40, 41, 42, 43, 44, 45, 46]


def settings(policy: str, **more: Any) -> CanvasSettings:
    return CanvasSettings(policy=policy, **more)  # type: ignore[arg-type]


def record_closing(lane: CanvasLane) -> dict[str, list[int]]:
    """What each row's cache holds when it is closed."""
    held: dict[str, list[int]] = {}
    close = lane.close

    def recording(row: Any, *, keep: bool) -> None:
        held[row.request.request_id] = encoded_ids(row.cache)
        close(row, keep=keep)

    lane.close = recording  # type: ignore[method-assign]
    return held


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limit", [1, 2, 15, 16, 17, 35])
def test_f01_an_answer_is_never_rounded_up_to_canvases(policy: str, limit: int) -> None:
    answer = [40 + i % 20 for i in range(60)]
    lane = scripted_lane(ScriptedCanvas({5: answer}, sure_from=2), settings(policy))
    held = record_closing(lane)
    result = serve(lane, [ask(5, limit)]).result("r5")
    assert result.token_ids == tuple(answer[:limit]) and result.generated_tokens == limit
    assert result.stop_reason == "max_new_tokens"
    assert held["r5"][PROMPT:] == answer[: len(held["r5"]) - PROMPT] and len(held["r5"]) < PROMPT + limit


@pytest.mark.parametrize("policy", POLICIES)
def test_f02_markers_reach_the_parsers_and_not_the_text(policy: str, modilify: Runtime) -> None:
    answer = [100, 40, 41, 101, 42, 43, TURN_END]
    lane = scripted_lane(ScriptedCanvas({5: answer}, sure_from=1), settings(policy))
    served = serve(lane, [ask(5, 30)], tokenizer=modilify.tokenizer)
    result = served.result("r5")
    assert result.token_ids == tuple(answer) and result.stop_reason == "turn_end"
    last = [event for event in served.of("r5") if isinstance(event, Token)][-1]
    assert last.text == modilify.tokenizer.decode(answer)
    for marker in (100, 101, TURN_END):
        assert modilify.tokenizer.token(marker) in last.text
        assert modilify.tokenizer.token(marker) not in result.text
    assert result.text == modilify.tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 3}, {"logit_bias": ((4, 1.0),)}],
    ids=lambda changes: next(iter(changes)),
)
def test_f03_what_the_lane_cannot_do_is_refused_by_name(policy: str, changes: dict[str, Any]) -> None:
    lane = scripted_lane(ScriptedCanvas({5: SAY}), settings(policy))
    refused = serve(lane, [ask(5, 4, sampling=SamplingParams(**changes))]).failure("r5")
    assert isinstance(refused, RequestRejected)
    (name,) = changes
    assert refused.code == "unsupported" and refused.field_name == f"sampling.{name}" and name in refused.error
    with pytest.raises(RequestError) as caught:
        lane.open(ask(5, 4, sampling=SamplingParams(**changes)), [5, 50, 51, 52])
    assert caught.value.http_status == 400


@pytest.mark.parametrize("policy", POLICIES)
def test_f04_nan_at_step_3_fails_that_request_only(policy: str) -> None:
    answers = {first: [first + 20 + i for i in range(9)] for first in range(5, 9)}
    model = ScriptedCanvas(answers, poison=(6, 3))
    lane = scripted_lane(model, settings(policy, pipeline_depth=4))
    served = serve(lane, [ask(first, 9) for first in answers])
    failed = served.failure("r6")
    assert failed.code == "non_finite"
    assert model.denoises[6] == 3
    for first in (5, 7, 8):
        assert served.result(f"r{first}").token_ids == tuple(answers[first])
    # the same lane, afterwards: nothing of it is left, and no filler ever gets into an answer
    many = {first: [first % 60 + 20 + i for i in range(5)] for first in range(5, 55)}
    model.answers, model.poison, model.sure_from = many, None, 1
    model.denoises.clear()
    served = serve(lane, [ask(first, 5) for first in many])
    assert served.ids == {f"r{first}": tuple(answer) for first, answer in many.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_f06_no_work_behind_the_end(policy: str) -> None:
    answer = [40, 41, 42, 43, 44, EOS]
    model = ScriptedCanvas({5: answer}, C=256)
    lane = scripted_lane(model, settings(policy, max_denoising_steps=None if policy == "rolling" else 200))
    held = record_closing(lane)
    served = serve(lane, [ask(5, 2000)])
    result = served.result("r5")
    assert result.token_ids == tuple(answer) and result.stop_reason == "eos"
    assert result.generated_tokens == len(answer)
    assert result.forwards <= len(answer) + 3  # settling the canvas would take two hundred
    assert held["r5"][PROMPT:] == answer[: len(held["r5"]) - PROMPT]
    assert EOS not in held["r5"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [50, 300])
def test_f10_meters_can_tell_the_rate(policy: str, length: int, modilify: Runtime) -> None:
    answer = [40 + i % 50 for i in range(length)]
    lane = scripted_lane(ScriptedCanvas({5: answer}, C=64, sure_from=1), settings(policy))
    request = ask(5, length)
    served = serve(lane, [request], tokenizer=modilify.tokenizer)
    check_events(served, [request])  # no text twice, every id once
    result = served.result("r5")
    assert result.generated_tokens == length and result.ttft_seconds > 0
    assert result["ttfd_seconds"] <= result.ttft_seconds <= result.elapsed_seconds
    assert result["denoise_steps_per_second"] > 0
    assert result.decode_tokens_per_second is None or result.decode_tokens_per_second > 0
    if policy == "block":
        assert result["canvas_count"] == -(-length // 64)


def test_f12_company_changes_nothing(runtimes: dict[str, Runtime]) -> None:
    """See test_canvas_lane_company.py for every kind of company; this is the reported one."""
    for kind, runtime in runtimes.items():
        prompts = {name: tuple(range(9 + i, 20 + 2 * i)) for i, name in enumerate("abcd")}
        asked = [
            replace(ask(5, 6), request_id=name, token_ids=ids, seed=77, ignore_eos=True)
            for name, ids in prompts.items()
        ]
        alone = serve(open_lane(runtime, SETTINGS[kind]), asked[:1]).ids["a"]
        assert serve(open_lane(runtime, SETTINGS[kind]), asked).ids["a"] == alone
        assert serve(open_lane(runtime, SETTINGS[kind]), asked[::-1]).ids["a"] == alone


# -- rows that fail ----------------------------------------------------------------------------------------------------


class BrokenError(RuntimeError):
    pass


def breaking(place: str, first: int, *, after: int = 0) -> Callable[[str, int], None]:
    """A fault at one place for one request, from its call number `after` on."""
    calls = 0

    def fault(where: str, whose: int) -> None:
        nonlocal calls
        if (where, whose) == (place, first):
            calls += 1
            if calls > after:
                raise BrokenError(f"{place} broke")

    return fault


def four_rows(policy: str, fault: Callable[[str, int], None]) -> tuple[Served, dict[int, list[int]], list[Any]]:
    answers = {first: [first + 20 + i % 8 for i in range(20)] for first in range(5, 9)}
    lane = scripted_lane(ScriptedCanvas(answers, C=8, fault=fault), settings(policy, pipeline_depth=2), max_rows=4)
    rows: list[Any] = []
    open_row = lane.open

    def recording(*arguments: Any) -> Any:
        rows.append(open_row(*arguments))
        return rows[-1]

    lane.open = recording  # type: ignore[method-assign]
    return serve(lane, [ask(first, 20) for first in answers]), answers, rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("place", "after"), [("begin", 2), ("encode", 0), ("observe", 0), ("write", 0), ("sweep", 1)])
def test_a_row_that_breaks_in_its_own_part_breaks_alone(policy: str, place: str, after: int) -> None:
    if policy == "block" and place in ("observe", "write"):
        return  # the block policy has no such part
    served, answers, rows = four_rows(policy, breaking(place, 6, after=after))
    failed = served.failure("r6")
    assert failed.code == "internal" and f"{place} broke" in failed.error
    for first in (5, 7, 8):
        assert served.result(f"r{first}").token_ids == tuple(answers[first])
    assert failed.generated_tokens < 20
    for row in rows:
        assert row.cache.offset == 0 and row.seen is None
        assert getattr(row, "state", None) is None and getattr(row, "block", None) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_breaks_breaks_its_group_only(policy: str) -> None:
    served, answers, _ = four_rows(policy, breaking("layer", 6, after=3))
    broken = {f"r{first}" for first in answers if f"r{first}" not in served.ids}
    assert broken == {"r5", "r6"}  # which ran side by side
    for name in broken:
        assert "layer broke" in served.failure(name).error
    for first in (7, 8):
        assert served.result(f"r{first}").token_ids == tuple(answers[first])


def test_a_cohort_that_is_too_large_or_repeats_a_row_is_refused(diffusion: Runtime) -> None:
    lane = open_lane(diffusion, replace(SETTINGS["block"], max_batch_tokens=12))
    assert lane.capacity == 2
    rows = []
    for first in (5, 6, 7):
        row = lane.open(ask(first, 4), [first, 50])
        while not lane.prefill_step(row):
            pass
        rows.append(row)
    for wrong in (rows, [rows[0], rows[0]]):
        with pytest.raises(Exception, match="at most 2 rows"):
            lane.step(wrong)
    assert all(not isinstance(item, Exception) for item in lane.step(rows[:2]))


def test_prompts_that_this_lane_cannot_read_are_refused() -> None:
    lane = scripted_lane(ScriptedCanvas({5: SAY}))
    for ids, wrong in (([5, 99, 6, 7], "image token"), ([5, 128, 6, 7], "id 128")):
        with pytest.raises(RequestError, match=wrong) as caught:
            lane.open(ask(5, 4), ids)
        assert caught.value.code == "bad_prompt"
    with pytest.raises(RequestError) as caught:
        lane.open(ask(5, 9000), [5, 50, 51, 52])
    assert caught.value.code == "too_long"
