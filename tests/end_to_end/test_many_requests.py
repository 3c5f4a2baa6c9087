"""Two hundred mixed lines through the command line, ten of them bad; and memory while they are served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polytoken
from polytoken.engine import read_requests
from polytoken.events import GenerationResult
from polytoken.request import Request, RequestDefaults
from polytoken.testkit.tiny import write_checkpoint

PAGES = Path("/proc/self/statm")
BAD = {
    3: ("{broken", "bad_json"),
    20: ("[1]", "bad_record"),
    41: ("null", "bad_record"),
    60: ('{"prompt": "x"}', "bad_request_id"),
    77: ('{"request_id": "none"}', "prompt_xor_messages"),
    98: ('{"request_id": "q", "prompt": "x", "body": 1}', "unknown_field"),
    120: ('{"request_id": "q", "prompt": "x", "max_new_tokens": 0}', "bad_limit"),
    143: ('{"request_id": "q", "prompt": "x", "sampling": {"top_p": 2}}', "bad_sampling"),
    166: ('{"request_id": "r1", "prompt": "again"}', "duplicate_id"),
    189: (json.dumps({"request_id": "q", "prompt": "x" * 600}), "too_long"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", seed=1).path)


def mixed(number: int) -> str:
    record: dict[str, Any] = {"request_id": f"r{number}", "max_new_tokens": 1 + number % 9}
    if number % 3:
        record["prompt"] = f"line {number % 17} " * (1 + number % 5)
    else:
        record["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{number}?"}]
    if number % 2:
        record["sampling"] = {"temperature": 0.9, "top_k": number % 7, "repetition_penalty": 1.1}
    if number % 5 == 0:
        record["stop"] = ["e", "zz"]
    return json.dumps(record)


def test_g01_190_results_as_alone_and_10_errors_with_line_and_code(tiny: str, tmp_path: Path) -> None:
    lines = [BAD[number][0] if number in BAD else mixed(number) for number in range(1, 201)]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n")
    finished = subprocess.run(
        [sys.executable, "-m", "polytoken", "generate", "--model", tiny, "--requests-jsonl", str(path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (finished.returncode, finished.stderr) == (1, "")
    events = [json.loads(line) for line in finished.stdout.splitlines()]
    errors = {event["line"]: event["code"] for event in events if event["event"] == "request_error"}
    assert errors == {number: code for number, (_, code) in BAD.items()}
    results = {event["request_id"]: event for event in events if event["event"] == "generation_result"}
    assert len(results) == 190 and all(result["status"] == "finished" for result in results.values())
    assert (events[-1]["finished_requests"], events[-1]["rejected_requests"]) == (190, 10)
    compared = 0
    with polytoken.load(tiny, batch_size=1, prefix_cache_mib=0) as engine:
        for item in read_requests(path, RequestDefaults()):
            if not isinstance(item, Request) or item.line in BAD:
                continue
            alone, beside = engine.generate(item), results[item.request_id]
            assert list(alone.token_ids) == beside["token_ids"], item.request_id
            assert (alone.text, alone.stop_reason, alone.seed) == (
                beside["text"], beside["stop_reason"], beside["seed"],
            )  # fmt: skip
            compared += 1
    assert compared == 190


@pytest.mark.skipif(not PAGES.exists(), reason="there is no /proc to read memory from")
def test_j01_j02_memory_is_flat_over_200_lines(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(mixed(number) + "\n" for number in range(1, 201)))
    pages = []
    with polytoken.load(tiny, prefix_cache_mib=1) as engine:
        for event in engine.run(read_requests(path, RequestDefaults()), token_events=False):
            if isinstance(event, GenerationResult):
                pages.append(int(PAGES.read_text().split()[1]))
    assert len(pages) == 200
    # 4 KiB a page: 16 MiB over the last 150 requests, where one that kept 128 KiB each would be above it.
    growth = (sum(pages[-10:]) - sum(pages[50:60])) / 10 * 4096
    assert growth < 16 << 20
