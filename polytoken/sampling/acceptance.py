"""Which drafts of a window stay, and what is emitted behind them: exact speculative sampling.

Symbols of Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318), for a window of drafts x_1 .. x_d,
each drawn from its own law q_j, and the target's laws p_1 .. p_{d+1}, one row further each:

    alpha_j = min(1, p_j(x_j) / q_j(x_j))            accept x_j when a fresh uniform u < alpha_j
    r_j(x)  = max(p_j(x) - q_j(x), 0) / sum of them  at the first rejection j emit y ~ r_j, and stop
    b       ~ p_{d+1}                                 emitted when all d drafts are accepted

The emitted token has the law p exactly, whatever q is:

    q min(1, p / q) + (1 - sum min(p, q)) r = min(p, q) + (p - min(p, q)) = p

What must hold is that q_j is the law x_j was really drawn from, and that no draft was chosen with an eye on p.

Greedy decoding is the same with point masses: alpha is 1 for the target's argmax and else 0, and asks for no random
number. Everything is float64 on the host, over sparse laws, a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from polytoken.errors import NonFiniteError
from polytoken.sampling.choose import pick
from polytoken.sampling.draws import Purpose
from polytoken.sampling.law import Distribution, Probs

Law = Callable[[int], Distribution]
"""j -> p_{j+1}, the target's law after j accepted drafts. Asked in order, and only as far as drafts were accepted."""

Uniform = Callable[[Purpose, int], float]
"""(purpose, j) -> the number in [0, 1) that decides this at j places behind the window's first draft."""


class Origin(StrEnum):
    """Where the token behind the accepted drafts comes from."""

    TOKEN = "token"  # drawn from p without any draft
    CORRECTION = "correction"  # drawn from the residual at the first rejection
    BONUS = "bonus"  # drawn from p after all drafts were accepted


@dataclass(frozen=True, eq=False)
class Verdict:
    """What becomes of a window.

    Attributes:
        accepted: a, how many drafts stay: x_1 .. x_a.
        token: what is emitted behind them; None after an accepted stop id, or when there is no room for it.
        origin: where `token` comes from.
        law: the law that `token` was drawn from.
        probabilities: alpha of each draft that was examined: a of them, or a + 1 after a rejection.
    """

    accepted: int
    token: int | None = None
    origin: Origin | None = None
    law: Distribution | None = None
    probabilities: tuple[float, ...] = ()


def accept_probability(p: Distribution, q: Distribution, x: int) -> float:
    """alpha = min(1, p(x) / q(x)) of a draft x drawn from q.

    A draft that q could not have given (q(x) = 0) is accepted whenever p could give it.

    Raises:
        NonFiniteError: when either probability is NaN.
    """
    p_x, q_x = p.probability(x), q.probability(x)
    if np.isnan(p_x) or np.isnan(q_x):
        raise NonFiniteError(f"the probability of draft {x} is not a number (p {p_x}, q {q_x})")
    if q_x <= 0.0:
        return 1.0 if p_x > 0.0 else 0.0
    return min(1.0, p_x / q_x)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The law r of the token that replaces a rejected draft: max(p - q, 0), normalised.

    Without mass there (p = q up to rounding) it is p itself.

    Raises:
        NonFiniteError: when a probability is NaN.
    """
    excess = np.maximum(p.probs - on_support(q, p), 0.0)  # outside of p's support it is 0 anyway
    mass = float(excess.sum())
    if np.isnan(mass):
        raise NonFiniteError("a law holds a probability that is not a number")
    if mass <= 0.0:
        return p
    alive = excess > 0.0
    return Distribution(p.ids[alive], excess[alive] / mass, p.vocab_size)


def on_support(q: Distribution, p: Distribution) -> Probs:
    """float64, beside `p.ids`: q's probabilities of the ids that p supports."""
    if q.ids is p.ids:
        return q.probs
    slots = np.minimum(np.searchsorted(q.ids, p.ids), q.ids.size - 1)
    return np.where(q.ids[slots] == p.ids, q.probs[slots], 0.0)


def accept_window(
    drafts: Sequence[int],
    p: Law,
    *,
    q: Sequence[Distribution] | None,
    uniform: Uniform,
    room: int,
    stop_ids: Collection[int] = frozenset(),
) -> Verdict:
    """Examine the drafts of one window in order.

    Draws, in this order: one coin per examined draft, then one number for the correction, the bonus, or, without
    drafts, the plain token.

    Args:
        drafts: x_1 .. x_d, no more than `room`.
        p: the target's laws.
        q: the law that each draft was drawn from; None when each was chosen with certainty (copied, or an argmax).
        uniform: the request's random numbers; greedy decoding passes a constant 0.
        room: how many tokens the request still wants; a bonus beyond it is not drawn.
        stop_ids: nothing is emitted behind an accepted one, whatever would have been rejected later.
    """
    alphas: list[float] = []
    for j, x in enumerate(drafts):
        p_j = p(j)
        q_j = Distribution.point_mass(x, vocab_size=p_j.vocab_size) if q is None else q[j]
        alphas.append(accept_probability(p_j, q_j, x))
        if not uniform(Purpose.ACCEPT, j) < alphas[-1]:  # strictly: what p cannot give is never accepted
            r = residual(p_j, q_j)
            y = pick(r, uniform(Purpose.CORRECTION, j))
            return Verdict(j, y, Origin.CORRECTION, r, tuple(alphas))
        if x in stop_ids:
            return Verdict(j + 1, probabilities=tuple(alphas))
    d = len(drafts)
    if d >= room:
        return Verdict(d, probabilities=tuple(alphas))
    law = p(d)
    if d == 0:
        return Verdict(0, pick(law, uniform(Purpose.TOKEN, 0)), Origin.TOKEN, law)
    return Verdict(d, pick(law, uniform(Purpose.BONUS, d)), Origin.BONUS, law, tuple(alphas))


def accept_greedy(
    drafts: Sequence[int], choices: Sequence[int], *, room: int, stop_ids: Collection[int] = frozenset()
) -> Verdict:
    """`accept_window` for greedy decoding, from the target's argmax of each row instead of its laws.

    Args:
        drafts: x_1 .. x_d.
        choices: d + 1 ids, the target's choice after each accepted prefix.
        room: how many tokens the request still wants.
        stop_ids: nothing is emitted behind an accepted one.
    """
    a = 0
    while a < len(drafts) and drafts[a] == choices[a]:
        a += 1
        if drafts[a - 1] in stop_ids:
            return Verdict(a, probabilities=(1.0,) * a)
    if a < len(drafts):
        return Verdict(a, choices[a], Origin.CORRECTION, probabilities=(1.0,) * a + (0.0,))
    if a >= room:
        return Verdict(a, probabilities=(1.0,) * a)
    return Verdict(a, choices[a], Origin.BONUS if a else Origin.TOKEN, probabilities=(1.0,) * a)
