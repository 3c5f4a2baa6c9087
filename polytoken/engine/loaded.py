"""What loading a checkpoint gives to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polytoken.engine.job import Label, TextPort
from polytoken.events import RuntimeLoaded
from polytoken.lanes.base import Lane
from polytoken.request import Request, SamplingParams


@dataclass(frozen=True, kw_only=True)
class LoadedLane:
    """What loading gives to an engine. It lives and dies on the owner thread.

    Attributes:
        lane: the way of decoding, ready to run.
        encode: prompt ids of a request; with an attribute `history_miss` where its session's history was left.
        open_text: a fresh text port for a request and its prompt ids.
        label: which weights answer.
        loaded: the event that reports them.
        sampling: what the checkpoint recommends for requests that name nothing.
        release: called last on the owner thread, after the lane is gone (free the device's memory pool).
        rows_per_step: most rows of one step, where that depends on what was loaded; None for the limits' own.
        histories: committed streams of sessions (`polytoken.text.histories`); for the owner thread.
        tokenizer: of the checkpoint, for callers that make prompt ids themselves; may be used on any thread.
    """

    lane: Lane[Any]
    encode: Callable[[Request], Sequence[int]]
    open_text: Callable[[Request, Sequence[int]], TextPort]
    label: Label
    loaded: RuntimeLoaded
    sampling: SamplingParams = field(default_factory=SamplingParams)
    release: Callable[[], None] | None = None
    rows_per_step: int | None = None
    tokenizer: Any = None
    histories: Any = None
