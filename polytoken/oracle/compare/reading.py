"""Reading a receipt for a comparison: what cannot be held against anything is refused with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from polytoken.errors import UsageError
from polytoken.oracle.compare.fields import GENERATED_ENDS, HEADER, printable
from polytoken.oracle.receipt import SCHEMA, Record, read_receipts

# Lists of ids beside which `top` has a row for each.
_ROW_FOR_EACH: Final = {"forward_reference": ("token_ids",), **dict.fromkeys(GENERATED_ENDS, ("tokens",))}
_NO_RESULT: Final = HEADER | {"reference_prompt"}
_LONG: Final = 400  # characters of a failure
_LARGEST: Final = 1e300  # beyond any logit or id
# Without these a record says nothing that could be held against another one's.
_STATED: Final[dict[str, tuple[str, ...]]] = {
    "forward_reference": ("token_ids", "argmax"),
    "decode_reference": ("token_id", "argmax"),
    "decode_reference_end": ("token_ids",),
    "mtp_reference": ("op",),
    "ar_prefill_reference": ("token_ids",),
    "ar_reference_end": ("tokens",),
    "mtp_prefill_reference": ("token_ids", "token"),
    "mtp_generation_input": ("token_ids",),
    "mtp_generation_end": ("tokens",),
    "restored_suffix_reference": ("token_ids",),
    "chat_warmup": ("tokens",),
    "chat_turn": ("prompt_ids", "tokens"),
    "canvas_prefill_reference": ("token_ids",),
    "canvas_reference": ("token_ids",),
    "canvas_reference_end": ("tokens",),
    "gate_check": ("check", "verdict"),
}


def read_comparable(path: Path) -> list[Record]:
    """The records of one receipt of this schema whose ids and rows are what they should be.

    Raises:
        UsageError: it cannot be read, is empty, of another schema, more than one or without a result, or its ids or
            rows are missing or none.
    """
    records = read_receipts(path, cut_off=True)
    if not records:
        raise UsageError(f"{path} holds no receipt: no line of it is a record")
    for number, record in enumerate(records, start=1):
        fault = _misplaced(number, len(records), record["event"]) or _fault(record)
        if fault is not None:
            raise UsageError(f"{path}, record {number} ({printable(record['event'])}): {fault}")
    if all(record["event"] in _NO_RESULT for record in records):
        raise UsageError(f"{path} holds no result: {ending(records) or 'nothing was run'}")
    return records


def beginning(records: Sequence[Record]) -> str | None:
    """What is wrong with the way a receipt begins; None for one that says who wrote it."""
    if records and records[0]["event"] == "receipt_start":
        return None
    return "it lacks its beginning: its first record is no receipt_start"


def ending(records: Sequence[Record]) -> str | None:
    """What is wrong with the way a receipt ends; None for a run that came to its end."""
    last = records[-1] if records else {}
    if last.get("event") != "receipt_end":
        return "it is cut off: its last record is no receipt_end"
    if not last.get("exit_status"):
        return None
    failure = last.get("failure")
    why = f": {printable(str(failure.get('error')), longest=_LONG)}" if isinstance(failure, Mapping) else ""
    return f"its run ended with status {last['exit_status']}{why}"


def _misplaced(number: int, count: int, event: str) -> str | None:
    if (event == "receipt_start" and number > 1) or (event == "receipt_end" and number < count):
        return "a receipt begins and ends once: this file holds more than one, or not in order"
    return None


def _fault(record: Record) -> str | None:
    if record["event"] == "receipt_start" and (type(record.get("schema")) is not int or record["schema"] != SCHEMA):
        known = f"this polytoken knows schema {SCHEMA}"
        return f"its schema is {record.get('schema')!r}, and {known}; compare with the one that wrote it"
    missing = next((name for name in _STATED.get(record["event"], ()) if record.get(name) is None), None)
    if missing is not None:
        return f"it does not state {missing}"
    for name in ("token_ids", "tokens", "prompt_ids"):
        if name in record and not _ids(record[name]):
            return f"{name} must be a list of token ids"
    for name in ("token_id", "token"):
        if name in record and type(record[name]) is not int:
            return f"{name} must be a token id"
    if not _number(record.get("temperature", 0)):
        return "temperature must be a number"
    return _rows_fault(record)


def _rows_fault(record: Record) -> str | None:
    """Rows come one to a record, or as a list of them beside as many sums, ids and choices."""
    top, sums, argmax = record.get("top"), record.get("logsumexp"), record.get("argmax")
    if argmax is not None and type(argmax) is not int and not _ids(argmax):
        return "argmax must be a token id, or a list of them"
    if top is None or top == []:
        return None
    one = _row(top)
    rows = [top] if one else top
    if not isinstance(rows, list) or not all(_row(row) for row in rows):
        return "top must be a list of pairs of id and number, the largest first and every id once, or of such lists"
    if not _number(sums or 0) if one else not (isinstance(sums or [], list) and all(map(_number, sums or []))):
        return "logsumexp must be a number beside one row, a list of numbers beside a list of rows"
    return _choices_fault(record, rows, {} if one else {"logsumexp": sums, "argmax": argmax})


def _choices_fault(record: Record, rows: list[Any], beside: dict[str, Any]) -> str | None:
    """Lists beside rows have an item for each, and what was chosen is the likeliest."""
    beside |= {name: record.get(name) for name in _ROW_FOR_EACH.get(record["event"], ())}
    for name, values in beside.items():
        if isinstance(values, list) and len(values) != len(rows):
            return f"{name} must have as many items as top has rows, {len(rows)}, not {len(values)}"
    argmax = record.get("argmax")
    chosen = argmax if isinstance(argmax, list) else [argmax] * len(rows)
    if argmax is not None and not all(map(_is_largest, chosen, rows)):
        return "argmax must be the first id of top, or one that is as likely"
    return None


def _row(row: Any) -> bool:
    if not (isinstance(row, list) and row and all(_pair(pair) for pair in row)):
        return False
    falling = all(a[1] >= b[1] for a, b in pairwise(row))
    return falling and len({pair[0] for pair in row}) == len(row)


def _pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _number(pair[0]) and _number(pair[1]) and pair[0] % 1 == 0


def _is_largest(token: int, row: Sequence[Sequence[float]]) -> bool:
    return any(pair[0] == token and pair[1] == row[0][1] for pair in row)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(item) is int for item in value)
