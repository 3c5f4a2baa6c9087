"""Ctrl-C and SIGTERM: the first drains with a record for every open request, the second does not wait."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

COMMAND = [sys.executable, "-m", "polytoken.cli"]
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
NOTE = {signal.SIGINT: "polytoken: note: interrupted\n", signal.SIGTERM: "polytoken: note: terminated\n"}
SIGNALS = pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)


@contextmanager
def started(*arguments: str, **words: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that does not outlive its test."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", **words
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def read_until(stream: IO[str], event: str) -> list[dict[str, Any]]:
    seen = []
    for line in stream:
        seen.append(json.loads(line))
        if seen[-1]["event"] == event:
            return seen
    raise AssertionError(f"no {event} before the end: {seen}")


def ask(process: subprocess.Popen[str], count: int, tokens: int = 400) -> None:
    assert process.stdin is not None
    for number in range(count):
        record = {"request_id": f"r{number}", "prompt": "x" * 40, "max_new_tokens": tokens}
        process.stdin.write(json.dumps(record) + "\n")
    process.stdin.flush()  # and not closed: more could come


@SIGNALS
def test_the_first_one_drains(tiny: str, number: signal.Signals) -> None:
    with started("generate", "--model", tiny, "--ignore-eos", "--requests-jsonl", "-") as process:
        ask(process, 12)
        assert process.stdout is not None and process.stderr is not None
        before = read_until(process.stdout, "token")
        process.send_signal(number)
        events = before + [json.loads(line) for line in process.stdout]
        assert process.wait(60) == STATUS[number]
        begun = {event["request_id"] for event in events if event["event"] == "request_started"}
        ends = [event for event in events if event["event"] == "generation_result"]
        assert begun <= {event["request_id"] for event in ends}
        assert len({event["request_id"] for event in ends}) == len(ends)
        assert any(event["status"] == "failed" and event["code"] == "interrupted" for event in ends)
        assert events[-1]["event"] == "inference_summary" and events[-1]["interrupted"]
        assert events[-1]["failed_requests"] + events[-1]["finished_requests"] == len(ends)
        assert process.stderr.read() == NOTE[number]


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_one_does_not_wait(tiny: str, numbers: tuple[signal.Signals, signal.Signals]) -> None:
    # Nobody reads: the drain hangs in a full pipe, and only a second signal ends it.
    with started("generate", "--model", tiny, "--ignore-eos", "--requests-jsonl", "-") as process:
        ask(process, 40)
        assert process.stdout is not None and process.stderr is not None
        read_until(process.stdout, "token")
        time.sleep(3)
        process.send_signal(numbers[0])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(numbers[1])
        assert process.wait(10) == STATUS[numbers[1]]
        assert "without waiting" in process.stderr.read()


@SIGNALS
def test_while_nothing_happens(tiny: str, number: signal.Signals) -> None:
    with started("generate", "--model", tiny, "--requests-jsonl", "-") as process:
        assert process.stdout is not None
        read_until(process.stdout, "runtime_loaded")
        process.send_signal(number)
        assert [json.loads(line)["event"] for line in process.stdout] == ["inference_summary"]
        assert process.wait(60) == STATUS[number]


@SIGNALS
def test_the_text_so_far_is_kept(tiny: str, number: signal.Signals) -> None:
    with started("generate", "--model", tiny, "--ignore-eos", "--prompt", "x", "--stream") as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(10)
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(60) in (0, STATUS[number])  # 0: the tiny model was faster
        assert len(first) == 10 and rest.endswith("\n")
        assert "Traceback" not in process.stderr.read()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc to see how far a process is")
@SIGNALS
@pytest.mark.parametrize("library", ["libmlx", "tokenizers"])
def test_while_loading(tiny: str, number: signal.Signals, library: str) -> None:
    with started("generate", "--model", tiny, "--requests-jsonl", "-") as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while library not in maps.read_text():  # in the middle of imports, or of the load
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (STATUS[number], NOTE[number])


def test_sigterm_ends_a_chat_in_the_middle_of_an_answer_and_at_its_prompt(tiny: str) -> None:
    for speak in (True, False):
        with started("chat", "--model", tiny, "--max-new-tokens", "400", "--verbose") as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            if speak:
                process.stdin.write("hello\n")
                process.stdin.flush()
                assert process.stdout.read(1)
            else:
                while "loaded in" not in process.stderr.readline():
                    pass
                time.sleep(1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143
            assert process.stderr.read().endswith(NOTE[signal.SIGTERM])


def test_what_was_ignored_at_the_start_stays_ignored(tiny: str) -> None:
    ignore = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # noqa: E731
    with started("generate", "--model", tiny, "--requests-jsonl", "-", preexec_fn=ignore) as process:
        assert process.stdin is not None and process.stdout is not None
        read_until(process.stdout, "runtime_loaded")
        process.send_signal(signal.SIGTERM)
        ask(process, 1, tokens=3)
        process.stdin.close()
        assert [json.loads(line) for line in process.stdout][-1]["finished_requests"] == 1
        assert process.wait(60) == 0
        process.stdin = None  # for the last communicate
