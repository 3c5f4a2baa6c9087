"""Log-probabilities in OpenAI's two forms, with the exact bytes of every token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from polytoken.events import TokenLogprob

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\ufffd"


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The `content` list of a chat choice."""
    return [
        {
            **_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_entry(tokenizer, token_id, value) for token_id, value in entry.top],
        }
        for entry in _told(tokenizer, entries)
    ]


def completion_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob], *, start: int = 0) -> dict[str, Any]:
    """The `logprobs` object of a completion choice; `start` is the offset in characters of its first token."""
    entries = _told(tokenizer, entries)
    texts = [text_of(tokenizer, entry.token_id) for entry in entries]
    offsets, at = [], start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {text_of(tokenizer, token_id): value for token_id, value in reversed(entry.top)} for entry in entries
        ],
        "text_offset": offsets,
    }


def _told(tokenizer: Any, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """All tokens but the one that ends an answer, which clients do not see."""
    ends = frozenset(tokenizer.eos_ids)
    return [entry for entry in entries if entry.token_id not in ends]


def _entry(tokenizer: Any, token_id: int, value: float) -> dict[str, Any]:
    return {"token": text_of(tokenizer, token_id), "logprob": value, "bytes": list(bytes_of(tokenizer, token_id))}


def text_of(tokenizer: Any, token_id: int) -> str:
    """The token's text; OpenAI's `bytes:\\xe2` form where it is part of a character only."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    if _REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes_of(tokenizer, token_id))


def bytes_of(tokenizer: Any, token_id: int) -> bytes:
    """The token's bytes, also where they are no whole character."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    if _REPLACEMENT not in text:
        return text.encode()
    spelled = tokenizer.token(token_id) or ""
    fallback = _BYTE_TOKEN.fullmatch(spelled)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in spelled):
        return bytes(alphabet[character] for character in spelled)
    return text.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable Latin-1 as itself, the rest moved up to U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return {chr(byte) if byte in printable else chr(next(moved)): byte for byte in range(256)}
