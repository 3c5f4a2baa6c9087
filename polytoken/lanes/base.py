"""The lane contract: how a request's row is opened, prefilled, stepped and closed.

Every way of decoding commits a prefix of a proposal: one token (AR), a verified window (MTP), a settled part of a
canvas. The scheduler knows only this file. A lane never sees text, HTTP or files; it works on ids and arrays.
"""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from polytoken.events import TokenLogprob
from polytoken.request import Request


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What one step made permanent for one row.

    Attributes:
        token_ids: ids committed by this step, in order; may be empty (a denoise that settled nothing). A stop id, if
            there is one, is the last.
        stop_reason: why the row ends with this step (`eos`, `turn_end`, `max_new_tokens`, ...), None while it goes on.
        logprobs: one entry per id when the request asked for them, else None.
        proposed: ids that were proposed in this step (drafts, canvas positions), at least len(token_ids).
        forwards: forwards of the whole network that this step cost.
        detail: lane counts for the result: numbers are summed over the steps of a request (so give counts, not
            ratios), of anything else the last value stays.
    """

    token_ids: tuple[int, ...]
    stop_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    proposed: int = 0
    forwards: int = 1
    detail: Mapping[str, Any] = field(default_factory=dict)


class Row(Protocol):
    """One request inside a lane. A lane's own row class holds caches, keys and counters beside these."""

    @property
    def request(self) -> Request:
        """The request as the lane serves it: limits that were only defaults may have shrunk to the context."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were restored instead of computed."""
        ...

    @property
    def cache_miss(self) -> str | None:
        """Why not more was restored, or None after a full hit."""
        ...

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens still to be computed; 0 when the row may be stepped."""
        ...


RowT = TypeVar("RowT", bound=Row)

PrefillObserver = Callable[[str, int, int], None]
"""(request id, prompt tokens encoded or restored, prompt tokens): told after every chunk, on the owner thread."""

_LOG = logging.getLogger(__name__)


class Lane(ABC, Generic[RowT]):
    """One way of committing tokens. All calls come from the one thread that owns MLX.

    Attributes:
        name: `ar`, `mtp` or `canvas`, as events report it.
        execution: how rows share the device, as events report it.
        bank: store of reusable states, and of what sessions have committed.
        prefill_observer: who is told how far prompts are; it must be quick.
        refused_ids: ids that no prompt may hold, though an answer may.
    """

    name: str
    execution: str
    bank: Any  # a StateBank; bookkeeping that needs no MLX reads this file
    prefill_observer: PrefillObserver | None = None
    refused_ids: frozenset[int] = frozenset()

    def tell_prefill(self, row: RowT) -> None:
        """Called by `prefill_step` after its work. An observer that fails is dropped: no request fails for it."""
        if self.prefill_observer is None:
            return
        try:
            self.prefill_observer(row.request.request_id, row.prompt_tokens - row.prefill_remaining, row.prompt_tokens)
        except Exception:
            _LOG.error("the observer of prompts failed and is dropped\n%s", traceback.format_exc())
            self.prefill_observer = None

    @abstractmethod
    def open(self, request: Request, ids: Sequence[int]) -> RowT:
        """A row for the prompt ids, with the longest reusable prefix already restored.

        Raises RequestError when the request cannot be served by this lane (too long, unsupported field).
        """

    @abstractmethod
    def prefill_cost(self, row: RowT) -> int:
        """Prompt tokens that the next `prefill_step` will compute; 0 after a full hit."""

    @abstractmethod
    def prefill_step(self, row: RowT) -> bool:
        """Compute at most one chunk of the prompt; True when the row is ready to be stepped."""

    @abstractmethod
    def step(self, rows: Sequence[RowT]) -> list[Commit | Exception]:
        """Advance every row by one step and say, row by row in the same order, what was committed or what went wrong.

        A row's numbers never depend on its neighbours. An exception raised by this call itself fails all rows of it.
        """

    @abstractmethod
    def close(self, row: RowT, *, keep: bool) -> None:
        """Release the row's memory. `keep` is True after a clean end, when its state may be banked for reuse."""

    def remember(self, row: RowT, ids: Sequence[int]) -> None:  # a lane without sessions has nothing to do
        """The request ended cleanly with these output ids: commit them to its session, and bank its state if it can be.

        Called once, before `close`, for a request that names a session. Ids beyond these never happened.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def statistics(self) -> Mapping[str, Any]:
        """Totals of this lane over its life, for results and the summary.

        The summary has fields of its own for `prefix_cache_hits`, `prefix_cache_misses`, `prefix_cache_reused_tokens`,
        `mlx_active_memory_bytes` and `mlx_peak_memory_bytes`; everything else is added under its own name.
        """
