"""The source of a chat: the records of an earlier client run, and what of them a run of the oracle has to reproduce.

JSON lines with exactly one `start`, one `warmup_result` and three `result`, as `polytoken eval chat` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polytoken.errors import UsageError
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.plan import check_sampling
from polytoken.oracle.receipt import Record, read_receipts
from polytoken.request import SamplingParams

TURNS: Final = 3
CLOSE_THINK: Final = "</think>"
CHECKS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "text")
_SHOWN: Final = 40  # characters of two texts from where they part
_FLAG: Final = "--source-run"


@dataclass(frozen=True, kw_only=True)
class SourceTurn:
    """What one turn of the source looked like from the client's side."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning: str | None
    content: str

    @property
    def text(self) -> str:
        """Reasoning, its closing tag and the answer, or the answer alone where there was no reasoning."""
        return self.content if self.reasoning is None else self.reasoning + CLOSE_THINK + self.content


@dataclass(frozen=True, kw_only=True)
class SourceRun:
    """A checked source.

    Attributes:
        prompts: user turns.
        warmup: `prompt` and `max_generated_tokens` of the warm-up.
        warmup_result: how it ended.
        counts_end: whether its server counts the id that ends an answer.
        bootstrap: whether the server had encoded its template's head before the first request.
        held: what of a turn is held to the source. Another engine has frontiers and draws of its own: `eval chat` says
            which of `CHECKS` mean the same there.
    """

    prompts: tuple[str, ...]
    warmup: Mapping[str, Any]
    warmup_result: Mapping[str, Any]
    turns: tuple[SourceTurn, ...]
    sampling: SamplingParams
    seed: int
    max_generated_tokens: int
    context_tokens: int
    prefill_chunk: int
    think: bool
    bootstrap: bool
    counts_end: bool
    held: tuple[str, ...] = CHECKS

    def limit(self, prompt_tokens: int) -> int:
        """Tokens that a turn may have. Raises UsageError when the context has no room."""
        limit = min(self.max_generated_tokens, self.context_tokens - prompt_tokens)
        if limit <= 0:
            raise UsageError(f"{_FLAG}: a prompt of {prompt_tokens} tokens exhausts the source's context", field=_FLAG)
        return limit

    def check_turn(
        self, step: int, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, text: str
    ) -> tuple[Record, Record]:
        """Each thing that must agree and whether it does; and of those that do not, what is here and in the source."""
        turn = self.turns[step]
        pairs: dict[str, tuple[Any, Any]] = {
            "prompt_tokens": (prompt_tokens, turn.prompt_tokens),
            "cached_tokens": (cached_tokens, turn.cached_tokens),
            "completion_tokens": (completion_tokens, turn.completion_tokens),
            "text": (text, turn.text),
        }
        held = {name: pairs[name] for name in self.held}
        wrong = {name: _difference(here, there) for name, (here, there) in held.items() if here != there}
        return {name: name not in wrong for name in held}, wrong


def read_source(path: Path, *, mtp: bool, canary: bool) -> SourceRun:
    """The source in a file.

    Raises:
        UsageError: what it lacks, or how it differs from the run that is asked for.
    """
    return parse_source(read_receipts(path, flag=_FLAG), mtp=mtp, canary=canary)


def parse_source(records: Sequence[Record], *, mtp: bool, canary: bool) -> SourceRun:
    """The source among these records. Raises UsageError."""
    start = _only(records, "start")
    warmup_result = _only(records, "warmup_result")
    results = [record for record in records if record["event"] == "result"]
    try:
        _check(start, results, warmup_result, mtp=mtp, canary=canary)
        settings = start["settings"]
        return SourceRun(
            prompts=tuple(start["prompts"]),
            warmup=start["warmup"],
            warmup_result=warmup_result,
            turns=tuple(_turn(record) for record in results),
            sampling=check_sampling(
                settings["temperature"], top_p=settings["top_p"], top_k=settings["top_k"], flag=_FLAG
            ),
            seed=settings["seed"],
            max_generated_tokens=settings["max_generated_tokens"],
            context_tokens=settings["context_tokens"],
            prefill_chunk=settings["prefill_chunk"],
            think=settings["reasoning"] != "off",
            bootstrap=bool(start.get("bootstrap", True)),
            counts_end=bool(start.get("counts_end", False)),
            held=_held(start.get("held", CHECKS)),
        )
    except KeyError as missing:
        raise UsageError(f"{_FLAG}: the source has no {missing}", field=_FLAG) from None
    except (TypeError, AttributeError):
        raise UsageError(f"{_FLAG}: a field of the source is of the wrong type", field=_FLAG) from None


