"""Ctrl-C and SIGTERM: the first drains with a record for every open request, the second does not wait."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
from cli_child import PATIENCE, Child, started  # type: ignore[import-not-found]

from polytoken.cli.interrupts import Terminated, draining, ending
from polytoken.engine import Engine
from polytoken.testkit.tiny import write_checkpoint

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
NOTE = {signal.SIGINT: "polytoken: note: interrupted\n", signal.SIGTERM: "polytoken: note: terminated\n"}
SIGNALS = pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
LONG = 50_000  # tokens, more than any machine generates before a signal reaches it


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with room for answers that are always interrupted."""
    config = {"max_position_embeddings": 1 << 17}
    return str(write_checkpoint(tmp_path_factory.mktemp("endless"), "qwen3", seed=1, config=config).path)


def ask(child: Child, count: int, tokens: int = LONG) -> None:
    """Write so many requests, and leave the input open: more could come."""
    for number in range(count):
        record = {"request_id": f"r{number}", "prompt": "x" * 40, "max_new_tokens": tokens}
        child.write(json.dumps(record) + "\n")


def await_full_pipe(child: Child) -> None:
    """Read nothing until the command's output is stuck."""
    assert child.process.stdout is not None
    # A pause alone may be the machine's; where the pipe's size can be had, the pipe must be nearly full.
    size = fcntl.fcntl(child.process.stdout, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else 2 * 8192
    before, end = -1, time.monotonic() + PATIENCE
    while time.monotonic() < end:
        raw = fcntl.ioctl(child.process.stdout, termios.FIONREAD, struct.pack("i", 0))
        waiting = struct.unpack("i", raw)[0]
        if waiting == before and waiting >= size - 8192:
            return
        before = waiting
        time.sleep(0.2)
    raise AssertionError(f"the pipe holds {before} bytes and is not full")


def press_first(child: Child, number: signal.Signals) -> None:
    """Where /proc shows it, wait until it was noticed: of two at once Python takes the lower number first."""
    status = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/status")

    def pauses() -> str:
        return next((line for line in status.read_text().splitlines() if line.startswith("voluntary")), "")

    before, end = pauses() if status.exists() else None, time.monotonic() + PATIENCE
    child.press(number)
    while before is not None and pauses() == before:  # it hangs in a write, and will again
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe that takes nothing more and that nobody reads."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x")
    except BlockingIOError:
        os.set_blocking(write_end, True)
    yield write_end
    os.close(read_end)
    os.close(write_end)


@SIGNALS
def test_the_first_one_drains(endless: str, number: signal.Signals) -> None:
    with started("generate", "--model", endless, "--ignore-eos", "--requests-jsonl", "-") as child:
        ask(child, 12)
        child.until_event("token")
        child.press(number)
        assert child.end() == STATUS[number]
        begun = {event["request_id"] for event in child.events if event["event"] == "request_started"}
        ends = [event for event in child.events if event["event"] == "generation_result"]
        assert begun <= {event["request_id"] for event in ends}
        assert len({event["request_id"] for event in ends}) == len(ends)
        assert {(event["status"], event["code"]) for event in ends} == {("failed", "interrupted")}
        last = child.events[-1]
        assert last["event"] == "inference_summary" and last["interrupted"] and last["failed_requests"] == len(ends)
        assert child.told == NOTE[number]


