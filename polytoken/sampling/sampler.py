"""How one request turns rows of logits into ids: its parameters, its random numbers, the ids it has seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polytoken.events import TokenLogprob
from polytoken.request import SamplingParams
from polytoken.sampling.choose import pick, top_logprobs
from polytoken.sampling.draws import Draws, Purpose
from polytoken.sampling.grammar import Grammar
from polytoken.sampling.law import Distribution, Logits, finite_peak, shape
from polytoken.sampling.penalties import Bias, TokenCounts, adjust


@dataclass(frozen=True)
class Choice:
    """One chosen id, with its log-probability when the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class TokenSampler:
    """The sampling state of one request. Nothing is shared between samplers, so no row can affect another.

    `choose` reads the state, `observe` advances it: a lane calls `observe` for every id it commits, and for no other.
    An id depends on the row of logits, the ids observed, the seed and the position, never on earlier calls of `choose`.

    Attributes:
        params: the request's sampling parameters.
        vocab_size: V, the length of every row.
        draws: the request's random numbers.
        counts: prompt and output ids for the penalties, None when no penalty is active.
        constraint: what the grammar allows next, None without one.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        vocab_size: int,
        prompt_ids: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """Raises RequestError when `logit_bias` or, with penalties, the prompt names an id outside the vocabulary."""
        self.params = params
        self.vocab_size = vocab_size
        self.draws = Draws(seed)
        self.constraint = None if grammar is None else grammar.open()
        self._bias = Bias(params.logit_bias, vocab_size=vocab_size) if params.logit_bias else None
        self.counts = (
            TokenCounts(prompt_ids=prompt_ids if params.repetition_penalty != 1.0 else (), vocab_size=vocab_size)
            if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
            else None
        )

    @property
    def needs_host(self) -> bool:
        """False when `device_greedy` on the untouched logits gives all that `choose` would."""
        return not self.chooses_on_device or self.params.logprobs is not None

    @property
    def chooses_on_device(self) -> bool:
        """Whether the choice is the argmax of the untouched logits."""
        return self.params.greedy and not self.params.shapes_logits and self.constraint is None

    def adjusted(self, logits: Logits, *, allowed: npt.NDArray[np.bool_] | None = None) -> Logits:
        """The row [V] after penalties, bias and mask (see `penalties.adjust`); the input is not written to.

        Raises:
            NonFiniteError: when the network's row holds NaN or +inf.
        """
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits must have shape ({self.vocab_size},), not {logits.shape}")
        if allowed is None and self.constraint is not None:
            allowed = self.constraint.allowed()
        finite_peak(logits)  # before the penalties, which would hide an infinity by clipping it
        return adjust(logits, self.params, counts=self.counts, bias=self._bias, allowed=allowed)

    def distribution(self, logits: Logits, *, allowed: npt.NDArray[np.bool_] | None = None) -> Distribution:
        """The law from which the next id is drawn, given the network's row [V]."""
        return shape(self.adjusted(logits, allowed=allowed), self.params)

    def choose(self, logits: Logits, *, position: int, allowed: npt.NDArray[np.bool_] | None = None) -> Choice:
        """The next id.

        Args:
            logits: float32 [V], the network's row as it stands.
            position: place of the id in the request's output, 0 for the first.
            allowed: bool [V] of ids that may be chosen, None for all.

        Raises:
            NonFiniteError: when the row holds NaN or +inf, or every id is banned.
        """
        row = self.adjusted(logits, allowed=allowed)
        law = shape(row, self.params)
        # A greedy law has one id and asks for no random number.
        u = 0.0 if self.params.greedy else self.draws.uniform(position, Purpose.TOKEN)
        token_id = pick(law, u)
        asked = self.params.logprobs
        return Choice(token_id, None if asked is None else top_logprobs(row, token_id, asked))

    def observe(self, token_id: int) -> None:
        """Take note of an id that has become part of the output."""
        if self.counts is not None:
            self.counts.observe(token_id)
        if self.constraint is not None:
            self.constraint.observe(token_id)

    def mark(self) -> tuple[int, int]:
        """A place to go back to: what is observed behind it may prove to be no part of the output."""
        return (
            0 if self.counts is None else self.counts.mark(),
            0 if self.constraint is None else self.constraint.mark(),
        )

    def rollback(self, mark: tuple[int, int]) -> None:
        """Forget what was observed since that mark."""
        if self.counts is not None:
            self.counts.rollback(mark[0])
        if self.constraint is not None:
            self.constraint.rollback(mark[1])


def device_greedy(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Greedy ids on the device, and whether each row may be trusted.

    Args:
        logits: [R, V] of any float type.

    Returns:
        ids int32 [R], the lowest id on ties; ok bool [R], False where the row holds NaN or +inf, or nothing above -inf.
        Both are lazy. For a row that is not ok, `law.finite_peak` on the host row raises the error with its census.
    """
    peaks = mx.max(logits, axis=-1)  # NaN if the row holds one; +inf and -inf surface here too
    return mx.argmax(logits, axis=-1).astype(mx.int32), mx.abs(peaks) < mx.inf
