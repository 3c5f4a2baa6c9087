"""The loaded model that a run examines, and the real lanes over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from polytoken.assembly import EngineOptions, load_lane
from polytoken.backend import require_mlx
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.tokenizer import Tokenizer, load_tokenizer
from polytoken.engine import LoadedLane
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.limits import check_ids
from polytoken.lanes.mtp.lane import MtpLane, identify, usable_head
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.models.draft import DraftHead
from polytoken.request import Request, SamplingParams

Ids = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """What was loaded, as the engine itself loads it. It belongs to the thread that made it.

    Attributes:
        loaded: of `polytoken.assembly`.
        options: what it was loaded with.
        model: the network; another may be put here to examine how faults show.
    """

    loaded: LoadedLane
    options: EngineOptions
    model: Any

    @property
    def lane(self) -> Lane[Any]:
        """The lane that was loaded."""
        return self.loaded.lane

    @property
    def about(self) -> dict[str, Any]:
        """What `runtime_loaded` says beside its own fields."""
        return dict(self.loaded.loaded.extra)

    @property
    def checkpoint(self) -> Path:
        return Path(self.loaded.label.checkpoint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.checkpoint)

    @property
    def eos_ids(self) -> frozenset[int]:
        ids: frozenset[int] = self.loaded.lane.eos_ids  # type: ignore[attr-defined]
        return ids

    @property
    def chunk(self) -> int:
        """Prompt tokens per prefill forward."""
        return self.options.prefill_chunk_size

    @property
    def max_positions(self) -> int:
        return int(self.about["max_positions"])

    @property
    def head(self) -> DraftHead:
        """The draft head. Raises UsageError `no_draft_head`."""
        return usable_head(self.model)

    @property
    def is_canvas(self) -> bool:
        return self.lane.name == "canvas"

    @property
    def recommended(self) -> SamplingParams:
        """What the server uses for requests that name nothing."""
        return self.loaded.sampling

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, think: bool = True) -> Ids:
        """Prompt ids of a conversation, as every request's are made."""
        request = Request(request_id="oracle", max_new_tokens=1, messages=tuple(messages), think=think)
        return self.checked(self.loaded.encode(request))

    def checked(self, ids: Sequence[int]) -> Ids:
        """The ids of a prompt that no lane has looked at. Raises RequestError `bad_prompt` for one without a row."""
        check_ids(ids, vocab_size=self.model.vocab_size)
        return tuple(ids)

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, special tokens kept."""
        return self.tokenizer.decode(list(ids))

    def visible(self, ids: Sequence[int]) -> str:
        """The text that a user sees: no special tokens, no stop ids."""
        request = Request(request_id="oracle", max_new_tokens=max(len(ids), 1), token_ids=(0,))
        port = self.loaded.open_text(request, (0,))
        port.push(tuple(ids))
        port.finish()
        return port.text

    # -- lanes -----------------------------------------------------------------------------------------------------

    def ar_lane(self, *, cache_bytes: int = 0, chunk: int | None = None) -> ArLane:
        """A fresh AR lane over the model with a bank of its own."""
        identity = self._identity(chunk)
        return ArLane(
            self.model, StateBank(cache_bytes, identity=identity), prefill_chunk=identity.grid, **self._common()
        )

    def mtp_lane(self, settings: MtpSettings, *, cache_bytes: int = 0, chunk: int | None = None) -> MtpLane:
        """A fresh MTP lane that records every window."""
        identity = identify(self._identity(chunk), settings, self.model)
        return MtpLane(
            self.model,
            StateBank(cache_bytes, identity=identity),
            prefill_chunk=identity.grid,
            settings=settings,
            record_cycles=True,
            **self._common(),
        )

    def _identity(self, chunk: int | None) -> StateIdentity:
        lane: Any = self.lane
        loaded: StateIdentity = lane.bank.identity
        return replace(loaded, lane="ar", grid=chunk or self.chunk, hidden_variant=None, history_policy=None)

    def _common(self) -> dict[str, Any]:
        lane: Any = self.lane
        return {"eos_ids": tuple(self.eos_ids), "max_positions": self.max_positions, "turn_end_id": lane.turn_end_id}


def examine(
    options: EngineOptions,
    act: Callable[[Subject], T],
    *,
    progress: Progress = silent,
    stop: Callable[[], None] = lambda: None,
) -> T:
    """Load a model on a thread that owns the device until the end, and do this with it there.

    Args:
        stop: called at a signal: makes `act` end soon.

    Raises:
        PolytokenError: what is wrong with the options, the checkpoint or the backend, and whatever `act` raises.
    """
    require_mlx()

    def work() -> T:
        loaded = load_lane(options, progress)
        try:
            return act(Subject(loaded, options, loaded.lane.model))  # type: ignore[attr-defined]
        finally:
            if loaded.release is not None:
                loaded.release()

    with ThreadPoolExecutor(1, "polytoken-oracle") as owner:
        running = owner.submit(work)
        try:
            return running.result()
        except KeyboardInterrupt:  # leaving this block waits for the thread
            stop()
            raise
