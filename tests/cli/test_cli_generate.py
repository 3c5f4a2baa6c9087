"""Answers, events and exit statuses of `polytoken generate` on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import Outcome, Runner  # type: ignore[import-not-found]

from polytoken.request import derive_seed


def lines(*records: Any) -> str:
    return "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)


def result_of(outcome: Outcome) -> dict[str, Any]:
    (result,) = outcome.events_of("generation_result")
    return result


def test_three_ways_to_print_one_answer(polytoken: Runner, tiny: str) -> None:
    ask = ("generate", "--model", tiny, "--prompt", "Grüße", "--max-new-tokens", "24")
    whole, streamed, machine = polytoken(*ask), polytoken(*ask, "--stream"), polytoken(*ask, "--json")
    for outcome in (whole, streamed, machine):
        assert outcome.status == 0
        assert outcome.err == ""
    text = result_of(machine)["text"]
    assert whole.out == streamed.out == text + ("" if text.endswith("\n") else "\n")
    names = [event["event"] for event in machine.events]
    tokens = names.count("token")
    assert names == ["runtime_loaded", "request_started", *["token"] * tokens, "generation_result", "inference_summary"]
    assert "".join(event["delta"] for event in machine.events_of("token")) == text
    assert result_of(machine)["request_id"] == "single"
    assert result_of(machine)["seed"] == 42  # as it stands, not derived


def test_prompt_and_messages_from_standard_input(polytoken: Runner, tiny: str) -> None:
    ask = ("generate", "--model", tiny, "--max-new-tokens", "8")
    plain = polytoken(*ask, "--prompt", "hello").out
    assert polytoken(*ask, "--prompt", "-", stdin="hello\n").out == plain
    turns = json.dumps([{"role": "user", "content": "hello"}])
    assert polytoken(*ask, "--messages", "-", stdin=turns).out == plain
    assert polytoken(*ask, "--checkpoint", tiny, "--prompt", "hello").out == plain


def test_many_requests_are_those_asked_alone(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    records = [
        {"request_id": f"r{number}", "prompt": f"number {number} " * number, "max_new_tokens": 6 + number,
         "sampling": {"temperature": 0.9 if number % 2 else 0.0}}
        for number in range(1, 7)
    ]  # fmt: skip
    path = tmp_path / "requests.jsonl"
    path.write_text(lines(*records), encoding="utf-8")
    ask = ("generate", "--model", tiny, "--requests-jsonl")
    together = polytoken(*ask, str(path), "--batch-size", "3")
    assert together.status == 0
    results = {event["request_id"]: event for event in together.events_of("generation_result")}
    assert set(results) == {record["request_id"] for record in records}
    for record in records[:2]:
        alone = result_of(polytoken(*ask, "-", stdin=lines(record)))
        assert alone["token_ids"] == results[record["request_id"]]["token_ids"]
        assert alone["seed"] == derive_seed(42, str(record["request_id"]))
    (summary,) = together.events_of("inference_summary")
    assert summary["finished_requests"] == 6


def test_every_bad_row_is_told_and_the_rest_goes_on(polytoken: Runner, tiny: str) -> None:
    rows = lines(
        {"request_id": "a", "prompt": "x", "max_new_tokens": 2},
        "{broken\n",
        "\n",
        "[1]\n",
        '"x"\n',
        "null\n",
        "3\n",
        {},
        {"body": "x"},
        {"request_id": "b"},
        {"request_id": "a", "prompt": "again", "max_new_tokens": 2},
        {"request_id": "c", "prompt": "x" * 600},
        {"request_id": "d", "prompt": "é", "max_new_tokens": 2},
    )
    outcome = polytoken("generate", "--model", tiny, "--requests-jsonl", "-", stdin=rows)
    assert outcome.status == 1
    assert outcome.err == ""
    rejected = [(event.get("line"), event["code"]) for event in outcome.events_of("request_error")]
    assert sorted(rejected) == [
        (2, "bad_json"),
        (4, "bad_record"),
        (5, "bad_record"),
        (6, "bad_record"),
        (7, "bad_record"),
        (8, "bad_request_id"),
        (9, "unknown_field"),
        (10, "prompt_xor_messages"),
        (11, "duplicate_id"),
        (12, "too_long"),
    ]
    assert {event["request_id"] for event in outcome.events_of("generation_result")} == {"a", "d"}
    (summary,) = outcome.events_of("inference_summary")
    assert summary["finished_requests"] == 2
    assert summary["rejected_requests"] == len(rejected) == 10


def test_requests_that_cannot_be_read(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    outcome = polytoken("generate", "--model", tiny, "--requests-jsonl", str(tmp_path / "absent.jsonl"))
    assert outcome.status == 1
    (event,) = outcome.events
    assert (event["event"], event["code"]) == ("request_error", "unreadable_input")
    assert "line" not in event
    assert "request_id" not in event


def test_a_folder_as_requests(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    outcome = polytoken("generate", "--model", tiny, "--requests-jsonl", str(tmp_path))
    assert outcome.status == 1
    assert [event["code"] for event in outcome.events_of("request_error")] == ["unreadable_input"]


def test_a_prompt_that_does_not_fit_fails_with_a_line(polytoken: Runner, tiny: str) -> None:
    outcome = polytoken("generate", "--model", tiny, "--prompt", "x" * 600)
    assert outcome.status == 1
    assert outcome.out == ""
    assert "512" in outcome.error
    kept = polytoken("generate", "--model", tiny, "--prompt", "x", "--max-new-tokens", "600", "--json")
    assert [event["code"] for event in kept.events_of("request_error")] == ["too_long"]


def test_the_default_limit_shrinks_to_the_context(polytoken: Runner, tiny: str) -> None:
    result = result_of(polytoken("generate", "--model", tiny, "--prompt", "x", "--ignore-eos", "--json"))
    assert result["prompt_tokens"] + result["generated_tokens"] == 512


ENGINE_FLAGS: dict[str, tuple[list[str], Any]] = {
    "lane": (["--lane", "ar"], "ar"),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "dequantise": (["--no-dequantise"], False),
    "products": (["--products", "stock"], "stock"),
    "threads": (["--threads", "2"], 2),
    "device": (["--device", "cpu"], "cpu"),
    "offline": (["--offline"], True),
    "batch_size": (["--batch-size", "3"], 3),
    "prefill_chunk_size": (["--prefill-chunk-size", "17"], 17),
    "prefix_cache_mib": (["--prefix-cache-mib", "7"], 7),
    "session_cache_mib": (["--session-cache-mib", "5"], 5),
    "prefix_reuse": (["--prefix-reuse", "close"], "close"),
    "max_queue_size": (["--max-queue-size", "5"], 5),
}
REQUEST_FLAGS: dict[str, tuple[list[str], Any]] = {
    "max_new_tokens": (["--max-new-tokens", "3"], 3),
    "stop": (["--stop", "q!", "--stop", "zz"], ["q!", "zz"]),
    "think": (["--think", "OFF"], False),
    "ignore_eos": (["--ignore-eos"], True),
    "seed": (["--seed", "-7"], -7),
    "raw": (["--raw"], True),
}
SAMPLING_FLAGS: dict[str, tuple[list[str], Any]] = {
    "temperature": (["--temperature", "0.7"], 0.7),
    "top_k": (["--top-k", "9"], 9),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.01"], 0.01),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "0.5"], 0.5),
    "frequency_penalty": (["--frequency-penalty", "-0.5"], -0.5),
    "logit_bias": (["--logit-bias", "5=-100", "--logit-bias", "3=2"], [[3, 2.0], [5, -100.0]]),
    "logprobs": (["--logprobs", "2"], 2),
}


def test_every_flag_shows_in_the_settings(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    flags = [
        word for group in (ENGINE_FLAGS, REQUEST_FLAGS, SAMPLING_FLAGS) for words, _ in group.values() for word in words
    ]
    outcome = polytoken("generate", "--model", tiny, "--prompt", "x", "--json", "--store", str(tmp_path), *flags)
    settings = outcome.events[0]["settings"]
    requests = settings.pop("requests")
    assert settings["model"] == tiny
    assert settings["store"] == str(tmp_path)
    for name, (_, value) in ENGINE_FLAGS.items():
        assert settings[name] == value, name
    for name, (_, value) in REQUEST_FLAGS.items():
        assert requests[name] == value, name
    for name, (_, value) in SAMPLING_FLAGS.items():
        assert requests["sampling"][name] == value, name
    result = result_of(outcome)
    assert (result["seed"], result["thinking"], result["generated_tokens"]) == (-7, "off", 3)
    assert len(result["logprobs"]) == 3
    assert all(len(item["top"]) == 2 for item in result["logprobs"])
    assert outcome.events[0]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "5", "--seed", "1"],
        ["--repetition-penalty", "3"],
        ["--presence-penalty", "2"],
        ["--frequency-penalty", "2"],
        ["--raw"],
        ["--think", "false"],
    ],
)
def test_a_flag_changes_the_answer(polytoken: Runner, tiny: str, flags: list[str]) -> None:
    ask = ("generate", "--model", tiny, "--prompt", "say something", "--max-new-tokens", "32", "--ignore-eos", "--json")
    assert result_of(polytoken(*ask))["token_ids"] != result_of(polytoken(*ask, *flags))["token_ids"]


def test_verbose_tells_about_model_and_speed(polytoken: Runner, tiny: str) -> None:
    outcome = polytoken("generate", "--model", tiny, "--prompt", "x", "--max-new-tokens", "8", "--verbose")
    assert "loading" in outcome.err
    for words in ("products", "tokens/s", "tokens/forward", "of the byte floor"):
        assert words in outcome.err
    assert "tokens/s" not in outcome.out


@pytest.mark.parametrize(("many", "status"), [(False, 4), (True, 1)])
def test_numbers_that_are_not_finite_have_a_status_of_their_own(
    polytoken: Runner, tiny: str, tmp_path: Path, many: bool, status: int
) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(tiny, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    weights = {name: mx.full(value.shape, float("nan"), dtype=value.dtype) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    record = json.dumps({"request_id": "a", "prompt": "x"})
    how = ("--requests-jsonl", "-") if many else ("--prompt", "x", "--json")
    outcome = polytoken("generate", "--model", str(folder), *how, stdin=record)
    assert outcome.status == status
    (result,) = outcome.events_of("generation_result")
    assert result["code"] == "non_finite"
