"""The canary: probes of every kind, and a process that ends when the device does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from polytoken.errors import UsageError
from polytoken.oracle.canary.probe import MlxProbe, NativeProbe, Probe, Sample, choose_probe
from polytoken.oracle.canary.watch import Canary
from polytoken.oracle.receipt import Receipts
from polytoken.testkit.tiny import write_checkpoint

SOURCE = Path(str(files("polytoken.oracle.canary") / "native"))
HANGING = """
#include <time.h>
#include <stdio.h>
#include <unistd.h>
int ds4_gpu_canary_probe(double seconds[2]) {
    seconds[0] = seconds[1] = 1e-6;
    if (access(HANG_FILE, F_OK) == 0) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        FILE *out = fopen(HANG_FILE ".since", "w");
        if (out) { fprintf(out, "%.6f", (double)t.tv_sec + 1e-9 * (double)t.tv_nsec); fclose(out); }
        sleep(3600);
    }
    return 1;
}
"""
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles a C text, or the shipped reference, into a library."""

    def compiled(text: str | None = None, *words: str) -> Path:
        source = SOURCE / "canary.c"
        if text is not None:
            source = tmp_path / "probe.c"
            source.write_text(text)
        library = tmp_path / "canary.so"
        command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", *words, "-o", str(library), str(source)]
        subprocess.run([*command, "-lpthread"], check=True)
        return library

    return compiled


def watched(probe: Probe | None, seconds: float) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of a canary that watches for some time, and the statuses it wanted to leave with."""
    notes: list[dict[str, Any]] = []
    left: list[int] = []
    receipts = Receipts(lambda line: None, lambda line: notes.append(json.loads(line)))
    with Canary(probe, receipts, exit=left.append):
        receipts.enter("loading")
        time.sleep(seconds)
    return notes, left


def test_the_reference_library_answers_in_time(build: Build) -> None:
    sample = NativeProbe(build())()
    assert sample.ok and 0 <= sample.scheduled_seconds <= sample.completed_seconds < 2


def test_samples_know_their_phase_and_the_summary_holds_them(build: Build) -> None:
    notes, left = watched(NativeProbe(build()), 0.5)
    summary = notes[-1]
    assert summary["event"] == "reference_canary_summary" and left == []
    assert summary["enabled"] and not summary["incomplete"] and summary["probe"] == "native"
    assert 2 <= len(summary["samples"]) <= 6  # one every 100 ms from start to start, fewer on a busy machine
    assert {sample["phase"] for sample in summary["samples"]} <= {"startup", "loading"}
    assert "loading" in {sample["phase"] for sample in summary["samples"]}


class Scripted(Probe):
    """A probe that answers as told."""

    name = "scripted"

    def __init__(self, act: Callable[[], Sample]) -> None:
        self._act = act

    def __call__(self) -> Sample:
        return self._act()


def test_a_probe_that_fails_or_is_late_aborts_with_its_sample() -> None:
    for sample in (Sample(False, 0.0, 0.0), Sample(True, 0.1, 2.5)):
        notes, left = watched(Scripted(lambda sample=sample: sample), 0.3)  # type: ignore[misc]
        assert left[:1] == [86]
        abort = next(note for note in notes if note["event"] == "test_canary_abort")
        assert abort["ok"] is sample.ok and abort["sample"]["completed_ms"] == sample.completed_seconds * 1000


def test_a_probe_that_does_not_come_back_aborts_after_two_seconds_with_phase_and_summary() -> None:
    block = threading.Event()

    def hang() -> Sample:
        block.wait(10)
        return Sample(True, 0.0, 0.0)

    start = time.monotonic()
    notes: list[dict[str, Any]] = []
    times: list[float] = []
    receipts = Receipts(lambda line: None, lambda line: notes.append(json.loads(line)))

    def leave(status: int) -> None:
        times.append(time.monotonic() - start)
        assert status == 86
        block.set()

    with Canary(Scripted(hang), receipts, exit=leave):
        while not times and time.monotonic() - start < 5:
            time.sleep(0.01)
    assert 2.0 <= times[0] < 2.5
    assert [note["event"] for note in notes[:2]] == ["test_canary_abort", "reference_canary_summary"]
    assert notes[0]["phase"] == "startup" and notes[1]["incomplete"] is True


def test_no_probe_writes_a_summary_that_says_so() -> None:
    notes, left = watched(None, 0.0)
    assert (
        notes
        == [{"event": "reference_canary_summary", "enabled": False, "probe": None, "samples": [], "incomplete": False}]
        and left == []
    )


def test_the_mlx_probe_lives_in_a_process_of_its_own() -> None:
    probe = MlxProbe("cpu")
    try:
        sample = probe()
        assert sample.ok and 0 <= sample.scheduled_seconds <= sample.completed_seconds
        probe._process.kill()
        probe._process.wait()
        assert not probe().ok  # it died: that is a failure, not a wait
    finally:
        probe.close()


def test_the_probe_follows_the_device() -> None:
    assert choose_probe("auto", None, device="cpu") is None
    assert choose_probe("off", None, device="gpu") is None


def test_a_library_without_the_entry_point_is_a_usage_error(build: Build, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ds4_gpu_canary_probe"):
        NativeProbe(build("int other(void) { return 1; }"))
    with pytest.raises(UsageError, match="cannot load"):
        NativeProbe(tmp_path / "none.so")


def test_a_hanging_probe_ends_the_process_with_86_within_2200_ms_while_it_generates(
    build: Build, tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    library = build(HANGING, f'-DHANG_FILE="{hang}"')
    model = write_checkpoint(tmp_path / "model", "qwen3", seed=1, config={"max_position_embeddings": 60_000}).path
    command = [sys.executable, "-m", "polytoken.cli", "oracle", "run", "--model", str(model), "--ar"]
    command += ["--temperature", "0", "--canary", "native", "--canary-library", str(library)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines, tokens = [], 0
    try:
        for line in process.stderr:
            lines.append(line)
            tokens += '"ar_token"' in line
            if tokens == 20 and not hang.exists():
                hang.touch()
        status = process.wait(10)
        ended = time.monotonic()
    finally:
        process.kill()
    since = float(Path(f"{hang}.since").read_text())
    assert status == 86
    assert 2.0 <= ended - since <= 2.2 + 0.3, ended - since  # the 0.3 s are the interpreter's that waits here
    records = [json.loads(line) for line in lines if line.startswith("{")]
    abort, summary = records[-2:]
    assert abort["event"] == "test_canary_abort" and abort["phase"] == "decode"
    assert summary["event"] == "reference_canary_summary" and summary["incomplete"] is True
    assert {"decode"} <= {sample["phase"] for sample in summary["samples"]}
