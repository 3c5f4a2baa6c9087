"""Running plans and keeping what they write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from polytoken.assembly import EngineOptions
from polytoken.errors import PolytokenError
from polytoken.oracle.plan import Plan
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.run import run_oracle
from polytoken.oracle.schema import receipt_schema


@dataclass
class Ran:
    """What one run left behind."""

    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    error: PolytokenError | None = None

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]

    def one(self, event: str) -> dict[str, Any]:
        (record,) = self.of(event)
        return record

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.notes if record["event"] == event]


def run_plan(model: str, *, chunk: int = 16, check: bool = True, **plan: Any) -> Ran:
    """Run a plan; its error is kept when `check` is off."""
    ran = Ran()
    receipts = Receipts(
        lambda line: ran.records.append(json.loads(line)), lambda line: ran.notes.append(json.loads(line))
    )
    options = EngineOptions(model=model, prefill_chunk_size=chunk, batch_size=1)
    try:
        run_oracle(Plan(**plan), options, receipts)
    except PolytokenError as error:
        if check:
            raise
        ran.error = error
    return ran


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what differs from run to run: times and the state of the machine."""
    dropped = ("environment", "settings", "raw_cycles", "phase_seconds", "decode_tps")
    return [
        {name: value for name, value in record.items() if not name.endswith("seconds") and name not in dropped}
        for record in records
    ]


def undescribed(records: list[dict[str, Any]]) -> set[str]:
    """Fields that the schema says nothing about, as `event.field`: it allows any, but ours are all described."""
    described = receipt_schema()["$defs"]
    return {
        f"{record['event']}.{name}"
        for record in records
        for name in record
        if name not in described[f"event_{record['event']}"]["properties"]
    }
