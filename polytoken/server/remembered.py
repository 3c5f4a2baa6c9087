"""Answers that a client may go on from by their id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from polytoken.server.errors import ApiError, shown

REMEMBERED: Final = 1000  # answers that previous_response_id may name
CHARACTERS: Final = 64 << 20  # of all their conversations together, each counted whole


@dataclass(frozen=True)
class Remembered:
    """A conversation up to one of its answers.

    Attributes:
        turns: its messages, the answer included.
        session: under which the engine keeps its tokens, so that the next turn goes on from them.
    """

    turns: tuple[dict[str, Any], ...]
    session: str | None

    @property
    def size(self) -> int:
        """Characters of its messages, about."""
        return sum(len(str(turn.get("content") or "")) + len(str(turn.get("tool_calls") or "")) for turn in self.turns)


class ResponseStore:
    """Conversations by the id of their latest answer; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Remembered, int]] = OrderedDict()  # with its size
        self._size = 0

    def put(self, answer_id: str, conversation: Remembered) -> None:
        size = conversation.size
        self._known[answer_id] = (conversation, size)
        self._size += size
        while len(self._known) > 1 and (len(self._known) > REMEMBERED or self._size > CHARACTERS):
            self._size -= self._known.popitem(last=False)[1][1]

    def get(self, answer_id: str) -> Remembered:
        """The conversation up to that answer. Raises ApiError, 404."""
        known = self._known.get(answer_id)
        if known is None:
            raise ApiError(
                404, f"there is no stored response {shown(answer_id)}", code="response_not_found",
                param="previous_response_id",
            )  # fmt: skip
        return known[0]
