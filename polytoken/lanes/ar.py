"""The AR lane: one token per forward. The truth that the other lanes are held against.

Rows are interleaved, never stacked: each row's forward is a graph of its own, submitted to the device before the next
row's is built, so a row's numbers cannot depend on its neighbours. A greedy row looks one token ahead: the forward of
the next token is submitted before the host has read the current one, which hides the host's work behind the device's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.cache.bank import StateBank
from polytoken.cache.state import DecodingState
from polytoken.errors import NonFiniteError
from polytoken.events import TokenLogprob
from polytoken.lanes.base import Commit, Lane
from polytoken.lanes.ends import END_COUNTS, bank_end, committing, go_back
from polytoken.lanes.limits import check_ids, fit_length, refuse_denoising_limit
from polytoken.lanes.prefill import COUNTS, Prefill
from polytoken.models.base import CausalModel
from polytoken.request import Request
from polytoken.sampling.law import finite_peak
from polytoken.sampling.sampler import TokenSampler, device_greedy


@dataclass(frozen=True, eq=False)
class InFlight:
    """A greedy choice on the device that the host has not read yet.

    Attributes:
        token: int32 [1], or -1 when the row of logits cannot be trusted.
        logits: the row [1, V] itself, to say what is wrong with it.
    """

    token: mx.array
    logits: mx.array


@dataclass
class ArRow:
    """One request of the AR lane.

    Attributes:
        logits: the row [1, V] that the host will choose from; None for a row that chooses on the device.
        ahead: a greedy row's next choice in flight.
        behind: the choice that follows it, submitted before `ahead` is read.
        fault: what went wrong while looking ahead, until the step reports it.
    """

    request: Request
    prefill: Prefill
    sampler: TokenSampler
    stop_ids: frozenset[int]
    generated: int = 0
    logits: mx.array | None = None
    ahead: InFlight | None = None
    behind: InFlight | None = None
    fault: Exception | None = field(default=None, repr=False)

    @property
    def cache(self) -> DecodingState:
        return self.prefill.cache

    @property
    def prompt_tokens(self) -> int:
        return len(self.prefill.ids)

    @property
    def cached_tokens(self) -> int:
        return self.prefill.cached_tokens

    @property
    def cache_miss(self) -> str | None:
        return self.prefill.miss

    @property
    def prefill_remaining(self) -> int:
        return self.prefill.remaining


class ArLane(Lane[ArRow]):
    """Autoregressive decoding over any `CausalModel`.

    Args:
        model: the network.
        bank: store of prompt prefixes; a limit of 0 bytes turns reuse off.
        prefill_chunk: tokens per prefill forward, the absolute grid that all prompts are encoded on.
        eos_ids: ids that end a text.
        turn_end_id: the end-of-turn id, reported as `turn_end` instead of `eos`; None when the model has none.
        max_positions: longest sequence (prompt + output) the model supports.
    """

    name = "ar"
    execution = "row_interleaved_singleton"

    def __init__(
        self,
        model: CausalModel,
        bank: StateBank,
        *,
        prefill_chunk: int,
        eos_ids: Sequence[int],
        max_positions: int,
        turn_end_id: int | None = None,
    ) -> None:
        self.model = model
        self.bank = bank
        self.prefill_chunk = prefill_chunk
        self.eos_ids = frozenset(eos_ids) | ({turn_end_id} if turn_end_id is not None else frozenset())
        self.turn_end_id = turn_end_id
        self.max_positions = max_positions
        self.forwards = 0
        self.discarded_lookaheads = 0
        self.counts: Counter[str] = Counter(dict.fromkeys((*COUNTS, *END_COUNTS), 0))

    def open(self, request: Request, ids: Sequence[int]) -> ArRow:
        refuse_denoising_limit(request, lane=self.name)
        check_ids(ids, vocab_size=self.model.vocab_size)
        request = fit_length(request, len(ids), max_positions=self.max_positions)
        sampler = TokenSampler(
            request.sampling,
            seed=request.seed,
            vocab_size=self.model.vocab_size,
            prompt_ids=tuple(ids),
            grammar=request.grammar,
        )
        return ArRow(
            request=request,
            prefill=Prefill(
                self.model,
                self.bank,
                tuple(ids),
                chunk=self.prefill_chunk,
                session=request.session,
                counts=self.counts,
            ),
            sampler=sampler,
            stop_ids=frozenset() if request.ignore_eos else self.eos_ids,
        )

    def prefill_cost(self, row: ArRow) -> int:
        return row.prefill.cost

    def prefill_step(self, row: ArRow) -> bool:
        ready = row.prefill.step()
        self.tell_prefill(row)
        if not ready:
            return False
        assert row.prefill.logits is not None
        self._take(row, row.prefill.logits)
        return True

    def step(self, rows: Sequence[ArRow]) -> list[Commit | Exception]:
        for row in rows:
            if row.ahead is not None and row.generated + 1 < row.request.max_new_tokens:
                try:
                    self._look_ahead(row)
                except Exception as fault:
                    row.fault = fault
        return [self._outcome(row) for row in rows]

    def close(self, row: ArRow, *, keep: bool) -> None:
        row.logits = row.ahead = row.behind = None
        row.prefill.release()

    def remember(self, row: ArRow, ids: Sequence[int]) -> None:
        session = row.request.session
        assert session is not None
        text = (*row.prefill.ids, *ids)
        with committing(self.bank, session, text):
            self._bank_end(row, session, text)

    def _bank_end(self, row: ArRow, session: str, text: tuple[int, ...]) -> None:
        state = row.cache
        if not (self.bank.identity.free and go_back(state, len(text))):
            self.counts["ends_not_banked"] += 1
            return
        if state.offset < len(text):  # the last token was chosen and not forwarded
            self._forward(row, mx.array([text[state.offset :]], dtype=mx.int32))
        state.settle()
        mx.eval(state.arrays())
        bank_end(self.bank, session, text, state, counts=self.counts)

    def settle(self) -> None:
        mx.synchronize()

    def statistics(self) -> Mapping[str, Any]:
        return {
            **self.bank.statistics().report(),
            **self.counts,
            "discarded_lookaheads": self.discarded_lookaheads,
            "mlx_active_memory_bytes": mx.get_active_memory(),
            "mlx_peak_memory_bytes": mx.get_peak_memory(),
        }

    def _look_ahead(self, row: ArRow) -> None:
        """Submit the forward of the token in flight, whose value the host does not know yet."""
        assert row.ahead is not None
        row.behind = _choose_greedy(self._forward(row, row.ahead.token[None]))

    def _commit(self, row: ArRow) -> Commit:
        """Read this step's token, and see to it that the next step finds its choice on the way."""
        token_id, logprob = self._read(row)
        row.generated += 1
        row.sampler.observe(token_id)
        reason = self._stop_reason(row, token_id)
        if reason is not None:
            self.discarded_lookaheads += row.behind is not None
            row.logits = row.ahead = row.behind = None
        elif row.ahead is not None:
            row.ahead, row.behind = row.behind, None
        else:
            self._take(row, self._forward(row, mx.array([[token_id]], dtype=mx.int32)))
        return Commit(
            token_ids=(token_id,),
            stop_reason=reason,
            logprobs=None if logprob is None else (logprob,),
            proposed=1,
            forwards=1,
        )

    def _take(self, row: ArRow, logits: mx.array) -> None:
        """Go on from a row of logits [1, V]: choose on the device where that says all, else leave it to the host."""
        if row.sampler.needs_host:
            row.logits = logits
            mx.async_eval(logits)
        else:
            row.ahead = _choose_greedy(logits)

    def _read(self, row: ArRow) -> tuple[int, TokenLogprob | None]:
        """The chosen id of this step: the only place where the host waits for the device."""
        if row.ahead is not None:
            token_id = int(np.array(row.ahead.token)[0])
            if token_id < 0:
                finite_peak(np.array(row.ahead.logits[0]))  # raises with a census of the row
                raise NonFiniteError(f"no logit can be trusted at output position {row.generated}")
            return token_id, None
        assert row.logits is not None
        choice = row.sampler.choose(np.array(row.logits[0], copy=False), position=row.generated)
        return choice.token_id, choice.logprob

    def _forward(self, row: ArRow, ids: mx.array) -> mx.array:
        """Logits float32 [1, V] after ids [1, 1]."""
        self.forwards += 1
        hidden = self.model.forward(ids, row.cache)
        return self.model.project(hidden.post[:, -1])

    def _stop_reason(self, row: ArRow, token_id: int) -> str | None:
        if token_id in row.stop_ids:
            return "turn_end" if token_id == self.turn_end_id else "eos"
        if row.generated >= row.request.max_new_tokens:
            return "max_new_tokens"
        return None

    def _outcome(self, row: ArRow) -> Commit | Exception:
        """This row's commit, or its fault, which stays its own."""
        if row.fault is not None:
            return row.fault
        try:
            return self._commit(row)
        except Exception as fault:
            return fault


def _choose_greedy(logits: mx.array) -> InFlight:
    """Submit the greedy choice from a row of logits [1, V]."""
    ids, ok = device_greedy(logits)
    token = mx.where(ok, ids, -1)
    mx.async_eval(token)
    return InFlight(token, logits)
