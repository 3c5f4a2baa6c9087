"""`"polytoken": {"watch": true}`: progress beside the chunks of a chat, and a canvas settling, for those who ask."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripted import Script
from server_running import Running

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
WATCH = {"polytoken": {"watch": True}}


def seen_of(chunks: list[Any], kind: str) -> list[Any]:
    return [chunk["polytoken"][kind] for chunk in chunks[:-1] if kind in chunk.get("polytoken", ())]


def content_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1] if chunk["choices"])


def test_progress_comes_with_every_step_and_only_when_asked_for(scripted: Running, script: Script) -> None:
    script.says = lambda prompt: "one two three"
    plain = scripted.stream(CHAT, HELLO)
    chunks = scripted.stream(CHAT, {**HELLO, **WATCH})
    assert content_of(chunks) == content_of(plain) == "one two three"
    assert not any("polytoken" in chunk for chunk in plain[:-1])
    steps = seen_of(chunks, "progress")
    assert [step["forwards"] for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["tokens"] == len(steps)
    # a client that knows nothing of it sees an ordinary chunk that adds nothing
    extra = [chunk for chunk in chunks[:-1] if "polytoken" in chunk]
    assert all(chunk["choices"] == [{**chunk["choices"][0], "delta": {}, "finish_reason": None}] for chunk in extra)


def test_the_prompt_is_seen_being_read(tiny: Running) -> None:
    body = {"messages": [{"role": "user", "content": "words " * 40}], "max_tokens": 2, **WATCH}
    chunks = tiny.stream(CHAT, body)
    parts = seen_of(chunks, "prompt")
    assert parts
    assert parts[-1]["done"] == parts[-1]["of"] > 40


def test_a_canvas_is_seen_settling(canvas: Running) -> None:
    body = {**HELLO, "max_tokens": 12, "seed": 1}
    plain = canvas.stream(CHAT, body)
    chunks = canvas.stream(CHAT, {**body, **WATCH})
    assert content_of(chunks) == content_of(plain)  # looking changes nothing
    frames = seen_of(chunks, "canvas")
    assert frames
    for frame in frames:
        assert len(frame["pieces"]) == len(frame["confidence"]) == len(frame["likely"]) <= 6
        assert all(0 <= value <= 100 for value in frame["confidence"])
    assert [frame["step"] for frame in frames] == sorted({frame["step"] for frame in frames})
    assert seen_of(chunks, "progress")[-1]["denoise_steps"] >= frames[-1]["step"]


def test_two_who_watch_at_once_see_their_own_canvas_alone(canvas: Running) -> None:
    bodies = [{"messages": [{"role": "user", "content": text}], "max_tokens": 12, "seed": 1} for text in ("one", "two")]
    alone = [content_of(canvas.stream(CHAT, body)) for body in bodies]
    with ThreadPoolExecutor(3) as pool:
        watched = [pool.submit(canvas.stream, CHAT, {**body, **WATCH}) for body in bodies]
        plain = pool.submit(canvas.stream, CHAT, bodies[0])
    assert not any("polytoken" in chunk for chunk in plain.result()[:-1])
    for run, text in zip(watched, alone, strict=True):
        assert content_of(run.result()) == text
        steps = [frame["step"] for frame in seen_of(run.result(), "canvas")]
        assert steps == sorted(set(steps))  # another's frames would come between
        assert seen_of(run.result(), "progress")[-1]["denoise_steps"] >= steps[-1]


def test_the_lane_is_left_alone_when_nobody_watches_any_more(canvas: Running) -> None:
    canvas.stream(CHAT, {**HELLO, "max_tokens": 6, **WATCH})
    engine = canvas.state.pool.loaded["canvas"].engine
    deadline = time.monotonic() + 60
    while engine.call(lambda loaded: loaded.lane.observer) is not None:
        assert time.monotonic() < deadline
        canvas.post(CHAT, {**HELLO, "max_tokens": 6})
    assert engine.call(lambda loaded: loaded.lane.prefill_observer) is None


def test_a_word_that_it_does_not_know_is_refused(scripted: Running) -> None:
    status, record = scripted.post(CHAT, {**HELLO, "polytoken": {"wacth": True}})
    assert (status, record["error"]["param"]) == (400, "polytoken.wacth")
