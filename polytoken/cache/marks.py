"""What a store keeps of one position beside rows: the states that cannot be cut out of rows, and the last outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock
from polytoken.cache.tail import Tail


@dataclass(frozen=True, eq=False)
class Mark:
    """A position that a network with recurrent layers can be restored at; of others it only holds the last outputs.

    Never changes after it is made.

    Attributes:
        position: tokens encoded.
        states: the blocks of the layers whose state stands alone (`LayerBlock.alone`), in the order of the layers: the
            recurrent layers', and behind them, where a draft head follows, the hidden row of the last token.
        tail: the last row's outputs, with which an equal prompt needs no forward; None where they were not computed.
    """

    position: int
    states: tuple[LayerBlock, ...] = ()
    tail: Tail | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(block.nbytes for block in self.states) + (0 if self.tail is None else self.tail.nbytes)

    def arrays(self) -> list[mx.array]:
        """The arrays, for evaluation."""
        tail = [] if self.tail is None else self.tail.arrays()
        return [array for block in self.states for array in block.arrays] + tail
