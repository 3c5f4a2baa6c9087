"""The canary: probes of every kind, and a process that ends when the device does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
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
    """Compiles a C text, or a file that is shipped (by default the reference), into a library."""

    def compiled(text: str | None = None, *words: str) -> Path:
        source = SOURCE / (words[0] if words and text is None else "canary.c")
        if text is not None:
            source = tmp_path / "probe.c"
            source.write_text(text)
        library = tmp_path / "canary.so"
        flags = words if text is not None else ()
        command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(library)]
        subprocess.run([*command, str(source), "-ldl", "-lpthread"], check=True)
        return library

    return compiled


def watched(probe: Probe | None) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of a canary that watches until it wants to leave, and the statuses it wanted to leave with."""
    notes: list[dict[str, Any]] = []
    left: list[int] = []
    receipts = Receipts(lambda line: None, lambda line: notes.append(json.loads(line)))
    with Canary(probe, receipts, exit=left.append):
        receipts.enter("loading")
        end = time.monotonic() + 60
        while probe is not None and not left and time.monotonic() < end:
            time.sleep(0.01)
    return notes, left


def in_time(measure: Callable[[int], float]) -> None:
    """Some measurement keeps the promise of 2 s to the tenth: a busy machine, unlike a fault, need not delay all.

    Args:
        measure: seconds of one more attempt, given its number. Never less than 2.
    """
    least = float("inf")
    for number in range(6):
        seconds = measure(number)
        assert seconds >= 2.0
        least = min(least, seconds)
        if least < 2.2:
            return
    pytest.fail(f"at best after {least:.3f} s")


def test_the_reference_library_answers_in_time(build: Build) -> None:
    sample = NativeProbe(build())()
    assert sample.ok and 0 <= sample.scheduled_seconds <= sample.completed_seconds < 2


def test_the_form_for_cuda_builds_without_a_toolkit_and_says_where_there_is_no_driver(build: Build) -> None:
    library = build(None, "canary_cuda.c")
    if Path("/dev/nvidiactl").exists():
        assert NativeProbe(library)().ok
        return
    with pytest.raises(UsageError, match="the first probe failed: it cannot use the device"):
        NativeProbe(library)


@pytest.mark.parametrize("kind", ["compiled", "python"])
def test_samples_know_their_phase_and_the_summary_holds_them(build: Build, kind: str) -> None:
    notes: list[dict[str, Any]] = []
    receipts = Receipts(lambda line: None, lambda line: notes.append(json.loads(line)), descriptor=2)
    for probe in (NativeProbe(build()), MlxProbe("cpu")):
        with closing(probe):
            for patience in (0.5, 5, 20):  # seconds, for at least two samples of a machine that may be busy
                notes.clear()
                receipts.enter("startup")
                start = time.monotonic()
                with Canary(probe, receipts, compiled=kind == "compiled") as canary:
                    receipts.enter("loading")
                    time.sleep(patience)
                (summary,) = notes
                if sum(sample["phase"] == "loading" for sample in summary["samples"]) > 1:
                    break
        assert summary["event"] == "reference_canary_summary" and summary["enabled"] and not summary["incomplete"]
        assert summary["probe"] == probe.name and summary["threads"] == canary.kind == kind
        samples = summary["samples"]
        most = (time.monotonic() - start) / 0.1 + 1  # one every 100 ms from start to start, fewer on a busy machine
        assert 2 <= len(samples) <= most
        assert "loading" in {sample["phase"] for sample in samples} <= {"startup", "loading", "finishing"}
        assert all(0 < sample["scheduled_ms"] <= sample["completed_ms"] < 2000 for sample in samples)


class Scripted(Probe):
    """A probe that answers as told."""

    name = "scripted"

    def __init__(self, act: Callable[[], Sample]) -> None:
        self._act = act

    def __call__(self) -> Sample:
        return self._act()


