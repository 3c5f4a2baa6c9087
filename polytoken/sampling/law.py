"""The one law every lane samples from: a row of logits and its parameters give a sparse distribution.

For a row z (after penalties, bias and mask) at temperature T let P = softmax(z / T) over the full vocabulary. Ids are
ranked by z descending, then id ascending; c(i) is the total P of the ids ranked before i.

    K = the first `top_k` ranks             (0, or at least V: all)
    N = {i : c(i) < top_p}                  (1: all; the first rank is always in)
    M = {i : P_i >= min_p * max P}          (0: all)
    p_i = P_i / sum of P over K & N & M     for i in K & N & M, else 0

All three sets are prefixes of one ranking measured on one P, so the filters commute and their meet is never empty. This
is not the chained definition, which renormalises after each filter: draft, verify and plain decoding must not differ.

Everything here is a pure function of one row, in float64 on the host, whatever rows stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from polytoken.errors import NonFiniteError
from polytoken.request import SamplingParams

Logits = npt.NDArray[np.float32]  # [V]; -inf marks an id that must not be chosen
Ids = npt.NDArray[np.int64]
Probs = npt.NDArray[np.float64]

_FIRST_NUCLEUS: Final = 64  # ranks sorted at first for top_p; most rows of a language model need no more
_NUCLEUS_GROWTH: Final = 16


@dataclass(frozen=True, eq=False)
class Distribution:
    """A law over token ids, stored sparsely.

    Attributes:
        ids: int64 [S], strictly ascending; the support, every id with probability above 0.
        probs: float64 [S], sums to 1.
        vocab_size: V, above every id.
    """

    ids: Ids
    probs: Probs
    vocab_size: int

    @classmethod
    def point_mass(cls, token_id: int, *, vocab_size: int) -> Distribution:
        """All probability on one id."""
        return cls(np.array([token_id], np.int64), np.ones(1, np.float64), vocab_size)

    def probability(self, token_id: int) -> float:
        """p(token_id), 0 outside the support."""
        slot = int(np.searchsorted(self.ids, token_id))
        if slot < self.ids.size and self.ids[slot] == token_id:
            return float(self.probs[slot])
        return 0.0

    def dense(self) -> Probs:
        """float64 [V], for tests and small vocabularies."""
        row = np.zeros(self.vocab_size, np.float64)
        row[self.ids] = self.probs
        return row


def shape(logits: Logits, params: SamplingParams) -> Distribution:
    """The distribution of the next id.

    Args:
        logits: float32 [V], after penalties, bias and mask; -inf bans an id.
        params: temperature and filters; penalties and bias are not looked at here.

    Raises:
        NonFiniteError: when the row holds NaN or +inf, or bans every id.
    """
    peak = finite_peak(logits)
    V = logits.size
    if params.greedy:
        return Distribution.point_mass(int(np.argmax(logits)), vocab_size=V)
    T = float(params.temperature)
    by_rank = 0 < params.top_k < V
    by_mass = params.top_p < 1.0
    # Every set is a prefix of one ranking, so each is cut out of what the former left. `ids` is None until a cut.
    ids = leading(logits, params.top_k) if by_rank else None
    values = logits if ids is None else logits[ids]
    weights = unnormalised(values, peak, T)
    total = 0.0
    if by_mass:  # measured on the full softmax, before any filter
        total = float((unnormalised(logits, peak, T) if by_rank else weights).sum())
    if params.min_p > 0.0:  # weights are P / max P
        index = np.flatnonzero(weights >= params.min_p)
        ids, values, weights = _taken(ids, index), values[index], weights[index]
    if by_mass:
        count = _nucleus(weights, float(params.top_p) * total)
        if count < values.size:
            index = leading(values, count)
            ids, weights = _taken(ids, index), weights[index]
    weights /= weights.sum()
    alive = weights > 0.0  # banned ids, and those too unlikely for float64
    if not alive.all():
        index = np.flatnonzero(alive)
        ids, weights = _taken(ids, index), weights[index]
    return Distribution(np.arange(V, dtype=np.int64) if ids is None else ids, weights, V)


def finite_peak(logits: Logits) -> float:
    """The largest logit, which is finite.

    Raises:
        NonFiniteError: with a census, when the row holds NaN or +inf, or nothing above -inf.
    """
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"logits must be one row [V], not shape {logits.shape}")
    peak = float(logits.max())  # NaN and +inf both surface here, in one pass
    if np.isfinite(peak):
        return peak
    nans, infs, V = int(np.isnan(logits).sum()), int(np.isposinf(logits).sum()), logits.size
    if nans or infs:
        raise NonFiniteError(f"logits hold {nans} NaN and {infs} +inf among {V} entries", field="logits")
    raise NonFiniteError(f"all {V} logits are -inf: no id is left to choose", code="no_candidates", field="logits")


def leading(values: Logits, count: int) -> Ids:
    """Indices, ascending, of the first `count` ranks of values [n] (by value descending, then index ascending)."""
    n = values.size
    if count >= n or count == 0:
        return np.arange(min(count, n), dtype=np.int64)
    # The value at the cut is found without sorting; every tie at the cut is then seen, and the lowest indices win.
    cut = np.partition(values, n - count)[n - count]
    chosen = values > cut
    ties = np.flatnonzero(values == cut)
    chosen[ties[: count - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def unnormalised(values: Logits, peak: float, temperature: float) -> Probs:
    """exp((z - peak) / T) of values [n], a new float64 array in [0, 1]: P up to a common factor.

    The peak is subtracted before the division, so no temperature overflows to anything but -inf (weight 0).
    """
    scaled = values.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        scaled -= peak
        scaled /= temperature
        return np.exp(scaled, out=scaled)


def _nucleus(weights: Probs, mass: float) -> int:
    """How many ranks of weights [n] have less than `mass` before them; at least 1.

    Only as many ranks are sorted as it takes to gather the mass. The running sum is sequential from rank 0, so the
    answer does not depend on how far a round looked.
    """
    n = weights.size
    look = min(_FIRST_NUCLEUS, n)
    while True:
        top = weights if look == n else np.partition(weights, n - look)[n - look :]
        after = np.cumsum(np.sort(top)[::-1])  # mass up to and including each rank
        count = 1 + int(np.searchsorted(after, mass, side="left"))  # rank i + 1 is in while after[i] < mass
        if count <= look or look == n:
            return min(count, n)
        look = min(look * _NUCLEUS_GROWTH, n)


def _taken(ids: Ids | None, index: Ids) -> Ids:
    """ids[index], where None stands for 0, 1, 2, ... (not made before it is known to be needed: that costs at 262k)."""
    return index if ids is None else ids[index]
