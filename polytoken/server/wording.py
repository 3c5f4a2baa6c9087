"""An error about the chat that a call was made into, told in the words that the caller wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from polytoken.server.errors import ApiError

_CUTS: Final = re.compile(r"[.\[]")


class Wording:
    """Where each part of a chat comes from: `messages[2].content` from `input[1].output`.

    What has no name of its own is called after the part that holds it; what no name covers keeps ours.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, ours: str, theirs: str) -> None:
        """Tell of `ours`, and what is inside, as `theirs`."""
        self._names[ours] = theirs

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors that the block raises name what the caller wrote."""
        try:
            yield
        except ApiError as error:
            if error.param is not None:
                error.rename(self._theirs(error.param))
            raise

    def _theirs(self, place: str) -> str:
        for end in [len(place), *reversed([cut.start() for cut in _CUTS.finditer(place)])]:
            found = self._names.get(place[:end])
            if found is not None:
                return found + place[end:]
        return place
