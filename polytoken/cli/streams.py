"""Standard input, output and errors as every command finds them: all three open, and their failures in one line.

Output that cannot be written is told once: `OutputFailed` says why, `OutputClosed` that the reader has gone. Whatever
prints (this package, the help, a table) meets the same two.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Final, TextIO

from polytoken.errors import UsageError

EXIT_PIPE: Final = 141  # the reader of our output left: what a shell reports for SIGPIPE


class OutputClosed(Exception):  # noqa: N818  (no error)
    """Whoever read our output has gone."""


class OutputFailed(Exception):  # noqa: N818
    """Standard output cannot be written: a full disk, a device that fails, a stream that was never open.

    No PolytokenError, so that nothing which goes on after one of those goes on after this.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror or error}")


class Output(io.TextIOWrapper):
    """Standard output whose failures are ours, raised where the text is written."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._explain(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._explain(error) from None

    def _explain(self, error: OSError) -> Exception:
        discard(self)  # what is left in the buffer must not fail once more when the interpreter ends
        return OutputClosed() if isinstance(error, BrokenPipeError) else OutputFailed(error)


class Errors(io.TextIOWrapper):
    """Standard error. Where it cannot be written nobody can be told that, and the exit status has to do."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            discard(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            discard(self)


def prepare_streams() -> None:
    """Make all three usable, and independent of the locale's idea of text.

    Raises:
        OutputFailed: standard output is closed. Refused before any work is done.
    """
    _occupy_closed()
    if sys.stderr is None:  # nobody is to be told anything; print() would take standard output instead
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        sys.stdout = io.StringIO()
        raise OutputFailed(OSError("it is closed; send it to /dev/null if it is not wanted"))
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _wrap(sys.stdout, Output)
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _wrap(sys.stderr, Errors)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def standard_input(flag: str | None = None) -> TextIO:
    """Where users type or pipe. Raises UsageError when it is closed; `flag` is what asked for it."""
    if sys.stdin is None:
        raise UsageError(f"{flag + ': ' if flag else ''}there is no standard input: it is closed", field=flag)
    return sys.stdin


def discard(stream: TextIO) -> None:
    """Send the rest of a stream nowhere, so that the interpreter's last flush finds an open end."""
    with suppress(OSError, ValueError):
        target = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, target)
        os.close(null)


def _wrap(stream: io.TextIOWrapper, kind: type[Output] | type[Errors]) -> io.TextIOWrapper:
    """The same stream in a class of ours; sys.__stdout__ and sys.__stderr__ keep the one it had."""
    return kind(stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering)


def _occupy_closed() -> None:
    """Put nothing behind closed descriptors: the next file opened would take their number, and be taken for them."""
    null = os.open(os.devnull, os.O_RDWR)
    while null <= 2:
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    os.close(null)
