"""What a whole prompt leaves behind for its first step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from polytoken.cache.rows import copy_array


@dataclass(frozen=True, eq=False)
class Tail:
    """The last row's outputs: with them and the state, no forward is needed to go on.

    Attributes:
        logits: [1, V].
        hidden: [1, 1, H] in the lane's variant, or None.
    """

    logits: mx.array
    hidden: mx.array | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(int(item.nbytes) for item in self.arrays())

    def arrays(self) -> list[mx.array]:
        """The arrays, for evaluation."""
        return [self.logits] if self.hidden is None else [self.logits, self.hidden]

    def copy(self) -> Tail:
        """The same values in memory of their own (lazy)."""
        return Tail(copy_array(self.logits), None if self.hidden is None else copy_array(self.hidden))

    def view(self) -> Tail:
        """Fresh array objects on the same memory: what a borrower assigns into them stays with the borrower."""
        return Tail(self.logits[...], None if self.hidden is None else self.hidden[...])
