"""Checks for the settings of this lane: one clear line that names the setting, wherever it was written."""

from __future__ import annotations

import math
from typing import Any

from polytoken.errors import UsageError


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise UsageError unless value is a finite number between low and high (each inclusive unless open)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refusal(name, value, "must be a finite number")
    if value < low or (open_low and value == low):
        raise refusal(name, value, f"must be {'above' if open_low else 'at least'} {low:g}")
    if value > high or (open_high and value == high):
        raise refusal(name, value, f"must be {'below' if open_high else 'at most'} {high:g}")


def check_count(name: str, value: Any, *, low: int = 1) -> None:
    """Raise UsageError unless value is an integer of at least low."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise refusal(name, value, f"must be an integer of at least {low}")


def refusal(name: str, value: Any, rule: str) -> UsageError:
    """The error that says which setting breaks which rule."""
    return UsageError(f"{name} {rule}, not {value!r}", field=name)
