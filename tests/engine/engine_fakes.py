"""A scripted lane, text and clock: the engine under test needs no model, no tokenizer and no real time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polytoken.engine import Label, LoadedLane, Scheduler, SchedulerLimits
from polytoken.errors import RequestError
from polytoken.events import Event, GenerationFailed, GenerationResult, RequestRejected, RequestStarted, RuntimeLoaded
from polytoken.lanes.base import Commit, Lane
from polytoken.request import Request, SamplingParams

CHUNK = 256
STOP_ID = 0


class FakeClock:
    """Seconds that pass only when told to, or by `tick` at every reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass(kw_only=True)
class Script:
    """What the lane does for one request. Commits default to single ids, a function of the request's seed."""

    prompt: int = 1
    cached: int = 0
    commits: list[Commit | Exception] | None = None
    open_error: Exception | None = None
    encode_error: Exception | None = None
    prefill_error: Exception | None = None
    prefill_error_at: int = 0  # prompt position from which a prefill step fails
    close_error: Exception | None = None


@dataclass(eq=False)
class FakeRow:
    request: Request
    prompt_tokens: int
    cached_tokens: int
    script: Script
    position: int = 0
    steps: int = 0
    cache_miss: str | None = None
    closed: int = 0
    kept: bool | None = None

    @property
    def prefill_remaining(self) -> int:
        return self.prompt_tokens - self.position


@dataclass
class Turn:
    """What one turn did, in order: (request id, prompt tokens) and the ids of each step."""

    prefill: list[tuple[str, int]] = field(default_factory=list)
    stepped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        left = " ".join(f"{name}{count}" for name, count in self.prefill) or "-"
        return f"{left} | {' '.join(self.stepped) or '-'}"


class FakeLane(Lane[FakeRow]):
    execution = "row_interleaved_singleton"

    def __init__(self, scripts: Mapping[str, Script] | None = None, *, chunk: int = CHUNK, name: str = "ar") -> None:
        self.name = name
        self.scripts = dict(scripts or {})
        self.chunk = chunk
        self.rows: list[FakeRow] = []
        self.turn = Turn()
        self.step_error: Callable[[list[str]], BaseException | None] = lambda ids: None
        self.before_step: Callable[[list[str]], None] = lambda ids: None
        self.cohorts: list[list[str]] = []
        self.settled = 0

    def script(self, request: Request) -> Script:
        return self.scripts.get(request.request_id, Script())

    def open(self, request: Request, ids: Sequence[int]) -> FakeRow:
        script = self.script(request)
        if script.open_error is not None:
            raise script.open_error
        row = FakeRow(request, len(ids), script.cached, script, position=script.cached)
        self.rows.append(row)
        return row

    def prefill_cost(self, row: FakeRow) -> int:
        assert not row.closed
        return min(self.chunk, row.prefill_remaining)

    def prefill_step(self, row: FakeRow) -> bool:
        assert not row.closed
        cost = self.prefill_cost(row)
        self.turn.prefill.append((row.request.request_id, cost))
        if row.script.prefill_error is not None and row.position + cost > row.script.prefill_error_at:
            raise row.script.prefill_error
        row.position += cost
        return row.prefill_remaining == 0

    def step(self, rows: Sequence[FakeRow]) -> list[Commit | Exception]:
        ids = [row.request.request_id for row in rows]
        assert len(set(ids)) == len(ids)
        assert all(not row.closed and row.prefill_remaining == 0 for row in rows)
        self.turn.stepped.extend(ids)
        self.cohorts.append(ids)
        self.before_step(ids)
        error = self.step_error(ids)
        if error is not None:
            raise error
        return [self._commit(row) for row in rows]

    def _commit(self, row: FakeRow) -> Commit | Exception:
        row.steps += 1
        if row.script.commits is not None:
            if row.steps > len(row.script.commits):
                return RuntimeError("the script is over")
            return row.script.commits[row.steps - 1]
        token_id = 1 + (row.request.seed * 31 + row.steps * 7 + row.prompt_tokens) % 25
        end = "max_new_tokens" if row.steps >= row.request.max_new_tokens else None
        return Commit(token_ids=(token_id,), stop_reason=end, proposed=1)

    def close(self, row: FakeRow, *, keep: bool) -> None:
        row.closed += 1
        row.kept = keep
        if row.script.close_error is not None:
            raise row.script.close_error

    def settle(self) -> None:
        self.settled += 1

    def statistics(self) -> Mapping[str, Any]:
        return {"prefix_cache_hits": 3, "mlx_peak_memory_bytes": 7, "open_rows": self.open_rows}

    @property
    def open_rows(self) -> int:
        return sum(not row.closed for row in self.rows)


