"""Stop strings in a stream of text, wherever it is cut into pieces.

The rule, the same for any cutting: the match that is complete first ends the text; of several that are complete at
the same character the longest counts, so that no character of a stop string is left in front. Waiting for a longer
match that began earlier is not done: it would make the model go on behind a text that the caller asked to stop at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopStep:
    """`text` may be shown now; `stop_string` is the match that ended the stream, if any, and `rest` what follows it."""

    text: str
    stop_string: str | None = None
    rest: str = ""


class StopMatcher:
    """Holds back the longest end of the text that may still become a stop string (Knuth, Morris, Pratt per string)."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))  # longest first: it wins a tie
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text now ends with
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that was pushed and not yet shown: a proper prefix of some stop string."""
        return self._held

    def push(self, text: str) -> StopStep:
        """Search on through `text`. After a match the matcher is spent: what was held belongs to the match."""
        if not self._held and self._first.isdisjoint(text):
            return StopStep(text)
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                self._held = ""
                return StopStep(buffer[: position - len(stop)], stop, buffer[position:])
        keep = len(buffer) - max(self._matched)
        self._held = buffer[keep:]
        return StopStep(buffer[:keep])

    def finish(self) -> str:
        """The held text, once no more comes: it is not a stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = self._fallbacks[index][length - 1]
            length += stop[length] == character
            self._matched[index] = length
            if length == len(stop):
                return stop
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of the string, the length of its longest proper end that is also its beginning."""
    lengths = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = lengths[length - 1]
        length += stop[index] == stop[length]
        lengths[index] = length
    return lengths
