"""The AR lane through the real scheduler, on tiny checkpoints: what a request gets depends on that request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import Runtime, load_runtime
from polytoken.engine import Label, Scheduler, SchedulerLimits
from polytoken.events import Event, GenerationFailed, GenerationResult, RequestRejected, RequestStarted
from polytoken.lanes.ar import ArLane, ArRow
from polytoken.models.base import CausalModel, Hidden
from polytoken.request import Request, SamplingParams
from polytoken.testkit.tiny import write_checkpoint

FAMILIES = ("llama", "qwen3", "gemma3_text")
FEW = settings(
    max_examples=settings.default.max_examples // 20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=FAMILIES)
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    path: Path = tmp_path_factory.mktemp(request.param)
    return load_runtime(write_checkpoint(path, request.param, seed=3).path)


class Ids:
    """A text port for ids alone."""

    text = full_text = ""

    def push(self, ids: Sequence[int]) -> Any:
        return TextStep(len(ids))

    def finish(self) -> str:
        return ""

    def drain(self) -> None:
        return None


@dataclass(frozen=True)
class TextStep:
    consumed: int
    delta: str = ""
    stop_string: str | None = None


@dataclass
class Run:
    """All events of one run, by request."""

    events: list[Event] = field(default_factory=list)

    def result(self, request_id: str) -> GenerationResult:
        last = [event for event in self.events if getattr(event, "request_id", None) == request_id][-1]
        assert isinstance(last, GenerationResult), last
        return last


def make_lane(runtime: Runtime, *, chunk: int = 16, bank_bytes: int = 0) -> ArLane:
    identity = StateIdentity(checkpoint=runtime.identity, lane="ar", grid=chunk)
    return ArLane(
        runtime.model,
        StateBank(bank_bytes, identity=identity),
        prefill_chunk=chunk,
        eos_ids=(),
        max_positions=runtime.max_positions,
    )


def serve(lane: ArLane, requests: Sequence[Request], *, rows: int = 4, capacity: int | None = None) -> Run:
    run = Run()
    scheduler = Scheduler(
        lane,
        SchedulerLimits(max_rows=rows, rows_per_step=capacity, prefill_budget=lane.prefill_chunk),
        encode=lambda request: request.token_ids or (),
        open_text=lambda request, ids: Ids(),
        emit=run.events.append,
        label=Label("tiny"),
    )
    waiting = list(requests)
    while waiting or not scheduler.idle:
        while waiting and scheduler.offer(waiting[0]):
            waiting.pop(0)
        scheduler.turn()
    return run


def ask(name: str, ids: Sequence[int], *, new: int = 6, **fields: Any) -> Request:
    return Request(request_id=name, token_ids=tuple(ids), max_new_tokens=new, **fields)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(3, 120, length))


SAMPLING = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.3, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5),
        SamplingParams(repetition_penalty=1.5, logprobs=3),
        SamplingParams(logit_bias=((5, 50.0), (6, -100.0))),
    ]
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 70), st.integers(1, 8), SAMPLING), min_size=2, max_size=5
)


def build(drawn: list[tuple[int, int, int, SamplingParams]]) -> list[Request]:
    return [
        ask(f"r{i}", prompt(seed, length), new=new, seed=seed, sampling=sampling)
        for i, (seed, length, new, sampling) in enumerate(drawn)
    ]


@FEW
@given(drawn=REQUESTS, rows=st.integers(1, 5), capacity=st.integers(1, 5), order=st.randoms())
def test_a_request_gets_the_same_alone_and_in_any_company(
    runtime: Runtime, drawn: Any, rows: int, capacity: int, order: Any
) -> None:
    requests = build(drawn)
    solo = {r.request_id: serve(make_lane(runtime), [r]).result(r.request_id) for r in requests}
    shuffled = list(requests)
    order.shuffle(shuffled)
    together = serve(make_lane(runtime), shuffled, rows=rows, capacity=capacity)
    for request in requests:
        mine = together.result(request.request_id)
        assert mine.token_ids == solo[request.request_id].token_ids
        assert mine.logprobs == solo[request.request_id].logprobs


@FEW
@given(drawn=REQUESTS, limit=st.sampled_from([2_000, 60_000, 1 << 30]), rows=st.integers(1, 3))
def test_a_bank_of_any_size_changes_nothing_but_work(runtime: Runtime, drawn: Any, limit: int, rows: int) -> None:
    requests = build(drawn)
    twice = requests + [replace(r, request_id=r.request_id + "-again") for r in requests]
    cold = serve(make_lane(runtime), twice, rows=1)
    lane = make_lane(runtime, bank_bytes=limit)
    warm = serve(lane, twice, rows=rows)
    for request in twice:
        assert warm.result(request.request_id).token_ids == cold.result(request.request_id).token_ids
        assert warm.result(request.request_id).logprobs == cold.result(request.request_id).logprobs
    assert lane.bank.nbytes <= limit


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_prefill_chunks_change_no_bit_on_the_cpu(runtime: Runtime, device: str, chunk: int) -> None:
    if device != "cpu":
        pytest.skip("bit equality over chunk sizes is promised on the CPU")
    ids = prompt(7, 50)
    rows = []
    for size in (chunk, 50):
        lane = make_lane(runtime, chunk=size)
        row = lane.open(ask("a", ids), ids)
        while not lane.prefill_step(row):
            pass
        rows.append((np.array(row.prefill.logits), row.cache.snapshot().digest()))
    assert np.array_equal(rows[0][0], rows[1][0])
    assert rows[0][1] == rows[1][1]


def test_a_repeated_prompt_costs_no_forward_and_says_so(runtime: Runtime) -> None:
    lane = make_lane(runtime, bank_bytes=1 << 30)
    run = serve(lane, [ask("a", prompt(1, 40)), ask("b", prompt(1, 40)), ask("c", (*prompt(1, 40)[:33], 9, 9))], rows=1)
    started = {e.request_id: e for e in run.events if isinstance(e, RequestStarted)}
    assert (started["a"].prefix_cache_tokens, started["a"].prefix_cache_miss) == (0, "cold at token 0")
    assert (started["b"].prefix_cache_tokens, started["b"].prefix_cache_miss) == (40, None)
    assert started["c"].prefix_cache_tokens == 32
    assert started["c"].prefix_cache_miss is not None
    assert run.result("b").token_ids == run.result("a").token_ids


def test_seeds_decide_and_nothing_else(runtime: Runtime) -> None:
    sampling = SamplingParams(temperature=1.0)
    ids = prompt(2, 10)
    seeds = {"one": 1, "two": 2, "one-again": 1, "negative": -5, "huge": (1 << 70) + 3, "small": 3}
    run = serve(
        make_lane(runtime), [ask(name, ids, new=24, seed=seed, sampling=sampling) for name, seed in seeds.items()]
    )
    texts = {name: run.result(name).token_ids for name in seeds}
    assert texts["one"] == texts["one-again"]
    assert len({texts["one"], texts["two"], texts["negative"]}) == 3


class Faulty(CausalModel):
    """A network that breaks one request's forwards in a chosen way."""

    def __init__(self, model: CausalModel, *, trigger: int, fault: str) -> None:
        self._model, self._trigger, self._fault = model, trigger, fault
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.weight_bytes_per_forward = model.weight_bytes_per_forward

    def make_cache(self) -> Any:
        return self._model.make_cache()

    def forward(self, ids: mx.array, cache: Any, *, keep: int | None = None) -> Hidden:
        marked = self._trigger in np.array(ids).ravel().tolist()
        hidden = self._model.forward(ids, cache, keep=keep)
        if marked and self._fault == "raise":
            raise RuntimeError("the device is on fire")
        if marked:
            return Hidden(hidden.post * mx.array(float("nan")))
        return hidden

    def project(self, hidden: mx.array) -> mx.array:
        return self._model.project(hidden)


