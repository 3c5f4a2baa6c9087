"""How long work reports itself: the caller draws, this package never prints."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then during a pull, a conversion or a load.

    `stage` is a stable lower-case word ("download", "verify", "unpack", "convert", "hash", "load"); `done` and
    `total` count `unit` ("bytes" or "tensors"); `total` is 0 while it is unknown. The last call of a stage has
    `done == total`. Calls come from the thread that asked for the work, except that a hub download reports from its
    own workers.
    """

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None: ...


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """The progress of callers that watch nothing."""
