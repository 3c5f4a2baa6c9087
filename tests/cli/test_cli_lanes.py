"""The mtp and canvas lanes from the command line: their flags, what is refused, what is said about them."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, Runner  # type: ignore[import-not-found]

from polytoken.cli.lane_flags import LaneFlags, flag_of, owner_of
from polytoken.cli.output import describe_work, steps_per_canvas
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.lanes.mtp.settings import LookupSettings, MtpSettings

MTP: dict[str, tuple[str, Any]] = {
    "depth": ("2", 2),
    "depth_policy": ("streak", "streak"),
    "drafter": ("lookup+head", "lookup+head"),
    "history_window": ("9", 9),
    "lookup_gram": ("3", 3),
    "lookup_longest": ("5", 5),
}
CANVAS: dict[str, tuple[str, Any]] = {
    "policy": ("rolling", "rolling"),
    "canvas_length": ("6", 6),
    "pipeline_depth": ("1", 1),
    "max_batch_tokens": ("12", 12),
    "vocab_chunk_size": ("100", 100),
    "max_denoising_steps": ("3", 3),
    "commit_failure_budget": ("0.5", 0.5),
    "commit_top_k": ("7", 7),
    "commit_min_p": ("0.1", 0.1),
    "commit_target_confidence": ("0.2", 0.2),
}


def words(flags: dict[str, tuple[str, Any]]) -> list[str]:
    return [word for name, (text, _) in flags.items() for word in (flag_of(name), text)]


def result_of(outcome: Outcome) -> dict[str, Any]:
    (result,) = outcome.events_of("generation_result")
    return result  # type: ignore[no-any-return]


# -- flags -------------------------------------------------------------------------------------------------------------


def test_every_flag_of_the_mtp_lane_shows_and_its_work_is_told(polytoken: Runner, hybrid: str) -> None:
    ask = ("generate", "--model", hybrid, "--prompt", "ab ab ab", "--max-new-tokens", "12", "--ignore-eos", "--json")
    outcome = polytoken(*ask, "--lane", "mtp", *words(MTP))
    loaded, result = outcome.events[0], result_of(outcome)
    settings = loaded["settings"]["mtp"]
    said = {**settings, "depth_policy": settings["policy"], "lookup_gram": settings["lookup"]["gram"]}
    said["lookup_longest"] = settings["lookup"]["longest"]
    assert {name: said[name] for name in MTP} == {name: value for name, (_, value) in MTP.items()}
    assert (loaded["lane"], loaded["depth"], loaded["drafter"]) == ("mtp", 2, "lookup+head")
    assert result["lane"] == "mtp"
    assert result["generated_tokens"] == 12
    plain = polytoken(*ask, "--lane", "ar")
    assert result_of(plain)["token_ids"] == result["token_ids"]
    assert "drafted_tokens" not in result_of(plain)


def test_every_flag_of_the_canvas_lane_shows(polytoken: Runner, canvas: str) -> None:
    ask = ("generate", "--model", canvas, "--prompt", "x", "--max-new-tokens", "9", "--json")
    outcome = polytoken(*ask, *words(CANVAS))
    loaded, result = outcome.events[0], result_of(outcome)
    said = {**loaded["settings"]["canvas"], "vocab_chunk_size": loaded["settings"]["canvas"]["vocab_chunk"]}
    assert {name: said[name] for name in CANVAS} == {name: value for name, (_, value) in CANVAS.items()}
    for name in ("canvas_length", "pipeline_depth", "commit_failure_budget", "commit_top_k", "commit_min_p"):
        assert loaded[name] == CANVAS[name][1], name
    assert loaded["commit_target_confidence"] == 0.2
    assert (loaded["lane"], loaded["policy"], loaded["execution"]) == (
        "canvas",
        "rolling",
        "layer_interleaved_singleton",
    )
    assert result["denoise_steps"] <= 3


def test_a_record_s_own_number_of_denoises_comes_first(polytoken: Runner, canvas: str) -> None:
    rows = '{"request_id": "a", "prompt": "x", "max_denoising_steps": 1}\n{"request_id": "b", "prompt": "x"}\n'
    limit = ("--policy", "rolling", "--max-denoising-steps", "2", "--commit-failure-budget", "1e-9", "--ignore-eos")
    outcome = polytoken("generate", "--model", canvas, "--requests-jsonl", "-", *limit, stdin=rows)
    steps = {event["request_id"]: event["denoise_steps"] for event in outcome.events_of("generation_result")}
    assert steps == {"a": 1, "b": 2}
    assert {event["stop_reason"] for event in outcome.events_of("generation_result")} == {"max_denoising_steps"}


def test_defaults_are_those_of_the_lanes() -> None:
    flags = LaneFlags()
    made = flags.engine_options("auto")
    assert made == {"mtp": MtpSettings(), "draft_model": None, "canvas": CanvasSettings()}
    assert {owner_of(name) for name in (*MTP, "draft_model")} == {"mtp"}
    assert {owner_of(name) for name in CANVAS} == {"canvas"}
    assert LaneFlags(lookup_gram=2, drafter="lookup").engine_options("mtp")["mtp"].lookup == LookupSettings(gram=2)


FOREIGN = [(name, text, lane) for name, (text, _) in (MTP | CANVAS).items() for lane in ("ar", "mtp", "canvas")
           if lane != owner_of(name)]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "lane"), FOREIGN)
def test_a_flag_of_another_lane_is_refused_before_loading(polytoken: Runner, name: str, text: str, lane: str) -> None:
    ask = ("generate", "--model", "no-such-model", "--prompt", "x", "--lane", lane)
    outcome = polytoken(*ask, flag_of(name), text)
    assert outcome.status == 2
    assert outcome.error == f"{flag_of(name)} belongs to the {owner_of(name)} lane; this is {lane} (--lane says so)"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--depth", "2", "--policy", "block"], ["--depth", "--policy"]),
        (["--lookup-gram", "3"], ["--lookup-gram", "--drafter"]),
        (["--drafter", "lookup", "--depth", "2"], ["--depth", "--drafter lookup"]),
        (["--drafter", "lookup", "--depth-policy", "cost"], ["--depth-policy"]),
        (["--drafter", "lookup", "--history-window", "4"], ["--history-window"]),
        (["--drafter", "model"], ["--draft-model"]),
        (["--draft-model", "m"], ["--draft-model", "--drafter"]),
        (["--depth", "0"], ["--depth"]),
        (["--depth", "17"], ["--depth"]),
        (["--depth-policy", "guess"], ["--depth-policy"]),
        (["--drafter", "nobody"], ["--drafter"]),
        (["--history-window", "0"], ["--history-window"]),
        (["--drafter", "lookup", "--lookup-gram", "33"], ["--lookup-gram"]),
        (["--drafter", "lookup", "--lookup-longest", "0"], ["--lookup-longest"]),
        (["--policy", "other"], ["--policy"]),
        (["--canvas-length", "0"], ["--canvas-length"]),
        (["--pipeline-depth", "0"], ["--pipeline-depth"]),
        (["--max-batch-tokens", "0"], ["--max-batch-tokens"]),
        (["--vocab-chunk-size", "0"], ["--vocab-chunk-size"]),
        (["--max-denoising-steps", "0"], ["--max-denoising-steps"]),
        (["--commit-failure-budget", "0"], ["--commit-failure-budget"]),
        (["--commit-top-k", "0"], ["--commit-top-k"]),
        (["--commit-min-p", "1"], ["--commit-min-p"]),
        (["--commit-target-confidence", "0"], ["--commit-target-confidence"]),
        (["--commit-target-confidence", "nan"], ["--commit-target-confidence"]),
        (["--lane", "ar", "--watch"], ["--watch"]),
    ],
)
def test_what_cannot_have_an_effect_is_refused_before_loading(
    polytoken: Runner, arguments: list[str], names: list[str]
) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", "--prompt", "x", *arguments)
    assert outcome.status == 2
    assert all(name in outcome.error for name in names)


@pytest.mark.parametrize("verb", ["generate", "chat", "bench"])
def test_a_flag_of_a_lane_that_the_checkpoint_does_not_get(polytoken: Runner, tiny: str, verb: str) -> None:
    prompt = ("--prompt", "x") if verb == "generate" else ()
    for flag, value in (("--history-window", "5"), ("--vocab-chunk-size", "99")):
        outcome = polytoken(verb, "--model", tiny, *prompt, flag, value)
        assert outcome.status == 2
        assert outcome.error.startswith(f"{flag} belongs to the ")
        assert "this is ar (no draft head" in outcome.error


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--canvas-length", "4096"], "--canvas-length"),
        (["--max-batch-tokens", "5"], "--max-batch-tokens"),
        (["--commit-top-k", "5"], "--commit-top-k"),  # its own policy is block
        (["--temperature", "0.5"], "--temperature"),
        (["--logprobs", "1", "--json"], "--logprobs"),
        (["--lane", "mtp"], "--lane"),
        (["--depth", "3"], "--depth"),
    ],
)
def test_what_a_canvas_cannot_do_is_one_line(polytoken: Runner, canvas: str, arguments: list[str], names: str) -> None:
    outcome = polytoken("generate", "--model", canvas, "--prompt", "x", *arguments)
    assert outcome.status == 2
    assert names in outcome.error


def test_no_canvas_for_a_causal_checkpoint(polytoken: Runner, tiny: str) -> None:
    outcome = polytoken("generate", "--model", tiny, "--prompt", "x", "--lane", "canvas")
    assert outcome.status == 2
    assert "--lane canvas" in outcome.error
    assert "--drafter" in polytoken("generate", "--model", tiny, "--prompt", "x", "--lane", "mtp").error


def test_the_export_in_the_current_folder(
    polytoken: Runner, export: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("generate", "chat", "bench"):
        assert polytoken(verb).error == f"--model is required; see `polytoken {verb} --help`"
    monkeypatch.chdir(export)
    outcome = polytoken("generate", "--prompt", "x", "--max-new-tokens", "4", "--json")
    assert outcome.status == 0
    assert Path(outcome.events[0]["settings"]["model"]).samefile(export)
    assert outcome.events[0]["step"] == 1234


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_dropped_head_is_never_passed_over_in_silence(polytoken: Runner, headless: str) -> None:
    ask = ("--model", headless, "--max-new-tokens", "3")
    outcome = polytoken("generate", *ask, "--prompt", "x")
    assert outcome.status == 0
    assert outcome.err.startswith("polytoken: note: lane ar, one token per forward: config.json declares a draft head")
    assert "declares a draft head" in polytoken("chat", *ask, stdin="x\n").err
    machine = polytoken("generate", *ask, "--prompt", "x", "--json")
    assert "declares a draft head" in machine.err
    assert "declares a draft head" in machine.events[0]["draft_head_note"]
    assert polytoken("generate", *ask, "--prompt", "x", "--lane", "ar").err == ""
    refused = polytoken("generate", *ask, "--prompt", "x", "--depth", "2").error
    assert "--depth belongs to the mtp lane" in refused and "declares a draft head" in refused
    copied = polytoken("generate", *ask, "--prompt", "x", "--drafter", "lookup", "--verbose")
    assert "lane mtp (--drafter lookup asks for it), drafts by lookup" in copied.err
    report = json.loads(polytoken("inspect", headless, "--json").out)
    assert (report["lane"], report["draft_head_usable"]) == ("ar", False)


def test_notes_of_an_mtp_run(polytoken: Runner, hybrid: str) -> None:
    ask = ("generate", "--model", hybrid, "--prompt", "x", "--max-new-tokens", "20", "--ignore-eos", "--verbose")
    outcome = polytoken(*ask)
    assert "lane mtp (the checkpoint has a draft head), drafts by head, depth 3 (fixed)" in outcome.err
    for said in ("tokens/forward", "drafts (", "by depth", "of the byte floor"):
        assert said in outcome.err
    assert json.loads(polytoken("inspect", hybrid, "--json").out)["lane"] == "mtp"


def test_notes_of_a_canvas_run(polytoken: Runner, canvas: str, export: str) -> None:
    ask = ("--prompt", "x", "--max-new-tokens", "8", "--verbose")
    outcome = polytoken("generate", "--model", canvas, *ask, "--max-denoising-steps", "2")
    assert "lane canvas (a block-diffusion checkpoint), block policy on a canvas of 6" in outcome.err
    assert "4 denoise steps, 2.0 steps/canvas" in outcome.err
    for said in ("denoises/s", "first after", "of the byte floor"):
        assert said in outcome.err
    assert "rolling policy on a canvas of 8" in polytoken("generate", "--model", export, *ask).err
    assert json.loads(polytoken("inspect", canvas, "--json").out)["lane"] == "canvas"
    assert "canvas" in polytoken("inspect", export).out


def test_work_in_words() -> None:
    assert describe_work({"generated_tokens": 5}) == ""
    record = {"drafted_tokens": 9, "accepted_drafts": 6, "drafted_by_depth": [4, 3, 0], "accepted_by_depth": [3, 1, 0]}
    assert describe_work(record) == "accepted 6 of 9 drafts (67%; by depth 75%, 33%)"
    copies = {**record, "copied_tokens": 2, "accepted_copies": 2, "speculation": "off: too slow"}
    assert describe_work(copies).endswith(", 2 of 2 copies among them, speculation off: too slow")
    denoised = {"denoise_steps": 6, "generated_tokens": 12, "denoise_steps_per_second": 2.0, "ttfd_seconds": 0.25}
    assert describe_work(denoised, canvas_length=8) == (
        "6 denoise steps, 4.0 steps/canvas, 2.0 denoises/s, first after 0.25 s"
    )
    assert steps_per_canvas({"denoise_steps": 6, "canvas_count": 2, "generated_tokens": 12}, 8) == 3.0
    assert steps_per_canvas({"denoise_steps": 6, "generated_tokens": 0}, 8) is None


# -- chat and many requests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hybrid", "canvas", "export"])
def test_a_chat(polytoken: Runner, request: pytest.FixtureRequest, kind: str) -> None:
    model = request.getfixturevalue(kind)
    quick = ("--max-denoising-steps", "2") if kind == "canvas" else ()
    ask = ("--model", model, "--max-new-tokens", "6", *quick)
    outcome = polytoken("chat", *ask, "--prefill-chunk-size", "8", "--verbose", stdin="hello\nmore\n/stats\n")
    assert outcome.status == 0
    notes = outcome.err.splitlines()
    assert sum("tokens/forward" in line for line in notes) == 2  # two answers
    assert outcome.out.count("tokens/forward") == 1  # /stats
    assert "2 turns" in outcome.out
    assert "cached" in outcome.err  # the second turn reused what the first one had read
    assert ("drafts (" if kind == "hybrid" else "denoise steps") in outcome.err
    generated = polytoken("generate", *ask, "--prompt", "hello")
    assert outcome.out.startswith(generated.out.strip("\n"))


@pytest.mark.parametrize("kind", ["hybrid", "canvas", "export"])
def test_many_requests_are_those_asked_alone(
    polytoken: Runner, request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    model = request.getfixturevalue(kind)
    quick = ("--max-denoising-steps", "2") if kind == "canvas" else ()
    hot = {"sampling": {"temperature": 0.8}} if kind == "hybrid" else {}
    records = [
        {"request_id": f"r{n}", "prompt": f"number {n} " * (n % 5 + 1), "max_new_tokens": 3 + n % 7}
        | (hot if n % 2 else {})
        for n in range(9)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ask = ("generate", "--model", model, *quick, "--requests-jsonl")
    together = polytoken(*ask, str(path), "--batch-size", "4", "--verbose")
    assert together.status == 0
    results = {event["request_id"]: event for event in together.events_of("generation_result")}
    assert set(results) == {record["request_id"] for record in records}
    for record in records:
        assert results[record["request_id"]]["generated_tokens"] <= record["max_new_tokens"]
        assert "jump_count" in results[record["request_id"]] or kind == "hybrid"
    few = "".join(json.dumps(record) + "\n" for record in records[1:8:3])
    for event in polytoken(*ask, "-", "--batch-size", "1", "--prefix-cache-mib", "0", stdin=few).events_of(
        "generation_result"
    ):
        assert event["token_ids"] == results[event["request_id"]]["token_ids"]
    (summary,) = together.events_of("inference_summary")
    assert summary["finished_requests"] == 9
    if kind == "hybrid":
        assert summary["accepted_drafts"] <= summary["drafted_tokens"]
        assert "by depth" in together.err
    else:
        assert summary["active_row_denoises"] == sum(event["denoise_steps"] for event in results.values())
        assert together.events_of("first_denoise")
        assert "denoises/s" in together.err


def test_a_second_model_drafts(polytoken: Runner, hybrid: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(hybrid, other)
    ask = ("generate", "--model", hybrid, "--prompt", "x", "--max-new-tokens", "8", "--ignore-eos", "--json")
    outcome = polytoken(*ask, "--drafter", "model", "--draft-model", str(other))
    result = result_of(outcome)
    assert result["accepted_drafts"] == result["drafted_tokens"] > 0  # it is the same model
    assert outcome.events[0]["settings"]["draft_model"] == str(other)
    assert result["token_ids"] == result_of(polytoken(*ask, "--lane", "ar"))["token_ids"]


def test_every_flag_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    everywhere = (docs / "cli.md").read_text()
    pages = {lane: (docs / f"{lane}.md").read_text() for lane in ("mtp", "canvas")}
    for item in fields(LaneFlags):
        flag = flag_of(item.name)
        assert flag in everywhere and flag in pages[owner_of(item.name)], flag
