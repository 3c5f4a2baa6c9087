"""One accepted request on its way through the scheduler: what it has produced, when, and the events that tell so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from polytoken.engine.metrics import Totals
from polytoken.errors import PolytokenError
from polytoken.events import (
    AnswerDelta,
    AnswerSum,
    Event,
    GenerationFailed,
    GenerationResult,
    RequestStarted,
    Token,
    TokenLogprob,
)
from polytoken.lanes.base import Commit, Row
from polytoken.request import Request

Sink = Callable[[Event], None]


class TextStep(Protocol):
    """What one push of ids did to the visible text."""

    @property
    def consumed(self) -> int:
        """How many of the pushed ids belong to the request; fewer than pushed only after a stop string."""
        ...

    @property
    def delta(self) -> str: ...

    @property
    def stop_string(self) -> str | None: ...


class TextPort(Protocol):
    """The visible text of one request, fed with ids as they are committed."""

    def push(self, ids: tuple[int, ...], /) -> TextStep: ...

    def finish(self) -> str:
        """Release what was held back (half a character, the start of a stop string)."""
        ...

    def drain(self) -> AnswerDelta | None:
        """What reasoning, content and tool calls gained since the last call; None if they are not told apart."""
        ...

    @property
    def text(self) -> str: ...

    @property
    def full_text(self) -> str: ...


class Label(NamedTuple):
    """Which weights answer: the checkpoint's name and its training step."""

    checkpoint: str
    step: int = 0


