"""What a request's tool list says about the arguments of a call."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_WHOLE: Final = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_STRINGS: Final = frozenset({"string", "str", "text", "enum"})
_INTEGERS: Final = ("int", "uint", "long", "short", "unsigned")


class ArgumentTypes:
    """The declared type of each argument of each tool, in lower case; a tool or argument may be unknown."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._types: dict[str, dict[str, str]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                continue
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            self._types[function["name"]] = {
                key: _type_of(value) for key, value in (properties if isinstance(properties, Mapping) else {}).items()
            }

    def knows(self, name: str) -> bool:
        """Whether a tool of this name was declared."""
        return name in self._types

    def integers(self, name: str) -> frozenset[str]:
        """Arguments of a tool that are whole numbers."""
        return frozenset(key for key, kind in self._types.get(name, {}).items() if kind.startswith(_INTEGERS))

    def is_text(self, name: str, key: str) -> bool:
        """Whether an argument is text whatever it looks like: declared so, or not declared at all."""
        return self._types.get(name, {}).get(key, "string") in _STRINGS

    def convert(self, name: str, key: str, text: str) -> str:
        """The JSON of an argument written as plain text: of its declared type if that loses nothing, else a string."""
        kind = self._types.get(name, {}).get(key, "string")
        converted = None if kind in _STRINGS else _convert(kind, text.strip())
        return json.dumps(text, ensure_ascii=False) if converted is None else converted


def _type_of(value: object) -> str:
    declared = value.get("type") if isinstance(value, Mapping) else None
    return declared.strip().lower() if isinstance(declared, str) else ""


def _convert(kind: str, text: str) -> str | None:
    if text.lower() in ("null", "none"):
        return "null"
    if kind.startswith(_INTEGERS):
        whole = _WHOLE.fullmatch(text)
        return whole[1] if whole else None
    if kind.startswith(("num", "float", "double")):
        return text if _NUMBER.fullmatch(text) else None
    if kind.startswith("bool"):
        return text.lower() if text.lower() in ("true", "false") else None
    return _structure(text)


def _structure(text: str) -> str | None:
    """The JSON of a list or object written in JSON or in Python's way."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            if isinstance(value, (dict, list)):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return None
