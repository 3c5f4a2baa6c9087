"""Answers that a client may go on from by their id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from polytoken.server.errors import ApiError, shown

REMEMBERED: Final = 1000  # answers that previous_response_id may name


@dataclass(frozen=True)
class Remembered:
    """A conversation up to one of its answers.

    Attributes:
        turns: its messages, the answer included.
        session: under which the engine keeps its tokens, so that the next turn goes on from them.
    """

    turns: tuple[dict[str, Any], ...]
    session: str | None


class ResponseStore:
    """Conversations by the id of their latest answer; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Remembered] = OrderedDict()

    def put(self, answer_id: str, conversation: Remembered) -> None:
        self._known[answer_id] = conversation
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def get(self, answer_id: str) -> Remembered:
        """The conversation up to that answer. Raises ApiError, 404."""
        known = self._known.get(answer_id)
        if known is None:
            raise ApiError(
                404, f"there is no stored response {shown(answer_id)}", code="response_not_found",
                param="previous_response_id",
            )  # fmt: skip
        return known
