"""The decoding states of conversations that may go on: taken over as they are, so that a next turn copies nothing.

A live state is a second copy of rows that the bank holds in blocks. It saves joining them again, which for a long
conversation costs more than computing a short turn, and it can be dropped at any time. Whoever takes one owns it alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState
from polytoken.cache.tree import ID_BYTES, common_bytes


@dataclass(frozen=True, eq=False)
class LiveState:
    """A state that is ready to be gone on from.

    Attributes:
        identity: what it was encoded under.
        key: the encoded ids of its tokens.
        state: at exactly these tokens, evaluated.
        owner: what else the lane needs to go on with it.
    """

    identity: StateIdentity
    key: bytes
    state: DecodingState
    owner: Any = None

    @property
    def length(self) -> int:
        """Tokens encoded."""
        return len(self.key) // ID_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it keeps, spare capacity included."""
        return self.state.held_bytes

    def usable(self, identity: StateIdentity, key: bytes, *, last: int) -> int:
        """How many tokens of it serve the prompt `key`, at most `last`; 0 if it cannot be taken back that far."""
        if identity != self.identity:
            return 0
        length = min(common_bytes(self.key, key) // ID_BYTES, last)
        back = self.length - length
        return length if back == 0 or all(layer.can_trim(back) for layer in self.state.layers) else 0


class LiveStates:
    """At most one live state per session, in the order of their use.

    Attributes:
        nbytes: sum over all.
    """

    def __init__(self) -> None:
        self._states: OrderedDict[str, LiveState] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._states)

    def get(self, session: str) -> LiveState | None:
        """The session's, which stays."""
        return self._states.get(session)

    def put(self, session: str, live: LiveState) -> None:
        """Keep it as the session's only one, and as the most recently used."""
        self.take(session)
        self._states[session] = live
        self.nbytes += live.nbytes

    def take(self, session: str) -> LiveState | None:
        """Give the session's away, if there is one."""
        live = self._states.pop(session, None)
        if live is not None:
            self.nbytes -= live.nbytes
        return live

    def drop_oldest(self) -> bool:
        """Let go of the least recently used; False when there is none."""
        return bool(self._states) and self.take(next(iter(self._states))) is not None

    def clear(self) -> None:
        """Let go of all."""
        self._states.clear()
        self.nbytes = 0
