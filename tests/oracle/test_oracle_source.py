"""Source runs: what counts as one, and a chat with our own server that the oracle reproduces from the record alone."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from conftest import end_soon
from oracle_runs import run_plan, undescribed

from polytoken.cli import main
from polytoken.errors import UsageError
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.schema import violations
from polytoken.oracle.source import CHECKS, parse_source, require
from polytoken.testkit.tiny import write_checkpoint

Records = list[dict[str, Any]]
START: dict[str, Any] = {
    "event": "start",
    "model": "m",
    "plain_chat": True,
    "system_prompt": None,
    "canary": True,
    "prompts": ["a", "b", "c"],
    "warmup": {"enabled": True, "prompt": "ping", "max_generated_tokens": 4},
    "settings": {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "seed": 0,
        "reasoning": "low",
        "quality": False,
        "power_percent": 100,
        "prefill_chunk": 2048,
        "max_generated_tokens": 100,
        "context_tokens": 400,
        "acceleration": {"kind": "mtp", "enabled": True},
    },
}


def turn(number: int) -> dict[str, Any]:
    tokens = {"prompt": 10 * number, "cached": 0, "completion": 5}
    words = {"finish_reason": "stop", "reasoning": "notes", "content": "answer"}
    return {"event": "result", "turn": number, "ok": True, "tokens": tokens, **words}


def source() -> Records:
    warm = {"event": "warmup_result", "ok": True, "finish_reason": "length", "completion_tokens": 4}
    return copy.deepcopy([START, warm, turn(1), turn(2), turn(3)])


def test_a_source_is_read_with_what_it_says() -> None:
    run = parse_source(source(), mtp=True, canary=True)
    assert run.prompts == ("a", "b", "c") and run.limit(350) == 50 and run.bootstrap and not run.counts_end
    assert run.turns[0].text == "notes</think>answer"
    checks, differences = run.check_turn(
        0, prompt_tokens=10, cached_tokens=0, completion_tokens=5, text="notes</think>answer"
    )
    assert list(checks) == list(CHECKS) and all(checks.values()) and differences == {}
    require(checks, "turn 1", differences)
    wrong, how = run.check_turn(1, prompt_tokens=20, cached_tokens=16, completion_tokens=5, text="notes</think>other")
    said = r"turn 2 differs from the source in cached_tokens \(16 against 0\), text \(from character 13: 'other'"
    with pytest.raises(MismatchError, match=said) as caught:
        require(wrong, "turn 2", how)
    assert caught.value.exit_status == 3 and caught.value.code == "source_mismatch"
    with pytest.raises(UsageError, match="exhausts"):
        run.limit(400)


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("plain_chat",), False, "plain_chat"),
        (("system_prompt",), "be kind", "system_prompt"),
        (("canary",), False, "canary is on"),
        (("settings", "reasoning"), "high", "reasoning"),
        (("settings", "power_percent"), 50, "power_percent"),
        (("settings", "min_p"), 0.1, "min_p"),
        (("settings", "quality"), True, "quality"),
        (("settings", "seed"), None, "seed"),
        (("settings", "prefill_chunk"), 0, "prefill_chunk"),
        (("settings", "acceleration", "kind"), "other", "kind mtp"),
        (("settings", "acceleration", "enabled"), False, "acceleration is on"),
        (("settings", "context_tokens"), "many", "context_tokens"),
        (("settings", "max_generated_tokens"), None, "max_generated_tokens"),
        (("settings", "temperature"), -4, "--source-run: temperature"),
        (("warmup", "max_generated_tokens"), 0, "warm-up's max_generated_tokens"),
        (("prompts",), ["a"], "3 prompts"),
        (("prompts",), ["a", "b", 5], "every prompt is a text"),
        (("warmup", "enabled"), False, "warm-up"),
    ],
)
def test_a_source_of_another_kind_is_refused_by_the_rule_it_breaks(
    path: tuple[str, ...], value: Any, rule: str
) -> None:
    records = source()
    place = records[0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UsageError, match=rule):
        parse_source(records, mtp=True, canary=True)


@pytest.mark.parametrize("place", range(5))
def test_a_source_with_junk_in_any_field_is_refused_or_read_before_anything_is_loaded(place: int) -> None:
    """Nothing that a run later reads is missing or of another type."""
    for junk in (None, "abc", [], {}, 1.5):
        for name in source()[place]:
            records = source()
            records[place][name] = junk
            if name == "event":
                continue
            try:
                read = parse_source(records, mtp=True, canary=True)
            except UsageError:
                continue
            assert isinstance(read.warmup_result["finish_reason"], str)
            assert isinstance(read.warmup_result["completion_tokens"], int)
            assert all(isinstance(each.text, str) for each in read.turns)
            assert isinstance(read.warmup["prompt"], str)


def test_an_incomplete_source_is_refused() -> None:
    for missing in range(5):
        records = source()
        del records[missing]
        with pytest.raises(UsageError):
            parse_source(records, mtp=True, canary=True)
    records = source()
    records[3]["finish_reason"] = "length"
    with pytest.raises(UsageError, match="ended with stop"):
        parse_source(records, mtp=True, canary=True)
    records = source()
    del records[0]["settings"]["top_p"]
    with pytest.raises(UsageError, match="top_p"):
        parse_source(records, mtp=True, canary=True)
    records = source()
    records[0]["settings"] = [1]
    with pytest.raises(UsageError, match="wrong type"):
        parse_source(records, mtp=True, canary=True)


def test_another_engines_source_is_held_to_what_means_the_same_there() -> None:
    records = source()
    records[0]["held"] = ["prompt_tokens", "text"]
    run = parse_source(records, mtp=True, canary=True)
    checks, _ = run.check_turn(0, prompt_tokens=10, cached_tokens=7, completion_tokens=9, text="notes</think>answer")
    assert checks == {"prompt_tokens": True, "text": True}
    for held in (["text"], ["prompt_tokens", "speed"]):
        records[0]["held"] = held
        with pytest.raises(UsageError, match="held"):
            parse_source(records, mtp=True, canary=True)


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """A server of any kind, a module of Python and its arguments; its address."""
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # which others may take before the server does
        with TemporaryFile("w+") as log:
            command = [sys.executable, "-m", *words, "--port", str(port)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
            try:
                if answers(process, f"http://127.0.0.1:{port}"):
                    yield f"http://127.0.0.1:{port}"
                    return
            finally:
                process.terminate()
                process.wait(120)
            log.seek(0)
            told = log.read()
    pytest.fail(told)


def answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait for the server to answer; False when it has ended, or a busy machine would long have started it."""
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=30):
            return process.poll() is None
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("lane", ["mtp", pytest.param("ar", marks=pytest.mark.slow)])
def test_a_chat_with_our_own_server_is_reproduced_from_its_record(
    lane: str, hybrid: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "source.jsonl"
    server = ["--model", f"tiny={hybrid}", "--lane", lane, "--prefill-chunk-size", "16"]
    with serving("polytoken", "serve", *server) as url:
        words = ["eval", "chat", "--url", url, "--model", "tiny", "--readme", str(text_file), "--prefill-chunk", "16"]
        assert main([*words, "--warmup-tokens", "4", "--seed", "3", "--output", str(record)]) == 0
    events = [json.loads(line)["event"] for line in record.read_text().splitlines()]
    assert events == ["start", "warmup_result", "result", "result", "result"]
    capsys.readouterr()
    mode = "mtp-generate" if lane == "mtp" else "ar"
    plan: dict[str, Any] = {"mode": mode, "chat": True, "readme": text_file, "server_defaults": True}
    ran = run_plan(hybrid, **plan, source_run=record)
    assert violations(ran.records) == [] and undescribed(ran.records) == set()
    matches = ran.of("chat_source_match")
    assert len(matches) == 3 and all(all(match["checks"].values()) for match in matches)
    assert matches[2]["checks"].keys() == set(CHECKS)
    # The same record with one token more is not this engine's.
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines[3]["tokens"]["completion"] += 1
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run_plan(hybrid, **plan, source_run=record, check=False)
    assert isinstance(ran.error, MismatchError) and ran.error.field == "completion_tokens"
    assert ran.records[-1]["exit_status"] == 3


def chat_with_mlx_lm(model: Path, readme: Path, record: Path, *words: str) -> int:
    """The status of `eval chat` against `mlx_lm.server`, as the documentation has it."""
    with serving("mlx_lm", "server", "--model", str(model)) as url:
        command = ["eval", "chat", "--url", url, "--model", "default_model", "--readme", str(readme), "--counts-end"]
        return main([*command, *words, "--output", str(record)])


def reproduce(model: str, readme: Path, record: Path) -> list[dict[str, bool]]:
    """What of every turn agrees when the AR lane runs the record's chat."""
    plan: dict[str, Any] = {"mode": "ar", "chat": True, "readme": readme, "server_defaults": True}
    ran = run_plan(model, **plan, source_run=record)
    assert violations(ran.records) == [] and undescribed(ran.records) == set()
    return [match["checks"] for match in ran.of("chat_source_match")]


def test_a_chat_with_mlx_lm_is_held_to_what_it_can_give(tmp_path: Path) -> None:
    """Greedy: prompts, counts and texts agree. Its cache has frontiers of its own, which are not ours to prove."""
    config = {"max_position_embeddings": 4096}
    made = write_checkpoint(tmp_path / "model", "qwen3", seed=1, config=config).path
    model, readme, record = end_soon(made, 150), tmp_path / "readme", tmp_path / "source.jsonl"
    readme.write_text("harbour\n")
    assert chat_with_mlx_lm(made, readme, record, "--temperature", "0", "--warmup-tokens", "4") == 0
    start, *_, last = [json.loads(line) for line in record.read_text().splitlines()]
    assert start["held"] == ["prompt_tokens", "completion_tokens", "text"] and start["server"] is None
    assert last["tokens"]["cached"] > 0
    assert reproduce(model, readme, record) == [dict.fromkeys(start["held"], True)] * 3


def test_no_server_is_one_line(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "chat", "--url", "http://127.0.0.1:9", "--model", "m", "--readme", str(text_file)]
    assert main(words) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://"])
def test_an_address_that_is_none_of_http_is_a_usage_error(
    url: str, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "chat", "--url", url, "--model", "m", "--readme", str(text_file)]) == 2
    assert "must be of the form http://host:port" in capsys.readouterr().err
