"""From options to a running engine: which lane a checkpoint gets, what is refused, what the first event reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import polytoken
from polytoken.errors import RequestError, UsageError
from polytoken.events import GenerationResult, InferenceSummary
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.request import Request
from polytoken.sampling.grammar import compile_grammar, regex_grammar
from polytoken.testkit.modilify import write_modilify
from polytoken.testkit.tiny import Layout, write_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {name: write_checkpoint(root / name, name).path for name in ("llama", "qwen3_5", "diffusion_gemma")}
    made["headless"] = write_checkpoint(root / "headless", "qwen3_5", layout=Layout(head="dropped")).path
    write_modilify(root / "modilify")
    made["modilify"] = root / "modilify"
    return made


@pytest.mark.parametrize(
    ("name", "lane"),
    [("llama", "ar"), ("qwen3_5", "mtp"), ("headless", "ar"), ("diffusion_gemma", "canvas"), ("modilify", "canvas")],
)
def test_auto_is_what_suits_the_checkpoint(checkpoints: dict[str, Path], name: str, lane: str) -> None:
    with polytoken.load(checkpoints[name]) as engine:
        assert engine.loaded.lane == lane
        result = polytoken.generate(engine, "Hello there.", max_new_tokens=5, ignore_eos=lane != "canvas")
        assert result.lane == lane
        assert result.generated_tokens <= 5
        note = engine.loaded.extra["draft_head_note"]
    if name == "headless":  # said, never served in silence
        assert "declare" in note or "lack" in note
    if name == "llama":
        assert note is None


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("llama", {"lane": "mtp"}, "--lane"),
        ("headless", {"lane": "mtp"}, "--lane"),
        ("llama", {"lane": "canvas"}, "--lane"),
        ("diffusion_gemma", {"lane": "ar"}, "--lane"),
        ("diffusion_gemma", {"canvas": CanvasSettings(commit_top_k=4)}, "--commit-top-k"),
        ("diffusion_gemma", {"canvas": CanvasSettings(canvas_length=100_000)}, "--canvas-length"),
        ("llama", {"lane": "mtp", "mtp": MtpSettings(drafter="model")}, "--draft-model"),
    ],
)
def test_a_lane_that_cannot_be_had_is_refused_in_one_line(
    checkpoints: dict[str, Path], name: str, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(UsageError) as refused:
        polytoken.load(checkpoints[name], **options)
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "lane"), [("llama", "ar"), ("qwen3_5", "mtp"), ("diffusion_gemma", "canvas")])
def test_a_token_that_the_network_has_no_row_for_is_refused_and_the_others_go_on(
    tmp_path: Path, name: str, lane: str
) -> None:
    """Some tokenizers know more than their network; a device would read on behind the table without a word."""
    path = write_checkpoint(tmp_path / name, name).path
    file = path / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    backend.add_tokens([f"<beyond {number}>" for number in range(600)])
    backend.save(str(file))
    with polytoken.load(path, lane=lane) as engine:
        before = polytoken.generate(engine, "Hello there.", max_new_tokens=5)
        with pytest.raises(RequestError, match="outside the network's vocabulary") as refused:
            polytoken.generate(engine, "What is <beyond 599>?", max_new_tokens=5)
        assert refused.value.code == "bad_prompt"
        assert polytoken.generate(engine, "Hello there.", max_new_tokens=5).token_ids == before.token_ids
        if lane == "canvas":
            return
        model = engine.call(lambda loaded: loaded.lane.model)
        ends = (*engine.tokenizer.eos_ids, engine.tokenizer.vocab_size - 1)
        grammar = compile_grammar(
            regex_grammar("[a-z]{3,9}"), engine.tokenizer, vocab_size=model.vocab_size, eos_ids=ends
        )
        held = Request(request_id="held", raw_prompt="Hello there.", max_new_tokens=12, grammar=grammar)
        assert re.fullmatch("[a-z]{3,9}", engine.generate(held).text)


def test_options_of_another_lane_or_out_of_range_are_refused() -> None:
    for options in ({"lane": "x"}, {"device": "tpu"}, {"prefix_cache_mib": -1}, {"draft_model": "y"}):
        with pytest.raises(UsageError):
            polytoken.EngineOptions(model="m", **options)


def test_mtp_and_lookup_give_the_greedy_ids_of_ar(checkpoints: dict[str, Path]) -> None:
    texts = []
    for options in (
        {"lane": "ar"},
        {"lane": "mtp"},
        {"lane": "mtp", "mtp": MtpSettings(depth=2, drafter="lookup+head")},
    ):
        with polytoken.load(checkpoints["qwen3_5"], **options) as engine:
            texts.append(polytoken.generate(engine, "one two one two one two", max_new_tokens=20).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_more_rows_than_a_canvas_step_takes_are_served_all_the_same(checkpoints: dict[str, Path]) -> None:
    canvas = CanvasSettings(max_batch_tokens=24)  # two canvases of twelve
    short: dict[str, Any] = {"max_new_tokens": 6, "max_denoising_steps": 12}
    with polytoken.load(checkpoints["diffusion_gemma"], canvas=canvas, batch_size=8) as engine:
        requests = [
            polytoken.make_request(engine, f"Number {i}", seed=i, request_id=f"r{i}", **short) for i in range(5)
        ]
        events = list(engine.run(requests))
        results = {e.request_id: e.token_ids for e in events if isinstance(e, GenerationResult)}
        assert len(results) == 5
        alone = polytoken.generate(engine, "Number 3", seed=3, **short)
    assert results["r3"] == alone.token_ids
    summary = events[-1]
    assert isinstance(summary, InferenceSummary)
    rates = [summary.extra[name] for name in ("denoise_steps_per_second", "scheduler_denoises_per_second")]
    assert 0 < rates[0] <= rates[1]
