"""The oracle of exact speculative sampling: every way a window can go, with its probability, and what it emits.

The coins and draws of the real `accept_window` are scripted; its verdict then tells the probability of having gone that
way (`probabilities`) and the law of what it emits there (`law`). So the code under test is run, not re-implemented.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from polytoken.sampling.acceptance import accept_window
from polytoken.sampling.draws import Purpose
from polytoken.sampling.law import Distribution

Prefix = tuple[int, ...]
Laws = Callable[[Prefix], Distribution]
ALMOST_ONE = 1.0 - 2.0**-53


def ways(
    prefix: Prefix, p: Laws, q: Laws | None, *, depth: int, copied: Prefix = (), room: int = 99
) -> Iterator[tuple[float, Prefix]]:
    """Pairs (probability, emitted tokens) of one window after `prefix`.

    Drafts are drawn from q, or, when q is None, are the first `depth` of `copied`.
    """
    depth = min(depth, room)
    for chance, drafts, laws in windows(prefix, q, depth=depth, copied=copied):
        for accepted in range(depth + 1):

            def uniform(purpose: Purpose, j: int, accepted: int = accepted) -> float:
                return (0.0 if j < accepted else ALMOST_ONE) if purpose is Purpose.ACCEPT else 0.5

            verdict = accept_window(drafts, lambda j, x=drafts: p(prefix + x[:j]), q=laws, uniform=uniform, room=room)
            if verdict.accepted != accepted:
                continue  # this way has probability 0 or 1
            alphas = verdict.probabilities
            rejected = 1.0 - alphas[accepted] if accepted < depth else 1.0
            weight = chance * float(np.prod(alphas[:accepted])) * rejected
            if verdict.law is None:
                yield weight, drafts[:accepted]
            else:
                for token, share in zip(verdict.law.ids.tolist(), verdict.law.probs.tolist(), strict=True):
                    yield weight * share, (*drafts[:accepted], token)


def windows(
    prefix: Prefix, q: Laws | None, *, depth: int, copied: Prefix
) -> Iterator[tuple[float, Prefix, list[Distribution] | None]]:
    if q is None:
        yield 1.0, copied[:depth], None
        return
    for drafts in itertools.product(range(q(prefix).vocab_size), repeat=depth):
        laws = [q(prefix + drafts[:j]) for j in range(depth)]
        chance = float(np.prod([law.probability(x) for law, x in zip(laws, drafts, strict=True)]))
        if chance > 0.0:
            yield chance, drafts, laws


def emitted(p: Laws, q: Laws | None, *, depth: int, count: int, copied: Prefix = ()) -> Mapping[Prefix, float]:
    """The law of the first `count` tokens of a speculating run; the first is drawn from p alone."""
    total: dict[Prefix, float] = {}
    todo: dict[Prefix, float] = {(): 1.0}
    while todo:
        prefix, chance = todo.popitem()
        steps: Iterator[tuple[float, Prefix]]
        if prefix:
            steps = ways(prefix, p, q, depth=depth, copied=copied)
        else:
            first = p(())
            steps = ((share, (token,)) for token, share in zip(first.ids.tolist(), first.probs.tolist(), strict=True))
        for weight, tokens in steps:
            longer = (prefix + tokens)[:count]
            where = total if len(longer) == count else todo
            where[longer] = where.get(longer, 0.0) + chance * weight
    return total


def plain(p: Laws, *, count: int, after: Prefix = ()) -> Mapping[Prefix, float]:
    """The law of the first `count` tokens of plain sampling that goes on from `after`: the product of p."""
    total: dict[Prefix, float] = {after[:count]: 1.0}
    for _ in range(count - len(after)):
        total = {
            (*prefix, token): chance * share
            for prefix, chance in total.items()
            for token, share in zip(p(prefix).ids.tolist(), p(prefix).probs.tolist(), strict=True)
        }
    return total
