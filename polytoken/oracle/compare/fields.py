"""What of a record says something about the engine's numbers, and in which way it is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from polytoken.oracle.receipt import Record

Near = Callable[[float, float], bool]
_LONGEST: Final = 80  # characters of a value or name that are shown

# About the run, not about its outcome.
_CIRCUMSTANCES: Final = frozenset(
    {"environment", "settings", "engine", "model", "decode_tps", "raw_cycles", "phase_seconds", "failure", "records"}
    | {"prefill_scope", "power_percent", "name", "seconds_free", "seconds_fixed", "ratio"}
)
# Numbers behind a verdict: where bits differ, so do these, and the verdict beside them says what it comes to.
_EVIDENCE: Final = {"gate_check": frozenset({"detail"})}
# What was asked for: where this differs, no answer can be held against the other.
_ASKED: Final = ("seed", "temperature", "top_p", "top_k", "depth", "prompt_ids", "step")
_LOADED: Final = frozenset({"event", "checkpoint_sha256", "tokenizer"})
HEADER: Final = frozenset(
    {"receipt_start", "reference_loaded", "reference_environment", "reference_request_policy", "receipt_end"}
)
# Hashes of numbers: equal bits or not, and nothing between.
_DIGESTS: Final = frozenset({"row_sha256", "cache", "state", "trunk", "mtp", "trunk_after", "mtp_after", "sha256"})
# Rows of logits, which rounding moves: compared within a tolerance, by `compare.rows`.
ROWS: Final = frozenset({"top", "logsumexp"})
# Means and extremes over a canvas, which rounding moves like logits.
_MEASURED: Final = "statistics"
GENERATED_ENDS: Final = frozenset(
    {"decode_reference_end", "ar_reference_end", "mtp_generation_end", "chat_turn", "chat_warmup"}
)


@dataclass(frozen=True)
class Difference:
    """Where two receipts part.

    Attributes:
        record: index among the records that are compared, from 0; of the left receipt.
        event: of that record, with `op` or `step` where it has one.
        field: path of the field, or `event` when the records are of different kinds.
        left, right: the values.
    """

    record: int
    event: str
    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        what = f"record {self.record} ({self.event}), field {printable(self.field)}"
        return f"{what}: {_shown(self.left)} against {_shown(self.right)}"


def name_record(record: Record) -> str:
    """The event, with what tells it from others of its kind."""
    marks = [f"{key} {record[key]}" for key in ("op", "step", "depth", "window") if record.get(key) is not None]
    return printable(" ".join([record["event"], *marks]))


def printable(text: str, *, longest: int = _LONGEST) -> str:
    """Somebody's words for one line of a terminal: not too long, and nothing in them that moves its cursor."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= longest else text[: longest - 3] + "..."


def meaningful(record: Record) -> Record:
    """The fields that are compared at all."""
    if record["event"] == "reference_loaded":
        return {name: value for name, value in record.items() if name in _LOADED}
    if record["event"] == "receipt_end":
        return {"event": "receipt_end", "exit_status": record.get("exit_status")}
    if record["event"] == "receipt_start":
        return {name: record.get(name) for name in ("event", "schema", "mode")}
    return {name: value for name, value in record.items() if not _circumstance(name)}


def first_difference(index: int, left: Record, right: Record) -> Difference | None:
    """The first field in which two records differ by a bit; a field that one side lacks is a difference.

    What was loaded is only held where both sides say it: not every engine can name its tokenizer.
    """
    loaded = left["event"] == "reference_loaded"
    found = _differ("", meaningful(left), meaningful(right), lenient=loaded)
    return None if found is None else Difference(index, name_record(left), *found)


def first_semantic_difference(index: int, left: Record, right: Record, *, near: Near) -> Difference | None:
    """The first field that means something else on the other side.

    Digests say nothing here, rows of logits that both have are compared elsewhere, and what one side does not state (a
    field that is missing or null) is not held against it.

    Args:
        near: whether rounding explains two measured numbers.
    """
    skipped = ROWS | _EVIDENCE.get(left["event"], frozenset())
    if left.get("top") and right.get("top"):
        skipped |= {"argmax"}  # the first of each row
    a, b = _semantic(meaningful(left), skipped), _semantic(meaningful(right), skipped)
    measured = a.pop(_MEASURED, None), b.pop(_MEASURED, None)
    found = _differ("", a, b, lenient=True) or _differ(_MEASURED, *measured, lenient=True, near=near)
    return None if found is None else Difference(index, name_record(left), *found)


def asked_otherwise(index: int, left: Record, right: Record) -> Difference | None:
    """The first thing that was asked for in another way, where both sides say it."""
    for name in _ASKED:
        found = _differ(name, left.get(name), right.get(name), lenient=True)
        if found is not None:
            return Difference(index, name_record(left), *found)
    return None


def _semantic(record: Record, skipped: frozenset[str]) -> Record:
    return {name: _without_digests(name, value) for name, value in record.items() if name not in skipped}


def _without_digests(name: str, value: Any) -> Any:
    if name in _DIGESTS:
        return None
    if isinstance(value, Mapping):
        if set(value) == {"shape", "sha256"}:
            return _squeezed(value["shape"])
        return {key: _stayed(value, key) or _without_digests(key, item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [_without_digests("", item) for item in value]
    return _squeezed(value) if name == "shape" else value


def _stayed(record: Mapping[str, Any], name: str) -> str | None:
    """For a digest `x_after` beside `x`: whether the two are one, which engines agree on whatever their bits are."""
    before = name.removesuffix("_after")
    if before == name or before not in record:
        return None
    return "as before" if record[name] == record[before] else "changed"


def _squeezed(shape: Any) -> Any:
    """Without axes of one item, which engines put where they like."""
    return [size for size in shape if size != 1] if isinstance(shape, list) else shape


def _differ(
    path: str, left: Any, right: Any, *, lenient: bool = False, near: Near | None = None
) -> tuple[str, Any, Any] | None:
    """Path and values of the first difference, depth first in the left side's order."""
    if left == right or (lenient and (left is None or right is None)):
        return None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        names = [*left, *(name for name in right if name not in left)]
        for name in names:
            if _circumstance(name):
                continue
            inner = f"{path}.{name}" if path else name
            found = _differ(inner, left.get(name), right.get(name), lenient=lenient, near=near)
            if found is not None:
                return found
        return None
    if isinstance(left, list) and isinstance(right, list):
        for i, (a, b) in enumerate(zip(left, right, strict=False)):
            found = _differ(f"{path}[{i}]", a, b, lenient=lenient, near=near)
            if found is not None:
                return found
        return None if len(left) == len(right) else (f"{path}.length", len(left), len(right))
    numbers = isinstance(left, float) and isinstance(right, float)
    return None if near is not None and numbers and near(left, right) else (path, left, right)


def _circumstance(name: str) -> bool:
    return name in _CIRCUMSTANCES or name.endswith("seconds")


def _shown(value: Any) -> str:
    return printable(repr(value))
