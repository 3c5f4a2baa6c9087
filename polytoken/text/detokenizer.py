"""Token ids to text, one id at a time, exactly as one decode of all ids would give it.

Decoding the whole list at every token would cost the square of its length, and decoding tokens one by one breaks
characters and loses spaces. So a short window of the last ids is decoded, and its text is joined to text that is
settled. The window may be shortened only at a place where that provably changes nothing:

- the shorter window gives the same end of text. Its start may differ (half a character, a stripped space), so only
  the part on which both agree is used, and that part stays open to change by later ids. UTF-8 read from any byte is
  in step again after three bytes, so that for a byte-level decoder this is all there is to ask;
- for a byte-fallback decoder, which judges a run of byte tokens as a whole, no such run is open: the text ends in a
  whole character, and one more piece of a character put behind it adds exactly one replacement mark.

State, with `w` the decode of the window: decode(all ids) = settled + w[cut:].
"""

from __future__ import annotations

import copy
from typing import Final

from polytoken.text.ports import Tokenizer
from polytoken.text.profile import REPLACEMENT, Kind, decode_profile

CONTEXT: Final = 8  # ids kept when the window is shortened: enough for any character cut in two to lie at their start
WINDOW: Final = 24  # ids at which shortening is tried
RETRY: Final = 4  # ids until the next try after one that failed
MAX_PIECES: Final = 4  # a character has at most four bytes, so at most four tokens


class Detokenizer:
    """One stream of ids. `push` gives what may be shown, `text` what a full decode of all pushed ids gives.

    What was shown is never taken back. While the end of the text is an unfinished character it is held; when it
    cannot become one any more (more tokens than a character has bytes), it is shown as the replacement marks that the
    decoder writes for it. If a later id changes text that was shown, showing goes on at the first character that
    differs. For a decoder that never does so, the joined deltas and `finish` are the full decode.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._profile = decode_profile(tokenizer)
        self._skip_special = skip_special
        self._settled = ""
        self._window: list[int] = []
        self._cut = 0
        self._tail = ""  # w[cut:]
        self._shown = ""  # the part of the tail's history that was shown, aligned with its start
        self._waiting = 0  # ids since the end of the text began to be a replacement mark and nothing was shown
        self._next_try = WINDOW

    @property
    def text(self) -> str:
        """The decode of all ids pushed so far, unfinished characters as replacement marks."""
        return self._settled + self._tail

    def fork(self) -> Detokenizer:
        """An independent stream with the same past."""
        twin = copy.copy(self)
        twin._window = list(self._window)
        return twin

    def push(self, token_id: int) -> str:
        """Text that may be shown now; often empty. Ids outside the vocabulary stand for nothing."""
        kind = self._profile.kind(self._tokenizer, token_id)
        if kind is Kind.NOTHING or (kind is Kind.SPECIAL and self._skip_special):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self._tail = text[self._cut :]
        delta = self._show(self._ready())
        if len(self._window) >= self._next_try:
            self._shorten(text)
        return delta

    def finish(self) -> str:
        """What was held back, once no more ids come."""
        return self._show(self._tail)

    def _decode(self, ids: list[int]) -> str:
        # Special ids that must not show never enter a window, so nothing is left for the tokenizer to skip.
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _ready(self) -> str:
        """The tail without an end that the next ids may still turn into a character."""
        tail = self._tail
        if not tail.endswith(REPLACEMENT):
            self._waiting = 0
            return tail
        ready = tail.rstrip(REPLACEMENT)
        if len(ready) > len(self._shown):
            self._waiting = 0
        self._waiting += 1
        if self._waiting < MAX_PIECES:
            return ready
        # Not one unfinished character: at most the last mark is. The others are what the text really holds.
        self._waiting = 1
        return tail[:-1]

    def _show(self, ready: str) -> str:
        if self._shown.startswith(ready):
            return ""  # nothing new, or less than was shown: kept, since it mostly comes back with the next id
        same = len(self._shown) if ready.startswith(self._shown) else _common_prefix(ready, self._shown)
        self._shown = ready
        return ready[same:]

    def _shorten(self, text: str) -> None:
        """Drop ids from the front of the window if that cannot change what any later id decodes to."""
        self._next_try = len(self._window) + RETRY
        if not self._tail.startswith(self._shown) or not self._is_closed(text):
            return
        context = self._window[-CONTEXT:]
        shorter = self._decode(context)
        agreed = _common_suffix(shorter, self._tail)
        settled = len(self._tail) - agreed
        if agreed == 0 or agreed * 2 < len(shorter) or settled > len(self._shown):
            return
        self._settled += self._tail[:settled]
        self._tail = self._tail[settled:]
        self._shown = self._shown[settled:]
        self._cut = len(shorter) - agreed
        self._window = context
        self._next_try = WINDOW

    def _is_closed(self, text: str) -> bool:
        """Whether no run of byte tokens is open that later ids could change the meaning of."""
        if not self._profile.judges_runs:
            return True
        if text.endswith(REPLACEMENT):
            return False
        assert self._profile.partial_id is not None
        return self._decode([*self._window, self._profile.partial_id]) == text + REPLACEMENT


def _common_prefix(one: str, other: str) -> int:
    limit = min(len(one), len(other))
    return next((index for index in range(limit) if one[index] != other[index]), limit)


def _common_suffix(one: str, other: str) -> int:
    limit = min(len(one), len(other))
    return next((length for length in range(limit) if one[-1 - length] != other[-1 - length]), limit)
