"""The JSON schema of receipts, and checking a receipt against it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from polytoken.errors import UsageError
from polytoken.oracle.receipt import Record


def receipt_schema() -> dict[str, Any]:
    """The schema of one line, draft 2020-12."""
    schema: dict[str, Any] = json.loads(schema_text())
    return schema


def schema_text() -> str:
    """The schema as it is packaged."""
    return (files(__package__) / "receipt.schema.json").read_text(encoding="utf-8")


def violations(records: Iterable[Record]) -> list[str]:
    """What is wrong with a receipt, a line of text for each fault; [] for nothing.

    Raises:
        UsageError: `jsonschema` is not installed.
    """
    try:
        from jsonschema import Draft202012Validator  # noqa: PLC0415
    except ImportError:
        raise UsageError(
            "checking receipts needs jsonschema: pip install 'polytoken[oracle]'", code="missing_extra", field="--check"
        ) from None
    validator = Draft202012Validator(receipt_schema())
    listed = list(records)
    faults = [
        f"record {number} ({record.get('event')}): {'.'.join(map(str, error.absolute_path)) or '-'}: {error.message}"
        for number, record in enumerate(listed, start=1)
        for error in validator.iter_errors(record)
    ]
    if not listed or listed[0].get("event") != "receipt_start":
        faults.insert(0, "the first record must be a receipt_start")
    if not listed or listed[-1].get("event") != "receipt_end":
        faults.append("the last record must be a receipt_end: the run did not come to its end")
    return faults
