"""From the nearly-JSON that models write to JSON, character by character, without ever taking anything back.

Read are also: single quotes, bare keys, a comma before a closing bracket, Python's True, False and None, raw line
breaks in strings, and strings between marks of their own (Gemma). What comes out is strict JSON of the same value.
Anything else is `Malformed`.

Readers are generators that are sent one character at a time; `yield from` nests them as the grammar nests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from polytoken.text.stops import StopMatcher

T = TypeVar("T")
Reading = Generator[None, str, T]
Emit = Callable[[str], None]

MAX_DEPTH: Final = 64  # brackets inside brackets
MAX_LITERAL: Final = 400  # characters of a number or a word
SPACE: Final = " \t\r\n"
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WHOLE: Final = re.compile(r"(-?[0-9]+)\.0+")
_BARE_KEY: Final = re.compile(r"[\w$][\w$.-]*")


class Malformed(Exception):  # noqa: N818  (no error of the caller's)
    """The text is not what the reader expects."""


class Characters:
    """The characters that are sent in, with one that may be put back."""

    def __init__(self) -> None:
        self._back = ""

    def take(self) -> Reading[str]:
        """The next character."""
        if self._back:
            character, self._back = self._back, ""
        else:
            character = yield
        return character

    def take_solid(self) -> Reading[str]:
        """The next character that is not white space."""
        while True:
            character = yield from self.take()
            if character not in SPACE:
                return character

    def put_back(self, character: str) -> None:
        """Let the next `take` give this again."""
        self._back = character

    def expect(self, text: str) -> Reading[None]:
        """Exactly this text."""
        for wanted in text:
            if (yield from self.take()) != wanted:
                raise Malformed


def read_value(
    source: Characters, first: str, emit: Emit, *, quote: str | None, depth: int = 0, integer: bool = False
) -> Reading[None]:
    """One value that begins with `first`; its JSON goes to `emit` as it becomes certain.

    Args:
        quote: the mark around strings, None for JSON's.
        integer: whether a number such as 5.0 is meant as 5.
    """
    if depth > MAX_DEPTH:
        raise Malformed
    if first == "{":
        yield from read_object(source, emit, quote=quote, depth=depth)
    elif first == "[":
        yield from _read_array(source, emit, quote=quote, depth=depth)
    elif first in "\"'":
        yield from _read_string(source, first, emit)
    elif quote is not None and first == quote[0]:
        yield from source.expect(quote[1:])
        yield from _read_marked_string(source, quote, emit)
    else:
        yield from _read_literal(source, first, emit, bare=quote is not None, integer=integer)


def read_object(
    source: Characters,
    emit: Emit,
    *,
    quote: str | None,
    depth: int = 0,
    integers: frozenset[str] = frozenset(),
) -> Reading[None]:
    """The rest of an object behind its opening brace; `integers` names its members that are whole numbers."""
    emit("{")
    comma = ""
    while True:
        first = yield from source.take_solid()
        if first == "}":
            emit("}")
            return
        emit(comma)
        key = yield from _read_key(source, first, quote=quote)
        emit(_spell(key))
        yield from _expect_solid(source, ":")
        emit(": ")
        first = yield from source.take_solid()
        yield from read_value(source, first, emit, quote=quote, depth=depth + 1, integer=key in integers)
        after = yield from source.take_solid()
        if after == "}":
            emit("}")
            return
        if after != ",":
            raise Malformed
        comma = ", "


def read_text(source: Characters, first: str) -> Reading[str]:
    """A quoted string's value, whole."""
    if first not in "\"'":
        raise Malformed
    parts: list[str] = []
    yield from _read_string(source, first, parts.append)
    value: str = json.loads("".join(parts))
    return value


def escape(text: str) -> str:
    """Text as it stands between the quotation marks of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _spell(key: str) -> str:
    """A key in JSON; half a surrogate pair, which an escape can name, stays an escape."""
    text = json.dumps(key, ensure_ascii=False)
    return json.dumps(key) if any("\ud800" <= character <= "\udfff" for character in text) else text


def _expect_solid(source: Characters, wanted: str) -> Reading[None]:
    if (yield from source.take_solid()) != wanted:
        raise Malformed


def _read_array(source: Characters, emit: Emit, *, quote: str | None, depth: int) -> Reading[None]:
    emit("[")
    comma = ""
    while True:
        first = yield from source.take_solid()
        if first == "]":
            emit("]")
            return
        emit(comma)
        yield from read_value(source, first, emit, quote=quote, depth=depth + 1)
        after = yield from source.take_solid()
        if after == "]":
            emit("]")
            return
        if after != ",":
            raise Malformed
        comma = ", "


def _read_key(source: Characters, first: str, *, quote: str | None) -> Reading[str]:
    if first in "\"'":
        key = yield from read_text(source, first)
        return key
    if quote is not None and first == quote[0]:
        parts: list[str] = []
        yield from source.expect(quote[1:])
        yield from _read_marked_string(source, quote, parts.append)
        marked: str = json.loads("".join(parts))
        return marked
    bare = first
    while len(bare) <= MAX_LITERAL:
        if not _BARE_KEY.fullmatch(bare):
            raise Malformed
        character = yield from source.take()
        if character == ":" or character in SPACE:
            source.put_back(character)
            return bare
        bare += character
    raise Malformed


def _read_string(source: Characters, mark: str, emit: Emit) -> Reading[None]:
    emit('"')
    while True:
        character = yield from source.take()
        if character == mark:
            emit('"')
            return
        if character == "\\":
            emit((yield from _read_escape(source)))
        else:
            emit(escape(character))


def _read_escape(source: Characters) -> Reading[str]:
    character = yield from source.take()
    if character == "u":
        digits = ""
        for _ in range(4):
            digits += yield from source.take()
        if not re.fullmatch("[0-9a-fA-F]{4}", digits):
            raise Malformed
        return f"\\u{digits}"
    if character in '"\\/bfnrt':
        return f"\\{character}"
    # No escape of JSON's: a quote needs none, of anything else (a regular expression's \d) the backslash is meant.
    return character if character == "'" else "\\\\" + escape(character)


def _read_marked_string(source: Characters, mark: str, emit: Emit) -> Reading[None]:
    emit('"')
    matcher = StopMatcher([mark])
    while True:
        step = matcher.push((yield from source.take()))
        emit(escape(step.text))
        if step.stop_string is not None:
            emit('"')
            return


def _read_literal(source: Characters, first: str, emit: Emit, *, bare: bool, integer: bool) -> Reading[None]:
    text = first
    if first in ",:]}":
        raise Malformed
    while True:
        character = yield from source.take()
        if character in ",]}" or (character in SPACE and not bare):
            source.put_back(character)
            break
        text += character
        if len(text) > MAX_LITERAL:
            raise Malformed
    text = text.strip()
    whole = _WHOLE.fullmatch(text)
    if text in _WORDS:
        emit(_WORDS[text])
    elif whole is not None and integer:
        emit(whole[1])
    elif _NUMBER.fullmatch(text):
        emit(text)
    elif bare:
        emit(json.dumps(text, ensure_ascii=False))  # a string without its marks
    else:
        raise Malformed
