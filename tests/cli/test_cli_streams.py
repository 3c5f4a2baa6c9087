"""Output that cannot be written, readers that leave, streams that are closed: one line or none, a stable status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "polytoken"]
FULL = Path("/dev/full")
NO_SPACE = "polytoken: error: cannot write to standard output: No space left on device\n"
CLOSED = "polytoken: error: cannot write to standard output: it is closed; send it to /dev/null if it is not wanted\n"

GENERATE = ("generate", "--model", "{tiny}", "--prompt", "x", "--max-new-tokens", "8")
REQUESTS = ("generate", "--model", "{tiny}", "--requests-jsonl", "{requests}")
CHAT = ("chat", "--model", "{tiny}", "--max-new-tokens", "4")
BENCH = ("bench", "--model", "{tiny}", "--rounds", "1", "--new-tokens", "2", "--prompt-tokens", "4")
STREAM = (*GENERATE, "--stream")
VERBS = [
    GENERATE,
    STREAM,
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
LEFT = [GENERATE, STREAM, REQUESTS, CHAT, ("models",), ("inspect", "{tiny}"), ("--help",)]
SAVED = (*BENCH, "--output", "{report}")
Ends = dict[tuple[str, tuple[str, ...]], tuple[int, str]]
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
PATIENCE = 300  # seconds, for a machine that has other things to do

# Many command lines in one process, which pays for its imports once; each gets streams of its own, as files.
MANY = """
import faulthandler, io, json, os, sys, tempfile
from polytoken.cli import main

sys.path.append({tests})
from short_probes import shorten_probes
shorten_probes()

def stream(number, mode):
    return io.TextIOWrapper(open(number, mode, closefd=False), encoding="utf-8")

report, kept, ends = os.fdopen(os.dup(1), "w"), [], []
faulthandler.dump_traceback_later({patience}, file=os.fdopen(os.dup(2), "w"), exit=True)
for kind, words in json.load(sys.stdin):
    errors, typed = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    typed.write(b"hello\\nhello\\n")
    typed.seek(0)
    if kind == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        gone, target = os.pipe()
        os.close(gone)
    for source, number in ((typed.fileno(), 0), (target, 1), (errors.fileno(), 2)):
        os.dup2(source, number)
    os.close(target)
    sys.stdin, sys.stdout, sys.stderr = stream(0, "rb"), stream(1, "wb"), stream(2, "wb")
    kept.append((sys.stdin, sys.stdout, sys.stderr))  # as the interpreter keeps its own
    status = main(words)
    sys.stdout.flush()  # as at the end of a process
    sys.stderr.flush()
    errors.seek(0)
    ends.append([status, errors.read().decode()])
json.dump(ends, report)
report.flush()
os._exit(0)
""".replace("{patience}", str(PATIENCE - 30)).replace("{tests}", repr(str(Path(__file__).parents[1])))


@pytest.fixture(scope="module")
def fill(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    requests = tmp_path_factory.mktemp("requests") / "many.jsonl"
    records = [{"request_id": f"r{n}", "prompt": "x" * n, "max_new_tokens": 100} for n in range(1, 21)]
    requests.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"tiny": tiny, "requests": str(requests), "report": str(requests.with_name("report.json"))}


@pytest.fixture(scope="module")
def ends(fill: dict[str, str]) -> Ends:
    """Status and errors of every command line, on a full disk and with a reader that has left."""
    jobs = [("full", words) for words in [*VERBS, SAVED] if FULL.exists()] + [("left", words) for words in LEFT]
    told = json.dumps([(kind, [word.format(**fill) for word in words]) for kind, words in jobs])
    finished = subprocess.run(
        [sys.executable, "-c", MANY], input=told, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return {job: (status, errors) for job, (status, errors) in zip(jobs, json.loads(finished.stdout), strict=True)}


def run(words: tuple[str, ...], fill: dict[str, str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own; one that hangs fails the test."""
    arguments = [word.format(**fill) for word in words]
    streams.setdefault("stderr", subprocess.PIPE)
    return subprocess.run([*COMMAND, *arguments], text=True, timeout=PATIENCE, check=False, **streams)


def shell(words: tuple[str, ...], fill: dict[str, str], redirection: str) -> subprocess.CompletedProcess[str]:
    """The same with a redirection that only a shell can make, such as a closed stream."""
    arguments = [word.format(**fill) for word in words]
    script = f'"$@" {redirection}'
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@needs_full
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_full_disk_is_one_line_and_status_1(words: tuple[str, ...], ends: Ends) -> None:
    status, errors = ends["full", words]
    told = errors.splitlines(keepends=True)
    if words[0] == "bench":  # it tells how far it is
        told = told[-1:]
    assert (status, told) == (1, [NO_SPACE])


@needs_full
@pytest.mark.parametrize("words", [STREAM, ("--help",)], ids=" ".join)
def test_a_full_disk_is_told_once_also_where_the_interpreter_ends(words: tuple[str, ...], fill: dict[str, str]) -> None:
    with FULL.open("w") as full:
        finished = run(words, fill, input="", stdout=full)
    assert (finished.returncode, finished.stderr) == (1, NO_SPACE)


@pytest.mark.parametrize("words", [GENERATE, REQUESTS, CHAT, BENCH, ("models",), ("inspect", "{tiny}"), ("version",)])
def test_closed_output_is_refused_before_anything_is_loaded(words: tuple[str, ...], fill: dict[str, str]) -> None:
    finished = shell(words, {**fill, "tiny": "no-such-model"}, ">&-")
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", CLOSED)


@pytest.mark.parametrize("words", LEFT, ids=" ".join)
def test_a_reader_that_left_gets_silence_and_status_141(words: tuple[str, ...], ends: Ends) -> None:
    assert ends["left", words] == (141, "")


@pytest.mark.parametrize("words", [pytest.param(STREAM, marks=pytest.mark.slow), ("--help",)], ids=" ".join)
def test_a_reader_that_left_is_no_matter_at_the_end_of_the_interpreter(
    words: tuple[str, ...], fill: dict[str, str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        finished = run(words, fill, input="", stdout=write_end)
    finally:
        os.close(write_end)
    assert (finished.returncode, finished.stderr) == (141, "")


def test_a_reader_that_leaves_after_one_line(fill: dict[str, str]) -> None:
    finished = shell(REQUESTS, fill, "| head -n 1")
    assert json.loads(finished.stdout)["event"] == "runtime_loaded"
    assert finished.stderr == ""


@pytest.mark.parametrize("redirection", [pytest.param("2>&-", marks=pytest.mark.slow), "2>/dev/full"])
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


@needs_full
def test_a_report_is_saved_before_it_is_printed(ends: Ends, fill: dict[str, str]) -> None:
    assert ends["full", SAVED][0] == 1
    assert json.loads(Path(fill["report"]).read_text())["rounds"] == 1
