"""Rows beside each other: ragged, joining, leaving, failing, restored; each as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mtp_models import FAMILIES, TableHead, TableModel, small, tuned
from mtp_runs import CHUNK, GREEDY, USUAL, Run, ask, bank, mtp_lane, prompts, run_all, start, state_bits, step

from polytoken.cache.identity import StateIdentity
from polytoken.engine import Label, Scheduler, SchedulerLimits
from polytoken.events import Event, GenerationFailed, GenerationResult, InferenceSummary, Token
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.lanes.mtp.settings import LookupSettings
from polytoken.lanes.mtp.steps import interleave, submit
from polytoken.request import Request, SamplingParams

WILD = SamplingParams(temperature=1.3, presence_penalty=0.5, logprobs=1)
KINDS = (GREEDY, USUAL, WILD)


def ragged(count: int) -> list[Request]:
    """Requests of all kinds and lengths."""
    made = prompts(count, seed=3)
    return [ask(str(n), prompt, count=3 + 5 * (n % 4), seed=n, sampling=KINDS[n % 3]) for n, prompt in enumerate(made)]


def fingerprint(run: Run, lane: MtpLane) -> object:
    """All that a request's own numbers are: tokens, log-probabilities, windows, final state."""
    windows = [(c.drafts, c.accepted, c.accept_probabilities, c.token, c.source) for c in run.row.cycles]
    lane.finish(run.row)
    return run.tokens, run.logprobs, windows, run.reason, state_bits(run.row.state)


@pytest.mark.parametrize("family, policy", [*((family, "fixed") for family in FAMILIES), ("qwen3_5", "streak")])
def test_d17_ragged_rows_that_join_and_leave_equal_their_solo_runs(family, policy: str) -> None:
    def lane() -> MtpLane:
        return mtp_lane(
            tuned(family, "a", "free"), depth=3, policy=policy, drafter="lookup+head", lookup=LookupSettings(gram=1)
        )

    requests = ragged(7)
    together = lane()
    waiting, runs = list(requests), []
    turn = 0
    while waiting or any(not run.over for run in runs):
        if waiting and turn % 2 == 0:  # one more joins every other turn
            runs.append(start(together, waiting.pop(0)))
        step(together, runs)
        turn += 1
    assert not any(run.error for run in runs)
    for request, run in zip(requests, runs, strict=True):
        solo = lane()
        (alone,) = run_all(solo, [request])
        assert fingerprint(run, together) == fingerprint(alone, solo)


def test_the_order_of_rows_does_not_matter() -> None:
    lane = mtp_lane(tuned("qwen3_5", "a", "free"), depth=2)
    forth = run_all(lane, ragged(5))
    back = run_all(lane, ragged(5)[::-1])[::-1]
    assert [fingerprint(run, lane) for run in forth] == [fingerprint(run, lane) for run in back]


def test_a_row_that_fails_leaves_the_others_alone() -> None:
    """A fault in the middle of a window, between drafting and verifying."""
    lane = mtp_lane(tuned("qwen3_5", "a", "free"), depth=3)
    requests = ragged(3)
    runs = [start(lane, request) for request in requests]
    step(lane, runs)
    boom = RuntimeError("boom")

    class Broken:
        vocab_size = 1

        def forward(self, *_: object, **__: object) -> None:
            raise boom

    runs[1].row.followed.trunk = Broken()
    while any(not run.over for run in runs):
        step(lane, runs)
    assert runs[1].error is boom and len(runs[1].tokens) == 1
    for index in (0, 2):
        solo = mtp_lane(tuned("qwen3_5", "a", "free"), depth=3)
        assert fingerprint(runs[index], lane) == fingerprint(run_all(solo, [requests[index]])[0], solo)


