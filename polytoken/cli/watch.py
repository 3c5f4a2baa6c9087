"""`polytoken generate --watch`: a canvas settling, on a terminal.

The lane's observer leaves each frame where the screen's own thread finds the latest one; the engine never waits for the
screen. What is committed is plain. Of the rest, ids that would be committed if only their own risk counted are coloured
by confidence, other ids that are at all probable are faint, and undecided positions are dots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from polytoken.cli.terminal import SHOWN_CONTROLS
from polytoken.errors import UsageError
from polytoken.events import Event, GenerationFailed, GenerationResult, RequestRejected
from polytoken.text.pieces import split_pieces

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

    from polytoken.engine import Engine, LoadedLane, TextPort
    from polytoken.lanes.canvas.lane import CanvasLane
    from polytoken.lanes.canvas.watch import CanvasFrame
    from polytoken.request import Request

DOT: Final = "\u00b7"
_CONTEXT: Final = 8  # committed ids in front of a canvas, so that its first ids decode as they will
_PER_SECOND: Final = 12.0
_COLOURS: Final = ((0.9, "green"), (0.6, "yellow"), (0.0, "dark_orange"))  # of likely ids, by least confidence
_FAINT: Final = 0.3  # least confidence at which an undecided id is shown
_IN_A_CANVAS: Final = {**SHOWN_CONTROLS, ord("\n"): "\u21b5", ord("\t"): " "}  # what is not final must not move lines


def paint(frame: CanvasFrame, pieces: Sequence[str]) -> Text:
    """The canvas of one frame, from the text of each of its positions."""
    from rich.text import Text  # noqa: PLC0415

    canvas = Text()
    for j, piece in enumerate(pieces[: frame.remaining]):
        if j < frame.committed:
            canvas.append(piece.translate(SHOWN_CONTROLS))
            continue
        shown, confidence = piece.translate(_IN_A_CANVAS), frame.confidence[j]
        if frame.likely[j] and shown:
            canvas.append(shown, style=next(colour for least, colour in _COLOURS if confidence >= least))
        elif confidence >= _FAINT and shown:
            canvas.append(shown, style="dim")
        else:
            canvas.append(DOT, style="dim")
    return canvas


def status(frame: CanvasFrame) -> str:
    """The bottom line: how far the answer is."""
    tokens = frame.generated_tokens + frame.committed
    undecided = frame.entropy[frame.committed : frame.remaining]
    mean = f"{sum(undecided) / len(undecided):.2f} nats" if undecided else "none"
    return (
        f"step {frame.denoise_steps}, {tokens} tokens committed, {tokens / frame.denoise_steps:.2f} tokens/forward, "
        f"mean entropy {mean}"
    )


def fit(text: Text, bottom: str, console: Console) -> list[Text]:
    """The last lines of the text that a screen has room for, and the bottom line."""
    from rich.text import Text  # noqa: PLC0415

    room = max(console.height - 2, 1)  # one line for the status, one for the cursor
    lines = list(text.wrap(console, max(console.width, 1)))[-room:]
    last = Text(bottom, style="dim", no_wrap=True, overflow="ellipsis")
    last.truncate(max(console.width, 1), overflow="ellipsis")
    return [*lines, last]


class CanvasView:
    """The canvas of one request while it is served.

    Args:
        engine: with a canvas lane.
        open_port: a fresh text of ids, in which nothing ends it.
    """

    def __init__(self, engine: Engine, open_port: Callable[[], TextPort]) -> None:
        self._engine = engine
        self._open_port = open_port
        self._text = open_port()
        self._told = 0  # committed ids that the text holds
        self._ids: list[int] = []
        self._frame: CanvasFrame | None = None

    def observe(self, frame: CanvasFrame) -> None:
        """Take a frame. Called on the thread that owns the device."""
        self._ids += frame.token_ids[: frame.committed]
        self._frame = frame

    def show(self, events: Iterator[Event]) -> Iterator[Event]:
        """The same events; the screen is the canvas's until the last event of the request, and is empty then."""
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        console = Console(highlight=False)
        self._engine.call(self._look)
        try:
            with Live(
                get_renderable=lambda: self.draw(console), console=console, refresh_per_second=_PER_SECOND,
                transient=True, vertical_overflow="crop",
            ):  # fmt: skip
                last = None
                for event in events:
                    if isinstance(event, (GenerationResult, GenerationFailed, RequestRejected)):
                        last = event
                        break
                    yield event
        finally:
            self._engine.call(_look_away)
        if last is not None:
            yield last
        yield from events

    def draw(self, console: Console) -> Group:
        """What the screen shows now."""
        from rich.console import Group  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        frame = self._frame
        if frame is None:
            return Group(*fit(Text(), "reading the prompt", console))
        before = frame.generated_tokens
        self._text.push(tuple(self._ids[self._told : before]))
        self._told = max(self._told, before)
        pieces = split_pieces(self._open_port(), self._ids[max(before - _CONTEXT, 0) : before], frame.token_ids)
        whole = Text(self._text.text.translate(SHOWN_CONTROLS)).append_text(paint(frame, pieces))
        return Group(*fit(whole, status(frame), console))

    def _look(self, loaded: LoadedLane) -> None:
        _canvas_lane(loaded).observer = self.observe


def open_view(engine: Engine, request: Request) -> CanvasView:
    """A view of this request.

    Raises:
        UsageError: the model at work has no canvas.
    """
    from polytoken.cli.output import lane_reason  # noqa: PLC0415

    if engine.loaded.lane != "canvas":
        raise UsageError(
            f"--watch belongs to the canvas lane; this is {engine.loaded.lane} ({lane_reason(engine.loaded)})",
            field="--watch",
        )
    open_text = engine.call(lambda loaded: loaded.open_text)
    endless = replace(request, stop=())
    return CanvasView(engine, lambda: open_text(endless, ()))


def _look_away(loaded: LoadedLane) -> None:
    _canvas_lane(loaded).observer = None


def _canvas_lane(loaded: LoadedLane) -> CanvasLane:
    from polytoken.lanes.canvas.lane import CanvasLane  # noqa: PLC0415

    assert isinstance(loaded.lane, CanvasLane)
    return loaded.lane
