"""A draft head's history as layers beside the trunk's, so that a banked prompt can be gone on from.

Row i of the history is made of the pair (h_i, t_{i+1}): it belongs to token i + 1, and token 0 has none. With the
hidden row of the last token beside it, the history of a prefix needs nothing that comes after that prefix.
"""

from __future__ import annotations

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock, LayerSnapshot
from polytoken.cache.layers import CacheLayer
from polytoken.errors import CacheError


class HistoryLayer(CacheLayer):
    """One layer of a history, seen as rows of tokens: at offset P the layer inside holds the rows of tokens 1 .. P - 1.

    Only for encoding and banking prompts: windows are drafted on the layer inside.
    """

    kind = "draft_history"

    def __init__(self, rows: CacheLayer) -> None:
        self._rows = rows

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def held_bytes(self) -> int:
        return self._rows.held_bytes

    def arrays(self) -> list[mx.array]:
        return self._rows.arrays()

    def advance(self, rows: int) -> None:
        """Note that `rows` more tokens were encoded, and their pairs appended to the layer inside."""
        self.offset += rows
        if self._rows.offset != max(self.offset - 1, 0):
            raise CacheError(f"a history of {self._rows.offset} rows does not belong to {self.offset} tokens")

    def can_trim(self, n: int) -> bool:
        return n == 0

    def block(self, start: int, stop: int) -> LayerBlock:
        self._check_span(start, stop)
        if stop == 0:
            return LayerBlock(self.kind, None, 0, 0, 0, ())
        first = max(start, 1)  # token 0 has no row
        arrays = self._rows.block(first - 1, stop - 1).arrays if stop > first else ()
        return LayerBlock(self.kind, None, first, stop, 1, arrays)

    def restore(self, snapshot: LayerSnapshot) -> None:
        self.check_snapshot(snapshot)
        rows = max(snapshot.offset - 1, 0)
        self._rows.restore(LayerSnapshot(self._rows.kind, self._rows.window, rows, snapshot.parts))
        self.offset = snapshot.offset

    def _trim(self, n: int) -> None: ...
