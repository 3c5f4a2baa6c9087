"""Rows of logits that rounding has moved: how far, and whether a choice between two ids was a near tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from polytoken.oracle.receipt import Record

Top = Sequence[Sequence[float]]

# What two right engines may differ by in a logit, for the compute type. Rounding grows with depth and with the values.
TOLERANCES: Final = {"float32": 2e-3, "float16": 0.06, "bfloat16": 0.5}
RELATIVE: Final = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
UNKNOWN: Final = "bfloat16"


@dataclass(frozen=True)
class Tolerance:
    """How far two logits may be apart: `absolute` + `relative` times the larger one."""

    absolute: float
    relative: float

    @classmethod
    def of(cls, *dtypes: str) -> Tolerance:
        """Of the coarsest of these types."""
        known = [dtype if dtype in TOLERANCES else UNKNOWN for dtype in dtypes] or [UNKNOWN]
        worst = max(known, key=lambda dtype: TOLERANCES[dtype])
        return cls(TOLERANCES[worst], RELATIVE[worst])

    def allows(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.bound(a, b)

    def bound(self, *values: float) -> float:
        return self.absolute + self.relative * max(map(abs, values))


@dataclass(frozen=True)
class Drift:
    """How far one row of the left receipt is from the right one's.

    Attributes:
        where: event and what tells it apart.
        position: place in the text, counted from the first row of its record.
        largest: largest difference of a logit that both sides list.
        logsumexp: difference of the two, None where a side does not state it.
        margin: the smaller gap between the best two ids of either side.
        within: whether the tolerance allows it.
    """

    where: str
    position: int
    largest: float
    logsumexp: float | None
    margin: float
    within: bool


@dataclass(frozen=True)
class Tie:
    """The first place where two runs chose different ids.

    Attributes:
        where: event and field.
        position: index among the chosen ids.
        left, right: the two ids.
        left_margin: how far the left's own id is above the right's id in the left's row; None where that is not listed.
        right_margin: the same the other way round.
        left_rank: rank of the right's id in the left's row, from 1; None below the listed ones.
        right_rank: the same the other way round.
        near: whether rounding explains it.
        drawn: whether the ids were drawn; then two equal laws explain it.
        one_draw: whether the laws are equal in every bit and so are the draws, which nothing explains.
    """

    where: str
    position: int
    left: int
    right: int
    left_margin: float | None
    right_margin: float | None
    left_rank: int | None
    right_rank: int | None
    near: bool
    drawn: bool
    one_draw: bool = False

    @property
    def why(self) -> str:
        """The judgement in words."""
        if self.drawn:
            differ = "one law and one seed drew two ids" if self.one_draw else "the laws differ"
            return "the laws agree, so a draw fell beside an edge" if self.near else differ
        return "a near tie" if self.near else "no near tie"

    def __str__(self) -> str:
        margins = f"margins {number(self.left_margin)} and {number(self.right_margin)}"
        ranks = f"ranks {self.left_rank or 'unlisted'} and {self.right_rank or 'unlisted'}"
        return f"{self.where}, token {self.position}: {self.left} against {self.right}; {self.why} ({margins}, {ranks})"


def rows_of(record: Record) -> list[tuple[Top, float | None]]:
    """The rows of a record as pairs of top list and logsumexp; [] for a record without any."""
    top, lse = record.get("top"), record.get("logsumexp")
    if not top:
        return []
    if not isinstance(top[0][0], list):  # one row
        return [(top, lse if isinstance(lse, float) else None)]
    values = lse if isinstance(lse, list) else [None] * len(top)
    return list(zip(top, values, strict=True))


def compare_rows(
    left: Record, right: Record, *, where: str, tolerance: Tolerance, upto: int | None = None
) -> list[Drift]:
    """The drift of every row that both records have, at most `upto` of them."""
    pairs = list(zip(rows_of(left), rows_of(right), strict=False))[:upto]
    return [_drift(a, b, where=where, position=i, tolerance=tolerance) for i, (a, b) in enumerate(pairs)]


def examine_tie(
    where: str,
    position: int,
    ids: tuple[int, int],
    tops: tuple[Top | None, Top | None],
    *,
    tolerance: Tolerance,
    drawn: bool,
) -> Tie:
    """Why two runs chose different ids at a place that both came to with the same ids before it."""
    left, right = ids
    margin_l, rank_l = _behind(tops[0], left, right)
    margin_r, rank_r = _behind(tops[1], right, left)
    near = False
    if tops[0] is not None and tops[1] is not None:
        if drawn:
            near = _drift((tops[0], None), (tops[1], None), where=where, position=position, tolerance=tolerance).within
        elif margin_l is not None and margin_r is not None:
            # Each side's row may have moved by the tolerance, and both ids within it.
            bound = 2 * tolerance.bound(*(pair[1] for pair in (*tops[0][:2], *tops[1][:2])))
            near = abs(margin_l) <= bound and abs(margin_r) <= bound
    return Tie(where, position, left, right, margin_l, margin_r, rank_l, rank_r, near, drawn)


def _drift(
    a: tuple[Top, float | None], b: tuple[Top, float | None], *, where: str, position: int, tolerance: Tolerance
) -> Drift:
    left, right = {int(i): v for i, v in a[0]}, {int(i): v for i, v in b[0]}
    shared = [(left[i], right[i]) for i in left if i in right]
    largest = max((abs(x - y) for x, y in shared), default=float(abs(a[0][0][1] - b[0][0][1])))
    within = bool(shared) and all(tolerance.allows(x, y) for x, y in shared)
    # An id that only one side lists must lie at the other's edge, or the laws have different heads.
    for own, other in ((left, right), (right, left)):
        edge = min(other.values())
        within = within and all(v <= edge + 2 * tolerance.bound(v, edge) for i, v in own.items() if i not in other)
    lse = None if a[1] is None or b[1] is None else abs(a[1] - b[1])
    if lse is not None:
        within = within and lse <= tolerance.bound(a[1] or 0.0, b[1] or 0.0)
    margin = min(_margin(a[0]), _margin(b[0]))
    return Drift(where, position, largest, lse, margin, within)


def _margin(top: Top) -> float:
    return float(top[0][1] - top[1][1]) if len(top) > 1 else float("inf")


def _behind(top: Top | None, own: int, other: int) -> tuple[float | None, int | None]:
    """How far `other` is behind `own` in a row, and its rank."""
    if top is None:
        return None, None
    values = {int(i): v for i, v in top}
    ranks = {int(i): rank for rank, (i, _) in enumerate(top, start=1)}
    margin = values[own] - values[other] if own in values and other in values else None
    return margin, ranks.get(other)


def number(value: float | None) -> str:
    """A margin in words."""
    return "unknown" if value is None else f"{value:.3g}"


def top_at(record: Record, position: int) -> Any:
    """The top list at a place of a record's chosen ids, or None."""
    rows: list[Any] = record.get("top") or []
    return rows[position] if position < len(rows) and isinstance(rows[0][0], list) else None
