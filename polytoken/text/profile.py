"""How a tokenizer decodes, found out once per tokenizer by asking it.

Nothing here looks inside a tokenizer: the same questions work for byte-level BPE, byte fallback and adapters that only
offer `encode` and `decode`.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Final

from polytoken.text.ports import Tokenizer

REPLACEMENT: Final = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character

# Rare characters that no vocabulary merges into one token, so that their pieces are raw bytes.
_RARE: Final = ("\U000133f7", "\U0010fffd", "\u1e97")


class Kind(Enum):
    """What `decode` does with an id: writes it, drops it as special on request, or never writes anything for it."""

    TEXT = "text"
    SPECIAL = "special"
    NOTHING = "nothing"


class DecodeProfile:
    """Answers about one tokenizer, remembered.

    Attributes:
        partial_id: an id that stands for part of a character only, or None when the vocabulary has none.
        judges_runs: whether a run of byte tokens is decoded as a whole, so that one bad byte spoils whole characters
            in front of it (byte fallback). Otherwise bytes are decoded one character after another.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.partial_id, self.judges_runs = _find_partial(tokenizer)
        self._kinds: dict[int, Kind] = {}

    def kind(self, tokenizer: Tokenizer, token_id: int) -> Kind:
        """The kind of any integer, in the vocabulary or not."""
        known = self._kinds.get(token_id)
        if known is None:
            known = self._kinds[token_id] = _find_kind(tokenizer, token_id)
        return known


def decode_profile(tokenizer: Tokenizer) -> DecodeProfile:
    """The profile of a tokenizer, made at the first call and kept as long as the tokenizer lives."""
    key = id(tokenizer)
    entry = _PROFILES.get(key)
    if entry is not None and entry[0]() is tokenizer:
        return entry[1]
    profile = DecodeProfile(tokenizer)
    try:
        reference = weakref.ref(tokenizer, lambda _: _PROFILES.pop(key, None))
    except TypeError:
        return profile  # an adapter without weak references: asked again at each request
    _PROFILES[key] = (reference, profile)
    return profile


# Keyed by identity: a tokenizer need not be hashable, and equality of two of them would be costly.
_PROFILES: dict[int, tuple[weakref.ref[Tokenizer], DecodeProfile]] = {}


def _find_kind(tokenizer: Tokenizer, token_id: int) -> Kind:
    if token_id < 0:
        return Kind.NOTHING
    # Both sources count: a tokenizer's list of named special tokens may lack added ones that its decoder drops.
    kept = tokenizer.decode([token_id], skip_special_tokens=False)
    if token_id >= tokenizer.vocab_size and not kept:
        return Kind.NOTHING
    if token_id in tokenizer.special_ids or (kept and not tokenizer.decode([token_id], skip_special_tokens=True)):
        return Kind.SPECIAL
    return Kind.TEXT


def _find_partial(tokenizer: Tokenizer) -> tuple[int | None, bool]:
    for character in _RARE:
        ids = tokenizer.encode(character, add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if character not in text:
            continue
        for token_id in ids:
            if tokenizer.decode([token_id], skip_special_tokens=False) == REPLACEMENT:
                spoiled = tokenizer.decode([*ids, token_id], skip_special_tokens=False)
                return token_id, spoiled != text + REPLACEMENT
    return None, False
