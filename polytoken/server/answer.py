"""The answer of one choice while it comes: reasoning, content and tool calls, and what is told at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polytoken.events import GenerationResult, Token, TokenLogprob, ToolCallDelta, ToolCallSum
from polytoken.text.toolcalls.parser import ToolCallParser

_FINISH: Final = {
    "turn_end": "stop",
    "eos": "stop",
    "stop_string": "stop",
    "max_new_tokens": "length",
    "max_denoising_steps": "length",
    "context_full": "length",
    "episode_watchdog": "length",
}


@dataclass(frozen=True)
class Reasoning:
    """More of the model's notes."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


Delta = Reasoning | Content | ToolCallDelta


@dataclass
class Usage:
    """Tokens of one call, over all of its choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(eq=False)
class Answer:
    """One choice. Fed with the engine's events, it gives what clients see.

    Attributes:
        parser: finds tool calls in content, where the engine does not because the template knows no markup.
        reasoning, content: so far.
        calls: tool calls so far.
        logprobs: of the tokens so far, when they were asked for.
        result: the engine's, at the end.
    """

    parser: ToolCallParser | None = None
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: ToolCallSum = field(default_factory=ToolCallSum)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: GenerationResult | None = None

    def push(self, event: Token) -> list[Delta]:
        """What these tokens add, in order."""
        self.logprobs.extend(event.logprobs or ())
        deltas: list[Delta] = []
        if event.reasoning_delta:
            self.reasoning.append(event.reasoning_delta)
            deltas.append(Reasoning(event.reasoning_delta))
        deltas += self._content(event.delta if event.content_delta is None else event.content_delta)
        for step in event.tool_calls or ():
            self.calls.add(step)
            deltas.append(step)
        return deltas

    def finish(self, result: GenerationResult) -> list[Delta]:
        """What was held back, once the engine has ended."""
        self.result = result
        return [] if self.parser is None else self._sort(self.parser.finish())

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its tags included."""
        return 0 if self.result is None else self.result.reasoning_tokens or 0

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        assert self.result is not None
        reason = _FINISH.get(self.result.stop_reason, "stop")
        return "tool_calls" if reason == "stop" and self.calls.calls else reason

    def _content(self, text: str) -> list[Delta]:
        if not text:
            return []
        return self._sort([text] if self.parser is None else self.parser.push(text))

    def _sort(self, pieces: Sequence[str | ToolCallDelta]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self.calls.add(piece)
                deltas.append(piece)
            elif piece:
                self.content.append(piece)
                deltas.append(Content(piece))
        return deltas


def usage_of(answers: Sequence[Answer], *, per_prompt: int = 1) -> Usage:
    """The sum over choices; the prompt of several choices counts once.

    Args:
        per_prompt: choices of one prompt, which stand side by side.
    """
    usage = Usage()
    for index, answer in enumerate(answers):
        result = answer.result
        if result is None:
            continue
        usage.completion += result.generated_tokens
        usage.reasoning += answer.reasoning_tokens
        if index % per_prompt == 0:
            usage.prompt += result.prompt_tokens
            usage.cached += result.prefix_cache_tokens
    return usage


def stats_of(result: GenerationResult) -> dict[str, Any]:
    """The engine's own counts and times, as llama.cpp's clients know them, and what speculation did."""
    extra = result.extra
    timings: dict[str, Any] = {
        "queue_ms": 1000 * (result.queue_seconds - result.prefill_seconds),
        "prompt_n": result.prompt_tokens - result.prefix_cache_tokens,
        "prompt_ms": 1000 * result.prefill_seconds,
        "predicted_n": result.generated_tokens,
        "predicted_ms": 1000 * (result.elapsed_seconds - result.queue_seconds),
        "predicted_per_second": result.decode_tokens_per_second,
        "ttft_ms": None if result.ttft_seconds is None else 1000 * result.ttft_seconds,
        "tokens_per_forward": result.tokens_per_forward,
        "forwards": result.forwards,
        "lane": result.lane,
        "seed": result.seed,
        "stop_reason": result.stop_reason,
    }
    for theirs, ours in (("draft_n", "drafted_tokens"), ("draft_n_accepted", "accepted_drafts")):
        if ours in extra:
            timings[theirs] = extra[ours]
    for name in ("speculation", "drafted_by_depth", "accepted_by_depth", "denoise_steps"):
        if name in extra:
            timings[name] = extra[name]
    return timings
