"""Our own runs: one request at a time on the owner thread, through the engine's scheduler, on any lane over the model.

All lanes of a benchmark are driven in this one way, so that they differ by nothing but the lane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from polytoken.api import make_request
from polytoken.bench.floor import decode_seconds
from polytoken.bench.sample import Sample
from polytoken.engine import Engine, LoadedLane, Scheduler, SchedulerLimits, error_of
from polytoken.errors import UsageError
from polytoken.events import Event, GenerationFailed, GenerationResult, RequestRejected
from polytoken.lanes.base import Lane
from polytoken.request import Request, SamplingParams

FILLER = (
    "A short history of measurement: people have compared lengths with the body, then with a rod, and at last with "
    "the wave of a chosen light. Each step traded convenience for agreement between strangers. "
)
SEED = 42
Choose = Callable[[LoadedLane], Lane[Any]]
"""The lane to run, from the one that was loaded; called on the owner thread."""


class Driver:
    """Runs of one prompt.

    Args:
        engine: running, idle, with prefix reuse off.
        prompt_tokens, new_tokens: size of the work; end tokens are passed over.
        prefill_chunk: prompt tokens per forward.
    """

    def __init__(self, engine: Engine, *, prompt_tokens: int, new_tokens: int, prefill_chunk: int) -> None:
        self.engine = engine
        self.prefill_chunk = prefill_chunk
        self.new_tokens = new_tokens
        self.prompt_ids = _prompt_ids(engine, prompt_tokens)
        self._stop = threading.Event()

    def run(self, choose: Choose) -> Sample:
        """Generate greedily on a lane. Ctrl-C ends it within a step."""
        request = make_request(
            self.engine,
            token_ids=self.prompt_ids,
            max_new_tokens=self.new_tokens,
            sampling=SamplingParams(),
            seed=SEED,
            ignore_eos=True,
        )
        try:
            result = self.engine.call(lambda loaded: self._serve(loaded, choose(loaded), request))
        except KeyboardInterrupt:
            self._stop.set()
            raise
        first = result.extra.get("ttfd_seconds", result.ttft_seconds)
        seconds = decode_seconds(result)
        if first is None or seconds is None:
            raise UsageError("--new-tokens: the answer ended at its first step; ask for more", field="--new-tokens")
        return Sample(first, seconds, result.token_ids, result)

    def _serve(self, loaded: LoadedLane, lane: Lane[Any], request: Request) -> GenerationResult:
        events: list[Event] = []
        scheduler = Scheduler(
            lane,
            SchedulerLimits(max_rows=1, prefill_budget=self.prefill_chunk),
            encode=loaded.encode,
            open_text=loaded.open_text,
            emit=events.append,
            label=loaded.label,
            token_events=False,
        )
        scheduler.offer(request)
        while not scheduler.idle:
            if self._stop.is_set():
                scheduler.interrupt()
            scheduler.turn()
        lane.settle()
        last = events[-1]
        if isinstance(last, GenerationResult):
            return last
        assert isinstance(last, GenerationFailed | RequestRejected)
        raise error_of(last)


def _prompt_ids(engine: Engine, count: int) -> tuple[int, ...]:
    """Exactly `count` ids of plain English, whatever the tokenizer."""
    text = FILLER * (count // 8 + 1)
    request = make_request(engine, text, raw=True, max_new_tokens=1)
    ids = engine.call(lambda lane: tuple(lane.encode(request)))
    return ids[:count]