def letters(ids: Sequence[int]) -> str:
    """Ids 1.. as letters from `a`; the stop id is special and has no text."""
    return "".join(chr(96 + token_id) for token_id in ids if token_id != STOP_ID)


@dataclass(frozen=True)
class FakeStep:
    consumed: int
    delta: str
    stop_string: str | None


class FakeText:
    """Text of the ids as letters, holding one letter back, so that flushing at the end can be seen."""

    def __init__(self, request: Request, prompt_ids: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.stops = request.stop
        self._held = ""

    def push(self, ids: Sequence[int], /) -> FakeStep:
        for count, token_id in enumerate(ids, 1):
            self.ids.append(token_id)
            whole = letters(self.ids)
            for stop in self.stops:
                if stop in whole:
                    delta = whole[len(self.text) : whole.index(stop)]
                    self.text += delta
                    return FakeStep(count, delta, stop)
        held = max(1, *(len(stop) for stop in self.stops), 1) if self.stops else 1
        whole = letters(self.ids)
        ready = whole[: max(len(self.text), len(whole) - held)]
        delta = ready[len(self.text) :]
        self.text = ready
        return FakeStep(len(ids), delta, None)

    def finish(self) -> str:
        rest = letters(self.ids)[len(self.text) :]
        self.text += rest
        return rest

    def drain(self) -> None:
        return None

    @property
    def full_text(self) -> str:
        return "".join("<s>" if token_id == STOP_ID else letters([token_id]) for token_id in self.ids)


def make_request(request_id: str, *, tokens: int = 3, **rest: Any) -> Request:
    rest.setdefault("created", 100.0)
    return Request(request_id=request_id, raw_prompt="x", max_new_tokens=tokens, **rest)


def encode_with(lane: FakeLane) -> Callable[[Request], Sequence[int]]:
    def encode(request: Request) -> Sequence[int]:
        script = lane.script(request)
        if script.encode_error is not None:
            raise script.encode_error
        return range(script.prompt)

    return encode


class Bench:
    """A scheduler over a fake lane that keeps what it did, turn by turn, and checks the rules of spec 14 on the way."""

    def __init__(
        self,
        scripts: Mapping[str, Script] | None = None,
        *,
        chunk: int = CHUNK,
        clock: Callable[[], float] | None = None,
        name: str = "ar",
        token_events: bool = True,
        **limits: Any,
    ) -> None:
        self.lane = FakeLane(scripts, chunk=chunk, name=name)
        self.limits = SchedulerLimits(**({"prefill_budget": chunk} | limits))
        self.events: list[Event] = []
        self.logged: list[str] = []
        self.turns: list[Turn] = []
        self.scheduler = Scheduler(
            self.lane,
            self.limits,
            encode=encode_with(self.lane),
            open_text=FakeText,
            emit=self.events.append,
            label=Label("fake", 5),
            token_events=token_events,
            clock=clock or FakeClock(),
            log=self.logged.append,
        )

    def offer(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.offer(request)

    def turn(self) -> Turn:
        self.lane.turn = turn = Turn()
        cohorts = len(self.lane.cohorts)
        self.scheduler.turn()
        self.turns.append(turn)
        assert sum(count for _, count in turn.prefill) <= self.limits.prefill_budget
        assert len(turn.stepped) <= self.limits.capacity
        assert len(self.lane.cohorts) - cohorts <= 1
        assert self.lane.open_rows <= self.limits.max_rows
        return turn

    def drain(self, limit: int = 10_000) -> None:
        while not self.scheduler.idle:
            assert limit, "the scheduler does not come to an end"
            self.turn()
            limit -= 1
        assert self.lane.open_rows == 0
        assert all(row.closed == 1 for row in self.lane.rows)

    def of(self, request_id: str) -> list[Event]:
        return [event for event in self.events if getattr(event, "request_id", None) == request_id]

    def last(self, request_id: str) -> Any:
        return self.of(request_id)[-1]


def is_last(event: Event) -> bool:
    return isinstance(event, (GenerationResult, GenerationFailed, RequestRejected))


def names(events: Sequence[Event]) -> list[str]:
    return [event.event for event in events]


def started(events: Sequence[Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, RequestStarted)]


def loaded(lane: FakeLane, *, release: Callable[[], None] | None = None) -> LoadedLane:
    return LoadedLane(
        lane=lane,
        encode=encode_with(lane),
        open_text=FakeText,
        label=Label("fake", 5),
        loaded=RuntimeLoaded(
            engine="polytoken",
            checkpoint="fake",
            step=5,
            restored_trainable_tensors=0,
            backend="fake",
            lane=lane.name,
            execution=lane.execution,
            load_seconds=0.0,
        ),
        sampling=SamplingParams(temperature=0.5),
        release=release,
    )


def too_long() -> RequestError:
    return RequestError("prompt is too long", code="too_long", field="max_new_tokens")
