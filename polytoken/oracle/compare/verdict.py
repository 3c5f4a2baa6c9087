"""The comparison of two receipts and its one-line verdict: identical, same law, or different."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polytoken.oracle.compare.fields import (
    GENERATED_ENDS,
    HEADER,
    Difference,
    asked_otherwise,
    first_difference,
    first_semantic_difference,
    name_record,
    printable,
)
from polytoken.oracle.compare.reading import beginning, ending
from polytoken.oracle.compare.rows import Drift, Tie, Tolerance, compare_rows, examine_tie, rows_of, top_at
from polytoken.oracle.receipt import Record

Verdict = Literal["identical", "same law", "different"]


@dataclass
class Comparison:
    """What was found.

    Attributes:
        verdict: see `explain`.
        exact: the first field that differs by a bit; None for identical receipts.
        semantic: the first field that means something else; None where none does.
        drifts: how far apart the rows of logits are, in order.
        ties: places where different ids were chosen.
        compared: records that were held against each other.
        skipped: records behind a near tie, which belong to different texts.
        notes: what else is worth knowing, such as weights that are not the same.
        tolerance: what logits may differ by.
        engines: who wrote the two.
    """

    verdict: Verdict = "identical"
    exact: Difference | None = None
    semantic: Difference | None = None
    drifts: list[Drift] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    compared: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    tolerance: Tolerance = field(default_factory=lambda: Tolerance(0.0, 0.0))
    engines: tuple[str, str] = ("", "")

    @property
    def largest_drift(self) -> Drift | None:
        return max(self.drifts, key=lambda drift: drift.largest, default=None)

    def explain(self) -> str:
        """The verdict and its reason in one line."""
        if self.verdict == "identical":
            return f"identical: {self.compared} records agree in every bit"
        drift = self.largest_drift
        moved = "" if drift is None else f", logits within {drift.largest:.3g}"
        if self.verdict == "same law":
            tie = f"; {self.ties[0]}, {self.skipped} records behind it not compared" if self.ties else ""
            return f"same law: tokens, counts and offsets of {self.compared} records agree{moved}{tie}"
        worst = next((drift for drift in self.drifts if not drift.within), None)
        if self.semantic is not None:
            tie = f"; {self.ties[0]}" if self.ties else ""
            return f"different: {self.semantic}{tie}"
        if worst is not None:
            return f"different: {worst.where}, row {worst.position}: logits {worst.largest:.3g} apart"
        return f"different: {self.exact}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        drift = self.largest_drift
        return {
            "event": "comparison",
            "verdict": self.verdict,
            "engines": list(self.engines),
            "explanation": self.explain(),
            "exact": None if self.exact is None else vars(self.exact),
            "semantic": None if self.semantic is None else vars(self.semantic),
            "ties": [vars(tie) for tie in self.ties],
            "largest_drift": None if drift is None else vars(drift),
            "tolerance": vars(self.tolerance),
            "notes": self.notes,
            "compared": self.compared,
            "skipped": self.skipped,
        }


def compare(
    left: Sequence[Record], right: Sequence[Record], *, exact: bool = False, tolerance: Tolerance | None = None
) -> Comparison:
    """Hold two receipts against each other.

    Args:
        exact: whether nothing short of equal bits counts as agreement.
        tolerance: of logits; by default that of the coarser compute type.
    """
    chosen = tolerance or Tolerance.of(*_dtypes(left), *_dtypes(right))
    result = Comparison(tolerance=chosen, engines=(_engine(left), _engine(right)))
    hashes = _hash(left), _hash(right)
    if None not in hashes and hashes[0] != hashes[1]:
        result.notes.append("the weight files are not the same")
    for side, records in (("the first", left), ("the second", right)):
        faults = (beginning(records), ending(records))
        result.notes += [f"of {side} receipt: {fault}" for fault in faults if fault is not None]
    result.exact = _first_exact(left, right)
    result.semantic = _other_mode(left, right)
    if result.semantic is None:
        _compare_semantic(_law(left), _law(right), result, same_draws=_same_draws(left, right))
    if result.semantic is None:
        result.semantic = _other_ending(left, right)
    broken = result.semantic is not None or any(not drift.within for drift in result.drifts)
    broken = broken or any(not tie.near for tie in result.ties)
    if result.exact is None:
        result.verdict = "identical"
    else:
        result.verdict = "different" if broken or exact else "same law"
    return result


def _first_exact(left: Sequence[Record], right: Sequence[Record]) -> Difference | None:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a["event"] != b["event"]:
            return Difference(index, name_record(a), "event", a["event"], b["event"])
        found = first_difference(index, a, b)
        if found is not None:
            return found
    return _uneven(left, right)


def _compare_semantic(left: Sequence[Record], right: Sequence[Record], result: Comparison, *, same_draws: bool) -> None:
    """Fill in what records mean: up to the first difference, or to a choice that went another way.

    Args:
        same_draws: whether equal laws must give equal ids, though they are drawn.
    """
    drawn = _temperature(left) > 0.0
    parted = False
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if parted and a["event"] != b["event"]:
            result.skipped += max(len(left), len(right)) - index
            return  # texts of different lengths
        if a["event"] != b["event"] or a.get("op") != b.get("op"):
            result.semantic = Difference(index, name_record(a), "event", name_record(a), name_record(b))
            return
        if parted:
            result.skipped += 1
            continue
        result.compared += 1
        result.semantic = asked_otherwise(index, a, b)
        if result.semantic is not None:
            return
        ties = _ties(a, b, tolerance=result.tolerance, drawn=drawn, same_draws=same_draws)
        result.ties += ties
        parted = any(_decides(a, tie) for tie in ties)
        upto = ties[0].position + 1 if ties and a["event"] in GENERATED_ENDS else None
        result.drifts += compare_rows(a, b, where=name_record(a), tolerance=result.tolerance, upto=upto)
        far = next((tie for tie in ties if not tie.near), None)
        if far is not None:
            result.semantic = Difference(index, name_record(a), far.where, far.left, far.right)
        elif not parted:
            result.semantic = first_semantic_difference(index, a, b, near=result.tolerance.allows)
        if result.semantic is not None:
            return
    if not parted:
        result.semantic = _uneven(left, right)


def _ties(a: Record, b: Record, *, tolerance: Tolerance, drawn: bool, same_draws: bool) -> list[Tie]:
    """The places of a record where different ids were chosen from the same past: of a text the first one only."""
    name = name_record(a)
    if a["event"] in GENERATED_ENDS and "tokens" in a and "tokens" in b:
        for i, ids in enumerate(zip(a["tokens"], b["tokens"], strict=False)):
            if ids[0] != ids[1]:
                tops = (top_at(a, i), top_at(b, i))
                tie = examine_tie(f"{name}.tokens", i, ids, tops, tolerance=tolerance, drawn=drawn)
                if drawn and same_draws and tops[0] == tops[1]:
                    tie = replace(tie, near=False, one_draw=True)
                return [tie]
        return []
    if a.get("token_ids", a.get("token_id")) != b.get("token_ids", b.get("token_id")):
        return []  # another past: the ids themselves are the difference
    ties = []
    for i, ((p, _), (q, _)) in enumerate(zip(rows_of(a), rows_of(b), strict=False)):
        ids = (int(p[0][0]), int(q[0][0]))
        if ids[0] != ids[1]:
            ties.append(examine_tie(f"{name}.argmax", i, ids, (p, q), tolerance=tolerance, drawn=False))
    return ties


def _decides(record: Record, tie: Tie) -> bool:
    """Whether what follows depends on this choice: of a prompt's rows only on the last."""
    return record["event"] != "forward_reference" or tie.position == len(record["token_ids"]) - 1


