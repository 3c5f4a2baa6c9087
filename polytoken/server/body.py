"""A request's body: read within limits, strict JSON, checked against a record. Every fault is a 4xx with a reason."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from polytoken.server.errors import ApiError, bad_request

RecordT = TypeVar("RecordT", bound=BaseModel)
MAX_DEPTH: Final = 200  # nested arrays and objects; what follows renders and hashes them recursively


async def read_record(request: Request, record: type[RecordT], *, limit: int) -> RecordT:
    """The request's body as a checked record.

    Raises:
        ApiError: 400, 413 or 415.
    """
    return check(record, parse_json(await read_body(request, limit=limit)))


async def read_body(request: Request, *, limit: int) -> bytes:
    """All bytes, at most `limit` of them."""
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
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(499, "the client left before its request was complete", code="client_closed") from None
    return b"".join(parts)


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8 without a mark, no NaN, no key twice, not nested beyond reason."""
    if not body.strip():
        raise bad_request("the body is empty; a JSON object is needed", param=None, code="invalid_json")
    try:
        text = body.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
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
        first = error.errors(include_url=False, include_context=False)[0]
        place = _place(first["loc"])
        missing = first["type"] == "missing"
        text = f"{place} is required" if missing else f"{place}: {first['msg']}"
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
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit} bytes", code="body_too_large", headers={"Connection": "close"}
    )
