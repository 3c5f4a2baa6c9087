"""The state of a chat and its slash commands, apart from any terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from polytoken.errors import RequestError, UsageError
from polytoken.events import GenerationResult
from polytoken.request import Request, RequestDefaults, parse_record, parse_sampling

FORMAT: Final = 1  # of saved conversations


class Leave(Exception):  # noqa: N818  (no error)
    """The user is done."""


@dataclass
class Totals:
    """Sums over the finished turns of a chat."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def add(self, result: GenerationResult) -> None:
        """Count one finished turn."""
        self.turns += 1
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.prefix_cache_tokens
        self.generated_tokens += result.generated_tokens
        self.forwards += result.forwards
        self.seconds += result.elapsed_seconds

    def describe(self) -> str:
        """One line for `/stats`."""
        return (
            f"{self.turns} turns, {self.generated_tokens} tokens in {self.seconds:.1f} s, "
            f"{self.generated_tokens / max(self.forwards, 1):.2f} tokens/forward, "
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens reused"
        )


@dataclass
class Conversation:
    """What has been said, and how the next answer is to be made.

    Attributes:
        defaults: limits, sampling, seed and switches of every turn.
        system: the system prompt, None for none.
        turns: user and assistant messages in order.
        asked: turns ever asked for; it numbers the requests of one engine.
    """

    defaults: RequestDefaults
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    asked: int = 0

    def ask(self, text: str) -> Request:
        """The request for the next answer. The turn counts only once `answered` is called."""
        self.asked += 1
        record = {
            "request_id": f"chat-{self.asked}",
            "messages": [*self._system_turn(), *self.turns, {"role": "user", "content": text}],
            "seed": self.defaults.seed,
        }
        return parse_record(record, self.defaults)

    def answered(self, question: str, answer: str) -> None:
        """Keep a turn, also one that was stopped half-way."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash and return what to tell the user.

        Raises:
            Leave: the user is done.
            UsageError: no such command, or it cannot be done; nothing has changed.
        """
        word, _, rest = line.strip().partition(" ")
        act = self._commands().get(word)
        if act is None:
            raise UsageError(f"no command {word}; /help lists them")
        return act(rest.strip())

    def _commands(self) -> Mapping[str, Callable[[str], str]]:
        return {
            "/system": self._set_system,
            "/reset": self._reset,
            "/stats": lambda _: self.totals.describe(),
            "/seed": self._set_seed,
            "/temperature": self._set_temperature,
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: HELP,
            "/exit": self._leave,
        }

    def _system_turn(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return "system prompt set" if text else "no system prompt"

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "conversation cleared"

    def _set_seed(self, text: str) -> str:
        try:
            self.defaults = replace(self.defaults, seed=int(text))
        except ValueError:
            raise UsageError(f"/seed wants an integer, not {text!r}") from None
        return f"seed {self.defaults.seed}"

    def _set_temperature(self, text: str) -> str:
        try:
            sampling = parse_sampling({"temperature": float(text)}, self.defaults.sampling)
        except (ValueError, RequestError):
            raise UsageError(f"/temperature wants a number of at least 0, not {text!r}") from None
        self.defaults = replace(self.defaults, sampling=sampling)
        return f"temperature {sampling.temperature:g}"

    def _save(self, name: str) -> str:
        if not name:
            raise UsageError("/save wants a file name")
        record = {"format": FORMAT, "system": self.system, "messages": self.turns}
        try:
            Path(name).expanduser().write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {name!r}: {error.strerror or error}") from None
        return f"{len(self.turns)} messages saved to {name}"

    def _load(self, name: str) -> str:
        if not name:
            raise UsageError("/load wants a file name")
        try:
            record = json.loads(Path(name).expanduser().read_text("utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {name!r}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name!r} is not JSON: {error}") from None
        self.system, self.turns = _checked(record, name)
        return f"{len(self.turns)} messages loaded from {name}"

    def _leave(self, _: str) -> str:
        raise Leave


def _checked(record: Any, name: str) -> tuple[str | None, list[dict[str, str]]]:
    """System prompt and turns of a saved conversation."""
    wrong = UsageError(f"{name!r} is not a conversation that /save wrote")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise wrong
    system, messages = record.get("system"), record.get("messages")
    if not isinstance(system, str | None) or not isinstance(messages, list):
        raise wrong
    for item in messages:
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            raise wrong
    return system, [{"role": item["role"], "content": item["content"]} for item in messages]


HELP: Final = """\
/system TEXT     set the system prompt; without TEXT there is none
/reset           forget the conversation, keep the system prompt
/stats           totals of this chat
/seed N          seed of the next answers
/temperature X   0 is greedy
/save FILE       write the conversation as JSON
/load FILE       go on with a saved one
/help            this list
/exit            leave (Ctrl-D does too)
A line that ends with \\ goes on in the next one; Ctrl-C stops an answer and keeps what is there."""
