"""What one step does, in which order, and why a row ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from canvas_serving import KINDS, SETTINGS, mixed_requests, open_lane, serve
from scripted_canvas import EOS, PROMPT, TURN_END, ScriptedCanvas, ask, encoded_ids, scripted_lane

from polytoken.checkpoint.runtime import Runtime
from polytoken.engine import Scheduler
from polytoken.events import Token
from polytoken.lanes.base import Commit
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.policy import commit_reasons, failure_rate, select_commit
from polytoken.lanes.canvas.ring import logical_positions, to_logical
from polytoken.lanes.canvas.rolling import RollingMethod
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.lanes.canvas.state import RollingState
from polytoken.lanes.canvas.watch import CanvasFrame
from polytoken.request import Request
from polytoken.sampling.vocabulary import vocabulary_statistics


def stepped(lane: CanvasLane, request: Request) -> Any:
    """A row that is ready to be stepped."""
    row = lane.open(request, list(request.token_ids))
    while not lane.prefill_step(row):
        pass
    return row


def plain_rolling(lane: CanvasLane, request: Request) -> tuple[list[int], int, int]:
    """One row, one denoise after the other, every part at once and nothing skipped: ids, denoises and jumps."""
    method = lane.method
    assert isinstance(method, RollingMethod)
    model, policy, C = lane.model, method.policy, lane.model.canvas_length
    row = stepped(lane, request)
    cache, noise, pad = row.cache, row.noise, method.ends.pad
    seen = {token_id for token_id in request.token_ids if token_id not in method.ends.excluded}
    state = RollingState.initial(
        noise.canvas(0), model.make_latent(), max_new_tokens=request.max_new_tokens, pad_id=pad
    )
    out: list[int] = []
    steps = jumps = 0
    while len(out) < request.max_new_tokens and steps < (request.max_denoising_steps or 10**6):
        assert cache.offset == len(request.token_ids) + len(out)
        output = model.denoise(state.canvas, cache, latent=state.latent, head=state.head)
        mask = np.zeros(model.vocab_size, bool)
        mask[sorted(seen)] = True
        drawn = vocabulary_statistics(
            output.heavy_hidden,
            model.project,
            row.rule,
            vocab_size=model.vocab_size,
            noise=noise.step(steps),
            seen=mx.array(mask),
        )
        remaining = mx.array([request.max_new_tokens - len(out)])
        latent = replace(
            output.next_latent_state,
            confidence=drawn.confidence,
            entropy=drawn.entropy,
            age=state.latent.age + 1,
            token_changed=(drawn.sampled != state.canvas).astype(mx.float32),
            confidence_delta=drawn.confidence - state.latent.confidence,
            entropy_delta=drawn.entropy - state.latent.entropy,
        )
        valid = logical_positions(state.head, C) < remaining[:, None]
        latent = model.observe(latent, output, valid=valid, head=state.head)
        made = select_commit(
            policy,
            sampled=to_logical(drawn.sampled, state.head),
            f_new=to_logical(failure_rate(drawn.confidence, drawn.entropy, policy), state.head),
            f_old=to_logical(failure_rate(state.latent.confidence, state.latent.entropy, policy), state.head),
            greedy=to_logical(drawn.greedy, state.head),
            f_greedy=to_logical(failure_rate(drawn.greedy_confidence, drawn.entropy, policy), state.head),
            ponder_steps=state.latent.ponder_steps,
            stagnation_steps=state.latent.stagnation_steps,
            active=mx.array([True]),
            remaining=remaining,
            stop_ids=row.stop_ids,
        )
        n = made.lengths.item()
        ids = made.ids.tolist()[0][:n]
        latent = replace(latent, ponder_steps=made.ponder_steps, stagnation_steps=made.stagnation_steps)
        if n:
            memory, _ = model.commit_write(
                latent.memory_slots,
                output,
                token_embeddings=model.embed(mx.array([ids])),
                lengths=made.lengths,
                prefix_lengths=mx.array([cache.offset]),
                reasons=commit_reasons(made.lengths, made.jumped, made.ids, row.stop_ids),
                head=state.head,
            )
            latent = replace(latent, memory_slots=memory, gdn2=replace(latent.gdn2, persistent=memory))
            model.encode(mx.array([ids]), cache)
        moved = RollingState(drawn.sampled, latent, state.head).advance_ring(
            made.lengths, noise.canvas(steps + 1), entropy_fill_value=math.log(model.vocab_size)
        )
        position = logical_positions(moved.head, C)
        beyond = (position >= C - n) & (position >= request.max_new_tokens - len(out) - n)
        state = replace(moved, canvas=mx.where(beyond, pad, moved.canvas))
        mx.eval(state.canvas, state.latent.memory_slots)
        out += ids
        seen |= {token_id for token_id in ids if token_id not in method.ends.excluded}
        steps += 1
        jumps += bool(made.jumped.item())
    return out, steps, jumps


@pytest.mark.parametrize("kind", ["modilify", "rolled"])
def test_the_lane_is_the_plain_loop(kind: str, runtimes: dict[str, Runtime]) -> None:
    lane = open_lane(runtimes[kind], SETTINGS[kind])
    asked = [request for request in mixed_requests(lane.model.vocab_size) if request.request_id in "cfg"]
    served = serve(lane, asked)
    jumps = shifts = 0
    for request in asked:
        result = served.result(request.request_id)
        wanted = plain_rolling(lane, request)
        assert (list(result.token_ids), result["denoise_steps"], result["jump_count"]) == wanted
        assert result["state_shift_count"] <= result["denoise_steps"]
        jumps, shifts = jumps + result["jump_count"], shifts + result["state_shift_count"]
    assert 0 < jumps < shifts  # or the comparison saw only one of the two ways to commit


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_holds_prompt_and_answer_of_rows_that_go_on(kind: str, runtimes: dict[str, Runtime]) -> None:
    lane = open_lane(runtimes[kind], SETTINGS[kind])
    asked = [request for request in mixed_requests(lane.model.vocab_size) if request.request_id in "adh"]
    rows = {request.request_id: stepped(lane, request) for request in asked}
    for _ in range(60):
        going = list(rows.values())
        for name, commit in zip(list(rows), lane.step(going), strict=True):
            assert isinstance(commit, Commit), commit
            if commit.stop_reason is not None:
                lane.close(rows.pop(name), keep=True)
        for row in rows.values():
            lane.method.settle(row)  # what the next step begins with; doing it now changes nothing
            assert row.cache.offset == row.prompt_tokens + row.generated
        if not rows:
            return
    raise AssertionError("the rows never ended")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_one_step_waits_for_the_device_once(
    kind: str, depth: int, runtimes: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(runtimes[kind], replace(SETTINGS[kind], pipeline_depth=depth))
    rows = [stepped(lane, request) for request in mixed_requests(lane.model.vocab_size)[:3]]
    lane.step(rows)
    waits = 0
    wait = mx.eval

    def counting(*arrays: Any) -> None:
        nonlocal waits
        waits += 1
        wait(*arrays)

    monkeypatch.setattr(mx, "eval", counting)
    lane.step(rows)
    assert waits == -(-3 // depth)  # once per group


@pytest.mark.parametrize("policy", ["rolling", "block"])
def test_ids_are_streamed_before_they_are_remembered_and_encoded(policy: str) -> None:
    log: list[str] = []
    answer = [40 + i % 20 for i in range(24)]
    model = ScriptedCanvas({5: answer}, C=8, fault=lambda place, _: log.append(place))
    lane = scripted_lane(model, CanvasSettings(policy=policy))  # type: ignore[arg-type]
    served = serve(lane, [ask(5, 24)], after_turn=lambda _: log.append("turn over"))
    assert served.ids["r5"] == tuple(answer)
    work = ("write", "encode") if policy == "rolling" else ("encode",)
    tokens = len([event for event in served.of("r5") if isinstance(event, Token)])
    for place in work:
        assert log.count(place) == tokens - 1  # the last block ends the row: nobody needs it any more
    turns = "".join({"turn over": "|", "write": "w", "encode": "e"}.get(place, "") for place in log).split("|")
    first = next(i for i, turn in enumerate(turns) if turn)
    assert first > 0 and not any(turn.endswith("b") for turn in turns)
    for turn in turns[first:]:
        assert turn in ("", "we" if policy == "rolling" else "e")
    begins = [place for place in log if place in ("encode", "begin", "turn over")]
    for i, place in enumerate(begins):
        if place == "encode":  # first thing in a turn
            assert begins[i - 1] == "turn over" and begins[i + 1] == "begin"


def test_a_row_that_a_stop_string_ends_pays_for_nothing_more(modilify: Runtime) -> None:
    log: list[str] = []
    answer = modilify.tokenizer.encode("one two three", add_special_tokens=False)
    assert max(answer) < 512
    model = ScriptedCanvas({5: answer}, V=512, C=8, tail=7, sure_from=1, fault=lambda place, _: log.append(place))
    lane = scripted_lane(model)
    result = serve(lane, [ask(5, 200, stop=("two",))], tokenizer=modilify.tokenizer).result("r5")
    assert result.stop_reason == "stop_string" and result.text == "one "
    assert log.count("encode") == result["canvas_count"] - 1


# -- why a row ends ----------------------------------------------------------------------------------------------------

ENDS = {
    "turn_end": ([40, 41, TURN_END, 42], {}, 3),
    "eos": ([40, EOS, 41], {}, 2),
    "max_new_tokens": ([40, 41, 42, 43, 44], {"limit": 5}, 5),
}


@pytest.mark.parametrize("policy", ["rolling", "block"])
@pytest.mark.parametrize("reason", ENDS)
def test_stop_reasons(policy: str, reason: str) -> None:
    answer, more, length = ENDS[reason]
    lane = scripted_lane(ScriptedCanvas({5: answer}), CanvasSettings(policy=policy))  # type: ignore[arg-type]
    result = serve(lane, [ask(5, more.get("limit", 50))]).result("r5")
    assert result.stop_reason == reason and result.token_ids == tuple(answer[:length])


@pytest.mark.parametrize("policy", ["rolling", "block"])
def test_ends_can_be_ignored(policy: str) -> None:
    answer = [40, EOS, 41, TURN_END, 42, 43]
    lane = scripted_lane(ScriptedCanvas({5: answer}), CanvasSettings(policy=policy))  # type: ignore[arg-type]
    result = serve(lane, [ask(5, 6, ignore_eos=True)]).result("r5")
    assert result.token_ids == tuple(answer) and result.stop_reason == "max_new_tokens"


def test_a_rolling_answer_may_be_cut_by_its_denoises() -> None:
    lane = scripted_lane(ScriptedCanvas({5: range(40, 90)}), CanvasSettings(policy="rolling", max_denoising_steps=9))
    by_request, by_setting = (serve(lane, [ask(5, 50, max_denoising_steps=limit)]).result("r5") for limit in (4, None))
    for result, steps in ((by_request, 4), (by_setting, 9)):
        assert result.stop_reason == "max_denoising_steps" and result["denoise_steps"] == steps
        assert result.token_ids == tuple(range(40, 40 + result.generated_tokens)) and result.generated_tokens < 50


def test_a_block_schedule_is_per_canvas_and_cuts_no_answer() -> None:
    lane = scripted_lane(ScriptedCanvas({5: range(40, 60)}, C=5), CanvasSettings(max_denoising_steps=3))
    for limit, steps in ((None, 3), (2, 2)):
        result = serve(lane, [ask(5, 20, max_denoising_steps=limit)]).result("r5")
        assert result.generated_tokens == 20 and result.stop_reason == "max_new_tokens"
        assert result["denoise_steps"] == 4 * steps and result["canvas_count"] == 4


def test_a_rolling_row_that_settles_nothing_jumps_on() -> None:
    """No watchdog: every ponder limit commits something, and denoises stay within the bound."""
    model = ScriptedCanvas({5: range(40, 52)}, C=8)
    model._logits = lambda first, canvas, cache, head: mx.zeros((1, 8, 129))  # type: ignore[method-assign]
    lane = scripted_lane(model, generation={"max_ponder_steps": 4, "jump_on_no_progress_after": 3}, settings=CanvasSettings(policy="rolling"))  # fmt: skip  # noqa: E501
    result = serve(lane, [ask(5, 12, ignore_eos=True)]).result("r5")
    assert result.generated_tokens == 12 and result.stop_reason == "max_new_tokens"
    assert result["jump_count"] == result["state_shift_count"] > 0
    assert result["denoise_steps"] <= 12 * 4


# -- spectators and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_spectator_sees_every_canvas_and_changes_nothing(kind: str, runtimes: dict[str, Runtime]) -> None:
    asked = [request for request in mixed_requests(200) if request.request_id in "ad"]
    plain = serve(open_lane(runtimes[kind], SETTINGS[kind]), asked)
    lane = open_lane(runtimes[kind], SETTINGS[kind])
    frames: list[CanvasFrame] = []
    lane.observer = frames.append
    served = serve(lane, asked)
    assert served.ids == plain.ids
    C = lane.model.canvas_length
    for request in asked:
        mine = [frame for frame in frames if frame.request_id == request.request_id]
        assert [frame.denoise_steps for frame in mine] == list(range(1, served.result(request.request_id).forwards + 1))
        text: list[int] = []
        for frame in mine:
            assert frame.generated_tokens == len(text)
            assert frame.remaining == request.max_new_tokens - len(text)
            text += frame.token_ids[: frame.committed]
            lists = (frame.token_ids, frame.confidence, frame.entropy, frame.age, frame.likely)
            assert all(len(item) == C for item in lists)
            assert all(0.0 <= p <= 1.0 for p in frame.confidence) and all(age >= 1 for age in frame.age)
        assert tuple(text) == served.ids[request.request_id]
    lane.observer = None
    frames.clear()
    assert serve(lane, asked).ids == plain.ids and not frames


def test_a_spectator_that_fails_is_dropped_and_nobody_else() -> None:
    lane = scripted_lane(ScriptedCanvas({5: range(40, 60)}))

    def broken(frame: CanvasFrame) -> None:
        raise RuntimeError("the view is gone")

    lane.observer = broken
    assert serve(lane, [ask(5, 20)]).ids["r5"] == tuple(range(40, 60))
    assert lane.observer is None


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_flat_over_many_steps(kind: str, runtimes: dict[str, Runtime]) -> None:
    lane = open_lane(runtimes[kind], replace(SETTINGS[kind], pipeline_depth=2))
    asked = [replace(request, max_new_tokens=90, max_denoising_steps=None) for request in mixed_requests(200)[:2]]
    levels: list[int] = []

    def note(scheduler: Scheduler) -> None:
        mx.synchronize()
        levels.append(mx.get_active_memory())

    serve(lane, asked, after_turn=note)
    while_running = levels[len(levels) // 4 : -2]
    assert len(while_running) > 20
    # A leak of a canvas, a latent state or a graph per step would show as megabytes; keys and values grow in place.
    assert max(while_running) - min(while_running) < 400_000
    assert levels[-1] < min(while_running)  # the rows' memory came back


def test_only_prompts_are_banked(modilify: Runtime) -> None:
    lane = open_lane(modilify, SETTINGS["modilify"], cache_bytes=64 << 20)
    request = mixed_requests(lane.model.vocab_size)[0]
    ids = serve(lane, [request]).ids["a"]
    longest = max(lane.bank.entries(), key=lambda entry: len(entry.ids))
    assert longest.ids == request.token_ids
    follow = replace(request, request_id="next", token_ids=request.token_ids + ids[:4])
    served = serve(lane, [follow])
    assert served.of("next")[0].prefix_cache_tokens == len(request.token_ids) // 8 * 8


def test_a_scripted_cache_reads_back() -> None:
    """The script itself: what it was told to encode is what a test can read."""
    model = ScriptedCanvas({5: range(40, 60)}, C=8)
    lane = scripted_lane(model, CanvasSettings(policy="rolling"))
    row = stepped(lane, ask(5, 20))
    while row.generated < 9:
        lane.step([row])
    lane.method.settle(row)
    assert encoded_ids(row.cache)[PROMPT:] == list(range(40, 40 + row.generated))