def test_work_is_interleaved_in_order_and_faults_stay_with_their_work() -> None:
    seen: list[str] = []

    def work(name: str, steps: int, fault: bool = False):
        for index in range(steps):
            seen.append(f"{name}{index}")
            yield from submit(mx.zeros(1))
        if fault:
            raise ValueError(name)
        return name

    outcomes = interleave([work("a", 2), work("b", 1, fault=True), work("c", 3)])
    assert seen == ["a0", "b0", "c0", "a1", "c1", "c2"]
    assert outcomes[0] == "a" and outcomes[2] == "c" and isinstance(outcomes[1], ValueError)
    assert interleave([]) == []


# -- cancelling and going on ------------------------------------------------------------------------------------------


class StopError(Exception):
    pass


def count_calls(model: TableModel, fuse: list[int]) -> None:
    """Make the model raise after as many forwards as the fuse says."""
    forward = model.forward

    def counted(*args: object, **kwargs: object) -> object:
        if fuse and fuse[0] == 0:
            fuse.clear()
            raise StopError
        if fuse:
            fuse[0] -= 1
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    model.forward = counted  # type: ignore[method-assign, assignment]


def table_model() -> TableModel:
    rng = np.random.default_rng(1)
    return TableModel(rng.normal(0, 2, (9, 9, 9)), TableHead(rng.normal(0, 1, (9, 9))))


@pytest.mark.parametrize("sampling", [GREEDY, USUAL], ids=["greedy", "sampled"])
def test_d16_an_end_at_any_point_leaves_nothing_behind(sampling: SamplingParams) -> None:
    """Dropped after every possible number of forwards, in prefill, drafting or verifying; then asked again."""
    prompt = np.random.default_rng(2).integers(0, 9, 21).tolist()
    request = ask("a", prompt, count=12, sampling=sampling, seed=4)
    (expected,) = run_all(mtp_lane(table_model(), depth=3), [request])
    for cut in range(16):
        model = table_model()
        lane = mtp_lane(model, depth=3, limit=1 << 20)
        fuse = [cut]
        count_calls(model, fuse)
        try:
            run = start(lane, request)
            while not run.over:
                step(lane, [run])
            assert isinstance(run.error, StopError) or run.reason
            lane.close(run.row, keep=False)
        except StopError:
            pass
        fuse.clear()
        stored = {entry.ids for entry in lane.bank.entries()}
        assert all(tuple(prompt[: len(ids)]) == ids for ids in stored)  # prompts only, no drafts
        again = start(lane, request)
        while not again.over:
            step(lane, [again])
        assert again.tokens == expected.tokens


def test_closing_gives_memory_back() -> None:
    lane = mtp_lane(tuned("qwen3_5", "a", "free"), depth=3)
    run = start(lane, ask("a", prompts(9)[8], count=6))
    step(lane, [run])
    step(lane, [run])
    lane.close(run.row, keep=False)
    assert run.row.state.nbytes == 0 and run.row.drafter.history.nbytes == 0 and run.row.drafter._rows is None


# -- restored prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter, window", [("head", None), ("lookup+head", None), ("model", None), ("lookup", None), ("head", 12)]
)
def test_a_restored_prompt_gives_the_bits_of_a_cold_one(drafter: str, window: int | None) -> None:
    """Invariant 10: equal prompts, prompts that go on, and prompts that part, also under a window."""
    model, other = tuned("qwen3_5", "a", "free"), small("qwen3_5", seed=5)
    ids = np.random.default_rng(5).integers(0, 280, 40).tolist()
    texts = [ids[:n] for n in (1, 2, 8, 9, 17, 24, 25, 40)] + [[*ids[:20], 5, 6, 7], ids[:40]]

    def lane(limit: int) -> MtpLane:
        return mtp_lane(
            model, depth=2, drafter=drafter, draft_model=other, history_window=window, limit=limit,
            lookup=LookupSettings(gram=1),
        )  # fmt: skip

    warm, cold, reused = lane(1 << 26), lane(0), 0
    for n, text in enumerate(texts):
        request = ask(str(n), text, count=5, seed=n, sampling=USUAL)
        mine, theirs = start(warm, request), start(cold, request)
        reused += mine.row.cached_tokens
        one, two = (getattr(run.row.drafter, "other", None) or run.row.drafter for run in (mine, theirs))
        for name in ("history", "state"):
            if hasattr(one, name):
                assert state_bits(getattr(one, name)) == state_bits(getattr(two, name))
        for run, of in ((mine, warm), (theirs, cold)):
            while not run.over:
                step(of, [run])
        assert fingerprint(mine, warm) == fingerprint(theirs, cold)
    assert reused > 60
    assert warm.bank.statistics().nbytes > 0


