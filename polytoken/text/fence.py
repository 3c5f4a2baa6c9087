"""Fenced blocks of Markdown: what stands in one quotes markup and is none."""

from __future__ import annotations

from typing import Final

_FENCE: Final = "```"
_FENCE_COLUMNS: Final = 6  # three spaces and the fence


class CodeFence:
    """Whether a text stands inside a fenced block, and whether at the start of a line, so far."""

    def __init__(self) -> None:
        self.is_open = False
        self._line = ""  # the beginning of the current line, as far as it can still be a fence

    @property
    def at_line_start(self) -> bool:
        """Whether the current line holds nothing but spaces."""
        return not self._line.strip()

    def push(self, text: str) -> None:
        """More of the text."""
        for character in text:
            if character == "\n":
                self._line = ""
            elif len(self._line) < _FENCE_COLUMNS:
                self._line += character
                if self._line.lstrip(" ") == _FENCE:
                    self.is_open = not self.is_open
                    self._line = "." * _FENCE_COLUMNS  # a fence counts once in its line
