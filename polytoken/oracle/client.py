"""A client of any OpenAI-compatible server: warm-up and three turns, written down as the source of an oracle's chat.

It speaks plain HTTP by the standard library alone, so that what it proves depends on nothing else.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import urlsplit

from polytoken.errors import PolytokenError, UsageError
from polytoken.oracle.prompts import FOLLOW_UPS, PING
from polytoken.oracle.source import CHECKS

Emit = Callable[..., None]
"""(event, **fields): takes a record."""

_OWN_ENGINE: Final = "polytoken"


class ServerFault(PolytokenError):  # noqa: N818  (a server's, not ours)
    """The server did not answer as it should. Codes: `no_server`, `server_refused`, `bad_answer`."""

    code = "no_server"


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """A client run.

    Attributes:
        url: of the server, up to and without `/v1`.
        model: as the server calls it.
        first: the first user turn; two fixed ones follow.
        lane: `mtp` or `ar`, which the server cannot be asked in a standard way.
        prefill_chunk, context_tokens: of the server.
        canary: whether the oracle's run will have one.
        counts_end: whether the server counts the id that ends an answer; None for what is known of it.
        bootstrap: whether the server encodes its template's head before the first request.
        think: whether reasoning is asked for.

    Raises:
        UsageError: an address that is none of HTTP.
    """

    url: str
    model: str
    first: str
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    seed: int = 0
    max_generated_tokens: int = 2048
    warmup_tokens: int = 32
    lane: str | None = None
    prefill_chunk: int = 256
    context_tokens: int | None = None
    canary: bool = True
    counts_end: bool | None = None
    bootstrap: bool = False
    think: bool = True
    api_key: str | None = None
    timeout: float = 600.0
    warmup_prompt: str = PING
    follow_ups: tuple[str, ...] = FOLLOW_UPS

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            right = False
        if not right:
            raise UsageError(f"--url: {self.url!r} must be of the form http://host:port", field="--url")

    @property
    def prompts(self) -> list[str]:
        return [self.first, *self.follow_ups]

    @property
    def held_elsewhere(self) -> tuple[str, ...]:
        """What means the same with another engine: its cache has frontiers of its own, and so have its draws."""
        return ("prompt_tokens",) if self.temperature > 0 else ("prompt_tokens", "completion_tokens", "text")


@dataclass(eq=False)
class ChatClient:
    """One run of a plan against its server."""

    plan: EvalPlan
    emit: Emit
    _about: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> bool:
        """Whether all turns were answered to a natural end; records are emitted as they come.

        Raises:
            ServerFault: the server is not there, refuses, or answers what is no answer.
        """
        self._about = self._health()
        self._start()
        warm, _ = self._ask([{"role": "user", "content": self.plan.warmup_prompt}], self.plan.warmup_tokens)
        self.emit("warmup_result", ok=True, completion_tokens=warm["tokens"]["completion"], **warm)
        messages: list[dict[str, str]] = []
        complete = True
        for turn, prompt in enumerate(self.plan.prompts, start=1):
            messages.append({"role": "user", "content": prompt})
            result, seconds = self._ask(messages, self.plan.max_generated_tokens)
            self.emit("result", turn=turn, ok=True, seconds=seconds, **result)
            complete = complete and result["finish_reason"] == "stop"
            messages.append({"role": "assistant", "content": result["content"]})
        return complete

    def _start(self) -> None:
        plan, about = self.plan, self._about
        own = bool(about)
        self.emit(
            "start",
            model=plan.model,
            server=about.get("version") and f"{_OWN_ENGINE} {about['version']}",
            plain_chat=True,
            system_prompt=None,
            canary=plan.canary,
            prompts=plan.prompts,
            warmup={
                "enabled": True,
                "prompt": plan.warmup_prompt,
                "max_generated_tokens": plan.warmup_tokens,
            },
            bootstrap=plan.bootstrap,
            counts_end=own if plan.counts_end is None else plan.counts_end,
            held=list(CHECKS if own else plan.held_elsewhere),
            settings={
                "temperature": plan.temperature,
                "top_p": plan.top_p,
                "top_k": plan.top_k,
                "min_p": 0,
                "seed": plan.seed,
                "reasoning": "low" if plan.think else "off",
                "quality": False,
                "power_percent": 100,
                "prefill_chunk": plan.prefill_chunk,
                "max_generated_tokens": plan.max_generated_tokens,
                "context_tokens": plan.context_tokens or about.get("context") or 1 << 20,
                "acceleration": {"kind": "mtp", "enabled": (plan.lane or about.get("lane") or "ar") == "mtp"},
            },
        )

    def _ask(self, messages: list[dict[str, str]], limit: int) -> tuple[dict[str, Any], float]:
        """One answer in the words of the records, and how long it took."""
        plan = self.plan
        body = {
            "model": plan.model,
            "messages": messages,
            "max_tokens": limit,
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "top_k": plan.top_k,
            "seed": plan.seed,
            "stream": False,
            "chat_template_kwargs": {"enable_thinking": plan.think},
        }
        start = time.perf_counter()
        answer = self._call("/v1/chat/completions", body)
        seconds = time.perf_counter() - start
        try:
            result = _read_answer(answer)
        except KeyError as missing:
            raise ServerFault(f"the server's answer lacks {missing}", code="bad_answer") from None
        except (AttributeError, TypeError, ValueError):
            raise ServerFault("the server's answer has a field of the wrong type", code="bad_answer") from None
        return result, seconds

    def _health(self) -> dict[str, Any]:
        """What our own server says of the model; {} from any other."""
        try:
            record = self._call("/health", None)
        except ServerFault as fault:
            if fault.code == "no_server":
                raise
            return {}
        model = record.get("models", {}).get(self.plan.model) if isinstance(record.get("models"), dict) else None
        return {} if model is None else {"version": record.get("version"), **model}

    def _call(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        plan = self.plan
        headers = {"Content-Type": "application/json"}
        if plan.api_key is not None:
            headers["Authorization"] = f"Bearer {plan.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(plan.url.rstrip("/") + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=plan.timeout) as response:
                record = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise ServerFault(f"{path}: status {error.code}: {_why(error)}", code="server_refused") from None
        except (ValueError, RecursionError) as error:
            raise ServerFault(f"{path}: no JSON: {error}", code="bad_answer") from None
        except HTTPException as error:  # no HTTP, or an answer that breaks off
            what = f"{path}: no whole answer of HTTP: {type(error).__name__}"
            raise ServerFault(what, code="bad_answer") from None
        except OSError as error:
            raise ServerFault(f"no server answers at {plan.url}: {error}", code="no_server", field="--url") from None
        if not isinstance(record, dict):
            raise ServerFault(f"{path}: the answer is no object", code="bad_answer")
        return record


def _why(error: urllib.error.HTTPError) -> str:
    """The beginning of what a server says of a refusal, in one line."""
    try:
        return " ".join(error.read().decode(errors="replace").split())[:300]
    except (HTTPException, OSError):
        return "its reason broke off"


def _read_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The one choice of an answer in the words of the records. Raises KeyError, or another for a wrong type."""
    (choice,) = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    result = {
        "finish_reason": choice["finish_reason"],
        "tokens": {
            "prompt": usage["prompt_tokens"],
            "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            "completion": usage["completion_tokens"],
        },
        "reasoning": reasoning,
        "content": message.get("content") or "",
    }
    texts = (result["content"], reasoning or "")
    if not all(type(count) is int for count in result["tokens"].values()) or not all(isinstance(t, str) for t in texts):
        raise TypeError("counts are whole numbers, contents texts")
    return result
