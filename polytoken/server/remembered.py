"""Answers that a client may go on from by their id."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from polytoken.server.errors import ApiError

REMEMBERED: Final = 1000  # answers that previous_response_id may name


class ResponseStore:
    """Conversations by the id of their latest answer; the oldest are forgotten."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    def put(self, answer_id: str, turns: list[dict[str, Any]]) -> None:
        self._turns[answer_id] = turns
        while len(self._turns) > REMEMBERED:
            self._turns.popitem(last=False)

    def get(self, answer_id: str) -> list[dict[str, Any]]:
        """The conversation up to that answer. Raises ApiError, 404."""
        turns = self._turns.get(answer_id)
        if turns is None:
            raise ApiError(
                404, f"there is no stored response {answer_id!r}", code="response_not_found",
                param="previous_response_id",
            )  # fmt: skip
        return turns