@pytest.mark.parametrize(("fault", "code"), [("nan", "non_finite"), ("raise", "internal")])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_one_bad_row_fails_alone(runtime: Runtime, fault: str, code: str, sampling: SamplingParams) -> None:
    good = [ask(f"g{i}", prompt(i, 12), sampling=sampling) for i in range(3)]
    expected = serve(make_lane(runtime), good)
    trigger = 121  # an id that no good prompt holds and that bias forbids them to produce
    forbidden = replace(sampling, logit_bias=((trigger, -100.0),))
    good = [replace(r, sampling=forbidden) for r in good]
    expected = serve(make_lane(runtime), good)
    lane = make_lane(runtime)
    lane.model = Faulty(runtime.model, trigger=trigger, fault=fault)
    bad = ask("bad", prompt(9, 5), sampling=replace(sampling, logit_bias=((trigger, 100.0),)))
    run = serve(lane, [good[0], bad, *good[1:]])
    for request in good:
        assert run.result(request.request_id).token_ids == expected.result(request.request_id).token_ids
    ends = [e for e in run.events if isinstance(e, (GenerationFailed, RequestRejected)) and e.request_id == "bad"]
    assert [e.code for e in ends] == [code]
    if fault == "nan":
        assert "nan" in ends[0].error.lower()


def test_too_long_is_refused_and_a_default_limit_shrinks(runtime: Runtime) -> None:
    positions = runtime.max_positions
    ids = prompt(4, positions - 3)
    lane = make_lane(runtime, chunk=256)
    with pytest.raises(Exception, match="exceeds the model's") as refused:
        lane.open(ask("a", ids, new=4), ids)
    assert refused.value.code == "too_long"
    row: ArRow = lane.open(ask("a", ids, new=8192, limit_is_default=True), ids)
    assert row.request.max_new_tokens == 3


def test_a_cap_on_denoises_is_refused_not_passed_over(runtime: Runtime) -> None:
    lane = make_lane(runtime)
    with pytest.raises(Exception, match="belongs to the canvas lane") as refused:
        lane.open(ask("a", prompt(1, 4), max_denoising_steps=8), prompt(1, 4))
    assert (refused.value.code, refused.value.field) == ("unsupported", "max_denoising_steps")


def test_memory_is_flat_over_many_tokens(runtime: Runtime) -> None:
    lane = make_lane(runtime)
    serve(lane, [ask("warm", prompt(1, 8), new=32)])
    mx.clear_cache()
    before = mx.get_active_memory()
    for i in range(5):
        serve(lane, [ask(f"{i}-{j}", prompt(j, 8), new=32, sampling=SamplingParams(temperature=1.0)) for j in range(2)])
    mx.clear_cache()
    assert mx.get_active_memory() - before < 16 * 1024
