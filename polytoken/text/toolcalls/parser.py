"""Tool calls told apart from the answer around them, while the text comes and wherever it is cut.

The rules:

- A call begins when its name is certain, and its arguments come as strict JSON, piece by piece.
- What opens like a call and is none (a quoted tag, prose, a name that never comes) is content, with its tags. Held back
  meanwhile is at most `MAX_HEAD` characters.
- Behind a code fence the opening tag is text.
- Arguments that stop being readable after the call has begun go on as they stand, up to the closing tag, and the call
  is marked as not valid. So is one that the text breaks off in.
- Every character of content keeps its place; nothing but well-formed markup is dropped.

So the result depends on the text alone, not on how it is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from polytoken.events import ToolCall, ToolCallDelta, ToolCallSum
from polytoken.text.fence import CodeFence
from polytoken.text.stops import StopMatcher
from polytoken.text.toolcalls.markup import ToolMarkup
from polytoken.text.toolcalls.reader import read_calls
from polytoken.text.toolcalls.relaxed import SPACE, Characters, Malformed, Reading
from polytoken.text.toolcalls.schema import ArgumentTypes

MAX_HEAD: Final = 4096  # characters that may be held in front of a call's name
Piece = str | ToolCallDelta  # content, or a step of a call


class ToolCallParser:
    """Splits an answer into content and calls. One parser per answer.

    Args:
        markup: how the model writes calls.
        tools: what the request declared, in the form of the OpenAI API; types of arguments come from there.
        call_id: beginning of the calls' ids; the number of the call follows.
    """

    def __init__(self, markup: ToolMarkup, *, tools: Sequence[Mapping[str, Any]] = (), call_id: str = "call_") -> None:
        self._markup = markup
        self._types = ArgumentTypes(tools)
        self._call_id = call_id
        self._count = 0  # calls begun
        self._open = False  # the latest of them has not ended
        self._pieces: list[Piece] = []
        self._seek = StopMatcher([markup.opening])
        self._fence = CodeFence()
        self._reading: Reading[None] | None = None  # inside the tags
        self._fruitful = False  # a call has begun between these tags
        self._unsaid: list[str] = []  # read inside the tags since a call last gained something by it
        self._spoiled: StopMatcher | None = None  # looks for the closing tag of a call that cannot be read

    @property
    def inside(self) -> bool:
        """Whether the text stands between tags."""
        return self._reading is not None or self._spoiled is not None

    def wants(self, mark: str) -> bool:
        """Whether a control token with this text would mean something here."""
        return mark in self._markup.marks and (self.inside or mark == self._markup.opening)

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of text; what became certain by it, in order."""
        self._take(text)
        return self._gains()

    def mark(self, mark: str) -> list[Piece]:
        """Take a control token that `wants` asked for. It is never a quotation, so a code fence doesn't count."""
        if self.inside:
            return self.push(mark)
        self._content(self._seek.finish())
        self._enter()
        return self._gains()

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes."""
        while self._reading is not None and not self._open:
            self._take(self._give_up())
        if self._spoiled is not None:
            self.argue(self._spoiled.finish())
        elif self._open:
            self.argue("".join(self._unsaid))
        else:
            self._content(self._seek.finish())
        if self._open:
            self.end(valid=False)
        self._reading = self._spoiled = None
        return self._gains()

    # -- what the reader of a call reports ---------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A call of this tool; from here on the text belongs to it."""
        self._open = self._fruitful = True
        self._unsaid.clear()
        delta = ToolCallDelta(
            index=self._count, call_id=f"{self._call_id}{self._count}", name=name, declared=self._types.knows(name)
        )
        self._count += 1
        self._pieces.append(delta)

    def argue(self, text: str) -> None:
        """More of the arguments' JSON."""
        if not text:
            return
        self._unsaid.clear()
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ToolCallDelta) and last.index == self._count - 1:
            self._pieces[-1] = replace(last, arguments=last.arguments + text)
        else:
            self._pieces.append(ToolCallDelta(index=self._count - 1, arguments=text))

    def end(self, *, valid: bool = True) -> None:
        """The arguments are complete, or cannot be any more."""
        self._open = False
        self._unsaid.clear()
        self._pieces.append(ToolCallDelta(index=self._count - 1, done=True, valid=valid))

    # -- the three places where text can stand ---------------------------------------------------------------------

    def _take(self, text: str) -> None:
        while text:
            if self._reading is not None:
                text = self._read(self._reading, text)
            elif self._spoiled is not None:
                text = self._pass_on(self._spoiled, text)
            else:
                text = self._search(text)

    def _search(self, text: str) -> str:
        """Outside the tags: the text behind the next opening tag."""
        step = self._seek.push(text)
        self._content(step.text)
        if step.stop_string is None:
            return ""
        if self._fence.is_open:
            self._seek = StopMatcher([self._markup.opening])
            self._content(self._markup.opening)
        else:
            self._enter()
        return step.rest

    def _read(self, reading: Reading[None], text: str) -> str:
        """Between the tags: the text that the reader leaves."""
        for position, character in enumerate(text, start=1):
            self._unsaid.append(character)
            try:
                reading.send(character)
            except StopIteration:
                self._reading = None
                return text[position:]
            except Malformed:
                return self._turn_away() + text[position:]
            if not self._open and len(self._unsaid) > MAX_HEAD:
                return self._give_up() + text[position:]
        return ""

    def _pass_on(self, closing: StopMatcher, text: str) -> str:
        """In a call that cannot be read: its text goes on up to the closing tag."""
        step = closing.push(text)
        self.argue(step.text)
        if step.stop_string is None:
            return ""
        self._spoiled = None
        self.end(valid=False)
        return step.rest

    def _enter(self) -> None:
        self._seek = StopMatcher([self._markup.opening])
        self._unsaid.clear()
        self._fruitful = False
        self._reading = read_calls(Characters(), self, markup=self._markup, types=self._types)
        next(self._reading)

    def _turn_away(self) -> str:
        """The reader cannot go on: text to take again."""
        if not self._open:
            return self._give_up()
        self._reading = None
        self._spoiled = StopMatcher([self._markup.closing])
        return "".join(self._unsaid)

    def _give_up(self) -> str:
        """What was read is no call: text to take again, as content."""
        self._reading = None
        text = "".join(self._unsaid)
        self._unsaid.clear()
        if not self._fruitful:
            self._content(self._markup.opening)
            return text
        return text if text.strip(SPACE + "}") else ""  # the end of a call whose closing tag never came

    # -- what leaves -------------------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        if not text:
            return
        self._fence.push(text)
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, str):
            self._pieces[-1] = last + text
        else:
            self._pieces.append(text)

    def _gains(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def parse_tool_calls(
    text: str, markup: ToolMarkup, *, tools: Sequence[Mapping[str, Any]] = (), call_id: str = "call_"
) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of a complete answer."""
    parser = ToolCallParser(markup, tools=tools, call_id=call_id)
    pieces = [*parser.push(text), *parser.finish()]
    calls = ToolCallSum()
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            calls.add(piece)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls.calls
