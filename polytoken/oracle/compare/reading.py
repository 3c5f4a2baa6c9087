"""Reading a receipt for a comparison: what cannot be held against anything is refused with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from polytoken.errors import UsageError
from polytoken.oracle.compare.fields import HEADER
from polytoken.oracle.receipt import SCHEMA, Record, read_receipts

_NO_RESULT: Final = HEADER | {"reference_prompt"}
_LARGEST: Final = 1e300  # beyond any logit or id


def read_comparable(path: Path) -> list[Record]:
    """The records of a receipt of this schema whose ids and rows are what they should be.

    Raises:
        UsageError: it cannot be read, is empty, of another schema or without a result, or its ids or rows are none.
    """
    records = read_receipts(path)
    if not records:
        raise UsageError(f"{path} holds no receipt: no line of it is a record")
    for number, record in enumerate(records, start=1):
        fault = _fault(record)
        if fault is not None:
            raise UsageError(f"{path}, record {number} ({record['event']}): {fault}")
    if all(record["event"] in _NO_RESULT for record in records):
        raise UsageError(f"{path} holds no result: {ending(records) or 'nothing was run'}")
    return records


def ending(records: Sequence[Record]) -> str | None:
    """What is wrong with the way a receipt ends; None for a run that came to its end."""
    last = records[-1] if records else {}
    if last.get("event") != "receipt_end":
        return "it is cut off: its last record is no receipt_end"
    if not last.get("exit_status"):
        return None
    failure = last.get("failure")
    why = f": {failure.get('error')}" if isinstance(failure, Mapping) else ""
    return f"its run ended with status {last['exit_status']}{why}"


def _fault(record: Record) -> str | None:
    if record["event"] == "receipt_start" and record.get("schema") != SCHEMA:
        known = f"this polytoken knows schema {SCHEMA}"
        return f"its schema is {record.get('schema')!r}, and {known}; compare with the one that wrote it"
    for name in ("token_ids", "tokens"):
        if name in record and not _ids(record[name]):
            return f"{name} must be a list of token ids"
    if not _number(record.get("temperature", 0)):
        return "temperature must be a number"
    return _rows_fault(record)


def _rows_fault(record: Record) -> str | None:
    """Rows come one to a record, or as a list of them beside as many sums."""
    top, sums = record.get("top"), record.get("logsumexp")
    if top is None or top == []:
        return None
    one = _row(top)
    if not one and not (isinstance(top, list) and all(_row(row) for row in top)):
        return "top must be a list of pairs of id and number, or of such lists"
    if one or sums is None:
        return None if sums is None or _number(sums) else "logsumexp must be a number beside one row"
    if isinstance(sums, list) and len(sums) == len(top) and all(map(_number, sums)):
        return None
    return f"logsumexp must be {len(top)} numbers, as many as rows"


def _row(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(_pair(pair) for pair in row)


def _pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _number(pair[0]) and _number(pair[1])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(item) is int for item in value)