def require(checks: Mapping[str, bool], what: str, differences: Record | None = None) -> None:
    """Raise MismatchError, naming what differs and how, unless all checks hold."""
    wrong = [name for name, holds in checks.items() if not holds]
    if not wrong:
        return
    how = dict.fromkeys(wrong, "")
    for name, found in (differences or {}).items():
        at = f"from character {found['at']}: " if "at" in found else ""
        how[name] = f" ({at}{found['here']!r} against {found['source']!r})"
    text = ", ".join(name + how[name] for name in wrong)
    raise MismatchError(f"{what} differs from the source in {text}", code="source_mismatch", field=wrong[0])


def _difference(here: Any, there: Any) -> Record:
    """What is here and in the source; of texts from where they part, and not much of it."""
    if not isinstance(here, str):
        return {"here": here, "source": there}
    at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return {"at": at, "here": here[at : at + _SHOWN], "source": there[at : at + _SHOWN]}


def _only(records: Sequence[Record], event: str) -> Record:
    found = [record for record in records if record["event"] == event]
    if len(found) != 1:
        raise UsageError(f"{_FLAG}: the source must have one {event} record, not {len(found)}", field=_FLAG)
    return found[0]


def _check(start: Record, results: Sequence[Record], warmup: Record, *, mtp: bool, canary: bool) -> None:
    settings = start["settings"]
    acceleration = settings["acceleration"]
    rules = {
        "plain_chat is true": start["plain_chat"] is True,
        "there is no system_prompt": not start["system_prompt"],
        f"canary is {'on' if canary else 'off'}, as here": start["canary"] == canary,
        "reasoning is low or off": settings["reasoning"] in ("low", "off"),
        "power_percent is 100": settings["power_percent"] == 100,
        "prefill_chunk is a number of tokens": _count(settings["prefill_chunk"]),
        "min_p is 0": settings["min_p"] == 0,
        "quality is off": not settings["quality"],
        "there is a seed": isinstance(settings["seed"], int),
        "acceleration is of kind mtp": acceleration["kind"] == "mtp",
        f"acceleration is {'on' if mtp else 'off'}, as here": acceleration["enabled"] == mtp,
        "max_generated_tokens is a number of tokens": _count(settings["max_generated_tokens"]),
        "context_tokens is a number of tokens": _count(settings["context_tokens"]),
        "the warm-up's answer has a finish_reason and counted tokens": isinstance(warmup["finish_reason"], str)
        and isinstance(warmup["completion_tokens"], int)
        and isinstance(warmup.get("tokens", {}), dict),
        "the warm-up's max_generated_tokens is a number of tokens": _count(start["warmup"]["max_generated_tokens"]),
        f"there are {TURNS} prompts": len(start["prompts"]) == TURNS,
        "every prompt is a text": all(
            isinstance(prompt, str) for prompt in (*start["prompts"], start["warmup"]["prompt"])
        ),
        f"the turns are 1 to {TURNS}": [record["turn"] for record in results] == list(range(1, TURNS + 1)),
        "every turn is ok": all(record["ok"] for record in results),
        "every turn has counted tokens and a text": all(map(_answered, results)),
        "every turn ended with stop": all(record["finish_reason"] == "stop" for record in results),
        "warm-up is on and ok": bool(start["warmup"]["enabled"] and warmup["ok"]),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise UsageError(f"{_FLAG}: a source counts only where {broken[0]}", field=_FLAG)


def _answered(record: Record) -> bool:
    counts = (record["tokens"][name] for name in ("prompt", "cached", "completion"))
    texts = (record["content"], record["reasoning"] or "")
    return all(isinstance(count, int) for count in counts) and all(isinstance(text, str) for text in texts)


def _held(names: Sequence[str]) -> tuple[str, ...]:
    wrong = [name for name in names if name not in CHECKS]
    if wrong or "prompt_tokens" not in names:
        raise UsageError(
            f"{_FLAG}: held must name prompt_tokens and no other than {', '.join(CHECKS)}, not {list(names)}",
            field=_FLAG,
        )
    return tuple(name for name in CHECKS if name in names)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _turn(record: Record) -> SourceTurn:
    tokens = record["tokens"]
    return SourceTurn(
        prompt_tokens=tokens["prompt"],
        cached_tokens=tokens["cached"],
        completion_tokens=tokens["completion"],
        reasoning=record["reasoning"] or None,
        content=record["content"],
    )
