"""The inside of a tool call, in the three forms that models write, read while it comes."""

from __future__ import annotations

import json
from typing import Final, Protocol

from polytoken.text.stops import StopMatcher
from polytoken.text.toolcalls.markup import ToolMarkup
from polytoken.text.toolcalls.relaxed import (
    SPACE,
    Characters,
    Emit,
    Malformed,
    Reading,
    escape,
    read_object,
    read_text,
    read_value,
)
from polytoken.text.toolcalls.schema import ArgumentTypes

MAX_HELD: Final = 4096  # characters of one argument that are held until its type is certain
MAX_NAME: Final = 128
_PARAMETER_END: Final = "</parameter>"
_ARGUMENTS: Final = ("arguments", "parameters")


class Calls(Protocol):
    """Where a reader reports what it finds."""

    def begin(self, name: str) -> None:
        """A call of this tool; from here on the text belongs to it."""
        ...

    def argue(self, text: str) -> None:
        """More of the arguments' JSON."""
        ...

    def end(self) -> None:
        """The arguments are complete."""
        ...


def read_calls(source: Characters, calls: Calls, *, markup: ToolMarkup, types: ArgumentTypes) -> Reading[None]:
    """Everything up to and including the closing tag; several calls may stand between two tags."""
    read_one = _read_tagged if markup.quote is None else _read_gemma
    first = yield from source.take_solid()
    while True:
        yield from read_one(source, first, calls, markup, types)
        first = yield from source.take_solid()
        if first == "}" and markup.quote is None:  # one brace too many, a slip that small models make
            first = yield from source.take_solid()
        if first == markup.closing[0]:
            second = yield from source.take()
            source.put_back(second)
            if second == markup.closing[1]:  # not another call, in the form that begins like the tag
                break
    yield from source.expect(markup.closing[1:])


def _read_tagged(
    source: Characters, first: str, calls: Calls, markup: ToolMarkup, types: ArgumentTypes
) -> Reading[None]:
    if first == "{":
        yield from _read_json_call(source, calls, types)
    elif first == "<":
        yield from _read_xml_call(source, calls, types)
    else:
        raise Malformed


def _read_json_call(source: Characters, calls: Calls, types: ArgumentTypes) -> Reading[None]:
    """`"name": ..., "arguments": {...}}` in any order; other members are read over."""
    name: str | None = None
    begun = False
    waiting: list[str] | None = None  # arguments that came before the name
    first = yield from source.take_solid()
    while first != "}":
        key = yield from read_text(source, first)
        if (yield from source.take_solid()) != ":":
            raise Malformed
        first = yield from source.take_solid()
        if key == "name" and name is None:
            name = _checked((yield from read_text(source, first)))
        elif key in _ARGUMENTS and not begun and waiting is None:
            if name is None:
                waiting = []
                yield from _read_arguments(source, first, waiting.append, frozenset())
            else:
                calls.begin(name)
                begun = True
                yield from _read_arguments(source, first, calls.argue, types.integers(name))
                calls.end()
        else:
            yield from read_value(source, first, _nothing, quote=None)
        after = yield from source.take_solid()
        if after == "}":
            break
        if after == "<" and begun:  # a brace too few
            source.put_back(after)
            return
        if after != ",":
            raise Malformed
        first = yield from source.take_solid()
    if name is None:
        raise Malformed
    if not begun:
        calls.begin(name)
        calls.argue("".join(waiting) if waiting else "{}")
        calls.end()


def _read_arguments(source: Characters, first: str, emit: Emit, integers: frozenset[str]) -> Reading[None]:
    """An object, or one written into a string, or null for none."""
    if first == "{":
        yield from read_object(source, emit, quote=None, integers=integers)
        return
    parts: list[str] = []
    yield from read_value(source, first, parts.append, quote=None)
    text = "".join(parts)
    inner = json.loads(text) if first in "\"'" else None
    if isinstance(inner, str) and _is_object(inner):
        emit(inner)
    elif text == "null":
        emit("{}")
    else:
        emit(text)
        raise Malformed


def _read_xml_call(source: Characters, calls: Calls, types: ArgumentTypes) -> Reading[None]:
    """`function=name>`, any number of `<parameter=key>value</parameter>`, `</function>`; the first `<` is gone."""
    yield from source.expect("function=")
    name = _checked((yield from _read_to_bracket(source)))
    calls.begin(name)
    opening = "{"
    while True:
        if (yield from source.take_solid()) != "<":
            raise Malformed
        second = yield from source.take()
        if second == "/":
            yield from source.expect("function>")
            calls.argue("{}" if opening == "{" else "}")
            calls.end()
            return
        source.put_back(second)
        yield from source.expect("parameter=")
        key = yield from _read_to_bracket(source)
        calls.argue(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        if types.is_text(name, key):
            calls.argue('"')
            yield from _read_parameter(source, calls.argue)
            calls.argue('"')
        else:
            yield from _read_typed_parameter(source, calls, types, name, key)


def _read_to_bracket(source: Characters) -> Reading[str]:
    text = ""
    while True:
        character = yield from source.take()
        if character == ">":
            return text.strip()
        text += character
        if character == "<" or len(text) > MAX_NAME:
            raise Malformed


def _read_parameter(source: Characters, emit: Emit) -> Reading[None]:
    """The text of a parameter, escaped for JSON, less one line break at each end."""
    first = yield from source.take()
    matcher = StopMatcher([_PARAMETER_END])
    held = ""  # a line break that may be the last character
    step = matcher.push("" if first == "\n" else first)
    while True:
        if step.text:
            text, held = held + step.text, ""
            if text.endswith("\n"):
                text, held = text[:-1], "\n"
            emit(escape(text))
        if step.stop_string is not None:
            return
        step = matcher.push((yield from source.take()))


def _read_typed_parameter(source: Characters, calls: Calls, types: ArgumentTypes, name: str, key: str) -> Reading[None]:
    """A parameter that is no text; it is held to its end, for only then is certain what it is."""
    first = yield from source.take()
    matcher = StopMatcher([_PARAMETER_END])
    step = matcher.push("" if first == "\n" else first)
    text = step.text
    while step.stop_string is None:
        step = matcher.push((yield from source.take()))
        text += step.text
        if len(text) > MAX_HELD:
            calls.argue(json.dumps(text + matcher.finish(), ensure_ascii=False)[:-1])
            raise Malformed
    calls.argue(types.convert(name, key, text.removesuffix("\n")))


def _read_gemma(
    source: Characters, first: str, calls: Calls, markup: ToolMarkup, types: ArgumentTypes
) -> Reading[None]:
    """`call:name{...}`."""
    if first != "c":
        raise Malformed
    yield from source.expect("all:")
    name = ""
    while (character := (yield from source.take())) != "{":
        name += character
        if character in SPACE or len(name) > MAX_NAME:
            raise Malformed
    calls.begin(_checked(name))
    yield from read_object(source, calls.argue, quote=markup.quote, integers=types.integers(name))
    calls.end()


def _checked(name: str) -> str:
    """A name that a tool can have."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise Malformed
    return name


def _is_object(text: str) -> bool:
    try:
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _nothing(_: str) -> None:
    return None
