"""JSON lines in: nothing vanishes (G01), nothing takes the batch down (G02)."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FakeLane, Script, loaded, too_long
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.engine import Engine, read_requests
from polytoken.engine.jsonl import read_stream
from polytoken.events import GenerationResult, InferenceSummary, RequestRejected
from polytoken.request import Request, RequestDefaults

DEFAULTS = RequestDefaults(max_new_tokens=8)


def read(data: bytes, **options: Any) -> list[Request | RequestRejected]:
    return list(read_stream(io.BytesIO(data), DEFAULTS, **options))


def line(request_id: str, **rest: Any) -> bytes:
    return json.dumps({"request_id": request_id, "prompt": "x"} | rest).encode()


def codes(items: list[Request | RequestRejected]) -> list[tuple[int | None, str]]:
    return [(item.line, item.code) if isinstance(item, RequestRejected) else (None, item.request_id) for item in items]


def test_errors_found_after_reading_carry_their_line_too() -> None:
    lane = FakeLane({"long": Script(open_error=too_long()), "fails": Script(commits=[ValueError("no")])})
    data = b"\n".join([line("a"), b"", line("a"), line("long"), line("fails"), b"["])
    with Engine(lambda: loaded(lane)) as engine:
        events = [event.to_dict() for event in engine.run(read(data))]
    errors = {(event["line"], event["code"]) for event in events if "code" in event}
    assert errors == {(3, "duplicate_id"), (4, "too_long"), (5, "internal"), (6, "bad_json")}


def test_the_line_is_no_part_of_what_is_asked() -> None:
    first, _, again = (replace(item, created=0.0) for item in read(b"\n".join([line("a"), line("b"), line("a")])))
    assert isinstance(first, Request) and isinstance(again, Request)
    assert (first.line, again.line) == (1, 3) and first == again


def test_g01_every_line_is_a_request_or_an_error_with_its_number() -> None:
    data = b"\n".join(
        [
            line("good"),
            b"",
            b'{"request_id": "broken", ',
            b"   \t ",
            b"[1]",
            b'{"request_id": "no prompt"}',
            line("good"),
            line("broken"),
        ]
    )
    items = read(data)
    assert codes(items) == [
        (None, "good"),
        (3, "bad_json"),
        (5, "bad_record"),
        (6, "prompt_xor_messages"),
        (None, "good"),
        (None, "broken"),
    ]
    with Engine(lambda: loaded(FakeLane())) as engine:
        events = list(engine.run(items))
    summary = events[-1]
    assert isinstance(summary, InferenceSummary)
    assert (summary.finished_requests, summary.rejected_requests) == (2, 4)
    assert {event.request_id for event in events if isinstance(event, GenerationResult)} == {"good", "broken"}
    errors = [event.to_dict() for event in events if isinstance(event, RequestRejected)]
    assert sorted((error.get("line", 0), error.get("request_id"), error["code"]) for error in errors) == [
        (3, None, "bad_json"),
        (5, None, "bad_record"),
        (6, None, "prompt_xor_messages"),
        (7, "good", "duplicate_id"),
    ]


@pytest.mark.parametrize("text", ["[1]", '"x"', "null", "3", "{}", '{"body": "x"}', "true", "1.5", "[[{}]]"])
def test_g02_json_that_is_no_request_costs_its_line_only(text: str) -> None:
    items = read(text.encode() + b"\n" + line("a") + b"\n")
    assert [type(item) for item in items] == [RequestRejected, Request]
    assert isinstance(items[0], RequestRejected) and items[0].line == 1


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b'{"request_id": "a", "prompt": "x", "prompt": "y"}',
        b'{"request_id": "a", "messages": [{"role": "user", "role": "user", "content": ""}]}',
        b'{"request_id": "a", "prompt": "x", "sampling": {"temperature": NaN}}',
        b'{"request_id": "a", "prompt": "x", "sampling": {"temperature": -Infinity}}',
        b'{"request_id": "a", "prompt": "x", "sampling": {"temperature": 1e999}}',
        b'{"request_id": "a", "prompt": "\xff"}',
        b'{"request_id": "a", "prompt": "x"} {}',
        b"{'request_id': 'a'}",
        b"[" * 200_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        "\N{NO-BREAK SPACE}".encode(),
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_strict_json_is_bad_json(text: bytes) -> None:
    items = read(line("first") + b"\n" + text + b"\n" + line("last"))
    assert codes(items) == [(None, "first"), (2, "bad_json"), (None, "last")]


def test_a_byte_order_mark_is_borne_at_the_start() -> None:
    assert codes(read(b"\xef\xbb\xbf" + line("a"))) == [(None, "a")]
    assert read(b"\xef\xbb\xbf\r\n") == []


def test_line_ends_and_a_last_line_without_one() -> None:
    assert codes(read(line("a") + b"\r\n" + line("b"))) == [(None, "a"), (None, "b")]
    assert read(b"") == []


def test_a_long_line_is_refused_without_being_held() -> None:
    data = line("a") + b"\n" + line("b", prompt="y" * 5000) + b"\n" + line("c") + b"\n"
    assert codes(read(data, max_line_bytes=200)) == [(None, "a"), (2, "line_too_long"), (None, "c")]
    exact = line("a")
    assert codes(read(exact + b"\n" + exact, max_line_bytes=len(exact))) == [(None, "a")] * 2
    assert codes(read(exact + b"x", max_line_bytes=len(exact))) == [(1, "line_too_long")]


def test_a_number_that_no_check_foresaw_costs_its_line() -> None:
    items = read(b'{"request_id": "a", "prompt": "x", "sampling": {"temperature": 1' + b"0" * 400 + b"}}\n" + line("b"))
    assert isinstance(items[0], RequestRejected) and items[0].line == 1 and codes(items)[1] == (None, "b")


def test_files_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(line("a") + b"\n" + line("b", max_new_tokens=3))
    items = list(read_requests(path, RequestDefaults(max_new_tokens=9)))
    assert [item.max_new_tokens for item in items if isinstance(item, Request)] == [9, 3]


@pytest.mark.parametrize("name", ["missing", "", "a\0b"])
def test_unreadable_input_is_one_error_without_a_line(tmp_path: Path, name: str) -> None:
    (item,) = list(read_requests(tmp_path / name, DEFAULTS))
    assert isinstance(item, RequestRejected)
    record = item.to_dict()
    assert record["code"] == "unreadable_input" and "line" not in record and "request_id" not in record


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, line("a") + b"\n" + line("b"))
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert codes(list(read_requests("-", DEFAULTS))) == [(None, "a"), (None, "b")]
        stream.fileno()  # still ours to close
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line("c"))))
    assert codes(list(read_requests("-", DEFAULTS))) == [(None, "c")]
    monkeypatch.setattr(sys, "stdin", None)
    assert codes(list(read_requests("-", DEFAULTS))) == [(None, "unreadable_input")]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), max_size=8))
def test_any_bytes_give_one_answer_per_line_that_is_not_blank(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    numbers = [number for number, text in enumerate(data.split(b"\n"), 1) if text.strip()]
    bom_only = data.split(b"\n")[0].removeprefix(b"\xef\xbb\xbf").strip() == b""
    items = read(data)
    assert [item.line for item in items if isinstance(item, RequestRejected)] == [
        number for number in numbers if not (number == 1 and bom_only)
    ]
