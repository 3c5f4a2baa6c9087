"""From a law and a random number to one id, and from a row of logits to log-probabilities."""

from __future__ import annotations

from typing import Final

import numpy as np

from polytoken.events import TokenLogprob
from polytoken.sampling.law import Distribution, Logits, finite_peak, leading, unnormalised

LOGPROB_FLOOR: Final = -9999.0  # JSON has no -inf: a banned id, and anything less likely than this, is reported so


def pick(distribution: Distribution, u: float) -> int:
    """The id at cumulative probability u in [0, 1): the first, by id ascending, whose running sum exceeds u."""
    if distribution.ids.size == 1:
        return int(distribution.ids[0])
    running = np.cumsum(distribution.probs)
    # The running sum may end a rounding error away from 1, so u is measured against where it does end.
    slot = int(np.searchsorted(running, u * running[-1], side="right"))
    return int(distribution.ids[min(slot, distribution.ids.size - 1)])


def top_logprobs(logits: Logits, chosen: int, n: int) -> TokenLogprob:
    """Log-probability of the chosen id and the n most likely ids.

    Natural logarithm of the softmax of `logits` at temperature 1. The row is the one the choice was made from, that is
    after penalties, bias and mask; neither temperature nor top_k, top_p or min_p is applied, so values of different
    requests compare. The alternatives come by value descending, then id ascending, and include the chosen id when it
    is among them. Values never fall below `LOGPROB_FLOOR`.

    Args:
        logits: float32 [V].
        chosen: the id that was chosen.
        n: how many alternatives; no more than V are given.
    """
    peak = finite_peak(logits)
    log_total = float(np.log(unnormalised(logits, peak, 1.0).sum()))

    def value(token_id: int) -> float:
        return max(float(logits[token_id]) - peak - log_total, LOGPROB_FLOOR)

    ids = leading(logits, n)
    ranked = ids[np.argsort(-logits[ids], kind="stable")]
    return TokenLogprob(
        token_id=chosen,
        logprob=value(chosen),
        top=tuple((int(token_id), value(int(token_id))) for token_id in ranked),
    )
