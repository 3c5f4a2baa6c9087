"""The end of a turn: the state of prompt and answer goes to the bank, and stays ready for the session's next turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from polytoken.cache.answers import PutOutcome
from polytoken.cache.bank import StateBank
from polytoken.cache.state import DecodingState

END_COUNTS: Final = ("ends_banked", "ends_kept_live", "ends_not_banked")
"""Turns of sessions that ended: with their state banked, kept ready, or neither."""


@contextmanager
def committing(bank: StateBank, session: str, ids: Sequence[int]) -> Iterator[None]:
    """The session's stream is `ids` from now on, whatever becomes of its state; within it, the state is banked."""
    bank.commit(session, ids)
    try:
        yield
    finally:
        bank.save(session)


def go_back(state: DecodingState, length: int) -> bool:
    """Take back what was encoded beyond `length` tokens; False, with nothing done, if that cannot be done exactly."""
    beyond = state.offset - length
    if beyond <= 0:
        return True
    if not all(layer.can_trim(beyond) for layer in state.layers):
        return False
    state.trim(beyond)
    return True


def bank_end(
    bank: StateBank,
    session: str,
    ids: Sequence[int],
    state: DecodingState,
    *,
    counts: Counter[str],
    owner: Any = None,
) -> bool:
    """Bank the state at exactly `ids`, evaluated; True if it is also left with the bank as the session's own."""
    outcome = bank.put(ids, state, session=session)
    banked = outcome in (PutOutcome.STORED, PutOutcome.PRESENT)
    counts["ends_banked" if banked else "ends_not_banked"] += 1
    live = banked and bank.keep_live(session, ids, state, owner=owner)
    counts["ends_kept_live"] += live
    return live
