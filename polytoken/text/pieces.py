"""The share that each of several ids has in their text: what a canvas looks like, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PiecePort(Protocol):
    """A fresh text of ids, in which nothing ends it."""

    def push(self, ids: tuple[int, ...], /) -> object: ...

    @property
    def full_text(self) -> str: ...


def split_pieces(port: PiecePort, context: Sequence[int], ids: Sequence[int]) -> list[str]:
    """The part that each id has in the text of all of them, behind a few that came before.

    A character of several ids is the last one's.
    """
    port.push(tuple(context))
    starts, text = [], port.full_text
    for token_id in ids:
        port.push((token_id,))
        before, text = text, port.full_text
        starts.append(_common_prefix(before, text))
    pieces, end = [], len(text)
    for start in reversed(starts):
        pieces.append(text[min(start, end) : end])
        end = min(start, end)
    return pieces[::-1]


def _common_prefix(one: str, other: str) -> int:
    limit = min(len(one), len(other))
    return next((index for index in range(limit) if one[index] != other[index]), limit)
