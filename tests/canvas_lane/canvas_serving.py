"""Tiny checkpoints on the canvas lane behind the real scheduler, and a mixed set of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.checkpoint.runtime import Runtime
from polytoken.engine import Label, Scheduler, SchedulerLimits
from polytoken.events import (
    Event,
    FirstDenoise,
    GenerationFailed,
    GenerationResult,
    InferenceSummary,
    RequestRejected,
    RequestStarted,
    Token,
)
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.opening import open_canvas_lane
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.request import Request, SamplingParams
from polytoken.testkit.modilify import modilify_config, write_modilify
from polytoken.testkit.tiny import write_checkpoint
from polytoken.text.prompt import prompt_ids
from polytoken.text.stream import TextStream

CHUNK = 8
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
# Two policies over the two kinds of checkpoint; every kind gets its answers done within a few denoises.
KINDS = ("modilify", "block", "rolled")
SETTINGS = {
    "modilify": CanvasSettings(),
    "block": CanvasSettings(max_denoising_steps=4),
    "rolled": CanvasSettings(policy="rolling", commit_failure_budget=0.02),
}


def load_modilify(directory: Path, **options: Any) -> Runtime:
    """Two layers, a canvas of 8, impatient: it jumps after two denoises without progress."""
    text = {**modilify_config("b")["text_config"], **LAYERS}
    options.setdefault("config", {"text_config": text, "latent_num_layers": 1})
    runtime = load_runtime(write_modilify(directory, shape="b", **options).path)
    return replace(runtime, generation={**runtime.generation, "jump_on_no_progress_after": 2, "max_ponder_steps": 3})


def load_diffusion(directory: Path) -> Runtime:
    """Two layers, a canvas of 6."""
    made = write_checkpoint(directory, "diffusion_gemma", config={**LAYERS, "canvas_length": 6})
    runtime = load_runtime(made.path)
    return replace(runtime, generation={**runtime.generation, "jump_on_no_progress_after": 2, "max_ponder_steps": 3})


def open_lane(
    runtime: Runtime,
    settings: CanvasSettings,
    *,
    chunk: int = CHUNK,
    max_rows: int = 8,
    cache_bytes: int = 0,
    bank: StateBank | None = None,
) -> CanvasLane:
    identity = StateIdentity(checkpoint=runtime.identity, lane="canvas", grid=chunk)
    return open_canvas_lane(
        runtime,
        settings,
        bank=bank or StateBank(cache_bytes, identity=identity),
        prefill_chunk=chunk,
        max_batch_rows=max_rows,
    )


@dataclass
class Served:
    """What one run gave: every event in order, and the events of each request."""

    events: list[Event] = field(default_factory=list)
    summary: InferenceSummary | None = None
    peak_rows: int = 0

    def of(self, request_id: str) -> list[Any]:
        return [event for event in self.events if getattr(event, "request_id", None) == request_id]

    def result(self, request_id: str) -> GenerationResult:
        last = self.of(request_id)[-1]
        assert isinstance(last, GenerationResult), last
        return last

    def failure(self, request_id: str) -> GenerationFailed | RequestRejected:
        last = self.of(request_id)[-1]
        assert isinstance(last, (GenerationFailed, RequestRejected)), last
        return last

    @property
    def ids(self) -> dict[str, tuple[int, ...]]:
        return {event.request_id: event.token_ids for event in self.events if isinstance(event, GenerationResult)}


def serve(
    lane: CanvasLane,
    requests: Sequence[Request],
    *,
    tokenizer: Any = None,
    arrivals: Iterable[int] | None = None,
    max_rows: int | None = None,
    after_turn: Callable[[Scheduler], None] | None = None,
) -> Served:
    """Run the requests to their end; `arrivals` says how many may come before each turn (default: all at once)."""
    served = Served()
    rows = max_rows or lane.max_batch_rows
    scheduler = Scheduler(
        lane,
        SchedulerLimits(max_rows=rows, rows_per_step=lane.capacity, max_pending=64, prefill_budget=lane.prefill_chunk),
        encode=lambda request: prompt_ids(tokenizer, request) if tokenizer else request.token_ids,
        open_text=lambda request, ids: TextStream(tokenizer, stop=request.stop) if tokenizer else IdText(),
        emit=served.events.append,
        label=Label("tiny"),
        log=lambda text: None,
    )
    waiting = list(requests)
    steps = iter(arrivals) if arrivals is not None else iter([len(waiting)])
    while waiting or not scheduler.idle:
        count = next(steps, len(waiting))
        for request in waiting[:count]:
            assert scheduler.offer(request)
        del waiting[:count]
        scheduler.turn()
        if after_turn is not None:
            after_turn(scheduler)
    served.summary = scheduler.summary()
    return served


class IdText:
    """A text port that spells ids as numbers, for models without a tokenizer."""

    def __init__(self) -> None:
        self.text = ""

    @property
    def full_text(self) -> str:
        return self.text

    def push(self, ids: tuple[int, ...], /) -> Any:
        delta = "".join(f"{token_id} " for token_id in ids)
        self.text += delta
        return _Step(len(ids), delta)

    def finish(self) -> str:
        return ""

    def drain(self) -> None:
        return None


@dataclass(frozen=True)
class _Step:
    consumed: int
    delta: str
    stop_string: str | None = None


def mixed_requests(vocab_size: int, *, count: int = 8) -> list[Request]:
    """Requests, by eights, that differ in all that a lane may confuse: two share a prompt, several a beginning."""
    if count > 8:
        eights = [
            replace(each, request_id=f"{each.request_id}{lap}", seed=each.seed + 11 * lap)
            for lap in range(-(-count // 8))
            for each in mixed_requests(vocab_size)
        ]
        return eights[:count]
    base = [(7 * i + 3) % (vocab_size - 10) + 5 for i in range(40)]
    penalised = SamplingParams(repetition_penalty=1.3)

    def make(name: str, ids: list[int], limit: int, **more: Any) -> Request:
        return Request(request_id=name, token_ids=tuple(ids), max_new_tokens=limit, ignore_eos=True, **more)

    return [
        make("a", base[:20], 9, seed=1),
        make("b", base[:20], 9, seed=2),
        make("c", [*base[:17], 9, 9], 5, seed=-3),
        make("d", base[:8], 13, seed=2**40 + 4),
        make("e", base[30:33], 1, seed=5),
        make("f", base, 7, seed=6, sampling=penalised),
        make("g", base[:24], 12, seed=7, max_denoising_steps=3),
        make("h", base[5:6], 8, seed=8),
    ]


def check_events(served: Served, requests: Sequence[Request]) -> None:
    """Order, exactly one end, and a stream that adds up to the result."""
    for request in requests:
        events = served.of(request.request_id)
        assert [type(event) for event in events[:2]] == [RequestStarted, FirstDenoise]
        ends = [event for event in events if isinstance(event, (GenerationResult, GenerationFailed, RequestRejected))]
        assert ends == events[-1:]
        tokens = events[2:-1]
        assert all(isinstance(event, Token) for event in tokens)
        result = served.result(request.request_id)
        assert tuple(token_id for event in tokens for token_id in event.token_ids) == result.token_ids
        assert "".join(event.delta for event in tokens) == result.text
        generated, text = 0, ""
        for event in tokens:
            generated += len(event.token_ids)
            assert event.generated_tokens == generated and event.text.startswith(text)
            text = event.text
        assert result.generated_tokens == len(result.token_ids) <= request.max_new_tokens
        assert result["denoise_steps"] == result.forwards
        assert result.stop_reason != "episode_watchdog"
