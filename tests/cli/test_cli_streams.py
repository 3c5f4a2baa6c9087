"""Output that cannot be written, readers that leave, streams that are closed: one line or none, a stable status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "polytoken.cli"]
FULL = Path("/dev/full")
NO_SPACE = "polytoken: error: cannot write to standard output: No space left on device\n"
CLOSED = "polytoken: error: cannot write to standard output: it is closed; send it to /dev/null if it is not wanted\n"

GENERATE = ("generate", "--model", "{tiny}", "--prompt", "x", "--max-new-tokens", "8")
REQUESTS = ("generate", "--model", "{tiny}", "--requests-jsonl", "{requests}")
CHAT = ("chat", "--model", "{tiny}", "--max-new-tokens", "4")
BENCH = ("bench", "--model", "{tiny}", "--rounds", "1", "--new-tokens", "2", "--prompt-tokens", "4")
VERBS = [
    GENERATE,
    (*GENERATE, "--stream"),
    (*GENERATE, "--json"),
    REQUESTS,
    CHAT,
    BENCH,
    (*BENCH, "--json"),
    ("models",),
    ("models", "--json"),
    ("inspect", "{tiny}"),
    ("doctor",),
    ("version",),
    ("--version",),
    ("--help",),
    ("generate", "--help"),
]


@pytest.fixture(scope="module")
def fill(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    requests = tmp_path_factory.mktemp("requests") / "many.jsonl"
    records = [{"request_id": f"r{n}", "prompt": "x" * n, "max_new_tokens": 100} for n in range(1, 21)]
    requests.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"tiny": tiny, "requests": str(requests)}


def run(words: tuple[str, ...], fill: dict[str, str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own; one that hangs fails the test."""
    arguments = [word.format(**fill) for word in words]
    streams.setdefault("stderr", subprocess.PIPE)
    return subprocess.run([*COMMAND, *arguments], text=True, timeout=90, check=False, **streams)


def shell(words: tuple[str, ...], fill: dict[str, str], redirection: str) -> subprocess.CompletedProcess[str]:
    """The same with a redirection that only a shell can make, such as a closed stream."""
    arguments = [word.format(**fill) for word in words]
    script = f'"$@" {redirection}'
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *COMMAND, *arguments], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_full_disk_is_one_line_and_status_1(words: tuple[str, ...], fill: dict[str, str]) -> None:
    with FULL.open("w") as full:
        finished = run(words, fill, input="hello\nhello\n", stdout=full)
    told = finished.stderr.splitlines(keepends=True)
    if words[0] == "bench":  # it tells how far it is
        told = told[-1:]
    assert (finished.returncode, told) == (1, [NO_SPACE])


@pytest.mark.parametrize("words", [GENERATE, REQUESTS, CHAT, BENCH, ("models",), ("inspect", "{tiny}"), ("version",)])
def test_closed_output_is_refused_before_anything_is_loaded(words: tuple[str, ...], fill: dict[str, str]) -> None:
    finished = shell(words, {**fill, "tiny": "no-such-model"}, ">&-")
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", CLOSED)


@pytest.mark.parametrize(
    "words", [GENERATE, (*GENERATE, "--stream"), REQUESTS, CHAT, ("models",), ("inspect", "{tiny}"), ("--help",)]
)
def test_a_reader_that_left_gets_silence_and_status_141(words: tuple[str, ...], fill: dict[str, str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        finished = run(words, fill, input="hello\nhello\n", stdout=write_end)
    finally:
        os.close(write_end)
    assert (finished.returncode, finished.stderr) == (141, "")


def test_a_reader_that_leaves_after_one_line(fill: dict[str, str]) -> None:
    finished = shell(REQUESTS, fill, "| head -n 1")
    assert json.loads(finished.stdout)["event"] == "runtime_loaded"
    assert finished.stderr == ""


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_errors_that_nobody_can_be_told_never_end_up_in_the_output(fill: dict[str, str], redirection: str) -> None:
    if "full" in redirection and not FULL.exists():
        pytest.skip("no /dev/full on this system")
    wrong = shell(("generate", "--modle", "x"), fill, redirection)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    right = shell((*GENERATE, "--json", "--verbose"), fill, redirection)
    assert right.returncode == 0
    assert [json.loads(line)["event"] for line in right.stdout.splitlines()][-1] == "inference_summary"


def test_a_closed_input_is_refused_where_it_is_needed_and_harms_nothing_else(fill: dict[str, str]) -> None:
    for words, flag in (((*GENERATE[:3], "--prompt", "-"), "--prompt: "), (CHAT, "")):
        finished = shell(words, {**fill, "tiny": "no-such-model"}, "<&-")
        assert finished.returncode == 2
        assert finished.stderr == f"polytoken: error: {flag}there is no standard input: it is closed\n"
    finished = shell((*GENERATE[:3], "--requests-jsonl", "-"), {**fill, "tiny": "no-such-model"}, "<&-")
    assert finished.returncode == 1
    assert json.loads(finished.stdout)["code"] == "unreadable_input"
    # The next file opened must not get the number of the closed stream.
    assert shell(GENERATE, fill, "<&-").returncode == 0


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_a_report_is_saved_before_it_is_printed(fill: dict[str, str], tmp_path: Path) -> None:
    with FULL.open("w") as full:
        finished = run((*BENCH, "--output", str(tmp_path / "report.json")), fill, stdout=full)
    assert finished.returncode == 1
    assert json.loads((tmp_path / "report.json").read_text())["rounds"] == 1
