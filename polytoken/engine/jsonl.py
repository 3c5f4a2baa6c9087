"""Requests from JSON lines: every line that holds something becomes a request or an error with its number."""

from __future__ import annotations

import io
import json
import math
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from polytoken.errors import RequestError
from polytoken.events import RequestRejected
from polytoken.request import Request, RequestDefaults, parse_record

MAX_LINE_BYTES: Final = 64 << 20
_NO_INPUT: Final = "there is no standard input: it is closed"
_BOM: Final = b"\xef\xbb\xbf"
_GULP: Final = 1 << 20  # bytes of an overlong line thrown away at a time


def read_requests(
    path: str | Path, defaults: RequestDefaults, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Request | RequestRejected]:
    """The requests of a file, or of standard input for `-`, as they can be read.

    A line that is no valid request gives a `request_error` with its 1-based number, and reading goes on. Blank lines
    are counted and skipped. Input that cannot be opened or read on gives one error of code `unreadable_input`.
    """
    try:
        with _open_bytes(path) as stream:
            yield from read_stream(stream, defaults, max_line_bytes=max_line_bytes)
    except (OSError, ValueError) as error:
        yield _unreadable(path, error)


def check_readable(path: str | Path) -> RequestRejected | None:
    """The error that `read_requests` would begin with, or None; nothing is read, and a pipe is not opened."""
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise OSError(_NO_INPUT)
        elif not stat.S_ISFIFO(Path(path).stat().st_mode):
            Path(path).open("rb").close()
    except (OSError, ValueError) as error:
        return _unreadable(path, error)
    return None


def read_stream(
    stream: BinaryIO, defaults: RequestDefaults, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Request | RequestRejected]:
    """The same for an open binary stream."""
    number = 0
    while line := stream.readline(max_line_bytes + 1):
        number += 1
        try:
            if len(line) > max_line_bytes and not line.endswith(b"\n"):
                _skip_line(stream)
                raise RequestError(f"the line is longer than {max_line_bytes} bytes", code="line_too_long")
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield replace(parse_record(parse_json(line), defaults), line=number)
        except RequestError as error:
            yield RequestRejected(line=number, code=error.code, field_name=error.field, error=str(error))
        except Exception as error:  # a hole in the checks costs its line, not the lines behind it
            yield RequestRejected(line=number, code="internal", error=f"{type(error).__name__}: {error}")


def parse_json(line: bytes) -> Any:
    """The value of one line of strict JSON.

    Raises:
        RequestError: `bad_json` for anything else, also a repeated member, a number that is not finite, and bytes
            that are not UTF-8.
    """
    try:
        return json.loads(
            line.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise RequestError(f"not valid JSON: {reason}", code="bad_json")


def _unreadable(path: str | Path, error: OSError | ValueError) -> RequestRejected:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RequestRejected(code="unreadable_input", error=f"cannot read {str(path)!r}: {text}")


def _open_bytes(path: str | Path) -> BinaryIO:
    if str(path) != "-":
        return Path(path).open("rb")
    if sys.stdin is None:
        raise OSError(_NO_INPUT)
    try:
        # A reader of our own: one that hangs in sys.stdin on another thread would crash the interpreter at its exit.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        return io.BytesIO(sys.stdin.buffer.read())  # replaced by a test


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(_GULP)) and not rest.endswith(b"\n"):
        pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"member {name!r} is given twice")
            seen.add(name)
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text} is out of range")
    return value
