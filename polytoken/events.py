"""What the engine says: one typed record per event, the same for JSON lines, servers, receipts and tests.

Every record has `event`, its name; a machine mode also stamps the stream with `schema` in the first record. Seconds are
floats of a monotonic clock. Fields that do not apply to a lane are absent from the JSON, never made up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

SCHEMA: Final = 1  # version of the event records; raised when a field changes its meaning or leaves


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `to_json` keeps the field order of the class; unset optional fields are left out."""

    event: ClassVar[str] = ""
    nullable: ClassVar[frozenset[str]] = frozenset()  # fields that are written as null rather than left out

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = {"event": self.event}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "extra":
                record.update(value)
            elif value is not None or item.name in self.nullable:
                record[item.name] = list(value) if isinstance(value, tuple) else value
        return record

    def to_json(self) -> str:
        """One line of strict JSON; a float that is not finite is a defect and raises ValueError."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class RuntimeLoaded(Event):
    """The model is in memory. `settings` holds the effective value of every option."""

    event: ClassVar[str] = "runtime_loaded"
    schema: int = SCHEMA
    engine: str
    checkpoint: str
    step: int
    restored_trainable_tensors: int
    backend: str
    lane: str
    execution: str
    load_seconds: float
    extra: Mapping[str, Any] = field(default_factory=dict)  # lane fields (canvas_length, commit knobs, ...)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestStarted(Event):
    """The prompt is prefilled and the row is active."""

    event: ClassVar[str] = "request_started"
    request_id: str
    prompt_tokens: int
    prefix_cache_tokens: int
    prefix_cache_miss: str | None = None  # why not more was reused
    history_miss: str | None = None  # where the messages part from what their session has committed
    prefill_seconds: float


@dataclass(frozen=True, kw_only=True)
class FirstDenoise(Event):
    """Canvas lane: the first policy result has reached the host."""

    event: ClassVar[str] = "first_denoise"
    request_id: str
    ttfd_seconds: float


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one id (natural log, of the law that was sampled before truncation)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "token_id": self.token_id,
            "logprob": self.logprob,
            "top": [[token_id, value] for token_id, value in self.top],
        }


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A step of a tool call. The first has `call_id`, `name` and `declared`, the last `done` and `valid`.

    Attributes:
        index: which call of the answer, from 0.
        declared: whether the request declared a tool of this name.
        arguments: what the call's arguments gain, JSON text.
        valid: whether all arguments together are the JSON of an object; what is not, is as the model wrote it.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    declared: bool | None = None
    arguments: str = ""
    done: bool = False
    valid: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) not in (None, "")}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A whole tool call; see `ToolCallDelta`."""

    call_id: str
    name: str
    arguments: str
    valid: bool
    declared: bool

    def to_dict(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


class ToolCallSum:
    """Tool calls put together from their steps."""

    def __init__(self) -> None:
        self._steps: dict[int, list[ToolCallDelta]] = {}

    def add(self, step: ToolCallDelta) -> None:
        """Take the next step."""
        self._steps.setdefault(step.index, []).append(step)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, in order."""
        return tuple(
            ToolCall(
                call_id=steps[0].call_id or "",
                name=steps[0].name or "",
                arguments="".join(step.arguments for step in steps),
                valid=steps[-1].valid is True,
                declared=steps[0].declared is True,
            )
            for _, steps in sorted(self._steps.items())
        )


@dataclass(frozen=True)
class AnswerDelta:
    """What reasoning, answer and tool calls gain by one step, the markup between them left out.

    Attributes:
        reasoning, content: text.
        tool_calls: steps of calls.
        reasoning_tokens: ids that belong to the reasoning, its markup included.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning_tokens: int = 0


class AnswerSum:
    """An answer put together from what it gained step by step."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls = ToolCallSum()
        self._reasoning_tokens = 0

    def add(self, gain: AnswerDelta) -> None:
        """Take the next step."""
        self._reasoning.append(gain.reasoning)
        self._content.append(gain.content)
        self._reasoning_tokens += gain.reasoning_tokens
        for step in gain.tool_calls:
            self._calls.add(step)

    def fields(self) -> dict[str, Any]:
        """The members of a result."""
        reasoning = "".join(self._reasoning)
        return {
            "reasoning": reasoning or None,
            "reasoning_tokens": self._reasoning_tokens or None,
            "content": "".join(self._content),
            "tool_calls": self._calls.calls or None,
        }


@dataclass(frozen=True, kw_only=True)
class Token(Event):
    """Ids committed by one step. `text` decodes all ids of the request so far, special tokens kept.

    `delta` is the visible text this step adds: append-only, whole characters, cut before a stop string. The same text
    without markup is told apart into `reasoning_delta`, `content_delta` and `tool_calls`, where the lane's text can.
    """

    event: ClassVar[str] = "token"
    request_id: str
    token_ids: tuple[int, ...]
    generated_tokens: int
    text: str
    delta: str
    denoise_steps: int | None = None
    forwards: int
    reasoning_delta: str | None = None
    content_delta: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        return _with_lists(super().to_dict(), "logprobs", "tool_calls")


@dataclass(frozen=True, kw_only=True)
class GenerationResult(Event, Mapping[str, Any]):
    """The end of an accepted request that ran to a stop condition.

    Also the record that it is written as: `result["text"]` is `result.text`, and a lane's own fields are there too.

    `stop_reason` is one of `turn_end`, `eos`, `stop_string`, `max_new_tokens`, `max_denoising_steps`,
    `episode_watchdog`, `context_full`.

    `text` is the whole visible text. Without markup it is told apart into `reasoning` (absent if there was none),
    `content` and `tool_calls`; `reasoning_tokens` of the generated ones belong to the reasoning.
    """

    event: ClassVar[str] = "generation_result"
    nullable: ClassVar[frozenset[str]] = frozenset({"ttft_seconds"})
    request_id: str
    status: str = "finished"
    checkpoint: str
    step: int
    lane: str
    thinking: str
    stop_reason: str
    stop_string: str | None = None
    seed: int
    prompt_tokens: int
    generated_tokens: int
    token_ids: tuple[int, ...]
    text: str
    reasoning: str | None = None
    reasoning_tokens: int | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    forwards: int
    tokens_per_forward: float
    queue_seconds: float
    prefill_seconds: float
    ttft_seconds: float | None
    decode_tokens_per_second: float | None = None
    elapsed_seconds: float
    prefix_cache_tokens: int
    prefix_cache_hits: int
    prefix_cache_reused_tokens: int
    mlx_active_memory_bytes: int
    mlx_peak_memory_bytes: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # lane fields (denoise_steps, acceptance, ...)

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return _with_lists(super().to_dict(), "logprobs", "tool_calls")


@dataclass(frozen=True, kw_only=True)
class GenerationFailed(Event):
    """The end of an accepted request that failed or was cancelled. What it had produced stays readable."""

    event: ClassVar[str] = "generation_result"
    request_id: str
    status: str = "failed"
    line: int | None = None  # of the input, 1-based
    code: str
    error: str
    generated_tokens: int = 0
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestRejected(Event):
    """A line or request that never became a row. `line` is 1-based; neither is set if the input cannot be opened."""

    event: ClassVar[str] = "request_error"
    line: int | None = None
    request_id: str | None = None
    code: str
    field_name: str | None = None
    error: str

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        if "field_name" in record:
            record["field"] = record.pop("field_name")
        return record


@dataclass(frozen=True, kw_only=True)
class InferenceSummary(Event):
    """Totals of one run of the scheduler, after the device is idle."""

    event: ClassVar[str] = "inference_summary"
    elapsed_seconds: float
    finished_requests: int
    failed_requests: int
    rejected_requests: int
    prompt_tokens: int
    generated_tokens: int
    forwards: int
    tokens_per_forward: float
    generated_tokens_per_second: float
    decode_scheduler_seconds: float
    peak_active_requests: int
    prefix_cache_hits: int
    prefix_cache_misses: int
    prefix_cache_reused_tokens: int
    mlx_peak_memory_bytes: int
    interrupted: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)  # lane totals (active_row_denoises, ...)


def _with_lists(record: dict[str, Any], *names: str) -> dict[str, Any]:
    """The record with the items of these members as records too."""
    for name in names:
        if record.get(name) is not None:
            record[name] = [item.to_dict() for item in record[name]]
    return record


def is_failure(event: Event) -> bool:
    """True for the events that make a run exit with status 1."""
    return isinstance(event, (GenerationFailed, RequestRejected))


def finite(value: float) -> float:
    """The value itself, or 0 for a ratio over a zero duration (never inf or NaN in a record)."""
    return value if math.isfinite(value) else 0.0
