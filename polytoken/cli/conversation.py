"""The state of a chat and its slash commands, apart from any terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from polytoken.cli.chat_files import (
    SavedConversation,
    conversation_names,
    read_conversation,
    write_conversation,
)
from polytoken.errors import RequestError, UsageError
from polytoken.events import GenerationResult
from polytoken.request import Request, RequestDefaults, parse_record, parse_sampling


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
        session: the engine's name for it, under which it keeps the state behind the last turn.
        path: where it is saved by itself after every turn, None for nowhere.
        folder: where sessions are kept, for `/sessions`.
        tries: how often the question at hand was answered before; each try draws with a seed of its own.
    """

    defaults: RequestDefaults
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    asked: int = 0
    session: str = "chat"
    path: Path | None = None
    folder: Path | None = None
    tries: int = 0

    def saved(self) -> SavedConversation:
        """What a file keeps of it."""
        return SavedConversation(self.system, self.turns)

    def resume(self, saved: SavedConversation) -> None:
        """Go on from what a file holds."""
        self.system, self.turns = saved.system, saved.turns

    def ask(self, text: str) -> Request:
        """The request for the next answer. The turn counts only once `answered` is called."""
        self.asked += 1
        record = {
            "request_id": f"chat-{self.asked}",
            "messages": [*self._system_turn(), *self.turns, {"role": "user", "content": text}],
            "seed": self.defaults.seed + self.tries,
            "session": self.session,
        }
        return parse_record(record, self.defaults)

    @property
    def last_question(self) -> str:
        """The question that was answered last. Raises UsageError if there is none."""
        if len(self.turns) < 2 or (self.turns[-2]["role"], self.turns[-1]["role"]) != ("user", "assistant"):
            raise UsageError("nothing has been answered yet")
        return self.turns[-2]["content"]

    def answered(self, question: str, answer: str) -> None:
        """Keep a turn, also one that was stopped half-way."""
        self.tries = 0
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
            "/sessions": self._list,
            "/undo": self._undo,
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
        path = self.path if not name else Path(name).expanduser()
        if path is None:
            raise UsageError("/save wants a file name; a chat with --session NAME is saved by itself")
        write_conversation(path, self.saved())
        return f"{len(self.turns)} messages saved to {name or path}"

    def _load(self, name: str) -> str:
        if not name:
            raise UsageError("/load wants a file name")
        self.resume(read_conversation(Path(name).expanduser()))
        return f"{len(self.turns)} messages loaded from {name}"

    def _list(self, _: str) -> str:
        if self.folder is None:
            raise UsageError("no folder of sessions")
        names = conversation_names(self.folder)
        return "\n".join(names) if names else f"no sessions in {self.folder}"

    def _undo(self, _: str) -> str:
        question = self.last_question
        del self.turns[-2:]
        return f"took back: {question}"

    def _leave(self, _: str) -> str:
        raise Leave


HELP: Final = """\
/system TEXT     set the system prompt; without TEXT there is none
/reset           forget the conversation, keep the system prompt
/stats           totals of this chat
/seed N          seed of the next answers
/temperature X   0 is greedy
/undo            take the last question and its answer back
/retry           answer the last question again (drawn anew; a greedy answer stays the same)
/save FILE       write the conversation as JSON
/load FILE       go on with a saved one
/sessions        names of the sessions that are kept (chat --session NAME)
/help            this list
/exit            leave (Ctrl-D does too)
A line that ends with \\ goes on in the next one; Ctrl-C stops an answer and keeps what is there."""
