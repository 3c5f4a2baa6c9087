"""`generate --watch`: what a frame looks like, how it fits a screen, and the whole on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from conftest import Runner  # type: ignore[import-not-found]
from rich.console import Console

from polytoken.cli import main
from polytoken.cli.watch import DOT, fit, paint, status
from polytoken.lanes.canvas.watch import CanvasFrame
from polytoken.text.pieces import split_pieces

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def frame(**changes: Any) -> CanvasFrame:
    values: dict[str, Any] = {
        "request_id": "a",
        "denoise_steps": 4,
        "generated_tokens": 10,
        "committed": 1,
        "remaining": 6,
        "token_ids": (1, 2, 3, 4, 5, 6, 7, 8),
        "confidence": (0.99, 0.95, 0.7, 0.5, 0.4, 0.1, 1.0, 1.0),
        "entropy": (0.0, 0.5, 1.0, 1.5, 2.0, 0.0, 9.0, 9.0),
        "age": (4,) * 8,
        "likely": (True, True, True, True, False, False, True, True),
    }
    return CanvasFrame(**{**values, **changes})


def test_each_position_shows_how_settled_it_is() -> None:
    text = paint(frame(), [" one", " two", " three", " four", " five", " six", "never", "never"])
    assert text.plain == f" one two three four five{DOT}"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles == {" two": "green", " three": "yellow", " four": "dark_orange", " five": "dim", DOT: "dim"}


def test_what_is_not_final_moves_neither_lines_nor_the_cursor() -> None:
    pieces = ["a\n\x1b[2J", "b\nc\td", "\x1b[1m", "", "\r", "x", "", ""]
    text = paint(frame(), pieces)
    assert text.plain == f"a\n\u241b[2Jb\u21b5c d\u241b[1m{DOT}\u240d{DOT}"
    assert paint(frame(remaining=0), pieces).plain == ""


def test_the_bottom_line() -> None:
    assert status(frame()) == "step 4, 11 tokens committed, 2.75 tokens/forward, mean entropy 1.00 nats"
    assert status(frame(committed=6)).endswith("mean entropy none")


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 5), (3, 4), (20, 3), (40, 10), (200, 50)])
def test_it_fits_every_screen(width: int, height: int) -> None:
    console = Console(width=width, height=height, file=StringIO())
    text = paint(frame(), ["word \u4e2d\u6587 and-a-very-long-one-without-a-break\nand more "] * 8)
    text.append("the end")
    lines = fit(text, status(frame()), console)
    assert len(lines) <= max(height - 1, 2)
    assert all(line.cell_len <= max(width, 2) for line in lines)  # a wide character needs two
    if width >= 40:
        assert lines[-2].plain.endswith("the end")
        assert lines[-1].plain.startswith("step 4")


class Port:
    """Text of ids that are bytes."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def push(self, ids: tuple[int, ...]) -> Any:
        self.ids += ids

    def finish(self) -> str:
        return ""

    @property
    def full_text(self) -> str:
        return bytes(self.ids).decode(errors="replace")

    text = full_text


def test_pieces_are_the_text_cut_at_the_ids() -> None:
    ids = list("aé€b".encode())
    pieces = split_pieces(Port(), list(b"before "), ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == "aé€b"
    assert pieces == ["a", "", "é", "", "", "€", "b"]
    assert split_pieces(Port(), [], []) == []
    assert split_pieces(Port(), [], [0xFF, 65]) == ["\ufffd", "A"]


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--prompt", "x"], "terminal"),
        (["--prompt", "x", "--stream"], "--stream"),
        (["--prompt", "x", "--json"], "--json"),
        (["--requests-jsonl", "-"], "--requests-jsonl"),
    ],
)
def test_where_nobody_can_watch(polytoken: Runner, arguments: list[str], names: str) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", *arguments, "--watch")
    assert outcome.status == 2
    assert outcome.error.startswith("--watch ")
    assert names in outcome.error


# -- on a terminal -----------------------------------------------------------------------------------------------------


@contextmanager
def terminal(width: int, height: int) -> Iterator[tuple[int, Callable[[], str]]]:
    """A terminal's own end, and everything that was written to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 4096):
                seen.append(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def text() -> str:
        reader.join(60)
        return b"".join(seen).decode(errors="replace").replace("\r\n", "\n")

    try:
        yield slave, text
    finally:
        os.close(master)


def watched(monkeypatch: pytest.MonkeyPatch, *arguments: str, width: int, height: int) -> tuple[int, str]:
    """Status and raw output of a command on a terminal of this size, in this process."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with terminal(width, height) as (slave, text):
        with os.fdopen(slave, "w", encoding="utf-8") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            code = main(["generate", *arguments, "--watch"])
            monkeypatch.undo()
        return code, text()


@pytest.mark.parametrize(("kind", "size"), [("canvas", (80, 24)), ("export", (50, 10)), ("export", (12, 4))])
def test_watching_an_answer_settle(
    polytoken: Runner,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    size: tuple[int, int],
) -> None:
    width, height = size
    model = request.getfixturevalue(kind)
    steps = ("--max-denoising-steps", "6") if kind == "canvas" else ()
    ask = ("--model", model, "--prompt", "hello there", "--max-new-tokens", "18", "--ignore-eos", *steps)
    plain = polytoken("generate", *ask).out
    code, raw = watched(monkeypatch, *ask, width=width, height=height)
    assert code == 0
    shown = ESCAPES.sub("", raw)
    assert "step"[:width] in shown
    assert "\x1b[2K" in raw or "\x1b[1A" in raw  # drawn over and over
    if width >= 50:
        assert re.search(r"step \d+, \d+ tokens committed, \d", shown)
        assert DOT in shown or "\x1b[2m" in raw
    assert shown.endswith(plain)  # and in the end the text as it stands, alone
    assert "Traceback" not in shown


def test_only_a_canvas_can_be_watched(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, raw = watched(monkeypatch, "--model", tiny, "--prompt", "x", width=80, height=24)
    assert (code, raw) == (2, "")
    assert capsys.readouterr().err.startswith("polytoken: error: --watch belongs to the canvas lane; this is ar (")


def test_a_real_terminal_that_is_narrow(export: str) -> None:
    command = [sys.executable, "-m", "polytoken", "generate", "--model", export, "--prompt", "x", "--watch"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with terminal(9, 5) as (slave, text):
        process = subprocess.Popen(
            [*command, "--max-new-tokens", "16"], stdin=slave, stdout=slave, stderr=slave,
            env={**environment, "TERM": "xterm"},
        )  # fmt: skip
        os.close(slave)
        assert process.wait(300) == 0
        shown = ESCAPES.sub("", text())
    assert "Traceback" not in shown
    assert "step" in shown
    assert "tokens/forward" in shown.splitlines()[-1]  # the closing note
