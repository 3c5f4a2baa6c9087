"""A request's ids depend on the request alone: not on company, order, depth, batch, cache or the sweep's chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from canvas_serving import CHUNK, KINDS, SETTINGS, Served, check_events, mixed_requests, open_lane, serve

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint.runtime import Runtime
from polytoken.request import Request


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runtime(kind: str, runtimes: dict[str, Runtime]) -> Runtime:
    return runtimes[kind]


@pytest.fixture(scope="module")
def requests(runtime: Runtime) -> list[Request]:
    return mixed_requests(runtime.model.vocab_size)


@pytest.fixture(scope="module")
def alone(kind: str, runtime: Runtime, requests: list[Request]) -> Served:
    """Every request by itself, in one lane after another."""
    together = Served()
    for request in requests:
        served = serve(open_lane(runtime, replace(SETTINGS[kind], pipeline_depth=1), max_rows=1), [request])
        together.events += served.events
    return together


def test_alone(alone: Served, requests: list[Request], kind: str) -> None:
    check_events(alone, requests)
    lengths = {request.request_id: request.max_new_tokens for request in requests}
    if kind != "block":
        lengths.pop("g")  # whose denoises are limited
    assert {name: len(ids) for name, ids in alone.ids.items() if name in lengths} == lengths
    assert alone.ids["a"] != alone.ids["b"]  # the seed matters


COMPANIES = {
    "all at once": {"depth": 2, "rows": 8},
    "depth 1": {"depth": 1, "rows": 3},
    "depth 4, one by one": {"depth": 4, "rows": 8, "arrivals": [1] * 8},
    "depth 3, in gusts, backwards": {"depth": 3, "rows": 5, "arrivals": [0, 3, 0, 0, 2, 1, 2], "backwards": True},
    "two rows a step": {"depth": 2, "rows": 8, "canvases": 2},
    "one row a step": {"depth": 4, "rows": 4, "canvases": 1},
}


@pytest.mark.parametrize("company", COMPANIES)
def test_in_company(kind: str, runtime: Runtime, requests: list[Request], alone: Served, company: str) -> None:
    how = COMPANIES[company]
    C = runtime.model.canvas_length
    settings = replace(
        SETTINGS[kind], pipeline_depth=how["depth"], max_batch_tokens=C * how.get("canvases", 99) + C - 1
    )
    lane = open_lane(runtime, settings, max_rows=how["rows"])
    asked = requests[::-1] if how.get("backwards") else requests
    served = serve(lane, asked, arrivals=how.get("arrivals"))
    assert served.ids == alone.ids
    check_events(served, requests)
    totals = lane.statistics()
    denoises = sum(served.result(request.request_id).forwards for request in requests)
    assert totals["active_row_denoises"] == totals["heavy_forward_count"] == denoises == served.summary.forwards
    assert 1 <= totals["max_inflight_denoises"] <= min(how["depth"], lane.capacity)


@pytest.fixture(scope="module")
def forty(runtime: Runtime) -> list[Request]:
    V = runtime.model.vocab_size
    return [replace(each, max_new_tokens=min(each.max_new_tokens, 5)) for each in mixed_requests(V, count=40)]


@pytest.fixture(scope="module")
def forty_alone(kind: str, runtime: Runtime, forty: list[Request]) -> dict[str, tuple[int, ...]]:
    lane = open_lane(runtime, replace(SETTINGS[kind], pipeline_depth=1), max_rows=1)
    return {name: ids for request in forty for name, ids in serve(lane, [request]).ids.items()}


WAYS = {
    "cohorts of 2": (2, 1, 64, 0),
    "cohorts of 4": (4, 2, 100, 64 << 20),
    "cohorts of 8": (8, 3, 4096, 9000),
    "cohorts of 8, depth 4": (8, 4, 64, 9000),
}


@pytest.mark.parametrize(
    "way",
    [
        "cohorts of 4",
        "cohorts of 8, depth 4",
        pytest.param("cohorts of 2", marks=pytest.mark.slow),
        pytest.param("cohorts of 8", marks=pytest.mark.slow),
    ],
)
def test_forty_mixed_requests_are_the_same_in_any_cohort(
    kind: str, runtime: Runtime, forty: list[Request], forty_alone: dict[str, tuple[int, ...]], way: str
) -> None:
    """Cohorts of 2, 4 and 8, depths 1 to 4, chunks of 64 to the whole vocabulary, a prefix cache on, off and tiny."""
    cohort, depth, chunk, cache = WAYS[way]
    settings = replace(SETTINGS[kind], pipeline_depth=depth, vocab_chunk=chunk)
    assert serve(open_lane(runtime, settings, max_rows=cohort, cache_bytes=cache), forty).ids == forty_alone
    assert len(set(forty_alone.values())) > 30


@pytest.mark.parametrize("limit", ["ample", "tiny"])
def test_a_prefix_cache_changes_no_bit(
    kind: str, runtime: Runtime, requests: list[Request], alone: Served, limit: str
) -> None:
    identity = StateIdentity(checkpoint=runtime.identity, lane="canvas", grid=CHUNK)
    bank = StateBank(64 << 20 if limit == "ample" else 9000, identity=identity)
    for _ in range(2):  # cold, then warm; the second with everything that the first has left
        served = serve(open_lane(runtime, SETTINGS[kind], bank=bank, max_rows=3), requests)
        assert served.ids == alone.ids
    started = {request.request_id: served.of(request.request_id)[0] for request in requests}
    if limit == "ample":
        assert all(event.prefix_cache_tokens == event.prompt_tokens for event in started.values())
        assert all(event.prefix_cache_miss is None for event in started.values())
    else:
        assert bank.statistics().refusals + bank.statistics().evictions > 0
    assert bank.nbytes <= bank.limit_bytes


@pytest.mark.parametrize("chunk", [7, 64])
def test_the_sweep_s_chunks_change_no_id(
    kind: str, runtime: Runtime, requests: list[Request], alone: Served, chunk: int
) -> None:
    some = [request for request in requests if request.request_id in "ace"]
    served = serve(open_lane(runtime, replace(SETTINGS[kind], vocab_chunk=chunk)), some)
    assert served.ids == {request.request_id: alone.ids[request.request_id] for request in some}


def test_seeds_count_modulo_two_to_the_32(kind: str, runtime: Runtime, requests: list[Request]) -> None:
    short = replace(requests[0], max_new_tokens=4)
    seeds = {"x": -3, "y": 2**32 - 3, "z": 5 * 2**32 - 3, "w": -4}
    served = serve(
        open_lane(runtime, SETTINGS[kind]),
        [replace(short, request_id=name, seed=seed) for name, seed in seeds.items()],
    )
    assert served.ids["x"] == served.ids["y"] == served.ids["z"] != served.ids["w"]


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prefill_chunks_change_ids_by_rounding_at_most(runtime: Runtime, kind: str, chunk: int) -> None:
    """KV within 1e-4, and the sliding tail exactly W - 1 tokens whatever the chunks."""
    ids = list(range(5, 42))
    caches = []
    for size in (CHUNK, chunk):
        lane = open_lane(runtime, SETTINGS[kind], chunk=size)
        row = lane.open(Request(request_id="r", token_ids=tuple(ids), max_new_tokens=4), ids)
        while not lane.prefill_step(row):
            pass
        caches.append(row.cache)
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        expected = len(ids) if ours.window is None else min(len(ids), ours.window - 1)
        for one, other in zip(ours.valid(), theirs.valid(), strict=True):
            assert one.shape == other.shape and one.shape[2] == expected
            assert abs(one - other).max().item() < 1e-4
