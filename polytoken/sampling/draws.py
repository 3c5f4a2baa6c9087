"""Random numbers addressed by what they are for, not by when they are asked for.

A draw is a pure function of (seed, position, purpose, index): numpy's Philox4x64-10 (Salmon et al. 2011) keyed by the
request's seed with those three as its counter. So a request's tokens cannot depend on other requests, on the order of
calls, on how many drafts were thrown away, or on any global state; and the coin that accepts a draft is never the
number that draws its replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

_WORD: Final = (1 << 64) - 1
_DOMAIN: Final = 0x706F6C79746F6B31  # second key word, "polytok1": changes if the meaning of a draw ever does
_UNIT: Final = 2.0**-53


class Purpose(IntEnum):
    """What a draw decides. The numbers are part of the seed contract: never renumber."""

    TOKEN = 0  # a token drawn from the target law (AR, and the primary of a window)
    DRAFT = 1  # a token drawn from the draft law
    ACCEPT = 2  # the coin that accepts a draft
    CORRECTION = 3  # the token drawn from the residual after a rejection
    BONUS = 4  # the token drawn from the target law after full acceptance


@dataclass(frozen=True)
class Draw:
    """One recorded draw."""

    position: int
    purpose: Purpose
    index: int
    value: float


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of one request.

    Attributes:
        seed: any integer. Seeds that are equal modulo 2**64 give equal draws, so -1 is 2**64 - 1.
        log: when a list, every draw is appended to it in the order of asking (receipts); None records nothing.
    """

    seed: int
    log: list[Draw] | None = field(default=None, repr=False)

    def uniform(self, position: int, purpose: Purpose, *, index: int = 0) -> float:
        """A float64 in [0, 1) with 53 random bits.

        Args:
            position: place of the token in the request's output, 0 for the first, below 2**64.
            purpose: what the number decides.
            index: tells several draws for one position and purpose apart.
        """
        if not (0 <= position <= _WORD and 0 <= index < _WORD):
            raise ValueError(f"position {position} and index {index} must be from 0 to below 2**64 - 1")
        counter = np.array([index, int(purpose), position, 0], np.uint64)
        key = np.array([self.seed & _WORD, _DOMAIN], np.uint64)
        # numpy steps the lowest counter word before it generates: asking for `index` yields block index + 1.
        bits = int(np.random.Philox(counter=counter, key=key).random_raw())
        value = (bits >> 11) * _UNIT
        if self.log is not None:
            self.log.append(Draw(position, purpose, index, value))
        return value