def test_a_probe_that_fails_or_is_late_aborts_with_its_sample() -> None:
    for sample in (Sample(False, 0.0, 0.0), Sample(True, 0.1, 2.5)):
        notes, left = watched(Scripted(lambda sample=sample: sample))  # type: ignore[misc]
        assert left[:1] == [86]
        abort = next(note for note in notes if note["event"] == "test_canary_abort")
        assert abort["ok"] is sample.ok and abort["sample"]["completed_ms"] == sample.completed_seconds * 1000


def test_python_threads_abort_after_two_seconds_with_phase_and_summary() -> None:
    def measure(_: int) -> float:
        block = threading.Event()

        def hang() -> Sample:
            block.wait(60)
            return Sample(True, 0.0, 0.0)

        notes: list[dict[str, Any]] = []
        left: list[int] = []
        receipts = Receipts(lambda line: None, lambda line: notes.append(json.loads(line)))

        def leave(status: int) -> None:
            left.append(status)
            block.set()

        with Canary(Scripted(hang), receipts, exit=leave):
            assert block.wait(60)
        assert left[:1] == [86]
        assert [note["event"] for note in notes[:2]] == ["test_canary_abort", "reference_canary_summary"]
        assert notes[0]["phase"] == notes[0]["sent_in"] == "startup" and notes[1]["incomplete"] is True
        return float(notes[0]["pending_seconds"])

    in_time(measure)


def test_a_first_probe_that_does_not_come_back_is_a_usage_error() -> None:
    block = threading.Event()
    with pytest.raises(UsageError, match=r"--canary-library: the first probe is not back after 0\.05 s"):
        Scripted(lambda: Sample(block.wait(5), 0.0, 0.0)).start(flag="--canary-library", seconds=0.05)
    block.set()


def test_no_probe_writes_a_summary_that_says_so() -> None:
    notes, left = watched(None)
    (summary,) = notes
    assert summary == {
        "event": "reference_canary_summary", "enabled": False, "probe": None, "threads": None, "samples": [],
        "incomplete": False,
    }  # fmt: skip
    assert left == []


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


@pytest.mark.parametrize(
    "body", ["return -1;", "return 2;", "seconds[0] = NAN; return 1;", "seconds[1] = -1; return 1;"]
)
def test_a_library_succeeds_with_1_and_times_alone(build: Build, body: str) -> None:
    code = f"#include <math.h>\nint ds4_gpu_canary_probe(double seconds[2]) {{ seconds[0] = seconds[1] = 0; {body} }}"
    with pytest.raises(UsageError, match="the first probe failed"):
        NativeProbe(build(code))


# -- processes that end ------------------------------------------------------------------------------------------------

HELD = """
import ctypes, json, sys, time
from pathlib import Path
from polytoken.oracle.canary.probe import NativeProbe
from polytoken.oracle.canary.watch import Canary
from polytoken.oracle.receipt import Receipts
receipts = Receipts(print, lambda line: None, descriptor=2)
with Canary(NativeProbe(Path(sys.argv[1])), receipts) as canary:
    assert canary.kind == "compiled"
    receipts.enter("decode")
    time.sleep(0.3)
    if sys.argv[2] == "full":
        import os
        os.set_blocking(2, False)
        try:
            while True:
                os.write(2, b"x" * 512)
        except BlockingIOError:
            os.set_blocking(2, True)
    Path(sys.argv[3]).touch()
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter: no thread of Python runs any more
"""


def hung_since(hang: Path) -> float:
    """When the probe hung, on the clock of `time.monotonic`."""
    return float(Path(f"{hang}.since").read_text())