@dataclass(eq=False, kw_only=True)
class Job:
    """The scheduler's record of one request. Times are readings of the scheduler's clock, in seconds.

    Attributes:
        sink: where its events go.
        totals: where it counts: those of its run, or the scheduler's own.
        token_events: whether `token` events are wanted.
        denoising: True on the canvas lane, whose steps are denoises and are reported as such.
        row: the lane's row while one is open.
        doom: why it has to end at the next safe point (cancelled, interrupted), or None.
        overtaken: prefill steps of others since its own latest one.
        active_at: when the prompt was prefilled.
        first_step_at, last_step_at: when the first and the latest step reached the host.
        first_commit_at, last_commit_at: the same for steps that committed at least one id.
        history_miss: where the messages part from what their session has committed, None if they don't.
        answer: reasoning, content and tool calls, where the text port tells them apart.
        first_commit_tokens: how many ids the first of these committed; they are not part of the decode rate.
        extra: sums of the numbers in the lane's commit details, and the last value of anything else.
    """

    request: Request
    sink: Sink
    totals: Totals
    token_events: bool = True
    denoising: bool = False
    row: Row | None = None
    text: TextPort | None = None
    doom: PolytokenError | None = None
    prefill_seconds: float = 0.0
    overtaken: int = 0
    active_at: float = 0.0
    steps: int = 0
    first_step_at: float | None = None
    last_step_at: float = 0.0
    first_commit_at: float | None = None
    first_commit_tokens: int = 0
    last_commit_at: float = 0.0
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    forwards: int = 0
    stop_reason: str | None = None
    stop_string: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    answer: AnswerSum | None = None
    history_miss: str | None = None

    def started(self) -> RequestStarted:
        assert self.row is not None
        return RequestStarted(
            request_id=self.request.request_id,
            prompt_tokens=self.row.prompt_tokens,
            prefix_cache_tokens=self.row.cached_tokens,
            prefix_cache_miss=self.row.cache_miss,
            history_miss=self.history_miss,
            prefill_seconds=self.prefill_seconds,
        )

    def take(self, commit: Commit, now: float) -> Token | None:
        """Add one commit that reached the host at `now`, set `stop_reason` if it ends the row, and make its event.

        The first stop counts: a stop string that completes inside the commit cuts the ids behind it, a stop of the
        lane inside the budget comes next, and the cap on new tokens last.
        """
        assert self.text is not None
        self._count(commit, now)
        room = self.request.max_new_tokens - len(self.ids)
        ids = commit.token_ids[:room]
        step = self.text.push(ids)
        ids = ids[: step.consumed]
        self.ids.extend(ids)
        if ids:
            if self.first_commit_at is None:
                self.first_commit_at, self.first_commit_tokens = now, len(ids)
            self.last_commit_at = now
        if step.stop_string is not None:
            self.stop_reason, self.stop_string = "stop_string", step.stop_string
        elif commit.stop_reason is not None and len(commit.token_ids) <= room:
            self.stop_reason = commit.stop_reason
        elif len(self.ids) >= self.request.max_new_tokens:
            self.stop_reason = "max_new_tokens"
        delta = step.delta
        if self.stop_reason is not None and self.stop_string is None:
            delta += self.text.finish()
        gain = self._gain()
        logprobs = None if commit.logprobs is None else commit.logprobs[: len(ids)]
        self.logprobs.extend(logprobs or ())
        if not self.token_events or not (ids or delta or (gain is not None and gain.tool_calls)):
            return None
        return Token(
            request_id=self.request.request_id,
            token_ids=ids,
            generated_tokens=len(self.ids),
            text=self.text.full_text,
            delta=delta,
            denoise_steps=self.steps if self.denoising else None,
            forwards=self.forwards,
            reasoning_delta=(gain.reasoning or None) if gain is not None else None,
            content_delta=gain.content if gain is not None else None,
            tool_calls=(gain.tool_calls or None) if gain is not None else None,
            logprobs=logprobs,
        )

    def _gain(self) -> AnswerDelta | None:
        assert self.text is not None
        gain = self.text.drain()
        if gain is not None:
            self.answer = self.answer or AnswerSum()
            self.answer.add(gain)
        return gain

    def _count(self, commit: Commit, now: float) -> None:
        self.steps += 1
        self.first_step_at = now if self.first_step_at is None else self.first_step_at
        self.last_step_at = now
        self.forwards += commit.forwards
        for name, value in commit.detail.items():
            summed = isinstance(value, (int, float))
            self.extra[name] = self.extra.get(name, 0) + value if summed else value

    def finished(self, now: float, *, lane: str, label: Label, statistics: Mapping[str, Any]) -> GenerationResult:
        """The result at clock reading `now`; `statistics` are the lane's totals (cache and memory)."""
        assert self.row is not None and self.text is not None and self.stop_reason is not None
        generated = len(self.ids)
        created = self.request.created
        rest = generated - self.first_commit_tokens
        decoding = self.last_commit_at - (self.first_commit_at or 0.0)
        return GenerationResult(
            request_id=self.request.request_id,
            checkpoint=label.checkpoint,
            step=label.step,
            lane=lane,
            thinking="on" if self.request.think else "off",
            stop_reason=self.stop_reason,
            stop_string=self.stop_string,
            seed=self.request.seed,
            prompt_tokens=self.row.prompt_tokens,
            generated_tokens=generated,
            token_ids=tuple(self.ids),
            text=self.text.text,
            **({} if self.answer is None else self.answer.fields()),
            forwards=self.forwards,
            tokens_per_forward=generated / max(self.forwards, 1),
            queue_seconds=self.active_at - created,
            prefill_seconds=self.prefill_seconds,
            ttft_seconds=None if self.first_commit_at is None else self.first_commit_at - created,
            decode_tokens_per_second=rest / decoding if rest and decoding > 0 else None,
            elapsed_seconds=now - created,
            prefix_cache_tokens=self.row.cached_tokens,
            prefix_cache_hits=int(statistics.get("prefix_cache_hits", 0)),
            prefix_cache_reused_tokens=int(statistics.get("prefix_cache_reused_tokens", 0)),
            mlx_active_memory_bytes=int(statistics.get("mlx_active_memory_bytes", 0)),
            mlx_peak_memory_bytes=int(statistics.get("mlx_peak_memory_bytes", 0)),
            logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs),
            extra=self._denoise_fields() | self.extra,
        )

    def _denoise_fields(self) -> dict[str, Any]:
        if not self.denoising or self.first_step_at is None:
            return {}
        return {
            "denoise_steps": self.steps,
            "ttfd_seconds": self.first_step_at - self.request.created,
            "denoise_steps_per_second": self.steps / max(self.last_step_at - self.active_at, 1e-9),
        }

    def failed(self, code: str, error: str) -> GenerationFailed:
        return GenerationFailed(
            request_id=self.request.request_id,
            line=self.request.line,
            code=code,
            error=error,
            generated_tokens=len(self.ids),
            text=None if self.text is None else self.text.text,
        )