@pytest.mark.parametrize("n", [1, 2, 12, 13, 14, 30])
def test_a_window_keeps_as_many_history_rows_as_it_says(n: int) -> None:
    """Invariant 8: min(n - 1, k) rows, the last ones, whatever the chunks."""
    model = tuned("qwen3_5", "a", "free")
    ids = np.random.default_rng(6).integers(0, 280, n).tolist()
    lane = mtp_lane(model, depth=2, history_window=12)
    run = start(lane, ask("a", ids, count=3))
    history = run.row.drafter.history
    assert history.offset == min(n - 1, 12)
    head = model.draft_head
    assert head is not None
    rows = head.take(model.forward(mx.array([ids]), model.make_cache()))
    anew, first = head.make_cache(), max(1, n - 12)
    if n > 1:
        head.append(rows[:, first - 1 : n - 1], mx.array([ids[first:]]), anew)
    assert state_bits(history) == state_bits(anew)
    while not run.over:
        step(lane, [run])
    assert run.tokens == run_all(mtp_lane(model, depth=2), [ask("a", ids, count=3)])[0].tokens


def test_d23_restored_and_fresh_rows_in_one_cohort_equal_their_solo_runs() -> None:
    model = tuned("qwen3_5", "a", "free")
    lane = mtp_lane(model, depth=3, limit=1 << 26)
    first = [ask(f"t{n}", prompt, count=4) for n, prompt in enumerate(prompts(12, seed=8)[9:11])]
    told = run_all(lane, first)
    follow = [
        ask(f"u{n}", [*request.token_ids, *run.tokens, 9, 9], count=7, seed=n, sampling=USUAL)
        for n, (request, run) in enumerate(zip(first, told, strict=True))
    ]
    follow.append(ask("new", prompts(12, seed=9)[11], count=7, sampling=USUAL))
    runs = run_all(lane, follow)
    assert runs[0].row.cached_tokens and runs[1].row.cached_tokens and not runs[2].row.cached_tokens
    for request, run in zip(follow, runs, strict=True):
        solo = mtp_lane(model, depth=3)
        assert fingerprint(run, lane) == fingerprint(run_all(solo, [request])[0], solo)


def test_states_of_other_lanes_are_never_taken_for_these() -> None:
    """One store, AR's identity and ours: what one banked the other does not find. Copies alone share AR's."""
    model = tuned("qwen3_5", "a", "free")
    ids = prompts(17)[16] * 2
    with_head, copying = mtp_lane(model, depth=2), mtp_lane(model, depth=2, drafter="lookup")
    base = StateIdentity(checkpoint="tiny", lane="ar", grid=CHUNK)
    assert copying.bank.identity == base
    differing = with_head.bank.identity.differing(base)
    assert set(differing) == {"lane", "hidden_variant", "history_policy"}
    store = bank(with_head.bank.identity, limit=1 << 26)
    lane = mtp_lane(model, depth=2, store=store)
    run_all(lane, [ask("a", ids, count=2)])
    assert store.find(ids, identity=base).length == 0 and store.find(ids).length == len(ids)


# -- through the scheduler ---------------------------------------------------------------------------------------------


