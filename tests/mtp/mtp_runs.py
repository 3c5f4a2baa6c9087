"""Running requests through a lane, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState
from polytoken.events import TokenLogprob
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.lane import MtpLane, identify
from polytoken.lanes.mtp.settings import LookupSettings, MtpSettings
from polytoken.models.base import CausalModel
from polytoken.request import Request, SamplingParams

CHUNK = 8
GREEDY = SamplingParams()
USUAL = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
SHORT_GRAMS = LookupSettings(gram=2)


def bank(identity: StateIdentity | None = None, *, limit: int = 0) -> StateBank:
    return StateBank(limit, identity=identity or StateIdentity(checkpoint="tiny", lane="ar", grid=CHUNK))


def ar_lane(model: CausalModel, *, eos: Sequence[int] = ()) -> ArLane:
    return ArLane(model, bank(), prefill_chunk=CHUNK, eos_ids=eos, max_positions=512)


def mtp_lane(
    model: CausalModel,
    *,
    eos: Sequence[int] = (),
    limit: int = 0,
    store: StateBank | None = None,
    draft_model: CausalModel | None = None,
    clock: Any = None,
    **settings: Any,
) -> MtpLane:
    chosen = MtpSettings(**settings)
    identity = identify(bank().identity, chosen, model, draft_model="draft")
    extra = {} if clock is None else {"clock": clock}
    return MtpLane(
        model,
        store or bank(identity, limit=limit),
        prefill_chunk=CHUNK,
        eos_ids=eos,
        max_positions=512,
        settings=chosen,
        draft_model=draft_model,
        record_cycles=True,
        **extra,
    )


def ask(
    name: str,
    prompt: Sequence[int],
    *,
    count: int = 16,
    seed: int = 0,
    sampling: SamplingParams = GREEDY,
    ignore_eos: bool = False,
) -> Request:
    return Request(
        request_id=name,
        token_ids=tuple(prompt),
        max_new_tokens=count,
        seed=seed,
        sampling=sampling,
        ignore_eos=ignore_eos,
    )


@dataclass
class Run:
    """What became of one request."""

    row: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    forwards: int = 0
    steps: int = 0
    reason: str | None = None
    error: Exception | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.reason is not None or self.error is not None


def start(lane: Lane[Any], request: Request) -> Run:
    """A prefilled row."""
    assert request.token_ids is not None
    run = Run(lane.open(request, request.token_ids))
    while not lane.prefill_step(run.row):
        pass
    return run


def step(lane: Lane[Any], runs: Sequence[Run]) -> None:
    """One step of all rows that are not over."""
    live = [run for run in runs if not run.over]
    for run, commit in zip(live, lane.step([run.row for run in live]), strict=True):
        if isinstance(commit, Exception):
            run.error = commit
            continue
        run.tokens += commit.token_ids
        run.logprobs += commit.logprobs or ()
        run.forwards += commit.forwards
        run.steps += 1
        run.reason = commit.stop_reason
        run.detail.update(commit.detail)


def run_all(lane: Lane[Any], requests: Sequence[Request]) -> list[Run]:
    """All requests together, to their ends."""
    runs = [start(lane, request) for request in requests]
    while any(not run.over for run in runs):
        step(lane, runs)
    for run in runs:
        if run.error is not None:
            raise run.error
    return runs


def tokens_of(lane: Lane[Any], requests: Sequence[Request]) -> list[list[int]]:
    return [run.tokens for run in run_all(lane, requests)]


def prompts(count: int, *, vocab: int = 280, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 16 ids; every third repeats itself, so that there is something to copy."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        ids = rng.integers(0, vocab, 1 + index % 16).tolist()
        made.append((ids * 3)[:16] if index % 3 == 0 else ids)
    return made


def bits(array: mx.array) -> bytes:
    return np.array(array.astype(mx.float32)).tobytes()


def state_bits(state: DecodingState) -> list[list[bytes]]:
    """Every layer's valid rows, bit by bit."""
    return [[bits(array) for array in layer.snapshot().arrays()] for layer in state.layers]
