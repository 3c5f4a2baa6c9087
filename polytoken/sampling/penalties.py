"""What is done to a row of logits before the law is formed, and the counts it needs.

Order, for sampling and for greedy decoding alike:

    repetition penalty -> presence and frequency -> logit bias -> allowed-id mask -> (temperature, filters: `law`)

A finite logit stays finite through the first two; a bias of -100 and the mask turn it into -inf, which is a ban.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from polytoken.errors import RequestError
from polytoken.request import BIAS_LIMIT, SamplingParams
from polytoken.sampling.law import Ids, Logits

_LARGEST: Final = float(np.finfo(np.float32).max)
_FIRST_CAPACITY: Final = 64


class TokenCounts:
    """Ids of the prompt (as a set) and of the output (with counts) of one request.

    Kept as arrays that grow by `observe` and shrink by `rollback`, so that a penalty is one gather and one scatter over
    the ids seen, and drafts can be tried and taken back: `mark`, observe them, `rollback` to the mark.
    """

    def __init__(self, *, prompt_ids: Iterable[int], vocab_size: int) -> None:
        prompt = np.unique(np.fromiter(prompt_ids, np.int64))
        if prompt.size and not (prompt[0] >= 0 and prompt[-1] < vocab_size):
            bad = int(prompt[0] if prompt[0] < 0 else prompt[-1])
            raise RequestError(f"prompt id {bad} lies outside the vocabulary of {vocab_size}", field="token_ids")
        self.vocab_size = vocab_size
        self._prompt_size = int(prompt.size)
        self._size = self._prompt_size  # slots in use: the prompt's, then output ids in order of first sight
        self._ids = np.concatenate([prompt, np.zeros(_FIRST_CAPACITY, np.int64)])
        self._counts = np.zeros(self._ids.size, np.int64)
        self._slots = {int(token_id): slot for slot, token_id in enumerate(prompt)}
        self._output: list[int] = []

    @property
    def seen(self) -> Ids:
        """int64 [n]: every id of prompt or output, once each."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ids:
        """int64 [n], beside `seen`: how often each occurs in the output."""
        return self._counts[: self._size]

    def count(self, token_id: int) -> int:
        """How often the id occurs in the output."""
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])

    def observe(self, token_id: int) -> None:
        """Add one output id."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"id {token_id} lies outside the vocabulary of {self.vocab_size}")
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._size
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._slots[token_id] = slot
            self._size += 1
        self._counts[slot] += 1
        self._output.append(token_id)

    def mark(self) -> int:
        """A point to roll back to: the number of output ids observed."""
        return len(self._output)

    def rollback(self, mark: int) -> None:
        """Forget every output id observed after `mark`, without a trace."""
        if not 0 <= mark <= len(self._output):
            raise ValueError(f"cannot roll back to {mark}: {len(self._output)} ids were observed")
        while len(self._output) > mark:
            token_id = self._output.pop()
            slot = self._slots[token_id]
            self._counts[slot] -= 1
            # Slots are handed out in order and taken back in reverse: an id that leaves holds the last one.
            if slot >= self._prompt_size and self._counts[slot] == 0:
                del self._slots[token_id]
                self._size -= 1

    def fork(self) -> TokenCounts:
        """An independent copy."""
        other = TokenCounts.__new__(TokenCounts)
        other.vocab_size = self.vocab_size
        other._prompt_size, other._size = self._prompt_size, self._size
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._slots, other._output = self._slots.copy(), self._output.copy()
        return other


class Bias:
    """A request's logit bias as arrays: plain addition, except that -100 bans the id.

    +100 is an addition like any other: it wins against every logit less than 100 below, it does not forbid the rest.
    """

    def __init__(self, pairs: Iterable[tuple[int, float]], *, vocab_size: int) -> None:
        merged: dict[int, float] = {}
        for token_id, value in pairs:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"logit_bias names id {token_id}, but the vocabulary ends at {vocab_size - 1}",
                    code="bad_sampling",
                    field="logit_bias",
                )
            amount = -np.inf if value <= -BIAS_LIMIT else float(value)
            merged[token_id] = merged.get(token_id, 0.0) + amount
        self.ids = np.array(sorted(merged), np.int64)
        self.values = np.array([merged[token_id] for token_id in sorted(merged)], np.float64)


def adjust(
    logits: Logits,
    params: SamplingParams,
    *,
    counts: TokenCounts | None,
    bias: Bias | None,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Logits:
    """A row of logits after penalties, bias and mask; the input row itself when there is nothing to do.

    Args:
        logits: float32 [V] of the network, without NaN or +inf. Never written to.
        params: the penalties.
        counts: prompt and output ids; None when no penalty is active.
        bias: None for none.
        allowed: bool [V]; ids where it is False are banned (grammar). None allows all.
    """
    if counts is None and bias is None and allowed is None:
        return logits
    row = logits.copy()
    if counts is not None:
        penalise(row, params, counts)
    if bias is not None:
        z = row[bias.ids].astype(np.float64) + bias.values
        row[bias.ids] = _clip(z, banned=np.isneginf(z))
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def penalise(row: Logits, params: SamplingParams, counts: TokenCounts) -> None:
    """Apply the penalties to row [V] in place.

    Repetition (Keskar et al., arXiv:1909.05858) sees prompt and output: z / rho if z > 0 else z * rho.
    Presence and frequency see the output only: z - frequency * count - presence * [count > 0].
    """
    ids, times = counts.seen, counts.counts
    z = row[ids].astype(np.float64)
    banned = np.isneginf(z)
    rho = params.repetition_penalty
    if rho != 1.0:
        with np.errstate(over="ignore", under="ignore"):
            z = np.where(z > 0.0, z / rho, z * rho)
    z -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    row[ids] = _clip(z, banned=banned)


def _clip(z: npt.NDArray[np.float64], *, banned: npt.NDArray[np.bool_]) -> Logits:
    """float32 again: -inf where banned, finite everywhere else, however far the arithmetic went."""
    return np.where(banned, -np.inf, np.clip(z, -_LARGEST, _LARGEST)).astype(np.float32)
