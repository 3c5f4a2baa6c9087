"""The real small model through the public interface: the same ids as mlx-lm, streams, stops, many requests at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import polytoken
from polytoken.bench.peer import run_mlx_lm
from polytoken.engine import Engine, read_requests
from polytoken.events import GenerationResult, InferenceSummary, RequestRejected, Token
from polytoken.request import RequestDefaults, SamplingParams

pytestmark = pytest.mark.model

PROMPTS = {
    "fact": "What is the capital of France?",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "long": "Summarise: " + "The river rose in spring and the town moved its market to the hill. " * 12,
}


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with polytoken.load(smollm2) as running:
        yield running


@pytest.mark.parametrize("name", ["fact", "long", pytest.param("code", marks=pytest.mark.slow)])
def test_greedy_ids_equal_mlx_lm_on_the_same_weights(engine: Engine, name: str) -> None:
    ours = polytoken.generate(
        engine, PROMPTS[name], max_new_tokens=24, sampling=SamplingParams(), ignore_eos=True, think=False
    )
    request = polytoken.make_request(engine, PROMPTS[name], think=False)

    def peer(lane: object) -> tuple[int, ...]:
        ids = lane.encode(request)  # type: ignore[attr-defined]
        network = lane.lane.model.network  # type: ignore[attr-defined]
        return run_mlx_lm(network, ids, new_tokens=24, prefill_chunk=2048).token_ids

    assert engine.call(peer) == ours.token_ids


def test_it_answers_and_the_stream_equals_the_result(engine: Engine) -> None:
    whole = polytoken.generate(engine, PROMPTS["fact"], max_new_tokens=32)
    assert "Paris" in whole.text
    assert whole.stop_reason == "eos"
    pieces = list(polytoken.stream(engine, PROMPTS["fact"], max_new_tokens=32))
    assert "".join(text for text, _ in pieces) == whole.text
    assert tuple(i for _, ids in pieces for i in ids) == whole.token_ids


def test_a_stop_string_across_tokens_cuts_the_text(engine: Engine) -> None:
    whole = polytoken.generate(engine, PROMPTS["fact"], max_new_tokens=32).text
    stop = whole[len(whole) // 2 - 2 : len(whole) // 2 + 3]
    cut = polytoken.generate(engine, PROMPTS["fact"], max_new_tokens=32, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.stop_reason, cut.stop_string) == ("stop_string", stop)


def test_a_second_turn_reuses_the_first(engine: Engine) -> None:
    first = polytoken.generate(engine, "Remember the word: harbour. " * 40, max_new_tokens=4)
    again = polytoken.generate(engine, "Remember the word: harbour. " * 40 + "Which word?", max_new_tokens=4)
    assert first.prompt_tokens > 256
    # restored to the token where the two prompts part, which lies behind the first chunk
    assert 256 < again.prefix_cache_tokens < first.prompt_tokens


def test_many_lines_at_once_with_bad_ones_among_them(engine: Engine, tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {
                "request_id": f"r{i}",
                "prompt": f"Name {i % 5 + 1} colours.",
                "max_new_tokens": 4 + i % 3,
                "seed": i,
                "sampling": {"temperature": (i % 2) * 0.8},
            }
        )
        for i in range(12)
    ]
    lines.insert(3, "{not json")
    lines.insert(7, json.dumps({"request_id": "", "prompt": "x"}))
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n")
    events = list(engine.run(read_requests(str(path), RequestDefaults())))
    results = {event.request_id: event for event in events if isinstance(event, GenerationResult)}
    rejected = [(event.line, event.code) for event in events if isinstance(event, RequestRejected)]
    assert sorted(rejected) == [(4, "bad_json"), (8, "bad_request_id")]
    assert len(results) == 12
    tokens = [event for event in events if isinstance(event, Token) and event.request_id == "r5"]
    assert "".join(event.delta for event in tokens) == results["r5"].text
    assert isinstance(events[-1], InferenceSummary)
    alone = polytoken.generate(
        engine, "Name 1 colours.", max_new_tokens=6, seed=5, sampling=SamplingParams(temperature=0.8)
    )
    assert results["r5"].token_ids == alone.token_ids