def test_the_second_one_does_not_wait(endless: str) -> None:
    # Nobody reads: the drain hangs in a full pipe, and only a second signal ends it.
    with started("generate", "--model", endless, "--ignore-eos", "--requests-jsonl", "-") as child:
        ask(child, 40)
        child.until_event("token")
        await_full_pipe(child)
        press_first(child, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            child.process.wait(1)
        child.press(signal.SIGINT)
        assert child.wait() == STATUS[signal.SIGINT]
        child.end()
        assert child.told == "polytoken: note: interrupted again: left without waiting\n"


def test_the_second_one_does_not_wait_for_errors_to_be_read_either(endless: str, full_pipe: int) -> None:
    words = ("generate", "--model", endless, "--ignore-eos", "--requests-jsonl", "-")
    with started(*words, stderr=full_pipe) as child:
        ask(child, 4)
        child.until_event("token")
        await_full_pipe(child)
        press_first(child, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.process.wait(1)
        child.press(signal.SIGTERM)
        assert child.wait() == STATUS[signal.SIGTERM]


def test_while_nothing_happens(endless: str) -> None:
    with started("generate", "--model", endless, "--requests-jsonl", "-") as child:
        child.until_event("runtime_loaded")
        child.press(signal.SIGINT)
        assert child.end() == STATUS[signal.SIGINT]
        assert [event["event"] for event in child.events] == ["runtime_loaded", "inference_summary"]


def test_the_text_so_far_is_kept(endless: str) -> None:
    words = ("--ignore-eos", "--prompt", "x", "--stream", "--max-new-tokens", str(LONG))
    with started("generate", "--model", endless, *words) as child:
        child.until("text", lambda: len(child.out) >= 10)
        child.press(signal.SIGINT)
        assert child.end() == STATUS[signal.SIGINT]
        assert child.out.endswith(b"\n")
        assert child.told == NOTE[signal.SIGINT]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc to see how far a process is")
@pytest.mark.parametrize(("number", "library"), [(signal.SIGINT, "tokenizers"), (signal.SIGTERM, "libmlx")])
def test_while_loading(endless: str, number: signal.Signals, library: str) -> None:
    with started("generate", "--model", endless, "--requests-jsonl", "-") as child:
        maps, end = Path(f"/proc/{child.process.pid}/maps"), time.monotonic() + PATIENCE
        while library not in maps.read_text():  # in the middle of imports, or of the load
            assert child.process.poll() is None and time.monotonic() < end, child.told
            time.sleep(0.01)
        child.press(number)
        assert (child.end(), child.told) == (STATUS[number], NOTE[number])


@pytest.mark.parametrize("speak", [True, False], ids=["in an answer", "at the prompt"])
def test_sigterm_ends_a_chat(endless: str, speak: bool) -> None:
    with started("chat", "--model", endless, "--max-new-tokens", str(LONG), "--verbose") as child:
        if speak:
            child.write("hello\n")
            child.until("answer", lambda: bool(child.out))
        else:
            child.until("note about the model", lambda: "loaded in" in child.told)
        child.press(signal.SIGTERM)
        assert child.end() == STATUS[signal.SIGTERM]
        assert child.told.endswith(NOTE[signal.SIGTERM]) and "Traceback" not in child.told


def test_what_was_ignored_at_the_start_stays_ignored(endless: str) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what a command inherits
    with started("generate", "--model", endless, "--requests-jsonl", "-") as child:
        signal.signal(signal.SIGTERM, before)
        child.until_event("runtime_loaded")
        child.press(signal.SIGTERM)
        ask(child, 1, tokens=3)
        child.hang_up()
        assert child.end() == 0
        assert child.events[-1]["finished_requests"] == 1


def test_a_sigterm_that_a_library_dropped_ends_the_run_before_it_begins() -> None:
    with ending():
        with suppress(KeyboardInterrupt):  # as an import that is half done may
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated), draining(cast(Engine, None)):
            pytest.fail("the run began")


PRESS_WITHIN = """
import os, signal, sys, time
import mlx
from polytoken.cli.interrupts import Terminated, ending

class Press:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("mlx.") and name != "mlx.core":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

with ending():
    sys.meta_path.insert(0, Press())
    try:
        import mlx.core
        print("imported", flush=True)
        time.sleep(10)
    except Terminated:
        print("terminated")
"""


def test_sigterm_waits_until_a_compiled_module_is_there() -> None:
    """MLX's initialisation imports Python modules; an exception from within one aborts the process."""
    done = subprocess.run([sys.executable, "-c", PRESS_WITHIN], capture_output=True, text=True, timeout=99, check=False)
    assert (done.stdout, done.returncode) == ("imported\nterminated\n", 0), done.stderr
