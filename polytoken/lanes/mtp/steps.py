"""Work of several rows taken in turns: each row submits to the device and steps aside before it reads.

A row's work is written from top to bottom as a generator. Where it needs numbers from the device it submits them and
yields; by the time it is resumed every other row has submitted its own, so the device is never idle for want of a host
that waits. Rows share nothing, so no number depends on the company.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields after each submission and returns a T."""


def submit(*arrays: mx.array) -> Steps[None]:
    """Start computing the arrays, and let the other rows do the same."""
    mx.async_eval(*arrays)
    yield


def interleave(works: Sequence[Steps[T]]) -> list[T | Exception]:
    """Run all works in turns, in order, and return what each returned or raised."""
    outcomes: dict[int, T | Exception] = {}
    while len(outcomes) < len(works):
        for index, work in enumerate(works):
            if index in outcomes:
                continue
            try:
                next(work)
            except StopIteration as end:
                outcomes[index] = end.value
            except Exception as fault:
                outcomes[index] = fault
    return [outcomes[index] for index in range(len(works))]
