"""Prompts say how far they are: the API's callback, on every lane, and the line on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polytoken
from polytoken.testkit.tiny import write_checkpoint

LANES = {"llama": "ar", "qwen3_5": "mtp", "diffusion_gemma": "canvas"}
SMALL = {"prefill_chunk_size": 8, "device": "cpu"}


@pytest.fixture(scope="module", params=LANES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family = request.param
    path = write_checkpoint(tmp_path_factory.mktemp(family), family, seed=1).path
    with polytoken.load(path, lane=LANES[family], **SMALL) as opened:
        yield opened


def test_every_chunk_is_told(engine: polytoken.Engine) -> None:
    told: list[tuple[str, int, int]] = []
    polytoken.watch_prefill(engine, lambda *how_far: told.append(how_far))
    request = polytoken.make_request(engine, token_ids=range(5, 25), max_new_tokens=2, request_id="r")
    engine.generate(request)
    assert told == [("r", 8, 20), ("r", 16, 20), ("r", 20, 20)]
    polytoken.watch_prefill(engine, None)
    engine.generate(polytoken.make_request(engine, token_ids=range(7, 25), max_new_tokens=2))
    assert len(told) == 3


def test_an_observer_that_fails_is_dropped_and_no_request(engine: polytoken.Engine) -> None:
    calls: list[int] = []

    def fail(_: str, done: int, total: int) -> None:
        calls.append(done)
        raise RuntimeError("no")

    polytoken.watch_prefill(engine, fail)
    request = polytoken.make_request(engine, token_ids=range(9, 39), max_new_tokens=2)
    assert engine.generate(request).generated_tokens == 2
    assert len(calls) == 1


def test_a_terminal_shows_how_far_a_prompt_is(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", seed=1).path
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "polytoken", "generate", "--model", str(path), "--device", "cpu", "--raw"]
    command += ["--prompt", "word " * 60, "--max-new-tokens", "1", "--prefill-chunk-size", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait() == 0, seen
    assert b"Reading the prompt: " in seen and b" tokens" in seen
