"""The prompts of the oracle: the same words for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polytoken.errors import UsageError

PING: Final = "ping"
SUMMARISE: Final = "Give a summary of the following text:\n\n"
STORY: Final = "Tell me a complete short story about a lighthouse keeper. Do not ask questions."
CODE: Final = "Write a Python function is_prime(n: int) -> bool, followed by five assert examples. No tools."
FOLLOW_UPS: Final = (STORY, CODE)


def first_prompt(readme: Path | None) -> str:
    """One word, or the instruction to summarise a text."""
    return PING if readme is None else SUMMARISE + read_text(readme, flag="--readme")


def suffix_prompts(text: Path) -> tuple[str, str, str]:
    """Three user turns of different lengths."""
    return (STORY, SUMMARISE + read_text(text, flag="--restored-suffixes"), CODE)


def read_text(path: Path, *, flag: str) -> str:
    """A file's text.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag}: cannot read {str(path)!r}: {reason}", field=flag) from None
