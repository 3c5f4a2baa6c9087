"""What proposes the tokens of a window, behind one contract: a network's own head, a copy of the text, another model.

A drafter belongs to one row and sees nothing of others. It is told the prompt as the trunk encodes it (`follow`), asked
for drafts (`propose`), and told what became of every window (`commit`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from polytoken.cache.layers import CacheLayer
from polytoken.lanes.mtp.steps import Steps, submit
from polytoken.models.base import Hidden
from polytoken.sampling.choose import pick
from polytoken.sampling.draws import Purpose
from polytoken.sampling.law import Distribution
from polytoken.sampling.sampler import TokenSampler, device_greedy

Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Cue:
    """Where a window begins.

    Attributes:
        primary: x_0, emitted and not yet forwarded.
        position: place of x_1 in the request's output.
        depth: how many drafts are wanted.
        room: tokens the request still wants, at least 1; more drafts than that are no use.
        sampler: the request's sampling state, with the primary observed.
        clock: monotonic seconds.
    """

    primary: int
    position: int
    depth: int
    room: int
    sampler: TokenSampler
    clock: Clock = time.perf_counter


@dataclass(frozen=True, eq=False)
class Draft:
    """The proposed tokens x_1 .. x_d.

    Attributes:
        source: who proposed them.
        ids: int32 [1, d], possibly not computed yet; None for no drafts.
        laws: q_1 .. q_d from which they were drawn; None where each was chosen with certainty.
        trusted: bool [d], False where the drafter's numbers were not finite; None when the host has checked.
        seconds: how long the host waited for the drafter's numbers.
    """

    source: str
    ids: mx.array | None = None
    laws: tuple[Distribution, ...] | None = None
    trusted: mx.array | None = None
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """d."""
        return 0 if self.ids is None else int(self.ids.shape[1])


@dataclass(frozen=True, eq=False)
class Kept:
    """What became of a window.

    Attributes:
        draft: what was proposed.
        window: x_0 .. x_a, the tokens that stay.
        hidden: the trunk's rows [1, a + 1, ...] of them.
    """

    draft: Draft
    window: tuple[int, ...]
    hidden: Hidden


class Drafter(ABC):
    """Proposes tokens for one row.

    Attributes:
        name: what events call it.
    """

    name: str

    @abstractmethod
    def reset(self) -> list[CacheLayer]:
        """Forget everything, and return the fresh layers that are to be banked with a prompt's state.

        After `follow` of P tokens each is at offset P, and holds all that going on from there needs.
        """

    @abstractmethod
    def rows_wanted(self, rows: int) -> int | None:
        """How many of the trunk's last hidden rows the next `follow` of that many tokens wants; None for all."""

    @abstractmethod
    def follow(self, ids: mx.array, hidden: Hidden) -> None:
        """Encode the next ids [1, S] of the prompt, whose rows the trunk has computed; lazy."""

    @abstractmethod
    def begin(self, prompt: tuple[int, ...]) -> None:
        """The prompt is encoded, or restored into the layers: windows come next."""

    @abstractmethod
    def propose(self, cue: Cue) -> Steps[Draft]:
        """At most min(depth, room) drafts. Called once for every window, also when none are wanted."""

    @abstractmethod
    def commit(self, kept: Kept) -> None:
        """Go back to the tokens that stay; lazy."""

    def take_back(self, tokens: int) -> None:  # noqa: B027  # nothing is kept of the text
        """At the end of a row: the last tokens of the latest window, its primary not among them, never happened."""

    def settle(self) -> list[mx.array]:
        """Put everything that is committed into the drafter's state, and return the state's arrays."""
        return []

    def level(self, tokens: int) -> None:  # noqa: B027  # most layers know their own offset
        """After `settle`, when this many tokens are committed: bring the layers that `reset` returned to that offset.

        Raises CacheError when the state is not at that many tokens.
        """


Chain = Callable[[mx.array], mx.array]
"""The next id int32 [1, 1] -> logits float32 [1, V] of the id after it; lazy."""


def draw_chain(cue: Cue, logits: mx.array, advance: Chain, *, source: str) -> Steps[Draft]:
    """min(depth, room) drafts from a chain of logits rows, of which the first is given.

    A greedy row whose logits nothing shapes chains its choices on the device: nothing is read before the window is
    verified. Otherwise each draft is drawn on the host from the law that the target would be sampled with: penalties
    count the drafts before it.
    """
    d = min(cue.depth, cue.room)
    params = cue.sampler.params
    if cue.sampler.chooses_on_device:
        ids, trusted = [], []
        for j in range(d):
            x, ok = device_greedy(logits)
            ids.append(x[None])
            trusted.append(ok)
            if j + 1 < d:
                logits = advance(ids[-1])
        return Draft(source, mx.concatenate(ids, axis=1), None, mx.concatenate(trusted))

    drafts: list[int] = []
    laws: list[Distribution] = []
    mark = cue.sampler.mark()
    waited = 0.0
    for j in range(d):
        yield from submit(logits)
        before = cue.clock()
        z = np.array(logits, copy=False)[0]
        waited += cue.clock() - before
        q = cue.sampler.distribution(z)
        u = 0.0 if params.greedy else cue.sampler.draws.uniform(cue.position + j, Purpose.DRAFT)
        x_j = pick(q, u)
        drafts.append(x_j)
        laws.append(q)
        if j + 1 < d:
            cue.sampler.observe(x_j)
            logits = advance(mx.array([[x_j]], dtype=mx.int32))
    cue.sampler.rollback(mark)
    return Draft(source, mx.array([drafts], dtype=mx.int32), tuple(laws), seconds=waited)