def last_words(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The abort and the summary at the end of a log."""
    abort, summary = [json.loads(line) for line in text.splitlines() if line.startswith("{")][-2:]
    assert abort["event"] == "test_canary_abort" and summary["event"] == "reference_canary_summary"
    assert summary["incomplete"] is True and summary["threads"] == "compiled"
    return abort, summary


@pytest.mark.parametrize("reader", ["reads", "full"])
def test_a_hanging_probe_ends_a_process_whose_interpreter_is_held_even_if_nobody_reads(
    build: Build, tmp_path: Path, reader: str
) -> None:
    def measure(number: int) -> float:
        hang = tmp_path / f"hang {number}"
        library = build(HANGING, f'-DHANG_FILE="{hang}"')
        command = [sys.executable, "-c", HELD, str(library), reader, str(hang)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.wait(120) == 86
        assert time.monotonic() - hung_since(hang) >= 2.0
        assert process.stderr is not None
        text = process.stderr.read()
        process.stderr.close()
        if reader == "full":
            return 2.0  # it could not say
        abort, summary = last_words(text)
        assert abort["phase"] == abort["sent_in"] == "decode"
        assert summary["samples"]
        return float(abort["pending_seconds"])  # its own clock, just before it leaves

    in_time(measure)


@pytest.mark.parametrize(
    ("body", "ok", "completed"),
    [
        ("return hung();", False, 100.0),
        ("seconds[1] = hung() ? 0.1 : 2.5; return 1;", True, 2500.0),
        ("return hung() ? 1 : -1;", False, 100.0),
        ("seconds[0] = hung() ? 0.1 : NAN; return 1;", False, 0.0),
        ("seconds[0] = hung() ? 0.1 : -1.0; return 1;", False, 0.0),
    ],
)
def test_a_probe_that_fails_or_was_late_ends_the_process_with_its_sample(
    build: Build, tmp_path: Path, body: str, ok: bool, completed: float
) -> None:
    hang = tmp_path / "hang"
    code = f"""
#include <math.h>
#include <unistd.h>
static int hung(void) {{ return access(HANG_FILE, F_OK) != 0; }}
int ds4_gpu_canary_probe(double seconds[2]) {{ seconds[0] = seconds[1] = 0.1; {body} }}
"""
    library = build(code, f'-DHANG_FILE="{hang}"')
    command = [sys.executable, "-c", HELD, str(library), "reads", str(hang)]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ran.returncode == 86
    abort, summary = last_words(ran.stderr)
    assert abort["ok"] is ok and abort["sample"]["completed_ms"] == completed
    assert summary["samples"][-1] == abort["sample"]


def end_while_generating(build: Build, folder: Path, number: int = 0) -> tuple[float, list[str]]:
    """Hang a probe of a run that generates: seconds from then to when the process was seen to end, and its log."""
    hang = folder / f"hang {number}"
    library = build(HANGING, f'-DHANG_FILE="{hang}"')
    room = {"max_position_embeddings": 60_000}
    model = write_checkpoint(folder / f"model {number}", "qwen3", seed=1, config=room).path
    command = [sys.executable, "-m", "polytoken", "oracle", "run", "--model", str(model), "--ar"]
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
        status = process.wait(60)
        ended = time.monotonic()
    finally:
        process.kill()
    assert status == 86
    return ended - hung_since(hang), lines


def test_a_hanging_probe_ends_a_process_that_generates_within_2200_ms_by_its_own_clock(
    build: Build, tmp_path: Path
) -> None:
    def measure(number: int) -> float:
        _, lines = end_while_generating(build, tmp_path, number)
        abort, summary = last_words("".join(lines))
        assert abort["phase"] == abort["sent_in"] == "decode"
        phases = {sample["phase"] for sample in summary["samples"]}
        assert phases and phases <= {"startup", "loading", "prefill", "decode"}
        assert sum('"ar_token"' in line for line in lines) > 20  # it went on meanwhile
        return float(abort["pending_seconds"])

    in_time(measure)


@pytest.mark.slow  # two seconds to the tenth, which a busy machine cannot keep
def test_a_hanging_probe_ends_the_process_with_86_within_2200_ms_while_it_generates(
    build: Build, tmp_path: Path
) -> None:
    """The same by the clock on the wall, which needs an idle machine."""
    seconds, _ = end_while_generating(build, tmp_path)
    assert 2.0 <= seconds <= 2.2