def _temperature(records: Sequence[Record]) -> float:
    return next((float(record["temperature"]) for record in records if "temperature" in record), 0.0)


def _uneven(left: Sequence[Record], right: Sequence[Record]) -> Difference | None:
    if len(left) == len(right):
        return None
    index = min(len(left), len(right))
    longer = left if len(left) > len(right) else right
    return Difference(index, name_record(longer[index]), "records", len(left), len(right))


def _other_ending(left: Sequence[Record], right: Sequence[Record]) -> Difference | None:
    """The exit status, where both receipts state it and they differ."""
    if not left or not right:
        return None
    a, b = left[-1], right[-1]
    if a["event"] != "receipt_end" or b["event"] != "receipt_end":
        return None
    return first_semantic_difference(len(left) - 1, a, b, near=lambda x, y: x == y)


def _other_mode(left: Sequence[Record], right: Sequence[Record]) -> Difference | None:
    """Two modes, where both receipts state theirs: their records are of different kinds from the first on."""
    modes = [records[0].get("mode") if records and records[0]["event"] == "receipt_start" else None
             for records in (left, right)]  # fmt: skip
    if None in modes or modes[0] == modes[1]:
        return None
    return Difference(0, "receipt_start", "mode", *modes)


def _same_draws(left: Sequence[Record], right: Sequence[Record]) -> bool:
    """Whether one engine wrote both in one lane: from one law a seed then draws one id."""
    a, b = ({name: r.get(name) for name in ("event", "engine", "lane")} for r in (left[0], right[0]))
    return a == b and a["event"] == "receipt_start"


def _law(records: Sequence[Record]) -> list[Record]:
    """The records that every engine has: what was loaded comes first where both say it."""
    return [record for record in records if record["event"] not in HEADER]


def _dtypes(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record["event"] == "reference_loaded" and record.get("dtype"):
            yield str(record["dtype"])


def _hash(records: Sequence[Record]) -> str | None:
    return next((r.get("checkpoint_sha256") for r in records if r["event"] == "reference_loaded"), None)


def _engine(records: Sequence[Record]) -> str:
    named = next((str(record.get("engine")) for record in records if record["event"] == "receipt_start"), "unknown")
    return printable(named)
