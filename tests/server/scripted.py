"""An engine whose model says what the test tells it to, token by token, through the real tokenizer and text stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint.tokenizer import load_tokenizer
from polytoken.engine import Engine, Label, LoadedLane, SchedulerLimits
from polytoken.events import RuntimeLoaded
from polytoken.lanes.base import Commit, Lane
from polytoken.lanes.limits import fit_length
from polytoken.request import Request, SamplingParams
from polytoken.testkit.tokenizer import write_tokenizer
from polytoken.text.answer import open_answer
from polytoken.text.prompt import prompt_ids

CONTEXT = 4096


@dataclass(eq=False)
class Line:
    """One request and what is said to it."""

    request: Request
    ids: list[int]
    prompt_tokens: int
    cached_tokens: int = 0
    cache_miss: str | None = None
    prefill_remaining: int = 1
    said: int = 0


@dataclass
class Script:
    """What the model says.

    Attributes:
        says: text for a prompt's text; the end token follows it.
        pace: seconds per step.
        group: tokens per step.
        steps: of every request so far, by the text of its prompt.
        closed: requests whose rows were closed.
        gate: when there is one, steps wait until it is set.
        hold: tokens of a request that come before they wait.
    """

    says: Callable[[str], str] = lambda prompt: "ok"
    pace: float = 0.0
    group: int = 1
    steps: dict[str, int] = field(default_factory=dict)
    opened: int = 0
    closed: int = 0
    gate: threading.Event | None = None
    hold: int = 0

    def held(self, tokens: int = 0) -> threading.Event:
        """A new gate, closed, which lets so many tokens of a request through."""
        self.gate, self.hold = threading.Event(), tokens
        return self.gate


class ScriptedLane(Lane[Line]):
    """Commits the ids of the script. Text ends with the tokenizer's end token."""

    name, execution = "ar", "row_interleaved_singleton"

    def __init__(self, script: Script, tokenizer: Any) -> None:
        self.script, self.tokenizer = script, tokenizer
        self.bank = StateBank(0, identity=StateIdentity(checkpoint="scripted", lane=self.name, grid=1))

    def open(self, request: Request, ids: Sequence[int]) -> Line:
        request = fit_length(request, len(ids), max_positions=CONTEXT)
        text = self.script.says(self.tokenizer.decode(list(ids)))
        said = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_ids[0]]
        self.script.opened += 1
        return Line(request, said, len(ids))

    def prefill_cost(self, row: Line) -> int:
        return row.prefill_remaining

    def prefill_step(self, row: Line) -> bool:
        row.prefill_remaining = 0
        return True

    def step(self, rows: Sequence[Line]) -> list[Commit | Exception]:
        gate = self.script.gate
        if gate is not None and any(row.said >= self.script.hold for row in rows):
            assert gate.wait(60)
        if self.script.pace:
            time.sleep(self.script.pace)
        return [self._commit(row) for row in rows]

    def _commit(self, row: Line) -> Commit:
        group = row.ids[row.said : row.said + self.script.group]
        row.said += len(group)
        self.script.steps[row.request.request_id] = row.said
        return Commit(
            token_ids=tuple(group),
            stop_reason="eos" if row.said >= len(row.ids) else None,
            proposed=len(group),
        )

    def close(self, row: Line, *, keep: bool) -> None:
        del keep
        self.script.closed += 1

    def settle(self) -> None:
        return None

    def statistics(self) -> Mapping[str, Any]:
        return {"open_rows": self.script.opened - self.script.closed}


def scripted_engine(folder: Path, script: Script, *, style: str = "qwen", **limits: Any) -> Engine:
    """A started engine over the script, with the style's tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, style, vocab_size=512)  # type: ignore[arg-type]
    (folder / "config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    lane = ScriptedLane(script, tokenizer)
    stop_ids = frozenset(tokenizer.eos_ids)

    def load() -> LoadedLane:
        return LoadedLane(
            lane=lane,
            encode=lambda request: prompt_ids(tokenizer, request),
            open_text=lambda request, ids: open_answer(tokenizer, request, ids, stop_ids=stop_ids),
            label=Label("scripted"),
            loaded=RuntimeLoaded(
                engine="test", checkpoint="scripted", step=0, restored_trainable_tensors=0, backend="none", lane="ar",
                execution=lane.execution, load_seconds=0.0, extra={"max_positions": CONTEXT},
            ),
            sampling=SamplingParams(),
            tokenizer=tokenizer,
        )  # fmt: skip

    engine = Engine(load, SchedulerLimits(**limits))
    engine.start()
    return engine
