"""What a check of the gate says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["identical", "near tie", "different"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One property over one case.

    Attributes:
        check: the property.
        case: what it was tried on.
        verdict: `near tie` where rounding explains the difference; `different` is a failure.
        detail: where they part, and the numbers behind the verdict.
        seconds: it took.
    """

    check: str
    case: Mapping[str, Any]
    verdict: Verdict
    detail: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def equal(check: str, case: Mapping[str, Any], holds: bool, **detail: Any) -> Outcome:
    """Identical or different, nothing between."""
    return Outcome(check=check, case=case, verdict="identical" if holds else "different", detail=detail)