class Letters:
    """A text port whose ids are letters; a stop string ends it."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.text = self.full_text = ""
        self._stop = stop

    def push(self, ids: tuple[int, ...]) -> Letters:
        self.consumed, before, self.stop_string = 0, len(self.text), None
        for token_id in ids:
            self.consumed += 1
            self.text += chr(ord("a") + token_id)
            hit = next((stop for stop in self._stop if self.text.endswith(stop)), None)
            if hit is not None:
                self.stop_string, self.text = hit, self.text.removesuffix(hit)
                break
        self.full_text = self.text
        self.delta = self.text[before:]
        return self

    def finish(self) -> str:
        return ""

    def drain(self) -> None:
        return None


def schedule(lane: MtpLane, requests: Sequence[Request], *, cancel: str | None = None) -> tuple[dict, InferenceSummary]:
    """The last event of every request, by id, and the summary; one is cancelled as soon as it has said something."""
    last: dict[str, Event] = {}

    def take(event: Event) -> None:
        if isinstance(event, Token) and event.request_id == cancel:
            scheduler.cancel(cancel)
        if isinstance(event, (GenerationResult, GenerationFailed)):
            last[event.request_id] = event

    scheduler = Scheduler(
        lane,
        SchedulerLimits(max_rows=4, max_pending=99, prefill_budget=CHUNK),
        encode=lambda request: request.token_ids or (),
        open_text=lambda request, _: Letters(request.stop),
        emit=take,
        label=Label("tiny"),
    )
    for request in requests:
        assert scheduler.offer(request)
    while not scheduler.idle:
        scheduler.turn()
    return last, scheduler.summary()


def test_d14_results_and_the_summary_say_what_speculation_did() -> None:
    requests = [ask(str(n), (1, 2, n), count=12, seed=n, sampling=KINDS[n % 3]) for n in range(6)]
    results, summary = schedule(mtp_lane(table_model(), depth=3), requests)
    for result in results.values():
        assert isinstance(result, GenerationResult) and result.lane == "mtp" and result.extra["speculation"] == "on"
        drafted = result.extra["drafted_tokens"]
        assert drafted == sum(result.extra["drafted_by_depth"]) > 0
        assert result.forwards == 1 + result.extra["verify_calls"]
        assert result.generated_tokens == 12 == len(result.token_ids)
        json.loads(result.to_json())
    assert summary.extra["drafted_tokens"] == sum(result.extra["drafted_tokens"] for result in results.values())
    assert summary.extra["accepted_drafts"] == sum(result.extra["accepted_drafts"] for result in results.values())
    assert summary.tokens_per_forward > 1.0
    json.loads(summary.to_json())


def test_d02_a_stop_string_inside_a_window_cuts_it() -> None:
    model = table_model()
    lane = mtp_lane(model, depth=4, drafter="model", draft_model=model)
    whole = schedule(lane, [ask("a", (1, 2), count=12)])[0]["a"]
    stop = whole.text[3:5]
    at = whole.text.index(stop)
    request = Request(request_id="b", token_ids=(1, 2), max_new_tokens=12, stop=(stop,))
    cut = schedule(lane, [request])[0]["b"]
    assert (cut.text, cut.stop_reason, cut.stop_string) == (whole.text[:at], "stop_string", stop)
    assert cut.token_ids == whole.token_ids[: at + 2]


def test_requests_at_once_equal_requests_one_by_one_and_cancelling_hurts_nobody() -> None:
    model = table_model()
    requests = [ask(str(n), (1, n, 2), count=4 + 9 * (n % 3), seed=n, sampling=KINDS[n % 3]) for n in range(8)]
    results, summary = schedule(mtp_lane(model, depth=3), requests, cancel="5")
    assert summary.peak_active_requests == 4
    for request in requests:
        (alone,) = run_all(mtp_lane(model, depth=3), [request])
        result = results[request.request_id]
        if request.request_id == "5":
            assert isinstance(result, GenerationFailed) and result.code == "cancelled"
        else:
            assert list(result.token_ids) == alone.tokens
