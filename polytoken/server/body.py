"""A request's body: read within limits, strict JSON, checked against a record. Every fault is a 4xx with a reason.

Many small values cost far more than their bytes: they are counted before anything is made of them, and what is left
of the work is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from polytoken.server.beside import beside
from polytoken.server.errors import ApiError, bad_request, shown
from polytoken.server.settings import ServerSettings

RecordT = TypeVar("RecordT", bound=BaseModel)
MAX_DEPTH: Final = 200  # nested arrays and objects; what follows renders and hashes them recursively
MAX_DIGITS: Final = 1000  # of an integer
_OPENING: Final = re.compile(rb'["\[{]')


async def read_record(request: Request, record: type[RecordT], settings: ServerSettings) -> RecordT:
    """The request's body as a checked record.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    body = await read_body(request, limit=settings.max_body_bytes, seconds=settings.request_timeout)

    def read() -> RecordT:
        check_counts(body, items=settings.max_body_items, values=settings.max_body_values)
        return check(record, parse_json(body))

    return await beside(read, body)


async def read_body(request: Request, *, limit: int, seconds: float) -> bytes:
    """All bytes, at most `limit` of them, that came within so many seconds."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Any other type can be posted by a foreign web page without the browser asking first.
    if kind != "application/json":
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body must not be compressed", code="unsupported_media_type")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        text = f"the body did not come within {seconds:g} seconds"
        raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its request was complete", code="client_closed") from None
    return b"".join(parts)


def check_counts(body: bytes, *, items: int, values: int) -> None:
    """Refuse a body of very many values, without making any of them; its JSON may be bad in any way.

    Args:
        items: most texts, names of members, lists and objects.
        values: most members of lists and objects.

    Raises:
        ApiError: 413 `too_many_items`.
    """
    at = seen = commas = 0
    while True:
        opening = _OPENING.search(body, at)
        commas += body.count(b",", at, len(body) if opening is None else opening.start())
        seen += opening is not None
        if seen > items:
            raise _too_many(items, "texts, lists and objects", setting="max_body_items")
        if commas > values:
            raise _too_many(values, "values", setting="max_body_values")
        if opening is None:
            return
        at = opening.end() if opening[0] != b'"' else _end_of_text(body, opening.end())


def _end_of_text(body: bytes, start: int) -> int:
    """The place behind the quote that ends the text which begins at `start`; the body's end if none does."""
    at = start
    while (quote := body.find(b'"', at)) >= 0:
        before = quote
        while before > at and body[before - 1] == 0x5C:
            before -= 1
        at = quote + 1
        if (quote - before) % 2 == 0:  # an even number of backslashes: the quote itself is not escaped
            return at
    return len(body)


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8 without a mark, no NaN, no key twice, not nested beyond reason."""
    if not body.strip():
        raise bad_request("the body is empty; a JSON object is needed", param=None, code="invalid_json")
    try:
        text = body.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        value = json.loads(text, parse_constant=_no_constant, parse_int=_integer, object_pairs_hook=_unique)
        _check_depth(value)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason}", param=None, code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", param=None, code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", param=None, code="invalid_json") from None
    return value


def check(record: type[RecordT], value: Any) -> RecordT:
    """The value as a record; the first fault is reported, with its place."""
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", param=None, code="invalid_type")
    try:
        return record.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = _place(first["loc"])
        missing = first["type"] == "missing"
        text = f"{place} is required" if missing else f"{place}: {first['msg'].removeprefix('Value error, ')}"
        raise bad_request(text, param=place, code="missing_field" if missing else "invalid_value") from None


def _place(location: tuple[int | str, ...]) -> str:
    """messages[0].content of ("messages", 0, "content"); pydantic's own names of alternatives are left out."""
    place = ""
    for item in location:
        if isinstance(item, int):
            place += f"[{item}]"
        elif item.replace("_", "").isalnum() and item.islower() and item not in ("str", "int", "float", "bool"):
            place += f".{item}" if place else item
    return place or "body"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(item, (dict, list))
        ]


def _too_many(most: int, of: str, *, setting: str) -> ApiError:
    return ApiError(413, f"the body holds more than {most} {of} (the server's {setting})", code="too_many_items")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit} bytes", code="body_too_large", headers={"Connection": "close"}
    )
