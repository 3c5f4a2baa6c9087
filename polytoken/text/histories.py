"""Which committed stream belongs to which session: the memory that makes a turn's prompt go on from the turn before."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from polytoken.request import Request
from polytoken.text.committed import CommittedStream, Encoding, commit_turn, encode_turn, reply_message
from polytoken.text.ports import Tokenizer
from polytoken.text.stream import TextStream

MOST: Final = 1024  # streams remembered
MOST_IDS: Final = 1 << 22  # and ids of all of them


class PromptIds(tuple[int, ...]):
    """Prompt ids, and where they left what the session had committed (None if they extend it)."""

    history_miss: str | None = None


@dataclass(frozen=True)
class _Asked:
    request: Request
    encoding: Encoding


class Histories:
    """Streams by their ids, so that they are found again after a session was forked or restored under another name.

    Args:
        tokenizer: of the checkpoint.
        committed: the ids that a session has committed as the engine knows them, None for an unknown session.
        most: streams remembered; the one unused for longest is forgotten, and its next turn is encoded from scratch.
        refused: ids that no prompt may hold. A turn whose answer has one is not kept: its text is encoded again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        committed: Callable[[str], Sequence[int] | None],
        *,
        most: int = MOST,
        refused: Container[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._committed = committed
        self._most = most
        self._refused = refused
        self._streams: OrderedDict[bytes, CommittedStream] = OrderedDict()
        self._latest: OrderedDict[str, bytes] = OrderedDict()  # of sessions whose ids the engine does not know
        self._held = 0  # ids of all streams
        self._asked: dict[str, _Asked] = {}

    def get(self, session: str) -> CommittedStream | None:
        """What the session has committed, if it is remembered."""
        ids = self._committed(session)
        name = None if ids is None else _name(ids)
        if name not in self._streams:  # the engine forgot it, or was told of it under other ids before a restart
            name = self._latest.get(session)
        if name is None or name not in self._streams:
            return None
        self._streams.move_to_end(name)
        return self._streams[name]

    def put(self, session: str, stream: CommittedStream | None, *, ids: Sequence[int] | None = None) -> None:
        """Remember (or with None forget) a session's stream; `ids` are the engine's where it committed more."""
        self._latest.pop(session, None)
        if stream is None:
            return
        name = _name(stream.ids if ids is None else ids)
        before = self._streams.pop(name, None)
        self._held += len(stream.ids) - (0 if before is None else len(before.ids))
        self._streams[name] = stream
        self._latest[session] = name
        while len(self._latest) > self._most:
            self._latest.popitem(last=False)
        while len(self._streams) > 1 and (len(self._streams) > self._most or self._held > MOST_IDS):
            self._held -= len(self._streams.popitem(last=False)[1].ids)

    def encode(self, request: Request) -> PromptIds:
        """Prompt ids of a turn of a session; its end is expected at `watch`."""
        assert request.session is not None and request.messages is not None
        stream = self.get(request.session)
        encoding = encode_turn(self._tokenizer, request.messages, stream, think=request.think, tools=request.tools)
        ids = PromptIds(encoding.ids)
        ids.history_miss = None if encoding.parting is None else str(encoding.parting)
        self._asked = {request.request_id: _Asked(request, encoding)}  # opened right after, or refused
        return ids

    def watch(self, request: Request) -> Callable[[TextStream], None] | None:
        """What to call at the end of a request's text; None for one that was not encoded here."""
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return None

        def end(text: TextStream) -> None:
            self._end(asked, text)

        return end

    def _end(self, asked: _Asked, text: TextStream) -> None:
        request, encoding = asked.request, asked.encoding
        assert request.session is not None and request.messages is not None
        if any(token in self._refused for token in text.ids):
            self.put(request.session, None)
            return
        fields = text.answer.fields()
        stream = commit_turn(
            self._tokenizer,
            request.messages,
            encoding,
            text.ids,
            reply_message(
                content=fields["content"], reasoning=fields["reasoning"], tool_calls=fields["tool_calls"] or ()
            ),
            visible=text.text,
            think=request.think,
            tools=request.tools,
        )
        self.put(request.session, stream, ids=encoding.ids + text.ids)


def _name(ids: Sequence[int]) -> bytes:
    return sha256(array("q", ids).tobytes()).digest()
