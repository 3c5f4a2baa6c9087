"""Watching an answer come into being: how far its prompt is, what every step gave, and a canvas settling.

A chat that says `"polytoken": {"watch": true}` gets, among its chunks, some with an empty delta and a member
`polytoken`. A lane has one observer of each kind: while somebody watches it is `Watchers`, which tells requests apart.
The engine never waits for a spectator; of the frames that a slow one has not read yet, it gets the newest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakValueDictionary

from polytoken.errors import PolytokenError
from polytoken.events import Event, Token
from polytoken.request import Request
from polytoken.server.errors import from_engine
from polytoken.text.detokenizer import Detokenizer
from polytoken.text.pieces import split_pieces

if TYPE_CHECKING:
    from polytoken.engine import LoadedLane
    from polytoken.lanes.canvas.watch import CanvasFrame
    from polytoken.server.pool import Model
    from polytoken.server.turn import Member, Turn

_CONTEXT: Final = 8  # committed ids in front of a canvas, so that its first ids decode as they will
_SECONDS: Final = 0.05  # between two frames of a request


@dataclass(frozen=True, kw_only=True)
class PromptRead(Event):
    """So many tokens of the prompt are encoded or restored."""

    event: ClassVar[str] = "prompt_read"
    done: int
    of: int


@dataclass(frozen=True, kw_only=True)
class CanvasSeen(Event):
    """A canvas after a denoise."""

    event: ClassVar[str] = "canvas_seen"
    frame: CanvasFrame


class Watchers:
    """Everyone who watches requests of one engine."""

    def __init__(self) -> None:
        self.watches: WeakValueDictionary[str, Watch] = WeakValueDictionary()  # by request; gone with their calls
        self._loaded: LoadedLane | None = None

    def look(self, loaded: LoadedLane) -> None:
        """Become the lane's observer. On the owner thread, like what follows."""
        self._loaded = loaded
        loaded.lane.prefill_observer = self._on_prompt
        if loaded.lane.name == "canvas":
            loaded.lane.observer = self._on_frame  # type: ignore[attr-defined]

    def _find(self, request_id: str) -> Watch | None:
        """The request's watch; without any the lane is left alone again, since frames are not free."""
        if not self.watches and self._loaded is not None:
            self._loaded.lane.prefill_observer = None
            if self._loaded.lane.name == "canvas":
                self._loaded.lane.observer = None  # type: ignore[attr-defined]
            self._loaded = None
        return self.watches.get(request_id)

    def _on_prompt(self, request_id: str, done: int, of: int) -> None:
        watch = self._find(request_id)
        if watch is not None:
            watch.show(request_id, PromptRead(done=done, of=of))

    def _on_frame(self, frame: CanvasFrame) -> None:
        watch = self._find(frame.request_id)
        if watch is not None:
            watch.show_frame(frame)


class Watch:
    """One call's view of its requests.

    Attributes:
        turn: of the call, once it is queued.
    """

    def __init__(self, model: Model, requests: Sequence[Request]) -> None:
        self.turn: Turn | None = None
        self._tokenizer = model.tokenizer
        self._places = {request.request_id: index for index, request in enumerate(requests)}
        self._newest: dict[str, CanvasSeen] = {}
        self._shown_at: dict[str, float] = {}
        self._committed: dict[int, deque[int]] = {index: deque(maxlen=_CONTEXT) for index in self._places.values()}

    def show(self, request_id: str, event: Event) -> None:
        """Put what was seen among the request's events. On the owner thread."""
        if self.turn is not None:
            self.turn.show(self._places[request_id], event)

    def show_frame(self, frame: CanvasFrame) -> None:
        """The same, unless one was shown a moment ago."""
        now = time.monotonic()
        if now - self._shown_at.get(frame.request_id, -1.0) >= _SECONDS:
            self._shown_at[frame.request_id] = now
            seen = self._newest[frame.request_id] = CanvasSeen(frame=frame)
            self.show(frame.request_id, seen)

    def record(self, member: Member, event: Event) -> dict[str, Any] | None:
        """What a chunk says of the event; None for nothing."""
        if isinstance(event, PromptRead):
            return {"prompt": {"done": event.done, "of": event.of}}
        if isinstance(event, Token):
            self._committed[member.index].extend(event.token_ids)
            steps = {} if event.denoise_steps is None else {"denoise_steps": event.denoise_steps}
            return {"progress": {"tokens": event.generated_tokens, "forwards": event.forwards, **steps}}
        if isinstance(event, CanvasSeen) and self._newest.get(event.frame.request_id) is event:
            return {"canvas": self._canvas(member.index, event.frame)}
        return None

    def _canvas(self, index: int, frame: CanvasFrame) -> dict[str, Any]:
        """A canvas by its positions: text, percent of confidence, and whether each would have been committed."""
        size = frame.remaining
        port = _Ids(Detokenizer(self._tokenizer, skip_special=False))
        undecided = frame.entropy[frame.committed : size]
        return {
            "step": frame.denoise_steps,
            "tokens": frame.generated_tokens,
            "committed": frame.committed,
            "pieces": split_pieces(port, tuple(self._committed[index]), frame.token_ids[:size]),
            "confidence": [round(100 * value) for value in frame.confidence[:size]],
            "likely": [int(value) for value in frame.likely[:size]],
            "entropy": round(sum(undecided) / len(undecided), 3) if undecided else None,
        }


class _Ids:
    """A text of ids, special ones included."""

    def __init__(self, text: Detokenizer) -> None:
        self._text = text

    def push(self, ids: tuple[int, ...]) -> None:
        for token_id in ids:
            self._text.push(token_id)

    @property
    def full_text(self) -> str:
        return self._text.text


async def watch_requests(model: Model, requests: Sequence[Request]) -> Watch:
    """A watch of requests that are about to be queued.

    Raises:
        ApiError: 503, the engine takes nothing.
    """
    watch = Watch(model, requests)
    for request in requests:
        model.watchers.watches[request.request_id] = watch
    try:
        await asyncio.to_thread(model.engine.call, model.watchers.look)
    except PolytokenError as error:
        raise from_engine(error) from None
    return watch
