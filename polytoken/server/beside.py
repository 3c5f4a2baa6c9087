"""Work that would hold up everyone if the event loop did it: beside the loop, unless it is little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel

T = TypeVar("T")
LITTLE: Final = 4_000  # characters, or a tenth as many values: a thread would take longer than the work


async def beside(work: Callable[[], T], *values: Any) -> T:
    """What the work gives; on a thread of its own where the values that it goes through are many or long."""
    return await asyncio.to_thread(work) if is_much(*values) else work()


def is_much(*values: Any) -> bool:
    """Whether the values have more characters and members than are handled in a moment; looks at no more than that."""
    left, waiting = LITTLE, list(values)
    while waiting:
        value = waiting.pop()
        left -= 10 + (len(value) if isinstance(value, (str, bytes)) else 0)
        if left < 0:
            return True
        if isinstance(value, BaseModel):
            waiting += [*vars(value).values(), value.model_extra]
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
    return False
